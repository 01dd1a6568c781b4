"""What the SPECs of paged attention do not say: neighbours do not matter, pages are written in place."""

import math

import pytest
import torch
from torch import Tensor

from core.kernels import attention, torch_attention
from core.kernels.operator import forced
from core.kernels.paged_attention import SPECS, paged_attention, reference, write_pages, write_reference
from tests.support.device import DEVICE

pytestmark = pytest.mark.usefixtures("device")
CACHE = {"k_pages", "v_pages", "k_scales", "v_scales", "slopes"}


def batch(**case) -> dict:
    sizes = {"B": 3, "L": 300, "Q": 4, "J": 1, "G": 2, "K": 8, "page": 16} | case
    return SPECS[0].inputs(sizes, torch.float32, DEVICE, torch.Generator().manual_seed(3))


def alone(inputs: dict, b: int) -> dict:
    """The batch of sequence b and nobody else, its table no longer than it has to be."""
    cu, length = inputs["cu_query_lens"], int(inputs["lengths"][b])
    page_size = inputs["k_pages"].shape[1]
    mine = {name: value for name, value in inputs.items() if name in CACHE}
    mine["q"] = inputs["q"][cu[b] : cu[b + 1]]
    mine["page_table"] = inputs["page_table"][b : b + 1, : -(-length // page_size)]
    mine["lengths"] = inputs["lengths"][b : b + 1]
    return mine | {"cu_query_lens": cu[b : b + 2] - cu[b]}


@pytest.mark.parametrize("function", [paged_attention, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
def test_a_sequence_does_not_see_its_batch(function, int8: bool) -> None:
    inputs = batch(int8=int8, slopes=True)
    counts = torch.tensor([4, 1, 2])
    inputs["cu_query_lens"] = torch.tensor([0, *counts.cumsum(0)], dtype=torch.int32, device=DEVICE)
    inputs["q"] = torch.randn(int(counts.sum()), 2, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    inputs["lengths"][1:] = inputs["lengths"][1:].clamp(min=2)
    cu = inputs["cu_query_lens"].tolist()
    with forced():
        together = function(**inputs)
        for b in range(3):
            one = function(**alone(inputs, b))
            assert torch.equal(one, together[cu[b] : cu[b + 1]]), f"sequence {b}"


@pytest.mark.parametrize("function", [paged_attention, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("slopes", [False, True], ids=["plain", "alibi"])
def test_a_window_is_that_of_plain_attention(function, slopes: bool) -> None:
    """One query and several; pages that a window hides are not in the table, and what they held is poison."""
    for num_queries, window in ((1, 1), (1, 290), (9, 1), (9, 33)):
        inputs = batch(B=1, Q=num_queries, window=window, slopes=slopes)
        (length,), table = inputs["lengths"].tolist(), inputs["page_table"][0]
        first = max(0, length - num_queries + 1 - window)
        places = torch.arange(first, length, device=DEVICE)
        k, v = (inputs[name][table[places // 16].long(), places % 16][None] for name in ("k_pages", "v_pages"))
        seen = {"causal": True, "window": window, "slopes": inputs["slopes"]}
        wanted = attention.reference(inputs["q"][None], k, v, **seen)[0][0]
        with forced():
            found = function(**inputs)
        torch.testing.assert_close(found, wanted, rtol=0, atol=3e-6 * float(wanted.abs().max()))


def test_a_windowed_prompt_is_the_same_however_it_is_cut() -> None:
    """Between tiles, since the interpreter's products have other bits in another row of a tile."""
    inputs = batch(B=1, L=150, Q=140, window=40)
    inputs["page_table"] = inputs["page_table"].clamp(min=0)
    with forced():
        whole = paged_attention(**inputs)
        for first, last in ((0, 64), (64, 140)):
            part = {"q": inputs["q"][first:last], "lengths": inputs["lengths"] - 140 + last}
            part["cu_query_lens"] = torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE)
            assert torch.equal(paged_attention(**inputs | part), whole[first:last])


def test_one_query_is_decoded_alike_with_and_without_offsets() -> None:
    inputs = batch(Q=1)
    ragged = inputs | {"cu_query_lens": torch.arange(4, dtype=torch.int32, device=DEVICE)}
    with forced():
        assert torch.equal(paged_attention(**inputs), paged_attention(**ragged))


@pytest.mark.parametrize("in_pages", [torch.float32, torch.bfloat16, torch.float16])
def test_pages_in_another_format_than_the_queries(in_pages: torch.dtype) -> None:
    inputs = batch(L=40)
    for name in ("k_pages", "v_pages"):
        inputs[name] = inputs[name].to(in_pages)
    inputs["q"] = inputs["q"].bfloat16()
    with forced():
        found = paged_attention(**inputs)
    wide = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in inputs.items()}
    exact = reference(**wide)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-2 * float(exact.abs().max()))


def test_pages_in_a_row_are_the_same_as_scattered_ones() -> None:
    inputs = batch(L=40, Q=3)
    table, pages = inputs["page_table"], {}
    order = table[table >= 0].long()
    for name in ("k_pages", "v_pages"):
        pages[name] = inputs[name][order]
    in_a_row = table.clone()
    in_a_row[table >= 0] = torch.arange(len(order), dtype=torch.int32, device=DEVICE)
    assert torch.equal(reference(**inputs), reference(**inputs | pages | {"page_table": in_a_row}))


@pytest.mark.parametrize("write", [write_pages, write_reference], ids=["kernel", "reference"])
def test_written_in_place_and_read_back(write) -> None:
    """Through strided pages, in two pieces, int8: within half a step of what was written."""
    generator = torch.Generator().manual_seed(5)
    k, v = (torch.randn(9, 2, 6, generator=generator).to(DEVICE) for _ in range(2))
    both = torch.zeros(4, 2, 5, 2, 6, dtype=torch.int8, device=DEVICE)  # keys and values of a page side by side
    k_pages, v_pages = both.unbind(1)
    k_scales, v_scales = torch.full((2, 4, 5, 2), math.nan, device=DEVICE)
    slots = torch.tensor([3, 4, 15, 16, 17, 18, -1, 0, 19], device=DEVICE)
    with forced():
        for part in (slice(0, 4), slice(4, 9)):
            write(k[part], v[part], k_pages, v_pages, slots[part], k_scales=k_scales, v_scales=v_scales)
    kept = slots >= 0
    for x, pages, scales in ((k, k_pages, k_scales), (v, v_pages, v_scales)):
        pages, scales = pages.flatten(0, 1), scales.flatten(0, 1)
        steps = scales[slots[kept]][..., None]
        assert ((pages[slots[kept]] * steps - x[kept]).abs() <= 0.5001 * steps).all()
        untouched = torch.ones(20, dtype=torch.bool, device=DEVICE)
        untouched[slots[kept]] = False
        assert (pages[untouched] == 0).all()
        assert scales[untouched].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 3, 8)}, "H a multiple of 2"),
        ({"q": torch.zeros(4, 4, 8)}, "4 queries for 3 sequences"),
        ({"lengths": torch.ones(2)}, "page_table"),
        ({"cu_query_lens": torch.zeros(3)}, "cu_query_lens"),
        ({"slopes": torch.zeros(2)}, "slopes"),
        ({"k_scales": torch.zeros(1)}, "only int8 pages have scales"),
        ({"v_pages": torch.zeros(1, 2, 2, 8)}, "v_pages"),
    ],
)
def test_wrong_shapes_are_named(change: dict, message: str) -> None:
    inputs = batch(Q=1, J=2, L=5)
    with pytest.raises(ValueError, match=message):
        paged_attention(**inputs | change)


def test_int8_pages_need_scales() -> None:
    with pytest.raises(ValueError, match="int8 pages have scales"):
        paged_attention(**batch(int8=True) | {"v_scales": None})


def test_what_torch_attends_to_begins_where_16_bytes_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias of the shorter sequence is a slice of the longest's; on a GPU torch's kernel does not look."""
    monkeypatch.setattr(torch_attention, "_read_by_vectors", lambda _: True)
    attend, begins = torch.nn.functional.scaled_dot_product_attention, []

    def spy(*tensors: Tensor, attn_mask: Tensor | None, **options) -> Tensor:
        begins.extend(x.data_ptr() % 16 for x in (*tensors, attn_mask) if x is not None)
        return attend(*tensors, attn_mask=attn_mask, **options)

    inputs = batch(Q=1, slopes=True, even=True)
    inputs["lengths"] -= torch.tensor([0, 1, 2], dtype=inputs["lengths"].dtype, device=DEVICE)
    with torch.enable_grad():
        right = reference(**inputs)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        assert torch.equal(reference(**inputs), right)
    assert len(begins) == 12
    assert not any(begins)


def test_a_copy_that_begins_evenly_keeps_its_values_and_expanded_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "_read_by_vectors", lambda _: True)
    mask = torch.randn(1, 5, 25, device=DEVICE)[..., 1:].expand(1000, 5, 24)
    even = torch_attention._begins_evenly(mask)
    assert even.data_ptr() % 16 == 0
    assert torch.equal(even, mask)
    assert even.untyped_storage().nbytes() == 5 * 24 * 4
    assert torch_attention._begins_evenly(even) is even


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torch_attends_in_16_bits_with_slopes(dtype: torch.dtype) -> None:
    """Distances are in fp32 beside queries in 16 bits, which a GPU's attention would read as if they were in 16."""
    inputs = batch(Q=1, K=16, slopes=True)
    wanted = reference(**inputs)
    narrow = {name: value.to(dtype) if name in ("q", "k_pages", "v_pages") else value for name, value in inputs.items()}
    found = reference(**narrow)
    assert found.dtype == dtype
    assert float((found.float() - wanted).abs().max()) <= 16 * torch.finfo(dtype).eps * float(wanted.abs().max())
