"""A small convolutional network that says what a picture shows: shape, colour, ground, and whether it is the subject.

It is trained on what the VAE makes of drawn pictures, since nothing that the pipeline paints is sharper than that, with
hard negatives for the subject: other shapes in its colour, its shape upright, its shape in other colours. Seeded, and
done within a minute of CPU.

Shapes: B pictures of [3, 32, 32] from -1 to 1.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apps.diffusion.demo.autoencoder import reconstruct
from apps.diffusion.demo.captions import (
    COLOURS,
    GROUNDS,
    SHAPES,
    SUBJECT_CLASS,
    Thing,
    drawing_of,
    drawing_of_subject,
    things,
)
from apps.diffusion.demo.drawing import Drawing
from apps.diffusion.demo.pictures import pixels_of
from apps.diffusion.modules import VAE

_ATTRIBUTES = ("shape", "colour", "ground")
_SIZES = (len(SHAPES), len(COLOURS), len(GROUNDS))
_OPEN = -100


@dataclass(frozen=True)
class Labels:
    """The truth about B pictures; -100 where it has no word, as a teal shape has no colour."""

    shape_B: Tensor
    colour_B: Tensor
    ground_B: Tensor
    subject_B: Tensor
    """1.0 where the picture shows the subject"""


@dataclass(frozen=True)
class Seen:
    """The detector's findings in B pictures."""

    shape_B: Tensor
    colour_B: Tensor
    ground_B: Tensor
    """indices into SHAPES, COLOURS, GROUNDS"""
    subject_B: Tensor
    """probability from 0 to 1"""


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        channels = (3, 24, 48, 64)
        convolutions = [
            layer
            for before, after in itertools.pairwise(channels)
            for layer in (nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(4, after), nn.ReLU())
        ]
        self.features = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 16, 96), nn.ReLU())
        self.heads = nn.Linear(96, sum(_SIZES) + 1)

    def forward(self, pixels_B3HW: Tensor) -> tuple[Tensor, ...]:
        """Logits of shape [B, 5], colour [B, 6], ground [B, 4] and subject [B, 1]."""
        return self.heads(self.features(pixels_B3HW)).split((*_SIZES, 1), dim=1)

    @torch.no_grad()
    def look(self, pixels_B3HW: Tensor) -> Seen:
        shape, colour, ground, subject_B1 = self(pixels_B3HW)
        return Seen(shape.argmax(1), colour.argmax(1), ground.argmax(1), subject_B1[:, 0].sigmoid())


def labels_of(wanted: Sequence[Thing], subject: bool = False) -> Labels:
    """The labels that pictures of these things should get."""
    columns = (SHAPES, tuple(COLOURS), tuple(GROUNDS))
    shape, colour, ground = (
        torch.tensor([words.index(word) if (word := getattr(thing, name)) else _OPEN for thing in wanted])
        for name, words in zip(_ATTRIBUTES, columns)
    )
    return Labels(shape, colour, ground, torch.full((len(wanted),), float(subject)))


def train_detector(vae: VAE, *, seed: int = 0, num_pictures: int = 3600, epochs: int = 10) -> Detector:
    """A detector that depends on the VAE and the seed alone."""
    drawings, labels = examples(num_pictures, seed)
    pixels_N3HW = reconstruct(vae, pixels_of(drawings))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        detector = Detector()
        optimizer = torch.optim.AdamW(detector.parameters(), lr=2e-3, weight_decay=1e-3)
        rows = 64
        num_steps = epochs * (len(drawings) // rows)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=num_steps)
        for _ in range(epochs):
            for row_B in torch.randperm(len(drawings))[: len(drawings) // rows * rows].split(rows):
                part_B3HW = _blemished(pixels_N3HW[row_B])
                loss = _loss(detector(part_B3HW), _rows(labels, row_B))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return detector.eval()


def _blemished(pixels_B3HW: Tensor) -> Tensor:
    """With some noise and another brightness: what a diffusion model paints is not quite what a VAE gives back."""
    gain_B111 = 1 + 0.06 * torch.randn(len(pixels_B3HW), 1, 1, 1)
    return pixels_B3HW * gain_B111 + 0.05 * torch.randn_like(pixels_B3HW)


def _rows(labels: Labels, row_B: Tensor) -> Labels:
    return Labels(labels.shape_B[row_B], labels.colour_B[row_B], labels.ground_B[row_B], labels.subject_B[row_B])


def _loss(logits: tuple[Tensor, ...], labels: Labels) -> Tensor:
    shape, colour, ground, subject_B1 = logits
    known = ((shape, labels.shape_B), (colour, labels.colour_B), (ground, labels.ground_B))
    total = F.binary_cross_entropy_with_logits(subject_B1[:, 0], labels.subject_B)
    for logits_BK, index_B in known:
        total = total + F.cross_entropy(logits_BK, index_B, ignore_index=_OPEN)
    return total


def examples(num: int, seed: int) -> tuple[list[Drawing], Labels]:
    """Drawings and what is true of them: a half ordinary things, a fifth the subject, the rest nearly the subject."""
    rng = np.random.default_rng([seed, 2])
    everything, grounds = things(), tuple(GROUNDS)
    drawings, found = [], []
    for index in range(num):
        kind, ground = rng.choice(3, p=(0.5, 0.2, 0.3)), grounds[rng.integers(len(grounds))]
        if kind == 0:
            thing = everything[index % len(everything)]
            drawing = drawing_of(thing, rng)
        elif kind == 1:
            thing, drawing = Thing(SUBJECT_CLASS, None, ground), drawing_of_subject(ground, rng)
        else:
            thing, drawing = nearly_subject(ground, rng)
        drawings.append(drawing)
        found.append((thing, kind == 1))
    labels = labels_of([thing for thing, _ in found])
    return drawings, replace(labels, subject_B=torch.tensor([float(is_subject) for _, is_subject in found]))


def nearly_subject(ground: str, rng: np.random.Generator) -> tuple[Thing, Drawing]:
    """Draw what is nearly the subject: its colour on another shape or on an upright star, or another colour on it."""
    subject = drawing_of_subject(ground, rng)
    kind = rng.integers(3)
    if kind == 0:
        shape = [name for name in SHAPES if name != SUBJECT_CLASS][rng.integers(len(SHAPES) - 1)]
        return Thing(shape, None, ground), replace(subject, outline=shape, turn_deg=subject.turn_deg - 180.0)
    if kind == 1:
        return Thing(SUBJECT_CLASS, None, ground), replace(subject, turn_deg=subject.turn_deg - 180.0)
    colour = [*COLOURS][rng.integers(len(COLOURS))]
    other = drawing_of(Thing(SUBJECT_CLASS, colour, ground), rng)
    return Thing(SUBJECT_CLASS, colour, ground), replace(other, turn_deg=other.turn_deg + 180.0)
