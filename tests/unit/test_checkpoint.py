"""Checkpoints in one process: what comes back, what a crash leaves, what is refused. Ranks: tests/parity."""

import errno
import os
import pickle
import random
import shutil
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import SavePlan

from core.checkpoint import CheckpointConfig, Checkpointer, complete_steps, inspect, iterate_full, read_full
from core.checkpoint import checkpointer as checkpointer_module
from core.checkpoint.shards import Shard, item_bytes, staged_bytes, write_once
from core.config import UserError
from core.layout import Layout, tag
from core.mesh import MeshConfig, MeshShape, build_mesh, host_group
from core.rng import rng_state, set_rng_state
from tests.support.checkpoints import edit_json, flipped, flips, sign_again, without_checksums


@pytest.fixture
def open_checkpointer():
    opened = []

    def open_(folder: Path, **options) -> Checkpointer:
        opened.append(Checkpointer(folder, CheckpointConfig(**options)))
        return opened[-1]

    yield open_
    for checkpointer in opened:
        checkpointer.close()


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model/weight": torch.randn(97, 13, generator=generator),
        "model/bias": torch.randn(13, generator=generator, dtype=torch.float64),
        "model/half": torch.randn(5, generator=generator).bfloat16(),
        "optim/step": torch.tensor(7.0),
        "optim/count": torch.arange(4),
        "optim/mask": torch.tensor([True, False]),
        "optim/none": torch.empty(0, 5),
        "optim/transposed": torch.randn(3, 4, generator=generator).T,
    }


def emptied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_everything_comes_back(tmp_path, open_checkpointer, asynchronous):
    checkpointer = open_checkpointer(tmp_path, asynchronous=asynchronous)
    tensors, values = some_tensors(), {"tokens": 12, "config": {"lr": 1e-4, "name": "ß"}}
    rank_values = {"blob": b"\x00\xff", "generator": torch.arange(3, dtype=torch.uint8), "nothing": b""}
    checkpointer.save(100, tensors, values, rank_values)
    loaded = emptied(tensors)
    addresses = {name: tensor.data_ptr() for name, tensor in loaded.items()}
    step, loaded_values, loaded_rank_values = checkpointer.load(None, loaded)
    assert (step, loaded_values) == (100, values)
    assert same(loaded, tensors)
    assert {name: tensor.data_ptr() for name, tensor in loaded.items()} == addresses
    assert loaded_rank_values.keys() == rank_values.keys()
    assert loaded_rank_values["blob"] == b"\x00\xff"
    assert loaded_rank_values["nothing"] == b""
    assert torch.equal(loaded_rank_values["generator"], rank_values["generator"])


def test_parameters_are_loaded_in_place_and_keep_their_gradient(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path)
    saved, loaded = nn.Linear(3, 2), nn.Linear(3, 2)
    checkpointer.save(1, dict(saved.named_parameters()), {}, {})
    checkpointer.load(1, dict(loaded.named_parameters()))
    assert torch.equal(loaded.weight, saved.weight)
    assert loaded.weight.requires_grad
    assert loaded.weight.is_leaf


def test_training_goes_on_while_a_save_is_written(tmp_path, open_checkpointer, monkeypatch):
    """`save` returns before a byte is written, what is written is what was there then, and the next save waits."""
    may_write, writing = threading.Event(), []
    write_file = checkpointer_module.write_file

    def slow_write(path, content):
        writing.append(path)
        assert may_write.wait(20)
        write_file(path, content)

    monkeypatch.setattr(checkpointer_module, "write_file", slow_write)
    checkpointer = open_checkpointer(tmp_path)
    tensors, values = some_tensors(), {"position": [1]}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    checkpointer.save(1, tensors, values, {})
    assert checkpointer.steps() == []
    for tensor in tensors.values():
        tensor.zero_()
    values["position"].append(2)
    threading.Timer(0.2, may_write.set).start()
    checkpointer.save(2, tensors, values, {})
    assert checkpointer.steps() == [1], "the second save did not wait for the first"
    checkpointer.wait()
    loaded = emptied(before)
    assert checkpointer.load(1, loaded)[1] == {"position": [1]}
    assert same(loaded, before)
    checkpointer.load(2, loaded)
    assert same(loaded, tensors)


def test_what_lies_on_the_host_asks_nothing_of_a_gpu_beside_it(tmp_path, open_checkpointer, monkeypatch):
    """A question would make a context on the first GPU, which takes half a gigabyte of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: pytest.fail("a stream of a GPU was asked for"))
    checkpointer = open_checkpointer(tmp_path)
    checkpointer.save(1, some_tensors(), {}, {})
    checkpointer.wait()


def test_buffers_are_reused_from_save_to_save(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path)
    addresses = []
    for step in (1, 2):
        checkpointer.save(step, some_tensors(), {}, {})
        checkpointer.wait()
        addresses.append({box.fqn: buffer.data_ptr() for box, buffer in checkpointer._staging._buffers.items()})
    assert addresses[0] == addresses[1]
    assert addresses[0].keys() == some_tensors().keys()
    staged = sum(buffer.nbytes for buffer in checkpointer._staging._buffers.values())
    assert staged == staged_bytes(sum(tensor.nbytes for tensor in some_tensors().values()))


@pytest.mark.parametrize("call", ["wait", "save", "load", "close"])
def test_a_failure_in_the_background_surfaces_at_the_next_call(tmp_path, monkeypatch, call):
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())
    tensors = some_tensors()
    checkpointer.save(1, tensors, {}, {})
    checkpointer.wait()

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer_module, "write_file", full)
        checkpointer.save(2, tensors, {}, {})
        arguments = {"save": (3, tensors, {}, {}), "load": (None, tensors)}.get(call, ())
        with pytest.raises(UserError, match=r"cannot save step 2 in .*No space left.*free space"):
            getattr(checkpointer, call)(*arguments)
    if call != "close":
        checkpointer.save(4, tensors, {}, {})
        checkpointer.close()
        assert checkpointer.steps() == [1, 4]
    assert not list(tmp_path.glob("*.tmp-*")) or call == "close"


def test_the_last_n_are_kept(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path, keep=2)
    for step in (10, 20, 30, 20):
        checkpointer.save(step, {"x": torch.tensor(float(step))}, {}, {})
    checkpointer.wait()
    assert checkpointer.steps() == [20, 30]
    checkpointer.save(5, {"x": torch.tensor(5.0)}, {}, {})
    checkpointer.wait()
    assert checkpointer.steps() == [5, 30], "a run that starts over must not lose what it just saved"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000030"]


def test_no_more_than_asked_is_removed(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path, keep=5)
    for step in range(1, 8):
        checkpointer.save(step, {"x": torch.tensor(float(step))}, {}, {})
        checkpointer.wait()
        assert checkpointer.steps() == list(range(max(1, step - 4), step + 1))


def test_the_same_step_is_replaced(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path, keep=1)
    for value in (1.0, 2.0):
        checkpointer.save(7, {"x": torch.tensor(value)}, {"value": value}, {})
    checkpointer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    assert read_full(tmp_path)["x"] == 2.0
    assert inspect(tmp_path).values == {"value": 2.0}


@pytest.mark.parametrize("next_step", [2, 1], ids=["new step", "same step again"])
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path, next_step):
    """Kill -9 a child before its n-th operation on the file system, for every n, and load what is there."""
    outcomes = set()
    for operation in range(1, 200):
        folder = tmp_path / str(operation)
        finished = _save_and_be_killed(folder, next_step, operation)
        steps = complete_steps(folder)
        assert steps, f"killed before operation {operation}: nothing complete is left"
        for path in steps.values():
            value = inspect(path).values["value"]
            assert read_full(path)["x"].tolist() == [float(value)] * 5
            outcomes.add(value)
        _save_next(folder, 3)
        assert not list(folder.glob("*.tmp-*")), "the next save did not clear what the crashed one left"
        assert not list(folder.glob("*.replaced-*"))
        assert read_full(folder)["x"].tolist() == [3.0] * 5
        shutil.rmtree(folder)
        if finished:
            break
    assert operation > 10, "the audit hook saw no operations: the test kills nothing"
    assert outcomes == {1, 2}


def _save_next(folder: Path, value: int, step: int = 3) -> None:
    checkpointer = Checkpointer(folder, CheckpointConfig(keep=1))
    checkpointer.save(step, {"x": torch.full((5,), float(value))}, {"value": value}, {})
    checkpointer.close()


def _save_and_be_killed(folder: Path, step: int, operation: int) -> bool:
    """Save 1 as step 1, then 2 as `step` in a child that dies before its n-th operation; whether it lived."""
    _save_next(folder, 1, step=1)
    child = os.fork()
    if child == 0:
        counted = 0

        def kill_at_operation(event, arguments):
            nonlocal counted
            # Removals go by names relative to an open folder, so only `open` can be told from other people's files.
            changes = event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove")
            if changes or (event == "open" and str(folder) in str(arguments[0])):
                counted += 1
                if counted == operation:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill_at_operation)
        _save_next(folder, 2, step)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status == 0


class Malicious:
    """Unpickling this creates a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (open, (str(self.target), "w"))


def _malicious_shard(step: Path) -> None:
    """A tensor whose bytes are a pickle that creates a file when it is unpickled, in the place of the real ones."""
    torch.save(Malicious(step.parent / "owned"), step / "__0_0.distcp")
    nbytes = (step / "__0_0.distcp").stat().st_size
    edit_json(
        step / "tensors.json", lambda c: [k.update(first_byte=0, bytes=nbytes) for t in c.values() for k in t["chunks"]]
    )


def _foreign(step: Path) -> None:
    """A folder that Distributed Checkpoint might have written, with a malicious index."""
    (step / "complete.json").unlink()
    (step / ".metadata").write_bytes(pickle.dumps(Malicious(step.parent / "owned")))


def _outside(step: Path) -> None:
    shutil.copy(step / "__0_0.distcp", step.parent / "secret")
    edit_json(step / "tensors.json", lambda c: c["x"]["chunks"][0].update(file="../secret"))


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def _truncate(path: Path, nbytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(nbytes)


def _garble(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)


# damage -> what is said of it, and what is where the checksums are right all the same (None: the same)
DAMAGES = {
    "missing": (shutil.rmtree, "there is no such folder", None),
    "foreign": (_foreign, "not a complete Megalith checkpoint", None),
    "malicious shard": (_malicious_shard, "tensors.json is", "cannot be read"),
    "malicious index of torch": (
        lambda step: (
            (step / ".metadata").write_bytes(pickle.dumps(Malicious(step.parent / "owned"))),
            (step / "tensors.json").unlink(),
        ),
        "tensors.json is missing",
        None,
    ),
    "truncated shard": (lambda step: _truncate(step / "__0_0.distcp", 3000), "truncated (3000 of", None),
    "empty shard": (lambda step: _truncate(step / "__0_0.distcp", 0), "truncated (0 of", None),
    "longer shard": (lambda step: _append(step / "__0_0.distcp"), "__0_0.distcp is too long", None),
    "garbled shard": (lambda step: _garble(step / "__0_0.distcp"), "__0_0.distcp is damaged", "cannot be read"),
    "missing shard": (lambda step: (step / "__0_0.distcp").unlink(), "__0_0.distcp is missing", None),
    "truncated record": (lambda step: _truncate(step / "complete.json", 30), "complete.json cannot be read", None),
    "binary record": (
        lambda step: (step / "complete.json").write_bytes(b"\xff\xfe\x00"),
        "complete.json cannot be",
        None,
    ),
    "record is a list": (lambda step: (step / "complete.json").write_text("[]"), "not a JSON object", None),
    "wrong format": (
        lambda step: edit_json(step / "complete.json", lambda c: c.update(format=99)),
        "its complete.json says format 99, and this version reads 1 and 2",
        "its complete.json says format 99, and this version reads 1 and 2",
    ),
    "a format without checksums": (
        lambda step: edit_json(step / "complete.json", lambda c: c.update(format=1)),
        "complete.json is damaged",
        None,
    ),
    "record without a step": (
        lambda step: edit_json(step / "complete.json", lambda c: c.pop("step")),
        "complete.json is damaged",
        "damaged ('step')",
    ),
    "truncated index": (lambda step: _truncate(step / "tensors.json", 50), "tensors.json is truncated", None),
    "unknown dtype": (
        lambda step: edit_json(step / "tensors.json", lambda c: c["x"].update(dtype="load")),
        "tensors.json is",
        "no dtype load",
    ),
    "file outside the folder": (_outside, "tensors.json is", "x lies in ../secret"),
    "index with a hole": (
        lambda step: edit_json(step / "tensors.json", lambda c: c["x"].update(chunks=[])),
        "tensors.json is truncated",
        "does not cover the whole of x",
    ),
    "truncated rank values": (lambda step: _truncate(step / "rank-00000.safetensors", 20), "rank-00000.saf", None),
    "garbled rank values": (
        lambda step: _garble(step / "rank-00000.safetensors"),
        "rank-00000.safetensors is damaged",
        "rank-00000.safetensors cannot be read",
    ),
    "rank values of another rank": (
        lambda step: (step / "rank-00000.safetensors").unlink(),
        "rank-00000.safetensors is missing",
        None,
    ),
}


@pytest.mark.parametrize("right_checksums", [False, True])
@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_or_foreign_gets_one_line_and_is_never_executed(
    tmp_path, open_checkpointer, name, right_checksums
):
    damage, reason, reason_behind = DAMAGES[name]
    if right_checksums and reason_behind is None:
        return  # nothing is left of which checksums could be right
    checkpointer = open_checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, {"x": torch.randn(40, 30)}, {}, rng_state())
    checkpointer.wait()
    damage(tmp_path / "step-00000002")
    if right_checksums:
        sign_again(tmp_path / "step-00000002")
    with pytest.raises(UserError) as error:
        checkpointer.load(tmp_path / "step-00000002", {"x": torch.zeros(40, 30)})
    assert (reason_behind if right_checksums else reason) in str(error.value)
    assert "\n" not in str(error.value)
    good = "the nearest good checkpoint is that of step 1; resume from it, into another --out: "
    good += str(tmp_path / "step-00000001")
    assert good in str(error.value)
    assert "step 2" in str(error.value)
    assert not (tmp_path / "owned").exists()
    checkpointer.load(1, {"x": torch.zeros(40, 30)})


def test_no_flipped_byte_in_any_file_is_accepted(tmp_path, open_checkpointer):
    """Of each file some at random, and every byte of the two that say what the others are."""
    checkpointer = open_checkpointer(tmp_path)
    tensors = some_tensors()
    checkpointer.save(1, tensors, {"tokens": 12}, rng_state())
    checkpointer.wait()
    step = tmp_path / "step-00000001"
    files = sorted(step.iterdir())
    assert [file.name for file in files] == [
        ".metadata", "__0_0.distcp", "complete.json", "rank-00000.safetensors", "tensors.json",
    ]  # fmt: skip
    drawn = list(flips(files, 100, seed=0))
    drawn += [(step / "complete.json", at, 1) for at in range((step / "complete.json").stat().st_size)]
    for path, at, mask in drawn:
        with flipped(path, at, mask), pytest.raises(UserError, match=f"cannot load step 1 .*{path.name}"):
            checkpointer.load(1, emptied(tensors))
    loaded = emptied(tensors)
    checkpointer.load(1, loaded)
    assert same(loaded, tensors)


def test_the_nearest_good_step_is_read_before_it_is_named(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path, keep=5)
    for step in (10, 20, 30, 60):
        checkpointer.save(step, {"x": torch.randn(40, 30)}, {}, {})
    checkpointer.wait()
    shards = {step: tmp_path / f"step-{step:08d}" / "__0_0.distcp" for step in (10, 20, 30, 60)}
    with flipped(shards[30], 2000, 1):
        with pytest.raises(UserError, match=r"step 30 .*nearest good checkpoint is that of step 20"):
            checkpointer.load(30, {"x": torch.zeros(40, 30)})
        with flipped(shards[20], 2000, 1):
            with pytest.raises(UserError, match=r"step 30 .*nearest good checkpoint is that of step 10"):
                checkpointer.load(30, {"x": torch.zeros(40, 30)})
            with (
                flipped(shards[10], 2000, 1),
                flipped(shards[60], 2000, 1),
                pytest.raises(UserError, match="there is no good checkpoint in"),
            ):
                checkpointer.load(None, {"x": torch.zeros(40, 30)})


def test_a_checkpoint_of_the_format_without_checksums_is_read_with_a_line(tmp_path, open_checkpointer, capsys):
    checkpointer = open_checkpointer(tmp_path)
    tensors = some_tensors()
    checkpointer.save(1, tensors, {"tokens": 12}, rng_state())
    checkpointer.wait()
    without_checksums(tmp_path / "step-00000001")
    loaded = emptied(tensors)
    _, values, rank_values = checkpointer.load(1, loaded)
    assert same(loaded, tensors)
    assert values == {"tokens": 12}
    assert set(rank_values) == set(rng_state())
    said = capsys.readouterr().err
    assert "step-00000001 was saved without checksums (format 1)" in said
    assert said.count("\n") == 1
    assert same(read_full(tmp_path), tensors)


def test_a_disk_that_fills_inside_a_tensor_file_is_one_line(tmp_path, open_checkpointer, monkeypatch):
    """torch.save's writer answers a failed write with an exception that names no disk."""
    checkpointer = open_checkpointer(tmp_path, asynchronous=False)
    checkpointer.save(1, {"x": torch.randn(40, 30)}, {}, {})
    path_open = Path.open

    class Full:
        def __init__(self, file) -> None:
            self.file, self.room = file, 3000

        def __enter__(self):
            return self

        def __exit__(self, *error) -> None:
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data) -> int:
            self.room -= len(data)
            if self.room < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

    def open_full(path, mode="r", *options):
        file = path_open(path, mode, *options)
        return Full(file) if path.suffix == ".distcp" and "w" in mode else file

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(UserError, match=r"cannot save step 2 in .*No space left.*__0_0.distcp.*free space") as error:
        checkpointer.save(2, {"x": torch.randn(40, 30)}, {}, {})
    assert "\n" not in str(error.value)
    assert checkpointer.steps() == [1]


def test_the_malicious_pickles_of_this_file_do_create_a_file_when_unpickled(tmp_path):
    pickle.loads(pickle.dumps(Malicious(tmp_path / "owned")))
    assert (tmp_path / "owned").exists()


def test_steps_that_are_not_there(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path / "new")
    assert checkpointer.latest() is None
    with pytest.raises(UserError, match=r"no complete checkpoint in .*new; start from the beginning"):
        checkpointer.load(None, {})
    checkpointer.save(3, {"x": torch.zeros(1)}, {}, {})
    with pytest.raises(UserError, match=r"no complete checkpoint of step 4 in .*; there are those of steps 3"):
        checkpointer.load(4, {"x": torch.zeros(1)})
    assert checkpointer.latest() == 3


def test_names_shapes_and_kinds_of_dtype_must_agree(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path)
    tensors = {"model/a": torch.ones(3), "model/b": torch.ones(3, dtype=torch.int64), "optim/a": torch.ones(3)}
    checkpointer.save(1, tensors, {}, {})
    refused = {
        "lacks model/c, model/d, model/e and 1 more": {f"model/{n}": torch.ones(1) for n in "fdec"} | tensors,
        "has, and this run does not, model/b, optim/a": {"model/a": torch.ones(3)},
        r"model/a is \(3,\) in .* and \(4,\) here": tensors | {"model/a": torch.ones(4)},
        "model/b is torch.int64 in .* and torch.float32 here": tensors | {"model/b": torch.ones(3)},
        "model/a is torch.float32 in .* and torch.int32 here": tensors | {"model/a": torch.ones(3, dtype=torch.int32)},
    }
    for message, asked in refused.items():
        kept = {name: tensor.clone() for name, tensor in asked.items()}
        with pytest.raises(UserError, match=message):
            checkpointer.load(1, asked)
        assert same(asked, kept), "a refused load must not have begun"


def test_floating_dtypes_are_cast(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path)
    saved = torch.randn(50, dtype=torch.float64)
    checkpointer.save(1, {"x": saved}, {}, {})
    for dtype in (torch.float32, torch.bfloat16):
        loaded = torch.zeros(50, dtype=dtype)
        checkpointer.load(1, {"x": loaded})
        assert torch.equal(loaded, saved.to(dtype))


def test_part_of_a_checkpoint(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path)
    tensors = some_tensors()
    checkpointer.save(1, tensors, {}, {})
    model = {name: torch.zeros_like(t) for name, t in tensors.items() if name.startswith("model/")}
    checkpointer.load(1, model, under="model/")
    assert all(torch.equal(model[name], tensors[name]) for name in model)
    with pytest.raises(UserError, match="does not, model/weight"):
        checkpointer.load(1, {name: t for name, t in model.items() if name != "model/weight"}, under="model/")


def test_whole_tensors_without_a_checkpointer(tmp_path, open_checkpointer, monkeypatch):
    checkpointer = open_checkpointer(tmp_path / "checkpoints")
    tensors = some_tensors()
    checkpointer.save(12, tensors, {"a": 1}, {})
    checkpointer.wait()
    stored = inspect(tmp_path / "checkpoints")
    assert stored.path == tmp_path / "checkpoints/step-00000012"
    assert (stored.step, stored.world_size, stored.values) == (12, 1, {"a": 1})
    assert {n: (t.shape, t.dtype) for n, t in stored.tensors.items()} == {
        n: (tuple(t.shape), t.dtype) for n, t in tensors.items()
    }
    assert same(read_full(stored.path), tensors)
    assert same(read_full(stored.path, ["optim/step"]), {"optim/step": tensors["optim/step"]})
    with pytest.raises(UserError, match="lacks nonsense"):
        read_full(stored.path, ["nonsense", "optim/step"])

    name, first = next(iter(iterate_full(stored.path)))
    assert torch.equal(first, tensors[name])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_itself_reads_our_folder(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path, asynchronous=False)
    tensors = some_tensors()
    checkpointer.save(1, tensors, {}, {})
    loaded = emptied(tensors)
    dcp.load(loaded, checkpoint_id=tmp_path / "step-00000001", no_dist=True)
    assert same(loaded, tensors)


def test_values_must_be_json(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path)
    with pytest.raises(TypeError, match="JSON"):
        checkpointer.save(1, {}, {"tensor": torch.ones(1)}, {})
    assert checkpointer.steps() == []


@pytest.mark.parametrize(("options", "message"), [({"every": -1}, "every=-1"), ({"keep": 0}, "keep=0")])
def test_config_is_checked(options, message):
    with pytest.raises(UserError, match=message):
        CheckpointConfig(**options)


def test_each_box_is_written_once_and_ranks_write_about_the_same():
    sizes = [1000, 900, 800, 10, 10, 10, 700, 600, 500]
    replicated = [
        item for i, n in enumerate(sizes) for item in Shard(torch.zeros(n)).__create_write_items__(f"r{i}", None)
    ]
    own = [Shard(torch.zeros(2000)).__create_write_items__(f"own{rank}", None) for rank in (0, 1)]
    plans = write_once(
        [SavePlan(replicated), SavePlan([*replicated, *own[0]]), SavePlan(replicated), SavePlan([*own[1], *replicated])]
    )
    written = [[item.index.fqn for item in plan.items] for plan in plans]
    assert sorted(name for names in written for name in names) == sorted([*(f"r{i}" for i in range(9)), "own0", "own1"])
    nbytes = [sum(item_bytes(item) for item in plan.items) for plan in plans]
    # 8530 elements over 4 ranks, two of which hold 2000 alone: nobody is above the mean by more than one item.
    assert max(nbytes) <= 4 * (8530 / 4 + 700)
    assert nbytes[1] >= 8000
    assert min(nbytes) > 0


def test_an_empty_shard_does_not_stand_for_the_neighbour_at_its_offset():
    """Two rows over tp=2, then dp=2: the second rank of the first half holds nothing, from row 1 on."""
    items = []
    for rank in range(4):
        mesh = MeshShape(("tp", "dp"), (2, 2), rank)
        cut = Layout((2, 3)).cut(mesh, "tp").cut(mesh, "dp")
        shard = Shard(tag(torch.zeros(cut.local_shape()), cut))
        items += shard.__create_write_items__("x", None)
    assert [(item.index.offset, item_bytes(item)) for item in items] == [((0, 0), 12), ((1, 0), 12)]


def test_resume_equals_never_having_stopped(tmp_path, open_checkpointer):
    """Bit for bit: parameters, Adam's moments, and a model that draws from every generator."""

    def build():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(7, 11), nn.Dropout(0.5), nn.Linear(11, 3))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, num_steps):
        losses = []
        for _ in range(num_steps):
            x = torch.randn(5, 7) * random.random() + float(np.random.randn())
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def tensors(model, optimizer):
        names = dict(model.named_parameters())
        moments = {
            f"optim/{key}/{name}": value for name, p in names.items() for key, value in optimizer.state[p].items()
        }
        return {f"model/{name}": p for name, p in names.items()} | moments

    checkpointer = open_checkpointer(tmp_path)
    model, optimizer = build()
    train(model, optimizer, 3)
    checkpointer.save(3, tensors(model, optimizer), {}, rng_state())
    straight_on = train(model, optimizer, 4)

    resumed, resumed_optimizer = build()
    train(resumed, resumed_optimizer, 1)
    _, _, rank_values = checkpointer.load(3, tensors(resumed, resumed_optimizer))
    set_rng_state(rank_values)
    assert train(resumed, resumed_optimizer, 4) == straight_on
    assert same(tensors(resumed, resumed_optimizer), tensors(model, optimizer))


@pytest.mark.gpu
def test_device_tensors_are_staged_before_training_changes_them(tmp_path, open_checkpointer, device):
    """Copies to pinned memory run on the stream that trains, so what comes after `save` cannot reach them."""
    checkpointer = open_checkpointer(tmp_path)
    tensors = {"x": torch.randn(4096, 4096, device=device), "y": torch.randn(7, device=device)}
    before = {name: tensor.cpu() for name, tensor in tensors.items()}
    checkpointer.save(1, tensors, {}, rng_state())
    for tensor in tensors.values():
        tensor.zero_()
    if device.type == "cuda":
        assert [buffer.is_pinned() for buffer in checkpointer._staging._buffers.values()] == [True, True]
    _, _, rank_values = checkpointer.load(1, tensors)
    assert same({name: tensor.cpu() for name, tensor in tensors.items()}, before)
    set_rng_state(rank_values)
    drawn = torch.rand(3, device=device)
    assert not torch.equal(torch.rand(3, device=device), drawn)
    set_rng_state(rank_values)
    assert torch.equal(torch.rand(3, device=device), drawn)


def test_two_checkpointers_of_a_mesh_never_use_its_group_at_once(tmp_path: Path, monkeypatch) -> None:
    """Each has a thread; what two threads say over one group, two ranks need not hear in one order."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = build_mesh(MeshConfig().resolve(1), "cpu")
        first, second = (Checkpointer(tmp_path / name, CheckpointConfig(), mesh) for name in "ab")
        assert first._group is not host_group(mesh), "what the steps say goes over another"
        released, order = threading.Event(), []
        write, plan = first._write_mine, second._plan_all

        def slow(save):
            released.wait(5)
            order.append("the first has written")
            return write(save)

        def planned(*given):
            order.append("the second plans")
            return plan(*given)

        monkeypatch.setattr(first, "_write_mine", slow)
        monkeypatch.setattr(second, "_plan_all", planned)
        first.save(1, some_tensors(), {}, {})
        threading.Timer(0.2, released.set).start()
        second.save(1, some_tensors(), {}, {})
        assert order == ["the first has written", "the second plans"]
        for one in (first, second):
            one.close()
            assert one.steps() == [1]
    finally:
        torch.distributed.destroy_process_group()
