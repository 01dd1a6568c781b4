"""Copies of each rank's state in memory that outlives the rank, every K steps, for when no replica is left that has it.

A replica dies with any of its ranks, and with all replicas the state that they hold. So every K steps each rank copies
its shards (parameters, optimizer, averages, buffers, loss scale, random state: all that a replica that joins is given)
to the keeper of its machine, a process by itself (`core.keeper`). Its buddy, the rank of the same place in the next
replica, has the same shards and does so in the same step: so each shard lies in the memory of as many machines as there
are replicas, and nothing is sent between machines. A replica that is alone has no such buddy: it sends its copies to
the next of its machines, too.

1. `keep`: behind a step the rank copies its shards on the host, and a thread brings them to the keeper.
2. `settle`: in the next step, before any replica votes for it, the thread is waited for. So when that step is taken all
   ranks of all replicas have the copy: at most K steps are ever repeated, and two copies of a rank are enough.
3. `find`, by the first replica of a generation in which none has the state: the latest step of which every rank has a
   copy in a keeper that is left; each rank takes its own.

What is lost with all machines of all replicas comes from a checkpoint. Wang et al. 2023, GEMINI, SOSP, section 4, keep
copies in the memory of peers; theirs are sent, for want of replicas that have them already.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.config import UserError
from core.keeper import Head, Keeper, start_keeper
from core.layout import local
from core.members import Members, parse_address
from core.pinned import host_empty
from core.runtime import agreed, gathered
from core.watch import place

_KEEPERS = "keepers"
_TAKEN = "taken"


class Found(NamedTuple):
    """A copy of this rank's state.

    machines  of the keepers that all ranks have theirs from
    taken     steps that the run had taken
    """

    head: dict[str, Any]
    body: memoryview
    machines: list[str]
    taken: int


class _At(NamedTuple):
    """A keeper: of which replica, on which machine, where it listens."""

    replica: int
    machine: str
    host: str
    port: int


def check_buddies(every: int | None, least: int) -> None:
    """Raises UserError, on every rank, where a rank's copy would be kept by its own machine alone.  A collective."""
    if every is not None and least == 1 and len(set(gathered(place()))) == 1:
        raise UserError(
            f"elastic.buddy_every={every} with elastic.min=1 and one machine: a replica that is alone would be its own "
            "buddy; give --elastic.min 2, or replicas of several machines"
        )


class Buddies:
    """This rank's copies.

    told  where lines for the user go
    """

    def __init__(self, every: int, members: Members, told: Callable[[str], None]):
        self.every, self._members, self._told = every, members, told
        self._firsts: list[int] = []
        """the first rank of each machine of this replica"""
        self._first = -1
        self._to: list[_At] = []
        self._connections: dict[_At, Keeper] = {}
        self._staged = torch.empty(0, dtype=torch.uint8)
        self._sending: threading.Thread | None = None
        self._failed: OSError | None = None
        self._generation = -1
        """the last one in which a copy was kept"""
        self._cleared = -1

    def join(self) -> None:
        """Find this machine's keeper, and start it on the first rank there.  A collective of a replica that has become
        a member: others' keepers are ended."""
        if self._firsts:
            return
        machines = self._members.places()
        self._firsts = [machines.index(machine) for machine in dict.fromkeys(machines)]
        self._first = machines.index(place())
        if self._starts:
            self._start()
        gathered(None)  # all have started theirs
        self._find()

    @property
    def _starts(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self._members.rank == self._first

    def _start(self) -> None:
        at = _At(self._members.id, place().split()[0], *start_keeper(parse_address(self._members.address)))
        self._members.add_note(_KEEPERS, json.dumps(at))
        self._members.note(self._of_machine(self._first), json.dumps(at))

    def _find(self) -> None:
        """The keepers of this machine, and of the next where there is one."""
        after = self._firsts[(self._firsts.index(self._first) + 1) % len(self._firsts)]
        self._to = [
            _At(*json.loads(self._members.noted(self._of_machine(first)) or ""))
            for first in dict.fromkeys((self._first, after))
        ]

    def _of_machine(self, first: int) -> str:
        return f"keeper/{self._members.id}/{first}"

    # --- to keep ------------------------------------------------------------------------------------------------------

    def keep(
        self, step: int, head: Callable[[], Mapping[str, Any]], tensors: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        """Behind a step: where it is one of those, begin to copy this rank's state.

        head     JSON-able, of what is no tensor
        tensors  name -> tensor; they may change as soon as this returns
        """
        generation = self._members.generation
        assert generation is not None
        if self._members.leads and self._members.rank == 0:
            self._members.note(_TAKEN, str(step))
        alone = len(generation.members) == 1
        if step % self.every and not (alone and self._generation != generation.number):
            return
        if self._failed is not None:  # it was ended by itself
            if self._starts:
                self._start()
            self._find()
        self._generation = generation.number
        sizes = self._stage(tensors())
        text = torch.frombuffer(bytearray(json.dumps({"tensors": sizes, **head()}).encode()), dtype=torch.uint8)
        copy = {"rank": self._members.rank, "step": step, "generation": generation.number}
        body = [memoryview(len(text).to_bytes(8, "big")), text.numpy().data, self._staged.numpy().data]
        self._failed = None
        to = self._to if alone else self._to[:1]
        self._sending = threading.Thread(target=self._send, args=(to, copy, body), name="copies", daemon=True)
        self._sending.start()

    def _stage(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Copy tensors into one buffer on the host.  Returns the bytes of each."""
        flat = [local(tensor).detach().reshape(-1).view(torch.uint8) for tensor in tensors.values()]
        sizes = [len(one) for one in flat]
        if len(self._staged) != sum(sizes):
            self._staged = host_empty(sum(sizes), torch.uint8, pinned=any(one.is_cuda for one in flat))
        for place_, one in zip(self._staged.split(sizes), flat, strict=True):
            place_.copy_(one, non_blocking=True)
        if self._staged.is_pinned():
            torch.cuda.current_stream().synchronize()
        return sizes

    def _send(self, to: Sequence[_At], copy: Head, body: Sequence[memoryview]) -> None:
        for at in to:
            try:
                if at not in self._connections:
                    self._connections[at] = Keeper(at.host, at.port)
                self._connections[at].put(copy, body)
            except OSError as failed:
                self._connections.pop(at, None)
                self._failed = failed

    def settle(self) -> None:
        """Wait until the copy that was begun last is made."""
        if self._sending is None:
            return
        self._sending.join()
        self._sending = None
        if self._failed is not None:
            self._told(f"warning: a keeper is gone ({self._failed}); the next copy goes to another")

    def clear(self) -> None:
        """Behind a step that all have taken: once they have copies of this generation, end keepers of lost replicas."""
        generation = self._members.generation
        assert generation is not None
        settled = self._generation == generation.number and self._sending is None and self._failed is None
        if settled and self._cleared != generation.number:
            self._cleared = generation.number
            self.end_lost()

    def end_lost(self) -> None:
        """End the keepers of replicas that are lost; the first rank of all does."""
        members, generation = self._members, self._members.generation
        assert generation is not None
        if members.leads and members.rank == 0:
            for at in self._known():
                if at.replica not in generation.members:
                    _end(at)

    def leave(self) -> None:
        """This replica needs no copies any more: it has saved, or others go on."""
        if self._sending is not None:
            self._sending.join()
            self._sending = None
        for keeper in self._connections.values():
            keeper.close()
        if self._to and self._starts:
            _end(self._to[0])

    # --- to take ------------------------------------------------------------------------------------------------------

    def _known(self) -> list[_At]:
        noted = self._members.noted(_KEEPERS) or ""
        return [_At(*json.loads(one)) for one in noted.split(";") if one]

    def find(self, latest: int) -> Found | None:
        """This rank's copy of the last step of which all ranks have one; None where none is later than that step.

        A collective of this replica, alike on all of its ranks.
        """
        plan = agreed(self._plan(latest) if self._members.rank == 0 else None)
        if plan is None:
            return None
        copies, machines, taken = plan
        copy, at = copies[self._members.rank]
        body = None
        with suppress(OSError, LookupError):
            keeper = Keeper(at.host, at.port)
            body = keeper.get(copy)
            keeper.close()
        if not all(gathered(body is not None)) or body is None:
            return None
        begin = 8 + int.from_bytes(body[:8], "big")
        return Found(json.loads(body[8:begin]), memoryview(body)[begin:], machines, taken)

    def _plan(self, latest: int) -> tuple[list[tuple[Head, _At]], list[str], int] | None:
        """For each rank which copy and where, the machines, and the steps that were taken."""
        where: dict[tuple[int, int], dict[int, tuple[Head, _At]]] = {}
        for at in self._known():
            with suppress(OSError):
                keeper = Keeper(at.host, at.port)
                for copy in keeper.held():
                    where.setdefault((copy["step"], copy["generation"]), {})[copy["rank"]] = copy, at
                keeper.close()
        whole = [point for point, copies in where.items() if len(copies) == self._members.num_ranks]
        if not whole or max(whole)[0] <= latest:
            return None
        copies = [where[max(whole)][rank] for rank in range(self._members.num_ranks)]
        machines = list(dict.fromkeys(at.machine for _, at in copies))
        return copies, machines, int(self._members.noted(_TAKEN) or max(whole)[0])


def pieces(found: Found) -> Callable[[Tensor], Tensor]:
    """A function that returns the values of one tensor after the other, each like what it is given."""
    parts = iter(torch.frombuffer(found.body, dtype=torch.uint8).split(found.head["tensors"]))
    return lambda like: next(parts).clone().view(like.dtype).view(like.shape)


def _end(at: _At) -> None:
    with suppress(OSError):
        Keeper(at.host, at.port).end()
