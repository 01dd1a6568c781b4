"""Damaging checkpoints, and giving what was changed the checksums of what it is now, as a forger would."""

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core.files import crc32, signed, stamp


def edit_json(path: Path, edit) -> None:
    content = json.loads(path.read_bytes())
    edit(content)
    path.write_text(json.dumps(content))


def sign_again(step: Path) -> None:
    """Right checksums for whatever a step's folder holds."""

    def edit(content) -> None:
        for tensor in content.values():
            for chunk in tensor["chunks"]:
                raw = (step / chunk["file"]).read_bytes()
                chunk["crc32"] = crc32(raw[chunk["first_byte"] : chunk["first_byte"] + chunk["bytes"]])

    edit_json(step / "tensors.json", edit)
    record = json.loads((step / "complete.json").read_bytes())
    del record["crc32"]
    record["files"] = {name: stamp(step / name) for name in record["files"]}
    (step / "complete.json").write_bytes(signed(record))


@contextmanager
def flipped(path: Path, at: int, mask: int) -> Iterator[None]:
    """One byte of a file is another, until the end of the block."""
    raw = path.read_bytes()
    path.write_bytes(raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :])
    try:
        yield
    finally:
        path.write_bytes(raw)


def flips(files: list[Path], num_flips: int, seed: int) -> Iterator[tuple[Path, int, int]]:
    """(file, byte, bits) drawn at random, every file at least once where there are flips enough."""
    draw = random.Random(seed)
    for number in range(num_flips):
        path = files[number] if number < len(files) else draw.choice(files)
        yield path, draw.randrange(path.stat().st_size), draw.randrange(1, 256)


def without_checksums(step: Path) -> None:
    """Turn a checkpoint into one of format 1, as earlier versions wrote it."""

    def edit(content) -> None:
        for tensor in content.values():
            for chunk in tensor["chunks"]:
                del chunk["crc32"]

    edit_json(step / "tensors.json", edit)
    record = json.loads((step / "complete.json").read_bytes())
    del record["crc32"], record["files"]
    (step / "complete.json").write_text(json.dumps(record | {"format": 1}, indent=1))


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target
