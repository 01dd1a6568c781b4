"""A linear layer and cross-entropy in one, without all logits: the loss over a vocabulary, or over a shard of it.

    loss = sum over tokens of  logsumexp - sum_v q_v logit_v + z_loss logsumexp^2,   logits = x W^T + b
    q = (1 - label_smoothing) onehot(target) + label_smoothing / vocab_size
    d loss / d logit_v = (1 + 2 z_loss logsumexp) exp(logit_v - logsumexp) - q_v

For each chunk of tokens:
1. logits = x W^T + b, in the dtype of the model; per token their maximum, sum of exponentials and sum_v q_v logit_v, in
   fp32 or wider (`CrossEntropyOfShard`).
2. `combine` turns these statistics of the vocabulary rows held here into those of all rows (one rank: nothing).
3. When a gradient is wanted: the logits become their gradient g in place, and feed dx = g W, dW += g^T x and
   db += sum of g over the tokens at once, so the backward only scales, and the forward's products are not repeated.

Beside the gradients of x and W, which any loss hands back, the peak is one chunk and the sum of dW over the chunks.
With weights of 16 bits that sum is in fp32, two further weights; where few tokens meet a wide model, fewer and larger
chunks, summed in the weight's own dtype, take less (`cut`): at most FEW_CHUNKS - 1 more roundings of dW.

A sum over tokens passes what fp16 holds, 65,504, long before the loss's mean over them does, and no scale of the loss
would help. So of fp16 the products that make dW are in fp32 too, dW stays so until the backward has scaled it, and is
rounded then.

The products are torch's. On a GPU, kernels read the logits once for the statistics, and read and write them once more
for the gradient; a row of any length is a loop over tiles with a running maximum. On a CPU the softmax of a tile of
tokens is taken while it is in a core's cache.

The idea is that of Wijmans et al., "Cut Your Losses" (2024), and Liger's fused linear cross-entropy. The z-loss is that
of Chowdhery et al., "PaLM" (2022), section 5; label smoothing that of Szegedy et al., "Rethinking the Inception
Architecture" (2016), section 7.

Shapes: N tokens, C tokens of a chunk, D model, V vocabulary rows held here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.compat import FakeTensor
from core.kernels import matmul
from core.kernels.blocks import Blocks
from core.kernels.language import tl, triton
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.spec import Case, KernelSpec, Traffic, drawing

# Logits of one chunk. Larger makes the products a little better, smaller keeps memory and page faults down.
CHUNK_BYTES = 64 << 20
# Logits worked on at a time on a CPU, counted in fp32.
TILE_BYTES = 1 << 20
# The weight's gradient added at a time.
SLAB_BYTES = 16 << 20
# Chunks whose products are summed in 16 bits rather than in fp32, where that takes less memory.
FEW_CHUNKS = 4
# Elements of 16 bits that a GPU's matrix units take at once, and to a multiple of which rows of logits are filled up.
_PIECE, _ROW = 8, 64

Statistics = tuple[Tensor, Tensor, Tensor]
Combine = Callable[[Tensor, Tensor, Tensor], Statistics]
"""(max, sum_exp, target_logit), each [C], over the rows held here -> the same over the whole vocabulary.

max and sum_exp satisfy max + log(sum_exp) = logsumexp. target_logit is the share of the rows held here in
sum_v q_v logit_v, so that it sums over the shards; without label smoothing the target's logit, 0 where it is not held.
"""
Product = Callable[[Tensor, Tensor], Tensor]
"""Matrix product a[M, K] b[K, N]."""
Show = Callable[[slice, Tensor], None]
"""(tokens, g[C, V]): the gradient of the sum of the losses by the logits of these tokens; it must stay as it is."""


@dataclass(frozen=True)
class Objective:
    """The sum over the tokens, and where the rows of the vocabulary that are held here begin.

    vocab_size    rows of the whole vocabulary; label smoothing spreads over them
    ignore_index  tokens of this target count nothing
    """

    vocab_size: int
    vocab_start: int = 0
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def q_target(self) -> float:
        """The target's q beyond that of the others."""
        return 1.0 - self.label_smoothing

    @property
    def q_each(self) -> float:
        return self.label_smoothing / self.vocab_size


def linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    combine: Combine | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    max_rows: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    product: Product = torch.matmul,
    show: Show | None = None,
) -> Tensor:
    """The sum of the tokens' losses; scalar, fp32 or wider. Gradients for x, weight and bias, made in the forward.

    bias         [V], added to the logits; None: none
    targets      [N] integers: rows of the whole vocabulary, or `ignore_index`
    combine      where the weight is a shard: see `Combine`
    vocab_start  the shard's first row; vocab_size: rows of the whole vocabulary (default: the weight's)
    max_rows     the most rows that any rank holds: cuts the tokens into chunks, alike on every rank
    product      multiplies matrices
    show         is shown the gradients of each chunk's logits, where there are gradients

    Raises ValueError when the shapes do not fit each other.
    """
    if x_ND.ndim != 2 or weight_VD.ndim != 2 or x_ND.shape[1] != weight_VD.shape[1] or weight_VD.shape[0] == 0:
        raise ValueError(
            f"linear_cross_entropy: x {list(x_ND.shape)} and weight {list(weight_VD.shape)}; they must be [N, D] and "
            "[V, D], V > 0"
        )
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise ValueError(f"linear_cross_entropy: bias {list(bias_V.shape)} for weight {list(weight_VD.shape)}")
    if targets_N.shape != x_ND.shape[:1]:
        raise ValueError(f"linear_cross_entropy: targets {list(targets_N.shape)} for x {list(x_ND.shape)}")
    num_rows = weight_VD.shape[0]
    objective = Objective(vocab_size or num_rows, vocab_start, ignore_index, label_smoothing, z_loss)
    chunk_tokens, sum_dtype = cut(len(x_ND), max_rows or num_rows, x_ND.shape[1], x_ND.dtype)
    arguments = x_ND, weight_VD, bias_V, targets_N, objective, combine, product, chunk_tokens, sum_dtype, show
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in arguments[:3]):
        return _LinearCrossEntropy.apply(*arguments)
    return _over_chunks(*arguments, with_gradients=False)[0]


def reference(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The same with all logits, for a whole vocabulary."""
    logits_NV = F.linear(x_ND, weight_VD).to(torch.promote_types(x_ND.dtype, torch.float32))
    loss = F.cross_entropy(
        logits_NV, targets_N, reduction="sum", ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    if z_loss == 0:
        return loss
    return loss + z_loss * (logits_NV.logsumexp(-1).square() * (targets_N != ignore_index)).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        loss, dx_ND, dweight_VD, dbias_V = _over_chunks(*arguments, with_gradients=True)
        ctx.save_for_backward(dx_ND, dweight_VD, dbias_V)
        ctx.dtype = arguments[1].dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dx_ND, dweight_VD, dbias_V = ctx.saved_tensors
        # In place: a second backward through the same graph is refused by autograd's version check.
        dx_ND, dweight_VD = dx_ND.mul_(grads[0]), dweight_VD.mul_(grads[0]).to(ctx.dtype)
        return dx_ND, dweight_VD, None if dbias_V is None else dbias_V.mul_(grads[0]).to(ctx.dtype), *[None] * 7


def _over_chunks(
    x_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    objective: Objective,
    combine: Combine | None,
    product: Product,
    chunk_tokens: int,
    sum_dtype: torch.dtype,
    show: Show | None,
    with_gradients: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(loss, its gradients by x, weight and bias); that by a weight in fp16 is in fp32, that by a bias always."""
    num_tokens = x_ND.shape[0]
    loss = x_ND.new_zeros((), dtype=torch.promote_types(x_ND.dtype, torch.float32))
    dx_ND = torch.empty_like(x_ND) if with_gradients else None
    vocabulary = _Vocabulary(weight_VD, product)
    dweight = _Sum(vocabulary, sum_dtype, in_parts=chunk_tokens < num_tokens)
    dbias_V = None if bias_V is None or not with_gradients else torch.zeros_like(bias_V, dtype=loss.dtype)
    for start in range(0, num_tokens, chunk_tokens):
        chunk = slice(start, min(start + chunk_tokens, num_tokens))
        x_CD, targets_C = x_ND[chunk], targets_N[chunk]
        logits_CV = vocabulary.logits(x_CD)
        logits_CV = logits_CV if bias_V is None else logits_CV.add_(bias_V)
        shard = cross_entropy_of_shard(logits_CV, targets_C, objective, padded=vocabulary.apart)
        del logits_CV
        logsumexp_C, target_C = shard.logsumexp_C, shard.statistics[2]
        if combine is not None:
            max_C, sum_C, target_C = combine(*shard.statistics)
            logsumexp_C = max_C + sum_C.log()
        loss_C = logsumexp_C - target_C + objective.z_loss * logsumexp_C.square()
        # Not in place: torch 2.11 compiles a sum in place in an autograd.Function to one whose gradient is zero.
        loss = loss + (loss_C * (targets_C != objective.ignore_index)).sum()
        if dx_ND is not None:
            g_CV = shard.gradients(logsumexp_C)
            if show is not None:
                show(chunk, g_CV)
            dx_ND[chunk] = vocabulary.input_gradient(g_CV)
            dweight.add(g_CV.T, x_CD)
            if dbias_V is not None:
                dbias_V += g_CV.sum(0, dtype=dbias_V.dtype)
            del g_CV
        del shard  # before the next chunk's logits are made
    return loss, dx_ND, dweight.total() if with_gradients else None, dbias_V


class _Vocabulary:
    """Products of a chunk with the rows of a vocabulary.

    A GPU's matrix units take 16 bits in pieces of 8, and a matrix that ends within one (GPT-2's 50,257 rows) by kernels
    that are six times slower, however its rows lie. So the few rows of the last piece are multiplied `apart`, and rows
    of logits begin where pieces do, filled up with -inf.
    """

    def __init__(self, weight_VD: Tensor, product: Product):
        self.weight_VD, self.product = weight_VD, product
        self.by_library = product in (torch.matmul, matmul.product) and _by_library(weight_VD)
        num_rows = len(weight_VD)
        self.apart = self.by_library and weight_VD.dtype.itemsize == 2 and num_rows % _PIECE != 0
        whole = num_rows - num_rows % _PIECE if self.apart else num_rows
        self.parts = [slice(start, stop) for start, stop in ((0, whole), (whole, num_rows)) if stop > start]

    def logits(self, x_CD: Tensor) -> Tensor:
        """[C, V]; where rows are taken apart a view of something wider."""
        if not self.apart:
            return self.product(x_CD, self.weight_VD.T)
        num_rows = len(self.weight_VD)
        room = x_CD.new_empty(len(x_CD), -(-num_rows // _ROW) * _ROW)
        room[:, num_rows:] = float("-inf")
        for rows in self.parts:
            torch.mm(x_CD, self.weight_VD[rows].T, out=room[:, rows])
        return room[:, :num_rows]

    def input_gradient(self, g_CV: Tensor) -> Tensor:
        if not self.apart:
            return self.product(g_CV, self.weight_VD)
        first, *others = self.parts
        dx_CD = torch.mm(g_CV[:, first], self.weight_VD[first])
        for rows in others:
            dx_CD.addmm_(g_CV[:, rows], self.weight_VD[rows])
        return dx_CD


class _Sum:
    """Sum of products a @ b of a vocabulary's shape, given back in the dtype of its weight; of fp16 in fp32.

    Several are summed in `dtype`: on a GPU by its library as it multiplies, elsewhere by slabs of rows, so that no
    second tensor of this size is alive.
    """

    def __init__(self, vocabulary: _Vocabulary, dtype: torch.dtype, in_parts: bool):
        self.vocabulary = vocabulary
        self.like = like = vocabulary.weight_VD
        self.product = vocabulary.product
        self.dtype = dtype
        self.overflows = like.dtype == torch.float16
        self.in_parts = in_parts or self.overflows
        self.value: Tensor | None = None

    def add(self, a: Tensor, b: Tensor) -> None:
        if not self.in_parts and not self.vocabulary.apart:
            self.value = self.product(a, b)
            return
        if self.value is None:
            self.value = torch.zeros_like(self.like, dtype=self.dtype if self.in_parts else self.like.dtype)
        if self.vocabulary.by_library:
            for rows in self.vocabulary.parts:
                _add_product(self.value[rows], a[rows], b)
            return
        slab_rows = max(1, SLAB_BYTES // (b.shape[1] * self.dtype.itemsize))
        for start in range(0, a.shape[0], slab_rows):
            slab = slice(start, start + slab_rows)
            self.value[slab].add_(wide_product(a[slab], b) if self.overflows else self.product(a[slab], b))

    def total(self) -> Tensor:
        dtype = self.dtype if self.overflows else self.like.dtype
        return torch.zeros_like(self.like, dtype=dtype) if self.value is None else self.value.to(dtype)


def _by_library(weight: Tensor) -> bool:
    """Return whether products go into what is there.

    A compiler knows none that writes into a part of a tensor, autocast lets those through as they are, and a quantized
    weight multiplies by itself.
    """
    if not weight.is_cuda or type(weight) not in (Tensor, nn.Parameter):
        return False
    return not torch.is_autocast_enabled("cuda") and not torch.compiler.is_compiling()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, added in its dtype; of 16 bits or what `total` has."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of fp16 in fp32: what the units that multiply fp16 sum in."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def cut(num_tokens: int, num_rows: int, dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """(tokens of a chunk, dtype in which the chunks' parts of the weight's gradient are summed).

    A function of sizes that all ranks share, so that all cut alike. Chunks are of CHUNK_BYTES and summed in fp32 or
    wider, unless the sum takes more than twice the memory of FEW_CHUNKS larger ones, which are summed in 16 bits; in
    bf16 alone, for fp16 has no room for sums over tokens.
    """
    wide = torch.promote_types(dtype, torch.float32)
    chunk = _even_part(num_tokens, CHUNK_BYTES // (num_rows * dtype.itemsize))
    few = max(chunk, _even_part(num_tokens, -(-num_tokens // FEW_CHUNKS)))
    if dtype in (wide, torch.float16) or 2 * few * dtype.itemsize > chunk * dtype.itemsize + dim * wide.itemsize:
        return chunk, wide
    return few, dtype


def _even_part(total: int, largest: int) -> int:
    """Size of the parts when `total` is cut into as few, nearly equal parts as `largest` allows."""
    num_parts = max(1, -(-total // max(1, largest)))
    return max(1, -(-total // num_parts))


# --- logits over the rows held here -----------------------------------------------------------------------------------


class CrossEntropyOfShard(Protocol):
    """The loss of a chunk of tokens from logits[C, V] over the rows of the vocabulary that are held here.

    statistics   of these rows: what `Combine` takes; fp32 or wider
    logsumexp_C  of these rows
    """

    statistics: Statistics
    logsumexp_C: Tensor

    def gradients(self, logsumexp_C: Tensor) -> Tensor:
        """g[C, V], the gradient of the summed loss by the logits, from the log-sum-exp of the whole vocabulary.

        In the memory of the logits, so once only.
        """
        ...


def cross_entropy_of_shard(
    logits_CV: Tensor, targets_C: Tensor, objective: Objective, padded: bool = False
) -> CrossEntropyOfShard:
    """The loss over a shard in two steps, between which the caller may reduce over ranks. Takes the logits' memory.

    padded  rows of logits go on with -inf up to where the next begins
    """
    if runs_kernel("cross_entropy_of_shard", logits_CV, unless=unsupported_dtype(logits_CV)):
        return _KernelShard(logits_CV, targets_C, objective, padded)
    return _TorchShard(logits_CV, targets_C, objective)


class _KernelShard:
    """By kernels: the logits stay until `gradients` is asked for."""

    def __init__(self, logits_CV: Tensor, targets_C: Tensor, objective: Objective, padded: bool):
        # Contiguous is what every product of ours and of torch's already is.
        self.logits_CV = logits_CV if padded else logits_CV.contiguous()
        self.targets_C, self.padded = targets_C.contiguous(), padded
        self.objective = o = objective
        self.statistics = _statistics(self.logits_CV, self.targets_C, o.vocab_start, o.q_target, o.q_each, padded)
        self.logsumexp_C = self.statistics[0] + self.statistics[1].log()

    def gradients(self, logsumexp_C: Tensor) -> Tensor:
        o = self.objective
        _turn_into_gradients(
            self.logits_CV, self.targets_C, logsumexp_C.contiguous(),
            o.vocab_start, o.ignore_index, o.q_target, o.q_each, o.z_loss, self.padded,
        )  # fmt: skip
        return self.logits_CV


class _TorchShard:
    """By torch: the logits become softmax over the rows held here (0 where the token does not count) at once."""

    def __init__(self, logits_CV: Tensor, targets_C: Tensor, objective: Objective):
        self.logits_CV, self.objective = logits_CV, objective
        dtype, num_rows = torch.promote_types(logits_CV.dtype, torch.float32), logits_CV.shape[1]
        columns_C1 = (targets_C - objective.vocab_start)[:, None]
        self.columns_C1 = columns_C1.clamp(0, num_rows - 1)
        self.held_C1 = (columns_C1 >= 0) & (columns_C1 < num_rows)
        self.counted_C = (targets_C != objective.ignore_index).to(dtype)
        self.target_C = logits_CV.gather(1, self.columns_C1).to(dtype).masked_fill(~self.held_C1, 0.0).squeeze(1)
        target_C = self.target_C
        if objective.label_smoothing:
            target_C = objective.q_target * target_C + objective.q_each * logits_CV.sum(1, dtype=dtype)
        max_C, sum_C = _softmax_(logits_CV, self.counted_C)
        self.statistics = max_C, sum_C, target_C
        self.logsumexp_C = max_C + sum_C.log()

    def gradients(self, logsumexp_C: Tensor) -> Tensor:
        g_CV, objective = self.logits_CV, self.objective
        scale_C = 1 + 2 * objective.z_loss * logsumexp_C
        if logsumexp_C is not self.logsumexp_C or objective.z_loss:
            rescale_C = (self.logsumexp_C - logsumexp_C).exp() * scale_C
            g_CV.mul_(rescale_C.to(g_CV.dtype)[:, None])
        if objective.label_smoothing:
            g_CV.sub_((objective.q_each * self.counted_C).to(g_CV.dtype)[:, None])
        # The target's from its logit: softmax - 1 is rounded once.
        at_target_C = (self.target_C - logsumexp_C).exp() * scale_C - objective.q_target - objective.q_each
        at_target_C1 = (at_target_C * self.counted_C).to(g_CV.dtype)[:, None]
        at_target_C1 = torch.where(self.held_C1, at_target_C1, g_CV.gather(1, self.columns_C1))
        g_CV[torch.arange(len(g_CV), device=g_CV.device), self.columns_C1[:, 0]] = at_target_C1[:, 0]
        return g_CV


def _softmax_(logits_CV: Tensor, factor_C: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits into factor * softmax, computed in the factor's dtype; returns (max[C], sum_exp[C]) of the logits.

    Goes over tiles of rows: on a CPU a tile and its softmax stay in the cache of a core; elsewhere there is one tile.
    """
    (num_tokens, width), dtype = logits_CV.shape, factor_C.dtype
    on_cpu = logits_CV.device.type == "cpu"
    tile_tokens = _even_part(num_tokens, TILE_BYTES // (width * dtype.itemsize)) if on_cpu else num_tokens
    wide_TV, softmax_TV = logits_CV.new_empty(2, tile_tokens, width, dtype=dtype)
    max_C, largest_C = logits_CV.new_empty(2, num_tokens, dtype=dtype)
    _softmax_tiles(logits_CV, factor_C, wide_TV, softmax_TV, max_C, largest_C)
    return max_C, largest_C.reciprocal_()  # the largest probability is exp(max - max) / sum_exp


@operator("softmax_tiles", mutates=("logits_CV", "wide_TV", "softmax_TV", "max_C", "largest_C"))
def _softmax_tiles(
    logits_CV: Tensor, factor_C: Tensor, wide_TV: Tensor, softmax_TV: Tensor, max_C: Tensor, largest_C: Tensor
) -> None:
    """One operator, since tiles are thousands in a step: a plan, which traces several, would take minutes over them."""
    if isinstance(logits_CV, FakeTensor):
        return
    for start in range(0, len(logits_CV), len(wide_TV)):
        tile = slice(start, start + len(wide_TV))
        logits_TV = logits_CV[tile]
        wide = logits_TV if logits_TV.dtype == wide_TV.dtype else wide_TV[: len(logits_TV)].copy_(logits_TV)
        softmax = torch.softmax(wide, -1, out=softmax_TV[: len(logits_TV)])
        torch.amax(wide, -1, out=max_C[tile])
        torch.amax(softmax, -1, out=largest_C[tile])
        logits_TV.copy_(softmax.mul_(factor_C[tile, None]))


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _cross_entropy_statistics(
    logits, targets, maximum, sum_exp, target_logit, length, width, vocab_start, q_target, q_each,
    BLOCK: tl.constexpr, SMOOTHED: tl.constexpr,
):  # fmt: skip
    """A row a program; the running maximum is one number, so an element costs one exponential.

    width: of the rows, with what they are filled up by; a multiple of 16 lets accesses be wide
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    highest = float("-inf")
    sums = tl.zeros((BLOCK,), tl.float32)
    plain_sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < width, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
        sums = sums * tl.exp(highest - shift) + tl.exp(x - shift)
        highest = higher
        if SMOOTHED:
            plain_sums += tl.where(column < length, x, 0.0)
    tl.store(maximum + row, highest)
    tl.store(sum_exp + row, tl.sum(sums, 0))
    column = tl.load(targets + row) - vocab_start
    held = (column >= 0) & (column < length)
    chosen = q_target * tl.load(logits + tl.where(held, column, 0), mask=held, other=0.0).to(tl.float32)
    if SMOOTHED:
        chosen += q_each * tl.sum(plain_sums, 0)
    tl.store(target_logit + row, chosen)


@triton.jit
def _cross_entropy_gradients(
    logits, targets, logsumexp, width, vocab_start, ignore_index, q_target, q_each, z_loss, BLOCK: tl.constexpr
):
    """A tile of a row a program; what a row is filled up by is written, too, and not read."""
    num_tiles = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    column = tl.program_id(0) % num_tiles * BLOCK + tl.arange(0, BLOCK)
    logits += row * width
    target, whole = tl.load(targets + row), tl.load(logsumexp + row)
    place = target - vocab_start
    place = tl.where((place >= 0) & (place < width), place, -1).to(tl.int32)  # comparisons in 64 bits cost registers
    x = tl.load(logits + column, mask=column < width, other=float("-inf")).to(tl.float32)
    g = tl.exp(x - whole) * (1.0 + 2.0 * z_loss * whole) - q_each
    g = tl.where(column == place, g - q_target, g)
    g = tl.where(target != ignore_index, g, 0.0)
    tl.store(logits + column, g, mask=column < width)


# --- operators --------------------------------------------------------------------------------------------------------


@operator("cross_entropy_statistics")
def _statistics(
    logits_CV: Tensor, targets_C: Tensor, vocab_start: int, q_target: float, q_each: float, padded: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(max, sum_exp, target_logit), each [C]; of contiguous logits, or of padded ones."""
    num_tokens, length = logits_CV.shape
    max_C, sum_C, target_C = (torch.empty(num_tokens, dtype=torch.float32, device=logits_CV.device) for _ in range(3))
    if launches(logits_CV):
        _cross_entropy_statistics[(num_tokens,)](
            logits_CV, targets_C, max_C, sum_C, target_C, length, _width(logits_CV, padded), vocab_start, q_target,
            q_each, SMOOTHED=q_each != 0, **_row_blocks(num_tokens, length),
        )  # fmt: skip
    return max_C, sum_C, target_C


@operator("cross_entropy_gradients", mutates=("logits_CV",))
def _turn_into_gradients(
    logits_CV: Tensor, targets_C: Tensor, logsumexp_C: Tensor,
    vocab_start: int, ignore_index: int, q_target: float, q_each: float, z_loss: float, padded: bool = False,
) -> None:  # fmt: skip
    if launches(logits_CV):
        width, blocks = _width(logits_CV, padded), _blocks(logits_CV.shape[1])
        _cross_entropy_gradients[(len(logits_CV) * triton.cdiv(width, blocks["BLOCK"]),)](
            logits_CV, targets_C, logsumexp_C, width, vocab_start, ignore_index, q_target, q_each, z_loss, **blocks
        )


def _width(logits_CV: Tensor, padded: bool) -> int:
    return logits_CV.stride(0) if padded else logits_CV.shape[1]


def _blocks(length: int) -> Blocks:
    """16 elements a thread, and so few threads that several programs share a multiprocessor: while one waits for its
    maximum the others' loads are under way."""
    block = min(4096, triton.next_power_of_2(length))
    return {"BLOCK": block, "num_warps": max(4, block // 512)}


def _row_blocks(num_rows: int, length: int) -> Blocks:
    """Of programs that take a row: the widest of which 132 multiprocessors run all at once, 2, 5 or 10 on each for
    their registers. A second round for a few rows would cost as much as the first."""
    block = min(8192 if num_rows <= 264 else 4096 if num_rows <= 660 else 2048, triton.next_power_of_2(length))
    return {"BLOCK": block, "num_warps": max(4, block // 512)}


# --- specs ------------------------------------------------------------------------------------------------------------


def _inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    N, D, V = (case[name] for name in "NDV")

    draw = drawing(torch.float32, device, generator)
    inputs = {
        "x_ND": draw(N, D).to(dtype),
        "weight_VD": (draw(V, D) / D**0.5).to(dtype),
        "targets_N": _targets(N, V, generator).to(device),
    }
    return inputs | {name: case[name] for name in ("label_smoothing", "z_loss") if name in case}


def _targets(num_tokens: int, num_rows: int, generator: torch.Generator) -> Tensor:
    targets = torch.randint(0, num_rows, (num_tokens,), generator=generator)
    targets[2::3] = -100
    return targets


def _traffic(case: Case, dtype: torch.dtype) -> Traffic:
    """The gradients are made in the forward; the backward scales them."""
    N, D, V = (case[name] for name in "NDV")
    return Traffic(2 * dtype.itemsize * (N + V) * D, 2 * dtype.itemsize * (N + V) * D, 6 * N * D * V, (N + V) * D)


def _shard_in_full(
    logits_CV: Tensor, targets_C: Tensor, above: float, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(max, sum_exp, target_logit, g), where the whole vocabulary has a log-sum-exp greater by `above`."""
    shard = cross_entropy_of_shard(logits_CV.clone(), targets_C, Objective(**options))
    return *shard.statistics, shard.gradients(shard.logsumexp_C + above)


def _shard_in_place(logits_CV: Tensor, targets_C: Tensor, above: float, **options: Any) -> Tensor:
    shard = cross_entropy_of_shard(logits_CV, targets_C, Objective(**options))
    return shard.gradients(shard.logsumexp_C + above)


def _shard_reference(
    logits_CV: Tensor, targets_C: Tensor, above: float, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, term by term."""
    o, dtype = Objective(**options), logits_CV.dtype
    logits_CV = logits_CV.to(torch.promote_types(dtype, torch.float32))
    rows_V = torch.arange(logits_CV.shape[1], device=logits_CV.device) + o.vocab_start
    q_CV = o.q_target * (targets_C[:, None] == rows_V).to(logits_CV.dtype) + o.q_each
    max_C = logits_CV.amax(-1)
    sum_C = (logits_CV - max_C[:, None]).exp().sum(-1)
    whole_C1 = (max_C + sum_C.log() + above)[:, None]
    g_CV = (1 + 2 * o.z_loss * whole_C1) * (logits_CV - whole_C1).exp() - q_CV
    g_CV = g_CV * (targets_C != o.ignore_index)[:, None]
    return max_C, sum_C, (q_CV * logits_CV).sum(-1), g_CV.to(dtype)


def _shard_inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    C, V, start = case["C"], case["V"], case.get("vocab_start", 0)
    logits = 3 * drawing(torch.float32, device, generator)(C, V)
    whole = start + V + case.get("behind", 0)
    inputs = {
        "logits_CV": logits.to(dtype),
        "targets_C": _targets(C, whole, generator).to(device),
        "above": 0.5,
        "vocab_size": whole,
        "vocab_start": start,
    }
    return inputs | {name: case[name] for name in ("label_smoothing", "z_loss") if name in case}


def _shard_traffic(case: Case, dtype: torch.dtype) -> Traffic:
    """Two reads and a write of the logits."""
    return Traffic(3 * dtype.itemsize * case["C"] * case["V"], 0, 8 * case["C"] * case["V"])


SPECS = (
    KernelSpec(
        name="linear_cross_entropy",
        function=linear_cross_entropy,
        reference=reference,
        inputs=_inputs,
        grads=("x_ND", "weight_VD"),
        cases=(
            {"N": 7, "D": 16, "V": 1000, "label_smoothing": 0.1, "z_loss": 1e-2},
            {"N": 3, "D": 5, "V": 9000},
            {"N": 63, "D": 3, "V": 100, "z_loss": 1e-2},
            {"N": 1, "D": 1, "V": 1},
            {"N": 0, "D": 4, "V": 3},
        ),
        space={"N": range(1, 30), "D": range(1, 20), "V": range(2, 300), "label_smoothing": (0.0, 0.2),
               "z_loss": (0.0, 1e-2)},
        timed=(
            {"N": 8192, "D": 768, "V": 50_257},
            {"N": 8192, "D": 2048, "V": 32_000, "label_smoothing": 0.1, "z_loss": 1e-4},
            {"N": 4096, "D": 4096, "V": 128_256},
        ),
        # fp32: products, exponentials and their sums, a few roundings each, of logits up to 4. In 16 bits the logits
        # are rounded (2^-9 of bf16, 2^-12 of fp16; of 4: 2^-7 of a probability), their gradient, and the result.
        tolerance={torch.float32: 4e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3},
        traffic=_traffic,
        gradcheck={"N": 4, "D": 2, "V": 5, "label_smoothing": 0.1, "z_loss": 1e-2},
        alone=("targets_N",),
    ),
    KernelSpec(
        name="cross_entropy_of_shard",
        function=_shard_in_full,
        reference=_shard_reference,
        inputs=_shard_inputs,
        cases=(
            {"C": 7, "V": 1000, "vocab_start": 200, "behind": 300, "label_smoothing": 0.1, "z_loss": 1e-2},
            {"C": 5, "V": 20_001, "vocab_start": 3},  # three tiles: the running maximum moves
            {"C": 63, "V": 100, "behind": 100},
            {"C": 1, "V": 1},
            {"C": 0, "V": 7},
        ),
        space={"C": range(1, 30), "V": range(1, 300), "vocab_start": (0, 40), "behind": (0, 70),
               "label_smoothing": (0.0, 0.2), "z_loss": (0.0, 1e-2)},
        timed=({"C": 667, "V": 50_257}, {"C": 261, "V": 128_256, "label_smoothing": 0.1, "z_loss": 1e-4}),
        # The statistics are in fp32; the gradient is rounded once, relative to at most its largest element.
        tolerance={torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        traffic=_shard_traffic,
        alone=("targets_C",),
        in_place=(_shard_in_place, _shard_reference),
    ),
)  # fmt: skip
