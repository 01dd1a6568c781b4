"""Recomputation: the same gradients, from fewer kept activations, in the blocks that were asked for."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from core.compose import ParallelConfig, compile_blocks
from core.config import UserError
from core.parallel.recompute import RecomputeConfig, RecomputeMode, apply_recompute
from core.trace.account import MemoryAccount


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for _ in range(4):
            x = self.dropout(self.linear(x)).sin()
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def run(config: RecomputeConfig) -> tuple[list[Tensor], list[int], int]:
    """Gradients, calls of each block, and bytes that the forward keeps."""
    torch.manual_seed(0)
    net = Net()
    apply_recompute(net, config)
    with MemoryAccount() as account:
        x = torch.randn(64, 16)
        account.add(net.parameters())
        before = account.current_bytes
        loss = net(x).sum()
        kept = account.current_bytes - before
        loss.backward()
    assert next(n for n, _ in net.named_parameters()) == "blocks.0.linear.weight"
    return [p.grad for p in net.parameters()], [block.calls for block in net.blocks], kept


def test_gradients_are_the_same_and_less_is_kept() -> None:
    plain, _, kept = run(RecomputeConfig())
    found = {mode: run(RecomputeConfig(mode)) for mode in ("full", "selective")}
    for gradients, _, _ in found.values():
        assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))
    assert found["full"][2] < found["selective"][2] < kept
    assert found["full"][2] < kept / 4


@pytest.mark.parametrize(("every", "calls"), [(1, [2, 2, 2, 2]), (2, [2, 1, 2, 1]), (3, [2, 1, 1, 2])])
def test_every_nth_block(every: int, calls: list[int]) -> None:
    assert run(RecomputeConfig("full", every))[1] == calls


@pytest.mark.parametrize(("mode", "convolutions"), [("none", 1), ("selective", 1), ("full", 2)])
def test_convolutions_are_kept_as_matrix_products_are(mode: RecomputeMode, convolutions: int) -> None:
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counting.count += func is torch.ops.aten.convolution.default
            return func(*args, **(kwargs or {}))

    net = nn.ModuleList([nn.Sequential(nn.Conv2d(2, 2, 3), nn.SiLU())])
    apply_recompute(net, RecomputeConfig(mode))
    with Counting():
        net[0](torch.randn(1, 2, 5, 5)).sum().backward()
    assert Counting.count == convolutions


def test_every_is_at_least_one() -> None:
    with pytest.raises(UserError, match=r"recompute\.every=0"):
        RecomputeConfig("full", 0)


def test_what_is_computed_again_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compiles nothing of what its checkpoint is called on: the graphs are of what that calls."""
    graphs: list[torch.fx.GraphModule] = []
    monkeypatch.setattr(
        torch, "compile", partial(torch.compile, backend=lambda graph, _: graphs.append(graph) or graph)
    )
    torch.compiler.reset()
    torch.manual_seed(0)
    plain, again = (
        nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))})
        for _ in range(2)
    )
    again.load_state_dict(plain.state_dict())
    apply_recompute(again, RecomputeConfig("full"))
    compile_blocks(list(again["blocks"]))
    x, found = torch.randn(2, 8), []
    for net in (plain, again):
        y = x
        for block in net["blocks"]:
            y = block(y)
        found.append(torch.autograd.grad(y.sum(), list(net.parameters())))
    assert graphs
    for wanted, computed in zip(*found, strict=True):
        torch.testing.assert_close(computed, wanted)
    with pytest.raises(UserError, match=r"compile with recompute\.mode=selective"):
        ParallelConfig(compile=True, recompute=RecomputeConfig("selective"))
