"""torch.compile for predictions: what an operation does with one of its slices becomes a graph.

    compile_operations(model)           before the first prediction

Compiled are the methods that operations call slice by slice (`_PIECES`), not the loops over slices, which are another
for every length, and not attention, which looks into its mask so that what sequences share is not repeated. Sizes are
variables in the graphs. So a prediction compiles for its widths, not for its lengths: whatever the first sequences
compiled serves the later ones, and all blocks of a stack. What is left to compile is what lies otherwise in memory (the
first sequence that is worked on in slices) and sizes of 1, which torch takes for constants: a last slice of one row.

Results are those of the eager model, to rounding.
"""

from functools import lru_cache

import torch
from torch import nn

from apps.fold.model.attention import Attend, GatedAttention, GlobalAttention
from apps.fold.model.layers import Transition
from apps.fold.model.msa import ColumnAttention, ColumnGlobalAttention, OuterProductMean, RowAttentionWithPairBias
from apps.fold.model.triangle import TriangleAttention
from core.compat import allow_graphs, symbolic_shapes

_PIECES: dict[type[nn.Module], tuple[str, ...]] = {
    RowAttentionWithPairBias: ("pair_bias", "sequences"),
    ColumnAttention: ("forward",),
    ColumnGlobalAttention: ("forward",),
    Transition: ("forward",),
    OuterProductMean: ("factors", "update"),
    TriangleAttention: ("pair_bias", "edges"),
}
_GRAPHS = 64  # of one method: its widths, each with and without sizes of 1


@lru_cache  # one for all modules, which a graph tells apart by what they call
def _left_out(attend: Attend) -> Attend:
    return torch.compiler.disable(attend)  # pyright: ignore[reportReturnType]


def compile_operations(model: nn.Module, backend: str = "inductor") -> None:
    """Let the model's operations compute by graphs, which are made as they are needed."""
    allow_graphs(_GRAPHS, 8 * _GRAPHS)
    symbolic_shapes.use_duck_shape = False  # sizes that are equal now need not be in the next slice
    for module in model.modules():
        if isinstance(module, GatedAttention | GlobalAttention):
            module.attend = _left_out(module.attend)
        for name in _PIECES.get(type(module), ()):
            method = getattr(type(module), name).__get__(module)
            module.__dict__.setdefault("compiled", {})[name] = torch.compile(method, backend=backend, dynamic=True)
            if name != "forward":
                setattr(module, name, module.__dict__["compiled"][name])
