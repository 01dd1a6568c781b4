"""Find the kind of weights at a path, and load the model with them."""

import hashlib
import os
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from apps.fold.model.config import ESMFoldConfig, ModelConfig, MultimerConfig, released
from apps.fold.model.esmfold import ESMFold
from apps.fold.model.network import Network, network
from apps.fold.weights.alphafold import MULTIMER_KEY, load_npz
from apps.fold.weights.esmfold import is_esmfold, load_esmfold
from apps.fold.weights.folder import load_folder
from apps.fold.weights.openfold import load_pt
from core.config import UserError
from core.weights import read_json

WHERE = (
    "AlphaFold's lie at https://storage.googleapis.com/alphafold/alphafold_params_2022-12-06.tar "
    "(params_model_*.npz, CC BY 4.0)"
)
_READ_WHOLE, _END = 2**30, 2**20  # bytes


def read_weights(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and parameters of an npz of AlphaFold's, a .pt of OpenFold's, a folder of ours or of ESMFold.

    Raises UserError for anything else.
    """
    if path.is_dir():
        return load_esmfold(path) if is_esmfold(path) else load_folder(path)
    if not path.is_file():
        raise UserError(f"there are no weights at {path}; {WHERE}")
    if path.suffix == ".npz":
        return _named(path, *load_npz(path))
    if path.suffix in (".pt", ".pth", ".ckpt"):
        return _named(path, *load_pt(path))
    raise UserError(
        f"{path} is neither params_model_*.npz, nor an OpenFold .pt, nor a folder (megalith fold convert, ESMFold)"
    )


def _named(path: Path, config: ModelConfig, parameters: dict[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Where the file's name is a released model's, with that model's number of extra rows, which no array tells."""
    complexes = isinstance(config, MultimerConfig)
    suffix = r"_multimer(_v[23])?" if complexes else r"(_ptm)?"
    name = re.search(rf"model_[1-5]{suffix}(?=$|[^0-9a-z])", path.stem)
    return (replace(config, max_extra_msa=released(name[0]).max_extra_msa) if name else config), parameters


def is_multimer(path: Path) -> bool:
    """Whether these are a complex's weights, by the names in the file, or in a folder's config.json."""
    if path.is_dir():
        return not is_esmfold(path) and "recycle_tolerance" in read_json(path / "config.json").get("model", {})
    if path.suffix != ".npz" or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as file:
        return f"{MULTIMER_KEY}.npy" in file.namelist()


def identify(path: Path) -> str:
    """Changes with the contents of the weights, not with where they lie.

    Of files beyond a GiB, as ESMFold's, the size, the time of change and both ends stand for them.
    """
    found = hashlib.blake2b(digest_size=16)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        stat = file.stat()
        with open(file, "rb") as content:
            found.update(f"{file.name if path.is_dir() else ''} {stat.st_size}\0".encode())
            if stat.st_size <= _READ_WHOLE:
                found.update(hashlib.file_digest(content, "blake2b").digest())
                continue
            found.update(f"{stat.st_mtime_ns}".encode() + content.read(_END))
            content.seek(-_END, os.SEEK_END)
            found.update(content.read())
    return found.hexdigest()


def read_alphafold(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The same for what works with AlphaFold alone.  Raises UserError for ESMFold, too."""
    config, parameters = read_weights(path)
    if isinstance(config, ESMFoldConfig):
        raise UserError(
            f"{path} holds ESMFold, which is for megalith fold predict and plan as it is; give AlphaFold weights"
        )
    return config, parameters


def build(
    config: ModelConfig, parameters: dict[str, Tensor], dtype: torch.dtype, device: str | torch.device
) -> Network:
    """The model with these parameters, in evaluation mode."""
    with torch.device("meta"):
        model = network(config)
    buffers = {name for name, _ in model.named_buffers()}  # frequencies of rotary positions: not to be rounded
    values = {name: value.to(device, None if name in buffers else dtype) for name, value in parameters.items()}
    model.load_state_dict(values, assign=True)
    if isinstance(model, ESMFold):
        model.language.fill_buffers(device)
    return model.eval().requires_grad_(False)
