"""Bytes alive on the meta device, in a fraction of the time that torch takes to find the shapes of results.

Most operators have their shapes found on that device by Python, in up to some milliseconds each. A plan does the same
operators over and over: of slices, of the blocks of a stack, of one budget after another. So `MetaAccount` asks torch
once what an operator makes of tensors of such shapes, strides and formats, and from then on makes results like these.
"""

from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from core.trace.account import MemoryAccount

_MOST = 2**14  # results that are remembered


class MetaAccount(MemoryAccount):
    """`MemoryAccount("meta")`: the same bytes, the same results."""

    def __init__(self):
        super().__init__("meta")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(partial(_remembered, func), types, args, kwargs)


class _Like(NamedTuple):
    """A result, in memory of its own."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


class _Unknown(Exception):
    """An argument is a tensor elsewhere."""


_results: dict[tuple, tuple[_Like, ...]] = {}


def _remembered(func: Any, *args: Any, **kwargs: Any) -> Any:
    kind = _kind(func)
    if kind == "other":
        return func(*args, **kwargs)
    try:
        key = (func, torch.get_default_dtype(), _key(args), _key(tuple(kwargs.items())))
        known = _results.get(key)
    except (_Unknown, TypeError):  # what cannot be told apart is asked for each time
        return func(*args, **kwargs)
    if known is None:
        result = func(*args, **kwargs)
        likes = () if kind == "in place" else _likes(result, args)
        if likes is not None:
            if len(_results) >= _MOST:
                _results.clear()
            _results[key] = likes
        return result
    if kind == "in place":
        return args[0]
    made = tuple(like.make() for like in known)
    return made[0] if len(func._schema.returns) == 1 else made


@cache
def _kind(func: Any) -> Literal["new", "in place", "other"]:
    """Whether an operator's results are new tensors, or its first argument."""
    arguments, returns = func._schema.arguments, func._schema.returns
    written = [one.alias_info is not None and one.alias_info.is_write for one in (*arguments, *returns)]
    aliases = [one.alias_info is not None for one in (*arguments, *returns)]
    plain = arguments and returns and all(str(one.type) == "Tensor" for one in returns)
    if not plain or torch.Tag.inplace_view in func.tags:  # which gives its argument another shape
        return "other"
    if not any(aliases):
        return "new"
    return "in place" if len(returns) == 1 and written[0] and written[-1] and sum(aliases) == 2 else "other"


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise _Unknown
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_key, value))
    return type(value), value  # 2 and 2.0 make different things of integers


def _likes(result: Any, given: Any) -> tuple[_Like, ...] | None:
    """None where `make` would make something else, as for a view that is not told to be one (`_unsafe_view`)."""
    likes, taken = [], {id(one.untyped_storage()) for one in given if isinstance(one, Tensor)}
    for one in result if isinstance(result, tuple) else (result,):
        if not isinstance(one, Tensor) or not one.is_meta or id(one.untyped_storage()) in taken:
            return None
        likes.append(_Like(one.shape, one.stride(), one.dtype))
        taken.add(id(one.untyped_storage()))
        if one.storage_offset() or one.untyped_storage().nbytes() != likes[-1].make().untyped_storage().nbytes():
            return None
    return tuple(likes)
