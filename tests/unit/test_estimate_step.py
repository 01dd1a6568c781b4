"""A step that is estimated on tensors without memory is the step that is run: bytes, messages, FLOPs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from core.compose import ParallelConfig
from core.config import UserError
from core.estimate import RunShape, StepEstimate, decoder_shape, estimate_memory, estimate_step
from core.estimate.time import step_flops
from core.gemini.config import GeminiConfig
from core.kernels import cross_entropy
from core.mesh import MeshConfig
from core.models.decoder import Decoder, DecoderConfig
from core.models.plan import decoder_plan
from core.optim.build import OPTIMIZERS, OptimConfig
from core.optim.matrices import MatrixConfig
from core.parallel.recompute import RecomputeConfig
from core.runtime import start
from core.trace.machine import Speed
from tests.support import zoo
from tests.support.accounted import accounted_decoder, accounted_step, decoder_loss
from tests.unit.test_estimate import CHUNK_BYTES, FAMILIES, SMALL

SPEED = Speed(1e12, 1e11)
ALONE = MeshConfig().resolve(1)


def estimated(
    config: DecoderConfig, parallel: ParallelConfig, rows: int, num_microbatches: int = 1, mesh: MeshConfig = ALONE
) -> StepEstimate:
    with torch.device("meta"):
        model = Decoder(config)
    loss = partial(decoder_loss, rows, config.max_length)
    return estimate_step(
        model, loss, mesh, parallel, SPEED, decoder_plan(config, mesh), num_microbatches=num_microbatches
    )


@pytest.mark.parametrize(
    ("family", "precision", "recompute", "every", "num_microbatches"),
    [
        ("gpt2", "fp32", "none", 1, 1),
        ("gpt2", "bf16", "full", 2, 1),
        ("gpt2, large vocabulary", "bf16", "none", 1, 1),
        ("opt", "fp64", "selective", 1, 1),
        ("bloom", "fp32", "none", 1, 1),
        ("llama", "fp32", "none", 1, 2),
        ("llama", "bf16", "full", 1, 1),
    ],
)
def test_a_decoder_takes_what_is_counted_and_what_its_closed_form_says(
    family: str, precision, recompute, every: int, num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", CHUNK_BYTES)
    config, options = FAMILIES[family], ParallelConfig(precision=precision, recompute=RecomputeConfig(recompute, every))
    with start("cpu") as runtime:
        counted, _ = accounted_decoder(config, runtime.mesh(MeshConfig()), options, 8, 128, num_microbatches)
    found = estimated(config, options, 8, num_microbatches)
    assert found.peak_bytes == pytest.approx(counted, rel=0.02)
    run = RunShape(
        precision=precision,
        recompute=recompute,
        recompute_every=every,
        microbatch_size=8,
        num_microbatches=num_microbatches,
        sequence_length=128,
    )
    form = estimate_memory(decoder_shape(config, device_type="cpu"), run)
    assert found.peak_bytes == pytest.approx(form.peak_bytes, rel=0.04)
    assert found.parameters_bytes == form.parameters_bytes


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(("gpt2", "bf16"), ("recomputing gpt2", "fp32"), ("opt", "bf16"), ("t5", "fp32")),
        *(("lora", "fp32"), ("unet", "bf16"), ("clip", "fp32")),
    ],
)
def test_a_foreign_module_takes_what_is_counted(name: str, precision) -> None:
    case, parallel = zoo.CASES[name], ParallelConfig(precision=precision)

    def loss(model: nn.Module) -> Tensor:
        return case.loss(model, case.batch(0))

    with start("cpu") as runtime:
        counted, _ = accounted_step(case.make(), loss, runtime.mesh(MeshConfig()), parallel)
    with torch.device("meta"):
        model = case.make()
    assert estimate_step(model, loss, ALONE, parallel, SPEED).peak_bytes == pytest.approx(counted, rel=0.02)


def test_microbatches_between_the_first_and_the_last_are_counted_without_being_run() -> None:
    config, mesh = replace(SMALL, num_layers=1, max_length=8), MeshConfig(dp_shard=2, dp_replicate=1)
    two, three, five = (estimated(config, ParallelConfig(zero=3), 1, n, mesh) for n in (2, 3, 5))
    assert five.peak_bytes == two.peak_bytes
    for of in (lambda e: e.flops, lambda e: e.compute_s, lambda e: e.sent.bytes["all_gather", "dp_shard"]):
        assert of(five) - of(three) == pytest.approx(2 * (of(three) - of(two)))
        assert of(three) > of(two)


@pytest.mark.parametrize("name", [name for name, spec in OPTIMIZERS.items() if not spec.looks])
def test_an_optimizer_keeps_what_its_record_says(name: str) -> None:
    """On two ranks with ZeRO 1; counters of steps are not in the record."""
    options = OptimConfig(name)
    num_layers = 2 if isinstance(options, MatrixConfig) else 1  # homes of two alike blocks are dealt out evenly
    config, mesh = replace(SMALL, num_layers=num_layers, max_length=8), MeshConfig().resolve(2, 1)
    loss = partial(decoder_loss, 1, 8)
    with torch.device("meta"):
        model = Decoder(config)
    run = RunShape(optimizer=options, dp_shard=2, zero=1, sequence_length=8)
    form = estimate_memory(decoder_shape(config), run)
    found = estimate_step(model, loss, mesh, ParallelConfig(zero=1), SPEED, optimizer=options)
    assert found.state_bytes == pytest.approx(form.optimizer_bytes, rel=0.02, abs=200)


def test_flops_are_those_of_the_closed_form() -> None:
    """Which counts four products of scores in the backward, where fused attention makes the scores once more."""
    run = RunShape(microbatch_size=2, num_microbatches=3, sequence_length=128)
    again = 2 * SMALL.num_layers * SMALL.dim * 128 * 2 * 3 * 128
    assert estimated(SMALL, ParallelConfig(), 2, 3).flops == step_flops(decoder_shape(SMALL), run) + again


def test_what_is_not_estimated_is_refused_in_a_line() -> None:
    def refused(model: nn.Module, loss: Callable[[nn.Module], Tensor], parallel: ParallelConfig, **sizes: int) -> str:
        mesh = MeshConfig(dp_replicate=1, dp_shard=1, **sizes)
        with pytest.raises(UserError) as error:
            estimate_step(model, loss, mesh, parallel, SPEED)
        assert "\n" not in str(error.value)
        return str(error.value)

    def looking(model: nn.Module) -> Tensor:
        found = model(torch.zeros(2, 3)).sum()
        return found if found > 0 else -found

    with torch.device("meta"):
        linear = nn.Linear(3, 3)
    assert "mesh.pp=2" in refused(linear, looking, ParallelConfig(), pp=2)
    assert "mesh.tp=2 without a plan" in refused(linear, looking, ParallelConfig(), tp=2)
    assert "gemini.budget=1MB" in refused(linear, looking, ParallelConfig(gemini=GeminiConfig("1MB")))
    assert "this model's step cannot be foreseen without values" in refused(linear, looking, ParallelConfig())
