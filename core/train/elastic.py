"""Elastic data parallelism: replicas that share each step's rows, of which any may die, and others join.

A replica is a launch of its own, with a mesh of its own: one rank, or tensor parallelism, stages, ZeRO's shards within.
What the ranks of all replicas share is a store, in which `core.members` keeps who is there. A step is

1. The rows of the global batch are dealt out over the replicas that are there, as evenly as they go. Data order is a
   function of the step, so a step's rows are the same however many share them.
2. Each replica computes the gradient of the mean loss over its rows, and completes it among its own ranks.
3. All arrive; then rank r of each replica adds up with rank r of the others  sum_w W_w g_w / sum_w W_w,  W_w the
   weight of a replica's rows, over a group of gloo that exists for this generation alone.
4. All vote. Only when every rank of every replica has the whole sum does any of them update its masters.

Where a replica is lost before that, none takes the step: gradients are dropped, buffers and random generators put back,
the rest become the next generation and repeat the step with its rows dealt out anew. So no row of the data is lost or
seen twice, and losses are those of the undisturbed run up to the order of sums. A replica that joins does so between
two steps, and gets parameters, optimizer, averages, loss scale, buffers and random state from the first one. Where none
is left that has the state, it comes from memory that outlives replicas (`core.train.buddies`), or from a checkpoint.

The first replica leads: it writes the log, evaluates and saves; of every step the log says who had which rows. When it
is lost the next one takes over. Messages between replicas go from the host, also those of a GPU's gradients.

What a batch norm's statistics see are its replica's rows. Not here: sums that overlap with the backward.
"""

import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroupGloo
from torch.distributed.device_mesh import DeviceMesh

from core.checkpoint import Checkpointer
from core.config import UserError, as_json
from core.data import Batches, Prefetch, rows_of_step, some_rows
from core.data.batches import rows_of_rank
from core.layout import local
from core.members import Aborted, Excluded, Generation, Members, Over, StoreLost, connection, excluded
from core.mesh import data_axis
from core.metrics import Progress, RunLog, read_metrics
from core.nn.moe import MoE
from core.parallel.data import in_buckets
from core.parallel.parallel_model import ParallelModel, Sample
from core.rng import rng_text, set_rng_text
from core.run_folder import hold
from core.runtime import Runtime, StopRequest, agreed, gloo_group
from core.train.buddies import Buddies, check_buddies, pieces
from core.train.config import TrainConfig
from core.train.folder import dotted, is_told, nothing_to_do, run_log, told_loss, write_config
from core.train.meter import Meter
from core.train.state import TrainState, resume
from core.weights import persistent_buffers

GROUP_S = 60.0
"""for a message between replicas that have all arrived"""
KEPT_ROWS = 64
"""rows of metrics that every replica keeps, for when the one that writes them is lost"""
OF_A_LAUNCH = ("out", "resume", "nproc", "device", "elastic.store", "elastic.lost_after", "log.tensorboard")
"""Options that a replica may have otherwise than the others, or that are compared by themselves."""

StepOf = Callable[..., dict[str, Any]]


def shares(num_units: int, num_replicas: int) -> list[range]:
    """Deal out units, those behind one another to one replica; of none has one two more than another."""
    ends = [num_units * (place + 1) // num_replicas for place in range(num_replicas)]
    return [range(begin, end) for begin, end in zip([0, *ends[:-1]], ends)]


class Rows:
    """The rows of the global batch that a replica has, as a `Batches` of its data ranks."""

    def __init__(self, batches: Batches, position: int, num_replicas: int):
        self.batches, self.position, self.num_replicas = batches, position, num_replicas

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        num_rows = rows_of_step(self.batches, step)
        own = self.of_replica(num_rows, num_ranks, self.position)
        each = len(own) // num_ranks
        return some_rows(self.batches, step, own[rank * each : (rank + 1) * each], num_rows)

    def of_replica(self, num_rows: int, num_ranks: int, position: int) -> range:
        """Raises UserError for fewer rows than replicas with their ranks."""
        units = shares(len(rows_of_rank(num_rows, 0, num_ranks)), self.num_replicas)[position]
        if not units:
            raise UserError(
                f"a global batch of {num_rows} rows on {self.num_replicas} replicas of {num_ranks} data-parallel "
                "ranks: each needs a row; give a larger batch, or fewer replicas"
            )
        return range(units.start * num_ranks, units.stop * num_ranks)


class Group:
    """The ranks of the same place in all replicas of a generation, or in some of them.

    name   its own in the generation
    place  of this replica among its `size`

    Messages are begun and then looked after, so that a rank hears that a step is given up while a message waits.
    """

    _given_up: list[ProcessGroupGloo] = []  # noqa: RUF012
    """Groups with messages that nobody answers: torch waits for them where it would forget a group."""

    def __init__(self, members: Members, name: str, place: int, size: int):
        assert members.generation is not None
        self._members, self.place, self.size = members, place, size
        self._group: ProcessGroupGloo | None = None
        if size > 1:
            self._group = self._made(f"{members.prefix}/group/{members.generation.number}/{members.rank}/{name}")

    def _made(self, prefix: str) -> ProcessGroupGloo:
        """Raises Aborted where a member is lost meanwhile, for which torch would wait."""
        made: list[ProcessGroupGloo] = []
        failed: list[Exception] = []

        def make() -> None:
            try:
                store = connection(self._members.address)
                made.append(gloo_group(store, prefix, self.place, self.size, GROUP_S))
            except Exception as error:  # told by who waits
                failed.append(error)

        thread = threading.Thread(target=make, name="group", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.02)
            if self._members.is_aborted:
                raise Aborted
        if failed:
            self._members.broken(f"{failed[0]}")
        return made[0]

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up over the replicas, in place.  Raises Aborted."""
        if self._group is not None:
            self._wait(lambda group: group.allreduce([tensor]))
        return tensor

    def from_first(self, tensor: Tensor) -> Tensor:
        """The first one's values, in place.  Raises Aborted."""
        if self._group is not None:
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._wait(lambda group: group.broadcast([tensor], options))
        return tensor

    def _wait(self, begin: Callable[[Any], Any]) -> None:
        assert self._group is not None
        try:
            work, pause = begin(self._group), 1e-4
            while not work.is_completed():
                if self._members.is_aborted:
                    self._give_up()
                time.sleep(pause)
                pause = min(1.5 * pause, 2e-3)
            work.wait()
        except RuntimeError as error:
            self._members.broken(str(error).splitlines()[0])

    def _give_up(self) -> NoReturn:
        assert self._group is not None
        Group._given_up.append(self._group)
        raise Aborted


class Replica:
    """This replica's part of a step: `core.train.state.Elastic`."""

    def __init__(self, parallel: ParallelModel, members: Members, leaves: Callable[[], bool]):
        self._parallel, self._members, self._leaves = parallel, members, leaves
        self.num_rows, self.rows = 0, range(0)
        self.verdict = ""
        self.group: Group | None = None
        self.before_votes: Callable[[], None] = lambda: None
        sizes = {n: m.numel() * m.element_size() for n, m in parallel.masters.items()}
        self._messages = in_buckets(sizes, parallel.table)

    def first_row(self, data_rank: int, rows: int) -> int:
        return self.rows.start + data_rank * rows

    @torch.no_grad()
    def exchange(self, weight: Tensor, mean: Tensor) -> Tensor:
        assert self.group is not None
        self.before_votes()
        self._members.arrive()
        masters = self._parallel.masters
        used = [float(master.grad is not None) for master in masters.values()]
        own = float(weight)
        told = self.group.sum(torch.tensor([own, own * float(mean), *used], dtype=torch.float64))
        total, losses, *users = told.tolist()
        used_by = dict(zip(masters, users, strict=True))
        for names in self._messages:
            among = [masters[name] for name in names if used_by[name]]
            for master in among:
                master.grad = torch.zeros_like(master) if master.grad is None else master.grad
            grads = [local(master.grad) for master in among if master.grad is not None]
            if grads and self.group.size > 1:
                flat = self.group.sum(torch.cat([grad.flatten() for grad in grads]).mul_(own / total).cpu())
                flat = flat.to(grads[0].device)  # in one copy
                for grad, piece in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                    grad.copy_(piece.view_as(grad))
        self.verdict = self._members.vote(self._leaves())
        return mean.new_tensor(losses / total, dtype=torch.float64)


class Run:
    """An elastic run, on one rank of one replica."""

    def __init__(
        self,
        state: TrainState,
        batches: Batches,
        config: TrainConfig,
        runtime: Runtime,
        meter: Meter,
        step_of: StepOf,
        evaluate: Callable[[], Mapping[str, float]] | None,
        checkpointer: Checkpointer,
        stop: StopRequest,
    ):
        self.state, self.batches, self.config, self.runtime = state, batches, config, runtime
        self.meter, self.step_of, self.evaluate, self.checkpointer = meter, step_of, evaluate, checkpointer
        self.stop, self.parallel = stop, state.parallel
        self.axis: DeviceMesh = data_axis(self.parallel.whole_mesh)
        given = config.elastic
        assert given.store is not None
        self.members = Members(
            given.store, runtime.rank, runtime.world_size, least=given.min, lost_after=given.lost_after,
            hang_after=config.hang_after, agree=agreed, told=self._tell,
        )  # fmt: skip
        self.replica = Replica(self.parallel, self.members, lambda: stop.requested or state.stopping)
        state.elastic = self.replica
        self.buddies: Buddies | None = None
        if given.buddy_every is not None:
            self.buddies = Buddies(given.buddy_every, self.members, self._tell)
            self.replica.before_votes = self.buddies.settle
        self.last = min(config.steps, config.stop_after or config.steps)
        self.step, self.saved = 0, -1
        self.first: int | None = None  # of a run that goes on from a checkpoint
        self.kept = deque[dict[str, Any]](maxlen=KEPT_ROWS)
        self.repeats = self.has_taken = False

    def _tell(self, line: str) -> None:
        if self.runtime.leads:
            print(line, file=sys.stderr, flush=True)

    def run(self) -> dict[str, Any]:
        """Train to the end, or to where this replica leaves.  Returns its summary."""
        self.members.join(_must_agree(self.config, self.runtime))
        while True:
            try:
                generation = self._regroup()
                if generation is None:
                    return self._left()
                with ExitStack() as stack:
                    self._set_up(generation)
                    if self._was_over(generation):
                        self.members.leave(over=True)
                        return nothing_to_do(self.config, self.runtime, self.step, self.last)
                    log = stack.enter_context(self._leading(generation)) if self.members.leads else None
                    if self._train(generation, log):
                        continue
                    if self.stop.requested and self.step < self.last:
                        return self._left(log)
                    return self._end(log)
            except Aborted:
                self.parallel.release()
                self.repeats = True

    # --- generations --------------------------------------------------------------------------------------------------

    def _regroup(self) -> Generation | None:
        units = rows_of_step(self.batches, self.step) // self.axis.size()
        most = min(units, self.config.elastic.max or units)
        if self.step == self.last:  # nothing is computed any more
            self.members.least = 1
        return self.members.regroup(self.step, most, self._save_alone, lambda: self.stop.requested)

    def _save_alone(self) -> None:
        """Save where there are too few replicas; of those that are there the first one does."""
        if not self.members.remains_first or self.step == 0:
            return
        with ExitStack() as stack:
            if self.runtime.leads:  # one that led and is slow, not dead, may be saving this very step
                stack.enter_context(self._held(waits=True))
            self.checkpointer.wait()
            # What the folder has counts, not `saved`: who was to save this step may have been lost with half of it.
            if agreed(self.checkpointer.latest()) != self.step:
                self._save()
                self.checkpointer.wait()

    def _save(self) -> None:
        self.state.save(self.checkpointer, self.step)
        self.saved = self.step

    def _set_up(self, generation: Generation) -> None:
        """Make the groups, give the state to those that have none.  Raises Aborted."""
        members, self.has_taken = self.members, False
        if self.buddies is not None:
            self.buddies.join()
        begins = not generation.holders and members.leads
        with members.working("setup", times=False):
            if begins:
                self._begin(again=generation.number > 1)
        members.arrive()
        self.replica.group = Group(members, "all", members.position, len(generation.members))
        holders = generation.holders or generation.members[:1]
        joining = [member for member in generation.members if member not in holders]
        if len(holders) == 1 and joining:
            self._share_state(self.replica.group)
        elif members.leads:
            for member in joining:
                self._share_state(Group(members, f"to {member}", 0, 2))
        elif members.id in joining:
            self._share_state(Group(members, f"to {members.id}", 1, 2))
        members.vote()
        if self.has_taken:  # only now: these are messages of a replica's ranks, and one of them may have been aborted
            self.parallel.publish()
            self._joined()
        self.meter.num_devices = self.parallel.whole_mesh.size() * len(generation.members)
        if members.leads and generation.number > 1:
            doing = "repeat" if self.repeats else "go on with"
            self._tell(
                f"elastic: {len(generation.members)} replicas ({', '.join(map(str, generation.members))}) {doing} step "
                f"{self.step + 1}"
            )
        self.repeats = False

    def _begin(self, again: bool) -> None:
        """Take the state from where it is left, or begin anew.  again: the run had begun before."""
        self.step = self.first = 0
        if again and self.buddies is not None:
            found = self.buddies.find(agreed(self.checkpointer.latest()) or 0)
            if found is not None:
                self._take_state(found.head, pieces(found))
                self._tell(
                    f"elastic: no replica is left that has the state; that behind step {self.step} is taken from the "
                    f"memory of {', '.join(found.machines)}, and {max(0, found.taken - self.step)} steps are repeated"
                )
                return
        self.first = resume(self.state, self.checkpointer, self.config, again)
        self.step = self.saved = self.first or 0

    def _was_over(self, generation: Generation) -> bool:
        """Whether a run that is resumed had come to its end before, in another store or before this one was its."""
        anew = generation.number == 1 and self.config.resume == "auto"
        if not anew or self.first is None or self.first < self.last:
            return False
        if self.first > self.last or is_told(self.config, self.first):
            return True
        self.state.loss = told_loss(self.config, self.first)  # its end is left to do
        return False

    def _head(self, names: Iterable[str]) -> dict[str, Any]:
        """What a replica is given beside tensors of these names."""
        head = {"step": self.step, "saved": self.saved, "first": self.first, "record": self.state.record()}
        return head | {"random": rng_text(), "names": list(names)}

    def _share_state(self, group: Group) -> None:
        """The state of the first of a group, to the others.  Raises Aborted."""
        if group.place:
            text = torch.zeros(int(group.from_first(torch.zeros(1, dtype=torch.int64))), dtype=torch.uint8)
            head = json.loads(group.from_first(text).numpy().tobytes())
            self._take_state(head, lambda like: group.from_first(torch.empty_like(like, device="cpu").contiguous()))
            return
        tensors = self.state.complete_tensors()
        text = torch.frombuffer(bytearray(json.dumps(self._head(tensors)).encode()), dtype=torch.uint8)
        group.from_first(torch.tensor([len(text)]))
        group.from_first(text)
        for tensor in tensors.values():
            group.from_first(local(tensor).detach().cpu().contiguous())

    def _take_state(self, head: dict[str, Any], values: Callable[[Tensor], Tensor]) -> None:
        """values: those of one tensor after the other, each like what it is given"""

        def fill(tensors: dict[str, Tensor]) -> tuple[dict[str, Any], None]:
            if head["names"] != list(tensors):
                raise RuntimeError("this replica's tensors are not those of the replica that it joins")
            for tensor in tensors.values():
                place = local(tensor).detach()
                place.copy_(values(place))
            self.step, self.saved, self.first = head["step"], head["saved"], head["first"]
            set_rng_text(head["random"])
            self.parallel.draws.forget()
            return head["record"], None

        self.state.take(fill, publish=False)
        self.has_taken = True

    def _joined(self) -> None:
        """Called when this replica has taken another's state, and all have what they need."""

    @contextmanager
    def _leading(self, generation: Generation) -> Iterator["Log"]:
        """Write what one replica writes, for as long as this one leads."""
        with ExitStack() as stack:
            if self.runtime.leads:
                first = self.members.generation is None or self.members.generation.number == 1
                stack.enter_context(self._held(waits=not first))
                write_config(self.config)
            fresh = self.step == 0 and self.first is None and generation.number == 1
            rows = stack.enter_context(run_log(self.config, self.runtime, None if fresh else self.step))
            progress = Progress(self.config.steps, first_step=self.step, active=self.runtime.leads)
            log = Log(rows, stack.enter_context(progress))
            log.catch_up(self.kept, self.step)
            if generation.number == 1 and self.first is not None:
                progress.message(f"continuing after step {self.first}{self.state.changed()}")
            yield log

    @contextmanager
    def _held(self, waits: bool) -> Iterator[None]:
        """The folder's lock; one that led and is stopped, not dead, may have it still, and will not write.

        waits  for whoever has it; otherwise that is another run's
        """
        with ExitStack() as stack:
            end = time.monotonic() + 2 * self.config.elastic.lost_after
            while True:
                try:
                    stack.enter_context(hold(self.config.out))
                    break
                except UserError as error:
                    if not waits:
                        raise
                    if time.monotonic() > end:
                        self._tell(f"warning: {error}; this replica leads and writes there all the same")
                        break
                time.sleep(0.1)
            yield

    # --- steps --------------------------------------------------------------------------------------------------------

    def _train(self, generation: Generation, log: "Log | None") -> bool:
        """Take steps for as long as this generation lasts.  Returns whether another follows.  Raises Aborted."""
        members, replica = self.members, self.replica
        with self._batches(generation) as (source, rows):
            while self.step < self.last:
                dealt = self._deal(generation, rows)
                with self.meter.step(self.state), members.working(f"{self.step}"), self._put_back():
                    batch = next(source)
                    row = self.step_of(batch=batch, step=self.step)
                self._after(self._row(row, generation, dealt), log)
                if self.step > 2 and self.runtime.leads and members.leads:
                    members.forget(f"{self.step - 3}")
                if replica.verdict == "regroup":
                    return self._goes_on(generation, log)
            return False

    @contextmanager
    def _batches(self, generation: Generation) -> Iterator[tuple[Prefetch, Rows]]:
        """This rank's batches, from the next step on, and who has which rows."""
        rows = Rows(self.batches, self.members.position, len(generation.members))
        place, device = (self.axis.get_local_rank(), self.axis.size()), self.parallel.device
        with Prefetch(rows, *place, step=self.step, device=device) as source:
            yield source, rows

    def _deal(self, generation: Generation, rows: Rows) -> dict[int, range]:
        """The next step's rows of each member; this replica's are those that it takes."""
        replica, ranks = self.replica, self.axis.size()
        replica.num_rows = rows_of_step(self.batches, self.step)
        dealt = {m: rows.of_replica(replica.num_rows, ranks, place) for place, m in enumerate(generation.members)}
        replica.rows = dealt[self.members.id]
        return dealt

    def _goes_on(self, generation: Generation, log: "Log | None") -> bool:
        """Behind a step after which members change: whether this replica has another generation."""
        leavers = self.members.leavers()
        if self.members.id in leavers:
            self.stop.requested = True
            if leavers >= set(generation.members):
                self._stop_all(log)
            return False
        return self.step < self.last

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        """Put buffers and random generators back where a step is not taken."""
        random = rng_text()
        buffers = [(buffer, buffer.clone()) for buffer in persistent_buffers(self.parallel.model).values()]
        try:
            yield
        except Aborted:
            set_rng_text(random)
            self.parallel.draws.forget()
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            raise

    def _row(self, row: dict[str, Any], generation: Generation, dealt: dict[int, range]) -> dict[str, Any]:
        """The row of metrics of a step that has just been taken."""
        self.step += 1
        row = {"step": self.step, **row, **self.meter.row(row.pop("tokens"))}
        row |= {"replicas": len(dealt), "generation": generation.number}
        row["rows"] = {str(member): [rows.start, rows.stop] for member, rows in dealt.items()}
        return row

    def _after(self, row: dict[str, Any], log: "Log | None") -> None:
        config, step = self.config, self.step
        if log is not None and self.evaluate is not None and config.evaluate_every and step < config.steps:
            row |= self.evaluate() if step % config.evaluate_every == 0 else {}
        self.kept.append(row)
        if self.buddies is not None:
            self._keep(self.buddies)
        if log is not None:
            log.write(row)
        if not math.isfinite(self.state.loss):
            raise UserError(f"the loss is {self.state.loss} at step {step}; lower optim.lr (now {config.optim.lr:g})")
        if config.checkpoint.every and step % config.checkpoint.every == 0 and step < self.last:
            if log is not None:
                self._save()
            self.saved = step

    def leave_buddies(self) -> None:
        """This replica's state is on the disk, or others go on with it."""
        if self.buddies is not None:
            self.buddies.leave()

    def _keep(self, buddies: Buddies) -> None:
        buddies.clear()
        tensors: dict[str, Tensor] = {}

        def complete() -> dict[str, Tensor]:
            tensors.update(self.state.complete_tensors())
            return tensors

        buddies.keep(self.step, lambda: self._head(tensors), complete)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _end(self, log: "Log | None") -> dict[str, Any]:
        """The last checkpoint and the summary, by the replica that leads; the others wait, in case that one is lost."""
        summary = self.meter.summary(self.step, self.config.steps, self.state)
        if self.buddies is not None:
            self.buddies.settle()
        with self.members.working("end", times=False):
            if log is not None:
                if self.saved != self.step:
                    self._save()
                self.checkpointer.wait()
                if self.evaluate is not None and self.step == self.config.steps:
                    summary |= self.evaluate()
                log.rows.summarise(summary)
        self.members.arrive()
        self.members.vote()
        if self.buddies is not None:
            self.buddies.end_lost()
        self.members.leave(over=True)
        return summary if log is not None else summary | {"status": "followed"}

    def _stop_all(self, log: "Log | None") -> None:
        """All replicas are asked to stop: the first one saves."""
        if log is None:
            return
        if self.saved != self.step:
            self._save()
        self.checkpointer.wait()
        log.rows.summarise(self.meter.summary(self.step, self.config.steps, self.state))

    def _left(self, log: "Log | None" = None) -> dict[str, Any]:
        if log is None and self.members.generation is not None and self.members.remains_first and self.members.alone:
            self._save_alone()
        if log is not None:
            self.checkpointer.wait()  # as long as the folder is held: who leads next removes what is half written
        self.members.leave()
        self._tell(f"elastic: this replica leaves behind step {self.step}")
        return self.meter.summary(self.step, self.config.steps, self.state) | {"status": "stopped"}


class Log:
    """The metrics of a run and what is shown of it, by the replica that leads."""

    def __init__(self, rows: RunLog, progress: Progress):
        self.rows, self.progress = rows, progress

    def catch_up(self, kept: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write rows of steps up to that one which the replica that led before has taken and not written."""
        if not self.rows.active:
            return
        written = max((row["step"] for row in read_metrics(self.rows.metrics_path)), default=0)
        for row in kept:
            if written < row["step"] <= step:
                self.rows.write(row)

    def write(self, row: Mapping[str, Any]) -> None:
        self.rows.write(row)
        self.progress.update(row)


def _must_agree(config: TrainConfig, runtime: Runtime) -> dict[str, Any]:
    options = {name: value for name, value in dotted(as_json(config)).items() if name not in OF_A_LAUNCH}
    version = f"torch {torch.__version__.split('+')[0]}, Python {sys.version_info.major}.{sys.version_info.minor}"
    return {"out": str(config.out), "version": version, "ranks": runtime.world_size, "options": options}


def _check(state: TrainState) -> None:
    """Raises UserError for what does not go with replicas that come and go."""
    if any(isinstance(module, MoE) for module in state.parallel.model.modules()):
        raise UserError(
            "elastic.store with experts: their load is balanced over the rows of one replica; leave --elastic.store out"
        )


def fit_elastically(
    state: TrainState,
    batches: Batches,
    config: TrainConfig,
    runtime: Runtime,
    meter: Meter,
    step_of: StepOf,
    sample: Sample,
    evaluate: Callable[[], Mapping[str, float]] | None,
    of: type[Run] = Run,
) -> dict[str, Any]:
    """`core.train.fit` of a replica.  Returns its summary; its status is `followed` where another one led to the end.

    step_of  `train_step`, that wants a batch and a step
    of       what its steps are
    """
    _check(state)
    check_buddies(config.elastic.buddy_every, config.elastic.min)
    with ExitStack() as stack:
        state.parallel.prepare(state.optimizer, sample)
        checkpointer = Checkpointer(config.out / "checkpoints", config.checkpoint, state.parallel.whole_mesh)
        stack.callback(checkpointer.close)
        stop = stack.enter_context(StopRequest())
        run = of(state, batches, config, runtime, meter, step_of, evaluate, checkpointer, stop)
        stack.callback(run.members.leave)
        try:
            summary = run.run()
            run.leave_buddies()
            return summary
        except Excluded:
            run.leave_buddies()
            if runtime.leads:
                print(excluded(config.elastic.lost_after), file=sys.stderr, flush=True)
            raise SystemExit(1) from None
        except StoreLost:
            if run.members.leads and run.step and run.saved != run.step:
                state.parallel.release()
                state.save(checkpointer, run.step)
                checkpointer.wait()
            raise UserError(
                f"elastic.store={config.elastic.store}: it does not answer any more, so the run ends behind step "
                f"{run.step}; start it again with --resume"
            ) from None
        except Over:
            if runtime.leads:
                print(f"nothing to do: the run in {config.out} has come to its end")
            return {"step": config.steps, "status": "followed"}
