"""A sheet that shows the subject's pictures, and for each prompt what was painted before and after."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

_SIDE, _GAP, _TEXT = 96, 4, 18


def before_and_after(
    subject: Path, prompts: Sequence[str], before: Sequence[Image.Image], after: Sequence[Image.Image]
) -> Image.Image:
    """A row of the subject's pictures, then a row a prompt; each prompt has equally many pictures in both lists."""
    columns = len(before) // len(prompts)
    given = [Image.open(path) for path in sorted(subject.glob("*.png"))]
    cell, row = _SIDE + _GAP, _SIDE + _GAP + _TEXT
    sheet = Image.new("RGB", (2 * columns * cell + 5 * _GAP, (len(prompts) + 1) * row + _TEXT), "white")
    pen = ImageDraw.Draw(sheet)
    halves = (_GAP, columns * cell + 4 * _GAP)
    _place(sheet, given, halves[0], _TEXT)
    pen.text((_GAP, 2), "the pictures of the subject", "black", ImageFont.load_default(12))
    for x, title in zip(halves, ("before", "after")):
        pen.text((x, row + 2), title, "black", ImageFont.load_default(12))
    for index, prompt in enumerate(prompts):
        top = (index + 1) * row + _TEXT
        for x, pictures in zip(halves, (before, after)):
            _place(sheet, pictures[index * columns : (index + 1) * columns], x, top)
        pen.text((halves[0], top + _SIDE + 2), prompt, "black", ImageFont.load_default(12))
    return sheet


def _place(sheet: Image.Image, pictures: Sequence[Image.Image], left: int, top: int) -> None:
    for index, picture in enumerate(pictures):
        larger = picture.resize((_SIDE, _SIDE), Image.Resampling.NEAREST)
        sheet.paste(larger, (left + index * (_SIDE + _GAP), top))
