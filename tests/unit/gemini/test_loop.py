"""Any module trains under Gemini as it does without, bit for bit, in any budget; what is not there is not read."""

import gc
import math
import re
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from core.config import UserError
from core.gemini import replicas, report, wrap
from core.gemini.config import GeminiConfig
from core.gemini.figure import draw_memory
from core.gemini.gauge import Gauge
from core.gemini.report import draw
from core.gemini.states import State
from core.gemini.trace import Moment, Trace
from core.mesh import MeshConfig, build_mesh
from core.optim import KFAC, Adafactor, HessianFree, Lamb
from core.runtime import join
from core.trace.tracer import StepTrace, trace_step
from tests.support.gemini import Net, Run, batch, loss, model_bytes, require_equal, train

TIGHT, HALF = 20_000, 30_000  # bytes; the model has 63,000


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


@pytest.fixture(scope="module")
def plain() -> Callable[..., Any]:
    """Runs without Gemini, each once."""
    found: dict[str, Any] = {}

    def run(name: str, make: Callable[[], nn.Module], optimizer: Any = adamw, **options: Any) -> Any:
        if name not in found:
            found[name] = train(make, None, optimizer, **options)
        return found[name]

    return run


@pytest.mark.parametrize("budget", [TIGHT, HALF, 200_000])
def test_bit_equal(plain, budget: int) -> None:
    run = train(Net, budget, adamw)
    require_equal(run, plain("net", Net))
    assert run.gemini.device_peak_bytes <= budget
    assert (run.gemini.parallel.tier.num_evictions > 0) == (budget < model_bytes(Net))
    assert run.gemini.moved_bytes >= 4 * 2 * model_bytes(Net)  # in and out, each of four steps


@pytest.mark.parametrize(
    "make",
    [
        partial(Net, twice=True),
        partial(Net, recompute=False),
        partial(Net, recompute=True),
        partial(Net, 2, True, True),
    ],
    ids=["twice", "recompute", "reentrant", "twice, reentrant"],
)
def test_modules_that_run_more_than_once(plain, make) -> None:
    require_equal(train(make, TIGHT, adamw), plain(str(make), make))


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
        partial(torch.optim.RMSprop, lr=1e-2),
        partial(torch.optim.Adagrad, lr=1e-2),
        partial(Adafactor, lr=1e-2),
        partial(Lamb, lr=1e-2),
    ],
    ids=lambda o: o.func.__name__,
)
def test_optimizers(plain, optimizer) -> None:
    require_equal(train(Net, TIGHT, optimizer), plain(str(optimizer), Net, optimizer))


SAMPLE = {"sample": lambda: lambda model: loss(model, batch(0))}


@cache
def freely(budget: int) -> Run:
    """A run whose plan no policy binds, once."""
    return train(partial(Net, recompute=False), budget, adamw, **SAMPLE)


@pytest.mark.parametrize(
    ("make", "budget"),
    [
        (Net, 90_000),
        (Net, 300_000),
        (partial(Net, recompute=False), 48_000),
        (partial(Net, recompute=False), 60_000),
        (partial(Net, recompute=True), 60_000),
    ],
)
def test_planned(plain, make, budget: int) -> None:
    """A step is foreseen, activations and all; then nothing goes over the budget, and what is predicted happens."""
    run = freely(budget) if str(make) == str(partial(Net, recompute=False)) else train(make, budget, adamw, **SAMPLE)
    require_equal(run, plain("net" if make is Net else str(make), make))
    planned, tier = run.gemini.parallel.planned, run.gemini.parallel.tier
    assert tier.peak_bytes <= budget
    assert (tier.num_evictions > 0) == (budget < 200_000)
    assert (len(planned.plan.resident) == len(planned.trace.chunks)) == (budget > 200_000)
    if make is Net:
        assert tier.peak_bytes <= planned.plan.device_peak_bytes
        assert run.gemini.moved_bytes <= 4 * planned.plan.moved_bytes


RESIDENT = 300_000  # bytes: all model data and activations of Net under AdamW


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_where_everything_fits_a_step_runs_the_operators_of_the_model_and_no_others() -> None:
    def operators(budget: int | None) -> Counter[str]:
        model = Net(recompute=False)
        optimizer = adamw(model.parameters())
        if budget is not None:
            assert len(wrap(model, optimizer, budget, **SAMPLE).parallel.planned.plan.resident) > 1
        with _Operators() as found:
            for step in range(2):
                loss(model, batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return found.counts

    assert operators(RESIDENT) == operators(None)


def test_where_everything_fits_nobody_follows_the_step() -> None:
    """And the account of the device has what was planned all the same."""
    parallel = train(Net, RESIDENT, adamw, **SAMPLE).gemini.parallel
    assert parallel.hooks.rests
    assert parallel.hooks._clock == 0
    assert parallel.tier.peak_bytes == parallel.planned.plan.device_peak_bytes
    assert not train(partial(Net, recompute=False), 110_000, adamw, steps=1, **SAMPLE).gemini.parallel.hooks.rests


def test_the_first_step_corrects_what_was_foreseen(plain, monkeypatch) -> None:
    """Where activations are foreseen half as large as they turn out to be, and nothing lives on the device before."""
    make, budget = partial(Net, recompute=False), 110_000
    right = train(make, budget, adamw, **SAMPLE).gemini.parallel.planned.trace

    def too_little(*args: Any, **kwargs: Any) -> StepTrace:
        found = trace_step(*args, **kwargs)
        halved = [[replace(s, other_bytes=s.other_bytes // 2) for s in stretches] for stretches in found.microbatches]
        return replace(found, microbatches=tuple(map(tuple, halved)))

    foreseen: list[Trace] = []
    settle = replicas.GeminiReplicas._correct

    def correct(parallel: replicas.GeminiReplicas, planned: Any, gauge: Any) -> None:
        foreseen.append(planned.trace)
        assert not any(chunk.resident for chunk in parallel.chunks)
        settle(parallel, planned, gauge)

    monkeypatch.setattr(replicas, "trace_step", too_little)
    monkeypatch.setattr(replicas.GeminiReplicas, "warms_up", True)
    monkeypatch.setattr(replicas.GeminiReplicas, "_correct", correct)
    run = train(make, budget, adamw, **SAMPLE)
    require_equal(run, plain(str(make), make))
    parallel = run.gemini.parallel
    assert foreseen[0].other_peak_bytes <= right.other_peak_bytes / 2
    assert parallel.planned.trace.other_peak_bytes == pytest.approx(right.other_peak_bytes, rel=0.1)
    assert {chunk.index for chunk in parallel.chunks if chunk.resident} == parallel.planned.plan.resident != frozenset()
    assert any(chunk.merged for chunk in parallel.chunks)
    assert not [m.name for unit in parallel.hooks.units for m in unit.members if m.chunk.merged], "they stay for good"
    assert parallel.executor.gauge is None
    assert parallel.tier.peak_bytes <= budget


@pytest.mark.parametrize("budget", [110_000, RESIDENT])
def test_what_is_drawn_is_what_tensors_really_took(tmp_path, monkeypatch, budget: int) -> None:
    """Every tensor that is alive is counted, moment by moment: there was no more than planned, and never too much.

    Also where all lives on the device, and nobody follows a step but to measure it.
    """
    gauges: list[Gauge] = []
    lines: list[tuple[Any, Any]] = []

    def drawn(png: Path, planned: Any, gauge: Gauge, mesh: Any) -> None:
        gauges.append(gauge)
        draw(png, planned, gauge, mesh)

    def with_lines(png: Path, trace: Trace, plan: Any, device: Any, host: Any) -> None:
        lines.append((device, host))
        draw_memory(png, trace, plan, device, host)

    monkeypatch.setattr(replicas, "draw", drawn)
    monkeypatch.setattr(report, "draw_memory", with_lines)
    join("cpu")
    mesh = build_mesh(MeshConfig().resolve(1, 3), "cpu")
    png = tmp_path / "memory.png"
    config = GeminiConfig(str(budget), figure=png)
    model = Net(recompute=False)
    model.unused.requires_grad_(False)  # the plan has optimizer state of all that is trained, and this would get none
    parallel = replicas.GeminiReplicas(model, mesh, 3, "fp32", lambda _: None, config)
    optimizer = adamw(parallel.masters.values())
    parallel.prepare(optimizer, lambda: [lambda model: loss(model, batch(0))])
    for step in range(3):
        parallel.run([batch(step), batch(step)], lambda ids: loss(parallel.model, ids) / 2)
        parallel.reduce()
        optimizer.step()
        parallel.release()
        parallel.publish()
    assert png.read_bytes().startswith(b"\x89PNG")
    assert len(gauges) == 2
    assert lines == [(gauge.device, gauge.host) for gauge in gauges]
    assert parallel.hooks.rests == (budget == RESIDENT)
    planned = parallel.planned

    def comes(moment: Moment) -> bool:
        """Gradients of what lives here alone are their masters' at once: nothing reduces them."""
        return moment.kind != "update" and not (moment.kind == "reduce" and parallel.chunks[moment.chunks[0]].alone)

    assert parallel._host_bytes() == pytest.approx(planned.plan.host_bytes, rel=0.01)
    for gauge in gauges:
        seen = [k for k, others in enumerate(gauge.others) if others is not None]
        assert len(seen) > 0.9 * len([m for m in planned.trace.moments if comes(m)])
        differences = [gauge.others[k] - planned.trace.moments[k].other_bytes for k in seen]
        # Python's numbers are tensors, and where a chunk ends in a block, its norm's gradients come a moment later.
        assert sum(abs(n) <= 256 for n in differences) > 0.9 * len(seen), differences
        assert max(differences) <= 2_000  # of 110,000
        assert max(gauge.device[k] for k in seen) <= budget + 2_000
        assert max(gauge.device[k] for k in seen) > 0.8 * planned.plan.device_peak_bytes
        assert all((gauge.host[k] is not None) == (k in seen) for k in range(len(gauge.host)))
    hosts = [{num_bytes for num_bytes in gauge.host if num_bytes is not None} for gauge in gauges]
    assert max(hosts[1]) == pytest.approx(planned.plan.host_bytes, rel=0.01)
    if budget < RESIDENT:
        assert 0 < max(hosts[0]) < 0.6 * max(hosts[1]), "the optimizer has no state in the first step"


def test_too_small_a_budget_is_refused_with_one_that_works(plain) -> None:
    with pytest.raises(UserError, match="give at least") as refusal:
        train(Net, 20_000, adamw, **SAMPLE)
    least = re.search(r"give at least ([\d.]+ \w+)", str(refusal.value))[1]
    require_equal(train(Net, least, adamw, **SAMPLE), plain("net", Net))


def test_too_small_a_host_is_refused_with_one_that_works(plain) -> None:
    """Of the least that is told the run has all that it takes; with a byte less there is no plan."""
    with pytest.raises(UserError, match="the host has") as refusal:
        train(Net, 90_000, adamw, host=1000, **SAMPLE)
    least = re.search(r"([\d.]+ \w+) of model data do not fit", str(refusal.value))[1]
    run = train(Net, 90_000, adamw, host=least, **SAMPLE)
    require_equal(run, plain("net", Net))
    host = run.gemini.parallel.host
    assert 0.9 * host.budget_bytes < host.peak_bytes <= host.budget_bytes
    with pytest.raises(UserError, match="the host has"):
        train(Net, 90_000, adamw, host=host.peak_bytes - 1, **SAMPLE)
    with pytest.raises(UserError, match="are to live on the host"):
        train(Net, 90_000, adamw, host=1000)


def test_after_a_refusal_model_and_optimizer_are_as_they_were(plain) -> None:
    def step(model: nn.Module, index: int) -> Tensor:
        return loss(model, batch(index))

    torch.manual_seed(0)
    model = Net()
    optimizer = adamw(model.parameters())
    for index in range(4):
        if index == 1:
            with pytest.raises(UserError, match="give at least"):
                wrap(model, optimizer, 20_000, **SAMPLE)
            gemini = wrap(model, optimizer, 90_000, **SAMPLE)
        step(model, index).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = plain("net", Net).values
    assert all(torch.equal(value, expected[name]) for name, value in gemini.state_dict().items())


def kfac_run(budget: int | None) -> tuple[dict[str, Tensor], int]:
    """Parameters after four steps of K-FAC whose targets are drawn; evictions."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)]
    model = nn.Sequential(*layers).double()
    optimizer = KFAC(model, lr=0.1, inverse_every=2)
    made = None
    if budget is not None:
        made = wrap(model, optimizer, optimizer.beside_bytes + budget, precision="fp64", device="cpu")
    for _ in range(4):
        x, y = torch.randn(8, 16).double(), torch.randn(8, 4).double()
        drawn = torch.randn(8, 4).double()
        ((model(x) - y).square().sum() / 16).backward()
        optimizer.observe(lambda x=x, y=drawn: (model(x) - y).square().sum() / 16, items=8)
        optimizer.step()
        optimizer.zero_grad()
    if made is None:
        return {name: value.detach().clone() for name, value in model.named_parameters()}, 0
    return made.state_dict(), made.parallel.tier.num_evictions


def test_kfac_looks_at_a_model_whose_chunks_come_and_go() -> None:
    """Its factors are those without Gemini, and a look leaves no gradients behind."""
    (found, evictions), (expected, _) = kfac_run(10_000), kfac_run(None)
    assert evictions > 4
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14, msg=name)


def test_hessian_free_is_refused() -> None:
    model = Net()
    with pytest.raises(UserError, match="HessianFree's products by two backwards"):
        wrap(model, HessianFree(model), TIGHT)


def test_after_a_refusal_in_another_format_no_value_is_rounded() -> None:
    model = Net()
    given = {name: value.detach().clone() for name, value in model.state_dict().items()}
    optimizer = adamw(model.parameters())
    with pytest.raises(UserError, match="give at least"):
        wrap(model, optimizer, 1_000, precision="bf16")
    assert all(torch.equal(value.detach(), given[name]) for name, value in model.named_parameters())
    gemini = wrap(model, optimizer, TIGHT, precision="bf16")
    assert all(torch.equal(value, given[name]) for name, value in gemini.state_dict().items())


def test_state_that_an_optimizer_has_from_the_start_is_in_the_masters_format() -> None:
    """Adagrad's is made with it, of a model that is still in bf16."""
    model = Net().to(torch.bfloat16)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2, fused=True)
    wrap(model, optimizer, TIGHT)
    loss(model, batch(0)).backward()
    optimizer.step()
    assert {state["sum"].dtype for state in optimizer.state.values()} == {torch.float32}


@pytest.mark.parametrize("policy", ["static", "cpu"])
def test_policies(plain, policy: str) -> None:
    """They move more than what is planned freely, and learn the same."""
    make = partial(Net, recompute=False)
    free, bound = freely(60_000), train(make, 60_000, adamw, **SAMPLE, policy=policy)
    require_equal(bound, plain(str(make), make))
    assert bound.gemini.moved_bytes > free.gemini.moved_bytes
    resident = [chunk for chunk in bound.gemini.parallel.chunks if chunk.resident]
    assert bool(resident) == (policy == "static")
    assert bound.gemini.device_peak_bytes <= 60_000


@pytest.mark.parametrize(("budget", "options"), [(TIGHT, {}), (RESIDENT, SAMPLE)])
def test_frozen_parameters_are_moved_too(plain, budget, options) -> None:
    def make() -> Net:
        net = Net()
        for name, parameter in net.named_parameters():
            parameter.requires_grad_("gain" in name)
        return net

    run = train(make, budget, adamw, **options)
    require_equal(run, plain("frozen", make))
    assert (run.gemini.parallel.tier.num_evictions > 0) == (budget == TIGHT)
    assert {c.trainable for c in run.gemini.parallel.chunks} == {True, False}


@pytest.mark.parametrize(("budget", "options"), [(TIGHT, {}), (RESIDENT, SAMPLE)])
def test_accumulation_and_another_order_in_evaluation(plain, budget, options) -> None:
    def step(model: nn.Module, index: int) -> Tensor:
        (loss(model, batch(100 + index)) / 2).backward()
        model.eval()
        with torch.no_grad():
            seen = float(loss(model, batch(7), order=-1))
        model.train()
        return loss(model, batch(index)) / 2 + 0.0 * seen

    run = train(Net, budget, adamw, step=step, **options)
    require_equal(run, plain("accumulation", Net, step=step))


@pytest.mark.parametrize(("budget", "options"), [(TIGHT, {}), (RESIDENT, SAMPLE)])
def test_training_goes_on_after_an_exception(plain, budget, options) -> None:
    """In forward, in evaluation, and in the middle of a backward."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, where):
            if where == "forward":
                raise ZeroDivisionError
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    def fail(model: nn.Module, where: str) -> None:
        handle = model.blocks[1].up.register_forward_hook(lambda m, a, y: Raises.apply(y, where))
        with pytest.raises(ZeroDivisionError):
            loss(model, batch(50)).backward()
        handle.remove()
        model.zero_grad()

    def step(model: nn.Module, index: int) -> Tensor:
        fail(model, "forward" if index % 2 else "backward")
        return loss(model, batch(index))

    run = train(Net, budget, adamw, step=step, **options)
    require_equal(run, plain("net", Net))
    parallel = run.gemini.parallel
    lives_here = sum(c.param_bytes + c.shard_bytes for c in parallel.planned.trace.chunks) if options else 0
    coming_and_going = sum(c.num_bytes for c in parallel.chunks if c.is_filled and not c.resident)
    assert parallel.tier.current_bytes == lives_here + coming_and_going
    assert not parallel.hooks._forwards
    assert not parallel.hooks._backwards


@pytest.mark.parametrize(("budget", "options"), [(TIGHT, {}), (RESIDENT, SAMPLE)])
def test_a_model_that_nobody_needs_any_more_is_freed(budget, options) -> None:
    def trained() -> list[weakref.ref]:
        parallel = train(Net, budget, adamw, steps=1, **options).gemini.parallel
        return [weakref.ref(thing) for thing in (parallel.model, parallel.hooks, *parallel.chunks)]

    left_behind = trained()
    gc.collect()
    assert not [ref() for ref in left_behind if ref() is not None]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks(backend: str) -> None:
    """The second saves of parameters what its own backward reads, behind autograd's back."""

    def make() -> Net:
        net = Net()
        for block in net.blocks:
            block.compile(backend=backend)
        return net

    run = train(make, TIGHT, adamw, steps=2)
    require_equal(run, train(Net, None, adamw, steps=2))


def test_what_is_not_there_cannot_be_read() -> None:
    model = Net()
    names = {n: (p.shape, p.dtype) for n, p in model.named_parameters()}
    optimizer = adamw(model.parameters())
    gemini = wrap(model, optimizer, TIGHT)
    loss(model, batch(0)).backward()
    optimizer.step()
    assert {n: (p.shape, p.dtype) for n, p in model.named_parameters()} == names
    free = [m for c in gemini.parallel.chunks for m in c.members if m.state is State.FREE]
    assert free
    for member in free:
        assert member.chunk.buffer.untyped_storage().nbytes() == 0
        for read in (lambda p: p.sum(), lambda p: p + 1, lambda p: p.data, lambda p: p.detach(), lambda p: p.T):
            with pytest.raises(RuntimeError, match=f"{member.name} is not on the device"):
                read(member.parameter)


class _Joined(nn.Module):
    """Autograd leaves the gradients of both parameters in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a.view(6) + self.b.view(6)) * x


def test_gradients_that_lie_in_one_memory_are_clipped_once_each() -> None:
    model = _Joined()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1.0), torch.ones(6)
    gemini = wrap(model, optimizer, RESIDENT, sample=lambda: lambda model: model(x).sum())
    assert all(chunk.alone for chunk in gemini.parallel.chunks)
    for _ in range(2):  # accumulated, and clipped to a norm of 1
        model(x).sum().backward()
    gemini.clip_grad_norm_(1.0)
    for master in gemini.parallel.masters.values():
        torch.testing.assert_close(master.grad.flatten(), torch.full((6,), 12**-0.5), rtol=1e-5, atol=0)


def test_clipping_is_that_of_torch(plain) -> None:
    def clipped(gemini: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = wrap(model, optimizer, TIGHT) if gemini else None
        for step in range(3):
            loss(model, batch(step)).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) if wrapped is None else None
            if wrapped is not None:
                norm = wrapped.clip_grad_norm_(0.1)
            assert float(norm) > 0.1
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict()) if wrapped is None else wrapped.state_dict()

    expected = clipped(False)
    for name, value in clipped(True).items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_are_wide_and_saved(precision) -> None:
    """A rate so small that 16-bit parameters would not move: the masters do."""
    run = train(Net, TIGHT, partial(torch.optim.SGD, lr=1e-5), precision=precision)
    torch.manual_seed(0)
    start = Net().state_dict()
    moved = [n for n, value in run.values.items() if not torch.equal(value, start[n].detach())]
    assert len(moved) > 20
    assert all(value.dtype == torch.float32 for value in run.values.values())
    resident = train(Net, RESIDENT, partial(torch.optim.SGD, lr=1e-5), precision=precision, **SAMPLE)
    assert resident.gemini.moved_bytes == 0
    require_equal(resident, run)
    assert all(p.dtype == getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[precision])
               for p in run.gemini.parallel.model.parameters())  # fmt: skip


def test_what_cannot_work_is_refused() -> None:
    model = Net()
    with pytest.raises(UserError, match="give at least"):
        train(Net, 2_000, adamw, steps=1)
    with pytest.raises(UserError, match="not the model's"):
        wrap(model, adamw(Net().parameters()), "1MB")


class Bare(nn.Module):
    """Two layers whose inputs must be of their format."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x))).square().mean()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parameters_stay_what_they_are(dtype: torch.dtype) -> None:
    model = Bare().to(dtype)
    gemini = wrap(model, optimizer := adamw(model.parameters()), TIGHT)
    model(torch.ones(3, 8, dtype=dtype)).backward()
    optimizer.step()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {value.dtype for value in gemini.state_dict().values()} == {wide}


def test_parameters_of_several_formats_are_refused_by_name() -> None:
    model = Bare()
    model.last.double()
    optimizer = adamw(model.parameters())
    said = r"the model has first.weight of float32, last.weight of float64; give precision= \(fp64, fp32, bf16, fp16\)"
    with pytest.raises(UserError, match=said):
        wrap(model, optimizer, TIGHT)
    wrap(model, optimizer, TIGHT, precision="fp64")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


@pytest.mark.parametrize(
    "make", [adamw, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), Adafactor]
)
def test_frozen_parameters_may_be_the_optimizers(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def trained(wraps: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Bare()
        model.first.weight.requires_grad_(False)
        optimizer = make(model.parameters())
        gemini = wrap(model, optimizer, TIGHT) if wraps else None
        for step in range(3):
            model(torch.full((3, 8), float(step + 1))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return gemini.state_dict() if gemini else {n: v.detach().clone() for n, v in model.state_dict().items()}

    expected, found = trained(False), trained(True)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7, msg=name)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.table.weight
        self.norm = nn.BatchNorm1d(9)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.head(self.table(ids))).square().sum()


def test_a_state_has_every_name_and_buffers() -> None:
    model = Tied()
    names = list(model.state_dict())
    gemini = wrap(model, optimizer := adamw(model.parameters()), TIGHT)
    model(torch.arange(9)).backward()
    optimizer.step()
    state = gemini.state_dict()
    assert sorted(state) == sorted(names)
    (fresh := Tied()).load_state_dict(state)
    assert torch.equal(fresh.head.weight, gemini.state_dict()["table.weight"])
    assert torch.equal(fresh.norm.running_var, model.norm.running_var)


def test_an_optimizer_in_mid_run_keeps_its_state() -> None:
    def trained(wraps: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Net()
        optimizer = adamw(model.parameters())
        gemini = None
        for step in range(4):
            if wraps and step == 2:
                gemini = wrap(model, optimizer, TIGHT)
            model.unused(torch.ones(16)).sum().mul(0.0).add(loss(model, batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict()) if gemini is None else gemini.state_dict()

    expected = trained(False)
    for name, value in trained(True).items():
        assert torch.equal(value, expected[name].detach()), name


def test_new_values_reach_what_an_evaluation_has_left_on_the_device() -> None:
    model = Net()
    gemini = wrap(model, adamw(model.parameters()), 200_000)
    with torch.no_grad():
        before = loss(model, batch(0))
        for master in gemini.parallel.masters.values():
            master.zero_()
        gemini.parallel.publish()
        assert float(loss(model, batch(0))) == pytest.approx(math.log(11))
    assert float(before) != pytest.approx(math.log(11))
