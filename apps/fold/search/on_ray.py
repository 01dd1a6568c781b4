"""Searches on the nodes of a Ray cluster, by the schedule that this machine has by itself (schedule.py).

1. Every node says, once, which parts of the databases it holds as this machine does, by programs of the same version,
   and whether it sees the cache's folder. What this machine cut or converted, a node that has the whole does itself
2. a search is a task of Ray's, pinned to a node, with its cores and memory declared. Ray repeats none, the schedule
   does
3. a node that sees the cache's folder keeps the result there itself, written aside and renamed; from others it comes
   back with the task

Nodes need the databases under the same paths, and Megalith's searches as they are here, which is checked.
"""

import hashlib
import os
import socket
import tempfile
import time
import uuid
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from apps.fold.search.database import Database, Shard, digest_of
from apps.fold.search.jobs import Search, Searches
from apps.fold.search.schedule import Outcome, attempt
from core.config import UserError, in_words
from core.files import replace_file

INSTALL = "pip install 'megalith[ray]'"
OWN, RUNNING_OR_OWN = "local", "auto"
_STORE_BYTES = 80 << 20  # results of searches that end at the same time, packed; Ray's least is 75 MiB
_STARTS = 3
_REACHED_S, _MOMENT_S, _NODES_S = 5.0, 1.0, 2.0
_JOIN = "give HOST:PORT of a cluster's head, from a machine that is one of its nodes (ray start --address HOST:PORT)"

Part = tuple[str, int]
"""The name of a database, which is unique in a run, and the number of its shard."""


class PlacedTool(Protocol):
    """A program that searches, which other machines may have, too."""

    @property
    def version(self) -> str: ...

    def installed(self) -> str:
        """The version that is here.  Raises UserError where there is none."""
        ...

    def opened(self, database: Database, cache: Path) -> Database:
        """The database under its path as it is here, cut and converted alike.  Raises UserError where it is none."""
        ...


class PlacedSearch(Search, Protocol):
    """A search that another machine may do."""

    @property
    def tool(self) -> Any: ...

    @property
    def database(self) -> Database: ...

    @property
    def shard(self) -> Shard: ...


S = TypeVar("S", bound=PlacedSearch)


@dataclass(frozen=True)
class Asked:
    """What a node is asked. digests: of the files of a database's shards, which a node may hold without the whole."""

    sources: tuple[tuple[PlacedTool, Database, tuple[bytes, ...]], ...]
    cache: Path
    seen: Path
    """A file of this run in the cache's folder."""


@dataclass(frozen=True)
class Answer:
    """What a node holds, why it lacks the rest (a database's name -> the reason), and whether it sees the cache."""

    held: frozenset[Part] = frozenset()
    lacks: Mapping[str, str] | str = ""
    sees_cache: bool = False
    code: str = ""

    def reason(self, name: str) -> str:
        return self.lacks if isinstance(self.lacks, str) else self.lacks.get(name, "it does not have it")


def find_ray() -> Any:
    """The package.  Raises UserError where it is not installed."""
    try:
        ray = import_module("ray")
        import_module("ray.util.scheduling_strategies")  # an attribute of ray's from then on
    except ImportError as error:
        raise UserError(f"--ray takes Ray ({error}); {INSTALL}, or leave --ray out") from None
    return ray


def installed_ray() -> str:
    """`Ray 2.60.0`, or how to install it; without the second that an import takes."""
    try:
        return f"Ray {version('ray')}"
    except PackageNotFoundError:
        return f"Ray is not installed; {INSTALL}"


class Cluster:
    """A connection to Ray, from the first search to the end of `with`: where every result is known it is not asked.

    Where there is no cluster to join, Ray runs on this machine alone meanwhile.

    address  HOST:PORT of a cluster's head; OWN: none; RUNNING_OR_OWN: the one that this machine is a node of, or none
    cores    that each search takes
    memory   bytes that each search takes
    most     searches at once on all nodes; None: as many as have place

    Raises UserError where Ray is not installed, or no cluster answers at the address.
    """

    def __init__(self, address: str, cores: int, memory: int, most: int | None):
        self.ray = find_ray()
        self.cores, self.memory, self.most = cores, memory, most
        self._address, self._connected = address, False
        self._wrong = (RuntimeError, ValueError, AssertionError, OSError, self.ray.exceptions.RayError)
        if address not in (OWN, RUNNING_OR_OWN):
            _reach(address)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.ray.shutdown()

    def machines(self, searches: Searches, tell: Callable[[str], None] = print) -> Callable[[Sequence[S]], "Nodes[S]"]:
        """What `Searches.run_on` takes.  tell  gets a line about the cluster, once"""
        return lambda jobs: Nodes(self._connect(tell), jobs, searches)

    def _connect(self, tell: Callable[[str], None]) -> "Cluster":
        if not self._connected:
            if self._address == OWN or not self._joined():
                self._begin()
            self._connected = True
            tell(self._described())
        return self

    def _joined(self) -> bool:
        try:
            self._init(address=self._address)
        except self._wrong as error:
            if self._address == RUNNING_OR_OWN and isinstance(error, ConnectionError):
                return False
            raise UserError(f"--ray {self._address}: {_line(error)}; {_JOIN}") from None
        return True

    def _begin(self) -> None:
        """Start Ray on this machine. It waits 30 s for processes of its own, which does not always do on a busy one."""
        cores = max(os.cpu_count() or 1, self.cores * (self.most or 1))
        for left in reversed(range(_STARTS)):
            try:
                self._init(address="local", num_cpus=cores, include_dashboard=False, object_store_memory=_STORE_BYTES)
                return
            except Exception as error:  # that is what Ray raises after the 30 s
                self.ray.shutdown()
                if not left:
                    raise UserError(f"--ray: Ray does not start here ({_line(error)}); leave --ray out") from None

    def _init(self, **options: Any) -> None:
        self.ray.init(log_to_driver=False, logging_level="ERROR", **options)

    def nodes(self) -> dict[str, Any]:
        """Those that are alive, by their ids, with what Ray says of each."""
        return {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}

    def _described(self) -> str:
        nodes = self.nodes().values()
        cores = sum(node["Resources"].get("CPU", 0) for node in nodes)
        return f"Ray {self.ray.__version__}: {cores:.0f} cores on {len(nodes)} node{'s' if len(nodes) > 1 else ''}"


class Nodes(Generic[S]):
    """The nodes of a cluster.  See `apps.fold.search.schedule.Machines`."""

    def __init__(self, cluster: Cluster, jobs: Sequence[S], searches: Searches):
        self.most = float("inf") if cluster.most is None else float(cluster.most)
        self._cluster, self._ray, self._searches = cluster, cluster.ray, searches
        self._search, self._look = cluster.ray.remote(searched), cluster.ray.remote(look)
        self._seen = searches.folder / f".run-{uuid.uuid4().hex}"
        self._seen.touch()
        sources = {(job.database.name): (job.tool, job.database, _digests(job.database)) for job in jobs}
        self._asked = cluster.ray.put(Asked(tuple(sources.values()), searches.folder.parent, self._seen))
        self._alive: dict[str, Any] = {}
        self._looked_at = -_NODES_S
        self._answers: dict[str, Answer] = {}
        self._asking: dict[Hashable, str] = {}
        self._running: dict[Hashable, S] = {}

    def places(self) -> Mapping[str, int]:
        if time.monotonic() - self._looked_at >= _NODES_S:
            self._alive, self._looked_at = self._cluster.nodes(), time.monotonic()
            for node in sorted(self._alive.keys() - self._answers.keys() - set(self._asking.values())):
                self._asking[self._pinned(self._look, node, num_cpus=0).remote(self._asked)] = node
        places = {node: self._room(node) for node in self._alive if node in self._answers}
        return {node: count for node, count in places.items() if count}

    def _room(self, node: str) -> int:
        has = self._alive[node]["Resources"]
        return int(min(has.get("CPU", 0) // self._cluster.cores, has.get("memory", 0) // self._cluster.memory))

    def part(self, job: S) -> Part:
        return job.database.name, job.shard.number

    def holds(self, node: str, part: Hashable) -> bool:
        return node in self._answers and part in self._answers[node].held

    def begin(self, job: S, node: str) -> Hashable:
        name = f"{job.shard.number + 1}/{job.shard.count} of {job.database.name}"
        task = self._pinned(self._search, node, num_cpus=self._cluster.cores, memory=self._cluster.memory, name=name)
        handle = task.remote(job, self._searches.path(job), self._seen)
        self._running[handle] = job
        return handle

    def _pinned(self, task: Any, node: str, **needs: Any) -> Any:
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        return task.options(max_retries=0, scheduling_strategy=affinity, **needs)

    def ended(self) -> Iterable[tuple[Hashable, Outcome]]:
        ready, _ = self._ray.wait([*self._running, *self._asking], num_returns=1, timeout=_MOMENT_S)
        for handle in ready:
            if handle in self._asking:
                self._take_answer(handle)
            else:
                yield handle, self._kept(handle, self._running.pop(handle))

    def _take_answer(self, handle: Hashable) -> None:
        node = self._asking.pop(handle)
        errors = self._ray.exceptions
        try:
            answer = self._ray.get(handle)
        except errors.RayTaskError as error:
            answer = Answer(lacks=f"it does not have Megalith as it is here ({_line(error)})")
        except errors.RayError as error:
            answer = Answer(lacks=f"it did not answer ({_line(error)})")
        if answer.code not in ("", _code()):
            answer = Answer(lacks="its Megalith is another than here")
        self._answers[node] = answer

    def _kept(self, handle: Hashable, job: S) -> Outcome:
        """How an attempt ended, with its result in the cache where it has one."""
        try:
            outcome, result = self._ray.get(handle)
        except self._ray.exceptions.RayTaskError as error:
            return Outcome(failed=_line(error))  # an error of ours, which would come again
        except self._ray.exceptions.RayError as error:
            return Outcome(lost=f"the process that searched was lost ({_line(error)})")
        if result:
            replace_file(self._searches.path(job), zlib.decompress(result))
        elif outcome == Outcome() and not self._searches.path(job).exists():
            return Outcome(lost=f"its result is not in {self._searches.folder}")
        return outcome

    def expects(self) -> bool:
        return bool(self._asking)

    def nowhere(self, job: S) -> str:
        name, part = job.database.name, self.part(job)
        hosts = {node: facts["NodeManagerHostname"] for node, facts in self._alive.items()}
        if not hosts:
            return "no node of Ray's is alive"
        if any(self.holds(node, part) for node in hosts):
            cores = f"{self._cluster.cores} core{'s' * (self._cluster.cores > 1)}"
            size = f"{cores} and {in_words(self._cluster.memory)}"
            return f"no node of Ray's that holds {name} has {size} for a search; give fewer --threads or less --memory"
        reasons = {f"{host}: {self._answers[node].reason(name)}" for node, host in hosts.items()}
        return f"no node of Ray's holds {job.shard.file} as it is here; {'; '.join(sorted(reasons))}"

    def stop(self) -> None:
        for handle in (*self._running, *self._asking):
            self._ray.cancel(handle, force=True)
        self._seen.unlink(missing_ok=True)


def look(asked: Asked) -> Answer:
    """A node's answer; computed there."""
    sees_cache = asked.seen.exists()
    held, lacks = set[Part](), {}
    for tool, database, digests in asked.sources:
        try:
            if (here := tool.installed()) != tool.version:
                raise UserError(f"it has {here}, not {tool.version}")
            if not sees_cache:
                asked.cache.mkdir(parents=True, exist_ok=True)
            found = _shards_here(tool, database, digests, asked.cache)
            held |= {(database.name, number) for number in found}
        except (UserError, OSError) as error:
            lacks[database.name] = _line(error)
    return Answer(frozenset(held), lacks, sees_cache, _code())


def _shards_here(tool: PlacedTool, database: Database, digests: Sequence[bytes], cache: Path) -> Iterable[int]:
    """Numbers of the shards that this machine has: all of the same database, or files that were copied.

    Raises UserError where it has none.
    """
    try:
        if tool.opened(database, cache) == database:
            return range(len(database.shards))
        reason = UserError(f"its {database.path} is another")
    except (UserError, OSError) as error:
        reason = error
    found = [number for number, digest in enumerate(digests) if _same(database.shards[number].file, digest)]
    if not found:
        raise reason
    return found


def _same(file: Path, digest: bytes) -> bool:
    try:
        return digest_of(file) == digest
    except UserError:
        return False


def _digests(database: Database) -> tuple[bytes, ...]:
    """Of the files of shards; none where the shard is the whole."""
    return tuple(digest_of(shard.file) for shard in database.shards) if len(database.shards) > 1 else ()


def searched(job: Search, kept: Path, seen: Path) -> tuple[Outcome, bytes]:
    """How a search ended and, from a node that does not see the cache's folder, its result, packed; computed there."""
    result = b""

    def search() -> None:
        nonlocal result
        found = job.result(Path(tempfile.gettempdir())).encode()
        if seen.exists():
            replace_file(kept, found)
        else:
            result = zlib.compress(found)

    return attempt(search), result


def _code() -> str:
    """A digest of what a node computes a result by."""
    found = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


def _reach(address: str) -> None:
    """Raises UserError where the address is none, or nobody listens there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        raise UserError(f"--ray {address}: that is no address; {_JOIN}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"--ray {address}: nobody answers there ({error}); {_JOIN}") from None


def _line(error: BaseException) -> str:
    """The last line that an error of Ray's, or of a task, has: those before are a traceback."""
    return next(reversed([line.strip() for line in str(error).splitlines() if line.strip()]), type(error).__name__)
