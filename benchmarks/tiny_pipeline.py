"""The pipeline that comes with the program, and DreamBooth into it, by the demo's detector.

1. What it paints of everything that captions can say, at the settings of the demo and at those of `diffusion sample`.
2. `python -m apps.diffusion.demo`, with class pictures (prior preservation) and without, at equal seeds and steps.
3. The VAE's ceiling beside: the same figures of drawn pictures that went through it.

--full takes three seeds of DreamBooth instead of one.
"""

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from apps.diffusion.demo.__main__ import SAMPLING, DemoConfig, painter
from apps.diffusion.demo.__main__ import run as demo
from apps.diffusion.demo.detector import Detector, train_detector
from apps.diffusion.demo.metrics import Attributes, ceiling, pipeline_attributes
from apps.diffusion.generate import Sampling
from apps.diffusion.loading import load_pipeline
from apps.diffusion.pipeline import EMBEDDED
from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import run_command

MOST_BYTES = 6_000_000
MOST_CPU_S = 120.0
_SETTINGS = {"demo": SAMPLING, "diffusion sample": Sampling()}
_UNITS = {"psnr_db": "dB", "drift_points": "points", "dreambooth_cpu_s": "s", "dreambooth_wall_s": "s"}


def measure(options: Options) -> Measured:
    pipeline = load_pipeline(EMBEDDED)
    detector = (
        train_detector(pipeline.vae, num_pictures=128, epochs=1) if options.quick else train_detector(pipeline.vae)
    )
    painted = {}
    for name, sampling in list(_SETTINGS.items())[: 1 if options.quick else None]:
        paint = painter(pipeline, replace(sampling, steps=2) if options.quick else sampling)
        painted[name] = pipeline_attributes(paint, detector, repeats=1 if options.quick else 2, seed=5)
    most = ceiling(pipeline.vae, detector, repeats=1 if options.quick else 2, seed=7)
    learned = {
        prior: [dreambooth(prior, seed, detector, options) for seed in _seeds(options)]
        for prior in ((True,) if options.quick else (True, False))
    }
    rows = [
        *(
            _row({"pictures": which, "settings": name}, asdict(a))
            for name, f in painted.items()
            for which, a in f.items()
        ),
        _row({"pictures": "drawn, after the VAE", "settings": "none"}, most),
        *(
            _row({"DreamBooth": _with(prior), "seed": seed}, figures)
            for prior, found in learned.items()
            for seed, figures in enumerate(found)
        ),
    ]
    return Measured(tuple(rows), (*_painted(painted["demo"]["all"]), *_learned(learned)))


def _seeds(options: Options) -> range:
    return range(3 if options.full else 1)


def _with(prior: bool) -> str:
    return "with class pictures" if prior else "without"


def _row(case: Mapping[str, str | int], figures: Mapping[str, float]) -> Row:
    return Row(dict(case), {name: Number(value, _UNITS.get(name, "")) for name, value in figures.items()})


def dreambooth(prior: bool, seed: int, detector: Detector, options: Options) -> dict[str, float]:
    """The figures of one run of the demo."""
    quick: dict[str, Any] = {"steps": 2, "class_images": 2, "repeats": 1, "sampling_steps": 1} if options.quick else {}
    with tempfile.TemporaryDirectory() as folder:
        summary = demo(DemoConfig(out=Path(folder, "demo"), prior=prior, seed=seed, **quick), detector)
    after = summary["after"]
    return {
        "subject_as_seen": min(seen["all_three"] for seen in after["subject_seen"].values()),
        "things_as_seen": after["things_seen"]["all_three"],
        "seen": after["seen"],
        "unseen": after["unseen"],
        "leak": after["leak"],
        "class_all_three_before": summary["before"]["class_attributes"]["all_three"],
        "class_all_three_after": after["class_attributes"]["all_three"],
        **{name: summary[name] for name in ("drift_points", "dreambooth_cpu_s", "dreambooth_wall_s")},
    }


def _painted(found: Attributes) -> list[Target]:
    size = sum(path.stat().st_size for path in EMBEDDED.rglob("*") if path.is_file())
    return [
        *(Target(f"{name} as the caption says", 0.9, getattr(found, name)) for name in ("shape", "colour", "ground")),
        Target("6 MB / the pipeline's files", 1.0, MOST_BYTES / size),
    ]


def _learned(learned: Mapping[bool, list[dict[str, float]]]) -> list[Target]:
    """Of means over the seeds."""
    kept, lost = (
        {name: fmean(figures[name] for figures in found) for name in found[0]}
        for found in (learned[True], learned.get(False, learned[True]))  # --quick, which measures nothing, has one
    )
    return [
        Target("subject's probability, on grounds it was seen on", 0.9, kept["seen"]),
        Target("subject's probability, on other grounds", 0.6, kept["unseen"]),
        Target("subject, called what it is by a viewer, on the worst ground", 0.9, kept["subject_as_seen"]),
        Target("1 - drift of everything, as seen, with class pictures", 0.95, 1 - kept["drift_points"] / 100),
        Target("1 - leak into the class, with class pictures", 0.97, 1 - kept["leak"]),
        Target("leak into the class or drift, without", 0.3, max(lost["leak"], lost["drift_points"] / 100)),
        Target("120 s / CPU time of DreamBooth", 1.0, MOST_CPU_S / kept["dreambooth_cpu_s"]),
    ]


MEASURES = (
    "apps/diffusion",
    "benchmarks/tiny_pipeline.py",
)
BENCHMARK = Benchmark("tiny_pipeline", "The pipeline that comes with the program", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="tiny_pipeline"), sys.argv[1:]))
