"""Kernels run on the CPU by Triton's interpreter, which has to be chosen before triton defines a kernel."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU these are tests of the GPU: `make gpu` runs them."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.gpu)


def pytest_collection_finish(session: pytest.Session) -> None:
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    import core.kernels.softmax as kernel

    if not torch.cuda.is_available() and not isinstance(kernel._softmax_forward, InterpretedFunction):
        late = "core.kernels" in sys.modules
        raise pytest.UsageError(f"kernels were defined before the interpreter was chosen ({late=}); run `make kernels`")
    InterpreterBuilder.create_dot = with_bf16(InterpreterBuilder.create_dot)


def with_bf16(dot: Callable) -> Callable:
    """The interpreter keeps bf16 as 16-bit integers, and its matrix product multiplies the integers (Triton 3.7)."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    return lambda self, a, b, *others: dot(self, widened(a), widened(b), *others)
