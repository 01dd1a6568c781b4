"""Gemini on one, two, three and four ranks trains as one rank without it, in fp64, with chunks that come and go."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from core.compose import ParallelConfig
from core.config import UserError
from core.gemini.replicas import RemoteError
from core.mesh import MeshConfig
from core.models.decoder import DecoderConfig
from core.parallel.pipeline.schedule import PipelineConfig
from core.parallel.pipeline.stages import Stages
from core.parallel.recompute import RecomputeConfig
from tests.parity.test_experts import SWITCH, TOPK
from tests.parity.test_train import LLAMA
from tests.support.covering import FEW, MANY
from tests.support.gemini import Net, Run, Tempered, batch, loss, traced_once, train
from tests.support.grid_resume import resumed_elsewhere
from tests.support.training import (
    Case,
    build,
    difference_from_single,
    gemini_of,
    largest_difference,
    of_one_rank,
    run,
    whole,
)

TOLERANCE = 1e-10
GPT2 = DecoderConfig(vocab_size=61, dim=24, num_layers=4, num_heads=6, ffn_dim=50, max_length=9)
OPT = replace(GPT2, family="opt", position_offset=2, activation="relu", tied_head=False)
ROTARY = replace(LLAMA, num_layers=4)
TIGHT = 100_000  # bytes for all on the device; the parameters alone have 173,000
HYBRID = MeshConfig(dp_replicate=2, dp_shard=2)
soak = partial(pytest.param, marks=pytest.mark.soak)


def case(model: DecoderConfig, budget: int, zero: int = 3, **options) -> Case:
    parallel = ParallelConfig(zero=zero, precision="fp64", recompute=options.pop("recompute", RecomputeConfig()))
    return Case(model, parallel=parallel, budget=str(budget), **options)


def require_alike(ranks, given: Case, results: list[dict[str, Any]]) -> None:
    difference, where = largest_difference(results, of_one_rank(ranks, given), given.steps)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


def check(ranks, num_ranks: int, given: Case, evicts: bool) -> None:
    results = ranks(num_ranks).run(run, given)
    require_alike(ranks, given, results)
    for found in results:
        assert found["peak"] <= found["budget"]
        assert (found["evictions"] > 0) == evicts
        assert found["moved"] > 0


@pytest.mark.parametrize(
    ("num_ranks", "mesh", "zero"),
    [(1, MeshConfig(), 3), (2, MeshConfig(), 0), (2, MeshConfig(), 3), (3, MeshConfig(), 3), (4, HYBRID, 3)],
)
def test_every_number_of_ranks(ranks, num_ranks: int, mesh: MeshConfig, zero: int) -> None:
    steps = MANY if (num_ranks, zero) == (2, 3) else FEW
    check(ranks, num_ranks, case(GPT2, TIGHT, zero, mesh=mesh, steps=steps), evicts=True)


def test_with_tensor_parallelism(ranks) -> None:
    check(ranks, 4, case(GPT2, 45_000, mesh=MeshConfig(tp=2)), evicts=True)


def test_with_context_parallelism(ranks) -> None:
    check(ranks, 2, case(GPT2, TIGHT, mesh=MeshConfig(cp=2)), evicts=True)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_accumulation(ranks, num_ranks: int) -> None:
    check(ranks, num_ranks, case(OPT, TIGHT, microbatch=4), evicts=True)


@pytest.mark.parametrize("mode", ["full", "selective", "offload", "compressed"])
def test_recomputation(ranks, mode: str) -> None:
    check(ranks, 2, case(GPT2, TIGHT, recompute=RecomputeConfig(mode)), evicts=True)


@pytest.mark.parametrize("optim", ["adafactor", "lamb", "sgd"])
def test_optimizers(ranks, optim: str) -> None:
    """Without biases in attention: a key's has a gradient of zero, and Adafactor turns rounding noise into steps."""
    check(ranks, 2, case(ROTARY, TIGHT, optim=optim), evicts=True)


TORCH_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5, centered=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, fused=True),
}


def wrapped(name: str, budget: int | None, make: Callable[[], torch.nn.Module] = Net) -> Run:
    """A module that is awkward to move, under an optimizer of torch's, on all ranks that there are."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if budget is not None else (0, 1)

    def step(model: torch.nn.Module, index: int) -> torch.Tensor:
        return loss(model, batch(index).chunk(num_ranks)[rank]) / num_ranks

    return train(make, budget, TORCH_OPTIMIZERS[name], step=step, precision="fp64")


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
def test_optimizers_of_torch(ranks, name: str) -> None:
    """Masters and state are rows of a rank; of the attention's bias, the key's has a gradient of nothing but noise."""
    expected = wrapped(name, None)
    for rank in ranks(2).run(of_wrapped, name):
        for parameter, value in expected.values.items():
            found = rank["values"][parameter]
            if parameter.endswith("in_proj_bias"):
                found, value = (torch.cat(bias.chunk(3)[::2]) for bias in (found, value))
            torch.testing.assert_close(found, value, rtol=TOLERANCE, atol=TOLERANCE, msg=parameter)
        assert rank["peak"] <= 60_000
        assert rank["evictions"] >= 4


def test_parameters_without_rows(ranks) -> None:
    """Of no dims: each rank has it whole, and its gradient is summed once."""
    name = next(iter(TORCH_OPTIMIZERS))
    expected = wrapped(name, None, Tempered)
    assert float(expected.values["temperature"]) != 0.5
    for rank in ranks(2).run(of_wrapped, name, Tempered):
        for parameter in ("temperature", "nothing", "embedding.weight"):
            found, value = rank["values"][parameter], expected.values[parameter]
            torch.testing.assert_close(found, value, rtol=TOLERANCE, atol=TOLERANCE, msg=parameter)
        assert rank["evictions"] >= 4


def of_wrapped(name: str, make: Callable[[], torch.nn.Module] = Net) -> dict[str, Any]:
    run = wrapped(name, 60_000, make)
    tier = run.gemini.parallel.tier
    return {"values": run.values, "peak": tier.peak_bytes, "evictions": tier.num_evictions}


def planned(given: Case, share: float) -> dict[str, Any]:
    """A run in a budget in which `share` of the model data fits beside everything else of the step."""
    with traced_once():
        everything = gemini_of(build(replace(given, budget="1GB", planned=True))[0].parallel)
        trace, plan = everything.planned.trace, everything.planned.plan
        alone = [[member] for chunk in everything.chunks for member in chunk.members]
        messages = everything.executor.transport.message_bytes(alone, everything.reduce_dtype)
        others = torch.tensor(plan.device_peak_bytes - trace.model_bytes + messages + int(share * trace.model_bytes))
        dist.all_reduce(others, op=dist.ReduceOp.MAX)  # stages differ
        return run(replace(given, budget=str(int(others)), planned=True))


def test_planned_on_two_ranks(ranks) -> None:
    given = case(GPT2, 1)
    results = ranks(2).run(planned, given, 0.4)
    require_alike(ranks, given, results)
    for found in results:
        assert found["peak"] <= found["budget"]
        assert found["moved"] > 0


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_experts(ranks, num_ranks: int) -> None:
    """Planned on drawn parameters, since a router looks at values; tokens then go elsewhere."""
    given = Case(TOPK, parallel=ParallelConfig(zero=3, precision="fp64"))
    results = ranks(num_ranks).run(planned, given, 0.35)
    require_alike(ranks, given, results)
    for found in results:
        assert found["peak"] <= found["budget"]
        assert found["evictions"] >= given.steps


EXPERTS = MeshConfig(ep=2)
THREE = replace(TOPK, moe=replace(TOPK.moe, num_experts=3))


@pytest.mark.parametrize(
    ("num_ranks", "mesh", "zero", "model"),
    [
        (2, EXPERTS, 3, THREE),
        (4, EXPERTS, 3, TOPK),
        soak(4, EXPERTS, 0, TOPK),
        soak(4, replace(EXPERTS, dp_replicate=2), 3, THREE),
        soak(4, replace(EXPERTS, tp=2), 3, SWITCH),
        soak(4, replace(EXPERTS, cp=2), 3, TOPK),
        soak(4, MeshConfig(ep=4), 3, SWITCH),
        soak(8, replace(EXPERTS, dp_replicate=2), 3, TOPK),
        soak(8, MeshConfig(ep=4), 3, TOPK),
    ],
)
def test_experts_on_ranks_of_their_own(ranks, num_ranks: int, mesh: MeshConfig, zero: int, model: Any) -> None:
    """Chunks of experts are of fewer ranks than the rest, ranks have unequally many experts, some get no tokens."""
    given = Case(model, mesh=mesh, parallel=ParallelConfig(zero=zero, precision="fp64"), batch=16)
    results = ranks(num_ranks).run(planned, given, 0.35)
    require_alike(ranks, given, results)
    for found in results:
        assert found["peak"] <= found["budget"]
        assert found["evictions"] >= given.steps


@pytest.mark.soak
def test_experts_in_a_budget_go_on_elsewhere(ranks, tmp_path: Path) -> None:
    """A checkpoint knows nothing of chunks nor of who had which experts."""
    one, budget = MeshConfig(), "700KB"
    legs = [(4, EXPERTS, 3, "450KB"), (2, one, 3, budget), (2, EXPERTS, 0), (2, EXPERTS, 3, budget), (1, one, 0)]
    assert resumed_elsewhere(ranks, tmp_path, THREE, "adamw", legs) <= TOLERANCE


@pytest.mark.parametrize(
    ("num_ranks", "mesh", "schedule", "model", "microbatches"),
    [
        (2, MeshConfig(pp=2), "1f1b", replace(GPT2, num_layers=5), 3),
        (2, MeshConfig(pp=2), "interleaved", replace(TOPK, num_layers=4), 3),
        soak(2, MeshConfig(pp=2), "1f1b", GPT2, 5),
        soak(2, MeshConfig(pp=2), "interleaved", OPT, 3),
        soak(2, MeshConfig(pp=2), "1f1b", replace(SWITCH, num_layers=5), 3),
        soak(4, MeshConfig(pp=2), "1f1b", GPT2, 3),
        soak(4, MeshConfig(pp=2, tp=2), "gpipe", GPT2, 3),
        soak(4, MeshConfig(pp=2, ep=2), "1f1b", replace(TOPK, num_layers=4), 3),
    ],
)
def test_stages_have_their_own_chunks(
    ranks, num_ranks: int, mesh: MeshConfig, schedule: Any, model: Any, microbatches: int
) -> None:
    """Planned with several microbatches under way (10 rows in 3), experts, a tied head on two stages."""
    pipeline = PipelineConfig(schedule, microbatches=microbatches)
    parallel = ParallelConfig(zero=3, precision="fp64", pipeline=pipeline)
    given = Case(model, mesh=mesh, parallel=parallel, batch=4 * microbatches - 2)
    results = ranks(num_ranks).run(planned, given, 0.4)
    require_alike(ranks, given, results)
    for found in results:
        assert found["peak"] <= found["budget"]
    assert all(found["moved"] > 0 and found["evictions"] > 0 for found in results[:1])


FAILURES = {"a mistake": ArithmeticError, "a refusal": UserError}


def foresee_what_fails(failure: str, bad_stage: int) -> str:
    """What this rank says of a step in which the forward of one stage fails; then of one that is fine."""
    parallel = ParallelConfig(precision="fp64", pipeline=PipelineConfig("interleaved", microbatches=2))
    given = Case(OPT, mesh=MeshConfig(pp=2), parallel=parallel, budget=str(2**30), planned=True)
    compute = Stages.compute

    def fail(stages: Stages, *args: Any, **kwargs: Any) -> Any:
        if stages.current == bad_stage:
            raise FAILURES[failure](failure)
        return compute(stages, *args, **kwargs)

    with patch.object(Stages, "compute", fail):
        try:
            build(given)
        except (ArithmeticError, UserError, RemoteError) as error:
            said = f"{type(error).__name__}: {error}"
        else:
            said = "planned"
    build(given)
    return said


@pytest.mark.parametrize("bad_stage", [soak(0), 1, 2, soak(3)])
def test_a_failure_on_one_rank_reaches_all(ranks, bad_stage: int) -> None:
    """In any stage of two ranks that have two each: both end, with what went wrong, and nothing is left on its way."""
    bad = bad_stage % 2
    said = ranks(2).run(foresee_what_fails, "a mistake", bad_stage)
    assert said[bad] == "ArithmeticError: a mistake"
    assert said[1 - bad] == f"RemoteError: rank {bad}: ArithmeticError: a mistake"
    # A refusal of a model that is yet to be made: it goes without a plan, on all ranks.
    assert ranks(2).run(foresee_what_fails, "a refusal", bad_stage) == ["planned"] * 2


def test_mixed_precision_is_that_of_fsdp2(ranks) -> None:
    """Both compute in bf16 and reduce in fp32; what is left is the order of sums."""
    given = case(GPT2, 50_000)
    theirs, ours = (
        replace(c, parallel=replace(c.parallel, precision="bf16")) for c in (replace(given, budget=None), given)
    )
    expected = whole(ranks(2).run(run, theirs))
    difference, where = largest_difference(ranks(2).run(run, ours), expected, given.steps)
    assert difference <= 1e-6, f"{where} differs by {difference:.3g}"


@pytest.mark.parametrize("without", ["all_gather_into_tensor", "reduce_scatter_tensor"])
def test_a_missing_collective_is_seen(ranks, without: str) -> None:
    given = case(GPT2, TIGHT, steps=3)
    difference, _ = difference_from_single(ranks, 2, given, ("core.gemini.transport", without))
    assert not difference <= 1e4 * TOLERANCE
