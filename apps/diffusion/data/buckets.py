"""Sizes of about equal area for every aspect ratio, and how an image is laid into one of them.

An image goes to the size whose ratio of sides is nearest to its own, is scaled to cover it, and what overhangs is
cropped away: nothing is distorted, and with many sizes little is lost. All rows of a step are of one size.

Sizes are (width, height) in pixels.
"""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from core.config import UserError

Size = tuple[int, int]


def bucket_sizes(resolution: int, step: int, most: float = 2.0) -> list[Size]:
    """Sizes with sides that are multiples of `step`, an area of at most resolution^2, and sides within `most` times.

    The square comes first. Raises UserError unless the resolution is a multiple of the step.
    """
    if resolution < step or resolution % step:
        raise UserError(
            f"data.resolution={resolution}; the latents of this model go with multiples of {step} pixels, "
            f"give {max(step, round(resolution / step) * step)}"
        )
    sizes = {(resolution, resolution)}
    for width in range(step, int(resolution * math.sqrt(most)) + 1, step):
        height = resolution * resolution // width // step * step
        if height and 1 / most <= width / height <= most:
            sizes |= {(width, height), (height, width)}
    return sorted(sizes, key=lambda size: (abs(math.log(size[0] / size[1])), size))


def nearest(sizes: list[Size], size: Size) -> Size:
    """The size whose aspect ratio is nearest; of several alike the first."""
    ratio = math.log(size[0] / size[1])
    return min(sizes, key=lambda one: abs(math.log(one[0] / one[1]) - ratio))


@dataclass(frozen=True)
class Variant:
    """One way of laying an image into a size."""

    size: Size
    crop: float = 0.5
    """where the crop lies on what overhangs: 0 at the left or top, 1 at the right or bottom"""
    mirrored: bool = False


def variants(image: Size, size: Size, num_crops: int, flip: bool) -> list[Variant]:
    """The ways an image of these sides is shown: crops evenly along what overhangs, each also mirrored.

    Where less than a pixel overhangs one crop is all there is.
    """
    scale = max(size[0] / image[0], size[1] / image[1])
    overhang = max(image[0] * scale - size[0], image[1] * scale - size[1])
    crops = [0.5] if num_crops == 1 or overhang < 1 else np.linspace(0, 1, num_crops).tolist()
    return [Variant(size, crop, mirrored) for crop in crops for mirrored in ((False, True) if flip else (False,))]


def lay(image: Image.Image, variant: Variant) -> np.ndarray:
    """The image as a variant shows it: uint8 [H, W, 3]."""
    (width, height), (own_width, own_height) = variant.size, image.size
    scale = max(width / own_width, height / own_height)
    wide, high = min(width / scale, own_width), min(height / scale, own_height)
    left, top = (own_width - wide) * variant.crop, (own_height - high) * variant.crop
    laid = image.resize(variant.size, Image.Resampling.LANCZOS, box=(left, top, left + wide, top + high))
    pixels = np.asarray(laid)
    return np.ascontiguousarray(pixels[:, ::-1]) if variant.mirrored else pixels
