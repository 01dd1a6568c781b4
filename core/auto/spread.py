"""A module's forward, spread over the ranks of a mesh: what `core.auto.apply` puts in its place.

A call is planned when the first of its kind comes: traced (`core.trace.record`), made a problem
(`core.auto.formulate`), solved by the first rank, whose plan all take. Then `core.auto.execute` runs it, its backward
as one function of autograd. Parameters are DTensors under their own names in the modules that have them; buffers stay
whole.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from core.auto.attention import give_to_cuda
from core.auto.costs import Link
from core.auto.exchange import convert
from core.auto.execute import Program
from core.auto.formulate import Formulation, formulate
from core.auto.readable import SpreadStep
from core.auto.solve import Plan, solve
from core.auto.specs import Spec, all_specs, from_placements, parse
from core.compat import own_part, tree_flatten, tree_map_only
from core.config import UserError
from core.layout import is_dtensor
from core.mesh import device_of, sub_mesh
from core.runtime import agreed
from core.trace.graph import Graph, Value
from core.trace.machine import Speed
from core.trace.record import named_tensors, trace_call
from core.trace.tracer import stand_ins

log = logging.getLogger("auto")
SpecText = str | Spec


@dataclass(frozen=True)
class Options:
    """Arguments of `core.auto.apply.parallelize`, read."""

    mesh: DeviceMesh
    loss: Callable[[Any], Any] | None
    budget_bytes: int | None
    links: tuple[Link, ...]
    speed: Speed
    state: float
    constraints: dict[str, dict[str, SpecText]]


# --- the call ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A kind of call, ready to run.

    learning  names of parameters and inputs that get gradients
    begins    output with which the backward begins -> name of its gradient among the graph's inputs
    others    outputs without a gradient
    reached   what learns -> the outputs, by their places in `begins`, of which it gets a gradient
    """

    graph: Graph
    program: Program
    plan: SpreadStep
    learning: tuple[str, ...]
    begins: dict[str, str]
    others: tuple[str, ...]
    reached: dict[str, frozenset[int]]


class SpreadForward:
    """See the module.

    layouts  parameter -> how it lies; steps: kind of call -> what runs it
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        self.model, self.options, self.own = model, options, model.forward
        self.mesh, self.sizes = options.mesh, tuple(options.mesh.shape)
        self.signature = inspect.signature(self.own)
        self.__signature__ = self.signature
        self.layouts: dict[str, Spec] = {}
        self.steps: dict[Any, Step] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._named(args, kwargs)
        tensors = dict(named_tensors(given))
        key = self._kind_of_call(given)
        if key not in self.steps:
            self.steps[key] = self._planned(given, tensors, key)
        return self._run(self.steps[key], tensors)

    def __deepcopy__(self, memo: Any) -> Any:
        raise UserError("a parallelized module is not copied, for its ranks are one group; copy it before it is spread")

    def begin(self, example: Mapping[str, Any] | Sequence[Any]) -> None:
        """Plan the first call, and lay out the parameters."""
        self._refuse_odd_tensors()
        args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
        given = self._named(args, kwargs)
        tensors = dict(named_tensors(given))
        key = self._kind_of_call(given)
        step = self._planned(given, tensors, key)
        self.layouts = {name: step.program.specs[name] for name in self._names_here()}
        self._lay_out()
        self.steps[self._kind_of_call(given)] = step

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | tuple[Any, ...]:
        """A call's arguments by name; by place, where the forward takes any number."""
        if not args:
            return kwargs
        found: dict[str, Any] = {}
        for name, value in self.signature.bind(*args, **kwargs).arguments.items():
            kind = self.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                found |= value
            elif kind is inspect.Parameter.VAR_POSITIONAL or kind is inspect.Parameter.POSITIONAL_ONLY:
                if kwargs:
                    raise UserError(f"{name}: arguments by place and by name in one call; name all, or none")
                return args
            else:
                found[name] = value
        return found

    def _kind_of_call(self, given: Any) -> Any:
        """All that the graph of a call depends on."""
        named = given.items() if isinstance(given, dict) else enumerate(given)
        arguments = []
        for name, value in named:
            leaves, tree = tree_flatten(value)
            arguments.append((name, str(tree), tuple(self._described(name, leaf) for leaf in leaves)))
        parameters = tuple((p.requires_grad, p.dtype) for p in self.model.parameters())
        kind = self.mesh.device_type
        casts = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        modes = tuple(module.training for module in self.model.modules())
        return tuple(arguments), parameters, modes, torch.is_grad_enabled(), casts

    def _described(self, name: Any, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype, leaf.requires_grad, self._given_spec(str(name), leaf)
        if isinstance(leaf, bool | int | float | str | torch.dtype | torch.device | type(None)):
            return type(leaf), leaf
        raise UserError(
            f"{name}: a plan's inputs are tensors, numbers and texts, and this is a {type(leaf).__name__}; leave it out"
        )

    def _given_spec(self, name: str, tensor: Tensor) -> Spec | None:
        """How a DTensor lies that is given; None of a plain tensor."""
        if not is_dtensor(tensor):
            return None
        if tensor.device_mesh != self.mesh:
            raise UserError(f"{name} is a DTensor of another mesh than the module's; redistribute it, or give it whole")
        return from_placements(tensor.placements, tensor.ndim, self.sizes).summed()

    def _run(self, step: Step, tensors: Mapping[str, Tensor]) -> Any:
        given = self._parts(step, tensors)
        if step.begins and torch.is_grad_enabled() and step.learning:
            learning = [given.pop(name) for name in step.learning]
            returned = _OfStep.apply(step, given, *learning)
            outputs = dict(zip((*step.begins, *step.others), returned, strict=True))  # pyright: ignore
        else:
            outputs, _ = step.program.forward(given)
        assert step.graph.result is not None
        by_value = {step.graph.result.values[name].index: self._whole_or_dtensor(step, name, outputs[name])
                    for name in outputs}  # fmt: skip
        return step.graph.result.filled({name: by_value[v.index] for name, v in step.graph.result.values.items()})

    def _whole_or_dtensor(self, step: Step, name: str, part: Tensor) -> Tensor:
        spec = step.program.outputs[name]
        assert step.graph.result is not None
        value = step.graph.result.values[name]
        return self._dtensor(part, spec, value.shape) if spec.axes else part

    def _dtensor(self, part: Tensor, spec: Spec, shape: Sequence[int]) -> DTensor:
        form = torch.empty(tuple(shape), device="meta")
        placements = spec.placements(self.mesh.ndim)
        return DTensor.from_local(part, self.mesh, placements, run_check=False, shape=form.shape, stride=form.stride())

    def _parts(self, step: Step, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank holds of everything that a step is given."""
        found: dict[str, Tensor] = {}
        parameters, learning = dict(self.model.named_parameters()), set(step.learning)
        for name, spec in self.layouts.items():
            parameter = self._in_place(name, parameters.get(name), spec)
            found[name] = parameter.to_local() if name in learning else own_part(parameter).detach()
        found |= dict(self.model.named_buffers())
        for name, constant in step.graph.constants.items():
            constant = constant.to(step.program.device)
            found[name] = constant.clone() if step.program.writes.is_written(name) else constant
        for name, tensor in tensors.items():
            found[name] = self._part(name, tensor, step)
        return {name: found[name] for name in step.graph.inputs if name in found}

    def _in_place(self, name: str, parameter: Tensor | None, spec: Spec) -> DTensor:
        """The parameter.  Raises UserError where it is another than the plan has it."""
        if parameter is None or not is_dtensor(parameter) or not self._lies_as(parameter, spec):
            raise UserError(f"{name} lies no longer as it is planned; load values into it, and leave it in its place")
        if parameter.is_meta:
            raise UserError(f"{name} has no values; give the module memory (to_empty), and load a checkpoint")
        return parameter

    def _lies_as(self, tensor: DTensor, spec: Spec) -> bool:
        return tensor.device_mesh == self.mesh and tensor.placements == spec.placements(self.mesh.ndim)

    def _part(self, name: str, tensor: Tensor, step: Step) -> Tensor:
        if tensor.device.type != self.mesh.device_type:
            raise UserError(
                f"{name} lies on {tensor.device}, and the mesh is of {self.mesh.device_type}; move it there"
            )
        spec = step.program.specs[name]
        if is_dtensor(tensor):
            return tensor.redistribute(placements=spec.placements(self.mesh.ndim)).to_local()
        if not spec.axes:
            return tensor
        return convert(tensor, Spec(((),) * tensor.ndim), spec, self.mesh, tensor.shape, self.options.links)

    # --- planning -----------------------------------------------------------------------------------------------------

    def _planned(self, given: Any, tensors: Mapping[str, Tensor], key: Any) -> Step:
        self._same_on_all_ranks(tensors, key)
        graph = self._traced(given)
        formulation = formulate(
            graph, self.sizes, self.options.links, self.options.speed, self._fixed(graph, tensors), self.options.state
        )
        plan = SpreadStep(graph, formulation, self._agreed_plan(formulation), self.mesh.mesh_dim_names or ())
        program = Program(graph, formulation, plan.plan.choice, self.mesh)
        called = type(self.model).__name__
        log.info("%s is planned for a call with %s: %s", called, shapes_of(tensors), plan.plan)
        assert graph.result is not None
        names: dict[int, str] = {}
        for name, value in graph.result.values.items():
            names.setdefault(value.index, name)
        gradients = [name for name in graph.inputs if name.startswith("gradient of output.")]
        begins = dict(zip((names[value.index] for value in graph.outputs), gradients, strict=False))
        others = tuple(name for name in names.values() if name not in begins)
        return Step(graph, program, plan, tuple(graph.gradients), begins, others, reached(graph, list(begins.values())))

    def _same_on_all_ranks(self, tensors: Mapping[str, Tensor], key: Any) -> None:
        """Raises UserError where ranks are given different inputs, or calls."""
        told = {"": sha256(str(key).encode()).hexdigest()}
        for name, tensor in tensors.items():
            if not is_dtensor(tensor) and not tensor.is_meta:
                plain = tensor.detach().cpu().contiguous().view(-1)
                told[name] = sha256(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"").hexdigest()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, told)
        for other in everyone:
            for name, digest in told.items():
                if other.get(name) != digest:
                    what = f"{name} has other values on other ranks" if name else "the call is another on other ranks"
                    raise UserError(f"{what}; give every rank the whole batch, or DTensors")

    def _traced(self, given: Any) -> Graph:
        kind = self.mesh.device_type
        casts = torch.is_autocast_enabled(kind)
        with (
            self._own_forward(),
            stand_ins(self.model, _without_memory),
            torch.autocast("cpu", torch.get_autocast_dtype(kind) if casts else None, enabled=casts),
        ):
            learns = torch.is_grad_enabled()
            graph = trace_call(
                self.model, tree_map_only(Tensor, _without_memory, given), self.options.loss, backward=learns
            )
        device = device_of(self.mesh)
        if device.type != "cpu":
            give_to_cuda()
            for node in graph.nodes:
                node.args, node.kwargs = _on(device, node.args), _on(device, node.kwargs)
        return graph

    @contextmanager
    def _own_forward(self) -> Iterator[None]:
        before = self.model.__dict__.get("forward")
        self.model.forward = self.own
        try:
            yield
        finally:
            if before is None:
                del self.model.__dict__["forward"]
            else:
                self.model.forward = before

    def _fixed(self, graph: Graph, tensors: Mapping[str, Tensor]) -> dict[str, Spec | Sequence[Spec]]:
        """How inputs and outputs lie, and those of which the solver says it."""
        fixed: dict[str, Spec | Sequence[Spec]] = {}
        for name, value in graph.inputs.items():
            if value.storage.kind == "parameters":
                fixed[name] = self.layouts.get(name, sayable(value, self.mesh.ndim))
            else:
                given = self._given_spec(name, tensors[name]) if name in tensors else None
                fixed[name] = whole(value) if given is None else given
        begins = {value.index for value in graph.outputs}
        for name, value in graph.named_outputs().items():
            fixed[name] = whole(value) if value.index in begins else sayable(value, self.mesh.ndim)
        for name, spec in self._constraints(graph):
            fixed[name] = spec
        values = {value.index: fixed[name] for name, value in graph.named_outputs().items()}
        for number, value in enumerate(graph.outputs):
            if f"gradient of output.{number}" in graph.inputs:
                fixed[f"gradient of output.{number}"] = values[value.index]
        return fixed

    def _constraints(self, graph: Graph) -> Iterator[tuple[str, Spec]]:
        """Raises UserError where one is of nothing that there is in the first call."""
        data = {name: value for name, value in graph.inputs.items() if value.storage.kind == "inputs"}
        outputs = {name.removeprefix("output."): value for name, value in graph.named_outputs().items()}
        found = {"input": data, "output": outputs, "node": _constrained_nodes(graph)}
        for kind, constraints in self.options.constraints.items():
            for pattern, told in constraints.items():
                names = [name for name in found[kind] if fnmatchcase(name, pattern)]
                if not names and not self.layouts:
                    some = ", ".join(list(found[kind])[:5])
                    raise UserError(f"{kind}={{{pattern!r}: …}} names nothing in the step; there are {some}, …")
                for name in names:
                    node, value = _meant(kind, name, found[kind][name])
                    if isinstance(told, Spec):
                        spec = told
                    else:
                        spec = parse(told, len(value.shape))
                    spec.check(value.shape, self.sizes)
                    if spec.partial and kind != "node":
                        raise UserError(
                            f"{kind}={{{pattern!r}: {told}}}: an {kind} cannot lie as a partial sum; cut it"
                        )
                    if kind != "node" or node in graph.inputs:
                        spec.placements(self.mesh.ndim)
                    if node not in self.layouts:
                        yield node, spec

    def _agreed_plan(self, formulation: Formulation) -> Plan:
        """The first rank's, on every rank."""
        found: Plan | str | None = None
        if dist.get_rank() == 0:
            try:
                found = solve(formulation.problem, self.options.budget_bytes)
            except UserError as error:
                found = str(error)
            except BaseException:
                agreed("the first rank failed while it solved the plan")
                raise
        found = agreed(found)
        if not isinstance(found, Plan):
            raise UserError(str(found))
        return found

    # --- parameters ---------------------------------------------------------------------------------------------------

    def _names_here(self) -> list[str]:
        """Parameters that this rank has a part of."""
        return [name for name, _ in self.model.named_parameters()]

    def _refuse_odd_tensors(self) -> None:
        for name, parameter in self.model.named_parameters():
            if is_dtensor(parameter) or hasattr(parameter, "__tensor_flatten__"):
                raise UserError(
                    f"{name} is a {type(parameter).__name__}; parallelize takes modules whose parameters are plain "
                    "tensors, before anything else spreads or quantizes them"
                )

    @torch.no_grad()
    def _lay_out(self) -> None:
        """Parameters become DTensors, buffers go to the device; values are the first rank's."""
        device, made = device_of(self.mesh), {}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for module in self.model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in made:
                        made[id(parameter)] = parameter, self._spread(parameter, self.layouts[names[id(parameter)]])
                    module._parameters[key] = made[id(parameter)][1]
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in made:
                    moved = buffer.to(device).contiguous()
                    self._take_first_ranks(moved)
                    made[id(buffer)] = buffer, moved
                if buffer is not None:
                    module._buffers[key] = made[id(buffer)][1]

    def cut_whole(self, model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Before `load_state_dict`: of tensors that are whole the rank takes its parts."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            given = state_dict.get(prefix + name)
            if not isinstance(given, Tensor) or is_dtensor(given) or not is_dtensor(parameter):
                continue
            if given.shape == parameter.shape:  # of another shape torch says what is wrong
                spec = from_placements(parameter.placements, parameter.ndim, self.sizes)
                state_dict[prefix + name] = self._dtensor(
                    self._own(given, spec).to(parameter.device), spec, given.shape
                )

    def _own(self, whole: Tensor, spec: Spec) -> Tensor:
        """A copy of this rank's part."""
        box = spec.box(whole.shape, self.sizes, self.mesh.get_coordinate() or ())
        return whole[box].clone(memory_format=torch.contiguous_format)

    def _spread(self, parameter: nn.Parameter, spec: Spec) -> nn.Parameter:
        whole = parameter.detach() if parameter.is_meta else parameter.detach().to(device_of(self.mesh))
        whole = whole.clone(memory_format=torch.contiguous_format)
        self._take_first_ranks(whole)
        spread = nn.Parameter(self._dtensor(self._own(whole, spec), spec, whole.shape), parameter.requires_grad)
        vars(spread).update(vars(parameter))
        return spread

    def _take_first_ranks(self, tensor: Tensor) -> None:
        if tensor.is_meta or not tensor.numel():
            return
        for axis in self.mesh.mesh_dim_names or ():
            group = sub_mesh(self.mesh, axis).get_group()
            dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)


class _OfStep(Function):
    """A step as a function of autograd: of the parts of what learns."""

    @staticmethod
    def forward(ctx, step, given, *learning):
        given = given | dict(zip(step.learning, learning, strict=True))
        outputs, ctx.kept = step.program.forward(given)
        ctx.step, ctx.given = step, given
        ctx.save_for_backward(*learning)  # so that a change of a parameter in between is noticed
        ctx.set_materialize_grads(False)
        # What is returned learns of this node; what is kept must not, or the two would hold each other for ever.
        ctx.returned = [(tensor, tensor._version) for tensor in outputs.values()]
        begins, others = ([outputs[name].detach() for name in names] for names in (step.begins, step.others))
        ctx.mark_non_differentiable(*others)
        return (*begins, *others)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        step, kept = ctx.step, ctx.kept
        _ = ctx.saved_tensors
        if kept is None:
            raise UserError("the backward of a parallelized module runs once for each call; call the module again")
        if any(tensor._version != version for tensor, version in ctx.returned):
            raise UserError("an output of a parallelized module was written to before its backward; write to a copy")
        ctx.kept = ctx.returned = None
        begun: dict[str, Tensor] = {}
        present = set()
        for place, (name, gradient) in enumerate(zip(step.begins.values(), gradients)):
            value = step.graph.inputs[name]
            if gradient is None:
                shape = step.program.specs[name].local_shape(value.shape, step.program.sizes, step.program.coordinate)
                gradient = torch.zeros(shape, dtype=value.dtype, device=step.program.device)
            else:
                present.add(place)
            begun[name] = gradient
        found = step.program.backward(kept, begun, ctx.given)
        ctx.given = None
        return None, None, *(found[name] if step.reached[name] & present else None for name in step.learning)


def reached(graph: Graph, gradients: Sequence[str]) -> dict[str, frozenset[int]]:
    """What learns -> the gradients of outputs, by their places, on which its own depends."""
    of: dict[int, frozenset[int]] = {graph.inputs[name].index: frozenset((n,)) for n, name in enumerate(gradients)}

    def reaching(value: Value) -> frozenset[int]:
        found = of.get(value.index, frozenset())
        return found | reaching(value.before) if value.before is not None else found

    for node in graph.nodes:
        if node.kind == "backward":
            reached = frozenset().union(*map(reaching, (*node.inputs, *node.writes)))
            for value in (*node.outputs, *node.writes):
                of[value.index] = of.get(value.index, frozenset()) | reached
    return {name: reaching(value) for name, value in graph.gradients.items()}


# --- small things -----------------------------------------------------------------------------------------------------


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


def _on(device: torch.device, tree: Any) -> Any:
    """An operator's arguments, made for another device."""
    if isinstance(tree, torch.device):
        return device
    if isinstance(tree, dict):
        return {key: _on(device, value) for key, value in tree.items()}
    return type(tree)(_on(device, value) for value in tree) if isinstance(tree, list | tuple) else tree


def whole(value: Value) -> Spec:
    return Spec(((),) * len(value.shape))


def sayable(value: Value, num_axes: int) -> tuple[Spec, ...]:
    """The specs that placements of a DTensor can say."""
    every = all_specs(len(value.shape), num_axes)
    return tuple(spec for spec in every if all(list(axes) == sorted(axes) for axes in spec.dims))


def _constrained_nodes(graph: Graph) -> dict[str, tuple[str, Value]]:
    """What a constraint of nodes may name -> node and value: operators, modules by what they make, parameters."""
    found = {name: (name, v) for name, v in graph.inputs.items() if v.storage.kind == "parameters"}
    for node in graph.nodes:
        if node.outputs:
            found[node.name] = node.name, node.outputs[0]
            path = node.module if node.kind == "forward" else ""
            while path:
                found[path] = node.name, node.outputs[0]
                path = path.rpartition(".")[0]
    return found


def _meant(kind: str, name: str, found: Any) -> tuple[str, Value]:
    if kind == "node":
        return found
    return (f"output.{name}" if kind == "output" and name != "output" else name), found


def shapes_of(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, tensor.shape)) or '()'}" for name, tensor in tensors.items())
