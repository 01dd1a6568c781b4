"""Searching for plans: all of them are looked at, none on the front is beaten, and their figures the estimators'."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from apps.llm.config import PretrainConfig, check_combination
from apps.llm.corpus import DataConfig
from core.auto.costs import Link
from core.auto.machines import Cluster, cluster_of, gpu_named
from core.auto.step_time import StepClock, step_time
from core.auto.strategies import (
    RECOMPUTED,
    SCHEDULED,
    Job,
    divisors,
    meshes,
    nearest,
    options_of,
    precisions,
    runs,
    search,
)
from core.comm.block_code import BlockCode
from core.compose import ParallelConfig
from core.config import UserError
from core.estimate import RunShape, decoder_shape, estimate_memory, sent_bytes
from core.estimate.residency import estimate_budget
from core.gemini.config import GeminiConfig
from core.mesh import MeshConfig
from core.models.decoder import Decoder, DecoderConfig
from core.models.plan import decoder_plan
from core.models.shapes import SHAPES
from core.nn.routing import MoEConfig
from core.parallel.compress import CommConfig
from core.parallel.pipeline.schedule import Kind, PipelineConfig
from core.parallel.recompute import RecomputeConfig
from core.trace.machine import Speed
from tests.support.accounted import decoder_loss

SMALL = DecoderConfig(vocab_size=515, dim=64, num_layers=4, num_heads=4, ffn_dim=256, max_length=4096)
EXPERTS = replace(SHAPES["debug_moe"], moe=MoEConfig(num_experts=4, experts_per_token=2))
JOB = Job(SMALL, (8,), 2048)
ROOMY = 2**30


def tight(job: Job, ranks: int) -> int:
    """A third more than the least that anything takes."""
    return search(replace(job, held={"gemini.budget": None}), cluster(ranks)).plans[-1].memory_bytes * 4 // 3


def cluster(ranks: int, memory_bytes: int = ROOMY) -> Cluster:
    return cluster_of(gpu_named("a100-40gb"), ranks, memory_bytes=memory_bytes)


def space(job: Job, on: Cluster) -> Iterator[RunShape]:
    """Every run without Gemini, whether it fits or not."""
    for mesh in meshes(job, on):
        for alike in runs(job, mesh, on):
            yield from alike


def front(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Those that no other one beats, by comparing all pairs."""
    kept = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
    return sorted(kept)


@pytest.mark.parametrize(
    ("job", "ranks", "is_tight"),
    [
        (JOB, 2, False),
        (JOB, 4, True),
        pytest.param(JOB, 4, False, marks=pytest.mark.soak),
        (replace(JOB, model=EXPERTS), 2, False),
        pytest.param(JOB, 8, False, marks=pytest.mark.soak),
        pytest.param(JOB, 8, True, marks=pytest.mark.soak),
        pytest.param(replace(JOB, model=EXPERTS), 8, False, marks=pytest.mark.soak),
    ],
)
def test_the_search_finds_what_trying_everything_finds(job: Job, ranks: int, is_tight: bool) -> None:
    memory_bytes = tight(job, ranks) if is_tight else ROOMY
    job, on, model = replace(job, held={"gemini.budget": None}), cluster(ranks, memory_bytes), decoder_shape(job.model)
    tried = [(run, estimate_memory(model, run).peak_bytes) for run in space(job, on)]
    fitting = [(step_time(model, run, on).step_s, size) for run, size in tried if size <= memory_bytes]
    assert fitting
    found = search(job, on)
    assert [(plan.step_s, plan.memory_bytes) for plan in found.plans] == front(fitting)
    assert found.tried == len(fitting)
    assert is_tight == (len(fitting) < len(tried))


def test_the_space_is_every_mesh_that_a_run_would_start_on() -> None:
    """Asked of the check with which each run begins, of all sizes of all axes."""
    ranks, accepted = 8, set()
    forms = [("1d", 1), ("2d", 1), ("2.5d", 2), ("3d", 1)]
    for pp, cp, tp, (mode, depth) in itertools.product(divisors(8), divisors(8), divisors(8), forms):
        for how in ("ring", "ulysses") if cp > 1 else ("ring",):
            if (cp > 1 and mode != "1d") or (mode != "1d" and tp == depth):
                continue
            try:
                mesh = MeshConfig(pp=pp, cp=cp, tp=tp, tp_mode=mode, tp_depth=depth, cp_mode=how)
                data = DataConfig(global_batch=8, sequence_length=2048)
                if cp > 2:  # of fewer than 1,024 tokens a rank
                    continue
                check_combination(PretrainConfig(model=SMALL, mesh=mesh, nproc=ranks, data=data))
            except UserError:
                continue
            accepted.add((pp, cp, how, tp, mode, depth))
    found = {
        (run.pp, run.cp, run.mesh.cp_mode, run.tp, run.tp_mode, run.tp_depth) for run in meshes(JOB, cluster(ranks))
    }
    assert found == accepted
    assert len(found) > 20


def test_what_is_held_is_in_every_plan() -> None:
    held = {"mesh.tp": 2, "zero": 1, "recompute.mode": "selective", "microbatch": 1}
    for plan in search(replace(JOB, held=held), cluster(4)).plans:
        assert {name: plan.options()[name] for name in held} == held
    with pytest.raises(UserError, match=r"no mesh of 4 ranks with mesh\.tp=3 divides a batch of 8 rows"):
        search(replace(JOB, held={"mesh.tp": 3}), cluster(4))
    with pytest.raises(
        UserError, match=r"no run on 2 ranks is searched with mesh\.pp=2 zero=1 and a batch of 8 rows; leave"
    ):
        search(replace(JOB, held={"mesh.pp": 2, "zero": 1}), cluster(2))


@pytest.fixture(scope="module")
def plans():
    return search(replace(JOB, model=SHAPES["gpt2_124m"], batches=(16,), sequence_length=1024), cluster(4, 2**34))


def test_no_plan_of_the_front_is_beaten(plans) -> None:
    assert len(plans.plans) >= 5
    for one, other in itertools.pairwise(plans.plans):
        assert one.step_s < other.step_s
        assert one.memory_bytes > other.memory_bytes


def test_memory_is_the_estimators(plans) -> None:
    model = decoder_shape(SHAPES["gpt2_124m"])
    for plan in plans.plans:
        if plan.budget_bytes is None:
            assert plan.memory_bytes == estimate_memory(model, plan.run).peak_bytes
        else:
            assert plan.memory_bytes == plan.budget_bytes < estimate_memory(model, plan.run).peak_bytes


CODED = CommConfig(weights="int8", gradients="int4", secondary=True, node=2)
VARIED = [
    {},
    {"tp": 4, "pp": 2, "num_microbatches": 4},
    {"tp": 4, "tp_mode": "2d", "dp_replicate": 2},
    {"cp": 4, "dp_shard": 2, "zero": 1},
    {"cp": 4, "cp_exchange": 4, "dp_shard": 2, "zero": 2, "reduce_each": True, "num_microbatches": 2},
    {"dp_shard": 8, "zero": 3, "recompute": "full"},
    {"dp_replicate": 2, "dp_shard": 4, "zero": 3, "recompute": "selective"},
    {"pp": 8, "num_microbatches": 8, "pipeline": PipelineConfig("interleaved"), "recompute": "full"},
    {"pp": 4, "dp_replicate": 2, "num_microbatches": 6, "pipeline": PipelineConfig("zb-h1")},
    {"pp": 4, "tp": 2, "num_microbatches": 6, "pipeline": PipelineConfig("zbv")},
    {"dp_replicate": 8, "comm": CommConfig("powersgd")},
    {"dp_shard": 8, "zero": 1, "comm": CommConfig("zero_one", start=2)},
    {"dp_shard": 8, "zero": 3, "comm": CODED, "num_microbatches": 2},
    {"dp_replicate": 2, "dp_shard": 4, "zero": 2, "comm": CommConfig(weights="int8", gradients="int8")},
    {"dp_replicate": 8, "local_every": 50, "local_code": BlockCode(2)},
]


@pytest.mark.parametrize("options", VARIED, ids=str)
def test_a_slower_link_makes_no_step_faster(options: dict[str, Any]) -> None:
    """Nor a slower device; and some link makes it slower, where anything is sent."""
    model = decoder_shape(replace(SMALL, num_layers=16))
    run, on = RunShape(precision="bf16", sequence_length=128, **options), cluster(8)
    on = replace(on, ranks_per_machine=4)
    budget = 8_000_000 if run.zero == 3 and run.pp == 1 and not run.comm.is_given else None
    usual, slower = step_time(model, run, on, budget).step_s, []
    for name in ("inside", "across", "to_host"):
        link = getattr(on, name)
        for slow in (Link(link.latency_s, link.bytes_per_s / 3), Link(link.latency_s * 9, link.bytes_per_s)):
            slower.append(step_time(model, run, replace(on, **{name: slow}), budget).step_s)
    assert min(slower) >= usual
    assert (max(slower) > usual) == bool(options)
    for weaker in ({"utilisation": on.utilisation / 2}, {"bytes_per_s": on.bytes_per_s / 2}):
        assert step_time(model, run, replace(on, **weaker), budget).step_s >= usual
    time = step_time(model, run, on, budget)
    parts = (time.compute_s, time.messages_s, time.bubble_s, time.reduced_s, time.update_s, time.host_s)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(time.step_s)


@pytest.mark.parametrize("options", VARIED, ids=str)
def test_no_step_is_shorter_than_its_bound(options: dict[str, Any]) -> None:
    clock = StepClock(
        decoder_shape(replace(SMALL, num_layers=16)), RunShape(sequence_length=128, **options), cluster(8)
    )
    assert clock.least_s() <= clock.time().step_s * (1 + 1e-12)


def test_what_sends_less_takes_less_of_a_slow_link() -> None:
    """Beyond what is computed, about as the bytes of the plan's closed forms."""
    model, on = decoder_shape(replace(SMALL, dim=256, ffn_dim=1024)), replace(cluster(8), ranks_per_machine=1)
    on = replace(on, across=Link(0.0, 1e6))

    def sending(**options: Any) -> tuple[float, float]:
        run = RunShape(sequence_length=128, **options)
        return step_time(model, run, on).step_s, sent_bytes(model, run)

    for plain, forms in (
        ({"dp_replicate": 8}, ({"comm": CommConfig("powersgd")}, {"local_every": 50, "local_code": BlockCode(2)})),
        ({"dp_shard": 8, "zero": 3}, ({"comm": replace(CODED, node=1)}, {"comm": CommConfig(weights="int4")})),
        ({"dp_shard": 8, "zero": 1}, ({"comm": CommConfig(gradients="int4")}, {"comm": CommConfig("top_k")})),
    ):
        seconds, sent = sending(**plain)
        assert seconds == pytest.approx(sent / 1e6, rel=0.05)
        for form in forms:
            seconds, sent = sending(**plain | form)
            assert seconds == pytest.approx(sent / 1e6, rel=0.1), form


def test_more_compute_takes_longer_and_checkpointing_costs() -> None:
    model, on = decoder_shape(SHAPES["gpt3_6_7b"]), cluster(1)
    run = RunShape(precision="bf16", sequence_length=2048)
    plain, full, selective = (
        step_time(model, replace(run, recompute=mode), on).step_s for mode in ("none", "full", "selective")
    )
    assert plain < selective < 1.1 * plain
    assert 1.2 * plain < full < 4 / 3 * plain
    one, two = (step_time(model, replace(run, microbatch_size=size), on).compute_s for size in (1, 2))
    assert 1.8 * one < two < 2 * one


def test_a_ring_is_hidden_by_attention_and_gathers_by_blocks() -> None:
    """max(compute, communication): what is hidden is free up to what hides it, and no further."""
    model, fast = decoder_shape(SHAPES["gpt3_1_3b"]), cluster(8)
    run = RunShape(precision="bf16", sequence_length=16384, dp_shard=8, zero=3, microbatch_size=1)
    slow = replace(fast, inside=Link(0.0, 1e8))
    clock, alone = StepClock(model, run, slow), StepClock(model, replace(run, zero=0, dp_shard=1), slow)
    block, gathered = alone._blocks[0], clock._blocks[0].gathered
    assert gathered > block.forward
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        assert clock.action_s(kind, 0) >= model.num_blocks * gathered
    quick = StepClock(model, run, fast)
    assert quick._blocks[0].gathered < quick._blocks[0].forward
    assert quick.time().messages_s < 0.05 * quick.time().compute_s
    ring = replace(run, zero=0, dp_shard=1, cp=8, sequence_length=8 * 16384)
    hidden, seen = (StepClock(model, ring, on) for on in (fast, slow))
    assert hidden._sent[1] > 0.0
    assert hidden._blocks[0].sent == pytest.approx(hidden._sent[0] / 2 / model.num_blocks)
    assert seen._blocks[0].sent > 0.9 * seen._sent[1] / 2 / model.num_blocks


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    job = replace(JOB, model=SHAPES["gpt2_xl"], sequence_length=1024, held={"gemini.budget": None})
    with pytest.raises(
        UserError, match=r"no plan fits 2 x a100-40gb: the least needs .* more than .* --gpus \d+ of"
    ) as refused:
        search(job, cluster(2, 2**32))
    assert "\n" not in str(refused.value)


def test_a_prime_number_of_ranks_works_or_says_why() -> None:
    assert {plan.run.num_data_ranks for plan in search(replace(JOB, batches=(13,)), cluster(13)).plans} == {13}
    with pytest.raises(
        UserError, match=r"no mesh of 13 ranks divides a batch of 8 rows, 4 blocks .*; use --gpus 12, or"
    ):
        search(JOB, cluster(13))


def test_gemini_trains_where_nothing_else_fits() -> None:
    wide = replace(SMALL, dim=256, num_layers=8, ffn_dim=1024, max_length=64)  # little but weights
    job = replace(JOB, model=wide, sequence_length=64, held={"mesh.pp": 1, "mesh.tp": 1})
    least = search(replace(job, held=job.held | {"gemini.budget": None}), cluster(2)).plans[-1].memory_bytes
    on = cluster(2, least * 2 // 3)
    found = search(job, on).plans
    assert found
    assert all(plan.budget_bytes and plan.run.zero == 3 and plan.time.host_s > 0 for plan in found)


def test_the_nearest_run_that_fits_changes_least() -> None:
    model, size = decoder_shape(SMALL), tight(JOB, 2)
    run = RunShape(precision="bf16", dp_replicate=2, microbatch_size=2, sequence_length=2048)
    assert estimate_memory(model, run).peak_bytes > size
    changed = nearest(JOB, cluster(2, size), run)
    assert changed
    fitting = [r for r in space(JOB, cluster(2)) if estimate_memory(model, r).peak_bytes <= size]
    given = options_of(run)
    assert len(changed) <= min(sum(v != given[k] for k, v in options_of(r).items()) for r in fitting)
    assert nearest(JOB, cluster(2, 1000), run) is None


def test_every_choice_is_in_the_space() -> None:
    job = replace(JOB, model=replace(SMALL, num_layers=8), batches=(16,))
    found = list(space(job, cluster(8)))
    assert {(run.recompute, run.recompute_every) for run in found} == set(RECOMPUTED)
    assert {(run.pipeline.schedule, run.pipeline.chunks) for run in found} == set(SCHEDULED)
    assert {run.zero for run in found} == {0, 1, 2, 3}
    assert {run.precision for run in found} == {"bf16", "fp32"}
    assert {run.tp_mode for run in found} == {"1d", "2d", "2.5d", "3d"}
    assert {run.cp_exchange > 1 for run in found} == {run.reduce_each for run in found} == {True, False}
    assert len({(*options_of(run).items(), run.dp_shard) for run in found}) == len(found)


@pytest.mark.parametrize(
    ("gpu", "given", "own", "tried"),
    [
        ("a100-40gb", None, "bf16", ["bf16", "fp32"]),
        ("a100-40gb", None, "fp16", ["fp16", "fp32"]),
        ("a100-40gb", None, "fp32", ["bf16", "fp32"]),
        ("v100-32gb", None, "bf16", ["fp16", "fp32"]),
        ("l4", "fp32", "bf16", ["fp32"]),
        ("a100-40gb", "fp64", "bf16", ["fp64"]),
    ],
)
def test_formats_are_those_that_the_gpu_computes_in(gpu: str, given: Any, own: Any, tried: list[str]) -> None:
    job = replace(JOB, precision=own, held={"precision": given})
    on = cluster_of(gpu_named(gpu), 2, memory_bytes=ROOMY)
    assert precisions(job, on) == tried
    assert {run.precision for run in meshes(job, on)} == set(tried)
    assert {plan.run.precision for plan in search(replace(job, batches=(2,)), on).plans} <= set(tried)


def test_a_format_that_the_gpu_has_not_is_refused_by_name() -> None:
    for gpu, precision, has in (("t4", "bf16", "fp32 or fp16"), ("l4", "fp64", "fp32 or bf16 or fp16")):
        with pytest.raises(UserError, match=f"precision={precision} and a {gpu} does not compute in it; .* {has}"):
            search(replace(JOB, held={"precision": precision}), cluster_of(gpu_named(gpu), 2))


def test_ranks_that_share_a_link_to_their_host_wait_for_it() -> None:
    """And those that share its memory update more slowly; gradients of each microbatch leave."""
    wide = replace(SMALL, dim=512, num_layers=8, ffn_dim=2048, max_length=64)
    model, run = decoder_shape(wide), RunShape(precision="bf16", sequence_length=64, zero=3, dp_shard=2)
    budget = estimate_memory(model, run).peak_bytes // 3
    on = cluster(2)
    usual = step_time(model, run, on, budget)
    halved = replace(on, to_host=Link(0.0, on.to_host.bytes_per_s / 2))
    assert step_time(model, run, halved, budget).step_s > 1.3 * usual.step_s
    assert step_time(model, run, replace(on, host_update=on.host_update / 2), budget).host_s == 2 * usual.host_s
    again = step_time(model, replace(run, num_microbatches=2), on, budget)
    assert again.step_s - again.host_s > 1.8 * (usual.step_s - usual.host_s - usual.update_s)
    sharing, alone = (cluster_of(gpu_named(name), 8) for name in ("a100-40gb", "a100-pcie-40gb"))
    assert 2 * sharing.to_host.bytes_per_s == alone.to_host.bytes_per_s


@pytest.mark.parametrize(("precision", "share"), [("fp32", 0.5), ("bf16", 0.4), ("bf16", 0.7)])
def test_gemini_takes_of_the_host_what_its_own_planner_says(precision: Any, share: float) -> None:
    """And as long: the search has a closed form of what `core.gemini` decides by a trace of the step."""
    config = replace(SMALL, dim=256, num_layers=12, ffn_dim=1024, max_length=64)
    run = RunShape(precision=precision, sequence_length=64, zero=3, recompute="full")
    model, on = decoder_shape(config, device_type="cpu"), cluster(1)
    budget = int(share * estimate_memory(model, run).peak_bytes)
    clock = StepClock(model, run, on, budget)
    with torch.device("meta"):
        decoder = Decoder(config)
    options = ParallelConfig(
        precision=precision, zero=3, recompute=RecomputeConfig("full"), gemini=GeminiConfig(str(budget))
    )
    speed = Speed(clock.flops, on.bytes_per_s)
    given = decoder, partial(decoder_loss, 1, 64), run.mesh, options, speed, on.to_host.bytes_per_s
    planned = estimate_budget(*given, decoder_plan(config, run.mesh)).plan
    # Chunks are whole, and its planner leaves room for fetching ahead and keeps some between two uses.
    assert clock.host_bytes == pytest.approx(planned.host_bytes, rel=0.25)
    assert clock.time().host_s == pytest.approx(planned.busy_s["host_update"], rel=0.25)
    brought_s = 2 * sum(part.num_whole for part in clock._parts) * clock._brought
    assert 0.6 < brought_s * on.to_host.bytes_per_s / planned.to_device_bytes < 2
