"""Which node runs which search, and what happens to one that is cut off: one schedule for this machine and for many.

1. Each node that has a place left takes the first job of the parts of databases that it holds. A part that another
   node already reads comes last: its pages stay in one node's memory
2. a job that was lost, because its process or node was killed, begins again before all others, on another node where
   one holds its part, `ATTEMPTS` times in all; one that failed would fail again
3. a job of whose part no node is left that holds it fails
"""

from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from apps.fold.search.program import Killed
from core.config import UserError

ATTEMPTS = 4

J = TypeVar("J")
_J = TypeVar("_J", contravariant=True)


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: why it would fail again, or why it was cut off; where both are empty its result is kept."""

    failed: str = ""
    lost: str = ""


class Machines(Protocol[_J]):
    """What runs searches. A node is named by a text, a running job by what `begin` returned."""

    most: float
    """Searches at once on all nodes together."""

    def places(self) -> Mapping[str, int]:
        """node -> how many searches it runs at once, of the nodes that are there now."""
        ...

    def part(self, job: _J) -> Hashable:
        """The part of a database that the job reads."""
        ...

    def holds(self, node: str, part: Hashable) -> bool:
        """Whether the node can read the part."""
        ...

    def begin(self, job: _J, node: str) -> Hashable:
        """Begin a job on a node, in one of its places."""
        ...

    def ended(self) -> Iterable[tuple[Hashable, Outcome]]:
        """Those that have ended, once each. Waits for one, or for a moment where nodes may come or go."""
        ...

    def expects(self) -> bool:
        """Whether more nodes may soon be in `places`."""
        ...

    def nowhere(self, job: _J) -> str:
        """Why no node takes the job."""
        ...

    def stop(self) -> None:
        """End what still runs."""
        ...


def attempt(work: Callable[[], None]) -> Outcome:
    """Do it once."""
    try:
        work()
    except Killed as error:
        return Outcome(lost=_line(error))
    except (UserError, OSError, ValueError) as error:
        return Outcome(failed=_line(error))
    return Outcome()


def run_all(jobs: Sequence[J], machines: Machines[J]) -> Generator[tuple[J, str], None, None]:
    """Run every job to its end.  Yields each as it ends, with what went wrong; "" where its result is kept."""
    waiting = _Waiting([machines.part(job) for job in jobs], machines.holds)
    running: dict[Hashable, tuple[int, str]] = {}
    try:
        while waiting or running:
            places = machines.places()
            free = Counter(dict(places))
            free.subtract(node for _, node in running.values() if node in places)
            while len(running) < machines.most and (taken := waiting.take(free)):
                number, node = taken
                free[node] -= 1
                running[machines.begin(jobs[number], node)] = taken
            if not running and not machines.expects():
                yield from ((jobs[number], machines.nowhere(jobs[number])) for number in waiting.numbers())
                return
            for handle, outcome in machines.ended():
                number, node = running.pop(handle)
                if outcome.lost and waiting.again(number, node):
                    continue
                lost = f"{outcome.lost} ({ATTEMPTS} times)" if outcome.lost else ""
                yield jobs[number], outcome.failed or lost
    finally:
        machines.stop()


class _Waiting:
    """Jobs by their numbers, which are their order, and by the parts that they read."""

    def __init__(self, parts: list[Hashable], holds: Callable[[str, Hashable], bool]):
        self._parts, self._holds = parts, holds
        self._queues: dict[Hashable, deque[int]] = {}
        for number, part in enumerate(parts):
            self._queues.setdefault(part, deque()).append(number)
        self._readers: dict[Hashable, set[str]] = {part: set() for part in self._queues}
        self._lost: list[int] = []
        self._lost_on: dict[int, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._lost) or any(self._queues.values())

    def numbers(self) -> list[int]:
        return sorted([*self._lost, *(number for queue in self._queues.values() for number in queue)])

    def take(self, free: Mapping[str, int]) -> tuple[int, str] | None:
        """A job and the node that it goes to, the one with most places left first; None where none can begin."""
        for node in sorted((node for node, places in free.items() if places > 0), key=lambda node: (-free[node], node)):
            number = self._lost_for(node, free)
            if number is None:
                number = self._first_for(node)
            if number is not None:
                self._readers[self._parts[number]].add(node)
                return number, node
        return None

    def _lost_for(self, node: str, nodes: Mapping[str, int]) -> int | None:
        for number in self._lost:
            part, before = self._parts[number], self._lost_on[number]
            others = (other for other in nodes if other not in before and self._holds(other, part))
            if self._holds(node, part) and (node not in before or not any(others)):
                self._lost.remove(number)
                return number
        return None

    def _first_for(self, node: str) -> int | None:
        held = [part for part, queue in self._queues.items() if queue and self._holds(node, part)]
        if not held:
            return None
        part = min(held, key=lambda part: (bool(self._readers[part] - {node}), self._queues[part][0]))
        return self._queues[part].popleft()

    def again(self, number: int, node: str) -> bool:
        """Whether a job that was lost on that node may begin once more; if so, it waits."""
        lost_on = self._lost_on.setdefault(number, [])
        lost_on.append(node)
        if len(lost_on) < ATTEMPTS:
            self._lost.append(number)
        return len(lost_on) < ATTEMPTS


class Threads(Generic[J]):
    """This machine alone: each of a number of threads waits for a process of a tool.  See `Machines`."""

    def __init__(self, workers: int, work: Callable[[J], None]):
        self.most = float(workers)
        self._work, self._running, self._pool = work, set[Future[Outcome]](), ThreadPoolExecutor(workers)

    def places(self) -> Mapping[str, int]:
        return {"": int(self.most)}

    def part(self, job: J) -> Hashable:
        return ""

    def holds(self, node: str, part: Hashable) -> bool:
        return True

    def begin(self, job: J, node: str) -> Hashable:
        future = self._pool.submit(attempt, lambda: self._work(job))
        self._running.add(future)
        return future

    def ended(self) -> Iterable[tuple[Hashable, Outcome]]:
        ready, self._running = wait(self._running, return_when=FIRST_COMPLETED)
        return [(future, future.result()) for future in ready]

    def expects(self) -> bool:
        return False

    def nowhere(self, job: J) -> str:
        raise AssertionError("this machine takes every job")

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
