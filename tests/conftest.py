"""Fixtures for all tests."""

import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.chosen import choose_in_a_moment
from tests.support.forkserver import PRELOADED, fork_server
from tests.support.parsed_once import parse_with_known_parsers
from tests.support.ranks import Pools

if TYPE_CHECKING:  # not before a test or a list of tests needs it: xdist's own process has none
    import torch

HERE = Path(__file__).parent
_COMPILED, _COMPILING_S = "MEGALITH_TESTS_COMPILED", 180.0

gc.disable()  # until all is imported, as commands do: nothing of it is garbage


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "where the tests that are marked gpu run: a GPU, if there is one (auto), or the CPU, kernels interpreted"
    parser.addoption("--device", choices=("auto", "cpu"), default="auto", help=said)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before anything asks for a GPU, or defines a kernel."""
    is_first = "PYTEST_XDIST_WORKER" not in os.environ
    if is_first and not sys.dont_write_bytecode and not any(HERE.glob("unit/__pycache__/*.pyc")):
        folder = tempfile.TemporaryDirectory(prefix="compiled-")
        config.add_cleanup(folder.cleanup)
        os.environ[_COMPILED] = folder.name
    # Inductor's pool of compilers is one more process that imports torch, for the one file that a test has compiled.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if config.getoption("--device") == "cpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


@pytest.fixture
def device() -> "torch.device":
    """Where a test that is marked gpu makes its tensors; each of them asks for it (tests/unit/test_gpu_marks.py)."""
    import torch

    from tests.support.device import DEVICE

    return torch.device(DEVICE)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(n).run(case, …)` runs a case on n gloo ranks; see tests/support/ranks.py."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(autouse=True, scope="session")
def kernels_are_chosen_in_a_moment() -> None:
    choose_in_a_moment()


@pytest.fixture(autouse=True, scope="session")
def parsers_of_options_are_made_once() -> None:
    parse_with_known_parsers()


@pytest.fixture(autouse=True, scope="module")
def no_process_group_is_left() -> Iterator[None]:
    """What joins one for as long as the process lives (`core.gemini.wrap`) leaves it to the other tests here."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """In a fresh clone the first of xdist's processes imports all before the others do, and leaves them the bytecode.

    Compiling takes three times as long as all else of an import, and each of them would do it by itself.
    """
    worker, folder = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get(_COMPILED)
    if worker is None or folder is None:
        return (yield)
    is_done = Path(folder, "done")
    deadline = time.monotonic() + _COMPILING_S
    while worker != "gw0" and not is_done.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    try:
        return (yield)
    finally:
        is_done.touch()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What ranks will run is imported once, before they are forked."""
    import torch

    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.support.interpreter import take_interpreter

        take_interpreter()
    modules = [item.module.__name__ for item in session.items if "ranks" in getattr(item, "fixturenames", ())]
    PRELOADED.extend(name for name in dict.fromkeys(modules) if name not in PRELOADED)
    gc.collect()
    gc.freeze()  # modules and tests stay; what tests leave is looked for among what came later
    if session.items and not torch.cuda.is_available():  # a fork of a process that knows of CUDA cannot use it
        fork_server()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "soak" not in config.getoption("markexpr"):
        items[:] = [item for item in items if not _marked(item, "soak")]
    import torch

    if torch.cuda.is_available():
        return
    on_cpu = config.getoption("--device") == "cpu"
    skip = pytest.mark.skip(reason="needs a CUDA device; runs where `make gpu` finds one")
    for item in items:
        if _marked(item, "cuda") or (_marked(item, "gpu") and not on_cpu and not _marked(item, "interpreted")):
            item.add_marker(skip)


def _marked(item: pytest.Item, name: str) -> bool:
    """By a mark: keywords have the names of folders, too."""
    return item.get_closest_marker(name) is not None
