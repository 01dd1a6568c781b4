"""A rank that fails takes the job down at once, instead of leaving the others to wait for it until a timeout.

Every rank of several runs a `Watch`, a thread that looks twice a second

1. whether a rank has reported a failure in the store that the ranks share, on whatever machine it runs;
2. whether the processes of the other ranks of this machine are there: what is killed (for want of memory, say) or
   crashes reports nothing. The first to miss one reports it.

Then its own rank gets `GRACE_S` seconds to end by itself, twice that if it is the one that failed, and is ended: a
process that waits inside a collective hears nothing, neither exceptions nor signals. A rank that leaves because it is
done says so first. Where the store is gone, so is the rank or the launcher that held it: nothing is left to watch.

Once its rank has failed or is done, the thread asks the store nothing more: where a process ends while one of its
threads is inside a call of torch's, that thread ends it by SIGABRT, and its exit code is lost.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

from torch.distributed import Store

GRACE_S = 4.0
INTERVAL_S = 0.5
_FAILED = "watch/failed"


class Watch:
    """Watches the other ranks from now until `leave`.

    store  a connection to the ranks' store that nothing else uses: a blocking call of another would stop the watch
    """

    def __init__(self, store: Store, rank: int, num_ranks: int):
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._left = threading.Event()
        self._asks = threading.RLock()  # held while the store is asked
        self._first: int | None = None  # that failed
        self._neighbours: dict[int, int] = {}
        self._here = place()
        store.set(f"watch/process/{rank}", f"{self._here} {os.getpid()}")
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def report(self, rank: int) -> int:
        """Note that a rank has failed.  Returns the one that did so first."""
        with self._asks:
            self._first = int(self._store.compare_set(_FAILED, "", str(rank)))
        return self._first

    def let_end(self, rank: int) -> None:
        """Wait until a rank that failed has ended and its launcher has seen it: its exit code is that of the job."""
        with contextlib.suppress(RuntimeError):  # the store has gone with it
            end = time.monotonic() + GRACE_S / 2  # before the watch ends this rank
            while (process := self._process(rank)) and exists(process) and time.monotonic() < end:
                time.sleep(0.05)
        time.sleep(INTERVAL_S)

    def leave(self) -> None:
        """This rank is done; its end is no failure."""
        self._left.set()
        with self._asks, contextlib.suppress(RuntimeError):  # the store has gone with a rank that was done earlier
            self._store.set(f"watch/left/{self._rank}", "1")

    def _run(self) -> None:
        try:
            while not self._left.wait(INTERVAL_S):
                failed = self._failed()
                if failed is None:
                    continue
                own = failed == self._rank  # it prints, and its exit code is that of the job
                if not self._left.wait(2 * GRACE_S if own else GRACE_S):
                    if not own:
                        print(f"rank {self._rank} ends, because rank {failed} failed", file=sys.stderr, flush=True)
                    os._exit(1)
        except RuntimeError:
            return

    def _failed(self) -> int | None:
        """The rank that failed first, if any did."""
        with self._asks:
            if self._first is None and not self._left.is_set():
                if self._store.check([_FAILED]):
                    self._first = int(self._store.get(_FAILED))
                elif (missing := self._missing()) is not None:
                    self.report(missing)
            return self._first

    def _missing(self) -> int | None:
        """A rank of this machine whose process has ended without a word."""
        for rank in range(self._num_ranks):
            process = self._process(rank)
            if process and not exists(process) and not self._store.check([f"watch/left/{rank}"]):
                return rank
        return None

    def _process(self, rank: int) -> int:
        """Its number; 0 where it is not known here, or on another machine."""
        if rank not in self._neighbours and self._store.check([f"watch/process/{rank}"]):
            place, _, number = self._store.get(f"watch/process/{rank}").decode().rpartition(" ")
            self._neighbours[rank] = int(number) if place == self._here else 0
        return self._neighbours.get(rank, 0)


def place() -> str:
    """Where this process is: within this, process numbers mean the same: a machine, and a container of it."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(namespace) if namespace.exists() else os.getpid()}"


def exists(process: int) -> bool:
    """Return whether a process of this place has not ended."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    with contextlib.suppress(OSError):  # one that has ended stays until its parent has asked how
        return not Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("Z")
    return True
