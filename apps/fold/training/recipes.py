"""Recipes of `fold train`: functions that return a whole configuration.

`initial_training` and `finetuning` are the two stages of AlphaFold 2 (supplement, table 4 and 1.11): crops of 256, then
384 residues; 128, then 512 rows; a rate of 1e-3 after a warm-up over 128,000 samples, then half of it; 10 million
samples, then 1.5 million. Two things differ: gradients are clipped for the whole batch and not for each sample, and the
rate does not fall by 5 % after 6.4 million samples.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from apps.fold.loss.total import LossConfig, fine_tuning
from apps.fold.toy import DIMERS, HELDOUT, NOTE, STRUCTURES
from apps.fold.training.config import DataConfig, FoldTrainConfig
from core.checkpoint import CheckpointConfig
from core.optim.adamw import AdamWConfig
from core.optim.schedule import ScheduleConfig
from core.parallel.recompute import RecomputeConfig

_BATCH = 128


def initial_training() -> FoldTrainConfig:
    """The first stage, from random weights."""
    return FoldTrainConfig(
        model="model_3_ptm",
        data=DataConfig(global_batch=_BATCH, crop=256),
        max_msa=128,
        max_extra_msa=1024,
        steps=10_000_000 // _BATCH,
        microbatch=1,
        precision="bf16",
        zero=1,
        recompute=RecomputeConfig("full"),
        optim=_adam(1e-3, ScheduleConfig(shape="constant", warmup_steps=128_000 // _BATCH)),
        checkpoint=CheckpointConfig(every=500),
        evaluate_every=1000,
        out=Path("runs/fold"),
    )


def finetuning() -> FoldTrainConfig:
    """The second stage, from the weights of the first: longer crops, more rows, violations."""
    return FoldTrainConfig(
        model="model_3_ptm",
        data=DataConfig(global_batch=_BATCH, crop=384),
        loss=fine_tuning(),
        max_msa=512,
        max_extra_msa=5120,
        steps=1_500_000 // _BATCH,
        microbatch=1,
        precision="bf16",
        zero=1,
        recompute=RecomputeConfig("full"),
        optim=_adam(5e-4, ScheduleConfig(shape="constant")),
        checkpoint=CheckpointConfig(every=500),
        evaluate_every=1000,
        out=Path("runs/fold_finetuned"),
    )


def tiny() -> FoldTrainConfig:
    """A small model and three small proteins that the package carries, for one core."""
    return FoldTrainConfig(
        model="demo",
        data=DataConfig(structures=STRUCTURES, validation=HELDOUT, global_batch=1, crop=128, decoys=0.1),
        loss=LossConfig(backbone=1.0, unclamped=1.0, distogram=1.0, masked_msa=0.0, plddt=0.02),
        average=0.97,
        steps=800,
        optim=AdamWConfig(
            lr=3e-3,
            betas=(0.9, 0.99),
            eps=1e-6,
            weight_decay=0.0,
            clip_norm=None,  # it would cut a chain's gradient to a fraction of itself, and a decoy's not at all
            schedule=ScheduleConfig(shape="cosine", warmup_steps=20, final=0.02),
        ),
        checkpoint=CheckpointConfig(every=100),
        note=NOTE,
        out=Path("runs/fold_tiny"),
    )


def tiny_confidence() -> FoldTrainConfig:
    """Teach the model of `tiny` its confidence: to tell what it knows from what it does not; its structures stay.

    While `tiny` learns, its rate is so high that a step's structures are far worse than those of the average, which is
    what predicts: of these its confidence knows nothing. So the head is taught once more, with the average as it is, by
    the three chains and as many shuffled sequences, each of which comes once: a few it would learn by heart.
    """
    first = tiny()
    return replace(
        first,
        model=str(first.out / "model"),
        learns="confidence",
        data=replace(first.data, decoys=0.5),
        loss=LossConfig(plddt=1.0),
        optim=replace(first.optim, lr=2e-2, schedule=ScheduleConfig(shape="cosine", warmup_steps=10, final=0.05)),
        out=Path("runs/fold_tiny_confidence"),
    )


def complexes() -> FoldTrainConfig:
    """AlphaFold-Multimer from random weights: crops of 384 residues, interfaces in half of them."""
    first = initial_training()
    return replace(
        first,
        model="model_1_multimer_v2",
        data=replace(first.data, crop=384),
        loss=LossConfig(experimentally_resolved=0.01, violation=0.03, unclamped=0.0),
        max_msa=None,
        max_extra_msa=None,
        num_recycles=3,
        out=Path("runs/fold_complexes"),
    )


def tiny_complexes() -> FoldTrainConfig:
    """A small model of complexes and two small dimers that the package carries, for one core."""
    first = tiny()
    return replace(
        first,
        model="demo_multimer",
        data=DataConfig(structures=DIMERS, global_batch=1, crop=64),
        loss=LossConfig(backbone=1.0, interface=1.0, unclamped=1.0, interface_clamp=None, masked_msa=0.0, plddt=0.02),
        steps=1000,
        out=Path("runs/fold_tiny_complexes"),
    )


def debug_complexes() -> FoldTrainConfig:
    """`debug` of complexes."""
    return replace(
        debug(),
        model="debug_multimer",
        data=DataConfig(structures=DIMERS, validation=DIMERS, global_batch=2, crop=24),
        out=Path("runs/fold_debug_complexes"),
    )


def debug() -> FoldTrainConfig:
    """A few steps of the smallest model on the demo's chains; seconds on one core."""
    return FoldTrainConfig(
        model="debug",
        data=DataConfig(structures=STRUCTURES, validation=HELDOUT, global_batch=2, crop=24),
        steps=4,
        optim=_adam(1e-3, ScheduleConfig(warmup_steps=1)),
        out=Path("runs/fold_debug"),
    )


def _adam(rate: float, schedule: ScheduleConfig) -> AdamWConfig:
    return AdamWConfig(lr=rate, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, clip_norm=0.1, schedule=schedule)


RECIPES: dict[str, Callable[[], FoldTrainConfig]] = {
    "initial_training": initial_training,
    "finetuning": finetuning,
    "tiny": tiny,
    "tiny_confidence": tiny_confidence,
    "complexes": complexes,
    "tiny_complexes": tiny_complexes,
    "debug": debug,
    "debug_complexes": debug_complexes,
}
