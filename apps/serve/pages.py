"""The books of the cache, without tensors: which sequences hold a page, and which tokens a page holds.

Full pages stand in a radix tree by their tokens: the path from the root to a node is the text before it, so a sequence
that begins alike shares the pages of the path (Zheng et al., "SGLang", 2024, section 3). A page is the unit of an edge.
Where a text leaves a page in its middle, the page is copied for it and the copy goes on differently: copy on write.

A page is *free* (holds nothing), *held* by one or more sequences, or *idle*: in the tree, held by nobody, kept until
its place is needed. Idle ones are given up from the one that was longest not used. Who holds a page holds the pages
before it, and gives back the last one first, so in the order of giving back children come before their parents: the
first idle page never has children.

With a window over all layers a sequence needs no more pages than its next tokens see: those before are `dropped`, and
who shares a text holds only the pages of it that it will see. A page of the tree may then be idle, and given up, while
pages behind it are held. It goes with all that follow it, which nobody finds any more without it: idle ones are free,
held ones belong to their sequences alone from then on.

Layers with a window beside layers that see all have pages of their own: a place of a text has a page of each *kind* of
layers, and a node both. The tree is that of the first kind, whose layers see all. A page of the second kind is dropped
and given up as above, but its node stays: who begins alike shares the text as far as the pages of its last window are
there. Sequences that run hold few of these pages (`most_local_pages`), so that nobody ever waits for one.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Node:
    """A full page in the tree.

    pages     of each kind of layers; of a second kind perhaps `DROPPED`: given up
    parent    None: taken out of the tree
    children  by their tokens
    order     the children's tokens, sorted: who begins most like a text stands beside its place
    """

    tokens: tuple[int, ...]
    pages: list[int]
    parent: "Node | None"
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    order: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, child: "Node") -> None:
        self.children[child.tokens] = child
        insort(self.order, child.tokens)

    def remove(self, child: "Node") -> None:
        del self.children[child.tokens]
        del self.order[bisect_left(self.order, child.tokens)]

    def most_alike(self, tokens: tuple[int, ...]) -> "tuple[Node | None, int]":
        """The child whose page begins most like `tokens`, and how many tokens they share."""
        place = bisect_left(self.order, tokens)
        beside = [(_common(page, tokens), page) for page in self.order[max(place - 1, 0) : place + 1]]
        length, page = max(beside, default=(0, ()))
        return (self.children[page], length) if length else (None, 0)


@dataclass(frozen=True)
class Match:
    """A text's part that the tree has: the pages of `path` whole, and the first `num_copied` tokens of `source`."""

    path: tuple[Node, ...] = ()
    source: Node | None = None
    num_copied: int = 0


@dataclass(eq=False)
class HeldPages:
    """The pages of one kind of layers that a sequence holds, in order.

    num_dropped  pages at the beginning that it does not need any more, which are `DROPPED` in `pages`
    """

    pages: list[int] = field(default_factory=list)
    num_dropped: int = 0


@dataclass(eq=False)
class Held:
    """What a sequence holds, of each kind of layers; the pages of `path` are in the tree, the rest are its own."""

    kinds: list[HeldPages]
    path: list[Node] = field(default_factory=list)

    @property
    def pages(self) -> list[int]:
        """Those of the first kind."""
        return self.kinds[0].pages


DROPPED = -1


@dataclass(frozen=True)
class Local:
    """The pages of layers with a window, where others see all."""

    num_pages: int
    window: int


def most_local_pages(window: int, page_size: int, num_running: int, batch_tokens: int) -> int:
    """Pages of layers with a window that so many sequences hold at most.

    What its next token sees, a page that is copied, and what two steps add: one is launched before the last is read.
    """
    return num_running * (-(-window // page_size) + 3) + 2 * -(-batch_tokens // page_size)


class _Kind:
    """The pages of layers that see alike.

    number  the place of theirs in `Node.pages`
    window  of these layers; None: they see all tokens, and pages are held as long as their sequence runs
    """

    def __init__(self, number: int, num_pages: int, window: int | None):
        self.number, self.window = number, window
        self.free = list(range(num_pages - 1, -1, -1))
        self.holders = [0] * num_pages
        self.idle: OrderedDict[Node, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self.free) + len(self.idle)

    def num_unseen(self, num_computed: int, page_size: int) -> int:
        return 0 if self.window is None else max(0, num_computed + 1 - self.window) // page_size

    def hold(self, node: Node) -> int:
        self.idle.pop(node, None)
        page = node.pages[self.number]
        self.holders[page] += 1
        return page

    def take(self) -> int:
        """A free page, for one sequence."""
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def release(self, page: int, node: Node | None) -> None:
        self.holders[page] -= 1
        assert self.holders[page] >= 0
        if self.holders[page] == 0:
            if node is None or node.parent is None:
                self.free.append(page)
            else:
                self.idle[node] = None

    def release_at(self, held: Held, place: int) -> None:
        self.release(held.kinds[self.number].pages[place], held.path[place] if place < len(held.path) else None)

    def discard(self, node: Node) -> None:
        """An idle page is free."""
        if node in self.idle:
            del self.idle[node]
            self.free.append(node.pages[self.number])


class Pages:
    """All pages, 0 … num_pages - 1, of each kind of layers.

    window  of all layers; None: some see all tokens
    local   those of layers with a window, where others see all; None: all layers are of one kind
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        sharing: bool = True,
        window: int | None = None,
        local: Local | None = None,
    ):
        assert window is None or local is None
        self.num_pages, self.page_size, self.sharing, self.window = num_pages, page_size, sharing, window
        self._first = _Kind(0, num_pages, window)
        self._kinds = [self._first] if local is None else [self._first, _Kind(1, local.num_pages, local.window)]
        self._root = Node((), [], None)

    @property
    def num_free(self) -> int:
        """Pages of the first kind that can be handed out: free or idle."""
        return self._first.num_free

    @property
    def num_free_of_kinds(self) -> list[int]:
        return [kind.num_free for kind in self._kinds]

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest part of a text that the tree has, but for its last token, whose logits are wanted."""
        if not self.sharing:
            return Match()
        size, node, path = self.page_size, self._root, []
        while (len(path) + 1) * size < len(tokens):
            following = node.children.get(tuple(tokens[len(path) * size : (len(path) + 1) * size]))
            if following is None:
                break
            path.append(following)
            node = following
        for kind in self._kinds[1:]:
            while (gone := self._given_up(kind, path)) is not None:
                del path[gone:]
        node = path[-1] if path else self._root
        rest = tuple(tokens[len(path) * size : min((len(path) + 1) * size, len(tokens) - 1)])
        source, num_copied = node.most_alike(rest)
        if source is None or DROPPED in source.pages:
            return Match(tuple(path))
        return Match(tuple(path), source, num_copied)

    def _given_up(self, kind: _Kind, path: Sequence[Node]) -> int | None:
        """The last place of a path that is given up, of those that who goes on behind the path sees."""
        unseen = kind.num_unseen(len(path) * self.page_size, self.page_size)
        places = range(len(path) - 1, unseen - 1, -1)
        return next((place for place in places if path[place].pages[kind.number] == DROPPED), None)

    def num_tokens(self, match: Match) -> int:
        return len(match.path) * self.page_size + match.num_copied

    def num_idle(self, match: Match) -> int:
        """The number of the matched pages that `claim` takes out of those that `num_free` counts."""
        return sum(node in self._first.idle for node in self._claimed(self._first, match))

    def num_returned(self, held: Held) -> int:
        """Pages that `give_back` would make free or idle."""
        first = held.kinds[0]
        return sum(self._first.holders[page] == 1 for page in first.pages[first.num_dropped :])

    def claim(self, match: Match) -> Held:
        """Hold what was matched and will be seen, the page to be copied too, until `copy`."""
        kinds = []
        for kind in self._kinds:
            claimed = [kind.hold(node) for node in self._claimed(kind, match)]
            seen = claimed if match.source is None else claimed[:-1]
            unseen = len(match.path) - len(seen)
            kinds.append(HeldPages([DROPPED] * unseen + seen, unseen))
        return Held(kinds, list(match.path))

    def _claimed(self, kind: _Kind, match: Match) -> tuple[Node, ...]:
        source = () if match.source is None else (match.source,)
        return (*match.path[kind.num_unseen(self.num_tokens(match), self.page_size) :], *source)

    def copy(self, held: Held, match: Match) -> list[tuple[int, int]]:
        """Give the sequence pages of its own for copies of the matched ones.  Returns (from, to) of each kind."""
        assert match.source is not None
        self.grow(held, len(held.pages) * self.page_size + 1)
        for kind in self._kinds:
            kind.release(match.source.pages[kind.number], match.source)
        return [(match.source.pages[kind.number], held.kinds[kind.number].pages[-1]) for kind in self._kinds]

    def grow(self, held: Held, num_tokens: int) -> None:
        """Have room for so many tokens; new pages are the sequence's own."""
        for kind, mine in zip(self._kinds, held.kinds, strict=True):
            while len(mine.pages) * self.page_size < num_tokens:
                if not kind.free:
                    self._give_up_one(kind)
                mine.pages.append(kind.take())

    def commit(self, held: Held, tokens: Sequence[int], num_computed: int) -> None:
        """Put full pages into the tree. Where it has such a page already, that one is held instead of the own.

        Pages that follow one which was given up stay out of it.
        """
        if not self.sharing:
            return
        size = self.page_size
        while (len(held.path) + 1) * size <= num_computed:
            place = len(held.path)
            parent = held.path[-1] if held.path else self._root
            if parent.parent is None and parent is not self._root:
                return
            text = tuple(tokens[place * size : (place + 1) * size])
            node = parent.children.get(text)
            if node is None:
                node = Node(text, [mine.pages[place] for mine in held.kinds], parent)
                parent.add(node)
            else:
                self._exchange(held, place, node)
            held.path.append(node)

    def _exchange(self, held: Held, place: int, node: Node) -> None:
        """Hold a node's pages instead of those that hold the same; what the node has given up, it gets."""
        for kind, mine in zip(self._kinds, held.kinds, strict=True):
            if node.pages[kind.number] == DROPPED:
                node.pages[kind.number] = mine.pages[place]
            else:
                kind.release(mine.pages[place], None)
                mine.pages[place] = kind.hold(node)

    def drop(self, held: Held, num_computed: int) -> None:
        """Give back, once so many tokens are computed and committed, the pages that no later one sees."""
        for kind, mine in zip(self._kinds, held.kinds, strict=True):
            for place in range(mine.num_dropped, kind.num_unseen(num_computed, self.page_size)):
                kind.release_at(held, place)
                mine.pages[place] = DROPPED
                mine.num_dropped += 1

    def give_back(self, held: Held) -> None:
        """The last page first."""
        for kind, mine in zip(self._kinds, held.kinds, strict=True):
            for place in range(len(mine.pages) - 1, mine.num_dropped - 1, -1):
                kind.release_at(held, place)
            mine.pages.clear()
            mine.num_dropped = 0
        held.path.clear()

    def forget(self, held: Held) -> None:
        """Take pages that only this sequence holds out of the tree, and idle ones behind them; they stay its own.

        Those that it has dropped go as well, unless somebody else holds them.
        """
        while held.path:
            node, is_held = held.path[-1], len(held.path) > held.kinds[0].num_dropped
            if node.parent is not None:
                if self._first.holders[node.pages[0]] != is_held:
                    return
                self._remove_below(node)
                self._remove(node)
            held.path.pop()

    def _give_up_one(self, kind: _Kind) -> None:
        """The page that was longest not used is free."""
        node = next(iter(kind.idle))
        if kind is not self._first:
            kind.discard(node)
            node.pages[kind.number] = DROPPED
            return
        assert self.window is not None or not node.children, "a page is given up before those that follow it"
        self._remove_below(node)
        self._remove(node)

    def _remove_below(self, node: Node) -> None:
        """Take all that follows a page out of the tree; idle pages of it are free."""
        below = list(node.children.values())
        for child in below:  # it grows: a text is as deep as it has pages, deeper than calls may be
            below += child.children.values()
        for child in reversed(below):
            self._remove(child)

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.remove(node)
        node.parent = None
        for kind in self._kinds:
            kind.discard(node)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
