"""The benchmark of training: a turn ends, and one that does not says so."""

import contextlib
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from benchmarks import contenders, train
from core.runtime import Runtime

TURN = contenders.Turn("DDP", "fp32", train.TINY, 1, 1, num_warmup=1, num_steps=1, account=True, weights="")


class Step:
    """A contender that holds itself in a circle, as a module whose hooks are its own methods does."""

    def __init__(self) -> None:
        self.circle = self

    def __call__(self, batch: contenders.Batch) -> float:
        return 1.0


def test_what_a_contender_holds_is_freed_before_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    built, alive_at_end = [], []

    def build(turn: contenders.Turn, runtime: Runtime) -> Step:
        step = Step()
        built.append(weakref.ref(step))
        return step

    @contextlib.contextmanager
    def start(device: str, seed: int) -> Iterator[Runtime]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield Runtime(0, 0, 1, torch.device(device))
        alive_at_end.append([step() is not None for step in built])
        dist.destroy_process_group()

    monkeypatch.setattr(contenders, "start", start)
    monkeypatch.setitem(contenders.CONTENDERS, "DDP", build)
    contenders.take_turn(TURN)
    assert alive_at_end == [[False]]


def python(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code])


def test_a_late_rank_is_told_from_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train._wait([python(""), python("")]) == (False, None)
    assert train._wait([python("import time; time.sleep(60)"), python("raise SystemExit(3)")]) == (False, 1)
    monkeypatch.setattr(train, "TURN_LIMIT_S", 0.5)
    ended = python("")
    ended.wait()
    assert train._wait([ended, python("import time; time.sleep(60)")]) == (True, 1)
