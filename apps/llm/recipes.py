"""Recipes: functions that return a whole configuration. `--recipe NAME` picks one, options change it.

Batch sizes and learning rates of the large shapes are those of table 2.1 of the GPT-3 paper (Brown et al. 2020), taken
by parameter count; OPT and BLOOM follow it closely. `debug` is for trying things: it trains in seconds on one core.
"""

import email
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from apps.llm.config import PretrainConfig, objective_of
from apps.llm.corpus import DataConfig
from core.checkpoint import CheckpointConfig
from core.config import UserError
from core.models.decoder import DecoderConfig
from core.models.shapes import SHAPES
from core.optim.build import OptimConfig
from core.optim.schedule import ScheduleConfig
from core.parallel.recompute import RecomputeConfig

# (parameters up to, peak learning rate, tokens of a batch)
_GPT3_TABLE = (
    (200e6, 6e-4, 0.5e6),
    (500e6, 3e-4, 0.5e6),
    (1e9, 2.5e-4, 0.5e6),
    (2e9, 2e-4, 1e6),
    (4e9, 1.6e-4, 1e6),
    (9e9, 1.2e-4, 2e6),
    (20e9, 1e-4, 2e6),
    (float("inf"), 0.6e-4, 3.2e6),
)
_LARGE = 3e9
_TOKENS_TO_TRAIN = 300e9


def debug() -> PretrainConfig:
    """Sixteen thin layers, eight heads, plain bytes of a small package that every Python has; seconds on one core."""
    return PretrainConfig(
        model=SHAPES["debug"],
        data=DataConfig(
            path=str(Path(email.__file__).parent),
            suffixes=(".py",),
            tokenizer="byte",
            sequence_length=32,
            global_batch=24,
            heldout_fraction=0.04,
        ),
        steps=20,
        optim=OptimConfig(lr=2e-3, schedule=ScheduleConfig(warmup_steps=2)),
        out=Path("runs/debug"),
    )


def debug_moe() -> PretrainConfig:
    """A small Mixtral: eight experts in every block, two a token. Trains in seconds, on 8 ranks too."""
    return replace(debug(), model=SHAPES["debug_moe"], out=Path("runs/debug_moe"))


def debug_bert() -> PretrainConfig:
    """A small BERT that learns to fill masks in the same text. Trains in seconds, on 8 ranks too."""
    data = replace(debug().data, mask_token=True)
    return replace(debug(), model=SHAPES["debug_bert"], objective="mlm", data=data, out=Path("runs/debug_bert"))


def default_recipe(argv: list[str]) -> str:
    """The recipe of a command line that names none: a masked language model's where that is the objective."""
    masked = ("--objective", "mlm") in pairwise(argv) or not {"--objective=mlm", "objective=mlm"}.isdisjoint(argv)
    return "debug_bert" if masked else "debug"


def demo() -> PretrainConfig:
    """The run of `make demo`, in runs/demo: a small GPT on the source of this Python's standard library."""
    return PretrainConfig(
        model=DecoderConfig(vocab_size=4096, dim=256, num_layers=4, num_heads=4, ffn_dim=1024, max_length=256),
        data=DataConfig(path="stdlib", vocab_size=4096, sequence_length=256, global_batch=16),
        steps=500,
        precision="bf16",
        optim=OptimConfig(
            name="muon",
            lr=3e-3,
            schedule=ScheduleConfig(shape="linear", warmup_steps=20, final=0.0),
        ),
        checkpoint=CheckpointConfig(every=250),
        out=Path("runs/pretrain_demo"),
    )


def of_shape(name: str) -> PretrainConfig:
    """The recipe of a published shape: its batch, rate and length; how it runs follows from its size."""
    shape = SHAPES[name]
    num_parameters = shape.num_parameters()
    lr, batch_tokens = next((lr, tokens) for most, lr, tokens in _GPT3_TABLE if num_parameters <= most)
    length = shape.max_length
    # A multiple of 48 rows divides over 2, 3, 4, 6, 8, 12, 16, 24 and 48 ranks.
    rows = max(48, round(batch_tokens / length / 48) * 48)
    steps = round(_TOKENS_TO_TRAIN / (rows * length))
    large = num_parameters > _LARGE
    return PretrainConfig(
        model=shape,
        objective=objective_of(shape),
        data=DataConfig(
            vocab_size=shape.vocab_size, sequence_length=length, global_batch=rows, mask_token=not shape.causal
        ),
        steps=steps,
        microbatch=1 if large else 4,
        precision="bf16",
        zero=3 if large else 1,
        reduce_each=large,
        recompute=RecomputeConfig("full" if large else "none"),
        optim=OptimConfig(lr=lr, schedule=ScheduleConfig(warmup_steps=min(2000, steps // 100))),
        out=Path("runs") / name,
    )


RECIPES: dict[str, Callable[[], PretrainConfig]] = {
    "debug": debug,
    "debug_bert": debug_bert,
    "debug_moe": debug_moe,
    "demo": demo,
    **{name: partial(of_shape, name) for name in SHAPES if not name.startswith("debug")},
}


def main(argv: list[str]) -> int:
    """`megalith llm recipes`: the recipes with their shapes."""
    if argv:
        raise UserError(f"megalith llm recipes takes no options, and was given {' '.join(argv)}")
    table = Table("recipe", "family", "parameters", "layers x dim, heads", "length", "batch tokens", "rate", "zero")
    for name, recipe in RECIPES.items():
        config = recipe()
        model, tokens = config.model, config.data.global_batch * config.data.sequence_length
        shape = f"{model.num_layers} x {model.dim}, {model.num_heads}"
        table.add_row(
            name,
            model.family,
            f"{model.num_parameters():,}",
            shape,
            f"{config.data.sequence_length:,}",
            f"{tokens:,}",
            f"{config.optim.lr:g}",
            str(config.zero),
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 0
