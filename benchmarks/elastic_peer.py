"""torchft's part of `benchmarks.elastic`: groups of one rank that share a step, one of which is killed now and then.

    python -m benchmarks.elastic_peer {"steps": …} FOLDER      by an interpreter that has torchft

As in torchft's own example, each group has its share of the rows of every step, whoever else is there: the share of a
group that is dead, or that is still taking over the state, is not learned from. Gradients are averaged by
`Manager.allreduce`, and a step is taken where `should_commit` says so. The last line on stdout is JSON: seconds from
each kill to the next step, steps a second, samples lost.
"""

import importlib
import json
import multiprocessing
import os
import sys
import time
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import TCPStore
from torch.nn.functional import mse_loss

from tests.support.elastic import Batch
from tests.support.small import Small

MICROBATCH = 2
LIMIT_S = 120.0
fork = multiprocessing.get_context("fork")


def shares(given: dict[str, Any]) -> list[range]:
    """The rows of each group, those of `core.train.elastic.shares`."""
    rows, groups = given["rows"], given["replicas"]
    return [range(rows * group // groups, rows * (group + 1) // groups) for group in range(groups)]


def lighthouse(least: int, said: Path) -> None:
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

    server = LighthouseServer(bind="[::]:0", min_replicas=least, join_timeout_ms=100)
    said.write_text(server.address())
    while True:
        time.sleep(60)


def group(given: dict[str, Any], number: int, address: str, folder: Path) -> NoReturn:
    """Take steps until the last; each that was taken is a line of this group's file."""
    from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Small(0.2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    kept = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,
        replica_id=f"group_{number}",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=kept.port,
        lighthouse_addr=address,
        timeout=timedelta(seconds=10),
    )
    rows = shares(given)[number]
    with (folder / f"steps-{number}").open("a", buffering=1) as taken:
        while (step := manager.current_step()) < given["steps"]:
            manager.start_quorum()
            optimizer.zero_grad()
            whole = Batch().batch(step, 0, 1)
            for begin in range(rows.start, rows.stop, MICROBATCH):
                time.sleep(given["pause_s"])
                of = slice(begin, min(begin + MICROBATCH, rows.stop))
                share = (of.stop - of.start) / len(rows)
                (mse_loss(model(whole["x"][of]), whole["y"][of]) * share).backward()
            parameters = list(model.parameters())
            flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
            manager.allreduce(flat).wait()
            participates = manager.is_participating()
            if not manager.should_commit():
                continue
            for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = piece.view_as(parameter).clone()
            optimizer.step()
            taken.write(f"{json.dumps([manager.current_step(), participates])}\n")
    os._exit(0)


def taken(folder: Path) -> dict[int, set[int]]:
    """Step -> the groups whose rows it was made of."""
    found = dict[int, set[int]]()
    for path in folder.glob("steps-*"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                step, participated = json.loads(line)
                found.setdefault(step, set()).update([int(path.name.rpartition("-")[2])] if participated else [])
    return found


def first_of_all(folder: Path, groups: int) -> int | None:
    """The first step that all groups have taken part in: how they begin is not what is measured."""
    return min((step for step, numbers in taken(folder).items() if len(numbers) == groups), default=None)


def wait_for_step(folder: Path, step: int) -> float:
    begin = time.monotonic()
    while max(taken(folder), default=0) < step:
        if time.monotonic() - begin > LIMIT_S:
            raise TimeoutError(f"step {step} has not come in {LIMIT_S} s")
        time.sleep(0.02)
    return time.monotonic() - begin


def main(given: dict[str, Any], folder: Path) -> None:
    importlib.import_module("torchft")  # so that what is forked need not

    folder.mkdir(parents=True)
    address = folder / "lighthouse"
    keeper = fork.Process(target=lighthouse, args=(2, address), daemon=True)
    keeper.start()
    while not address.exists() or not address.read_text():
        time.sleep(0.05)

    def begun(number: int) -> BaseProcess:
        process = fork.Process(target=group, args=(given, number, address.read_text(), folder))
        process.start()
        return process

    groups, seconds = [begun(number) for number in range(given["replicas"])], list[float]()
    while (first := first_of_all(folder, given["replicas"])) is None:
        time.sleep(0.02)
    begin = time.monotonic()
    try:
        for kill, step in enumerate(range(given["every"], given["steps"], given["every"]) if given["every"] else ()):
            wait_for_step(folder, step)
            number = kill % given["replicas"]
            groups[number].kill()
            seconds.append(wait_for_step(folder, max(taken(folder)) + 1))
            groups[number] = begun(number)
        wait_for_step(folder, given["steps"])
        rate = (max(taken(folder)) - first) / (time.monotonic() - begin)
    finally:
        for process in [*groups, keeper]:
            process.kill()
    of = shares(given)
    learned = [sum(len(of[number]) for number in taken(folder)[step]) for step in taken(folder) if step >= first]
    lost = sum(given["rows"] - rows for rows in learned)
    print(json.dumps({"seconds": seconds, "rate": rate, "lost": lost}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
