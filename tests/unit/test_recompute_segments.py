"""Segments at work: the gradients of no recomputation to the bit, as many runs as planned, and within the budget."""

import copy
import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.auto.checkpointing import fastest, frontier
from core.compose import ParallelConfig, compile_blocks
from core.config import UserError
from core.estimate import RunShape, decoder_shape, estimate_memory
from core.estimate.chain import estimate_chain
from core.estimate.step import estimate_places
from core.gemini.config import GeminiConfig
from core.mesh import MeshConfig
from core.models.decoder import Decoder, initialise
from core.models.plan import pipeline_plan
from core.optim.build import OptimConfig
from core.parallel.pipeline.backward import SplitBackward
from core.parallel.pipeline.schedule import PipelineConfig, ScheduleName
from core.parallel.plan import RECOMPUTED, blocks_of
from core.parallel.recompute import RecomputeConfig, apply_recompute
from core.placement.table import ModelPlan
from core.runtime import start
from core.trace.account import MemoryAccount
from core.trace.machine import Speed
from core.trace.segments import NAMED, Lean, Segments, runs_of
from core.train.segments import choose_segments, described
from tests.support import zoo
from tests.support.accounted import accounted_step, decoder_loss
from tests.support.chains import random_segments
from tests.unit.test_estimate import FAMILIES, SMALL

BUDGET = RecomputeConfig("budget", budget="1GiB")
SPEED = Speed(1e12, 1e11)
ALONE = MeshConfig().resolve(1)


class Block(nn.Module):
    """A dropout, an argument beside, and an output that blocks behind are given: the first one makes a bias."""

    def __init__(self, makes: bool) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(16, 16), nn.Linear(16, 16, bias=False) if makes else None

    def forward(self, x: Tensor, scale: Tensor, *, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.bias is not None:
            bias = self.bias.weight.sin()
        assert bias is not None
        for _ in range(3):
            x = nn.functional.dropout(self.linear(x) @ bias, 0.3) * scale + x.sin()
        return x, bias


class Net(nn.Module):
    """A chain of blocks; from `cut` on it is another one, for the model changes what the blocks hand on."""

    def __init__(self, num_blocks: int, cut: int = -1, twice: int = -1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(makes=index == 0) for index in range(num_blocks))
        self.cut, self.twice = cut, twice

    def forward(self, x: Tensor) -> Tensor:
        scale, bias = torch.full((16,), 0.5, dtype=x.dtype), None
        for index, block in enumerate(self.blocks):
            if index == self.cut:
                x = x * 2.0
            for _ in range(1 + (index == self.twice)):
                x, bias = block(x, scale, bias=bias)
        return x


def net(**options: Any) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return Net(6, **options).double(), lambda model: model(x).square().sum()


def decoder(family: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    config = replace(FAMILIES[family], num_layers=6, max_length=16)
    model = Decoder(config)
    initialise(model, 0)
    ids = torch.randint(0, 515, (2, 16), generator=torch.Generator().manual_seed(1))
    return model.double(), lambda model: model(ids, targets=ids)


def gpt2() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=37, n_positions=16, n_embd=32, n_layer=6, n_head=4))
    ids = torch.randint(0, 37, (3, 9), generator=torch.Generator().manual_seed(1))
    return model.double().train(), lambda model: model(input_ids=ids, labels=ids, use_cache=False).loss


def t5() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A bias that all blocks of a stack share, an encoder's output that all of the decoder take, dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 37, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    ids = torch.randint(0, 37, (3, 9), generator=torch.Generator().manual_seed(1))
    return model.double().train(), lambda model: model(input_ids=ids, labels=ids, use_cache=False).loss


def unet() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Blocks that are given skips, and hand on several tensors."""
    case = zoo.CASES["unet"]
    return case.make().double(), lambda model: case.loss(model, case.batch(0))


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]] = {
    "net": net,
    "cut": partial(net, cut=3),
    "gpt2": partial(decoder, "gpt2"),
    "mixtral": partial(decoder, "mixtral"),
    "gpt2 of transformers": gpt2,
    "t5 of transformers": t5,
    "unet of diffusers": unet,
}


def step(model: nn.Module, loss: Callable[[nn.Module], Tensor], config: RecomputeConfig, segments: Segments | None):
    """Gradients, and how often each block ran."""
    blocks, runs = blocks_of(model), Counter[int]()
    for index, block in enumerate(blocks):

        def counted(*args: Any, forward: Any = block.forward, index: int = index, **kwargs: Any) -> Any:
            runs[index] += 1
            return forward(*args, **kwargs)

        block.forward = counted
    apply_recompute(model, config, segments=segments)
    torch.manual_seed(3)
    value = loss(model)
    value.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return value.detach(), grads, [runs[index] for index in range(len(blocks))]


FEW = {("net", "sqrt"), ("net", "recursive"), ("gpt2", "recursive")}
FEW |= {(name, "any") for name in ("net", "cut", "mixtral", "t5 of transformers")}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in FEW else pytest.mark.soak)
        for name in MODELS
        for mode in ("sqrt", "recursive", "any")
    ],
)
def test_gradients_are_those_of_no_recomputation_to_the_bit(name: str, mode: str) -> None:
    torch.manual_seed(0)
    model, loss = MODELS[name]()
    with zoo.in_fp64():
        plain, expected, once = step(copy.deepcopy(model), loss, RecomputeConfig(), None)
        assert set(once) == {1}
        cases: list[tuple[RecomputeConfig, Segments | None]] = [(RecomputeConfig(mode), None)]
        if mode == "any":
            draw = random.Random(name)
            cases = [(BUDGET, random_segments(draw, len(once))) for _ in range(2)]
            cases += [(BUDGET, (Lean(2, "products"), (Lean(1, "linear"), (1,), len(once) - 4)))]
        for config, segments in cases:
            value, found, runs = step(copy.deepcopy(model), loss, config, segments)
            assert torch.equal(value, plain)
            for key, grad in expected.items():
                assert (grad is None) == (found[key] is None), key
                assert grad is None or torch.equal(grad, found[key]), (key, segments)
            if name not in ("cut", "t5 of transformers", "unet of diffusers"):  # of several chains, which run less
                assert runs == runs_of(segments or NAMED[mode](len(once))), segments
            assert min(runs) >= 1
            if mode != "any":
                assert max(runs) > 1


def test_a_block_that_is_called_twice_is_right_too() -> None:
    torch.manual_seed(0)
    model, loss = net(twice=2)
    _, expected, _ = step(copy.deepcopy(model), loss, RecomputeConfig(), None)
    for segments in (((6,),), (((2,), 1, ((2,), 1)),), (1, ((1,), (2,), 2))):
        _, found, _ = step(copy.deepcopy(model), loss, BUDGET, segments)
        assert all(torch.equal(grad, found[key]) for key, grad in expected.items())


def test_what_is_kept_is_what_was_planned_and_goes_with_the_backward() -> None:
    held = {}
    for segments in ((6,), ((6,),), ((3,), (3,)), NAMED["recursive"](6)):
        torch.manual_seed(0)
        model, loss = net()
        apply_recompute(model, BUDGET, segments=segments)
        gc.collect()
        gc.disable()
        try:
            with MemoryAccount() as account:
                account.add(model.parameters())
                begin = account.current_bytes
                value = loss(model)
                held[segments] = account.current_bytes - begin
                value.backward()
                del value
                grads = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
                assert account.current_bytes - begin <= grads + 3000  # generators' states and numbers
        finally:
            gc.enable()
    assert held[((6,),)] < held[((3,), (3,))] < held[(6,)]


def test_where_no_gradient_is_asked_for_blocks_run_as_they_are() -> None:
    model, loss = net()
    apply_recompute(model.eval(), RecomputeConfig("recursive"))
    with torch.no_grad(), MemoryAccount() as account:
        account.add(model.parameters())
        before = account.current_bytes
        loss(model)
    assert account.current_bytes - before < 3000
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert not loss(model).requires_grad
    model, loss = net()
    apply_recompute(model, RecomputeConfig("recursive"))
    for parameter in model.blocks[:3].parameters():
        parameter.requires_grad_(False)
    loss(model).backward()
    assert all((p.grad is None) == (int(name.split(".")[1]) < 3) for name, p in model.named_parameters())


@pytest.mark.parametrize("mode", ["sqrt", "recursive"])
def test_a_backward_in_two_parts_runs_blocks_again_in_the_first(mode: str) -> None:
    """As zero-bubble schedules take it."""
    x, gradient = (torch.randn(8, 16, dtype=torch.float64) for _ in range(2))
    found = {}
    for config in (RecomputeConfig(), RecomputeConfig(mode)):  # pyright: ignore[reportArgumentType]
        torch.manual_seed(0)
        model, _ = net()
        apply_recompute(model, config, in_parts=True)
        entrance = x.clone().requires_grad_()
        torch.manual_seed(1)
        split = SplitBackward(model(entrance), gradient, entrance)
        input_gradient = split.input()
        split.accumulate_computed()
        split.weights()
        found[config.mode] = [input_gradient, *(p.grad for p in model.parameters())]
    for ours, expected in zip(found[mode], found["none"], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


def test_what_is_computed_again_is_compiled() -> None:
    graphs: list[Any] = []
    torch.compiler.reset()
    torch.manual_seed(0)
    model, loss = decoder("gpt2")
    again = copy.deepcopy(model)
    apply_recompute(again, RecomputeConfig("recursive"))
    compiled = partial(torch.compile, backend=lambda graph, _: graphs.append(graph) or graph)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "compile", compiled)
        compile_blocks(blocks_of(again))
    for one in (model, again):
        loss(one).backward()
    assert graphs
    for expected, found in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"zero": 3}, r"recompute\.mode=sqrt with zero=3: .*only that block's parameters are gathered; use --zero 2"),
        ({"gemini": GeminiConfig("1GiB")}, r"recompute\.mode=sqrt with gemini\.budget=1GiB: .*use --recompute\.mode"),
        (
            {"gemini": GeminiConfig("1GiB"), "recompute": BUDGET},
            r"recompute\.mode=budget with gemini\.budget=1GiB: both say what a device may hold",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        ParallelConfig(**{"recompute": RecomputeConfig("sqrt"), **options})


def test_segments_of_several_blocks_are_refused_where_parameters_are_not_gathered() -> None:
    apply_recompute(net()[0], BUDGET, segments=((1,), Lean(2, "linear"), 3), single=True)
    with pytest.raises(
        UserError, match=r"recompute\.mode=budget with zero=3 and segments .*let each segment be of one block"
    ):
        apply_recompute(net()[0], BUDGET, segments=((1,), (2,), 3), single=True)


def test_budgets_that_are_none() -> None:
    with pytest.raises(UserError, match=r"recompute\.mode=budget without one; give --recompute\.budget"):
        RecomputeConfig("budget")
    with pytest.raises(UserError, match=r"recompute\.budget=many: that is no size"):
        RecomputeConfig("budget", budget="many")
    ParallelConfig(recompute=BUDGET, pipeline=PipelineConfig("gpipe")).check_pipeline(2)
    for pipeline, why in (
        (PipelineConfig("zb-h1"), r"budget with pipeline\.schedule=zb-h1: .*a backward in one part"),
        (PipelineConfig(cost="measured"), r"budget with pipeline\.cost=measured: .*give --pipeline\.split"),
    ):
        with pytest.raises(UserError, match=why):
            ParallelConfig(recompute=BUDGET, pipeline=pipeline).check_pipeline(2)
    with pytest.raises(UserError, match="nobody has chosen what is computed again"):
        apply_recompute(net()[0], BUDGET)
    assert "budget" in RecomputeConfig("full", budget="1GiB").unread()
    assert "every" in RecomputeConfig("sqrt", 2).unread()
    assert "budget" not in BUDGET.unread()


# --- costs, and what is made of them ----------------------------------------------------------------------------------


def wide_gpt(rows: int = 4, layers: int = 6):
    config = replace(SMALL, num_layers=layers)

    def make() -> nn.Module:
        with torch.device("meta"):
            return Decoder(config)

    return make, partial(decoder_loss, rows, 64), lambda model: initialise(model, 0)


def wide_t5(rows: int = 4, layers: int = 3):
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": layers, "num_heads": 4}
    config = T5Config(**sizes, decoder_start_token_id=0)

    def loss(model: nn.Module) -> Tensor:
        ids = torch.zeros(rows, 48, dtype=torch.int64)
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    def make() -> nn.Module:
        with torch.device("meta"):
            return T5ForConditionalGeneration(config).train()

    def fill(model: nn.Module) -> None:
        model.to_empty(device="cpu")
        for tensor in (*model.parameters(), *model.buffers()):
            nn.init.normal_(tensor, std=0.02)

    return make, loss, fill


def keeps_to_budgets(make: Any, loss: Any, fill: Any, num_budgets: int, num_microbatches: int = 1, **options: Any):
    """Measured steps of segments for as many budgets: never above them, nor less for more; runs as planned."""
    parallel = ParallelConfig(recompute=BUDGET, **options)
    chain = estimate_chain(make(), loss, ALONE, parallel, SPEED, num_microbatches=num_microbatches)
    choices = frontier(chain)
    least, most = choices[0].peak_bytes, choices[-1].peak_bytes
    before, measured = 0, 0
    with start("cpu") as runtime:
        mesh = runtime.mesh(MeshConfig())
        for index in range(num_budgets):
            budget = least + (most - least) * index // (num_budgets - 1)
            found = fastest(choices, budget)
            assert found is not None
            if found.peak_bytes != before:
                runs: Counter[int] = Counter()
                model = counting(make(), runs)
                plan = ModelPlan(recompute=found.segments)
                measured_now, _ = accounted_step(model, loss, mesh, parallel, num_microbatches, plan, fill)
                assert [runs[k] for k in range(len(chain.blocks))] == [n * num_microbatches for n in found.step.runs], (
                    found.segments
                )
                assert measured_now <= budget, found.segments
                assert measured_now == pytest.approx(found.peak_bytes, rel=0.01)
                assert measured_now >= measured, found.segments
                before, measured = found.peak_bytes, measured_now
    return choices


def counting(model: nn.Module, runs: Counter[int]) -> nn.Module:
    for index, block in enumerate(blocks_of(model)):

        def counted(*args: Any, forward: Any = block.forward, index: int = index, **kwargs: Any) -> Any:
            runs[index] += 1
            return forward(*args, **kwargs)

        block.forward = counted
    return model


def test_a_decoder_keeps_to_its_budget() -> None:
    choices = keeps_to_budgets(*wide_gpt(layers=4), num_budgets=5)
    assert choices[0].peak_bytes < choices[-1].peak_bytes * 0.8
    assert choices[0].step.again_s > 0 == choices[-1].step.again_s


def test_a_foreign_model_keeps_to_its_budget() -> None:
    keeps_to_budgets(*wide_t5(layers=2), num_budgets=3)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"num_microbatches": 2}, {"zero": 2}], ids=str)
@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_forty_budgets(name: str, options: dict[str, Any]) -> None:
    layers = {"gpt": partial(wide_gpt, layers=12), "t5": partial(wide_t5, layers=6)}
    keeps_to_budgets(*layers[name](), num_budgets=40, **options)


def test_a_budget_that_is_too_small_says_the_smallest() -> None:
    make, loss, _ = wide_gpt(layers=2)
    with pytest.raises(UserError, match=r"recompute\.budget=1MiB: a step takes at least .* \((\d+) bytes\)") as refused:
        choose_segments(make(), loss, ALONE, ParallelConfig(recompute=RecomputeConfig("budget", budget="1MiB")), SPEED)
    least = str(refused.value).partition("(")[2].partition(" ")[0]
    parallel = ParallelConfig(recompute=RecomputeConfig("budget", budget=least))
    found = choose_segments(make(), loss, ALONE, parallel, SPEED)
    assert found.peak_bytes == int(least)
    assert "of 2 blocks run again" in described(found)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.soak)])
def test_the_stages_of_a_pipeline_keep_to_their_budget(schedule: ScheduleName) -> None:
    make, loss, _ = wide_gpt(layers=3)
    mesh, plan = MeshConfig(pp=2).resolve(2), ModelPlan(pipeline=pipeline_plan())
    given = make(), loss, mesh

    def parallel(budget: int) -> ParallelConfig:
        config = RecomputeConfig("budget", budget=str(budget))
        return ParallelConfig(recompute=config, pipeline=PipelineConfig(schedule, microbatches=4))

    with pytest.raises(UserError, match=r"a step takes at least .* \((\d+) bytes\)") as refused:
        choose_segments(*given, parallel(1 << 20), SPEED, plan, num_microbatches=4)
    least = int(str(refused.value).partition("(")[2].partition(" ")[0])
    before = None
    for budget in (least * 5 // 4, least * 3):
        found = choose_segments(*given, parallel(budget), SPEED, plan, num_microbatches=4)
        traced = replace(plan, recompute=found.segments)
        stages = estimate_places(*given, parallel(budget), traced, OptimConfig(), 4, range(2))
        peaks = [one.peak_bytes for one in stages.values()]
        assert max(peaks) == found.peak_bytes <= budget
        assert before is None or found.step.again_s < before
        before = found.step.again_s
    assert before == 0.0


def test_blocks_that_are_no_chain_are_refused() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in reversed(self.blocks):
                x = block(x).sin()
            return x

    def loss(model: nn.Module) -> Tensor:
        return model(torch.zeros(2, 4)).sum()

    with torch.device("meta"):
        model = Backwards()
    with pytest.raises(UserError, match=r"does not call its blocks one after another, once each; use --recompute"):
        estimate_chain(model, loss, ALONE, ParallelConfig(recompute=BUDGET), SPEED)
    with pytest.raises(UserError, match="no list of blocks"):
        estimate_chain(nn.Linear(4, 4, device="meta"), loss, ALONE, ParallelConfig(recompute=BUDGET), SPEED)


@pytest.mark.parametrize("mode", NAMED)
def test_the_closed_form_of_named_segments_is_what_is_counted(mode: str) -> None:
    make, loss, fill = wide_gpt(rows=8, layers=9)
    parallel = ParallelConfig(recompute=RecomputeConfig(mode))  # pyright: ignore[reportArgumentType]
    with start("cpu") as runtime:
        counted, _ = accounted_step(make(), loss, runtime.mesh(MeshConfig()), parallel, 1, ModelPlan(), fill)
    run = RunShape(
        recompute=mode,  # pyright: ignore[reportArgumentType]
        microbatch_size=8,
        sequence_length=64,
        optimizer=OptimConfig(),
    )
    form = estimate_memory(decoder_shape(replace(SMALL, num_layers=9), device_type="cpu"), run)
    assert form.peak_bytes == pytest.approx(counted, rel=0.04)


def test_the_forward_of_a_block_stays_by_its_name() -> None:
    model, _ = net()
    forwards = [block.forward for block in model.blocks]
    apply_recompute(model, RecomputeConfig("sqrt"))
    assert [getattr(block, RECOMPUTED) for block in model.blocks] == forwards
    assert list(model.state_dict()) == list(net()[0].state_dict())
