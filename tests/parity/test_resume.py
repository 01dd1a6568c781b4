"""Resuming equals never having stopped: to the bit on the same mesh, to 1e-6 on another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.checkpoint import CheckpointConfig
from core.mesh import MeshConfig
from core.metrics import read_metrics
from core.optim import OptimConfig, ScheduleConfig
from core.precision import LossScaleConfig
from core.train import TrainConfig
from tests.support.small import Noisy, config_of, train

STEPS, STOP = 6, 4
MATRICES: dict[str, dict[str, Any]] = {
    "soap": {"precondition_frequency": 2, "eps": 1e-2},
    "shampoo": {"precondition_frequency": 2, "max_preconditioner_dim": 12},
    "galore": {"rank": 3, "update_gap": 2},
}


def outcome(config: TrainConfig, dropout: float) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Masters and buffers at the end, and the rows of the metrics without what depends on the clock."""
    masters = train(config, dropout)[1]
    rows = read_metrics(config.out / "metrics.jsonl")
    return masters, [
        {k: v for k, v in row.items() if k in ("step", "loss", "lr", "grad_norm", "loss_scale")} for row in rows
    ]


def gone_on_to_the_bit(ranks, size: int, tmp_path: Path, config: TrainConfig) -> dict[str, torch.Tensor]:
    """The tensors of a run with dropout that stops and is resumed, which must be those of one that does not stop."""
    stopped = replace(config, out=tmp_path / "stopped")
    ranks(size).run(train, replace(stopped, stop_after=STOP), 0.3)
    found, rows = ranks(size).run(outcome, replace(stopped, resume="auto"), 0.3)[0]
    expected, expected_rows = ranks(size).run(outcome, replace(config, out=tmp_path / "straight"), 0.3)[0]
    assert rows == expected_rows
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    return found


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (2, {"zero": 0, "precision": "bf16"}),
        (2, {"zero": 1, "microbatch": 3}),
        (2, {"zero": 2, "precision": "fp16", "loss_scale": LossScaleConfig(2.0**20, growth_interval=2)}),
        (2, {"zero": 3, "precision": "bf16"}),
        (4, {"zero": 1, "mesh": MeshConfig(tp=2)}),
        (4, {"zero": 3, "mesh": MeshConfig(tp=2)}),
        (4, {"zero": 2, "mesh": MeshConfig(dp_replicate=2, dp_shard=2)}),
    ],
)
def test_to_the_bit_on_the_same_mesh(ranks, tmp_path: Path, size: int, options: dict[str, Any]) -> None:
    """With dropout: random state, data position, moments, learning rate and loss scale all go on where they were."""
    config = config_of(tmp_path, steps=STEPS, checkpoint=CheckpointConfig(every=3), **options)
    found = gone_on_to_the_bit(ranks, size, tmp_path, config)
    assert found["seen"] == STEPS * (2 if "microbatch" in options else 1)


@pytest.mark.parametrize("name", MATRICES)
def test_bases_to_the_bit_on_the_same_mesh(ranks, tmp_path: Path, name: Any) -> None:
    optim = OptimConfig(name, schedule=ScheduleConfig(warmup_steps=2), **MATRICES[name])
    config = config_of(tmp_path, steps=STEPS, checkpoint=CheckpointConfig(every=3), optim=optim, zero=1)
    gone_on_to_the_bit(ranks, 2, tmp_path, config)


def test_a_model_draws_on_from_where_it_was(ranks, tmp_path: Path) -> None:
    """From torch's generator, which dropout does not draw its masks from."""
    config = config_of(tmp_path, steps=6)
    stopped = replace(config, out=tmp_path / "stopped")
    ranks(1).run(train, replace(stopped, stop_after=3), make=Noisy)
    found = ranks(1).run(train, replace(stopped, resume="auto"), make=Noisy)[0][1]
    expected = ranks(1).run(train, replace(config, out=tmp_path / "straight"), make=Noisy)[0][1]
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_dropout_is_at_work(ranks, tmp_path: Path) -> None:
    """Without the random state, what is held above to the bit would differ."""
    config = config_of(tmp_path, steps=STEPS)
    found = gone_on_to_the_bit(ranks, 1, tmp_path, config)
    without = train(replace(config, out=tmp_path / "without"), dropout=0.0)[1]
    assert not torch.allclose(found["head.weight"], without["head.weight"], rtol=1e-3)


@pytest.mark.parametrize("name", ["adafactor", "came", "adamw8bit", "muon", "adagrad", "rmsprop", *MATRICES])
def test_other_optimizers_across_meshes(ranks, tmp_path: Path, name: Any) -> None:
    """State that is not of the parameter's shape, too: half on ZeRO-1 x tp, half on ZeRO-3, is one rank's run."""
    optim = OptimConfig(name=name, lr=1e-2, schedule=ScheduleConfig(warmup_steps=2), **MATRICES.get(name, {}))
    config = config_of(tmp_path / "moving", steps=6, optim=optim)
    ranks(4).run(outcome, replace(config, zero=1, mesh=MeshConfig(tp=2), stop_after=3), 0.0)
    found, rows = ranks(2).run(outcome, replace(config, zero=3, resume="auto"), 0.0)[0]
    expected, expected_rows = ranks(1).run(outcome, replace(config, out=tmp_path / "straight"), 0.0)[0]
    assert len(rows) == len(expected_rows) == 6
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-9)
    for parameter, value in expected.items():
        torch.testing.assert_close(found[parameter], value, rtol=1e-9, atol=1e-12, msg=parameter)


@pytest.mark.parametrize(
    "meshes",
    [
        [(4, {"zero": 1, "mesh": MeshConfig(tp=2)}), (4, {"zero": 0, "mesh": MeshConfig(tp=4)}), (1, {})],
        [(1, {}), (2, {"zero": 3}), (4, {"zero": 2, "mesh": MeshConfig(tp=2)})],
        [(4, {"zero": 3, "mesh": MeshConfig(tp=2)}), (3, {"zero": 0, "mesh": MeshConfig(tp=3)}), (2, {"zero": 1})],
    ],
    ids=["dp2xtp2-tp4-one", "one-zero3-dp2xtp2", "dp2xtp2-tp3-zero1"],
)
def test_across_meshes(ranks, tmp_path: Path, meshes: list[tuple[int, dict[str, Any]]]) -> None:
    """Three meshes in turn, a third of the run each, train what one rank does."""
    config = config_of(tmp_path / "moving", steps=9)
    for leg, (size, options) in enumerate(meshes):
        here = replace(config, resume="auto" if leg else None, stop_after=3 * (leg + 1), **options)
        found, rows = ranks(size).run(outcome, here, 0.0)[0]
    expected, expected_rows = ranks(1).run(outcome, replace(config, out=tmp_path / "straight"), 0.0)[0]
    assert [row["step"] for row in rows] == list(range(1, 10))
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9, msg=name)
