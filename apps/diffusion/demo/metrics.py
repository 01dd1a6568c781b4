"""What the demo's pictures are worth, in figures, by the detector.

- attributes: share of pictures whose shape, colour and ground are what the caption says
- subject: mean probability that a picture for the subject's prompt shows it, on grounds it was seen on and on others
- drift: by how many points fewer pictures of the class, the subject's word left out, are as the caption says
- leak: mean probability that such a picture shows the subject all the same
- ceiling: the same figures of drawn pictures that went through the VAE; no pipeline with this VAE can do better
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from apps.diffusion.demo.autoencoder import psnr_db, reconstruct
from apps.diffusion.demo.captions import (
    COLOURS,
    GROUNDS,
    SEEN_GROUNDS,
    SUBJECT_CLASS,
    UNSEEN_GROUNDS,
    Thing,
    caption,
    drawing_of,
    drawing_of_subject,
    is_held_out,
    subject_prompt,
    things,
)
from apps.diffusion.demo.detector import Detector, labels_of
from apps.diffusion.demo.pictures import pixels_of

Paint = Callable[[Sequence[str], int], Tensor]
"""(prompts, seed) -> pictures [B, 3, 32, 32] from -1 to 1; picture b depends on prompt b, b and the seed alone"""


@dataclass(frozen=True)
class Attributes:
    """Shares from 0 to 1 of pictures that are as their captions say."""

    shape: float
    colour: float
    ground: float
    all_three: float


@dataclass(frozen=True)
class SubjectFigures:
    """What a pipeline makes of the subject's prompt and of its class; shares and probabilities from 0 to 1."""

    seen: float
    unseen: float
    leak: float
    class_attributes: Attributes


def attributes(detector: Detector, pixels_B3HW: Tensor, wanted: Sequence[Thing]) -> Attributes:
    seen, labels = detector.look(pixels_B3HW), labels_of(wanted)
    right_3B = torch.stack(
        [seen.shape_B == labels.shape_B, seen.colour_B == labels.colour_B, seen.ground_B == labels.ground_B]
    )
    shape, colour, ground = right_3B.double().mean(1).tolist()
    return Attributes(shape, colour, ground, float(right_3B.all(0).double().mean()))


def pipeline_attributes(paint: Paint, detector: Detector, repeats: int, seed: int) -> dict[str, Attributes]:
    """Of everything that captions can say, `repeats` pictures each: all, and those held out of training alone."""
    wanted = [thing for thing in things() for _ in range(repeats)]
    pixels_B3HW = paint([caption(thing) for thing in wanted], seed)
    held_out = [index for index, thing in enumerate(wanted) if is_held_out(thing)]
    return {
        "all": attributes(detector, pixels_B3HW, wanted),
        "held_out": attributes(detector, pixels_B3HW[held_out], [wanted[index] for index in held_out]),
    }


def class_things(repeats: int) -> list[Thing]:
    """The class of the subject in every colour on every ground."""
    return [Thing(SUBJECT_CLASS, colour, ground) for colour in COLOURS for ground in GROUNDS for _ in range(repeats)]


def subject_figures(paint: Paint, detector: Detector, *, repeats: int, seed: int) -> SubjectFigures:
    """The figures of a pipeline, from 4 * repeats pictures of the subject a ground, and repeats of each class thing."""

    def probability(grounds: Sequence[str]) -> float:
        prompts = [subject_prompt(ground) for ground in grounds for _ in range(4 * repeats)]
        return float(detector.look(paint(prompts, seed)).subject_B.double().mean())

    wanted = class_things(repeats)
    pixels_B3HW = paint([caption(thing) for thing in wanted], seed)
    return SubjectFigures(
        seen=probability(SEEN_GROUNDS),
        unseen=probability(UNSEEN_GROUNDS),
        leak=float(detector.look(pixels_B3HW).subject_B.double().mean()),
        class_attributes=attributes(detector, pixels_B3HW, wanted),
    )


def drift_points(before: SubjectFigures, after: SubjectFigures) -> float:
    """How many of a hundred class pictures are no longer as their captions say."""
    return 100 * (before.class_attributes.all_three - after.class_attributes.all_three)


def ceiling(vae: AutoencoderKL, detector: Detector, *, repeats: int, seed: int) -> dict[str, float]:
    """The figures of drawn pictures, none of which the detector was trained on, after the VAE."""
    rng = np.random.default_rng([seed, 3])
    wanted = [thing for thing in things() for _ in range(repeats)]
    drawn = pixels_of(drawing_of(thing, rng) for thing in wanted)
    ordinary = reconstruct(vae, drawn)
    subject = reconstruct(vae, pixels_of(drawing_of_subject(ground, rng) for ground in GROUNDS for _ in range(16)))
    return {
        "psnr_db": psnr_db(ordinary, drawn),
        "subject": float(detector.look(subject).subject_B.double().mean()),
        "leak": float(detector.look(ordinary).subject_B.double().mean()),
        **asdict(attributes(detector, ordinary, wanted)),
    }
