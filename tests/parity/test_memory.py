"""On several ranks a real step allocates and sends what the estimators say, and each ZeRO level what its formula is."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.compose import ParallelConfig, parallelize
from core.config import UserError
from core.estimate import RunShape, decoder_shape, estimate_memory, estimate_step
from core.estimate.memory import estimate_places
from core.estimate.pipeline import stages_of
from core.layout import local
from core.mesh import MeshConfig, Zero, build_mesh
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import decoder_plan
from core.nn.routing import MoEConfig
from core.optim.build import OptimConfig, build_optimizer
from core.parallel.correction import CorrectionName
from core.parallel.pipeline.schedule import SCHEDULES, PipelineConfig, ScheduleName
from core.parallel.recompute import RecomputeConfig, RecomputeMode
from core.precision import Precision
from core.trace.machine import Speed
from tests.support import ahead, zoo
from tests.support.accounted import accounted_decoder, accounted_step, decoder_loss
from tests.support.covering import few_rows

MODEL = DecoderConfig(vocab_size=1024, dim=128, num_layers=4, num_heads=4, ffn_dim=512, max_length=64)
STAGED = replace(MODEL, vocab_size=2048, dim=256, num_layers=6, ffn_dim=1024)


def counted(
    model: DecoderConfig, mesh: MeshConfig, parallel: ParallelConfig, rows: int, num_microbatches: int
) -> tuple[int, Counter, Counter]:
    """Most bytes alive, bytes and calls of messages."""
    built = build_mesh(mesh.resolve(dist.get_world_size(), parallel.zero), "cpu")
    most, sent = accounted_decoder(model, built, parallel, rows, model.max_length, num_microbatches)
    return most, sent.bytes, sent.calls


ESTIMATED = [
    *((precision, tp, zero, 1) for precision, tp in (("fp32", 1), ("bf16", 1), ("fp32", 2)) for zero in range(4)),
    ("fp32", 1, 2, 2),
    ("bf16", 1, 3, 2),
]
ROWS = {
    "-".join(map(str, row)): dict(zip(("precision", "tp", "zero", "microbatches"), row, strict=True))
    for row in ESTIMATED
}


@pytest.mark.parametrize("name", few_rows(ROWS))
def test_estimate(ranks, name: str) -> None:
    precision, tp, zero, num_microbatches = ROWS[name].values()
    parallel = ParallelConfig(zero=zero, precision=precision, reduce_each=num_microbatches > 1)
    of_ranks = ranks(2 * tp).run(counted, MODEL, MeshConfig(tp=tp), parallel, 4, num_microbatches)
    measured = max(most for most, _, _ in of_ranks)
    run = RunShape(
        precision=precision,
        dp_replicate=1 if zero else 2,
        dp_shard=2 if zero else 1,
        tp=tp,
        zero=zero,
        microbatch_size=4,
        num_microbatches=num_microbatches,
        reduce_each=parallel.reduce_each,
        sequence_length=MODEL.max_length,
    )
    estimate = estimate_memory(decoder_shape(MODEL, device_type="cpu"), run)
    expected = estimate.peak_bytes
    if zero == 2:  # gloo copies a message, here all gradients, while it reduces and scatters it; NCCL does not
        expected = max(expected, estimate.phases["gradients"] + 4 * MODEL.num_parameters() // tp)
    assert expected == pytest.approx(measured, rel=0.1)
    mesh = MeshConfig(tp=tp).resolve(2 * tp, zero)
    with torch.device("meta"):
        model = Decoder(MODEL)
    loss = partial(decoder_loss, 4, MODEL.max_length)
    plan = decoder_plan(MODEL, mesh)
    traced = estimate_step(model, loss, mesh, parallel, Speed(1e12, 1e12), plan, num_microbatches=num_microbatches)
    expected = traced.peak_bytes
    if zero == 2:  # as above
        expected = max(expected, traced.phases["update"] + 4 * MODEL.num_parameters() // tp)
    assert expected == pytest.approx(measured, rel=0.02)
    assert (traced.sent.bytes, traced.sent.calls) == of_ranks[0][1:]


EXPERTS = replace(MODEL, num_layers=3, moe=MoEConfig(4, experts_per_token=4))
"""All tokens go to all experts, so that loads are balanced, as the estimators take them to be."""
GRIDS = {
    "a square": (4, MeshConfig(tp=4, tp_mode="2d"), 0),
    "a square in depth": (8, MeshConfig(tp=8, tp_mode="2.5d", tp_depth=2), 0),
    "a cube": (8, MeshConfig(tp=8, tp_mode="3d"), 0),
    "squares with ep": (8, MeshConfig(tp=4, tp_mode="2d", ep=2), 3),
    "no grid": (4, MeshConfig(tp=2, ep=2), 1),
}


def counted_experts(mesh: MeshConfig, parallel: ParallelConfig) -> tuple[int, Counter, Counter]:
    sizes = mesh.resolve(dist.get_world_size(), parallel.zero)
    with torch.device("meta"):
        model = Decoder(EXPERTS)
    loss, plan = partial(decoder_loss, 4, EXPERTS.max_length), decoder_plan(EXPERTS, sizes)
    built = build_mesh(sizes, "cpu")
    most, sent = accounted_step(model, loss, built, parallel, 1, plan, lambda m: initialise(m, 0))
    return most, sent.bytes, sent.calls


@pytest.mark.parametrize(
    "name", [name if name == "a square" else pytest.param(name, marks=pytest.mark.soak) for name in GRIDS]
)
def test_estimate_of_experts_on_grids(ranks, name: str) -> None:
    num_ranks, mesh, zero = GRIDS[name]
    parallel = ParallelConfig(zero=zero)
    measured, sent, calls = max(ranks(num_ranks).run(counted_experts, mesh, parallel), key=lambda of_rank: of_rank[0])
    sizes = mesh.resolve(num_ranks, zero)
    with torch.device("meta"):
        model = Decoder(EXPERTS)
    loss, plan = partial(decoder_loss, 4, EXPERTS.max_length), decoder_plan(EXPERTS, sizes)
    traced = estimate_step(model, loss, sizes, parallel, Speed(1e12, 1e12), plan)
    assert traced.peak_bytes == pytest.approx(measured, rel=0.02)
    assert (traced.sent.bytes, traced.sent.calls) == (sent, calls)


STAGES = [
    *((name, "none") for name in get_args(ScheduleName) if not SCHEDULES[name].runs_ahead),
    ("zb-h1", "full"),
    *(
        pytest.param(*row, marks=pytest.mark.soak)
        for row in (("zbv", "full"), ("zb-h1", "selective"), ("1f1b", "full"))
    ),
]


@pytest.mark.parametrize(("schedule", "recompute"), STAGES)
def test_estimate_of_stages(ranks, schedule: ScheduleName, recompute: RecomputeMode) -> None:
    """The fullest rank, with what its schedule keeps of six microbatches (GPipe: twelve); the tied head is twice."""
    pipeline = PipelineConfig(schedule)
    # In fp32 a CPU's products may compute a weight's gradient with its input's, and nothing waits.
    precision = "fp32" if recompute == "none" else "fp64"
    run = RunShape(
        precision=precision,
        pp=2,
        pipeline=pipeline,
        recompute=recompute,
        microbatch_size=4,
        num_microbatches=12 if schedule == "gpipe" else 6,
        sequence_length=STAGED.max_length,
    )
    shape = decoder_shape(STAGED, device_type="cpu")
    given = replace(pipeline, split=tuple(len(blocks) for blocks in stages_of(shape, run).ranges))
    parallel = ParallelConfig(precision=precision, pipeline=given, recompute=RecomputeConfig(recompute))
    of_ranks = ranks(2).run(counted, STAGED, MeshConfig(pp=2), parallel, 4, run.num_microbatches)
    measured, sent, calls = max(of_ranks, key=lambda of_rank: of_rank[0])
    assert estimate_memory(shape, run).peak_bytes == pytest.approx(measured, rel=0.05)
    mesh, loss = MeshConfig(pp=2).resolve(2), partial(decoder_loss, 4, STAGED.max_length)
    with torch.device("meta"):
        model = Decoder(STAGED)
    plan, speed = decoder_plan(STAGED, mesh), Speed(1e12, 1e12)
    traced = estimate_step(model, loss, mesh, parallel, speed, plan, num_microbatches=run.num_microbatches)
    assert traced.peak_bytes == pytest.approx(measured, rel=0.02)
    assert (traced.sent.bytes, traced.sent.calls) == (sent, calls)


OVERLAPPING: list[tuple[ScheduleName, tuple[int, ...], int, Zero, Precision, int]] = [
    ("2bw", (2, 4), 2, 0, "fp32", 4),
    ("2bw", (3, 3), 4, 1, "bf16", 4),
    ("pipedream", (2, 2, 2), 3, 0, "fp32", 1),
    ("pipedream_sync", (2, 2, 2), 3, 0, "bf16", 1),
]
OVERLAPPING_LONG: list[tuple[ScheduleName, tuple[int, ...], int, Zero, Precision, int]] = [
    ("2bw", (2, 2, 2), 3, 0, "bf16", 3),
    ("2bw", (2, 4), 2, 0, "bf16", 4),
    ("2bw", (3, 3), 4, 1, "fp32", 4),
    ("pipedream", (2, 2, 2), 3, 0, "bf16", 3),
    ("pipedream", (3, 3), 4, 1, "fp32", 1),
    ("pipedream", (3, 3), 4, 1, "bf16", 2),
    ("pipedream_sync", (2, 2, 2), 3, 0, "fp32", 1),
    ("pipedream_sync", (2, 2, 2), 3, 0, "fp32", 3),
    ("pipedream_sync", (3, 3), 4, 1, "fp32", 1),
]


@pytest.mark.parametrize(
    ("schedule", "replicas", "number"),
    [
        ("pipedream", (2, 1), 2),
        *(
            pytest.param(*row, marks=pytest.mark.soak)
            for row in [
                ("pipedream_sync", (2, 1), 4),
                ("2bw", (2, 1), 6),
                ("pipedream", (1, 2, 1), 4),
            ]
        ),
    ],
)
def test_estimate_of_replicas(ranks, schedule: ScheduleName, replicas: tuple[int, ...], number: int) -> None:
    pipeline, pp = PipelineConfig(schedule, replicas=replicas), sum(replicas)
    run = RunShape(
        precision="fp32",
        pp=pp,
        pipeline=pipeline,
        microbatch_size=4,
        num_microbatches=number,
        sequence_length=STAGED.max_length,
    )
    staged = replace(STAGED, tied_head=False)
    shape = decoder_shape(staged, device_type="cpu")
    split = tuple(len(blocks) for blocks in stages_of(shape, run).ranges)
    parallel = ParallelConfig(precision="fp32", pipeline=replace(pipeline, split=split))
    measured = ranks(pp).run(ahead.peak_of_steps, staged, parallel, 4, number, pp, 2 * len(replicas))
    assert estimate_memory(shape, run).peak_bytes == pytest.approx(max(measured), rel=0.1)


@pytest.mark.parametrize(
    ("schedule", "split", "size", "zero", "precision", "number"),
    [*OVERLAPPING, *(pytest.param(*row, marks=pytest.mark.soak) for row in OVERLAPPING_LONG)],
)
def test_estimate_of_steps_that_overlap(
    ranks, schedule: ScheduleName, split: tuple[int, ...], size: int, zero: Zero, precision: Precision, number: int
) -> None:
    """Versions of the parameters, and gradients of several steps, on every stage."""
    pipeline, stages = PipelineConfig(schedule, split=split), len(split)
    run = RunShape(
        precision=precision,
        pp=stages,
        dp_shard=size // stages if zero else 1,
        pipeline=pipeline,
        zero=zero,
        microbatch_size=4,
        num_microbatches=number,
        sequence_length=STAGED.max_length,
    )
    # A tied weight is on its way for as many steps, in the host's memory, which here is that of the model.
    staged = replace(STAGED, tied_head=schedule == "2bw")
    shape = decoder_shape(staged, device_type="cpu")
    parallel = ParallelConfig(precision=precision, zero=zero, pipeline=pipeline)
    measured = ranks(size).run(ahead.peak_of_steps, staged, parallel, 4, number, stages, 2 * stages)
    for stage, estimate in estimate_places(shape, run).items():
        of_stage = measured[stage * size // stages : (stage + 1) * size // stages]
        assert estimate.peak_bytes == pytest.approx(max(of_stage), rel=0.1), f"stage {stage}"
    mesh = MeshConfig(pp=stages).resolve(size, zero)
    with torch.device("meta"):
        model = Decoder(staged)

    def loss(model: nn.Module) -> torch.Tensor:
        return decoder_loss(4, staged.max_length, model)

    given = model, loss, mesh, parallel, Speed(1e12, 1e12), decoder_plan(staged, mesh)
    if schedule != "2bw":
        with pytest.raises(UserError, match="more versions than are foreseen of any model"):
            estimate_step(*given, num_microbatches=number)
        return
    assert estimate_step(*given, num_microbatches=number).peak_bytes == pytest.approx(max(measured), rel=0.1)


def test_stages_with_forwards_behind_their_first_gradients(ranks) -> None:
    """The few microbatches that are traced have them too, on a rank that has all of its others in flight before."""
    parallel, pp, number = ParallelConfig(pipeline=PipelineConfig("1f1b", split=(2, 2, 2))), 3, 6
    of_ranks = ranks(pp).run(counted, STAGED, MeshConfig(pp=pp), parallel, 4, number)
    mesh, loss = MeshConfig(pp=pp).resolve(pp), partial(decoder_loss, 4, STAGED.max_length)
    with torch.device("meta"):
        model = Decoder(STAGED)
    plan, speed = decoder_plan(STAGED, mesh), Speed(1e12, 1e12)
    traced = estimate_step(model, loss, mesh, parallel, speed, plan, num_microbatches=number)
    assert traced.peak_bytes == pytest.approx(max(most for most, _, _ in of_ranks), rel=0.02)


@pytest.mark.parametrize("correction", ["prediction", "error_feedback"])
def test_estimate_of_a_correction(correction: CorrectionName) -> None:
    """Its state, the masters where versions are other values, and the weights of before while the optimizer steps."""
    shape = decoder_shape(STAGED, device_type="cpu")
    run = RunShape(pp=2, pipeline=PipelineConfig("2bw"), num_microbatches=4, sequence_length=STAGED.max_length)
    plain = estimate_memory(shape, run)
    with_it = estimate_memory(shape, replace(run, pipeline=PipelineConfig("2bw", correction=correction)))
    weights = plain.parameters_bytes // 2
    assert with_it.optimizer_bytes - plain.optimizer_bytes == (1 + (correction == "prediction")) * weights
    assert with_it.phases["update"] > plain.phases["update"] + weights


def counted_gpt2(parallel: ParallelConfig, num_microbatches: int) -> tuple[int, Counter, Counter]:
    built, loss = build_mesh(MeshConfig(pp=2).resolve(2), "cpu"), zoo_loss("gpt2")
    most, sent = accounted_step(zoo.CASES["gpt2"].make(), loss, built, parallel, num_microbatches)
    return most, sent.bytes, sent.calls


def zoo_loss(name: str) -> Callable[[nn.Module], torch.Tensor]:
    case = zoo.CASES[name]
    return lambda model: case.loss(model, case.batch(0))


def test_estimate_of_stages_that_a_forward_shows(ranks) -> None:
    parallel, mesh = ParallelConfig(), MeshConfig(pp=2).resolve(2)
    measured, sent, calls = max(ranks(2).run(counted_gpt2, parallel, 4), key=lambda of_rank: of_rank[0])
    with torch.device("meta"):
        model = zoo.CASES["gpt2"].make()
    traced = estimate_step(model, zoo_loss("gpt2"), mesh, parallel, Speed(1e12, 1e12), num_microbatches=4)
    assert traced.peak_bytes == pytest.approx(measured, rel=0.02)
    assert (traced.sent.bytes, traced.sent.calls) == (sent, calls)


def state_bytes(parallel: ParallelConfig) -> dict[str, int]:
    """Bytes that a rank holds between backward and update: each storage once."""
    mesh = build_mesh(MeshConfig().resolve(dist.get_world_size(), parallel.zero), "cpu")
    model = Decoder(MODEL)
    initialise(model, 0)
    spread = parallelize(model, mesh, parallel)
    optimizer = build_optimizer(OptimConfig(), spread.masters)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with spread.microbatch(last=True):
        spread.model(ids, targets=ids).backward()
    spread.reduce()
    optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values() if v.ndim]
    found = {
        "parameters": _storages([local(p.detach()) for p in spread.model.parameters()]),
        "gradients": _storages([m.grad for m in spread.masters.values() if m.grad is not None]),
        "optimizer": _storages(states),
    }
    masters = _storages([m.detach() for m in spread.masters.values()])
    held = {name: sum(storages.values()) for name, storages in found.items()}
    held["masters"] = sum(n for key, n in masters.items() if key not in found["parameters"])
    return held


def _storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rank_holds_what_the_level_says(ranks, zero: int, precision: str) -> None:
    """Rajbhandari et al. 2020, figure 1, on four ranks; every dim 0 of the model divides by four."""
    held = ranks(4).run(state_bytes, ParallelConfig(zero=zero, precision=precision))[0]
    num_parameters = MODEL.num_parameters()
    wide = precision == "fp32" or zero == 3  # FSDP2's shards are the masters
    expected = {
        "parameters": (4 if wide else 2) * num_parameters / (4 if zero == 3 else 1),
        "gradients": 4 * num_parameters / (4 if zero >= 2 else 1),
        "optimizer": 8 * num_parameters / (4 if zero else 1),
        "masters": 0 if wide else 4 * num_parameters / (4 if zero else 1),
    }
    assert held == expected
