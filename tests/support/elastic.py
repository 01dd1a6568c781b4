"""Replicas of an elastic run of the small model, each a process that a test kills when it likes."""

import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_double
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore

from core.compose import parallelize
from core.config import run_command
from core.members import Members
from core.metrics import read_metrics
from core.optim.average import WeightAverage, unbiased
from core.optim.build import build_optimizer
from core.placement.stages import PipelinePlan
from core.placement.table import ModelPlan
from core.runtime import start
from core.train import TrainConfig, fit
from core.train.config import ElasticConfig
from core.train.elastic import Group
from tests.support.small import PLAN, Small, config_of, loss

ROWS = 10
"""of the global batch, over 2, 3, 4 and 8 replicas: they do not divide"""
MESSAGES: tuple[tuple[Any, str], ...] = (
    *((dist, name) for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")),
    *((dist, name) for name in ("batch_isend_irecv", "broadcast_object_list", "all_gather_object")),
    *((Group, name) for name in ("_made", "sum", "from_first")),
    *((Members, name) for name in ("arrive", "vote")),
)
HELD_OUT = 4000
"""rows that no batch has"""
SEEDS_APART = 1_000_000
fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Task:
    """What replicas learn.

    dropout  of the model
    make     (dropout) -> the model
    steep    the target is sin(steep * sum of x): at 1 the small model learns little of it in hundreds of steps, at 0.4
             nearly all
    seeded   the run's seed draws also the model's values and the data, and the loss on rows that are in no batch is in
             the summary as `held_out`; by default it draws dropout alone
    average  an average of the weights is kept
    """

    dropout: float = 0.2
    make: Callable[[float], nn.Module] = Small
    steep: float = 1.0
    seeded: bool = False
    average: bool = False


class Batch:
    """A global batch whose rows know their number."""

    def __init__(self, seed: int = 0, steep: float = 1.0):
        self.seed, self.steep = seed, steep

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        assert ROWS % num_ranks == 0
        rows = slice(ROWS // num_ranks * rank, ROWS // num_ranks * (rank + 1))
        found = self.drawn(step, ROWS)
        return {name: value[rows] for name, value in found.items()} | {"row": torch.arange(ROWS)[rows]}

    def drawn(self, number: int, rows: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(SEEDS_APART * self.seed + number)
        x = torch.randn(rows, 5, dtype=torch.float64, generator=draw)
        return {"x": x, "y": (self.steep * x.sum(-1, keepdim=True)).sin()}

    def held_out(self, model: nn.Module) -> dict[str, float]:
        """The loss on rows that no step has, alike for all seeds."""
        return {"held_out": float(loss(model, Batch(0, self.steep).drawn(SEEDS_APART - 1, HELD_OUT)))}


def store() -> TCPStore:
    """A store in this process, which replicas do not have to wait for."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def config(
    out: Path, port: int | None, steps: int, least: int = 1, lost_after: float = 60.0, **options: Any
) -> TrainConfig:
    """lost_after: so long that no replica of a busy machine is taken for lost; the dead are found by their process"""
    elastic = ElasticConfig() if port is None else ElasticConfig(f"127.0.0.1:{port}", least, lost_after=lost_after)
    return config_of(out, **{"steps": steps, "elastic": elastic, "microbatch": 2, **options})


def pause(seconds: float) -> c_double:
    """Seconds that a forward takes at least, so that a kill finds it in the middle of a step.  The processes that are
    forked share them: with 0 a run that has seen enough comes to its end."""
    return fork.Value("d", seconds, lock=False)  # one that is killed would keep a lock


USUAL = Task()


def train(given: TrainConfig, pause_s: c_double | None = None, task: Task = USUAL) -> dict[str, Any]:
    def slow_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        time.sleep(0.0 if pause_s is None else pause_s.value)
        return loss(model, batch)

    seed = given.seed if task.seeded else 0
    with start("cpu", given.seed) as runtime:
        torch.manual_seed(seed)
        model = task.make(task.dropout).double()
        plan = ModelPlan(tensor=PLAN if given.mesh.tp > 1 else None, pipeline=PipelinePlan("blocks"))
        parallel = parallelize(model, runtime.mesh(given.mesh, given.zero), given, plan)
        optimizer = build_optimizer(given.optim, parallel.masters)
        batches = Batch(seed, task.steep)
        average = WeightAverage(parallel.masters, unbiased(0.9)) if task.average else None
        evaluate = batches.held_out if task.seeded else None
        return fit(parallel, optimizer, batches, slow_loss, given, runtime, evaluate=evaluate, average=average)


def _main(given: TrainConfig, said: Path, pause_s: c_double | None, task: Task, fuse: "Fuse | None" = None) -> None:
    sys.stdout = sys.stderr = said.open("a", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    torch.set_num_threads(1)
    if fuse is not None:
        fuse.lay()

    def main(_: list[str]) -> int:
        train(given, pause_s, task)
        return 0

    os._exit(run_command(main, []))


def replica(
    given: TrainConfig,
    said: Path,
    pause_s: c_double | None = None,
    task: Task = USUAL,
    fuse: "Fuse | None" = None,
) -> BaseProcess:
    """Start one: a fork, so that all is imported."""
    process = fork.Process(target=_main, args=(given, said, pause_s, task, fuse))
    process.start()
    return process


class Fuse:
    """A process that is given one dies, by -9, at the message that `light` says: of its ranks or of replicas.

    among  functions that begin a message, as (where, name); by default all that a step or a generation's setup has
    """

    def __init__(self, among: Sequence[tuple[Any, str]] | None = None):
        self._among = MESSAGES if among is None else among
        self._left = fork.Value("i", 0, lock=False)  # one that is killed would keep a lock

    def light(self, messages: int) -> None:
        """messages: from now on, the last of which is not begun any more"""
        self._left.value = messages

    def lay(self) -> None:
        """In the process: count messages from now on."""
        for where, name in self._among:
            setattr(where, name, self._counted(getattr(where, name)))

    def _counted(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def message(*given: Any, **options: Any) -> Any:
            if self._left.value > 0:
                self._left.value -= 1
                if not self._left.value:
                    os.kill(os.getpid(), signal.SIGKILL)
            return begin(*given, **options)

        return message


def _rank(
    given: TrainConfig, said: Path, pause_s: c_double | None, environment: dict[str, str], fuse: Fuse | None
) -> None:
    os.environ.update(environment)
    _main(given, said, pause_s, USUAL, fuse)


def replica_of_ranks(
    given: TrainConfig, said: Path, num_ranks: int, pause_s: c_double | None = None, fuses: Sequence[Fuse] = ()
) -> list[BaseProcess]:
    """Start the ranks of one.  fuses: one for each of its first ranks"""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = []
    for rank in range(num_ranks):
        number, size = str(rank), str(num_ranks)
        environment = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        fuse = fuses[rank] if rank < len(fuses) else None
        ranks.append(fork.Process(target=_rank, args=(given, said, pause_s, environment, fuse)))
        ranks[-1].start()
    return ranks


def rows(out: Path) -> list[dict[str, Any]]:
    return read_metrics(out / "metrics.jsonl") if (out / "metrics.jsonl").exists() else []


def wait_for_step(out: Path, step: int, limit_s: float, processes: Sequence[BaseProcess] = ()) -> float:
    """Wait until a step is in the log.  Returns the seconds that it took."""
    begin = time.monotonic()
    while not (found := rows(out)) or found[-1]["step"] < step:
        assert time.monotonic() - begin < limit_s, f"step {step} has not come in {limit_s} s"
        assert not processes or any(process.is_alive() for process in processes)
        time.sleep(0.02)
    return time.monotonic() - begin


def wait_for_members(out: Path, number: int, limit_s: float) -> None:
    """Wait until the last step was taken by so many."""
    begin = time.monotonic()
    while not (found := rows(out)) or found[-1]["replicas"] < number:
        assert time.monotonic() - begin < limit_s, f"{number} replicas have not come in {limit_s} s"
        time.sleep(0.02)


def dealt_out(row: Mapping[str, Any]) -> list[int]:
    """The rows of the batch that replicas had in a step, in order."""
    return sorted(number for begin, end in row["rows"].values() for number in range(begin, end))


def said(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def die_and_join(given: TrainConfig, said: Path, task: Task, number: int, kills: Sequence[int], limit_s: float) -> None:
    """A run of so many replicas of one rank; a moment after each of these steps one is killed while another comes. The
    run's seed draws which and when."""
    if not kills:  # then nothing holds the run up: one that came behind its end would be refused the folder
        given = replace(given, elastic=replace(given.elastic, min=number))
    draw, slow = random.Random(given.seed), pause(0.0)
    running = [replica(given, said, slow, task) for _ in range(number)]
    try:
        for step in kills:
            slow.value = 0.005
            wait_for_step(given.out, step, limit_s, running)
            slow.value = 0.1  # whoever has come meanwhile joins soon, and is one of those that may be killed
            wait_for_members(given.out, number, limit_s)
            slow.value = 0.005
            time.sleep(draw.uniform(0.0, 0.1))
            running.append(replica(given, said, slow, task))
            draw.choice([process for process in running[:-1] if process.is_alive()]).kill()
        if kills:
            slow.value = 0.1
            wait_for_step(given.out, kills[-1] + 10, limit_s, running)
            wait_for_members(given.out, number, limit_s)
        slow.value = 0.0
        for process in running:
            process.join(limit_s)
            assert process.exitcode in (0, -signal.SIGKILL), said.read_text()[-500:]
    finally:
        for process in running:
            process.kill()
