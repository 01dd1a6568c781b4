"""What a rank of a pipeline computes in a step, for who wants to see it before it runs.

The actions of the rank's schedule, one after the other, without the other ranks: what a stage would receive is a tensor
of the shape that the stage before it has found out in the same way, and said once. So as many microbatches are under
way at once as will be, and what is seen of memory is that of the real step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from core.config import UserError
from core.parallel.pipeline.schedule import Action, Kind
from core.parallel.pipeline.shapes import MOST_DIMS, description_of, read_description
from core.parallel.pipeline.stages import StageEnd, check_activation

if TYPE_CHECKING:
    from core.parallel.pipeline.run import Pipeline

FAILED = -1
"""In the place of a format: the stage before could not be foreseen."""


class ForeseenStep:
    """Called with the model it runs the step of this rank, and yields behind each backward.

    losses  microbatch -> function model -> its loss

    Only of schedules that do not split the backward.
    """

    def __init__(self, pipeline: Pipeline, losses: Sequence[Callable[[nn.Module], Tensor]]):
        self.pipeline, self.losses = pipeline, losses
        self.stages = pipeline.stages
        self._given: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {}  # stage -> what it hands on
        self._told: set[int] = set()

    def __call__(self, model: nn.Module) -> Iterator[None]:
        held: dict[tuple[int, int], Tensor] = {}
        for action in self.pipeline.schedule(len(self.losses)).ranks[self.pipeline.rank]:
            key = action.stage, action.microbatch
            if action.kind is Kind.FORWARD:
                held[key] = self._forward(model, action)
                continue
            output = held.pop(key)
            is_last = action.stage == self.stages.num_stages - 1
            if output.requires_grad:
                output.backward(None if is_last else torch.empty_like(output))
            del output
            yield

    def _forward(self, model: nn.Module, action: Action) -> Tensor:
        try:
            received = None if action.stage == 0 else self._received(action.stage)
            with self.stages.computing(action.stage, received):
                try:
                    return self.losses[action.microbatch](model)
                except StageEnd as end:
                    output = check_activation(end.activation)
                if self.stages.carried is not None:
                    raise UserError("what blocks add to the loss is not foreseen stage by stage")
        except BaseException:
            if action.stage < self.stages.num_stages - 1:
                self._tell(action.stage, None)
            raise
        self._tell(action.stage, output)
        return output

    def _tell(self, stage: int, output: Tensor | None) -> None:
        """Once: what the next stage gets from this one; None: nobody knows."""
        if stage in self._told:
            return
        self._told.add(stage)
        with _disable_current_modes():
            told = torch.full((MOST_DIMS + 2,), FAILED) if output is None else description_of(output, "cpu")
            if output is not None:
                self._given[stage] = read_description(told)
            next_owner = self.stages.owners[stage + 1]
            if next_owner != self.pipeline.rank:
                dist.send(told.to(self.pipeline.mesh.device_type), self.pipeline.ranks[next_owner], self.pipeline.group)

    def _received(self, stage: int) -> Tensor:
        before = stage - 1
        if before not in self._given:
            with _disable_current_modes():
                told = torch.empty(MOST_DIMS + 2, dtype=torch.int64, device=self.pipeline.mesh.device_type)
                owner = self.stages.owners[before]
                dist.recv(told, self.pipeline.ranks[owner], self.pipeline.group)
                if int(told[0]) == FAILED:
                    raise UserError("the stage before this one could not be foreseen")
                self._given[before] = read_description(told)
        dtype, shape = self._given[before]
        return torch.empty(shape, dtype=dtype, device=self.pipeline.mesh.device_type).requires_grad_()
