"""Golden runs of the original code, and how ours compares: params.npz, batch.npz, out.npz and config.json in a folder.

The batch holds the network's inputs by the original's names, with a leading dim of 1 (the same features in every
recycling iteration) or of one entry an iteration; those of a complex have none (golden_complex.py). config.json gives
what the arrays do not say: `num_recycle` and `structure_layers`, and, where it was noted, `params_sha256` of
params.npz: some weights may have no effect on a run, such as queries of the only template. The runs were made with
undefined torsions at (sin, cos) = (1, 0).

How far rounding carries depends on the width, the depth and the weights, so it is measured (`examine`): ours computes
in fp32 and in fp64, and what lies between the two is the rounding of one fp32 run. The original's run, in fp32, has to
be about as far from ours in fp64. There nothing of ours hides what other weights change, and the root of the mean
square tells it from rounding where the largest difference would not.
"""

import hashlib
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from apps.fold.features.arrays import features_of_arrays
from apps.fold.golden_complex import complex_of, possible_draws
from apps.fold.model.alphafold import Prediction
from apps.fold.model.config import MultimerConfig
from apps.fold.model.features import Features
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
COMPLEX_OUTPUTS: dict[str, Callable[[Prediction], Tensor | None]] = {
    **OUTPUTS,
    "num_recycles": lambda p: torch.tensor([p.num_recycles]),
}


_MOST = 8.0
"""times the rounding of our own run in fp32 that the original's may be from ours in fp64: 1 to 3 are usual"""
_LARGEST_ROUNDING = 1e-4
"""of an output's largest element: more is no rounding of fp32, but an operator that computes something else"""
_SAME_DRAW = 1e-2
"""of the MSA's largest element: more between ours and the original's, and other rows were drawn"""
_SMALLEST = 2.0**-24
"""what fp32 cannot tell from 1: the rounding of an output that has none, such as a mask"""


@dataclass(frozen=True)
class Finding:
    """An output of a golden run beside ours, all relative to its largest element.

    difference  between the original's and ours in fp64, the root of its mean square
    limit       the most that it may be, by the rounding of ours
    rounding    the largest difference between ours in fp32 and in fp64
    """

    difference: float
    limit: float
    rounding: float

    @property
    def well(self) -> bool:
        return self.difference <= self.limit and self.rounding <= _LARGEST_ROUNDING


def examine(folder: Path, device: str = "cpu") -> dict[str, Finding]:
    """Ours in fp32 on the device and in fp64 on the CPU, beside the original's outputs.

    Raises UserError for a folder that holds no golden run, or other weights than config.json notes.
    """
    run = _Run(folder)
    exact, rounded = run.outputs("cpu", torch.float64), run.outputs(device, torch.float32)
    found = {}
    for name, theirs in run.expected.items():
        if name not in COMPLEX_OUTPUTS:
            continue
        ours, in_fp32, scale = exact[name], rounded[name], max(float(np.abs(theirs).max()), 1e-30)
        if ours is None or in_fp32 is None or ours.shape != theirs.shape or in_fp32.shape != theirs.shape:
            found[name] = Finding(float("inf"), 0.0, 0.0)
            continue
        difference, rounding = (ours - theirs) / scale, (in_fp32 - ours) / scale
        limit = _MOST * max(_root_mean_square(rounding), _SMALLEST)
        found[name] = Finding(_root_mean_square(difference), limit, float(np.abs(rounding).max()))
    return found


def _root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def outputs_of(folder: Path, dtype: torch.dtype, device: str = "cpu") -> dict[str, np.ndarray | None]:
    """Ours, by the names of out.npz, without the batch's dim, in fp64; None for what the model does not have."""
    return _Run(folder).outputs(device, dtype)


def compare(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """The largest difference of each output, relative to the output's largest element.

    Raises UserError for a folder that holds no golden run.
    """
    run = _Run(folder)
    ours = run.outputs(device, dtype)
    return {name: _difference(ours[name], run.expected[name]) for name in ours if name in run.expected}


class _Run:
    """The contents of a folder."""

    def __init__(self, folder: Path):
        self.batch, self.expected = _arrays(folder / "batch.npz"), _arrays(folder / "out.npz")
        self.described = described = read_json(folder / "config.json")
        _check_weights(folder / "params.npz", described.get("params_sha256"))
        recycles, layers = described.get("num_recycle"), described.get("structure_layers")
        self.config, self.parameters = load_npz(folder / "params.npz", recycles, layers)
        if not any(name in self.expected for name in OUTPUTS):
            raise UserError(f"{folder}/out.npz holds none of {', '.join(OUTPUTS)}")
        if isinstance(self.config, MultimerConfig):
            self.iterations = self._drawn_by_the_original(self.config)
            return
        self.rounds = len(self.batch["aatype"])
        if self.rounds not in (1, self.config.num_recycles + 1):
            wanted = self.config.num_recycles + 1
            raise UserError(f"{folder}/batch.npz holds {self.rounds} iterations, and the run has {wanted}")
        self.iterations = self._given()

    def _given(self) -> list[Features]:
        """The features of all iterations."""
        found = []
        for i in range(self.rounds):
            arrays = {name: array[i : i + 1] for name, array in self.batch.items()}
            found.append(features_of_arrays(arrays, undefined=(1.0, 0.0)))
        return found if self.rounds > 1 else found * (self.config.num_recycles + 1)

    def _drawn_by_the_original(self, config: MultimerConfig) -> list[Features]:
        """The features of all iterations, by the key with which ours comes near the original's; else by the first."""
        name, one = "representations/msa", complex_of(self.batch)
        if name not in self.expected:
            raise UserError(f"a complex's out.npz lacks {name}, which tells how many rows were drawn, and which")
        rows = len(self.expected[name])
        extra = self.described.get("num_extra_msa", len(one.msa) - rows)
        config = replace(config, max_msa=rows, max_extra_msa=extra)
        recycles = int(np.ravel(self.expected.get("num_recycles", config.num_recycles))[0])
        first = None
        for ours, drawn in possible_draws(one, config, self.described, recycles):
            first = first or (ours, drawn)
            self.config = ours
            if _difference(self._computed(drawn)[name], self.expected[name]) <= _SAME_DRAW:
                return drawn
        assert first is not None
        self.config, drawn = first
        return drawn

    def outputs(self, device: str, dtype: torch.dtype) -> dict[str, np.ndarray | None]:
        """The results of our model, by the names of out.npz, without the batch's dim, in fp64."""
        return self._computed(self.iterations, device, dtype)

    def _computed(
        self, iterations: list[Features], device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> dict[str, np.ndarray | None]:
        model = build(self.config, self.parameters, dtype, device)
        with torch.inference_mode():
            prediction = model([one.to(device, dtype) for one in iterations])
        tensors = {name: get(prediction) for name, get in COMPLEX_OUTPUTS.items()}
        return {n: None if t is None else t[0].to("cpu", torch.float64).numpy() for n, t in tensors.items()}


def _check_weights(path: Path, noted: object) -> None:
    if noted is not None and path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != noted:
        raise UserError(f"{path} holds other weights than the run was made with (params_sha256); copy it again")


def _difference(ours: np.ndarray | None, theirs: np.ndarray) -> float:
    if ours is None or ours.shape != theirs.shape:
        return float("inf")
    difference = float(np.abs(ours - theirs).max())
    return difference / max(float(np.abs(theirs).max()), 1e-30) if np.isfinite(difference) else float("inf")


def _arrays(path: Path) -> Mapping[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        wanted = "params.npz, batch.npz, out.npz and config.json"
        raise UserError(f"cannot read {path} ({error}); a golden run is a folder of {wanted}") from error
