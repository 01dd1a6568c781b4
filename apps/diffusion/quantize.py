"""`diffusion quantize IN OUT`: a pipeline whose weights are integers, convolutions too, in a folder for `sample`.

In a program it is one line, for any pipeline's modules:

    quantize(pipeline.unet)        # core.quant, of any module: 8 bits

Convolutions are 69 % of the U-Net of v1; what rounds linear layers only leaves them as they are.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from apps.diffusion.loading import load_pipeline
from apps.diffusion.noise import Prediction
from apps.diffusion.pipeline import Pipeline, check_free, save_pipeline
from core.config import UserError, in_words, parse, require_device
from core.precision import COMPUTE_DTYPE
from core.quant import quantize, stored_bytes
from core.quant.scheme import SchemeName
from core.runtime import device_of

Part = Literal["unet", "vae", "text_encoder"]


@dataclass(frozen=True)
class QuantizeConfig:
    """Write a pipeline with weights in 8 or 4 bits."""

    model: Path | None = None
    """a diffusers folder, or a single file; `megalith diffusion quantize IN OUT` means the same"""
    out: Path | None = None
    """folder to write"""
    scheme: SchemeName = "int8"
    """see docs/quantization.md; convolutions are rounded by all of them"""
    parts: tuple[Part, ...] = ("unet",)
    """which modules"""
    group_size: int = 64
    """int4: weights that share a scale, 32, 64 or 128"""
    symmetric: bool = False
    """int4: without zeros"""
    threshold: float = 6.0
    """llm.int8: inputs above it are not rounded"""
    precision: Literal["fp32", "bf16", "fp16"] = "fp16"
    """of the weights that stay as they are: biases, norms, the other modules"""
    prediction_type: Prediction | None = None
    """what the U-Net predicts, for single files of v2 that do not say it"""
    tokenizer: Path | None = None
    """folder of a tokenizer, for single files, which hold none"""
    device: str = "auto"
    """where weights are rounded, one at a time: cpu, cuda or cuda:N"""

    def __post_init__(self) -> None:
        require_device("device", self.device)
        if not self.parts:
            raise UserError("parts is empty; name unet, vae or text_encoder")


def main(argv: list[str]) -> int:
    config = parse({"default": QuantizeConfig}, argv, "megalith diffusion quantize", "default", ("model", "out"))
    if config.model is None or config.out is None:
        raise UserError(
            "megalith diffusion quantize takes the pipeline and the folder to write: IN OUT, or --model IN --out OUT"
        )
    source, target = config.model, config.out
    check_free(target)
    pipeline = load_pipeline(source, prediction_type=config.prediction_type, tokenizer=config.tokenizer)
    before = {name: stored_bytes(module) for name, module in pipeline.modules.items()}
    quantize_parts(pipeline, config)
    pipeline.to(COMPUTE_DTYPE[config.precision])
    save_pipeline(pipeline, target)
    for name, module in pipeline.modules.items():
        now = stored_bytes(module)
        print(f"{name:12} {in_words(before[name]):>9} in fp32, {in_words(now):>9} now ({now / before[name]:.1%})")
    return 0


def quantize_parts(pipeline: Pipeline, config: QuantizeConfig) -> None:
    """Quantize in place.  Raises UserError as core's `quantize` does."""
    device = device_of(config.device)
    for name in config.parts:
        quantize(
            pipeline.modules[name],
            config.scheme,
            group_size=config.group_size,
            symmetric=config.symmetric,
            threshold=config.threshold,
            embeddings=name == "text_encoder",
            device=device,
        )
