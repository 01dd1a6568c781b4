"""Attention's biases in 16 bits against fp64: ALiBi, padding, documents; by torch and by kernels."""

import pytest
import torch
from torch import Tensor

from core.nn.attention import StepContext, alibi_slopes, attend
from core.nn.by_kernels import attend_by_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]

B, L, H, K = 2, 70, 4, 16
# Of an output's largest element: q, k, v, the probabilities and the output are each rounded once.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.5 * 2**-8, torch.float16: 2.5 * 2**-11}


def inputs(what: str, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, L, H, K, generator=generator).to(device, dtype) for _ in range(3))
    mask = documents = None
    if "padding" in what:
        mask = torch.ones(B, L, dtype=torch.int64, device=device)
        mask[0, :9] = 0
    if "documents" in what:
        documents = (torch.arange(L, device=device) // 23).expand(B, L).contiguous()
    slopes = alibi_slopes(H).to(device) if "alibi" in what else None
    return {"q": q, "k": k, "v": v, "mask": mask, "documents": documents, "slopes": slopes}


def attended(attend, given: dict[str, Tensor | None]) -> Tensor:
    q, mask = given["q"], given["mask"]
    assert q is not None
    places = torch.arange(L, device=q.device).expand(B, L)
    positions = places if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    context = StepContext(given["documents"])
    return attend(q, given["k"], given["v"], slopes=given["slopes"], mask=mask, positions=positions, context=context)


def exact(given: dict[str, Tensor | None]) -> Tensor:
    """Written out, in fp64."""
    q, k, v = (x.double() for x in (given["q"], given["k"], given["v"]))
    place = torch.arange(L, device=q.device)
    visible = (place <= place[:, None]).expand(B, 1, L, L)
    if given["mask"] is not None:
        visible = visible & given["mask"].bool()[:, None, None]
    if given["documents"] is not None:
        visible = visible & (given["documents"][:, None, :, None] == given["documents"][:, None, None])
    visible = visible | torch.eye(L, dtype=torch.bool, device=q.device)
    scores = torch.einsum("blhk,bshk->bhls", q, k) * K**-0.5
    if given["slopes"] is not None:
        distance = (place[None] - place[:, None]).double()
        scores = scores + given["slopes"].double()[:, None, None] * distance
    return torch.einsum("bhls,bshk->blhk", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("attend", [attend, attend_by_kernel], ids=["torch", "kernels"])
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("what", ["plain", "alibi", "padding", "documents", "alibi, padding", "alibi, documents"])
def test_in_16_bits_as_in_64(what: str, dtype: torch.dtype, attend, device: torch.device) -> None:
    given = inputs(what, dtype, device)
    found, wanted = attended(attend, given), exact(given)
    real = slice(None) if given["mask"] is None else given["mask"].bool()
    assert found.dtype == dtype
    error = float((found.double() - wanted)[real].abs().max() / wanted[real].abs().max())
    assert error <= ROUNDING[dtype]


def test_distances_that_are_read_in_16_bits_are_seen(device: torch.device) -> None:
    """As a mask of another format than the queries is read: outside of the tolerance of fp32."""
    given = inputs("alibi", torch.float32, device)
    slopes = given["slopes"]
    assert slopes is not None
    wanted = exact(given)
    wrong = attended(attend, given | {"slopes": slopes.bfloat16().float() * (1 + 2**-8)})
    assert float((wrong.double() - wanted).abs().max() / wanted.abs().max()) > ROUNDING[torch.float32]
