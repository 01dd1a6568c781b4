"""Results of operators that a block keeps: handed back once each, never where they would be wrong."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.compat import TorchDispatchMode
from core.kernels import matmul
from core.parallel.recompute import RecomputeConfig, apply_recompute
from core.parallel.results import OPERATORS, KeptResults, _draws
from core.trace.account import MemoryAccount
from core.trace.segments import Lean, Results

BUDGET = RecomputeConfig("budget", budget="1GiB")


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.name()] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.compute, self.weight = compute, nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x.sin(), self.weight).sin()


def attend(x: Tensor, weight: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x * weight, x, x)


def grouped(x: Tensor, weight: Tensor) -> Tensor:
    return F.grouped_mm(x.bfloat16(), weight.bfloat16(), offs=torch.tensor([4, 8], dtype=torch.int32)).float()


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...], Results]] = {
    "aten::mm": (torch.mm, (4, 4), (4, 4), "linear"),
    "aten::addmm": (lambda x, w: F.linear(x, w, w[0]), (4, 4), (4, 4), "linear"),
    "aten::bmm": (torch.bmm, (2, 4, 4), (2, 4, 4), "products"),
    "aten::baddbmm": (lambda x, w: torch.baddbmm(w, x, w), (2, 4, 4), (2, 4, 4), "products"),
    "aten::convolution": (F.conv2d, (1, 2, 5, 5), (2, 2, 3, 3), "linear"),
    "aten::_grouped_mm": (grouped, (8, 16), (2, 16, 16), "linear"),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (attend, (1, 2, 8, 8), (8,), "attention"),
}


def gradients(block: Block, x: Tensor, config: RecomputeConfig, segments=None) -> tuple[list[Tensor], Counter[str]]:
    model = nn.ModuleDict({"blocks": nn.ModuleList([block])})
    apply_recompute(model, config, segments=segments)
    x = x.clone().requires_grad_()
    with Calls() as calls:
        block.forward(x).sum().backward()
    assert x.grad is not None
    assert block.weight.grad is not None
    return [x.grad, block.weight.grad], calls.count


@pytest.mark.parametrize("operator", PRODUCTS)
def test_a_result_is_handed_back_in_place_of_being_computed(operator: str) -> None:
    compute, of_x, of_weight, results = PRODUCTS[operator]
    found, counts = {}, {}
    for name, config, segments in (
        ("plain", RecomputeConfig(), None),
        ("full", RecomputeConfig("full"), None),
        ("lean", BUDGET, (Lean(1, results),)),
    ):
        torch.manual_seed(0)
        x = torch.randn(*of_x)
        found[name], counts[name] = gradients(Block(compute, *of_weight), x, config, segments)
    assert counts["lean"][operator] == counts["plain"][operator] == counts["full"][operator] - 1
    assert counts["lean"]["aten::sin"] == counts["full"]["aten::sin"] > counts["plain"]["aten::sin"]
    for name in ("full", "lean"):
        assert all(torch.equal(a, b) for a, b in zip(found["plain"], found[name], strict=True))


def test_products_of_one_dnn_are_kept() -> None:
    if not matmul.uses_onednn(torch.ones(1), torch.ones(1), 1 << 30):
        return  # torch's own products are the faster ones here
    found = {}
    for name, config, segments in (("plain", RecomputeConfig(), None), ("lean", BUDGET, (Lean(1, "linear"),))):
        torch.manual_seed(0)
        x = torch.randn(256, 256)
        found[name] = gradients(Block(matmul.linear, 256, 256), x, config, segments)
    assert all(torch.equal(a, b) for a, b in zip(found["plain"][0], found["lean"][0], strict=True))
    operator = "mkldnn::_linear_pointwise"
    assert found["lean"][1][operator] == found["plain"][1][operator] > 0


def test_a_result_that_has_been_written_to_is_computed_again() -> None:
    def rectified(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight).relu_().sin()

    found = {}
    for name, config, segments in (("plain", RecomputeConfig(), None), ("lean", BUDGET, (Lean(1, "linear"),))):
        torch.manual_seed(0)
        x = torch.randn(1, 2, 5, 5)
        found[name], counts = gradients(Block(rectified, 2, 2, 3, 3), x, config, segments)
    assert all(torch.equal(a, b) for a, b in zip(found["plain"], found["lean"], strict=True))
    assert counts["aten::convolution"] == 2


def test_what_no_saved_tensor_follows_is_not_kept() -> None:
    """As the last product of a transformer's block: its second run ends before it."""
    weight = torch.randn(8, 64)
    kept = {}
    for behind in (False, True):

        def last(x: Tensor, _: Tensor, behind: bool = behind) -> Tensor:
            y = x @ weight
            return y.sin() if behind else y + 1

        x, results = torch.randn(32, 8, requires_grad=True), KeptResults(OPERATORS["linear"])
        with MemoryAccount() as account:
            before = account.current_bytes
            with torch.autograd.graph.saved_tensors_hooks(results.before(lambda x: None), lambda x: x), results.keep():
                last(x, weight)
            kept[behind] = account.current_bytes - before
    assert kept[True] >= 32 * 64 * 4
    assert kept[False] < 32 * 64 * 4


def test_attention_that_draws_a_dropout_runs_again() -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = torch.empty(0)
    assert not _draws(attention, (q, q, q), {})
    assert not _draws(attention, (q, q, q, 0.0), {})
    assert _draws(attention, (q, q, q, 0.1), {})
    assert _draws(
        torch.ops.aten._scaled_dot_product_efficient_attention.default, (q, q, q, None, True), {"dropout_p": 0.1}
    )
    assert not _draws(torch.ops.aten.mm.default, (q, q), {})
    results = KeptResults(OPERATORS["products"])
    assert results.concerns(attention, (q, q, q), {})
    assert not results.concerns(attention, (q, q, q, 0.1), {})
