"""Tensors on disk, each file named by a digest of all that its content follows from.

What is asked for by the same key is the same, whoever wrote it and when; a change of the image, of the crop or of the
encoder's weights is another key. Files are written aside and renamed, so several ranks and runs may share a store. Each
is a safetensors file and, before it, the checksum of its bytes; one that is broken in any byte counts as missing.
"""

import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from core.files import crc32, replacing

HELD_BYTES = 1 << 30
_CRC_BYTES = 8


def key_of(*parts: Any) -> str:
    """A name for what follows from `parts` (JSON-able values)."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def fingerprint(module: nn.Module, config: Any) -> str:
    """A digest of a module's values, names and configuration."""
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Store:
    """A folder of such files; the last `held_bytes` bytes read stay in memory."""

    def __init__(self, folder: Path, held_bytes: int = HELD_BYTES):
        self.folder, self._room = folder, held_bytes
        self._held: OrderedDict[str, Tensor] = OrderedDict()

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.tensor"

    def __contains__(self, key: str) -> bool:
        """Return whether the file is there and whole."""
        try:
            self[key]
        except KeyError:
            return False
        return True

    def __getitem__(self, key: str) -> Tensor:
        """Raises KeyError where the file is missing or broken."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        try:
            raw = self.path(key).read_bytes()
            if crc32(memoryview(raw)[_CRC_BYTES:]).encode() != raw[:_CRC_BYTES]:
                raise KeyError(key)
            value = load(raw[_CRC_BYTES:])["value"]
        except (OSError, SafetensorError, KeyError):
            raise KeyError(key) from None
        self._hold(key, value)
        return value

    def __setitem__(self, key: str, value: Tensor) -> None:
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = save({"value": value.detach().cpu().contiguous()})
        with replacing(path) as aside:
            aside.write_bytes(crc32(raw).encode() + raw)

    def _hold(self, key: str, value: Tensor) -> None:
        self._held[key] = value
        self._room -= value.nbytes
        while self._room < 0:
            self._room += self._held.popitem(last=False)[1].nbytes
