"""`diffusion pretrain`: a U-Net, and a text encoder if asked, from nothing, in the latents of a VAE that is given."""

from apps.diffusion.train import run
from apps.diffusion.train_recipes import PRETRAIN
from core.config import parse


def main(argv: list[str]) -> int:
    return run("pretrain", parse(PRETRAIN, argv, "diffusion pretrain", default="pretrain"), argv)
