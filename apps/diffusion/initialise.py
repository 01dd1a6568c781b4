"""First values of a U-Net or a VAE that is trained from nothing, as the authors of the architecture begin it.

1. Every convolution and projection keeps the variance of what it is given, and adds no bias.
2. The last convolution of each residual block and the projection out of each transformer are zero: blocks begin as the
   identity, so the first gradients pass the whole depth (Dhariwal and Nichol 2021, arXiv:2105.05233, `zero_module`).
3. A U-Net's last convolution is zero: it begins by predicting nothing.

torch's own values shrink a signal by the root of three at each convolution and add biases, in which it is soon lost: a
narrow VAE then spends its first hundreds of steps on finding out that latents say something.
"""

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn


@torch.no_grad()
def begin_as_identity(module: nn.Module) -> None:
    """Draw the values of a diffusers module anew, from torch's generator."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(part.weight, nonlinearity="linear")
            if part.bias is not None:
                part.bias.zero_()
    for part in module.modules():
        if isinstance(part, ResnetBlock2D):
            part.conv2.weight.zero_()
        if isinstance(part, Transformer2DModel):
            part.proj_out.weight.zero_()
    if isinstance(module, UNet2DConditionModel):
        module.conv_out.weight.zero_()
