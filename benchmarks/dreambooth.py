"""DreamBooth beside diffusers' own script at equal settings: steps/s, memory, and what is learned, in turns.

taught  the pipeline that comes with the program learns the demo's subject from four pictures, U-Net and text encoder,
        8 + 8 pictures a step, the same class pictures, rate and steps: what its detector says of the subject and of
        its class afterwards; and in a run of its own, by torch.profiler, where the time of a step goes
narrow  v1's topology with random weights, a fifth of its width at 128 px on a CPU, as published at 512 px and in bf16
        on a GPU; 1 + 1 pictures a step, the U-Net alone or with the text encoder: steps/s and memory

Each run is a process of its own, watched from outside (`dreambooth_run`): when each optimizer step ended, and the most
memory by then. What comes before the first step and after the last is not timed.

The script is examples/dreambooth/train_dreambooth.py in the checkout of diffusers that --peers-source names, run by
--peers-python (which needs accelerate) or by this interpreter; without a checkout ours is measured alone.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from apps.diffusion.demo import __main__ as demo
from apps.diffusion.demo.captions import SUBJECT_CLASS, subject_prompt
from apps.diffusion.demo.detector import Detector, train_detector
from apps.diffusion.demo.metrics import drift_points, subject_figures
from apps.diffusion.demo.pictures import as_images, write_subject_folder
from apps.diffusion.demo.sizes import PIXELS
from apps.diffusion.generate import Sampling
from apps.diffusion.loading import load_pipeline
from apps.diffusion.pipeline import EMBEDDED, Pipeline, save_pipeline
from apps.diffusion.shapes import SD_V1, Shape
from benchmarks.dreambooth_run import PROFILED, WARM_UP
from benchmarks.result import ROOT, Measured, Number, Row, Target, versions
from benchmarks.run import Benchmark, Options, main
from benchmarks.stable_diffusion import write_random
from core.config import UserError, run_command

SCRIPT = Path("examples/dreambooth/train_dreambooth.py")
INSTANCE, CLASS = subject_prompt(), f"a {SUBJECT_CLASS}"
SEEDS = {"demo": 0, "figures": 1}
QUICK = replace(demo.SAMPLING, steps=2)


@dataclass(frozen=True)
class DreamBoothJob:
    """A training run that both can do."""

    weights: Path
    subject: Path
    class_images: Path
    pixels: int
    batch: int
    steps: int
    lr: float
    schedule: str
    train_text: bool
    bf16: bool = False


def measure(options: Options) -> Measured:
    script = None if options.peers_source is None else options.peers_source / SCRIPT
    if script is not None and not script.is_file():
        raise UserError(f"{options.peers_source} has no {SCRIPT}; give a checkout of diffusers")
    contenders = commands(script, options.peers_python)
    rows, targets = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for part in (taught, narrow):
            more_rows, more_targets = part(Path(scratch), contenders, options.quick)
            rows += more_rows
            targets += more_targets
    notes = [f"what is timed: steps from the {WARM_UP}th on; resident: the whole process, with what it imports"]
    notes.append("on a CPU both compute with one thread")
    if script is None:
        notes.append("diffusers' script is left out: --peers-source names a checkout of diffusers")
    return Measured(tuple(rows), tuple(targets), tuple(notes), versions("diffusers", "accelerate"))


# --- contenders -------------------------------------------------------------------------------------------------------

Command = Callable[[DreamBoothJob, Path], list[str]]
"""(job, folder of what it leaves) -> command line, without the file of figures"""


def commands(script: Path | None, python: Path | None) -> dict[str, Command]:
    if script is None:
        return {"ours": our_command}
    run = [str(python or sys.executable), str(script)]

    def theirs(job: DreamBoothJob, out: Path) -> list[str]:
        return [*run, *_their_options(job, out)]

    def prompts_once(job: DreamBoothJob, out: Path) -> list[str]:
        return [*theirs(job, out), "--pre_compute_text_embeddings"]

    return {"ours": our_command, "diffusers": theirs, "diffusers, prompts once": prompts_once}


def our_command(job: DreamBoothJob, out: Path) -> list[str]:
    given = {
        "model": job.weights,
        "instance-dir": job.subject,
        "instance-prompt": INSTANCE,
        "class-dir": job.class_images,
        "class-prompt": CLASS,
        "num-class-images": len(list(job.class_images.iterdir())),
        "data.resolution": job.pixels,
        "data.global-batch": job.batch,
        "data.cache": out.with_name(f"{out.name}-cache"),
        "optim.lr": job.lr,
        "optim.schedule.shape": job.schedule,
        **({} if job.schedule == "constant" else {"optim.schedule.final": 0}),
        "steps": job.steps,
        "precision": "bf16" if job.bf16 else "fp32",
        "checkpoint.every": 0,
        "out": out,
    }
    flags = ["--log.no-tensorboard", *["--train-text-encoder"] * job.train_text]
    return [sys.executable, "ours", *(f"--{name}={value}" for name, value in given.items()), *flags]


def _their_options(job: DreamBoothJob, out: Path) -> list[str]:
    given = {
        "pretrained_model_name_or_path": job.weights,
        "instance_data_dir": job.subject,
        "instance_prompt": INSTANCE,
        "class_data_dir": job.class_images,
        "class_prompt": CLASS,
        "num_class_images": len(list(job.class_images.iterdir())),
        "resolution": job.pixels,
        "train_batch_size": job.batch,
        "learning_rate": job.lr,
        "lr_scheduler": job.schedule,
        "lr_warmup_steps": 0,
        "max_train_steps": job.steps,
        "checkpointing_steps": 10**6,
        "output_dir": out,
        "mixed_precision": "bf16" if job.bf16 else "no",
        "seed": SEEDS["demo"],
    }
    flags = ["--with_prior_preservation", *["--train_text_encoder"] * job.train_text]
    return [*(f"--{name}={value}" for name, value in given.items()), *flags]


def watched(command: list[str], figures: Path, profile: bool = False) -> dict:
    """Run one contender and read what was seen of it.  Raises UserError with its last words where it fails."""
    python, *rest = command
    found_in = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # .gpu-pack may be in it
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": found_in, "OMP_NUM_THREADS": "1"}
    line = [python, "-m", "benchmarks.dreambooth_run", *["--profile"] * profile, str(figures), *rest]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not figures.exists():
        raise UserError(f"{' '.join(line[:6])} … failed: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
    return json.loads(figures.read_text())


def steps_per_s(run: dict) -> float:
    times = run["times_s"][WARM_UP - 1 :]
    return (len(times) - 1) / (times[-1] - times[0])


def cpu_per_step(run: dict) -> float:
    """CPU seconds of a step: a core that others use, too, changes them less than steps/s."""
    times = run["cpu_s"][WARM_UP - 1 :]
    return (times[-1] - times[0]) / (len(times) - 1)


def numbers_of(runs: list[dict]) -> dict[str, Number]:
    """Of the same run, some times: the median speed and the most memory."""
    numbers = {
        "steps": Number(statistics.median(map(steps_per_s, runs)), "1/s"),
        "cpu": Number(statistics.median(map(cpu_per_step, runs)), "s a step"),
        "resident": Number(max(run["rss_bytes"] for run in runs) / 1e6, "MB"),
    }
    if torch.cuda.is_available():
        numbers["device"] = Number(max(run["device_bytes"] for run in runs) / 1e6, "MB")
    return numbers


def _speed_targets(rows: Mapping[str, dict[str, Number]], what: str) -> list[Target]:
    """Beside the faster of the script's ways."""
    theirs = [numbers["steps"].value for name, numbers in rows.items() if name != "ours"]
    if not theirs:
        return []
    return [Target(f"steps/s beside the script's, {what}", 1.5, rows["ours"]["steps"].value / max(theirs))]


# --- what is learned --------------------------------------------------------------------------------------------------


def taught(scratch: Path, contenders: Mapping[str, Command], quick: bool) -> tuple[list[Row], list[Target]]:
    folder = scratch / "taught"
    pipeline = load_pipeline(EMBEDDED)
    detector = train_detector(pipeline.vae, num_pictures=128, epochs=1) if quick else train_detector(pipeline.vae)
    steps = WARM_UP + 2 if quick else demo.DemoConfig().steps
    job = DreamBoothJob(
        # the script wants them in fp32
        weights=save_pipeline(pipeline, folder / "weights"),
        subject=write_subject_folder(folder / "subject", SEEDS["demo"]),
        class_images=_paint_class(
            pipeline, folder / "class", *((2, QUICK) if quick else (demo.DemoConfig().class_images, demo.SAMPLING))
        ),
        pixels=PIXELS,
        batch=demo.BATCH,
        steps=steps,
        lr=demo.DemoConfig().lr,
        schedule="cosine",
        train_text=True,
    )
    looked = (1, QUICK) if quick else (4, demo.SAMPLING)
    before = _figures(pipeline, detector, *looked)
    case = {"part": "taught", "trained": "U-Net, text encoder"}
    found, profiled = {}, []
    for name in ("ours", "diffusers"):
        if name not in contenders:
            continue
        profiled.append(Row(case | {"part": "profiled", "by": name}, _profiled(contenders[name], job, folder / name)))
        out = folder / name
        found[name] = numbers_of([watched(contenders[name](job, out), folder / f"{name}.json")])
        after = _figures(load_pipeline(out), detector, *looked)
        found[name] |= {part: Number(getattr(after, part), "") for part in ("seen", "unseen", "leak")}
        found[name]["drift"] = Number(drift_points(before, after), "points")
    rows = [Row(case | {"by": name}, numbers) for name, numbers in found.items()]
    return rows + profiled, _speed_targets(found, "tiny, U-Net and text encoder")


def _profiled(command: Command, job: DreamBoothJob, folder: Path) -> dict[str, Number]:
    out = folder.with_name(f"{folder.name}-profiled")
    run = watched(command(replace(job, steps=WARM_UP + PROFILED), out), out.with_suffix(".json"), profile=True)
    operators = run["profile"].pop("operators")
    shares = {kind: Number(100 * share, "%") for kind, share in run["profile"].items()}
    return {"operators": Number(operators, "a step"), **shares}


def _paint_class(pipeline: Pipeline, folder: Path, count: int, sampling: Sampling) -> Path:
    folder.mkdir(parents=True)
    painted = demo.painter(pipeline, sampling)([CLASS] * count, SEEDS["demo"])
    for number, picture in enumerate(as_images(painted)):
        picture.save(folder / f"{number:03d}.png")
    return folder


def _figures(pipeline: Pipeline, detector: Detector, repeats: int, sampling: Sampling) -> demo.SubjectFigures:
    return subject_figures(demo.painter(pipeline, sampling), detector, repeats=repeats, seed=SEEDS["figures"])


# --- speed and memory of v1's topology --------------------------------------------------------------------------------


def narrow(scratch: Path, contenders: Mapping[str, Command], quick: bool) -> tuple[list[Row], list[Target]]:
    folder = scratch / "narrow"
    shape, job, name, rounds = narrow_job(folder, quick)
    write_inputs(folder, shape, job.pixels)
    rows, targets = [], []
    for train_text in (False,) if quick else (False, True):  # `taught` trains it, too
        trained = "U-Net, text encoder" if train_text else "U-Net"
        # with a text encoder that learns there is nothing to do once; where it does not, the script's better way counts
        left_out = "diffusers, prompts once" if train_text else "diffusers"
        taking_part = {name: command for name, command in contenders.items() if name != left_out}
        runs: dict[str, list[dict]] = {name: [] for name in taking_part}
        for turn in range(rounds):
            for index, (by, command) in enumerate(taking_part.items()):
                out = folder / f"{train_text}-{turn}-{index}"
                line = command(replace(job, train_text=train_text), out)
                runs[by].append(watched(line, out.with_suffix(".json")))
        found = {by: numbers_of(of) for by, of in runs.items()}
        rows += [Row({"part": name, "trained": trained, "by": by}, numbers) for by, numbers in found.items()]
        targets += _speed_targets(found, f"{name}, {trained}")
    return rows, targets


def narrow_job(folder: Path, quick: bool) -> tuple[Shape, DreamBoothJob, str, int]:
    unet = {"block_out_channels": [64, 128, 256, 256], "cross_attention_dim": 128, "sample_size": 16}
    text = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "projection_dim": 128}
    vae = {"block_out_channels": [32, 64, 128, 128], "sample_size": 128}
    small = Shape(SD_V1.unet | unet, SD_V1.vae | vae, SD_V1.text_encoder | text)
    inputs = folder / "weights", folder / "subject", folder / "class"
    job = DreamBoothJob(
        *inputs, pixels=128, batch=1, steps=WARM_UP + 12, lr=5e-6, schedule="constant", train_text=False
    )
    if quick:
        smallest = {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1, "sample_size": 8}
        shape = replace(small, unet=small.unet | smallest)
        return shape, replace(job, pixels=64, steps=WARM_UP + 2), "tiniest", 1
    if torch.cuda.is_available():
        return SD_V1, replace(job, pixels=512, steps=WARM_UP + 30, bf16=True), "v1, 512 px", 3
    return small, job, "narrow, 128 px", 2


def write_inputs(folder: Path, shape: Shape, pixels: int) -> None:
    """weights, subject and class images."""
    folder.mkdir(parents=True)
    write_random(shape, folder / "weights", folder / "tokenizer")
    write_subject_folder(folder / "subject", size=pixels)
    (folder / "class").mkdir()
    generator = np.random.default_rng(0)
    for number in range(4):
        values = generator.integers(0, 256, (pixels, pixels, 3)).astype(np.uint8)
        Image.fromarray(values).save(folder / "class" / f"{number}.png")


MEASURES = (
    "apps/diffusion",
    "core/train",
    "core/optim",
    "core/parallel",
    "core/placement",
    "core/kernels",
    "benchmarks/dreambooth_run.py",
    "benchmarks/dreambooth.py",
)
BENCHMARK = Benchmark("dreambooth", "DreamBooth beside diffusers' script", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="dreambooth"), sys.argv[1:]))
