"""A module's forward in stages: each stage's ranks hold and run its part, and hand on tensors at its borders.

1. Before a call the owners of weights that several stages read send them to the others.
2. The microbatches pass through one after another. A stage receives what it reads, runs its part of the graph
   (`core.auto.stages`) under its own plan of layouts, and sends what others read. Tensors at borders are whole.
3. Outputs go from the stage that makes them to all ranks, so that the caller's loss is the same everywhere, and so is
   its gradient, with which each rank's backward begins.
4. The backward runs the same in reverse, the last microbatch and the last stage first. Gradients of parameters add up
   over microbatches; each rank gets those of the parameters that it has.

That is GPipe's schedule (Huang et al. 2019): all forwards, then all backwards. Every stage keeps what the backward of
every microbatch reads.

A rank's `parameters()` and `state_dict()` are of its stage alone, under the original names; loading takes what is the
stage's out of a whole one. `clip_grad_norm_` here is of all stages; torch's clips each stage by its own norm.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from core.auto.exchange import convert
from core.auto.execute import Parts, Program, draws
from core.auto.formulate import Formulation, formulate
from core.auto.readable import SpreadStep
from core.auto.solve import Plan, solve
from core.auto.specs import Spec
from core.auto.spread import Options, SpreadForward, Step, log, reached, sayable, shapes_of, whole
from core.auto.stages import Cut, Dealt, Message, Phase, cut_graph, deal
from core.compat import tree_map_only
from core.config import UserError
from core.layout import full_tensor, is_dtensor
from core.mesh import device_of, sub_mesh
from core.trace.graph import Graph, Node, Value

STAGE = "stage"
"""The axis of a mesh on which stages follow each other."""


@dataclass(frozen=True)
class StagedStep(Step):
    """A kind of call, ready to run: what is said of this rank's stage, but for the outputs, which are all stages'.

    graph  of one microbatch, with all stages
    rows   of a microbatch; 0: the batch is not cut
    """

    cut: Cut
    rows: int


class StagedForward(SpreadForward):
    """See the module.  options: of a stage's mesh; mesh: the whole one, its first axis the stages'"""

    def __init__(
        self, model: nn.Module, options: Options, mesh: DeviceMesh, stages: int | Sequence[int], microbatches: int
    ) -> None:
        super().__init__(model, options)
        self.all_ranks, self.asked, self.microbatches = mesh, stages, microbatches
        line = sub_mesh(mesh, STAGE)
        self.count, self.stage, self.line = line.size(), line.get_local_rank(), line.get_group()
        self.dealt: Dealt | None = None
        self.owners: dict[str, int] | None = None
        self.learns: dict[str, bool] = {}
        self.absent: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        """Parameters of other stages: where they were, and without memory."""
        self.elsewhere: set[str] = set()
        """All their names."""

    # --- the call -----------------------------------------------------------------------------------------------------

    def begin(self, example: Mapping[str, Any] | Sequence[Any]) -> None:
        self.learns = {name: parameter.requires_grad for name, parameter in self.model.named_parameters()}
        super().begin(example)

    def _kind_of_call(self, given: Any) -> Any:
        """Alike on all stages, which have other parameters each."""
        arguments, _, *modes = super()._kind_of_call(given)
        return (arguments, (), *modes)

    def _given_spec(self, name: str, tensor: Tensor) -> Spec | None:
        if is_dtensor(tensor):
            raise UserError(f"{name} is a DTensor, and stages take whole tensors; give the whole batch on every rank")
        if tensor.requires_grad:
            raise UserError(f"{name} wants a gradient, which stages do not send back; detach it")
        return None

    def _run(self, step: StagedStep, tensors: Mapping[str, Tensor]) -> Any:
        for name in self.layouts:
            if self.model.get_parameter(name).requires_grad != self.learns[name]:
                raise UserError(
                    f"requires_grad of {name} was changed after the module was cut into stages; freeze before that"
                )
        run = _Run(self, step, self._parts(step, tensors), tensors)
        if step.begins and torch.is_grad_enabled():
            learning = [run.given.pop(name) for name in step.learning]
            returned = _OfStages.apply(run, torch.zeros((), requires_grad=True), *learning)
            outputs = dict(zip((*step.begins, *step.others), returned, strict=True))  # pyright: ignore
        else:
            outputs = run.forward({})
        assert step.graph.result is not None
        by_value = {step.graph.result.values[name].index: tensor for name, tensor in outputs.items()}
        return step.graph.result.filled({name: by_value[v.index] for name, v in step.graph.result.values.items()})

    def _parts(self, step: StagedStep, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank holds of everything but the batch."""
        found: dict[str, Tensor] = {}
        parameters, learning = dict(self.model.named_parameters()), set(step.learning)
        for name, spec in self.layouts.items():
            parameter = self._in_place(name, parameters.get(name), spec)
            found[name] = parameter.to_local() if name in learning else parameter.to_local().detach()
        found |= dict(self.model.named_buffers())
        for name, constant in step.program.graph.constants.items():
            constant = constant.to(step.program.device)
            found[name] = constant.clone() if step.program.writes.is_written(name) else constant
        for name, tensor in tensors.items():
            if tensor.device.type != self.mesh.device_type:
                raise UserError(
                    f"{name} lies on {tensor.device}, and the mesh is of {self.mesh.device_type}; move it there"
                )
        return {name: tensor for name, tensor in found.items() if name in step.program.graph.inputs}

    # --- planning -----------------------------------------------------------------------------------------------------

    def _planned(self, given: Any, tensors: Mapping[str, Tensor], key: Any) -> StagedStep:
        self._same_on_all_ranks(tensors, key)
        rows = self._rows(tensors)
        graph = self._traced(tree_map_only(Tensor, lambda tensor: _rows_of(tensor, 0, rows, self.microbatches), given))
        self._check(graph, rows)
        self.dealt = self.dealt or deal(graph, self.asked)
        cut = cut_graph(graph, self.dealt.stages(graph), self.count, self.owners)
        self.owners = cut.owners
        own = cut.parts[self.stage]
        twice = [name for name, times in Counter(n for part in cut.parts for n in part.written).items() if times > 1]
        if twice:
            raise UserError(
                f"the buffer {twice[0]} is written to by several stages; put the border of stages elsewhere"
            )

        def made() -> Formulation:
            fixed = self._fixed_here(own.graph, own.owns)
            return formulate(own.graph, self.sizes, self.options.links, self.options.speed, fixed, self.options.state)

        formulation = _on_all(made)
        leads = not any(self.mesh.get_coordinate() or ())
        solved = _on_all(lambda: solve(formulation.problem, self.options.budget_bytes) if leads else None)
        told: list[tuple[int, Plan | None]] = [(0, None)] * dist.get_world_size()
        dist.all_gather_object(told, (self.stage, solved))
        plan = next(plan for stage, plan in told if plan is not None and stage == self.stage)
        program = _on_all(lambda: Program(own.graph, formulation, plan.choice, self.mesh))
        readable = SpreadStep(own.graph, formulation, plan, self.mesh.mesh_dim_names or ())
        log.info("stage %d of %s, %s: %s", self.stage, type(self.model).__name__, shapes_of(tensors), plan)
        assert graph.result is not None
        names: dict[int, str] = {}
        for name, value in graph.result.values.items():
            names.setdefault(value.index, name)
        gradients = [name for name in graph.inputs if name.startswith("gradient of output.")]
        begins = dict(zip((names[value.index] for value in graph.outputs), gradients, strict=False))
        others = tuple(name for name in names.values() if name not in begins)
        learning = tuple(own.graph.gradients)
        of = reached(graph, list(begins.values()))
        return StagedStep(graph, program, readable, learning, begins, others, of, cut, rows)

    def _rows(self, tensors: Mapping[str, Tensor]) -> int:
        """Rows of a microbatch: all tensors that have as many rows as the first one are the batch."""
        if self.microbatches == 1:
            return 0
        batch = next((tensor.shape[0] for tensor in tensors.values() if tensor.ndim), 0)
        if not batch or batch % self.microbatches:
            raise UserError(
                f"microbatches={self.microbatches} of a batch of {batch} rows; give a divisor, so that all are alike"
            )
        return batch // self.microbatches

    def _check(self, graph: Graph, rows: int) -> None:
        """Raises UserError for what stages, or microbatches, would compute otherwise than one rank does."""
        for node in graph.nodes:
            where = f"{node.op} in {node.module or 'the module'}"
            if draws(node):
                raise UserError(
                    f"{where} draws random numbers, which stages do not draw as one rank would; set dropout to 0, or "
                    "leave stages out"
                )
            if rows and _has_statistics_of_rows(node, rows):
                raise UserError(
                    f"{where} has its statistics of a batch, and of each microbatch they are others; give "
                    "microbatches=1, or evaluate it"
                )
        for name, value in graph.named_outputs().items() if rows else ():
            if value.node is not None and value.shape[:1] != (rows,):
                raise UserError(
                    f"{name} is {_told(value)}, not rows of the batch, and of microbatches={self.microbatches} there "
                    "would be several; leave labels out and compute the loss of what is returned, or give "
                    "microbatches=1"
                )

    def _fixed_here(self, graph: Graph, owns: frozenset[str]) -> dict[str, Spec | Sequence[Spec]]:
        """Parameters lie as they do or may; all else comes and leaves whole."""
        fixed: dict[str, Spec | Sequence[Spec]] = {}
        for name, value in graph.inputs.items():
            fixed[name] = self.layouts.get(name, sayable(value, self.mesh.ndim)) if name in owns else whole(value)
        return fixed | {name: whole(value) for name, value in graph.named_outputs().items()}

    @contextmanager
    def _own_forward(self) -> Iterator[None]:
        """With parameters of other stages, without memory, as a trace needs them."""
        for owned, key, parameter in self.absent:
            owned[key] = parameter
        try:
            with super()._own_forward():
                yield
        finally:
            for owned, key, _ in self.absent:
                owned[key] = None

    # --- parameters ---------------------------------------------------------------------------------------------------

    def _names_here(self) -> list[str]:
        assert self.owners is not None
        return [name for name, stage in self.owners.items() if stage == self.stage]

    @torch.no_grad()
    def _lay_out(self) -> None:
        """Values are the first rank's; parameters of other stages go, and this stage's become DTensors of its ranks."""
        device = device_of(self.all_ranks)
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if not tensor.is_meta and tensor.numel():
                moved = tensor.detach().to(device).contiguous()
                for axis in self.all_ranks.mesh_dim_names or ():
                    group = sub_mesh(self.all_ranks, axis).get_group()
                    dist.broadcast(moved, src=dist.get_global_rank(group, 0), group=group)
                tensor.copy_(moved)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        empty = {
            id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            for parameter in self.model.parameters()
            if names[id(parameter)] not in self.layouts
        }
        for path, module in self.model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in empty:
                    self.absent.append((module._parameters, key, empty[id(parameter)]))
                    self.elsewhere.add(f"{path}.{key}" if path else key)
                    module._parameters[key] = None
        super()._lay_out()

    def _take_first_ranks(self, tensor: Tensor) -> None:
        """They are alike already."""

    def cut_whole(self, model: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Before `load_state_dict`: a rank takes its parts, and leaves what other stages have."""
        for name in self.elsewhere:
            state_dict.pop(prefix + name, None)
        super().cut_whole(model, state_dict, prefix, *rest)


class _Run:
    """A call: its microbatches, what their backwards need, and the messages.  given: all but the batch"""

    def __init__(
        self, of: StagedForward, step: StagedStep, given: dict[str, Tensor], tensors: Mapping[str, Tensor]
    ) -> None:
        self.of, self.step, self.given, self.tensors = of, step, given, tensors
        self.kept: list[Parts] = []
        self.were_given: list[dict[str, Tensor]] = []
        self.made: list[dict[str, Tensor]] = []
        self.sending: list[tuple[Any, Tensor]] = []

    def forward(self, learning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs of the whole, by name."""
        step, given = self.step, self.given | dict(learning)
        self._send("parameters", self._whole_parameters(given))
        given |= self._received("parameters")
        for number in range(self.of.microbatches):
            here = given | self._batch(number) | self._received("forward")
            made, kept = step.program.forward(here)
            self._send("forward", made)
            self.made.append(made)
            self.kept.append(kept)
            self.were_given.append(here)
        self._wait()
        outputs = {name: self._everywhere(name) for name in (*step.begins, *step.others)}
        buffers = dict(self.of.model.named_buffers())
        for stage, part in enumerate(step.cut.parts):
            for name in sorted(part.written):
                self._broadcast(buffers[name], stage)
        behind = {message.name for message in step.cut.of("backward")}
        self.made = [{name: tensor for name, tensor in made.items() if name in behind} for made in self.made]
        return outputs

    def backward(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of the stage's parameters, of those of whole outputs."""
        step, found = self.step, {}
        for number in reversed(range(self.of.microbatches)):
            begun = {
                step.begins[name]: _rows_of(gradient, number, step.rows, self.of.microbatches)
                for name, gradient in gradients.items()
                if step.begins[name] in step.program.graph.inputs
            }
            begun |= self._received("backward")
            made = step.program.backward(self.kept.pop(), begun, self.were_given.pop())
            self._send("backward", self.made.pop() | made)
            for name in step.learning:
                found[name] = made[name] if name not in found else found[name] + made[name]
        self._wait()
        return found

    def _batch(self, number: int) -> dict[str, Tensor]:
        inputs = self.step.program.graph.inputs
        parts = {n: t for n, t in self.tensors.items() if n in inputs}
        return {name: _rows_of(t, number, self.step.rows, self.of.microbatches) for name, t in parts.items()}

    def _whole_parameters(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that other stages read, too."""
        found = {}
        for message in self.step.cut.of("parameters"):
            if message.source == self.of.stage:
                local, spec = given[message.name].detach(), self.of.layouts[message.name]
                shape = message.value.shape
                found[message.name] = convert(
                    local, spec, whole(message.value), self.of.mesh, shape, self.of.options.links
                )
        return found

    # Messages: as bytes, so that any format travels.

    def _send(self, phase: Phase, tensors: Mapping[str, Tensor]) -> None:
        for message in self.step.cut.of(phase):
            if message.source == self.of.stage and tensors[message.name].numel():
                sent = _as_bytes(tensors[message.name].contiguous())
                to = dist.get_global_rank(self.of.line, message.target)
                self.sending.append((dist.isend(sent, to, group=self.of.line), sent))

    def _received(self, phase: Phase) -> dict[str, Tensor]:
        return {
            message.name: self._receive(message)
            for message in self.step.cut.of(phase)
            if message.target == self.of.stage
        }

    def _receive(self, message: Message) -> Tensor:
        tensor = self._empty(message.value.shape, message.value.dtype)
        if tensor.numel():
            dist.recv(_as_bytes(tensor), dist.get_global_rank(self.of.line, message.source), group=self.of.line)
        return tensor

    def _wait(self) -> None:
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()

    def _everywhere(self, name: str) -> Tensor:
        """An output of all microbatches, on every rank."""
        assert self.step.graph.result is not None
        value, maker = self.step.graph.result.values[name], self.step.cut.makers[name]
        if value.name in self.tensors and value.node is None:
            return self.tensors[value.name]
        rows, count = self.step.rows, self.of.microbatches if self.step.rows and value.node is not None else 1
        if maker == self.of.stage:
            parts = [made[name] for made in self.made[:count]]
            tensor = torch.cat(parts) if count > 1 else parts[0].contiguous()
        else:
            tensor = self._empty((count * rows, *value.shape[1:]) if count > 1 else value.shape, value.dtype)
        self._broadcast(tensor, maker)
        return tensor

    def _broadcast(self, tensor: Tensor, stage: int) -> None:
        if tensor.numel():
            dist.broadcast(_as_bytes(tensor), dist.get_global_rank(self.of.line, stage), group=self.of.line)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.step.program.device)


class _OfStages(Function):
    """A call as a function of autograd: of the parts of what learns here, and of a number that has every rank's
    backward run, whatever its own stage learns."""

    @staticmethod
    def forward(ctx, run, _number, *learning):
        step = run.step
        outputs = run.forward(dict(zip(step.learning, learning, strict=True)))
        ctx.run = run
        ctx.save_for_backward(*learning)  # so that a change of a parameter in between is noticed
        ctx.set_materialize_grads(False)
        begins, others = ([outputs[name].detach() for name in names] for names in (step.begins, step.others))
        ctx.shapes = [tensor.shape for tensor in begins]
        ctx.mark_non_differentiable(*others)
        return (*begins, *others)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        run = ctx.run
        _ = ctx.saved_tensors
        if run is None:
            raise UserError("the backward of a parallelized module runs once for each call; call the module again")
        step, ctx.run = run.step, None
        begun, present = {}, set()
        for place, (name, gradient) in enumerate(zip(step.begins, gradients)):
            if gradient is None:
                dtype = step.graph.inputs[step.begins[name]].dtype
                gradient = torch.zeros(ctx.shapes[place], dtype=dtype, device=step.program.device)
            else:
                present.add(place)
            begun[name] = gradient.contiguous()
        found = run.backward(begun)
        return None, None, *(found[name] if step.reached[name] & present else None for name in step.learning)


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients of a parallelized module down to a norm, of all ranks and stages together.  Returns the norm
    that they had, the same on every rank; a collective of all ranks.  Raises UserError for parameters alone."""
    if not isinstance(model, nn.Module):
        raise UserError(
            "core.auto.clip_grad_norm_ takes the module, since other stages have a part of its norm; give model, not "
            "model.parameters()"
        )
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = full_tensor(norm) if is_dtensor(norm) else norm
    if isinstance(model.forward, StagedForward):
        squared = norm.square()
        dist.all_reduce(squared, group=model.forward.line)
        norm = squared.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


_Made = TypeVar("_Made")


def _on_all(make: Callable[[], _Made]) -> _Made:
    """What this rank makes, once all have made theirs.  Raises UserError with what any of them said."""
    made, failure = None, None
    try:
        made = make()
    except Exception as error:
        failure = error
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, None if failure is None else str(failure))
    if failure is not None:
        raise failure
    if (other := next((one for one in said if one is not None), None)) is not None:
        raise UserError(other)
    return made  # pyright: ignore[reportReturnType]


def _rows_of(tensor: Tensor, number: int, rows: int, microbatches: int) -> Tensor:
    """A microbatch of what is cut by rows; all else as it is."""
    if rows and tensor.ndim and tensor.shape[0] == rows * microbatches:
        return tensor.narrow(0, number * rows, rows)
    return tensor


def _has_statistics_of_rows(node: Node, rows: int) -> bool:
    """Whether an operator is a batch norm in training. As an instance norm calls it, rows are among its channels."""
    if node.kind != "forward" or "batch_norm" not in node.op._schema.name:
        return False
    names = [argument.name for argument in node.op._schema.arguments]
    given = dict(zip(names, node.args)) | node.kwargs
    return bool(given.get("training", True)) and (rows == 1 or node.inputs[0].shape[0] != 1)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _told(value: Value) -> str:
    return f"of shape {'x'.join(map(str, value.shape))}" if value.shape else "a number"
