"""Golden runs of the original code, and how ours compares: params.npz, batch.npz, out.npz and config.json in a folder.

The batch holds the network's inputs by the original's names, with a leading dim of 1 (the same features in every
recycling iteration) or of one entry an iteration. config.json gives what the arrays do not say: `num_recycle` and
`structure_layers`. The runs were made with undefined torsions at (sin, cos) = (1, 0).
"""

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from apps.fold.features.arrays import features_of_arrays
from apps.fold.model.alphafold import Prediction
from apps.fold.weights.alphafold import load_npz
from apps.fold.weights.source import build
from core.config import UserError
from core.weights import read_json

# Name in out.npz -> the same of ours; all without the batch's dim.
OUTPUTS: dict[str, Callable[[Prediction], Tensor | None]] = {
    "representations/single": lambda p: p.single_BND,
    "representations/pair": lambda p: p.pair_BNNZ,
    "representations/msa": lambda p: p.msa_BSND,
    "representations/msa_first_row": lambda p: p.msa_BSND[:, 0],
    "representations/structure_module": lambda p: p.structure.single_BND,
    "structure_module/final_atom_positions": lambda p: p.positions_BN373,
    "structure_module/final_atom_mask": lambda p: p.atom_mask_BN37,
    "predicted_lddt/logits": lambda p: p.logits.plddt,
    "predicted_aligned_error/logits": lambda p: p.logits.pae,
    "distogram/logits": lambda p: p.logits.distogram,
    "masked_msa/logits": lambda p: p.logits.masked_msa,
    "experimentally_resolved/logits": lambda p: p.logits.experimentally_resolved,
}


def compare(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """The largest difference of each output, relative to the output's largest element.

    Raises UserError for a folder that holds no golden run of a monomer.
    """
    batch, expected = _arrays(folder / "batch.npz"), _arrays(folder / "out.npz")
    told = read_json(folder / "config.json")
    config, parameters = load_npz(folder / "params.npz", told.get("num_recycle"), told.get("structure_layers"))
    model = build(config, parameters, dtype, device)
    rounds = len(batch["aatype"])
    if rounds not in (1, config.num_recycles + 1):
        raise UserError(f"{folder}/batch.npz holds {rounds} iterations, and the run has {config.num_recycles + 1}")
    drawn = [
        features_of_arrays({name: array[i : i + 1] for name, array in batch.items()}, undefined=(1.0, 0.0)).to(
            device, dtype
        )
        for i in range(rounds)
    ]
    with torch.inference_mode():
        prediction = model(drawn if rounds > 1 else drawn * (config.num_recycles + 1))
    compared = {name: _difference(get(prediction), expected[name]) for name, get in OUTPUTS.items() if name in expected}
    if not compared:
        raise UserError(f"{folder}/out.npz holds none of {', '.join(OUTPUTS)}")
    return compared


def _difference(ours: Tensor | None, theirs: np.ndarray) -> float:
    if ours is None or ours.shape[1:] != theirs.shape:
        return float("inf")
    value = ours[0].to("cpu", torch.float64)
    difference = (value - torch.from_numpy(theirs).double()).abs().max().item()
    return difference / max(float(np.abs(theirs).max()), 1e-30) if np.isfinite(difference) else float("inf")


def _arrays(path: Path) -> Mapping[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        wanted = "params.npz, batch.npz, out.npz and config.json"
        raise UserError(f"cannot read {path} ({error}); a golden run is a folder of {wanted}") from error
