"""A step that is traced with a few of the blocks that are alike is, to the byte, the step traced with all of them."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.compose import ParallelConfig
from core.estimate import estimate_step, growth
from core.mesh import MeshConfig
from core.models.decoder import Decoder, DecoderConfig
from core.models.plan import decoder_plan
from core.nn.routing import MoEConfig
from core.optim.build import OptimConfig
from core.parallel import data
from core.parallel.pipeline.schedule import PipelineConfig
from core.parallel.recompute import RecomputeConfig
from core.placement.table import NO_PLAN
from core.trace.alike import AlikeBlocks, alike_blocks
from core.trace.machine import Speed
from tests.support.accounted import decoder_loss

DEEP = DecoderConfig(vocab_size=67, dim=16, num_layers=9, num_heads=2, ffn_dim=32, max_length=8)
ALONE = MeshConfig().resolve(1)
Loss = Callable[[nn.Module], Tensor]


def is_alike(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], nn.Module],
    loss: Loss,
    mesh: MeshConfig,
    parallel: ParallelConfig,
    *of: Any,
    within: float = 1e-6,
    **options: Any,
) -> None:
    """Holds both to be equal, and that the first is of fewer blocks.  within: relative, of the seconds"""
    cuts = []

    def noted(*given: Any, **few: Any) -> Any:
        cuts.append(growth.cuts_of(*given, **few))
        return cuts[-1]

    monkeypatch.setattr("core.estimate.step.cuts_of", noted)
    found = []
    for find in (alike_blocks, lambda *_: []):
        monkeypatch.setattr(growth, "alike_blocks", find)
        with torch.device("meta"):
            model = make()
        found.append(estimate_step(model, loss, mesh, parallel, Speed(1e9, 1e9), *of, **options))
        assert any(cut.growths for cut in cuts[-1]) == (find is alike_blocks)
    few, whole = found
    assert few.compute_s == pytest.approx(whole.compute_s, rel=within)
    assert replace(few, compute_s=whole.compute_s) == whole


RUNS = {
    "recomputed": (MeshConfig(), ParallelConfig(precision="bf16", recompute=RecomputeConfig("full", 2)), 1),
    "selective": (MeshConfig(), ParallelConfig(recompute=RecomputeConfig("selective")), 2),
    "zero 0": (MeshConfig(), ParallelConfig(), 3),
    "zero 1": (MeshConfig(), ParallelConfig(1, "bf16"), 2),
    "zero 2": (MeshConfig(), ParallelConfig(2, reduce_each=True), 2),
    "zero 3": (MeshConfig(), ParallelConfig(3, "bf16"), 2),
    "zero 3 recomputed": (MeshConfig(), ParallelConfig(3, recompute=RecomputeConfig("full")), 1),
    "tp": (MeshConfig(tp=2), ParallelConfig(1), 1),
}


def broad(*names: str, few: Collection[str]) -> list[Any]:
    """Those beyond the few are for `make soak`."""
    return [pytest.param(name, id=name, marks=() if name in few else pytest.mark.soak) for name in names]


@pytest.mark.parametrize("name", broad(*RUNS, few=("zero 1", "zero 3 recomputed")))
def test_a_decoder(name: str, monkeypatch) -> None:
    """Messages of 5 KiB, of which a block fills a little less than two: they begin to repeat after some blocks."""
    sizes, parallel, num_microbatches = RUNS[name]
    monkeypatch.setattr(data, "BUCKET_BYTES", 5 << 10)
    ranks = sizes.tp * (2 if name.startswith(("zero", "tp")) else 1)
    in_messages = ranks > 1 and parallel.zero < 3
    mesh, config = sizes.resolve(ranks, parallel.zero), replace(DEEP, num_layers=17 if in_messages else 11)
    plan, loss = decoder_plan(config, mesh), partial(decoder_loss, 2, 8)
    is_alike(monkeypatch, lambda: Decoder(config), loss, mesh, parallel, plan, num_microbatches=num_microbatches)


@pytest.mark.parametrize("schedule", broad("1f1b", "interleaved", few=["interleaved"]))
def test_stages(schedule, monkeypatch) -> None:
    """Of interleaved ones the second rank's two grow, one of them with the head."""
    zero, split = (1, ()) if schedule == "1f1b" else (0, (1, 5, 1, 5))
    config, ranks = replace(DEEP, num_layers=sum(split) or 20), 2 + 2 * zero
    parallel = ParallelConfig(zero, pipeline=PipelineConfig(schedule, split=split))
    mesh = MeshConfig(pp=2).resolve(ranks, zero)
    monkeypatch.setattr(data, "BUCKET_BYTES", 5 << 10)
    plan, loss = decoder_plan(config, mesh), partial(decoder_loss, 2, 8)
    is_alike(monkeypatch, lambda: Decoder(config), loss, mesh, parallel, plan, num_microbatches=5)


@pytest.mark.soak
def test_experts_in_every_other_block(monkeypatch) -> None:
    config = replace(DEEP, num_layers=13, moe=MoEConfig(num_experts=4, every=2))
    mesh = MeshConfig(ep=2).resolve(2, 3)
    plan, loss = decoder_plan(config, mesh), partial(decoder_loss, 2, 8)
    is_alike(monkeypatch, lambda: Decoder(config), loss, mesh, ParallelConfig(3), plan)


class Alternating(nn.Module):
    """Every third block is another; two lists, of which the second is gone through twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(
            nn.Sequential(nn.Linear(8, n := 8 << (i % 3 == 2)), nn.Linear(n, 8)) for i in range(17)
        )
        self.second = nn.ModuleList(nn.Linear(8, 8) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.first, *self.second, *self.second):
            x = block(x).relu()
        return x


@pytest.mark.parametrize("optimizer", broad("adamw", "adafactor", "lamb", few=["lamb"]))
def test_kinds_in_turn_in_two_lists(optimizer: str, monkeypatch) -> None:
    """LAMB adds each norm to a list of all, which counts as read whole each time: with their number squared."""
    is_alike(
        monkeypatch,
        Alternating,
        lambda model: model(torch.zeros(5, 8)).sum(),
        ALONE,
        ParallelConfig(),
        within=0.01 if optimizer == "lamb" else 1e-6,
        optimizer=OptimConfig(optimizer),
    )


@pytest.mark.parametrize("name", broad("gpt2", "t5", few=["gpt2"]))
def test_a_foreign_model(name: str, monkeypatch) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

    sizes = {"n_positions": 8, "n_embd": 16, "n_layer": 8, "n_head": 2}
    made = {
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=37, **sizes)),
        "t5": lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=37, d_model=16, d_kv=8, d_ff=32, num_layers=7, num_heads=2, decoder_start_token_id=0)
        ),
    }

    def loss(model: nn.Module) -> Tensor:
        ids = torch.zeros(2, 8, dtype=torch.int64)
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    is_alike(monkeypatch, made[name], loss, MeshConfig().resolve(2, 3), ParallelConfig(3, "bf16"))


def test_as_many_blocks_are_traced_of_96_as_of_24() -> None:
    def traced(layers: int) -> int:
        with torch.device("meta"):
            model = Decoder(replace(DEEP, num_layers=layers))
        (cut,) = growth.cuts_of(model, MeshConfig().resolve(8, 3), ParallelConfig(3), NO_PLAN)
        return sum(map(len, cut.kept()))

    assert traced(96) == traced(24) <= 4


def test_blocks_are_told_apart_by_all_but_their_number() -> None:
    class Block(nn.Module):
        def __init__(self, index: int, window: int = 3):
            super().__init__()
            self.index, self.window = index, window
            self.linear = nn.Linear(2, 2)

    def found(*blocks: nn.Module) -> list[tuple[int, int, int]]:
        return [(run.start, run.stop, run.period) for run in alike_blocks(nn.Sequential(nn.ModuleList(blocks)))]

    alike = [Block(index) for index in range(8)]
    assert found(*alike) == [(0, 8, 1)]
    assert found(*alike, Block(8, window=4)) == [(0, 8, 1)]
    assert found(*(Block(index, window=index % 2) for index in range(11))) == [(0, 11, 2)]
    assert found(*alike[:6], Block(7), Block(6)) == []
    alike[3].linear.weight = alike[4].linear.weight
    assert found(*alike) == []
    alike[4] = Block(4)
    alike[6] = nn.Identity()
    assert alike_blocks(nn.ModuleList(alike)) == [AlikeBlocks("", 0, 6, 1)]
