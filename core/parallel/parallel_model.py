"""The training loop's interface to a model that is spread over the mesh, however that was done.

A step is

    1. `run`: forward and backward of every microbatch; gradients accumulate
    2. `reduce`: every master's `.grad` is complete, the sum over all ranks that contribute to it; None, on all ranks
       that hold a part of it, where it took part on none, so that no optimizer moves it or lets it decay
    3. `update`: the optimizer updates the masters (local tensors, each tagged with its layout); `release` drops the
       gradients
    4. `publish`: the masters' values enter the parameters that the next forward uses
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from core.config import UserError
from core.layout import detached
from core.mesh import device_of
from core.parallel.coded_shards import CodedShards
from core.parallel.correction import Correction
from core.parallel.draws import Draws
from core.parallel.feedback import Feedback, Unsent
from core.parallel.regroup import Read
from core.parallel.squares import GradientSquares
from core.placement.table import Table

Sample = Callable[[], Sequence[Callable[[nn.Module], Any]]]
"""Draws the microbatches of a step: of each the function model -> its loss; or one function for all, which runs their
forwards and backwards itself, and yields behind each backward."""


class Tally(Protocol):
    """Numbers of a step, fp64[size], that are added up over all ranks."""

    size: int

    def forwarded(self) -> None:
        """Told when this stage's last forward of the step is over."""
        ...

    def of_stage(self, loss: Tensor, replicas: int) -> Tensor:
        """The sums over the ranks of this stage, when its gradients are complete.

        loss      the sum of the microbatches' losses; zero but on the last stage
        replicas  of the stage, each of which has some of its microbatches, and all of its gradients: the sums are this
                  one's, and are added up over all of them
        """
        ...


@dataclass(frozen=True, eq=False)
class Work:
    """A step's microbatches and their loss: the arguments of `ParallelModel.run`.

    update  of a model whose stages update at once: the update of this stage alone, whose gradients are complete; it is
            given the stage's sums of the tally, and says whether it was made or the step was skipped
    """

    microbatches: Sequence[Any]
    loss: Callable[[Any], Tensor]
    scale: float
    tally: Tally
    update: Callable[[Tensor], bool] | None = None


class RunsAhead(Protocol):
    """A model some of whose next steps run before a step ends.

    depth            the most steps after it of which something has run or come when a step ends
    updates_at_once  a step's update is `Work.update`, on each stage at another time, and not the loop's
    """

    depth: int
    updates_at_once: bool

    def run_ahead(self, work: Work, following: Sequence[Work]) -> Tensor:
        """`run` and `reduce` of a step, and the beginning of those that follow.  Returns the sums of the step's tally.

        work       the first of those that were given to follow the last call's, if there were any
        following  the steps after it, in order; those that were given before are given again. Where there are fewer
                   than `depth`, no other will be begun before all of them are over
        """
        ...


class Told(NamedTuple):
    """What a worker learns from its push.

    stop_at    steps after which all workers stop
    staleness  the slowest worker's steps that are not in the values that the next step begins with
    tokens     of all workers' pushes that were applied since this one's last
    wait_s     seconds that the push and the wait for these values took
    """

    stop_at: int
    staleness: int
    tokens: int
    wait_s: float


class RunsAsynchronously(Protocol):
    """A model whose ranks do not wait for one another: `push` takes the place of `reduce` and `update`, and `publish`
    is where they meet (`core.parallel.asynchronous.Workers`)."""

    def running(
        self, optimizer: torch.optim.Optimizer, step: int, most_norm: float | None
    ) -> AbstractContextManager[None]: ...

    def clip(self) -> float: ...

    def push(self, step: int, weight: float, tokens: int, rates: Sequence[float], stop: bool) -> Told: ...


class Ended(NamedTuple):
    """What `TrainsLocally.end_step` has come to: figures for the step's row, and whether all workers stop after it."""

    figures: dict[str, float]
    stopping: bool


class TrainsLocally(Protocol):
    """Workers that take steps by themselves, each with a mesh of its own, and average the way that they have come
    (`core.parallel.local.LocalTraining`)."""

    def begin_step(self, weight: Tensor) -> None: ...

    def share_gradients(self, step: int) -> None: ...

    def end_step(self, step: int, loss: float, stop: bool, is_last: bool) -> Ended: ...

    def outer_weights(self) -> AbstractContextManager[None]: ...

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]: ...

    def reads(self, saved: Mapping[str, int], tensors: Mapping[str, Tensor]) -> Iterator[Read]: ...

    def restored(self) -> None: ...

    @property
    def form(self) -> Mapping[str, int]: ...

    @property
    def tensors(self) -> list[Tensor]: ...


class KeepsSteps(Protocol):
    """A model whose steps can be made durable one by one (`core.gemini.durable.DurableSteps`).

    folder  where
    every   steps from one that is made durable to the next
    """

    folder: Path
    every: int

    def latest(self) -> tuple[int, str] | None:
        """The last step that is durable on all ranks, and the run that it is of."""
        ...

    def of_other_ranks(self) -> tuple[int, str, int] | None:
        """The last step that some rank has of another number of ranks, its run, and that number."""
        ...

    def commit(self, step: int, run: str, values: Mapping[str, Any], blob: bytes) -> None:
        """Begin to make masters and optimizer state of a step durable, and with them values (JSON-able) and a blob.

        They are so before the next step's updates begin.
        """
        ...

    def confirm(self) -> None:
        """Return when they are, and may be looked at by name."""
        ...

    def restore(self, step: int) -> tuple[dict[str, Any], bytes]:
        """Take over a durable step.  Returns its values and blob."""
        ...

    def loading(self) -> AbstractContextManager[None]:
        """Surround whatever writes masters or state beside the optimizer."""
        ...


class FollowsMasters(Protocol):
    """An average of the masters (`core.optim.average.WeightAverage`)."""

    tensors: dict[str, Tensor]
    in_parts: bool

    def take_in(self, names: Iterable[str]) -> None: ...

    def exchange(self, names: Iterable[str]) -> None: ...

    def in_place(self, publish: Callable[[], None]) -> AbstractContextManager[None]: ...


class ParallelModel(ABC):
    """A model and its masters on this rank.

    model    the module to call; called without gradients it is the whole model on every rank
    masters  name -> the local tensor that the optimizer updates: a leaf, tagged with its layout. Every parameter has
             one, on each rank that holds a part of it
    table    where its parameters and masters lie, and those of other ranks
    draws    knows which rows of which step a forward computes, so that dropout is that of one rank
    correction  of what is learned with old weights, under a pipeline that has them
    compression of the messages of its gradients
    coded    how shards are sent, where it is not as they are
    mesh     of those ranks that take a step together
    local    what workers average, where each takes steps by itself
    durable  keeps steps on a disk, where there is one
    updates_as_final  set by who trains, before `prepare`: nothing stands between a gradient and its update, so that one
             may begin before the step's end; the optimizer then has the step's rates before `run`
    """

    model: nn.Module
    mesh: DeviceMesh
    masters: dict[str, Tensor]
    table: Table
    draws: Draws = Draws()
    correction: Correction = Correction({})
    compression: Feedback | None = None
    coded: CodedShards | None = None
    local: TrainsLocally | None = None
    durable: KeepsSteps | None = None
    updates_as_final: bool = False
    all_workers: DeviceMesh | None = None

    @property
    def unsent(self) -> Unsent | None:
        """What of gradients has not been sent, where messages leave something out that goes along later."""
        if self.compression is not None:
            return self.compression
        return None if self.coded is None else self.coded.unsent

    @property
    def whole_mesh(self) -> DeviceMesh:
        """The mesh of all ranks, also of other workers."""
        return self.mesh if self.all_workers is None else self.all_workers

    @property
    def ahead(self) -> "RunsAhead | None":
        """This, where a step begins before the one before it ends: then `run_ahead` takes the place of `run`."""
        return None

    @property
    def asynchronous(self) -> RunsAsynchronously | None:
        """This, where each rank's step is its own."""
        return None

    @property
    def device(self) -> torch.device:
        """The device where the model computes; its inputs must lie there."""
        return device_of(self.mesh)

    @property
    def frozen(self) -> dict[str, Tensor]:
        """name -> local tensor, tagged with its layout, of every parameter that is not trained."""
        return {n: detached(p) for n, p in self.model.named_parameters() if not p.requires_grad}

    @property
    def stashed(self) -> dict[str, Tensor]:
        """name -> local tensor, tagged with its layout, of the parameters that the next step computes with.

        Empty where those are the masters' values; checkpoints keep them.
        """
        return {}

    @property
    def schedule_name(self) -> str:
        """Of a pipeline's steps."""
        return "none"

    @property
    def blocks_of_stages(self) -> list[int]:
        """How many blocks each stage of a pipeline has; empty without one."""
        return []

    @property
    def device_peak_bytes(self) -> int | None:
        """The most bytes that were on the device at once, where this keeps the account of them; else None."""
        return None

    def figures(self) -> Mapping[str, Any]:
        """Figures for the run's summary, alike on every rank."""
        return {}

    def prepare(self, optimizer: torch.optim.Optimizer, sample: Sample | None) -> None:  # noqa: B027
        """Prepare for the first step, before the optimizer has state, by what a step will look like.

        sample  draws a step's microbatches; None: nothing is known of it
        """

    def empty_like(self, master: Tensor) -> Tensor:
        """Memory, undefined, for another tensor like a master, where that may lie before the first step."""
        return torch.empty_like(master)

    def keep_average(self, average: FollowsMasters) -> None:  # noqa: B027
        """Take care of an average of the masters where they are not in memory; before `prepare`."""

    def showing(self, average: FollowsMasters) -> AbstractContextManager[None]:
        """Within, between two steps, the model computes with the average."""
        return average.in_place(self.publish)

    def close(self) -> None:  # noqa: B027
        """Give back what a process may hold only once: the run is over."""

    def looking(self) -> AbstractContextManager[None]:
        """Surround a backward between two steps that leaves no gradient in any parameter, and the like forwards."""
        return nullcontext()

    def squares(self) -> GradientSquares:
        """From now on adds up the squares of each microbatch's gradients; for whoever holds it, and only so long.

        Raises UserError where gradients of single microbatches are not to be had.
        """
        raise UserError("noise_scale: this form of parallelism does not show the gradient of a microbatch")

    @abstractmethod
    def run(self, microbatches: Sequence[Any], loss: Callable[[Any], Tensor], scale: float = 1.0) -> Tensor:
        """Forward and backward of each microbatch; returns the sum of their losses, alike on all ranks that share data.

        microbatches  at least one; tensors, or containers of tensors
        loss          microbatch -> its part of the step's loss, a scalar; calls `model`
        scale         factor of the gradients, not of what is returned (fp64)
        """

    @abstractmethod
    def reduce(self) -> None:
        """Complete the gradients after the last backward.

        Masters that took part in the loss of no rank have none, as in torch; those that did on some rank have one
        on all.
        """

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step, of all at once or part by part."""
        optimizer.step()

    def skip(self) -> None:
        """Take note, in the place of `update`, of a step whose gradients were not finite."""
        self.correction.skip()

    @abstractmethod
    def release(self) -> None:
        """Drop the gradients after the step."""

    @abstractmethod
    def publish(self) -> None:
        """Bring the masters' values into the parameters of the next forward."""
