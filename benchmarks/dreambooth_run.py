"""One DreamBooth run in a process of its own, for `benchmarks.dreambooth`: ours, or diffusers' script, seen alike.

`python -m benchmarks.dreambooth_run FIGURES ours OPTION…` or `… FIGURES SCRIPT OPTION…` writes {"times_s": when each
optimizer step ended, "cpu_s": the process's CPU time, "rss_bytes", "device_bytes": the most by then} to FIGURES.
With --profile before FIGURES it adds {"profile": {kind: share of the CPU's time, "operators": of torch's, a step}} of
PROFILED steps, by torch.profiler.

A script is run as it is, from its file. Of torchvision it wants six transforms; where there is none that fits torch,
they are made of Pillow and numpy.
"""

import contextlib
import json
import runpy
import sys
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.optim.optimizer import register_optimizer_step_post_hook

from core.trace.account import resident_peak_bytes

WARM_UP = 3
"""steps that are neither timed nor profiled"""
PROFILED = 10
"""steps that are profiled, behind those"""
# An operator counts by its own time; what torch calls a span (of optimizers, and of the loader) by all that is in it.
_OPERATORS = {
    "convolutions and products": ("convolution", "aten::mm", "aten::addmm", "bmm", "scaled_dot_product"),
    "gradients and copies": ("AccumulateGrad", "aten::copy_"),
}
_SPANS = {"optimizer": "Optimizer.step#", "pictures": "enumerate(DataLoader)#"}


def main(argv: list[str]) -> int:
    is_profiled = argv[0] == "--profile"
    figures, what, *options = argv[is_profiled:]
    seen: dict[str, Any] = {"times_s": [], "cpu_s": [], "rss_bytes": 0, "device_bytes": 0}
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def note(*_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            seen["device_bytes"] = torch.cuda.max_memory_allocated()
        seen["rss_bytes"] = resident_peak_bytes()
        seen["times_s"].append(time.perf_counter())
        seen["cpu_s"].append(time.process_time())
        if is_profiled and len(seen["times_s"]) == WARM_UP:
            profiler.start()
        elif is_profiled and len(seen["times_s"]) == WARM_UP + PROFILED:
            profiler.stop()
            seen["profile"] = _profile(profiler.key_averages())

    hook = register_optimizer_step_post_hook(note)
    code = _ours(options) if what == "ours" else _script(Path(what), options)
    hook.remove()
    Path(figures).write_text(json.dumps(seen))
    return code


def _profile(events: Any) -> dict[str, float]:
    whole = sum(event.self_cpu_time_total for event in events)

    def share(times: Iterable[float]) -> float:
        return sum(times) / whole

    found = {
        kind: share(e.self_cpu_time_total for e in events if any(name in e.key for name in names))
        for kind, names in _OPERATORS.items()
    }
    for kind, span in _SPANS.items():
        found[kind] = share(e.cpu_time_total for e in events if e.key.startswith(span))
    return found | {"operators": sum(e.count for e in events if e.key.startswith("aten::")) / PROFILED}


def _ours(options: list[str]) -> int:
    from apps.diffusion.dreambooth import main as dreambooth

    return dreambooth(options)


def _script(path: Path, options: list[str]) -> int:
    try:
        import torchvision.transforms  # noqa: F401
    except (ImportError, RuntimeError):
        _settle_what_there_is()
        _stand_in()
    sys.argv = [str(path), *options]
    runpy.run_path(str(path), run_name="__main__")
    return 0


def _settle_what_there_is() -> None:
    """Libraries look once what is installed; they must not take the stand-in for it."""
    with contextlib.suppress(ImportError):
        import diffusers  # noqa: F401
        from transformers.utils import import_utils

        import_utils.is_torchvision_available()
        import_utils.is_torchvision_v2_available()


def _stand_in() -> None:
    """`torchvision.transforms`, as far as the script goes."""

    class Compose:
        def __init__(self, parts: list[Callable]):
            self.parts = parts

        def __call__(self, value: Any) -> Any:
            for part in self.parts:
                value = part(value)
            return value

    def resize(size: int, interpolation: Any) -> Callable[[Image.Image], Image.Image]:
        def apply(image: Image.Image) -> Image.Image:
            scale = size / min(image.size)
            return image.resize((round(image.width * scale), round(image.height * scale)), interpolation)

        return apply

    def crop(size: int) -> Callable[[Image.Image], Image.Image]:
        def apply(image: Image.Image) -> Image.Image:
            left, top = ((side - size) // 2 for side in image.size)
            return image.crop((left, top, left + size, top + size))

        return apply

    def to_tensor() -> Callable[[Image.Image], torch.Tensor]:
        return lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255

    def normalize(mean: list[float], std: list[float]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda pixels: (pixels - mean[0]) / std[0]

    transforms = types.ModuleType("torchvision.transforms")
    made = {"Compose": Compose, "Resize": resize, "CenterCrop": crop, "RandomCrop": crop, "ToTensor": to_tensor}
    made |= {"Normalize": normalize, "InterpolationMode": Image.Resampling}
    for name, value in made.items():
        setattr(transforms, name, value)
    package = types.ModuleType("torchvision")
    package.transforms = transforms  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules |= {"torchvision": package, "torchvision.transforms": transforms}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
