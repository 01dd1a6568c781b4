"""Fixtures for all tests."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.support.forkserver import PRELOADED
from tests.support.ranks import Pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(n).run(case, …)` runs a case on n gloo ranks; see tests/support/ranks.py."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(autouse=True, scope="session")
def kernels_are_chosen_in_a_moment() -> Iterator[None]:
    """The fastest of some exact kernels is asked for by one call of each, on little: no test depends on which it is."""
    from core.kernels import matmul, timing  # not before tests/kernels has chosen Triton's interpreter
    from core.quant import integers, packed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_CACHED_BYTES", 4)
        patch.setattr(integers, "_MEASURED_WEIGHTS", 1)
        patch.setattr(integers, "_MEASURED_CHANNELS", 64)
        patch.setattr(integers, "_ROUNDS", 1)
        patch.setattr(packed, "_ROUNDS", 1)
        patch.setattr(matmul, "_TRIES", 1)
        yield


@pytest.fixture(autouse=True, scope="module")
def no_process_group_is_left() -> Iterator[None]:
    """What joins one for as long as the process lives (`core.gemini.wrap`) leaves it to the other tests here."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What ranks will run is imported once, before they are forked."""
    modules = [item.module.__name__ for item in session.items if "ranks" in getattr(item, "fixturenames", ())]
    PRELOADED.extend(name for name in dict.fromkeys(modules) if name not in PRELOADED)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "soak" not in config.getoption("markexpr"):
        items[:] = [item for item in items if "soak" not in item.keywords]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; runs where `make gpu` finds one")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
