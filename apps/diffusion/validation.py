"""Validation while a run trains: pictures of fixed prompts from fixed noise, and the loss on images held out.

Every rank draws its share of the pictures, all of them call the model equally often (where parameters are sharded a
call is a collective), and the first puts them into one grid, `OUT/validation/step-00000100.png`, a row for each prompt.
The loss is of the same noise at the same timesteps every time, so its curve moves by what was learned and nothing else.
Both are of the moving average of the weights where there is one.

Shapes: B pictures, C latent channels, h x w latents.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apps.diffusion.config import ValidationConfig
from apps.diffusion.data.batches import LatentBatches
from apps.diffusion.denoiser import Objective
from apps.diffusion.generate import decode, is_guided, picture_size, run_sampler
from apps.diffusion.images import grid, save_png, to_pil
from apps.diffusion.pipeline import Pipeline
from core.mesh import data_axis
from core.optim.average import WeightAverage
from core.parallel.parallel_model import ParallelModel
from core.runtime import freed_memory_given_back


@dataclass
class Validation:
    """Called by the training loop with its model; see the module's docstring."""

    config: ValidationConfig
    pipeline: Pipeline
    """its VAE and its schedule draw; its other modules are not used"""
    text: Callable[[str], Tensor]
    parallel: ParallelModel
    objective: Objective
    average: WeightAverage | None
    heldout: LatentBatches | None
    folder: Path
    seed: int
    dtype: torch.dtype
    """that the model computes in"""

    def __call__(self, model: nn.Module) -> Mapping[str, float]:
        with nullcontext() if self.average is None else self.parallel.showing(self.average):
            figures = {} if self.heldout is None else {"validation_loss": self._loss(model, self.heldout)}
            if self.config.prompts:
                with freed_memory_given_back(self.pipeline.stored_bytes, self.parallel.device):
                    self._draw(model)
        return figures

    def _loss(self, model: nn.Module, batches: LatentBatches) -> float:
        axis = data_axis(self.parallel.whole_mesh)
        total = torch.zeros((), dtype=torch.float64, device=self.parallel.device)
        for step in range(batches.steps_an_epoch):
            batch = batches.batch(step, axis.get_local_rank(), axis.size())
            total += self.objective(model, {name: self._placed(value) for name, value in batch.items()})
        if axis.size() > 1:
            dist.all_reduce(total, group=axis.get_group())
        return float(total) / axis.size() / batches.steps_an_epoch

    def _placed(self, value: Tensor) -> Tensor:
        return value.to(self.parallel.device, self.dtype if value.is_floating_point() else None)

    def _draw(self, model: nn.Module) -> None:
        config, axis = self.config, data_axis(self.parallel.whole_mesh)
        jobs = [(prompt, self.seed + number) for prompt in config.prompts for number in range(config.num_images)]
        share = -(-len(jobs) // axis.size())
        own = [jobs[min(axis.get_local_rank() * share + place, len(jobs) - 1)] for place in range(share)]
        latents = torch.cat([self._latents(model, own[i : i + 4]) for i in range(0, share, 4)]).cpu()
        shares: list[Tensor] = [latents] * axis.size()
        if axis.size() > 1:
            dist.all_gather_object(shares, latents, group=axis.get_group())
        if dist.get_rank() == 0:
            self._save(torch.cat(shares)[: len(jobs)])

    def _latents(self, model: nn.Module, jobs: list[tuple[str, int]]) -> Tensor:
        """[B, C, h, w] as the U-Net has them, from the noise of each job's seed."""
        sampling = self.config.sampling
        prompts = [prompt for prompt, _ in jobs]
        prompts = [sampling.negative] * len(jobs) * is_guided(self.pipeline, sampling) + prompts
        text = self._placed(torch.stack([self.text(prompt) for prompt in prompts]))
        given = {"text" if text.is_floating_point() else "prompt_ids": text}

        def predict(seen: Tensor, timestep: Tensor, guidance: Tensor | None) -> Tensor:
            times = torch.full((len(seen),), float(timestep), device=seen.device)
            return model(seen.to(self.dtype), times, **given)

        wide = torch.promote_types(self.dtype, torch.float32)
        size, seeds = picture_size(self.pipeline, sampling), [seed for _, seed in jobs]
        return run_sampler(self.pipeline, sampling, seeds, size, predict, text.device, wide)

    def _save(self, latents_BChw: Tensor) -> None:
        self.pipeline.vae.to(self.parallel.device)
        pictures = [to_pil(picture) for picture in decode(self.pipeline, latents_BChw.float())]
        self.pipeline.vae.to("cpu")
        path = self.folder / f"step-{self.objective.steps_seen:08d}.png"
        save_png(
            grid(pictures, self.config.num_images), path, {"prompts": list(self.config.prompts), "seed": self.seed}
        )
