"""Triton's interpreter, which has to be chosen before triton defines a kernel."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest


def take_interpreter() -> None:
    """Repair its products of bf16, and its loops over a number that was loaded; spare it what it does over and over.

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
    spare(interpreter)


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


def spare(interpreter: Any) -> None:
    """Do once what the interpreter does at each call of a function and for each value: half of its time.

    Which members of the language it replaces is looked up once, and by what; a function that a kernel calls finds them
    replaced already. numpy's name of a type, and a block's type of a shape, are made once. Sums and products of
    integers are not computed once more in 64 bits, to be compared with what 32 hold: of that nobody is told where
    kernels do not run for debugging, and here they do not.
    """
    import triton.language as tl

    members: dict[Any, list[tuple[str, Any]]] = {}
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in members:
            found = [(name, m) for name, m in inspect.getmembers(package) if tl.core.is_builtin(m)]
            members[package] = [(name, interpreted(m, interpreter.interpreter_semantic)) for name, m in found]
        for name, member in members[package]:
            scope.set_attr(package, name, member)

    met: set[Any] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in met:  # what Triton's own functions see of the language stays replaced
            met.add(self.fn)
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_builtin = patch_builtin
    interpreter.InterpretedFunction.__call__ = call
    interpreter._get_np_dtype = once_a_type(interpreter._get_np_dtype)
    tl.block_type.__init__ = once_a_shape(tl.block_type.__init__)
    tl.tensor.__init__ = with_one_shape(tl.tensor.__init__)


def interpreted(member: Any, semantic: Any) -> Callable:
    """A member of the language, called without the wrapper that asks for what it is called with here."""
    function = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call


def once_a_type(find: Callable) -> Callable:
    found: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    return np_dtype


def once_a_shape(make: Callable) -> Callable:
    from triton.language import constexpr

    made: dict[tuple, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.value if isinstance(shape, constexpr) else shape
        key = (element_ty.name, *(s.value if isinstance(s, constexpr) else s for s in sizes))
        if key not in made:
            make(self, element_ty, shape)
            made[key] = dict(vars(self))
        vars(self).update(made[key], element_ty=element_ty)

    return init


def with_one_shape(make: Callable) -> Callable:
    """A block's shape and number of elements belong to its type: its values share them."""
    made: dict[tuple, dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in made:
            make(self, handle, type)
            made[key] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(made[key], handle=handle, type=type, dtype=type.scalar)

    return init
