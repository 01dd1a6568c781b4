"""Kernels as operators of torch, and when they run.

A public function of this package asks `runs_kernel` and takes the Triton path or its reference: kernels on a GPU, torch
elsewhere. That is the only dispatch there is. The Triton path is one or more operators (`operator`) that torch.compile
and FakeTensor see as a whole: tracing runs the same function with its launches left out (`launches`), so there is no
second description of the results' shapes.

Two ways to run kernels without a GPU:
- TRITON_INTERPRET=1 before triton is imported, and `forced()`: the interpreter computes on CPU tensors (tests).
- `core.kernels.compile`: launches with meta tensors compile for a chip and are not launched.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.library import CustomOpDef, custom_op

from core.compat import FakeTensor
from core.kernels.language import INSTALLED

_forced = False
_compiling = False
_warned: set[tuple[str, str]] = set()


def operator(name: str, mutates: Iterable[str] = ()) -> Callable[[Callable], CustomOpDef]:
    """Register a function that launches kernels as `torch.ops.megalith.<name>`.

    The function makes its results with torch, and guards its launches with `launches`; then it is its own fake.
    mutates  names of the arguments that it writes to. Results must not share memory with arguments.
    """

    def register(function: Callable) -> CustomOpDef:
        registered = custom_op(f"megalith::{name}", function, mutates_args=tuple(mutates))
        registered.register_fake(function)
        return registered

    return register


def launches(x: Tensor) -> bool:
    """Return whether an operator on `x` launches: not on nothing, and not where only shapes are traced."""
    if isinstance(x, FakeTensor):
        return False
    return x.numel() > 0 and (not x.is_meta or _compiling)


def runs_kernel(name: str, x: Tensor, unless: str | None = None) -> bool:
    """Return whether the public function `name` takes its kernel for `x` and not its reference.

    unless  why the kernel cannot do what is asked (None: it can); said once, and the reference is taken
    """
    if not (x.is_cuda or _forced):
        return False
    if not INSTALLED:
        unless = "triton is not installed"
    if unless is None:
        return True
    _warn_once(name, unless)
    return False


def _warn_once(name: str, unless: str) -> bool:
    """Under torch.compile it is called while tracing, and not in the graph."""
    if new := (name, unless) not in _warned:
        _warned.add((name, unless))
        warnings.warn(f"{name}: {unless}; torch's own operators are taken", stacklevel=4)
    return new


# As torch.compiler.assume_constant_result marks it, which imports torch's tracer, a second, in every process.
_warn_once._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@contextmanager
def forced(compiling: bool = False) -> Iterator[None]:
    """Take kernels on every device inside; with `compiling` their launches with meta tensors happen, too."""
    global _forced, _compiling
    before = _forced, _compiling
    _forced, _compiling = True, compiling
    try:
        yield
    finally:
        _forced, _compiling = before


def is_forced() -> bool:
    """Return whether kernels are asked for whatever else there is."""
    return _forced


def unsupported_dtype(*tensors: Tensor | None) -> str | None:
    """The reason why kernels cannot take these tensors' formats; None where they can (fp32, bf16, fp16)."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"there is no kernel for {tensor.dtype}"
    return None
