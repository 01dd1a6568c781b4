"""Block sizes: a small table per kernel and chip, and an autotuner that is off until somebody asks for it.

A kernel hands `choose` its default (from its own table, by `chip()`) and the alternatives. The default is what runs;
`autotune(folder)` turns tuning on: the first call with a new key then times the alternatives, and the winner is kept in
`folder`, one JSON file a chip, for this and every later process.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

Blocks = dict[str, int]
"""Keyword arguments of a launch: constexpr block sizes, num_warps, num_stages."""

_target: str | None = None
_folder: Path | None = None
_winners: dict[str, Blocks] = {}


def chip() -> str:
    """The chip that is compiled for: sm_80, sm_90, sm_100, gfx942, …; sm_90 where there is none (the interpreter)."""
    if _target is not None:
        return _target
    if not torch.cuda.is_available():
        return "sm_90"
    if torch.version.hip:
        return torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


@contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """Inside, `chip()` is `name`."""
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


def choose(kernel: str, key: tuple, default: Blocks, others: Sequence[Blocks], run: Callable[[Blocks], None]) -> Blocks:
    """The blocks for a launch of `kernel`.

    key     what the best choice depends on: sizes (rounded up to powers of two by the caller), dtypes, flags
    others  alternatives to the default, for the autotuner
    run     launches with given blocks; called many times while tuning, so it must be repeatable
    """
    name = f"{kernel} {' '.join(map(str, key))}"
    if name not in _winners and _folder is not None and torch.cuda.is_available() and _target is None:
        _winners[name] = _fastest([default, *others], run)
        _keep(_folder / f"{chip()}.json")
    return _winners.get(name, default)


def _fastest(candidates: Sequence[Blocks], run: Callable[[Blocks], None]) -> Blocks:
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    times: list[tuple[float, int]] = []
    for index, blocks in enumerate(candidates):
        try:
            times.append((do_bench(lambda blocks=blocks: run(blocks), warmup=5, rep=20), index))
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
