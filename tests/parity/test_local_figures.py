"""What messages of local workers in few bits lose, held against their displacements and what came of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core.mesh import MeshConfig, Zero
from core.parallel.local import LocalTraining, LocalTrainingConfig
from core.runtime import start
from tests.support.small import build, config_of

ROUNDS, EVERY = 5, 2
SUMS = LocalTrainingConfig(every=EVERY, outer_lr=1.0, outer_momentum=0.0, bits=2)


def figures(local: LocalTrainingConfig, out: Path, zero: Zero, inside: int) -> list[dict[str, float]]:
    """Of each step that ended a round; and as `true_...` what they should be."""
    workers = dist.get_world_size() // inside
    config = config_of(out, local=local, zero=zero, mesh=MeshConfig(dp_replicate=workers, dp_shard=inside))
    with start("cpu", 0):
        state = build(config)
        of = state.parallel.local
        assert isinstance(of, LocalTraining)
        generator = torch.Generator().manual_seed(dist.get_rank())
        found, waits = list[dict[str, float]](), 0.0
        for step in range(ROUNDS * EVERY):
            of.begin_step(torch.tensor(1.0 + of.worker))
            for master in state.parallel.masters.values():
                noise = torch.randn(master.shape, generator=generator, dtype=torch.float64)
                master.data.add_(noise, alpha=0.01)
            before = {name: value.clone() for name, value in of.outer.items()}
            ways = _flat({name: value - state.parallel.masters[name] for name, value in of.outer.items()})
            share = 2 * (1.0 + of.worker) / (workers * (workers + 1))
            ended = of.end_step(step, 0.0, False, False)
            if (step + 1) % EVERY:
                continue
            came = _flat({name: value - of.outer[name] for name, value in before.items()})
            true = _summed(ways * share, workers)
            waits = waits + true - came if local.error_feedback else true - came
            dot, norms = _total(true * came, inside), [_total(one.square(), inside) ** 0.5 for one in (true, came)]
            row = {"true_cosine": dot / norms[0] / norms[1]}
            row["true_error"] = _total(torch.as_tensor(waits).square(), inside) ** 0.5 / norms[0]
            found.append(row | ended.figures)
        return found


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten() for value in tensors.values()])


def _summed(own: Tensor, workers: int) -> Tensor:
    """Over the workers, of ranks in one place inside them."""
    every = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, own)
    inside = dist.get_world_size() // workers
    return torch.stack(every[dist.get_rank() % inside :: inside]).sum(0)


def _total(own: Tensor, inside: int) -> float:
    """Over the ranks inside a worker, each of which has rows of its own."""
    every = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, float(own.sum()))
    first = dist.get_rank() // inside * inside
    return sum(every[first : first + inside])


@pytest.mark.parametrize(
    ("size", "inside", "options"),
    [
        (3, 1, {}),
        pytest.param(4, 2, {"keep": 0.1}, marks=pytest.mark.soak),
        pytest.param(2, 1, {"error_feedback": False}, marks=pytest.mark.soak),
    ],
)
def test_figures_are_those_of_what_was_sent(
    ranks, tmp_path: Path, size: int, inside: int, options: dict[str, Any]
) -> None:
    """Each four steps, at the end of the round that they end in."""
    given = replace(SUMS, report_every=4, **options)
    zero = 1 if inside > 1 else 0
    for rows in ranks(size).run(figures, given, tmp_path, zero, inside):
        assert ["compression_error" in row for row in rows] == [False, True, False, True, False]
        for row in (row for row in rows if "compression_error" in row):
            assert row["compression_cosine"] == pytest.approx(row["true_cosine"], rel=1e-9)
            assert row["compression_error"] == pytest.approx(row["true_error"], rel=1e-9)
            assert 0.1 < row["compression_error"] < 3
