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
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Node:
    """A full page in the tree.

    parent    None: taken out of the tree
    children  by their pages
    order     the children's pages, sorted: who begins most like a text stands beside its place
    """

    tokens: tuple[int, ...]
    page: int
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
class Held:
    """The pages of a sequence in order; those of `path` are in the tree, the rest are its own.

    num_dropped  pages at the beginning that it does not need any more, which are `DROPPED` in `pages`
    """

    pages: list[int] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)
    num_dropped: int = 0


DROPPED = -1


class Pages:
    """All pages, 0 … num_pages - 1.

    window  of all layers; None: a layer sees all tokens, and pages are held as long as their sequence runs
    """

    def __init__(self, num_pages: int, page_size: int, sharing: bool = True, window: int | None = None):
        self.num_pages, self.page_size, self.sharing, self.window = num_pages, page_size, sharing, window
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self._root = Node((), -1, None)

    @property
    def num_free(self) -> int:
        """Pages that can be handed out: free or idle."""
        return len(self._free) + len(self._idle)

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
        rest = tuple(tokens[len(path) * size : min((len(path) + 1) * size, len(tokens) - 1)])
        return Match(tuple(path), *node.most_alike(rest))

    def num_tokens(self, match: Match) -> int:
        return len(match.path) * self.page_size + match.num_copied

    def num_idle(self, match: Match) -> int:
        """The number of the matched pages that `claim` takes out of those that `num_free` counts."""
        return sum(node in self._idle for node in self._claimed(match))

    def num_unseen(self, num_computed: int) -> int:
        """Pages at the beginning of a text that nothing behind so many of its tokens sees."""
        return 0 if self.window is None else max(0, num_computed + 1 - self.window) // self.page_size

    def num_returned(self, held: Held) -> int:
        """Pages that `give_back` would make free or idle."""
        return sum(self._holders[page] == 1 for page in held.pages[held.num_dropped :])

    def claim(self, match: Match) -> Held:
        """Hold what was matched and will be seen, the page to be copied too, until `copied`."""
        for node in self._claimed(match):
            self._hold(node)
        unseen = self.num_unseen(self.num_tokens(match))
        pages = [DROPPED] * unseen + [node.page for node in match.path[unseen:]]
        return Held(pages, list(match.path), unseen)

    def _claimed(self, match: Match) -> tuple[Node, ...]:
        source = () if match.source is None else (match.source,)
        return (*match.path[self.num_unseen(self.num_tokens(match)) :], *source)

    def copy(self, held: Held, match: Match) -> tuple[int, int]:
        """Give the sequence a page of its own for a copy of the matched one.  Returns (from, to)."""
        assert match.source is not None
        self.grow(held, len(held.pages) * self.page_size + 1)
        self._release(match.source.page, match.source)
        return match.source.page, held.pages[-1]

    def grow(self, held: Held, num_tokens: int) -> None:
        """Have room for so many tokens; new pages are the sequence's own."""
        while len(held.pages) * self.page_size < num_tokens:
            page = self._take()
            self._holders[page] = 1
            held.pages.append(page)

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
            page = tuple(tokens[place * size : (place + 1) * size])
            node = parent.children.get(page)
            if node is None:
                node = Node(page, held.pages[place], parent)
                parent.add(node)
            else:
                self._hold(node)
                self._release(held.pages[place], None)
                held.pages[place] = node.page
            held.path.append(node)

    def drop(self, held: Held, num_computed: int) -> None:
        """Give back, once so many tokens are computed and committed, the pages that no later one sees."""
        for place in range(held.num_dropped, self.num_unseen(num_computed)):
            self._release_at(held, place)
            held.pages[place] = DROPPED
            held.num_dropped += 1

    def give_back(self, held: Held) -> None:
        """The last page first."""
        for place in range(len(held.pages) - 1, held.num_dropped - 1, -1):
            self._release_at(held, place)
        held.pages.clear()
        held.path.clear()
        held.num_dropped = 0

    def _release_at(self, held: Held, place: int) -> None:
        self._release(held.pages[place], held.path[place] if place < len(held.path) else None)

    def forget(self, held: Held) -> None:
        """Take pages that only this sequence holds out of the tree, and idle ones behind them; they stay its own.

        Those that it has dropped go as well, unless somebody else holds them.
        """
        while held.path:
            node, is_held = held.path[-1], len(held.path) > held.num_dropped
            if node.parent is not None:
                if self._holders[node.page] != is_held:
                    return
                self._remove_below(node)
                _detach(node)
                if not is_held:
                    del self._idle[node]
                    self._free.append(node.page)
            held.path.pop()

    def _remove_below(self, node: Node) -> None:
        """Take all that follows a page out of the tree; idle pages of it are free."""
        below = list(node.children.values())
        for child in below:  # it grows: a text is as deep as it has pages, deeper than calls may be
            below += child.children.values()
        for child in reversed(below):
            _detach(child)
            if child in self._idle:
                del self._idle[child]
                self._free.append(child.page)

    def _hold(self, node: Node) -> None:
        self._idle.pop(node, None)
        self._holders[node.page] += 1

    def _release(self, page: int, node: Node | None) -> None:
        self._holders[page] -= 1
        assert self._holders[page] >= 0
        if self._holders[page] == 0:
            if node is None or node.parent is None:
                self._free.append(page)
            else:
                self._idle[node] = None

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        node, _ = self._idle.popitem(last=False)
        assert self.window is not None or not node.children, "a page is given up before those that follow it"
        self._remove_below(node)
        _detach(node)
        return node.page


def _detach(node: Node) -> None:
    assert node.parent is not None
    node.parent.remove(node)
    node.parent = None


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
