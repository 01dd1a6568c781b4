"""The ranks of a benchmark: processes of one thread over gloo, or one a GPU over NCCL where there are enough."""

import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core.config import UserError


def on_ranks(
    num_ranks: int, function: Callable[..., Any], *arguments: Any, preload: list[str], limit_s: float = 1800
) -> list[Any]:
    """What `function(*arguments)` returned on every rank of a group that is up by then, in rank order.

    function  of an importable module; arguments and results are pickled
    preload   modules that the ranks have imported before they start: importing torch takes longer than most counts

    Raises UserError when a rank fails or they take longer than limit_s; then none is left running.
    """
    on_gpus = torch.cuda.is_available()
    context = multiprocessing.get_context("spawn" if on_gpus else "forkserver")
    if not on_gpus:
        context.set_forkserver_preload(preload)
    with tempfile.TemporaryDirectory(prefix="benchmark-ranks-") as folder:
        answers = context.SimpleQueue()
        shared = num_ranks, str(Path(folder) / "store"), answers, function, arguments
        ranks = [context.Process(target=_rank, args=(rank, *shared)) for rank in range(num_ranks)]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + limit_s
        found: dict[int, Any] = {}
        try:
            while len(found) < num_ranks:
                failed = [r for r, process in enumerate(ranks) if process.exitcode not in (None, 0)]
                if failed or time.monotonic() > deadline:
                    what = f"rank {failed[0]} failed" if failed else f"not done after {limit_s:.0f} s"
                    raise UserError(f"{function.__module__} on {num_ranks} ranks: {what}; no result")
                if answers.empty():
                    time.sleep(0.05)
                else:
                    rank, answer = answers.get()
                    found[rank] = answer
        finally:
            for process in ranks:
                process.join(10 if len(found) == num_ranks else 0)
                process.kill()
    return [found[rank] for rank in range(num_ranks)]


def device_of_rank() -> torch.device:
    """Of the rank that asks."""
    on_a_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", dist.get_rank()) if on_a_gpu else torch.device("cpu")


def _rank(rank: int, num_ranks: int, store: str, answers: Any, function: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    # torch 2.13 deprecates names of collectives whose new names 2.11 does not have yet.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    backend = "nccl" if torch.cuda.device_count() >= num_ranks else "gloo"
    if backend == "nccl":  # else all ranks of NCCL are on the first GPU
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    answers.put((rank, function(*arguments)))
    dist.barrier()
    dist.destroy_process_group()
