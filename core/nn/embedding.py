"""Token ids to the first block's input: tokens, projection, learned positions, token types, norm; where it has them.

Shapes: B batch, L length, E embedding size, D model.
"""

from functools import cache

import torch
from torch import Tensor, nn

from core.nn.linear import Linear


class Embedding(nn.Module):
    """project_in(scale tokens[ids]) + positions[p + offset] + types[0], then the norm (BLOOM's, BERT's).

    `offset` shifts every index into the position table (OPT keeps two rows in front of position 0). A text is of token
    type 0; BERT's other types are for second sentences, which nothing here has.
    `scale` is rounded to the tokens' dtype first, as Gemma's is; None: 1.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        embed_dim: int | None = None,
        num_positions: int | None = None,
        offset: int = 0,
        num_types: int = 0,
        norm: nn.Module | None = None,
        scale: float | None = None,
    ):
        super().__init__()
        width = embed_dim or dim
        self.tokens = _table(vocab_size, width)
        self.positions = _table(num_positions + offset, dim) if num_positions is not None else None
        self.types = _table(num_types, dim) if num_types else None
        self.project_in = Linear(width, dim, bias=False) if width != dim else None
        self.norm = norm
        self.offset, self.scale = offset, scale

    def forward(self, input_ids_BL: Tensor, positions_BL: Tensor) -> Tensor:
        """x[B, L, D]. positions may have one row for the whole batch."""
        x = self.tokens(input_ids_BL)
        if self.scale is not None:
            x = x * _rounded(self.scale, x.dtype)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            x = x + self.positions(positions_BL + self.offset if self.offset else positions_BL)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(positions_BL[:1]))
        return self.norm(x) if self.norm is not None else x


@cache
def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype, device="cpu"))


def _table(rows: int, width: int) -> nn.Embedding:
    """torch's own, but nothing is drawn on the meta device, where drawing takes longer than all the rest."""
    if torch.get_default_device().type == "meta":
        return nn.Embedding(rows, width, _weight=torch.empty(rows, width))
    return nn.Embedding(rows, width)
