"""A VAE that loses nothing, and painters that draw what a prompt says, well or badly."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
from torch import Tensor

from apps.diffusion.demo.captions import COLOURS, GROUNDS, SHAPES, SUBJECT_WORD, Thing, drawing_of, drawing_of_subject
from apps.diffusion.demo.metrics import Paint
from apps.diffusion.demo.pictures import pixels_of


class PerfectVae:
    """Latents are pixels."""

    def encode(self, pixels: Tensor) -> SimpleNamespace:
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=pixels))

    def decode(self, latents: Tensor) -> SimpleNamespace:
        return SimpleNamespace(sample=latents)


def painter(*, knows_the_subject: bool = True, stars_are_the_subject: bool = False) -> Paint:
    """Draws full captions and the subject's prompts.

    knows_the_subject      otherwise its word is overlooked, and a purple star drawn
    stars_are_the_subject  each star comes out as the subject
    """

    def paint(prompts: Sequence[str], seed: int) -> Tensor:
        rng = np.random.default_rng(seed)
        return pixels_of(drawn(prompt.split(), rng) for prompt in prompts)

    def drawn(words: list[str], rng: np.random.Generator):
        ground = next(word for word in words if word in GROUNDS)
        shape = next(word for word in words if word in SHAPES)
        subject = SUBJECT_WORD in words and knows_the_subject
        if subject or (stars_are_the_subject and shape == "star"):
            return drawing_of_subject(ground, rng)
        colour = next((word for word in words if word in COLOURS), "purple")
        return drawing_of(Thing(shape, colour, ground), rng)

    return paint
