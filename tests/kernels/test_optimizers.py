"""The optimizers' kernels over several steps: against torch.optim, and rounding at random by its statistics."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from core.kernels import adafactor as adafactor_module
from core.kernels.adafactor import adafactor
from core.kernels.adamw import adamw
from core.kernels.adamw8bit import adamw_8bit
from core.kernels.adamw8bit import reference as adamw_8bit_reference
from core.kernels.blockwise import BLOCK, code_tables, quantize
from core.kernels.operator import forced
from core.kernels.tensor_lists import owners, table
from tests.support.device import DEVICE
from tests.support.fake_gpu import fake_gpu

pytestmark = pytest.mark.usefixtures("device")
SHAPES = [(5, 7), (3,), (2, 3, 4), ()]
NUM_STEPS = 5


def draw(shapes: list[tuple[int, ...]], seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for shape in shapes]


def by_torch(optimizer: type[torch.optim.Optimizer], dtype: torch.dtype, **options: Any) -> list[Tensor]:
    params = draw(SHAPES, 0, dtype)
    made = optimizer(params, **options)
    for step in range(1, NUM_STEPS + 1):
        for p, g in zip(params, draw(SHAPES, step, dtype)):
            p.grad = g
        made.step()
    return params


def by_adafactor(dtype: torch.dtype, **options: Any) -> list[Tensor]:
    params = draw(SHAPES, 0, dtype)
    state = adafactor_state(params)
    for step in range(1, NUM_STEPS + 1):
        adafactor(params, draw(SHAPES, step, dtype), *state, step=step, **options)
    return params


def adafactor_state(params: list[Tensor]) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
    rows = [p.new_zeros(*p.shape[:-1], 1) if p.ndim > 1 else None for p in params]
    cols = [p.new_zeros(*p.shape[:-2], 1, p.shape[-1]) if p.ndim > 1 else None for p in params]
    return rows, cols, [torch.zeros_like(p) if p.ndim < 2 else None for p in params]


def agree(found: list[Tensor], expected: list[Tensor], limit: float) -> None:
    """Within `limit` of the distance that the parameters went, which a step that does nothing does not reach."""
    for got, want, start in zip(found, expected, draw(SHAPES, 0, found[0].dtype), strict=True):
        went = float((want - start).abs().max())
        assert went > 1e-4
        assert float((got - want).abs().max()) <= limit * went


ADAFACTOR = [
    {},
    {"lr": 0.3, "weight_decay": 0.1, "d": 2.0, "eps": (1e-4, 0.5)},
    {"lr": 0.3, "beta2_decay": -0.5, "maximize": True},
]


@pytest.mark.parametrize("options", ADAFACTOR)
def test_adafactor_is_that_of_torch(options: dict[str, Any]) -> None:
    agree(by_adafactor(torch.float64, **options), by_torch(torch.optim.Adafactor, torch.float64, **options), 1e-12)


@pytest.mark.parametrize("options", ADAFACTOR)
def test_adafactor_kernels_are_those_of_torch(options: dict[str, Any]) -> None:
    with forced():
        found = by_adafactor(torch.float32, **options)
    agree(found, by_torch(torch.optim.Adafactor, torch.float32, **options), 1e-3)


def test_adafactor_phases_of_two_shards_are_the_whole() -> None:
    """Rows on two ranks: sums of columns, means of r and squares are added between the phases."""
    (param,), (grad,) = draw([(7, 20)], 0, torch.float32), draw([(7, 20)], 1, torch.float32)
    whole, state = param.clone(), adafactor_state([param])
    options = (1e-6, 1e-3, 1.0, 0.01, 1.0, False, None)
    with forced():
        adafactor([whole], [grad], *state, step=1, eps=(1e-6, 1e-3))
        by = adafactor_module.phases([param])
        assert by is adafactor_module.KERNELS
        shards, grads = [list(t.split([3, 4])) for t in (param.clone(), grad)]
        states = [adafactor_state([shard]) for shard in shards]
        sums = [by.row_col_sums([g]) for g in grads]
        col = sums[0][1][0] + sums[1][1][0]
        means = [
            by.update_factors(row_var, col_var, rows, [col], [7], [20], 1.0)
            for (row_var, col_var, _), (rows, _) in zip(states, sums)
        ]
        mean = [means[0][0] + means[1][0]]
        factors = [(row_var, col_var, mean) for row_var, col_var, _ in states]
        squares = sum(by.factored_squares([p], [g], *f, 1e-6) for p, g, f in zip(shards, grads, factors))
        for p, g, f in zip(shards, grads, factors):
            by.apply([p], [g], *f, squares, [140], *options)
    torch.testing.assert_close(torch.cat(shards), whole, rtol=1e-6, atol=1e-7)
    assert float((whole - param).abs().max()) > 1e-3


def test_adafactor_phases_of_a_shard_without_rows() -> None:
    """All rows on one rank, none on the other: its sums are zeros, and it has the same column factors."""
    (param,), (grad,) = draw([(7, 20)], 0, torch.float32), draw([(7, 20)], 1, torch.float32)
    found = {}
    for name, by, context in (("torch", adafactor_module.TORCH, torch.no_grad), ("kernels", None, forced)):
        with context():
            by = by or adafactor_module.KERNELS
            p, g = param[:0].clone(), grad[:0].clone()
            row_var, col_var, _ = adafactor_state([p])
            rows, _ = by.row_col_sums([g])
            means = by.update_factors(row_var, col_var, rows, [grad.square().sum(0, keepdim=True)], [7], [20], 0.5)
            squares = by.factored_squares([p], [g], row_var, col_var, means, 1e-6)
            by.apply([p], [g], row_var, col_var, means, squares, [140], 1e-6, 1e-3, 1.0, 0.01, 1.0, False, None)
            found[name] = [*rows, *by.row_col_sums([g])[1], *col_var, *means, squares]
    for got, want in zip(found["kernels"], found["torch"], strict=True):
        torch.testing.assert_close(got, want)
    assert float(found["kernels"][2].max()) > 0.1


def test_adafactor_names_what_does_not_fit() -> None:
    p, g = torch.zeros(3, 4), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"a parameter \[3, 4\] has a gradient \[4, 3\]"):
        adafactor([p], [g.mT], [None], [None], [None], step=1)
    with pytest.raises(ValueError, match=r"needs a col_var \[1, 4\], not None"):
        adafactor([p], [g], [torch.zeros(3, 1)], [None], [None], step=1)
    with pytest.raises(ValueError, match="lengths"):
        adafactor([p], [], [], [], [], step=1)


def neighbours_and_mean(params: Tensor, exact: float) -> None:
    """All values are the two bf16 neighbours of `exact`, and their mean is near it."""
    low = torch.tensor(exact).view(torch.int32) & -(1 << 16)
    below, above = (float((low + n).view(torch.float32)) for n in (0, 1 << 16))
    values = params.double()
    assert set(values.unique().tolist()) == {below, above}
    share = (exact - below) / (above - below)
    deviation = (above - below) * (share * (1 - share) / values.numel()) ** 0.5
    assert abs(float(values.mean()) - exact) < 4 * deviation


@pytest.mark.parametrize("kernels", [False, True])
def test_adafactor_rounds_at_random(kernels: bool) -> None:
    """Ones minus a hundredth of the last bit and a bit: nearest would never move them."""
    p, g = torch.ones(100, 200, dtype=torch.bfloat16, device=DEVICE), torch.ones(100, 200, device=DEVICE)
    with forced() if kernels else torch.no_grad():
        adafactor([p], [g], *adafactor_state([g]), step=1, lr=1e-3, seed=5)
    neighbours_and_mean(p, 1 - 1e-3)


def by_adamw(dtype: torch.dtype, **options: Any) -> list[Tensor]:
    params = draw(SHAPES, 0, dtype)
    exp_avgs, exp_avg_sqs = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for step in range(1, NUM_STEPS + 1):
        adamw(params, draw(SHAPES, step, dtype), exp_avgs, exp_avg_sqs, step=step, **options)
    return params


ADAMW = [{}, {"lr": 0.3, "betas": (0.5, 0.8), "eps": 1e-3, "weight_decay": 0.2, "maximize": True}]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("options", ADAMW)
def test_adamw_is_that_of_torch(options: dict[str, Any], fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fused:
        monkeypatch.setattr("core.kernels.adamw._fuses", lambda lists: False)
    agree(by_adamw(torch.float64, **options), by_torch(torch.optim.AdamW, torch.float64, **options), 1e-12)


@pytest.mark.parametrize("options", ADAMW)
def test_adamw_kernel_is_that_of_torch(options: dict[str, Any]) -> None:
    with forced():
        found = by_adamw(torch.float32, **options)
    agree(found, by_torch(torch.optim.AdamW, torch.float32, **options), 1e-3)


def test_adamw_takes_what_does_not_lie_alike() -> None:
    """A transposed parameter with a gradient that is not, one that is channels last, one with gaps."""
    params = [torch.randn(5, 7, device=DEVICE).mT, torch.randn(6, 2, device=DEVICE)[:, 0]]
    params.insert(1, torch.randn(2, 3, 4, 4, device=DEVICE).to(memory_format=torch.channels_last))
    copies = [p.clone(memory_format=torch.contiguous_format) for p in params]
    grads = [torch.randn(p.shape, device=DEVICE) for p in params]
    grads[1] = grads[1].to(memory_format=torch.channels_last)
    state = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    plain = [torch.zeros_like(p) for p in copies], [torch.zeros_like(p) for p in copies]
    adamw(copies, grads, *plain, step=1, lr=0.1)
    with forced():
        adamw(params, grads, *state, step=1, lr=0.1)
    for got, want in zip(params + state[1], copies + plain[1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernels", [False, True])
def test_adamw_rounds_at_random(kernels: bool) -> None:
    """A step of a thousandth from 1: rounded to the nearest it would never happen."""
    p, g = torch.ones(100, 200, dtype=torch.bfloat16, device=DEVICE), torch.ones(100, 200, device=DEVICE)
    state = torch.zeros_like(g), torch.zeros_like(g)
    with forced() if kernels else torch.no_grad():
        adamw([p], [g], [state[0]], [state[1]], step=1, lr=1e-3, weight_decay=0.0, seed=5)
        neighbours_and_mean(p, 1 - 1e-3)
        again = torch.ones_like(p)
        adamw([again], [g], [state[0] * 0], [state[1] * 0], step=1, lr=1e-3, weight_decay=0.0, seed=6)
    assert not torch.equal(again, p)
    assert abs(float(torch.corrcoef(torch.stack((again.float().flatten(), p.float().flatten())))[0, 1])) < 0.03


def test_adamw_asks_no_default_of_torch() -> None:
    """Step 1003 is none of bf16's numbers."""
    found = []
    before = torch.get_default_dtype()
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "meta")):
        lists = [[torch.full((8,), value)] for value in (0.5, 0.1, 0.01, 1e-4)]
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                adamw(*lists, step=1003)
        finally:
            torch.set_default_dtype(before)
        found.append(lists[0][0])
    assert torch.equal(*found)


def test_adamw_names_what_does_not_fit() -> None:
    p = torch.zeros(3)
    with pytest.raises(ValueError, match=r"\[3\], \[4\]"):
        adamw([p], [torch.zeros(4)], [p], [p], step=1)
    with pytest.raises(ValueError, match="lengths"):
        adamw([p], [], [], [], step=1)


def relative_values() -> Tensor:
    """[N, 300]: blocks whose largest magnitude is 1; about all middles between codes, of all sizes, zero, the ends."""
    generator = torch.Generator().manual_seed(3)
    found = [torch.zeros(1), torch.tensor([1e-30, 1e-10, -1e-10])]
    for signed in (True, False):
        middles = code_tables(signed, torch.device("cpu"), torch.float32)[1]
        middles = middles if signed else middles.sqrt()  # of second moments, which are squares
        found += [middles, middles.nextafter(torch.tensor(2.0)), middles.nextafter(torch.tensor(-2.0))]
    found.append(10 ** (-9 * torch.rand(20_000, generator=generator)) * torch.randn(20_000, generator=generator).sign())
    values = torch.cat(found).clamp(-1, 1)
    values = torch.nn.functional.pad(values, (0, -len(values) % 298)).view(-1, 298)
    ends = torch.ones(len(values), 1)
    return torch.cat((ends, values[:, : BLOCK - 1], -ends, values[:, BLOCK - 1 :]), 1).to(DEVICE)


def state_8bit(like: Tensor) -> list[Tensor]:
    """Codes and scales of two moments that are zero."""
    return [t for signed in (True, False) for t in quantize(torch.zeros_like(like), signed)]


def test_every_code_is_the_one_that_a_search_finds() -> None:
    """With betas of zero and a state of zeros the moments are the gradient and its square, without a rounding."""
    grad = relative_values()
    state = state_8bit(grad)
    with forced():
        adamw_8bit([torch.zeros_like(grad)], [grad], *([t] for t in state), step=1, lr=0.0, betas=(0.0, 0.0))
    for signed, (codes, scales) in ((True, state[:2]), (False, state[2:])):
        want_codes, want_scales = quantize(grad if signed else grad.square(), signed)
        assert torch.equal(scales, want_scales)
        assert torch.equal(codes, want_codes)
        assert len(codes.unique()) == 256


def test_adamw_in_8_bits_goes_where_its_reference_goes() -> None:
    """Over steps; a moment that a rounding brings to the other side of a middle has the neighbouring code."""
    shapes = [(40, 300), (7, 64)]
    runs = {}
    for name in ("reference", "kernel"):
        params = draw(shapes, 0, torch.float32)
        lists = list(zip(*(state_8bit(p) for p in params)))
        for step in range(1, NUM_STEPS + 1):
            grads = draw(shapes, step, torch.float32)
            if name == "kernel":
                with forced():
                    adamw_8bit(params, grads, *lists, step=step, lr=1e-2)
            else:
                adamw_8bit_reference(params, grads, *lists, step=step, lr=1e-2)
        runs[name] = params, lists
    starts = draw(shapes, 0, torch.float32)
    for got, want, start in zip(runs["kernel"][0], runs["reference"][0], starts, strict=True):
        assert float((want - start).abs().max()) > 1e-2
        # One code more or less moves a moment by a hundredth of its block's largest.
        assert float((got - want).abs().mean()) < 1e-5 * float((want - start).abs().mean())
    for place in (0, 2):
        for got, want in zip(runs["kernel"][1][place], runs["reference"][1][place], strict=True):
            off = (got.int() - want.int()).abs()
            assert int(off.max()) <= 1
            assert float((off > 0).float().mean()) < 1e-3


def test_a_moment_that_is_not_a_number_is_not_hidden() -> None:
    grad = torch.ones(2, 300, device=DEVICE)
    grad[1, 270] = torch.nan
    param, state = torch.zeros_like(grad), state_8bit(grad)
    with forced():
        adamw_8bit([param], [grad], *([t] for t in state), step=1)
    assert torch.equal(param.isnan(), grad.isnan())
    for scales in (state[1], state[3]):
        assert scales.isnan().tolist() == [[False, False], [False, True]]


@pytest.mark.parametrize("wrong", range(1, 6))
def test_shapes_that_are_not_those_of_adamw_in_8_bits(wrong: int) -> None:
    param = torch.zeros(4, 300)
    given = [param, torch.zeros_like(param), *state_8bit(param)]
    given[wrong] = given[wrong][:, 1:]
    with pytest.raises(ValueError, match="adamw_8bit: shapes"):
        adamw_8bit(*([t] for t in given), step=1)


class Copies(TorchDispatchMode):
    """done  (whether it is pinned, whether the host goes on) of each copy from the host"""

    def __init__(self, pinned: Callable[[Tensor], bool]):
        super().__init__()
        self.pinned, self.done = pinned, list[tuple[bool, bool]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and torch.device(kwargs["device"]).type != "cpu":
            self.done.append((self.pinned(args[0]), bool(kwargs.get("non_blocking"))))
        return func(*args, **kwargs)


def test_tables_are_sent_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses of gradients are in them, which may differ in each step; the GPU is not there."""
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: pinned.append(x.clone()) or pinned[-1])
    gpu = torch.device("cuda")
    with fake_gpu(), Copies(lambda x: any(x is one for one in pinned)) as copies:
        sent = table.__wrapped__(((1, 2), (3, 4)), gpu), owners.__wrapped__((3, 1), gpu)
    assert [x.dtype for x in sent] == [torch.int64, torch.int32]
    assert copies.done == [(True, True)] * 2


def test_a_step_of_adafactor_sends_no_table_that_a_step_before_it_sent() -> None:
    """What a step makes for itself lies elsewhere each time; a table that named it would be sent anew."""
    p, g = (torch.randn(40, 24, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(2))
    row_var, col_var = p.new_zeros(40, 1), p.new_zeros(1, 24)
    taken, sent = [], []
    with forced():
        for step in range(1, 4):
            taken += [torch.empty(n, device=DEVICE) for n in (1, 2, 24, 40, 64, 64, 128) for _ in range(20)]
            adafactor([p], [g], [row_var], [col_var], [None], step=step)
            sent.append(table.cache_info().misses)
    assert len(set(sent)) == 1
