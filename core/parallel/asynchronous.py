"""Data parallelism without barriers: workers that push gradients and pull parameters as each of them comes along.

Every rank is a worker p of P: in its step t it computes the gradient g of the mean loss of its own rows of batch t.

    parameter_server  every rank also owns a part of the parameters, with its optimizer state: about P-th of the bytes.
                      A thread of it takes pushes in the order in which they arrive. A push is an update with the
                      gradient of one worker, at a P-th of the learning rate:  w <- update(w, g(p, t), lr(t) / P)
    hogwild           the parameters lie in memory that the ranks of one machine share, and each worker updates them
                      without a lock:  w <- w - lr(t) / P g(p, t), of which single elements may be lost

Staleness is bounded by S: with c(p) the number of pushes of worker p that have been applied, a worker begins step t as
soon as  min over p of c(p) >= t - S.  What it reads then has all pushes of steps before t - S, its own among them, and
those of others that happen to have come. Under parameter_server each owner holds to that for its part.

S = 0 is synchronous data parallelism: an owner lets a step's pushes arrive, and makes one update of their mean, at the
whole rate, weighted as the loss is and added up in the order of ranks, clipped by its norm, of which owners tell one
another their parts. S = 0 of hogwild lets no worker begin a step before all have ended the one before; their updates
still meet without locks.

Elsewhere a global norm would be a barrier: a push is clipped by its own norm. It is dropped where that is not finite.
`publish` is where all workers meet: before a checkpoint, an evaluation, the end. A stop that a worker is asked for at
step t is one after step t + S, which none can have begun before it hears of it.

Ho et al. 2013, Stale Synchronous Parallel, section 3; Li et al. 2014, Parameter Server, sections 3 and 4.2; Recht et
al. 2011, HOGWILD!, algorithm 1. Not here: filters and compression of pushes, owners that are lost, CUDA.
"""

import os
import secrets
import tempfile
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from core.config import UserError
from core.layout import tag
from core.mesh import data_axis
from core.parallel.data import DataParallel, allocate, begin, cast_parameter, on_mesh, own_gradient
from core.parallel.parallel_model import Told
from core.placement.table import Table, parameter_names, set_parameter
from core.precision import Precision, compute_dtype, master_dtype
from core.streams import take_device

NEVER = 2**52
"""A step that none reaches, and that fp64 tells from its neighbours."""

_PUSH, _PULL, _SQUARES = 1, 2, 3  # tags of messages
_POLL_S = 0.0002


@dataclass(frozen=True)
class LocalConfig:
    asynchronous: Literal["parameter_server", "hogwild"] | None = None
    """data parallelism without barriers: each rank's gradient is an update of its own, of parameters that ranks own in
    parts (parameter_server), or that those of one machine have in shared memory (hogwild); by default synchronous"""
    staleness: int = 3
    """steps that a worker may be ahead of the slowest; 0 of parameter_server is synchronous"""

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise UserError(f"local.staleness={self.staleness}; give a number of steps, at least 0")

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        if self.asynchronous is not None:
            return {}
        return {"staleness": "without local.async, whose workers it bounds; give --local.async parameter_server"}


def asynchronous_replicas(
    model: nn.Module,
    mesh: DeviceMesh,
    local: LocalConfig,
    precision: Precision,
    materialise: Callable[[nn.Module], None],
    table: Table,
) -> "Workers":
    """`data_parallel` without barriers.  Raises UserError for ranks of which not each is a worker, and for CUDA."""
    given = f"local.async={local.asynchronous}"
    if data_axis(mesh).size() != mesh.size():
        raise UserError(f"{given} takes a mesh of data-parallel ranks alone; leave --mesh.* out")
    if mesh.device_type != "cpu":
        raise UserError(
            f"{given} with device={mesh.device_type}: its messages and memory are the host's; use --device cpu"
        )
    kind = Hogwild if local.asynchronous == "hogwild" else ParameterServer
    return kind(model, mesh, precision, materialise, table, local.staleness)


class Workers(DataParallel):
    """What a worker does in both forms.

    parameters    name -> what the worker computes with
    grads         of this step, in the format of masters, of those that took part in the loss
    clips_pushes  whether a push is clipped by its own norm
    """

    clips_pushes = True

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        precision: Precision,
        materialise: Callable[[nn.Module], None],
        table: Table,
        staleness: int,
    ):
        self.completion = begin(model, mesh, precision, table)
        self.model, self.mesh, self.table, self.staleness = model, mesh, table, staleness
        self.compute_dtype, self.reduce_dtype = compute_dtype(precision), master_dtype(precision)
        self.num_workers, self.worker = mesh.size(), data_axis(mesh).get_local_rank()
        allocate(model, mesh.device_type)
        materialise(model)
        self.parameters: dict[str, nn.Parameter] = {}
        wide: dict[str, Tensor] = {}
        for names in parameter_names(model):
            given = model.get_parameter(names[0])
            parameter = cast_parameter(given, self.compute_dtype)
            for name in names:
                set_parameter(model, name, parameter)
            if parameter.requires_grad:
                self.parameters[names[0]] = parameter
                wide[names[0]] = given.detach().to(self.reduce_dtype).contiguous()
        self.grads: dict[str, Tensor] = {}
        self._most_stale, self._meeting = 0, False
        self._most_norm: float | None = None
        self._tokens = 0  # of all workers, as far as this one has been told
        self._optimizer: torch.optim.Optimizer | None = None
        self.masters = on_mesh({n: tag(m, table[n].master) for n, m in self._adopt(wide).items()}, mesh)

    @abstractmethod
    def _adopt(self, wide: dict[str, Tensor]) -> dict[str, Tensor]:
        """The masters of this rank, leaves.  wide: every trained parameter's value, in their format"""

    @property
    def asynchronous(self) -> "Workers":
        return self

    @contextmanager
    def microbatch(self, last: bool, names: frozenset[str] | None = None) -> Iterator[None]:
        yield
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                held = self.grads.get(name)
                grad = parameter.grad
                self.grads[name] = own_gradient(grad, self.reduce_dtype) if held is None else held.add_(grad)
                parameter.grad = None

    def run(self, microbatches: Sequence[Any], loss: Callable[[Any], Tensor], scale: float = 1.0) -> Tensor:
        if self._meeting:
            dist.barrier()  # until the last has left it, nobody changes what another may be saving
            self._meeting = False
        return super().run(microbatches, loss, scale)

    def publish(self) -> None:
        """Let all workers meet, and each have the newest values, until each begins its next step.

        All pushes have been applied: a worker's step ends when they are.
        """
        dist.barrier()
        self._meeting = True

    def reduce(self) -> None:
        """Do nothing: a push is of this worker alone."""

    def release(self) -> None:
        """Drop this worker's gradients; those of masters come and go with each update, at any time."""
        self.grads.clear()

    @torch.no_grad()
    def clip(self) -> float:
        """Scale this worker's gradients down to the run's norm where a push is clipped; return the norm they had."""
        if not self.grads:
            return 0.0
        grads = list(self.grads.values())
        norm = float(torch.stack(torch._foreach_norm(grads)).double().square().sum().sqrt())
        most = self._most_norm
        if self.clips_pushes and most is not None and most < norm < float("inf"):
            torch._foreach_mul_(grads, most / norm)
        return norm

    @contextmanager
    def running(self, optimizer: torch.optim.Optimizer, step: int, most_norm: float | None) -> Iterator[None]:
        """Take pushes for the length of the block, which all workers enter, and leave after as many steps.

        step       that the first push will be of
        most_norm  that gradients are clipped to
        """
        self._optimizer, self._most_norm, self._tokens = optimizer, most_norm, 0
        for group in optimizer.param_groups:  # another's push may set a rate before this worker asks for its own
            group.setdefault("initial_lr", group["lr"])
        self._begin(step)
        dist.barrier()
        yield
        self._end()

    @abstractmethod
    def _begin(self, step: int) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...

    def push(self, step: int, weight: float, tokens: int, rates: Sequence[float], stop: bool) -> Told:
        """Give away this worker's gradients, and return when the next step may begin, with the values to begin it with.

        weight  of its mean loss among the others'; not a number: the gradients are not finite, and change nothing
        tokens  of its rows
        rates   learning rate of each parameter group
        stop    this worker is asked to stop
        """
        begin = time.perf_counter()
        stop_at = step + self.staleness + 1 if stop else NEVER
        head = _Head(self.worker, step, weight, stop_at, tokens)
        stop_at, slowest, total = self._push(head, rates)
        stale, new, self._tokens = max(0, step + 1 - slowest), total - self._tokens, total
        self._most_stale = max(self._most_stale, stale)
        return Told(stop_at, stale, new, time.perf_counter() - begin)

    @abstractmethod
    def _push(self, head: "_Head", rates: Sequence[float]) -> "_State": ...

    def figures(self) -> Mapping[str, Any]:
        found = torch.tensor([self._most_stale, self._sent_bytes()])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return {"most_staleness": int(found[0]), "communication_bytes_per_step": int(found[1])}

    def _sent_bytes(self) -> int:
        """Bytes that this rank sends a step."""
        return 0


class _Head(NamedTuple):
    """What a push says beside the gradients.

    step     -1: the worker has ended
    stop_at  steps after which all are to stop
    """

    worker: int
    step: int
    weight: float
    stop_at: int
    tokens: int


class _State(NamedTuple):
    """How far all workers are: the stop that was asked for, the slowest one's pushes, the tokens of all pushes."""

    stop_at: int
    slowest: int
    tokens: int


class Clocks:
    """How many pushes of each worker have been applied, and who waits for those of others."""

    def __init__(self, num_workers: int, staleness: int, step: int):
        self.applied, self.staleness = [step] * num_workers, staleness
        self._asking: dict[int, int] = {}  # worker -> step that it wants to begin

    @property
    def slowest(self) -> int:
        return min(self.applied)

    def push(self, worker: int) -> list[tuple[int, int]]:
        """Note that a worker's push has been applied.  Returns who may now begin which step, in the order of asking."""
        self.applied[worker] += 1
        self._asking[worker] = self.applied[worker]
        free = [(w, step) for w, step in self._asking.items() if may_begin(step, self.slowest, self.staleness)]
        for known, _ in free:
            del self._asking[known]
        return free


def may_begin(step: int, slowest: int, staleness: int) -> bool:
    """Whether a worker may begin a step when the slowest has had so many pushes applied."""
    return slowest >= step - staleness


# --- parameter server -------------------------------------------------------------------------------------------------


def dealt_out(sizes: Mapping[str, int], num_owners: int) -> list[list[str]]:
    """The parameters of each owner, by balanced bytes: the largest first, each to who has least."""
    owned: list[list[str]] = [[] for _ in range(num_owners)]
    held = [0] * num_owners
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owner = held.index(min(held))
        owned[owner].append(name)
        held[owner] += sizes[name]
    return owned


class ParameterServer(Workers):
    """Masters and optimizer state of a rank are those of the parameters that it owns."""

    @property
    def clips_pushes(self) -> bool:
        return self.staleness > 0

    def _adopt(self, wide: dict[str, Tensor]) -> dict[str, Tensor]:
        self.owned = dealt_out({name: value.numel() for name, value in wide.items()}, self.num_workers)
        self._sizes = [sum(wide[name].numel() for name in names) for names in self.owned]
        self._group = cast(ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(days=30)))
        # What an owner updates is never what its worker computes with, which a graph may hold.
        return {name: wide[name].clone().requires_grad_() for name in self.owned[self.worker]}

    def _begin(self, step: int) -> None:
        assert self._optimizer is not None
        groups = len(self._optimizer.param_groups)
        self._forms = [_Form(len(n), groups, s, self.reduce_dtype) for n, s in zip(self.owned, self._sizes)]
        self.server = _Server(self, self._optimizer, self._forms[self.worker], self._group, step)
        self.server.start()

    def _end(self) -> None:
        ended = _Head(self.worker, -1, 0.0, NEVER, 0)
        gone = [_Push(ended, [], [], torch.empty(0)) for _ in self._others]
        sent = [
            dist.isend(self._forms[o].packed(push), group=self._group, group_dst=o, tag=_PUSH)
            for o, push in zip(self._others, gone)
        ]
        _wait(sent)
        self.server.join()

    @property
    def _others(self) -> list[int]:
        return [owner for owner in range(self.num_workers) if owner != self.worker]

    @torch.no_grad()
    def _push(self, head: _Head, rates: Sequence[float]) -> _State:
        pushes = [self._push_to(owner, head, rates) for owner in range(self.num_workers)]
        # Answers have where to go before anything asks for them: no owner waits for a worker.
        answers = {o: torch.empty(self._forms[o].answer_bytes, dtype=torch.uint8) for o in self._others}
        work = [dist.irecv(a, group=self._group, group_src=o, tag=_PULL) for o, a in answers.items()]
        messages = [self._forms[o].packed(pushes[o]) for o in self._others]
        work += [
            dist.isend(message, group=self._group, group_dst=o, tag=_PUSH)
            for o, message in zip(self._others, messages, strict=True)
        ]
        answers[self.worker] = self.server.own_push(pushes[self.worker])
        _wait(work)
        told = {owner: self._taken_over(owner, answer) for owner, answer in answers.items()}
        first, slowest = min(each.stop_at for each in told.values()), min(each.slowest for each in told.values())
        return _State(first, slowest, told[self.worker].tokens)

    def _push_to(self, owner: int, head: _Head, rates: Sequence[float]) -> "_Push":
        names = self.owned[owner]
        used = [float(name in self.grads) for name in names]
        parts = [self.grads[n] if n in self.grads else torch.zeros_like(self.parameters[n]) for n in names]
        flat = torch.cat([part.flatten().to(self.reduce_dtype) for part in parts]) if parts else torch.empty(0)
        return _Push(head, list(rates), used, flat)

    def _taken_over(self, owner: int, answer: Tensor) -> _State:
        """Take an owner's values; return how far it says that all are."""
        head, flat = self._forms[owner].opened(answer, len(_State._fields))
        parameters = [self.parameters[name] for name in self.owned[owner]]
        for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
            parameter.copy_(piece.view_as(parameter))
        return _State(*map(int, head.tolist()))

    @torch.no_grad()
    def publish(self) -> None:
        super().publish()
        for owner, names in enumerate(self.owned):
            for name in names:
                own = owner == self.worker
                value = (
                    self.masters[name].detach()
                    if own
                    else torch.empty_like(self.parameters[name], dtype=self.reduce_dtype)
                )
                dist.broadcast(value, owner)
                self.parameters[name].copy_(value)

    def _sent_bytes(self) -> int:
        pushes = sum(self._forms[owner].push_bytes for owner in self._others)
        squares = 0 if self.clips_pushes or self._most_norm is None else torch.float64.itemsize
        return pushes + len(self._others) * (self._forms[self.worker].answer_bytes + squares)


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()


class _Push(NamedTuple):
    """A worker's gradient of an owner's parameters.

    used  of each parameter, whether it took part in the loss
    flat  the gradients in the owner's order
    """

    head: _Head
    rates: list[float]
    used: list[float]
    flat: Tensor


class _Form:
    """The bytes of messages to and from an owner: numbers in fp64, then values in the format of masters."""

    def __init__(self, num_parameters: int, num_groups: int, num_elements: int, dtype: torch.dtype):
        self.num_parameters, self.num_groups, self.num_elements = num_parameters, num_groups, num_elements
        self.dtype = dtype
        self.head = len(_Head._fields) + num_groups + num_parameters
        self.push_bytes, self.answer_bytes = self._bytes(self.head), self._bytes(len(_State._fields))

    def _bytes(self, head: int) -> int:
        return 8 * head + self.dtype.itemsize * self.num_elements

    def packed(self, push: _Push) -> Tensor:
        message = torch.zeros(self.push_bytes, dtype=torch.uint8)
        head, flat = self.opened(message, self.head)
        numbers = [*push.head, *push.rates, *push.used]
        head[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        flat[: len(push.flat)] = push.flat
        return message

    def push(self, message: Tensor) -> _Push:
        head, flat = self.opened(message, self.head)
        worker, step, weight, stop_at, tokens, *rest = head.tolist()
        said = _Head(int(worker), int(step), weight, int(stop_at), int(tokens))
        return _Push(said, rest[: self.num_groups], rest[self.num_groups :], flat)

    def opened(self, message: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """Numbers and values of a message, which share its memory."""
        return message[: 8 * head].view(torch.float64), message[8 * head :].view(self.dtype)


class _Server:
    """An owner's part: takes pushes one at a time, in the order in which they come, and answers who may go on.

    record  where a list stands here: ("push", worker, step) of each as it is taken, and ("pull", worker, step) of each
            answer with which a worker begins a step
    """

    def __init__(
        self, owner: ParameterServer, optimizer: torch.optim.Optimizer, form: _Form, group: ProcessGroup, step: int
    ):
        self.masters, self.optimizer, self.form, self.group = list(owner.masters.values()), optimizer, form, group
        self.worker, self.num_workers = owner.worker, owner.num_workers
        self.together, self.most_norm = owner.staleness == 0, owner._most_norm
        self.clocks, self.stop_at, self.tokens = Clocks(self.num_workers, owner.staleness, step), NEVER, 0
        self.record: list[tuple[str, int, int]] | None = None
        self._changed = threading.Condition()
        self._arrived: dict[int, _Push] = {}  # of a step that is one update
        self._sent: dict[int, tuple[dist.Work | None, Tensor]] = {}  # memory of answers, until they have gone
        self._own: Tensor | None = None
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="parameter server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait until all other workers have ended."""
        self._thread.join()
        _wait([work for work, _ in self._sent.values()])

    def _serve(self) -> None:
        for master in self.masters[:1]:
            take_device(master.device)
        left = self.num_workers - 1
        try:
            while left:
                message = torch.empty(self.form.push_bytes, dtype=torch.uint8)
                dist.recv(message, group=self.group, tag=_PUSH)
                push = self.form.push(message)
                if push.head.step < 0:
                    left -= 1
                    continue
                with self._changed:
                    self._take(push)
        except Exception as failed:  # told by the worker, which waits for an answer
            with self._changed:
                self._failed = failed
                self._changed.notify_all()

    def own_push(self, push: _Push) -> Tensor:
        """The push of this rank's worker, and the wait for its answer."""
        with self._changed:
            self._take(push)
            while self._own is None and self._failed is None:
                self._changed.wait()
            if self._failed is not None:
                raise RuntimeError("the parameter server of this rank has failed") from self._failed
            answer, self._own = self._own, None
            assert answer is not None
            return answer

    def _take(self, push: _Push) -> None:
        head = push.head
        if self.record is not None:
            self.record.append(("push", head.worker, head.step))
        self.stop_at = min(self.stop_at, head.stop_at)
        self.tokens += head.tokens
        if self.together:
            self._arrived[head.worker] = push
            if len(self._arrived) == self.num_workers:
                self._update_together([self._arrived.pop(worker) for worker in range(self.num_workers)])
        elif head.weight == head.weight:
            self._update(push.flat, push.used, push.rates, 1 / self.num_workers)
        for worker, step in self.clocks.push(head.worker):
            self._answer(worker, step)

    def _update_together(self, pushes: list[_Push]) -> None:
        """One update of all workers' mean; none where a worker's gradient is not finite, as synchronous steps do."""
        total = sum(push.head.weight for push in pushes)
        if not total > 0:
            return
        flat = torch.zeros(self.form.num_elements, dtype=self.form.dtype)
        for push in pushes:
            flat.add_(push.flat, alpha=push.head.weight / total)
        if self.most_norm is not None:
            norm = self._whole_norm(flat)
            if not norm < float("inf"):
                return
            flat.mul_(min(1.0, self.most_norm / max(norm, 1e-300)))
        used = [max(each) for each in zip(*(push.used for push in pushes))]
        self._update(flat, used, pushes[0].rates, 1.0)

    def _whole_norm(self, flat: Tensor) -> float:
        """Of the gradient of which each owner has a part: all have the pushes of this step, or will have them."""
        own = flat.double().square().sum().reshape(1)
        squares = [own if owner == self.worker else torch.empty_like(own) for owner in range(self.num_workers)]
        others = [owner for owner in range(self.num_workers) if owner != self.worker]
        work = [dist.irecv(squares[owner], group=self.group, group_src=owner, tag=_SQUARES) for owner in others]
        work += [dist.isend(own, group=self.group, group_dst=owner, tag=_SQUARES) for owner in others]
        _wait(work)
        return float(torch.cat(squares).sum().sqrt())

    def _update(self, flat: Tensor, used: Sequence[float], rates: Sequence[float], share: float) -> None:
        pieces = flat.split([master.numel() for master in self.masters])
        for master, piece, takes_part in zip(self.masters, pieces, used, strict=True):
            master.grad = piece.view_as(master) if takes_part else None
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share
        self.optimizer.step()
        for master in self.masters:
            master.grad = None

    @torch.no_grad()
    def _answer(self, worker: int, step: int) -> None:
        if self.record is not None:
            self.record.append(("pull", worker, step))
        answer = torch.empty(self.form.answer_bytes, dtype=torch.uint8)
        state = _State(self.stop_at, self.clocks.slowest, self.tokens)
        head, flat = self.form.opened(answer, len(state))
        head.copy_(torch.tensor(state, dtype=torch.float64))
        if self.masters:
            torch.cat([master.flatten() for master in self.masters], out=flat)
        if worker == self.worker:
            self._own = answer
            self._changed.notify_all()
            return
        if worker in self._sent:
            _wait([self._sent[worker][0]])  # it has pushed since, and so has received it
        self._sent[worker] = dist.isend(answer, group=self.group, group_dst=worker, tag=_PULL), answer


# --- HOGWILD! ---------------------------------------------------------------------------------------------------------


class Hogwild(Workers):
    """Parameters are their own masters, in memory that all ranks share."""

    def _adopt(self, wide: dict[str, Tensor]) -> dict[str, Tensor]:
        aligned = {name: -(-value.numel() * value.element_size() // 64) * 64 for name, value in wide.items()}
        self._shared = _shared_memory(8 * len(_State._fields) * self.num_workers, self.worker)
        # Each worker writes its own: of one number of all, what two write at once would be lost.
        self._stops, self._clocks, self._tokens_of = self._shared.view(torch.int64).view(len(_State._fields), -1)
        self._memory = _shared_memory(sum(aligned.values()), self.worker)
        offset, masters = 0, {}
        for names in parameter_names(self.model):
            if names[0] not in wide:
                continue
            value = wide[names[0]]
            place = self._memory[offset : offset + value.numel() * value.element_size()].view(value.dtype)
            place = place.view(value.shape)
            place.copy_(value)  # of all ranks the same
            parameter = nn.Parameter(place)
            for name in names:
                set_parameter(self.model, name, parameter)
            masters[names[0]] = self.parameters[names[0]] = parameter
            offset += aligned[names[0]]
        return masters

    def _begin(self, step: int) -> None:
        self._stops[self.worker], self._clocks[self.worker], self._tokens_of[self.worker] = NEVER, step, 0

    def _end(self) -> None:
        dist.barrier()

    def _push(self, head: _Head, rates: Sequence[float]) -> _State:
        assert self._optimizer is not None
        if head.weight == head.weight:
            for name, master in self.masters.items():
                master.grad = self.grads.get(name)
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate / self.num_workers
            self._optimizer.step()
            for master in self.masters.values():
                master.grad = None
        self._tokens_of[self.worker] += head.tokens
        self._stops[self.worker] = min(int(self._stops[self.worker]), head.stop_at)
        self._clocks[self.worker] = head.step + 1  # last: who sees it sees the stop, too
        while not may_begin(head.step + 1, slowest := int(self._clocks.min()), self.staleness):
            time.sleep(_POLL_S)
        return _State(int(self._stops.min()), slowest, int(self._tokens_of.sum()))


def _shared_memory(num_bytes: int, rank: int) -> Tensor:
    """Memory, uint8[num_bytes], that all ranks share; the file that it begins as is gone when this returns.

    A collective of all ranks.  Raises UserError, on all, where they are not on one machine.
    """
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    told: list[Any] = [None]
    if rank == 0:
        handle, path = tempfile.mkstemp(prefix="megalith-", dir=folder)
        os.truncate(handle, num_bytes + 8)
        os.close(handle)
        told = [(path, secrets.randbits(62))]
    dist.broadcast_object_list(told, src=0)
    path, token = told[0]
    memory: Tensor | None = None
    if Path(path).is_file():
        memory = torch.from_file(path, shared=True, size=num_bytes + 8, dtype=torch.uint8)
    if memory is not None and rank == 0:
        memory[num_bytes:].view(torch.int64)[0] = token
    dist.barrier()
    found = memory is not None and int(memory[num_bytes:].view(torch.int64)[0]) == token
    ranks_found = torch.tensor(int(found))
    dist.all_reduce(ranks_found, op=dist.ReduceOp.MIN)
    if rank == 0:
        Path(path).unlink()
    if memory is None or not int(ranks_found):
        raise UserError(
            "local.async=hogwild on several machines: its workers share memory; use --local.async parameter_server"
        )
    return memory[:num_bytes]
