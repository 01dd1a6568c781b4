"""One image file as RGB in 8 bits, upright: grey, palette, transparent, CMYK, 16 bits, turned by EXIF.

Nothing that a file claims is taken on trust: an image too large to decode, too small or too long to learn from, or
broken raises `Unusable` with one line; the caller leaves it out and counts it.
"""

import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
MIN_SIDE = 16
"""pixels; there is nothing to learn from less"""
MAX_RATIO = 8.0
"""of the longer to the shorter side: more would be cropped to a strip of itself"""
MAX_PIXELS = 100_000_000


class Unusable(Exception):
    """The reason to leave an image out, in one line without its name."""


def read_image(path: Path) -> Image.Image:
    """The image in mode RGB, upright; what is transparent lies on white; of an animation the first frame.

    Raises Unusable.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as opened:
                _check_size(*opened.size)
                opened.load()
                return _rgb(ImageOps.exif_transpose(opened))
    except Image.DecompressionBombError:
        raise Unusable(f"it has more than {MAX_PIXELS:,} pixels; make it smaller") from None
    except UnidentifiedImageError:
        raise Unusable("it is no image that can be read") from None
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError) as error:
        raise Unusable(f"it is broken ({_one_line(error)})") from None


def _check_size(width: int, height: int) -> None:
    short, long = sorted((width, height))
    if short < MIN_SIDE:
        raise Unusable(f"it has {width} x {height} pixels; give images of at least {MIN_SIDE} x {MIN_SIDE}")
    if width * height > MAX_PIXELS:
        raise Unusable(f"it has {width} x {height} pixels, more than {MAX_PIXELS:,}; make it smaller")
    if long > MAX_RATIO * short:
        raise Unusable(f"it has {width} x {height} pixels; its sides must not differ more than {MAX_RATIO:g} times")


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    if image.mode == "F":
        raise Unusable("its pixels are floating-point numbers of unknown range; convert it to 8 or 16 bits")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        above = image.convert("RGBA")
        ground = Image.new("RGBA", above.size, "white")
        return Image.alpha_composite(ground, above).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits, which Pillow would clip instead of scaling, also where it holds it in 32."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise Unusable("its pixels have 32 bits; convert it to 8 or 16 bits")
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _one_line(error: Exception) -> str:
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__
