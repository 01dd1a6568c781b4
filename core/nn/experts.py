"""Many MLPs of one shape, their weights stacked: each row of the input goes through the one that it is sorted under.

A stack of linear layers is one parameter [E, O, I], so an optimizer sees E matrices, and a cut of dim 0 deals out whole
experts. On a GPU the products of all experts are one call, so that the host need not wait to know how many rows each
has: `core.kernels.grouped_matmul`, or torch's grouped product, where that does not loop on the host, in bf16 on compute
capability 9 and 10. On a CPU there is one product an expert. An expert without rows has a gradient of zero, and its
output hangs in the graph, so the collectives of the backward are called on every rank.

Shapes: A rows, E experts, I in_features, O out_features, D model, F hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.kernels.grouped_matmul import grouped_matmul, one_by_one
from core.nn.mlp import ActivationName, activation_function, is_gated
from core.trace.balanced import are_balanced, numbers

_ALIGNMENT_BYTES = 16
_WITHOUT_WAITING = (9, 10)
"""major compute capabilities on which torch's grouped product does not read the groups' ends on the host"""


class GroupedLinear(nn.Module):
    """E linear layers: weight[E, O, I], bias[E, O].

    bias_share   the part of the bias that is added here, where several ranks' outputs are summed
    factored_as  for optimizers that look at layers (`core.optim.kfac_layers.kind_of`)
    """

    factored_as = "experts"

    def __init__(self, num_experts: int, in_features: int, out_features: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features)) if bias else None
        self.bias_share = 1.0
        bound = in_features**-0.5
        for parameter in () if self.weight.is_meta else self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x_AI: Tensor, rows_E: Tensor) -> Tensor:
        """x[A, I], the rows of one expert after those of another; rows_E says how many each has -> [A, O].

        Rows behind those that are counted fill up: the last expert takes them, too.
        """
        ends_E = _ends(rows_E, x_AI.shape[0])
        y_AO = grouped_linear(x_AI, self.weight, ends_E)
        if self.bias is None:
            return y_AO
        bias = self.bias if self.bias_share == 1.0 else self.bias * self.bias_share
        rows_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        return y_AO + bias.repeat_interleave(rows_E, dim=0, output_size=x_AI.shape[0])


class Experts(nn.Module):
    """E MLPs, plain or gated: what `core.nn.mlp` is, for each group of rows with weights of its own."""

    def __init__(self, num_experts: int, dim: int, hidden: int, activation: ActivationName, bias: bool):
        super().__init__()
        self.num_experts = num_experts
        self.up = GroupedLinear(num_experts, dim, hidden, bias)
        self.gate = GroupedLinear(num_experts, dim, hidden, bias) if is_gated(activation) else None
        self.down = GroupedLinear(num_experts, hidden, dim, bias)
        self.activation = activation_function(activation)

    def forward(self, x_AD: Tensor, rows_E: Tensor) -> Tensor:
        """x[A, D], sorted by expert, what fills up behind; rows_E int64: the rows of each expert -> [A, D]."""
        up_AF = self.up(x_AD, rows_E)
        hidden_AF = self.activation(up_AF) if self.gate is None else self.activation(self.gate(x_AD, rows_E)) * up_AF
        return self.down(hidden_AF, rows_E)


def grouped_linear(x_AI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """The rows of expert e times weight[e] transposed, for all e; ends_E int64: where the rows of each end."""
    if takes_torchs_product(x_AI, weight_EOI):
        return by_torchs_product(x_AI, weight_EOI, ends_E)
    if are_balanced():
        return one_by_one(x_AI, weight_EOI, numbers(ends_E, x_AI.shape[0]))
    return grouped_matmul(x_AI, weight_EOI, ends_E)


def takes_torchs_product(x_AI: Tensor, weight_EOI: Tensor) -> bool:
    """Return whether torch's kernel for GPUs computes this without a wait: bf16, rows of whole 16 bytes."""
    aligned = all(n * x_AI.element_size() % _ALIGNMENT_BYTES == 0 for n in weight_EOI.shape[1:])
    if not (x_AI.is_cuda and x_AI.dtype == weight_EOI.dtype == torch.bfloat16 and aligned and weight_EOI.numel()):
        return False
    return torch.cuda.get_device_capability(x_AI.device)[0] in _WITHOUT_WAITING


def by_torchs_product(x_AI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    return F.grouped_mm(x_AI, weight_EOI.transpose(-2, -1), offs=ends_E.to(torch.int32))


def _ends(rows_E: Tensor, num_rows: int) -> Tensor:
    """int64[E]: where the rows of each expert end; those of the last where all end."""
    return torch.cat([rows_E[:-1].cumsum(0), rows_E.new_full((1,), num_rows)])
