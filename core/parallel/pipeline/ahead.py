"""A pipeline that does not stop between steps: it begins the next one where a step's end would leave it idle.

`2bw` (Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN Training, section 3.1): microbatches of step t run,
forwards and backwards, on the weights that t - 1 updates have made, and of them comes update t + 1:

    w(t + 1) = w(t) - lr update(grad f(w(max(t - 1, 0))))       f: the loss of the whole batch of step t, t = 0, 1, …

So a step's weights are there before the step before it ends, and the actions of many steps are those of one long 1f1b.
They are cut into steps at one forward (`segment`): that of microbatch n - 1 of the next step, on each stage.

    stage 1 of 2, m = 3   F(t,2) B(t,1) F(t+1,0) B(t,2) | gradients of t whole | F(t+1,1) | update t, then step t + 1

Versions are parameters of their own (`Replicas.replace_parameters`): the graph of a forward holds those that it was
made of, a block that is computed again has them put in its place, and none is written once it has been read.

The norm of a step's gradients, and whether they are finite, is of all stages. The numbers of each stage (`Tally`) ride
back with the gradient of the step's last microbatch, added up; the first stage then knows the sums, and they ride on
with the activations of that microbatch n - 1: m >= n, so it comes before any forward that needs the update.

A step after which something else looks at the weights (a checkpoint, an evaluation, the end) begins no other. Versions
are told by number, not by time, so it learns the same as one that does; it pays 1f1b's bubble once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.layout import detached, local
from core.mesh import host_group
from core.parallel.data import DataParallel, Replicas
from core.parallel.parallel_model import Work
from core.parallel.pipeline.messages import Message, Step, with_messages
from core.parallel.pipeline.run import Key, Pipeline, PipelineStep
from core.parallel.pipeline.schedule import SCHEDULES, Action, B, F, Kind, PipelineConfig, ScheduleName, schedule
from core.parallel.pipeline.shapes import Parcel
from core.parallel.pipeline.stages import Stages
from core.placement.table import parameter_names, set_parameter

Version = dict[str, nn.Parameter]


@lru_cache
def segment(
    name: ScheduleName, num_ranks: int, number: int, begun: bool, goes_on: bool
) -> tuple[tuple[Step, ...], ...]:
    """Each rank's actions and exchanges of a step; microbatches from `number` on are those of the next step.

    begun    by the step before
    goes_on  begins the next one
    """
    steps = begun + 1 + goes_on
    ranks = with_messages(schedule(name, num_ranks, number * steps))
    first = number * begun
    found = []
    for rank, whole in enumerate(ranks):
        start = whole.index(F(first + num_ranks - 1, rank)) + 1 if begun else 0
        stop = whole.index(F(first + number + num_ranks - 1, rank)) + 1 if goes_on else len(whole)
        found.append(tuple(_earlier(step, first) for step in whole[start:stop]))
    return tuple(found)


def _earlier(step: Step, number: int) -> Step:
    """The same of microbatches that come so many before."""
    if isinstance(step, Action):
        return replace(step, microbatch=step.microbatch - number)
    return tuple(replace(m, action=replace(m.action, microbatch=m.action.microbatch - number)) for m in step)


def _key_earlier(key: Key, number: int) -> Key:
    is_forward, cut, microbatch = key
    return is_forward, cut, microbatch - number


class AheadPipeline(Pipeline):
    """A pipeline whose steps overlap, where they are run by `run_ahead`; by `run` they learn the same one by one.

    older   the parameters of the step that runs
    newest  those of the next step: what the masters' last `publish` made, and the correction of it
    """

    def __init__(self, inner: DataParallel, stages: Stages, config: PipelineConfig):
        assert isinstance(inner, Replicas), "what has no whole parameters is refused by the schedule"
        delay = SCHEDULES[config.schedule].delay
        assert all(delay(stage, stages.num_stages) == 1 for stage in stages.own), "two versions are kept"
        self.replicas = inner
        names = [names for names in parameter_names(inner.model) if names[0] in inner.masters]
        self._places = {of[0]: of for of in names}
        self.installed = self.older = self.newest = dict(inner.parameters)
        self._flight: Flight | None = None
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self._evaluated: Version | None = None
        super().__init__(inner, stages, config)
        self.older = self.newest
        self.correction = config.correct(self.masters, self.rank, stages.num_stages)

    @property
    def ahead(self) -> "AheadPipeline":
        return self

    def install(self, version: Version) -> None:
        """Let the model compute with these parameters."""
        if version is self.installed:
            return
        for name, places in self._places.items():
            for place in places:
                set_parameter(self.model, place, version[name])
        self.installed = version

    def run(self, microbatches: Sequence[Any], loss: Callable[[Any], Tensor], scale: float = 1.0) -> Tensor:
        assert self._flight is None, "a step is under way"
        self.install(self.older)
        total = super().run(microbatches, loss, scale)
        self.older = self.newest
        return total

    def run_ahead(self, work: Work, following: Work | None) -> Tensor:
        self.config.check_microbatches(len(work.microbatches), self.axis.size())
        goes_on = following is not None and len(following.microbatches) == len(work.microbatches)
        flight = self._flight or Flight(self, work)
        flight.run(following if goes_on else None)
        self._flight = flight if goes_on else None
        self.older = self.newest
        self.install(self.newest)
        sums = flight.sums()
        if not goes_on:
            dist.all_reduce(sums, group=self.group)
        return sums

    def reduce(self) -> None:
        """Complete the gradients of a step on this stage, and begin to add up those of the next one."""
        self.replicas.reduce()
        self._reduce_shared()
        self.replicas.begin_step()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        self._own_memory()
        self.correction.update(optimizer, optimizer.step)

    def release(self) -> None:
        for master in self.replicas.masters.values():
            master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        self._own_memory()
        with self.correction.looking_ahead():
            self.newest = self._version()
        self._evaluated = None

    def _version(self) -> Version:
        """New parameters of the masters' values; the model computes with them."""
        self._publish_shared()
        version = self.replicas.replace_parameters(shares=True)
        self.install(version)
        self.replicas.publish()
        return version

    def _own_memory(self) -> None:
        """Masters that a version shares its memory with go on in memory of their own."""
        memory = {local(p.detach()).untyped_storage().data_ptr() for p in self.newest.values()}
        for master in self.replicas.masters.values():
            if master.numel() and master.untyped_storage().data_ptr() in memory:
                master.data = master.data.clone()

    # --- versions in checkpoints --------------------------------------------------------------------------------------

    @property
    @torch.no_grad()
    def stashed(self) -> dict[str, Tensor]:
        if self.older is self.newest:
            newest, self.older = self.newest, self.replicas.replace_parameters(shares=False)
            self.replicas.parameters = dict(newest)
            for name, parameter in self.older.items():
                local(parameter).copy_(local(newest[name]))
        return {name: detached(parameter) for name, parameter in self.older.items()}

    # --- parameters that stages share: messages that nobody waits for before they are due ----------------------------

    def _reduce_shared(self) -> None:
        for name, (owner, *copies) in self._shared():
            if self.rank not in (owner, *copies):
                continue
            master = self.replicas.masters[name]
            if self.rank != owner:
                gradient = torch.zeros_like(master) if master.grad is None else master.grad
                used = gradient.new_full((1,), float(master.grad is not None))
                self._send_shared(torch.cat((gradient.flatten(), used)), owner)
                continue
            for copy in copies:
                received = self._receive_shared(master.new_empty(master.numel() + 1), copy)
                if received[-1].item():
                    gradient = received[:-1].view(master.shape)
                    master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def _publish_shared(self) -> None:
        for name, (owner, *copies) in self._shared():
            if self.rank == owner:
                for copy in copies:
                    self._send_shared(self.replicas.masters[name].detach(), copy)
            elif self.rank in copies:
                master = self.replicas.masters[name]
                master.copy_(self._receive_shared(torch.empty_like(master), owner))

    def _send_shared(self, tensor: Tensor, rank: int) -> None:
        """By the host's group: between the same ranks activations travel in an order of their own."""
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        own = tensor.to("cpu", copy=True).contiguous()
        self._sent = [(dist.isend(own, self.ranks[rank], group=host_group(self.mesh)), own)]

    def _receive_shared(self, tensor: Tensor, rank: int) -> Tensor:
        received = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        dist.recv(received, self.ranks[rank], group=host_group(self.mesh))
        return received.to(tensor.device)

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        assert self._flight is None, "a model is evaluated when no step is under way"
        self.install(self._masters_version() if self.correction.looks_ahead else self.newest)
        return super()._evaluate(*args, **kwargs)

    @torch.no_grad()
    def _masters_version(self) -> Version:
        """The masters' own values, where steps compute with others."""
        if self._evaluated is None:
            before = dict(self.replicas.parameters)
            self._own_memory()
            self._evaluated = self._version()
            self.replicas.parameters = before
        return self._evaluated


class Flight(PipelineStep):
    """Steps that overlap: what was received and computed of this one and the next, and is still needed."""

    def __init__(self, pipeline: AheadPipeline, work: Work):
        self.ahead, self.number = pipeline, len(work.microbatches)
        super().__init__(pipeline, pipeline.schedule(self.number), work.microbatches, work.loss, work.scale)
        self.work = work
        self.following: Work | None = None
        self.begun = False
        self.stage = pipeline.rank
        self.totals = [self.total, torch.zeros_like(self.total)]
        self.last = B(self.number - 1, self.stage)
        self.figures: Tensor | None = None  # the sums of this step's tally, as far as they have come
        self.down: Tensor | None = None  # those of the step before, which are to go on to the next stage
        self.rides: dict[Action, Tensor] = {}

    def run(self, following: Work | None) -> None:
        """Run the step, and begin `following`."""
        if self.begun:
            self._advance()
        self.following = following
        if following is not None:
            self.microbatches = [*self.work.microbatches, *following.microbatches]
            self.signatures = [*self.signatures, *self.signatures_of(following.microbatches)]
        steps = segment(self.ahead.config.schedule, self.of.num_stages, self.number, self.begun, following is not None)
        for what in steps[self.stage]:
            if isinstance(what, Action):
                self.compute(what)
            else:
                self.exchange(what)
        self.begun = following is not None
        if not self.begun:
            self.finish()

    def sums(self) -> Tensor:
        """The tally's, over this stage and those of which they have come."""
        assert self.figures is not None
        return self.figures.clone()

    def _advance(self) -> None:
        """The step that was begun is now the one that runs."""
        assert self.following is not None
        n, self.work = self.number, self.following
        self.microbatches, self.signatures = self.work.microbatches, self.signatures[n:]
        self.totals = [self.totals[1], torch.zeros_like(self.total)]
        self.held = {(stage, microbatch - n): held for (stage, microbatch), held in self.held.items()}
        self.passed = {_key_earlier(key, n): parcel for key, parcel in self.passed.items()}
        self.coming = {_key_earlier(key, n): parcel for key, parcel in self.coming.items()}
        self.down, self.figures = self.figures, None

    def compute(self, action: Action) -> None:
        is_next = action.microbatch >= self.number
        work = self.following if is_next else self.work
        assert work is not None
        self.loss, self.scale, self.total = work.loss, work.scale, self.totals[is_next]
        self.ahead.install(self.ahead.newest if is_next else self.ahead.older)
        super().compute(action)
        if action.kind is Kind.FORWARD:
            if action.microbatch % self.number == self.number - 1:
                work.tally.forwarded()
            if action.microbatch == self._last_begun and self.stage:
                self.figures = self.rides.pop(F(action.microbatch, self.stage - 1))
        elif action == self.last:
            self.ahead.reduce()
            self.figures = work.tally.of_stage(self.total)
            if (behind := self.rides.pop(B(action.microbatch, self.stage + 1), None)) is not None:
                self.figures = self.figures + behind

    @property
    def _last_begun(self) -> int:
        """The microbatch of the next step whose forward ends this one; its activations bring the sums of this step."""
        return self.number + self.of.num_stages - 1

    def beside(self, message: Message) -> Parcel:
        sends, microbatch = message.sender == self.stage, message.action.microbatch
        if message.is_forward:
            if sends and self.begun and microbatch == self._last_begun - self.number:
                assert self.down is not None
                return (self.down,)
            if sends or microbatch != self._last_begun:
                return ()
        elif microbatch != self.number - 1 or self.following is None:
            return ()
        elif sends:
            assert self.figures is not None
            return (self.figures,)
        self.rides[message.action] = torch.empty(self.work.tally.size, dtype=torch.float64, device=self.total.device)
        return (self.rides[message.action],)
