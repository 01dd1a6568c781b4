"""Attention of one query over pages, and their writing, by loops made through LLVM: what torch's references do."""

import pytest
import torch

from core.kernels import llvm, paged_loops
from core.kernels.paged_attention import paged_attention, reference, spans, write_pages, write_reference

pytestmark = pytest.mark.skipif(not llvm.available(), reason="llvmlite is missing; ends where it is installed")
FORMATS = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
# kv heads, queries of each, head size, page size, lengths: heads that fill vectors and do not, pages that are one token
SHAPES = [
    (2, 1, 64, 16, (1, 17, 130)),
    (2, 4, 8, 4, (3, 64, 33)),
    (3, 2, 80, 16, (500, 7)),
    (1, 1, 1, 3, (5,)),
    (2, 3, 24, 1, (6, 2)),
]


def pool(shape: tuple, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Pages in any order, with NaN wherever nobody's token lies."""
    kv_heads, _, head_size, page_size, lengths = shape
    generator = torch.Generator().manual_seed(head_size)
    width = max(-(-length // page_size) for length in lengths)
    num_pages = len(lengths) * width + 3
    order = torch.randperm(num_pages, generator=generator)[: len(lengths) * width].view(len(lengths), width)
    pages = [torch.full((num_pages, page_size, kv_heads, head_size), 0 if dtype == torch.int8 else torch.nan).to(dtype)]
    pages.append(pages[0].clone())
    scales = [torch.full((num_pages, page_size, kv_heads), torch.nan) for _ in range(2)] if dtype == torch.int8 else []
    slots = torch.tensor([
        int(order[b, place // page_size]) * page_size + place % page_size
        for b, length in enumerate(lengths) for place in range(length)
    ])  # fmt: skip
    new = [torch.randn(len(slots), kv_heads, head_size, generator=generator) for _ in range(2)]
    named = {"k_scales": scales[0], "v_scales": scales[1]} if scales else {}
    write_reference(*new, *pages, slots, **named)
    return {
        "k_pages": pages[0], "v_pages": pages[1], "page_table": order.to(torch.int32), "lengths": torch.tensor(lengths),
        **named,
    }  # fmt: skip


def queries(shape: tuple, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    kv_heads, group, head_size, _, lengths = shape
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(lengths), kv_heads * group, head_size, generator=generator).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(("has_slopes", "window"), [(False, None), (True, None), (False, 6), (True, 40)])
def test_attention(shape: tuple, dtype: torch.dtype, has_slopes: bool, window: int | None) -> None:
    """In fp32, and the same bits alone as beside others."""
    given, q = pool(shape, dtype), queries(shape)
    slopes = torch.rand(q.shape[1], generator=torch.Generator().manual_seed(2)) if has_slopes else None
    found = paged_attention(q, **given, slopes=slopes, window=window)
    exact = {n: x.double() if x.is_floating_point() and "scales" not in n else x for n, x in given.items()}
    wanted = reference(
        q.double(), **exact, slopes=None if slopes is None else slopes.double(), scale=q.shape[2] ** -0.5, window=window
    )
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-6
    for b in range(len(q)):
        one = given | {"page_table": given["page_table"][b : b + 1], "lengths": given["lengths"][b : b + 1]}
        assert torch.equal(paged_attention(q[b : b + 1], **one, slopes=slopes, window=window)[0], found[b])


@pytest.mark.parametrize("dtype", FORMATS[:3], ids=str)
def test_queries_of_each_format_that_lie_apart(dtype: torch.dtype) -> None:
    given, q = pool(SHAPES[0], dtype), queries(SHAPES[0], dtype)
    wide = torch.stack((q, torch.full_like(q, torch.nan)), 1)  # every other row of tokens
    found = paged_attention(wide[:, 0], **given)
    assert found.dtype == dtype
    assert torch.equal(found, paged_attention(q.contiguous(), **given))
    wanted = reference(q.float(), **given)
    assert float((found.float() - wanted).abs().max() / wanted.abs().max()) < max(1e-6, torch.finfo(dtype).eps)


def test_beside_prompts() -> None:
    """A batch of which one sequence has more queries, one has none, and one is empty."""
    shape = (2, 2, 32, 4, (9, 6, 5))
    given, generator = pool(shape, torch.float32), torch.Generator().manual_seed(3)
    q = torch.randn(5, 4, 32, generator=generator)
    starts = torch.tensor([0, 1, 5, 5], dtype=torch.int32)
    found = paged_attention(q, **given, cu_query_lens=starts)
    wanted = reference(q, **given, cu_query_lens=starts, scale=32**-0.5)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[1:], wanted[1:])


def test_a_prompt_taken_apart_is_the_same_however_it_is_cut() -> None:
    """Query by query: the bits of a whole prompt and of its parts; up to rounding what torch has for all at once."""
    given, generator = pool((2, 2, 32, 4, (9,)), torch.float32), torch.Generator().manual_seed(3)
    q, table = torch.randn(9, 4, 32, generator=generator), given["page_table"].tolist()

    def part(first: int, last: int, apart: int) -> torch.Tensor:
        prepared = spans(table, [last], [0, last - first], 4, apart)
        assert bool(prepared.longer) == (apart == 0 and last - first > 1)
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        one = given | {"lengths": torch.tensor([last])}
        return paged_attention(q[first:last], **one, cu_query_lens=starts, prepared=prepared)

    whole = part(0, 9, apart=9)
    assert torch.equal(torch.cat([part(0, 4, 9), part(4, 5, 9), part(5, 9, 9)]), whole)
    torch.testing.assert_close(whole, part(0, 9, apart=0), rtol=1e-5, atol=1e-6)


def test_it_is_what_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    given, q, calls = pool(SHAPES[0], torch.float32), queries(SHAPES[0]), []
    real = paged_loops.one_query_attention
    monkeypatch.setattr(paged_loops, "one_query_attention", lambda *a, **o: calls.append(len(a[4])) or real(*a, **o))
    paged_attention(q, **given)
    assert calls == [3]
    monkeypatch.setattr(paged_loops, "on_all_threads", lambda: False)
    torch.testing.assert_close(paged_attention(q, **given), reference(q, **given), rtol=0, atol=0)
    assert calls == [3]
    monkeypatch.undo()
    monkeypatch.setattr(llvm, "num_workers", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not paged_loops.offered(q, given["k_pages"])
    assert paged_loops.longest_apart(given["k_pages"]) == 0


def test_two_threads_share_the_heads() -> None:
    given, q = pool(SHAPES[1], torch.float32), queries(SHAPES[1])
    wanted, before = paged_attention(q, **given), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(paged_attention(q, **given), wanted)
        assert torch.equal(
            paged_attention(q[:1], **given | {n: given[n][:1] for n in ("page_table", "lengths")}), wanted[:1]
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("given_as", FORMATS[:3], ids=str)
@pytest.mark.parametrize("head_size", [64, 24, 1])
def test_writing_is_the_references(dtype: torch.dtype, given_as: torch.dtype, head_size: int) -> None:
    """Bit for bit, from rows that lie apart; negative slots are left out; zeros, and numbers out of range."""
    generator = torch.Generator().manual_seed(4)
    both = torch.randn(6, 2, 3, head_size, generator=generator)
    both[1], both[2, 0, 0, 0], both[3] = 0.0, 1e5, both[3] * 1e-6
    both = both.to(given_as)
    k, v, slots = both[:, 0], both[:, 1], torch.tensor([7, 0, 3, -1, 11, 2])
    found = []
    for write in (write_pages, write_reference):
        pages = [torch.zeros(3, 4, 3, head_size, dtype=dtype) for _ in range(2)]
        scales = [torch.zeros(3, 4, 3) for _ in range(2)]
        named = {"k_scales": scales[0], "v_scales": scales[1]} if dtype == torch.int8 else {}
        write(k, v, *pages, slots, **named)
        found.append([*pages, *scales])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("where", ["q", "k_pages", "v_pages"])
def test_what_is_no_number_stays_visible(where: str) -> None:
    given, q = pool(SHAPES[0], torch.float32), queries(SHAPES[0])
    clean = paged_attention(q, **given)
    target = q[1, 0] if where == "q" else given[where][given["page_table"][1, 0], 3, 0]
    target[7] = torch.nan
    found = paged_attention(q, **given)
    assert bool(found[1, 0].isnan().any())
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
