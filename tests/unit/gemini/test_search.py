"""The chunk size that is chosen, and the figure of a plan."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from core.config import UserError
from core.gemini.figure import draw_memory, planned_memory
from core.gemini.moments import on_chunks
from core.gemini.residency import plan_residency, smallest_budget
from core.gemini.search import (
    PIECE_OF_BUDGET,
    ParameterInfo,
    _candidates,
    choose_chunk_size,
    least_budget,
    packed,
    piece_of_budget,
)
from core.gemini.trace import ChunkInfo
from core.trace.machine import Bandwidth, Speed
from core.trace.tracer import StepTrace, trace_step
from tests.support.residency import replay, transformer


def infos(*sizes: int, **options) -> list[ParameterInfo]:
    return [ParameterInfo(str(i), size, size, 2 * size, True, **options) for i, size in enumerate(sizes)]


def names(chunks) -> list[list[str]]:
    return [[parameter.name for parameter in chunk] for chunk in chunks]


def test_packed_in_order_with_outliers_and_kinds_apart():
    assert names(packed(infos(3, 3, 3, 9, 1, 2), 6)) == [["0", "1"], ["2"], ["3"], ["4", "5"]]
    mixed = [
        ParameterInfo("a", 2, 4, 8, True, "bf16"),
        ParameterInfo("b", 2, 0, 0, False, "bf16"),
        ParameterInfo("c", 2, 4, 8, True, "bf16"),
        ParameterInfo("d", 2, 4, 8, True, "fp32"),
        ParameterInfo("e", 2, 0, 0, False, "bf16"),
    ]
    assert names(packed(mixed, 100)) == [["a", "c"], ["b", "e"], ["d"]]


@pytest.fixture(scope="module")
def blocks() -> tuple[StepTrace, list[ParameterInfo]]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(8)))
    step = trace_step(model, lambda m: m(torch.randn(4, 32)).sum(), Speed(1e8, 1e8))
    found = dict(model.named_parameters())
    sizes = {name: found[name].nbytes for name in step.order}
    return step, [ParameterInfo(n, s, s, 2 * s, True) for n, s in sizes.items()]


def test_no_candidate_is_better_than_the_chosen(blocks):
    step, parameters = blocks
    bandwidth = Bandwidth(1e8, 1e8, 1e8, 1e9, latency_s=1e-5)
    budget = 60_000
    chosen = choose_chunk_size(parameters, step, budget, bandwidth)
    assert sorted(sum(chosen.parameters, ())) == sorted(step.order)
    assert replay(chosen.trace, chosen.plan).device_bytes == chosen.plan.device_bytes
    steps = []
    for size in _candidates(parameters, budget):
        chunks = names(packed(parameters, size))
        trace = on_chunks(step, [_info(i, chunk, parameters) for i, chunk in enumerate(chunks)], chunks)
        if smallest_budget(trace) <= budget:
            steps.append(plan_residency(trace, budget, bandwidth).step_s)
    assert len(steps) >= 3
    assert chosen.plan.step_s <= 1.002 * min(steps)
    assert max(steps) > 1.05 * min(steps)  # it matters


def _info(index, chunk, parameters):
    size = sum(p.buffer_bytes for p in parameters if p.name in chunk)
    return ChunkInfo(index, size, size, 2 * size, True)


def test_the_dearer_a_copy_the_larger_the_chunk(blocks):
    step, parameters = blocks
    sizes = [
        choose_chunk_size(parameters, step, 60_000, Bandwidth(1e8, 1e8, math.inf, math.inf, latency_s=s)).chunk_bytes
        for s in (0.0, 1e-2)
    ]
    assert sizes[0] < sizes[1]


def test_where_everything_fits_no_chunk_is_as_large_as_the_model(blocks):
    step, parameters = blocks
    chosen = choose_chunk_size(parameters, step, 1 << 30, Bandwidth(1e8, 1e8, 1e8, 1e9, latency_s=1e-2))
    assert chosen.plan.moved_bytes == 0
    sizes = {parameter.name: parameter.buffer_bytes for parameter in parameters}
    largest = max(sum(sizes[name] for name in chunk) for chunk in chosen.parameters)
    assert largest <= sum(sizes.values()) / 8
    assert piece_of_budget(parameters, 64 * PIECE_OF_BUDGET) == 64
    assert piece_of_budget(parameters, 1) == 1


def test_a_budget_in_which_no_size_works_names_the_smallest_that_does(blocks):
    step, parameters = blocks
    bandwidth = Bandwidth(1e8, 1e8, 1e8, 1e9)
    with pytest.raises(UserError, match="give at least") as refused:
        choose_chunk_size(parameters, step, 2000, bandwidth)
    enough = math.ceil(float(str(refused.value).split("at least ")[1].split(" MiB")[0]) * 2**20)
    assert choose_chunk_size(parameters, step, enough, bandwidth).plan.device_peak_bytes <= enough
    assert 0 <= enough - least_budget(parameters, step) <= 2**20 / 1000 + 1  # it is told in thousandths


def test_the_figure_shows_what_was_planned(tmp_path):
    trace = transformer(6, activation_bytes=20)
    plan = plan_residency(trace, 1500, Bandwidth(2.0, 2.0, 1.0, 100.0))
    memory = planned_memory(trace, plan)
    assert np.array_equal(sum(memory["device"].values()), plan.device_bytes)
    assert (memory["device"]["buffers that come and go"] >= 0).all()
    assert sum(memory["host"].values()).max() == plan.host_bytes
    assert memory["host"]["gradients"][0] == memory["host"]["gradients"][-1] - 100 == 0
    png = draw_memory(tmp_path / "folder" / "memory.png", trace, plan, measured_device_bytes=plan.device_bytes)
    assert png.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="were measured"):
        draw_memory(tmp_path / "memory.png", trace, plan, measured_host_bytes=[1, 2])
