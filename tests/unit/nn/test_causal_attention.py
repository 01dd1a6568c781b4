"""Causal attention by tiles: as near to fp64 as bf16 allows, whatever the tiles."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.nn import causal_attention as tiles
from core.nn.attention import dot_product_attention
from core.nn.causal_attention import causal_attention, fits

# Scores, probabilities, their gradients and the results are each rounded to bf16: four errors of at most 2^-9 each.
TOLERANCE = 4 * 2.0**-9


def in_fp64(q_BLHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor) -> Tensor:
    q, k, v = (x.double().transpose(1, 2) for x in (q_BLHK, k_BLHK, v_BLHK))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def value_and_gradients(function, qkv_3BLHK: Tensor, do_BLHK: Tensor) -> list[Tensor]:
    inputs = [x.detach().clone().requires_grad_() for x in qkv_3BLHK]
    o_BLHK = function(*inputs)
    return [o_BLHK, *torch.autograd.grad(o_BLHK, inputs, do_BLHK.to(o_BLHK.dtype))]


@pytest.mark.parametrize("block_queries", [4, 5, 64])
@pytest.mark.parametrize("tile_bytes", [1, 600, 1 << 20])
@pytest.mark.parametrize("shape", [(3, 13, 5, 12), (1, 1, 1, 1), (2, 8, 2, 32)])
def test_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, block_queries: int, tile_bytes: int, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(tiles, "BLOCK_QUERIES", block_queries)
    monkeypatch.setattr(tiles, "TILE_BYTES", tile_bytes)
    torch.manual_seed(0)
    qkv, do = torch.randn(3, *shape).bfloat16(), torch.randn(shape).bfloat16()
    expected = value_and_gradients(in_fp64, qkv, do)
    for found, want in zip(value_and_gradients(causal_attention, qkv, do), expected, strict=True):
        assert found.dtype is torch.bfloat16
        # The gradient of a softmax over one key is zero: there is nothing to be relative to.
        assert (found - want).norm() <= TOLERANCE * want.norm().clamp(min=1e-3)


def test_it_is_an_operator_of_its_own() -> None:
    q, k, v = (torch.randn(2, 9, 3, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.library.opcheck(causal_attention, (q, k, v))


def test_attention_uses_it_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    q, narrow = torch.randn(1, 4, 2, 8).bfloat16(), torch.randn(1, 4, 1, 8).bfloat16()
    for units, expected in ((None, False), ("matrix", False), ("vector", True)):
        monkeypatch.setattr(tiles, "bf16_units", lambda device, units=units: units)
        assert fits(q, q) is expected
    assert not fits(q, narrow)  # grouped heads
    assert not fits(q[:, -1:], q)  # a query over cached keys
    assert not fits(q.float(), q.float())
    called = []
    monkeypatch.setattr("core.nn.attention.causal_attention", lambda *qkv: called.append(qkv))
    dot_product_attention(q, q, q, None, is_causal=True)
    assert len(called) == 1
    dot_product_attention(q, q, q, None, is_causal=False)
    assert len(called) == 1
