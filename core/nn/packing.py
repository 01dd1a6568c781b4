"""Inference on a CPU: weights of linear layers and of the head in the order in which oneDNN reads them."""

from torch import nn

from core.kernels.matmul import pack_weight
from core.nn.linear import Linear
from core.nn.loss import Head


def pack_linear(model: nn.Module) -> nn.Module:
    """Give a model's plain weights a second form, as large as they, where that is faster. Returns the model.

    They must not change any more; where gradients are recorded the plain ones are taken (`pack_weight`).
    """
    for module in model.modules():
        if isinstance(module, (Linear, Head)) and isinstance(module.weight, nn.Parameter):
            pack_weight(module.weight)
    return model
