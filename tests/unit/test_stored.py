"""What blocks save waits on the host or in fewer bytes: gradients to the bit, memory that is let go, errors by name."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.compose import ParallelConfig
from core.config import UserError
from core.gemini.config import GeminiConfig
from core.parallel import encoded, offload, stored
from core.parallel.encoded import Compressed, encode
from core.parallel.offload import Offloaded
from core.parallel.pipeline.schedule import PipelineConfig
from core.parallel.recompute import RecomputeConfig, apply_recompute
from core.trace.account import MemoryAccount
from tests.support.recorded_streams import RecordedStreams

WIDTH, ROWS = 32, 48
ROW = 4 * WIDTH * ROWS
"""Bytes of a block's input."""
MODES = [RecomputeConfig("offload"), RecomputeConfig("offload", 3), RecomputeConfig("compressed")]


class Block(nn.Module):
    """A bit of everything that saves: a ReLU's result twice, views of one product, a mask, places, an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.three = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.three(self.norm(x)).chunk(3, -1)
        x = x + self.dropout(q * k * mask + v.sigmoid())
        x = x + self.down(F.relu(self.up(x)))
        return x + F.max_pool1d(x, 3, stride=1, padding=1)


class Net(nn.Module):
    def __init__(self, num_blocks: int = 5, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        if tied:
            for block in self.blocks[1:]:
                block.get_submodule("up").weight = self.blocks[0].get_submodule("up").weight

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


def gradients(config: RecomputeConfig, steps: int = 2, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    net = Net(**options)
    apply_recompute(net, config)
    x, mask = torch.randn(ROWS, WIDTH, requires_grad=True), torch.rand(ROWS, WIDTH)
    losses = []
    for _ in range(steps):
        loss = net(x, mask).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, x.grad, *(parameter.grad for parameter in net.parameters())]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config", MODES, ids=lambda one: f"{one.mode} {one.every}")
def test_losses_and_gradients_are_the_same_to_the_bit(config: RecomputeConfig, tied: bool) -> None:
    plain = gradients(RecomputeConfig(), tied=tied)
    assert all(torch.equal(a, b) for a, b in zip(gradients(config, tied=tied), plain, strict=True))


@pytest.mark.parametrize(("bits", "within"), [(8, 0.02), (4, 0.3)])
def test_few_bits_change_gradients_a_little_and_no_loss(bits: Any, within: float) -> None:
    plain, found = gradients(RecomputeConfig(), 1), gradients(RecomputeConfig("compressed", bits=bits), 1)
    assert torch.equal(plain[0], found[0])  # the forward is exact
    again = gradients(RecomputeConfig("compressed", bits=bits), 1)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found[1:], plain[1:], strict=True)]
    assert 0 < max(errors) < within


def test_at_most_two_blocks_are_on_the_device() -> None:
    """Whatever the number of blocks; the host holds all, and nothing when the step is over."""
    kept, peaks = [], []
    for number in (4, 8):
        net = Net(number)
        blocks = apply_recompute(net, RecomputeConfig("offload"))
        assert isinstance(blocks, Offloaded)
        x, mask = torch.randn(ROWS, WIDTH), torch.rand(ROWS, WIDTH)
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with MemoryAccount() as account:
            account.add([*net.parameters(), *(p.grad for p in net.parameters() if p.grad is not None), x, mask])
            before = account.current_bytes
            loss = net(x, mask).sum()
            kept.append(account.current_bytes - before)
            held = blocks.tier.held_bytes
            loss.backward()
            peaks.append(account.peak_bytes - before)
        tier = blocks.tier
        assert tier.held_bytes == 0
        assert tier.peak_bytes == held == tier.sent_bytes
        each = (tier.sent_bytes + ROW) // number
        assert tier.fetched_bytes == tier.sent_bytes - each  # the last block's are still there
        assert kept[-1] < 1.2 * each
        assert peaks[-1] < 3 * each  # two blocks, and the gradients of one
    small = 2 * 4 * ROWS  # means and deviations stay
    assert kept[1] - kept[0] == peaks[1] - peaks[0] == 4 * small


def test_a_storage_goes_once_and_what_lives_anyway_stays() -> None:
    net = Net(2)
    blocks = apply_recompute(net, RecomputeConfig("offload"))
    assert isinstance(blocks, Offloaded)
    net(torch.randn(ROWS, WIDTH), torch.rand(ROWS, WIDTH)).sum()
    # The norm's input and output, three of one product of which two views are saved, the sigmoid, the dropout's mask,
    # the sum, ReLU's result of four, once, the pool's input, its places of two. The first input has no gradient.
    assert blocks.tier.sent_bytes == (2 * (1 + 1 + 3 + 1 + 1 + 1 + 4 + 1 + 2) - 1) * ROW


@pytest.mark.parametrize("config", MODES, ids=lambda one: f"{one.mode} {one.every}")
def test_what_is_written_into_is_an_error(config: RecomputeConfig) -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            z = y.sin()
            y.mul_(2)
            return z

    net = nn.ModuleList([Writes(), Writes()])
    apply_recompute(net, config)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"written into|modified by an inplace operation"):
        net[1](net[0](x)).sum().backward()


def test_a_graph_that_nobody_runs_leaves_nothing() -> None:
    net = Net(3)
    blocks = apply_recompute(net, RecomputeConfig("offload"))
    assert isinstance(blocks, Offloaded)
    outputs = net(torch.randn(ROWS, WIDTH), torch.rand(ROWS, WIDTH))
    assert blocks.tier.held_bytes > 0
    del outputs
    gc.collect()
    assert blocks.tier.held_bytes == 0
    with torch.no_grad():
        net(torch.randn(ROWS, WIDTH), torch.rand(ROWS, WIDTH))
    assert blocks.tier.held_bytes == 0


def test_a_graph_runs_twice() -> None:
    torch.manual_seed(0)
    net = Net(3)
    apply_recompute(net, RecomputeConfig("offload"))
    loss = net(torch.randn(ROWS, WIDTH), torch.rand(ROWS, WIDTH)).sum()
    first = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_batch_of_another_size_frees_old_places() -> None:
    """What is kept for reuse is bounded by the most that was there at once."""
    net = Net(2)
    blocks = apply_recompute(net, RecomputeConfig("offload"))
    assert isinstance(blocks, Offloaded)
    for rows in range(ROWS, ROWS + 12):
        net(torch.randn(rows, WIDTH), torch.rand(rows, WIDTH)).sum().backward()
    tier = blocks.tier
    free = sum(place.memory.nbytes for places in tier._free.values() for place in places)
    assert tier.held_bytes == 0
    assert free <= 2 * tier.peak_bytes


def _values() -> Iterator[tuple[str, Tensor, int]]:
    """(what, values, the most bytes of their code)"""
    x = torch.randn(1001)
    yield "mask", torch.rand(1001) < 0.3, 126
    yield "relu", x.relu(), 126 + 4 * int((x > 0).sum())
    yield "relu in 16 bits", x.bfloat16().relu(), 126 + 2 * int((x > 0).sum())
    yield "zeros with signs, and no numbers", torch.tensor([0.0, -0.0, float("nan"), float("inf")] + [0.0] * 500), 80
    yield "relu in 64 bits", x.double().relu(), 126 + 8 * int((x > 0).sum())
    yield "places of a byte", torch.randint(0, 256, (999,)), 999
    yield "places of two", torch.randint(-300, 300, (999,)), 2 * 999
    yield "places of four", torch.tensor([2**31 - 1, -(2**31)] * 9), 4 * 18


@pytest.mark.parametrize(("what", "values", "most"), _values(), ids=lambda one: one if isinstance(one, str) else "")
def test_forms_without_loss(what: str, values: Tensor, most: int) -> None:
    code = encode(values, None)
    assert code is not None, what
    restored = code.decode()
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    assert restored.dtype == values.dtype
    assert torch.equal(restored.view(words), values.view(words))
    assert _bytes_of(code) <= most


def _bytes_of(code: Any) -> int:
    parts = (part for part in code if isinstance(part, Tensor | tuple))
    return sum(part.nbytes if isinstance(part, Tensor) else _bytes_of(part) for part in parts)


@pytest.mark.parametrize("values", [torch.randn(300), torch.tensor([2**40, 1]), torch.zeros(0)])
def test_what_is_shortest_as_it_is_stays(values: Tensor) -> None:
    assert encode(values, None) is None


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_mask_of_a_relu_is_exact_in_few_bits(bits: int, dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr(encoded, "_BLOCKS_AT_A_TIME", 2)
    torch.manual_seed(1)
    values = (torch.randn(1300) * 10.0 ** torch.randint(-6, 3, (1300,))).relu().to(dtype)
    code = encode(values, bits)
    assert code is not None
    restored = code.decode()
    assert torch.equal(restored > 0, values > 0)
    step = torch.cat([part.abs().max().expand(len(part)) for part in values.double().split(256)]) / (
        2 ** (bits - 1) - 1
    )
    assert bool(((restored.double() - values.double()).abs() <= 1.01 * step).all())  # of the least ones; of others half


def on_streams(deaf_to: int | None = None, steps: int = 2) -> RecordedStreams:
    """Steps of a model whose host is far; what is done on which stream is recorded.

    deaf_to  the number of a wait that is left out
    """
    torch.manual_seed(0)
    net = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
    streams = RecordedStreams(deaf_to)

    def host_empty(num_elements: int, dtype: torch.dtype, pinned: bool, paged: bool) -> Tensor:
        assert pinned
        return streams.host(torch.empty(num_elements, dtype=dtype))

    with (
        patch.object(offload, "DeviceStreams", lambda device: streams),
        patch.object(offload, "host_empty", host_empty),
        streams,
    ):
        apply_recompute(net, RecomputeConfig("offload"))
        for _ in range(steps):
            x = torch.randn(ROWS, WIDTH)
            for block in net:
                x = block(x)
            x.sum().backward()
    return streams


def test_copies_are_ordered_with_what_computes() -> None:
    """Without a race; and a wait that is left out is one, but for those whose order others hold as well."""
    streams = on_streams()
    assert streams.races == []
    assert {"send", "fetch"} <= {what for _, what in streams.order}
    assert {actor for actor, what in streams.order if what == "send"} == {2}
    assert {actor for actor, what in streams.order if what == "fetch"} == {3}
    seen = [bool(on_streams(number).races) for number in range(0, len(streams.waits), 4)]
    assert sum(seen) > len(seen) / 3, seen


def test_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "LEAST_BYTES", 1 << 30)
    net = Net(2)
    blocks = apply_recompute(net, RecomputeConfig("offload"))
    assert isinstance(blocks, Offloaded)
    net(torch.randn(ROWS, WIDTH), torch.rand(ROWS, WIDTH)).sum().backward()
    assert blocks.tier.sent_bytes == 0


def test_nothing_holds_a_model() -> None:
    net = Net(2)
    blocks = apply_recompute(net, RecomputeConfig("compressed"))
    assert isinstance(blocks, Compressed)
    net(torch.randn(ROWS, WIDTH), torch.rand(ROWS, WIDTH)).sum().backward()
    gone = weakref.ref(net.blocks[0])
    del net, blocks
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recompute": RecomputeConfig("offload"), "gemini": GeminiConfig("1GiB", host="1GiB")},
            r"recompute\.mode=offload with gemini\.host=1GiB: .*leave it out",
        ),
    ],
)
def test_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ParallelConfig(**options)


@pytest.mark.parametrize("mode", ["offload", "compressed"])
def test_a_backward_in_two_parts_is_refused(mode: Any) -> None:
    config = ParallelConfig(recompute=RecomputeConfig(mode), pipeline=PipelineConfig("zbv"))
    with pytest.raises(UserError, match=rf"recompute\.mode={mode} with pipeline\.schedule=zbv: .*use --pipeline"):
        config.check_pipeline(2)
