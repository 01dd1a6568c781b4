"""The attention that CUDA is given computes what a CPU's operator computes; here on a CPU."""

import pytest
import torch
from torch import Tensor

from core.auto.attention import backward, forward

ATEN = torch.ops.aten


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape) + shape[-2]))


@pytest.mark.parametrize(("heads", "is_causal", "masked"), [(4, False, False), (4, True, False), (2, False, True)])
def test_attention_and_its_gradient(heads: int, is_causal: bool, masked: bool) -> None:
    """Also with fewer heads of keys than of queries, and with fewer keys."""
    keys = 5 if is_causal else 3
    q_BHLE, k_BHSE, v_BHSE = drawn(2, 4, 5, 6), drawn(2, heads, keys, 6), drawn(2, heads, keys, 6).flip(-1)
    mask = drawn(2, 1, 5, keys) if masked else None
    options = {"attn_mask": mask, "scale": 0.3}
    expected = ATEN._scaled_dot_product_flash_attention_for_cpu(q_BHLE, k_BHSE, v_BHSE, 0.0, is_causal, **options)
    found = forward(q_BHLE, k_BHSE, v_BHSE, 0.0, is_causal, **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    given = (drawn(2, 4, 5, 6).cos(), q_BHLE, k_BHSE, v_BHSE, *expected, 0.0, is_causal)
    gradients = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(*given, **options)
    torch.testing.assert_close(backward(*given, **options), gradients, rtol=1e-12, atol=1e-12)
