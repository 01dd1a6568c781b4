"""`fold msa --ray` on nodes that are not there: what they are asked, what runs where, what returns, what is refused."""

import random
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from apps.fold.msa import main
from apps.fold.search import on_ray
from apps.fold.search.database import Database, Shard, open_database
from apps.fold.search.hits import Hit
from apps.fold.search.jobs import SearchedDatabase, Searches, SearchJob, jobs_of
from apps.fold.search.on_ray import OWN, RUNNING_OR_OWN, Asked, Cluster, look
from apps.fold.search.program import Killed
from core.config import UserError
from tests.support.fake_ray import FakeRay, RayTaskError, WorkerCrashedError

NODES = {"a": {"CPU": 4.0, "memory": 8e9}, "b": {"CPU": 2.0, "memory": 8e9}}
SEQUENCES = ["MKTAYIAKQR", "MKT", "MKTAY"]


@dataclass(frozen=True)
class Tool:
    """Finds what the shard's first line says; of a version that its nodes have, or another one."""

    version: str = "9"
    has: str = "9"
    attempts: list[str] = field(default_factory=list, hash=False, compare=False)

    def depends_on(self) -> dict[str, Any]:
        return {"version": self.version}

    def installed(self) -> str:
        return self.has

    def opened(self, database: Database, cache: Path) -> Database:
        return open_database(database.path, len(database.shards), cache, database.name)

    def search(self, sequence: str, database: Database, shard: Shard, scratch: Path) -> list[Hit]:
        self.attempts.append(sequence)
        if sequence == "KILLED" and self.attempts.count(sequence) == 1:
            raise Killed("ended by signal 9")
        if sequence == "WRONG":
            raise UserError("out of luck\nand more")
        return [Hit(shard.file.read_text().split()[0], sequence, 1.0)]


def source(folder: Path, tool: Tool | None = None, shards: int = 3, name: str = "db") -> SearchedDatabase:
    path = folder / f"{name}.fasta"
    draw = random.Random(0)
    path.write_text("".join(f">seq{n}\n{''.join(draw.choices('ACDEFG', k=30))}\n" for n in range(9)))
    return SearchedDatabase(tool or Tool(), open_database(path, shards, folder / "cache", name))


@contextmanager
def connected(ray: FakeRay, cores: int = 1, memory: int = 2**30, most: int | None = None) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_ray, "find_ray", lambda: ray)
        patch.setattr(on_ray, "_NODES_S", 0.0)
        with Cluster(OWN, cores, memory, most) as cluster:
            yield cluster


def run(folder: Path, ray: FakeRay, jobs: list[SearchJob], **needs: Any) -> dict[str, str]:
    """sequence -> what went wrong, and holds that nothing is left in the cache but results."""
    searches, told = Searches(folder / "cache"), []
    with connected(ray, **needs) as cluster:
        failed = searches.run_on(cluster.machines(searches, told.append), jobs)
    assert len(told) == 1
    left = [path.name for path in searches.folder.iterdir() if path.suffix != ".json"]
    assert not left
    return {job.sequence: reason for job, reason in failed.items()}


def results(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "cache" / "searches").iterdir()}


def searches_of(ray: FakeRay) -> list[dict[str, Any]]:
    return [task for task in ray.tasks if task["function"] is on_ray.searched]


def test_a_cluster_keeps_what_threads_keep(tmp_path: Path) -> None:
    one = source(tmp_path)
    jobs = jobs_of(SEQUENCES, [one])
    assert Searches(tmp_path / "cache").run(jobs, 2) == {}
    by_threads = results(tmp_path)
    assert len(by_threads) == len(jobs) == 9
    for name in by_threads:
        (tmp_path / "cache" / "searches" / name).unlink()
    ray = FakeRay(NODES)
    assert run(tmp_path, ray, jobs, cores=2, memory=10**9) == {}
    assert results(tmp_path) == by_threads
    tasks = searches_of(ray)
    assert len(tasks) == 9
    assert {task["node"] for task in tasks} == {"a", "b"}
    assert all((task["num_cpus"], task["memory"], task["max_retries"]) == (2, 10**9, 0) for task in tasks)
    asked = [task for task in ray.tasks if task["function"] is look]
    assert [(task["node"], task["num_cpus"]) for task in asked] == [("a", 0), ("b", 0)]


def test_a_node_that_does_not_see_the_cache_hands_results_back(tmp_path: Path, monkeypatch) -> None:
    jobs = jobs_of(SEQUENCES, [source(tmp_path)])
    assert Searches(tmp_path / "cache").run(jobs, 2) == {}
    expected = results(tmp_path)
    for name in expected:
        (tmp_path / "cache" / "searches" / name).unlink()
    exists, wrote = Path.exists, []

    def without_marks(path: Path) -> bool:
        return not path.name.startswith(".run-") and exists(path)

    def write(path: Path, content: bytes) -> None:
        wrote.append(sys._getframe(1).f_code.co_name)
        path.write_bytes(content)

    monkeypatch.setattr(Path, "exists", without_marks)
    monkeypatch.setattr(on_ray, "replace_file", write)
    assert run(tmp_path, FakeRay(NODES), jobs) == {}
    assert results(tmp_path) == expected
    assert set(wrote) == {"_kept"}, "the node itself wrote where nobody looks"


def test_processes_and_nodes_that_are_killed_lose_nothing(tmp_path: Path) -> None:
    one = source(tmp_path)
    jobs = jobs_of([*SEQUENCES, "KILLED"], [one])
    ray = FakeRay(dict(NODES))
    fell = []

    def befalls(node: str, given: Any) -> Exception | None:
        if len(given) == 3 and len(fell) < 2:
            fell.append(given)
            if len(fell) == 2:
                ray.nodes_there["b"] = {}
            return WorkerCrashedError("The worker died.\n\nIt was killed by signal 9.")
        return None

    ray.befalls = befalls
    assert run(tmp_path, ray, jobs) == {}
    assert len(results(tmp_path)) == len(jobs)
    tried = [given[0] for given in (task["arguments"] for task in searches_of(ray))]
    assert len(tried) > len(jobs) + 2, "the two that fell, what ran on b, and the one whose tool was killed"
    always = FakeRay(NODES, befalls=lambda node, given: WorkerCrashedError("Gone.") if len(given) == 3 else None)
    failed = run(tmp_path, always, jobs_of(["MKTV"], [one])[:1])
    assert failed == {"MKTV": "the process that searched was lost (Gone.) (4 times)"}


def test_what_fails_fails_alone_and_once(tmp_path: Path) -> None:
    tool = Tool()
    ray = FakeRay(NODES)
    assert run(tmp_path, ray, jobs_of([*SEQUENCES, "WRONG"], [source(tmp_path, tool)])) == {"WRONG": "out of luck"}
    assert tool.attempts.count("WRONG") == 3, "once a shard"
    ours = FakeRay(
        NODES, befalls=lambda node, given: RayTaskError("Traceback\n  ValueError: x") if len(given) == 3 else None
    )
    failed = run(tmp_path, ours, jobs_of(["MKTV"], [source(tmp_path, tool)]))
    assert failed == {"MKTV": "ValueError: x"}
    assert len(searches_of(ours)) == 3


def test_a_node_says_what_it_holds(tmp_path: Path) -> None:
    """Of a database that is another there, of a program that is, and of shards that were copied without the whole."""
    one = source(tmp_path)
    digests = on_ray._digests(one.database)
    assert len(digests) == 3
    seen = tmp_path / "seen"
    seen.touch()

    def held(tool: Tool, database: Database = one.database, cache: str = "cache") -> tuple[set[int], str]:
        answer = look(Asked(((tool, database, digests),), tmp_path / cache, seen))
        assert answer.sees_cache
        assert answer.code == on_ray._code()
        return {number for _, number in answer.held}, answer.reason("db")

    assert held(Tool())[0] == {0, 1, 2}
    assert held(Tool(has="8")) == (set(), "it has 8, not 9")
    changed = replace(one.database, identity="of another time")
    assert held(Tool(), changed)[0] == {0, 1, 2}, "its shards are there all the same"
    one.database.shards[1].file.write_text("changed")
    assert held(Tool(), changed)[0] == {0, 2}
    one.database.path.unlink()
    assert held(Tool())[0] == {0, 2}
    for shard in one.database.shards:
        shard.file.unlink()
    nothing, why = held(Tool())
    assert not nothing
    assert "cannot read the database" in why
    away = Asked(((Tool(), one.database, digests),), tmp_path / "elsewhere", tmp_path / "not-there")
    assert not look(away).sees_cache


def test_what_no_node_takes_says_why(tmp_path: Path, monkeypatch) -> None:
    jobs = jobs_of(["MKT"], [source(tmp_path, shards=1)])
    assert run(tmp_path, FakeRay({}), jobs) == {"MKT": "no node of Ray's is alive"}
    small = run(tmp_path, FakeRay(NODES), jobs, cores=5, memory=3 * 2**30)["MKT"]
    assert small.startswith("no node of Ray's that holds db has 5 cores and 3 GiB for a search; give fewer --threads")
    few = run(tmp_path, FakeRay(NODES), jobs, memory=2**40)["MKT"]
    assert "has 1 core and 1 TiB for a search" in few
    other = jobs_of(["MKT"], [source(tmp_path, Tool(has="8"), shards=1)])
    reason = run(tmp_path, FakeRay(NODES), other)["MKT"]
    assert (
        reason
        == f"no node of Ray's holds {tmp_path}/db.fasta as it is here; host-a: it has 8, not 9; host-b: it has 8, not 9"
    )
    no_code = FakeRay({"a": NODES["a"]}, befalls=lambda node, given: RayTaskError("x\nModuleNotFoundError: apps"))
    assert "does not have Megalith as it is here (ModuleNotFoundError: apps)" in run(tmp_path, no_code, jobs)["MKT"]
    codes = iter(["of the node", "of this machine", *"..."])
    monkeypatch.setattr(on_ray, "_code", lambda: next(codes))
    assert "its Megalith is another than here" in run(tmp_path, FakeRay({"a": NODES["a"]}), jobs)["MKT"]


def test_a_limit_of_searches_is_that_of_all_nodes(tmp_path: Path, monkeypatch) -> None:
    running, most = 0, 0
    begin, kept = on_ray.Nodes.begin, on_ray.Nodes._kept

    def count(change: int) -> None:
        nonlocal running, most
        running += change
        most = max(most, running)

    monkeypatch.setattr(on_ray.Nodes, "begin", lambda self, *given: (count(1), begin(self, *given))[1])
    monkeypatch.setattr(on_ray.Nodes, "_kept", lambda self, *given: (count(-1), kept(self, *given))[1])
    one = source(tmp_path)
    assert run(tmp_path, FakeRay(NODES), jobs_of(SEQUENCES, [one]), most=2) == {}
    assert most == 2
    assert run(tmp_path, FakeRay(NODES), jobs_of(["MKTA", "MKTC", "MKTD"], [one])) == {}
    assert most == 6, "as many as the nodes have cores"


def test_how_ray_is_joined(tmp_path: Path, monkeypatch) -> None:
    ray = FakeRay(NODES)
    monkeypatch.setattr(on_ray, "find_ray", lambda: ray)
    searches, jobs = Searches(tmp_path / "cache"), jobs_of(["MKT"], [source(tmp_path, shards=1)])

    def joined(address: str) -> list[str]:
        ray.inits.clear()
        for path in searches.folder.iterdir():
            path.unlink()
        with Cluster(address, 1, 2**30, None) as cluster:
            assert not ray.inits, "not before something is to be searched"
            assert searches.run_on(cluster.machines(searches, lambda line: None), jobs) == {}
            assert searches.run_on(cluster.machines(searches), jobs) == {}
        assert ray.inits[-1] == {}, "left"
        return [options["address"] for options in ray.inits if options]

    assert joined(RUNNING_OR_OWN) == ["auto"]
    ray.refuses = ConnectionError("no cluster is found")
    assert joined(RUNNING_OR_OWN) == ["auto", "local"]
    assert joined(OWN) == ["local"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for wrong in (ConnectionError("It refused.\nTwice."), RuntimeError("Version mismatch.")):
            ray.refuses = wrong
            with pytest.raises(UserError, match=rf"--ray {address}: (Twice|Version mismatch).; give HOST:PORT"):
                joined(address)
        ray.refuses = None
        assert joined(address) == [address]
    ray.starts = [TimeoutError("late"), TimeoutError("late")]
    assert joined(OWN) == ["local"], "the third time"
    ray.starts = [TimeoutError("late")] * 3
    with pytest.raises(UserError, match=r"--ray: Ray does not start here \(late\); leave --ray out"):
        joined(OWN)
    with pytest.raises(UserError, match=r"nobody answers there .*; give HOST:PORT of a cluster's head"):
        joined(address)
    for wrong in ("somewhere", "ray://head:10001", "head:", ":6379"):
        with pytest.raises(UserError, match=f"--ray {wrong}: that is no address; give HOST:PORT"):
            joined(wrong)


def test_without_ray_a_line_names_the_extra(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(on_ray, "version", Mock(side_effect=PackageNotFoundError("ray")))
    assert on_ray.installed_ray() == "Ray is not installed; pip install 'megalith[ray]'"
    (tmp_path / "in.fasta").write_text(">a\nMKT\n")
    options = [
        str(tmp_path / "in.fasta"),
        "--databases",
        str(tmp_path / "in.fasta"),
        "--cache",
        str(tmp_path / "cache"),
    ]
    with pytest.raises(UserError, match=r"--ray takes Ray \(.*\); pip install 'megalith\[ray\]', or leave --ray out"):
        main([*options, "--ray"])
    with pytest.raises(UserError, match="--memory is what Ray sets aside; give --ray, too"):
        main([*options, "--memory", "3GiB"])
    with pytest.raises(UserError, match="memory=much: that is no size"):
        main([*options, "--ray", "local", "--memory", "much"])
