"""One step of the decoder over all sequences of a batch, and the tensors of the cache.

The tokens of all sequences lie behind each other in one row, ids[1, T]; each knows its position, so norms and products
need not know of sequences. Only attention does: `PagedAttend` in the decoder's `attend` slots writes the new keys and
values into their pages and attends over each sequence's pages. The head sees only rows whose logits are wanted.

With tensor parallelism every rank holds the pages of its heads. The first rank decides and sends each step to the
others, which follow until it sends none.

Shapes: T tokens of the step, R rows whose logits are wanted, B sequences, H query heads, J key/value heads, K head
size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core.config import UserError
from core.kernels.paged_attention import Spans, attention_on_cpu, paged_attention, spans, write_pages
from core.kernels.paged_loops import longest_apart, offered, write
from core.models.decoder import Decoder
from core.nn.attention import Attention, StepContext

PAGE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}


@dataclass(frozen=True)
class Step:
    """What is to be computed, as plain numbers.

    ids, positions, slots   of each token: what it is, where it stands in its text, its place in the pages
    tables, lengths, starts of each sequence: its pages, its tokens with the new ones, its first new token
    rows                    tokens whose logits are wanted
    copies                  pages to be copied before anything is written: (from, to)
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    rows: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class PagedContext(StepContext):
    """What `PagedAttend` needs to know of a step; tensors of `paged_attention` and `write_pages`."""

    tables_BP: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int32))
    lengths_B: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    starts_B: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int32))
    slots_T: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    max_length: int = 0
    spans: Spans | None = None


class PagedAttend:
    """`Attend` of one layer over its pages[P, page_size, J, K]; int8 pages have scales[P, page_size, J]."""

    def __init__(self, num_pages: int, page_size: int, num_heads: int, head_size: int, dtype: torch.dtype, device: Any):
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
        mask: Tensor | None,
        positions: Tensor,
        context: PagedContext,
    ) -> Tensor:
        return self.attend(q_1THK[0], k_1TJK[0], v_1TJK[0], slopes, context)[None]

    def attend(
        self, q_THK: Tensor, k_TJK: Tensor, v_TJK: Tensor, slopes: Tensor | None, context: PagedContext
    ) -> Tensor:
        """Keep the new keys and values; o[T, H, K]."""
        scales: dict[str, Any] = {"k_scales": self.k_scales, "v_scales": self.v_scales}
        if context.spans is not None and offered(q_THK, self.k):
            write(k_TJK, v_TJK, self.k, self.v, context.slots_T, **scales)
            return attention_on_cpu(q_THK, self.k, self.v, context.tables_BP, context.spans, slopes=slopes, **scales)
        write_pages(k_TJK, v_TJK, self.k, self.v, context.slots_T, **scales)
        return paged_attention(
            q_THK,
            self.k,
            self.v,
            context.tables_BP,
            context.lengths_B,
            cu_query_lens=context.starts_B,
            slopes=slopes,
            max_length=context.max_length,
            prepared=context.spans,
            **scales,
        )

    def copy(self, source: int, target: int) -> None:
        for pages in (self.k, self.v, self.k_scales, self.v_scales):
            if pages is not None:
                pages[target] = pages[source]


Graph = Callable[[Tensor, Tensor, PagedContext], Tensor]
"""(ids[1, T], positions[1, T], context) -> what the head is given, [1, T, D]."""


class Runner:
    """A decoder with pages in its `attend` slots.

    axis   the tensor-parallel ranks over which the decoder is cut; None: it is whole
    graph  what computes in the decoder's place, up to its head, if anything does (`apps.serve.compiled`)
    """

    def __init__(
        self, model: Decoder, num_pages: int, page_size: int, page_dtype: torch.dtype, axis: DeviceMesh | None = None
    ):
        self.model, self.axis, self.page_size = model.eval(), axis, page_size
        self.device = model.embedding.tokens.weight.device
        attentions = [module for module in model.modules() if isinstance(module, Attention)]
        ranks = 1 if axis is None else axis.size()
        try:
            self.pages = [
                PagedAttend(num_pages, page_size, a.num_kv_heads // ranks, a.head_dim, page_dtype, self.device)
                for a in attentions
            ]
        except (RuntimeError, MemoryError) as error:
            raise UserError(f"no memory for {num_pages} pages of the cache; give less by --engine.cache") from error
        for attention, pages in zip(attentions, self.pages, strict=True):
            attention.attend = pages
        self.graph: Graph | None = None

    def run(self, step: Step) -> Tensor:
        """logits[R, V] in fp32 or wider, R those of `step.rows`; on a GPU they are computed by the time they are read.

        Only the first rank of the axis calls it.
        """
        if self.axis is not None and self.axis.size() > 1:
            self._send(step)
        return self._compute(step)

    def wait(self) -> None:
        """Until what `run` began is computed: a GPU computes while `run` returns."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def follow(self) -> None:
        """What the other ranks do: each step that the first one sends, until it sends none."""
        while (step := self._send(None)) is not None:
            self._compute(step)

    def beat(self) -> None:
        """A sign of life to the other ranks, which would take a long silence for a failure."""
        self.run(Step())

    def release(self) -> None:
        """Let the other ranks go."""
        if self.axis is not None and self.axis.size() > 1:
            self._send(None)

    def _send(self, step: Step | None) -> Step | None:
        assert self.axis is not None
        group, box = self.axis.get_group(), [step]
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
        return box[0]

    @property
    def dtype(self) -> torch.dtype:
        """In which the decoder computes."""
        return self.model.embedding.tokens.weight.dtype

    @torch.inference_mode()
    def _compute(self, step: Step) -> Tensor:
        for source, target in step.copies:
            for pages in self.pages:
                pages.copy(source, target)
        if not step.ids:
            return torch.empty(0, 0)
        width = max(map(len, step.tables))
        tables = [table + [0] * (width - len(table)) for table in step.tables]

        def tensor(values: Any, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        context = PagedContext(
            rows_R=tensor(step.rows, torch.int64),
            tables_BP=tensor(tables, torch.int32),
            lengths_B=tensor(step.lengths, torch.int32),
            starts_B=tensor(step.starts, torch.int32),
            slots_T=tensor(step.slots, torch.int64),
            max_length=max(step.lengths),
            spans=self._spans(step) if self.device.type == "cpu" else None,
        )
        ids, positions = tensor([step.ids], torch.int64), tensor([step.positions], torch.int64)
        if self.graph is None:
            return _at_least_fp32(self.model(ids, positions=positions, context=context)[0])
        x_1TD = self.graph(ids, positions, context)
        if not step.rows:
            return x_1TD.new_empty(0, self.model.config.vocab_size)
        return _at_least_fp32(self.model.head(x_1TD, rows_R=context.rows_R)[0])

    def _spans(self, step: Step) -> Spans:
        return spans(step.tables, step.lengths, step.starts, self.page_size, longest_apart(self.pages[0].k))


def _at_least_fp32(logits_RV: Tensor) -> Tensor:
    return logits_RV.float() if logits_RV.dtype.itemsize < 4 else logits_RV
