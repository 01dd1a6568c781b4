"""The books of the cache, without tensors: which sequences hold a page, and which tokens a page holds.

Full pages stand in a radix tree by their tokens: the path from the root to a node is the text before it, so a sequence
that begins alike shares the pages of the path (Zheng et al., "SGLang", 2024, section 3). A page is the unit of an edge.
Where a text leaves a page in its middle, the page is copied for it and the copy goes on differently: copy on write.

A page is *free* (holds nothing), *held* by one or more sequences, or *idle*: in the tree, held by nobody, kept until
its place is needed. Idle ones are given up from the one that was longest not used. Who holds a page holds the pages
before it, and gives back the last one first, so in the order of giving back children come before their parents: the
first idle page never has children.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Node:
    """A full page in the tree.

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
    """The pages of a sequence in order; those of `path` are in the tree, the rest are its own."""

    pages: list[int] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)


class Pages:
    """All pages, 0 … num_pages - 1."""

    def __init__(self, num_pages: int, page_size: int, sharing: bool = True):
        self.num_pages, self.page_size, self.sharing = num_pages, page_size, sharing
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
        """The number of the matched pages that `num_free` counts."""
        source = () if match.source is None else (match.source,)
        return sum(node in self._idle for node in (*match.path, *source))

    def num_returned(self, held: Held) -> int:
        """Pages that `give_back` would make free or idle."""
        return sum(self._holders[page] == 1 for page in held.pages)

    def claim(self, match: Match) -> Held:
        """Hold what was matched, the page to be copied too, until `copied`."""
        for node in (*match.path, *(() if match.source is None else (match.source,))):
            self._hold(node)
        return Held([node.page for node in match.path], list(match.path))

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
        """Put full pages into the tree. Where it has such a page already, that one is held instead of the own."""
        if not self.sharing:
            return
        size = self.page_size
        while (len(held.path) + 1) * size <= num_computed:
            place = len(held.path)
            parent = held.path[-1] if held.path else self._root
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

    def give_back(self, held: Held) -> None:
        """The last page first."""
        for place in range(len(held.pages) - 1, -1, -1):
            self._release(held.pages[place], held.path[place] if place < len(held.path) else None)
        held.pages.clear()
        held.path.clear()

    def forget(self, held: Held) -> None:
        """Take pages that only this sequence holds out of the tree, and idle ones behind them; they stay its own."""
        while held.path and self._holders[held.path[-1].page] == 1:
            node = held.path.pop()
            self._free_below(node)
            _detach(node)

    def _free_below(self, node: Node) -> None:
        below = list(node.children.values())
        for child in below:  # it grows: a text is as deep as it has pages, deeper than calls may be
            below += child.children.values()
        for child in reversed(below):
            _detach(child)
            del self._idle[child]
            self._free.append(child.page)

    def _hold(self, node: Node) -> None:
        self._idle.pop(node, None)
        self._holders[node.page] += 1

    def _release(self, page: int, node: Node | None) -> None:
        self._holders[page] -= 1
        assert self._holders[page] >= 0
        if self._holders[page] == 0:
            if node is None:
                self._free.append(page)
            else:
                self._idle[node] = None

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        node, _ = self._idle.popitem(last=False)
        assert not node.children, "a page is given up before those that follow it"
        _detach(node)
        return node.page


def _detach(node: Node) -> None:
    assert node.parent is not None
    node.parent.remove(node)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
