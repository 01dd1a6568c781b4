"""The executor of pipeline schedules: one for all of them, in training and in evaluation.

`Pipeline` is a `ParallelModel` around that of data parallelism: it runs the actions that `.schedule` lists, with the
exchanges that `.messages` puts between them, on the stages that `.stages` makes of the model.

    run      for each step of this rank: compute an action on what was received, or exchange what was planned
    reduce   data parallelism's reductions; then what the copies of a shared parameter (a tied head) have gathered is
             added on the rank that owns it. Only there it has a master, and so optimizer state, a place in the norm of
             the gradients and in checkpoints
    publish  the owner's masters go to those of the copies; then data parallelism's

The shape of an activation may be another in every microbatch: the first time that tensors of some shapes come as a
microbatch, the sender says what shape follows, and from then on both sides know. Gradients have the shape of what they
belong to. A model whose blocks add to the loss by themselves (experts' routers: `Carried`) sends a second tensor with
each, of one number: what they have added up to there, and with the gradients that of the loss.

Why not the runtime of torch.distributed.pipelining (2.11 to 2.13): its stages infer one shape at the first step and
hold every microbatch to it; they take their module's outputs and a loss of them, where here head and loss are one
module and each loss is weighted by its microbatch; its split backward goes past the hooks of parameters. What it has in
common with this file is what follows from the schedules.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from core.comm.coded_rows import RowCode
from core.compat import tree_flatten, tree_leaves, tree_unflatten
from core.config import UserError
from core.parallel.data import DataParallel
from core.parallel.parallel_model import FollowsMasters, ParallelModel, Sample
from core.parallel.pipeline.backward import SplitBackward
from core.parallel.pipeline.foreseen import ForeseenStep
from core.parallel.pipeline.messages import MOST_UNFINISHED, Exchange, Meeting, Message, with_messages
from core.parallel.pipeline.schedule import Action, Kind, PipelineConfig, Schedule, schedule
from core.parallel.pipeline.shapes import (
    Form,
    Parcel,
    closed,
    description_of,
    empty_parcel,
    form_of,
    no_description,
    opened,
    read_description,
)
from core.parallel.pipeline.stages import Carried, StageEnd, Stages, check_activation
from core.parallel.squares import GradientSquares
from core.placement.table import parameter_names

Key = tuple[bool, int, int]
"""(forward?, cut between stages, microbatch) of what is passed on."""


@dataclass
class Held:
    """A forward's results that the backward of a microbatch on a stage needs.

    output  the loss, on the last stage; elsewhere the end of the graph alone: the activation itself goes when it has
            been sent (Korthikanti et al. 2022, Reducing Activation Recomputation, appendix B)
    """

    output: Tensor | GradientEdge
    entrance: Tensor | None
    carried: Carried | None = None
    exit: tuple[Tensor, Tensor] | None = None
    split: SplitBackward | None = None


class Pipeline(ParallelModel):
    """A model in stages over the pp axis; `inner` spreads the stages of this rank over the data axes.

    observe  called after each action with it and the seconds (`time.perf_counter`) at which it began and ended
    row_code  of the activations that are handed on, and of their gradients; None: they go as they are
    """

    row_code: RowCode | None = None

    def __init__(self, inner: DataParallel, stages: Stages, config: PipelineConfig):
        self.model, self.mesh, self.inner, self.stages, self.config = inner.model, inner.mesh, inner, stages, config
        self.axis = self.mesh["pp"]
        self.group = self.axis.get_group()
        self.ranks = dist.get_process_group_ranks(self.group)
        self.rank = stages.rank
        self.masters = {n: m for n, m in inner.masters.items() if stages.shared.get(n, [self.rank])[0] == self.rank}
        self.observe: Callable[[Action, float, float], None] | None = None
        self._shapes: dict[tuple[int, Any, int], Form] = {}  # by cut, microbatch's shapes, and the other rank
        self._names = names_of_stages(self.model, stages)
        stages.evaluate = self._evaluate
        stages.leave_before_the_loss()
        # NCCL wants all ranks of a group in its first message, and stages talk to their neighbours only.
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=self.mesh.device_type), group=self.group)
        self.publish()

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def frozen(self) -> dict[str, Tensor]:
        return self.inner.frozen

    @property
    def schedule_name(self) -> str:
        return self.config.schedule

    @property
    def blocks_of_stages(self) -> list[int]:
        return [len(blocks) for blocks in self.stages.ranges]

    @property
    def device_peak_bytes(self) -> int | None:
        return self.inner.device_peak_bytes

    def figures(self) -> Mapping[str, Any]:
        return self.inner.figures()

    def prepare(self, optimizer: torch.optim.Optimizer, sample: Sample | None) -> None:
        self.inner.prepare(optimizer, None if sample is None else lambda: [ForeseenStep(self, sample())])
        self.durable = self.inner.durable

    def empty_like(self, master: Tensor) -> Tensor:
        return self.inner.empty_like(master)

    def keep_average(self, average: FollowsMasters) -> None:
        self.inner.keep_average(average)

    def showing(self, average: FollowsMasters) -> AbstractContextManager[None]:
        # On a disk no stage shares a parameter, whose copies elsewhere take over the master's value.
        return super().showing(average) if self.durable is None else self.inner.showing(average)

    def close(self) -> None:
        self.inner.close()

    def squares(self) -> GradientSquares:
        """Raises UserError, on all ranks, for a parameter of several stages: each has a part of its gradient."""
        if shared := self._shared():
            raise UserError(
                f"noise_scale with mesh.pp={self.axis.size()}: stages share '{shared[0][0]}', and each has a part of a "
                "microbatch's gradient; use mesh.pp=1, or a model without a tied head (--model.no-tied-head)"
            )
        return self.inner.squares()

    def names_of(self, stage: int) -> frozenset[str]:
        """Masters that a backward of the stage has gradients for."""
        return self._names[stage]

    def schedule(self, num_microbatches: int) -> Schedule:
        return schedule(self.config.schedule, self.axis.size(), num_microbatches, self.config.chunks)

    def run(self, microbatches: Sequence[Any], loss: Callable[[Any], Tensor], scale: float = 1.0) -> Tensor:
        step = PipelineStep(self, self.schedule(len(microbatches)), microbatches, loss, scale)
        with self.inner.foreseen():
            step.run_all()
        dist.all_reduce(step.total, group=self.group)
        return step.total

    def look(self, microbatches: Sequence[Any], loss: Callable[[Any, list[Tensor]], Tensor], scale: float) -> None:
        """Forward and backward of each microbatch that leave no gradient in any parameter, for who hooks modules.

        loss  also given a list, to which it adds the tensors that gradients are to come to
        """
        _Look(self, self.schedule(len(microbatches)), microbatches, loss, scale).run_all()

    # --- without other ranks -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def first_form(self, loss: Callable[[], Tensor]) -> Form:
        """The form of what the first stage, which must be this rank's, hands on of a microbatch."""
        with self.stages.computing(0, None):
            try:
                loss()
            except StageEnd as end:
                activation = check_activation(end.activation)
                return form_of((activation, *_added(self.stages.carried, activation.device)))
        raise AssertionError("the loss of stage 0 was computed without calling the model")

    def expect(self, form: Form) -> None:
        """Take it for the form of all that comes of microbatches without tensors, so that no other rank need say it."""
        cuts = range(self.stages.num_stages - 1)
        self._shapes |= {(cut, (), self.stages.owners[side]): form for cut in cuts for side in (cut, cut + 1)}

    # --- parameters that stages share ---------------------------------------------------------------------------------

    def reduce(self) -> None:
        self.inner.reduce()
        used = self._shared_and_used()
        for name, (owner, *copies) in self._shared():
            if name not in used or self.rank not in (owner, *copies):
                continue
            master = self.inner.masters[name]
            if master.grad is None:  # other stages have used it, and this one has not
                master.grad = torch.zeros_like(master)
            self._sum_on_owner(master.grad, owner, copies)

    def _shared_and_used(self) -> set[str]:
        """Those of the shared parameters for which any stage has a gradient."""
        names = sorted(self.stages.shared)
        if not names:
            return set()
        own = [(m := self.inner.masters.get(name)) is not None and m.grad is not None for name in names]
        marks = torch.tensor(own, dtype=torch.uint8, device=self.mesh.device_type)
        dist.all_reduce(marks, dist.ReduceOp.MAX, group=self.group)
        return {name for name, mark in zip(names, marks.tolist(), strict=True) if mark}

    def _sum_on_owner(self, gradient: Tensor, owner: int, copies: list[int]) -> None:
        device = self.mesh.device_type  # gradients may lie on the host
        if self.rank != owner:
            dist.send(gradient.to(device).contiguous(), self.ranks[owner], self.group)
            return
        for copy in copies:
            other = torch.empty(gradient.shape, dtype=gradient.dtype, device=device)
            dist.recv(other, self.ranks[copy], self.group)
            gradient += other.to(gradient.device)

    @property
    def copies(self) -> dict[str, Tensor]:
        """name -> what this rank has of the parameters of several stages whose masters other ranks have."""
        return {name: copy for name, copy in self.inner.masters.items() if name not in self.masters}

    def add_on_owner(self, name: str, x: Tensor) -> None:
        """Add to the owner's x, in place, those of the ranks that have copies of this parameter, where there are any.

        Called on all of them, in the same order of names.
        """
        if name in self.stages.shared:
            owner, *copies = self.stages.shared[name]
            self._sum_on_owner(x, owner, copies)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        if self.stages.shared:  # values of copies are new only after `publish`
            optimizer.step()
        else:
            self.inner.update(optimizer)

    def release(self) -> None:
        self.inner.release()

    def publish(self) -> None:
        self._publish_shared()
        self.inner.publish()

    @torch.no_grad()
    def _publish_shared(self) -> None:
        device = self.mesh.device_type
        for name, (owner, *copies) in self._shared():
            if self.rank not in (owner, *copies):
                continue
            master = self.inner.masters[name]
            if not master.numel():
                continue
            if self.rank == owner:
                for copy in copies:
                    dist.send(master.detach().to(device).contiguous(), self.ranks[copy], self.group)
            else:
                received = torch.empty(master.shape, dtype=master.dtype, device=device)
                dist.recv(received, self.ranks[owner], self.group)
                master.copy_(received)

    def _shared(self) -> list[tuple[str, list[int]]]:
        """The shared parameters that learn, in an order that all ranks have."""
        frozen = {name for name, parameter in self.model.named_parameters() if not parameter.requires_grad}
        return sorted((name, ranks) for name, ranks in self.stages.shared.items() if name not in frozen)

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The whole model's forward, without gradients: the ranks take their stages in turn, and all get its result."""
        assert not torch.is_grad_enabled(), "a pipelined model is called by itself only without gradients"
        owners = self.stages.owners
        parcel: Parcel = ()
        result: Any = None
        for stage, owner in enumerate(owners):
            if owner != self.rank:
                continue
            if stage > 0 and owners[stage - 1] != self.rank:
                parcel = self._receive(self.ranks[owners[stage - 1]])
            with self.stages.computing(stage, *(parcel or (None,))):
                result = self.stages.compute(*args, **kwargs)
                if stage < len(owners) - 1:
                    parcel = (check_activation(result), *_added(self.stages.carried, result.device))
            if stage < len(owners) - 1 and owners[stage + 1] != self.rank:
                self._send(parcel, self.ranks[owners[stage + 1]])
        return self._broadcast(result, owners[-1])

    def _send(self, parcel: Parcel, peer: int) -> None:
        dist.send(description_of(form_of(parcel), parcel[0].device), peer, self.group)
        for tensor in closed(parcel, self.row_code):
            dist.send(tensor, peer, self.group)

    def _broadcast(self, result: Any, owner: int) -> Any:
        """The owner's result: a tensor, or tensors and plain values in containers."""
        told: list[Any] = [None]
        leaves: list[Any] = []
        if self.rank == owner:
            leaves, container = tree_flatten(result)
            told = [(container, [_form_or_value(leaf) for leaf in leaves])]
        dist.broadcast_object_list(told, self.ranks[owner], self.group)
        container, forms = told[0]
        unknown = next((form for form in forms if isinstance(form, _Unknown)), None)
        if unknown is not None:
            raise UserError(
                f"the model returns a {unknown.kind}, which the last stage cannot hand to the others; let it return "
                "tensors alone (transformers: use_cache=False)"
            )
        for place, form in enumerate(forms):
            if isinstance(form, _TensorForm):
                leaf = (
                    leaves[place].contiguous()
                    if leaves
                    else torch.empty(form.shape, dtype=form.dtype, device=self.device)
                )
                dist.broadcast(leaf, self.ranks[owner], self.group)
                forms[place] = leaf
        return tree_unflatten(forms, container)

    def _receive(self, peer: int) -> Parcel:
        description = no_description(self.mesh.device_type)
        dist.recv(description, peer, self.group)
        form = _form_in(description)
        parcel = empty_parcel(form, self.mesh.device_type, self.row_code)
        for tensor in parcel:
            dist.recv(tensor, peer, self.group)
        return opened(parcel, form, self.row_code)


@dataclass(frozen=True)
class _TensorForm:
    """A tensor of a model's result."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Unknown:
    """A value of a model's result that is not handed on."""

    kind: str


def _form_or_value(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _TensorForm(leaf.dtype, tuple(leaf.shape))
    return leaf if leaf is None or isinstance(leaf, bool | int | float | str) else _Unknown(type(leaf).__name__)


class PipelineStep:
    """One call of `Pipeline.run`: what was received and computed, and is still needed."""

    def __init__(
        self, pipeline: Pipeline, of: Schedule, microbatches: Sequence[Any], loss: Callable[[Any], Tensor], scale: float
    ):
        self.pipeline, self.stages, self.of = pipeline, pipeline.stages, of
        self.loss, self.scale = loss, scale
        self.microbatches = dict[int, Any](enumerate(microbatches))
        self.signatures = dict[int, Any](enumerate(self.signatures_of(microbatches)))
        self.total = torch.zeros((), dtype=torch.float64, device=pipeline.mesh.device_type)
        self.held: dict[tuple[int, int], Held] = {}
        self.passed: dict[Key, Parcel] = {}  # results of this rank that a stage waits for, here or elsewhere
        self.coming: dict[Key, tuple[Parcel, Form, list[dist.Work]]] = {}
        self.sent: list[tuple[list[dist.Work], Parcel]] = []
        self.last = [action for action in of.ranks[pipeline.rank] if action.releases][-1]

    @staticmethod
    def signatures_of(microbatches: Sequence[Any]) -> list[Any]:
        """The shapes of each one's tensors."""
        return [tuple(tuple(t.shape) for t in tree_leaves(m) if isinstance(t, Tensor)) for m in microbatches]

    def run_all(self) -> None:
        for what in with_messages(self.of)[self.pipeline.rank]:
            if isinstance(what, Action):
                self.compute(what)
            elif not isinstance(what, Meeting):  # of steps one by one: `reduce`
                self.exchange(what)
        self.finish()

    def compute(self, action: Action) -> None:
        self._receive(action)
        begin = time.perf_counter()
        key = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            self.held[key] = self._forward(action)
        elif action.kind is Kind.BACKWARD:
            self._backward(action, self.held.pop(key))
        elif action.kind is Kind.INPUT:
            self._input(action, self.held[key])
        else:
            with self._backward_of(action, last=self.is_last(action)):
                split = self.held.pop(key).split
                assert split is not None
                split.weights()
        if self.pipeline.observe is not None:
            if self.total.is_cuda:
                torch.cuda.synchronize()
            self.pipeline.observe(action, begin, time.perf_counter())

    def is_last(self, action: Action) -> bool:
        """Whether gradients of the step are complete on this rank when it ends."""
        return action == self.last

    def _forward(self, action: Action) -> Held:
        stage, microbatch = action.stage, action.microbatch
        received, *added = self._take((True, stage - 1, microbatch)) if stage else (None,)
        with self.stages.computing(stage, received if received is None else received.requires_grad_(), *added):
            try:
                value = self.loss(self.microbatches[microbatch])
            except StageEnd as end:
                output = check_activation(end.activation)
                self.passed[True, stage, microbatch] = (output.detach(), *_added(self.stages.carried, output.device))
                end_of_graph = get_gradient_edge(output) if output.requires_grad else output
                return Held(end_of_graph, self.stages.entrance, self.stages.carried)
            held = Held(value, self.stages.entrance, self.stages.carried, self.stages.exit)
        assert stage == self.of.num_stages - 1, f"the loss of stage {stage} was computed without calling the model"
        self.total += value.detach()
        if self.scale != 1.0:
            held.output = value * self.scale
        return held

    def _gradient(self, action: Action, held: Held) -> Tensor | None:
        """The gradient that the next stage sent of this one's output; None on the last, whose output is the loss."""
        if action.stage == self.of.num_stages - 1:
            return None
        gradient, *of_loss = self._take((False, action.stage, action.microbatch))
        if held.carried is not None:
            held.carried.grad = of_loss[0][0]
        return gradient

    def _backward(self, action: Action, held: Held) -> None:
        gradient = self._gradient(action, held)
        if isinstance(held.output, GradientEdge) or held.output.requires_grad:
            with self._backward_of(action, last=self.is_last(action)):
                torch.autograd.backward(held.output, gradient)
        if action.stage:
            assert held.entrance is not None
            found = held.entrance.grad
            self._pass_gradient(action, held, torch.zeros_like(held.entrance) if found is None else found)

    def _input(self, action: Action, held: Held) -> None:
        assert held.entrance is not None, "the first block was given no tensor"
        output, gradient = held.output, self._gradient(action, held)
        if held.exit is not None:
            assert isinstance(held.output, Tensor)
            output, gradient = self._back_to_blocks(action, held.output, *held.exit)
        held.split = SplitBackward(output, gradient, held.entrance)
        held.output, held.exit = output, None
        gradient = held.split.input()
        if held.split.computed:
            with self._backward_of(action, last=False):
                held.split.accumulate_computed()
        if action.stage:
            self._pass_gradient(action, held, gradient)

    def _backward_of(self, action: Action, last: bool) -> AbstractContextManager[None]:
        """Around the backward of a stage: gradients of its parameters come, and of no others."""
        return self.pipeline.inner.microbatch(last, self.pipeline.names_of(action.stage))

    def _back_to_blocks(self, action: Action, loss: Tensor, output: Tensor, copy: Tensor) -> tuple[Tensor, Tensor]:
        """The last block's output and its gradient, when the backward of all that lies behind it is done."""
        with self._backward_of(action, last=False):
            loss.backward()
        return output, torch.zeros_like(copy) if copy.grad is None else copy.grad

    def _pass_gradient(self, action: Action, held: Held, gradient: Tensor) -> None:
        of_loss = () if held.carried is None else (_number(held.carried.grad, gradient.device),)
        self.passed[False, action.stage - 1, action.microbatch] = (gradient, *of_loss)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _receive(self, action: Action) -> None:
        """Wait for what the action needs, where another rank sends it."""
        is_forward = action.kind is Kind.FORWARD
        key = is_forward, action.stage - is_forward, action.microbatch
        if action.kind is not Kind.WEIGHTS and key in self.coming:
            parcel, form, works = self.coming.pop(key)
            for work in works:
                work.wait()
            self.passed[key] = opened(parcel, form, self.pipeline.row_code)

    def _take(self, key: Key) -> Parcel:
        return tuple(tensor.detach() for tensor in self.passed.pop(key))

    def exchange(self, messages: Exchange) -> None:
        """Hand over all messages of a moment; only those that come are waited for, and only when they are used."""
        keys = [(m.is_forward, m.cut, m.action.microbatch) for m in messages]
        mine = [m.sender == self.pipeline.rank for m in messages]
        self._agree_on_shapes(messages)
        parcels = [
            closed(self.passed.pop(key), self.pipeline.row_code) if sends else self._empty(message)
            for key, sends, message in zip(keys, mine, messages)
        ]
        sent = [(*parcel, *self.beside(message)) for message, parcel in zip(messages, parcels)]
        each = [(message, tensor) for message, tensors in zip(messages, sent) for tensor in tensors]
        works = self._post(each)
        if len(works) != len(each):  # NCCL has one for all
            works = works * len(each)
        for key, sends, message, parcel, tensors in zip(keys, mine, messages, parcels, sent):
            own, works = works[: len(tensors)], works[len(tensors) :]
            if sends:
                self.sent.append((own, tensors))
            else:
                self.coming[key] = parcel, self._form(message), own
        self._wait_for_sends(MOST_UNFINISHED)

    def beside(self, message: Message) -> Parcel:
        """Tensors of somebody else's that travel with a message: to send, or to receive into."""
        return ()

    def _post(self, messages: list[tuple[Message, Tensor]]) -> list[dist.Work]:
        operations = []
        for message, tensor in messages:
            sends, peer = message.sender == self.pipeline.rank, self.pipeline.ranks[self._other(message)]
            operations.append(dist.P2POp(dist.isend if sends else dist.irecv, tensor, peer, self.pipeline.group))
        return dist.batch_isend_irecv(operations)

    def _other(self, message: Message) -> int:
        """The rank at the other end."""
        return message.receiver if message.sender == self.pipeline.rank else message.sender

    def _kind(self, message: Message) -> tuple[int, Any, int]:
        return message.cut, self.signatures[message.action.microbatch], self._other(message)

    def _agree_on_shapes(self, messages: Exchange) -> None:
        """Send the shapes of microbatches between two ranks, where they are new, from the sender to the receiver."""
        new: dict[tuple[int, Any, int], tuple[Message, Tensor]] = {}
        for message in messages:
            kind = self._kind(message)
            if not message.is_forward:
                continue
            known = self.pipeline._shapes.get(kind)
            if message.sender == self.pipeline.rank:
                parcel = self.passed[True, message.cut, message.action.microbatch]
                own = form_of(parcel)
                assert known in (None, own), f"alike microbatches have activations {known} and {own} behind a stage"
                description = description_of(form_of(parcel), parcel[0].device)
            else:
                description = no_description(self.total.device)
            if known is None and kind not in new:
                new[kind] = message, description
        if not new:
            return
        for work in self._post(list(new.values())):
            work.wait()
        for kind, (_, description) in new.items():
            self.pipeline._shapes[kind] = _form_in(description)

    def _empty(self, message: Message) -> Parcel:
        return empty_parcel(self._form(message), self.total.device, self.pipeline.row_code)

    def _form(self, message: Message) -> Form:
        return self.pipeline._shapes[self._kind(message)]

    def _wait_for_sends(self, most: int) -> None:
        while len(self.sent) > most:
            works, _ = self.sent.pop(0)
            for work in works:
                work.wait()

    def finish(self) -> None:
        """Everything computed, used and sent."""
        self._wait_for_sends(0)
        left = [*self.held, *self.passed, *self.coming]
        assert not left, f"a step of the pipeline has left {left} behind"


class _Look(PipelineStep):
    """A step whose backwards end at activations."""

    def __init__(
        self, pipeline: Pipeline, of: Schedule, microbatches: Sequence[Any],
        loss: Callable[[Any, list[Tensor]], Tensor], scale: float,
    ):  # fmt: skip
        self.wanted: dict[tuple[int, int], list[Tensor]] = {}
        self.of_wanted = loss
        super().__init__(pipeline, of, microbatches, lambda _: torch.empty(()), scale)

    def _forward(self, action: Action) -> Held:
        wanted = self.wanted[action.stage, action.microbatch] = []
        self.loss = partial(self._loss_of, wanted)
        return super()._forward(action)

    def _loss_of(self, wanted: list[Tensor], microbatch: Any) -> Tensor:
        return self.of_wanted(microbatch, wanted)

    def _backward(self, action: Action, held: Held) -> None:
        gradient, wanted = self._gradient(action, held), self.wanted.pop((action.stage, action.microbatch))
        if action.stage:
            assert held.entrance is not None
            wanted.append(held.entrance)
        found: Sequence[Tensor | None] = [None]
        if wanted and (isinstance(held.output, GradientEdge) or held.output.requires_grad):
            with self.pipeline.inner.looking():
                found = torch.autograd.grad(held.output, wanted, gradient, allow_unused=True)
        if action.stage:
            entrance = wanted[-1]
            self._pass_gradient(action, held, torch.zeros_like(entrance) if found[-1] is None else found[-1])


def names_of_stages(model: nn.Module, stages: Stages) -> dict[int, frozenset[str]]:
    """Parameters that a backward of each of this rank's stages has gradients for, by their first names."""
    of = {names[0]: {stages.split.stage_of(name) for name in names} for names in parameter_names(model)}
    return {stage: frozenset(n for n in of if stage in of[n]) for stage in stages.own}


def _added(carried: Carried | None, device: torch.device) -> Parcel:
    """The number that a stage hands on beside its activations: what blocks have added to the loss so far."""
    return () if carried is None else (_number(carried.value, device),)


def _number(x: Tensor | None, device: torch.device) -> Tensor:
    """One number as it travels; zero for none."""
    return torch.zeros(1, dtype=torch.float64, device=device) if x is None else x.detach().double().view(1)


def _form_in(description: Tensor) -> Form:
    form = read_description(description)
    assert form is not None, "a stage has passed on nothing"
    return form
