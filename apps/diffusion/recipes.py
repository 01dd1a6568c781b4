"""`diffusion recipes`: the models that have a name."""

import sys

from rich.console import Console
from rich.table import Table

from core.config import UserError


def main(argv: list[str]) -> int:
    if argv:
        raise UserError(f"diffusion recipes takes no options, and was given {' '.join(argv)}")
    from apps.diffusion.shapes import SHAPES, meta_modules

    table = Table("model", "U-Net", "VAE", "text encoder", "text width", "predicts", "pixels")
    for name, shape in SHAPES.items():
        modules = meta_modules(shape)
        counts = [f"{sum(p.numel() for p in modules[part].parameters()):,}" for part in ("unet", "vae", "text_encoder")]
        pixels = str(8 * shape.unet["sample_size"])
        table.add_row(name, *counts, str(shape.unet["cross_attention_dim"]), shape.schedule.prediction_type, pixels)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0
