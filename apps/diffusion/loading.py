"""`load_pipeline`: a pipeline from whichever form its files have."""

from pathlib import Path

import torch

from apps.diffusion.formats.single_file import load_single_file
from apps.diffusion.noise import Prediction
from apps.diffusion.pipeline import Pipeline, load_folder


def load_pipeline(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    prediction_type: Prediction | None = None,
    tokenizer: str | Path | None = None,
) -> Pipeline:
    """The pipeline of a diffusers folder or a single-file checkpoint, its modules in eval mode on the CPU.

    prediction_type  what the U-Net predicts, for files that do not say it
    tokenizer        folder of one, for single files, which hold none

    Raises UserError for a path of something else, of another model than Stable Diffusion v1 or v2, for one that is
    incomplete or truncated, for parts that do not fit each other, and where the path contradicts `prediction_type`.
    """
    path = Path(path)
    if path.is_file() or path.suffix == ".safetensors":
        return load_single_file(path, tokenizer, prediction_type, dtype)
    return load_folder(path, dtype, prediction_type, tokenizer)
