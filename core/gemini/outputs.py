"""The tensors that a module takes and gives, whatever they come in."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from core.compat import tree_leaves


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Those of a module's inputs or output: in tuples, dicts, what torch's pytrees know, dataclasses; each once."""
    if isinstance(output, Tensor):  # most outputs are nothing else
        yield output
        return
    seen: set[int] = set()
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            if id(leaf) not in seen:
                seen.add(id(leaf))
                yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
