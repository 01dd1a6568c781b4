"""The state of every random generator of this process, as tensors and JSON: nothing in it is ever executed."""

import json
import random

import numpy as np
import torch
from torch import Tensor


def rng_state() -> dict[str, Tensor | bytes]:
    """States of torch, the current CUDA device (where there is one), Python and NumPy."""
    state: dict[str, Tensor | bytes] = {
        "torch": torch.get_rng_state(),
        "python": json.dumps(random.getstate()).encode(),
        "numpy": json.dumps(np.random.get_state(legacy=False), default=np.ndarray.tolist).encode(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Tensor | bytes]) -> None:
    """Continue where `rng_state` was taken.  CUDA's state is left alone where it is missing or there is no device."""
    torch.set_rng_state(_tensor(state["torch"]))
    version, words, gauss = json.loads(bytes(_bytes(state["python"])))
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(json.loads(_bytes(state["numpy"])))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def rng_text() -> dict[str, str]:
    """`rng_state` as what JSON can hold."""
    state = rng_state()
    return {n: bytes(v if isinstance(v, bytes) else v.cpu().numpy().tobytes()).hex() for n, v in state.items()}


def set_rng_text(text: dict[str, str]) -> None:
    """Continue where `rng_text` was taken."""
    found: dict[str, Tensor | bytes] = {name: bytes.fromhex(value) for name, value in text.items()}
    for name in {"torch", "cuda"} & text.keys():
        found[name] = torch.from_numpy(np.frombuffer(_bytes(found[name]), np.uint8).copy())
    set_rng_state(found)


def _tensor(value: Tensor | bytes) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _bytes(value: Tensor | bytes) -> bytes:
    assert isinstance(value, bytes)
    return value
