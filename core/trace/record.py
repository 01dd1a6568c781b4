"""A step of any module as a graph, without memory and data: forward, backward, and with an optimizer its update.

1. Parameters, buffers and inputs get stand-ins without memory. The module's own code runs on them, and autograd's.
2. A dispatch mode sees every operator of ATen that either calls, notes what it is given and returns, and costs, and
   which storages come and go: weak references tell when eager torch frees one, whoever held it.
3. Modules are told by hooks. An operator of the backward belongs to that of the forward at whose call autograd made the
   node which runs: autograd numbers its nodes.

Operators are those that `make_fx` would see; the lives of storages it would not tell. What Python does not show as an
operator (a branch, a loop) is as it was on these shapes. Operators are those of a CPU. Memory inside of one operator is
not seen. A module that looks at values is refused, with the line that does.
"""

from __future__ import annotations

import linecache
import logging
import traceback
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from core.compat import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    current_node,
    next_sequence_number,
    sequence_number,
    tree_flatten,
    tree_map_only,
    wants_values,
    without_modes,
)
from core.config import UserError
from core.trace.account import DEVICE_OF, no_garbage
from core.trace.alike import NotAlike
from core.trace.cost import facts_of, operator_cost, tensors_of, written_by
from core.trace.graph import Graph, MemoryKind, Node, NodeKind, Result, Storage, Value, name_nodes
from core.trace.grow import GrownGraph, few_blocks
from core.trace.tracer import fake_of, stand_ins, tensors_in

log = logging.getLogger("trace")
_DEVICE = torch.device("cpu")
Optimizers = Callable[[dict[str, Tensor]], torch.optim.Optimizer]


def trace_graph(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    loss: Callable[[Any], Tensor] | None = None,
    *,
    train: bool | None = None,
    optimizer: Optimizers | None = None,
    whole: bool = False,
) -> Graph:
    """The step that the model takes on inputs of these shapes.

    inputs     its keyword arguments, or its arguments; their tensors' values are not looked at, they may be on "meta"
    loss       output -> what the backward begins with; by default the output's `loss`, or a scalar that is the output,
               else all of its tensors, each with a gradient given from outside
    train      with a backward; by default if the model is in training mode, which it is for the while
    optimizer  parameters by name -> the optimizer whose update ends the step, its state there from the beginning
    whole      trace every block, also where the same graph would grow from that of a few that are alike
               (`core.trace.grow`)

    The model may lie on the meta device; it is left as it was.
    Raises UserError where it cannot be traced, with the line that is why.
    """
    train = model.training if train is None else train
    with _in_mode(model, train):
        return _grown(model, _Traced(inputs, loss, train, optimizer), whole or optimizer is not None)


def trace_call(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    loss: Callable[[Any], Any] | None = None,
    *,
    backward: bool,
    whole: bool = False,
) -> Graph:
    """The same of one call, as whoever replaces the call needs it: its whole result, in the modes that modules have.

    loss      output -> what the call returns instead
    backward  also the backward, of which the gradient of every output it begins with is an input of the graph, and
              inputs that require one have gradients; left out where nothing depends on what learns
    """
    return _grown(model, _Traced(inputs, loss, backward, None, is_call=True), whole)


@dataclass(frozen=True)
class _Traced:
    """What is traced; arguments as of `trace_graph`.  is_call: see `trace_call`"""

    inputs: Mapping[str, Any] | Sequence[Any]
    loss: Callable[[Any], Any] | None
    train: bool
    optimizer: Optimizers | None
    is_call: bool = False


def _grown(model: nn.Module, what: _Traced, whole: bool) -> Graph:
    if not whole:
        try:
            return _of_few_blocks(model, what)
        except (NotAlike, UserError) as why:  # of the model's own code, too, which may count its blocks
            log.info("all blocks are traced: %s", why)
    return _trace(model, what)


def _of_few_blocks(model: nn.Module, what: _Traced) -> Graph:
    """Raises NotAlike where there are none, or the whole does not follow."""
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    with few_blocks(model) as inserts:
        if not inserts:
            raise NotAlike("there are no lists of alike blocks")
        graph = _trace(model, what)
    for insert in inserts:
        graph = GrownGraph(graph, insert, names).made()
    return graph


def _trace(model: nn.Module, what: _Traced) -> Graph:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, stand_ins(model, lambda tensor: fake_of(mode, tensor, _DEVICE)), no_garbage():
        inputs = dict(what.inputs) if isinstance(what.inputs, Mapping) else tuple(what.inputs)
        given = tree_map_only(Tensor, lambda tensor: _stand_in(mode, tensor), inputs)
        recorder = _Recorder(model, mode)
        recorder.expect(model, given)
        try:
            with torch.compiler.set_stance("force_eager"):
                _run(model, given, what, recorder)
        except UserError:
            raise
        except Exception as error:
            raise _refusal(model, error) from error
    return recorder.graph()


def _run(model: nn.Module, given: Any, what: _Traced, recorder: _Recorder) -> None:
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    updated = None if what.optimizer is None else recorder.with_state(what.optimizer(dict(parameters)), parameters)
    with recorder.hooks(), recorder, torch.set_grad_enabled(what.train):
        result = model(**given) if isinstance(given, Mapping) else model(*given)
        result = result if what.loss is None else what.loss(result)
        begins = _begins(result, what.train) if what.train or what.is_call else list(tensors_in(result))
        is_called = result if what.is_call else None
        del result
        if what.is_call:
            recorder.result = Result.of(is_called, recorder.value_of)
        if what.train and not begins and not what.is_call:
            raise UserError(
                f"{type(model).__name__} has no output that depends on a parameter which learns; profile it with "
                "train=False, or let its parameters require gradients"
            )
        recorder.returns(begins)
        if what.train and begins:
            is_loss = not what.is_call and len(begins) == 1 and begins[0].ndim == 0
            gradients = [None if is_loss else recorder.gradient_of(t) for t in begins]
            recorder.kind = "backward"
            torch.autograd.backward(begins, gradients)
            learning = parameters | (_learning(given) if what.is_call else {})
            recorder.learned({name: leaf.grad for name, leaf in learning.items() if leaf.grad is not None})
            del begins, gradients
            if updated is not None:
                recorder.kind = "update"
                updated.step()
        recorder.finish()


def _learning(given: Any) -> dict[str, Tensor]:
    """The inputs that want a gradient."""
    return {name: tensor for name, tensor in named_tensors(given) if tensor.requires_grad}


def _begins(result: Any, train: bool) -> list[Tensor]:
    """What the backward begins with: the loss, or every output that has a gradient; without one what it would be."""
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad >= train:
        return [found]
    return [tensor for tensor in tensors_in(result) if tensor.requires_grad >= train]


def named_tensors(given: Mapping[str, Any] | Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """A call's tensors by the names that they have as inputs of its graph."""
    named = given.items() if isinstance(given, Mapping) else ((f"input.{n}", value) for n, value in enumerate(given))
    for name, value in named:
        tensors = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
        for number, tensor in enumerate(tensors):
            yield name if len(tensors) == 1 else f"{name}.{number}", tensor


def _stand_in(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    return fake_of(mode, tensor, _DEVICE).requires_grad_(tensor.requires_grad)


@contextmanager
def _in_mode(model: nn.Module, train: bool) -> Iterator[None]:
    before = {module: module.training for module in model.modules()}
    try:
        if model.training != train:  # parts of it may be frozen on purpose
            model.train(train)
        yield
    finally:
        for module, training in before.items():
            module.training = training


# --- refusals ---------------------------------------------------------------------------------------------------------

_OWN, _TORCH = str(Path(__file__).parent), str(Path(torch.__file__).parent)


def _refusal(model: nn.Module, error: Exception) -> Exception:
    """A line that names the innermost line of code that is neither torch's nor ours, and what to do there."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    inner = [frame for frame in frames if not frame.filename.startswith((_TORCH, _OWN))]
    if not inner:  # arguments that its forward does not take, or a mistake of ours
        if not isinstance(error, TypeError) or "forward()" not in str(error):
            return error
        return UserError(f"{type(model).__name__} does not run on these inputs: {error}")
    at = inner[-1]
    code = (at.line or linecache.getline(at.filename, at.lineno or 0)).strip()
    where = f"{type(model).__name__} cannot be traced: {at.filename}:{at.lineno} ({code})"
    if wants_values(error):
        return UserError(
            f"{where} looks at a tensor's values, and there are none; write it without (torch.where, a mask), or "
            "trace the parts around it"
        )
    said = next(iter(str(error).splitlines()), "").strip()
    return UserError(f"{where} fails on these inputs with {type(error).__name__}: {said}; see that it runs on them")


# --- recording --------------------------------------------------------------------------------------------------------

_Place = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, bool, bool]
_PLAIN = (FakeTensor, nn.Parameter)


class _Memory:
    """A storage that is alive, and the values that lie in it: those as it is, and those before it was written to."""

    __slots__ = ("reference", "stale", "storage", "values", "writer")

    def __init__(self, storage: Storage):
        self.storage = storage
        self.reference: weakref.ref[torch.UntypedStorage] | None = None
        self.values: dict[_Place, Value] = {}
        self.stale: dict[_Place, Value] = {}
        self.writer = storage.born


class _Recorder(TorchDispatchMode):
    """Notes operators as a dispatch mode and modules by hooks."""

    def __init__(self, model: nn.Module, mode: FakeTensorMode):
        super().__init__()
        self.mode = mode
        self.kind: NodeKind = "forward"
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.storages: list[Storage] = []
        self.memory: dict[int, _Memory] = {}  # by the identity of storages that are alive
        self.inputs: dict[str, Value] = {}
        self.constants: dict[str, Tensor] = {}
        self.outputs: list[Value] = []
        self.result: Result | None = None
        self.gradients: dict[str, Value] = {}
        self.twins: dict[int, tuple[Tensor, Tensor]] = {}  # tensors from outside, and their stand-ins
        self.names = {id(module): name for name, module in model.named_modules()}
        self.owners = {id(parameter): name.rpartition(".")[0] for name, parameter in model.named_parameters()}
        self.running: list[str] = []
        self.numbers: list[int] = []  # of autograd's nodes, as they were made
        self.made_by: list[tuple[str, int | None]] = []  # for each of them: module, node of the forward
        self.is_settling = False

    # What is there before.

    def expect(self, model: nn.Module, given: Any) -> None:
        for name, parameter in model.named_parameters():
            self.add(name, parameter, "parameters")
        for name, buffer in model.named_buffers():
            self.add(name, buffer, "buffers")
        for name, tensor in named_tensors(given):
            self.add(name, tensor, "inputs")

    def add(self, name: str, tensor: Tensor, kind: MemoryKind) -> Value:
        memory = self._memory_of(tensor, None)
        if not memory.storage.name:
            memory.storage.name, memory.storage.kind = name, kind
        value = self._value(tensor, memory)
        value.name = value.name or name
        self.inputs.setdefault(value.name, value)
        return value

    def gradient_of(self, tensor: Tensor) -> Tensor:
        """A gradient of an output, from outside."""
        self.is_settling = True
        gradient = torch.empty_like(tensor)
        self.is_settling = False
        number = sum(name.startswith("gradient of output.") for name in self.inputs)
        self.add(f"gradient of output.{number}", gradient, "inputs")
        return gradient

    def with_state(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        """The optimizer, its state made by a step that nobody sees."""
        for parameter in parameters.values():
            parameter.grad = torch.empty_like(parameter)
        self.is_settling, self.kind = True, "update"
        with self:
            optimizer.step()
        self.is_settling, self.kind = False, "forward"
        for name, parameter in parameters.items():
            parameter.grad = None
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    self.add(f"{name}.{key}", value, "state")
        return optimizer

    # Results.

    def value_of(self, tensor: Tensor) -> Value:
        return self._value(tensor, self._memory_of(tensor, None))

    def returns(self, tensors: Sequence[Tensor]) -> None:
        self.outputs = [self.value_of(tensor) for tensor in tensors]

    def learned(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            memory = self._memory_of(gradient, None)
            memory.storage.kind, memory.storage.name = "gradients", name
            self.gradients[name] = self._value(gradient, memory)

    def finish(self) -> None:
        """What is alive now outlives the step."""
        self.memory.clear()
        first = next((node.index for node in self.nodes if node.kind == "backward"), len(self.nodes))
        for storage in self.storages:
            is_used = bool(storage.uses) and storage.uses[-1] >= first
            if storage.kind == "temporaries" and is_used and storage.born is not None and storage.born < first:
                storage.kind = "activations"

    def graph(self) -> Graph:
        name_nodes(self.nodes)
        results = (tuple(self.outputs), self.gradients, self.constants)
        return Graph(self.nodes, self.values, self.storages, self.inputs, *results, self.result)

    # Operators.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not all(issubclass(kind, _PLAIN) or kind is Tensor for kind in types):
            return NotImplemented  # its operators come here once more, on the tensors in it
        if func is DEVICE_OF:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        if self.kind == "update" and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1  # an update takes the same whatever a norm is
        if self.is_settling:
            return func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor):  # such as torch.tensor(3)
            return self._constant(args[0], func(*args, **kwargs))
        tensors = tensors_of((args, kwargs))
        if not all(isinstance(tensor, FakeTensor) for tensor in tensors) and func.namespace == "aten":
            if not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
                with without_modes():  # what is known without the step's data
                    return func(*args, **kwargs)
            args, kwargs = tree_map_only(Tensor, self._twin, (args, kwargs))
        given: list[Value] = []
        of_args = tuple(self._valued(args, given))
        of_kwargs = {key: self._valued(value, given) for key, value in kwargs.items()}
        number = next_sequence_number() - 1 if self.kind == "forward" or torch.is_grad_enabled() else None
        result = func(*args, **kwargs)
        if result is not NotImplemented:
            self._note(func, args, kwargs, result, (of_args, of_kwargs, given), number)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, valued: tuple[Any, Any, Any], number: Any) -> None:
        of_args, of_kwargs, given = valued
        index, facts = len(self.nodes), facts_of(func)
        written = list(written_by(facts, args, kwargs))
        made = tensors_of(result)
        is_known = not written and all(self._is_known(tensor) for tensor in made)
        module, source, recomputed = self._place(number, index - 1 if is_known and index else index)
        if is_known:
            return
        writes = tuple(self._value(tensor, self._memory_of(tensor, None)) for tensor in written)
        for tensor in written:
            memory = self._memory_of(tensor, None)
            memory.stale |= memory.values
            memory.values, memory.writer = {}, index
        outputs = tuple(self._value(tensor, self._memory_of(tensor, index), index) for tensor in made)
        for value in {value.index: value for value in given}.values():
            value.users.append(index)
        for storage in {value.storage.index: value.storage for value in (*given, *outputs)}.values():
            storage.uses.append(index)
        facts_and_cost = facts.is_view, *operator_cost(func, args, kwargs, result)
        where = self.kind, recomputed, module, source
        values = of_args, of_kwargs, self._valued(result, []), tuple(given), outputs, writes
        self.nodes.append(Node(index, "", func, *values, *where, *facts_and_cost))

    def _place(self, number: int | None, index: int) -> tuple[str, int | None, bool]:
        """(module, node of the forward, whether it is computed again) of the operator that runs."""
        running = self.running[-1] if self.running else ""
        if self.kind != "backward":
            self._made(number, running, index)
            return running, None, False
        node = current_node()
        found, source = self._of(node)
        if number is None:
            return found, source, False
        running = running or found
        self._made(number, running, index)
        return running, None, node is not None

    def _made(self, number: int | None, module: str, index: int) -> None:
        if number is not None and (not self.numbers or number > self.numbers[-1]):
            self.numbers.append(number)
            self.made_by.append((module, index))

    def _of(self, node: Any) -> tuple[str, int | None]:
        """Module and node of the forward at whose call autograd made a node."""
        if node is None:
            return "", None
        if (owner := self.owners.get(id(getattr(node, "variable", None)))) is not None:
            return owner, None  # it adds up a parameter's gradient
        place = bisect_left(self.numbers, sequence_number(node))
        return self.made_by[place] if place < len(self.made_by) else ("", None)

    # Tensors.

    def _twin(self, tensor: Tensor) -> Tensor:
        """The stand-in of a tensor that comes from outside; a constant, where it has values."""
        if isinstance(tensor, FakeTensor) or hasattr(tensor, "__tensor_flatten__"):
            return tensor
        if id(tensor) not in self.twins:
            twin = fake_of(self.mode, tensor, _DEVICE) if tensor.is_meta else self.mode.from_tensor(tensor)
            self.twins[id(tensor)] = tensor, self._constant(tensor, twin)
        return self.twins[id(tensor)][1]

    def _constant(self, tensor: Tensor, stand_in: Tensor) -> Tensor:
        name = f"constant.{len(self.constants)}"
        self.constants[name] = tensor
        self.add(name, stand_in, "inputs")
        return stand_in

    def _valued(self, tree: Any, given: list[Value]) -> Any:
        if isinstance(tree, Tensor):
            memory = self._memory_of(tree, None)
            if memory.storage.born is None and not memory.storage.name:
                self.add(f"unseen.{memory.storage.index}", tree, "inputs")
            given.append(self._value(tree, memory))
            return given[-1]
        if isinstance(tree, list | tuple):
            return [self._valued(branch, given) for branch in tree]
        return tree

    def _is_known(self, tensor: Tensor) -> bool:
        memory = self.memory.get(id(tensor.untyped_storage()))
        return memory is not None and _place_of(tensor) in memory.values

    def _memory_of(self, tensor: Tensor, born: int | None) -> _Memory:
        storage = tensor.untyped_storage()
        key = id(storage)
        memory = self.memory.get(key)
        if memory is None:
            memory = self.memory[key] = _Memory(Storage(len(self.storages), storage.nbytes(), born=born))
            memory.reference = weakref.ref(storage, lambda _: self._forget(key))
            self.storages.append(memory.storage)
        return memory

    def _forget(self, key: int) -> None:
        self.memory.pop(key).storage.freed = len(self.nodes) - 1

    def _value(self, tensor: Tensor, memory: _Memory, node: int | None = None) -> Value:
        place = _place_of(tensor)
        value = memory.values.get(place)
        if value is None:
            offset, shape, stride, dtype = place[:4]
            made = memory.writer if node is None else node
            before = memory.stale.get(place)
            value = Value(len(self.values), memory.storage, shape, dtype, offset, stride, made, "", before)
            self.values.append(value)
            memory.values[place] = value
        return value

    # Modules.

    @contextmanager
    def hooks(self) -> Iterator[None]:
        def begin(module: nn.Module, args: Any) -> None:
            if (name := self.names.get(id(module))) is not None:
                self.running.append(name)

        def end(module: nn.Module, args: Any, result: Any) -> None:
            if id(module) in self.names and self.running:
                self.running.pop()

        handles = (
            register_module_forward_pre_hook(begin),
            register_module_forward_hook(end, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _place_of(tensor: Tensor) -> _Place:
    shape = tuple(tensor.shape), tuple(tensor.stride())
    return int(tensor.storage_offset()), shape[0], shape[1], tensor.dtype, tensor.is_conj(), tensor.is_neg()
