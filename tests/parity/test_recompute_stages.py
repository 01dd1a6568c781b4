"""Mode budget over stages: what blocks save waits on the host or a drive, to the bit, in the bytes of the plan."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.compose import ParallelConfig
from core.mesh import MeshConfig, build_mesh
from core.models.decoder import Decoder, initialise
from core.models.plan import pipeline_plan
from core.parallel.pipeline.schedule import PipelineConfig, ScheduleName
from core.parallel.recompute import RecomputeConfig
from core.parallel.recompute_chain import chain_of
from core.placement.table import ModelPlan
from core.trace.chain import Line
from core.trace.machine import Speed
from core.trace.segments import Away, Form, Segments
from core.train.segments import choose_segments, described
from tests.parity.test_memory import STAGED
from tests.support.accounted import accounted_step

ROWS, LENGTH, MICROBATCHES = 2, 64, 4
FAST = Line(1e12, 1e12, overlaps=True)
MESH = MeshConfig(pp=2)


def loss(model: nn.Module) -> Tensor:
    ids = (torch.arange(ROWS * LENGTH) * 7 % 97).view(ROWS, LENGTH)
    return model(ids, targets=ids.roll(1, 1))


def trained(parallel: ParallelConfig, segments: Segments | None) -> dict[str, Any]:
    """A step in which this rank's peak is counted, behind one in which it meets the others."""
    model, losses = decoder(), list[Tensor]()
    plan = ModelPlan(pipeline=pipeline_plan(), recompute=segments)
    mesh = build_mesh(MESH.resolve(2), "cpu")

    def noted(model: nn.Module) -> Tensor:
        value = loss(model)
        losses.append(value.detach())
        return value

    most, _ = accounted_step(model, noted, mesh, parallel, MICROBATCHES, plan, lambda m: initialise(m, 0))
    found: dict[str, Any] = {"most": most, "losses": losses}
    found["values"] = {name: p.detach() for name, p in model.named_parameters() if p.numel()}
    if segments is not None:
        stores = chain_of(model).stores
        found["away"] = {form: store.tier.peak_bytes for form, store in stores.items() if hasattr(store, "tier")}
    return found


def decoder() -> nn.Module:
    with torch.device("meta"):
        return Decoder(replace(STAGED, num_layers=6, tied_head=False))


def chosen(schedule: ScheduleName, recompute: RecomputeConfig, lines: dict[Form, Line]) -> Any:
    parallel = ParallelConfig(recompute=recompute, pipeline=PipelineConfig(schedule))
    plan, speed = ModelPlan(pipeline=pipeline_plan()), Speed(1e12, 1e11)
    return choose_segments(
        decoder(), loss, MESH.resolve(2), parallel, speed, plan, num_microbatches=MICROBATCHES, lines=lines
    )


LONG = [("gpipe", "disk"), ("interleaved", "host"), ("1f1b", "disk")]


@pytest.mark.parametrize(
    ("schedule", "form"),
    [("1f1b", "host"), ("interleaved", "disk"), *(pytest.param(*row, marks=pytest.mark.soak) for row in LONG)],
)
def test_stages_send_what_does_not_fit(ranks, schedule: ScheduleName, form: Form, tmp_path: Path) -> None:
    plain = ParallelConfig(pipeline=PipelineConfig(schedule))
    expected = ranks(2).run(trained, plain, None)
    most = max(rank["most"] for rank in expected)
    options: dict[str, Any] = {"host": "1GiB"} if form == "host" else {"disk": tmp_path}
    recompute = RecomputeConfig("budget", budget=str(most * 7 // 8), **options)
    found = chosen(schedule, recompute, {form: FAST})
    assert any(isinstance(item, Away) and item.form == form for item in found.segments)
    assert f"waits {'on the host' if form == 'host' else 'on the drive'}" in described(found)
    given = partial(trained, replace(plain, recompute=recompute))
    for rank, (of, straight) in enumerate(zip(ranks(2).run(given, found.segments), expected, strict=True)):
        assert of["most"] == pytest.approx(found.ranks[rank].device, rel=0.05)
        assert of["most"] <= 1.02 * (most * 7 // 8)  # ranks keep a little more than is traced of each alone
        assert of["away"][form] == found.ranks[rank].away.get(form, 0)
        assert all(torch.equal(a, b) for a, b in zip(of["losses"], straight["losses"], strict=True))
        assert of["values"].keys() == straight["values"].keys()
        assert all(torch.equal(value, straight["values"][name]) for name, value in of["values"].items())
