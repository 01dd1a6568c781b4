"""The quality of the demo's pictures in figures, by the detector and by a viewer.

A detector that was trained on the right answers finds them in pictures that a viewer calls something else, so what
counts is what is seen: the nearest named colour, and the outline that fits (`viewer.py`).

- sights: of everything that captions can say, and of the subject on each ground, the share that is seen as it should be
- attributes: share of pictures whose shape, colour and ground are what the caption says
- subject: mean probability that a picture for the subject's prompt shows it, on grounds it was seen on and on others
- drift: by how many points fewer pictures of everything, the subject's word left out, are seen as the caption says
- leak: mean probability that such a picture shows the subject all the same
- ceiling: the same figures of drawn pictures that went through the VAE; no pipeline with this VAE can do better
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import numpy as np
import torch
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
from apps.diffusion.demo.viewer import SUBJECT_COLOUR_NAME, SUBJECT_SHAPE, Sight, most_seen, see
from apps.diffusion.modules import VAE

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
class SubjectSeen:
    """Shares of the subject's pictures on one ground that a viewer would call right."""

    colour: float
    shape: float
    ground: float
    all_three: float
    mostly: str
    """what most of them are called"""


@dataclass(frozen=True)
class SubjectFigures:
    """A pipeline's pictures of the subject and of its class, in figures; shares and probabilities from 0 to 1."""

    seen: float
    unseen: float
    leak: float
    class_attributes: Attributes
    subject_seen: dict[str, SubjectSeen]
    """by ground"""
    things_seen: Attributes
    """of everything that captions can say, by a viewer"""


def attributes(detector: Detector, pixels_B3HW: Tensor, wanted: Sequence[Thing]) -> Attributes:
    seen, labels = detector.look(pixels_B3HW), labels_of(wanted)
    right_3B = torch.stack(
        [seen.shape_B == labels.shape_B, seen.colour_B == labels.colour_B, seen.ground_B == labels.ground_B]
    )
    shape, colour, ground = right_3B.double().mean(1).tolist()
    return Attributes(shape, colour, ground, float(right_3B.all(0).double().mean()))


def pipeline_attributes(paint: Paint, detector: Detector, repeats: int, seed: int) -> dict[str, Attributes]:
    """Attributes of `repeats` pictures of each thing that captions can say: all, and those held out of training."""
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


def all_things() -> list[Thing]:
    """All things that captions can say: those not of the subject's class can drift too."""
    return things()


def subject_figures(paint: Paint, detector: Detector, *, repeats: int, seed: int) -> SubjectFigures:
    """The figures of a pipeline, from 4 * repeats pictures of the subject a ground, and repeats of each class thing."""

    def probability(grounds: Sequence[str]) -> float:
        prompts = [subject_prompt(ground) for ground in grounds for _ in range(4 * repeats)]
        return float(detector.look(paint(prompts, seed)).subject_B.double().mean())

    def seen(ground: str) -> SubjectSeen:
        return subject_seen(paint([subject_prompt(ground)] * 4 * repeats, seed), ground)

    wanted, everything = class_things(repeats), all_things()
    pixels_B3HW = paint([caption(thing) for thing in wanted], seed)
    return SubjectFigures(
        seen=probability(SEEN_GROUNDS),
        unseen=probability(UNSEEN_GROUNDS),
        leak=float(detector.look(pixels_B3HW).subject_B.double().mean()),
        class_attributes=attributes(detector, pixels_B3HW, wanted),
        subject_seen={ground: seen(ground) for ground in GROUNDS},
        things_seen=things_seen(paint([caption(thing) for thing in everything], seed), everything),
    )


def subject_seen(pixels_B3HW: Tensor, ground: str) -> SubjectSeen:
    """The viewer's findings in pictures of the subject's prompt on a ground."""
    sights = see(pixels_B3HW)
    return SubjectSeen(
        **asdict(_shares(sights, (SUBJECT_SHAPE, SUBJECT_COLOUR_NAME, ground))), mostly=most_seen(sights)
    )


def things_seen(pixels_B3HW: Tensor, wanted: Sequence[Thing]) -> Attributes:
    """Shares of pictures that a viewer would call what their captions say."""
    return _shares(see(pixels_B3HW), *((thing.shape, thing.colour, thing.ground) for thing in wanted))


def _shares(sights: Sequence[Sight], *wanted: tuple[str, str | None, str | None]) -> Attributes:
    """wanted  (shape, colour, ground) of every picture, or one of all"""
    wanted = wanted * len(sights) if len(wanted) == 1 else wanted
    right = [
        (sight.shape == shape, sight.colour == colour, sight.ground == ground)
        for sight, (shape, colour, ground) in zip(sights, wanted, strict=True)
    ]
    shape, colour, ground = (fmean(column) for column in zip(*right))
    return Attributes(shape, colour, ground, fmean(all(row) for row in right))


def drift_points(before: SubjectFigures, after: SubjectFigures) -> float:
    """The number of a hundred pictures of things that captions can say which are no longer seen as that."""
    return 100 * (before.things_seen.all_three - after.things_seen.all_three)


def ceiling(vae: VAE, detector: Detector, *, repeats: int, seed: int) -> dict[str, float]:
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
