"""Rows of a step: which image, how it is shown, and all that is drawn for it.

All rows of a step are of one size, so an epoch deals the images of each size into steps and shuffles the steps:

1. the images of a size, in the epoch's order, are cut into steps of `images_a_step`; the last of a size is filled up
   from the size's first, so an epoch shows every image at least once
2. the steps of all sizes follow each other in the epoch's order
3. what a row draws (variant, posterior, timestep, noise, whether its caption is dropped) comes from a generator of
   (seed, step, row of the global batch)

With class images (prior preservation) the rows of a step alternate: instance, class, instance, class, … Class images
run through epochs of their own. Their captions alone are dropped: what is drawn without a prompt, which guidance leads
away from, stays what the class looks like and does not become the subject.

A batch depends on the step, the data rank and the number of ranks alone: nothing is drawn from a rank's generator, so
n ranks train on what one does, and resuming needs no state.

    latents[B, C, h, w]   as the U-Net sees them (scaled)       noise[B, C, h, w]   with its offset
    timesteps[B]          int64                                 prior[B]            bool: a class image
    steps[B]              int64: the step, which validation names its pictures after
    text[B, L, D]         embeddings, or prompt_ids[B, L] where the text encoder is trained

Shapes: B rows of this rank, C latent channels, h x w latents, L tokens, D width of the text encoder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from apps.diffusion.data.buckets import Size
from apps.diffusion.data.encoding import Entry
from apps.diffusion.noise import with_offset
from core.data.batches import rows_of_rank, shuffled

_EPOCHS_OF_SIZES = 1 << 20
_CLASS = 0x5EED


@dataclass(frozen=True)
class Draws:
    """The random draws of a row, and their ranges."""

    num_timesteps: int
    scaling_factor: float
    offset_noise: float = 0.0
    caption_dropout: float = 0.0


class LatentBatches:
    """Endless epochs over encoded images; see the module's docstring."""

    def __init__(
        self,
        entries: Sequence[Entry],
        moments: Callable[[str], Tensor],
        text: Callable[[str], Tensor],
        images_a_step: int,
        seed: int,
        draws: Draws,
        class_entries: Sequence[Entry] = (),
    ):
        """moments: key of a variant -> mean and log variance [2, C, h, w]; text: caption -> what a row holds of it.

        Every entry has one size; those of the class have every size of the others.
        """
        self.entries, self.class_entries = list(entries), list(class_entries)
        self.moments, self.text, self.images_a_step, self.seed, self.draws = moments, text, images_a_step, seed, draws
        self.text_name = "text" if text("").is_floating_point() else "prompt_ids"
        self._by_size: dict[Size, list[int]] = {}
        for number, entry in enumerate(self.entries):
            (size,) = entry.keys
            self._by_size.setdefault(size, []).append(number)
        self.steps_an_epoch = sum(-(-len(numbers) // images_a_step) for numbers in self._by_size.values())
        self._epoch = lru_cache(4)(self._epoch)

    @property
    def global_batch(self) -> int:
        """Rows of a step."""
        return self.images_a_step * (2 if self.class_entries else 1)

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        rows = [self.row(step, row) for row in rows_of_rank(self.global_batch, rank, num_ranks)]
        stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return stacked | {"steps": torch.full((len(rows),), step)}

    def row(self, step: int, row: int) -> dict[str, Tensor]:
        """One row of a step, without the dim of rows."""
        size, entry, prior = self.shown(step, row)
        draws, generator = self.draws, np.random.default_rng([self.seed % 2**64, step, row])
        keys = entry.keys[size]
        mean, log_variance = self.moments(keys[int(generator.integers(len(keys)))]).unbind()
        timestep = int(generator.integers(draws.num_timesteps))
        dropped = generator.random() < draws.caption_dropout and (prior or not self.class_entries)
        posterior, noise = (_normal(generator, mean.shape) for _ in range(2))
        if draws.offset_noise:
            noise = with_offset(noise, _normal(generator, torch.Size((len(mean), 1, 1))), draws.offset_noise)
        sample = mean + log_variance.clamp(-30.0, 20.0).mul(0.5).exp() * posterior
        made = {
            "latents": sample * draws.scaling_factor,
            "noise": noise,
            "timesteps": torch.tensor(timestep),
            self.text_name: self.text("" if dropped else entry.caption),
        }
        return made | {"prior": torch.tensor(prior)} if self.class_entries else made

    def shown(self, step: int, row: int) -> tuple[Size, Entry, bool]:
        """The size, the image, and whether it is one of the class, of a row of a step."""
        epoch, place = divmod(step, self.steps_an_epoch)
        size, numbers = self._epoch(epoch)[place]
        if not self.class_entries:
            return size, self.entries[numbers[row]], False
        pair, prior = divmod(row, 2)
        if not prior:
            return size, self.entries[numbers[pair]], False
        epoch, place = divmod(step * self.images_a_step + pair, len(self.class_entries))
        number = shuffled(np.array([place]), len(self.class_entries), self.seed ^ _CLASS, epoch)[0]
        return size, self.class_entries[int(number)], True

    def _epoch(self, epoch: int) -> list[tuple[Size, list[int]]]:
        """The steps of an epoch: size and images."""
        steps = []
        for index, (size, numbers) in enumerate(self._by_size.items()):
            order = shuffled(np.arange(len(numbers)), len(numbers), self.seed, epoch + index * _EPOCHS_OF_SIZES)
            for start in range(0, len(numbers), self.images_a_step):
                places = (start + np.arange(self.images_a_step)) % len(numbers)
                steps.append((size, [numbers[place] for place in order[places]]))
        return [steps[place] for place in shuffled(np.arange(len(steps)), len(steps), self.seed, epoch)]


def _normal(generator: np.random.Generator, shape: torch.Size) -> Tensor:
    return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32))
