"""`llm evaluate`: loss, perplexity and bits per byte of a model on text; of a masked one its pseudo-perplexity."""

import json
import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar

import torch

from apps.llm.batches import evaluation_batches
from apps.llm.config import objective_of, unread_beside_a_model
from apps.llm.corpus import DataConfig, prepare
from apps.llm.loss import num_targets, summed_loss
from apps.llm.model import find_model
from core.config import UserError, parse
from core.data import RampConfig
from core.files import replace_file
from core.metrics import bits_per_byte
from core.precision import MatmulPrecision, Precision, compute_dtype, set_matmul_precision
from core.runtime import device_of


@dataclass(frozen=True)
class EvaluateConfig:
    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("model", "data.path", "data.sequence_length", "data.global_batch", "split", "precision", "device", "out"),
    )

    model: Path = Path()
    """a Hugging Face folder, or a run folder of `megalith llm pretrain`"""
    data: DataConfig = field(default_factory=lambda: DataConfig(heldout_fraction=0.05, global_batch=8))
    split: str = "all"
    """all of the text, or only its `heldout` or `train` documents"""
    passes: int | None = None
    """of a masked language model: the parts of each sequence that are hidden one after the other; by default 7, 15 % at
    a time as in training; with as many as --data.sequence-length each token alone (Salazar et al. 2020)"""
    precision: Precision = "fp32"
    matmul_precision: MatmulPrecision = "highest"
    """of products in fp32: highest (exact), high (on a GPU by TF32, with 11 bits) or medium (as bf16)"""
    out: Path | None = None
    """also write the figures to this JSON file"""
    device: str = "auto"
    """cpu, cuda, cuda:N; auto: CUDA where there is one"""

    def unread(self) -> dict[str, str]:
        found = unread_beside_a_model(self.data)
        found |= {f"data.ramp.{item.name}": "in an evaluation; give --data.global-batch" for item in fields(RampConfig)}
        if self.split == "all":
            found["data.heldout_fraction"] = "with split=all, which holds nothing out; give --split heldout or train"
        return found


def main(argv: list[str]) -> int:
    config = parse({"default": EvaluateConfig}, argv, "megalith llm evaluate", default="default")
    if config.split not in ("all", "heldout", "train"):
        raise UserError(f"split={config.split}; use all, heldout or train")
    figures = evaluate(config)
    for name, value in figures.items():
        print(f"{name:16} {value:,.6g}")
    if config.out is not None:
        replace_file(config.out, json.dumps(figures, indent=2).encode() + b"\n")
    return 0


def evaluate(config: EvaluateConfig) -> dict[str, float]:
    """Every token of the split is predicted once: from at most sequence_length tokens before it, or, of a masked
    language model, hidden, from the others of its sequence."""
    set_matmul_precision(config.matmul_precision)
    device = device_of(config.device)
    source = find_model(config.model)
    objective = objective_of(source.config)
    if config.passes is not None and objective == "clm":
        raise UserError("--passes is of masked language models, and this one predicts the next token; leave it out")
    model = source.load(compute_dtype(config.precision), device)
    tokenizer = config.data.tokenizer if config.data.tokenizer != "bpe" else str(source.tokenizer_folder)
    fraction = 0.0 if config.split == "all" else config.data.heldout_fraction
    length = config.data.sequence_length
    if source.config.positions == "learned" and length > source.config.max_length:
        length = source.config.max_length
        print(f"note: the model has positions for {length} tokens, so sequences are of that length")
    data = replace(config.data, tokenizer=tokenizer, heldout_fraction=fraction, sequence_length=length)
    corpus = prepare(data, Path("runs/corpora"))
    shards = corpus.heldout if config.split == "heldout" else corpus.train
    if shards is None:
        raise UserError(f"no document of {data.path} falls into the held-out split; use --split all")
    batches = evaluation_batches(source.config, data, shards, corpus.tokenizer, config.passes)
    total, count = 0.0, 0
    with torch.inference_mode():
        for step in range(batches.num_batches):
            batch = {k: v.to(device) for k, v in batches.batch(step, 0, 1).items()}
            total += float(summed_loss(model, batch))
            count += int(num_targets(batch))
    figures = {"tokens": count, "bytes": shards.num_text_bytes, "loss": total / count}
    if objective == "mlm":
        return figures | {"pseudo_perplexity": math.exp(total / count)}
    return figures | {
        "perplexity": math.exp(total / count),
        "bits_per_byte": bits_per_byte(total, shards.num_text_bytes),
    }
