"""LayerNorm and RMSNorm, by name.

All reduce in fp32 or wider whatever the dtype of the activations, inside torch's kernels.
Ba et al., "Layer Normalization" (2016); Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NormKind = Literal["layer_norm", "rms_norm", "rms_norm_from_one"]


class RMSNormFromOne(nn.RMSNorm):
    """y = x / rms(x) (1 + weight), all of it in fp32 or wider before y is rounded to x's dtype (Gemma's RMSNorm)."""

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            nn.init.zeros_(self.weight)

    def gain(self) -> Tensor | None:
        """What the normalised input is multiplied with, in fp32 or wider."""
        if self.weight is None:
            return None
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, tuple(self.normalized_shape), self.gain(), self.eps).to(x.dtype)


def build_norm(kind: NormKind, dim: int, eps: float, affine: bool = True) -> nn.Module:
    """A norm over the last dim, with a weight (and `layer_norm` with a bias) where `affine`."""
    if kind == "layer_norm":
        return nn.LayerNorm(dim, eps=eps, elementwise_affine=affine)
    rms_norm = nn.RMSNorm if kind == "rms_norm" else RMSNormFromOne
    return rms_norm(dim, eps=eps, elementwise_affine=affine)
