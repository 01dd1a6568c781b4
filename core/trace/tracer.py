"""One step of any module on fake tensors, before anything is allocated: what it needs at each moment.

1. Every parameter and buffer gets a stand-in without memory; the step runs on those, forward and backward.
2. Hooks cut it into *stretches*: where a module begins and ends (also recomputed in the backward), where its outputs'
   gradients come and its inputs' are done, where a parameter's gradient is there. In between, which parameters are in
   use does not change. A module's are its own, and those that its forward reads of modules it does not call.
3. A dispatch mode sees every operator: which storages are alive that are not parameters (`core.trace.account`),
   and how long it takes, by its FLOPs or the bytes that it touches, whichever is longer.

Gemini plans residency on it, once parameters lie in chunks (`core.gemini.moments`); `plan` commands count by it.

A gradient counts as other memory from when autograd has made it until it is put into its chunk.

Where a model looks at values (`if mask.any()`, experts that take what a router gives them), there are none to look at.
If it has its parameters, the step then runs for real where they are; else, if that is allowed, with parameters drawn at
random: a router sends tokens everywhere alike. Not seen: memory inside one operator, what a collective needs, updates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from core.compat import OUTSIDE, FakeTensor, FakeTensorMode, backward_number, own_part, tree_leaves, tree_map_only
from core.config import UserError
from core.trace.account import DEVICE_OF, MemoryAccount, plain_tensors
from core.trace.cost import operator_cost, tensors_of
from core.trace.machine import Speed

StretchKind = Literal["forward", "backward"]


@dataclass(frozen=True)
class Stretch:
    """A part of the step in which the parameters in use do not change.

    begins       a module's forward or backward begins with it; else it is what remains of the one before
    parameters   in use, by name
    writes       whose gradients are there at its end
    other_bytes  the most at once beside parameters
    """

    kind: StretchKind
    name: str
    begins: bool
    parameters: frozenset[str]
    writes: tuple[str, ...]
    other_bytes: int
    seconds: float


@dataclass(frozen=True)
class StepTrace:
    """One step by parameters.

    order  of first use; those that are never used come last
    reads  module -> parameters that its forward uses beside its own, since it does not call the modules that own them
    updates_as_final  an update may begin when the last gradient is there, and need not wait for the backward's end
    by_blocks  each backward is that of a part of the model, and those of the microbatches follow one another
    """

    microbatches: tuple[tuple[Stretch, ...], ...]
    order: tuple[str, ...]
    reads: dict[str, tuple[str, ...]]
    updates_as_final: bool = False
    by_blocks: bool = False


def trace_step(
    model: nn.Module,
    step: Callable[[nn.Module], Tensor | Iterator[None]],
    speed: Speed,
    device: torch.device | str = "cpu",
    num_microbatches: int = 1,
    units: Mapping[str, Collection[str]] | None = None,
    draws: bool = False,
    agree: Callable[[Exception | None], Exception | None] = lambda failure: failure,
) -> StepTrace:
    """Trace `num_microbatches` times `step(model)`, the loss of one microbatch, and its backward if it has one.

    step   or, for a pipeline, runs forwards and backwards itself, and yields behind each backward
    units  module -> parameters that are in use while its forward or backward runs; by default every module and its own
    draws  a model that looks at values and has none may get memory and random ones for the while
    agree  what went wrong on this rank -> what did on any; all ranks that trace together say so after each attempt, and
           so trace on values together where one of them has to

    The model may lie on the meta device; it, its gradients and the random state are left as they were.
    Raises UserError where the model looks at values and has none, and where it uses a parameter outside of any module.
    """
    device = torch.device(device)

    def attempt(make: Callable[[Tensor], Tensor], mode: FakeTensorMode | None) -> StepTrace | Exception:
        try:
            with mode or torch.random.fork_rng(), stand_ins(model, make):
                return _record(model, step, _Recorder(model, speed, device.type, units, mode), num_microbatches)
        except Exception as error:
            return error

    mode = FakeTensorMode()
    found = attempt(lambda tensor: fake_of(mode, tensor, device), mode)
    failure = agree(_failure(found))
    if failure is None or isinstance(failure, UserError):
        return _traced(found, failure)
    # Operators that need values, or that fake tensors do not know, fail in many ways; what is wrong with the model
    # itself fails again for real.
    has_values = all(_has_memory(tensor) and not tensor.is_meta for tensor in model.parameters())
    said = next(iter(str(failure).splitlines()), "")
    refusal = UserError(
        f"the model's step cannot be foreseen without values ({type(failure).__name__}: {said}); give the model its "
        "parameters before it is traced, or see that it runs"
    )
    refused = agree(None if has_values or draws else refusal)
    if refused is not None:
        raise refused from failure
    found = attempt(_copy if has_values else lambda tensor: _drawn(tensor, device), None)
    return _traced(found, agree(_failure(found)))


def _failure(found: StepTrace | Exception) -> Exception | None:
    return found if isinstance(found, Exception) else None


def _traced(found: StepTrace | Exception, failure: Exception | None) -> StepTrace:
    """Raises what went wrong, on this rank or on another."""
    if failure is not None:
        raise failure
    assert isinstance(found, StepTrace)
    return found


# --- stand-ins --------------------------------------------------------------------------------------------------------


@contextmanager
def stand_ins(model: nn.Module, make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Parameters and buffers are others inside; what was one tensor under several names stays one."""
    made: dict[int, Tensor] = {}
    originals: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for module in model.modules():
            for owned in (module._parameters, module._buffers):
                for name, tensor in owned.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        stand_in = make(tensor)
                        if isinstance(tensor, nn.Parameter):
                            stand_in = nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
                        made[id(tensor)] = stand_in
                    originals.append((owned, name, tensor))
        for owned, name, tensor in originals:
            owned[name] = made[id(tensor)]
        yield
    finally:
        for owned, name, tensor in originals:
            owned[name] = tensor


def fake_of(mode: FakeTensorMode, tensor: Tensor, device: torch.device) -> Tensor:
    if isinstance(tensor, DTensor):
        return _sharded_as(tensor, fake_of(mode, own_part(tensor), device))
    if hasattr(tensor, "__tensor_flatten__"):
        return mode.from_tensor(tensor.detach())
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _sharded_as(tensor: DTensor, own: Tensor) -> DTensor:
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def _has_memory(tensor: Tensor) -> bool:
    return all(storage.nbytes() for storage in _storages(tensor)) and (tensor.numel() < 2 or any(tensor.stride()))


def _copy(tensor: Tensor) -> Tensor:
    """Parameters are only read; buffers may be written."""
    return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.clone()


def _drawn(tensor: Tensor, device: torch.device) -> Tensor:
    """Values of an untrained model; what is in memory is copied."""
    if _has_memory(tensor) and not tensor.is_meta:
        return _copy(tensor)
    if isinstance(tensor, DTensor):
        return _sharded_as(tensor, _drawn(own_part(tensor), device))
    drawn = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return drawn.normal_(0.0, 0.02) if tensor.is_floating_point() else drawn


# --- recording --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Call:
    """One call of a module: which parameters it uses, and how its backward is recognised to be over."""

    name: str
    own: frozenset[str]
    others: set[str] = field(default_factory=set)
    has_input_gradients: bool = False

    @property
    def parameters(self) -> frozenset[str]:
        return self.own | self.others


@dataclass
class _Cut:
    """A stretch as it is recorded; a call's other parameters may be known only later."""

    kind: StretchKind
    begun: _Call | None
    calls: tuple[_Call, ...]
    written: frozenset[str]
    writes: tuple[str, ...]
    other_bytes: int
    seconds: float

    def stretch(self) -> Stretch:
        parameters = frozenset().union(*(call.parameters for call in self.calls)) - self.written
        begun = self.begun if self.begun is not None and self.begun.parameters else None
        name = begun.name if begun else ""
        return Stretch(self.kind, name, begun is not None, parameters, self.writes, self.other_bytes, self.seconds)


def _record(
    model: nn.Module, step: Callable[[nn.Module], Tensor | Iterator[None]], recorder: _Recorder, num_microbatches: int
) -> StepTrace:
    with torch.compiler.set_stance("force_eager"), recorder.hooks(), recorder:
        recorder.add(model.buffers())
        for _ in range(num_microbatches):
            loss = step(model)
            if isinstance(loss, Iterator):
                for _ in loss:
                    recorder.finish()
                continue
            if loss.requires_grad:
                loss.backward()
            del loss
            recorder.finish()
    return recorder.result()


class _Recorder(MemoryAccount):
    """Sees operators as a dispatch mode and modules through hooks, and cuts the step wherever parameters come or go."""

    _plain_types = (*MemoryAccount._plain_types, FakeTensor)

    def __init__(
        self,
        model: nn.Module,
        speed: Speed,
        device_type: str,
        units: Mapping[str, Collection[str]] | None = None,
        fake: FakeTensorMode | None = None,
    ):
        super().__init__(device_type)
        self.model, self.speed, self.units, self.fake = model, speed, units, fake
        self.twins: dict[int, tuple[Tensor, Tensor]] = {}  # what the step brings along, and its fake
        self.parameters = dict(model.named_parameters())
        self.names = {id(p): name for name, p in self.parameters.items()}
        # Storages are told apart by identity, so these are kept alive.
        self.storages = {id(s): (s, n) for n, p in self.parameters.items() for s in _storages(p)}
        self.calls: list[_Call] = []  # forwards that run, outermost first
        self.backwards: list[_Call] = []  # calls whose backward runs
        self.recomputed: list[_Call] = []  # forwards that run again inside a backward
        self.written: set[str] = set()  # parameters whose gradients have been made in this backward
        self.begun: _Call | None = None  # since the last cut
        self.cuts: list[_Cut] = []
        self.microbatches: list[list[_Cut]] = []
        self.seconds = 0.0
        self.reads: dict[str, set[str]] = {}

    # Operators.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].device
        if self.fake is not None:
            args, kwargs = tree_map_only(Tensor, self._twin, (args, kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented:
            return result
        for tensor in tensors_of((args, kwargs)):
            known = self.storages.get(id(tensor.untyped_storage()))
            if known is not None:
                self._use(known[1])
        cost = operator_cost(func, args, kwargs or {}, result)
        self.seconds += self.speed.seconds(cost.flops, cost.num_bytes)
        return result

    def _twin(self, tensor: Tensor) -> Tensor:
        if self.fake is None or isinstance(tensor, FakeTensor) or hasattr(tensor, "__tensor_flatten__"):
            return tensor
        if id(tensor) not in self.twins:
            self.twins[id(tensor)] = tensor, self.fake.from_tensor(tensor)
        return self.twins[id(tensor)][1]

    def _note(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self.storages:
            super()._note(storage)

    def _use(self, name: str) -> None:
        """A parameter is read: by a module that owns it, or by one that does not call its owner."""
        if _in_backward() and not self.recomputed:
            return
        running = self.recomputed or self.calls
        if any(name in call.parameters for call in running):
            return
        if not running:
            raise UserError(
                f"{name} is used outside of any module's forward, where it cannot be fetched; use it inside of the "
                "model's"
            )
        running[-1].others.add(name)
        self.reads.setdefault(running[-1].name, set()).add(name)

    # Modules.

    @contextmanager
    def hooks(self) -> Iterator[None]:
        handles = []
        try:
            for name, module in self.model.named_modules():
                own = frozenset(self.names[id(p)] for p in module._parameters.values() if p is not None)
                if self.units is not None:
                    if name not in self.units:
                        continue
                    own = frozenset(self.units[name])
                begin, end = self._hooks_of(name, own)
                handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
                handles.append(module.register_forward_hook(end, with_kwargs=True, always_call=True))
            for name, parameter in self.parameters.items():
                if parameter.requires_grad:
                    handles.append(parameter.register_post_accumulate_grad_hook(self._gradient_hook(name)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks_of(self, name: str, own: frozenset[str]) -> tuple[Callable[..., None], Callable[..., None]]:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            call = _Call(name, own)
            self._cut()
            self.begun = call
            (self.recomputed if _in_backward() else self.calls).append(call)
            for tensor in tensors_in((args, kwargs)):
                if tensor.requires_grad and torch.is_grad_enabled():
                    call.has_input_gradients = True
                    tensor.register_hook(lambda _: self._end_backward(call))

        def end(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            running = self.recomputed if _in_backward() else self.calls
            if not running:  # the forward was given up before its hook for the beginning
                return
            self._cut()
            call = running.pop()
            if call.parameters:
                for tensor in tensors_in(result):
                    if tensor.requires_grad:
                        tensor.register_hook(lambda _: self._begin_backward(call))

        return begin, end

    def _begin_backward(self, call: _Call) -> None:
        if call not in self.backwards:
            self._cut()
            self.begun = call
            self.backwards.append(call)

    def _end_backward(self, call: _Call) -> None:
        if call in self.backwards:
            self._cut()
            self.backwards.remove(call)

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def put_away(parameter: Tensor) -> None:
            self._cut(writes=(name,))
            self.written.add(name)
            parameter.grad = None
            for call in list(self.backwards):
                trained = {n for n in call.parameters if self.parameters[n].requires_grad}
                if not call.has_input_gradients and trained <= self.written:
                    self.backwards.remove(call)

        return put_away

    def finish(self) -> None:
        """A microbatch is over."""
        self._cut()
        self.microbatches.append(self.cuts)
        self.cuts = []
        for found in (self.calls, self.recomputed, self.backwards, self.written):
            found.clear()

    def _cut(self, writes: tuple[str, ...] = ()) -> None:
        """Make a stretch of what ran since the last cut."""
        is_backward = _in_backward() or (bool(self.cuts) and self.cuts[-1].kind == "backward")
        calls = (*self.calls, *self.recomputed, *self.backwards)
        written = frozenset(self.written)
        kind: StretchKind = "backward" if is_backward else "forward"
        self.cuts.append(_Cut(kind, self.begun, calls, written, writes, self.peak_bytes, self.seconds))
        self.peak_bytes, self.seconds, self.begun = self.current_bytes, 0.0, None

    def result(self) -> StepTrace:
        microbatches = tuple(tuple(cut.stretch() for cut in cuts) for cuts in self.microbatches)
        place = {name: index for index, name in enumerate(self.parameters)}
        used: dict[str, None] = {}
        for stretch in (stretch for stretches in microbatches for stretch in stretches):
            used |= dict.fromkeys(sorted(stretch.parameters, key=place.__getitem__))
        order = (*used, *(name for name in self.parameters if name not in used))
        return StepTrace(microbatches, order, {name: tuple(sorted(found)) for name, found in self.reads.items()})


def _in_backward() -> bool:
    return backward_number() != OUTSIDE


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Tensors of a module's inputs or output: in tuples, dicts, what torch's pytrees know, dataclasses; each once."""
    if isinstance(output, Tensor):  # most outputs are nothing else
        yield output
        return
    seen: set[int] = set()
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            if id(leaf) not in seen:
                seen.add(id(leaf))
                yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)])


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    return [plain.untyped_storage() for plain in plain_tensors(tensor)]
