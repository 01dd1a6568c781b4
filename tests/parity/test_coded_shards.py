"""ZeRO++: ranks are a simulation in one process that rounds in the same places, in fp64, on rows that do not divide."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.checkpoint import CheckpointConfig
from core.comm.block_code import RoundedCode
from core.comm.coded_rows import CodedRows, gather_coded, sum_coded
from core.comm.volume import count_volume
from core.compose import ParallelConfig, parallelize
from core.config import UserError
from core.layout import full_tensor
from core.mesh import MeshConfig, Zero, build_mesh
from core.metrics import read_metrics
from core.models.decoder import DecoderConfig
from core.optim.build import OptimConfig, build_optimizer
from core.optim.clip import scale_gradients
from core.parallel.coded_shards import CodedErrors, CodedShards
from core.parallel.compress import CommConfig
from core.train import TrainConfig
from tests.parity.test_resume import gone_on_to_the_bit
from tests.parity.test_train import GPT2, LLAMA, TOLERANCE
from tests.support.small import config_of, train
from tests.support.training import Case, largest_difference, run

STEPS = 4


class Rows(nn.Module):
    """Matrices whose rows deal unevenly, more of them than a block in some, a stack, vectors and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.blocks = nn.ModuleList(Block(draw) for _ in range(2))
        self.inward = nn.Parameter(torch.randn(23, 6, generator=draw, dtype=torch.float64))
        self.factor = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.unused = nn.Parameter(torch.randn(5, 5, generator=draw, dtype=torch.float64))
        self.seldom = nn.Parameter(torch.randn(6, 6, generator=draw, dtype=torch.float64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        is_seldom = len(x) == 3
        x = x @ self.inward
        if is_seldom:
            x = x @ self.seldom
        for block in self.blocks:
            x = x + block(x)
        return (self.factor * x).square().sum()


class Block(nn.Module):
    def __init__(self, draw: torch.Generator) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(6, 101, generator=draw, dtype=torch.float64) / 3)
        self.bias = nn.Parameter(torch.randn(101, generator=draw, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(101, 6, generator=draw, dtype=torch.float64) / 9)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up + self.bias) @ self.down


def data(step: int, rank: int, microbatch: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + 10 * rank + microbatch)
    return torch.randn(2 + step % 2, 23, generator=draw, dtype=torch.float64) / 4


OPTIM = OptimConfig("adamw", lr=0.01)


def trained(
    comm: CommConfig, zero: Zero, num_microbatches: int, looks: bool = False, scale: float = 1.0
) -> dict[str, Any]:
    """On ranks: parameters and losses, and what the last step has sent.

    looks  between two steps at a loss of other weights, which then go
    scale  of the loss; another than 1, and before each step one that overflows is skipped
    """
    mesh = build_mesh(MeshConfig().resolve(dist.get_world_size(), zero), "cpu")
    parallel = parallelize(Rows(), mesh, ParallelConfig(zero=zero, precision="fp64", comm=comm))
    optimizer, losses = build_optimizer(OPTIM, parallel.masters), []
    for step in range(STEPS):
        with count_volume(mesh) as volume:
            given = [data(step, dist.get_rank(), m) for m in range(num_microbatches)]
            if scale != 1.0:
                parallel.run([x * math.inf for x in given], lambda x: parallel.model(x), scale)
                parallel.reduce()
                parallel.skip()
                parallel.release()
            total = parallel.run(given, lambda x: parallel.model(x), scale)
            parallel.reduce()
            scale_gradients(parallel.masters.values(), 1 / scale)
            dist.all_reduce(total)
            losses.append(float(total))
            parallel.update(optimizer)
            parallel.publish()
            parallel.release()
        if looks:
            for factor in (2.0, 0.5):
                with torch.no_grad():
                    losses.append(float(parallel.model(data(step, 0, 0))))
                    for master in parallel.masters.values():
                        master.mul_(factor)
                parallel.publish()
    return {
        "masters": {n: full_tensor(m).detach() for n, m in parallel.masters.items()},
        "losses": losses,
        "bytes": dict(volume.bytes),
    }


def rounded(x: Tensor, bits: int) -> Tensor:
    """Every block of 256 elements, or of 64 in 4 bits, of a flat tensor by itself."""
    size = {8: 256, 4: 64}[bits]
    code, found = RoundedCode(bits, size), x.clone()
    for first in range(0, len(x), size):
        piece = x[first : first + size]
        block = piece.new_zeros(1, size)
        block[0, : len(piece)] = piece
        found[first : first + size] = code.decode(code.encode(block), x.dtype)[0, : len(piece)]
    return found


def by_rank(x: Tensor, ranks: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change each rank's rows, flat."""
    if x.ndim < 2:
        return x
    return torch.cat([change(rows.flatten()).view_as(rows) for rows in x.chunk(ranks)])


def simulated(comm: CommConfig, ranks: int, num_microbatches: int) -> dict[str, Any]:
    """The same of one process: exact masters; weights rounded by rank; sums by node, rounded before each hop."""
    bits = {"int8": 8, "int4": 4}
    masters = {n: p.detach().clone().requires_grad_() for n, p in Rows().named_parameters()}
    model = Rows()
    optimizer, losses = build_optimizer(OPTIM, masters), []
    errors = {name: [torch.zeros_like(p) for _ in range(ranks)] for name, p in Rows().named_parameters()}
    for step in range(STEPS):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                value = masters[name].detach()
                change = partial(rounded, bits=bits[comm.weights]) if comm.weights else Tensor.clone
                parameter.copy_(by_rank(value, ranks, change))
        of_ranks, total = [], 0.0
        for rank in range(ranks):
            model.zero_grad()
            for microbatch in range(num_microbatches):
                value = model(data(step, rank, microbatch))
                value.backward()
                total += float(value.detach())
            of_ranks.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        losses.append(total)
        for name, master in masters.items():
            grads = [one[name] for one in of_ranks]
            master.grad = None if grads[0] is None else summed(grads, comm, ranks, bits, errors[name])
        optimizer.step()
    return {"masters": masters, "losses": losses}


def summed(
    grads: list[Tensor], comm: CommConfig, ranks: int, bits: dict[str, int], errors: list[Tensor]
) -> Tensor:  # fmt: skip
    """errors: what each rank has left out, which goes along with feedback"""
    if comm.gradients is None:
        return sum(grads[1:], grads[0])
    change = partial(rounded, bits=bits[comm.gradients])

    def sent(x: Tensor) -> Tensor:
        return by_rank(x, ranks, change)

    if comm.feedback:
        grads = [grad + error for grad, error in zip(grads, errors, strict=True)]
        errors[:] = [grad - sent(grad) for grad in grads]
    if comm.node > 1:
        grads = [sent(one) for one in grads]
        grads = [sum(grads[n + 1 : n + comm.node], grads[n]) for n in range(0, ranks, comm.node)]
        for node, grad in enumerate(grads if comm.feedback and len(grads) > 1 else ()):
            for row, lost in enumerate((grad - sent(grad)).chunk(ranks) if grad.ndim > 1 else ()):
                own = errors[node * comm.node + row % comm.node]  # the rank that sends these rows to other nodes
                own.chunk(ranks)[row].add_(lost)
    if len(grads) > 1:
        grads = [sent(one) for one in grads]
    return sum(grads[1:], grads[0])


ALL = CommConfig(weights="int8", gradients="int4")
CASES = {
    "int8 and int4": (2, ALL, 3, 1),
    "three ranks": (3, ALL, 3, 2),
    "nodes": (4, replace(ALL, node=2, secondary=True), 3, 2),
    "int4 weights, zero 2": (3, CommConfig(weights="int4"), 2, 1),
    "zero 1": (4, replace(ALL, node=2), 1, 2),
    "feedback": (3, replace(ALL, feedback=True), 3, 2),
    "feedback, nodes": (4, replace(ALL, node=2, feedback=True, secondary=True), 3, 1),
    "feedback, one node": (2, replace(ALL, node=2, feedback=True), 3, 1),
    "feedback, zero 2": (3, replace(ALL, feedback=True), 2, 1),
    "feedback, zero 1, nodes": (4, replace(ALL, node=2, feedback=True), 1, 2),
}


@pytest.mark.parametrize("node", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_second_copy_is_zero_3_to_the_bit(ranks, node: int) -> None:
    """It is never that of weights of before, of an evaluation's or of a step's."""
    copied = CommConfig(secondary=True, node=node)
    plain, found = (ranks(4).run(trained, comm, 3, 2, looks=True)[0] for comm in (CommConfig(), copied))
    assert found["losses"] == plain["losses"]
    for key, value in plain["masters"].items():
        assert torch.equal(found["masters"][key], value), key


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_a_simulation(ranks, name: str) -> None:
    num_ranks, comm, zero, num_microbatches = CASES[name]
    found = ranks(num_ranks).run(trained, comm, zero, num_microbatches)[0]
    expected = simulated(comm, num_ranks, num_microbatches)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
    for key, value in expected["masters"].items():
        torch.testing.assert_close(found["masters"][key], value.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("zero", [2, 3])
def test_skipped_steps_leave_errors_and_scales_do_not_count(ranks, zero: Zero) -> None:
    comm = CommConfig(gradients="int4", feedback=True)
    found, expected = ranks(2).run(trained, comm, zero, 1, False, 1024.0)[0], simulated(comm, 2, 1)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)


@pytest.mark.parametrize(
    ("size", "mesh", "model"),
    [
        (4, MeshConfig(tp=2), LLAMA),
        pytest.param(4, MeshConfig(pp=2), GPT2, marks=pytest.mark.soak),
        pytest.param(4, MeshConfig(cp=2), GPT2, marks=pytest.mark.soak),
        pytest.param(4, MeshConfig(dp_replicate=2), GPT2, marks=pytest.mark.soak),
    ],
)
def test_a_second_copy_beside_other_forms(ranks, size: int, mesh: MeshConfig, model: DecoderConfig) -> None:
    comm = CommConfig(secondary=True, node=mesh.cp)
    case = Case(model, mesh=mesh, parallel=ParallelConfig(3, "fp64", comm=comm), microbatch=2)
    alone = replace(case, mesh=MeshConfig(), parallel=ParallelConfig(precision="fp64"), microbatch=None)
    found, where = largest_difference(ranks(size).run(run, case), ranks(1).run(run, alone)[0], case.steps)
    assert found <= TOLERANCE, f"{where} differs by {found:.3g}"


CODED_CONFIG = {"comm": replace(ALL, report_every=2), "zero": 3}


@pytest.mark.parametrize(
    ("size", "options"),
    [(2, {"precision": "bf16"}), pytest.param(4, {"mesh": MeshConfig(pp=2)}, marks=pytest.mark.soak)],
)
def test_resumed_to_the_bit(ranks, tmp_path: Path, size: int, options: dict[str, Any]) -> None:
    config = config_of(tmp_path, steps=6, checkpoint=CheckpointConfig(every=3), **CODED_CONFIG | options)
    gone_on_to_the_bit(ranks, size, tmp_path, config)


def test_figures_of_what_is_lost(ranks, tmp_path: Path) -> None:
    """Of int8 a hundredth, of int4 more; and they are there in the steps that are reported."""
    config = config_of(tmp_path, steps=4, **CODED_CONFIG)
    ranks(2).run(train, config)
    told = [
        {k: v for k, v in row.items() if "weights" in k or "gradients" in k}
        for row in read_metrics(tmp_path / "metrics.jsonl")
    ]
    assert [len(figures) for figures in told] == [0, 3, 0, 3]
    for figures in told[1::2]:
        assert 0 < figures["weights_error"] < 0.01
        assert 0.01 < figures["gradients_error"] < 0.2
        assert 0.98 < figures["gradients_cosine"] < 1


FEEDBACK = CommConfig(weights="int8", gradients="int4", feedback=True)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"zero": 3, "precision": "bf16"}),
        (4, {"zero": 2, "mesh": MeshConfig(tp=2)}),
        pytest.param(4, {"zero": 3, "mesh": MeshConfig(dp_replicate=2)}, marks=pytest.mark.soak),
    ],
)
def test_errors_are_resumed_to_the_bit(ranks, tmp_path: Path, size: int, options: dict[str, Any]) -> None:
    config = config_of(tmp_path, steps=6, checkpoint=CheckpointConfig(every=3), comm=FEEDBACK, **options)
    gone_on_to_the_bit(ranks, size, tmp_path, config)


def sums_of_errors(config: TrainConfig) -> dict[str, Tensor]:
    """Of all ranks of a run that goes on from its checkpoint, before its first step and behind the next."""
    found: dict[str, Tensor] = {}
    begin, commit = CodedErrors.take, CodedErrors.commit

    def noted(kind: str, errors: CodedErrors) -> None:
        for name, error in errors.errors.items():
            total = error.double()
            dist.all_reduce(total)
            found.setdefault(f"{kind} {name}", total)

    def take(errors: CodedErrors, *given: Any) -> None:
        begin(errors, *given)
        noted("before", errors)

    def committed(errors: CodedErrors) -> None:
        commit(errors)
        noted("after", errors)
        found["late"] = torch.tensor([len(errors.late)])

    with patch.object(CodedErrors, "take", take), patch.object(CodedErrors, "commit", committed):
        train(config)
    return found


def test_errors_of_ranks_that_are_gone_go_along(ranks, tmp_path: Path) -> None:
    """On fewer ranks their sum is what it was; one rank, which codes nothing, adds it to its next gradient."""
    config = config_of(tmp_path, steps=6, checkpoint=CheckpointConfig(every=3), comm=FEEDBACK, zero=2)
    ranks(4).run(train, replace(config, stop_after=3, out=tmp_path / "4"))
    found = {}
    for size in (2, 1, 4):
        out = tmp_path / "again" / str(size)
        shutil.copytree(tmp_path / "4", out)
        found[size] = ranks(size).run(sums_of_errors, replace(config, stop_after=4, out=out, resume="auto"))[0]
    assert any(bool(total.any()) for key, total in found[4].items() if "before" in key)
    for size in (2, 1):
        for key, total in found[4].items():
            if "before" in key:
                torch.testing.assert_close(found[size][key], total, rtol=1e-6, atol=1e-9)
    assert not any(bool(total.any()) for key, total in found[1].items() if "after" in key)
    assert found[1]["late"].tolist() == [0]


def test_a_run_without_feedback_would_lose_errors(tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=4, comm=FEEDBACK, zero=2, stop_after=2)
    train(config)
    again = replace(config, resume="auto", comm=replace(FEEDBACK, feedback=False))
    said = (
        r"of comm\.feedback, and this run has none, which would lose .*; resume it with --comm\.feedback, or begin anew"
    )
    with pytest.raises(UserError, match=said):
        train(again)


def stale(shards: CodedShards) -> None:
    """The second copy stays when masters have changed."""


def with_own_rows(whole: Tensor, own: Tensor, rows: CodedRows, group: dist.ProcessGroup) -> None:
    """A rank computes with its own rows as they were."""
    exact = own.clone()
    gather_coded(whole, own, rows, group)
    whole[group.rank()] = exact


def between_nodes_alone(whole: Tensor, rows: CodedRows, within: Any, between: Any, lost: None = None) -> Tensor:
    """What goes within a node is not coded."""
    if within is not None:
        mine = whole.unflatten(0, (-1, within.size())).contiguous()
        dist.all_reduce(mine, group=within)
        whole = mine[:, within.rank()].contiguous()
    return sum_coded(whole, rows, None, between)


def of_unused_too(errors: CodedErrors, masters: Any, used: set[str]) -> None:
    """Parameters that do not move lose theirs."""


def of_one_hop(
    whole: Tensor, rows: CodedRows, within: Any, between: Any, lost: Tensor | None = None
) -> Tensor:  # fmt: skip
    """What the node's sums lack is forgotten."""
    found = sum_coded(whole, rows, within, between, lost)
    if lost is not None and within is not None:
        rows.decode(rows.encode(whole), lost)
        torch.sub(whole, lost, out=lost)
    return found


MUTATIONS = {
    "stale": ("CodedShards.publish", stale, 3),
    "own rows": ("gather_coded", with_own_rows, 3),
    "one hop": ("sum_coded", between_nodes_alone, 3),
    "errors of one hop": ("sum_coded", of_one_hop, 3),
    "errors of unused": ("CodedErrors.complete", of_unused_too, 2),
}


def mutated(mutation: str, comm: CommConfig) -> dict[str, Any]:
    name, instead, zero = MUTATIONS[mutation]
    with patch(f"core.parallel.coded_shards.{name}", instead):
        return trained(comm, zero, 1)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mistake_is_seen(ranks, mutation: str) -> None:
    comm = replace(ALL, node=2, secondary=MUTATIONS[mutation][2] == 3, feedback="errors" in mutation)
    found, expected = ranks(4).run(mutated, mutation, comm)[0], simulated(comm, 4, 1)
    off = [float((found["masters"][name] - value.detach()).abs().max()) for name, value in expected["masters"].items()]
    assert max(off) > 1e-6
