"""The part that a parameter plays in a model, told by its name and shape: what an optimizer's groups are made of.

matrix     two dims, in a module that is repeated: its name holds the number of a block
experts    a stack of such matrices [E, O, I], one of each expert
kernel     of a convolution, [O, I, ..]
outer      a matrix outside the repeated modules that is neither of the next two
embedding  a table of rows that are looked up
head       the last matrix, of logits
norm, bias, vector   what has one dim or none, and the stacked biases of experts
"""

import re
from collections.abc import Sequence
from typing import Literal, get_args

Role = Literal["matrix", "experts", "kernel", "outer", "embedding", "head", "norm", "bias", "vector"]

ROLES: tuple[Role, ...] = get_args(Role)
MATRICES: tuple[Role, ...] = ROLES[:6]
"""those that can be updated as whole matrices"""

_EMBEDDING = re.compile(r"(^|_)embed(ding)?s?(_|$)|^(wte|wpe|shared|relative_attention_bias)$", re.IGNORECASE)
_HEAD = re.compile(r"head|^(embed_out|score|classifier)$", re.IGNORECASE)
_NORM = re.compile(r"norm|^ln(_|\d|$)", re.IGNORECASE)


def role_of(name: str, shape: Sequence[int]) -> Role:
    """The role of a parameter.  shape: of the whole"""
    *path, last = name.split(".")
    module = path[-1] if path and last in ("weight", "bias") else last
    if last.endswith("bias"):
        return "bias"
    if len(shape) < 2:
        return "norm" if _NORM.search(module) else "vector"
    is_repeated = any(part.isdigit() for part in name.split("."))
    if len(shape) > 2:
        return "experts" if len(shape) == 3 and any(part.endswith("experts") for part in path) else "kernel"
    if not is_repeated and _HEAD.search(module):
        return "head"
    if _EMBEDDING.search(module) or (not is_repeated and {"embedding", "embeddings"} & set(path)):
        return "embedding"
    return "matrix" if is_repeated else "outer"
