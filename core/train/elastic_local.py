"""Local training whose workers come and go: each is a launch of its own, and they meet where a round ends.

A worker is a replica of `core.train.elastic`, with the same store, signs of life, generations and verdicts; but only
the end of a round, every H steps, is a step that all take or none. Between, each takes steps by itself
(`core.parallel.local`), on its part of the global batch's rows, and hears nothing of the others. Where a round ends

1. All arrive; the ways that they have come are added up, weighted by their items; all vote; the outer optimizer steps.
2. Where one is lost, at any time of the round, the rest become the next generation and end the round without it: the
   mean is over those that are there. What a lost worker has learned in its round is lost, and no more: nobody repeats a
   step, and in the next round its rows are dealt out over the rest.
3. A worker that joins does so where a round ends, and takes theta, the outer momentum, and the inner optimizer's state
   from the first one. It begins at theta with the next step, and all of its steps count.

A round that is to be ended while others join is ended with them, who have no items in it: theirs weigh nothing.
Checkpoints are of theta, the outer momentum and the first worker's state, behind rounds.
"""

from typing import Any

from torch import Tensor

from core.config import UserError
from core.members import Generation
from core.parallel.local import LocalTraining
from core.train.elastic import Log, Run


class LocalRun(Run):
    """An elastic run of local training, on one rank of one worker."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        local = self.parallel.local
        assert isinstance(local, LocalTraining)
        if local.num_workers > 1:
            raise UserError(
                f"elastic.store with local.every={local.config.every} and {local.num_workers} workers in a launch: a "
                "launch is one worker; use --zero 1 to 3, or tensor parallelism or stages, over its ranks"
            )
        self.local = local
        local.ends_elsewhere = True
        self._last_row: dict[str, Any] | None = None  # of a step whose round is not ended yet
        self._ended: list[str] = []

    @property
    def _is_due(self) -> bool:
        return self.local.is_due(self.step, self.step == self.last)

    def _label(self) -> str:
        """Of the round's end that comes next."""
        every = self.local.config.every
        behind = self.step if self._is_due else (self.step // every + 1) * every
        return f"round {min(behind, self.last)}"

    def _train(self, generation: Generation, log: Log | None) -> bool:
        members, replica = self.members, self.replica
        with self._batches(generation) as (source, rows):
            while self.step < self.last or self._is_due:
                if not self._is_due:
                    dealt = self._deal(generation, rows)
                    with self.meter.step(self.state), members.working(self._label()):
                        batch = next(source)
                        row = self.step_of(batch=batch, step=self.step)
                    self._last_row = self._row(row, generation, dealt)
                ends = self._is_due
                figures = self._end_round(generation) if ends else {}
                if self._last_row is not None:
                    self._after(self._last_row | figures, log)
                    self._last_row = None
                if ends and replica.verdict == "regroup":
                    return self._goes_on(generation, log)
            return False

    def _end_round(self, generation: Generation) -> dict[str, Any]:
        """The figures of a round, and who was there when it ended.  Raises Aborted: the next generation ends it."""
        members, replica = self.members, self.replica
        group = replica.group
        assert group is not None

        def summed(message: Tensor) -> Tensor:
            return message.copy_(group.sum(message.cpu()))

        def vote() -> None:
            replica.verdict = members.vote(self.stop.requested or self.state.stopping)

        with members.working(label := self._label(), times=False):
            members.arrive()
            figures = self.local.end_round(group.size, summed, vote)
        self._ended.append(label)
        if len(self._ended) > 2 and self.runtime.leads and members.leads:
            members.forget(self._ended.pop(0))
        return {**figures, "workers": list(generation.members)}

    def _joined(self) -> None:
        self.local.join_round()
        self._last_row = None
