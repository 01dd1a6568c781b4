"""A step that does not end: every rank says where it stands, and the run ends instead of waiting.

A `HangWatch` is a thread on every rank. `with watch.step("step 7"):` is what it times; between two steps a rank may
take as long as it likes (an evaluation, a checkpoint). Twice a second each thread

1. looks whether its rank's step takes longer than its limit: `hang_after`, or without it the larger of `LEAST_S` and
   `MEDIANS` median steps of the run. The clock starts anew while the rank compiles, and until a first step has ended
   (without `hang_after`, on a CPU) while it computes: nobody knows yet how long its steps take.
2. If so it asks, in the store that the ranks share, where all ranks stand. Each thread answers with what it sees: for
   how long its step has been running, in which collective, and the stacks of its other threads.
3. It is a hang if every rank's step is over its limit, or a rank's thread does not answer (a native call that holds the
   interpreter's lock). A rank that is between steps, or whose clock is younger, keeps the others waiting rightly.
4. The one that asked prints all stacks and one line, and all ranks end with exit code 1: a process inside a
   collective hears neither exceptions nor signals.

What the collective is, is told by torch's flight recorder (its group, its tensors) and by the stack (its name, and all
of a message between two ranks, which gloo does not record).
"""

import contextlib
import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import Store

from core.compat import flight_record, group_named

LEAST_S = 300.0
MEDIANS = 20
INTERVAL_S = 0.5
ANSWER_S = 10.0
"""for a rank's thread to answer, on a machine that is busy"""
BUSY = 0.1
"""of a core: a process that takes more computes; one that waits takes a hundredth"""

_COMPILERS = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/compile_fx.py",
    "triton/compiler/compiler.py",
    "triton/runtime/autotuner.py",
)
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_AROUND = ("wrapper", "inner", "_time_logger", "_exception_logger")
_BEGINNINGS = ("_bootstrap", "_bootstrap_inner", "_run_module_as_main", "_run_code")
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Standing:
    """The place of a rank in its step.

    step      that it is in; None: between two
    seconds   since its clock started
    overdue   whether that is more than its limit
    waits_in  the collective; None: in none
    place     the innermost line of its main thread that is not torch's
    stack     of all its threads
    """

    step: str | None
    seconds: float
    overdue: bool
    waits_in: str | None = None
    place: str = ""
    stack: str = ""


class HangWatch:
    """`with HangWatch(…) as watch:`, then `with watch.step(name):` around each step. All ranks make equally many.

    store       a connection to the ranks' store that nothing else uses: a blocking call of another would stop the watch
    hang_after  seconds; None: the larger of LEAST_S and MEDIANS median steps
    on_cpu      whether a process that takes no time of a CPU waits (one that waits for a GPU may spin)
    """

    _number = 0

    def __init__(self, store: Store, rank: int, num_ranks: int, hang_after: float | None, on_cpu: bool):
        HangWatch._number += 1
        self._prefix = f"hang/{HangWatch._number}"
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._hang_after, self._on_cpu = hang_after, on_cpu
        self._main = threading.main_thread().ident
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)
        self._times: list[float] = []
        self._step: str | None = None
        self._since = 0.0  # when the clock started
        self._cpu = 0.0, 0.0  # when the process had taken how many seconds of a CPU
        self._answered = 0
        self._asked: tuple[int, float] | None = None  # the question, and when
        self._ask_at = 0.0

    def __enter__(self) -> "HangWatch":
        self._main = threading.get_ident()
        self._store.set(self._key("here", self._rank), "1")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        with contextlib.suppress(RuntimeError):  # the store has gone with a rank that was done earlier
            self._store.set(self._key("left", self._rank), "1")
        self._thread.join(INTERVAL_S)  # see `core.watch`: it must not be inside the store when the process ends

    @contextlib.contextmanager
    def step(self, name: str, counts: bool = True) -> Iterator[None]:
        """Watch the block, which ends unless the run hangs.

        counts  whether its time is one of those of which the median is taken
        """
        begin = self._since = time.monotonic()
        self._cpu = begin, time.process_time()
        self._step = name
        try:
            yield
        except Exception:
            if self._is_told():  # a rank that has ended already has closed its connections
                _end()
            raise
        finally:
            self._step = None
            if counts:
                self._times.append(time.monotonic() - begin)

    @property
    def limit_s(self) -> float:
        if self._hang_after is not None:
            return self._hang_after
        return max(LEAST_S, MEDIANS * statistics.median(self._times)) if self._times else LEAST_S

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._left.wait(INTERVAL_S):
                self._look()
        except RuntimeError:  # the store has gone, and with it the rank or the launcher that held it
            return

    def _look(self) -> None:
        self._restart_clock()
        question = self._answered + 1
        if self._store.check([self._key("asker", question)]):
            self._store.set(self._key("answer", question, self._rank), json.dumps(asdict(self._standing())))
            self._answered, self._ask_at = question, max(self._ask_at, time.monotonic() + ANSWER_S)
        if self._asked is not None:
            self._decide(*self._asked)
        elif self._is_overdue():
            if self._is_told():
                self._store.set(self._key("gone", self._rank), "1")
                _end()
            if time.monotonic() >= self._ask_at and self._is_first("asker", self._answered + 1):
                self._asked = self._answered + 1, time.monotonic()

    def _is_first(self, *of: object) -> bool:
        """Return whether this is the first rank that wants to do this."""
        return int(self._store.compare_set(self._key(*of), "", str(self._rank))) == self._rank

    def _restart_clock(self) -> None:
        """Where what takes long is no hang."""
        now = time.monotonic()
        if self._step is None or now - self._since < INTERVAL_S / 2:
            return
        frame = sys._current_frames().get(self._main or 0)
        if any(file.endswith(_COMPILERS) for file in _files(frame)):
            self._since = now
        elif self._hang_after is None and not self._times and self._on_cpu:
            then, taken = self._cpu
            if now - then >= 4 * INTERVAL_S:
                if time.process_time() - taken > BUSY * (now - then):
                    self._since = now
                self._cpu = now, time.process_time()

    def _is_overdue(self) -> bool:
        return self._step is not None and time.monotonic() - self._since > self.limit_s

    def _standing(self) -> Standing:
        step, seconds, overdue = self._step, time.monotonic() - self._since, self._is_overdue()
        if step is None or not overdue:
            return Standing(step, seconds, overdue=False)
        return Standing(step, seconds, overdue, *where_it_stands(self._main or 0))

    def _decide(self, question: int, asked_at: float) -> None:
        """The verdict that the answers come to, once they are there."""
        found: dict[int, Standing | None] = {}
        for rank in range(self._num_ranks):
            key = self._key("answer", question, rank)
            if self._store.check([key]):
                found[rank] = Standing(**json.loads(self._store.get(key)))
            elif not self._is_there(rank):
                found[rank] = Standing(None, 0.0, overdue=False)
            elif time.monotonic() - asked_at < ANSWER_S:
                return
            else:
                found[rank] = None
        self._asked = None
        if all(standing is None or standing.overdue for standing in found.values()):
            print(report(found, self._hang_after), file=sys.stderr, flush=True)
            self._store.set(self._key("reported"), "1")
            self._let_others_go([rank for rank, standing in found.items() if standing is not None])
            _end()
        self._ask_at = time.monotonic() + ANSWER_S
        for rank in found:
            self._store.delete_key(self._key("answer", question, rank))

    def _is_told(self) -> bool:
        """Return whether all ranks are to end, because the run hangs."""
        with contextlib.suppress(RuntimeError):
            return self._store.check([self._key("reported")])
        return False

    def _let_others_go(self, ranks: list[int]) -> None:
        """First, so that none sees a connection close and takes that for what went wrong."""
        others = [self._key("gone", rank) for rank in ranks if rank != self._rank]
        deadline = time.monotonic() + ANSWER_S
        while others and not self._store.check(others) and time.monotonic() < deadline:
            time.sleep(INTERVAL_S / 5)

    def _is_there(self, rank: int) -> bool:
        """Return whether a rank's thread has begun and not ended."""
        begun, ended = (self._store.check([self._key(word, rank)]) for word in ("here", "left"))
        return begun and not ended

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))


def _end() -> None:
    """End the process, whose main thread hears nothing."""
    sys.stdout.flush()
    os._exit(1)


# --- where a process stands -------------------------------------------------------------------------------------------


def where_it_stands(main: int) -> tuple[str | None, str, str]:
    """(the collective that this process waits in, the line where its main thread is, the stacks of its threads)."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = [main, *(t for t in frames if t not in (main, threading.get_ident()) and names.get(t) != "watch")]
    stacks = [
        f"thread {names.get(thread, thread)}:\n{_stack_of(frames[thread])}" for thread in threads if thread in frames
    ]
    called = next((name for t in threads if (name := _collective_of(frames.get(t))) is not None), None)
    running = _recorded_collective()
    waits_in = called if running is None else running if called is None else f"{called}: {running}"
    return waits_in, _place_of(frames.get(main)), "".join(stacks)


def _stack_of(frame: FrameType) -> str:
    """Without how a thread begins, which is alike in all of them."""
    return "".join(traceback.format_list([f for f in traceback.extract_stack(frame) if f.name not in _BEGINNINGS]))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _files(frame: FrameType | None) -> Iterator[str]:
    return (f.f_code.co_filename for f in _frames(frame))


def _collective_of(frame: FrameType | None) -> str | None:
    """The function of torch.distributed that was called last, if one runs."""
    called = None
    for f in _frames(frame):
        name, file = f.f_code.co_name, f.f_code.co_filename
        if file.endswith(_COLLECTIVES) and not name.startswith("_") and name not in _AROUND:
            called = name
        elif called is not None and not file.startswith(_TORCH):
            return called
    return called


def _recorded_collective() -> str | None:
    """The oldest collective that torch has begun and not ended: its operation, tensors and ranks."""
    with contextlib.suppress(Exception):  # a record of another version: the stack says what it can
        if (record := flight_record()) is None:
            return None
        entries = json.loads(record)["entries"]
        running = next((e for e in entries if not e["retired"]), None)
        if running is None:
            return None
        operation = running["profiling_name"].rpartition(":")[2]
        group, axis = running["process_group"]
        ranks = dist.get_process_group_ranks(group_named(group))
        sizes = ", ".join(map(str, running["input_sizes"]))
        of = f" ({axis})" if axis.startswith("mesh_") else ""
        return f"{operation} of {sizes} over ranks {', '.join(map(str, ranks))}{of}"
    return None


def _place_of(frame: FrameType | None) -> str:
    for f in _frames(frame):
        file = f.f_code.co_filename
        if not file.startswith((_TORCH, "<")) and not file.endswith("/contextlib.py"):
            return f"{file}:{f.f_lineno} in {f.f_code.co_name}"
    return "nowhere in Python"


# --- the report -------------------------------------------------------------------------------------------------------


def report(found: dict[int, Standing | None], hang_after: float | None) -> str:
    """All stacks, those that are alike once; where each rank waits; and a line that says what has happened."""
    stacks: dict[str, list[int]] = {}
    for rank, standing in found.items():
        stacks.setdefault("" if standing is None else standing.stack, []).append(rank)
    lines = [f"{_ranks(ranks)} stands at\n{stack}" for stack, ranks in stacks.items() if stack]
    waits: dict[str, list[int]] = {}
    for rank, standing in found.items():
        waits.setdefault(_where(standing), []).append(rank)
    lines += [f"{_ranks(ranks)} {where}" for where, ranks in waits.items()]
    overdue = [standing for standing in found.values() if standing is not None]
    steps = " and ".join(dict.fromkeys(standing.step or "" for standing in overdue))
    seconds = max(standing.seconds for standing in overdue)
    limit = f"--hang-after {hang_after:g}" if hang_after is not None else "--hang-after is left to the steps' median"
    lines.append(
        f"error: {steps} has not ended for {seconds:.0f} s ({limit}), and no rank goes on, so the run ends; above is "
        "where each rank waits. If a step may take so long, give a larger --hang-after"
    )
    return "\n".join(lines)


def _where(standing: Standing | None) -> str:
    if standing is None:
        return "does not answer: it is stopped, or a native call holds the interpreter"
    if standing.waits_in is None:
        return f"waits in no collective: {standing.place}"
    return f"waits in {standing.waits_in}: {standing.place}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
