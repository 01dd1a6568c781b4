"""`serve quantize IN OUT`: a model with weights in 8 or 4 bits, as a folder that is served at once."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apps.serve.model import ModelFolder, check_vocabulary, find_model
from apps.serve.text import load_text
from core.config import UserError, in_words, parse, require_device
from core.data import Faults, TextSource
from core.models import load_pretrained
from core.quant import Scheme, is_quantized, quantize, quantize_folder, save_quantized
from core.quant.folder import check_target, loaded_bytes
from core.quant.scheme import SchemeName
from core.runtime import available_bytes, device_of, keep_freed_memory

_BATCH_TOKENS, _LENGTH = 2048, 512
"""Of calibration: tokens of a batch, and of a sequence at most."""


@dataclass(frozen=True)
class QuantizeConfig:
    """Write the quantized model of a folder."""

    model: Path | None = None
    """a Hugging Face folder, or a run folder of `megalith llm pretrain`; `serve quantize IN OUT` is the same"""
    out: Path | None = None
    """folder to write"""
    scheme: SchemeName = "int8"
    """see docs/quantization.md"""
    group_size: int = 64
    """int4: weights that share a scale, 32, 64 or 128"""
    symmetric: bool = False
    """int4: without zeros"""
    threshold: float = 6.0
    """llm.int8: inputs above it are not rounded"""
    embeddings: bool = True
    """also embeddings"""
    head: bool = True
    """also the output layer"""
    calibration: str = ""
    """int4: text to round weights by, a file or folder (text, .jsonl, .parquet); holds the plain model in memory"""
    calibration_tokens: int = 32_768
    """how much of that text is used, from its beginning"""
    device: str = "auto"
    """where weights are rounded, one at a time, and the text is read, a block at a time: cpu, cuda or cuda:N"""

    def __post_init__(self) -> None:
        require_device("device", self.device)
        if self.calibration_tokens < 1:
            raise UserError(f"calibration_tokens={self.calibration_tokens}; give a positive number")
        if self.calibration and self.scheme != "int4":
            raise UserError(f"calibration is for int4, and {self.scheme} was asked for; leave calibration out")

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        return {} if self.calibration else {"calibration_tokens": "without a text; give --calibration FILE, too"}


def main(argv: list[str]) -> int:
    config = parse({"default": QuantizeConfig}, argv, "megalith serve quantize", "default", places=("model", "out"))
    if config.model is None or config.out is None:
        raise UserError(
            "megalith serve quantize takes the model's folder and the one to write: IN OUT, or --model IN --out OUT"
        )
    source, target = find_model(config.model), config.out
    scheme = Scheme(config.scheme, config.group_size, config.symmetric, config.threshold)
    options: dict[str, Any] = {"embeddings": config.embeddings, "head": config.head}
    options["device"] = device_of(config.device)
    options["progress"] = _show if sys.stderr.isatty() else _list if config.calibration else None
    if config.calibration:
        _calibrated(source, target, scheme, config, options)
    else:
        quantize_folder(source.folder, target, scheme, **options)
    print(f"{target}: {in_words(loaded_bytes(source.folder))} of weights in {in_words(loaded_bytes(target))}")
    return 0


def _calibrated(
    source: ModelFolder, target: Path, scheme: Scheme, config: QuantizeConfig, options: dict[str, Any]
) -> None:
    check_target(target)
    if is_quantized(source.folder):
        raise UserError(f"{source.folder} is quantized already; give the folder of plain weights")
    needed, there = 4 * source.config.num_parameters(), available_bytes()
    if needed > there:
        raise UserError(
            f"calibration holds the weights of {source.name} in fp32, {in_words(needed)}, and {in_words(there)} "
            "are free; leave it out, or calibrate where there is more memory"
        )
    keep_freed_memory()
    batches = list(_batches(source, Path(config.calibration), config.calibration_tokens))
    model = load_pretrained(source.folder)
    dtype = model.embedding.tokens.weight.dtype
    quantize(model.float(), scheme, calibration=batches, **options)
    save_quantized(model.to(dtype), target, source.folder)


def _batches(source: ModelFolder, path: Path, num_tokens: int) -> Iterator[Tensor]:
    """ids[B, L] of the text's first tokens, documents one after another. Raises UserError for too few."""
    text, length = load_text(source.folder), min(_LENGTH, source.config.max_length)
    check_vocabulary(source, text)
    wanted = max(num_tokens // length, 1) * length
    ids: list[int] = []
    for document in TextSource(path).documents(Faults("skip")):
        # Of a long document no more is tokenized than is needed.
        ids += text.encode(document.text[: (wanted - len(ids)) * text.longest_token])
        if len(ids) >= wanted:
            break
    if len(ids) < length:
        raise UserError(
            f"{path} holds {len(ids)} tokens; calibration needs {length}, best some ten thousand; give more text"
        )
    ids_NL = torch.tensor(ids[: min(wanted, len(ids)) // length * length]).view(-1, length)
    yield from ids_NL.split(max(1, _BATCH_TOKENS // length))


def _show(name: str, num_bytes: int) -> None:
    print(f"\r{in_words(num_bytes):>10}  {name:60.60}", end="", file=sys.stderr, flush=True)


def _list(name: str, num_bytes: int) -> None:
    """Calibration takes minutes: each weight a line."""
    print(f"{in_words(num_bytes):>10}  {name}", file=sys.stderr, flush=True)
