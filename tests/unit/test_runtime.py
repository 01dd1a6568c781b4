"""The process: joining and leaving its group, seeds, stop requests."""

import os
import random
import signal
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from core.comm import collectives
from core.config import UserError, require_device
from core.mesh import AXES, MeshConfig
from core.runtime import StopRequest, device_kind, seed_everything, start


def test_a_process_alone_is_a_group_of_one_and_leaves_it() -> None:
    for _ in range(2):
        with start("cpu", seed=1) as runtime:
            assert (runtime.rank, runtime.world_size, runtime.leads) == (0, 1, True)
            assert runtime.mesh(MeshConfig()).mesh_dim_names == AXES
            with pytest.raises(UserError, match="use --nproc 2"):
                runtime.mesh(MeshConfig(tp=2))
        assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), start("cpu"):
        raise ZeroDivisionError
    assert not dist.is_initialized()


def uses_the_group_that_is_there() -> tuple[int, int, bool]:
    with start("cpu") as runtime:
        found = runtime.rank, runtime.world_size
    return *found, dist.is_initialized()


def test_a_group_that_exists_is_used_and_left_alone(ranks) -> None:
    assert ranks(2).run(uses_the_group_that_is_there) == [(0, 2, True), (1, 2, True)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="holds where there is no CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(UserError, match="use --device cpu"), start("cuda"):
        pass


def reduces_with_the_old_name() -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with start("cpu") as runtime:
            axis = runtime.mesh(MeshConfig(tp=2))["tp"]
            collectives.reduce_scatter(torch.ones(4), 0, axis)
            collectives.all_gather(torch.ones(4), 0, axis)
    return [str(warning.message) for warning in seen]


def test_renamed_collectives_do_not_warn_users_of_either_torch(ranks) -> None:
    assert ranks(2).run(reduces_with_the_old_name) == [[], []]


def test_seeds_reach_every_generator() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_everything(5)
    first = draw()
    seed_everything(6)
    other = draw()
    seed_everything(5)
    assert draw() == first
    assert all(a != b for a, b in zip(first, other))


def test_a_stop_request_is_a_flag_and_a_second_interrupt_is_not() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler may send it again
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_outside_the_main_thread_the_flag_stays_down() -> None:
    found = []

    def elsewhere() -> None:
        with StopRequest() as stop:
            found.append(stop.requested)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [False]


def test_a_handler_that_python_did_not_set_is_left_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    set_handlers = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: set_handlers.append(handler))  # returns None
    with StopRequest():
        pass
    assert None not in set_handlers


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:", "CPU"])
def test_what_is_no_device_is_refused_alike_wherever_one_is_given(device: str) -> None:
    """By options, of which some take cuda:1, and by what starts ranks, whose number says which of several it is."""
    words = f"device={device}; the devices are cpu and cuda .*, or auto for CUDA where there is one"
    for numbered in (True, False):
        with pytest.raises(UserError, match=words):
            require_device("device", device, numbered)
    with pytest.raises(UserError, match=words):
        device_kind(device)
    require_device("device", "cuda:1")
    with pytest.raises(UserError, match=r"device=cuda:1; .*CUDA_VISIBLE_DEVICES says which GPUs"):
        device_kind("cuda:1")
