"""Head and loss as one module, so that whoever shards or gathers the head's weight sees it in use.

The loss never holds all logits: see `core.kernels.cross_entropy`.

Shapes: B batch, L length, R chosen places, D model, V vocabulary rows held here.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from core.kernels.cross_entropy import Combine, linear_cross_entropy
from core.kernels.matmul import linear, product


class Head(nn.Module):
    """Logits, or the sum of the tokens' cross-entropies.

    weight[V, D]  the embedding's own weight when tied
    bias[V]       added to the logits (BERT's); None: none
    combine, vocab_start  set by whoever shards the vocabulary: see `Combine`; the first row held here
    show_gradients  (x[B, L, D], tokens, g[C, V]) -> None, set by who wants to see the gradients of the returned sum by
              some tokens' logits; called in the forward, chunk by chunk, where there are gradients
    max_rows  the most rows of the vocabulary that any rank holds: cuts the tokens into chunks, alike on every rank
    z_loss, label_smoothing, ignore_index  as in `linear_cross_entropy`
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        weight: Tensor | None = None,
        bias: bool = False,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ):
        super().__init__()
        self.weight = nn.Linear(dim, vocab_size, bias=False).weight if weight is None else weight
        self.bias = nn.Parameter(self.weight.new_zeros(vocab_size)) if bias else None
        self.combine: Combine | None = None
        self.show_gradients: Callable[[Tensor, slice, Tensor], None] | None = None
        self.vocab_size = vocab_size
        self.vocab_start = 0
        self.max_rows = vocab_size
        self.z_loss = z_loss
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index

    def forward(
        self,
        x_BLD: Tensor,
        targets_BL: Tensor | None = None,
        length: int | None = None,
        rows_R: Tensor | None = None,
    ) -> Tensor:
        """logits[B, L, V]; with targets a scalar, fp32 or wider: the sum over targets other than `ignore_index`.

        Rows of x beyond `length` (default: all are real) are padding of a sharded sequence and dropped.
        With `rows_R` and no targets only the logits of these places: [B, R, V].
        """
        x_BLD = x_BLD[:, :length]
        if targets_BL is None:
            return linear(x_BLD if rows_R is None else x_BLD[:, rows_R], self.weight, self.bias)
        return linear_cross_entropy(
            x_BLD.flatten(0, 1),
            self.weight,
            targets_BL.flatten(),
            bias_V=self.bias,
            combine=self.combine,
            vocab_start=self.vocab_start,
            vocab_size=self.vocab_size,
            max_rows=self.max_rows,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            product=product,
            show=None if self.show_gradients is None else partial(self.show_gradients, x_BLD),
        )
