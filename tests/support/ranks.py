"""Pools of gloo ranks that stand for GPUs: each size is forked once, with everything imported, and runs many cases.

    def test_something(ranks):
        results = ranks(4).run(case, argument, key=word)     # what each rank returned, in rank order

`case` is a function at the top of an importable test module; it runs inside a process group of that many ranks. An
exception on any rank fails the test with that rank's traceback; a hang ends with the pool, not with the session, and
with the stacks of the ranks that did not answer. What a case changes of its process (generators, default format,
threads, environment, folder) is undone after it. One that patches a module for good takes a `Pool` of its own.
"""

import faulthandler
import gc
import io
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.forkserver import context

DEADLINE_S = 240.0
_STACK_S = 5.0  # for a rank to write where it stands


class RankFailure(AssertionError):
    """What went wrong on a rank, with its traceback."""


def _serve(rank: int, size: int, store: str, connection: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.freeze()  # what was imported before the fork is not looked through again, nor copied for it
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
    from torch._subclasses import fake_tensor

    from core import mesh
    from tests.support.chosen import choose_in_a_moment

    choose_in_a_moment()
    stack = open(f"{store}-stack-{rank}", "w")  # noqa: SIM115  as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    torch.set_num_threads(1)
    # A gloo device has a thread that wakes a hundred times a second, and each group has a device of its own for as long
    # as the process lives: hundreds of them slow the machine. Here a rank's groups share one, and cases share meshes.
    device = dist.ProcessGroupGloo.create_default_device()

    class OnOneDevice(dist.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._timeout, options._threads = [device], timeout, 2
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OnOneDevice
    # DTensor tries each operator that it meets on tensors without memory, and torch notes the stack at each such trial.
    fake_tensor.traceback = SimpleNamespace(extract_stack=list, format_list=traceback.format_list)
    made, mesh.build_mesh = mesh.build_mesh, lru_cache(mesh.build_mesh)
    for module in list(sys.modules.values()):  # those that were imported before the fork
        if vars(module).get("build_mesh") is made:
            vars(module)["build_mesh"] = mesh.build_mesh
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while (task := connection.recv_bytes()) is not None:
        function, args, kwargs = pickle.loads(task)
        if function is None:
            break
        try:
            with _leftovers_undone():
                answer = (True, function(*args, **kwargs))
            if not dist.is_initialized():
                answer = (False, "the case has left its process without a process group")
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send_bytes(_packed(answer))
    dist.destroy_process_group()


def _packed(answer: Any) -> bytes:
    """Pickled, tensors with their values; torch's way is a file in shared memory for each, which takes milliseconds."""
    import torch

    class WithValues(pickle.Pickler):
        def reducer_override(self, given: Any) -> Any:
            if type(given) is not torch.Tensor or given.layout != torch.strided or given.device.type != "cpu":
                return NotImplemented
            values = given.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(values), given.dtype, given.shape, given.requires_grad)

    packed = io.BytesIO()
    WithValues(packed, protocol=5).dump(answer)
    return packed.getvalue()


def _tensor(values: bytearray, dtype: Any, shape: Any, learns: bool) -> Any:
    import torch

    made = torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
    return made.view(shape).requires_grad_(learns)


@contextmanager
def _leftovers_undone() -> Iterator[None]:
    """Put back what a case changes of its process, which other cases are to find as it was."""
    import torch

    environment, folder = dict(os.environ), os.getcwd()
    dtype, threads, learns = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    drawn, torch_drawn = random.getstate(), torch.get_rng_state()
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        os.chdir(folder)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(learns)
        random.setstate(drawn)
        torch.set_rng_state(torch_drawn)


class Pool:
    """`size` processes in one process group; a case may take deadline_s."""

    def __init__(self, size: int):
        self.size, self.deadline_s = size, DEADLINE_S
        self.folder = tempfile.TemporaryDirectory(prefix=f"ranks-{socket.gethostname()}-")
        self.store = store = os.path.join(self.folder.name, "store")
        self.connections, self.processes = [], []
        for rank in range(size):
            here, there = context().Pipe()
            process = context().Process(target=_serve, args=(rank, size, store, there), daemon=True)
            process.start()
            self.connections.append(here)
            self.processes.append(process)
        self.broken = False

    def run(self, function: Callable, *args, **kwargs) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank; the list of what they return."""
        task = pickle.dumps((function, args, kwargs))
        for connection in self.connections:
            connection.send_bytes(task)
        answers, failures = [], []
        for rank, connection in enumerate(self.connections):
            # Once a rank has failed the others may wait for it forever, so they get little time.
            if not connection.poll(2.0 if failures else self.deadline_s):
                why = "no answer (a collective that the others left?)"
                failures.append(f"rank {rank} of {self.size}: {why}; it stands at\n{self._stack(rank)}")
                continue
            try:
                fine, answer = pickle.loads(connection.recv_bytes())
            except EOFError:
                fine, answer = False, "the process died"
            answers.append(answer)
            if not fine:
                failures.append(f"rank {rank} of {self.size}:\n{answer}")
        if failures:
            self.broken = True  # who raised and who waits cannot be told apart: the next case gets fresh ranks
            self.close(politely=False)
            raise RankFailure("\n".join(failures))
        return answers

    def _stack(self, rank: int) -> str:
        """Where a rank's threads are."""
        process, file = self.processes[rank].pid, Path(f"{self.store}-stack-{rank}")
        if not file.exists():
            return "its start: torch is not imported yet"
        os.kill(process, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_S
        while not file.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)  # the rest of what it writes
        return file.read_text() or "a place where it hears no signal"

    def close(self, politely: bool = True) -> None:
        for connection, process in zip(self.connections, self.processes):
            if politely and process.is_alive():
                connection.send_bytes(pickle.dumps((None, (), {})))
            else:
                process.kill()
        for process in self.processes:
            process.join(10)
        self.folder.cleanup()


class Pools:
    """One pool a size, made when first asked for."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, size: int) -> Pool:
        pool = self._pools.get(size)
        if pool is None or pool.broken:
            pool = self._pools[size] = Pool(size)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            if not pool.broken:
                pool.close()
