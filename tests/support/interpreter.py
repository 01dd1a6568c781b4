"""Triton's interpreter, which has to be chosen before triton defines a kernel."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def take_interpreter() -> None:
    """Repair its products of bf16, and its loops over a number that was loaded.

    Raises pytest.UsageError where kernels were defined before it was chosen.
    """
    from triton.runtime import interpreter

    import core.kernels.softmax as kernel

    if not isinstance(kernel._softmax_forward, interpreter.InterpretedFunction):
        late = "core.kernels" in sys.modules
        raise pytest.UsageError(f"kernels were defined before the interpreter was chosen ({late=}); run `make kernels`")
    builder = interpreter.InterpreterBuilder
    builder.create_dot = with_bf16(builder.create_dot)
    interpreter._patch_lang_tensor = with_index(interpreter._patch_lang_tensor)


def with_bf16(dot: Callable) -> Callable:
    """The interpreter keeps bf16 as 16-bit integers, and its matrix product multiplies the integers (Triton 3.7)."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    return lambda self, a, b, *others: dot(self, widened(a), widened(b), *others)


def with_index(patch: Callable) -> Callable:
    """A number that was loaded is an array of one element, which numpy 2.4 makes no `int` of (Triton 3.6)."""

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched
