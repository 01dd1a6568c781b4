"""What `diffusion pretrain --recipe tiny` starts from, made from a seed alone: pictures, and a pipeline to train.

1. OUT/pictures: drawn, captioned pictures, as a user's folder has them.
2. OUT/vae-run: the training run of the VAE.
3. OUT/start: a diffusers folder with that VAE, the tokenizer, and a U-Net and a text encoder with their first values.

Each is skipped where it is there whole; the VAE's run goes on where it was stopped.
"""

from dataclasses import replace
from pathlib import Path

import torch

from apps.diffusion.demo.autoencoder import AutoencoderConfig, train_autoencoder
from apps.diffusion.demo.captions import words
from apps.diffusion.demo.pictures import write_training_folder
from apps.diffusion.demo.sizes import tiny_schedule, tiny_text_encoder, tiny_unet, write_tokenizer
from apps.diffusion.pipeline import INDEX, Pipeline, save_pipeline

NUM_PICTURES = 4096


def prepare(out: Path, autoencoder: AutoencoderConfig, num_pictures: int = NUM_PICTURES) -> tuple[Path, Path]:
    """The folders of pictures and of the pipeline to start from; all that is random in them is of `autoencoder.seed`.

    autoencoder  the VAE's run; its folder becomes OUT/vae-run
    """
    pictures = write_training_folder(out / "pictures", num_pictures, autoencoder.seed)
    start = out / "start"
    if not (start / INDEX).exists():
        vae, summary = train_autoencoder(replace(autoencoder, out=out / "vae-run", resume="auto"))
        print(f"the VAE gives pictures back at {summary['heldout_psnr_db']:.1f} dB")
        tokenizer = write_tokenizer(words(), out / "tokenizer")
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(autoencoder.seed)
            unet, text_encoder = tiny_unet(), tiny_text_encoder(tokenizer)
        save_pipeline(Pipeline(unet, vae, text_encoder, tokenizer, tiny_schedule()), start)
    return pictures, start
