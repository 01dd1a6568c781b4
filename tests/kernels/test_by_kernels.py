"""A decoder by kernels is the decoder: loss and all gradients, and the kernels are what computed them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from core.kernels.operator import forced
from core.models import SHAPES, Decoder, DecoderConfig, initialise
from core.models.generate import generate
from core.models.rope import RopeScaling
from core.nn.attention import StepContext
from core.nn.by_kernels import by_kernels
from tests.support.device import DEVICE
from tests.support.masked import bert

pytestmark = pytest.mark.usefixtures("device")
CONFIGS = {
    "gpt2": replace(SHAPES["debug"], num_layers=1),
    "bloom": DecoderConfig(
        vocab_size=41, dim=24, num_layers=1, num_heads=3, ffn_dim=96, positions="alibi", embedding_norm=True,
        family="bloom",
    ),
    "llama": DecoderConfig(
        vocab_size=41, dim=24, num_layers=1, num_heads=6, num_kv_heads=2, ffn_dim=40, positions="rotary",
        norm="rms_norm", activation="swiglu", attention_bias=False, mlp_bias=False, tied_head=False, family="llama",
    ),
    "bert": bert(vocab_size=41, num_layers=1),
}  # fmt: skip
CONFIGS["gemma3"] = replace(
    CONFIGS["llama"], num_layers=2, norm="rms_norm_from_one", activation="geglu_tanh", tied_head=True, qk_norm=True,
    out_norms=True, scaled_embedding=True, window=4, full_layers=(1,), local_rope_theta=100.0, family="gemma3_text",
)  # fmt: skip
CONFIGS["qwen3"] = replace(CONFIGS["llama"], family="qwen3", head_dim=6, qk_norm=True)
CONFIGS["gpt_neox"] = replace(
    CONFIGS["gpt2"], family="gpt_neox", positions="rotary", rotary_share=0.5, parallel_residual=True, max_length=12,
    rope_scaling=RopeScaling(2.0, kind="dynamic"),
)  # fmt: skip
NORM, ATTENTION, PACKED = "norm_forward", "attention_forward", "attention_varlen_forward"
CASES = [
    ("gpt2", "plain", {NORM, ATTENTION}),
    ("gpt2", "documents", {NORM, PACKED}),
    ("gpt2", "padding", {NORM, ATTENTION}),
    ("bloom", "plain", {NORM, ATTENTION}),
    ("bloom", "padding", {NORM}),  # its attention is torch's
    ("llama", "plain", {NORM, ATTENTION, "rope", "swiglu_forward"}),
    ("qwen3", "plain", {NORM, ATTENTION, "rope", "swiglu_forward"}),
    ("gpt_neox", "plain", {NORM, ATTENTION, "rope"}),
    ("llama", "documents", {NORM, PACKED, "rope", "swiglu_forward"}),
    ("gemma3", "documents", {NORM, PACKED, "rope"}),
    ("gemma3", "padding", {NORM, ATTENTION, "rope"}),
    ("bert", "documents", {NORM, PACKED}),
    ("bert", "padding", {NORM, ATTENTION}),
]
B, L = 2, 13


class Operators(TorchDispatchMode):
    """Names of our operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "megalith":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def results(model: Decoder, what: str) -> list[Tensor]:
    """The loss, and gradients of all parameters, in the model's format."""
    generator = torch.Generator().manual_seed(3)
    ids, targets = torch.randint(0, 41, (2, B, L), generator=generator).to(DEVICE)
    mask = documents = None
    if what == "documents":
        documents = torch.tensor([[0] * 4 + [1] * 9, [0] * 12 + [1]], device=DEVICE)
    if what == "padding":  # in front of one sequence and behind the other
        mask = torch.ones(B, L, dtype=torch.int64, device=DEVICE)
        mask[0, :3] = mask[1, 9:] = 0
        targets = targets.masked_fill(mask == 0, -100)
    model.zero_grad()
    loss = model(ids, mask, context=StepContext(documents), targets=targets)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def built(name: str) -> Decoder:
    model = Decoder(CONFIGS[name])
    initialise(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim == 2 else 1)
    return model.to(DEVICE)


@pytest.mark.parametrize(("name", "what", "expected"), CASES, ids=[f"{name}-{what}" for name, what, _ in CASES])
def test_the_same_loss_and_gradients(name: str, what: str, expected: set[str]) -> None:
    exact, plain = results(built(name).double(), what), results(built(name), what)
    with forced(), Operators() as ran:
        found = results(by_kernels(built(name)), what)
    assert {n for n in ran.names if "backward" not in n and "cross_entropy" not in n} == expected
    _close(found, plain, exact)


def _close(found: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> None:
    """How far torch's own fp32 is from fp64 depends on the processor. Kernels are not much farther: they sum the same
    terms in another order. One rounding of the largest element is granted where torch happens to be exact.
    """
    for got, alone, wanted in zip(found, plain, exact, strict=True):
        rounding = torch.finfo(torch.float32).eps * max(float(wanted.abs().max()), 1.0)
        allowed = 4 * max(float((alone - wanted).abs().max()), rounding)
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=allowed)


@pytest.mark.parametrize(("what", "expected"), [("plain", ATTENTION), ("documents", PACKED)])
def test_slopes_go_to_our_kernel_unasked(what: str, expected: str) -> None:
    """Torch's operators of a GPU take no bias that is wider than their queries."""
    exact, plain = results(built("bloom").double(), what), results(built("bloom"), what)
    with forced(), Operators() as ran:
        found = results(built("bloom"), what)
    assert {n for n in ran.names if "attention" in n and "backward" not in n} == {expected}
    _close(found, plain, exact)


def test_generated_by_our_kernel() -> None:
    model = built("bloom").eval()
    prompts = torch.randint(0, 41, (B, L), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    want = generate(model, prompts, 5)
    with forced(), Operators() as ran:
        assert torch.equal(generate(model, prompts, 5), want)
    assert ATTENTION in ran.names
