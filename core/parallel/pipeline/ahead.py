"""A pipeline that does not stop between steps: it begins the next ones where a step's end would leave it idle.

Microbatches of step t run, forwards and backwards, on weights that d updates before it have not yet reached, and of
them comes update t + 1:

    w(t + 1) = w(t) - lr update(grad f(w(max(t - d, 0))))       f: the loss of the whole batch of step t, t = 0, 1, …

    2bw             d = 1: a step has at least as many microbatches as there are stages (Narayanan et al. 2021,
                    Memory-Efficient Pipeline-Parallel DNN Training, section 3.1)
    pipedream       d = n - 1 - s on stage s of n: f is taken where each stage's weights are as late as they are
                    (Narayanan et al. 2019, PipeDream, section 3.3, weight stashing)
    pipedream_sync  d = n - 1 on all stages (PipeDream, section 3.3, vertical sync)

So a step's weights are there before the steps before it end, and the actions of many steps are those of one long 1f1b.
They are cut into steps at one forward (`segment`): that of microbatch e of a step and those that follow, with e the
first that stage 0 runs behind the step's last backward.

    stage 1 of 2, m = 3, 2bw   F(t,2) B(t,1) F(t+1,0) B(t,2) | gradients of t whole, sums are there | F(t+1,1) …

The norm of a step's gradients, and whether they are finite, is of all stages. The numbers of each stage (`Tally`) ride
back with the gradient of the step's last microbatch, added up; the first stage then knows the sums, and they ride on
with the activations of microbatch e, of r replicas with those of e to e + r - 1, one for each. That comes before any
forward that needs the update under 2bw and pipedream_sync; gradients of the steps between wait for it. Under pipedream
a stage updates when it has a step's gradients (`Work.update`), and the sums are only told. A parameter of several
stages is one there, too: everywhere as late as on the first, n - 1 updates. The copy's gradient goes to its owner with
the step's last backward there, and the value comes back before microbatch e does.

The replicas of a stage (`.replicas`) meet behind their last backwards of a step, and add up their gradients and what
they say of it: all then know what one rank would, and update alike.

A step after which something else looks at the weights (a checkpoint, an evaluation, the end) begins no other. Versions
are told by number, not by time, so it learns the same as one that does; it pays 1f1b's bubble once.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.config import UserError
from core.layout import detached, local
from core.mesh import host_group
from core.parallel.correction import CORRECTIONS
from core.parallel.data import DataParallel, Replicas
from core.parallel.parallel_model import Work
from core.parallel.pipeline.messages import Meeting, Message, Step, with_messages
from core.parallel.pipeline.replicas import StageReplicas
from core.parallel.pipeline.run import Pipeline, PipelineStep
from core.parallel.pipeline.schedule import SCHEDULES, Action, F, Kind, PipelineConfig, Schedule, ScheduleName, schedule
from core.parallel.pipeline.shapes import Parcel
from core.parallel.pipeline.stages import Stages
from core.parallel.pipeline.versions import Ring, Version
from core.placement.table import parameter_names


def _first_forward(of: Schedule, rank: int, microbatch: int) -> Action:
    """The rank's first forward from a microbatch on."""
    (stage,) = of.stages_of(rank)
    place = rank - of.owners[stage]
    return F(microbatch + (place - microbatch) % of.num_replicas(stage), stage)


@lru_cache
def segment(
    name: ScheduleName, replicas: tuple[int, ...], number: int, before: int, following: int
) -> tuple[tuple[Step, ...], ...]:
    """Each rank's actions, exchanges and meetings of a step; microbatches are counted from its first one.

    replicas   ranks of each stage
    before     steps since nothing was under way; more than there are ranks make no difference
    following  steps after it that are known; fewer than the schedule's depth: it runs all of them to their end
    """
    before = min(before, sum(replicas))
    of = schedule(name, sum(replicas), number, steps=before + 1 + following, replicas=replicas)
    first, end = number * before, of.end
    goes_on = following == SCHEDULES[name].depth(len(replicas))
    found = []
    for rank, whole in enumerate(with_messages(of)):
        start = whole.index(_first_forward(of, rank, first - number + end)) if before else 0
        stop = whole.index(_first_forward(of, rank, first + end)) if goes_on else len(whole)
        found.append(tuple(_later(step, -first) for step in whole[start:stop]))
    return tuple(found)


def _later(step: Step, number: int) -> Step:
    """The same of microbatches that come so many later."""
    if isinstance(step, Action | Meeting):
        return replace(step, microbatch=step.microbatch + number)
    return tuple(replace(m, action=replace(m.action, microbatch=m.action.microbatch + number)) for m in step)


class AheadPipeline(Pipeline):
    """A pipeline whose steps overlap, where they are run by `run_ahead`; by `run` they learn the same one by one.

    rings   versions of its parameters: of its own, and of those that it shares with other stages where these are later
    taken   those that another stage updates, and this one is told of when a step ends; None where a step's end tells of
            them with the rest
    step    steps that are over
    stage   of this rank
    alike   the ranks of this stage
    """

    def __init__(self, inner: DataParallel, stages: Stages, config: PipelineConfig):
        assert isinstance(inner, Replicas), "what has no whole parameters is refused by the schedule"
        self.replicas, self.spec, self.step = inner, SCHEDULES[config.schedule], 0
        (self.stage,) = stages.own
        self.updates_at_once, self.depth = self.spec.updates_at_once, self.spec.depth(stages.num_stages)
        self._flight: Flight | None = None
        self._waiting = deque[dict[str, Tensor | None]]()  # gradients of steps that wait for their sums
        self._sent = deque[tuple[dist.Work, Tensor]]()
        self._evaluated: list[Version] | None = None
        self._make_rings(stages)
        super().__init__(inner, stages, config)
        alike = stages.split.ranks_of(self.stage)
        self.alike = StageReplicas([self.ranks[one] for one in alike], self.rank - alike.start, self.group)
        for ring in self.rings:
            ring.start(ring.newest)
        self._require_one_delay()
        self.correction = config.correct(self.masters, self.stage, stages.num_stages)

    def _require_one_delay(self) -> None:
        """Raises UserError where a correction would be of masters of one stage that are late by other numbers."""
        apart = [name for name, (owner, *_) in self._shared() if owner] if self.updates_at_once else []
        if apart and self.config.correction != "none":
            raise UserError(
                f"pipeline.correction={self.config.correction} with pipeline.schedule={self.config.schedule}: "
                f"'{apart[0]}' is shared by stages of which none is the first, and later than what is beside it; use "
                "--pipeline.schedule pipedream_sync or 2bw, or no correction"
            )

    def _make_rings(self, stages: Stages) -> None:
        inner = self.replicas
        names = [names for names in parameter_names(inner.model) if names[0] in inner.masters]
        late, num_stages = self.spec.delay(self.stage, stages.num_stages), stages.num_stages
        holders = {of[0]: stages.shared.get(of[0], [stages.rank]) if self.updates_at_once else [] for of in names}
        kinds: dict[tuple[int, bool], dict[str, list[str]]] = {}
        for of in names:
            shared = len(holders[of[0]]) > 1
            kind = self.spec.delay(0, num_stages) if shared else late, shared and holders[of[0]][0] != stages.rank
            kinds.setdefault(kind, {})[of[0]] = of
        rings = {kind: Ring(inner.model, places, kind[0]) for kind, places in kinds.items()}
        self.rings = list(rings.values())
        self.taken = next((ring for (_, is_taken), ring in rings.items() if is_taken), None)
        for ring in self.rings:
            ring.start(inner.parameters)

    @property
    def ahead(self) -> "AheadPipeline":
        return self

    @property
    def newest(self) -> dict[str, Tensor]:
        """The parameters of evaluations: what the last updates have made."""
        return {name: parameter for ring in self.rings for name, parameter in ring.newest.items()}

    def install(self, step: int | None) -> None:
        """Let the model compute with the parameters of a step; None: with the newest."""
        for ring in self.rings:
            ring.install(step)

    def drop(self, step: int) -> None:
        """The step's last backward on this stage is over."""
        for ring in self.rings:
            ring.drop(step)

    def schedule(self, num_microbatches: int) -> Schedule:
        return schedule(
            self.config.schedule, self.axis.size(), num_microbatches, replicas=self.config.replicas_of(self.axis.size())
        )

    def run(self, microbatches: Sequence[Any], loss: Callable[[Any], Tensor], scale: float = 1.0) -> Tensor:
        assert self._flight is None, "a step is under way"
        if self.config.has_replicas:
            raise UserError(
                "pipeline.replicas with steps one by one, whose norm would count each replica; use "
                "core.train.train_step, or one rank a stage"
            )
        self._fill()
        self.install(self.step)
        total = super().run(microbatches, loss, scale)
        self.drop(self.step)
        self.step += 1
        return total

    def run_ahead(self, work: Work, following: Sequence[Work]) -> Tensor:
        number = len(work.microbatches)
        self.config.check_microbatches(number, self.axis.size())
        alike = takewhile(lambda one: len(one.microbatches) == number, following[: self.depth])
        self._fill()
        flight = self._flight or Flight(self, work)
        sums = flight.run(work, list(alike))
        self._flight = flight if flight.under_way else None
        self.step += 1
        if not self.updates_at_once:
            for name, gradient in self._waiting.popleft().items():
                self.masters[name].grad = gradient
        elif self.taken is not None:
            self._take_shared()
            self._renew([self.taken], self.step)
        self.install(None)
        return sums

    def _fill(self) -> None:
        """Updates up to here that nothing was published of were skipped."""
        for ring in self.rings:
            ring.fill(self.step)

    def reduce(self) -> None:
        """Complete the gradients of a step on this stage, and begin to add up those of the next one."""
        self.replicas.reduce()
        self.alike.add_up_gradients(self.replicas.masters, self.replicas.table)
        self._reduce_shared()
        self.replicas.begin_step()

    def put_aside(self) -> None:
        """Let a step's gradients wait for its end."""
        self._waiting.append({name: master.grad for name, master in self.masters.items()})
        self.release()

    def update_stage(self, step: int, update: Callable[[Tensor], bool], sums: Tensor) -> None:
        """A step's update of this stage alone, which has its gradients."""
        own, updates = [ring for ring in self.rings if ring is not self.taken], step + 1
        if update(sums):
            with self.correction.looking_ahead():
                self._give_shared()
                self._renew(own, updates)
        else:
            self.correction.skip()
            with self.correction.looking_ahead():
                self._give_shared()
            for ring in own:
                ring.fill(updates)
        self.release()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        self._own_memory()
        self.correction.update(optimizer, optimizer.step)

    def release(self) -> None:
        for master in self.replicas.masters.values():
            master.grad = None

    def publish(self) -> None:
        with self.correction.looking_ahead():
            self._publish_shared()
            self._renew(self.rings, self.step)

    @torch.no_grad()
    def _renew(self, rings: Iterable[Ring], updates: int) -> None:
        """Make of the masters the version that so many updates have made."""
        rings = list(rings)
        names = frozenset(name for ring in rings for name in ring.places)
        made = self.replicas.replace_parameters(shares=True, names=names)
        for ring in rings:
            ring.put(updates, made)
            ring.install(None)
        self.replicas.publish(names)
        self._evaluated = None

    def _own_memory(self) -> None:
        """Masters go on in memory of their own that share it with a version that is still needed, or hold all of it."""
        memory = {
            local(p.detach()).untyped_storage().data_ptr(): ring.needs_newest
            for ring in self.rings
            for p in ring.newest.values()
        }
        for master in self.replicas.masters.values():
            whole = master.untyped_storage()
            needed = memory.get(whole.data_ptr())
            if master.numel() and needed is not None and (needed or whole.nbytes() > master.nbytes):
                master.data = master.data.clone()

    # --- versions in checkpoints --------------------------------------------------------------------------------------

    @property
    @torch.no_grad()
    def stashed(self) -> dict[str, Tensor]:
        """age/name -> what so many updates before the last have made of a parameter."""
        assert self._flight is None, "versions are saved when no step is under way"
        self._fill()
        found = {}
        for ring in self.rings:
            seen = {id(ring.newest)}
            for age, version in ring.older(self.step).items():
                if id(version) in seen:  # no update between the two: to be loaded each needs its memory
                    version = self._copied(version)
                    ring.replace(self.step, age, version)
                seen.add(id(version))
                found |= {f"{age}/{name}": detached(parameter) for name, parameter in version.items()}
        return found

    def _copied(self, version: dict[str, Any]) -> dict[str, Any]:
        newest = dict(self.replicas.parameters)
        copy = self.replicas.replace_parameters(shares=False, names=frozenset(version))
        self.replicas.parameters = newest
        for name, parameter in version.items():
            local(copy[name]).copy_(local(parameter))
        return {name: copy[name] for name in version}

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
        self._give_shared()
        self._take_shared()

    def _give_shared(self) -> None:
        """Send the values of what this stage updates for others."""
        for name, (owner, *copies) in self._shared():
            for copy in copies if self.rank == owner else ():
                self._send_shared(self.replicas.masters[name].detach(), copy)

    @torch.no_grad()
    def _take_shared(self) -> None:
        """Receive the values of what another stage updates."""
        self._own_memory()
        for name, (owner, *copies) in self._shared():
            if self.rank in copies:
                master = self.replicas.masters[name]
                master.copy_(self._receive_shared(torch.empty_like(master), owner))

    def _send_shared(self, tensor: Tensor, rank: int) -> None:
        """By the host's group: between the same ranks activations travel in an order of their own.

        What is on its way are messages of as many steps as overlap: the other stage takes each when its step is due.
        """
        a_step = sum(
            len(copies) if owner == self.rank else self.rank in copies for _, (owner, *copies) in self._shared()
        )
        while len(self._sent) >= self.depth * a_step:
            self._sent.popleft()[0].wait()
        own = tensor.to("cpu", copy=True).contiguous()
        work = dist.isend(own, self.ranks[rank], group=host_group(self.mesh))
        assert work is not None, "this rank is in the group of all"
        self._sent.append((work, own))

    def _receive_shared(self, tensor: Tensor, rank: int) -> Tensor:
        received = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        dist.recv(received, self.ranks[rank], group=host_group(self.mesh))
        return received.to(tensor.device)

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        assert self._flight is None, "a model is evaluated when no step is under way"
        self.install(None)
        if self._computes_elsewhere:
            for ring, version in zip(self.rings, self._masters_versions(), strict=True):
                ring.show(version)
        return super()._evaluate(*args, **kwargs)

    @property
    def _computes_elsewhere(self) -> bool:
        """Whether steps compute with other values than the masters' on any stage."""
        make, stages = CORRECTIONS[self.config.correction].make, self.stages.num_stages
        return any(make.leads(self.spec.delay(stage, stages)) for stage in range(stages))

    @torch.no_grad()
    def _masters_versions(self) -> list[Version]:
        """The masters' own values, ring by ring, where steps compute with others on any stage."""
        if self._evaluated is None:
            before = dict(self.replicas.parameters)
            self._publish_shared()
            made = self.replicas.replace_parameters(shares=True, names=frozenset(before))
            self.replicas.publish()
            self.replicas.parameters = before
            self._evaluated = [{name: made[name] for name in ring.places} for ring in self.rings]
        return self._evaluated


class Flight(PipelineStep):
    """Steps that overlap, since nothing was under way: what was received and computed of them, and is still needed.

    Microbatches are numbered through, and steps counted, from the first of them.
    """

    def __init__(self, pipeline: AheadPipeline, work: Work):
        self.ahead, self.number, self.rank = pipeline, len(work.microbatches), pipeline.rank
        super().__init__(pipeline, pipeline.schedule(self.number), (), work.loss, work.scale)
        self.first = pipeline.step  # of the pipeline's steps
        self.step = self.known = 0  # steps that are over; those of which the work is known
        self.works: dict[int, Work] = {}
        self.totals: dict[int, Tensor] = {}
        self.behind: dict[int, Tensor] = {}  # a step's tally: of the stages behind,
        self.so_far: dict[int, Tensor] = {}  # of these and this one,
        self.sums: dict[int, Tensor] = {}  # and of all
        self.drained = False

    @property
    def under_way(self) -> bool:
        return self.step < self.known

    def run(self, work: Work, following: Sequence[Work]) -> Tensor:
        """Run a step to its end, and what the schedule has before that of those that follow.  Returns its sums."""
        step = self.step
        self._learn_of([work, *following])
        if not self.drained:
            self._advance(len(following))
        self.step += 1
        for known in (self.works, self.totals, self.so_far):
            known.pop(step, None)
        self.sums.pop(step - 1, None)
        for microbatch in range(step * self.number, (step + 1) * self.number):
            del self.microbatches[microbatch], self.signatures[microbatch]
        return self.sums[step].clone()

    def _learn_of(self, works: Sequence[Work]) -> None:
        for step, work in enumerate(works, self.step):
            if step < self.known:
                assert self.works[step] is work, "a step that was begun is another one now"
                continue
            assert not self.drained, "a step comes behind those that were to be the last"
            self.works[step], self.totals[step] = work, torch.zeros_like(self.total)
            numbers = range(step * self.number, (step + 1) * self.number)
            self.microbatches |= dict(zip(numbers, work.microbatches, strict=True))
            self.signatures |= dict(zip(numbers, self.signatures_of(work.microbatches), strict=True))
            self.known = step + 1

    def _advance(self, following: int) -> None:
        steps = segment(self.ahead.config.schedule, self.of.replicas, self.number, self.step, following)
        for step in steps[self.rank]:
            what = _later(step, self.step * self.number)
            if isinstance(what, Action):
                self.compute(what)
            elif isinstance(what, Meeting):
                self._complete(what.microbatch // self.number)
            else:
                self.exchange(what)
        if following == self.ahead.depth:
            self._receive(_first_forward(self.of, self.rank, self.step * self.number + self.of.end))
            return
        self.drained = True
        self.finish()
        # In the order in which they ride otherwise, so that a pause changes no digit.
        rest = torch.stack([self.so_far[step] for step in range(self.step, self.known)])
        dist.broadcast(rest, self.ahead.ranks[0], group=self.ahead.group)
        self.sums |= dict(zip(range(self.step, self.known), rest.unbind(), strict=True))

    def compute(self, action: Action) -> None:
        step = action.microbatch // self.number
        work = self.works[step]
        self.loss, self.scale, self.total = work.loss, work.scale, self.totals[step]
        self.ahead.install(self.first + step)
        super().compute(action)
        if action.kind is Kind.FORWARD and self.is_last(action):
            work.tally.forwarded()

    def is_last(self, action: Action) -> bool:
        return action.microbatch % self.number >= self.number - self.ahead.alike.number

    def _complete(self, step: int) -> None:
        """The step's last backward on this stage is over, on all of its replicas."""
        work, alike = self.works[step], self.ahead.alike
        self.ahead.drop(self.first + step)
        self.ahead.reduce()
        own = work.tally.of_stage(self.totals[step], alike.number)
        alike.add_up(own)
        self.so_far[step] = own
        if self.ahead.stage < self.of.num_stages - 1:
            # Of the stages behind, which have told the replica that has the step's last microbatch.
            behind = self.behind.pop(step, None)
            behind = torch.zeros_like(own) if behind is None else behind
            alike.add_up(behind)
            self.so_far[step] = own + behind
        if self.ahead.stage == 0:
            self.sums[step] = self.so_far[step]
        if self.ahead.updates_at_once:
            assert work.update is not None, "a stage updates at once, and the work does not say how"
            self.ahead.update_stage(self.first + step, work.update, own)
        else:
            self.ahead.put_aside()

    def beside(self, message: Message) -> Parcel:
        sends, microbatch = message.sender == self.rank, message.action.microbatch
        if message.is_forward:
            step, place = divmod(microbatch - self.of.end, self.number)
            rides, sent, rode = self.sums, self.sums, self.of.num_replicas(message.action.stage + 1)
        else:
            step, place = divmod(microbatch + 1 - self.number, self.number)
            rides, sent, rode = self.behind, self.so_far, 1
        if step < 0 or place >= rode:
            return ()
        if not sends:
            size = self.works[self.step].tally.size
            rides[step] = torch.empty(size, dtype=torch.float64, device=self.total.device)
        return ((sent if sends else rides)[step],)
