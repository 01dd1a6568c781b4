"""Follows a step through the modules of a model, and tells the executor what it needs: hooks on modules, not operators.

A *unit* is a module with the parameters that its forward reads: its own, those of its parameter lists, and of what is
compiled, or is one of torch's own modules, everything below it.

    before its forward          its chunks are fetched, its parameters go into use
    after its forward           they are out of use; a hook on every tensor of the output waits for its gradient
    at the first of those       fetched and in use again, for the backward
    at each parameter's grad    it takes the parameter's place; the last one of a chunk has the chunk reduced. Where the
                                chunk lives here alone, it becomes the master's; where the next backward needs the
                                parameter again (`kept`), it goes beside the chunk, and the parameter stays
    when its backward is over   autograd runs nodes in the reverse of the order in which the forward made them. So it is
                                over when the gradient of one of its inputs goes on to whoever made that, or when the
                                backward of a unit begins that the forward had left before it came to this one

A forward inside a backward (recomputed activations) is a forward like all others. What is left when the whole backward
has ended, unused parameters, counts as zero in its chunk's reduction.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from core.compat import OUTSIDE, backward_number, compiled_call, is_compiled, own_part, set_compiled_call
from core.gemini.chunk import Chunk, Member
from core.gemini.executor import Executor
from core.gemini.states import COMPUTE, HOLD, HOLD_AFTER_BWD, HOLD_AFTER_FWD, READY_TO_REDUCE, State
from core.gemini.trace import MomentKind
from core.trace.tracer import tensors_in


class Unit:
    """A module with the parameters that its forward reads. What is merged stays for good, so nobody follows it."""

    def __init__(self, name: str, module: nn.Module, members: Sequence[Member]):
        self.name, self.module, self.members = name, module, list(members)
        self.settled()

    def settled(self) -> None:
        self.members = [member for member in self.members if not member.chunk.merged]
        self.chunks: list[Chunk] = list(dict.fromkeys(member.chunk for member in self.members))


class Call:
    """One forward of a unit, and its backward.

    entered, left  places in the order of all forwards' beginnings and ends
    backward       torch's number of the backward that it takes part in
    """

    def __init__(self, unit: Unit, entered: int):
        self.unit, self.entered, self.left = unit, entered, entered
        self.backward = OUTSIDE


class ModuleHooks:
    """The link between the modules of a model and the executor of its chunks.

    rests  everything is merged: nothing comes or goes, and unless it is measured, no moment needs to be known
    final  is told, in a step's last backward, of each chunk that has all of its gradients
    kept   chunks that get gradients from other backwards after this one
    """

    def __init__(self, units: Sequence[Unit], chunks: Sequence[Chunk], executor: Executor):
        self.units, self.chunks, self.executor = units, chunks, executor
        self.rests = False
        self.final: Callable[[Chunk], None] | None = None
        self.kept: frozenset[Chunk] = frozenset()
        self._clock = 0
        self._forwards: list[Call] = []
        self._backwards: list[Call] = []
        self._reduced: set[Chunk] = set()
        self.used: set[str] = set()  # parameters that had a gradient in this step
        for unit in units:
            self._install(unit)
        for chunk in chunks:
            for member in chunk.members:
                if member.trainable:
                    member.parameter.register_post_accumulate_grad_hook(self._gradient_hook(member))

    def _install(self, unit: Unit) -> None:
        module = unit.module
        compiled = compiled_call(module)
        if compiled is not None:  # its hooks would be compiled with it
            set_compiled_call(module, self._around(unit, compiled))
            return
        module.register_forward_pre_hook(
            lambda _, args, kwargs: self._before_forward(unit, (args, kwargs)), prepend=True, with_kwargs=True
        )
        module.register_forward_hook(lambda _m, _a, output: self._after_forward(unit, output), always_call=True)

    def _around(self, unit: Unit, call: Callable[..., Any]) -> Callable[..., Any]:
        @torch.compiler.disable(recursive=False)
        def called(*args: Any, **kwargs: Any) -> Any:
            output = None
            self._before_forward(unit, (args, kwargs))
            try:
                output = call(*args, **kwargs)
            finally:
                self._after_forward(unit, output)
            return output

        return called

    def settled(self) -> None:
        """Take note of what lives on the device, which was decided between two steps."""
        for unit in self.units:
            unit.settled()
        self.rests = all(chunk.merged for chunk in self.chunks)

    # --- a backward as a whole ----------------------------------------------------------------------------------------

    def end_backward(self, names: frozenset[str] | None = None) -> None:
        """The backward has ended: reduce what it has left, with zeros for what took no part.

        names  the parameters that it may have gradients for; None: all
        """
        for call in self._backwards:
            self._out_of_use(call, HOLD_AFTER_BWD)
        self._backwards.clear()
        for chunk in self.chunks:
            may = names is None or not names.isdisjoint(member.name for member in chunk.members)
            sends = chunk.sharers.sends and may and chunk.trainable and chunk not in self._reduced
            if chunk.holds_gradients or chunk.set_aside or sends:
                self._reduce(chunk)
        self._reduced.clear()

    def give_up(self) -> None:
        """The step was given up in the middle: nothing is in use, and no gradient of it counts."""
        for call in (*self._forwards, *self._backwards):
            self._out_of_use(call, HOLD)
        self._forwards.clear()
        self._backwards.clear()
        self._reduced.clear()
        for chunk in self.chunks:
            if chunk.holds_gradients:
                self.executor.drop(chunk)
            chunk.forget_grads()

    # --- forward ------------------------------------------------------------------------------------------------------

    def _before_forward(self, unit: Unit, inputs: Any) -> None:
        if self.rests and self.executor.gauge is None:
            return
        backward = backward_number()
        if backward == OUTSIDE and self._backwards:
            self.end_backward()
        self._end_calls(backward, None)
        self._restore(unit)
        self.executor.at(self._kind(), unit.name, unit.chunks)
        self._clock += 1
        call = Call(unit, self._clock)
        self._forwards.append(call)
        self._into_use(unit)
        if unit.members and torch.is_grad_enabled():
            for tensor in tensors_in(inputs):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(lambda _: self._after_backward(call))

    def _kind(self) -> MomentKind:
        """A forward inside a backward is part of that."""
        return "forward" if backward_number() == OUTSIDE else "backward"

    def _after_forward(self, unit: Unit, output: Any) -> None:
        if not self._forwards or self._forwards[-1].unit is not unit:
            return  # it never began: nobody follows it, or what it needs could not be fetched
        call = self._forwards.pop()
        self._clock += 1
        call.left = self._clock
        differentiable = []
        if torch.is_grad_enabled():
            differentiable = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf]
        for tensor in differentiable:
            tensor.register_hook(lambda _, call=call: self._before_backward(call))
        self._out_of_use(call, HOLD_AFTER_FWD if differentiable else HOLD)

    # --- backward -----------------------------------------------------------------------------------------------------

    def _before_backward(self, call: Call) -> None:
        backward = backward_number()
        self._end_calls(backward, call)
        if call in self._backwards or (call.backward == backward and not call.unit.members):
            return
        call.backward = backward
        self._restore(call.unit)
        self.executor.at("backward", call.unit.name, call.unit.chunks)
        if call.unit.members:
            self._backwards.append(call)
            self._into_use(call.unit)

    def _after_backward(self, call: Call) -> None:
        if call in self._backwards:
            self._backwards.remove(call)
            self._out_of_use(call, HOLD_AFTER_BWD)

    def _end_calls(self, backward: int, now: Call | None) -> None:
        """End the backward of calls that the running backward has left behind.

        Those are calls of a backward inside it (reentrant checkpoints number theirs higher), and calls that the forward
        came to after it had left `now`.
        """
        for call in list(self._backwards):
            is_inner = call.backward > backward
            if is_inner or (call.backward == backward and now is not None and call.entered > now.left):
                self._backwards.remove(call)
                self._out_of_use(call, HOLD_AFTER_BWD)

    def _gradient_hook(self, member: Member) -> Callable[[Tensor], None]:
        # The garbage collector does not see into these hooks of a parameter: what they held could never be freed.
        hooks, of = weakref.ref(self), weakref.ref(member)

        def arrived(parameter: Tensor) -> None:
            own, member, grad = hooks(), of(), parameter.grad
            assert own is not None
            assert member is not None
            assert grad is not None
            parameter.grad = None
            own.used.add(member.name)
            own._take_gradient(member, own_part(grad) if isinstance(grad, DTensor) else grad)

        return arrived

    @torch.no_grad()
    def _take_gradient(self, member: Member, grad: Tensor) -> None:
        chunk = member.chunk
        if chunk.alone:
            chunk.keep_grad(member, grad)
            return
        if chunk in self.kept:
            self._put_aside(member, grad)
            return
        if member.state is READY_TO_REDUCE:  # a second gradient in one backward: reentrant checkpoints that share it
            self.executor.restore(chunk)
        self.executor.require([chunk])
        member.view.copy_(grad)
        member.move(READY_TO_REDUCE)
        if chunk.count[READY_TO_REDUCE] == len(chunk.members):
            self._reduce(chunk)
            if self.final is not None:
                self.final(chunk)

    def _put_aside(self, member: Member, grad: Tensor) -> None:
        chunk = member.chunk
        if member in chunk.set_aside:  # a second gradient in one backward: reentrant checkpoints that share it
            self._reduce(chunk)
        chunk.put_aside(member, grad)
        if len(chunk.set_aside) == len(chunk.members):
            self._reduce(chunk)

    def _reduce(self, chunk: Chunk) -> None:
        keeps = chunk in self.kept
        self.executor.at("reduce", chunk.name, [] if keeps else [chunk])
        self.executor.reduce(chunk, keeps)
        self._reduced.add(chunk)

    # --- use ----------------------------------------------------------------------------------------------------------

    def _restore(self, unit: Unit) -> None:
        """Parameters of the unit whose place a gradient has taken come back: they are used once more."""
        for member in unit.members:
            if member.state is READY_TO_REDUCE:
                self.executor.restore(member.chunk)

    def _into_use(self, unit: Unit) -> None:
        for member in unit.members:
            member.users += 1
            if member.state is not COMPUTE:
                member.move(COMPUTE)

    def _out_of_use(self, call: Call, to: State) -> None:
        for member in call.unit.members:
            member.users -= 1
            if not member.users and member.state is COMPUTE:
                member.move(to)


def units_of(model: nn.Module) -> dict[str, list[str]]:
    """Module -> names of the parameters that its forward reads, as far as modules tell; none where it only calls."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inside: set[int] = set()
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if id(module) in inside or isinstance(module, nn.ParameterList | nn.ParameterDict):
            continue
        if _is_one(module):
            inside |= {id(m) for m in module.modules()}
            parameters = module.parameters()
        else:
            parameters = _read_by(module)
        found[name] = list(dict.fromkeys(names[id(parameter)] for parameter in parameters))
    return found


def _is_one(module: nn.Module) -> bool:
    """Return whether a module's forward may read parameters of those below without calling them."""
    if is_compiled(module):
        return True
    containers = nn.Sequential | nn.ModuleList | nn.ModuleDict
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, containers)


def _read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Its own parameters and those of its lists of parameters, which no one calls."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield from _read_by(child)
