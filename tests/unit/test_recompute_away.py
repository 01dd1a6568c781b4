"""Mode budget with a host beside: of each block the plan keeps, computes again, sends away or encodes what it saves."""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from core.auto.checkpointing import fastest, frontier
from core.compose import ParallelConfig, compile_blocks
from core.config import UserError
from core.estimate.chain import estimate_chain
from core.mesh import MeshConfig
from core.parallel.pipeline.schedule import PipelineConfig
from core.parallel.plan import blocks_of
from core.parallel.recompute import RecomputeConfig, apply_recompute
from core.parallel.recompute_chain import RecomputedChain
from core.placement.table import ModelPlan
from core.runtime import start
from core.trace.account import MemoryAccount
from core.trace.chain import Chain, ChainBlock, Kept, Line, simulate
from core.trace.machine import Bandwidth, Speed
from core.trace.segments import Away, Form, Lean, Segments, check_segments, of_blocks, runs_of
from core.train.segments import choose_segments, described, lines_of, within
from tests.support.accounted import accounted_step
from tests.unit.test_recompute_in_place import WIDTH, Block, Net
from tests.unit.test_recompute_segments import ALONE, BUDGET, SPEED, decoder, wide_gpt

FAST: dict[Form, Line] = {"host": Line(1e12, 1e12, overlaps=True)}
SLOW: dict[Form, Line] = {"host": Line(1e9, 1e9, overlaps=False)}
MIXED: Segments = (Away(1, "host"), 1, Lean(1, "linear"), Away(2, "host"), ((1,), 1), Away(1, "compressed"), 1)


def gradients(segments: Segments | None, make: Any = Block, **config: Any) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = Net(partial(make, torch.relu_), num_blocks=9).double()
    chain = None
    if segments is not None:
        chain = apply_recompute(model, replace(BUDGET, **config), segments=segments)
    x = torch.randn(48, WIDTH, dtype=torch.float64, requires_grad=True)
    losses = []
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    assert x.grad is not None
    return [*losses, x.grad, *(p.grad for p in model.parameters() if p.grad is not None)], chain


@pytest.mark.parametrize("segments", [MIXED, (Away(9, "host"),), (Away(9, "compressed"),)], ids=str)
def test_losses_and_gradients_are_the_same_to_the_bit(segments: Segments) -> None:
    plain, _ = gradients(None)
    found, chain = gradients(segments)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert isinstance(chain, RecomputedChain)
    tier = chain.stores["host"].tier  # pyright: ignore[reportAttributeAccessIssue]
    assert tier.held_bytes == 0
    assert (tier.fetched_bytes > 0) == (segments != (Away(9, "compressed"),))


def test_segments_that_are_away_are_checked_and_cut() -> None:
    assert check_segments(MIXED, 9) == MIXED
    assert of_blocks(MIXED, range(4, 6)) == (Away(1, "host"), ((1,),))
    assert runs_of(MIXED) == [1, 1, 2, 1, 1, 3, 2, 1, 1]
    with pytest.raises(ValueError, match="inside of another"):
        check_segments(((Away(1, "host"), 1),), 2)
    with pytest.raises(ValueError, match="waits in host or disk or compressed"):
        check_segments((Away(2, "tape"),), 2)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def chain() -> Chain:
    make, loss, _ = wide_gpt(layers=6)
    return estimate_chain(make(), loss, ALONE, ParallelConfig(recompute=BUDGET), SPEED, lines=FAST)


def measured(segments: Segments, recompute: RecomputeConfig = BUDGET, layers: int = 6) -> int:
    """The peak of a step."""
    make, loss, fill = wide_gpt(layers=layers)
    with start("cpu") as runtime:
        given = runtime.mesh(MeshConfig()), ParallelConfig(recompute=recompute), 1, ModelPlan(recompute=segments), fill
        return accounted_step(make(), loss, *given)[0]


@pytest.mark.parametrize(
    "segments",
    [
        (Away(6, "host"),),
        (Away(3, "host"), 3),
        (Away(1, "host"), 1, Away(1, "host"), (1,), (1,), 1),
        ((2,), Away(2, "host"), Lean(1, "linear"), 1),
        (1, Away(2, "host"), 3),
    ],
    ids=str,
)
def test_the_simulator_knows_what_a_step_takes(chain: Chain, segments: Segments) -> None:
    assert simulate(chain, segments).peak_bytes == pytest.approx(measured(segments), rel=0.01)


def test_the_plan_sends_where_copies_are_fast_and_runs_again_where_they_are_slow(chain: Chain) -> None:
    for lines, seconds in ((FAST, 1e12), (SLOW, 1e5)):
        line = replace(lines["host"], send_bytes_per_s=seconds, fetch_bytes_per_s=seconds)
        away = {
            k: replace(of.away["host"], send_s=of.away["host"].away / seconds, fetch_s=of.away["host"].away / seconds)
            for k, of in enumerate(chain.blocks)
        }
        blocks = tuple(replace(of, away={"host": away[k]}) for k, of in enumerate(chain.blocks))
        choices = frontier(replace(chain, blocks=blocks, lines={"host": line}))
        assert choices[-1].segments == ((Away(5, "host"), 1) if lines is FAST else (6,))
        middle = fastest(choices, (choices[0].peak_bytes + choices[-1].peak_bytes) // 2)
        assert middle is not None
        assert any(isinstance(item, Away) for item in middle.segments) == (lines is FAST), middle.segments


@pytest.mark.parametrize("num_budgets", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_budgets_are_kept_and_more_is_never_slower(chain: Chain, num_budgets: int) -> None:
    """Measured steps, each budget's peak that of its plan."""
    make, loss, _ = wide_gpt(layers=6)
    ends = [choice.peak_bytes for choice in frontier(replace(chain, lines=FAST))]
    least, most = ends[0], ends[-1]
    without = frontier(replace(chain, blocks=tuple(replace(of, away={}) for of in chain.blocks)))
    before = float("inf")
    sent = 0
    for index in range(num_budgets):
        budget = least + (most - least) * index // (num_budgets - 1)
        recompute = RecomputeConfig("budget", budget=str(budget), host="1GiB")
        given = make(), loss, ALONE, ParallelConfig(recompute=recompute), SPEED
        found = choose_segments(*given, lines=FAST)
        taken = measured(found.segments)
        assert taken <= budget
        assert taken == pytest.approx(found.peak_bytes, rel=0.01)
        assert found.step.seconds <= before
        alone = fastest(without, budget)
        assert alone is None or found.step.seconds <= alone.step.seconds
        before, sent = found.step.seconds, sent + ("on the host" in described(found))
    assert sent >= 1


def test_no_more_waits_on_the_host_than_there_is_room_for(chain: Chain) -> None:
    each = chain.blocks[0].away["host"].away
    narrow = within(chain, {"host": 2 * each})
    assert ["host" in of.away for of in narrow.blocks] == [True, True, False, False, False, False]
    for choice in frontier(narrow):
        assert choice.step.away_bytes.get("host", 0) <= 2 * each


def test_a_cpu_sends_nothing_to_itself_unless_it_is_told_to() -> None:
    link = Bandwidth(2e9, 1e9, 1e9, 1e9)
    assert lines_of(BUDGET, "cpu", link) == {}
    assert lines_of(replace(BUDGET, host="1GiB"), "cpu", link) == {"host": Line(1e9, 2e9, overlaps=False)}
    assert lines_of(BUDGET, "cuda", link) == {"host": Line(1e9, 2e9, overlaps=True)}
    with pytest.raises(UserError, match=r"recompute\.host=much"):
        replace(BUDGET, host="much")
    assert "host" in RecomputeConfig("full").unread()
    for options in ({"host": "1GiB"}, {"disk": Path("drive")}, {"bits": 8}):
        ParallelConfig(recompute=replace(BUDGET, **options), pipeline=PipelineConfig("gpipe")).check_pipeline(2)


def test_numbers_in_few_bits_are_foreseen() -> None:
    """The plan may round where `recompute.bits` says so."""
    make, loss, _ = wide_gpt(layers=4)
    recompute = replace(BUDGET, bits=8)
    slow = Speed(1e10, 1e12)  # computing again is slower than a pass over memory
    chain = estimate_chain(make(), loss, ALONE, ParallelConfig(recompute=recompute), slow, lines={})
    assert set(chain.blocks[0].away) == {"compressed"}
    segments: Segments = ((1,), Away(2, "compressed"), 1)
    assert simulate(chain, segments).peak_bytes == pytest.approx(measured(segments, recompute, 4), rel=0.02)
    assert simulate(chain, segments).peak_bytes < simulate(chain, ((1,), 3)).peak_bytes
    assert any(isinstance(item, Away) for choice in frontier(chain) for item in choice.segments)


def test_copies_that_run_beside_take_what_they_are_longer_by() -> None:
    """By hand: of four blocks of 1 s forward and 2 s backward, copies of 3 s each way.

    Beside: 1, 2 and 2 s when blocks 1, 2 and 3 have run, and 1 s for the first one's values.
    """
    block = unit_block()
    for overlaps, waits in ((False, 3 * 6.0), (True, 6.0)):
        line = Line(1.0, 1.0, overlaps)
        one = Chain((block,) * 4, output=1, head=1, lines={"host": line})
        step = simulate(one, (Away(3, "host"), 1))
        assert step.waits_s == waits
        assert step.seconds == 12 + waits
        assert step.away_bytes == {"host": 9}


def unit_block() -> ChainBlock:
    """Keeps three bytes beside the one that it hands on."""
    whole = Kept(peak=4, num_bytes=4, back=1, backward_peak=0)
    away = replace(whole, away=3, send_s=3.0, fetch_s=3.0)
    return ChainBlock(1, 0, 1, 1, whole, 4, 4, 0, 1.0, 1.0, 2.0, away={"host": away})


COMPILED: dict[str, tuple[RecomputeConfig, Segments | None]] = {
    "offload": (RecomputeConfig("offload"), None),
    "compressed": (RecomputeConfig("compressed"), None),
    "budget": (BUDGET, (Away(1, "host"), (1,), Away(2, "host"), Away(1, "compressed"), 1)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_what_waits_elsewhere_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled blocks save what their graphs say, and that waits: the same to the bit, and less is kept."""
    graphs: list[Any] = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=_noting(graphs)))
    torch.manual_seed(0)
    model, loss = decoder("gpt2")
    again, (config, segments) = copy.deepcopy(model), COMPILED[name]
    apply_recompute(again, config, segments=segments)
    kept, compiled = [], []
    for one in (model, again):
        torch.compiler.reset()
        graphs.clear()
        compile_blocks(blocks_of(one))
        loss(one).backward()
        for parameter in one.parameters():
            parameter.grad = None
        with MemoryAccount() as account:
            before = account.current_bytes
            value = loss(one)
            kept.append(account.current_bytes - before)
            value.backward()
        compiled.append(len(graphs))
    assert 0 < compiled[0] <= compiled[1]
    for expected, found in zip(model.parameters(), again.parameters(), strict=True):
        assert expected.grad is not None
        assert found.grad is not None
        assert torch.equal(expected.grad, found.grad)
    assert name == "compressed" or kept[1] < 0.8 * kept[0]


def _noting(graphs: list[Any]) -> Any:
    return lambda graph, inputs: graphs.append(graph) or aot_eager(graph, inputs)
