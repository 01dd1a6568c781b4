"""Folders of drawn pictures as users have them (PNG files, captions in metadata.jsonl), and the same as tensors."""

import itertools
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from apps.diffusion.demo.captions import (
    LOOSE,
    SUBJECT_GROUNDS,
    drawing_of_subject,
    finishing_samples,
    subject_prompt,
    training_samples,
)
from apps.diffusion.demo.drawing import OUTLINES, Drawing, draw
from apps.diffusion.demo.sizes import PIXELS


def write_training_folder(folder: Path, num_pictures: int, seed: int, size: int = PIXELS) -> Path:
    """`num_pictures` captioned pictures. The folder appears when it is whole; one that is there stays as it is."""
    return _write(folder, itertools.islice(training_samples(seed), num_pictures), size)


def write_finishing_folder(folder: Path, num_pictures: int, seed: int, size: int = PIXELS) -> Path:
    """The same of the pictures that finish the training."""
    return _write(folder, itertools.islice(finishing_samples(seed), num_pictures), size)


def write_subject_folder(folder: Path, seed: int = 0, size: int = PIXELS, captioned: bool = False) -> Path:
    """The pictures of the subject, one on each of SUBJECT_GROUNDS.

    captioned  with prompts that name the ground; otherwise one prompt for all is given beside the folder
    """
    rng = np.random.default_rng([seed, 4])
    drawings = (
        (subject_prompt(ground) if captioned else None, drawing_of_subject(ground, rng)) for ground in SUBJECT_GROUNDS
    )
    return _write(folder, drawings, size)


def _write(folder: Path, samples: Iterable[tuple[str | None, Drawing]], size: int) -> Path:
    if folder.exists():
        return folder
    aside = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    lines = []
    for index, (text, drawing) in enumerate(samples):
        name = f"{index:05d}.png"
        draw(drawing, size).save(aside / name)
        if text is not None:
            lines.append(json.dumps({"file_name": name, "text": text}))
    if lines:
        (aside / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    aside.rename(folder)
    return folder


def varied_drawings(num: int, seed: int) -> list[Drawing]:
    """Drawings for the VAE: half are things of the captions, half any outline, in any colours, turned anyhow."""
    rng = np.random.default_rng([seed, 1])
    known = (drawing for _, drawing in training_samples(seed, LOOSE))
    return [next(known) if index % 2 else _any_drawing(rng) for index in range(num)]


def _any_drawing(rng: np.random.Generator) -> Drawing:
    colour, ground = (tuple(rng.integers(0, 256, size=3).tolist()) for _ in range(2))
    x, y = rng.uniform(0.35, 0.65, size=2).tolist()
    outline = [*OUTLINES][rng.integers(len(OUTLINES))]
    return Drawing(outline, colour, ground, (x, y), float(rng.uniform(0.15, 0.35)), float(rng.uniform(0, 360)))


def as_pixels(images: Iterable[Image.Image]) -> Tensor:
    """Pictures as float32 [B, 3, H, W] from -1 to 1, as a VAE takes them."""
    array_BHW3 = np.stack([np.asarray(image.convert("RGB")) for image in images])
    return torch.from_numpy(array_BHW3).permute(0, 3, 1, 2).float().div(127.5).sub(1.0)


def pixels_of(drawings: Iterable[Drawing], size: int = PIXELS) -> Tensor:
    return as_pixels(draw(drawing, size) for drawing in drawings)


def as_images(pixels_B3HW: Tensor) -> list[Image.Image]:
    array = pixels_B3HW.clamp(-1, 1).add(1).mul(127.5).round().byte().permute(0, 2, 3, 1).contiguous().numpy()
    return [Image.fromarray(picture) for picture in array]
