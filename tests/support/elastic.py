"""Replicas of an elastic run of the small model, each a process that a test kills when it likes."""

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from ctypes import c_double
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from core.compose import parallelize
from core.config import run_command
from core.metrics import read_metrics
from core.optim.build import build_optimizer
from core.placement.stages import PipelinePlan
from core.placement.table import ModelPlan
from core.runtime import start
from core.train import TrainConfig, fit
from core.train.config import ElasticConfig
from tests.support.small import PLAN, Small, config_of, loss

ROWS = 10
"""of the global batch, over 2, 3, 4 and 8 replicas: they do not divide"""
fork = multiprocessing.get_context("fork")


class Batch:
    """A global batch whose rows know their number."""

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        assert ROWS % num_ranks == 0
        x = torch.randn(ROWS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        rows = slice(ROWS // num_ranks * rank, ROWS // num_ranks * (rank + 1))
        number = torch.arange(ROWS)[rows]
        return {"x": x[rows], "y": x[rows].sum(-1, keepdim=True).sin(), "row": number}


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


def train(given: TrainConfig, pause_s: c_double | None = None, dropout: float = 0.2) -> dict[str, Any]:
    def slow_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        time.sleep(0.0 if pause_s is None else pause_s.value)
        return loss(model, batch)

    with start("cpu", given.seed) as runtime:
        torch.manual_seed(0)
        model = Small(dropout).double()
        plan = ModelPlan(tensor=PLAN if given.mesh.tp > 1 else None, pipeline=PipelinePlan("blocks"))
        parallel = parallelize(model, runtime.mesh(given.mesh, given.zero), given, plan)
        optimizer = build_optimizer(given.optim, parallel.masters)
        return fit(parallel, optimizer, Batch(), slow_loss, given, runtime)


def _main(given: TrainConfig, said: Path, pause_s: c_double | None, dropout: float = 0.2) -> None:
    sys.stdout = sys.stderr = said.open("a", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    torch.set_num_threads(1)

    def main(_: list[str]) -> int:
        train(given, pause_s, dropout)
        return 0

    os._exit(run_command(main, []))


def replica(given: TrainConfig, said: Path, pause_s: c_double | None = None, dropout: float = 0.2) -> BaseProcess:
    """Start one: a fork, so that all is imported."""
    process = fork.Process(target=_main, args=(given, said, pause_s, dropout))
    process.start()
    return process


def _rank(given: TrainConfig, said: Path, pause_s: c_double | None, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    _main(given, said, pause_s)


def replica_of_ranks(
    given: TrainConfig, said: Path, num_ranks: int, pause_s: c_double | None = None
) -> list[BaseProcess]:
    """Start the ranks of one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = []
    for rank in range(num_ranks):
        number, size = str(rank), str(num_ranks)
        environment = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(fork.Process(target=_rank, args=(given, said, pause_s, environment)))
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


def dealt_out(row: Mapping[str, Any]) -> list[int]:
    """The rows of the batch that replicas had in a step, in order."""
    return sorted(number for begin, end in row["rows"].values() for number in range(begin, end))


def said(path: Path) -> str:
    return path.read_text() if path.exists() else ""
