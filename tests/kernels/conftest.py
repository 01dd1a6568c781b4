"""Kernels run on the CPU by Triton's interpreter, which has to be chosen before triton defines a kernel."""

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that compute on a device are tests of a GPU, too: `make gpu` runs them there."""
    for item in items:
        if item.path.is_relative_to(HERE) and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.interpreted)
