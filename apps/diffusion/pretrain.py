"""`diffusion pretrain`: a U-Net, and a text encoder if asked, from nothing, in the latents of a VAE that is given."""

from pathlib import Path

from apps.diffusion.shapes import SHAPES
from apps.diffusion.train import run
from apps.diffusion.train_recipes import PRETRAIN
from core.config import parse, tell_notes


def main(argv: list[str]) -> int:
    return run(
        "pretrain", parse(PRETRAIN, _as_called_now(argv), "megalith diffusion pretrain", default="pretrain"), argv
    )


def _as_called_now(argv: list[str]) -> list[str]:
    """--model NAME of a published model, which is called --unet now that --model is the pipeline."""
    found = list(argv)
    for index, (before, word) in enumerate(zip(["", *argv], argv)):
        value = word.removeprefix("--model=")
        if (before == "--model" or value != word) and value in SHAPES and not Path(value).exists():
            found[index] = f"--unet={value}" if value != word else value
            if before == "--model":
                found[index - 1] = "--unet"
            tell_notes([f"--model {value} is called --unet {value} now; the former name goes with the next version"])
    return found
