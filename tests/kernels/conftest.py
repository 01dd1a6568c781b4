"""Kernels run on the CPU by Triton's interpreter, which has to be chosen before triton defines a kernel."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish(session: pytest.Session) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    import core.kernels.softmax as kernel

    if not torch.cuda.is_available() and not isinstance(kernel._softmax_forward, InterpretedFunction):
        late = "core.kernels" in sys.modules
        raise pytest.UsageError(f"kernels were defined before the interpreter was chosen ({late=}); run `make kernels`")
