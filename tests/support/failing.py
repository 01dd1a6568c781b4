"""Ranks of which one fails while the other waits and hears no signal.

    python -m tests.support.failing MODE FOLDER --ranks 2

raise  rank 1 raises    kill  rank 1 is killed    far  rank 1 raises, and rank 0 waits for it in a collective
early  before there is a process group rank 1 meets a full disk, and rank 0 takes longer    both  rank 0 meets it, too
worker rank 1's worker cannot go on, and rank 0 waits for its pushes    owner  rank 1 cannot update what it owns

The folder then has `failed_at`, when rank 1 failed, and `alive_at`, when rank 0 was last there; of worker and owner
neither.
"""

import errno
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from core.config import run_command
from core.runtime import StopRequest, launch, launched, start, tells


def main(mode: str, folder: str) -> None:
    with start("cpu") as runtime, StopRequest():
        dist.barrier()
        if runtime.rank == 1:
            time.sleep(1)  # the watch has seen the process
            note(Path(folder, "failed_at"))
            if mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("a mistake of rank 1")
        threading.Thread(target=live, args=[Path(folder, "alive_at")], daemon=True).start()
        if mode == "far":
            dist.all_reduce(torch.ones(3))
        else:
            time.sleep(600)


def serve(mode: str, folder: str) -> None:
    """Workers of a parameter server, in the third step of rank 1's or at the third push to it."""
    import torch

    from core.config import UserError
    from core.parallel.local import LocalTrainingConfig
    from core.train import fit
    from tests.support.small import Rows, build, config_of, loss

    calls = []

    def fails(kind: type[Exception]) -> None:
        calls.append(None)
        if runtime.rank == 1 and len(calls) == 3:
            raise kind("a mistake of rank 1")

    def failing_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if mode == "worker":
            fails(UserError)
        return loss(model, batch)

    given = config_of(Path(folder, "run"), steps=1000, local=LocalTrainingConfig("parameter_server", 2))
    with start("cpu") as runtime:
        state = build(given)
        if mode == "owner":
            state.optimizer.register_step_pre_hook(lambda *_: fails(ArithmeticError))
        fit(state.parallel, state.optimizer, Rows(), failing_loss, given, runtime)


def prepare(argv: list[str]) -> None:
    """What ranks do before they have a process group."""
    mode, folder = argv
    if mode == "early" and os.environ["RANK"] == "0":
        time.sleep(600)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{folder}/corpora")


def live(path: Path) -> None:
    while True:
        note(path)
        time.sleep(0.05)


def note(path: Path) -> None:
    """The time, on a clock that all processes of the machine share; in one piece."""
    aside = path.with_suffix(".aside")
    aside.write_text(str(time.monotonic()))
    aside.replace(path)


if __name__ == "__main__":
    if launched():
        if sys.argv[1] in ("early", "both"):
            sys.exit(run_command(prepare, sys.argv[1:], tells))
        if sys.argv[1] in ("worker", "owner"):
            sys.exit(run_command(lambda argv: serve(*argv), sys.argv[1:], tells))
        main(*sys.argv[1:])
    else:
        sys.exit(launch(2, "tests.support.failing", sys.argv[1:3]))
