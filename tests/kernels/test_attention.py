"""What the SPECs of attention leave out: its CPU path, merging by log-sum-exp, parts of a bias's gradient, errors."""

import itertools
import sys
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor

from core.kernels import attention as kernels
from core.kernels.attention import (
    _library_is_faster,
    attention,
    attention_varlen,
    attention_with_lse,
    reference,
)
from core.kernels.blocks import compiling_for
from core.kernels.operator import forced
from core.kernels.partial_attention import Part, partial_attention, partial_gradients
from tests.support.device import DEVICE

SPEC = kernels.SPECS[0]
pytestmark = pytest.mark.usefixtures("device")


def drawn(dtype: torch.dtype, **case: Any) -> dict[str, Any]:
    case = {"B": 2, "L": 5, "S": 7, "J": 2, "G": 2, "K": 4, **case}
    return SPEC.inputs(case, dtype, DEVICE, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("bias", [None, "H", "BH"])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(
    "shown", [{}, {"causal": True}, {"window": 2}, {"causal": True, "S": 5}, {"offset": -2}], ids=str
)
def test_torchs_fused_operator_computes_the_same(shown: dict[str, Any], mask: bool, bias: str | None) -> None:
    for alibi in (False, True):
        inputs = drawn(torch.float64, mask=mask, bias=bias, alibi=alibi, **shown)
        leaves = [inputs[n].requires_grad_() for n in SPEC.grads if n in inputs]
        found, expected = attention(**inputs), reference(**inputs)[0]
        torch.testing.assert_close(found, expected)
        do = torch.randn_like(expected)
        for got, want in zip(torch.autograd.grad(found, leaves, do), torch.autograd.grad(expected, leaves, do)):
            torch.testing.assert_close(got, want)


def test_disjoint_keys_merge_by_their_lse() -> None:
    """What ring attention does, forward and backward, through the kernels."""
    inputs = drawn(torch.float32, S=8)
    q, k, v = (inputs[n].requires_grad_() for n in "qkv")
    whole, _ = reference(q, k, v)
    with forced():
        o, lse = zip(*(attention_with_lse(q, k[:, part], v[:, part]) for part in (slice(3), slice(3, 8))))
    weights = torch.softmax(torch.stack(lse), 0).transpose(2, 3)[..., None]
    merged = (torch.stack(o) * weights).sum(0)
    torch.testing.assert_close(merged, whole)
    do = torch.randn_like(whole)
    for got, want in zip(torch.autograd.grad(merged, (q, k, v), do), torch.autograd.grad(whole, (q, k, v), do)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernels_run", [False, True])
def test_parts_of_the_keys_give_the_gradients_of_all(kernels_run: bool) -> None:
    """By torch's products and by the kernels: from the lse, output and gradient of attention over all keys."""
    inputs = drawn(torch.float32, S=8, alibi=True)
    q, k, v = (inputs[n].requires_grad_() for n in "qkv")
    slopes, offset = inputs["slopes"], 8 - q.shape[1]
    whole, lse = reference(q, k, v, causal=True, slopes=slopes)
    do = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, (q, k, v), do)
    merged, gradients = torch.zeros_like(whole), [torch.zeros_like(x) for x in (q, k, v)]
    with torch.no_grad(), forced() if kernels_run else nullcontext():
        for keys in (slice(0, 3), slice(3, 8)):
            part = Part(offset - keys.start, True, None, slopes)
            o, part_lse = partial_attention(q, k[:, keys], v[:, keys], part)
            merged += o * torch.exp(part_lse - lse).transpose(1, 2)[..., None]
            dq, dk, dv = partial_gradients(do, q, k[:, keys], v[:, keys], whole, lse, part)
            gradients[0] += dq
            gradients[1][:, keys], gradients[2][:, keys] = dk, dv
    torch.testing.assert_close(merged, whole.detach(), rtol=1e-4, atol=1e-5)
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("few", [0, 3, 100])
def test_a_shared_bias_is_summed_in_any_number_of_parts(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = drawn(torch.float32, B=5, bias="H")
    bias = inputs["bias"].requires_grad_()
    (want,) = torch.autograd.grad(reference(**inputs)[0].sin().sum(), bias)
    monkeypatch.setattr(kernels, "_FEW_PROGRAMS", few)
    with forced():
        (got,) = torch.autograd.grad(attention(**inputs).sin().sum(), bias)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_neighbours_in_the_batch_may_share_a_bias() -> None:
    inputs = drawn(torch.float32, B=4)
    inputs["bias"] = bias = torch.randn(2, 2, 5, 7, device=DEVICE).requires_grad_()
    want = reference(**inputs)[0]
    repeated = reference(**inputs | {"bias": bias.repeat_interleave(2, 0).repeat_interleave(2, 1)})[0]
    torch.testing.assert_close(want, repeated)
    with forced():
        got = attention(**inputs)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        *(torch.autograd.grad(o.sin().sum(), bias)[0] for o in (got, want)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("window", [2**31 - 1, sys.maxsize])
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_wider_than_everything_hides_nothing(window: int, causal: bool) -> None:
    inputs = drawn(torch.float32, causal=causal)
    with forced():
        found = attention(**inputs | {"window": window})
    torch.testing.assert_close(found, reference(**inputs)[0])


def test_tiles_fit_every_head_size() -> None:
    dtypes, sizes = (torch.float32, torch.bfloat16), (1, 16, 20, 64, 96, 128, 200, 256)
    for kernel, dtype, size in itertools.product(("forward", "dkdv", "dq", "dbias"), dtypes, sizes):
        blocks = kernels._blocks(kernel, dtype, size, None)
        assert blocks["BLOCK_M"] >= 16
        assert blocks["BLOCK_N"] >= 16


def test_larger_heads_go_to_torch_with_a_warning() -> None:
    inputs = drawn(torch.float32, K=257)
    with forced(), pytest.warns(UserWarning, match="heads of at most 256 elements"):
        found = attention(**inputs)
    torch.testing.assert_close(found, reference(**inputs)[0])


def shaped(*shape: int) -> Tensor:
    return torch.zeros(shape, device=DEVICE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"v": shaped(2, 7, 2, 5)}, r"v \[2, 7, 2, 5\] are not"),
        ({"k": shaped(2, 7, 3, 4), "v": shaped(2, 7, 3, 4)}, "3 key/value heads do not divide 4 query heads"),
        ({"bias": shaped(2, 3, 5, 7)}, r"bias \[2, 3, 5, 7\] does not broadcast to \[2, 4, 5, 7\]"),
        ({"mask": shaped(2, 5)}, r"mask \[2, 5\] is not \[2, 7\]"),
        ({"slopes": shaped(2)}, r"slopes \[2\] are not \[4\]"),
        ({"window": 0}, "a window of 0 shows nothing"),
        ({"k": shaped(2, 7, 2, 4).half()}, "q, k and v are to have one dtype"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    inputs = drawn(torch.float32) | changed
    for function in (attention, attention_with_lse):
        with pytest.raises(ValueError, match=message):
            function(**inputs)


def test_packed_sequences_need_their_limits() -> None:
    with pytest.raises(
        ValueError, match=r"cu_seqlens_q and cu_seqlens_k are to be \[sequences \+ 1\], not \[3\] and \[2\]"
    ):
        attention_varlen(
            shaped(4, 2, 8), shaped(4, 2, 8), shaped(4, 2, 8), torch.tensor([0, 1, 4]), torch.tensor([0, 4]), 3, 4
        )


class OnGpu(NamedTuple):
    """As much of a tensor as the choice looks at."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    is_cuda: bool = True


def test_plain_attention_in_16_bits_is_the_librarys_on_hopper() -> None:
    def taken(chip: str = "sm_90", causal: bool = True, keys: int = 300, **given: Any) -> bool:
        q = OnGpu(**{"shape": (2, 300, 4, 64)} | given)
        with compiling_for(chip):
            return _library_is_faster(cast(Tensor, q), cast(Tensor, q._replace(shape=(2, keys, 4, 64))), causal)

    assert taken()
    assert taken(dtype=torch.float16)
    assert taken(keys=400, causal=False)
    assert not taken(keys=400)
    assert not taken("sm_80")
    assert not taken(dtype=torch.float32)
    assert not taken(shape=(2, 300, 4, 20))
    assert not taken(shape=(2, 300, 4, 256))
    assert not taken(shape=(2, 300, 8, 64))
    assert not taken(is_cuda=False)
    with forced():
        assert not taken()
    torch.use_deterministic_algorithms(True)
    try:
        assert not taken()
    finally:
        torch.use_deterministic_algorithms(False)
