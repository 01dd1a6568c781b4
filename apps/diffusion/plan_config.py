"""The options of `diffusion plan`: what is to be run, and on what."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import ClassVar, Literal

import torch

from apps.diffusion.adapters import LoraConfig
from apps.diffusion.attention import AttentionName
from apps.diffusion.config import FinetuneConfig
from apps.diffusion.shapes import SHAPES
from apps.diffusion.train_recipes import FINETUNE
from core.compose import ParallelConfig
from core.config import UserError
from core.estimate import PlannedMachine
from core.gemini.config import GeminiConfig
from core.metrics.throughput import gpu_peak_flops
from core.optim.build import OptimConfig, without_size
from core.parallel.recompute import RecomputeConfig
from core.precision import COMPUTE_DTYPE, Precision, master_dtype
from core.runtime import device_kind
from core.trace.machine import Speed, speed_of


@dataclass(frozen=True)
class DiffusionPlanConfig(PlannedMachine):
    """A run of `sample` or of training, and the machine to plan it for."""

    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("task", "model", "batch", "pixels", "steps", "precision", "scheme", "method", "lora.rank"),
        *(
            "train_text_encoder",
            "optim.name",
            "recompute.mode",
            "nproc",
            "zero",
            "gemini.budget",
            "device",
            "gpu",
            "memory",
        ),
    )

    RENAMED: ClassVar[Mapping[str, str]] = {"ranks": "nproc", "memory_gb": "memory=GB"}

    task: Literal["sample", "train"] = "sample"
    model: str = "sd_v1"
    """a published model (`megalith diffusion recipes`), or a diffusers folder, of which the configurations are read"""
    batch: int = 1
    """pictures at once on a device; DreamBooth with prior preservation: twice the subject's"""
    pixels: int | None = None
    """side of the pictures; by default what the model was trained on"""
    steps: int | None = None
    """sample: evaluations for a picture (25); train: optimizer steps (1000)"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: as the run has it; drawn in bf16 on CUDA and in fp32 on a CPU, trained as `diffusion finetune` trains"""
    attention: AttentionName = "flash"
    scheme: Literal["none", "int8"] = "none"
    """sample: weights of the U-Net in 8 bits"""
    guided: bool = True
    """sample: with classifier-free guidance, which doubles the U-Net's batch"""
    vae_tile: int | None = None
    """sample: pixels of the decoder's tiles"""
    method: Literal["full", "lora"] = "full"
    """train: all weights, or low-rank adapters of them"""
    lora: LoraConfig = field(default_factory=LoraConfig)
    train_text_encoder: bool = False
    """train: the text encoder too; otherwise its embeddings are cached and it is not on the device"""
    average: bool = False
    """train: a moving average of the weights, on the device"""
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    """train: activation checkpointing"""
    optim: OptimConfig = field(default_factory=OptimConfig)
    nproc: int = 1
    """train: data-parallel ranks, a device each"""
    zero: Literal[0, 1, 2, 3] = 0
    """train: what is divided over them: 1 optimizer, 2 also gradients, 3 also parameters"""
    gemini: GeminiConfig = field(default_factory=GeminiConfig)
    """train: a device's memory; what does not fit lives on the host"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """the kind of device that is planned for, which need not be here; auto: CUDA where there is one, or with --gpu"""
    gpu: str | None = None
    """the GPU whose data sheet says what it computes: A100 (where none is given), H100, L4, RTX 3080, …"""

    def __post_init__(self) -> None:
        for name in ("batch", "nproc", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}; give at least 1")
        self.check_machine()
        if self.weights is not None and not self.weights.exists():
            named = ", ".join(SHAPES)
            raise UserError(f"no model {self.model!r}: there is no such folder, and those that have a name are {named}")
        if self.pixels is not None and (self.pixels <= 0 or self.pixels % 64):
            raise UserError(f"pixels is {self.pixels}; give a multiple of 64, such as 512")
        if self.vae_tile is not None and (self.vae_tile < 64 or self.vae_tile % 8):
            raise UserError(f"vae_tile is {self.vae_tile}; give a multiple of 8 from 64 on, such as 512")
        if self.gemini.budget is not None and (self.task == "sample" or self.zero not in (0, 3)):
            raise UserError(
                f"gemini.budget={self.gemini.budget} with task={self.task} and zero={self.zero}: Gemini is for "
                "training, and shards all or nothing; use --task train and --zero 3 or 0"
            )
        if self.recompute.mode == "budget":
            raise UserError(
                "recompute.mode=budget: of the commands only megalith llm and fold train choose what is computed "
                "again; use --recompute.mode full, sqrt or recursive"
            )
        if self.recompute.segmented:
            ParallelConfig(zero=self.zero, recompute=self.recompute, gemini=self.gemini)
        if self.gpu is not None and self.device == "cpu":
            raise UserError(f"gpu={self.gpu} with device=cpu; give one of them")
        if gpu_peak_flops(self.sheet, self.dtype) is None:
            raise UserError(f"gpu={self.gpu} has no known {self.format} peak; give A100, H100, H200, B200, L4, …")

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        if self.task == "sample":
            names = ["average", "method", "train_text_encoder", "nproc", "zero", "bandwidth_gb_s"]
            for group in ("lora", "recompute", "optim", "optim.schedule", "gemini"):
                names += [f"{group}.{item.name}" for item in fields(attrgetter(group)(self))]
            return dict.fromkeys(names, "with task=sample; give --task train")
        found: dict[str, str] = dict.fromkeys(("guided", "scheme", "vae_tile"), "with task=train; give --task sample")
        found["gemini.durable_every"] = "in a plan, which is of steps that are all made durable; leave it out"
        found["gemini.order"] = "in a plan, which is of steps of one microbatch; leave it out"
        if self.method != "lora":
            names = [f"lora.{item.name}" for item in fields(self.lora)]
            found |= dict.fromkeys(names, f"with method={self.method}; give --method lora")
        if self.lora.start is not None:
            found["lora.start"] = "in a plan, which reads no file; give its --lora.rank and --lora.targets"
        if self.gemini.budget is not None:
            found["gemini.figure"] = "in a plan, which does not draw it; leave it out"
            if self.gemini.disk is None:
                found["average"] = "with a budget, of which a plan does not know where the average lies; leave it out"
        elif self.nproc == 1:
            found["bandwidth_gb_s"] = "on one device without a budget: nothing is sent; give --nproc or --gemini.budget"
        return found

    @property
    def weights(self) -> Path | None:
        """The folder of a model that has no name."""
        return None if self.model in SHAPES else Path(self.model)

    @property
    def format(self) -> Precision:
        """The precision that `auto` comes to."""
        if self.precision != "auto":
            return self.precision
        if self.task == "train":
            return FINETUNE["full"]().precision
        return "bf16" if self.kind == "cuda" else "fp32"

    @property
    def dtype(self) -> torch.dtype:
        return COMPUTE_DTYPE[self.format]

    @property
    def wide(self) -> torch.dtype:
        """The format of masters, gradients and the optimizer's state."""
        return master_dtype(self.format)

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        if self.device != "auto":
            return self.device
        return "cuda" if self.gpu is not None else device_kind("auto")

    @property
    def sheet(self) -> str:
        """The GPU whose speeds the plan follows."""
        return self.gpu or "A100"

    @property
    def measured(self) -> bool:
        """True where the plan follows from measurements made here, as that of a run with Gemini on this CPU does."""
        return self.kind == "cpu" and self.gemini.budget is not None

    @property
    def speed(self) -> Speed:
        if self.measured:
            return speed_of(torch.device("cpu"), self.dtype)
        peak = gpu_peak_flops(self.sheet, self.dtype)
        assert peak is not None
        return Speed(self.utilisation * peak, 1e9 * self.memory_gb_s)


WITHOUT_EFFECT = (
    *("optim.lr", "optim.clip_norm", "optim.schedule.shape", "optim.schedule.warmup_steps", "optim.schedule.final"),
    *("optim.schedule.scaling", "optim.plan", "lora.layout"),
)
"""Options of a training run that its plan is the same without, whatever the optimizer."""


def without_effect(config: DiffusionPlanConfig) -> set[str]:
    """Dotted names of the options that this plan does not depend on; on a CPU those of the time, too."""
    found = {*WITHOUT_EFFECT, *(f"optim.{name}" for name in without_size(config.optim))}
    if config.kind == "cuda":
        return found
    rates = {"utilisation", "memory_gb_s", "bandwidth_gb_s"}
    return found | rates | ({"steps"} if config.task == "train" else set())


def of_training(config: FinetuneConfig, model: str = "sd_v1") -> DiffusionPlanConfig:
    """The plan of a training run on one device; of a subject's, with class images (prior preservation)."""
    rows = config.data.global_batch * (1 if config.method == "full" else 2)
    return DiffusionPlanConfig(
        task="train",
        model=model,
        batch=min(rows, config.microbatch or rows),
        steps=config.steps,
        precision=config.precision,  # pyright: ignore[reportArgumentType]
        method="lora" if config.method == "lora" else "full",
        lora=config.lora,
        train_text_encoder=config.train_text_encoder,
        average=config.average is not None and not config.average_on_host,
        recompute=config.recompute,
        optim=config.optim,
        zero=config.zero,
        gemini=config.gemini,
    )


def _of_recipe(name: str) -> DiffusionPlanConfig:
    return of_training(FINETUNE[name]())


RECIPES: dict[str, Callable[[], DiffusionPlanConfig]] = {"default": DiffusionPlanConfig}
RECIPES |= {name: partial(_of_recipe, name) for name in FINETUNE}
"""By name; those of `diffusion finetune` as they train v1."""
