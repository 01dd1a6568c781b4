"""Triton, or where it is not installed (it is made for Linux) something that lets kernels be defined and never run.

from core.kernels.language import tl, triton
"""

from typing import Any


class _Absent:
    """Answers for any name; as a decorator it leaves the function as it is."""

    def __getattr__(self, name: str) -> "_Absent":
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self


try:
    import triton
    import triton.language as tl

    INSTALLED = True
except ImportError:
    triton: Any = _Absent()
    tl: Any = _Absent()
    INSTALLED = False

__all__ = ["INSTALLED", "tl", "triton"]
