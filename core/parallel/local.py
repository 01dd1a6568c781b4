"""Local training: workers that take H steps by themselves, and then average the way that they have come.

A worker w of n is a rank of the axis dp_replicate with all that lies inside: a mesh of its own, of ZeRO's shards,
tensor, context and expert parallelism and stages (`core.mesh.worker_mesh`). Within a round it sends nothing to other
workers: norms, clipping, what is skipped and the loss are of its own rows. At the round's end, on every master that a
rank holds,

    D_w    = theta - theta_w                 the way of a worker: theta is where all began the round
    D      = sum_w  a_w D_w                  a_w: its share of the items (rows, targets) of the round
    m      = mu m + D                        the outer optimizer: SGD, mu `outer_momentum`
    theta  = theta - eta (D + mu m)          eta `outer_lr`; without `nesterov` theta - eta m
    theta_w = theta                          the state of the inner optimizer stays each worker's own

    H steps, eta 0.7, mu 0.9, AdamW inside   DiLoCo
    H steps, eta 1, mu 0                     local SGD: weights are averaged
    the same behind `start` steps            post-local SGD; those are data parallelism, whose gradients are averaged
    H = 1, eta 1, mu 0, SGD inside           data parallelism
    one worker                               Lookahead, with an outer momentum

Fewer bytes: with `bits` each way is sent in blocks of so few, and their sum comes back so
(`core.parallel.coded_sum`); with `keep` only that share of it, the largest of each block.

Fewer at a time: P `fragments`, one in P blocks each, have rounds of their own, which end H / P steps apart; the sum of
a fragment takes `overlap` steps to arrive, in which its worker goes on. D_w is that of when it was sent, and what
arrives is mixed:  theta_w = alpha theta_w + (1 - alpha) theta,  alpha `mix`.

Steps of the learning rate's schedule are inner ones. The last step of a run ends all rounds, of whatever length.
Floating buffers, such as statistics of batches, are averaged as weights are. A stop that a rank is asked for is one
behind its round, when workers hear of it. An evaluation, and what others read of a checkpoint, are of theta.

Other workers may go on with a checkpoint, more or fewer (`core.parallel.regroup`).

Stich 2019, Local SGD, algorithm 1; Lin et al. 2020, Post-local SGD, section 3; Douillard et al. 2023, DiLoCo,
algorithm 1; Douillard et al. 2025, Streaming DiLoCo, arXiv:2501.18512, section 2; Zhang et al. 2019, Lookahead. Workers
that come and go are launches of their own, whose rounds `core.train.elastic_local` ends.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from core.comm.block_code import BlockCode
from core.comm.volume import wire_share
from core.config import UserError
from core.layout import layout_of, tag
from core.mesh import group_of_ranks, sub_mesh
from core.parallel.asynchronous import LocalConfig
from core.parallel.coded_sum import CodedSum
from core.parallel.data import in_buckets
from core.parallel.feedback import compared, figures_of
from core.parallel.parallel_model import Ended, ParallelModel
from core.parallel.regroup import ROUNDS, Read, Regrouping, of_worker
from core.streams import DeviceStreams, take_device

WORKERS = "dp_replicate"
"""The axis whose ranks are workers."""
BLOCK, BLOCK_OF_LARGEST = 256, 4096
"""Numbers of a block that has one scale, and of one of which the largest are kept."""


@dataclass(frozen=True)
class LocalTrainingConfig(LocalConfig):
    every: int = 0
    """local training (DiLoCo, local SGD): each rank of mesh.dp_replicate takes so many steps by itself between two
    averages with the others; 0: gradients are averaged in every step"""
    start: int = 0
    """steps before it, in which gradients are averaged (post-local SGD)"""
    outer_lr: float = 0.7
    """rate at which the mean of the workers' displacements is taken; 1 without momentum averages their weights"""
    outer_momentum: float = 0.9
    """of the outer SGD"""
    nesterov: bool = True
    """the outer momentum is Nesterov's"""
    bits: Literal[8, 4, 2] | None = None
    """send displacements, and their sum, in so few bits a number, with error feedback; by default as masters are"""
    keep: float | None = None
    """of them send only that share, the largest of each block"""
    error_feedback: bool = True
    """what a message in few bits has lost goes along in the next"""
    report_every: int = 0
    """steps between figures of what few bits lose, each of which sends displacements whole, twice; 0: none"""
    fragments: int = 1
    """parts of the model, one in so many blocks each, that are averaged in turn (Streaming DiLoCo)"""
    overlap: int = 0
    """steps that an average may take to arrive, in which workers go on"""
    mix: float = 0.5
    """what a worker keeps of its own weights when an average arrives late"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("every", 0), ("start", 0), ("overlap", 0), ("report_every", 0), ("fragments", 1)):
            if getattr(self, name) < least:
                raise UserError(f"local.{name}={getattr(self, name)}; give a number, at least {least}")
        if not 0 < self.outer_lr < math.inf:
            raise UserError(f"local.outer_lr={self.outer_lr}; give a positive number, such as 0.7")
        if not 0 <= self.outer_momentum < 1:
            raise UserError(f"local.outer_momentum={self.outer_momentum}; give a number from 0 to below 1, such as 0.9")
        if self.keep is not None and not 0 < self.keep < 1:
            raise UserError(f"local.keep={self.keep}; give a share above 0 and below 1, such as 0.02")
        if not 0 <= self.mix < 1:
            raise UserError(f"local.mix={self.mix}; give a number from 0 to below 1, such as 0.5")
        if not self.every:
            return
        if self.asynchronous is not None:
            raise UserError(
                f"local.every={self.every} with local.async={self.asynchronous}: workers average at the end of rounds, "
                "or never meet; give one of them"
            )
        if self.fragments > self.every:
            raise UserError(
                f"local.fragments={self.fragments} with local.every={self.every}: each has a step of its own in a "
                f"round; give at most {self.every}"
            )
        if self.overlap >= self.every:
            raise UserError(
                f"local.overlap={self.overlap} with local.every={self.every}: an average must arrive before the next "
                f"is sent; give at most {self.every - 1}"
            )

    @property
    def code(self) -> BlockCode | None:
        """The few bits of messages."""
        if self.bits is None:
            return None
        if self.keep is None:
            return BlockCode(self.bits, BLOCK)
        return BlockCode(self.bits, BLOCK_OF_LARGEST, max(1, round(self.keep * BLOCK_OF_LARGEST)))

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        found = super().unread()
        if not self.every:
            why = "without local.every, whose rounds it is of; give --local.every 50"
            names = (
                "start",
                "outer_lr",
                "outer_momentum",
                "nesterov",
                "bits",
                "keep",
                "error_feedback",
                "report_every",
            )
            return found | dict.fromkeys((*names, "fragments", "overlap", "mix"), why)
        if not self.outer_momentum:
            found["nesterov"] = "with local.outer_momentum=0: there is no momentum; leave it out"
        if self.bits is None:
            why = "without local.bits: messages are whole; give --local.bits 2"
            found |= dict.fromkeys(("keep", "error_feedback", "report_every"), why)
        if not self.overlap:
            found["mix"] = "without local.overlap: an average arrives at once; give --local.overlap 1"
        return found


def check_local(given: LocalTrainingConfig, refused: Mapping[tuple[str, str, str], bool]) -> None:
    """Raises UserError for the first that is there.  refused: (what, why, what to use) -> whether it is there"""
    for (what, why, instead), there in refused.items():
        if there:
            raise UserError(f"local.every={given.every} with {what}: {why}; use {instead}, or no --local.every")


def check_fragments(fragments: int, num_blocks: int) -> None:
    """Raises UserError for more fragments than there are blocks to deal out."""
    if fragments > max(1, num_blocks):
        raise UserError(
            f"local.fragments={fragments} and the model has {num_blocks} blocks: each fragment has one at least; "
            f"give at most {max(1, num_blocks)}"
        )


class _Sum(NamedTuple):
    """What workers have added up.

    told     fp64[5], see `LocalTraining._send`
    means    the sums a_w D_w, flat, of each message
    buffers  their sums a_w, fp64, flat
    lost     this rank's part of `core.parallel.feedback.compared`, where that was asked for
    """

    told: Tensor
    means: list[Tensor]
    buffers: Tensor
    lost: Tensor | None = None


class _Arriving:
    """A sum that is made while steps go on, by a thread of its own, on a GPU in a stream of its own.

    due     steps of the run after which it is taken
    beside  the stream in which it is made, and whose it is
    after   the one before it: two threads must not send over a group at a time, and all workers send in one order
    """

    def __init__(
        self,
        work: Callable[[], _Sum],
        due: int,
        beside: tuple[DeviceStreams, torch.cuda.Stream | None],
        after: threading.Thread | None = None,
    ):
        self.due = due
        self._streams, self._stream = beside
        self._given, self._made = self._streams.mark(), None
        self._result: _Sum | None = None
        self._failed: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(work, after), name="outer sum", daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], _Sum], after: threading.Thread | None) -> None:
        try:
            if after is not None:
                after.join()
            take_device(self._streams.device)
            with self._streams.inside(self._stream):
                self._streams.wait(self._given)
                self._result = work()
                self._made = self._streams.mark()
        except Exception as failed:  # told by who waits for it
            self._failed = failed

    def wait(self) -> _Sum:
        self.thread.join()
        if self._result is None:
            raise RuntimeError("the sum over workers has failed") from self._failed
        self._streams.wait(self._made)
        told, means, buffers, lost = self._result
        self._streams.keep(tensor for tensor in (told, *means, buffers, lost) if tensor is not None)
        return self._result


class _Fragment:
    """Parameters that are averaged together.

    messages  indices of theirs
    offset    inner steps by which its rounds end behind those of the first
    since     fp64[3]: items, their losses added up, and steps since it was sent
    """

    def __init__(self, messages: Sequence[int], offset: int, device: torch.device):
        self.messages, self.offset = messages, offset
        self.since = torch.zeros(3, dtype=torch.float64, device=device)
        self.arriving: _Arriving | None = None


class LocalTraining:
    """The rounds of a worker, and the outer optimizer's part of this rank's masters.

    outer     name -> theta, tagged as the masters lie
    momentum  name -> m; empty without
    """

    def __init__(self, parallel: ParallelModel, whole: DeviceMesh, config: LocalTrainingConfig):
        """parallel: the model as its worker has spread it, of values that are alike on all workers.

        Raises UserError for more fragments than the model has blocks.
        """
        self.parallel, self.config = parallel, config
        axis = sub_mesh(whole, WORKERS)
        self.num_workers, self.worker = axis.size(), axis.get_local_rank()
        self._group = _group_of_its_own(whole) if config.overlap else axis.get_group()
        masters = parallel.masters
        self.outer = {name: tag(master.detach().clone(), layout_of(master)) for name, master in masters.items()}
        self.momentum: dict[str, Tensor] = {}
        if config.outer_momentum:
            self.momentum = {n: tag(torch.zeros_like(value), layout_of(value)) for n, value in self.outer.items()}
        self._holders = {name: layout_of(master).num_holders(parallel.mesh) for name, master in masters.items()}
        self._weight = torch.zeros((), dtype=torch.float64, device=parallel.device)
        self._messages: list[list[str]] = []
        self._fragments = list(self._dealt_out())
        self._coded = None
        if config.code is not None and self.num_workers > 1:
            given = config.code, self.outer, self._messages, self._group
            self._coded = CodedSum(*given, feeds_back=config.error_feedback)
        self._stop, self._sent = False, 0.0
        self._lost: Tensor | None = None
        self._others: tuple[int, Callable[[Tensor], Tensor]] | None = None
        self._latest: threading.Thread | None = None
        streams = DeviceStreams(parallel.device)
        self._beside = streams, streams.another() if config.overlap else None
        self.ends_elsewhere = False
        """`end_step` ends no rounds; `end_round` does"""
        self._loaded: tuple[Tensor, dict[str, Tensor], dict[str, Tensor]] | None = None
        self._joins = False
        """what is loaded is of others, who were fewer"""

    def _dealt_out(self) -> Iterator[_Fragment]:
        config, number = self.config, self.config.fragments
        blocks = [block for block in dict.fromkeys(map(_block_of, self.parallel.table)) if block is not None]
        check_fragments(number, len(blocks))
        own: list[dict[frozenset[str], dict[str, int]]] = [{} for _ in range(number)]
        last = 0  # fragment of what is before the first block, and of what is behind the last
        for name, value in self.outer.items():
            block = _block_of(name)
            last = last if block is None else number - 1
            fragment = last if block is None else blocks.index(block) % number
            alike = own[fragment].setdefault(self._cut_by(name), {})
            alike[name] = value.numel() * value.element_size()
        for index, by_cut in enumerate(own):
            first = len(self._messages)
            for sizes in by_cut.values():
                self._messages += in_buckets(sizes, self.parallel.table)
            messages = range(first, len(self._messages))
            yield _Fragment(messages, config.every * index // number, self.parallel.device)

    def _cut_by(self, name: str) -> frozenset[str]:
        """The axes of several ranks that cut a parameter: those with the same ones go in one message.

        A number's code depends on the others in its block: beside what each rank has of its own, a worker's ranks would
        decode a number that they all have to different ones.
        """
        layout = layout_of(self.outer[name])
        return frozenset(axis for axis in layout.axes() if layout.axis_size(axis) > 1)

    @property
    def form(self) -> dict[str, int]:
        """What a checkpoint must agree in."""
        config = self.config
        feeds_back = self._coded is not None and config.error_feedback
        return {
            "workers": self.num_workers,
            "outer_momentum": int(bool(self.momentum)),
            "error_feedback": int(feeds_back),
            "fragments": config.fragments,
            "overlap": int(config.overlap > 0),
        }

    @property
    def tensors(self) -> list[Tensor]:
        """What this keeps beside the worker's own."""
        coded = [] if self._coded is None else self._coded.tensors
        return [*self.outer.values(), *self.momentum.values(), *coded]

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, weight: Tensor) -> None:
        """Take note of the items of this worker's step, alike on all of its ranks."""
        self._weight = weight.detach().to(self._weight, non_blocking=True).reshape(())

    @torch.no_grad()
    def share_gradients(self, step: int) -> None:
        """Before `start`: make the masters' gradients, complete in each worker, those of all workers' items."""
        if step >= self.config.start or self.num_workers == 1:
            return
        masters = self.parallel.masters
        used = [float(master.grad is not None) for master in masters.values()]
        told = torch.cat((self._weight.reshape(1), self._weight.new_tensor(used)))
        total, *users = self._summed(told).tolist()
        share = float(self._weight) / total
        used_by = dict(zip(masters, users, strict=True))
        for names in self._messages:
            among = {name: masters[name] for name in names if used_by[name]}
            for master in among.values():
                master.grad = torch.zeros_like(master) if master.grad is None else master.grad
            grads = [master.grad for master in among.values() if master.grad is not None]
            if grads:
                flat = self._summed(_flat(grads) * share)
                for grad, piece in zip(grads, _pieces(flat, grads), strict=True):
                    grad.copy_(piece)

    @torch.no_grad()
    def end_step(self, step: int, loss: float, stop: bool, is_last: bool) -> Ended:
        """Take note of a step that this worker has made, or skipped, and end the rounds that are over.

        loss  the mean over the step's items
        stop  this worker is asked to stop

        The figures of a step that takes an average are alike on all ranks: of `round_loss` over all items of the round,
        `displacement_norm` the root of the sum a_w |D_w|^2, `outer_norm` |D|, `displacement_cosine` the second over the
        first (where all |D_w| are alike, the mean of cos(D_w, D)), and `sent_bytes_dp_replicate` what this rank has
        sent to other workers since the one before. Each `report_every` steps those of `Feedback.row` tell what few
        bits have made of D.
        """
        noted = torch.stack((self._weight, self._weight * loss, torch.ones_like(self._weight)))
        for fragment in self._fragments:
            fragment.since += noted
        if self.ends_elsewhere:
            return Ended({}, False)
        self._stop = self._stop or stop
        done = step + 1 - self.config.start
        if done <= 0:
            return self._ended([self._follow()])
        found: list[tuple[Tensor, Tensor]] = []
        for fragment in self._fragments:
            if (arriving := fragment.arriving) is not None and (is_last or arriving.due == step + 1):
                fragment.arriving = None
                found.append(self._take(fragment, arriving.wait(), self.config.mix))
        for fragment in self._fragments:
            if not is_last and (done - fragment.offset) % self.config.every:
                continue
            work = self._send(fragment, self._reports(fragment, step))
            if self.config.overlap and not is_last:
                due = step + 1 + self.config.overlap
                fragment.arriving = _Arriving(work, due, self._beside, self._latest)
                self._latest = fragment.arriving.thread
            else:
                found.append(self._take(fragment, work(), 0.0))
        if not found:
            return Ended({}, False)
        self.parallel.publish()
        return self._ended(found)

    def is_due(self, step: int, is_last: bool) -> bool:
        """Whether a round is to be ended behind so many steps of the run.  Where rounds end elsewhere."""
        return (is_last or step % self.config.every == 0) and float(self._fragments[0].since[2]) > 0

    @torch.no_grad()
    def end_round(
        self, num_workers: int, summed: Callable[[Tensor], Tensor], agreed: Callable[[], None]
    ) -> dict[str, float]:
        """End a round with workers that are not ranks of this launch.  Returns the figures of `end_step`.

        summed  what it is given, in its place the sum over those workers
        agreed  returns when all of them have all sums

        What one of these raises leaves this worker as it was.
        """
        (fragment,) = self._fragments
        since = fragment.since.clone()
        self._others = num_workers, summed
        try:
            found = self._send(fragment)()
            agreed()
        except BaseException:
            fragment.since.copy_(since)
            raise
        finally:
            self._others = None
        taken = self._take(fragment, found, 0.0)
        self.parallel.publish()
        return self._ended([taken]).figures

    @torch.no_grad()
    def join_round(self) -> None:
        """Begin where theta is: this worker has taken another's state, and has no items in a round that is to end."""
        self.begin_at_theta()
        self.parallel.publish()

    def begin_at_theta(self) -> None:
        """Be where theta is, without items in the rounds that are under way: so a worker begins that is new."""
        for name, master in self.parallel.masters.items():
            master.copy_(self.outer[name])
        for fragment in self._fragments:
            fragment.since[:2] = 0

    def _follow(self) -> tuple[Tensor, Tensor]:
        """Behind a step in which gradients were averaged: theta is where all workers are."""
        for name, master in self.parallel.masters.items():
            self.outer[name].copy_(master)
        told = torch.cat((self._fragments[0].since, self._weight.new_tensor([float(self._stop), 0.0])))
        found = self._exchange([], [], told, self._flat_buffers())
        self._mix_buffers(found.buffers, 0.0)
        for fragment in self._fragments:
            fragment.since.zero_()
        self._stop = False
        return found.told, self._weight.new_zeros(())

    def _reports(self, fragment: _Fragment, step: int) -> bool:
        """Whether figures are due of the steps since a fragment was sent."""
        every = self.config.report_every
        if self._coded is None or not every:
            return False
        return (step + 1) // every > (step + 1 - int(fragment.since[2])) // every

    def _send(self, fragment: _Fragment, reports: bool = False) -> Callable[[], _Sum]:
        """A function that adds up a fragment's ways over the workers, as they are now.

        Beside them it adds up items, their losses, steps, workers that are asked to stop, and items |D_w|^2.
        """
        masters = self.parallel.masters
        names = [self._messages[index] for index in fragment.messages]
        ways = [_flat([self.outer[name] - masters[name] for name in of]) for of in names]
        squares = self._within_worker(sum(map(self._squares, names, ways), start=self._weight.new_zeros(())))
        stop = self._weight.new_tensor([float(self._stop)])
        told = torch.cat((fragment.since, stop, (fragment.since[0] * squares).reshape(1)))
        buffers = self._flat_buffers() if fragment is self._fragments[0] else self._weight.new_zeros(0)
        fragment.since.zero_()
        self._stop = False
        return partial(self._exchange, fragment.messages, ways, told, buffers, reports)

    @torch.no_grad()  # also in a thread
    def _exchange(
        self, messages: Sequence[int], ways: Sequence[Tensor], told: Tensor, buffers: Tensor, reports: bool = False
    ) -> _Sum:
        items = float(told[0])
        told = self._summed(told)
        share = items / float(told[0])
        means, lost = [], self._weight.new_zeros(4) if reports else None
        for index, way in zip(messages, ways, strict=True):
            given = way.mul_(share)
            if self._coded is None:
                means.append(self._summed(given))
                continue
            true, waits = None, None
            if lost is not None:
                true, waits = self._summed(given.clone()), self._summed(self._coded.waiting(index))
            means.append(self._coded.sum(index, given))
            if lost is not None and true is not None and waits is not None:
                lost += self._compared(self._messages[index], means[-1], true, true + waits - means[-1])
        return _Sum(told, means, self._summed(buffers * share), lost)

    def _compared(self, names: Sequence[str], *flat: Tensor) -> Tensor:
        """This rank's part of `compared` of a message."""
        pieces = zip(*(one.split([self.outer[name].numel() for name in names]) for one in flat), strict=True)
        parts = [compared(*each).to(self._weight) / self._holders[n] for n, each in zip(names, pieces, strict=True)]
        return torch.stack(parts).sum(0)

    def _take(self, fragment: _Fragment, found: _Sum, mix: float) -> tuple[Tensor, Tensor]:
        """The outer optimizer's step of a fragment; then its masters are theta's, but for what is mixed in.

        Returns what was told, and this rank's part of |D|^2.
        """
        if found.lost is not None:
            self._lost = found.lost if self._lost is None else self._lost + found.lost
        squares = self._weight.new_zeros(())
        for index, flat in zip(fragment.messages, found.means, strict=True):
            names = self._messages[index]
            squares += self._squares(names, flat)
            for name, mean in zip(names, _pieces(flat, [self.outer[name] for name in names]), strict=True):
                self._update(name, mean, mix)
        self._mix_buffers(found.buffers, mix)
        return found.told, squares

    def _update(self, name: str, mean: Tensor, mix: float) -> None:
        outer, master, momentum = self.outer[name], self.parallel.masters[name], self.config.outer_momentum
        if self.momentum:
            kept = self.momentum[name].mul_(momentum).add_(mean)
            mean = mean.add(kept, alpha=momentum) if self.config.nesterov else kept
        outer.sub_(mean, alpha=self.config.outer_lr)
        master.copy_(outer) if mix == 0 else master.mul_(mix).add_(outer, alpha=1 - mix)

    def _ended(self, found: list[tuple[Tensor, Tensor]]) -> Ended:
        squares = self._within_worker(torch.stack([own for _, own in found]).sum())
        told = torch.stack([each for each, _ in found])
        items, losses, _, stops, _ = told.sum(0).tolist()
        norm, outer_norm = float((told[:, 4] / told[:, 0]).sum().sqrt()), float(squares.sqrt())
        figures = {"round_loss": losses / items}
        if norm > 0:
            figures |= {"displacement_norm": norm, "displacement_cosine": outer_norm / norm, "outer_norm": outer_norm}
        if self._lost is not None:
            figures |= figures_of(self._within_worker(self._lost))
            self._lost = None
        sent = self._sent
        if self._coded is not None:
            sent, self._coded.sent = sent + self._coded.sent, 0.0
        self._sent = 0.0
        return Ended(figures | {"sent_bytes_dp_replicate": sent}, stops > 0)

    def _squares(self, names: Sequence[str], flat: Tensor) -> Tensor:
        """This rank's part of a message's square."""
        found = self._weight.new_zeros(())
        for name, piece in zip(names, flat.split([self.outer[name].numel() for name in names]), strict=True):
            found += (piece @ piece).to(found) / self._holders[name]
        return found

    def _within_worker(self, total: Tensor) -> Tensor:
        if self.parallel.mesh.size() > 1:
            dist.all_reduce(total, group=group_of_ranks(self.parallel.mesh))
        return total

    def _summed(self, message: Tensor) -> Tensor:
        """The message, in its place the sum over all workers."""
        if not message.numel():
            return message
        num_workers = self.num_workers
        if self._others is not None:
            num_workers, summed = self._others
            message = summed(message)
        elif num_workers > 1:
            dist.all_reduce(message, group=self._group)
        self._sent += wire_share("all_reduce", num_workers) * message.nbytes if num_workers > 1 else 0
        return message

    @property
    def _buffers(self) -> dict[str, Tensor]:
        kept = self.parallel.model.state_dict(keep_vars=True)
        buffers = self.parallel.model.named_buffers()
        return {name: buffer for name, buffer in buffers if name in kept and buffer.is_floating_point()}

    def _flat_buffers(self) -> Tensor:
        return torch.cat([self._weight.new_zeros(0), *(b.flatten().to(self._weight) for b in self._buffers.values())])

    def _mix_buffers(self, flat: Tensor, mix: float) -> None:
        buffers = list(self._buffers.values())
        if flat.numel():
            for buffer, piece in zip(buffers, _pieces(flat, buffers), strict=True):
                buffer.copy_(mix * buffer + (1 - mix) * piece)

    # --- theta --------------------------------------------------------------------------------------------------------

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Compute with theta for the length of the block; the worker's weights are back behind it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, master in self.parallel.masters.items():
            before = master.detach().clone()
            master.copy_(self.outer[name])
            self.outer[name].copy_(before)
        self.parallel.publish()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a checkpoint: `model/NAME` is theta, and what is a worker's own stands under worker/W/.

        tensors  those of this worker by itself

        Averages that are on their way have arrived when this returns, and are taken at their time. What was loaded into
        these tensors `restored` takes over.
        """
        masters, of = {f"model/{name}" for name in self.parallel.masters}, of_worker(self.worker)
        shared = {n: tensor for n, tensor in tensors.items() if n.startswith("model/") and n not in masters}
        own = {f"{of}{name}": tensor for name, tensor in tensors.items() if name not in shared}
        shared |= {f"model/{name}": value for name, value in self.outer.items()}
        shared |= {f"outer/momentum/{name}": value for name, value in self.momentum.items()}
        rounds, means, buffers = self._loaded = self._on_their_way()
        if self._coded is not None:  # whose errors a sum that is made changes
            own |= self._coded.stored(of)
        own[f"{of}{ROUNDS}"] = rounds
        shared |= {f"outer/arriving/{name}": value for name, value in means.items()}
        return shared | own | {f"outer/arriving_buffer/{name}": value for name, value in buffers.items()}

    def reads(self, saved: Mapping[str, int], tensors: Mapping[str, Tensor]) -> Iterator[Read]:
        """What to read in turn of a checkpoint of other workers, of that form, into the tensors of `stored`."""
        self._joins = self.worker >= saved["workers"]
        fragments = [[name for index in each.messages for name in self._messages[index]] for each in self._fragments]
        return Regrouping(self.worker, self.num_workers, saved, tensors, fragments).reads()

    def _on_their_way(self) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """fp64[fragments, 9]: `since`, when what arrives is taken (0: nothing arrives), `told`; and what arrives."""
        rounds = self._weight.new_zeros(len(self._fragments), 9)
        means: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        if self.config.overlap:
            means = {n: tag(torch.zeros_like(value), layout_of(value)) for n, value in self.outer.items()}
            buffers = {name: torch.zeros_like(buffer, dtype=torch.float64) for name, buffer in self._buffers.items()}
        for row, fragment in zip(rounds, self._fragments, strict=True):
            row[:3] = fragment.since
            if fragment.arriving is None:
                continue
            found = fragment.arriving.wait()
            row[3], row[4:] = fragment.arriving.due, found.told
            for index, flat in zip(fragment.messages, found.means, strict=True):
                places = [means[name] for name in self._messages[index]]
                for place, piece in zip(places, _pieces(flat, places), strict=True):
                    place.copy_(piece)
            if found.buffers.numel():
                for place, piece in zip(buffers.values(), _pieces(found.buffers, list(buffers.values())), strict=True):
                    place.copy_(piece)
        return rounds, means, buffers

    @torch.no_grad()
    def restored(self) -> None:
        """Take over what was loaded into the tensors that `stored` has given."""
        assert self._loaded is not None
        if self._coded is not None:
            self._coded.restored()
        rounds, means, buffers = self._loaded
        for row, fragment in zip(rounds, self._fragments, strict=True):
            fragment.since.copy_(row[:3])
            fragment.arriving = None
            if row[3]:
                flat = [_flat([means[name] for name in self._messages[index]]) for index in fragment.messages]
                of_first = buffers.values() if fragment is self._fragments[0] else ()
                flat_buffers = torch.cat([self._weight.new_zeros(0), *(b.flatten() for b in of_first)])
                told = row[4:].clone()
                told[3] = 0  # who was asked to stop has stopped
                found = _Sum(told, flat, flat_buffers)
                fragment.arriving = _Arriving(partial(_known, found), int(row[3]), self._beside)
        if self._joins:
            self.begin_at_theta()
        self._loaded, self._joins = None, False


def _known(found: _Sum) -> _Sum:
    return found


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _pieces(flat: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    for piece, tensor in zip(flat.split([tensor.numel() for tensor in like]), like, strict=True):
        yield piece.view_as(tensor)


def _block_of(name: str) -> tuple[str, int] | None:
    """The list of blocks that a parameter is of, and its place in it."""
    parts = name.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return None if place is None else (".".join(parts[:place]), int(parts[place]))


def _group_of_its_own(whole: DeviceMesh) -> ProcessGroup:
    """Another group of this rank's workers, for what a thread sends while steps go on.  A collective of all ranks."""
    place = (whole.mesh_dim_names or ()).index(WORKERS)
    own: ProcessGroup | None = None
    for ranks in whole.mesh.movedim(place, -1).flatten(0, -2).tolist():
        group = dist.new_group(ranks)
        if whole.get_rank() in ranks:
            own = cast(ProcessGroup, group)
    assert own is not None
    return own
