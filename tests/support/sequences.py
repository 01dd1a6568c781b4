"""Attention modules and small models on shards of a sequence, and the same on one rank."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core.comm.volume import count_volume
from core.mesh import MeshConfig, build_mesh, split_axis
from core.nn.attention import Attention, StepContext, attend, attend_both_ways
from core.parallel.context import SequenceCut, ShardedContext
from core.parallel.ring import ring_attention
from core.parallel.ulysses import ulysses_attention
from tests.support.training import removed


@dataclass(frozen=True)
class AttentionCase:
    """One attention over one sequence. exchange: of the ranks, those that exchange heads (1: a ring; all: Ulysses)."""

    exchange: int = 1
    causal: bool = True
    length: int = 13
    num_heads: int = 6
    num_kv_heads: int = 6
    batch: int = 2
    head_size: int = 4
    documents: bool = False
    padding: bool = False
    alibi: bool = False
    zigzag: bool = True


@dataclass(frozen=True)
class Drawn:
    module: Attention
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    documents: Tensor | None
    mask: Tensor | None
    positions: Tensor


def drawn(case: AttentionCase) -> Drawn:
    """Inputs in fp64, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    size = case.num_heads * case.head_size

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    with torch.device("meta"):
        module = Attention(size, case.num_heads, case.num_kv_heads, case.head_size, bias=False)
    B, L, H, J, K = case.batch, case.length, case.num_heads, case.num_kv_heads, case.head_size
    starts = torch.rand(B, L, generator=generator) < 0.3
    mask = torch.ones(B, L, dtype=torch.long)
    mask[0, : L // 4] = 0  # in front
    mask[-1, L - L // 3 :] = 0  # behind
    return Drawn(
        module, draw(B, L, H, K), draw(B, L, J, K), draw(B, L, J, K), draw(B, L, H, K),
        starts.cumsum(1) if case.documents else None, mask if case.padding else None, torch.arange(L)[None],
    )  # fmt: skip


def slopes_of(case: AttentionCase) -> Tensor | None:
    return torch.linspace(0.1, 0.9, case.num_heads, dtype=torch.float64) if case.alibi else None


def on_one_rank(case: AttentionCase) -> list[Tensor]:
    """[o, dq, dk, dv] of the whole sequence."""
    inputs = drawn(case)
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    whole = attend if case.causal else attend_both_ways
    o = whole(
        *leaves, slopes=slopes_of(case), mask=inputs.mask, positions=inputs.positions,
        context=StepContext(inputs.documents),
    )  # fmt: skip
    return [o.detach(), *torch.autograd.grad(o, leaves, inputs.do)]


def attend_over(axis: DeviceMesh, case: AttentionCase) -> Callable[..., Tensor]:
    if case.exchange == 1:
        return ring_attention(axis, causal=case.causal)
    if case.exchange == axis.size():
        return ulysses_attention(axis, attend if case.causal else attend_both_ways)
    ring, exchange = split_axis(axis, case.exchange, ("cp_ring", "cp_ulysses"))
    return ulysses_attention(exchange, ring_attention(ring, causal=case.causal), ring)


def on_shards(case: AttentionCase) -> tuple[list[Tensor], dict[str, tuple[int, int]]]:
    """[o, dq, dk, dv], joined, and what was sent."""
    mesh = build_mesh(MeshConfig(cp=dist.get_world_size()).resolve(dist.get_world_size()), "cpu")
    axis, inputs = mesh["cp"], drawn(case)
    zigzag = case.zigzag and case.causal and case.exchange != axis.size()
    cut = SequenceCut(case.length, axis.size(), zigzag)
    take: Callable[[Tensor], Tensor] = partial(cut.take, dim=1, rank=axis.get_local_rank())
    leaves = [take(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    whole = StepContext(inputs.documents)
    context: Any = ShardedContext(cut, inputs.documents, inputs.mask, inputs.positions, whole)
    over = attend_over(axis, case)
    with count_volume(mesh) as volume:
        o = over(*leaves, slopes=slopes_of(case), mask=None, positions=take(inputs.positions), context=context)
        grads = torch.autograd.grad(o, leaves, take(inputs.do))
    found = []
    for x in (o.detach(), *grads):
        parts = [torch.empty_like(x) for _ in range(axis.size())]
        dist.all_gather(parts, x.contiguous(), group=axis.get_group())
        found.append(cut.join(parts, 1))
    return found, {f"{op}/{name}": (n, volume.bytes[op, name]) for (op, name), n in volume.calls.items()}


def differences(
    cases: list[AttentionCase], without: str | None = None
) -> list[tuple[float, dict[str, tuple[int, int]]]]:
    """For each case the largest difference from one rank of output and input gradients, relative; and what was sent.

    without  a function of torch.distributed that sends nothing
    """
    answers = []
    for case in cases:
        with removed("core.comm.collectives", without) if without else nullcontext():
            found, sent = on_shards(case)
        pairs = zip(found, on_one_rank(case), strict=True)
        answers.append((max(float((a - b).norm() / max(float(b.norm()), 1.0)) for a, b in pairs), sent))
    return answers
