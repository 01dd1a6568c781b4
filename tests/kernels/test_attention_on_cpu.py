"""Attention's path on a CPU: shared biases joined with masks, and 16 bits by loops over scores in fp32."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from core.kernels import attention_loops
from core.kernels.attention import attention, reference
from core.trace.account import MemoryAccount


@pytest.mark.parametrize("masks", ["none", "all alike", "all visible", "two kinds", "one sees nothing"])
def test_a_shared_bias_is_joined_with_each_kind_of_mask_once(masks: str) -> None:
    """What a CPU does without gradients: as the reference, and without a bias for each sequence."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v, bias = draw(6, 32, 2, 4), draw(6, 40, 2, 4), draw(6, 40, 2, 4), draw(2, 2, 32, 40)
    mask = torch.ones(6, 40)
    if masks == "all alike":
        mask[:, 5:] = 0
    if masks in ("two kinds", "one sees nothing"):
        mask[1:3, 4:] = 0
    if masks == "one sees nothing":
        mask[4] = 0
    given = None if masks == "none" else mask
    expected, _ = reference(q, k, v, bias=bias, mask=given)
    with torch.no_grad(), MemoryAccount() as account:
        account.add([q, k, v, bias, mask])
        before = account.current_bytes
        got = attention(q, k, v, bias=bias, mask=given)
    assert (got - expected).abs().max() < 1e-5
    assert account.peak_bytes - before < 6 * 2 * 32 * 40 * 4


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("masks", ["none", "all visible", "two kinds", "one sees nothing", "hidden by the bias"])
def test_a_shared_bias_has_the_gradients_of_the_reference(masks: str, heads: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v, bias = draw(6, 5, 2, 4), draw(6, 7, 2, 4), draw(6, 7, 2, 4), draw(2, heads, 5, 7)
    mask = torch.ones(6, 7)
    if masks in ("two kinds", "one sees nothing"):
        mask[1:3, 4:] = 0
    if masks == "one sees nothing":
        mask[4] = 0
    if masks == "hidden by the bias":
        bias[1, :, 2] = bias[0, :, 1, 3:] = -torch.inf
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    given = None if masks == "none" else mask
    found, (expected, _) = (f(q, k, v, bias=bias, mask=given) for f in (attention, reference))
    torch.testing.assert_close(found, expected)
    do = torch.randn_like(expected)
    for got, want in zip(torch.autograd.grad(found, leaves, do), torch.autograd.grad(expected, leaves, do)):
        torch.testing.assert_close(got, want)


def in_16_bits(
    dtype: torch.dtype, bias: tuple[int, int] | None, masks: str = "none", amplitude: float = 1.0
) -> tuple[list[Tensor | None], Tensor | None, Tensor]:
    """q, k, v and a bias [.., 5, 37], lying as halves of wider rows do; a mask; a gradient of the output."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (amplitude * torch.randn(shape, generator=generator)).to(dtype)

    q, k, v = (draw(6, n, 2, 2, 20)[:, :, :, 1] for n in (5, 37, 37))
    mask = None if masks == "none" else torch.ones(6, 37)
    if mask is not None:
        mask[1:3, 4:] = 0
    added = None if bias is None else draw(*bias, 5, 37)
    if mask is not None and masks == "one sees nothing":
        mask[4] = 0
        if added is not None:
            added[0, :, 2] = -torch.inf  # nor does a query, by its bias
    return [q, k, v, added], mask, draw(6, 5, 2, 20)


def with_gradients(attend: Any, inputs: list[Tensor | None], do: Tensor, dtype: torch.dtype) -> list[Tensor]:
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
    o = attend(*leaves)
    return [o, *torch.autograd.grad(o, [x for x in leaves if x is not None], do.to(dtype))]


@pytest.mark.parametrize("masks", ["none", "two kinds", "one sees nothing"])
@pytest.mark.parametrize("bias", [None, (1, 2), (2, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_in_16_bits_come_of_scores_in_fp32(
    dtype: torch.dtype, bias: tuple[int, int] | None, masks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU. Scores of up to a dozen, rounded to 16 bits, would move the results by some of these roundings."""
    monkeypatch.setattr(attention_loops, "_PIECE_BYTES", 2 * 2 * 5 * 37 * 2)  # two sequences at a time
    inputs, mask, do = in_16_bits(dtype, bias, masks, amplitude=2.0)
    exact = with_gradients(
        lambda q, k, v, b: reference(q, k, v, bias=b, mask=mask)[0], inputs, do, torch.float64
    )  # fmt: skip
    found = with_gradients(lambda q, k, v, b: attention(q, k, v, bias=b, mask=mask), inputs, do, dtype)
    for got, want in zip(found, exact, strict=True):
        # p, ds and the result are rounded, each by half an eps at most and by a quarter of it on the average.
        assert (got.double() - want).norm() <= 3 / 4 * torch.finfo(dtype).eps * want.norm()


def test_attention_in_16_bits_keeps_one_tensor_of_scores_for_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, mask, _ = in_16_bits(torch.bfloat16, (1, 2), "two kinds")
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    leaves = [x.requires_grad_() for x in inputs if x is not None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(*leaves[:3], bias=leaves[3], mask=mask)
    scores = [t for t in kept if t.shape[-2:] == (5, 37)]
    assert [(t.shape, t.dtype) for t in scores] == [((6, 2, 5, 37), torch.bfloat16)]


@pytest.mark.parametrize("threads", [1, 2])
def test_attention_in_16_bits_is_the_same_under_autocast_and_on_any_number_of_threads(threads: int) -> None:
    inputs, mask, do = in_16_bits(torch.bfloat16, (1, 2), "two kinds")
    want = with_gradients(lambda q, k, v, b: attention(q, k, v, bias=b, mask=mask), inputs, do, torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            got = with_gradients(lambda q, k, v, b: attention(q, k, v, bias=b, mask=mask), inputs, do, torch.bfloat16)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_attention_in_16_bits_asks_no_default_of_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loops read and write fp32 on the CPU, whatever the user's tensors are by default."""
    inputs, mask, do = in_16_bits(torch.bfloat16, (1, 2), "two kinds")
    want = with_gradients(lambda q, k, v, b: attention(q, k, v, bias=b, mask=mask), inputs, do, torch.bfloat16)
    monkeypatch.setattr(attention_loops, "_room", partial(_fp32_room, attention_loops._room))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            got = with_gradients(lambda q, k, v, b: attention(q, k, v, bias=b, mask=mask), inputs, do, torch.bfloat16)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _fp32_room(room: Callable[[int, int], Tensor], head_size: int, width: int) -> Tensor:
    """Less memory, or none, would be written beyond."""
    found = room(head_size, width)
    assert (found.dtype, found.device.type) == (torch.float32, "cpu")
    return found


def test_attention_in_16_bits_without_a_bias_keeps_no_more_than_its_inputs() -> None:
    q, k, v = (torch.randn(1, n, 1, 8, dtype=torch.bfloat16) for n in (3, 24, 24))
    assert attention_loops.offered(q, k, v, None)
    longer = torch.randn(1, 25, 1, 8, dtype=torch.bfloat16)
    assert not attention_loops.offered(q, longer, longer, None)
