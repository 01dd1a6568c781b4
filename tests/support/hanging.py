"""Training of which a step does not end: `python -m tests.support.hanging MODE FOLDER [--ranks N]`.

receive  rank 1 waits for a message that nobody sends, the others for rank 1 in a collective
sleep    rank 1 sleeps in the loss
stopped  rank 1 is stopped by a signal, so that none of its threads runs
early    rank 1 sleeps before the first step
calm     nothing hangs: an evaluation, a checkpoint, a compiler take longer than --hang-after
"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.checkpoint import CheckpointConfig
from core.compose import parallelize
from core.optim.build import build_optimizer
from core.runtime import launch, launched, start
from core.train import TrainConfig, TrainState, fit
from tests.support.small import Rows, Small, loss

HANG_AFTER_S = 2.0
BEYOND_S = 1.5 * HANG_AFTER_S
BAD_STEP = 3


def main(mode: str, folder: str) -> None:
    config = TrainConfig(
        precision="fp64", steps=4, out=Path(folder), hang_after=HANG_AFTER_S, evaluate_every=2,
        checkpoint=CheckpointConfig(every=2, asynchronous=False),
    )  # fmt: skip
    with start("cpu") as runtime:
        torch.manual_seed(0)
        mesh = runtime.mesh(config.mesh)
        parallel = parallelize(Small(), mesh, config)
        state: dict[str, Any] = {"calls": 0}
        bad = runtime.rank == runtime.world_size - 1

        def share(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            state["calls"] += 1
            if state["calls"] == BAD_STEP:
                if mode == "calm":
                    compile_slowly()
                elif bad:
                    HANGS[mode]()
            return loss(model, batch)

        class Early(Rows):
            def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
                if mode == "early" and bad:
                    never_end()
                return super().batch(step, rank, num_ranks)

        optimizer = build_optimizer(config.optim.named("adamw"), parallel.masters)
        # One rank alone evaluates for long: the others wait for it in their next step.
        evaluate = (lambda _: beyond(dict) if bad else {}) if mode == "calm" else None
        save = partial(beyond, TrainState.save) if mode == "calm" else TrainState.save
        with patch.object(TrainState, "save", lambda *given: save(*given)):
            fit(parallel, optimizer, Early(), share, config, runtime, evaluate=evaluate)


def beyond(what: Any, *given: Any) -> Any:
    time.sleep(BEYOND_S)
    return what(*given)


def never_end() -> None:
    time.sleep(600)


def receive() -> None:
    dist.recv(torch.ones(3), 0)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def compile_slowly() -> None:
    """As a stack looks while torch compiles."""
    words = compile("import time\ntime.sleep(SECONDS)", "/anywhere/torch/_dynamo/convert_frame.py", "exec")
    exec(words, {"SECONDS": BEYOND_S})


HANGS = {"receive": receive, "sleep": never_end, "stopped": stop, "early": never_end}


if __name__ == "__main__":
    if launched() or "--ranks" not in sys.argv:
        main(*sys.argv[1:3])
    else:
        sys.exit(launch(int(sys.argv[-1]), "tests.support.hanging", sys.argv[1:3]))
