"""`fold msa --ray` with Ray itself, on this machine: the bytes of the local pool, and what kill -9 costs."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit.fold.test_search import CRAMBIN, ROOT, UBIQUITIN, _database, _runs, _wait_until

# Of shard N it does not end while there is a file hold-N, and finds one row.
_PROGRAM = """#!/bin/sh
if [ "$1" = -h ]; then echo "# HMMER 9"; exit 0; fi
for last in "$@"; do before=$query; query=$last; done
number=$(basename "$last" .fasta)
echo "$number $$" >> {folder}/begun
while [ -e {folder}/hold-$number ]; do sleep 0.05; done
letters=$(tail -n 1 "$before")
while [ "$1" != -A ]; do shift; done
printf "# STOCKHOLM 1.0\\nquery $letters\\nseq$number/1-9 $letters\\n#=GC RF $(echo $letters | tr A-Z x)\\n//\\n" > "$2"
echo "seq$number - 9 query - 9 1e-9 5$number.0 0 1 1 1e-9 1e-9 9 0 1 9 1 9 1 9 1 -" > "$4"
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Begins `fold msa` of two sequences in three shards, into a folder OUT-NAME and a cache of its own."""
    program = tmp_path / "jackhmmer"
    program.write_text(_PROGRAM.format(folder=tmp_path))
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    (tmp_path / "in.fasta").write_text(f">complex\n{UBIQUITIN}:{CRAMBIN}\n")
    given = [str(tmp_path / "in.fasta"), "--databases", str(_database(tmp_path / "db.fasta", 12)), "--shards", "3"]
    given += ["--jackhmmer", str(program)]
    own = tempfile.mkdtemp(prefix="ray-")  # the path of a socket in it is short, which one in tmp_path need not be
    begun: list[subprocess.Popen] = []

    def begin(name: str, *more: str, tmp: str = own) -> subprocess.Popen:
        words = [*given, "--out", str(tmp_path / f"out-{name}"), "--cache", str(tmp_path / f"cache-{name}"), *more]
        run = [sys.executable, "-m", "apps.fold", "msa", *words]
        pipe, folders = subprocess.PIPE, {"RAY_TMPDIR": tmp, "HOME": tmp}
        begun.append(subprocess.Popen(run, cwd=ROOT, env=os.environ | folders, stdout=pipe, stderr=pipe, text=True))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()
    shutil.rmtree(own, ignore_errors=True)


def _ended(process: subprocess.Popen) -> str:
    said, complaint = process.communicate()
    assert process.returncode == 0, complaint
    return said


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _tools(folder: Path) -> list[tuple[int, int]]:
    """Number of the shard and process of each search, in the order in which they began."""
    lines = (folder / "begun").read_text().splitlines() if (folder / "begun").exists() else []
    return [(int(number), int(pid)) for number, pid in (line.split() for line in lines)]


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_killed_workers_and_tools_lose_nothing_and_bytes_are_the_pool_s(tmp_path: Path, command) -> None:
    for number in range(3):
        (tmp_path / f"hold-{number}").touch()
    with_ray = command("ray", "--ray", "local", "--workers", "3")
    _wait_until(lambda: len(_tools(tmp_path)) == 3 or with_ray.poll() is not None)
    assert with_ray.poll() is None, with_ray.communicate()
    (_, first), (other, second), (_, third) = _tools(tmp_path)
    worker = _parent(_parent(first))  # between them is the process that ends the tool with the worker
    assert "ray::" in Path(f"/proc/{worker}/cmdline").read_text()
    os.kill(worker, signal.SIGKILL)
    os.kill(second, signal.SIGKILL)
    _wait_until(lambda: len(_tools(tmp_path)) == 5 and not _runs(first))
    assert _runs(third), "a search that nobody touched goes on"
    for number in range(3):
        (tmp_path / f"hold-{number}").unlink()
    said = _ended(with_ray)
    assert "Ray 2." in said
    assert "6 searches run, 0 known" in said
    began = [number for number, _ in _tools(tmp_path)]
    assert len(began) == 8, "what was killed began again, and nothing else did"
    assert began.count(other) == 3

    assert "6 searches run, 0 known" in _ended(command("pool"))
    assert _files(tmp_path / "out-ray") == _files(tmp_path / "out-pool")
    assert _files(tmp_path / "cache-ray" / "searches") == _files(tmp_path / "cache-pool" / "searches")
    assert _files(tmp_path / "out-ray")["complex_A/db.a3m"].count(b">seq") == 3


@pytest.mark.soak
def test_a_run_that_is_killed_leaves_nothing_running(tmp_path: Path, command) -> None:
    (tmp_path / "hold-1").touch()
    run = command("ray", "--ray", "local", "--workers", "3")
    results = tmp_path / "cache-ray" / "searches"
    _wait_until(lambda: len(list(results.glob("*.json"))) >= 2 and any(number == 1 for number, _ in _tools(tmp_path)))
    held = next(pid for number, pid in _tools(tmp_path) if number == 1)
    worker = _parent(_parent(held))
    raylet = _parent(worker)
    run.kill()
    _wait_until(lambda: not any(map(_runs, (held, worker, raylet))))
    (tmp_path / "hold-1").unlink()
    time.sleep(1)
    kept = len(list(results.glob("*.json")))
    assert f"{6 - kept} searches run, {kept} known" in _ended(command("ray", "--ray", "local"))


@pytest.mark.soak
def test_a_node_of_a_cluster_that_dies_loses_nothing(tmp_path: Path, command) -> None:
    """Two nodes on this machine, the head and another, which is killed with all that runs on it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = tempfile.mkdtemp(prefix="ray-")
    env = os.environ | {"RAY_TMPDIR": own, "HOME": own}
    start = [
        str(Path(sys.executable).parent / "ray"),
        "start",
        "--block",
        "--num-cpus=2",
        "--object-store-memory=80000000",
    ]
    start.append("--disable-usage-stats")
    nodes = []

    def begin(*more: str) -> None:
        nodes.append(subprocess.Popen([*start, *more], env=env, stdout=subprocess.DEVNULL))

    try:
        begin("--head", f"--port={port}", "--include-dashboard=false")
        _wait_until(lambda: _listens(port))
        begin(f"--address=127.0.0.1:{port}")
        for number in range(3):
            (tmp_path / f"hold-{number}").touch()
        with_ray = command("ray", "--ray", f"127.0.0.1:{port}", "--memory", "1MiB", tmp=own)
        _wait_until(lambda: len(_tools(tmp_path)) == 4 or with_ray.poll() is not None)
        assert with_ray.poll() is None, with_ray.communicate()
        begun = [pid for _, pid in _tools(tmp_path)]
        of_node = _descendants(nodes[1].pid)
        there = [pid for pid in begun if pid in of_node]
        assert len(there) == 2
        _kill(of_node)
        _wait_until(lambda: not any(map(_runs, there)))
        for number in range(3):
            (tmp_path / f"hold-{number}").unlink()
        said = _ended(with_ray)
        assert "6 searches run, 0 known" in said
        assert len(_tools(tmp_path)) == 8
    finally:
        for node in nodes:
            _kill(_descendants(node.pid))
            node.wait()
        shutil.rmtree(own, ignore_errors=True)
    _ended(command("pool"))
    assert _files(tmp_path / "out-ray") == _files(tmp_path / "out-pool")


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _descendants(pid: int) -> list[int]:
    """The process and all below it, which are of sessions of their own."""
    below: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            below.setdefault(_parent(int(path.name)), []).append(int(path.name))
    found = [pid]
    for one in found:
        found += below.get(one, [])
    return found


def _kill(processes: list[int]) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
