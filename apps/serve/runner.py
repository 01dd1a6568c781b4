"""One step of the decoder over all sequences of a batch, and the tensors of the cache.

The tokens of all sequences lie behind each other in one row, ids[1, T]; each knows its position, so norms and products
need not know of sequences. Only attention does: `PagedAttend` in the decoder's `attend` slots writes the new keys and
values into their pages and attends over each sequence's pages. The head sees only rows whose logits are wanted.

With tensor parallelism every rank holds the pages of its heads. The first rank decides and sends each step to the
others as one tensor of numbers, and they follow until it sends none.

Shapes: T tokens of the step, R rows whose logits are wanted, B sequences, H query heads, J key/value heads, K head
size, V vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from apps.serve.machine import machine_of
from apps.serve.packet import Layout
from apps.serve.pages import Local
from apps.serve.sampler import NUM_NUMBERS, Ask, Reading
from core.config import UserError
from core.kernels.paged_attention import Spans, attention_on_cpu, paged_attention, spans, write_pages
from core.kernels.paged_loops import longest_apart, offered, write
from core.models.decoder import Decoder
from core.nn.attention import Attention, StepContext

PAGE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}


@dataclass
class Step:
    """A step to compute, as plain numbers.

    ids, positions, slots   of each token: what it is, where it stands in its text, its place in the pages
    sources                 of each token: the row of the last step that drew it, where it is not read yet; else -1.
                            Empty: all are known
    tables, lengths, starts of each sequence: its pages, its tokens with the new ones, its first new token
    rows                    tokens whose logits are wanted
    copies                  pages to be copied before anything is written: (from, to)
    local_slots, local_tables, local_copies
                            the same of layers with a window, where others see all; empty: all layers have one table
    drawn, asks             which of `rows` the next tokens are drawn from, and how
    drawn_R, numbers        `drawn`, and what the sampler takes of `asks`, on a GPU; the runner puts them there
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    rows: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    drawn_R: Tensor | None = None
    numbers: Tensor | None = None
    local_slots: list[int] = field(default_factory=list)
    local_tables: list[list[int]] = field(default_factory=list)
    local_copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def writes_only(self) -> bool:
        """True where the step is one token of each sequence, and the next one of each is drawn."""
        alone = len(self.ids) == len(self.tables) == len(self.rows) == len(self.asks)
        return alone and bool(self.ids) and not self.copies


_STOP, _STEP, DECODE = range(3)
"""What a message to the other ranks is: the end, a step, one by a graph (`apps.serve.decode`)."""
HEADER = 16
"""Words of int32 at the beginning of a message: what it is, its length, and what its kind has to say of itself."""
_MESSAGE = 1 << 13
"""Words of a message; what is longer comes in a second part."""
_SIZES = ("ids", "sources", "lengths", "width", "rows", "copies", "drawn", "asks", "kinds", "longest")
_ASKS = _SIZES.index("asks")


@lru_cache(maxsize=64)
def _layout(
    ids: int, sources: int, lengths: int, width: int, rows: int, copies: int, drawn: int, asks: int, kinds: int
) -> Layout:
    """kinds: of layers, each with slots, tables and copies of its own"""
    long, short, local = torch.int64, torch.int32, kinds - 1
    return Layout((
        ("header", short, HEADER), ("ids", long, ids), ("positions", long, ids), ("slots", long, ids),
        ("sources", long, sources), ("rows", long, rows), ("drawn", long, drawn),
        ("numbers", torch.float64, NUM_NUMBERS * asks), ("lengths", short, lengths), ("starts", short, lengths + 1),
        ("copies", short, 2 * copies), ("tables", short, lengths * width), ("local_slots", long, local * ids),
        ("local_copies", short, local * 2 * copies), ("local_tables", short, local * lengths * width),
    ))  # fmt: skip


@dataclass
class PagedContext(StepContext):
    """A step's tensors for `PagedAttend`: those of `paged_attention` and `write_pages`.

    spans  window of layers -> what `paged_attention` has `prepared`; None on a GPU
    local_tables_BP, local_slots_T  of layers with a window, where others see all
    """

    tables_BP: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int32))
    lengths_B: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    starts_B: Tensor | None = None
    slots_T: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    max_length: int = 0
    spans: Mapping[int | None, Spans] | None = None
    local_tables_BP: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int32))
    local_slots_T: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


class PagedAttend:
    """`Attend` of one layer over its pages[P, page_size, J, K]; int8 pages have scales[P, page_size, J].

    window  the layer's
    local   it has a window, and others see all: its pages are of their own
    """

    def __init__(
        self, num_pages: int, page_size: int, num_heads: int, head_size: int, dtype: torch.dtype, device: Any,
        window: int | None = None, local: bool = False,
    ):  # fmt: skip
        self.window, self.local = window, local
        shape = (num_pages, page_size, num_heads, head_size)
        self.k, self.v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        scaled = dtype == torch.int8
        self.k_scales, self.v_scales = (
            torch.empty(shape[:3], device=device) if scaled else None for _ in range(2)
        )  # fmt: skip

    def __call__(
        self,
        q_1THK: Tensor,
        k_1TJK: Tensor,
        v_1TJK: Tensor,
        /,
        *,
        slopes: Tensor | None,
        window: int | None,
        mask: Tensor | None,
        positions: Tensor,
        context: PagedContext,
    ) -> Tensor:
        assert window == self.window
        return self.attend(q_1THK[0], k_1TJK[0], v_1TJK[0], slopes, context)[None]

    def attend(
        self, q_THK: Tensor, k_TJK: Tensor, v_TJK: Tensor, slopes: Tensor | None, context: PagedContext
    ) -> Tensor:
        """Keep the new keys and values; o[T, H, K]."""
        scales: dict[str, Any] = {"k_scales": self.k_scales, "v_scales": self.v_scales}
        seen: dict[str, Any] = {"slopes": slopes, "window": self.window}
        found = None if context.spans is None else context.spans[self.window]
        tables_BP, slots_T = context.tables_BP, context.slots_T
        if self.local:
            tables_BP, slots_T = context.local_tables_BP, context.local_slots_T
        if found is not None and offered(q_THK, self.k):
            write(k_TJK, v_TJK, self.k, self.v, slots_T, **scales)
            return attention_on_cpu(q_THK, self.k, self.v, tables_BP, found, **seen, **scales)
        write_pages(k_TJK, v_TJK, self.k, self.v, slots_T, **scales)
        return paged_attention(
            q_THK,
            self.k,
            self.v,
            tables_BP,
            context.lengths_B,
            cu_query_lens=context.starts_B,
            max_length=context.max_length,
            prepared=found,
            **seen,
            **scales,
        )

    def copy(self, source: int, target: int) -> None:
        for pages in (self.k, self.v, self.k_scales, self.v_scales):
            if pages is not None:
                pages[target] = pages[source]


Graph = Callable[[Tensor, Tensor, PagedContext], Tensor]
"""(ids[1, T], positions[1, T], context) -> what the head is given, [1, T, D]."""


class Captured(Protocol):
    """Computes steps in which all sequences decode (`apps.serve.decode`, which knows the runner)."""

    def way(self, step: Step) -> int | None: ...

    def launch(self, step: Step, way: int) -> Reading: ...

    def follow(self, words: Tensor) -> None: ...


class Runner:
    """A decoder with pages in its `attend` slots.

    axis    the tensor-parallel ranks over which the decoder is cut; None: it is whole
    local   the pages of layers with a window, where others see all; None: all layers have one table of pages
    graph   what computes in the decoder's place, up to its head, if anything does (`apps.serve.compiled`)
    decode  computes steps in which all sequences decode, if anything does (`apps.serve.decode`)
    tokens  on the device, those that the last step drew; None: steps begin when these are read
    """

    def __init__(
        self, model: Decoder, num_pages: int, page_size: int, page_dtype: torch.dtype, axis: DeviceMesh | None = None,
        local: Local | None = None,
    ):  # fmt: skip
        self.model, self.axis, self.page_size = model.eval(), axis, page_size
        self.kinds = 1 if local is None else 2
        self.device = model.embedding.tokens.weight.device
        attentions = [module for module in model.modules() if isinstance(module, Attention)]
        ranks = 1 if axis is None else axis.size()
        try:
            self.pages = [
                PagedAttend(
                    num_pages if local is None or a.window is None else local.num_pages,
                    page_size,
                    a.num_kv_heads // ranks,
                    a.head_dim,
                    page_dtype,
                    self.device,
                    a.window,
                    local is not None and a.window is not None,
                )
                for a in attentions
            ]
        except (RuntimeError, MemoryError) as error:
            raise UserError(f"no memory for {num_pages} pages of the cache; give less by --engine.cache") from error
        for attention, pages in zip(attentions, self.pages, strict=True):
            attention.attend = pages
        self.graph: Graph | None = None
        self.machine = machine_of(self.device)
        self.tokens: Tensor | None = None
        self.decode: Captured | None = None
        self._message = torch.zeros(_MESSAGE, dtype=torch.int32, device="cpu")

    def run(self, step: Step) -> Tensor:
        """logits[R, V] in fp32 or wider, R those of `step.rows`; on a GPU they are computed by the time they are read.

        Only the first rank of the axis calls it.
        """
        words = self._packed(step)
        self.send(_STEP, words)
        return self._compute(step, words)

    def compute(self, step: Step) -> Tensor:
        """Run a step on this rank alone; the others are not told."""
        return self._compute(step, self._packed(step))

    def follow(self) -> None:
        """Run each step that the first rank sends, until it sends none; the other ranks call this."""
        while (words := self._receive()) is not None:
            if int(words[0]) == DECODE:
                assert self.decode is not None
                self.decode.follow(words)
                continue
            step = _unpacked(words)
            self._compute(step, words)
            if step.drawn:
                self.share(len(step.drawn))

    def beat(self) -> None:
        """A sign of life to the other ranks, which would take a long silence for a failure."""
        self.run(Step())

    def release(self) -> None:
        """Let the other ranks go."""
        self.send(_STOP, self.machine.words(HEADER))

    @property
    def ranks(self) -> int:
        return 1 if self.axis is None else self.axis.size()

    def send(self, kind: int, words: Tensor) -> None:
        """Numbers on the host to the other ranks, for what `kind` says. The first two words are overwritten."""
        if self.ranks == 1:
            return
        words[0], words[1] = kind, len(words)
        message = self._message
        message[: len(words)] = words[:_MESSAGE]
        self._broadcast(message)
        if len(words) > _MESSAGE:
            self._broadcast(words[_MESSAGE:])

    def _receive(self) -> Tensor | None:
        message = self._message
        self._broadcast(message)
        kind, count = message[:2].tolist()
        if kind == _STOP:
            return None
        words = self.machine.words(count)
        words[:_MESSAGE] = message[:count]
        if count > _MESSAGE:
            self._broadcast(words[_MESSAGE:])
        return words

    def _broadcast(self, x: Tensor) -> None:
        assert self.axis is not None
        group = self.axis.get_group()
        dist.broadcast(x, src=dist.get_global_rank(group, 0), group=group)

    def share(self, count: int) -> None:
        """The first rank's last tokens to all: those with which the next step may begin before they are read."""
        if self.ranks > 1 and self.tokens is not None:
            self._broadcast(self.tokens[:count])

    @property
    def dtype(self) -> torch.dtype:
        """The format that the decoder computes in."""
        return self.model.embedding.tokens.weight.dtype

    def _packed(self, step: Step) -> Tensor:
        width = max(map(len, step.tables), default=0)
        asks = 0 if self.device.type == "cpu" else len(step.asks)  # there the sampler deals them out to groups
        sizes = (len(step.ids), len(step.sources), len(step.tables), width, len(step.rows), len(step.copies))
        sizes += len(step.drawn), asks, self.kinds
        layout = _layout(*sizes)
        words = self.machine.words(layout.num_words)
        longest = max(step.lengths, default=0)
        layout.array(words, "header")[2 : 2 + len(_SIZES)] = (*sizes, longest)
        for name in ("ids", "positions", "slots", "sources", "rows", "drawn", "lengths", "starts", "local_slots"):
            layout.array(words, name)[:] = getattr(step, name)
        for name in ("copies", "local_copies"):
            layout.array(words, name)[:] = list(chain.from_iterable(getattr(step, name)))
        if asks:
            layout.array(words, "numbers").reshape(NUM_NUMBERS, asks).T[:] = [ask.numbers for ask in step.asks]
        for name in ("tables", "local_tables"):
            layout.array(words, name)[:] = list(chain.from_iterable(_filled(getattr(step, name), width)))
        return words

    @torch.inference_mode()
    def _compute(self, step: Step, words: Tensor) -> Tensor:
        for pages in self.pages:
            for source, target in step.local_copies if pages.local else step.copies:
                pages.copy(source, target)
        if not step.ids:
            return torch.empty(0, 0)
        *sizes, longest = words[2 : 2 + len(_SIZES)].tolist()
        layout, there = _layout(*sizes), self.machine.put(words)
        on_cpu, alone = self.device.type == "cpu", len(step.ids) == len(step.tables)

        def of(name: str) -> Tensor:
            return layout.tensor(there, name)

        context = PagedContext(
            rows_R=of("rows"),
            tables_BP=of("tables").view(len(step.tables), -1),
            lengths_B=of("lengths"),
            starts_B=None if alone else of("starts"),
            slots_T=of("slots"),
            max_length=longest,
            spans=self._spans(step) if on_cpu else None,
        )
        if self.kinds > 1:
            context.local_tables_BP = of("local_tables").view(len(step.tables), -1)
            context.local_slots_T = of("local_slots")
        if not on_cpu:
            step.drawn_R, step.numbers = of("drawn"), of("numbers").view(NUM_NUMBERS, sizes[_ASKS])
        ids_T = self.fed(of("ids"), of("sources")) if step.sources else of("ids")
        return self.logits(ids_T[None], of("positions")[None], context)

    def fed(self, ids_T: Tensor, sources_T: Tensor) -> Tensor:
        """Ids, with the last step's tokens where they come from there."""
        assert self.tokens is not None
        return ids_T.where(sources_T < 0, self.tokens[sources_T.clamp(min=0)])

    def logits(self, ids_1T: Tensor, positions_1T: Tensor, context: PagedContext) -> Tensor:
        """[R, V], by the decoder or by the graph in its place."""
        if self.graph is None:
            return _at_least_fp32(self.model(ids_1T, positions=positions_1T, context=context)[0])
        x_1TD, rows_R = self.graph(ids_1T, positions_1T, context), context.rows_R
        if rows_R is not None and not len(rows_R):
            return x_1TD.new_empty(0, self.model.config.vocab_size)
        return _at_least_fp32(self.model.head(x_1TD, rows_R=rows_R)[0])

    def _spans(self, step: Step) -> dict[int | None, Spans]:
        given = step.lengths, step.starts, self.page_size, longest_apart(self.pages[0].k)
        tables = {pages.window: step.local_tables if pages.local else step.tables for pages in self.pages}
        return {window: spans(of_kind, *given, window) for window, of_kind in tables.items()}


def _at_least_fp32(logits_RV: Tensor) -> Tensor:
    return logits_RV.float() if logits_RV.dtype.itemsize < 4 else logits_RV


def _filled(tables: list[list[int]], width: int) -> Iterable[list[int]]:
    return (table if len(table) == width else table + [0] * (width - len(table)) for table in tables)


def _unpacked(words: Tensor) -> Step:
    """The tensors of a step that another rank needs to know."""
    *sizes, _ = words[2 : 2 + len(_SIZES)].tolist()
    layout, width = _layout(*sizes), sizes[3]

    def of(name: str) -> list[int]:
        return layout.array(words, name).tolist()

    def tables(name: str) -> list[list[int]]:
        return layout.array(words, name).reshape(-1, max(width, 1)).tolist()

    def copies(name: str) -> list[tuple[int, int]]:
        return list(zip(of(name)[::2], of(name)[1::2]))

    return Step(
        of("ids"), of("positions"), of("slots"), tables("tables"), of("lengths"), of("starts"), of("rows"),
        copies("copies"), of("sources"), of("drawn"), local_slots=of("local_slots"),
        local_tables=tables("local_tables"), local_copies=copies("local_copies"),
    )  # fmt: skip
