"""What a step's graph says, as tables and as a picture: by module, by operator, and at its fullest moment."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from core.config import in_words
from core.files import save_figure
from core.trace.graph import MEMORY_KINDS, Graph, MemoryKind, Node, NodeKind, Storage, Until


@dataclass
class Share:
    """What a part of a step does.

    name             of a module (numbers of blocks are *), or of an operator
    calls            of operators that take time
    flops_backward   those of what is recomputed, too
    kept_bytes       made by its forward and kept for the backward
    """

    name: str
    calls: int = 0
    parameters_bytes: int = 0
    flops_forward: int = 0
    flops_backward: int = 0
    flops_update: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    kept_bytes: int = 0

    def add(self, node: Node) -> None:
        self.calls += not node.is_view
        flops = f"flops_{node.kind}"
        setattr(self, flops, getattr(self, flops) + node.flops)
        self.bytes_read += node.bytes_read
        self.bytes_written += node.bytes_written


def by_module(graph: Graph, depth: int) -> list[Share]:
    """Modules down to `depth` names, each with those in it, blocks of a list together; the whole step first."""

    def above(path: str) -> Iterator[str]:
        parts = ["*" if part.isdigit() else part for part in path.split(".")] if path else []
        yield from (".".join(parts[:end]) for end in range(min(len(parts), depth) + 1))

    order: dict[str, None] = {}
    for storage in graph.storages:
        if storage.kind == "parameters":
            order |= dict.fromkeys(above(storage.name.rpartition(".")[0]))
    shares = _shares(graph, lambda node: above(node.module), order)
    for storage in graph.storages:
        if storage.kind == "parameters":
            for name in above(storage.name.rpartition(".")[0]):
                shares[name].parameters_bytes += storage.num_bytes
    return [shares[name] for name in sorted(shares, key=lambda name: _place(name, list(shares)))]


def _place(name: str, order: list[str]) -> tuple[int, ...]:
    """Behind the module that it is in, in the order in which they were met."""
    parts = name.split(".") if name else []
    return tuple(order.index(".".join(parts[:end])) for end in range(len(parts) + 1))


def by_operator(graph: Graph) -> list[Share]:
    """Those that touch most bytes first."""
    shares = _shares(graph, lambda node: [str(node.op).removeprefix("aten.")])
    found = [share for share in shares.values() if share.calls]
    return sorted(found, key=lambda share: -(share.bytes_read + share.bytes_written))


def _shares(graph: Graph, names: Callable[[Node], Iterable[str]], order: Iterable[str] = ()) -> dict[str, Share]:
    shares = {name: Share(name) for name in order}
    for node in graph.nodes:
        for name in names(node):
            shares.setdefault(name, Share(name)).add(node)
    for storage in graph.storages:
        if storage.kind == "activations" and storage.born is not None:
            for name in names(graph.nodes[storage.born]):
                shares[name].kept_bytes += storage.num_bytes
    return shares


@dataclass(frozen=True)
class Held:
    """Storages that are alive at the peak: of one kind, made by one operator of one module."""

    kind: MemoryKind
    name: str
    count: int
    num_bytes: int


def held_at_peak(graph: Graph, until: Until = "freed") -> list[Held]:
    """The largest first."""
    counts: Counter[tuple[MemoryKind, str]] = Counter()
    sizes: Counter[tuple[MemoryKind, str]] = Counter()
    for storage in graph.peak(until).alive:
        key = storage.kind, _origin(graph, storage)
        counts[key] += 1
        sizes[key] += storage.num_bytes
    return [Held(key[0], key[1], counts[key], num_bytes) for key, num_bytes in sizes.most_common()]


def _origin(graph: Graph, storage: Storage) -> str:
    if storage.kind in ("parameters", "gradients", "state"):
        return _starred(storage.name.rpartition(".")[0])
    if storage.born is None:
        return _starred(storage.name)
    node = graph.nodes[storage.born]
    return f"{_starred(node.module)} {str(node.op).removeprefix('aten.')}".strip()


def _starred(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def as_json(graph: Graph, depth: int) -> dict[str, Any]:
    """All of it, for programs."""
    peak = graph.peak()
    node = None if peak.node is None else graph.nodes[peak.node]
    kinds: tuple[NodeKind, ...] = ("forward", "backward", "update")
    return {
        "operators": sum(not node.is_view for node in graph.nodes),
        "flops": {kind: graph.flops(kind) for kind in kinds}
        | {"recomputed": sum(node.flops for node in graph.nodes if node.recomputed)},
        "bytes_read": graph.bytes_read,
        "bytes_written": graph.bytes_written,
        "bytes": {kind: graph.bytes_of(kind) for kind in MEMORY_KINDS if kind != "temporaries"},
        "peak": {
            "bytes": peak.num_bytes,
            "bytes_by_last_use": graph.peak("used").num_bytes,
            "kind": node and node.kind,
            "module": node and node.module,
            "operator": node and str(node.op),
            "by_kind": peak.by_kind,
            "alive": [asdict(held) for held in held_at_peak(graph)],
        },
        "by_module": [asdict(share) for share in by_module(graph, depth)],
        "by_operator": [asdict(share) for share in by_operator(graph)],
    }


def tables(graph: Graph, depth: int, most: int) -> Iterator[Table | str]:
    """What is printed.  most: operators, and groups of what is alive at the peak"""
    trains = any(node.kind == "backward" for node in graph.nodes)
    yield _table("by module", by_module(graph, depth), trains, parameters=True)
    operators = by_operator(graph)
    yield _table(f"by operator, those that touch most{_of(operators, most)}", operators[:most], trains)
    peak = graph.peak()
    where = "before the first operator"
    if peak.node is not None:
        node = graph.nodes[peak.node]
        where = f"at {str(node.op).removeprefix('aten.')} in {node.module or 'the model'}, {node.kind}"
    yield (
        f"peak {in_words(peak.num_bytes)}, operator {0 if peak.node is None else peak.node + 1:,} of "
        f"{len(graph.nodes):,}: {where}; {in_words(graph.peak('used').num_bytes)} if all were freed at its last use"
    )
    held = held_at_peak(graph)
    table = Table("kind", "of", "tensors", "bytes", title=f"alive at the peak{_of(held, most)}", title_justify="left")
    for kind, num_bytes in peak.by_kind.items():
        table.add_row(kind, "", "", in_words(num_bytes))
    table.add_section()
    for one in held[:most]:
        table.add_row(one.kind, one.name, f"{one.count:,}", in_words(one.num_bytes))
    yield table


def _of(found: list[Any], most: int) -> str:
    return f" ({most} of {len(found)})" if len(found) > most else ""


def _table(title: str, shares: list[Share], trains: bool, parameters: bool = False) -> Table:
    columns = ["module" if parameters else "operator", "calls", *(["parameters"] if parameters else [])]
    columns += ["forward", "backward"] if trains else ["FLOPs"]
    columns += ["read", "written", *(["kept"] if trains else [])]
    table = Table(title=f"{title}; FLOPs, bytes", title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for share in shares:
        row = [share.name or "the whole step", f"{share.calls:,}"]
        row += [_size(share.parameters_bytes)] if parameters else []
        row += [_count(share.flops_forward), *([_count(share.flops_backward)] if trains else [])]
        row += [_size(share.bytes_read), _size(share.bytes_written), *([_size(share.kept_bytes)] if trains else [])]
        table.add_row(*row)
    return table


def _size(num_bytes: int) -> str:
    return in_words(num_bytes) if num_bytes else ""


def _count(flops: int) -> str:
    return f"{flops:.3g}" if flops else ""


# --- the picture ------------------------------------------------------------------------------------------------------

_COLOURS: dict[MemoryKind, str] = {
    "parameters": "#30638e",
    "buffers": "#7d8ca3",
    "inputs": "#c9cba3",
    "gradients": "#d1495b",
    "state": "#00798c",
    "activations": "#edae49",
    "temporaries": "#b8b8b8",
}


def draw_memory(graph: Graph, png: str | Path, title: str = "") -> Path:
    """Bytes alive along the step, by kind, with its parts and its peak.  Returns the path of the PNG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    alive: dict[MemoryKind, list[int]] = {kind: row for kind, row in graph.bytes_alive().items() if any(row)}
    peak = graph.peak()
    with rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 5), layout="constrained")
        axes = figure.add_subplot()
        places = range(len(graph.nodes) + 1)
        colours = [_COLOURS[kind] for kind in alive]
        axes.stackplot(places, *alive.values(), labels=list(alive), colors=colours, step="post", linewidth=0)
        for kind in ("backward", "update"):
            first = next((node.index + 1 for node in graph.nodes if node.kind == kind), None)
            if first is not None:
                axes.axvline(first, color="#444444", linewidth=0.8, linestyle=":")
                axes.annotate(f" {kind}", (first, 1.0), xycoords=("data", "axes fraction"), va="top", fontsize=9)
        place = 0 if peak.node is None else peak.node + 1
        axes.plot([place], [peak.num_bytes], "v", color="black", markersize=6)
        axes.annotate(
            f"peak {in_words(peak.num_bytes)}", (place, peak.num_bytes), xytext=(0, 7), textcoords="offset points",
            ha="center", fontsize=9,
        )  # fmt: skip
        axes.set(xlabel="operators, in the order in which they run", title=title, xlim=(0, max(len(graph.nodes), 1)))
        axes.set_ylim(0, 1.12 * max(peak.num_bytes, 1))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda num_bytes, _: in_words(num_bytes)))
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        save_figure(figure, Path(png), 150)
    return Path(png)
