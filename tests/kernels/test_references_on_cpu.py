"""What a CPU computes in the place of kernels, seen from a machine that has no GPU."""

import pytest
import torch

from core.kernels.paged_attention import reference
from core.nn.by_kernels import by_kernels
from tests.kernels.test_by_kernels import CONFIGS, built, results
from tests.kernels.test_paged_attention import batch
from tests.support.device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="is about the CPU; runs where there is no CUDA device")


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 3, 1]], ids=str)
def test_one_query_in_16_bits_is_computed_in_32(counts: list[int]) -> None:
    """Bit for bit, also beside a sequence with several."""
    inputs = batch(L=90, K=32, slopes=True)
    cu = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    inputs |= {"q": torch.randn(int(cu[-1]), 2, 32, generator=torch.Generator().manual_seed(1)), "cu_query_lens": cu}
    inputs["lengths"] = inputs["lengths"].clamp(min=3)
    narrow = inputs | {name: inputs[name].bfloat16() for name in ("q", "k_pages", "v_pages")}
    wide = narrow | {name: narrow[name].float() for name in ("q", "k_pages", "v_pages")}
    lone = [int(cu[b]) for b in range(3) if counts[b] == 1]
    assert torch.equal(reference(**narrow)[lone], reference(**wide)[lone].bfloat16())


def test_without_a_gpu_nothing_changes() -> None:
    for name in CONFIGS:
        want, found = results(built(name), "plain"), results(by_kernels(built(name)), "plain")
        assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))
