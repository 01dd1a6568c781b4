"""The process: its group, its device, its seed, its memory allocator, its teardown, and the launch of local ranks.

The only file that reads the environment or creates a process group. Everything else is handed a mesh or an axis of it.
A process that no launcher started is a process group of one rank: the same path, without a special case.
"""

import atexit
import ctypes
import logging
import os
import random
import signal
import sys
import threading
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core.compat import connection_to_store, fake_store, forget_shardings, has_cpp_compiler, name_methods_by_frame
from core.config import LAUNCHER, UserError, in_one_line, require_device
from core.hang import HangWatch
from core.mesh import MeshConfig, Zero, build_mesh
from core.rank import end_with
from core.watch import Watch

_Value = TypeVar("_Value")
_STORE_S = 5.0


@dataclass(frozen=True)
class Runtime:
    """A rank's knowledge of itself."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """True on the rank that writes what is written once."""
        return self.rank == 0

    def mesh(self, config: MeshConfig, zero: Zero = 0) -> DeviceMesh:
        """The mesh of this process group's ranks.  Raises UserError when they cannot be laid out so."""
        return build_mesh(config.resolve(self.world_size, zero), self.device.type)


def world_size() -> int:
    """Ranks that the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched() -> bool:
    """Return whether torchrun, SLURM's equivalent or `launch` started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def ranks_of(nproc: int) -> int:
    """The number of ranks a run will have: those of the launcher that started this process, else --nproc.

    Raises UserError when both are given and disagree.
    """
    if not launched():
        return nproc
    if nproc not in (1, world_size()):
        raise UserError(f"nproc={nproc} under a launcher of {world_size()} ranks; leave --nproc out")
    return world_size()


def leads() -> bool:
    """Return whether this process is rank 0, before any process group exists."""
    return os.environ.get("RANK", "0") == "0"


def tells() -> bool:
    """Return whether this process reports a mistake: of ranks that each meet one by themselves, the first that asks.

    The launcher ends the others as soon as one has ended, rank 0 too, so it must not be left to rank 0. Where the
    launcher keeps no store for its ranks, it is.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        key, rank = f"reported/{os.environ['TORCHELASTIC_RESTART_COUNT']}", os.environ["RANK"]
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with suppress(RuntimeError):  # it has gone with the launcher
            store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_STORE_S))
            return store.compare_set(key, "", rank).decode() == rank
    return leads()


def agreed(value: _Value) -> _Value:
    """Rank 0's value, on every rank of the process group; without one the value itself."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def gathered(value: _Value) -> list[_Value]:
    """Every rank's value, on every rank of the process group; without one the value itself."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


@contextmanager
def start(device: str = "auto", seed: int = 0, timeout_s: float = 1800.0) -> Iterator[Runtime]:
    """Join the process group (NCCL on CUDA, gloo elsewhere) for the length of the block, and leave it at the end.

    device  "cpu", "cuda" or "auto", see `device_kind`.
    Under torchrun or `launch` the ranks find each other through the environment; alone, a group of one rank.
    A process group that exists already is used and left as it is.
    An exception that leaves the block on one of several ranks is printed before the others notice, and ends them all
    within seconds (`core.watch`).
    """
    kind = device_kind(device)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    place = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(place)
    else:
        keep_freed_memory()
        _share_cores(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    _use_old_names()
    owned = not dist.is_initialized()
    if owned:
        _init_process_group(kind, timedelta(seconds=timeout_s))
    seed_everything(seed)
    watch = _watch() if owned and dist.get_world_size() > 1 else None
    try:
        yield Runtime(dist.get_rank(), local_rank, dist.get_world_size(), place)
    except BaseException as error:
        if watch is not None:
            _tell(watch, error)
        raise
    else:
        if watch is not None:
            watch.leave()
    finally:
        if owned:
            dist.destroy_process_group()


def _use_old_names() -> None:
    """torch 2.13 deprecates names of collectives whose new names 2.11 does not have yet."""
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


@contextmanager
def pretended(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Pretend, for the length of the block, to be one rank of a process group of which no other rank exists.

    Messages come back at once, with whatever was in their memory: for shapes, bytes and FLOPs, not for values.
    Raises RuntimeError in a process that has a group.
    """
    if dist.is_initialized():
        raise RuntimeError("this process has a process group, and ranks can be pretended only without one")
    _use_old_names()
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_shardings()


def device_kind(name: str) -> Literal["cpu", "cuda"]:
    """cpu or cuda, of auto CUDA where there is one.  Raises UserError for another, and for one that torch does not see.

    name  of what ranks run on
    """
    require_device("device", name, numbered=False)  # which of a kind, the rank's number says
    return "cuda" if device_of(name).type == "cuda" else "cpu"


def device_of(name: str) -> torch.device:
    """The device that auto, cpu, cuda or cuda:N names; kernels are launched on that one from now on.

    Raises UserError for a CUDA device that torch does not see.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device={name}, and torch sees no CUDA device; use --device cpu")
    device = torch.device(name)
    if device.index is not None:
        if device.index >= (count := torch.cuda.device_count()):
            raise UserError(f"device={name}, and torch sees {count}; use one from cuda:0 to cuda:{count - 1}")
        torch.cuda.set_device(device)
    return device


def join(kind: str, timeout_s: float = 1800.0) -> None:
    """Join the process group and stay in it until the process ends; one that exists already is used.

    Under a launcher a rank that joins on CUDA takes the GPU of its number.
    """
    if not dist.is_initialized():
        if kind == "cuda" and launched():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        _init_process_group(kind, timedelta(seconds=timeout_s))
        atexit.register(_leave)


def launcher_mesh() -> DeviceMesh:
    """All ranks that the launcher started, joined until the process ends: one axis, `rank`; of several machines with as
    many ranks each two, `machine` and `rank`."""
    kind = device_kind("auto")
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    _use_old_names()
    join(kind)
    ranks = dist.get_world_size()
    if not 1 < local_size < ranks or ranks % local_size:
        return init_device_mesh(kind, (ranks,), mesh_dim_names=("rank",))
    return init_device_mesh(kind, (ranks // local_size, local_size), mesh_dim_names=("machine", "rank"))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _watch() -> Watch:
    return Watch(connection_to_store(), dist.get_rank(), dist.get_world_size())


def gloo_group(store: dist.Store, prefix: str, rank: int, size: int, timeout_s: float) -> dist.ProcessGroupGloo:
    """A group of gloo that torch.distributed does not know of, of processes that are not in one process group.

    It comes and goes by itself: no other group counts it. Making it waits for all of its ranks.
    """
    return dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), rank, size, timedelta(seconds=timeout_s))


def watch_steps(hang_after: float | None, device: torch.device) -> HangWatch:
    """Make the watch that ends a run of this process group's ranks whose step does not end.

    hang_after  seconds; None: see `core.hang`
    """
    return HangWatch(connection_to_store(), dist.get_rank(), dist.get_world_size(), hang_after, device.type == "cpu")


def _tell(watch: Watch, error: BaseException) -> None:
    """Report a failure of this rank; its traceback comes first, before it closes connections that others then miss."""
    if isinstance(error, SystemExit) and not error.code:
        watch.leave()
        return
    rank = dist.get_rank()
    first = watch.report(rank)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return
    line = in_one_line(error)
    if line is not None:  # one rank tells it: rank 0 by who catches it, another here, where nobody would
        if first == rank != 0:
            print(f"error: {line}", file=sys.stderr, flush=True)
        if first != 0:
            error.reported = True  # pyright: ignore[reportAttributeAccessIssue]
        return
    if first == rank:
        print(f"rank {rank} failed:\n{''.join(traceback.format_exception(error))}", file=sys.stderr, flush=True)
    else:
        why = (str(error).splitlines() or [""])[0]
        print(f"rank {rank} ends, because rank {first} failed ({type(error).__name__}: {why})", file=sys.stderr)
        watch.let_end(first)
    _print_others(but=error)


def _print_others(but: BaseException) -> None:
    """Print exceptions that reach the top of the program, all but this one, which has been reported."""
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not but:
            before(kind, value, trace)

    sys.excepthook = hook


def _init_process_group(kind: str, timeout: timedelta) -> None:
    # Checkpoints exchange their plans on the CPU while the device computes, so a CUDA group has a gloo side too.
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if launched():
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch alike on every rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# What a process on a CPU takes beside its tensors: the libraries' workspace and objects of Python, and of what lies on
# the heap the part that is free between allocations.
_BESIDE_TENSORS_BYTES = 32 * 2**20
_SHARE_OF_TENSORS = 0.8


def tensors_within(process_bytes: int) -> int:
    """Bytes of tensors alive at once with which a process on a CPU, once its modules are loaded, takes so much more."""
    return max(0, int(_SHARE_OF_TENSORS * (process_bytes - _BESIDE_TENSORS_BYTES)))


def process_holding(tensor_bytes: int) -> int:
    """The inverse of `tensors_within`, rounded up."""
    return -int(-tensor_bytes // _SHARE_OF_TENSORS) + 1 + _BESIDE_TENSORS_BYTES


_set_allocator: Callable[[], None] | None = None
"""What sets the allocator as it was set last, which mallopt(3) does not tell."""


@contextmanager
def freed_memory_given_back(held_bytes: int, device: torch.device) -> Iterator[None]:
    """`give_back_freed_memory` for the length of the block, in which a process on a CPU holds so many bytes.

    What is free before and after leaves the process, too. Then the allocator keeps or gives back as before.
    """
    if device.type != "cpu":
        yield
        return
    before = _set_allocator
    give_back_freed_memory(held_bytes)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
    trim(0)
    try:
        yield
    finally:
        if before is not None:
            before()
        trim(0)


def give_back_freed_memory(budget_bytes: int) -> None:
    """The opposite of `keep_freed_memory`, for a process that may take so many bytes: freed tensors leave it at once.

    What is smaller than a 256th of the budget stays on the heap, which gives back its end. Pages that are given back
    are made anew when they are needed, which costs time.
    """
    global _set_allocator  # as the allocator itself, of the process
    _set_allocator = partial(give_back_freed_memory, budget_bytes)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        smallest = min(max(budget_bytes // 256, 128 * 1024), 4 * 1024 * 1024)
        mallopt(_M_MMAP_MAX, 65536)
        mallopt(_M_MMAP_THRESHOLD, smallest)
        mallopt(_M_TRIM_THRESHOLD, smallest)
        mallopt(_M_TOP_PAD, 128 * 1024)


# Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4


def keep_freed_memory() -> None:
    """Let glibc keep what large activations free instead of unmapping it: each step would page-fault it in again.

    Another libc has no mallopt and needs none.
    """
    global _set_allocator
    _set_allocator = keep_freed_memory
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 * 1024 * 1024)


def require_compiler(device: torch.device | str) -> None:
    """Raises UserError where torch.compile could not build what it writes for the device."""
    if torch.device(device).type != "cpu":
        return
    if not has_cpp_compiler():
        raise UserError(
            "compile needs a C++ compiler on a CPU, and there is none on the PATH; install one (apt-get install g++), "
            "or leave --compile out"
        )


def _share_cores(num_local_ranks: int) -> None:
    """Divide the cores among the local ranks: threads of two ranks on one core slow each other many times over."""
    if "OMP_NUM_THREADS" not in os.environ or num_local_ranks > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // num_local_ranks))


def device_bytes(device: str, num_local_ranks: int) -> int:
    """Memory that one rank may use: its GPU's, or an equal share of what this machine has free."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return available_bytes() // num_local_ranks


def available_bytes() -> int:
    """Bytes of the host that the kernel can give without swapping; what is cached of files counts."""
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def launch(num_ranks: int, module: str, arguments: list[str]) -> int:
    """Run `python -m module arguments` as `num_ranks` local ranks by torch's elastic launcher.  Returns the exit code.

    The code is that of the rank that failed first; the others end within seconds (`core.watch`). They end with this
    process, too, however it ends (`core.rank`). SIGTERM and SIGINT go on to the ranks, which get 30 s to save and end;
    the code is then 128 + the signal's number, and the caller can look at what they left.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    # The ranks say what went wrong; that one of them ended with some code would be a second line.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"is_host": True},
        max_restarts=0,
        monitor_interval=0.2,
    )
    name_methods_by_frame()
    os.environ[LAUNCHER] = str(os.getpid())  # which the ranks inherit
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "core.rank", str(os.getpid()), module, *arguments)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode < 0:
            print(f"rank {rank} was ended by signal {-first.exitcode}", file=sys.stderr)
        return first.exitcode if first.exitcode > 0 else 1
    except SignalException as stop:
        return 128 + int(stop.sigval)
    finally:
        del os.environ[LAUNCHER]
    return 0


class StopRequest:
    """Turns SIGTERM (and the first SIGINT) into a flag that the training loop looks at between steps.

        with StopRequest() as stop:
            for step in ...:
                if stop.requested: save and leave

    Only the main thread may set signal handlers; elsewhere the flag simply stays down.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Callable | int | None] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._raise_flag)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            if handler is not None:  # one that was not set from Python cannot be set again
                signal.signal(number, handler)

    def _raise_flag(self, number: int, frame) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
