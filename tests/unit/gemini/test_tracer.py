"""Traces on fake tensors against what the same step does for real, and against figures worked out by hand."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from core.config import UserError
from core.gemini.moments import corrected, on_chunks
from core.gemini.residency import plan_residency, smallest_budget
from core.gemini.trace import ChunkInfo, Trace
from core.trace.machine import Bandwidth, Speed
from core.trace.tracer import StepTrace, _copy, _record, _Recorder, stand_ins, trace_step
from tests.support.residency import replay

SPEED = Speed(flops_per_s=1e9, bytes_per_s=1e9)


def foreseen_and_real(model, step, num_microbatches=1) -> StepTrace:
    """The trace without memory, which must be that of the same step with values.

    Python's numbers are tensors of 8 bytes in one and nothing in the other, and seconds are estimates anyway.
    """
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    foreseen = trace_step(model, step, SPEED, num_microbatches=num_microbatches)
    assert torch.equal(torch.get_rng_state(), state)
    with stand_ins(model, _copy):
        real = _record(model, step, _Recorder(model, SPEED, "cpu"), num_microbatches)
    pairs = [list(itertools.chain(*trace.microbatches)) for trace in (foreseen, real)]
    for mine, theirs in zip(*pairs, strict=True):
        assert dataclasses.replace(mine, seconds=0.0, other_bytes=0) == dataclasses.replace(
            theirs, seconds=0.0, other_bytes=0
        )
        assert abs(mine.other_bytes - theirs.other_bytes) <= 64
    assert (foreseen.order, foreseen.reads) == (real.order, real.reads)
    seconds = [sum(stretch.seconds for stretch in stretches) for stretches in pairs]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.05)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return foreseen


def one_chunk_each(model: nn.Module, found: StepTrace) -> Trace:
    parameters = dict(model.named_parameters())
    infos = []
    for index, name in enumerate(found.order):
        size, learns = parameters[name].nbytes, parameters[name].requires_grad
        infos.append(ChunkInfo(index, size, size if learns else 0, 2 * size if learns else 0, learns))
    return on_chunks(found, infos, [[name] for name in found.order])


def planned(trace: Trace) -> None:
    """Whose plan for a third of the model data an independent replay can run."""
    budget = smallest_budget(trace) + trace.model_bytes // 3
    plan = plan_residency(trace, budget, Bandwidth(1e9, 1e9, 1e9, 1e9))
    assert replay(trace, plan).device_bytes == plan.device_bytes


def test_by_hand():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x_NI = torch.randn(5, 8)
    found = foreseen_and_real(model, lambda m: m(x_NI).sum())
    assert found.order == ("0.weight", "0.bias", "2.weight", "2.bias")
    trace = on_chunks(
        found, (ChunkInfo(0, 576, 576, 0, True), ChunkInfo(1, 272, 272, 0, True)), (found.order[:2], found.order[2:])
    )
    moments = [(m.kind, m.name, m.chunks, m.writes) for m in trace.moments]
    assert moments == [
        ("forward", "0", (0,), ()),
        ("forward", "2", (1,), ()),
        ("backward", "2", (1,), (1,)),
        ("reduce", "2.weight … 2.bias", (1,), ()),
        ("backward", "0", (0,), (0,)),
        ("reduce", "0.weight … 0.bias", (0,), ()),
        ("update", "0.weight … 0.bias", (0,), ()),
        ("update", "2.weight … 2.bias", (1,), ()),
    ]
    # Input 160 and hidden 320; the ReLU's result 320 is saved, while its input goes; output 80 and loss 4.
    assert [m.other_bytes for m in trace.moments[:2]] == [160 + 320 + 320, 160 + 320 + 80 + 4]
    # Saved input and hidden, loss and its gradient; the gradients of the hidden 320, the weight 256, the bias 16.
    assert trace.moments[2].other_bytes == 160 + 320 + 4 + 4 + 320 + 256 + 16
    # x of 5 x 8 times 8 x 16 is 1280 FLOPs, against 1056 bytes that are read and written; then the ReLU's 640 bytes.
    assert trace.moments[0].seconds == pytest.approx((1280 + 640) / 1e9)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q_BNLK):
        return torch.nn.functional.scaled_dot_product_attention(q_BNLK * self.scale, q_BNLK, q_BNLK)


def test_attention_takes_the_time_of_its_products():
    """On queries, keys and values of 2 x 3 x 64 x 16: two products of 64 x 64 x 16 a head, backward five."""
    q_BNLK = torch.randn(2, 3, 64, 16)
    found = trace_step(Attention(), lambda m: m(q_BNLK).sum(), Speed(flops_per_s=1.0, bytes_per_s=1e30))
    seconds = sum(stretch.seconds for stretch in found.microbatches[0])
    assert seconds == pytest.approx((2 + 5) * 2 * (2 * 3) * 64 * 64 * 16)


class Twice(nn.Module):
    """A dict as output, a module that is called twice, weights that their parent reads, a branch that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.unused = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x_BLD):
        self.steps += 1
        h_BLD = self.shared(self.shared(x_BLD)).relu()
        y_BLD, _ = self.attention(h_BLD, h_BLD, h_BLD, need_weights=False)
        return {"y": self.norm(y_BLD), "more": [h_BLD]}


def test_dicts_modules_called_twice_and_weights_read_by_the_parent():
    model, x_BLD = Twice(), torch.randn(2, 5, 8)

    def step(m):
        found = m(x_BLD)
        return found["y"].sum() + found["more"][0].square().mean()

    found = foreseen_and_real(model, step)
    assert found.reads == {"attention": ("attention.out_proj.bias", "attention.out_proj.weight")}
    assert found.order[-2:] == ("unused.weight", "unused.bias")
    trace = one_chunk_each(model, found)
    shared = found.order.index("shared.weight")
    uses = [m.kind for m in trace.moments if m.name == "shared" and shared in m.chunks]
    assert uses == ["forward", "forward", "backward", "backward"]
    assert [m.chunks[0] for m in trace.moments if m.kind == "reduce"].count(shared) == 1
    # What was not used is reduced, with zeros, when the backward has ended.
    assert [m.name for m in trace.moments if m.kind == "reduce"][-2:] == ["unused.weight", "unused.bias"]
    planned(trace)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.reentrant = nn.Linear(8, 8), reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))

    def forward(self, x_ND):
        x_ND = self.first(x_ND)
        for block in self.blocks:
            x_ND = checkpoint(block, x_ND, use_reentrant=self.reentrant)
        return x_ND


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_and_microbatches(reentrant):
    model = Checkpointed(reentrant)
    found = foreseen_and_real(model, lambda m: m(torch.randn(50, 8)).sum(), num_microbatches=2)
    trace = one_chunk_each(model, found)
    names = [m.name for m in trace.moments if m.kind == "backward"]
    # Recomputed from the first product on, then backward; the last product's input is all that its backward needs.
    assert names[names.index("blocks.0.0") : names.index("first")][-2:] == ["blocks.0.2", "blocks.0.0"]
    assert names.count("blocks.0.0") == 4
    assert sum(m.kind == "reduce" for m in trace.moments) == 2 * len(found.order)
    plain = trace_step(nn.Sequential(model.first, *model.blocks), lambda m: m(torch.randn(50, 8)).sum(), SPEED)
    assert trace.other_peak_bytes < one_chunk_each(nn.Sequential(model.first, *model.blocks), plain).other_peak_bytes
    planned(trace)


def test_frozen_weights_and_a_model_without_values():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].requires_grad_(False)
    found = trace_step(model, lambda m: m(torch.randn(4, 8)).sum(), SPEED)
    assert model[0].weight.is_meta
    trace = one_chunk_each(model, found)
    frozen = {found.order.index("1.weight"), found.order.index("1.bias")}
    assert any(m.kind == "backward" and frozen <= set(m.chunks) for m in trace.moments)
    assert not any(frozen & {*m.writes, *m.chunks[:1]} for m in trace.moments if m.kind in ("reduce", "update"))
    planned(trace)


def test_evaluation_has_neither_reduces_nor_updates():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def step(m):
        with torch.no_grad():
            return m(torch.randn(4, 8)).sum()

    trace = one_chunk_each(model, foreseen_and_real(model, step))
    assert [m.kind for m in trace.moments] == ["forward", "forward"]
    planned(trace)


def test_given_units_are_followed():
    """A compiled block, or a module of torch's own, is one unit with all that is below it."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 8))
    units = {"0": ["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"], "1": ["1.weight", "1.bias"]}
    found = trace_step(model, lambda m: m(torch.randn(4, 8)).sum(), SPEED, units=units)
    trace = one_chunk_each(model, found)
    assert [(m.name, len(m.chunks)) for m in trace.moments if m.kind == "forward"] == [("0", 4), ("1", 2)]


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x_ND):
        return self.linear(x_ND[x_ND[:, 0] > 0]) if x_ND.sum() > -1e9 else x_ND


def test_models_that_look_at_values_run_for_real_or_are_refused():
    x_ND = torch.randn(6, 8)
    model = Looks()
    state = torch.get_rng_state()
    found = trace_step(model, lambda m: m(x_ND).sum(), SPEED)
    assert [s.writes for s in found.microbatches[0] if s.writes] == [("linear.bias",), ("linear.weight",)]
    assert model.linear.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(UserError, match="cannot be foreseen without values"):
        trace_step(model.to("meta"), lambda m: m(x_ND).sum(), SPEED)


def test_a_parameter_outside_of_any_module_is_refused_by_name():
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(UserError, match=r"0\.weight is used outside"):
        trace_step(model, lambda m: m(torch.randn(4, 8)).sum() + m[0].weight.square().sum(), SPEED)
    assert not model[0]._forward_hooks
    assert isinstance(model[0].weight, nn.Parameter)
    assert type(model[0].weight.data) is torch.Tensor


def test_corrected_by_a_real_step():
    model = nn.Sequential(nn.Linear(8, 8))
    trace = one_chunk_each(model, trace_step(model, lambda m: m(torch.randn(4, 8)).sum(), SPEED))
    real = corrected(trace, [(7 * k, 0.5) for k in range(len(trace.moments))])
    assert [m.other_bytes for m in real.moments] == [7 * k for k in range(len(trace.moments))]
    assert {m.seconds for m in real.moments} == {0.5}
    assert [m.chunks for m in real.moments] == [m.chunks for m in trace.moments]
    with pytest.raises(ValueError, match="1 moments were measured, and 6 were traced"):
        corrected(trace, [(0, 0.0)])


def transformers_models():
    from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

    gpt2 = GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    t5 = T5Config(vocab_size=100, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return {"gpt2": lambda: GPT2LMHeadModel(gpt2), "t5": lambda: T5ForConditionalGeneration(t5)}


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_transformers(name):
    model = transformers_models()[name]()
    ids_BL = torch.randint(100, (2, 16))
    found = foreseen_and_real(model, lambda m: m(input_ids=ids_BL, labels=ids_BL).loss)
    assert set(found.order) == set(dict(model.named_parameters()))
    trace = one_chunk_each(model, found)
    tied = next(n for n in found.order if "wte" in n or "shared" in n)
    # The embedding is the head's weight too: used at both ends of the forward, reduced once, at the very end.
    assert [m.chunks[0] for m in trace.moments if m.kind == "reduce"].count(found.order.index(tied)) == 1
    planned(trace)


def test_lora_on_checkpointed_gpt2():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        transformers_models()["gpt2"](), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    ids_BL = torch.randint(100, (2, 16))
    found = trace_step(model, lambda m: m(input_ids=ids_BL, labels=ids_BL, use_cache=False).loss, SPEED)
    trace = one_chunk_each(model, found)
    assert sum(m.kind == "reduce" for m in trace.moments) == 4
    planned(trace)


def test_diffusers_unet():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32,),
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        mid_block_type=None,
        cross_attention_dim=32,
        attention_head_dim=8,
    )
    x_BCHW, text_BLD = torch.randn(2, 4, 8, 8), torch.randn(2, 7, 32)
    found = foreseen_and_real(model, lambda m: m(x_BCHW, torch.tensor([3, 4]), text_BLD).sample.square().mean())
    planned(one_chunk_each(model, found))
