"""One launch for a list of tensors: what the optimizers' kernels share.

A launch gets two small integer tensors: a `table`, one row of pointers and sizes a tensor, and `owners`, the tensor's
row for each program. A program reads its owner, then its row. Both are cached: sizes do not change between steps, and
pointers seldom do.

Also here: rounding to bf16 at random, so that updates smaller than half of the last bit count on average
(Gupta et al. 2015, arXiv:1502.02551).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from core.kernels.language import tl, triton

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@lru_cache(maxsize=256)
def table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """int64 [tensors, columns] on the device."""
    return _sent(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)


@lru_cache(maxsize=256)
def owners(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [programs]: counts[i] programs work on tensor i."""
    repeats = torch.tensor(counts, dtype=torch.int64, device="cpu")
    numbers = torch.arange(len(counts), dtype=torch.int32, device="cpu")
    return _sent(numbers.repeat_interleave(repeats, output_size=sum(counts)), device)


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """On the device, without a wait: what gradients' addresses are part of goes in every step in which these differ."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def starts(counts: Sequence[int]) -> list[int]:
    """The begin of each tensor's share of a launch."""
    found = [0]
    for count in counts:
        found.append(found[-1] + count)
    return found[:-1]


def aligned(tensors: Iterable[Tensor]) -> bool:
    """Return whether the chip can read 16 bytes at once from every pointer."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def write_back(tensors: Iterable[Tensor], worked_on: Iterable[Tensor]) -> None:
    """Copy results into the tensors of which a kernel took contiguous copies."""
    for tensor, copy in zip(tensors, worked_on):
        if copy is not tensor:
            tensor.copy_(copy)


def on_clones(update: Callable[..., None], kinds: tuple[str, ...], inputs: dict) -> tuple[Tensor, ...]:
    """An update in place as a function, for a SPEC: keywords such as param_0 and grad_0 in, all but gradients out, new.

    kinds  of the lists that `update` takes, in its order; what one of them lacks for a parameter is None
    """
    changed = {n: t.clone() for n, t in inputs.items() if n[-1].isdigit() and not n.startswith("grad_")}
    on_keywords(update, kinds, **inputs | changed)
    return tuple(changed.values())


def on_keywords(update: Callable[..., None], kinds: tuple[str, ...], /, **inputs) -> None:
    """The update itself, of keywords such as param_0 and grad_0."""
    tensors = {n: t for n, t in inputs.items() if n[-1].isdigit()}
    options = {n: v for n, v in inputs.items() if n not in tensors}
    indices = sorted({int(n.rpartition("_")[2]) for n in tensors})
    update(*([tensors.get(f"{kind}_{i}") for i in indices] for kind in kinds), **options)


def rounded_at_random(x: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 -> bf16, up with the probability of the part that is cut off; infinities and NaN stay."""
    bits = x.float().contiguous().view(torch.int32)
    added = torch.randint(0, 1 << 16, bits.shape, generator=generator, device=x.device, dtype=torch.int32)
    rounded = ((bits + added) & -(1 << 16)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x.float()).bfloat16()


@triton.jit
def pointer_at(row, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in an element of the table."""
    pointer = tl.load(row).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def count_at(row, ALIGNED: tl.constexpr):
    """A number of elements in the table; a multiple of 16 where aligned, so that no mask splits an access."""
    count = tl.load(row)
    if ALIGNED:
        count = tl.multiple_of(count, 16)
    return count


@triton.jit
def store_rounded(pointer, x, inside, lane, seed, stream, TYPE: tl.constexpr, AT_RANDOM: tl.constexpr):
    """Store fp32 as TYPE; at random where asked (bf16). `lane` numbers elements in a program, `stream` programs.

    A word a program comes from Philox, a word an element from it by the finaliser of MurmurHash3: Philox for every
    element would need more integer operations than the chip has while it moves the element.
    """
    if AT_RANDOM:
        word = lane.to(tl.uint32) ^ tl.randint(seed, stream).to(tl.uint32)
        word = (word ^ (word >> 16)) * 0x85EBCA6B
        word = (word ^ (word >> 13)) * 0xC2B2AE35
        word = word ^ (word >> 16)
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (((bits + (word >> 16)) >> 16) << 16).to(tl.float32, bitcast=True)
        finite = ((bits >> 23) & 0xFF) != 0xFF
        x = tl.where(finite, rounded, x)
    tl.store(pointer, x.to(TYPE), mask=inside)
