"""0/1 Adam: momenta in signs (`core.parallel.one_bit`), second moments learned ever more seldom, local steps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.parallel.feedback import sum_together
from core.parallel.local_steps import LocalSteps, is_due
from core.parallel.one_bit import InSigns, Moments


class ZeroOne(InSigns):
    """Options: start, of whose steps the second moments are learned at ever longer intervals; local_steps, local_start
    and local_each of `core.parallel.local_steps`.

    local  a rank's own steps; None: momenta are sent in every step
    """

    name = "zero_one"

    def begin(self, dtype: torch.dtype, device: torch.device) -> None:
        super().begin(dtype, device)
        self.local = LocalSteps(self.errors, self.axis.size()) if self.options["local_steps"] > 1 else None
        self._kept: dict[str, Tensor] = {}
        self._ways: dict[str, tuple[float, float, float]] = {}
        self._counted: list[str] = []
        self._length = 0

    @property
    def _local_start(self) -> int:
        assert self.local is not None
        return self.options["local_start"]

    def _is_whole(self, step: int) -> bool:
        is_learned = self.local is None or step < self._local_start
        return is_learned and is_due(step, self.options["start"])

    def _sends(self, step: int) -> bool:
        """Whether momenta are sent in signs, as far as steps are concerned."""
        if self.local is None or step < self._local_start:
            return not self._is_whole(step)
        return is_due(step - self._local_start, self.options["local_each"], self.options["local_steps"])

    @property
    def is_on(self) -> bool:
        return not self._is_whole(self.steps)

    @property
    def _is_alone(self) -> bool:
        """Whether steps are those of `local` by now."""
        return self.local is not None and self.steps >= self._local_start

    @property
    def _is_sent(self) -> bool:
        return self._sends(self.steps) or self.is_last

    @property
    def _steps_since(self) -> int:
        before = self.steps - 1
        while before >= 0 and not self._sends(before):
            before -= 1
        return self.steps - before

    def settle(self) -> None:
        """With local steps: be as in the first sum of several."""
        super().settle()
        if self.local is not None:
            self.local.settle()
            self.steps = self._local_start
        while not self._sends(self.steps) or (self.local is not None and self._steps_since == 1):
            self.steps += 1

    def held(self) -> list[Tensor]:
        return [*super().held(), *([] if self.local is None else self.local.held())]

    @property
    def _lacks(self) -> bool:
        return super()._lacks or (self.local is not None and self._is_alone and not self.local.roots)

    def _gather(self, moments: Moments) -> None:
        super()._gather(moments)
        if self.local is None or not self._is_alone:
            return
        roots = self._gathered(moments.root, self.dtype)
        self.local.roots = {name: torch.where(self.moves[name], root, 1) for name, root in roots.items()}
        standing = torch.tensor([moments.standing(name) for name in self.names], device=self.device)
        if self.mesh.size() > 1:
            dist.all_reduce(standing, op=dist.ReduceOp.MAX)
        taken, groups = standing.mT.tolist()
        self.local.taken, self.local.groups = (dict(zip(self.names, of, strict=True)) for of in (taken, groups))
        assert self.momenta is not None
        if not self.local.steps:
            self.local.begin(self.momenta)

    def _keep(self, grads: dict[str, Tensor], factor: Tensor) -> None:
        self._kept, self._pending = {name: grad.mul_(factor) for name, grad in grads.items()}, {}

    def _offer(self, grads: dict[str, Tensor], factor: Tensor) -> None:
        if self.local is None or not self._is_alone:
            super()._offer(grads, factor)
            return
        assert self.moments is not None
        self._counted, self._ways = [*grads], {}
        for name in self.names:
            if name in grads or name in self.local.unsent:
                grad = grads[name].mul_(factor) if name in grads else None
                grads[name], pace = self.local.offer(name, grad, self.moments)
                self._ways[name] = (pace.kept, pace.weight, pace.rate)

    @contextmanager
    def apart(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        if self.local is None or not self.local.steps:
            yield
            return
        assert self.moments is not None
        if self._lacks:  # behind a checkpoint
            self._gather(self.moments)
        own = {name: parameters[name] for name in self.names}
        self.local.leave(own, self.moments)
        try:
            yield
        finally:
            self.local.come_back(own)

    def discard(self) -> None:
        self._kept = {}
        super().discard()

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer) -> bool:
        if self.local is None or not self._is_alone:
            return super().update(optimizer)
        assert self.moments is not None
        is_sent, kept, self._kept = self._is_sent, self._kept, {}
        self.commit()
        if not is_sent:
            self.local.take(kept, self.moves, self.moments)
            self.moments.count([*kept])
            return False
        self._length = self.local.steps + 1
        self.moments.count(self._counted)
        self.moments.arrive(self._ways)
        momenta = self.momenta or {}
        self.local.begin({name: momenta[name] for name in self._ways}, self._counted)
        return True

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        return super().record() | ({} if self.local is None else {"local": self.local.record()})

    def of_ranks(self) -> dict[str, dict[str, Tensor]]:
        return super().of_ranks() | ({} if self.local is None else self.local.of_ranks())

    def take(self, record: Mapping[str, Any], filled: Mapping[str, Tensor]) -> None:
        super().take(record, filled)
        if self.local is None:
            return
        self.local.take_over(record["local"])
        for kind, own in self.local.of_ranks().items():
            for name, tensor in own.items():
                tensor.copy_(filled[f"{kind}/{name}"].sum(0))
            if record["ranks"] != self.axis.size():
                sum_together([*own.values()], self.axis)
                for tensor in own.values():
                    tensor.div_(self.axis.size())

    def row(self) -> dict[str, float]:
        """The same; and of a sum of local steps how many there are."""
        length, self._length = self._length, 0
        return super().row() | ({"local_steps": length} if length else {})
