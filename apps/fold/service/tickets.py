"""The life of a ticket.

1. asked for: an equal one of the same owner that is under way, or done with the same databases, is that one
2. one whose searches are known waits for no other; else the queue and the owner's limit must have room
3. it is written to the disk, and then promised to the client
4. a thread takes it: of the owner with the fewest that run, the one that came first
5. its searches, shared with other tickets; then what has hits among structures
6. the result is written, then how it ended; where disks are limited, the oldest results go
"""

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from apps.fold.search.jobs import Searches
from apps.fold.service.answers import files, packed, to_search
from apps.fold.service.databases import Databases
from apps.fold.service.keys import Keys, Owner
from apps.fold.service.metrics import Metrics
from apps.fold.service.protocol import Query, Status
from apps.fold.service.shared import SharedSearches
from apps.fold.service.store import Job, Outcome, Store, is_name
from core.config import UserError, in_one_line, in_words

log = logging.getLogger("msa-server")
_TRIES = 3  # where results of searches are removed, for want of room, while an answer is made of them
_ENTRY_BYTES = 4096  # of the files beside a result
_QUICK = 2  # tickets without a search to be done, which need not wait for others
_LOOK_S = 60.0  # between looks at how large the cache of searches is


@dataclass(frozen=True)
class Limits:
    """Of all owners: tickets that wait, tickets at once, workers of each, bytes of results and searches."""

    max_queue: int
    at_once: int
    workers: int
    max_bytes: int


@dataclass(frozen=True)
class Ticket:
    """What a client hears; message says why where there is something to say."""

    id: str
    status: Status
    message: str = ""


class Tickets:
    """All tickets of a server.  Its methods may be called from any thread."""

    def __init__(
        self, store: Store, searches: Searches, open_them: Callable[[], Databases], keys: Keys, limits: Limits,
        metrics: Metrics,
    ):  # fmt: skip
        self._store, self._searches, self._open_them = store, searches, open_them
        self._keys, self._limits, self._metrics = keys, limits, metrics
        self._shared = SharedSearches(searches, limits.workers)
        self._databases, self._opening = open_them(), threading.Lock()
        self._changed = threading.Condition()
        self._open: dict[str, Job] = {}
        self._waiting: list[Job] = []
        self._running: dict[str, str] = {}
        self._asked: dict[str, float] = {}
        self._done: dict[str, tuple[str, int]] = {}
        self._sizes = Counter[str]()
        self._number = 0
        self._looked = 0.0
        self.draining = False
        self._quick = ThreadPoolExecutor(_QUICK)
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(limits.at_once)]
        self._restore()
        metrics.gauge("queued", "tickets that wait", lambda: self.num_waiting)
        metrics.gauge("running", "tickets that are searched for", lambda: self.num_running)
        metrics.gauge("result_bytes", "bytes of results", lambda: sum(self._sizes.values()))

    def _restore(self) -> None:
        for job in self._store.jobs():
            self._number = max(self._number, job.number)
            outcome = self._store.outcome(job.id)
            if outcome is None:
                self._open[job.id] = job
                self._waiting.append(job)
            else:
                self._note(job, outcome)
        if self._waiting:
            log.info("going on with %d tickets", len(self._waiting))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, patience_s: float) -> bool:
        """Take nothing more, and return whether what was under way has ended within that time."""
        with self._changed:
            self.draining = True
            self._changed.notify_all()
        deadline = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)
        self._quick.shutdown(wait=ended)
        return ended

    @property
    def databases(self) -> Databases:
        """As they were last opened."""
        return self._databases

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    # --- asking -------------------------------------------------------------------------------------------------------

    def submit(self, owner: Owner, query: Query) -> Ticket:
        """A ticket for a query, or RATELIMIT or MAINTENANCE.  Raises OSError where it cannot be kept."""
        name = self._store.name(owner.name, query)
        with self._changed:
            if name in self._open:
                return self._of_open(name)
        databases = self._databases
        if self._is_done(name, databases):
            return Ticket(name, "COMPLETE")
        if self.draining:
            return self._refused("maintenance", "MAINTENANCE", "the server is stopping; ask again in a minute")
        known = not to_search(query, databases, self._searches) and _is_unchanged(databases)
        with self._changed:
            if name in self._open:
                return self._of_open(name)
            if not known and (full := self._full(owner)):
                return self._refused("queue", "RATELIMIT", full)
            self._number += 1
            job = Job(name, owner.name, self._number, query)
            self._open[name], self._asked[name] = job, time.monotonic()
            self._drop(name)
        try:
            self._store.put(job)
        except BaseException:
            self._forget(name)
            raise
        if known:
            with contextlib.suppress(RuntimeError):  # the server has stopped since: the next one goes on with it
                self._quick.submit(self._answer, job)
            return Ticket(name, "PENDING")
        with self._changed:
            self._waiting.append(job)
            self._changed.notify_all()
        return Ticket(name, "PENDING")

    def _is_done(self, name: str, databases: Databases) -> bool:
        outcome = self._store.outcome(name)
        fits = outcome is not None and outcome.status == "COMPLETE" and outcome.databases == databases.identity
        return fits and _is_unchanged(databases)

    def _full(self, owner: Owner) -> str:
        """Why there is no room for another ticket; empty where there is."""
        if len(self._waiting) >= self._limits.max_queue:
            return f"{len(self._waiting)} tickets wait, as many as this server takes; ask again in a minute"
        of_owner = sum(job.owner == owner.name for job in self._open.values())
        if owner.most_jobs is not None and of_owner >= owner.most_jobs:
            return f"{of_owner} tickets of {owner.name} are under way, as many as it may have; wait for one of them"
        return ""

    def _refused(self, reason: str, status: Status, message: str) -> Ticket:
        self._metrics.refused(reason)
        return Ticket("", status, message)

    def ticket(self, owner: Owner, name: str) -> Ticket:
        """How a ticket is; UNKNOWN where its owner is another."""
        with self._changed:
            if name in self._open:
                return self._of_open(name) if self._open[name].owner == owner.name else Ticket(name, "UNKNOWN")
            mine = self._done.get(name, ("", 0))[0] == owner.name
        outcome = self._store.outcome(name) if mine and is_name(name) else None
        return Ticket(name, "UNKNOWN") if outcome is None else Ticket(name, outcome.status, outcome.message)

    def result(self, owner: Owner, name: str) -> Path | None:
        """The file of a ticket that is complete."""
        return self._store.result(name) if self.ticket(owner, name).status == "COMPLETE" else None

    def _of_open(self, name: str) -> Ticket:
        return Ticket(name, "RUNNING" if name in self._running else "PENDING")

    # --- working ------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._answer(job)

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.draining)
            if self.draining:
                return None
            busy = Counter(self._running.values())
            job = min(self._waiting, key=lambda job: (busy[job.owner], job.number))
            self._waiting.remove(job)
            self._running[job.id] = job.owner
            return job

    def _answer(self, job: Job) -> None:
        identity, result = "", None
        try:
            databases = self._current()
            identity = databases.identity
            result = self._made(job.query, databases)
            outcome = self._within_quota(job, Outcome("COMPLETE", identity, len(result)))
        except (UserError, OSError) as error:
            outcome = Outcome("ERROR", identity, 0, in_one_line(error) or str(error).splitlines()[0])
        except Exception as error:
            log.error("unexpected %s", type(error).__name__, exc_info=error)
            outcome = Outcome("ERROR", identity, 0, "an error of the server's, which its log tells of")
        try:
            self._store.finish(job, outcome, result if outcome.status == "COMPLETE" else None)
        except OSError as error:
            log.error("a ticket's end cannot be written: %s", error)
            outcome = Outcome("ERROR", identity, 0, "no room for the result")
        with self._changed:
            self._note(job, outcome)
        asked = self._asked.get(job.id)
        self._forget(job.id)
        self._metrics.ended(job.query.kind, outcome.status, 0.0 if asked is None else time.monotonic() - asked)
        if outcome.message:
            log.warning("a ticket failed: %s", outcome.message)
        self._make_room()

    def _made(self, query: Query, databases: Databases) -> bytes:
        """The result.  Raises UserError with the first search that failed."""
        for _ in range(_TRIES):
            while missing := to_search(query, databases, self._searches):
                run, failed = self._shared.run(missing)
                self._metrics.searched(run, len(failed))
                if failed:
                    raise UserError(next(iter(failed.values())))
            try:
                content = files(query, databases, self._searches)
            except FileNotFoundError:
                continue
            return packed(content)
        raise UserError("results of searches are removed before answers are made of them; give more --max-disk")

    def _current(self) -> Databases:
        """The databases, opened anew where one has changed.  Raises UserError where that cannot be."""
        with self._opening:
            if not _is_unchanged(self._databases):
                self._databases = self._open_them()
                log.info("a database has changed; all are opened anew")
            return self._databases

    def _forget(self, name: str) -> None:
        with self._changed:
            self._open.pop(name, None)
            self._running.pop(name, None)
            self._asked.pop(name, None)

    # --- disks --------------------------------------------------------------------------------------------------------

    def _within_quota(self, job: Job, outcome: Outcome) -> Outcome:
        most = self._keys.named(job.owner).most_bytes
        most = self._limits.max_bytes // 2 if most is None else min(most, self._limits.max_bytes // 2)
        if outcome.num_bytes + _ENTRY_BYTES <= most:
            return outcome
        size = in_words(outcome.num_bytes)
        return Outcome("ERROR", outcome.databases, 0, f"the result has {size}, more than may be kept, {in_words(most)}")

    def _note(self, job: Job, outcome: Outcome) -> None:
        self._drop(job.id)
        size = outcome.num_bytes + _ENTRY_BYTES
        self._done[job.id] = job.owner, size
        self._sizes[job.owner] += size

    def _drop(self, name: str) -> None:
        owner, size = self._done.pop(name, ("", 0))
        self._sizes[owner] -= size

    def _make_room(self) -> None:
        """Remove the oldest results beyond an owner's limit and beyond half of the disk, and of searches the rest."""
        with self._changed:
            going = []
            for owner in [owner for owner in self._sizes if self._is_over(owner)]:
                for name in [name for name, (other, _) in self._done.items() if other == owner]:
                    if not self._is_over(owner):
                        break
                    self._drop(name)
                    going.append(name)
            for name in list(self._done) if self._sizes.total() > self._limits.max_bytes // 2 else ():
                if self._sizes.total() <= self._limits.max_bytes // 2:
                    break
                self._drop(name)
                going.append(name)
            self._store.remove(going)  # before one of them can be asked for anew
        if time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            remove_oldest(self._searches.folder, self._limits.max_bytes // 2)

    def _is_over(self, owner: str) -> bool:
        most = self._keys.named(owner).most_bytes
        return most is not None and self._sizes[owner] > most


def remove_oldest(folder: Path, most_bytes: int) -> None:
    """Remove files of a folder, those unused for longest first, until they have at most so many bytes."""
    found = []
    for entry in os.scandir(folder):
        if entry.is_file() and not entry.name.startswith("."):
            stat = entry.stat()
            found.append((stat.st_mtime, stat.st_size, entry.path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most_bytes:
            return
        Path(path).unlink(missing_ok=True)
        total -= size


def _is_unchanged(databases: Databases) -> bool:
    try:
        databases.check_unchanged()
    except UserError:
        return False
    return True
