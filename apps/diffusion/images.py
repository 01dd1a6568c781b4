"""Pictures as files: tensors to PNG and grids, with how they were made in the PNG's text.

The text `parameters` is in the form that Stable Diffusion web interfaces read back; `megalith` is JSON of everything.

Shapes: B pictures, 3 channels, H x W pixels, values 0 to 1.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from core.files import replacing


def to_pil(picture_3HW: Tensor) -> Image.Image:
    values = (picture_3HW.detach().float().clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(values.permute(1, 2, 0).cpu().numpy())


def grid(pictures: Sequence[Image.Image], columns: int | None = None, gap: int = 2) -> Image.Image:
    """Pictures in rows on white, each cell as large as the largest; about as many columns as rows by default."""
    columns = columns or math.ceil(math.sqrt(len(pictures)))
    width, height = max(p.width for p in pictures), max(p.height for p in pictures)
    rows = -(-len(pictures) // columns)
    size = (columns * (width + gap) - gap, rows * (height + gap) - gap)
    whole = Image.new("RGB", size, "white")
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        whole.paste(picture, (column * (width + gap), row * (height + gap)))
    return whole


def save_png(picture: Image.Image, path: Path, settings: Mapping[str, Any] | None = None) -> None:
    """Write aside, then rename.  `settings` become the file's text."""
    text = PngInfo()
    if settings is not None:
        text.add_text("parameters", _as_parameters(settings))
        text.add_text("megalith", json.dumps(settings))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        picture.save(aside, format="PNG", pnginfo=text)


def read_settings(path: Path) -> dict[str, Any]:
    """Read back the settings that `save_png` was given; empty for other pictures."""
    with Image.open(path) as picture:
        text = getattr(picture, "text", {})
        return json.loads(text["megalith"]) if "megalith" in text else {}


_NAMES = {"steps": "Steps", "sampler": "Sampler", "guidance": "CFG scale", "seed": "Seed", "size": "Size"}


def _as_parameters(settings: Mapping[str, Any]) -> str:
    """The prompt, the negative one, and a line of settings."""
    lines = [str(settings.get("prompt", ""))]
    if settings.get("negative"):
        lines.append(f"Negative prompt: {settings['negative']}")
    lines.append(", ".join(f"{shown}: {settings[name]}" for name, shown in _NAMES.items() if name in settings))
    return "\n".join(lines)
