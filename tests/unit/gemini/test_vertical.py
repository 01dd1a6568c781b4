"""Microbatches by blocks: bit for bit what they do one after the other, with fewer reads, in the budget."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from core.compose import ParallelConfig, parallelize
from core.config import UserError
from core.gemini import replicas
from core.gemini.config import GeminiConfig
from core.gemini.moments import on_chunks
from core.gemini.replicas import GeminiReplicas
from core.gemini.residency import ResidencyPlan, plan_residency, smallest_budget
from core.gemini.trace import ChunkInfo
from core.gemini.vertical import by_blocks
from core.mesh import MeshConfig, build_mesh
from core.optim.build import build_optimizer
from core.parallel.pipeline.schedule import Action, B, F, Kind, simulate
from core.parallel.recompute import RecomputeConfig
from core.placement.stages import PipelinePlan
from core.placement.table import ModelPlan
from core.precision import LossScale
from core.runtime import join
from core.trace.machine import Bandwidth
from core.trace.tracer import StepTrace, Stretch
from core.train import TrainConfig, TrainState
from core.train.loop import train_step
from tests.parity.test_dropout import LENGTH, VOCABULARY, Dropping
from tests.parity.test_dropout import loss as of_dropping
from tests.parity.test_train import GPT2
from tests.support.training import Case, batch_of, build, evaluated, gemini_of, loss, moved, weight

STEPS = 3
GPT = Case(
    replace(GPT2, num_layers=3, tied_head=False), parallel=ParallelConfig(recompute=RecomputeConfig("full")),
    steps=STEPS, batch=12, length=5, planned=True, budget="90KB",
)  # fmt: skip
HOST = "240KB"
"""Gradients, and places for the disk; on which all else is."""
SIZES = {"one": 12, "three": 4, "ragged": 5}


@pytest.fixture(scope="module", autouse=True)
def joined() -> None:
    join("cpu")


def learned(case: Case) -> dict[str, Any]:
    """Losses, an evaluation's last, and masters; of Gemini how its microbatches ran, and what it read and took."""
    state, config = build(case)
    parallel = gemini_of(state.parallel) if case.budget is not None else None
    losses, read = [], [0]
    for step in range(case.steps):
        losses.append(train_step(state, batch_of(case, step), loss, weight, config, step)["loss"])
        if parallel is not None and parallel.disk is not None:
            parallel.disk.drain()
            read.append(parallel.disk.moved_bytes[0])
    losses.append(evaluated(state, batch_of(case, 0)))
    masters = {name: master.clone() for name, master in state.parallel.masters.items()}
    found = {"losses": losses, "masters": masters, "read": [b - a for a, b in pairwise(read)]}
    if parallel is not None:
        found |= moved(parallel) | {"by_blocks": parallel.vertical is not None, "orders": parallel.orders}
        found |= {
            "of_plan": read_as_planned(parallel, 1 if parallel.vertical else len(config.microbatch_rows(case.batch)))
        }
        found |= {"waiting": None if parallel.planned is None else parallel.planned.plan.waiting}
    state.parallel.close()
    return found


def read_as_planned(parallel: GeminiReplicas, times: int) -> int:
    """Bytes of a step that its plan's moves read from the disk, so many times a step, and its updates."""
    planned, disk = parallel.planned, parallel.disk
    assert planned is not None
    fetched = Counter(m.chunk for moves in planned.plan.moves for m in moves if "fetch" in m.kind)
    read = 0
    for chunk, slots in () if disk is None else disk.slots.items():
        if disk is not None and chunk in disk.away:
            begin, end = slots.fetched
            read += times * fetched[chunk.index] * (end - begin) + sum(b - a for a, b in slots.updated)
    return read


_PLAIN: dict[Case, dict[str, Any]] = {}


def plain(case: Case) -> dict[str, Any]:
    """What the same microbatches learn without Gemini."""
    key = replace(case, budget=None, host=None, disk=None, order="auto", planned=False)
    if key not in _PLAIN:
        _PLAIN[key] = learned(key)
    return _PLAIN[key]


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    for name, master in expected["masters"].items():
        assert torch.equal(found["masters"][name], master), name


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("blocks", [1, 4])
def test_every_action_comes_once_behind_what_it_needs(blocks: int, number: int) -> None:
    found = by_blocks(blocks, number)
    assert set(Counter(found.ranks[0]).values()) == {1}
    assert len(simulate(found, lambda _: 1.0)) == 2 * blocks * number


@pytest.mark.parametrize("number", [2, 5])
def test_by_blocks_fetches_what_one_microbatch_in_turn_does(number: int) -> None:
    """Of N chunks, a block each, that leave after each use: 2 N - 1 fetches a step, and in turn as many a microbatch.

    The last block's backward follows its forward. Gradients come home of each microbatch, in either order.
    """
    num_blocks, size = 4, 100
    names = [str(block) for block in range(num_blocks)]

    def stretch(action: Action) -> Stretch:
        name, is_forward = names[action.stage], action.kind is Kind.FORWARD
        writes = () if is_forward else (name,)
        return Stretch("forward" if is_forward else "backward", name, True, frozenset({name}), writes, 10, 1e-3)

    def planned(schedule: Sequence[Action], is_by_blocks: bool) -> ResidencyPlan:
        parts: list[list[Stretch]] = [[]]
        for action, following in zip_longest(schedule, schedule[1:]):
            parts[-1].append(stretch(action))
            ends = action.kind is Kind.BACKWARD and (is_by_blocks or action.stage == 0)
            parts += [[]] if ends and following is not None else []
        step = StepTrace(tuple(map(tuple, parts)), tuple(names), {}, by_blocks=is_by_blocks)
        chunks = [ChunkInfo(index, size, size, 2 * size, True) for index in range(num_blocks)]
        trace = on_chunks(step, chunks, [[name] for name in names])
        assert smallest_budget(trace) == 10 + size * (1 + is_by_blocks)  # a gradient beside its parameter
        return plan_residency(trace, 10 + size * 2, Bandwidth(1e8, 1e8, 1e8, 1e9, latency_s=1e-5), "cpu")

    turn = [*(F(0, block) for block in range(num_blocks)), *(B(0, block) for block in reversed(range(num_blocks)))]
    in_turn, found = planned(turn * number, False), planned(by_blocks(num_blocks, number).ranks[0], True)
    assert found.to_device_bytes == size * (2 * num_blocks - 1)
    assert in_turn.to_device_bytes == number * found.to_device_bytes
    assert found.to_host_bytes == in_turn.to_host_bytes == number * num_blocks * size


@pytest.mark.parametrize(
    ("tier", "optim", "size", "clip"),
    [
        ("host", "adamw", "three", 0.7),
        ("host", "adafactor", "ragged", None),
        ("disk", "adamw", "ragged", None),
        pytest.param("disk", "adamw", "three", 0.7, marks=pytest.mark.soak),
        ("disk", "adafactor", "three", None),
        ("disk", "adamw", "one", 0.7),
        ("gradients on the disk", "adamw", "ragged", 0.7),
    ],
)
def test_it_learns_what_it_learns_without_offload(
    tmp_path: Path, tier: str, optim: str, size: str, clip: float | None
) -> None:
    case = replace(GPT, optim=optim, microbatch=SIZES[size], clip=clip, order="vertical")
    if size == "one":  # all rows at once
        case = replace(case, budget="130KB")
    host = "190KB" if tier == "gradients on the disk" else HOST
    on = {} if tier == "host" else {"host": host, "disk": tmp_path / "disk"}
    found = learned(replace(case, **on))
    assert_equal(found, plain(case))
    assert found["by_blocks"] == (size != "one")
    assert bool(found["waiting"]) == (tier == "gradients on the disk")
    assert found["peak"] <= found["budget"]


def test_dropout_is_that_of_the_horizontal_order() -> None:
    """Modules that drop by place, called twice and by functions, also where blocks are computed again."""
    found = {}
    for order in ("horizontal", "vertical"):
        options = {"precision": "fp32", "microbatch": 3, "recompute": RecomputeConfig("full")}
        gemini = GeminiConfig("17KB", order=order)
        state, config = dropping(TrainConfig(seed=5, steps=STEPS, gemini=gemini, **options))
        assert (gemini_of(state.parallel).vertical is not None) == (order == "vertical")
        losses = []
        for step in range(STEPS):
            batch = tokens(step)
            losses.append(train_step(state, batch, of_dropping, rows_of, config, step)["loss"])
        masters = {name: master.clone() for name, master in state.parallel.masters.items()}
        found[order] = {"losses": losses, "masters": masters, "rng": torch.get_rng_state()}
        state.parallel.close()
    assert_equal(found["vertical"], found["horizontal"])


def dropping(config: TrainConfig) -> tuple[TrainState, TrainConfig]:
    mesh = build_mesh(config.mesh.resolve(1, config.zero), "cpu")
    plan = ModelPlan(pipeline=PipelinePlan("blocks", before=("embed", "drop")))
    parallel = parallelize(Dropping(False, 3), mesh, config, plan)
    optimizer = build_optimizer(config.optim, parallel.masters)
    torch.manual_seed(0)
    parts = [{name: x[:rows] for name, x in tokens(0).items()} for rows in (3, 3, 2)]
    parallel.prepare(optimizer, lambda: [lambda m, part=part: of_dropping(m, part) for part in parts])
    return TrainState(parallel, optimizer, LossScale(config.precision), {}), config


def tokens(step: int) -> dict[str, Tensor]:
    drawn = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return {"input_ids": drawn[:, :-1], "targets": drawn[:, 1:]}


def rows_of(batch: dict[str, Tensor]) -> Tensor:
    return torch.tensor(len(batch["targets"]))


def test_reads_are_those_of_the_plan_and_fall_with_the_microbatches(tmp_path: Path) -> None:
    """What the drive reads is what the moves say, to the byte."""
    case = replace(GPT, microbatch=4, clip=0.7, host=HOST, budget="110KB")
    found = {order: learned(replace(case, order=order, disk=tmp_path / order)) for order in ("horizontal", "vertical")}
    assert_equal(found["vertical"], found["horizontal"])
    for each in found.values():
        assert each["peak"] <= each["budget"]
    assert found["vertical"]["read"][-1] == found["vertical"]["of_plan"]
    assert found["horizontal"]["read"][-1] >= found["horizontal"]["of_plan"] > found["vertical"]["of_plan"]
    orders = found["vertical"]["orders"]
    assert orders.vertical.read_bytes < orders.horizontal.read_bytes


def test_the_plan_takes_the_shorter_order(tmp_path: Path) -> None:
    slow = replace(GPT, microbatch=4, host=HOST, disk=tmp_path / "disk", steps=1)
    with patch.object(replicas, "with_drives", lambda bandwidth, _: replace(bandwidth, disk_read=1e6, disk_write=1e6)):
        assert learned(slow)["by_blocks"]
    tied = replace(slow, model=GPT2, disk=tmp_path / "tied")
    found = learned(tied)
    assert not found["by_blocks"]
    assert "blocks share 'embedding.tokens.weight'" in found["orders"].why


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (replace(GPT, microbatch=4, budget="1KB"), "give at least"),
        (replace(GPT, microbatch=4, budget="1MB", planned=False), "no step of this model was foreseen"),
    ],
)
def test_what_does_not_go_is_refused(case: Case, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(replace(case, order="vertical"))


class Attending(nn.Module):
    """A block that draws by the order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return x + scaled_dot_product_attention(y, y, y, dropout_p=0.5)


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attending() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_draws_by_the_order_of_calls_are_refused() -> None:
    mesh = build_mesh(MeshConfig().resolve(1, 0), "cpu")
    config = TrainConfig(microbatch=2, gemini=GeminiConfig("1MB", order="vertical"))
    parallel = parallelize(Attended(), mesh, config, ModelPlan(pipeline=PipelinePlan("blocks")))
    optimizer = build_optimizer(config.optim, parallel.masters)
    losses = [lambda model: model(torch.zeros(2, 3, 6)).sum()] * 2
    with pytest.raises(UserError, match="calls scaled_dot_product_attention, which draws by the order of calls"):
        parallel.prepare(optimizer, lambda: losses)
