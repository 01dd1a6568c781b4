"""`python -m benchmarks.gpu shown RESULT ...`: the table of what kernels have shown on a GPU, from results of a and b.

    python -m benchmarks.gpu shown benchmarks/results/gpu_a-h200.json benchmarks/results/gpu_b-kernels-h200.json …

It goes to core/kernels/shown/CHIP.json, from where `core.kernels.shown_right` takes it. A family is

    right     where a result of a has an error of at most what is allowed, in each of its formats
    speedup   torch's best time over ours, the least of the cases and passes (forward, backward, both) in results of b.
              torch's are its operators one by one, compiled, fused, and attention by default, by cuDNN and by flash

Of results that measure the same the last one given counts. A family that has not both is in none of the table, and is
said. All results are of one GPU.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.result import Result, Row, read
from core.config import UserError
from core.kernels import specs
from core.kernels.shown_right import FOLDER

CHIPS = {"H100": "sm_90", "H200": "sm_90", "GH200": "sm_90", "A100": "sm_80", "B200": "sm_100", "GB200": "sm_100"}
TORCH = ("eager", "torch.compile", "torch fused", "SDPA", "SDPA, cuDNN", "SDPA, flash")


def main(paths: Sequence[Path], out: Path = FOLDER) -> None:
    """Writes the table and says what is in it.  Raises UserError for results that it cannot be made of."""
    results = [read(path) for path in paths]
    device = _device(results, paths)
    families, lacking = families_of([row for result in results for row in result.figures])
    if not families:
        raise UserError(f"{', '.join(map(str, paths))}: no family has both; give a result of a and one of b")
    table = {"device": device, "results": [path.name for path in paths], "families": families}
    path = out / f"{_chip(device)}.json"
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")
    for name, one in families.items():
        taken = "taken" if one["right"] and one["speedup"] >= 1 else "not taken"
        print(f"{name:24} {'right' if one['right'] else 'NOT RIGHT':10} {one['speedup']:6.2f}  {taken}")
    for name, what in lacking.items():
        print(f"{name:24} {what}: left out")
    print(path)


def families_of(figures: Iterable[Row]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Of the families that have both: right and speedup; of the others: what they lack."""
    errors: dict[tuple[str, str], float] = {}
    times: dict[tuple, dict[str, float]] = {}
    for row in figures:
        name = str(row.case.get("kernel"))
        if "error" in row.numbers:
            errors[name, str(row.case["dtype"])] = row.numbers["error"].value
        elif "time" in row.numbers:
            measured = name, *(row.case[what] for what in ("case", "dtype", "pass"))
            times.setdefault(measured, {})[str(row.case["contender"])] = row.numbers["time"].value
    found, lacking = {}, {}
    for name, spec in specs().items():
        formats = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
        checked = any(of == name for of, _ in errors)
        speedups = [s for (of, *_), by in times.items() if of == name and (s := _speedup(by)) is not None]
        if checked and speedups:
            right = all(errors.get((name, dtype), float("inf")) <= 1 for dtype in formats)
            found[name] = {"right": right, "speedup": round(min(speedups), 3)}
        else:
            lacking[name] = "no check" if speedups else "no time beside torch's" if checked else "neither"
    return found, lacking


def _speedup(seconds_by: dict[str, float]) -> float | None:
    torch_s = [seconds_by[contender] for contender in TORCH if contender in seconds_by]
    return min(torch_s) / seconds_by["ours"] if torch_s and "ours" in seconds_by else None


def _device(results: Sequence[Result], paths: Sequence[Path]) -> str:
    of = {path.name: ", ".join(sorted(set(r.hardware["gpus"]))) or "no GPU" for r, path in zip(results, paths)}
    if len(set(of.values())) > 1 or "no GPU" in of.values():
        said = "; ".join(f"{name}: {gpu}" for name, gpu in of.items())
        raise UserError(f"{said}; the results of one table are of one GPU")
    return next(iter(of.values()))


def _chip(device: str) -> str:
    known = [chip for name, chip in CHIPS.items() if name in device.replace("-", " ").split()]
    if not known:
        raise UserError(f"{device}: which chip that is is not known here; it is one of {', '.join(CHIPS)}")
    return known[0]
