"""`diffusion recipes`: the models that have a name, and the recipes of the training commands."""

import sys

from rich.console import Console
from rich.table import Table

from core.config import UserError


def main(argv: list[str]) -> int:
    if argv:
        raise UserError(f"megalith diffusion recipes takes no options, and was given {' '.join(argv)}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_models())
    console.print(_recipes())
    return 0


def _models() -> Table:
    from apps.diffusion.noise import prediction_of
    from apps.diffusion.shapes import SHAPES, meta_modules

    table = Table("model", "U-Net", "VAE", "text encoder", "text width", "predicts", "pixels")
    for name, shape in SHAPES.items():
        modules = meta_modules(shape)
        counts = [f"{sum(p.numel() for p in modules[part].parameters()):,}" for part in ("unet", "vae", "text_encoder")]
        pixels = str(8 * shape.unet["sample_size"])
        table.add_row(name, *counts, str(shape.unet["cross_attention_dim"]), prediction_of(shape.schedule), pixels)
    return table


def _recipes() -> Table:
    """By the first line of what each says of itself."""
    from apps.diffusion.train_recipes import FINETUNE, PRETRAIN

    table = Table("command", "--recipe", "what it is")
    for command, recipes in (("pretrain", PRETRAIN), ("finetune, dreambooth", FINETUNE)):
        for name, recipe in recipes.items():
            table.add_row(command, name, (recipe.__doc__ or "").strip().splitlines()[0])
    return table
