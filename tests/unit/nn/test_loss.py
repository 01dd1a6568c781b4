import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from core.kernels import cross_entropy as loss_module
from core.kernels.cross_entropy import linear_cross_entropy
from core.nn.loss import Head


def reference(x, weight, targets, z_loss=0.0, label_smoothing=0.0, ignore_index=-100, bias_V=None):
    logits = F.linear(x, weight, bias_V)
    z = (logits.logsumexp(-1).square() * (targets != ignore_index)).sum()
    options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
    return F.cross_entropy(logits, targets, reduction="sum", **options) + z_loss * z


def inputs(num_tokens, dim, num_rows, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(num_tokens)
    x = (torch.randn(num_tokens, dim, generator=generator) * scale).to(dtype).requires_grad_()
    weight = torch.randn(num_rows, dim, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, num_rows, (num_tokens,), generator=generator)
    targets[::3] = -100
    return x, weight, targets


OPTIONS = [{}, {"z_loss": 1e-2}, {"label_smoothing": 0.1}, {"z_loss": 1e-2, "label_smoothing": 0.1}]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
@pytest.mark.parametrize("shape", [(1, 3, 2), (2, 1, 1), (37, 5, 41), (64, 8, 100)])
@pytest.mark.parametrize("chunk_bytes", [1 << 26, 1600])
def test_loss_and_gradients(shape, chunk_bytes, options, monkeypatch):
    """Also in several chunks and tiles, the last one ragged."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(loss_module, "TILE_BYTES", 700)
    monkeypatch.setattr(loss_module, "SLAB_BYTES", 700)
    x, weight, targets = inputs(*shape)
    ours, expected = (f(x, weight, targets, **options) for f in (linear_cross_entropy, reference))
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)
    grads = torch.autograd.grad(0.37 * ours, (x, weight))
    for grad, want in zip(grads, torch.autograd.grad(0.37 * expected, (x, weight)), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk_bytes", [1 << 26, 1600])
def test_a_bias(chunk_bytes, monkeypatch):
    """Its gradient is summed over chunks, in fp32 of 16 bits; also where it alone learns."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk_bytes)
    x, weight, targets = inputs(37, 5, 41)
    bias = torch.linspace(-1, 1, 41, dtype=torch.float64, requires_grad=True)
    ours, expected = (f(x, weight, targets, bias_V=bias, z_loss=1e-2) for f in (linear_cross_entropy, reference))
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)
    wanted = torch.autograd.grad(0.37 * expected, (x, weight, bias))
    for grad, want in zip(torch.autograd.grad(0.37 * ours, (x, weight, bias)), wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)
    x, weight = x.detach(), weight.detach()
    (grad,) = torch.autograd.grad(0.37 * linear_cross_entropy(x, weight, targets, bias_V=bias, z_loss=1e-2), bias)
    torch.testing.assert_close(grad, wanted[2], rtol=1e-12, atol=1e-12)
    ours = linear_cross_entropy(x.bfloat16(), weight.bfloat16(), targets, bias_V=bias.bfloat16(), z_loss=1e-2)
    (half,) = torch.autograd.grad(0.37 * ours, bias)
    assert (half - wanted[2]).norm() / wanted[2].norm() < 2**-6
    with pytest.raises(ValueError, match=r"bias \[40\] for weight \[41, 5\]"):
        linear_cross_entropy(x, weight, targets, bias_V=bias[:40])


def test_large_logits():
    """A token whose probability underflows has its full loss."""
    x, weight, targets = inputs(12, 4, 50, torch.float32, scale=1000.0)
    torch.testing.assert_close(
        linear_cross_entropy(x, weight, targets), reference(x, weight, targets), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("chunk_bytes", [1 << 26, 120])
def test_bf16_accumulates_in_fp32(chunk_bytes, monkeypatch):
    """Against fp64 from the same bf16 inputs: one rounding of logits, of the gradient of logits and of the result.

    In 300 chunks a sum kept in bf16 would be off by sqrt(300) roundings.
    """
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk_bytes)
    x, weight, targets = inputs(300, 8, 60, torch.bfloat16)
    wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    expected = reference(wide_x, wide_weight, targets)
    ours = linear_cross_entropy(x, weight, targets)
    assert ours.dtype == torch.float32
    assert abs(ours.item() / expected.item() - 1) < 2**-9
    ours.backward()
    expected.backward()
    for grad, want in ((x.grad, wide_x.grad), (weight.grad, wide_weight.grad)):
        assert (grad.double() - want).norm() / want.norm() < 2**-8


def test_few_large_chunks_where_the_sum_in_fp32_would_be_most_of_the_memory(monkeypatch):
    """300 tokens and 100 dims: four chunks summed in bf16, three roundings of the sum beside the products' own."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 120)
    assert loss_module.cut(300, 60, 100, torch.bfloat16) == (75, torch.bfloat16)
    assert loss_module.cut(300, 60, 8, torch.bfloat16) == (1, torch.float32)
    assert loss_module.cut(300, 60, 100, torch.float32) == (1, torch.float32)
    x, weight, targets = inputs(300, 100, 60, torch.bfloat16, scale=0.1)
    wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    reference(wide_x, wide_weight, targets).backward()
    linear_cross_entropy(x, weight, targets).backward()
    for grad, want in ((x.grad, wide_x.grad), (weight.grad, wide_weight.grad)):
        assert (grad.double() - want).norm() / want.norm() < 2**-8


def test_a_sure_token_keeps_its_gradient():
    """softmax - 1 at the target is rounded once: 1 - 2e-4 must not become 1 first (bf16 has 8 bits)."""
    x = torch.tensor([[1.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[8.5], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(x, weight, torch.tensor([0])).backward()
    assert weight.grad[0].item() == pytest.approx(-weight.grad[1].item(), rel=2**-7)


@pytest.mark.parametrize("num_shards", [2, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
def test_vocabulary_in_shards(num_shards, options, monkeypatch):
    """Ragged shards, the ranks played by a loop: a first pass notes each chunk's statistics, a second combines them."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 23 * 8 * 10)
    x, weight, targets = inputs(29, 4, 23)
    expected = reference(x, weight, targets, **options)
    of_shards = {**options, "vocab_size": 23, "max_rows": 23}
    want_x, want_weight = torch.autograd.grad(expected, (x, weight))
    parts = weight.detach().chunk(num_shards)
    starts = [sum(len(p) for p in parts[:i]) for i in range(num_shards)]

    noted = [[] for _ in parts]
    for part, start, notes in zip(parts, starts, noted, strict=True):
        note = lambda *statistics, notes=notes: notes.append(statistics) or statistics  # noqa: E731
        with torch.no_grad():
            linear_cross_entropy(x, part, targets, combine=note, vocab_start=start, **of_shards)
    chunks = []
    for of_ranks in zip(*noted, strict=True):
        maxima, sums, chosen = (torch.stack(column) for column in zip(*of_ranks, strict=True))
        chunks.append((maxima.amax(0), (sums * (maxima - maxima.amax(0)).exp()).sum(0), chosen.sum(0)))
    assert [len(chunk[0]) for chunk in chunks] == [10, 10, 9]

    got_x = torch.zeros_like(x)
    for part, start, want in zip(parts, starts, want_weight.chunk(num_shards), strict=True):
        part, remaining = part.clone().requires_grad_(), iter(chunks)
        combine = lambda *_, remaining=remaining: next(remaining)  # noqa: E731
        loss = linear_cross_entropy(x, part, targets, combine=combine, vocab_start=start, **of_shards)
        torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
        grad_x, grad_part = torch.autograd.grad(loss, (x, part))
        torch.testing.assert_close(grad_part, want, rtol=1e-12, atol=1e-12)
        got_x += grad_x
    torch.testing.assert_close(got_x, want_x, rtol=1e-12, atol=1e-12)


def test_never_all_logits(monkeypatch):
    """No tensor of N x V values is made, whatever for."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 1 << 14)
    monkeypatch.setattr(loss_module, "TILE_BYTES", 1 << 12)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **kwargs or {})
            sizes = [t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
            largest = max([largest, *sizes])
            return out

    x, weight, targets = inputs(128, 2, 256)
    with Sizes():
        linear_cross_entropy(x, weight, targets).backward()
    assert largest <= (1 << 14) // 8


def test_a_trace_costs_the_same_for_any_number_of_tiles(monkeypatch):
    """A plan traces steps whose loss has thousands of tiles."""
    counts = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts[-1] += 1
            return func(*args, **kwargs or {})

    for tile_bytes in (1 << 20, 1 << 10):
        monkeypatch.setattr(loss_module, "TILE_BYTES", tile_bytes)
        counts.append(0)
        with FakeTensorMode():
            x, weight = (torch.empty(rows, 4, requires_grad=True) for rows in (128, 64))
            with Count():
                linear_cross_entropy(x, weight, torch.zeros(128, dtype=torch.long)).backward()
    assert counts[0] == counts[1]


def test_head():
    """Logits or loss, the rows beyond the length dropped; no gradient is made where none is wanted."""
    head = Head(11, 4).double()
    x, targets = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True), torch.randint(0, 11, (2, 3))
    assert torch.equal(head(x, None, 3), F.linear(x[:, :3], head.weight))
    expected = F.cross_entropy(F.linear(x[:, :3], head.weight).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(head(x, targets, 3), expected, rtol=1e-13, atol=0)
    with torch.no_grad():
        assert head(x, targets, 3).grad_fn is None


def test_head_options():
    """The head hands on all that the loss can do."""
    options = {"z_loss": 1e-2, "label_smoothing": 0.1, "ignore_index": 2}
    head, x = Head(11, 4, **options).double(), torch.randn(2, 3, 4, dtype=torch.float64)
    targets = torch.tensor([[0, 2, 10], [2, 7, 2]])
    expected = reference(x.flatten(0, 1), head.weight, targets.flatten(), **options)
    torch.testing.assert_close(head(x, targets), expected, rtol=1e-13, atol=0)
