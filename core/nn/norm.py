"""LayerNorm and RMSNorm, by name.

Both reduce in fp32 or wider whatever the dtype of the activations, inside torch's kernels.
Ba et al., "Layer Normalization" (2016); Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

from typing import Literal

from torch import nn

NormKind = Literal["layer_norm", "rms_norm"]


def build_norm(kind: NormKind, dim: int, eps: float, affine: bool = True) -> nn.Module:
    """A norm over the last dim, with a weight (and `layer_norm` with a bias) where `affine`."""
    if kind == "layer_norm":
        return nn.LayerNorm(dim, eps=eps, elementwise_affine=affine)
    return nn.RMSNorm(dim, eps=eps, elementwise_affine=affine)
