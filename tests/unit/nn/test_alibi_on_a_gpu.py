"""ALiBi on a GPU: slopes go to our kernel, and no operator of torch's gets a bias in another format than its queries.

There is no GPU here, so tensors are fakes of one, which choose what a GPU would choose; values are those of the
interpreter (tests/kernels/test_by_kernels.py) and of a GPU (tests/gpu/test_masks.py).
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.torch_attention import in_one_format, torch_attention
from core.models import Decoder, DecoderConfig
from core.models.generate import cached
from core.nn.attention import StepContext
from tests.support.fake_gpu import fake_gpu, on_fake_gpu

CONFIG = DecoderConfig(
    vocab_size=41,
    dim=48,
    num_layers=2,
    num_heads=3,
    ffn_dim=192,
    positions="alibi",
    embedding_norm=True,
    family="bloom",
)
B, L = 2, 13


def training(model: Decoder, ids: Tensor) -> None:
    model(ids, targets=ids)


def with_documents(model: Decoder, ids: Tensor) -> None:
    begins = torch.empty(5, dtype=torch.int32, device="cuda")  # their number is a value, which fakes have not
    with patch("core.nn.attention._begins", lambda _: begins):
        model(ids, context=StepContext(torch.empty(B, L, dtype=torch.long, device="cuda")), targets=ids)


def with_padding(model: Decoder, ids: Tensor) -> None:
    model.eval()(ids, torch.empty(B, L, dtype=torch.long, device="cuda"), targets=ids)


def generation(model: Decoder, ids: Tensor) -> None:
    with cached(model, L + 1):
        model(ids)
        model(ids[:, :1], positions=torch.empty(1, 1, dtype=torch.long, device="cuda"))


def generation_of_padded(model: Decoder, ids: Tensor) -> None:
    mask = torch.empty(B, L + 1, dtype=torch.long, device="cuda")
    with cached(model, L + 1):
        model(ids, mask[:, :L])
        model(ids[:, :1], mask, torch.empty(B, 1, dtype=torch.long, device="cuda"))


class Biases:
    """Formats of queries and of what is added to their scores, of each call of torch's operator."""

    def __init__(self) -> None:
        self.formats: list[tuple[torch.dtype, torch.dtype]] = []
        self.attend = F.scaled_dot_product_attention

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        assert q.is_cuda
        if attn_mask is not None:
            self.formats.append((q.dtype, attn_mask.dtype))
        return self.attend(q, k, v, attn_mask=attn_mask, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("run", "kernel", "padded"),
    [
        (training, "attention_forward", False),
        (with_documents, "attention_varlen_forward", False),
        (with_padding, "", True),
        (generation, "attention_forward", False),
        (generation_of_padded, "", True),
    ],
)
def test_no_operator_gets_a_bias_of_another_format(
    run: Callable[[Decoder, Tensor], None], kernel: str, padded: bool, dtype: torch.dtype
) -> None:
    model = Decoder(CONFIG)
    with patch.object(F, "scaled_dot_product_attention", Biases()) as biases, fake_gpu() as counted:
        run(on_fake_gpu(model, dtype), torch.empty(B, L, dtype=torch.long, device="cuda"))  # pyright: ignore
    calls = (2 if run in (generation, generation_of_padded) else 1) * CONFIG.num_layers
    assert all(queries == bias for queries, bias in biases.formats)
    if padded:
        assert biases.formats == [(torch.float32, torch.float32)] * calls
    else:
        assert not biases.formats
        assert counted.counts[kernel] == calls


def test_a_bias_narrower_than_its_queries_is_our_fault() -> None:
    with fake_gpu():
        q, bias = torch.empty(1, 1, 2, 4, device="cuda"), torch.empty(1, 1, 2, 2, device="cuda", dtype=torch.bfloat16)
        with pytest.raises(AssertionError, match="narrower"):
            in_one_format(q, q, q, bias)


def test_a_bias_wider_than_its_queries_is_added_in_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, formats = F.scaled_dot_product_attention, set[torch.dtype]()

    def spy(*tensors: Tensor, attn_mask: Tensor, **options: Any) -> Tensor:
        formats.update(x.dtype for x in (*tensors, attn_mask))
        return attend(*tensors, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    with fake_gpu():
        q, bias = torch.empty(1, 1, 2, 4, device="cuda", dtype=torch.bfloat16), torch.empty(1, 1, 2, 2, device="cuda")
        assert torch_attention(q, q, q, bias).dtype == torch.bfloat16
    assert formats == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_adds_in_fp32_as_before(dtype: torch.dtype) -> None:
    q = torch.randn(1, 1, 3, 4, dtype=dtype)
    assert in_one_format(q, q, q, torch.zeros(1, 1, 3, 3)) == (q, q, q)
