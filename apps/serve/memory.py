"""The memory of a served model, and each one's share where several are: pure functions of shapes and bytes.

`need` says what one model takes on each of its ranks: weights as they are stored, a page of the cache, and what a step
works with. `serve plan` asks it for devices that nobody has yet; `serve` asks it before anything is read, and
`share_out` divides what is free among the models that one server loads: weights first, then pages that were asked for,
then second forms of weights, and of the rest a share for pages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from apps.serve.history import BYTES as HISTORY_BYTES
from apps.serve.pages import most_local_pages
from apps.serve.sampler import DRAW_BYTES, slab_rows
from core.config import UserError, in_words
from core.mesh import MeshConfig
from core.models import DecoderConfig, stored_dtype
from core.models.decoder import decoder_without_memory
from core.nn.mlp import is_gated
from core.quant import Scheme, is_quantized
from core.quant.choose import choose
from core.quant.folder import described_weights, parameter_dtype, weight_bytes
from core.quant.products import working_bytes
from core.runtime import available_bytes

# Of the memory that is left when weights, forms and steps have theirs: for pages, where nothing is said.
_SHARE = {"cpu": 0.25, "cuda": 0.85}

Stored = Callable[[tuple[int, ...]], int]
"""The bytes in which a part of a weight, of this shape, is stored."""


@dataclass(frozen=True)
class Format:
    """The formats that a model is held in.

    dtype   of activations, and of the weights that are not quantized
    pages   of the cache
    stored  parameter -> its bytes, of those that are quantized
    scheme  by which they are; of several the one whose products take most
    """

    dtype: torch.dtype
    pages: torch.dtype
    stored: Mapping[str, Stored] = field(default_factory=dict)
    scheme: str | None = None


def quantized_format(model: DecoderConfig, scheme: Scheme, dtype: torch.dtype, pages: torch.dtype) -> Format:
    """The format of a model whose every matrix is quantized, embeddings and head too."""
    chosen = choose(decoder_without_memory(model), embeddings=True, head=True)
    stored = partial(weight_bytes, scheme, gain=scheme.name == "llm.int8")
    return Format(dtype, pages, {item.name: stored for item in chosen}, scheme.name)


def folder_format(
    model: DecoderConfig, folder: Path, dtype: torch.dtype | None, pages: torch.dtype | None, scheme: Scheme | None
) -> Format:
    """The format of a folder's model, of which only headers are read.

    dtype, pages  None: that of the folder; that of the activations
    scheme        weights are quantized so while they are loaded

    Raises UserError for a folder that is foreign or incomplete.
    """
    if not is_quantized(folder):
        dtype = dtype or stored_dtype(model, folder)
        if scheme is not None:
            return quantized_format(model, scheme, dtype, pages or dtype)
        return Format(dtype, pages or dtype)
    dtype = dtype or parameter_dtype(folder, "embedding.tokens.weight")
    described = described_weights(folder)
    stored = {name: partial(weight_bytes, one["scheme"], gain="gain" in one) for name, one in described.items()}
    schemes = {one["scheme"].name for one in described.values()}
    return Format(dtype, pages or dtype, stored, "int8" if "int8" in schemes else min(schemes, default=None))


@dataclass(frozen=True)
class Load:
    """The largest load at once.

    sequences     that run at once
    length        tokens of each at most, prompt and text
    batch_tokens  of a step at most
    window        of all layers of the model, where they have one
    local_window  of the layers with one, where others see all
    """

    sequences: int
    length: int
    batch_tokens: int
    page_size: int = 16
    window: int | None = None
    local_window: int | None = None

    @property
    def pages(self) -> int:
        """Pages that all of the sequences hold: with a window those that it lies on, and those of a step's tokens."""
        whole = self.sequences * self._pages(self.length)
        if self.window is None:
            return whole
        return min(whole, self.sequences * (self._pages(self.window) + 1) + self._pages(self.batch_tokens))

    @property
    def local_pages(self) -> int:
        """Pages that layers with a window have at most, where others see all."""
        if self.local_window is None:
            return 0
        return most_local_pages(self.local_window, self.page_size, self.sequences, self.batch_tokens)

    @property
    def seen(self) -> int:
        """Keys that the queries of a sequence see in one step."""
        return self.length if self.window is None else min(self.length, self.window + self.batch_tokens)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


@dataclass(frozen=True)
class Need:
    """Bytes that a model takes on each of its ranks: on the one that takes most.

    weights     as they are stored
    page        one page of the cache, in all layers, or in those that see all where others have a window
    work        what a step of the most tokens holds beside them
    forms       weights once more, in a form that is faster: taken if there is room
    local_page  one page in the layers with a window, where others see all; there are as many of them, but at most
    most_local
    """

    weights: int
    page: int
    work: int
    forms: int = 0
    local_page: int = 0
    most_local: int = 0

    def cache(self, num_pages: int) -> int:
        """Bytes of so many pages."""
        return num_pages * self.page + min(num_pages, self.most_local) * self.local_page

    def pages_in(self, num_bytes: int) -> int:
        """Pages that lie in so many bytes."""
        both = num_bytes // (self.page + self.local_page)
        return both if both < self.most_local else (num_bytes - self.most_local * self.local_page) // self.page

    def total(self, num_pages: int) -> int:
        """Bytes of all, without second forms."""
        return self.weights + self.cache(num_pages) + self.work


def need(model: DecoderConfig, format: Format, load: Load, ranks: int = 1, device: str = "cuda") -> Need:
    """A model's memory on each of `ranks` ranks of tensor parallelism. Reads nothing."""
    weights = 0
    for name, shape in _shapes(model, ranks).items():
        stored = format.stored.get(name)
        weights += math.prod(shape) * format.dtype.itemsize if stored is None else stored(shape)
    page = page_bytes(model, load.page_size, format.pages, ranks)
    kind = torch.device(device).type
    local = 0 if load.local_window is None else page // model.num_layers * (model.num_layers - len(model.full_layers))
    work, forms = _work(model, format, load, ranks, kind), weights if kind == "cpu" else 0
    return Need(weights, page - local, work, forms, local, load.local_pages)


@lru_cache
def _shapes(model: DecoderConfig, ranks: int) -> dict[str, tuple[int, ...]]:
    """parameter -> shape of the largest part of it that a rank holds."""
    if ranks == 1:
        return {name: tuple(parameter.shape) for name, parameter in decoder_without_memory(model).named_parameters()}
    from core.models.plan import decoder_table  # what it imports, one rank need not wait for

    table = decoder_table(model, MeshConfig(tp=ranks).resolve(ranks))
    return {name: row.layout.largest_shape() for name, row in table.items() if name == row.names[0]}


def page_bytes(model: DecoderConfig, page_size: int, dtype: torch.dtype, ranks: int = 1) -> int:
    """Bytes of one page in all layers, on one rank."""
    heads = model.kv_heads // ranks
    scales = 4 if dtype == torch.int8 else 0
    return 2 * model.num_layers * page_size * heads * (model.head_size * dtype.itemsize + scales)


def has_weights(folder: Path) -> bool:
    """Return whether a folder holds weights, plain or quantized, beside its config.json."""
    names = ("model.safetensors", "pytorch_model.bin")
    return is_quantized(folder) or any(
        (folder / (name + end)).is_file() for name in names for end in ("", ".index.json")
    )


def _work(model: DecoderConfig, format: Format, load: Load, ranks: int, kind: str) -> int:
    """Bytes of what is widest at once: a block's MLP, or its attention; and the logits.

    residual, normed and two copies, and the hidden activations: before (and beside a gate), and behind
    quantized   inputs and results of a product in fp32 where the model has 16 bits; of int8 and llm.int8 the digits
    attention   on a CPU a sequence at a time: its keys and values out of the pages, mask or ALiBi's bias
    product     with the quantized weight that takes most: some of it widened, or what stands for x in 8 bits
    """
    hidden, width = model.ffn_dim // ranks, format.dtype.itemsize
    mlp = (3 if is_gated(model.activation) else 2) * hidden
    if model.moe.num_experts:
        mlp = math.ceil(model.moe.per_token * (mlp + model.dim))
    token = width * (4 * model.dim + max(mlp, (model.num_heads + 2 * model.kv_heads) * model.head_size // ranks))
    if format.scheme is not None:
        token += 4 * (2 * model.dim + hidden) if width < 4 else 2 * model.dim
        token += 9 * max(hidden, model.dim) if format.scheme in ("int8", "llm.int8") else 0
    tokens = _tokens(load)
    logits = 16 * load.sequences * model.vocab_size
    if kind != "cpu":  # there drawing takes a few rows at a time, and histories are made when somebody needs one
        at_once = min(load.sequences, slab_rows(kind, model.vocab_size))
        logits += (DRAW_BYTES * at_once + HISTORY_BYTES * (load.sequences + 1)) * model.vocab_size
    more = _attention_on_cpu(model, load, ranks) if kind == "cpu" else 0
    return tokens * token + logits + more + _product(model, format, load, ranks, kind)


def _tokens(load: Load) -> int:
    """Tokens of the largest step."""
    return min(load.batch_tokens, load.sequences * load.length)


def _product(model: DecoderConfig, format: Format, load: Load, ranks: int, kind: str) -> int:
    if format.scheme is None:
        return 0
    most = 0
    for name, shape in _shapes(model, ranks).items():
        rows = min(_rows_multiplied(name, load), _tokens(load))
        if name in format.stored and len(shape) == 2 and rows:
            most = max(most, working_bytes(format.scheme, rows, (shape[0], shape[1]), format.dtype, kind))
    return most


def _rows_multiplied(name: str, load: Load) -> int:
    """With how many rows a step multiplies this weight: the head with each sequence's last; 0: it is looked up."""
    if name in ("head.weight", "embedding.tokens.weight"):
        return load.sequences
    return 0 if name.startswith("embedding.positions") else load.batch_tokens


def _attention_on_cpu(model: DecoderConfig, load: Load, ranks: int) -> int:
    keys = 2 * load.seen * (model.kv_heads // ranks) * model.head_size * 8
    alibi = model.positions == "alibi"
    scores = min(load.batch_tokens, load.length) * load.seen
    return keys + (4 * model.num_heads // ranks * scores + 9 * scores if alibi else 9 * scores)


# --- what each model gets ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A model that a server is to load.

    most_pages   that all its running sequences can use
    least_pages  without which none of them runs
    kv_bytes     asked for pages; None: a share of what is left
    """

    name: str
    need: Need
    most_pages: int
    least_pages: int = 2
    kv_bytes: int | None = None

    @property
    def pages(self) -> int | None:
        """Pages that were asked for."""
        return None if self.kv_bytes is None else min(self.need.pages_in(self.kv_bytes), self.most_pages)


@dataclass(frozen=True)
class Room:
    """A model's share on each rank: pages, and whether its weights may have second forms."""

    num_pages: int
    forms: bool


def share_out(asked: Sequence[Asked], free: int, device: str) -> list[Room]:
    """Divide `free` bytes of a rank among the models.  Raises UserError where they do not fit."""
    for one in asked:
        if one.kv_bytes is not None and one.kv_bytes < one.need.cache(one.least_pages):
            least = in_words(1.005 * one.need.cache(one.least_pages))  # and so no less, in three digits
            raise UserError(
                f"--engine.cache {in_words(one.kv_bytes)} holds no sequence of {one.name}; give at least {least}"
            )
    open_ended = sorted((one for one in asked if one.pages is None), key=lambda one: one.need.cache(one.most_pages))
    least_bytes = sum(one.need.cache(one.least_pages) for one in open_ended)
    left = free - sum(one.need.total(one.pages or 0) for one in asked)
    if left < least_bytes:
        raise UserError(_too_much(asked, free))
    forms = []
    for one in asked:
        forms.append(max(one.need.forms, least_bytes) <= left - one.need.forms)
        left -= one.need.forms if forms[-1] else 0
    more_bytes, given = max(int(_SHARE[torch.device(device).type] * left) - least_bytes, 0), {}
    for place, one in enumerate(open_ended):  # who can use less than an equal part leaves the others more
        equal = more_bytes // (len(open_ended) - place)
        least = one.need.cache(one.least_pages)
        given[one.name] = max(min(one.need.pages_in(least + equal), one.most_pages), one.least_pages)
        more_bytes -= one.need.cache(given[one.name]) - least
    return [Room(given[o.name] if o.pages is None else o.pages, f) for o, f in zip(asked, forms, strict=True)]


def _too_much(asked: Sequence[Asked], free: int) -> str:
    parts = [
        f"{one.name} {in_words(one.need.weights)} for its weights, "
        f"{in_words(one.need.cache(one.least_pages if one.pages is None else one.pages))} for "
        f"pages and {in_words(one.need.work)} for a step"
        for one in asked
    ]
    return (
        f"memory does not suffice: {in_words(free)} are free on a rank, and {', '.join(parts)} are needed there; "
        "serve over more ranks with --tp, in fewer bits with --quantize, or with less --engine.cache or "
        "--engine.max-batch-tokens"
    )


def free_bytes(device: str, axis: DeviceMesh | None = None) -> int:
    """Bytes that a rank may still take, of its GPU or its part of the host's: the least of the axis's ranks, on all."""
    if torch.device(device).type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = available_bytes() // (1 if axis is None else axis.size())
    if axis is None or axis.size() == 1:
        return free
    least = torch.tensor(free, dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=axis.get_group())
    return int(least)
