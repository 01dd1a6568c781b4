"""Compressed gradients: n ranks train as one rank does that is given their sum, in fp64, on every form of cutting.

One rank compresses too, so it is the reference of all meshes; that itself is held to the paper's algorithm in plain
matrices, with as many ranks' gradients as a list.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.checkpoint import CheckpointConfig, read_full
from core.comm.volume import count_volume
from core.compose import ParallelConfig
from core.config import UserError
from core.mesh import MeshConfig, Zero, build_mesh
from core.metrics import read_metrics
from core.nn.routing import MoEConfig
from core.parallel.compress import CommConfig, compression_of
from core.parallel.powersgd import NEGLIGIBLE
from core.placement.table import placement
from core.precision import LossScaleConfig
from core.train import train_step
from tests.parity.test_resume import gone_on_to_the_bit, outcome
from tests.parity.test_train import GPT2, HYBRID, LLAMA, TOLERANCE
from tests.support.small import config_of, train
from tests.support.training import Case, batch_of, build, largest_difference, loss, run, weight

RANK2 = CommConfig("powersgd", rank=2)
MOE = replace(GPT2, moe=MoEConfig(3, experts_per_token=2))


def parallel(zero: Zero = 0, comm: CommConfig = RANK2) -> ParallelConfig:
    return ParallelConfig(zero=zero, precision="fp64", comm=comm)


CASES = {
    "zero 0, twenty steps": (2, Case(GPT2, parallel=parallel(), steps=20)),
    "zero 1, odd": (3, Case(GPT2, parallel=parallel(1))),
    "zero 2, accumulation": (2, Case(GPT2, parallel=parallel(2), microbatch=4)),
    "zero 3, accumulation": (3, Case(GPT2, parallel=parallel(3), microbatch=2)),
    "hybrid": (4, Case(GPT2, mesh=HYBRID, parallel=parallel(2))),
    "tp": (4, Case(GPT2, mesh=MeshConfig(tp=2), parallel=parallel(1))),
    "random_k": (3, Case(GPT2, parallel=parallel(1, CommConfig("random_k", density=0.1)), microbatch=2)),
    "whole steps first": (2, Case(GPT2, parallel=parallel(1, replace(RANK2, start=2)))),
}
LONG = {
    "zero 0, odd": (3, Case(GPT2, parallel=parallel(), microbatch=2)),
    "zero 1": (2, Case(GPT2, parallel=parallel(1), microbatch=4, steps=20)),
    "zero 2, odd": (3, Case(GPT2, parallel=parallel(2))),
    "tp alone": (3, Case(GPT2, mesh=MeshConfig(tp=3), parallel=parallel())),
    "tp of llama": (4, Case(LLAMA, mesh=MeshConfig(tp=2), parallel=parallel(1))),
    "tp, zero 2": (4, Case(GPT2, mesh=MeshConfig(tp=2), parallel=parallel(2), microbatch=2)),
    "tp, zero 3": (4, Case(LLAMA, mesh=MeshConfig(tp=2), parallel=parallel(3), microbatch=2)),
    "hybrid, zero 3": (4, Case(GPT2, mesh=HYBRID, parallel=parallel(3, replace(RANK2, start=1)))),
    "2d": (4, Case(GPT2, mesh=MeshConfig(tp=4, tp_mode="2d"), parallel=parallel())),
    "cp": (4, Case(GPT2, mesh=MeshConfig(cp=2), parallel=parallel(1))),
    "experts": (4, Case(MOE, mesh=MeshConfig(tp=2), parallel=parallel(1))),
    "eight": (8, Case(GPT2, mesh=replace(HYBRID, tp=2), parallel=parallel(1), batch=16)),
}


def difference(ranks, num_ranks: int, case: Case, without: tuple[str, ...] = ()) -> tuple[float, str]:
    alone = replace(case, mesh=MeshConfig(), parallel=parallel(0, case.parallel.comm), microbatch=None)
    return largest_difference(ranks(num_ranks).run(run, case, without), ranks(1).run(run, alone)[0], case.steps)


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.soak) for name in LONG)])
def test_ranks_are_one_rank_that_is_given_the_sum(ranks, name: str) -> None:
    found, where = difference(ranks, *(CASES | LONG)[name])
    assert found <= TOLERANCE, f"{where} differs by {found:.3g}"


def test_without_the_messages_the_difference_is_seen(ranks) -> None:
    num_ranks, case = CASES["zero 0, twenty steps"]
    found, _ = difference(ranks, num_ranks, replace(case, steps=3), ("core.parallel.feedback", "all_reduce"))
    assert found > 1e-3


# --- the paper's algorithm ----------------------------------------------------------------------------------------


class Shapes(nn.Module):
    """A tall and a wide matrix, a kernel, a stack, vectors; of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"tall": (13, 5), "wide": (4, 11), "kernel": (7, 3, 3, 2), "stack": (3, 8, 9), "vector": (6,)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))


MATRICES = {"tall": (1, 13, 5), "wide": (1, 4, 11), "kernel": (1, 7, 18), "stack": (3, 8, 9)}


def gradient(name: str, step: int, rank: int) -> Tensor:
    """Of two directions that the ranks have in common, and noise; at step 0 nothing, at step 1 of one direction."""
    stack, rows, columns = MATRICES[name]
    common, own = (torch.Generator().manual_seed(1000 * step + seed) for seed in (99, rank))
    left, right = (torch.randn(stack, n, 2, generator=common, dtype=torch.float64) for n in (rows, columns))
    noise = torch.randn(stack, rows, columns, generator=own, dtype=torch.float64)
    if step == 0:
        return torch.zeros_like(noise)
    return left[..., :1] @ right[..., :1].mT if step == 1 else left @ right.mT + 0.1 * noise


def added(tensors: Sequence[Tensor]) -> Tensor:
    """In their order."""
    return reduce(torch.add, tensors)


def exchanged(num_steps: int, comm: CommConfig = RANK2) -> list[dict[str, Any]]:
    """What each step came to on this rank, and what it left; first powersgd's bases at the beginning."""
    mesh, model = build_mesh(MeshConfig().resolve(dist.get_world_size()), "cpu"), Shapes()
    compression = compression_of(comm, mesh, placement(model, None, mesh), torch.float64, torch.device("cpu"))
    assert compression is not None
    assert set(compression.names) == set(MATRICES)
    found: list[dict[str, Any]] = [{n: t.clone() for n, t in compression.own_tensors().items()}]
    for step in range(num_steps):
        grads = {n: gradient(n, step, dist.get_rank()).view(model.get_parameter(n).shape) for n in MATRICES}
        summed = compression.reduce({n: g.contiguous() for n, g in grads.items()}, scale=1.0)
        compression.commit()
        found.append({n: (summed[n].clone(), compression.errors[n].clone()) for n in MATRICES})
    return found


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_it_is_the_papers_algorithm(ranks, num_ranks: int) -> None:
    """Vogels et al. 2019, algorithms 1 and 2, in sums: its errors C_w - G^ / n, its orthonormalisation by QR."""
    of_ranks = ranks(num_ranks).run(exchanged, 6)
    for name, shape in MATRICES.items():
        stack, _, columns = shape
        q = first = of_ranks[0][0][f"basis/{name}"].reshape(stack, columns, RANK2.rank)
        errors = [torch.zeros(shape, dtype=torch.float64)] * num_ranks
        for step in range(6):
            given = [gradient(name, step, rank) + error for rank, error in enumerate(errors)]
            product = added(given) @ q
            p, r = torch.linalg.qr(product)
            gone = (r.diagonal(dim1=-2, dim2=-1).abs() <= NEGLIGIBLE * product.norm(dim=1)).unsqueeze(1)
            p = torch.where(gone, 0, p)
            q = added([c.mT @ p for c in given])
            sent = p @ q.mT
            errors = [c - sent / num_ranks for c in given]
            results = [of_rank[step + 1][name] for of_rank in of_ranks]
            for summed, _ in results:
                torch.testing.assert_close(summed.view(shape), sent, rtol=1e-10, atol=1e-10)
            left = added([error for _, error in results])
            torch.testing.assert_close(left.view(shape), added(errors), rtol=1e-10, atol=1e-10)
            q = torch.where(gone, first, q)
            assert gone.all() == (step == 0)
            assert gone.any() == (step < 2)
    # What a rank keeps is what of its own it did not send: no more than it was given.
    norms = [float(of_rank[-1]["tall"][1].norm()) for of_rank in of_ranks]
    assert max(norms) < 10


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_top_k_is_a_simulation_of_it(ranks, num_ranks: int) -> None:
    """To the bit."""
    comm = CommConfig("top_k", density=0.2)
    of_ranks = ranks(num_ranks).run(exchanged, 5, comm)
    for name, shape in MATRICES.items():
        errors = [torch.zeros(shape, dtype=torch.float64)] * num_ranks
        for step in range(5):
            given = [gradient(name, step, rank) + error for rank, error in enumerate(errors)]
            most = [c.abs().flatten().sort(descending=True).values[-(-c.numel() // 5) - 1] for c in given]
            kept = [c.where(c.abs() >= least, 0) for c, least in zip(given, most)]
            errors = [c - k for c, k in zip(given, kept)]
            assert step == 0 or all(int((k != 0).sum()) == -(-k.numel() // 5) for k in kept)
            for of_rank, error in zip(of_ranks, errors):
                summed, left = of_rank[step + 1][name]
                assert torch.equal(summed.view(shape), added(kept))
                assert torch.equal(left.view(shape), error)


# --- bytes --------------------------------------------------------------------------------------------------------


def sent(case: Case) -> Counter[tuple[str, str]]:
    """Bytes of a step's messages, by operation and axis."""
    state, config = build(case)
    rows = case.batch // dist.get_world_size()
    mine = {k: v[:rows] for k, v in batch_of(case, 0).items()}
    for step in range(2):
        with count_volume(state.parallel.mesh) as volume:
            train_step(state, mine, loss, weight, config, step)
    return volume.bytes


@pytest.mark.parametrize("num_ranks", [2, 3, 4, pytest.param(8, marks=pytest.mark.soak)])
def test_bytes_are_the_closed_form(ranks, num_ranks: int) -> None:
    def of(comm: CommConfig) -> Counter[tuple[str, str]]:
        return ranks(num_ranks).run(sent, Case(GPT2, parallel=parallel(0, comm)))[0]

    dim, ffn, layers, wide = 24, 50, 2, 8
    matrices = [(61, dim), (9, dim), *[(3 * dim, dim), (dim, dim), (ffn, dim), (dim, ffn)] * layers]
    reduced, whole = ("all_reduce", "dp_replicate"), sum(m * n for m, n in matrices)
    vectors = of(CommConfig())[reduced] - wide * whole
    assert of(RANK2)[reduced] == vectors + wide * sum(RANK2.rank * (m + n) for m, n in matrices)
    kept = sum(-(-m * n // 10) for m, n in matrices)
    assert of(CommConfig("random_k", density=0.1))[reduced] == vectors + wide * kept
    top_k = of(CommConfig("top_k", density=0.1))
    assert top_k[reduced] == vectors
    assert top_k["all_gather", "dp_replicate"] == num_ranks * kept * (wide + 4)


# --- state --------------------------------------------------------------------------------------------------------

SMALL = CommConfig("powersgd", rank=1)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"zero": 0, "microbatch": 3}),
        (4, {"zero": 1, "mesh": MeshConfig(tp=2)}),
        (2, {"zero": 2, "precision": "fp16", "loss_scale": LossScaleConfig(2.0**20, growth_interval=2)}),
        (2, {"comm": replace(SMALL, start=2)}),
        (3, {"comm": CommConfig("top_k", density=0.2), "zero": 1}),
        (2, {"comm": CommConfig("random_k", density=0.2)}),
    ],
)
def test_resumed_to_the_bit(ranks, tmp_path: Path, size: int, options: dict[str, Any]) -> None:
    """fp16: steps overflow, and what they leave of errors and bases is what was there before."""
    config = config_of(tmp_path, steps=6, checkpoint=CheckpointConfig(every=3), **{"comm": SMALL} | options)
    gone_on_to_the_bit(ranks, size, tmp_path, config)


def test_a_lost_ranks_error_goes_to_the_others(ranks, tmp_path: Path) -> None:
    """Four ranks, two of another mesh, then one: what one rank does all the way."""
    config = config_of(tmp_path / "moving", steps=9, comm=SMALL)
    legs = [(4, {"zero": 1, "mesh": MeshConfig(tp=2)}), (4, {"zero": 0}), (2, {"zero": 2})]
    for leg, (size, options) in enumerate(legs):
        here = replace(config, resume="auto" if leg else None, stop_after=3 * (leg + 1), **options)
        found, rows = ranks(size).run(outcome, here, 0.0)[0]
    name = "comm/error/blocks.0.up.weight"
    saved = read_full(tmp_path / "moving" / "checkpoints" / "step-00000006", [name])[name]
    assert saved.shape[0] == 4
    assert saved.abs().sum() > 0
    expected, expected_rows = ranks(1).run(outcome, replace(config, out=tmp_path / "straight"), 0.0)[0]
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-9)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_a_run_goes_on_with_what_has_not_been_sent(ranks, tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=4, comm=SMALL, stop_after=2)
    train(config)
    on = replace(config, resume="auto", stop_after=None)
    with pytest.raises(UserError, match=r"checkpoint of comm\.compress=powersgd, and this run has none"):
        train(replace(on, comm=CommConfig()))
    with pytest.raises(
        UserError, match=r"checkpoint of comm\.rank=1, and this run has 2; resume it with --comm\.rank 1"
    ):
        train(replace(on, comm=replace(SMALL, rank=2)))
    whole = replace(config, out=tmp_path / "whole", comm=CommConfig())
    train(whole)
    assert train(replace(on, out=whole.out))[0]["status"] == "complete"  # compression may begin with a checkpoint


def test_figures_of_what_is_lost(ranks, tmp_path: Path) -> None:
    """Two ranks report what one does; a rank that is as large as the gradients' loses nothing."""
    config = config_of(tmp_path / "two", steps=4, comm=replace(SMALL, report_every=2))
    ranks(2).run(train, config)
    train(replace(config, out=tmp_path / "one"))
    rows, alone = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("two", "one"))
    told = [{k: v for k, v in row.items() if k.startswith("compression")} for row in rows]
    assert [bool(figures) for figures in told] == [False, True, False, True]
    assert told[1] == pytest.approx({k: alone[1][k] for k in told[1]}, rel=1e-9)
    assert 0 < told[1]["compression_error"] < 2
    assert 0.3 < told[1]["compression_cosine"] < 1
