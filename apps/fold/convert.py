"""`fold convert`: weights of AlphaFold, OpenFold or our own, as a folder of ours or as AlphaFold's npz."""

from dataclasses import dataclass
from pathlib import Path

from apps.fold.weights.alphafold import arrays_of, write_npz
from apps.fold.weights.folder import read_note, save_folder
from apps.fold.weights.source import read_alphafold
from core.config import UserError, parse


@dataclass(frozen=True)
class ConvertConfig:
    model: Path | None = None
    """params_model_*.npz of AlphaFold, a .pt of OpenFold, or a folder of `megalith fold convert`"""
    out: Path | None = None
    """a folder, or a name that ends in .npz"""


def main(argv: list[str]) -> int:
    config = parse({"default": ConvertConfig}, argv, "megalith fold convert", default="default")
    if config.model is None or config.out is None:
        raise UserError("megalith fold convert needs both --model WEIGHTS and --out FOLDER (or --out NAME.npz)")
    model, parameters = read_alphafold(config.model)
    if config.out.suffix == ".npz":
        write_npz(config.out, arrays_of(parameters, model))
    else:
        save_folder(config.out, model, parameters, read_note(config.model))
    count = sum(value.numel() for value in parameters.values())
    print(f"{config.out}: {len(parameters)} parameters, {count:,} numbers")
    return 0
