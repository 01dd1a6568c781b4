"""The start of `diffusion pretrain --recipe tiny`, made from a seed alone: pictures, and a pipeline to train.

1. OUT/pictures: drawn, captioned pictures, as a user's folder has them.
2. OUT/last-pictures: half as many again, whose captions leave more open; the recipe `tiny_last` ends with them.
3. OUT/vae-run, OUT/decoder-run: the training runs of the VAE, and of its decoder alone.
4. OUT/start: a diffusers folder with that VAE, the tokenizer, and a U-Net and a text encoder with their first values.

Each is skipped where it is there whole; runs go on where they were stopped.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from apps.diffusion.demo.autoencoder import AutoencoderConfig, autoencoder, decoder, train_autoencoder, train_decoder
from apps.diffusion.demo.captions import words
from apps.diffusion.demo.pictures import write_finishing_folder, write_training_folder
from apps.diffusion.demo.sizes import tiny_schedule, tiny_text_encoder, tiny_unet, write_tokenizer
from apps.diffusion.pipeline import INDEX, Pipeline, save_pipeline
from core.config import UserError, run_command

NUM_PICTURES = 4096
TINY = Path("runs/tiny")


def prepare(
    out: Path, config: AutoencoderConfig, alone: AutoencoderConfig, num_pictures: int = NUM_PICTURES
) -> tuple[Path, Path]:
    """The folders of pictures and of the pipeline to start from; all that is random in them is of the runs' seeds.

    config  the VAE's run; its folder becomes OUT/vae-run
    alone   the decoder's; its folder becomes OUT/decoder-run
    """
    pictures = write_training_folder(out / "pictures", num_pictures, config.seed)
    write_finishing_folder(out / "last-pictures", num_pictures * 3 // 2, config.seed)
    start = out / "start"
    if not (start / INDEX).exists():
        vae, _ = train_autoencoder(replace(config, out=out / "vae-run", resume="auto"))
        summary = train_decoder(vae, replace(alone, out=out / "decoder-run", resume="auto"))
        print(f"the VAE gives pictures back at {summary['heldout_psnr_db']:.1f} dB")
        tokenizer = write_tokenizer(words(), out / "tokenizer")
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(config.seed)
            unet, text_encoder = tiny_unet(), tiny_text_encoder(tokenizer)
        save_pipeline(Pipeline(unet, vae, text_encoder, tokenizer, tiny_schedule()), start, torch.float16)
    return pictures, start


def main(argv: list[str]) -> int:
    """`python -m apps.diffusion.demo.prepare`: into the folder that the recipe `tiny` reads."""
    if argv:
        raise UserError(f"apps.diffusion.demo.prepare takes no options, and was given {' '.join(argv)}")
    for folder in prepare(TINY, autoencoder(TINY / "vae-run"), decoder(TINY / "decoder-run")):
        print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
