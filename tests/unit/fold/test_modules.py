"""Modules against the algorithms written down plainly, masks, dropout, and what must not depend on the frame."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from apps.fold.model import heads
from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.attention import GatedAttention, GlobalAttention
from apps.fold.model.config import StructureConfig, preset, tiny
from apps.fold.model.layers import SharedDropout
from apps.fold.model.msa import ColumnAttention, OuterProductMean, RowAttentionWithPairBias
from apps.fold.model.rigid import Frames
from apps.fold.model.structure import InvariantPointAttention
from apps.fold.model.triangle import TriangleAttention, TriangleMultiplication
from benchmarks.evoformer import as_written, blocks_of, forward_backward, inputs_of
from core.config import UserError
from core.kernels import triangle
from core.kernels.operator import INSTALLED, forced
from core.kernels.triangle import gate_reference, pair_factors
from tests.support.fold import random_features, random_parameters, randomise

F64 = torch.float64


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def _module(module: nn.Module) -> nn.Module:
    return randomise(module).to(F64).eval()


def _plain_attention(x: Tensor, mask: Tensor, bias: Tensor | None, a: GatedAttention) -> Tensor:
    """Algorithm 7, lines 2 to 7, for one row x[L, D], written with loops over heads."""
    H, K = a.num_heads, a.head_dim
    q, k, v = (x @ w.T for w in a.qkv.weight.chunk(3))
    gate = torch.sigmoid(x @ a.gate.weight.T + a.gate.bias)
    heads_out = []
    for h in range(H):
        cut = slice(h * K, (h + 1) * K)
        scores = q[:, cut] @ k[:, cut].T / math.sqrt(K) + (0 if bias is None else bias[h])
        weights = torch.softmax(scores + 1e9 * (mask - 1), -1)
        heads_out.append(gate[:, cut] * (weights @ v[:, cut]))
    return torch.cat(heads_out, -1) @ a.out_weight.T + a.out_bias


def test_row_attention() -> None:
    module = _module(RowAttentionWithPairBias(12, 6, 3, 4, dropout=0.1))
    m, z = _draw(2, 3, 5, 12), _draw(2, 5, 5, 6, seed=1)
    mask = (torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(2)) < 0.8).to(F64)
    mask[..., 0] = 1
    out = module(m, z, mask)
    for b in range(2):
        bias = module.bias(module.pair_norm(z[b])).permute(2, 0, 1)
        for s in range(3):
            expected = m[b, s] + _plain_attention(module.norm(m[b, s]), mask[b, s], bias, module.attention)
            assert (out[b, s] - expected).abs().max() < 1e-10


def test_column_attention() -> None:
    module = _module(ColumnAttention(12, 3, 4))
    m, mask = _draw(1, 4, 3, 12), torch.ones(1, 4, 3, dtype=F64)
    mask[0, 2] = 0
    out = module(m, mask)
    for n in range(3):
        expected = m[0, :, n] + _plain_attention(module.norm(m[0, :, n]), mask[0, :, n], None, module.attention)
        assert (out[0, :, n] - expected).abs().max() < 1e-10


def test_global_attention() -> None:
    module = _module(GlobalAttention(12, 3, 4))
    x, mask, residual = _draw(1, 5, 12), torch.tensor([[1.0, 1, 0, 1, 0]], dtype=F64), _draw(1, 5, 12, seed=3)
    out = module(x, mask, residual=residual)[0]
    mean = (x[0] * mask[0, :, None]).sum(0) / mask.sum()
    k, v = x[0] @ module.key_value.weight[:4].T, x[0] @ module.key_value.weight[4:].T
    q = (module.query.weight @ mean).view(3, 4)
    weights = torch.softmax(q @ k.T / 2 + 1e9 * (mask - 1), -1)
    gate = torch.sigmoid(module.gate(x[0]))
    expected = (gate * (weights @ v).flatten()) @ module.out_weight.T + module.out_bias + residual[0]
    assert (out - expected).abs().max() < 1e-10


def test_outer_product_mean() -> None:
    module = _module(OuterProductMean(12, 6, 4))
    m, z = _draw(1, 3, 4, 12), _draw(1, 4, 4, 6, seed=1)
    mask = torch.ones(1, 3, 4, dtype=F64)
    mask[0, 1, 2] = mask[0, :, 3] = 0
    out = module(m, z, mask)
    n = module.norm(m)
    a, b = module.left(n), module.right(n)
    for i in range(4):
        for j in range(4):
            both = mask[0, :, i] * mask[0, :, j]
            outer = sum(both[s] * torch.outer(a[0, s, i], b[0, s, j]) for s in range(3))
            expected = z[0, i, j] + module.out(outer.flatten()) / (1e-3 + both.sum())
            assert (out[0, i, j] - expected).abs().max() < 1e-8


@pytest.mark.parametrize(
    ("batch", "with_bias", "with_mask"), [((), False, False), ((1,), True, True), ((2, 3), True, False)]
)
def test_factors_of_a_triangle_lie_as_its_product_reads_them(
    batch: tuple[int, ...], with_bias: bool, with_mask: bool
) -> None:
    """Channels first and rows dense, with the values and gradients of the projection with channels last."""
    n, weight, bias = _draw(*batch, 3, 5, 6), _draw(16, 6, seed=1), _draw(16, seed=2) if with_bias else None
    mask = (_draw(*batch, 3, 5, seed=3) > 0).double() if with_mask else None
    inputs = [x.requires_grad_() for x in (n, weight, bias) if x is not None]
    expected = gate_reference(nn.functional.linear(n, weight, bias), mask)
    found = pair_factors(n, weight, bias, mask)
    for got, want in zip(found, expected, strict=True):
        assert got.shape == want.shape == (*batch, 4, 3, 5)
        assert (got - want).abs().max() < 1e-12
        assert got.stride()[-2:] == (5, 1)
    grads = [torch.autograd.grad((a * a + b).sum(), inputs) for a, b in (found, expected)]
    assert all((x - y).abs().max() < 1e-12 for x, y in zip(*grads, strict=True))


@pytest.mark.skipif(
    not INSTALLED, reason="no kernels without triton; ends where it is installed (constraints.txt does)"
)
def test_factors_take_their_kernel_whatever_the_masks_format(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(triangle, "gate_channels_first", lambda h, mask: taken.append(mask) or gate_reference(h, mask))
    n, weight, mask = torch.ones(2, 2, 6), torch.ones(16, 6), torch.ones(2, 2, dtype=torch.bool)
    pair_factors(n, weight, None, mask)
    assert not taken
    with forced():
        pair_factors(n, weight, None, mask)
    assert len(taken) == 1


@pytest.mark.parametrize("outgoing", [True, False])
def test_triangle_multiplication(outgoing: bool) -> None:
    m = _module(TriangleMultiplication(6, 4, outgoing=outgoing, dropout=0.2))
    z, mask = _draw(1, 5, 5, 6), torch.ones(1, 5, 5, dtype=F64)
    mask[:, 3] = mask[:, :, 3] = 0
    out = m(z, mask)[0]
    n = nn.functional.layer_norm(z[0], (6,), m.norm_weight, m.norm_bias)
    pa, pb, ga, gb = (n @ m.in_weight.T + m.in_bias).chunk(4, -1)
    a, b = mask[0, ..., None] * torch.sigmoid(ga) * pa, mask[0, ..., None] * torch.sigmoid(gb) * pb
    for i in range(5):
        for j in range(5):
            x = sum(a[i, k] * b[j, k] if outgoing else a[k, i] * b[k, j] for k in range(5))
            y = nn.functional.layer_norm(x, (4,), m.product_norm_weight, m.product_norm_bias)
            gate = torch.sigmoid(m.gate_weight @ n[i, j] + m.gate_bias)
            expected = z[0, i, j] + gate * (m.out_weight @ y + m.out_bias)
            assert (out[i, j] - expected).abs().max() < 1e-9


def test_triangle_attention() -> None:
    starting = _module(TriangleAttention(6, 2, 4, starting=True, dropout=0.2))
    z, mask = _draw(1, 5, 5, 6), torch.ones(1, 5, 5, dtype=F64)
    mask[:, 4] = mask[:, :, 4] = 0
    out = starting(z, mask)[0]
    n = starting.norm(z[0])
    bias = starting.bias(n).permute(2, 0, 1)
    for i in range(4):
        expected = z[0, i] + _plain_attention(n[i], mask[0, i], bias, starting.attention)
        assert (out[i] - expected).abs().max() < 1e-10
    ending = _module(TriangleAttention(6, 2, 4, starting=False, dropout=0.2))
    ending.load_state_dict(starting.state_dict())
    assert torch.equal(ending(z.transpose(1, 2), mask)[0], out.transpose(0, 1))


def _frames(seed: int, count: int) -> Frames:
    q, _ = torch.linalg.qr(_draw(1, count, 3, 3, seed=seed))
    q = q * torch.linalg.det(q)[..., None, None]
    return Frames(q, _draw(1, count, 3, seed=seed + 1))


def test_invariant_point_attention_against_the_algorithm() -> None:
    c = StructureConfig(10, 2, 3, 4, 2, 5, 3, 8, 1)
    ipa = _module(InvariantPointAttention(6, c))
    s, z, frames, mask = _draw(1, 4, 10), _draw(1, 4, 4, 6, seed=1), _frames(5, 4), torch.ones(1, 4, dtype=F64)
    mask[0, 3] = 0
    out = ipa(s, z, frames, mask)[0]
    H, K, P, V = 3, 4, 2, 5
    q, kv = ipa.query(s[0]).view(4, H, K), ipa.key_value(s[0]).view(4, H, 2 * K)
    qp, kvp = ipa.query_point(s[0]).view(4, 3, H, P), ipa.key_value_point(s[0]).view(4, 3, H, P + V)

    def globally(points: Tensor, i: int, h: int, p: int) -> Tensor:
        return frames.rotation[0, i] @ points[i, :, h, p] + frames.translation[0, i]

    gamma = nn.functional.softplus(ipa.point_weight)
    for i in range(4):
        o, points, pairs = [], [], []
        for h in range(H):
            scores = []
            for j in range(4):
                far = sum(((globally(qp, i, h, p) - globally(kvp, j, h, p)) ** 2).sum() for p in range(P))
                score = q[i, h] @ kv[j, h, :K] / math.sqrt(K) + ipa.bias(z[0, i, j])[h]
                score = math.sqrt(1 / 3) * (score - gamma[h] * math.sqrt(2 / (9 * P)) / 2 * far)
                scores.append(score + 1e5 * (mask[0, i] * mask[0, j] - 1))
            w = torch.softmax(torch.stack(scores), 0)
            o.append(sum(w[j] * kv[j, h, K:] for j in range(4)))
            pairs.append(sum(w[j] * z[0, i, j] for j in range(4)))
            for p in range(P, P + V):
                there = sum(w[j] * globally(kvp, j, h, p) for j in range(4))
                points.append(frames.rotation[0, i].T @ (there - frames.translation[0, i]))
        local = torch.stack(points)
        parts = [*o, *local.T, torch.sqrt((local**2).sum(-1) + 1e-8), *pairs]
        assert (out[i] - ipa.out(torch.cat(parts))).abs().max() < 1e-10


def test_the_structure_module_s_attention_does_not_see_the_frame_of_reference() -> None:
    ipa = _module(InvariantPointAttention(6, StructureConfig(10, 2, 3, 4, 2, 5, 3, 8, 1)))
    s, z, frames, mask = _draw(1, 7, 10), _draw(1, 7, 7, 6, seed=1), _frames(5, 7), torch.ones(1, 7, dtype=F64)
    turn = _frames(8, 1)
    turned = Frames(turn.rotation.expand(1, 7, 3, 3), turn.translation.expand(1, 7, 3)).compose(frames)
    assert (ipa(s, z, frames, mask) - ipa(s, z, turned, mask)).abs().max() < 1e-10
    moved = Frames(frames.rotation, frames.translation + torch.arange(7).to(F64)[:, None])
    assert (ipa(s, z, frames, mask) - ipa(s, z, moved, mask)).abs().max() > 1e-3


def test_padding_changes_nothing() -> None:
    """Residues, rows and templates that are masked leave the others' results alone."""
    config = tiny()
    model = AlphaFold(config).to(F64).eval()
    model.load_state_dict(random_parameters(config))
    features = random_features(9, rows=5, extra=4, templates=2).to("cpu", F64)
    padded = random_features(9, rows=5, extra=4, templates=2, pad=3).to("cpu", F64)
    with torch.inference_mode():
        expected, got = model([features] * 2), model([padded] * 2)
    assert (got.positions_BN373[:, :9] - expected.positions_BN373).abs().max() < 1e-8
    assert (got.pair_BNNZ[:, :9, :9] - expected.pair_BNNZ).abs().max() < 1e-8
    assert (got.logits.plddt[:, :9] - expected.logits.plddt).abs().max() < 1e-8


def test_a_batch_is_its_members() -> None:
    config = tiny()
    model = AlphaFold(config).to(F64).eval()
    model.load_state_dict(random_parameters(config))
    one, two = (random_features(8, rows=4, extra=3, templates=1, seed=seed).to("cpu", F64) for seed in (1, 2))
    both = type(one)(
        **{
            name: torch.cat([getattr(one, name), getattr(two, name)])
            for name in one.__dataclass_fields__
            if isinstance(getattr(one, name), torch.Tensor)
        },
        templates=type(one.templates)(
            **{
                name: torch.cat([getattr(one.templates, name), getattr(two.templates, name)])
                for name in one.templates.__dataclass_fields__
                if isinstance(getattr(one.templates, name), torch.Tensor)
            }
        ),
    )
    with torch.inference_mode():
        got = model([both])
        for i, features in enumerate((one, two)):
            expected = model([features])
            assert (got.positions_BN373[i] - expected.positions_BN373[0]).abs().max() < 1e-9
            assert (got.msa_BSND[i] - expected.msa_BSND[0]).abs().max() < 1e-9


def test_gradients_reach_every_parameter_and_only_through_the_last_iteration() -> None:
    config = replace(tiny(), structure=replace(tiny().structure, dropout=0.0))
    model = AlphaFold(config)
    model.load_state_dict(random_parameters(config))
    model.train()
    prediction = model([random_features(8, rows=4, extra=3, templates=2)] * 2)
    logits = [t for t in vars(prediction.logits).values() if t is not None]
    sum((t**2).mean() for t in [*logits, prediction.structure.atom14]).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # The last block's MSA reaches the masked-MSA head; nothing reads the last extra block's transition of the MSA but
    # its outer product. So every parameter has a gradient.
    assert without == []
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_shared_dropout() -> None:
    dropout, x = SharedDropout(0.5, dim=-3), torch.ones(2, 6, 50, 4)
    factor = dropout(x)
    assert factor.shape == (2, 1, 50, 4)
    assert set(factor.unique().tolist()) == {0.0, 2.0}
    assert dropout.eval()(x) is None


def test_confidences() -> None:
    logits = torch.full((1, 50), -1e9)
    logits[0, 49] = 0
    assert heads.plddt(logits).item() == pytest.approx(99.0)
    assert heads.plddt(torch.zeros(1, 50)).item() == pytest.approx(50.0)
    pae = torch.full((1, 3, 3, 64), -1e9)
    pae[..., 63] = 0
    assert heads.predicted_aligned_error(pae)[0, 0, 0].item() == pytest.approx(31.75)
    assert heads.max_aligned_error() == pytest.approx(31.75)
    pae = torch.full((1, 30, 30, 64), -1e9)
    pae[..., 4] = 0  # 2.25 Angstrom
    d0 = 1.24 * 15 ** (1 / 3) - 1.8
    assert heads.predicted_tm_score(pae, torch.ones(1, 30)).item() == pytest.approx(
        1 / (1 + (2.25 / d0) ** 2), rel=1e-5
    )
    assert heads.distogram_edges()[[0, -1]].tolist() == [2.3125, 21.6875]


def test_presets() -> None:
    assert preset("model_2").max_extra_msa == 1024
    assert preset("model_4_ptm").templates is None
    assert preset("model_5").heads.pae_bins is None
    for name in ("model_6", "model_1_multimer_v3", "multimer"):
        with pytest.raises(UserError, match=name):
            preset(name)


def test_a_block_in_16_bits_allocates_no_more_in_a_step_than_plain_operators() -> None:
    """Forward and backward on a CPU: all bytes that any operator asks for, those freed at once among them."""
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    blocks, inputs = blocks_of(1, cpu, dtype), inputs_of(8, 24, cpu, dtype)

    def asked_for() -> int:
        forward_backward(blocks, inputs_of(2, 4, cpu, dtype))  # what is made at the first use
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            forward_backward(blocks, inputs)
        return sum(max(0, event.self_cpu_memory_usage) for event in seen.events())

    ours = asked_for()
    as_written(blocks)
    assert ours <= asked_for()
