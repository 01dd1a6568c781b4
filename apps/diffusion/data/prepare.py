"""The way from folders to the batches of a run: read, laid into sizes, encoded, all ranks sharing the work."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from apps.diffusion.config import DiffusionConfig, FinetuneConfig
from apps.diffusion.data.batches import Draws, LatentBatches
from apps.diffusion.data.buckets import bucket_sizes
from apps.diffusion.data.encoding import Entry, encode_captions, encode_images, entries_of
from apps.diffusion.data.folder import LEFT_OUT, ImageFolder, read_folder, report_refused
from apps.diffusion.data.store import Store, fingerprint
from apps.diffusion.pipeline import Pipeline
from core.config import UserError
from core.runtime import Runtime


def prepare(
    config: DiffusionConfig, pipeline: Pipeline, runtime: Runtime
) -> tuple[LatentBatches, LatentBatches | None, list[ImageFolder]]:
    """The batches of a run, those held out, and the folders of both.

    Raises UserError for folders that nothing can be learned from.

    The VAE, and the text encoder where it does not learn, are on the device only as long as they encode.
    """
    share = (runtime.rank, runtime.world_size)
    instance, others = _folders(config, share)
    heldout = (
        None if config.validation.images is None else read_folder(config.validation.images, config.data.prompt, share)
    )
    folders = [folder for folder in (instance, others, heldout) if folder is not None]
    for folder in folders if runtime.leads else ():
        report_refused(folder, config.out / LEFT_OUT)
    data = config.data
    step = pipeline.factor * 2 ** (len(pipeline.unet.config.block_out_channels) - 1)
    resolution = _side(pipeline) if data.resolution is None else data.resolution
    sizes = bucket_sizes(resolution, step)[: None if data.buckets else 1]
    store = Store(data.cache or config.out.parent / "cache")
    vae_print = fingerprint(pipeline.vae, _fields(pipeline.vae.config))
    entries, wanted = entries_of(instance, sizes, data.crops, data.flip, vae_print)
    class_entries: list[Entry] = []
    if others is not None:
        used = list(dict.fromkeys(size for entry in entries for size in entry.keys))
        class_entries, more = entries_of(others, used, 1, False, vae_print, every_size=True)
        wanted += more
    held_entries: list[Entry] = []
    if heldout is not None:
        held_entries, more = entries_of(heldout, sizes, 1, False, vae_print)
        wanted += more
    pipeline.vae.to(runtime.device)
    encode_images(wanted, pipeline.vae, store, share, StatusLine(runtime.leads))
    pipeline.vae.to("cpu")
    captions = [entry.caption for entry in (*entries, *class_entries, *held_entries)]
    captions += [*config.validation.prompts, config.validation.sampling.negative]
    text = _text(config, pipeline, captions, store, runtime)
    draws = Draws(pipeline.num_train_timesteps, pipeline.scaling_factor, config.noise.offset, data.caption_dropout)
    batches = LatentBatches(entries, store.__getitem__, text, data.global_batch, config.seed, draws, class_entries)
    if not held_entries:
        return batches, None, folders
    calm = replace(draws, offset_noise=0.0, caption_dropout=0.0)
    rows = batches.global_batch  # which divides over the ranks
    return batches, LatentBatches(held_entries, store.__getitem__, text, rows, config.seed, calm), folders


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the library's notes on it, whose order is another in each process."""
    return {name: value for name, value in config.items() if not name.startswith("_")}


def _side(pipeline: Pipeline) -> int:
    """Raises UserError for a model whose pictures are not square."""
    height, width = pipeline.image_size
    if height != width:
        raise UserError(
            f"the model's pictures are {width} x {height} pixels; give --data.resolution, the side of a square of the "
            "area that images are to have"
        )
    return height


def _folders(config: DiffusionConfig, share: tuple[int, int]) -> tuple[ImageFolder, ImageFolder | None]:
    """The folders that are learned from, and the class images of prior preservation."""
    if isinstance(config, FinetuneConfig) and config.instance_dir is not None:
        instance = read_folder(config.instance_dir, config.instance_prompt, share)
        if config.class_dir is None:
            return instance, None
        return instance, read_folder(config.class_dir, config.class_prompt, share)
    assert config.data.images is not None
    return read_folder(config.data.images, config.data.prompt, share), None


def _text(config: DiffusionConfig, pipeline: Pipeline, captions: Sequence[str], store: Store, runtime: Runtime) -> Any:
    """caption -> its tokens where the text encoder learns, else its embedding."""
    captions = sorted({"", *captions})
    if config.train_text_encoder:
        return dict(zip(captions, pipeline.tokenize(captions))).__getitem__
    pipeline.text_encoder.to(runtime.device)
    share = (runtime.rank, runtime.world_size)
    keys = encode_captions(captions, pipeline.tokenize, pipeline.text_encoder, store, share, StatusLine(runtime.leads))
    pipeline.text_encoder.to("cpu")
    return lambda caption: store[keys[caption]]


class StatusLine:
    """Goes through items and says how far it is, on a terminal."""

    def __init__(self, active: bool):
        self.active = active and sys.stdout.isatty()

    def __call__(self, what: str, items: Sequence) -> Iterator:
        for number, item in enumerate(items):
            if self.active:
                print(f"\r{what}: {number} of {len(items)}", end="\r", flush=True)
            yield item
        if self.active and items:
            print(f"\r{what}: {len(items)} of {len(items)}")
