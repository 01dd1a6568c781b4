"""A linear layer whose matrix products take the faster of torch's libraries (core.kernels.matmul).

Same parameters, names and results as nn.Linear, up to the order of summation. Twice differentiable.
"""

from torch import Tensor, nn

from core.kernels.matmul import linear


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # nothing to draw; torch would go through its decompositions for it
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
