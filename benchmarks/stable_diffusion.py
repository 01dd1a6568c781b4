"""Stable Diffusion: device memory of training and sampling beside the published tables, and what runs on this CPU.

planned   bytes of the published models at full size, by `apps.diffusion.footprint`: the real modules on tensors
          without memory, and Gemini's planner. Beside them Colossal-AI's figures: training of v1 on 4 A100s, of v2
          with flash attention, low-memory training on a 3080, DreamBooth on 4 A100s, sampling in 8 bits
counted   a narrow pipeline's training step as it ran, byte by byte, beside its plan
sampled   pictures of the narrow pipeline by this program and by diffusers' own pipeline, from the same noise, and
          with weights in 8 bits
latency   v1's U-Net on this CPU in fp32, bf16 and 8 bits
"""

import copy
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from apps.diffusion import finetune
from apps.diffusion.demo.captions import words
from apps.diffusion.demo.sizes import write_tokenizer
from apps.diffusion.footprint import footprint, int8_bytes
from apps.diffusion.generate import PictureJob, Sampling, generate
from apps.diffusion.loading import load_pipeline
from apps.diffusion.pipeline import EMBEDDED, Pipeline, build_text_encoder, build_unet, build_vae, save_pipeline
from apps.diffusion.plan_config import RECIPES, DiffusionPlanConfig
from apps.diffusion.samplers import draw_noise
from apps.diffusion.shapes import SD_V1, Shape, meta_modules
from benchmarks.result import Measured, Number, Row, Target, versions
from benchmarks.run import Benchmark, Options, main
from core.config import run_command
from core.gemini.config import GeminiConfig
from core.optim.build import OptimConfig
from core.parallel.recompute import RecomputeConfig
from core.quant import quantize, stored_bytes
from core.trace.account import MemoryAccount

Part = tuple[list[Row], list[Target]]


def measure(options: Options) -> Measured:
    rows, targets = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_narrow(Path(scratch))
        tables = narrow_table(folder) if options.quick else TABLES
        for part in (planned(tables), counted(folder, options.quick), sampled(options.quick)):
            rows += part[0]
            targets += part[1]
    more_rows, more_targets = latency(options.quick)
    return Measured(tuple(rows + more_rows), tuple(targets + more_targets), NOTES, versions("diffusers"))


NOTES = (
    "planned: bytes that are alive together, without the CUDA context and the allocator's loss (about 1 GB); the "
    "published figures were measured. Sampling: one picture of 512 x 512 with guidance; theirs do not say how many.",
    "planned training: bf16 with fp32 masters, flash attention. Rows beside a stock run keep every activation, "
    "replicate and take AdamW; the others recompute blocks, with 8-bit AdamW, over 4 devices under ZeRO 3, on one "
    "under Gemini's budget: 'at least' is the smallest that such a step has. Rows with a target are recipes: full_6gb, "
    "full_5gb, dreambooth_6gb, lora_4gb.",
    "sampled, latency: in turns, the least of the rounds; latency with random weights; int8 has fp32 activations.",
)


# --- planned ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A row of a table: what was run, in GB on a device, and the setting of ours that stands beside it."""

    case: str
    theirs: str
    gigabytes: float | None
    ours: DiffusionPlanConfig
    wanted_gb: float | None = None


def _stock(model: str, batch: int, precision: Any = "bf16") -> DiffusionPlanConfig:
    return DiffusionPlanConfig(task="train", model=model, batch=batch, precision=precision)


def _low(model: str, batch: int, budget: str | None = None, **more: Any) -> DiffusionPlanConfig:
    given: dict[str, Any] = {"recompute": RecomputeConfig("full"), "optim": OptimConfig(name="adamw8bit")}
    return DiffusionPlanConfig(task="train", model=model, batch=batch, gemini=GeminiConfig(budget), **(given | more))


def _sample(precision: Any, scheme: Any = "none") -> DiffusionPlanConfig:
    return DiffusionPlanConfig(model="sd_v1", precision=precision, scheme=scheme)


def _recipe(name: str, model: str = "sd_v1") -> DiffusionPlanConfig:
    """As `diffusion plan --recipe NAME` has it."""
    return replace(RECIPES[name](), model=model)


_DDP: dict[str, Any] = {"nproc": 4}
_ZERO: dict[str, Any] = {"nproc": 4, "zero": 3}
TABLES = (
    Published("v1, sample, fp32", "stock", 7.68, _sample("fp32")),
    Published("v1, sample, fp32-int8", "Colossal-AI", 5.73, _sample("fp32", "int8")),
    Published("v1, sample, fp16", "stock", 3.52, _sample("fp16")),
    Published("v1, sample, fp16-int8", "Colossal-AI", 3.10, _sample("fp16", "int8"), 2.5),
    Published("v1, 2 on one device", "Colossal-AI, 3080", 5.9, _low("sd_v1", 2, "5.9GB")),
    Published("v1, 8 a device of 4, fp32", "stock", 67.0, _stock("sd_v1", 8, "fp32")),
    Published("v1, 16 a device of 4", "stock", 65.0, _stock("sd_v1", 16)),
    Published("v1, 16 a device of 4", "Colossal-AI", 30.0, _low("sd_v1", 16, **_ZERO)),
    Published("v1, 32 a device of 4", "Colossal-AI", 54.0, _low("sd_v1", 32, **_ZERO)),
    Published("v1, 64 a device of 4", "Colossal-AI", 78.2, _low("sd_v1", 64, **_ZERO)),
    Published("v1, DreamBooth, 8 a device of 4", "DDP", 41.97, replace(_stock("sd_v1", 8), **_DDP)),
    Published("v1, DreamBooth, 8 a device of 4", "Colossal-AI", 29.36, _low("sd_v1", 8, **_ZERO)),
    Published("v2, 16 on one device", "DDP, flash", 23.0, _low("sd_v2_base", 16, recompute=RecomputeConfig())),
    Published("v2, 16 on one device", "Colossal-AI, flash", 5.6, _recipe("full_6gb", "sd_v2_base"), 5.6),
    Published("v2, 2 on one device", "Colossal-AI, 3080 (v1)", 5.9, _recipe("full_5gb", "sd_v2_base"), 5.0),
    Published("v1, DreamBooth 1 + 1, text encoder too", "diffusers, README", 24.0, _recipe("dreambooth_6gb"), 6.0),
    Published("v1, DreamBooth 1 + 1, LoRA", "-", None, _recipe("lora_4gb"), 4.0),
)


def narrow_table(folder: Path) -> tuple[Published, ...]:
    """For --quick: tracing v1 takes a minute."""
    return (Published("narrow, 4 on one device", "-", None, _low(str(folder / "narrow"), 4, "32MiB")),)


def planned(tables: Sequence[Published]) -> Part:
    rows, targets = [], []
    for published in tables:
        found = footprint(published.ours)
        numbers = {"ours": Number(found.peak_bytes / 1e9, "GB")}
        if published.gigabytes is not None:
            numbers["published"] = Number(published.gigabytes, "GB")
        if found.least_bytes:
            numbers |= {"at least": Number(found.least_bytes / 1e9, "GB"), "host": Number(found.host_bytes / 1e9, "GB")}
        rows.append(Row({"part": "planned", "case": published.case, "beside": published.theirs}, numbers))
        if published.wanted_gb is not None:
            what = f"{published.case}: {published.wanted_gb} GB / ours, planned"
            targets.append(Target(what, 1.0, published.wanted_gb / (found.peak_bytes / 1e9)))
    unet = meta_modules(SD_V1)["unet"]
    in_fp32 = sum(parameter.nbytes for parameter in unet.parameters())
    for by, kinds in (("ours", (nn.Linear, nn.Conv2d)), ("linear layers only, as the peers", (nn.Linear,))):
        share = int8_bytes(unet, kinds) / in_fp32
        rows.append(
            Row({"part": "planned", "case": "v1, U-Net in int8", "beside": by}, {"weights": Number(share, "of fp32")})
        )
    return rows, [*targets, Target("26 % / weights of int8, v1", 1.0, 0.26 * in_fp32 / int8_bytes(unet))]


# --- a narrow pipeline ------------------------------------------------------------------------------------------------

_NARROW = {"block_out_channels": [32, 64, 128, 128], "cross_attention_dim": 32, "sample_size": 8}
_PIXELS = 64


def write_random(shape: Shape, folder: Path, tokenizer_folder: Path) -> Path:
    """A pipeline of this shape with random weights, for the demo's words."""
    tokenizer = write_tokenizer(words(), tokenizer_folder)
    ids = {"vocab_size": len(tokenizer), "max_position_embeddings": tokenizer.model_max_length}
    ids |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(0)
    modules = build_unet(shape.unet), build_vae(shape.vae), build_text_encoder(shape.text_encoder | ids)
    return save_pipeline(Pipeline(*modules, tokenizer, shape.schedule), folder)


def write_narrow(folder: Path) -> Path:
    """v1's topology at a tenth of its width with random weights, and four pictures with captions."""
    vae = {"block_out_channels": [32, 64, 128, 128], "sample_size": _PIXELS}
    text = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "projection_dim": 32}
    shape = Shape(SD_V1.unet | _NARROW, SD_V1.vae | vae, SD_V1.text_encoder | text)
    write_random(shape, folder / "narrow", folder / "tokenizer")
    (folder / "pictures").mkdir()
    generator = np.random.default_rng(0)
    for number in range(4):
        pixels = generator.integers(0, 256, (_PIXELS, _PIXELS, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "pictures" / f"{number}.png")
        (folder / "pictures" / f"{number}.txt").write_text("a red circle")
    return folder


@dataclass(frozen=True)
class Setting:
    """A training run of the narrow pipeline, and the plan of it."""

    name: str
    argv: tuple[str, ...] = ()
    plan: dict[str, Any] = field(default_factory=dict)


SETTINGS = (
    Setting("all activations"),
    Setting("recomputed", ("--recompute.mode", "full"), {"recompute": RecomputeConfig("full")}),
    Setting("8-bit AdamW", ("--optim.name", "adamw8bit"), {"optim": OptimConfig(name="adamw8bit")}),
    Setting("text encoder too", ("--train-text-encoder",), {"train_text_encoder": True}),
    Setting(
        "Gemini, 32 MiB",
        ("--gemini.budget", "32MiB", "--recompute.mode", "full"),
        {"gemini": GeminiConfig("32MiB"), "recompute": RecomputeConfig("full")},
    ),
)


def counted(folder: Path, quick: bool) -> Part:
    """Planned and counted bytes of a step of 4 rows of 64 px in fp32."""
    rows = []
    for number, setting in enumerate(SETTINGS[:1] if quick else SETTINGS):
        out = folder / f"run-{number}"
        options = {"model": folder / "narrow", "data.images": folder / "pictures", "data.global-batch": 4, "steps": 2}
        options |= {"out": out, "checkpoint.every": 0, "device": "cpu"}
        argv = [f"--{name}={value}" for name, value in options.items()]
        finetune.main([*argv, "--log.no-tensorboard", *setting.argv])
        summary = json.loads((out / "summary.json").read_text())
        plan = DiffusionPlanConfig(
            task="train", model=str(folder / "narrow"), batch=4, precision="fp32", **setting.plan
        )
        numbers = {
            "planned": Number(footprint(plan).peak_bytes / 1e6, "MB"),
            "counted": Number(summary["device_peak_bytes"] / 1e6, "MB"),
        }
        rows.append(Row({"part": "counted", "case": f"narrow, 4 rows, {setting.name}", "beside": "-"}, numbers))
    return rows, []


# --- sampling ---------------------------------------------------------------------------------------------------------

_PROMPTS = ("a red circle on a white ground", "a blue star on a black ground", "a green square on a gray ground")
_JOBS = [PictureJob(prompt, seed) for prompt in _PROMPTS for seed in range(4)]


def sampled(quick: bool) -> Part:
    """Seconds and bytes of twelve pictures (quick: one) by each, and how near they are to each other."""
    steps, rounds, jobs = (2, 1, _JOBS[:1]) if quick else (25, 3, _JOBS)
    plain, eighth = load_pipeline(EMBEDDED), load_pipeline(EMBEDDED)
    quantize(eighth.unet, "int8")
    theirs = _diffusers(plain)
    sampling = Sampling("ddim", steps, 7.5)
    contenders: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: _pictures(plain, sampling, jobs),
        "diffusers": lambda: _their_pictures(theirs, plain, steps, jobs),
        "ours, int8": lambda: _pictures(eighth, sampling, jobs),
    }
    seconds, peaks, pictures = dict.fromkeys(contenders, float("inf")), {}, {}
    for turn in range(rounds + 1):
        for name, draw in contenders.items():
            if turn == 0:  # counting takes time: not timed
                with torch.no_grad(), MemoryAccount() as account:
                    pictures[name] = draw()
                peaks[name] = account.peak_bytes
                continue
            started = time.perf_counter()
            draw()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    rows = [
        Row(
            {
                "part": "sampled",
                "case": f"tiny, {len(jobs)} of {plain.image_size[0]} px, {steps} steps",
                "beside": name,
            },
            {
                "time": Number(seconds[name], "s"),
                "counted": Number(peaks[name] / 1e6, "MB"),
                "to ours": Number(min(psnr(pictures[name], pictures["ours"]), 200.0), "dB"),
            },
        )
        for name in contenders
    ]
    found = psnr(pictures["ours, int8"], pictures["ours"])
    return rows, [Target("PSNR of int8 to fp32 at the same seeds / 45 dB, tiny", 1.0, found / 45)]


def _pictures(pipeline: Pipeline, sampling: Sampling, jobs: Sequence[PictureJob]) -> Tensor:
    return torch.stack([picture for _, picture in generate(pipeline, jobs, sampling, len(jobs))])


def _diffusers(pipeline: Pipeline) -> Any:
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    parts = pipeline.modules | {"tokenizer": pipeline.tokenizer, "safety_checker": None, "feature_extractor": None}
    scheduler = DDIMScheduler.from_config(dict(pipeline.schedule))
    theirs = StableDiffusionPipeline(**parts, scheduler=scheduler, requires_safety_checker=False)
    theirs.set_progress_bar_config(disable=True)
    return theirs


def _their_pictures(theirs: Any, pipeline: Pipeline, steps: int, jobs: Sequence[PictureJob]) -> Tensor:
    shape = (pipeline.latent_channels, *(side // pipeline.factor for side in pipeline.image_size))
    noise = draw_noise(shape, [torch.Generator().manual_seed(job.seed) for job in jobs])
    prompts = [job.prompt for job in jobs]
    return theirs(
        prompts, num_inference_steps=steps, guidance_scale=7.5, latents=noise, output_type="pt", eta=0.0
    ).images


def psnr(found: Tensor, wanted: Tensor) -> float:
    """Of pictures with values 0 to 1, in dB."""
    error = (found.double() - wanted.double()).square().mean().item()
    return math.inf if error == 0 else -10 * math.log10(error)


# --- the U-Net on this CPU --------------------------------------------------------------------------------------------


def latency(quick: bool) -> Part:
    """Seconds of an evaluation of v1's U-Net for 512 x 512 (quick: the narrow one), and the bytes of its weights."""
    config, side, rounds = (SD_V1.unet | _NARROW, 8, 1) if quick else (SD_V1.unet, 64, 2)
    plain = _random_unet(config)
    models = {"fp32": plain, "bf16": copy.deepcopy(plain).bfloat16(), "int8": quantize(copy.deepcopy(plain), "int8")}
    best = dict.fromkeys(models, math.inf)
    for _ in range(rounds):
        for name, unet in models.items():
            x = torch.randn(1, 4, side, side, dtype=unet.dtype).contiguous(memory_format=torch.channels_last)
            text = torch.randn(1, 77, config["cross_attention_dim"], dtype=unet.dtype)
            started = time.perf_counter()
            with torch.inference_mode():
                unet(x, 500, text)
            best[name] = min(best[name], time.perf_counter() - started)
    in_fp32, width = stored_bytes(plain), "narrow" if quick else "v1"
    rows = [
        Row(
            {"part": "latency", "case": f"{width}, U-Net, {8 * side} px", "beside": name},
            {"time": Number(best[name], "s"), "weights": Number(stored_bytes(unet) / in_fp32, "of fp32")},
        )
        for name, unet in models.items()
    ]
    return rows, [Target(f"0.6 x time of bf16 / time of int8, {width}", 1.0, 0.6 * best["bf16"] / best["int8"])]


def _random_unet(config: dict) -> nn.Module:
    """Small normal weights, without the modules' own and slower beginnings."""
    with torch.device("meta"):
        unet = build_unet(config)
    unet = unet.to_empty(device="cpu").eval()
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter.normal_(0, 0.02)
    return unet.to(memory_format=torch.channels_last)


MEASURES = (
    "apps/diffusion",
    "core/quant",
    "core/gemini",
    "core/trace",
    "core/kernels",
    "core/estimate",
    "benchmarks/stable_diffusion.py",
)
BENCHMARK = Benchmark("stable_diffusion", "Stable Diffusion beside the published tables", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only=BENCHMARK.name), sys.argv[1:]))
