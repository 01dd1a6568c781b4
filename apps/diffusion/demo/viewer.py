"""A viewer of pictures: names the colour of the ground, the colour of the figure, and the figure's outline.

Nothing here is learned, so nothing can be fooled as a network can. Of each picture:

1. The ground is the median of the pixels along the edge, the figure's colour the median of those farthest from it.
2. Colours get the name of the nearest colour in CIELAB (ISO/CIE 11664-4): the captions', the subject's, and others.
3. A pixel's coverage is how far it lies on the way from the ground to the figure. Moved to the middle and scaled to one
   area, it is laid over every outline at every turn, sharp and blurred, and the outline with the largest overlap (the
   sum of minima over the sum of maxima) is what is seen. A viewer knows that a blurred star is a star; beside sharp
   outlines alone it is more like a pentagon, whose edges have less to lose. Outlines that nobody asked for, as a
   pentagon, are among them: a circle that was painted with corners is no circle. A figure that no outline covers well
   enough has none.

Shapes: B pictures of [3, H, W] from -1 to 1, K templates, S x S samples of a template.
"""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from apps.diffusion.demo.captions import COLOURS, GROUNDS, SUBJECT_CLASS, SUBJECT_COLOUR
from apps.diffusion.demo.drawing import OUTLINES, Colour, Drawing, draw, regular

SUBJECT_COLOUR_NAME = "teal"
PALETTE: dict[str, Colour] = {
    **COLOURS,
    **GROUNDS,
    SUBJECT_COLOUR_NAME: SUBJECT_COLOUR,
    # what captions have no word for, and what a colour that was nearly learned is seen as
    "azure": (0, 120, 205),
    "cyan": (70, 215, 235),
    "lime": (140, 220, 60),
    "brown": (120, 70, 35),
    "magenta": (220, 40, 190),
}
UPSIDE_DOWN = "upside-down "
"""before the name of an outline that a half turn changes"""
SUBJECT_SHAPE = UPSIDE_DOWN + SUBJECT_CLASS

_SIDE = 32
_AREA = 0.28
"""of a template, as a share of its square: the largest outline at any turn fits"""
_BLURS = (0.0, 1.0, 1.75, 2.5)
"""standard deviations of Gaussians, in samples of a template, which are about pixels of the demo's pictures"""
_LEAST_OVERLAP = 0.8
_TURN_DEG = 4
_MOST_TILT_DEG = 12
"""An outline that stands a little askew is still that outline; one that is turned further has another name."""
LOOKED_FOR = OUTLINES | {"pentagon": regular(5, 1.05)}
# After how many degrees an outline is itself again; every outline that is not here, after any.
_PERIOD_DEG = {"square": 90, "triangle": 120, "star": 72, "cross": 90, "diamond": 180}
_WHITE_D65 = (0.95047, 1.0, 1.08883)


@dataclass(frozen=True)
class Sight:
    """One picture's ground, figure and outline, by name."""

    shape: str | None
    colour: str
    ground: str
    overlap: float
    """of the figure and its outline, from 0 to 1"""


def see(pixels_B3HW: Tensor) -> list[Sight]:
    """Name each picture as a viewer would."""
    pixels = pixels_B3HW.double().add(1).div(2).clamp(0, 1)
    ground_B3, figure_B3 = _grounds(pixels), _figures(pixels)
    names, overlaps = _outlines(_coverage(pixels, ground_B3, figure_B3))
    return [
        Sight(shape, _nearest(colour), _nearest(ground), overlap)
        for shape, colour, ground, overlap in zip(names, figure_B3, ground_B3, overlaps, strict=True)
    ]


def most_seen(sights: Sequence[Sight]) -> str:
    """The commonest sight in words, as `teal upside-down star`."""
    return Counter(map(in_words, sights)).most_common(1)[0][0]


def in_words(sight: Sight) -> str:
    return f"{sight.colour} {sight.shape or 'blot'}"


# --- colours ----------------------------------------------------------------------------------------------------------


def _grounds(pixels_B3HW: Tensor) -> Tensor:
    edge = torch.cat(
        [pixels_B3HW[..., :2, :].flatten(2), pixels_B3HW[..., -2:, :].flatten(2), pixels_B3HW[..., :2].flatten(2)], 2
    )
    return edge.median(2).values


def _figures(pixels_B3HW: Tensor) -> Tensor:
    """[B, 3]: the median of the pixels at least three quarters as far from the ground as the farthest."""
    flat_B3N = pixels_B3HW.flatten(2)
    away_BN = (flat_B3N - _grounds(pixels_B3HW)[..., None]).norm(dim=1)
    least_B1 = 0.75 * away_BN.quantile(0.95, dim=1, keepdim=True)
    rows = [flat_N3[away >= least].median(0).values for flat_N3, away, least in zip(flat_B3N.mT, away_BN, least_B1)]
    return torch.stack(rows)


def lab(rgb_N3: Tensor) -> Tensor:
    """CIELAB [N, 3] of sRGB values from 0 to 1 (IEC 61966-2-1, D65)."""
    linear = torch.where(rgb_N3 <= 0.04045, rgb_N3 / 12.92, ((rgb_N3 + 0.055) / 1.055) ** 2.4)
    to_xyz = rgb_N3.new_tensor(
        ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
    )
    ratio = linear @ to_xyz.T / rgb_N3.new_tensor(_WHITE_D65)
    root = torch.where(ratio > (6 / 29) ** 3, ratio ** (1 / 3), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = root.unbind(1)
    return torch.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)), 1)


def _nearest(rgb_3: Tensor) -> str:
    named = torch.tensor([*PALETTE.values()], dtype=rgb_3.dtype) / 255
    return [*PALETTE][int((lab(named) - lab(rgb_3[None])).norm(dim=1).argmin())]


# --- outlines ---------------------------------------------------------------------------------------------------------


def _coverage(pixels_B3HW: Tensor, ground_B3: Tensor, figure_B3: Tensor) -> Tensor:
    """[B, H, W] from 0, the ground, to 1, the figure."""
    way_B3 = figure_B3 - ground_B3
    along_BHW = ((pixels_B3HW - ground_B3[..., None, None]) * way_B3[..., None, None]).sum(1)
    return (along_BHW / way_B3.square().sum(1).clamp(min=1e-6)[:, None, None]).clamp(0, 1)


def _outlines(coverage_BHW: Tensor) -> tuple[list[str | None], list[float]]:
    names, templates_KN = _templates()
    seen_BN = normalised(coverage_BHW).flatten(1)
    # |a - b| = max - min and a + b = max + min
    apart_BK = torch.cdist(seen_BN, templates_KN, p=1)
    both_BK = seen_BN.sum(1, keepdim=True) + templates_KN.sum(1)
    overlaps_B, best_B = ((both_BK - apart_BK) / (both_BK + apart_BK)).max(1)
    found = zip(overlaps_B.tolist(), best_B.tolist())
    return [names[best] if overlap >= _LEAST_OVERLAP else None for overlap, best in found], overlaps_B.tolist()


def normalised(coverage_BHW: Tensor) -> Tensor:
    """[B, S, S]: every figure in the middle of the square, and of one area."""
    num, height, width = coverage_BHW.shape
    y_H = (torch.arange(height, dtype=coverage_BHW.dtype) + 0.5) * 2 / height - 1
    x_W = (torch.arange(width, dtype=coverage_BHW.dtype) + 0.5) * 2 / width - 1
    mass_B = coverage_BHW.sum((1, 2)).clamp(min=1e-6)
    x_B = (coverage_BHW.sum(1) * x_W).sum(1) / mass_B
    y_B = (coverage_BHW.sum(2) * y_H).sum(1) / mass_B
    scale_B = (mass_B / (height * width) / _AREA).sqrt()
    theta = coverage_BHW.new_zeros(num, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = scale_B
    theta[:, 0, 2], theta[:, 1, 2] = x_B, y_B
    where = F.affine_grid(theta, [num, 1, _SIDE, _SIDE], align_corners=False)
    return F.grid_sample(coverage_BHW[:, None], where, align_corners=False)[:, 0]


@functools.cache
def _templates() -> tuple[list[str], Tensor]:
    """Names and templates [K, S * S] of every outline at every turn and blur."""
    names, pictures = [], []
    for outline, corners in LOOKED_FOR.items():
        for turn in range(0, 360, _TURN_DEG):
            names.append(_named(outline, turn))
            drawing = Drawing(outline, (255, 255, 255), (0, 0, 0), radius=0.33, turn_deg=float(turn))
            pictures.append(np.asarray(draw(drawing, 2 * _SIDE, corners))[..., 0])
    sharp_KSS = normalised(torch.from_numpy(np.stack(pictures)).double() / 255)
    return names * len(_BLURS), torch.cat([_blurred(sharp_KSS, blur) for blur in _BLURS]).flatten(1)


def _blurred(pictures_KSS: Tensor, deviation: float) -> Tensor:
    """By a Gaussian, in samples."""
    if deviation == 0:
        return pictures_KSS
    reach = math.ceil(3 * deviation)
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, dtype=pictures_KSS.dtype) / deviation).square())
    weights = weights / weights.sum()
    return F.conv2d(pictures_KSS[:, None], torch.outer(weights, weights)[None, None], padding=reach)[:, 0]


def _named(outline: str, turn_deg: int) -> str:
    period = _PERIOD_DEG.get(outline, 1)
    tilt = min(turn_deg % period, period - turn_deg % period)
    if tilt <= _MOST_TILT_DEG:
        return outline
    return (UPSIDE_DOWN if period / 2 - tilt <= _MOST_TILT_DEG else "tilted ") + outline
