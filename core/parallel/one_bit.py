"""1-bit Adam, 1-bit LAMB and 0/1 Adam: momenta travel as signs, while second moments stay as they are.

In a step that is sent in signs each of n ranks w, with the gradient g_w of its own rows (their sum is the step's), does

    c_w = beta1 m / n + (1 - beta1) g_w + e_w              m is alike on all ranks
    s_w = mean|c_w| sign(c_w);  e_w = c_w - s_w            of each parameter
    to rank j its rows of s_w: signs by an all-to-all, means by an all-gather
    d   = sum over w of s_w + f;  m = mean|d| sign(d);  f = d - m     of rank j's rows, f its own error
    from every rank its rows of m: signs and means by all-gathers

and the optimizer takes m for its momentum (`core.optim.frozen`). sign(0) is 1. In all other steps gradients are reduced
whole, and the second moments follow them:

    one_bit   the first `start` steps, and with `settled` as many more as it takes until the sum of second moments,
              which is looked at each 1 / (1 - beta2) steps, is that share of what it was, or the other way round
    zero_one  of the first `start` steps all, of the next 2 `start` every second, of the next 4 `start` every fourth,
              and so on; with local steps (`core.parallel.local_steps`) none from `local_start` on, and not all of
              those that follow are sent

Elements that move. An element whose second moment's root is at most eps (a row of an embedding that was not seen, a
bias of keys, whose gradient is rounding noise) would get a whole sign of noise. So these have no part in means, are
sent as nothing (their bit is not read), have no error and a momentum of zero: they stay, but for weight decay, until
the second moments are next learned.

Clipping. A norm of m says nothing of gradients: each rank's are clipped before, by the root mean square of the norms of
all ranks' n g_w, which of one rank is its norm. That is the step's norm, too.

Figures. What was to be sent is beta1 m + (1 - beta1) sum over w of g_w, the momentum of whole gradients; what waits is
all e_w and f.

ZeRO shards what the optimizer has; m and which elements move lie whole on every rank beside, gathered from the
optimizer behind a step whose gradients were whole, and are not in checkpoints. Rows are dealt to ranks as torch.chunk
deals them; padding of ragged ones is sent. A rank's error f is of its rows, so that it lies in checkpoints as they do.

Tang et al. 2021, 1-bit Adam, arXiv:2102.02888, algorithm 1; Li et al. 2021, 1-bit LAMB, arXiv:2104.06069, section 4; Lu
et al. 2022, 0/1 Adam, arXiv:2202.06009, section 4.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core.comm.block_code import pack_bits, unpack_bits
from core.layout import Layout, largest_share, tag
from core.mesh import gradient_axes, joined_axis
from core.parallel.feedback import Feedback, gathered, sum_together
from core.parallel.local_steps import Rates
from core.parallel.rows import own_rows, paired_rows, row_length
from core.placement.table import Table


class Moments(Rates, Protocol):
    """What this asks of an optimizer, by the names of masters: this rank's parts.

    beta1, beta2  of all parameters
    """

    beta2: float

    def momentum(self, name: str) -> Tensor | None:
        """None before the first step, and of a part without elements."""
        ...

    def variance(self, name: str) -> Tensor | None:
        """The second moment, without what its average lacks."""
        ...

    def moves(self, name: str) -> Tensor | None:
        """Which elements move; of booleans."""
        ...

    def root(self, name: str) -> Tensor | None:
        """Of the second moment, what updates are divided by."""
        ...

    def standing(self, name: str) -> tuple[int, int]:
        """Steps that a parameter has taken part in, and the place of its group; both 0 of a part without elements."""
        ...

    def step(self, in_signs: bool) -> None:
        """Update the masters that have a gradient; in_signs: it is the momentum, and the second moments stay."""
        ...

    def count(self, names: Sequence[str]) -> None:
        """Take note of a step of these that leaves masters and second moments as they are."""
        ...

    def arrive(self, ways: Mapping[str, tuple[float, float, float]]) -> None:
        """Make one update of several steps that were counted: masters have the mean of their momenta for a gradient.

        ways  name -> (what decay has left, what the momenta's rates add up to, what the rates do)
        """
        ...

    def counts(self) -> dict[str, int]:
        """JSON-able; what `restore` takes."""
        ...

    def restore(self, counts: Mapping[str, int]) -> None: ...


def packed_length(num_elements: int) -> int:
    """Bytes of so many signs."""
    return -(-num_elements // 8)


def served(shape: Sequence[int], ranks: int) -> int:
    """Bytes of the signs of the rows that one of so many ranks serves."""
    return packed_length(largest_share(shape[0], ranks) * math.prod(shape[1:]) if shape else 1)


class InSigns(Feedback):
    """momenta  name -> m, of this rank's part before ZeRO; None: to be gathered from the optimizer
    moves  name -> which elements of it move
    """

    def __init__(
        self, names: Sequence[str], mesh: DeviceMesh, table: Table, dtype: torch.dtype, device: torch.device,
        options: Mapping[str, Any], start: int = 0, report_every: int = 0,
    ):  # fmt: skip
        """Take the arguments of `Feedback`."""
        super().__init__(names, mesh, table, dtype, device, options, start, report_every)
        self.dtype, self.device = dtype, device
        ranks = self.axis.size()
        self.lengths = {name: 8 * packed_length(row_length(error, ranks)) for name, error in self.errors.items()}
        self.momenta: dict[str, Tensor] | None = None
        self.moves: dict[str, Tensor] = {}
        self.moments: Moments | None = None
        self._next: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})

    def begin(self, dtype: torch.dtype, device: torch.device) -> None:
        super().begin(dtype, device)
        self.server_errors = {name: self._own(error).clone() for name, error in self.errors.items()}

    def attach(self, moments: Moments) -> None:
        self.moments = moments

    def held(self) -> list[Tensor]:
        return [*super().held(), *(self.momenta or {}).values(), *self.moves.values(), *self.server_errors.values()]

    def settle(self) -> None:
        super().settle()
        self.momenta = {name: torch.zeros_like(error) for name, error in self.errors.items()}
        self.moves = {name: torch.zeros_like(error, dtype=torch.bool) for name, error in self.errors.items()}

    def _own(self, tensor: Tensor) -> Tensor:
        """The rows of a parameter that this rank serves; a scalar is everybody's."""
        return own_rows(tensor, self.axis) if tensor.ndim else tensor

    # --- a step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self, grads: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
        """The momenta of the step, times the scale, in the place of gradients."""
        assert self.moments is not None, "there is no optimizer yet"
        self._pending, self._report = grads, None
        self.norm = self._norm(grads)
        factor = self._factor(grads, scale)
        if not self._is_sent:
            self._keep(grads, factor)
            return {}
        self._offer(grads, factor)
        if not grads:
            return {}
        reports = self._reports
        true = self._whole({name: c * self.moves[name] for name, c in grads.items()}) if reports else {}
        for name, c in grads.items():
            c.add_(self.errors[name]).mul_(self.moves[name])
        given = self._whole(self._with_own(grads)) if reports else {}
        found = self.exchange(grads)
        if reports:
            self._report = self._compared(found, true, given)
        self._next = found, self._next[1]
        return {name: m * scale for name, m in found.items()}

    @property
    def _is_sent(self) -> bool:
        """Whether momenta are added up in this step."""
        return True

    @property
    def _lacks(self) -> bool:
        """Whether the optimizer has what is to lie whole on every rank."""
        return self.momenta is None

    @property
    def _steps_since(self) -> int:
        """The steps of which this is the last, and the first whose momenta are sent in signs."""
        return 1

    @property
    def _reports(self) -> bool:
        every = self.report_every
        return every > 0 and (self.steps + 1) // every > (self.steps + 1 - self._steps_since) // every

    def _factor(self, grads: Mapping[str, Tensor], scale: float) -> Tensor:
        """What makes (1 - beta1) g_w, clipped, of this rank's gradients."""
        assert self.moments is not None
        assert self.norm is not None
        if grads and self._lacks:
            self._gather(self.moments)
        factor = torch.ones_like(self.norm)
        if self.clip_norm is not None:
            factor = (self.clip_norm * scale / self.norm).nan_to_num(nan=1.0).clamp(max=1.0)
        return ((1 - self.moments.beta1) * factor / scale).to(self.dtype)

    def _offer(self, grads: dict[str, Tensor], factor: Tensor) -> None:
        """Make of gradients what is to be sent, but for errors."""
        assert self.moments is not None
        for name, c in grads.items():
            assert self.momenta is not None
            c.mul_(factor).add_(self.momenta[name] * (self.moments.beta1 / self.axis.size()))

    def _keep(self, grads: dict[str, Tensor], factor: Tensor) -> None:
        """Take note of a step whose momenta are not sent."""
        raise AssertionError(f"{self.name} sends the momenta of every step")

    def _with_own(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies, with the errors of the rows that this rank serves; a scalar's are everybody's."""
        found = {name: c.clone() for name, c in given.items()}
        for name, c in found.items():
            if c.ndim or not self.axis.get_local_rank():
                self._own(c).add_(self.server_errors[name] * self._own(self.moves[name]))
        return found

    def _norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        """fp64, alike on all ranks: the root mean square of the norms of their own gradients, each times n."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, grad in grads.items():
            copies = self.table[name].layout.num_holders(self.mesh) // self.axis.size()
            total += torch.linalg.vector_norm(grad, dtype=torch.float64).square() / copies
        if self.mesh.size() > 1:
            dist.all_reduce(total)
        return (total * self.axis.size()).sqrt()

    def _gather(self, moments: Moments) -> None:
        """The optimizer's momenta, and which of its elements move, whole."""
        self.momenta = self._gathered(moments.momentum, self.dtype)
        self.moves = {name: one.bool() for name, one in self._gathered(moments.moves, torch.uint8).items()}
        for name, momentum in self.momenta.items():
            momentum.mul_(self.moves[name])

    def _gathered(self, part: Callable[[str], Tensor | None], dtype: torch.dtype) -> dict[str, Tensor]:
        """Name -> what the optimizers of all ranks have of it together."""
        found = {name: torch.zeros_like(error, dtype=dtype) for name, error in self.errors.items()}
        sharded: dict[str, list[str]] = {}
        for name, whole in found.items():
            row, rows = self.table[name], whole
            if not row.whole:
                axis, dim = row.master.cuts[-1]
                rows = own_rows(whole, joined_axis(self.mesh, tuple(axis.split("+"))), dim)
                sharded.setdefault(axis, []).append(name)
            if (own := part(name)) is not None:
                rows.copy_(own)
        for axis, names in sharded.items():
            sum_together([found[name] for name in names], joined_axis(self.mesh, tuple(axis.split("+"))))
        return found

    def exchange(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        names, ranks = list(given), self.axis.size()
        offsets = dict(zip(names, accumulate([0, *(self.lengths[name] for name in names)])))
        total = sum(self.lengths[name] for name in names)
        signs = torch.zeros(ranks, total, dtype=torch.bool, device=self.device)
        means = torch.stack([_mean(c, self.moves[name]) for name, c in given.items()])
        for (name, c), mean in zip(given.items(), means, strict=True):
            sign = c >= 0
            for slot, rows in paired_rows(self._slots(signs, name, c, offsets), sign):
                slot.copy_(rows)
            c.sub_(_signed(sign, mean)).mul_(self.moves[name])
        to_serve, of_workers = _signs(self._exchanged(_bits(signs))), gathered(means, self.axis)
        own_signs, own_means = torch.zeros(1, total, dtype=torch.bool, device=self.device), []
        left = dict(self.server_errors)
        for index, name in enumerate(names):
            d, moves = left[name].clone(), self._own(self.moves[name])
            at = slice(offsets[name], offsets[name] + d.numel())
            for rank in range(ranks):
                d += _signed(to_serve[rank, at], of_workers[rank, index]).view(d.shape)
            d.mul_(moves)
            sign = d >= 0
            own_means.append(_mean(d, moves))
            own_signs[0, at] = sign.view(-1)
            left[name] = d.sub_(_signed(sign, own_means[-1])).mul_(moves)
        all_signs = _signs(gathered(_bits(own_signs)[0], self.axis))
        of_servers = gathered(torch.stack(own_means), self.axis)
        found = {}
        for index, (name, c) in enumerate(given.items()):
            found[name] = torch.empty_like(c)
            values = _signed(self._slots(all_signs, name, c, offsets), of_servers[:, index : index + 1])
            for slot, rows in paired_rows(values, found[name]):
                rows.copy_(slot)
            found[name].mul_(self.moves[name])
        self._next = self._next[0], left
        return found

    def _slots(self, signs: Tensor, name: str, c: Tensor, offsets: Mapping[str, int]) -> Tensor:
        return signs.narrow(1, offsets[name], row_length(c, self.axis.size()))

    def _exchanged(self, own: Tensor) -> Tensor:
        """[ranks, n]: row j goes to rank j -> what each rank has sent to this one."""
        if self.axis.size() == 1:
            return own
        found = torch.empty_like(own)
        dist.all_to_all_single(found, own, group=self.axis.get_group())
        return found

    def commit(self) -> None:
        momenta, left = self._next
        if momenta:
            self.momenta = (self.momenta or {}) | momenta
            self.server_errors |= left
        self._next = {}, {}
        super().commit()

    def discard(self) -> None:
        self._next = {}, {}
        super().discard()

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer) -> bool:
        assert self.moments is not None
        in_signs = self.is_on
        self.commit()
        self.moments.step(in_signs)
        if not in_signs:
            self.momenta = None
            self.learned(self.moments)
        return True

    def learned(self, moments: Moments) -> None:
        """Look at second moments that a step has moved."""

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        assert self.moments is not None
        return super().record() | {"in_signs": self.moments.counts()}

    def own_tensors(self) -> dict[str, Tensor]:
        return {f"server_error/{name}": tag(error, self._served(name)) for name, error in self.server_errors.items()}

    def take(self, record: Mapping[str, Any], filled: Mapping[str, Tensor]) -> None:
        assert self.moments is not None
        super().take(record, filled)
        self.moments.restore(record["in_signs"])
        self.momenta = None

    def _served(self, name: str) -> Layout:
        layout = self.table[name].layout
        return layout.cut(self.mesh, "+".join(gradient_axes(self.mesh)), 0) if layout.shape else layout


class OneBit(InSigns):
    """Option: settled, the share at which second moments stay; None: behind `start` steps.

    looked  the sum of second moments when it was last looked at; 0: not yet
    """

    name = "one_bit"

    def begin(self, dtype: torch.dtype, device: torch.device) -> None:
        super().begin(dtype, device)
        self.stays = self.options["settled"] is None
        self.looked = 0.0

    @property
    def is_on(self) -> bool:
        return self.stays and self.steps >= self.start

    def settle(self) -> None:
        super().settle()
        self.stays = True

    def learned(self, moments: Moments) -> None:
        every = max(1, round(1 / (1 - moments.beta2)))
        if self.stays or self.steps % every:
            return
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for name in self.names:
            own = moments.variance(name)
            if own is not None:
                total += own.sum(dtype=torch.float64) / self.table[name].master.num_holders(self.mesh)
        if self.mesh.size() > 1:
            dist.all_reduce(total)
        before, self.looked = self.looked, float(total)
        least, most = sorted((before, self.looked))
        self.stays = before > 0 and least >= self.options["settled"] * most

    def record(self) -> dict[str, Any]:
        return super().record() | {"stays": self.stays, "looked": self.looked}

    def take(self, record: Mapping[str, Any], filled: Mapping[str, Tensor]) -> None:
        super().take(record, filled)
        self.stays, self.looked = bool(record["stays"]), float(record["looked"])


def _mean(c: Tensor, moves: Tensor) -> Tensor:
    """Mean magnitude of what moves, a scalar; 0 of nothing.  c: 0 where nothing moves"""
    return c.abs().sum() / moves.sum().clamp(min=1)


def _bits(signs: Tensor) -> Tensor:
    """[rows, 8 n] of truth values -> [rows, n] of bytes."""
    return pack_bits(signs.view(torch.uint8), 1)


def _signs(of_bytes: Tensor) -> Tensor:
    """[rows, n] of bytes -> [rows, 8 n] of truth values."""
    return unpack_bits(of_bytes, 1).bool()


def _signed(is_positive: Tensor, mean: Tensor) -> Tensor:
    return torch.where(is_positive, mean, -mean)
