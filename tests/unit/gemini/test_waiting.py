"""Gradients that wait on the disk for their update: bit for bit what is learned without, where they do not fit."""

import errno
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import current_thread
from typing import Any
from unittest.mock import patch

import pytest
import torch

from core.config import UserError, size_in_bytes
from core.gemini import replicas, residency, timeline, wrap
from core.gemini.disk import Disk
from core.gemini.executor import Executor
from core.gemini.figure import planned_memory
from core.gemini.lifetimes import Lifetimes, keep
from core.gemini.replicas import GeminiReplicas
from core.gemini.residency import PLACES, host_bytes_of, to_wait
from core.gemini.timeline import WAITING_PLACES
from core.gemini.trace import ChunkInfo
from core.mesh import MeshConfig, build_mesh
from core.optim.clip import gradient_norm, scale_gradients
from core.runtime import join
from core.trace.machine import Bandwidth
from core.train import TrainState
from core.train.loop import train_step
from tests.support.disk import CASE, go_on
from tests.support.gemini import Net
from tests.support.gemini import batch as net_batch
from tests.support.gemini import loss as net_loss
from tests.support.training import Case, batch_of, build, gemini_of, loss, weight

STEPS = 3
FP32 = replace(CASE, parallel=replace(CASE.parallel, precision="fp32"), budget="120KB", host=None)


@pytest.fixture(scope="module", autouse=True)
def joined() -> None:
    join("cpu")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., tuple[TrainState, Any]]]:
    """Runs on a folder in the least of the host that will do, or in so many bytes; they are closed at the end."""
    made: list[GeminiReplicas] = []

    def begin(case: Case, folder: Path = tmp_path / "disk", host: int | None = None) -> tuple[TrainState, Any]:
        for before in made:
            before.close()
        if host is None:
            host = _least[case] = _least.get(case) or least_host(case, folder)
        state, config = build(replace(case, disk=folder, host=f"{host}B"))
        made.append(gemini_of(state.parallel))
        return state, config

    yield begin
    for one in made:
        one.close()


_least: dict[Case, int] = {}
_expected: dict[Case, Any] = {}


def without(case: Case) -> Any:
    """What is learned without a disk."""
    if case not in _expected:
        _expected[case] = learned(*build(case), case)
    return _expected[case]


def least_host(case: Case, folder: Path) -> int:
    """Bytes that the refusal of a host that is too small tells of."""
    with pytest.raises(UserError) as refused:
        build(replace(case, disk=folder, host="1KB"))
    line = str(refused.value)
    found = re.search(r"at least (\d+) bytes", line)
    if found is not None:
        return int(found[1])
    found = re.match(r"gemini: ([\d.]+ [KMG]iB) of model data do not fit beside the device's, and the host has", line)
    assert found is not None, line
    return size_in_bytes(found[1], "least")


def waiting_of(state: TrainState) -> set[int]:
    disk = gemini_of(state.parallel).disk
    assert disk is not None
    return {chunk.index for chunk in disk.waiting.of}


def learned(state: TrainState, config: Any, case: Case, of_loss: Any = lambda step: loss) -> Any:
    """The figures of some steps, each durable, and the masters after them."""
    figures = []
    for step in range(STEPS):
        row = train_step(state, batch_of(case, step), of_loss(step), weight, config, step)
        figures.append((str(row["loss"]), str(row["grad_norm"]), row.get("skipped_steps")))
        state.commit(step + 1, config)
    return figures, {name: master.clone() for name, master in state.parallel.masters.items()}


def require_equal(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert [name for name, value in expected[1].items() if not torch.equal(found[1][name], value)] == []


# --- the plan ---------------------------------------------------------------------------------------------------------


def chunk_of(index: int, grad: int, learns: bool = True, waits: bool = True) -> ChunkInfo:
    grad = grad if learns else 0
    return ChunkInfo(index, 1, 1, 1, learns, 7, grad, 1000, 1, 900, grad if waits else 0)


def test_as_few_bytes_wait_as_the_host_cannot_hold() -> None:
    chunks = [chunk_of(0, 100), chunk_of(1, 60), chunk_of(2, 500), chunk_of(3, 60), chunk_of(4, 60, learns=False)]
    everything = frozenset(range(5))
    kept = host_bytes_of(chunks, frozenset(), everything, True)
    assert kept == 720 + PLACES * 1000

    def waits(host: int | None) -> tuple[set[int], int]:
        found = to_wait(chunks, frozenset(), everything, host)
        return set(found), host_bytes_of(chunks, frozenset(), everything, True, found)

    assert waits(None) == (set(), kept)
    assert waits(kept) == (set(), kept)
    assert waits(kept - 20) == ({0, 1, 3}, kept - 20)  # their places take 200: of those of 60 bytes 120 would
    assert waits(0) == ({0, 1, 3}, kept - 20)  # places of 500 bytes take more than all gradients
    assert to_wait([chunk_of(0, 100, waits=False)], frozenset(), frozenset({0}), 0) == frozenset()
    assert to_wait(chunks, frozenset({0, 1}), frozenset({2, 3, 4}), 0) == frozenset()


def test_a_gradient_that_waits_is_two_transfers_of_the_planned_step(opened) -> None:
    state, _ = opened(FP32)
    planned = gemini_of(state.parallel).planned
    assert planned is not None
    trace, plan = planned.trace, planned.plan
    assert plan.waiting
    assert plan.waiting <= plan.on_disk
    assert f"and the gradients of {len(plan.waiting)} on the disk" in plan.describe()
    lifetimes, slow = Lifetimes(trace), Bandwidth(1e12, 1e12, 1e12, 1e12, 0.0, 1e6, 1e6)
    kept = keep(lifetimes, plan.resident, plan.budget_bytes, 0)
    assert kept is not None
    of_disk = [
        timeline.run(lifetimes, plan.resident, kept, plan.budget_bytes, slow, plan.on_disk, waiting)
        for waiting in (frozenset(), plan.waiting)
    ]
    waits = sum(trace.chunks[index].wait_bytes for index in plan.waiting)
    assert of_disk[1].disk_read_bytes - of_disk[0].disk_read_bytes == waits
    assert of_disk[1].disk_written_bytes - of_disk[0].disk_written_bytes == waits
    assert of_disk[1].busy_s["disk"] - of_disk[0].busy_s["disk"] == pytest.approx(2 * waits / 1e6)
    assert plan.disk_bytes == 2 * sum(chunk.slot_bytes for chunk in trace.chunks) + waits
    tiers = planned_memory(trace, plan)
    assert sum(kind[0] for kind in tiers["disk"].values()) == plan.disk_bytes
    assert sum(kind[0] for kind in tiers["host"].values()) == plan.host_bytes


def test_the_refusal_tells_the_least_with_gradients_on_the_disk(opened, tmp_path: Path) -> None:
    state, _ = opened(FP32)
    gemini = gemini_of(state.parallel)
    least = gemini.host.budget_bytes
    assert least is not None
    state.parallel.close()
    with pytest.raises(UserError, match="of model data do not fit beside the device's, and the host has"):
        build(replace(FP32, disk=tmp_path / "disk", host=f"{least - 1100}B"))
    with patch.object(residency, "to_wait", lambda *_: frozenset()):
        assert least_host(FP32, tmp_path / "disk") > 1.1 * least


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optim", "options", "drives"),
    [
        ("adamw", {}, 1),
        ("adamw", {"microbatch": 2, "batch": 6}, 2),
        ("adafactor", {"microbatch": 2, "batch": 6, "planned": False}, 1),
        ("adafactor", {"clip": None}, 1),
    ],
)
def test_bit_equal_in_the_least_that_the_host_needs(
    opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: str, options: dict, drives: int
) -> None:
    case = replace(FP32, optim=optim, **options)
    expected = without(case)
    state, config = opened(case, folder=Path(",".join(str(tmp_path / f"drive-{k}") for k in range(drives))))
    gemini = gemini_of(state.parallel)
    assert len(waiting_of(state)) > 1
    assert gemini.disk is not None
    largest = max(gradient.num_bytes for gradient in gemini.disk.waiting.of.values())
    assert [place.nbytes for place in gemini.disk.waiting.places] == [largest] * WAITING_PLACES
    at, seen = Executor.at, Counter[str]()

    def accounted(*args: Any) -> None:
        assert gemini.host.budget_bytes is not None
        assert gemini._host_bytes() <= gemini.host.budget_bytes
        seen[args[1]] += 1
        at(*args)

    monkeypatch.setattr(Executor, "at", accounted)
    require_equal(learned(state, config, case), expected)
    assert seen["reduce"] > 0
    assert gemini.tier.peak_bytes <= gemini.tier.budget_bytes


@pytest.mark.parametrize(("microbatches", "clip"), [(1, 0.7), (1, None), (3, 0.7)])
def test_each_microbatch_writes_a_gradient_and_reads_it_once(opened, microbatches: int, clip: float | None) -> None:
    """Read for what is added by the next microbatch, the last time for the update."""
    case = replace(FP32, clip=clip, batch=2 * microbatches, microbatch=2)
    state, config = opened(case)
    disk, moved = gemini_of(state.parallel).disk, Counter[tuple[str, int]]()
    assert disk is not None
    train_step(state, batch_of(case, 0), loss, weight, config, 0)
    (drive,) = disk.drives
    for name in ("read", "write"):
        real = getattr(drive.file, name)

        def counted(offset: int, memory: torch.Tensor, *args: Any, name: str = name, real: Any = real) -> Any:
            moved[name, offset] += memory.nbytes
            return real(offset, memory, *args)

        setattr(drive.file, name, counted)
    train_step(state, batch_of(case, 1), loss, weight, config, 1)
    for chunk, gradient in disk.waiting.of.items():
        assert 0 <= gradient.num_bytes - 4 * chunk.own_elements < 4096
        assert moved["read", gradient.offset] == moved["write", gradient.offset] == microbatches * gradient.num_bytes


def test_updates_beside_the_backward_take_what_waits_even_of_a_step_that_is_skipped(
    opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_step(step: int) -> Callable[..., torch.Tensor]:
        return lambda model, batch: loss(model, batch) * (float("inf") if step == 1 else 1.0)

    def later(*args: Any) -> None:
        if current_thread().name.startswith("updates"):
            time.sleep(0.02)  # the backward is over when the last of them begin
        step_over(*args)

    case, accepted = replace(FP32, clip=None), list[int]()
    accept, step_over = Disk.accept, replicas.step_over
    monkeypatch.setattr(replicas, "step_over", later)
    monkeypatch.setattr(Disk, "accept", lambda disk, chunk: accepted.append(chunk.index) or accept(disk, chunk))
    expected = learned(*build(case), case, of_step)
    state, config = opened(case)
    require_equal(learned(state, config, case, of_step), expected)
    assert waiting_of(state) & set(accepted)
    assert expected[0][-1][-1] == 1


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["read", "write"])
def test_a_drive_that_fails_a_gradient_leaves_the_last_step(opened, name: str) -> None:
    expected = without(FP32)
    state, config = opened(FP32)
    go_on(state, config, steps=1)
    disk = gemini_of(state.parallel).disk
    assert disk is not None
    gradient = next(iter(disk.waiting.of.values()))
    at, real = f"_{name}", getattr(gradient.file, f"_{name}")

    def failing(offset: int, *args: Any) -> Any:
        if offset == gradient.offset:
            raise OSError(errno.EIO, "injected", str(gradient.file.path))
        return real(offset, *args)

    with patch.object(gradient.file, at, failing), pytest.raises(OSError, match="injected"):
        train_step(state, batch_of(FP32, 1), loss, weight, config, 1)
    state, config = opened(FP32)
    assert list(go_on(state, config, steps=STEPS).values()) == [float(row[0]) for row in expected[0][1:]]


def test_a_gradient_that_the_drive_has_lost_is_named(opened) -> None:
    state, config = opened(FP32)
    disk = gemini_of(state.parallel).disk
    assert disk is not None
    (chunk, gradient), *_ = disk.waiting.of.items()
    update = GeminiReplicas.update

    def rotten(replicas: GeminiReplicas, optimizer: Any) -> None:
        assert gradient.written is not None
        gradient.written.wait()
        with gradient.file.path.open("r+b") as other:
            other.seek(gradient.offset + 5)
            other.write(b"rot")
        update(replicas, optimizer)

    words = rf"bytes {gradient.offset} to .* \(the gradient of {re.escape(chunk.name)}\); go on from the last"
    with patch.object(GeminiReplicas, "update", rotten), pytest.raises(UserError, match=words):
        train_step(state, batch_of(FP32, 0), loss, weight, config, 0)


# --- a loop of one's own ----------------------------------------------------------------------------------------------


def clipped(model: Net, optimizer: torch.optim.Optimizer, gemini: Any = None) -> list[float]:
    """Norms of gradients that are clipped twice, in steps of two backwards."""
    norms = []
    for step in range(2):
        for half in range(2):
            net_loss(model, net_batch(2 * step + half)).backward()
        for most in (0.5, 0.3):
            if gemini is None:
                norm = gradient_norm(model.parameters(), build_mesh(MeshConfig().resolve(1, 3), "cpu"))
                scale_gradients(model.parameters(), min(1.0, most / (float(norm) + 1e-6)))
            else:
                norm = gemini.clip_grad_norm_(most)
            norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def test_a_loop_that_clips_twice_and_looks_at_a_gradient(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    expected = clipped(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(UserError) as refused:
        wrap(model, optimizer, 30_000, host=1000, disk=tmp_path / "disk", device="cpu")
    least = re.search(r"give at least (\d+) bytes", str(refused.value))
    assert least is not None
    gemini = wrap(model, optimizer, 30_000, host=int(least[1]), disk=tmp_path / "disk", device="cpu")
    try:
        assert gemini.parallel.disk is not None
        assert gemini.parallel.disk.waiting.of
        assert clipped(model, optimizer, gemini) == expected
        for name, value in gemini.state_dict().items():
            assert torch.equal(value, plain.get_parameter(name)), name
        net_loss(model, net_batch(0)).backward()
        gemini.reduce()
        chunk = next(iter(gemini.parallel.disk.waiting.of))
        grad = chunk.members[0].master.grad
        assert grad is not None
        with pytest.raises(RuntimeError, match=f"the gradient of {re.escape(chunk.members[0].name)} waits on the disk"):
            torch.clone(grad)
        gemini.optimizer.zero_grad()
    finally:
        gemini.close()
