"""Pipelines before they run: costs of stages, the step on a clock, memory by schedule, the picture."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from apps.llm.plan import draw_step, run_shape
from apps.llm.recipes import RECIPES
from core.config import UserError
from core.estimate import (
    BlockShape,
    HeadShape,
    Kept,
    Machine,
    ModelShape,
    RunShape,
    Weight,
    decoder_shape,
    estimate_memory,
    estimate_time,
    simulated_timeline,
    stage_costs,
)
from core.estimate.pipeline import stages_of
from core.mesh import MeshConfig
from core.models.decoder import DecoderConfig
from core.models.measured_costs import measured_costs
from core.nn.routing import MoEConfig
from core.parallel.pipeline.schedule import PipelineConfig, ScheduleName

MACHINE = Machine(1e12, bandwidth=float("inf"), utilisation=0.5)
BLOCKS = ModelShape(
    tuple(Weight((10, 10), block=index) for index in range(8)),
    num_blocks=8,
    block=BlockShape(Kept(10), Kept(90), Kept()),
    dim=0,
    num_matmul_parameters=800,
)
"""Eight equal blocks and nothing else."""


def run_of(name: ScheduleName, **options: object) -> RunShape:
    return RunShape(
        **{"pp": 4, "num_microbatches": 8, "sequence_length": 1, "pipeline": PipelineConfig(name)} | options
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
def test_equal_stages_idle_as_published(name: ScheduleName) -> None:
    run = run_of(name)
    timeline = simulated_timeline(BLOCKS, run, MACHINE)
    assert timeline.bubble == pytest.approx(timeline.theory, abs=1e-12)
    time = estimate_time(BLOCKS, run, MACHINE)
    assert time.step_s == pytest.approx(timeline.step_s)
    assert time.bubble_s / time.step_s == pytest.approx(timeline.theory)


def test_recomputation_makes_backwards_longer() -> None:
    plain, again = (run_of("1f1b", recompute=mode) for mode in ("none", "full"))
    ratio = simulated_timeline(BLOCKS, again, MACHINE).step_s / simulated_timeline(BLOCKS, plain, MACHINE).step_s
    assert ratio == pytest.approx(4 / 3)
    messages = replace(MACHINE, bandwidth=1.0)
    wide = replace(BLOCKS, dim=4)
    sent = estimate_time(wide, plain, messages).communication_s
    assert sent == pytest.approx(2 * 8 * 4 * 4)
    assert simulated_timeline(wide, plain, messages).bubble > 0.9


def test_a_large_head_gets_fewer_blocks_beside_it_and_still_makes_a_bubble() -> None:
    headed = replace(BLOCKS, head=HeadShape(100, 10, tied=False), num_matmul_parameters=800 + 1000)
    run = run_of("1f1b")
    costs = stage_costs(headed, run)
    assert costs.behind == pytest.approx(10 * costs.blocks[0])
    stages = stages_of(headed, run)
    assert [len(blocks) for blocks in stages.ranges] == [2, 2, 3, 1]
    assert [stages.ranks_with(block)[0] for block in (-1, 0, 6, 7, 8)] == [0, 0, 2, 3, 3]
    timeline = simulated_timeline(headed, run, MACHINE)
    assert timeline.bubble > 2 * timeline.theory


def test_what_a_schedule_keeps() -> None:
    activations = {
        name: estimate_memory(BLOCKS, run_of(name)).activations_bytes
        for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
    }
    block, gradients = 4 * 100, 4 * 2 * 10  # of a microbatch; the latter wait between I and W
    assert activations == {
        "gpipe": 8 * 2 * block, "1f1b": 4 * 2 * block, "interleaved": (4 + 2 * 3 + 1) * block,
        "zb-h1": 4 * 2 * (block + gradients), "zbv": 8 * block + 2 * gradients,
    }  # fmt: skip


def test_a_tied_head_is_there_twice_but_for_a_v() -> None:
    tied = DecoderConfig(vocab_size=1000, dim=16, num_layers=8, num_heads=2, ffn_dim=32, max_length=8)
    shape, weight = decoder_shape(tied), 1000 * 16
    parameters = {}
    for name in ("1f1b", "zbv"):
        run = run_of(name, pipeline=PipelineConfig(name, split=(2,) * 4 if name == "1f1b" else (1,) * 8))
        parameters[name] = estimate_memory(shape, run).parameters_bytes
    blocks = 4 * 2 * sum(w.shape[0] * (w.shape[1] if len(w.shape) > 1 else 1) for w in shape.weights if w.block == 0)
    norm, positions = 4 * 2 * 16, 4 * 8 * 16
    assert parameters == {"1f1b": blocks + 4 * weight + positions, "zbv": blocks + 4 * weight + positions + norm}


def test_measured_costs_are_of_every_part() -> None:
    model = DecoderConfig(
        vocab_size=300, dim=16, num_layers=3, num_heads=2, ffn_dim=32, family="llama", positions="rotary",
        norm="rms_norm", activation="swiglu", attention_bias=False, mlp_bias=False, tied_head=False,
    )  # fmt: skip
    costs = measured_costs(model, 2, 8, torch.float32, torch.device("cpu"))
    assert len(set(costs.blocks)) == 1
    assert len(costs.blocks) == 3
    assert min(costs.before, costs.behind, costs.blocks[0]) > 0
    mixed = measured_costs(replace(model, moe=MoEConfig(4, every=2)), 2, 8, torch.float32, torch.device("cpu"))
    assert mixed.blocks[0] == mixed.blocks[2] != mixed.blocks[1]


def test_a_block_with_experts_costs_what_its_tokens_are_multiplied_with() -> None:
    model = DecoderConfig(vocab_size=100, dim=16, num_layers=4, num_heads=2, ffn_dim=32, moe=MoEConfig(8, every=2))
    plain, experts, *_ = stage_costs(decoder_shape(model), run_of("1f1b")).blocks
    second_mlp, router = 2 * 16 * 32, 8 * 16
    assert experts - plain == 6 * (second_mlp + router)


def test_the_step_is_drawn(tmp_path: Path) -> None:
    config = replace(RECIPES["debug"](), nproc=4, mesh=MeshConfig(pp=4))
    model, run = decoder_shape(config.model), run_shape(config)
    said = draw_step(config, model, run, MACHINE, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert "1f1b, 4 ranks, 16 microbatches: bubble" in said
    assert "15.8% in theory" in said
    alone = replace(RECIPES["debug"](), nproc=1)
    with pytest.raises(UserError, match=r"mesh\.pp=1 has none; add --mesh\.pp 2"):
        draw_step(alone, model, run_shape(alone), MACHINE, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
@pytest.mark.parametrize("options", [{}, {"recompute": "full", "recompute_every": 2}, {"recompute": "selective"}])
def test_the_fullest_rank_is_among_those_that_are_looked_at(
    name: ScheduleName, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder_shape(DecoderConfig(vocab_size=99, dim=32, num_layers=19, num_heads=2, ffn_dim=64))
    for number in (1, 3, 8):
        run = run_of(name, num_microbatches=number, sequence_length=64, **options)
        found = estimate_memory(model, run)
        with monkeypatch.context() as patch:
            patch.setattr("core.estimate.memory._telling", lambda model, run, stages, own: range(run.pp))
            assert estimate_memory(model, run) == found
