"""Training the tiny VAE by core's `fit`: squared error of the reconstruction, and a light pull to a standard normal.

    loss = mean((D(mu + sigma * noise) - x)^2) + kl_weight * mean(KL(N(mu, sigma^2) || N(0, 1)))

Kingma and Welling 2014, arXiv:1312.6114, section 3. No perceptual or adversarial term: at this size, and of pictures
without texture, the squared error leaves little to wish for; how little, the demo's reconstruction ceiling says.

The decoder is then trained on alone, as that of Stable Diffusion was: a U-Net that knows the encoder's latents stays
right. It sees them with some noise, since what a U-Net makes is not quite what the encoder gives.

Shapes: B pictures, C = 4 channels and h = w = 8 of latents; pixels from -1 to 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from apps.diffusion.demo.pictures import pixels_of, varied_drawings
from apps.diffusion.demo.sizes import LATENT_CHANNELS, LATENT_SIZE, tiny_vae
from apps.diffusion.modules import VAE
from core.checkpoint import CheckpointConfig
from core.compose import parallelize
from core.data import GlobalBatches
from core.optim.adamw import AdamWConfig
from core.optim.build import build_optimizer
from core.optim.schedule import ScheduleConfig
from core.runtime import Runtime, seed_everything, start
from core.train import TrainConfig, fit, open_run

DECODER_NOISE = 0.05
"""of the latents that the decoder alone is trained on, as a share of their standard deviation"""


@dataclass(frozen=True)
class AutoencoderConfig(TrainConfig):
    """A training run of the tiny VAE, or of its decoder."""

    ELASTIC: ClassVar[bool] = False

    global_batch: int = 8
    num_pictures: int = 4096
    num_heldout: int = 256
    """pictures that the PSNR is of"""


def autoencoder(out: Path, steps: int = 1000) -> AutoencoderConfig:
    """The run that the committed encoder is of."""
    return AutoencoderConfig(
        steps=steps,
        out=out,
        optim=AdamWConfig(
            lr=2e-3,
            betas=(0.9, 0.99),
            weight_decay=0.0,
            schedule=ScheduleConfig(shape="cosine", warmup_steps=min(50, steps // 4), final=0.0),
        ),
        checkpoint=CheckpointConfig(every=500, keep=1),
    )


def decoder(out: Path, steps: int = 2000) -> AutoencoderConfig:
    """The run that the committed decoder is of, after that of the whole VAE."""
    return autoencoder(out, steps)


class Autoencoding(nn.Module):
    """The loss of a VAE as one module's forward, so that whoever shards or hooks it sees one call."""

    def __init__(self, vae: VAE, kl_weight: float = 1e-4):
        super().__init__()
        self.vae, self.kl_weight = vae, kl_weight
        # It begins with little noise (sigma = e^-3), or the decoder would first learn that latents say nothing.
        bias = cast(Tensor, vae.quant_conv.bias)
        bias.data[LATENT_CHANNELS:] = -6.0

    def forward(self, pixels_B3HW: Tensor, noise_BChw: Tensor) -> Tensor:
        posterior = self.vae.encode(pixels_B3HW).latent_dist
        decoded_B3HW = self.vae.decode(posterior.mean + posterior.std * noise_BChw).sample
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1.0 - posterior.logvar).mean()
        return nn.functional.mse_loss(decoded_B3HW, pixels_B3HW) + self.kl_weight * kl


class Decoding(nn.Module):
    """The squared error of what a decoder makes of latents and noise, as one module's forward."""

    def __init__(self, vae: VAE):
        super().__init__()
        self.post_quant_conv, self.decoder = vae.post_quant_conv, vae.decoder
        self.noise = DECODER_NOISE / vae.config.scaling_factor

    def forward(self, pixels_B3HW: Tensor, noise_BChw: Tensor, latents_BChw: Tensor) -> Tensor:
        decoded_B3HW = self.decoder(self.post_quant_conv(latents_BChw + self.noise * noise_BChw))
        return nn.functional.mse_loss(decoded_B3HW, pixels_B3HW)


def train_autoencoder(config: AutoencoderConfig) -> tuple[VAE, dict[str, Any]]:
    """The trained VAE, its scaling factor set, and the run's summary with its PSNR on pictures it has not seen."""
    pixels_N3HW = _pictures(config)
    with start(config.device, config.seed) as runtime, open_run(config, runtime):
        seed_everything(config.seed)
        trained = tiny_vae().to(memory_format=torch.channels_last)  # a fifth faster on a CPU
        summary = _fit(Autoencoding(trained), {"pixels_B3HW": pixels_N3HW}, config, runtime)
    # A VAE of its own: what the run hung on the other's parameters would answer the decoder's run too.
    vae = tiny_vae().eval()
    vae.load_state_dict(trained.state_dict())
    vae.register_to_config(scaling_factor=scaling_factor(vae, pixels_N3HW[1:1024:2]))
    return vae, summary | _heldout(vae, config)


def train_decoder(vae: VAE, config: AutoencoderConfig) -> dict[str, Any]:
    """Train the VAE's decoder alone, in place.  Returns the run's summary with its PSNR, as `train_autoencoder`."""
    pixels_N3HW = _pictures(config)
    given = {"pixels_B3HW": pixels_N3HW, "latents_BChw": latents_of(vae, pixels_N3HW)}
    with start(config.device, config.seed) as runtime, open_run(config, runtime):
        vae.to(memory_format=torch.channels_last)
        summary = _fit(Decoding(vae), given, config, runtime)
    vae.eval().cpu()
    return summary | _heldout(vae, config)


def _pictures(config: AutoencoderConfig) -> Tensor:
    return pixels_of(varied_drawings(config.num_pictures, config.seed))


def _heldout(vae: VAE, config: AutoencoderConfig) -> dict[str, float]:
    pixels_N3HW = pixels_of(varied_drawings(2 * config.num_heldout, config.seed + 1)[1::2])
    return {"heldout_psnr_db": psnr_db(reconstruct(vae, pixels_N3HW), pixels_N3HW)}


def _fit(model: nn.Module, given: Mapping[str, Tensor], config: AutoencoderConfig, runtime: Runtime) -> dict[str, Any]:
    """Train a model whose forward is its loss.  Returns the run's summary.

    given  argument of the forward -> [N, ...], of which each step takes rows; noise_BChw is drawn
    """

    def batch(step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        rows = torch.randint(config.num_pictures, (config.global_batch,), generator=generator)
        shape = (config.global_batch, LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE)
        noise_BChw = torch.randn(shape, generator=generator)
        return {name: values[rows] for name, values in given.items()} | {"noise_BChw": noise_BChw}

    def loss(module: nn.Module, rows: dict[str, Tensor]) -> Tensor:
        return module(**rows)

    mesh = runtime.mesh(config.mesh, config.zero)
    model.to(runtime.device)
    parallel = parallelize(model, mesh, config)
    optimizer = build_optimizer(config.optim, parallel.masters)
    return fit(parallel, optimizer, GlobalBatches(batch), loss, config, runtime)


@torch.no_grad()
def scaling_factor(vae: VAE, pixels_B3HW: Tensor) -> float:
    """1 / the standard deviation of sampled latents, to four digits (Rombach et al. 2022, appendix G)."""
    posterior = vae.encode(pixels_B3HW).latent_dist
    spread = (posterior.mean.var() + posterior.var.mean()).sqrt()
    return float(f"{1 / float(spread):.4g}")


@torch.no_grad()
def latents_of(vae: VAE, pixels_B3HW: Tensor, rows: int = 64) -> Tensor:
    """The means [B, C, h, w] of the posteriors, not scaled."""
    return torch.cat([vae.encode(part).latent_dist.mean for part in pixels_B3HW.split(rows)])


@torch.no_grad()
def reconstruct(vae: VAE, pixels_B3HW: Tensor, rows: int = 64) -> Tensor:
    """Pictures as the VAE gives them back (from the mean of the posterior), clamped to -1 … 1."""
    parts = [vae.decode(latents_of(vae, part)).sample.clamp(-1, 1) for part in pixels_B3HW.split(rows)]
    return torch.cat(parts)


def psnr_db(given_B3HW: Tensor, wanted_B3HW: Tensor) -> float:
    """Peak signal-to-noise ratio of pictures from -1 to 1."""
    return float(10 * torch.log10(4.0 / (given_B3HW - wanted_B3HW).square().mean()))
