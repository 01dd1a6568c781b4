"""Triton's interpreter, which has to be chosen before triton defines a kernel."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def take_interpreter() -> None:
    """Repair its products of bf16.  Raises pytest.UsageError where kernels were defined before it was chosen."""
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    import core.kernels.softmax as kernel

    if not isinstance(kernel._softmax_forward, InterpretedFunction):
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
