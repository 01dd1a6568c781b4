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
              and so on

Elements that move. An element whose second moment's root is at most eps (a row of an embedding that was not seen, a
bias of keys, whose gradient is rounding noise) would get a whole sign of noise. So these have no part in means, are
sent as nothing (their bit is not read), have no error and a momentum of zero: they stay, but for weight decay, until
the second moments are next learned.

Clipping. A norm of m says nothing of gradients: each rank's are clipped before, by the root mean square of the norms of
all ranks' n g_w, which of one rank is its norm. That is the step's norm, too.

ZeRO shards what the optimizer has; m and which elements move lie whole on every rank beside, gathered from the
optimizer behind a step whose gradients were whole, and are not in checkpoints. Rows are dealt to ranks as torch.chunk
deals them; padding of ragged ones is sent. A rank's error f is of its rows, so that it lies in checkpoints as they do.

Tang et al. 2021, 1-bit Adam, arXiv:2102.02888, algorithm 1; Li et al. 2021, 1-bit LAMB, arXiv:2104.06069, section 4; Lu
et al. 2022, 0/1 Adam, arXiv:2202.06009, section 4, here without local steps (`--local.every` has those).
"""

import math
from collections.abc import Mapping, Sequence
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
from core.parallel.rows import own_rows, paired_rows, row_length
from core.placement.table import Table


class Moments(Protocol):
    """What this asks of an optimizer, by the names of masters: this rank's parts.

    beta1, beta2  of all parameters
    """

    beta1: float
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

    def step(self, in_signs: bool) -> None:
        """Update the masters that have a gradient; in_signs: it is the momentum, and the second moments stay."""
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
        ranks, beta1, self._pending = self.axis.size(), self.moments.beta1, grads
        self.norm = self._norm(grads)
        if not grads:
            return {}
        if self.momenta is None:
            self._gather(self.moments)
        assert self.momenta is not None
        factor = torch.ones_like(self.norm)
        if self.clip_norm is not None:
            factor = (self.clip_norm * scale / self.norm).nan_to_num(nan=1.0).clamp(max=1.0)
        factor = ((1 - beta1) * factor / scale).to(self.dtype)
        for name, c in grads.items():
            c.mul_(factor).add_(self.momenta[name] * (beta1 / ranks)).add_(self.errors[name]).mul_(self.moves[name])
        found = self.exchange(grads)
        self._next = found, self._next[1]
        return {name: m * scale for name, m in found.items()}

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
        self.momenta = {name: torch.zeros_like(error) for name, error in self.errors.items()}
        moves = {name: torch.zeros_like(error, dtype=torch.uint8) for name, error in self.errors.items()}
        sharded: dict[str, list[str]] = {}
        for name in self.names:
            row, parts = self.table[name], [self.momenta[name], moves[name]]
            if not row.whole:
                axis, dim = row.master.cuts[-1]
                parts = [own_rows(part, joined_axis(self.mesh, tuple(axis.split("+"))), dim) for part in parts]
                sharded.setdefault(axis, []).append(name)
            for part, own in zip(parts, (moments.momentum(name), moments.moves(name)), strict=True):
                if own is not None:
                    part.copy_(own)
        for axis, names in sharded.items():
            for whole in (self.momenta, moves):
                sum_together([whole[name] for name in names], joined_axis(self.mesh, tuple(axis.split("+"))))
        self.moves = {name: one.bool() for name, one in moves.items()}
        for name, momentum in self.momenta.items():
            momentum.mul_(self.moves[name])

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
    def update(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.moments is not None
        in_signs = self.is_on
        self.commit()
        self.moments.step(in_signs)
        if not in_signs:
            self.momenta = None
            self.learned(self.moments)

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


class ZeroOne(InSigns):
    """Option: start, of whose steps the second moments are learned at ever longer intervals."""

    name = "zero_one"

    @property
    def is_on(self) -> bool:
        return not learns(self.steps, self.options["start"])

    def settle(self) -> None:
        super().settle()
        while not self.is_on:
            self.steps += 1


def learns(step: int, start: int) -> bool:
    """Whether zero_one sends a step's gradients whole; step: counted from 0."""
    doublings = (step // start + 1).bit_length() - 1
    return (step - start * (2**doublings - 1)) % 2**doublings == 0


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
