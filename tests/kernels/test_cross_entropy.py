"""What the SPECs of cross-entropy do not draw: several chunks, several shards, gradients under torch.compile."""

from contextlib import nullcontext

import pytest
import torch

from core.kernels import cross_entropy
from core.kernels.cross_entropy import Objective, cross_entropy_of_shard, linear_cross_entropy, reference
from core.kernels.operator import forced
from tests.support.device import DEVICE

pytestmark = pytest.mark.usefixtures("device")
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2, "ignore_index": 4}


def inputs(num_tokens: int, dim: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(rows, dim, generator=generator) for rows in (num_tokens, num_rows))
    targets = torch.randint(0, num_rows, (num_tokens,), generator=generator)
    return x.to(DEVICE).requires_grad_(), weight.to(DEVICE).requires_grad_(), targets.to(DEVICE)


def test_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 5, 5 and 3 tokens, products by another function than torch's."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 5 * 31 * 4)
    x, weight, targets = inputs(13, 6, 31)
    rows = []

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rows.append(a.shape[0])
        return a @ b

    with forced():
        loss = linear_cross_entropy(x, weight, targets, product=product, **OPTIONS)
    exact = reference(x.double(), weight.double(), targets, **OPTIONS)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    expected = torch.autograd.grad(exact, (x, weight))
    torch.testing.assert_close(torch.autograd.grad(loss, (x, weight)), expected, rtol=1e-5, atol=1e-5)
    assert rows == [5, 5, 31, 5, 5, 31, 3, 3, 31]


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("chunk_tokens", [5, 13])
@pytest.mark.parametrize("num_rows", [31, 32, 5])
def test_rows_beyond_a_whole_number_of_pieces(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, chunk_tokens: int, kernels: bool
) -> None:
    """Products by a GPU's library: the last rows apart, the weight's gradient added where it is."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", chunk_tokens * num_rows * 2)
    monkeypatch.setattr(cross_entropy, "FEW_CHUNKS", 1)
    if DEVICE == "cpu":
        monkeypatch.setattr(cross_entropy, "_by_library", lambda weight: True)
        monkeypatch.setattr(cross_entropy, "_add_product", lambda total, a, b: total.add_(a.float() @ b.float()))
    x, weight, targets = (t.bfloat16() if t.is_floating_point() else t for t in inputs(13, 6, num_rows))
    with forced() if kernels else torch.enable_grad():
        loss = linear_cross_entropy(x, weight, targets, **OPTIONS)
    wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = reference(*wide, targets, **OPTIONS)
    torch.testing.assert_close(loss.double(), exact, rtol=4e-3, atol=0)
    found, expected = torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(exact, wide)
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1.6e-2


def test_in_shards() -> None:
    """Ragged shards of the vocabulary: statistics combined between the steps, gradients side by side."""
    x, weight, targets = inputs(9, 6, 40)
    logits = (x @ weight.T).detach().requires_grad_()
    expected = reference(logits, torch.eye(40, device=DEVICE), targets, **OPTIONS)
    with forced():
        shards = [
            cross_entropy_of_shard(logits.detach()[:, a:b].clone(), targets, Objective(40, a, **OPTIONS))
            for a, b in ((0, 17), (17, 34), (34, 40))
        ]
        maxima, sums, chosen = (torch.stack(column) for column in zip(*(s.statistics for s in shards), strict=True))
        logsumexp = maxima.amax(0) + (sums * (maxima - maxima.amax(0)).exp()).sum(0).log()
        gradients = torch.cat([shard.gradients(logsumexp) for shard in shards], 1)
    loss = (logsumexp - chosen.sum(0) + 1e-2 * logsumexp.square())[targets != 4].sum()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, logits)[0], rtol=1e-5, atol=1e-6)


def test_a_masked_vocabulary() -> None:
    """Logits of -inf, whole tiles of them, are probabilities of zero."""
    logits, targets = torch.randn(3, 9000, device=DEVICE), torch.tensor([0, 8500, 2], device=DEVICE)
    logits[:, 10:8400] = float("-inf")
    logits[1, :8400] = float("-inf")
    wanted = logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(wanted, targets, reduction="sum")
    with forced():
        shard = cross_entropy_of_shard(logits, targets, Objective(9000))
        loss = (shard.logsumexp_C - shard.statistics[2]).sum()
        gradients = shard.gradients(shard.logsumexp_C)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, wanted)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernels", [False, True])
def test_targets_of_any_integers(kernels: bool) -> None:
    x, weight, targets = inputs(9, 6, 40)
    with forced() if kernels else torch.enable_grad():
        found, expected = (linear_cross_entropy(x, weight, t, **OPTIONS) for t in (targets.int(), targets))
    assert torch.equal(found, expected)


def test_compiled_with_gradients() -> None:
    x, weight, targets = inputs(5, 6, 31)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    with forced():
        expected = torch.autograd.grad(linear_cross_entropy(x, weight, targets, **OPTIONS), (x, weight))
        found = torch.autograd.grad(compiled(x, weight, targets, **OPTIONS), (x, weight))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("chunk_tokens", [256, 100])
def test_fp16_sums_over_tokens_beyond_its_range(
    monkeypatch: pytest.MonkeyPatch, kernels: bool, chunk_tokens: int
) -> None:
    """All tokens push one row the same way: the sum is about 250,000, its mean over the tokens about 1,000."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", chunk_tokens * 5 * 2)
    x = torch.full((256, 8), 1000.0, dtype=torch.float16, device=DEVICE, requires_grad=True)
    weight = (torch.arange(40, device=DEVICE).view(5, 8) / 1e5).half().requires_grad_()
    targets = torch.zeros(256, dtype=torch.int64, device=DEVICE)
    with forced() if kernels else nullcontext():
        loss = linear_cross_entropy(x, weight, targets)
        (loss / 256).backward()
    wide = weight.detach().double().requires_grad_()
    (reference(x.detach().double(), wide, targets) / 256).backward()
    assert wide.grad is not None
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float16
    assert float(wide.grad.abs().max()) * 256 > 2 * 65504
    torch.testing.assert_close(weight.grad.double(), wide.grad, rtol=2e-3, atol=0.5)
