"""A pipeline rank's step before it runs, for those who plan by it.

The actions of the rank's schedule, one after the other, without the other ranks: what a stage would receive is a parcel
of random numbers, of the form that the stage before it has found out in the same way and said of each microbatch. So as
many microbatches are under way at once as will be, and what is seen of memory is that of the real step.

Every rank says and hears something of every microbatch, whatever happens: one whose step fails says so in the place of
a form, and so do those that depend on it. No rank waits for one that has given up, and nothing is left on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from core.compat import without_modes
from core.mesh import host_group
from core.parallel.pipeline.schedule import Action, Kind, Schedule
from core.parallel.pipeline.shapes import (
    Form,
    Parcel,
    description_of,
    empty_parcel,
    form_of,
    no_description,
    read_description,
)
from core.parallel.pipeline.stages import Carried, StageEnd, Stages, check_activation


class PlacedPipeline(Protocol):
    """A pipeline's facts (of `run.Pipeline`): which rank has which stage, and which actions in what order.

    rank   of this process among the pipeline's
    ranks  in the world, of each of these
    """

    stages: Stages
    mesh: DeviceMesh
    rank: int
    ranks: list[int]

    def schedule(self, num_microbatches: int) -> Schedule: ...


@dataclass
class _Held:
    """A forward's results that the backward of a microbatch on a stage needs; its parcel, but on the last stage."""

    output: Tensor
    carried: Carried | None


class Unforeseen(Exception):
    """An error of a rank whose step depends on another's, which failed."""


class ForeseenStep:
    """Called with the model it runs the step of this rank, and yields behind each backward.

    losses  microbatch -> function model -> its loss

    Only of schedules that do not split the backward. Raises what the model's own step raises, or Unforeseen
    where another rank's did; when it ends all ranks have heard all that was said.
    """

    def __init__(self, pipeline: PlacedPipeline, losses: Sequence[Callable[[nn.Module], Tensor]]):
        self.pipeline, self.losses = pipeline, losses
        self.stages = pipeline.stages

    def __call__(self, model: nn.Module) -> Iterator[None]:
        forms: dict[tuple[int, int], Form | None] = {}  # (stage, microbatch) -> what it hands on; None: nobody knows
        held: dict[tuple[int, int], _Held] = {}
        said: list[dist.Work] = []
        failure: Exception | None = None
        for action in self.pipeline.schedule(len(self.losses)).ranks[self.pipeline.rank]:
            key = action.stage, action.microbatch
            try:
                if action.kind is not Kind.FORWARD:
                    if failure is None:
                        self._backward(action, held.pop(key))
                        yield
                    continue
                forms[key] = None
                before = self._heard(action, forms)
                if failure is None:
                    held[key] = self._forward(model, action, before)
                    forms[key] = self._form(action, held[key])
            except Exception as error:  # told by who called, once the other ranks know
                failure = failure or error
                held.clear()
            if action.kind is Kind.FORWARD:
                said += self._say(action, forms[key])
        for work in said:
            work.wait()
        if failure is not None:
            raise failure

    def _forward(self, model: nn.Module, action: Action, before: Form | None) -> _Held:
        if action.stage > 0 and before is None:
            raise Unforeseen("the stage before this one could not be foreseen")
        received, *added = self._drawn(before) if before is not None else (None,)
        with self.stages.computing(action.stage, received, *added):
            try:
                return _Held(self.losses[action.microbatch](model), self.stages.carried)
            except StageEnd as end:
                return _Held(check_activation(end.activation), self.stages.carried)

    def _drawn(self, form: Form) -> Parcel:
        """Numbers as activations have them: what looks at values (routers) does as with any."""
        first, *added = empty_parcel(form, self.pipeline.mesh.device_type)
        return (first.normal_().requires_grad_(), *(number.zero_() for number in added))

    def _backward(self, action: Action, held: _Held) -> None:
        is_last = action.stage == self.stages.num_stages - 1
        if held.carried is not None and not is_last:
            held.carried.grad = torch.zeros((), dtype=torch.float64, device=held.output.device)
        if held.output.requires_grad:
            held.output.backward(None if is_last else torch.zeros_like(held.output))

    def _form(self, action: Action, held: _Held) -> Form:
        dtype, shape, num_tensors = form_of([held.output])
        return dtype, shape, num_tensors + (held.carried is not None)

    # --- what ranks say -----------------------------------------------------------------------------------------------

    def _say(self, action: Action, form: Form | None) -> list[dist.Work]:
        """To the rank of the next stage: what it gets of this microbatch."""
        stage = action.stage + 1
        if stage == self.stages.num_stages or self.stages.owners[stage] == self.pipeline.rank:
            return []
        with without_modes():
            words = no_description("cpu") if form is None else description_of(form, "cpu")
            peer = self.pipeline.ranks[self.stages.owners[stage]]
            work = dist.isend(words, peer, host_group(self.pipeline.mesh), tag=self._tag(action.stage, action))
            return [] if work is None else [work]

    def _heard(self, action: Action, forms: dict[tuple[int, int], Form | None]) -> Form | None:
        """The parcel that the stage before hands on of this microbatch; None on the first, and where nobody knows."""
        stage = action.stage - 1
        if stage < 0 or self.stages.owners[stage] == self.pipeline.rank:
            return forms.get((stage, action.microbatch))
        with without_modes():
            words = no_description("cpu")
            peer = self.pipeline.ranks[self.stages.owners[stage]]
            dist.recv(words, peer, host_group(self.pipeline.mesh), tag=self._tag(stage, action))
            return read_description(words)

    def _tag(self, stage: int, action: Action) -> int:
        """One for each message: two ranks that share several stages need not send and receive in one order."""
        return stage * len(self.losses) + action.microbatch
