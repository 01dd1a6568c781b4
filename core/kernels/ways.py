"""The fastest of several ways to compute a product, as it was measured on this device; else by a rule.

    way("int4_matmul", rows, (N, K), rule)             the name to take
    measure("int4_matmul", rows, (N, K), launches)     times them; from then on `way` names the fastest
    keep(folder, device), load(folder, device)         for later processes

Nothing is measured unless `measure` is called, which is done when a model is loaded and never while it serves. Results
are kept by the device's name, for those of one chip differ in clocks and memory, and by torch's and triton's versions.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from core.kernels.language import INSTALLED

ROWS = (16, 64, 256, 1024, 4096)
"""Rows of x for which ways are measured; others take the nearest that is not smaller, more than all the last."""

_found: dict[str, str] = {}


def default_folder() -> Path:
    """The folder of results: the user's, not a project's."""
    return Path.home() / ".cache" / "megalith" / "products"


def rows_measured(rows: int) -> int:
    """The number of rows whose measurement counts for so many."""
    return next((n for n in ROWS if rows <= n), ROWS[-1])


def way(kernel: str, rows: int, key: tuple, rule: str) -> str:
    """The measured one for these rows and this key (sizes, formats); `rule` where none was measured."""
    return _found.get(_name(kernel, rows_measured(rows), key), rule)


def measure(kernel: str, rows: int, key: tuple, ways: Mapping[str, Callable[[], object]]) -> str:
    """The fastest of the ways, which are launches of one product; from now on `way` says so."""
    name = _name(kernel, rows, key)
    if name not in _found:
        _found[name] = min(ways, key=lambda one: _milliseconds(ways[one]))
    return _found[name]


def load(folder: Path, device: torch.device) -> bool:
    """Take over what was kept for a device of this name by these versions. Returns whether there was something.

    A file that is damaged, or that cannot be read, is as none: what it held is measured again.
    """
    try:
        kept = json.loads(_path(folder, device).read_text())
        made_by, ways = kept["made_by"], dict(kept["ways"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if made_by != _made_by(device):
        return False
    _found.update(ways)
    return True


def keep(folder: Path, device: torch.device) -> Path:
    """Write all that was found, complete or not at all; with what others found meanwhile."""
    path = _path(folder, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    load(folder, device)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps({"made_by": _made_by(device), "ways": _found}, indent=1, sort_keys=True) + "\n")
    aside.replace(path)
    return path


def known() -> int:
    """The number of choices that were measured."""
    return len(_found)


def forget() -> None:
    """Take the rules again."""
    _found.clear()


def _name(kernel: str, rows: int, key: tuple) -> str:
    return f"{kernel} {rows} {' '.join(str(part).removeprefix('torch.') for part in key)}"


def _path(folder: Path, device: torch.device) -> Path:
    return folder / f"{device_name(device).replace(' ', '-').replace('/', '-')}.json"


def device_name(device: torch.device) -> str:
    """The device's name, as its maker calls it."""
    return torch.cuda.get_device_name(device)


def _made_by(device: torch.device) -> dict[str, str]:
    from core.kernels.language import triton

    version = triton.__version__ if INSTALLED else ""
    return {"device": device_name(device), "torch": torch.__version__, "triton": version}


def _milliseconds(launch: Callable[[], object]) -> float:
    """Median of some launches; infinite where the device refuses."""
    from triton.testing import do_bench

    try:
        found = do_bench(launch, warmup=5, rep=20, return_mode="median")
    except RuntimeError:  # such as sizes that a library does not take
        return float("inf")
    assert isinstance(found, float)
    return found
