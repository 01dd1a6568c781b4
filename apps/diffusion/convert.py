"""`diffusion convert IN OUT`: a pipeline from one format into another, with LoRA merged into it if asked.

diffusion convert model.safetensors model --tokenizer stable-diffusion-v1-5      a single file to a diffusers folder
diffusion convert model model.safetensors --precision fp16                       and back
diffusion convert model merged --lora style.safetensors --lora-scale 0.8         LoRA into the weights
diffusion convert lora.safetensors kohya.safetensors --model model --layout kohya    a LoRA's layout
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from apps.diffusion.formats.lora import Layout, load_lora, merge_lora, save_lora
from apps.diffusion.formats.single_file import load_single_file, save_single_file
from apps.diffusion.loading import load_pipeline
from apps.diffusion.noise import Prediction
from apps.diffusion.pipeline import Pipeline, check_free, save_pipeline
from core.config import UserError, parse
from core.precision import COMPUTE_DTYPE


@dataclass(frozen=True)
class ConvertConfig:
    """Write a pipeline, or a LoRA, in another format: OUT ends in .safetensors for a single file."""

    input: Path | None = None
    """a pipeline, a folder or a single file; with --model a LoRA; `megalith diffusion convert IN OUT` means the same"""
    out: Path | None = None
    """what to write: a name that ends in .safetensors for a single file, else a folder"""
    model: Path | None = None
    """without --input the pipeline to convert; with it the one that the LoRA was made for"""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """of the weights that are written"""
    prediction_type: Prediction | None = None
    """what the U-Net predicts, for single files of v2 that do not say it"""
    tokenizer: Path | None = None
    """folder of a tokenizer, for single files, which hold none"""
    ema: bool = False
    """take the averaged weights of a training checkpoint"""
    lora: tuple[Path, ...] = ()
    """LoRA files to merge into the weights"""
    lora_scale: float = 1.0
    layout: Layout = "diffusers"
    """of a LoRA that is written"""

    @property
    def of_lora(self) -> bool:
        return self.input is not None and self.model is not None

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        if self.of_lora:
            names, why = ("tokenizer", "ema", "lora", "lora_scale"), "with --model, where IN is a LoRA; leave it out"
            return dict.fromkeys(names, why)
        found = {"layout": "without --model: a pipeline is written; give those of the pipeline that IN is a LoRA of"}
        return found if self.lora else found | {"lora_scale": "without a LoRA; give --lora FILE, too"}


def main(argv: list[str]) -> int:
    config = parse({"default": ConvertConfig}, argv, "megalith diffusion convert", "default", places=("input", "out"))
    source, target = config.input or config.model, config.out
    if source is None or target is None:
        raise UserError(
            "megalith diffusion convert takes what to read and what to write: IN OUT, or --model IN --out OUT"
        )
    if config.of_lora:
        assert config.model is not None
        lora = load_lora(source, load_pipeline(config.model, prediction_type=config.prediction_type))
        save_lora(lora, target, config.layout, COMPUTE_DTYPE[config.precision])
        print(f"{target}: {len(lora)} modules in {config.layout}'s layout")
        return 0
    if target.suffix != ".safetensors":
        check_free(target)
    pipeline = _read(source, config)
    for path in config.lora:
        merge_lora(pipeline, load_lora(path, pipeline), config.lora_scale)
    dtype = COMPUTE_DTYPE[config.precision]
    save = save_single_file if target.suffix == ".safetensors" else save_pipeline
    save(pipeline, target, dtype)
    count = sum(p.numel() for module in pipeline.modules.values() for p in module.parameters())
    print(f"{target}: {count:,} parameters in {config.precision}, predicts {pipeline.prediction_type}")
    return 0


def _read(source: Path, config: ConvertConfig) -> Pipeline:
    if config.ema:
        if source.is_dir():
            raise UserError("ema is for single files of training checkpoints, which hold both; leave it out")
        return load_single_file(source, config.tokenizer, config.prediction_type, torch.float32, ema=True)
    return load_pipeline(source, torch.float32, config.prediction_type, config.tokenizer)
