"""A keeper: a small process that holds copies of ranks' state in this machine's memory, and outlives the ranks.

    python -m core.keeper HOST:PORT OWN      of the run's store; it says the port at which it listens at its OWN address

A copy is bytes, which the keeper does not look into, with a rank, a step and a generation of replicas. Of each rank it
holds two: the last that is whole, and the one that comes in or came last. When the next begins to come in, the older
is let go of: its ranks see to it that all of them have the newer by then (`core.train.buddies`).

It ends when it is told to, when no rank has been connected for `IDLE_S`, or when none is and the store has gone. It
knows no torch, so that it starts in a moment and takes no memory but that of copies.

Messages: the lengths of a head and a body, the head in JSON, the body; one back for each.
"""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

IDLE_S = 600.0
"""without a rank, after which a keeper ends"""
ANSWER_S = 60.0
_CONNECT_S = 2.0
_LENGTHS = struct.Struct("!QQ")
_LOOK_S = 2.0

Head = dict[str, Any]


def _send(to: socket.socket, head: Mapping[str, Any], body: Sequence[memoryview] = ()) -> None:
    text = json.dumps(head).encode()
    to.sendall(_LENGTHS.pack(len(text), sum(part.nbytes for part in body)) + text)
    for part in body:
        to.sendall(part)


def _receive(source: socket.socket, into: bytearray) -> None:
    left = memoryview(into)
    while left:
        if not (size := source.recv_into(left)):
            raise ConnectionError("the connection was closed in a message")
        left = left[size:]


def _receive_head(source: socket.socket) -> tuple[Head, int]:
    """The head of a message, and the length of its body.  Raises ConnectionError where none comes any more."""
    lengths = bytearray(_LENGTHS.size)
    _receive(source, lengths)
    of_head, of_body = _LENGTHS.unpack(lengths)
    text = bytearray(of_head)
    _receive(source, text)
    return json.loads(text), of_body


# --- the process ------------------------------------------------------------------------------------------------------


class _Copies:
    """What a keeper holds: rank -> its copies, the last one last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[int, list[tuple[Head, bytearray]]] = {}
        self.num_connected, self.alone_since = 0, time.monotonic()

    def _connected(self, change: int) -> None:
        with self._lock:
            self.num_connected += change
            self.alone_since = time.monotonic()

    def serve(self, rank: socket.socket) -> None:
        """Answer a connection until it is closed."""
        self._connected(1)
        with rank, suppress(OSError), self._until_closed():
            while True:
                head, length = _receive_head(rank)
                match head.pop("do"):
                    case "put":
                        self._put(rank, head, length)
                        _send(rank, {})
                    case "held":
                        with self._lock:
                            found = [of for copies in self._of.values() for of, _ in copies]
                        _send(rank, {"held": found})
                    case "get":
                        with self._lock:  # what is on its way is not written over
                            found = [body for of, body in self._of.get(head["rank"], ()) if of == head]
                            _send(rank, {"found": bool(found)}, [memoryview(body) for body in found[:1]])
                    case "end":
                        _send(rank, {})
                        os._exit(0)

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._connected(-1)

    def _put(self, rank: socket.socket, head: Head, length: int) -> None:
        with self._lock:
            copies = self._of.setdefault(head["rank"], [])
            free = [body for _, body in copies[:-1] if len(body) == length]
            del copies[:-1]
        body = free[0] if free else bytearray(length)
        _receive(rank, body)
        with self._lock:
            copies.append((head, body))


def serve(store: tuple[str, int], own: str) -> None:
    """Be a keeper.  own: the address at which it listens, and at no other: it asks nobody for a key."""
    copies = _Copies()
    listening = socket.create_server((own, 0), family=socket.AF_INET6 if ":" in own else socket.AF_INET)
    print(listening.getsockname()[1], flush=True)

    def accept() -> None:
        while True:
            rank, _ = listening.accept()
            threading.Thread(target=copies.serve, args=(rank,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    while True:
        time.sleep(_LOOK_S)
        if copies.num_connected:
            continue
        if time.monotonic() - copies.alone_since > IDLE_S or not _listens(store):
            return


def _listens(store: tuple[str, int]) -> bool:
    try:
        socket.create_connection(store, timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


# --- a rank's side ----------------------------------------------------------------------------------------------------


def start_keeper(store: tuple[str, int]) -> tuple[str, int]:
    """Start a keeper on this machine.  Returns its address, for all that reach the store: raises OSError otherwise.

    It listens where this machine reaches the store: on the loopback where the store is here."""
    host, port = store
    with socket.create_connection(store, timeout=ANSWER_S) as known:
        own = known.getsockname()[0]
    command = [sys.executable, "-m", "core.keeper", f"{host}:{port}", own]
    process = subprocess.Popen(
        command,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # whoever reads what the ranks say would wait for it
    )
    assert process.stdout is not None
    with process.stdout as said:
        return own, int(said.readline())


class Keeper:
    """A connection to a keeper, for one thread at a time.  All calls raise OSError where it is gone."""

    def __init__(self, host: str, port: int):
        self._to = socket.create_connection((host, port), timeout=_CONNECT_S)
        self._to.settimeout(ANSWER_S)

    def put(self, copy: Head, body: Sequence[memoryview]) -> None:
        """Hold a copy: `rank`, `step`, `generation`.  It is whole there when this returns."""
        self._ask("put", copy, body)

    def held(self) -> list[Head]:
        """The copies that it holds whole."""
        return self._ask("held", {})[0]["held"]

    def get(self, copy: Head) -> bytearray:
        """Raises LookupError where it does not hold that one."""
        head, body = self._ask("get", copy)
        if not head["found"]:
            raise LookupError(f"the keeper does not hold {copy}")
        return body

    def end(self) -> None:
        """End it, with all that it holds."""
        with self._to:
            self._ask("end", {})

    def close(self) -> None:
        self._to.close()

    def _ask(self, do: str, head: Head, body: Sequence[memoryview] = ()) -> tuple[Head, bytearray]:
        _send(self._to, {"do": do} | head, body)
        answer, length = _receive_head(self._to)
        found = bytearray(length)
        _receive(self._to, found)
        return answer, found


if __name__ == "__main__":
    where, _, number = sys.argv[1].rpartition(":")
    serve((where, int(number)), sys.argv[2])
