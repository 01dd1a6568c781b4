"""Latents and text embeddings, made once and kept in a store: no step pays for the VAE or a frozen text encoder.

Each rank encodes its share, one image and one caption at a time: what comes out does not depend on who else was encoded
with it, nor on how many ranks there are. Of an image the moments of the posterior are kept, not a draw from it.

Shapes: C latent channels, h x w latents, L tokens, D width of the text encoder.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from apps.diffusion.data.buckets import Size, Variant, lay, nearest, variants
from apps.diffusion.data.folder import ImageFolder, Picture
from apps.diffusion.data.images import read_image
from apps.diffusion.data.store import Store, fingerprint, key_of
from apps.diffusion.modules import VAE, TextEncoder

Share = tuple[int, int]
"""(rank, ranks) that encode together"""


@dataclass(frozen=True)
class Entry:
    """An image in the sizes that it is shown in."""

    caption: str
    keys: dict[Size, tuple[str, ...]]
    """by size: where the moments of each of its variants lie in the store"""


def entries_of(
    folder: ImageFolder, sizes: Sequence[Size], num_crops: int, flip: bool, vae_print: str, every_size: bool = False
) -> tuple[list[Entry], list[tuple[Picture, Variant, str]]]:
    """The entries of a folder, and all (picture, variant, key) that the store has to hold for them.

    every_size  an image is shown in all sizes, not only in the one nearest to its own
    """
    entries, wanted = [], []
    for picture in folder.pictures:
        keys = {}
        for size in sizes if every_size else [nearest(list(sizes), picture.size)]:
            shown = [
                (
                    picture,
                    variant,
                    key_of("latents", vae_print, picture.digest, variant.size, variant.crop, variant.mirrored),
                )
                for variant in variants(picture.size, size, num_crops, flip)
            ]
            wanted += shown
            keys[size] = tuple(key for _, _, key in shown)
        entries.append(Entry(picture.caption, keys))
    return entries, wanted


@torch.no_grad()
def encode_images(
    wanted: Sequence[tuple[Picture, Variant, str]], vae: VAE, store: Store, share: Share, progress: "Progress"
) -> None:
    """Put the moments (mean, log variance) [2, C, h, w] of what is wanted into the store, where they are not there."""
    device = next(vae.parameters()).device
    last: tuple[Picture, object] | None = None
    for picture, variant, key in progress("encoding images", _own(wanted, share)):
        if key in store:
            continue
        if last is None or last[0] != picture:
            last = picture, read_image(picture.path)
        pixels = torch.from_numpy(lay(last[1], variant).copy()).permute(2, 0, 1)  # pyright: ignore[reportArgumentType]
        posterior = vae.encode((pixels.to(device).float() / 127.5 - 1)[None]).latent_dist
        store[key] = torch.cat((posterior.mean, posterior.logvar))
    _meet(share)


@torch.no_grad()
def encode_captions(
    captions: Iterable[str],
    tokenize: Callable[[Sequence[str]], Tensor],
    text_encoder: TextEncoder,
    store: Store,
    share: Share,
    progress: "Progress",
) -> dict[str, str]:
    """caption -> where its embedding [L, D] lies in the store, made as far as it is not there."""
    device = next(text_encoder.parameters()).device
    encoder_print = fingerprint(text_encoder, text_encoder.config.to_dict())
    ids = {caption: tokenize([caption]) for caption in sorted(set(captions))}
    keys = {caption: key_of("text", encoder_print, tokens.tolist()) for caption, tokens in ids.items()}
    for caption in progress("encoding captions", _own(list(ids), share)):
        if keys[caption] not in store:
            store[keys[caption]] = text_encoder(ids[caption].to(device))[0][0]
    _meet(share)
    return keys


def _own(items: Sequence, share: Share) -> Sequence:
    """This rank's run of neighbours: variants of one image stay together, so that it is decoded once."""
    rank, ranks = share
    return items[len(items) * rank // ranks : len(items) * (rank + 1) // ranks]


def _meet(share: Share) -> None:
    if share[1] > 1:
        dist.barrier()


Progress = Callable[[str, Sequence], Iterable]
"""(what is done, items) -> the items, while telling how far it is"""
