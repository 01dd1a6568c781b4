"""What BERT puts between its last block and the vocabulary: norm(activation(dense(x))) (Devlin et al. 2019)."""

from torch import Tensor, nn

from core.nn.linear import Linear
from core.nn.mlp import ActivationName, activation_function


class HeadTransform(nn.Module):
    def __init__(self, dim: int, activation: ActivationName, norm: nn.Module):
        super().__init__()
        self.dense = Linear(dim, dim)
        self.activation = activation_function(activation)
        self.norm = norm

    def forward(self, x_BLD: Tensor) -> Tensor:
        """x[.., D] -> [.., D]."""
        return self.norm(self.activation(self.dense(x_BLD)))
