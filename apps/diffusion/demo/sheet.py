"""A sheet that shows the subject's pictures, and for each prompt what was painted before and after.

Under each picture stands what a viewer sees in it (`viewer.py`).
"""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from apps.diffusion.demo.pictures import as_pixels
from apps.diffusion.demo.viewer import in_words, see

SIDE = 160
_GAP, _TEXT = 6, 20
_ROW = SIDE + 2 * _TEXT + _GAP


def before_and_after(
    subject: Path, prompts: Sequence[str], before: Sequence[Image.Image], after: Sequence[Image.Image]
) -> Image.Image:
    """A row of the subject's pictures, then a row a prompt; each prompt has equally many pictures in both lists."""
    columns = len(before) // len(prompts)
    given = [Image.open(path) for path in sorted(subject.glob("*.png"))]
    half = columns * (SIDE + _GAP)
    sheet = Image.new("RGB", (2 * half + 5 * _GAP, (len(prompts) + 1) * _ROW + _TEXT), "white")
    lefts = (_GAP, half + 4 * _GAP)
    _write(sheet, (lefts[0], 2), "the pictures of the subject", 15)
    _place(sheet, given, lefts[0], 0)
    for left, title in zip(lefts, ("before", "after")):
        _write(sheet, (left, _ROW), title, 17)
    for index, prompt in enumerate(prompts):
        top = (index + 1) * _ROW + _TEXT
        for left, pictures in zip(lefts, (before, after)):
            _write(sheet, (left, top + 2), f'"{prompt}"', 13)
            _place(sheet, pictures[index * columns : (index + 1) * columns], left, top)
    return sheet


def _place(sheet: Image.Image, pictures: Sequence[Image.Image], left: int, top: int) -> None:
    """Pictures in a row, enlarged, each over what it is seen as; `top` is that of the line above them."""
    for index, (picture, sight) in enumerate(zip(pictures, see(as_pixels(pictures)))):
        x = left + index * (SIDE + _GAP)
        sheet.paste(picture.resize((SIDE, SIDE), Image.Resampling.NEAREST), (x, top + _TEXT))
        _write(sheet, (x, top + _TEXT + SIDE + 2), in_words(sight), 12)


def _write(sheet: Image.Image, place: tuple[int, int], text: str, size: int) -> None:
    ImageDraw.Draw(sheet).text(place, text, "black", ImageFont.load_default(size))
