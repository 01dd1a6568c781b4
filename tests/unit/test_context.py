"""Cuts of a sequence and of heads, without a process; the refusals of what cannot be cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import UserError
from core.kernels import partial_attention as kernels
from core.kernels.attention import reference
from core.kernels.partial_attention import Part, partial_attention, partial_gradients
from core.mesh import MeshConfig
from core.parallel.context import SequenceCut, check_length
from core.parallel.ulysses import HeadCut, check_exchange

# An example takes as long as the machine is busy with other things.
examples = settings(deadline=None, max_examples=50)
CUTS = st.builds(SequenceCut, st.integers(1, 40), st.integers(1, 6), st.booleans())


@examples
@given(CUTS)
def test_what_the_ranks_take_joins_to_the_whole(cut: SequenceCut) -> None:
    x = torch.arange(2 * cut.length).view(2, cut.length, 1)
    parts = [cut.take(x, 1, rank, fill=-1) for rank in range(cut.num_ranks)]
    assert {part.shape[1] for part in parts} == {cut.local_length}
    assert torch.equal(cut.join(parts, 1), x)
    padding = sum(int((part == -1).sum()) for part in parts) // 2
    assert padding == cut.num_ranks * cut.local_length - cut.length


@examples
@given(CUTS)
def test_pieces_begin_in_ascending_order_and_know_what_is_real(cut: SequenceCut) -> None:
    for rank in range(cut.num_ranks):
        starts = cut.starts(rank)
        assert list(starts) == sorted(starts)
        local = cut.take(torch.arange(cut.length), 0, rank, fill=-1)
        for piece, start in zip(local.split(cut.piece_length), starts, strict=True):
            expected = list(range(start, start + cut.real(start)))
            assert piece.tolist() == expected + [-1] * (cut.piece_length - cut.real(start))


@examples
@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_neighbours_together_hold_a_coarser_cut(length: int, rings: int, by: int, zigzag: bool) -> None:
    cut = SequenceCut(length, rings * by, zigzag)
    coarse, exchange = cut.coarser(by), SequenceCut(by * cut.local_length, by, zigzag)
    x = torch.arange(1, length + 1)
    for ring in range(rings):
        parts = [cut.take(x, 0, ring * by + r) for r in range(by)]
        assert torch.equal(exchange.join(parts, 0), coarse.take(x, 0, ring))


@examples
@given(st.integers(1, 12))
def test_a_causal_zigzag_is_alike_much_work_for_every_rank(num_ranks: int) -> None:
    cut = SequenceCut(8 * num_ranks, num_ranks, zigzag=True)
    places = [cut.take(torch.arange(cut.length), 0, rank) for rank in range(num_ranks)]
    assert len({int(seen.sum()) for seen in places}) == 1


@examples
@given(st.integers(1, 8), st.integers(1, 4), st.data())
def test_every_head_is_dealt_out_once_with_its_keys(num_kv_heads: int, group: int, data) -> None:
    num_heads = num_kv_heads * group
    cut = HeadCut(num_heads, num_kv_heads, data.draw(st.integers(1, num_heads)))
    shares = [cut.queries(rank) for rank in range(cut.num_ranks)]
    assert [head for share in shares for head in share] == list(range(num_heads))
    assert min(map(len, shares)) > 0
    k = torch.arange(num_kv_heads).view(1, 1, -1, 1)
    for rank, share in enumerate(shares):
        keys = cut.keys(rank)
        mine = cut.spread(k[:, :, keys.start : keys.stop], rank).flatten()
        per_key = len(share) // len(mine)
        assert [int(mine[n // per_key]) for n in range(len(share))] == [head // group for head in share]


def test_refusals_say_what_would_work() -> None:
    with pytest.raises(UserError, match="cp=4 ranks; use a smaller cp"):
        check_length(3, 4)
    with pytest.raises(UserError, match=r"cp_ulysses of at most 6, or mesh\.cp_mode=ring"):
        check_exchange(6, 8)
    for options in ({"cp_mode": "mixed"}, {"cp_ulysses": 2}, {"cp": 3, "cp_mode": "mixed", "cp_ulysses": 2}):
        with pytest.raises(UserError, match="do not fit together"):
            MeshConfig(**options)


@pytest.mark.parametrize("tile_bytes", [1, 1 << 20])
@pytest.mark.parametrize("offset", [-2, 0, 3, 9])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_a_part_and_its_gradients(tile_bytes: int, offset: int, causal: bool, window: int | None, monkeypatch) -> None:
    """Over tiles of 16 queries and over one, with a bias, slopes and grouped heads."""
    monkeypatch.setattr(kernels, "TILE_BYTES", tile_bytes)
    draw = torch.Generator().manual_seed(3)
    q, do = torch.randn(2, 2, 37, 6, 4, dtype=torch.float64, generator=draw)
    k, v = torch.randn(2, 2, 11, 2, 4, dtype=torch.float64, generator=draw)
    bias = torch.where(torch.rand(2, 1, 37, 11, generator=draw) < 0.2, -torch.inf, 0.0)
    slopes = torch.linspace(0.1, 0.6, 6, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected, lse = reference(*leaves, causal=causal, window=window, offset=offset, bias=bias, slopes=slopes)
    part = Part(offset, causal, bias, slopes, window)
    with torch.no_grad():
        found, found_lse = partial_attention(q, k, v, part)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(found_lse, lse)
        seen = lse.detach().masked_fill(lse == -torch.inf, 0.0)
        gradients = partial_gradients(do, q, k, v, expected.detach(), seen, part)
    for got, want in zip(gradients, torch.autograd.grad(expected, leaves, do), strict=True):
        torch.testing.assert_close(got, want)
