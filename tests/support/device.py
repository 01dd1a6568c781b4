"""The device of the tests that are marked gpu: a GPU where there is one, else the CPU.

A test that is to run on a GPU asks for the fixture `device`, alone or by `pytest.mark.usefixtures("device")` for a
whole file, and makes its tensors on it. `--device cpu` hides the GPUs, and then those tests run all the same: kernels
by Triton's interpreter, the rest by torch.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def by_kernels() -> AbstractContextManager[Any]:
    """Inside, kernels run, on a CPU by the interpreter where it was chosen."""
    from core.kernels.operator import forced

    return forced() if DEVICE == "cpu" and INTERPRETED else nullcontext()
