"""The replicas of an elastic run: who is there, who is lost, who joins, and what all of them have agreed on.

A replica is a launch of its own, of one rank or several. Replicas know each other through a store (torch's TCPStore) at
an address that all are given. It is a process by itself, so that it outlives each of them: where nobody listens at an
address of this machine, a replica starts it; it ends when no replica has been there for a minute.

    python -m core.members HOST:PORT      the store by itself, until it is ended: for more than one machine

1. Signs of life. Every rank has a thread that counts up a number in the store, four times a second, and looks at the
   others' numbers. One that has not changed for `lost_after` seconds is a rank that died, was cut off or was stopped.
   Of ranks of this machine the process is looked for, too, which finds a dead one at once. A rank whose step takes
   longer than its limit by itself, without waiting for others, gives no more signs. With a rank its replica is lost.
2. Generations. A generation is a list of replicas that take steps together, written once, under its number, by whoever
   is first (compare and set). Its members make process groups of their own with its number.
3. Verdicts. Each step (and the setup of a generation) has one word in the store, written once: `commit` or `regroup` by
   the last rank that votes, when all have all that the step needs from others; `abort` by the first that finds a member
   lost. So a step is taken by all members or by none, whatever dies when. Behind `abort` and `regroup` comes the next
   generation: at the same step, or at the next one.
4. A replica that is not in the next generation was taken for lost, or has left. It learns so from the store, and ends.

The vote is the commit of two phases (Gray 1978, Notes on data base operating systems, section 5.8.3.3), with the store
as the coordinator that does not die. Losing the store ends the run, as losing all replicas does: there are checkpoints.
"""

import contextlib
import fcntl
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

from torch.distributed import TCPStore

from core.config import UserError
from core.hang import LEAST_S, MEDIANS
from core.watch import exists, place

INTERVAL_S = 0.25
CONNECT_S = 60.0
"""for a store to come up, on whatever machine"""
IDLE_S = 60.0
"""without a sign of life, after which a store that a replica has started ends"""
_ANSWER_S = 30.0
_BEGAN = "began"
_SIGNS = "signs"
_NOTHING = "-"

Verdict = Literal["commit", "regroup"]


class Aborted(Exception):
    """The step is not taken: a member of the generation is lost.  It is repeated by the next generation."""


class Excluded(Exception):
    """The others go on without this replica."""


class StoreLost(Exception):
    """The store does not answer."""


class Over(Exception):
    """The run that this replica would join has come to its end."""


@dataclass(frozen=True)
class Generation:
    """Replicas that take steps together.

    members  in the order of their ranks and rows; the first one leads
    holders  those of them that have the run's state; none: the first begins, from a checkpoint or its seed
    step     that is taken first
    known    replicas that had ever come when this was written, but for those of which no sign was seen yet: they are
             no members, and wait for the next generation
    """

    number: int
    members: tuple[int, ...]
    holders: tuple[int, ...]
    step: int
    known: int

    @staticmethod
    def read(text: bytes) -> "Generation":
        record = json.loads(text)
        return Generation(**record | {name: tuple(record[name]) for name in ("members", "holders")})


def parse_address(address: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT.  Raises UserError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"elastic.store={address}; give HOST:PORT, such as localhost:29400")
    return host.strip("[]"), int(port)


# --- the store --------------------------------------------------------------------------------------------------------


def connection(address: str) -> TCPStore:
    """A connection to the store, for one thread."""
    host, port = parse_address(address)
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_ANSWER_S))
    except RuntimeError as error:
        raise UserError(f"elastic.store={address}: what listens there is no store; give another port") from error


def find_store(address: str) -> None:
    """Wait until somebody listens at the address; on this machine start the store where nobody does.

    Raises UserError where nobody does within a minute, and for a host without an address.
    """
    host, port = parse_address(address)
    end, started = time.monotonic() + CONNECT_S, False
    with open(Path(tempfile.gettempdir(), f"megalith-store-{os.getuid()}-{port}"), "wb") as lock:
        while not _listens(host, port):
            if not started and _is_here(host) and _locks(lock):  # one of several that begin at once
                command = [sys.executable, "-m", "core.members", address, "--until-idle"]
                subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
                started = True
            if time.monotonic() > end:
                raise UserError(
                    f"elastic.store={address}: nobody listens there after {CONNECT_S:.0f} s; start "
                    f"`python -m core.members {address}` on that machine"
                )
            time.sleep(0.1)


def _read(store: TCPStore, key: str) -> str:
    """What a key has; "" for one that is not there, or not any more: a get of the store's own would wait for it."""
    found = store.compare_set(key, _NOTHING, _NOTHING).decode()
    return "" if found == _NOTHING else found


def _locks(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except socket.gaierror as error:
        raise UserError(f"elastic.store={host}:{port}: {host} has no address; give a host that has one") from error
    except OSError:
        return False
    return True


def _is_here(host: str) -> bool:
    """Whether a host is this machine: only an address of its own can be bound."""
    for family, kind, _, _, (address, *_) in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with socket.socket(family, kind) as found, contextlib.suppress(OSError):
            found.bind((address, 0))
            return True
    return False


def serve(address: str, until_idle: bool) -> int:
    """Be the store.  until_idle: end when no replica gave a sign of life for a minute."""
    host, port = parse_address(address)
    try:
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_ANSWER_S))
    except RuntimeError:
        if until_idle:
            return 0  # another replica's has come first
        print(f"error: {address} is taken; give another port", file=sys.stderr)
        return 2
    if not until_idle:
        print(f"the store of an elastic run listens at {address}", flush=True)
    signs, changed = -1, time.monotonic()
    while not until_idle or time.monotonic() - changed < IDLE_S:
        time.sleep(1.0)
        if (now := store.add(_SIGNS, 0)) != signs:
            signs, changed = now, time.monotonic()
    return 0


# --- a replica --------------------------------------------------------------------------------------------------------


class Members:
    """A replica's place among the others, on one of its ranks.

    agree   the first rank's value, on every rank of this replica; a collective of them
    told    where lines for the user go; on the first rank
    """

    def __init__(
        self,
        address: str,
        rank: int,
        num_ranks: int,
        *,
        least: int = 1,
        lost_after: float = 5.0,
        hang_after: float | None = None,
        agree: Callable[[Any], Any] = lambda value: value,
        told: Callable[[str], None] = lambda line: None,
    ):
        self.address, self.rank, self.num_ranks = address, rank, num_ranks
        self.least, self.lost_after, self.hang_after = least, lost_after, hang_after
        self._agree, self._told = agree, told
        self.id = -1
        self.generation: Generation | None = None
        self._holds = False
        self._settled = 0  # number of the last generation all of whose members had the run's state
        self.prefix = ""
        self._label: str | None = None
        self._left = threading.Event()
        self._gone = False  # the store
        self._aborted: tuple[int, str] | None = None
        self._lost: set[int] = set()
        self._busy_since: float | None = None
        self._times: list[float] = []
        self._signs: dict[tuple[int, int], tuple[bytes, float]] = {}
        self._processes: dict[tuple[int, int], int] = {}

    # --- joining ------------------------------------------------------------------------------------------------------

    def join(self, run: Mapping[str, Any]) -> None:
        """Become a replica of the run in the store, or of a new one where that is over.

        run  JSON-able; what every replica of the run must have alike: `out`, `version`, `ranks`, `options`

        Raises UserError, on every rank, where the store is not to be had or belongs to another run.
        """
        said, given = None, None
        if self.rank == 0:
            try:
                find_store(self.address)
                self._store = connection(self.address)
                given = self._enter(dict(run))
            except UserError as error:
                said = str(error)
        said, given = self._agree((said, given))
        if said is not None:
            raise UserError(said)
        self.prefix, self.id = given
        if self.rank:
            self._store = connection(self.address)
        here = f"{place()} {os.getpid()}"
        self._store.set(self._key("process", self.id, self.rank), here)
        self._store.add(self._key("sign", self.id, self.rank), 1)
        if self._store.add(self._key("here", self.id), 1) == self.num_ranks:  # others look at all ranks' keys
            self._append(self._key("registered"))
        while self.id not in self._agree(self._registered()):  # not a wait for the store: a rank may die
            time.sleep(0.01)
        self._other = connection(self.address)
        threading.Thread(target=self._run, name="members", daemon=True).start()

    def _enter(self, run: dict[str, Any]) -> tuple[str, int]:
        """(prefix of the run's keys, number of this replica)."""
        mine = json.dumps(run | {"run": uuid.uuid4().hex}).encode()
        found = self._store.compare_set(_BEGAN, "", mine.decode())
        while found != mine:
            record = json.loads(found)
            if not self._is_over(record["run"], anyway=record | {"run": 0} == run | {"run": 0}):
                _require_alike(self.address, record, run)
                break
            found = self._store.compare_set(_BEGAN, found.decode(), mine.decode())
        prefix = json.loads(found)["run"]
        return prefix, self._store.add(f"{prefix}/ids", 1) - 1

    def _is_over(self, prefix: str, anyway: bool) -> bool:
        """Whether a run has ended.  anyway: one that all have left for dead goes on with whoever joins."""
        if self._store.check([f"{prefix}/over"]):
            return True
        if anyway:
            return False
        signs = self._store.add(_SIGNS, 0)
        time.sleep(self.lost_after)
        return self._store.add(_SIGNS, 0) == signs

    # --- generations --------------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """This replica's place among the members."""
        assert self.generation is not None
        return self.generation.members.index(self.id)

    @property
    def leads(self) -> bool:
        return self.generation is not None and self.generation.members[0] == self.id

    @property
    def remains_first(self) -> bool:
        """Whether this replica is the first of those members that are left and have the run's state."""
        own = self.generation
        if own is None or not self._holds:
            return False
        return min(m for m in own.members if m == self.id or m not in self._lost) == self.id

    @property
    def alone(self) -> bool:
        """Whether no other member is left."""
        return self.generation is None or not set(self.generation.members) - self._lost - {self.id}

    def regroup(
        self,
        step: int,
        most: int,
        save: Callable[[], None] = lambda: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Generation | None:
        """Wait for the next generation with this replica in it, and be one of its members.

        step     that comes next, where this replica has the run's state
        most     replicas that have rows to work on; others wait
        save     called, on every rank, before waiting for want of replicas
        stopped  whether this replica is asked to stop

        Returns None, on every rank, where it is asked to stop while it waits.

        Raises Excluded, on every rank, where the others go on without it, and Over where the run has ended.
        """
        saved = False
        self._label = None
        while True:
            word, record = self._agree(self._decided(step, most, saved, stopped) if self.rank == 0 else None)
            if word == "save":
                if self._holds:
                    save()
                saved = True
            elif word == "over":
                raise Over
            elif word == "stopped":
                return None
            elif word == "excluded":
                self._left.set()
                raise Excluded
            elif word == "generation":
                self.generation = Generation(**record | {n: tuple(record[n]) for n in ("members", "holders")})
                return self.generation

    def _decided(self, step: int, most: int, saved: bool, stopped: Callable[[], bool]) -> tuple[str, Any]:
        """What comes next; rank 0 looks for it, and says "wait" now and then so that the other ranks hear of it."""
        begin = time.monotonic()
        end = begin + 20.0
        while time.monotonic() < end:
            if self._gone:
                raise StoreLost
            if self.generation is None and self._store.check([self._key("over")]):
                return "over", None
            latest = self._latest()
            if latest is not None and (self.generation is None or latest.number > self.generation.number):
                if self.id in latest.members:
                    return "generation", asdict(latest)
                if self.generation is not None:
                    return "excluded", None
            wanted = self._wanted(latest, step, most)
            if wanted is not None:
                if len(wanted.members) >= self.least:
                    text = json.dumps(asdict(wanted))
                    self._store.compare_set(self._key("generation", wanted.number), "", text)
                    self._store.set(self._key("latest"), str(wanted.number))
                    continue
                if not saved and time.monotonic() - begin > 4 * INTERVAL_S:  # others may have just come
                    self._tell_of_want(wanted)
                    return "save", None
            if stopped():
                return "stopped", None
            time.sleep(INTERVAL_S / 5)
        return "wait", None

    def _wanted(self, latest: Generation | None, step: int, most: int) -> Generation | None:
        """The next generation as this replica would write it; None where it is for others to do."""
        own, known = self.generation, self._registered()
        lost = self._lost | self._gone_by_themselves(known)
        there = [m for m in known if m not in lost and self._seen(m)]
        num_known = len(there) + len(lost & {*known})
        if own is None:  # one that comes new writes the first, or the next where all members are lost
            if latest is not None and not lost.issuperset(latest.members):
                return None
            number = 1 if latest is None else latest.number + 1
            return Generation(number, tuple(there[:most]), (), 0, num_known)
        holders = own.members if self._settled == own.number else own.holders
        kept = [m for m in own.members if m in there and m in holders]
        others = [m for m in there if m not in kept]
        return Generation(own.number + 1, tuple((kept + others)[:most]), tuple(kept), step, num_known)

    def _seen(self, member: int) -> bool:
        """Whether it has given a sign of life, to this replica or to the one that wrote the generation at hand."""
        among = () if self.generation is None else self.generation.members
        return member == self.id or member in among or (member, 0) in self._signs

    def _tell_of_want(self, wanted: Generation) -> None:
        there, own = len(wanted.members), self.generation
        lost = [] if own is None else [m for m in own.members if m not in wanted.members]
        who = f"; lost: {', '.join(self._named(m) for m in lost)}" if lost else ""
        saves = "saves and " if self._holds else ""
        self._told(
            f"elastic: {there} of at least {self.least} replicas {'is' if there == 1 else 'are'} there{who}; this one "
            f"{saves}waits for {self.least - there} more at {self.address}"
        )

    def _named(self, member: int) -> str:
        where, _, process = self._store.get(self._key("process", member, 0)).decode().rpartition(" ")
        return f"replica {member} (process {process} on {where.split()[0]})"

    def _latest(self) -> Generation | None:
        number = self.generation.number if self.generation is not None else 0
        if self.generation is None and self._store.check([self._key("latest")]):
            number = int(self._store.get(self._key("latest")))
        elif not self._store.check([self._key("generation", number + 1)]):
            return None
        else:
            number += 1
        while self.generation is None and self._store.check([self._key("generation", number + 1)]):
            number += 1
        return Generation.read(self._store.get(self._key("generation", number)))

    def _registered(self) -> list[int]:
        return [int(m) for m in _read(self._store, self._key("registered")).split(",") if m]

    def _gone_by_themselves(self, members: Collection[int]) -> set[int]:
        return {m for m in members if self._store.check([self._key("left", m)])}

    # --- a step -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def working(self, label: str, times: bool = True) -> Iterator[None]:
        """Surround what this rank does by itself of a step, or of a generation's setup.

        times  it has a limit, as a step has (`core.hang`)
        """
        assert self.generation is not None
        self._label = label
        begin = time.monotonic()
        self._busy_since = begin if times else None
        try:
            yield
            if times:
                self._times.append(time.monotonic() - begin)
        finally:
            self._busy_since = None

    @property
    def is_aborted(self) -> bool:
        """Whether the step at hand will not be taken."""
        if self._gone:
            raise StoreLost
        return self._aborted is not None and self._aborted == self._point

    @property
    def _point(self) -> tuple[int, str] | None:
        return None if self.generation is None or self._label is None else (self.generation.number, self._label)

    def arrive(self) -> None:
        """Wait until all ranks of all members are here.  Raises Aborted."""
        self._busy_since = None
        if self._store.add(self._of_step("arrived"), 1) == self._num_votes:
            self._store.set(self._of_step("all"), "1")
        self._wait_for(self._of_step("all"))
        if self._store.check([self._of_step("verdict")]):
            raise Aborted

    def vote(self, leaves: bool = False) -> Verdict:
        """Say that this rank has all that it needs from others to take the step; returns when all members have.

        leaves  this replica leaves behind the step

        Raises Aborted where they have not, because one is lost.
        """
        assert self.generation is not None
        if leaves and self.rank == 0:
            self._append(self._of_step("leaves"))
        verdict = self._of_step("verdict")
        if self._store.add(self._of_step("votes"), 1) == self._num_votes:
            changes = self._store.check([self._of_step("leaves")]) or len(self._registered()) > self.generation.known
            self._store.compare_set(verdict, "", "regroup" if changes else "commit")
        self._wait_for(verdict)
        word = self._store.get(verdict).decode()
        if word not in ("commit", "regroup"):
            raise Aborted
        self._holds, self._settled = True, self.generation.number
        self._lost.update(self.leavers() - {self.id} if word == "regroup" else ())
        return "commit" if word == "commit" else "regroup"

    def leavers(self) -> set[int]:
        """Replicas that leave behind the step that was just taken."""
        key = self._of_step("leaves")
        return {int(m) for m in self._store.get(key).decode().split(",") if m} if self._store.check([key]) else set()

    def broken(self, why: str) -> NoReturn:
        """A message to others has failed: wait until it is known which of them is lost, or give up this step."""
        end = time.monotonic() + 3 * self.lost_after
        while time.monotonic() < end and not self.is_aborted:
            time.sleep(0.02)
        self._abort(self._store, f"abort {why}")
        raise Aborted

    def forget(self, label: str) -> None:
        """Remove what an earlier step of this generation has left in the store."""
        for word in ("arrived", "all", "votes", "verdict"):
            self._store.delete_key(self._of_step(word, label))

    def note(self, name: str, value: str) -> None:
        """Leave a word in the store for all replicas of the run, in the place of what was noted so before."""
        self._store.set(self._key("noted", name), value)

    def add_note(self, name: str, value: str) -> None:
        """Leave a word, without a semicolon, behind those that have been left so."""
        store: Any = self._store
        store.append(self._key("noted", name), f"{value};")

    def noted(self, name: str) -> str | None:
        """What was noted so; None where nothing was."""
        key = self._key("noted", name)
        return self._store.get(key).decode() if self._store.check([key]) else None

    def places(self) -> list[str]:
        """Where each rank of this replica is (`core.watch.place`)."""
        keys = [self._key("process", self.id, rank) for rank in range(self.num_ranks)]
        return [where.decode().rpartition(" ")[0] for where in self._store.multi_get(keys)]

    def leave(self, over: bool = False) -> None:
        """This replica is done, and with `over` the run."""
        self._left.set()
        with contextlib.suppress(RuntimeError):
            if over:
                self._store.set(self._key("over"), "1")
            self._store.set(self._key("left", self.id), "1")

    @property
    def _num_votes(self) -> int:
        assert self.generation is not None
        return len(self.generation.members) * self.num_ranks

    def _of_step(self, word: str, label: str | None = None) -> str:
        assert self.generation is not None
        return self._key(word, self.generation.number, self._label if label is None else label)

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self.prefix, *parts)))

    def _append(self, key: str) -> None:
        """This replica's number, behind those that the key has."""
        store: Any = self._store
        store.append(key, f"{self.id},")

    def _wait_for(self, key: str) -> None:
        pause = 5e-4  # a wait of the store's own that times out is told of on stderr
        try:
            while not self._store.check([key]):
                if self._gone:
                    raise StoreLost
                time.sleep(pause)
                pause = min(1.5 * pause, 0.02)
        except RuntimeError as error:
            raise StoreLost from error

    def _abort(self, store: TCPStore, word: str) -> None:
        """Let nobody take the step at hand, unless all have voted."""
        if (point := self._point) is None:
            return
        if store.compare_set(self._key("verdict", *point), "", word).decode().startswith("abort"):
            self._give_up(store, point)

    def _give_up(self, store: TCPStore, point: tuple[int, str]) -> None:
        """A step is not taken; who waits for all hears of it, also where the one that said so died with that word."""
        self._aborted = point
        store.set(self._key("all", *point), "1")

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._left.wait(INTERVAL_S):
                self._look()
        except RuntimeError:
            self._gone = not self._left.is_set()

    def _look(self) -> None:
        store = self._other
        if not self._hangs():
            store.add(self._key("sign", self.id, self.rank), 1)
            store.add(_SIGNS, 1)
        known = [int(m) for m in _read(store, self._key("registered")).split(",") if m]
        self._lost.update([m for m in known if m != self.id and m not in self._lost and self._is_lost(m)])
        point, generation = self._point, self.generation
        if generation is None:
            return
        if store.check([self._key("generation", generation.number + 1)]):
            self._end_if_excluded(Generation.read(store.get(self._key("generation", generation.number + 1))))
        if point is None:
            return
        if _read(store, self._key("verdict", *point)).startswith("abort"):
            self._give_up(store, point)
        elif lost := [m for m in generation.members if m in self._lost]:
            self._abort(store, f"abort {' '.join(map(str, lost))}")

    def _hangs(self) -> bool:
        """Whether this rank's own part of a step takes longer than it may."""
        since = self._busy_since
        if since is None:
            return False
        limit = self.hang_after
        if limit is None:
            limit = max(LEAST_S, MEDIANS * statistics.median(self._times)) if self._times else LEAST_S
        return time.monotonic() - since > limit

    def _is_lost(self, member: int) -> bool:
        """Whether a rank of a replica has given no sign of life for too long, or its process is gone."""
        store, now = self._other, time.monotonic()
        if store.check([self._key("left", member)]):
            return True
        ranks = range(self.num_ranks)
        signs = store.multi_get([self._key("sign", member, rank) for rank in ranks])
        for rank, sign in zip(ranks, signs, strict=True):
            if (member, rank) not in self._processes:
                where, _, process = store.get(self._key("process", member, rank)).decode().rpartition(" ")
                self._processes[member, rank] = int(process) if where == place() else 0
            before = self._signs.get((member, rank))
            if before is None or before[0] != sign:
                self._signs[member, rank] = sign, now
            elif now - before[1] > self.lost_after:
                return True
            if (process := self._processes[member, rank]) and not exists(process):
                return True
        return False

    def _end_if_excluded(self, following: Generation) -> None:
        """End this process where its main thread does not: one that hangs hears nothing."""
        if self.id in following.members or self._left.wait(2.0):
            return
        print(excluded(self.lost_after), file=sys.stderr, flush=True)
        os._exit(1)


def excluded(lost_after: float) -> str:
    """The line of a replica that the others go on without."""
    return (
        f"error: the others took this replica for lost (no sign of life for {lost_after:g} s, a dead rank, or a step "
        "over its limit) and go on without it; start it again to join them"
    )


def _require_alike(address: str, record: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises UserError where the run in the store is another."""
    if record["out"] != own["out"]:
        raise UserError(
            f"elastic.store={address} is in use by the run in {record['out']}, and this one writes to {own['out']}; "
            "give each run a store of its own"
        )
    if record["version"] != own["version"]:
        raise UserError(
            f"elastic.store={address}: this replica has {own['version']}, and the run that it would join "
            f"{record['version']}; install the same"
        )
    if record["ranks"] != own["ranks"]:
        raise UserError(
            f"elastic.store={address}: this replica has {own['ranks']} ranks, and those of the run that it would join "
            f"{record['ranks']}; launch it with as many"
        )
    theirs, options = record["options"], own["options"]
    names = sorted(name for name in {*theirs, *options} if theirs.get(name) != options.get(name))
    if names:
        what = ", ".join(f"{name} {theirs.get(name)} -> {options.get(name)}" for name in names[:3])
        raise UserError(
            f"elastic.store={address}: this replica is configured otherwise than the run that it would join ({what}); "
            "give it the same options, or a store of its own"
        )


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "--until-idle"]
    try:
        if len(given) != 1:
            raise UserError(f"{' '.join(given) or 'no address'}; give HOST:PORT, such as 0.0.0.0:29400")
        sys.exit(serve(given[0], "--until-idle" in sys.argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
