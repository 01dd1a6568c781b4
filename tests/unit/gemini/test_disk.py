"""The disk below the host: bit for bit what training without it does, in its budgets, whatever the drive does."""

import errno
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn

from core.config import UserError
from core.files import Damaged
from core.gemini import direct, timeline, wrap
from core.gemini.config import GeminiConfig
from core.gemini.direct import CHECKED_BYTES, DirectFile, mapped_temporary
from core.gemini.disk import Disk
from core.gemini.drives import Folders, deal
from core.gemini.durable import DurableSteps
from core.gemini.figure import draw_memory, planned_memory
from core.gemini.generation import Folder, Generation, StoredChunk
from core.gemini.lifetimes import Lifetimes, keep
from core.gemini.loop import Gemini
from core.gemini.replicas import GeminiReplicas
from core.gemini.residency import PLACES, host_bytes_of, to_disk
from core.gemini.trace import ChunkInfo
from core.pinned import DRIVE_BLOCK, host_empty
from core.rng import rng_text
from core.runtime import join
from core.trace.machine import Bandwidth
from core.train import TrainState
from core.train.loop import train_step
from tests.support import command
from tests.support.disk import CASE, STEPS, Counted, counted_and_planned, failing, go_on, half
from tests.support.disk_plans import pages_in_cache
from tests.support.gemini import Net
from tests.support.gemini import batch as net_batch
from tests.support.gemini import loss as net_loss
from tests.support.gemini import train as plain_training
from tests.support.training import Case, batch_of, build, gemini_of, loss, run, weight


@pytest.fixture(scope="module", autouse=True)
def joined() -> None:
    join("cpu")


@pytest.fixture(scope="module")
def straight() -> dict[str, Any]:
    """What the case learns without a disk."""
    return run(replace(CASE, host=None))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., tuple[TrainState, Any]]]:
    """Runs of the case on a folder, which are closed at the end."""
    made: list[GeminiReplicas] = []

    def begin(case: Case = CASE, folder: Path = tmp_path / "disk") -> tuple[TrainState, Any]:
        for before in made:
            before.close()
        state, config = build(replace(case, disk=folder))
        made.append(gemini_of(state.parallel))
        return state, config

    yield begin
    for one in made:
        one.close()


def least_host(opened: Callable[..., Any], case: Case) -> str:
    """What the refusal of a host that is too small says."""
    with pytest.raises(UserError) as refused:
        opened(replace(case, host="1KB"))
    line = str(refused.value)
    assert "\n" not in line
    found = re.search(r"at least (\d+ bytes)", line) or re.search(r"([\d.]+ [KMG]iB) of model data", line)
    assert found is not None
    return found[1].replace("bytes", "B")


def require_learned(state: TrainState, straight: dict[str, Any]) -> None:
    for name, master in state.parallel.masters.items():
        piece = straight["start"][name].value + straight["displacement"][name].value
        assert torch.allclose(master, piece, rtol=0, atol=1e-7), name


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DirectFile]:
    file = DirectFile(tmp_path / "file", create=True)
    file.grow(0, 20 * CHECKED_BYTES)
    yield file
    file.close()


def memory(num_bytes: int, seed: int = 0) -> torch.Tensor:
    made = host_empty(num_bytes, torch.uint8, pinned=False, paged=True)
    return made.random_(generator=torch.Generator().manual_seed(seed))


def test_what_is_written_is_read(file: DirectFile) -> None:
    written, read = memory(11 * CHECKED_BYTES + DRIVE_BLOCK), memory(11 * CHECKED_BYTES + DRIVE_BLOCK, 1)
    sums = file.write(DRIVE_BLOCK, written).wait()
    assert len(sums) == 12
    assert file.read(DRIVE_BLOCK, read, sums).wait() == sums
    assert torch.equal(read, written)
    assert (file.read_bytes, file.written_bytes) == (read.nbytes, written.nbytes)
    assert file.is_direct


def test_a_block_that_is_not_what_was_written_is_named(file: DirectFile) -> None:
    sums = file.write(0, memory(11 * CHECKED_BYTES)).wait()
    with file.path.open("r+b") as other:
        other.seek(9 * CHECKED_BYTES + 5)
        other.write(b"rot")
    first, last = 9 * CHECKED_BYTES, 10 * CHECKED_BYTES - 1
    with pytest.raises(Damaged, match=f"bytes {first} to {last} are not those"):
        file.read(0, memory(11 * CHECKED_BYTES), sums).wait()


def test_mapped_memory_leaves_no_file(tmp_path: Path) -> None:
    tensor = mapped_temporary(tmp_path, (3, 5), torch.float32)
    assert tensor.fill_(2.0).sum() == 30
    assert mapped_temporary(tmp_path, (0, 3), torch.float32).shape == (0, 3)
    assert not list(tmp_path.iterdir())


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_what_does_not_learn_leaves_the_host_first() -> None:
    def chunk(index: int, kept: int, learns: bool) -> ChunkInfo:
        return ChunkInfo(index, 1, 1, 1, learns, kept + 10 * learns, 10 * learns, kept, 1, kept)

    chunks = [chunk(0, 100, True), chunk(1, 60, False), chunk(2, 300, True), chunk(3, 40, True)]
    everything = host_bytes_of(chunks, frozenset(), frozenset(), True)
    assert everything == 530 + PLACES * 300
    assert to_disk(chunks, frozenset(), None) == to_disk(chunks, frozenset(), everything) == frozenset()
    assert to_disk(chunks, frozenset(), everything - 1) == {1}
    assert to_disk(chunks, frozenset(), everything - 61) == {2}  # which alone does it
    assert to_disk(chunks, frozenset({2}), 0) == {0, 1, 3}
    assert host_bytes_of(chunks, frozenset(), to_disk(chunks, frozenset(), 0), True) == 30 + PLACES * 300


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optim", "precision"), [("adamw", "fp32"), ("sgd", "bf16"), ("adafactor", "fp32")])
def test_bit_equal_in_budgets_drawn_at_random(opened, optim: str, precision: Any) -> None:
    draw = random.Random(optim)
    parallel = replace(CASE.parallel, precision=precision)
    case = replace(CASE, optim=optim, parallel=parallel, host=None, budget=f"{draw.randint(105, 125)}KB")
    case = replace(case, planned=draw.random() < 0.7, microbatch=draw.choice([None, 2]))
    expected = run(case)
    state, config = opened(replace(case, host=least_host(opened, case)))
    for step in range(STEPS):
        figures = train_step(state, batch_of(case, step), loss, weight, config, step)
        assert figures["loss"] == expected["losses"][step]
        state.commit(step + 1, config)
    replicas = gemini_of(state.parallel)
    assert replicas.disk is not None
    assert replicas.disk.away
    assert 0 < replicas.host.peak_bytes <= replicas.host.budget_bytes
    assert replicas.tier.peak_bytes <= replicas.tier.budget_bytes
    for name, master in state.parallel.masters.items():
        assert torch.equal(master - expected["start"][name].value, expected["displacement"][name].value), name


@pytest.mark.parametrize(
    ("optim", "options", "moved", "clip"),
    [
        ("adamw", (), 26, 1.0),
        ("adamw", (), 26, None),
        ("adamw8bit", (), 14, 1.0),
        ("sgd", (("momentum", 0.0),), 10, 1.0),
    ],
)
def test_bytes_are_those_of_the_closed_form(opened, optim: str, options: tuple, moved: int, clip: float | None) -> None:
    """In bf16 an update reads masters and state, and writes them and the values in 16 bits, whenever it begins."""
    model = replace(CASE.model, dim=120, ffn_dim=240, num_layers=1)
    case = replace(CASE, model=model, optim=optim, options=options, budget="1.5MB", clip=clip)
    state, config = opened(replace(case, host=least_host(opened, case)))
    found, planned = counted_and_planned(state, config)
    assert found == planned
    disk = gemini_of(state.parallel).disk
    assert disk is not None
    largest = max(disk.slots.values(), key=lambda slots: slots.chunk.own_elements)
    of_update = largest.num_bytes + sum(b - a for a, b in largest.updated)
    assert of_update == pytest.approx(moved * largest.chunk.own_elements, rel=0.1)  # blocks of 4096 bytes are filled up


def test_the_page_cache_has_nothing_of_the_file(opened) -> None:
    state, config = opened()
    go_on(state, config)
    disk = gemini_of(state.parallel).disk
    assert disk is not None
    assert all(drive.file.is_direct for drive in disk.drives)
    assert [pages_in_cache(drive.file.path) for drive in disk.drives] == [0]


# --- durable steps ----------------------------------------------------------------------------------------------------


def test_another_budget_goes_on_from_the_last_step(opened, straight) -> None:
    state, config = opened()
    go_on(state, config, steps=2)
    state, config = opened(replace(CASE, budget="140KB", host="290KB"))
    durable = state.parallel.durable
    assert durable is not None
    assert durable.latest() == (2, str(config.out.resolve()))
    assert list(go_on(state, config).values()) == straight["losses"][2:STEPS]
    require_learned(state, straight)
    names = [path.name for path in (durable.folder / "rank-0").glob("chunks-*.bin")]
    assert len(names) == 1  # that of the first run has gone, with its last record


def test_faults_at_any_call_leave_the_last_step(tmp_path: Path) -> None:
    faults = ("kill", "EIO", "ENOSPC", "short")
    ran = command.run("-m", "tests.support.disk_faults", tmp_path, "drives", ",".join(faults), 11, 90)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["cases"].keys() == set(faults)
    assert found["resumed"] > 0


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failing_drive_leaves_the_last_step(opened, straight, code: int) -> None:
    state, config = opened()
    go_on(state, config, steps=2)
    with Counted() as calls:
        train_step(state, batch_of(CASE, 2), loss, weight, config, 2)
        state.commit(3, config)
    for nth in random.Random(code).sample(range(1, calls.count + 1), 2):
        state, config = opened()
        durable = state.parallel.durable
        assert durable is not None
        latest = durable.latest()
        assert latest is not None
        first = latest[0]
        with Counted(nth, failing(code)), pytest.raises(OSError, match="injected") as failed:
            go_on(state, config, steps=first + 1)
        assert failed.value.filename is not None
    state, config = opened()
    go_on(state, config)
    require_learned(state, straight)


def test_short_transfers_are_gone_on_with(opened, straight) -> None:
    with Counted() as calls:
        state, config = opened()
    for nth in range(5, 2 * calls.count, 40):
        with Counted(nth, half):
            go_on(state, config, steps=1 if nth < calls.count else STEPS)
    go_on(state, config)
    require_learned(state, straight)


def test_a_step_becomes_durable_beside_the_next_forward_and_before_its_updates(opened) -> None:
    state, config = opened()
    go_on(state, config, steps=1)
    disk, durable = gemini_of(state.parallel).disk, state.parallel.durable
    assert disk is not None
    assert durable is not None
    real, held, found = Folder.record, Event(), []
    update = GeminiReplicas.update

    def record(folder: Folder, generation: Any) -> None:
        held.wait()
        real(folder, generation)

    def updating(replicas: GeminiReplicas, optimizer: Any) -> None:
        held.set()
        with disk.updating():
            found.append(max(disk.folders.generations))
        update(replicas, optimizer)

    with patch.object(Folder, "record", record), patch.object(GeminiReplicas, "update", updating):
        train_step(state, batch_of(CASE, 1), loss, weight, config, 1)
        held.clear()
        state.commit(2, config)
        assert durable.latest() == (1, str(config.out.resolve()))
        train_step(state, batch_of(CASE, 2), loss, weight, config, 2)
        assert found == [1, 2]


def test_a_checkpoint_of_a_step_that_is_not_durable_waits_for_its_slots(opened) -> None:
    """As with `--gemini.durable-every 2`: nothing else waits for what the step's updates have written."""
    state, config = opened()
    go_on(state, config, steps=1)
    disk, real, asked = gemini_of(state.parallel).disk, os.pwritev, Event()
    assert disk is not None
    saved: dict[str, torch.Tensor] = {}

    def later(*args: Any) -> int:
        asked.wait(0.3)
        return real(*args)

    def save(step: int, tensors: dict[str, torch.Tensor], values: Any, random: Any) -> None:
        saved.update({name: tensor.clone() for name, tensor in tensors.items()})

    with patch.object(direct.os, "pwritev", later):
        train_step(state, batch_of(CASE, 1), loss, weight, config, 1)
        assert {write.slots.chunk for write in disk._begun()} & disk.away
        with patch.object(DurableSteps, "confirm", lambda steps: asked.set() or disk.confirm()):
            state.save(Mock(save=save), 2)
        asked.set()
        disk.drain()
    for name, tensor in state.tensors().items():
        assert torch.equal(saved[name], tensor), name


# --- several drives ---------------------------------------------------------------------------------------------------


def test_drives_are_done_with_their_chunks_at_the_same_time() -> None:
    chunks = [ChunkInfo(k, 1, 1, 1, k % 7 > 0, 16, 4, 12 + k % 3, 4, 12) for k in range(60)]
    on_disk, speeds = frozenset(range(0, 60, 2)), [(3e9, 2e9), (1e9, 1e9), (2e9, 1e9)]
    busy_s = [0.0] * 3
    for chunk, drive in zip(chunks, deal(chunks, on_disk, speeds), strict=True):
        read, write = speeds[drive]
        busy_s[drive] += 20 / read if chunk.index in on_disk else 0
        busy_s[drive] += chunk.slot_bytes / write if chunk.trainable else 0
    assert max(busy_s) < 1.1 * min(busy_s)
    assert deal(chunks, on_disk, speeds[:1]) == [0] * 60


def test_folders_on_one_drive_share_what_it_does(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    with patch.object(direct, "drive_speed", lambda folder: (8.0, 6.0)):
        speeds = direct.drive_speeds([tmp_path / "a", tmp_path / "b", tmp_path / "not there"])
    assert speeds == [(4.0, 3.0), (4.0, 3.0), direct.DESCRIBED_DRIVE]
    assert direct.with_drives(Bandwidth(1, 1, 1, 1), speeds[:2]).disk_write == 6.0


def test_two_drives_of_unequal_speed_learn_the_same_and_stop_and_go_on(opened, straight, tmp_path: Path) -> None:
    both = Path(f"{tmp_path / 'fast'},{tmp_path / 'slow'}")

    def speed(folder: Path) -> tuple[float, float]:
        return (6e9, 6e9) if folder.parent.name == "fast" else (2e9, 2e9)

    with patch.object(direct, "drive_speed", speed):
        state, config = opened(folder=both)
    disk = gemini_of(state.parallel).disk
    assert disk is not None
    assert go_on(state, config, steps=2) == dict(enumerate(straight["losses"][:2]))
    fast, slow = (drive.file.written_bytes for drive in disk.drives)
    assert 2 * slow < fast < 5 * slow
    for order in (Path(f"{tmp_path / 'slow'}"), Path(f"{tmp_path / 'fast'}")):
        state, config = opened(folder=order)
        assert state.parallel.durable is not None
        with pytest.raises(UserError, match=r"step \d has slots in chunks-\w+.bin, which lies in none of these"):
            state.parallel.durable.latest()
    state, config = opened(folder=Path(f"{tmp_path / 'slow'},{tmp_path / 'fast'}"))
    (tmp_path / "slow" / "rank-0" / "generation-0.json").unlink()  # killed between the two records
    assert list(go_on(state, config).values()) == straight["losses"][2:STEPS]
    require_learned(state, straight)
    for name in ("fast", "slow"):
        assert len(list((tmp_path / name / "rank-0").glob("chunks-*.bin"))) == 1


def test_the_first_record_of_one_folder_keeps_the_files_of_all(tmp_path: Path) -> None:
    """A process that is killed between the records of its first step leaves one folder without any."""
    given = [tmp_path / "a", tmp_path / "b"]
    folders = Folders(given, 0)
    files = [drive.file for drive in folders.drives()]
    chunks = [StoredChunk(file.path.name, 0, 0, [], [], []) for file in files]
    folders.opened[0].record(Generation(1, "run", chunks, {}, {}, b""))
    for file in files:
        file.close()
    for folder in folders.opened:
        folder.close()
    again = Folders(given[::-1], 0)
    assert list(again.generations) == [1]
    assert all(file.path.exists() for file in files)
    again.opened[0].record(Generation(1, "another", [], {}, {}, b""))
    with pytest.raises(UserError, match="a has steps of run; give folders of one run"):
        _ = again.generations
    again.close()


# --- bad input --------------------------------------------------------------------------------------------------------


def test_folders_that_are_refused(opened, tmp_path: Path) -> None:
    state, config = opened(folder=tmp_path / "disk")
    with pytest.raises(UserError, match=r"is in use by process \d+ .*or give another --gemini.disk"):
        Folder(tmp_path / "disk" / "rank-0")
    go_on(state, config, steps=1)
    state, config = opened(replace(CASE, model=replace(CASE.model, num_layers=1)))
    with pytest.raises(UserError, match="is of another model or optimizer: it has"):
        go_on(state, config)
    state, config = opened(replace(CASE, model=replace(CASE.model, ffn_dim=52)))
    with pytest.raises(UserError, match="is of another shape"):
        go_on(state, config)
    with pytest.raises(UserError, match="lies in memory"):
        Folder(Path("/dev/shm/megalith-test") / "rank-0")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="give a folder on a drive that can be written"):
        Folder(tmp_path / "file" / "rank-0")
    record = next((tmp_path / "disk" / "rank-0").glob("generation-*.json"))
    record.write_bytes(record.read_bytes().replace(b'"step": 1', b'"step": 7'))
    state.parallel.close()
    with pytest.raises(UserError, match="is damaged"):
        Folder(tmp_path / "disk" / "rank-0")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"budget": None, "disk": Path("x")}, "gemini.disk=x without a budget"),
        ({"budget": "1MB", "disk": Path("a,a")}, "gemini.disk=a,a: give each folder once"),
        ({"budget": "1MB", "disk": Path("a,")}, "gemini.disk=a,: give each folder once"),
        ({"budget": "1MB", "durable_every": 0}, "gemini.durable_every=0"),
    ],
)
def test_options_that_are_refused(options: dict, match: str) -> None:
    with pytest.raises(UserError, match=match):
        GeminiConfig(**options)


def test_the_figure_has_a_panel_for_the_disk(opened, tmp_path: Path) -> None:
    planned = gemini_of(opened()[0].parallel).planned
    assert planned is not None
    tiers = planned_memory(planned.trace, planned.plan)
    assert list(tiers) == ["device", "host", "disk"]
    assert sum(kind[0] for kind in tiers["disk"].values()) == planned.plan.disk_bytes
    assert sum(kind[0] for kind in tiers["host"].values()) == planned.plan.host_bytes
    assert draw_memory(tmp_path / "memory.png", planned.trace, planned.plan).stat().st_size > 10_000


def test_nothing_old_is_read_ahead(opened) -> None:
    """While chunks are updated others are fetched for the next step; what comes behind those is old still."""
    state, config = opened()
    go_on(state, config, steps=1)
    disk = gemini_of(state.parallel).disk
    assert disk is not None
    first, second = disk.order[:2]
    second.is_filled = False

    with disk.updating(), disk.values(first):
        pass
    assert not disk._ahead
    disk._cursor = 0
    with disk.values(first):
        pass
    assert next(iter(disk._ahead)) is second
    disk.forget_ahead()
    assert not disk._area._taken


def test_rot_in_what_was_read_ahead_is_told_when_somebody_asks_for_it(opened) -> None:
    state, config = opened()
    go_on(state, config, steps=1)
    disk = gemini_of(state.parallel).disk
    assert disk is not None
    first, second = disk.order[:2]
    slots, disk._cursor = disk.slots[second], 0
    with disk.drives[0].file.path.open("r+b") as file:
        file.seek(slots.offset(slots.latest) + slots.fetched.begin)
        file.write(b"rot")
    with disk.values(first):
        pass
    assert second in disk._ahead
    disk.forget_ahead()
    with pytest.raises(UserError, match=r"is damaged: bytes \d+ to \d+ .*the drive has lost it"), disk.values(second):
        pass


def test_what_killed_processes_have_left_beside_a_record_goes(tmp_path: Path) -> None:
    left = [tmp_path / "rank-0" / name for name in (".probe-17", ".generation-1.json.17-18.part")]
    left[0].parent.mkdir()
    for path in left:
        path.write_bytes(b"half")
    Folder(tmp_path / "rank-0").close()
    assert [path.name for path in left[0].parent.iterdir()] == [".lock"]


# --- updates before the step's end ------------------------------------------------------------------------------------


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What becomes of updates that begin before the step's end."""
    found: list[str] = []
    for name in ("accept", "_give_up"):
        real = getattr(Disk, name)
        monkeypatch.setattr(Disk, name, lambda *args, name=name, real=real: found.append(name) or real(*args))
    return found


UNCLIPPED = replace(CASE, clip=None, parallel=replace(CASE.parallel, precision="fp32"), budget="110KB", host="230KB")


def test_updates_beside_the_backward_change_nothing_even_of_a_step_that_is_skipped(opened, begun: list[str]) -> None:
    def of_step(step: int) -> Callable[..., torch.Tensor]:
        return lambda model, batch: loss(model, batch) * (float("inf") if step == 1 else 1.0)

    learned = []
    for case, begin in ((replace(UNCLIPPED, host=None), build), (UNCLIPPED, opened)):
        state, config = begin(case)
        figures = []
        for step in range(STEPS):
            row = train_step(state, batch_of(case, step), of_step(step), weight, config, step)
            figures.append((str(row["loss"]), str(row["grad_norm"]), row.get("skipped_steps")))
            state.commit(step + 1, config)
        learned.append((figures, {name: master.clone() for name, master in state.parallel.masters.items()}))
    (expected, values), (found, others) = learned
    assert found == expected
    assert expected[-1][-1] == 1
    assert all(torch.equal(others[name], value) for name, value in values.items())
    away = begun.count("_give_up")
    assert away > 0
    assert begun.count("accept") == (STEPS - 1) * away


def test_clipping_and_every_other_step_wait_for_the_end(opened, begun: list[str]) -> None:
    state, config = opened(replace(UNCLIPPED, clip=1.0))
    go_on(state, config, steps=1)
    assert not begun
    state, config = opened(UNCLIPPED, folder=opened_again(config))
    for step in range(2):  # the second overwrites what the first has left in the slot that is not durable
        train_step(state, batch_of(UNCLIPPED, step), loss, weight, config, step)
    disk = gemini_of(state.parallel).disk
    assert disk is not None
    assert len(begun) == len([chunk for chunk in disk.away if chunk.trainable])


def opened_again(config: Any) -> Path:
    return config.gemini.disk.parent / "other"


def test_a_plan_knows_of_updates_beside_the_backward(opened) -> None:
    """Of a drive that takes as long as the backward, it foresees most of an update's time gone."""
    planned = gemini_of(opened(UNCLIPPED)[0].parallel).planned
    assert planned is not None
    assert planned.trace.updates_as_final
    trace, plan = planned.trace, planned.plan
    computing = replace(trace, moments=tuple(replace(m, seconds=1.0) for m in trace.moments))
    slow = Bandwidth(1e12, 1e12, 1e12, 1e12, 0.0, *2 * [sum(c.slot_bytes for c in trace.chunks) / 10])
    step_s = {}
    for early in (False, True):
        lifetimes = Lifetimes(replace(computing, updates_as_final=early))
        kept = keep(lifetimes, plan.resident, plan.budget_bytes, 0)
        step_s[early] = timeline.run(lifetimes, plan.resident, kept, plan.budget_bytes, slow, plan.on_disk).step_s
    assert step_s[True] < step_s[False] - 1


# --- a loop of one's own ----------------------------------------------------------------------------------------------


def wrapped(folder: Path, host: int | str = "150KB", budget: int | str = 30_000) -> Callable[..., Any]:
    def train_from(steps: int, make: Callable[[], Any] = Net, early: bool = False) -> Any:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        gemini = wrap(model, optimizer, budget, host=host, disk=folder, device="cpu")
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        losses = []
        try:
            first, kept = gemini.resume()
            assert kept == ({} if first == 0 else {"after": first})
            for step in range(first, steps):
                value = net_loss(model, net_batch(step))
                with gemini.last_backward() if early else nullcontext():
                    value.backward()
                optimizer.step()
                optimizer.zero_grad()
                gemini.commit(step + 1, {"after": step + 1})
                losses.append(float(value.detach()))
            assert gemini.parallel.host.peak_bytes <= gemini.parallel.host.budget_bytes
            return losses, gemini.state_dict(), len(gemini.parallel.disk.away)
        finally:
            gemini.close()

    return train_from


@pytest.mark.parametrize("recompute", [None, True])
def test_a_loop_of_ones_own_stops_and_goes_on(tmp_path: Path, begun: list[str], recompute: bool | None) -> None:
    """Reentrant checkpoints of a block that is used twice give two gradients: the first was not final."""
    make = partial(Net, twice=True, recompute=recompute)
    expected = plain_training(make, None, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    losses, _, away = wrapped(tmp_path / "disk")(2, make, early=True)
    more, values, _ = wrapped(tmp_path / "disk", budget=40_000)(4, make, early=True)
    assert away > 0
    assert losses + more == expected.losses
    assert all(torch.equal(values[name], value) for name, value in expected.values.items())
    assert ("_give_up" in begun) == bool(recompute)
    assert recompute or "accept" in begun


class WithBuffers(nn.Module):
    """Batch norms, one of them twice, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*[nn.Linear(40, 40) for _ in range(17)])
        self.norm = nn.BatchNorm1d(40)
        self.again = self.norm
        self.frozen = nn.Linear(40, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.again(self.norm(self.inner(x)))).square().mean()


def with_buffers(folder: Path | None, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = WithBuffers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gemini = None
    if folder is not None:
        gemini = wrap(model, optimizer, "60KB", host="200KB", disk=folder, device="cpu")
    first, losses = gemini.resume()[0] if gemini else 0, []
    for step in range(first, steps):
        loss = model(torch.randn(8, 40, generator=torch.Generator().manual_seed(step)) * 2 + 3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if gemini is not None:
            gemini.commit(step + 1)
    if gemini is None:
        return losses, dict(model.state_dict())
    assert gemini.parallel.disk is not None
    assert gemini.parallel.disk.away
    values = gemini.state_dict()
    gemini.close()
    return losses, values


def test_buffers_go_with_a_step(tmp_path: Path) -> None:
    expected, whole = with_buffers(None, 4)
    losses, _ = with_buffers(tmp_path / "disk", 2)
    more, values = with_buffers(tmp_path / "disk", 4)
    assert losses + more == expected
    assert values.keys() == whole.keys()
    assert all(torch.equal(values[name], value) for name, value in whole.items())
    assert int(whole["norm.num_batches_tracked"]) == 8
    WithBuffers().load_state_dict(values)


def test_a_step_without_buffers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier version kept beside a step: the state of random generators as text."""
    with monkeypatch.context() as earlier:
        earlier.setattr(Gemini, "_beside", lambda _: json.dumps(rng_text()).encode())
        with_buffers(tmp_path / "disk", 1)
    with pytest.raises(UserError, match=r"step 1 in disk=.* is of a version that kept no buffers; go on with that one"):
        with_buffers(tmp_path / "disk", 2)


def test_a_model_with_other_buffers_is_refused(tmp_path: Path) -> None:
    with_buffers(tmp_path / "disk", 1)
    model = WithBuffers()
    optimizer = torch.optim.AdamW(model.parameters())
    held = wrap(model, optimizer, "60KB", host="200KB", disk=tmp_path / "disk", device="cpu")
    try:
        model.norm.register_buffer("more", torch.zeros(3))
        with pytest.raises(UserError, match=r"step 1 in .* is of a model with other buffers \(buffer/.*; give"):
            held.resume()
    finally:
        held.close()


def test_what_a_loop_with_a_disk_refuses(tmp_path: Path) -> None:
    wrapped(tmp_path / "disk")(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(UserError, match="are to live on the host; give at least"):
        wrap(model, optimizer, 30_000, host=1000, disk=tmp_path / "disk", device="cpu")
    gemini = wrap(model, optimizer, 30_000, host="200KB", disk=tmp_path / "disk", device="cpu")  # nothing is held
    try:
        with pytest.raises(UserError, match=r"already holds step 1; call resume\(\)"):
            gemini.commit(1)
        with pytest.raises(UserError, match="a step with a closure"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(UserError, match="load it before wrap"):
            optimizer.load_state_dict({})
        optimizer.register_step_post_hook(lambda *_: None)
        with pytest.raises(UserError, match="hooks at the optimizer's steps"):
            optimizer.step()
    finally:
        gemini.close()
    model = Net()
    plain = wrap(model, torch.optim.AdamW(model.parameters()), 40_000, device="cpu")
    with pytest.raises(UserError, match=r"commit\(\) without a disk"):
        plain.commit(1)
