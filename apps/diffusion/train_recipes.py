"""Recipes of the training commands: functions that return the configuration of a run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from apps.diffusion.config import DataConfig, FinetuneConfig, NoiseConfig, PretrainConfig
from core.checkpoint import CheckpointConfig
from core.gemini.config import GeminiConfig
from core.optim.adamw import AdamWConfig
from core.optim.schedule import ScheduleConfig
from core.parallel.recompute import RecomputeConfig


def _adamw(lr: float, shape: str = "constant", warmup_steps: int = 0) -> AdamWConfig:
    schedule = ScheduleConfig(shape=shape, warmup_steps=warmup_steps)  # pyright: ignore[reportArgumentType]
    return AdamWConfig(lr=lr, betas=(0.9, 0.999), weight_decay=0.01, schedule=schedule)


def _tiny_adamw(lr: float, schedule: ScheduleConfig) -> AdamWConfig:
    """AdamW of the small pipeline, whose runs are too short for a long memory of squares."""
    return replace(_adamw(lr), betas=(0.9, 0.99), schedule=schedule)


def _tiny_data(folder: str) -> DataConfig:
    return DataConfig(images=Path("runs/tiny", folder), global_batch=32, buckets=False, caption_dropout=0.1)


def pretrain() -> PretrainConfig:
    """Batch and rate of Stable Diffusion v1 (Rombach et al. 2022, and the model's card)."""
    return PretrainConfig(
        data=DataConfig(global_batch=2048, caption_dropout=0.1),
        steps=200_000,
        precision="bf16",
        average=0.9999,
        optim=_adamw(1e-4, warmup_steps=10_000),
        out=Path("runs/pretrain"),
    )


def tiny() -> PretrainConfig:
    """The small pipeline of drawn pictures; `python -m apps.diffusion.demo.prepare` makes what it starts from.

    Without min-SNR, which counts the noisiest timesteps least: there alone captions decide on shapes.
    """
    return PretrainConfig(
        model=Path("runs/tiny/start"),
        data=_tiny_data("pictures"),
        fresh="unet+text_encoder",
        train_text_encoder=True,
        steps=2200,
        optim=_tiny_adamw(1.5e-3, ScheduleConfig(shape="wsd", warmup_steps=100, decay=0.3, final=0.0)),
        save_precision="fp16",
        checkpoint=CheckpointConfig(every=250, keep=2),
        out=Path("runs/tiny/pipeline"),
    )


def tiny_last() -> FinetuneConfig:
    """The end of the small pipeline's training: pictures in any colour where the caption names none.

    A constant rate with a moving average: the run may end at any step.
    """
    return FinetuneConfig(
        model=Path("runs/tiny/pipeline"),
        data=_tiny_data("last-pictures"),
        train_text_encoder=True,
        steps=1323,
        optim=_tiny_adamw(6e-4, ScheduleConfig(shape="constant", warmup_steps=50)),
        average=0.998,
        save_precision="fp16",
        checkpoint=CheckpointConfig(every=250, keep=3),
        out=Path("runs/tiny/finished"),
    )


def full() -> FinetuneConfig:
    """All weights of the U-Net, on captioned images."""
    return FinetuneConfig(
        data=DataConfig(global_batch=16, caption_dropout=0.1, flip=True),
        noise=NoiseConfig(min_snr=5.0),
        steps=2000,
        optim=_adamw(1e-5, warmup_steps=100),
        out=Path("runs/finetune"),
    )


def lora() -> FinetuneConfig:
    """Adapters of the attention layers; they stand a higher rate than the weights."""
    return FinetuneConfig(
        method="lora",
        data=DataConfig(global_batch=1),
        steps=1000,
        optim=_adamw(1e-4),
        out=Path("runs/lora"),
    )


def dreambooth() -> FinetuneConfig:
    """One subject into all weights; the rate of Ruiz et al. 2023, section 3.1."""
    return FinetuneConfig(
        method="dreambooth",
        data=DataConfig(global_batch=1),
        steps=400,
        optim=_adamw(5e-6),
        out=Path("runs/dreambooth"),
    )


def _in_little(config: FinetuneConfig, budget: str | None) -> FinetuneConfig:
    """With what spares memory: 16 bits, 8-bit moments, blocks recomputed, and Gemini in a budget."""
    return replace(
        config,
        precision="bf16",
        recompute=RecomputeConfig("full"),
        optim=config.optim.named("adamw8bit"),
        gemini=GeminiConfig(budget),
    )


def dreambooth_6gb() -> FinetuneConfig:
    """DreamBooth of U-Net and text encoder on a device of 6 GB, whose context wants some of them."""
    return _in_little(replace(dreambooth(), train_text_encoder=True), "5GB")


def lora_4gb() -> FinetuneConfig:
    """Adapters on a device of 4 GB, with nothing on the host."""
    return _in_little(lora(), None)


def full_5gb() -> FinetuneConfig:
    """All weights of the U-Net on a device of 5 GB, two images at a time."""
    return _in_little(replace(full(), data=replace(full().data, global_batch=2)), "4GB")


def full_6gb() -> FinetuneConfig:
    """All weights of the U-Net on a device of 6 GB, sixteen images at a time."""
    return _in_little(full(), "5GB")


PRETRAIN: dict[str, Callable[[], PretrainConfig]] = {"pretrain": pretrain, "tiny": tiny}
FINETUNE: dict[str, Callable[[], FinetuneConfig]] = {
    "tiny_last": tiny_last,
    "full": full,
    "lora": lora,
    "dreambooth": dreambooth,
    "dreambooth_6gb": dreambooth_6gb,
    "lora_4gb": lora_4gb,
    "full_5gb": full_5gb,
    "full_6gb": full_6gb,
}
