"""A folder of images with captions: NAME.txt beside NAME.png, or metadata.jsonl with `file_name` and `text`.

The ranks of a run share the reading: each decodes its part of the files, so that a broken one is known before training
starts, and all tell each other what they found. An image that cannot be used is left out with a line that names it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from apps.diffusion.data.buckets import Size
from apps.diffusion.data.images import SUFFIXES, Unusable, read_image
from apps.diffusion.text import is_text
from core.config import UserError
from core.files import replace_file

METADATA = "metadata.jsonl"
LEFT_OUT = "left_out.txt"
"""in a run's folder: the images that it cannot use, a line each"""


@dataclass(frozen=True)
class Picture:
    """An image that can be used."""

    path: Path
    caption: str
    digest: str
    """of the file's bytes"""
    size: Size
    """upright, in pixels"""


@dataclass(frozen=True)
class ImageFolder:
    folder: Path
    pictures: tuple[Picture, ...]
    refused: tuple[str, ...]
    """a line for each image that is left out, or that is described and not there"""

    def __len__(self) -> int:
        return len(self.pictures)


def image_files(folder: Path) -> list[Path]:
    """The images in a folder and in its subfolders, sorted; hidden files are none."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def read_folder(folder: Path, prompt: str | None = None, share: tuple[int, int] = (0, 1)) -> ImageFolder:
    """The images of a folder with their captions.

    prompt  the caption of every image: captions in the folder are not read
    share   (rank, ranks) of the process group that reads together

    Raises UserError for a folder without images, where none can be used, and for a metadata.jsonl that is none.
    """
    files = _listed(folder)
    captions = {} if prompt is not None else _metadata(folder)
    rank, ranks = share
    own: list[Picture | str] = [_read(path, folder, prompt, captions) for path in files[rank::ranks]]
    if rank == 0:
        there = {path.relative_to(folder).as_posix() for path in files}
        own += [f"{name}: {METADATA} describes it, and it is not there" for name in captions if name not in there]
    shares = [own]
    if ranks > 1:
        shares = [own] * ranks
        dist.all_gather_object(shares, own)
    found = [one for part in shares for one in part]
    pictures = sorted((one for one in found if isinstance(one, Picture)), key=lambda picture: picture.path)
    refused = sorted(one for one in found if isinstance(one, str))
    if not pictures:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise UserError(f"no image in {folder} can be used: {refused[0]}{more}")
    return ImageFolder(folder, tuple(pictures), tuple(refused))


def _listed(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give one that holds images ({', '.join(SUFFIXES)})")
    files = image_files(folder)
    if not files:
        raise UserError(f"{folder} holds no image; give a folder of images ({', '.join(SUFFIXES)})")
    return files


def _read(path: Path, folder: Path, prompt: str | None, captions: dict[str, str | None]) -> Picture | str:
    name = path.relative_to(folder)
    try:
        caption = prompt if prompt is not None else _caption(path, name, captions)
        image = read_image(path)
        return Picture(path, caption, hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest(), image.size)
    except Unusable as reason:
        return f"{name}: {reason}"


def _caption(path: Path, name: Path, captions: dict[str, str | None]) -> str:
    if name.as_posix() in captions:
        caption = captions[name.as_posix()]
        if caption is None:
            raise Unusable(f"its text in {METADATA} is null; describe it")
    else:
        beside = path.with_suffix(".txt")
        if not beside.is_file():
            raise Unusable(f"it has no caption; put one into {beside.name} or {METADATA}, or give one prompt for all")
        try:
            caption = beside.read_text(encoding="utf-8-sig")
        except ValueError:
            raise Unusable(f"{beside.name} is not UTF-8 text") from None
    caption = " ".join(caption.split())
    if not is_text(caption):
        raise Unusable("its caption holds half a character (a lone surrogate); write it anew")
    if not caption:
        raise Unusable("its caption is empty; describe it, or use --data.caption-dropout to train without captions")
    return caption


def _metadata(folder: Path) -> dict[str, str | None]:
    """file name -> caption of metadata.jsonl, of which there need not be one; None where it says null."""
    path = folder / METADATA
    if not path.is_file():
        return {}
    captions: dict[str, str | None] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            name, text = Path(entry["file_name"]).as_posix(), entry["text"]
            if text is not None and not isinstance(text, str):
                raise TypeError(text)
            captions[name] = text
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f'{path}, line {number} is not {{"file_name": …, "text": …}}; correct it, or remove the file'
            ) from None
    return captions


def report_refused(found: ImageFolder, listed: Path, most: int = 8) -> None:
    """A line for each image that is left out, at most so many, and how many there are.

    listed  the file that will have all of them (`write_refused`)
    """
    for line in found.refused[:most]:
        print(f"left out: {line}")
    if found.refused:
        more = f"; all of them are listed in {listed}" if len(found.refused) > most else ""
        print(f"{len(found.refused)} of {len(found) + len(found.refused)} images in {found.folder} left out{more}")


def write_refused(folders: Sequence[ImageFolder], path: Path) -> None:
    """A line for each image that is left out; an earlier run's list goes where there is none."""
    lines = [f"{one.folder}/{line}\n" for one in folders for line in one.refused]
    if lines:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, "".join(lines).encode(errors="backslashreplace"))
    else:
        path.unlink(missing_ok=True)
