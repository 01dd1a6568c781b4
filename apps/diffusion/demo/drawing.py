"""One picture: a filled outline on a plain ground, antialiased by drawing it four times as large.

Outlines are polygons around the origin, x to the right and y down, of about equal area; the radius scales them.
"""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

Colour = tuple[int, int, int]

SUPERSAMPLING = 4


@dataclass(frozen=True)
class Drawing:
    """A figure on a ground. Lengths are fractions of the picture's side, so one drawing has every size in pixels."""

    outline: str
    colour: Colour
    ground: Colour
    centre: tuple[float, float] = (0.5, 0.5)
    radius: float = 0.3
    turn_deg: float = 0.0
    """clockwise"""


def regular(corners: int, radius: float, first_deg: float = -90.0) -> np.ndarray:
    """Corners [V, 2] evenly on a circle; -90 degrees is straight up."""
    angle_V = np.radians(first_deg + 360.0 * np.arange(corners) / corners)
    return radius * np.stack((np.cos(angle_V), np.sin(angle_V)), axis=1)


def _star(points: int, outer: float, inner: float) -> np.ndarray:
    corners = regular(2 * points, outer)
    corners[1::2] *= inner / outer
    return corners


def _cross(reach: float, half_width: float) -> np.ndarray:
    r, w = reach, half_width
    return np.array(
        [(-w, -r), (w, -r), (w, -w), (r, -w), (r, w), (w, w), (w, r), (-w, r), (-w, w), (-r, w), (-r, -w), (-w, -w)]
    )


OUTLINES: dict[str, np.ndarray] = {
    "circle": regular(48, 0.92),
    "square": regular(4, 1.15, first_deg=-135.0),
    "triangle": regular(3, 1.3) + np.array((0.0, 0.2)),
    "star": _star(5, 1.3, 0.58),
    "cross": _cross(1.1, 0.4),
    "diamond": regular(4, 1.15) * (0.8, 1.2),
    "hexagon": regular(6, 1.0),
}
"""name -> corners [V, 2]"""


def draw(drawing: Drawing, size: int, corners_V2: np.ndarray | None = None) -> Image.Image:
    """The picture, RGB, size x size pixels.

    corners_V2  of the outline, where it is none of OUTLINES
    """
    side = size * SUPERSAMPLING
    image = Image.new("RGB", (side, side), drawing.ground)
    turn = math.radians(drawing.turn_deg)
    rotation = np.array(((math.cos(turn), math.sin(turn)), (-math.sin(turn), math.cos(turn))))
    corners_V2 = OUTLINES[drawing.outline] if corners_V2 is None else corners_V2
    placed_V2 = corners_V2 @ rotation * drawing.radius + drawing.centre
    ImageDraw.Draw(image).polygon([(x * side, y * side) for x, y in placed_V2], fill=drawing.colour)
    return image.reduce(SUPERSAMPLING)
