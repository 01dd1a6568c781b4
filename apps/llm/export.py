"""`llm export`: a run's checkpoint as a Hugging Face folder that `transformers` loads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import torch

from apps.llm.model import find_model
from core.checkpoint import iterate_full
from core.config import UserError, parse
from core.models import save_pretrained
from core.models.decoder import Decoder
from core.precision import compute_dtype
from core.train import checkpoint_path
from core.weights import read_json

ExportDtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class ExportConfig:
    model: Path = Path()
    """the run folder of `megalith llm pretrain` or `megalith llm finetune`; its latest checkpoint is taken"""
    out: Path | None = None
    """where the folder is written; by default hf/ in the run folder"""
    dtype: ExportDtype | None = None
    """format of the weights; by default that in which the run computed (fp32 of one in fp64)"""


def main(argv: list[str]) -> int:
    config = parse({"default": ExportConfig}, argv, "megalith llm export", default="default")
    print(export(config.model, config.out or config.model / "hf", config.dtype))
    return 0


def export(run: Path, out: Path, dtype: ExportDtype | None = None) -> Path:
    """Write the folder, one tensor of the checkpoint in memory at a time.  Returns it.

    dtype  by default that in which the run computed; the checkpoint's masters stay as they are
    """
    source = find_model(run)
    if not source.is_run:
        raise UserError(f"{run} is a Hugging Face folder already; give the run folder of `megalith llm pretrain`")
    with torch.device("meta"):
        names = [f"model/{name}" for name, _ in Decoder(source.config).named_parameters()]
    tensors = ((n.removeprefix("model/"), t) for n, t in iterate_full(checkpoint_path(run), names))
    tokenizer = source.tokenizer()
    ids = {"eos_token_id": tokenizer.eos_id}
    if tokenizer.hf.bos_token_id is not None:
        ids["bos_token_id"] = tokenizer.hf.bos_token_id
    save_pretrained(tensors, source.config, out, dtype=compute_dtype(dtype or _format_of(run)), special_ids=ids)
    tokenizer.save(out)
    return out


def _format_of(run: Path) -> ExportDtype:
    """In which a run computed, as far as folders have it."""
    precision = read_json(run / "config.json").get("precision")
    return cast(ExportDtype, precision) if precision in get_args(ExportDtype) else "fp32"
