"""Block sizes: a small table per kernel and chip, what is shipped for a chip, and the autotuner that makes it.

A kernel hands `tuned` its default (from its own table, by `chip()`) and what may be changed of it. What runs is what
`SHIPPED` holds for the chip, else the default. `python -m core.kernels.tune` alone turns tuning on (`autotune`): the
first call with a new key then times the alternatives for at most `LONGEST_S`, and the winner is kept in a folder, one
JSON file a chip. So no step and no request waits for it.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

Blocks = dict[str, int]
"""Keyword arguments of a launch: constexpr block sizes, num_warps, num_stages."""

LONGEST_S = 10.0
"""That choosing for one key may take, compiling included; alternatives that are left then are not tried."""

SHIPPED = Path(__file__).parent / "tuned"
"""Winners by chip that come with the package; there are none yet."""

_target: str | None = None
_folder: Path | None = None
_winners: dict[str, Blocks] = {}


def chip() -> str:
    """The chip that is compiled for: sm_80, sm_90, sm_100, gfx942, …; sm_90 where there is none (the interpreter)."""
    if _target is not None:
        return _target
    return _chip_of(torch.cuda.current_device()) if torch.cuda.is_available() else "sm_90"


@lru_cache
def _chip_of(device: int) -> str:
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """Let `chip()` be `name` inside."""
    global _target
    before, _target = _target, name
    try:
        yield
    finally:
        _target = before


def autotune(folder: Path | None) -> None:
    """Tune from now on, and keep winners in `folder`; None turns tuning off (winners that were read stay)."""
    global _folder
    _folder = folder
    if folder is not None and (path := folder / f"{chip()}.json").exists():
        _winners.update(json.loads(path.read_text()))


def winners() -> dict[str, Blocks]:
    """The block sizes chosen in this process, or read by `autotune`."""
    return dict(_winners)


@lru_cache
def _shipped(folder: Path, name: str) -> dict[str, Blocks]:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def tuned(kernel: str, key: tuple, default: Blocks, run: Callable[[Blocks], None], **values: Sequence[int]) -> None:
    """Run with the blocks that `choose` finds among the default and those with one of its values changed.

        tuned("softmax", (256, torch.bfloat16), {"BLOCK": 256, "num_warps": 4}, run, num_warps=(2, 4, 8))

    run  is called many times while tuning, so it must not read what it writes
    """
    others = [default | {name: n} for name, options in values.items() for n in options if n != default.get(name)]
    run(choose(kernel, key, default, others, run))


def choose(kernel: str, key: tuple, default: Blocks, others: Sequence[Blocks], run: Callable[[Blocks], None]) -> Blocks:
    """The blocks for a launch of `kernel`.

    key     what the best choice depends on: sizes (rounded up to powers of two by the caller), dtypes, flags
    others  alternatives to the default, for the autotuner
    run     launches with given blocks; called many times while tuning, so it must be repeatable
    """
    name = f"{kernel} {' '.join(map(str, key))}"
    default = _shipped(SHIPPED, chip()).get(name, default)
    if _target is not None:  # winners are those of the chip that is there
        return default
    if name not in _winners and _folder is not None and _can_time():
        _winners[name] = _fastest([default, *others], run)
        _keep(_folder / f"{chip()}.json")
    return _winners.get(name, default)


def _can_time() -> bool:
    return torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()


def _fastest(candidates: Sequence[Blocks], run: Callable[[Blocks], None]) -> Blocks:
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    times: list[tuple[float, int]] = []
    begin = time.monotonic()
    for index, blocks in enumerate(candidates):
        if times and time.monotonic() - begin > LONGEST_S:
            break
        try:
            taken: Any = do_bench(lambda blocks=blocks: run(blocks), warmup=5, rep=20)  # without quantiles one number
            times.append((taken, index))
        except OutOfResources:  # more shared memory than this chip has
            continue
    return candidates[min(times)[1]]


def _keep(path: Path) -> None:
    """Merge with what other processes found meanwhile; complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(path.read_text()) if path.exists() else {}
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(found | _winners, indent=1, sort_keys=True) + "\n")
    aside.replace(path)
