"""The trained module: a U-Net, and the text encoder where it learns too; and the loss of a batch.

Shapes: B rows, C latent channels, h x w latents, L tokens, D width of the text encoder.
"""

from collections.abc import Callable, Mapping

import torch
from diffusers import Transformer2DModel
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

from apps.diffusion.modules import TextEncoder, UNet
from apps.diffusion.noise import NoiseSchedule
from core.layout import layout_of, local
from core.placement.table import set_parameter

_BLOCKS = (ResnetBlock2D, Transformer2DModel, Downsample2D, Upsample2D, CLIPEncoderLayer)


class Denoiser(nn.Module):
    """One call a step, so that whoever gathers, hooks or compiles weights sees both modules in use."""

    def __init__(self, unet: UNet, text_encoder: TextEncoder | None = None, channels_last: bool = False):
        super().__init__()
        self.unet, self.text_encoder = unet, text_encoder
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def forward(
        self,
        noisy_BChw: Tensor,
        timestep_B: Tensor,
        text: Tensor | None = None,
        prompt_ids: Tensor | None = None,
    ) -> Tensor:
        """Predict [B, C, h, w] by the U-Net, given embeddings text[B, L, D] or tokens prompt_ids[B, L]."""
        if text is None:
            assert self.text_encoder is not None
            assert prompt_ids is not None
            text = self.text_encoder(prompt_ids)[0]
        seen = noisy_BChw.contiguous(memory_format=self.memory_format)
        return self.unet(seen, timestep_B, encoder_hidden_states=text, return_dict=False)[0]

    def repeated_blocks(self) -> list[nn.Module]:
        """The blocks that are sharded, recomputed and compiled one by one.

        Not the elements of the U-Net's lists, which are whole resolutions: few, large, and each unlike the others.
        """
        return [module for module in self.modules() if isinstance(module, _BLOCKS)]


def emptied(model: nn.Module, device: torch.device) -> Callable[[nn.Module], None]:
    """Take a model's values away, its parameters to the meta device and its buffers to `device`.

    Returns what fills it again, each rank its shard, once; then the values are let go.
    """
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in list(model.named_parameters()):
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        set_parameter(model, name, empty)
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}

    @torch.no_grad()
    def fill(filled: nn.Module) -> None:
        for name in list(values):  # a value leaves when its place is filled
            give(filled, {name: values.pop(name)})
        for name, value in buffers.items():  # whoever gave memory to the parameters may have given the buffers new
            path, _, leaf = name.rpartition(".")
            setattr(filled.get_submodule(path), leaf, value.to(filled.get_buffer(name).dtype))

    return fill


@torch.no_grad()
def give(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """The parameters of these names of a (sharded) model get their parts of these values."""
    for name, value in values.items():
        parameter = model.get_parameter(name)
        local(parameter).copy_(layout_of(parameter).local(value))


class Objective:
    """(model, batch) -> the mean over rows of the squared error of the prediction, each row with its weight.

    Prior preservation: a batch holds as many class images as others (`prior` says which rows), and the loss is the mean
    over the others plus `prior_weight` times the mean over the class. Whatever rows a microbatch holds, the step comes
    to that, since each row counts twice in the mean over all. min-SNR weighs every row by its own timestep (Ruiz et al.
    2023, DreamBooth, equation 2; Hang et al. 2023).

    Noise is added, and the error taken, in fp32 where a run computes in 16 bits.
    """

    def __init__(self, schedule: NoiseSchedule, min_snr: float | None = None, prior_weight: float = 1.0):
        self.schedule, self.min_snr, self.prior_weight = schedule, min_snr, prior_weight
        self._steps: Tensor | None = None

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if model.training:
            self._steps = batch.get("steps")
        given = batch["latents"].dtype
        wide = torch.promote_types(given, torch.float32)
        sample_BChw, noise_BChw = batch["latents"].to(wide), batch["noise"].to(wide)
        timestep_B = batch["timesteps"]
        noisy_BChw = self.schedule.add_noise(sample_BChw, noise_BChw, timestep_B)
        text = {name: batch[name] for name in ("text", "prompt_ids") if name in batch}
        predicted_BChw = model(noisy_BChw.to(given), timestep_B, **text).to(wide)
        target_BChw = self.schedule.target(sample_BChw, noise_BChw, timestep_B)
        error_B = (predicted_BChw - target_BChw).square().mean((1, 2, 3))
        return (error_B * self.weight(batch).to(wide)).mean()

    @property
    def steps_seen(self) -> int:
        """The steps that the run has made, by the last batch it trained on."""
        return 0 if self._steps is None else int(self._steps[0]) + 1

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """Each row's weight in the loss [B], fp64."""
        weight_B = torch.ones(len(batch["timesteps"]), dtype=torch.float64, device=batch["timesteps"].device)
        if self.min_snr is not None:
            weight_B = self.schedule.min_snr_weight(batch["timesteps"], self.min_snr)
        if "prior" in batch:
            prior_B = batch["prior"].double()
            weight_B = 2 * (prior_B * self.prior_weight + (1 - prior_B)) * weight_B
        return weight_B
