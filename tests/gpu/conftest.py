"""Short tests of every part on a GPU; `make gpu`. On a CPU (--device cpu) kernels are taken, by the interpreter."""

from collections.abc import Iterator

import pytest

from tests.support.device import by_kernels


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with by_kernels():
        yield
