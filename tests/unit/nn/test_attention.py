import math

import pytest
import torch

from core.nn.attention import Attention, StepContext, alibi_slopes, attend, rotate


def naive(q, k, v, slopes, mask, positions, documents, window=None):
    """One query and head at a time."""
    B, L, H, K = q.shape
    group = H // k.shape[2]
    out = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            for i in range(L):
                token = lambda j: mask is None or mask[b, j]  # noqa: B023, E731
                together = lambda j: documents is None or documents[b, i] == documents[b, j]  # noqa: B023, E731
                oldest = 0 if window is None else max(0, i - window + 1)
                seen = [j for j in range(oldest, i + 1) if j == i or (token(j) and together(j))]
                scores = torch.stack([q[b, i, h] @ k[b, j, h // group] / math.sqrt(K) for j in seen])
                if slopes is not None:
                    row = positions[b if len(positions) > 1 else 0]
                    scores = scores + slopes[h] * torch.stack([row[j] for j in seen])
                out[b, i, h] = scores.softmax(0) @ v[b, seen, h // group]
    return out


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 6])
def test_attend(alibi, padded, packed, window, num_kv_heads):
    B, L, H, K = 2, 6, 6, 5
    q = torch.randn(B, L, H, K, dtype=torch.float64)
    k, v = torch.randn(2, B, L, num_kv_heads, K, dtype=torch.float64)
    mask = torch.tensor([[1] * 6, [0, 0, 0, 1, 1, 1]]) if padded else None
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0] * 6]) if packed else None
    positions = torch.arange(L)[None]
    slopes = alibi_slopes(H) if alibi else None
    expected = naive(q, k, v, slopes, mask, positions, documents, window)
    for context in (StepContext(documents), *([None] if documents is None else [])):
        out = attend(q, k, v, slopes=slopes, window=window, mask=mask, positions=positions, context=context)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_bias_is_built_once_a_step():
    """Layers share it; another forward with the same context but other positions does not."""
    context, built = StepContext(), []
    positions, other = torch.arange(3)[None], torch.arange(3)[None]
    for inputs in ((positions,), (positions,), (other,)):
        context.once(("bias",), inputs, lambda: built.append(1))
    assert len(built) == 2


def test_qkv_groups_by_key_value_head():
    """Rows of the weight of one key/value head and its queries are a smaller attention: a shard over heads."""
    attention = Attention(8, 4, 2, 6, bias=True).double()
    shard = Attention(8, 2, 1, 6, bias=True).double()
    x, positions = torch.randn(2, 7, 8, dtype=torch.float64), torch.arange(7)[None]
    with torch.no_grad():
        rows = 4 * 6  # two queries, a key, a value
        total = attention.out.bias.clone()
        for j in range(2):
            shard.qkv.weight.copy_(attention.qkv.weight[j * rows : (j + 1) * rows])
            shard.qkv.bias.copy_(attention.qkv.bias[j * rows : (j + 1) * rows])
            shard.out.weight.copy_(attention.out.weight[:, j * 12 : (j + 1) * 12])
            shard.out.bias.zero_()
            total = total + shard(x, positions)
        torch.testing.assert_close(total, attention(x, positions), rtol=1e-12, atol=1e-12)


def test_rows_beyond_the_length_are_dropped():
    attention = Attention(8, 2, 2, 4, bias=True).double()
    x, positions = torch.randn(1, 5, 8, dtype=torch.float64), torch.arange(3)[None]
    torch.testing.assert_close(attention(x, positions), attention(x[:, :3], positions), rtol=1e-13, atol=1e-13)


def test_alibi_slopes():
    """The paper's for 8 heads, and its rule for 12."""
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(12)[8:].tolist() == [2.0 ** (-i / 2) for i in (1, 3, 5, 7)]
    assert alibi_slopes(1).tolist() == [2.0**-8]


def test_rotate_turns_by_the_distance():
    """Scores depend on the difference of positions alone."""
    q, k = torch.randn(2, 1, 1, 1, 6, dtype=torch.float64)
    frequencies = torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64)
    turned = lambda x, p: rotate(x, *((p * frequencies).cos()[None, None], (p * frequencies).sin()[None, None]))  # noqa: E731
    scores = [float((turned(q, p + 3) * turned(k, p)).sum()) for p in (0, 5, 1000)]
    assert scores == pytest.approx([scores[0]] * 3, rel=1e-10)
    assert not math.isclose(scores[0], float((q * k).sum()), rel_tol=1e-3)


def test_norms_of_queries_and_keys():
    """Each head is normed before it is turned, so the scale of the weight's rows that make it does not matter."""
    build = lambda size: torch.nn.RMSNorm(size, eps=0.0)  # noqa: E731
    attention = Attention(8, 4, 2, 6, bias=False, norm=build).double()
    x, positions = torch.randn(2, 5, 8, dtype=torch.float64), torch.arange(5)[None]
    angle = torch.randn(1, 5, 3, dtype=torch.float64)
    seen = {}

    def note(q, k, v, **_rest):
        seen["q"], seen["k"] = q, k
        return attend(q, k, v, **_rest)

    attention.attend = note
    with torch.no_grad():
        attention.query_norm.weight.normal_()
        attention.key_norm.weight.normal_()
        out = attention(x, positions, (angle.cos(), angle.sin()))
        q_BLJGK, k_BLJ1K, _ = attention.qkv(x).view(2, 5, 2, 4, 6).split([2, 1, 1], dim=3)
        for name, heads, norm in (
            ("q", q_BLJGK.reshape(2, 5, 4, 6), attention.query_norm),
            ("k", k_BLJ1K.squeeze(3), attention.key_norm),
        ):
            normed = heads / heads.square().mean(-1, keepdim=True).sqrt() * norm.weight
            torch.testing.assert_close(seen[name], rotate(normed, angle.cos(), angle.sin()), rtol=1e-12, atol=1e-12)
        attention.qkv.weight.view(2, 4, 6, 8)[:, :3] *= torch.tensor([2.0, 3.0, 0.5], dtype=torch.float64)[
            :, None, None
        ]
        again = attention(x, positions, (angle.cos(), angle.sin()))
    torch.testing.assert_close(again, out, rtol=1e-12, atol=1e-12)
