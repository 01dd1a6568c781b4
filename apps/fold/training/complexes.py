"""A complex to train on: its chains' features as a prediction has them, and all that is known of where they lie.

Of a residue the positions in every copy of its chain are there, since chains of one sequence may be exchanged
(permutation.py). Chains stand as the network has them, those of one sequence side by side.

Shapes: N residues, K copies of a sequence at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apps.fold.features.complexes import ChainInput, assemble
from apps.fold.features.entries import Entry
from apps.fold.features.sampling import Complex
from apps.fold.model import residues
from apps.fold.training.permutation import matched_copies

_BY_RESIDUE = ("aatype", "residue_index", "asym_id", "entity_id", "sym_id", "mask")
_BY_ROW = ("cluster_bias",)  # the others have rows or templates in front, then residues


@dataclass(frozen=True)
class ComplexExample:
    """A complex with its experiment.

    complex          with all templates that were found, and zeros in the place of those that a chain lacks
    num_templates    of each chain
    positions, mask  atom37 in Angstrom, float32[N, 37, 3] and [N, 37]
    """

    name: str
    complex: Complex
    num_templates: tuple[int, ...]
    positions: np.ndarray
    mask: np.ndarray
    resolution: float

    def __len__(self) -> int:
        return len(self.complex.aatype)


def example_of(name: str, entries: Sequence[Entry], inputs: Sequence[ChainInput]) -> ComplexExample:
    """The complex of these chains; copies of a sequence have the same residues."""
    counts = [len(one.templates) for one in inputs]
    assembly = assemble(inputs, max(counts))
    ordered = [entries[number] for number in assembly.chains]
    positions, mask = (np.concatenate([getattr(one, part) for one in ordered]) for part in ("positions", "mask"))
    resolution = max(one.resolution for one in entries)
    of_chains = tuple(counts[number] for number in assembly.chains)
    # A PDB file leaves out residues that were not seen, and its numbers tell where.
    index = np.concatenate([one.index for one in ordered])
    return ComplexExample(name, replace(assembly.complex, residue_index=index), of_chains, positions, mask, resolution)


def save_complex(path: Path, example: ComplexExample) -> None:
    arrays = {name: getattr(example.complex, name) for name in _arrays()}
    np.savez_compressed(
        path,
        name=np.array(example.name),
        num_templates=np.array(example.num_templates),
        positions=example.positions,
        atom_mask=example.mask.astype(np.uint8),
        resolution=np.array(example.resolution),
        **arrays,
    )


def complex_of_arrays(arrays: dict[str, Any]) -> ComplexExample:
    """What `save_complex` wrote."""
    return ComplexExample(
        str(arrays["name"]),
        Complex(**{name: arrays[name] for name in _arrays()}),
        tuple(map(int, arrays["num_templates"])),
        arrays["positions"],
        arrays["atom_mask"].astype(np.float32),
        float(arrays["resolution"]),
    )


def _arrays() -> list[str]:
    return [item.name for item in fields(Complex)]


def with_templates(example: ComplexExample, chosen: Sequence[Sequence[int]], most: int) -> Complex:
    """The complex with `most` templates: of each chain these, then zeros."""
    one = example.complex
    found: dict[str, np.ndarray] = {}
    for name in ("template_aatype", "template_positions", "template_mask"):
        given = getattr(one, name)
        found[name] = np.zeros((most, *given.shape[1:]), given.dtype)
        for asym, numbers in enumerate(chosen, 1):
            here = np.flatnonzero(one.asym_id == asym)
            for place, number in enumerate(numbers):
                found[name][place, here] = given[number, here]
    return replace(one, **found)


def part_of(one: Complex, places: np.ndarray) -> Complex:
    """The complex with these residues alone."""

    def cut(name: str) -> np.ndarray:
        array = getattr(one, name)
        return array if name in _BY_ROW else array[places] if name in _BY_RESIDUE else array[:, places]

    return Complex(**{name: cut(name) for name in _arrays()})


def copies_of(one: Complex) -> np.ndarray:
    """int64[N, K]: the same residue in each copy of its chain; -1 where there are fewer copies."""
    members = {int(entity): np.unique(one.asym_id[one.entity_id == entity]) for entity in np.unique(one.entity_id)}
    found = np.full((len(one.asym_id), max(map(len, members.values()))), -1)
    for chains in members.values():
        places = np.stack([np.flatnonzero(one.asym_id == asym) for asym in chains], 1)
        for at in places.T:
            found[at, : len(chains)] = places
    return found


def labels_of(example: ComplexExample, places: np.ndarray) -> dict[str, Tensor]:
    """A row's ids and positions in the experiment; positions and masks [N, K, ..], in thousandths of an Angstrom."""
    one = example.complex
    copies = copies_of(one)[places]
    there = copies >= 0
    exists = residues.ATOM37_MASK[np.minimum(one.aatype[places], residues.UNKNOWN)]
    mask = example.mask[copies] * there[..., None] * exists[:, None]
    milli = np.rint(example.positions[copies].astype(np.float64) * 1000 * mask[..., None]).astype(np.int32)
    ids = {"asym": one.asym_id, "entity": one.entity_id, "sym": one.sym_id}
    return {
        **{name: torch.from_numpy(array[places].astype(np.int64)) for name, array in ids.items()},
        "copies": torch.from_numpy(there.sum(1)),
        "positions_milli": torch.from_numpy(milli),
        "atom_mask": torch.from_numpy(mask > 0),
    }


def matched_positions(batch: dict[str, Tensor], predicted_BN373: Tensor) -> tuple[Tensor, Tensor]:
    """positions_milli [B, N, 37, 3] and atom_mask [B, N, 37] of the copies that suit a prediction best."""
    milli, mask = batch["positions_milli"], batch["atom_mask"]
    alpha = milli[..., residues.CA, :].double() / 1000
    copy_BN = matched_copies(predicted_BN373[..., residues.CA, :], alpha, mask[..., residues.CA], batch)
    index = copy_BN[:, :, None, None]
    atoms = milli.gather(2, index[..., None].expand(-1, -1, 1, *milli.shape[3:]))[:, :, 0]
    return atoms, mask.gather(2, index.expand(-1, -1, 1, mask.shape[3]))[:, :, 0]
