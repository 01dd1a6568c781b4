"""Structures as mmCIF (with the categories of ModelCIF that viewers read) and PDB; confidences as json and npz.

pLDDT stands in the B-factor column of both. The PAE's json has the schema of the AlphaFold database.
"""

import json
import re
import string
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from apps.fold.features.sequences import chain_id
from apps.fold.model import residues
from apps.fold.model.heads import distogram_edges, max_aligned_error
from apps.fold.output.confidence import Folded
from apps.fold.output.interfaces import interfaces
from apps.fold.output.modelcif import (
    Categories,
    about_model,
    about_residues,
    about_sequences,
    about_software,
    three_letters,
)
from apps.fold.output.topology import faults

PDB_ATOMS, PDB_RESIDUES = 99_999, 9_999  # what the format can number
PDB_CHAINS = string.ascii_uppercase + string.ascii_lowercase + string.digits
JSON_RESIDUES = 3_000  # beyond, the PAE is written as npz only


@dataclass(frozen=True)
class Atom:
    """An atom of a structure: its residue from 0, its name, whose first letter is its element, its position."""

    residue: int
    name: str
    position: np.ndarray


def atoms(folded: Folded) -> list[Atom]:
    """Every heavy atom that there is, in the order of atom14."""
    listed = []
    for row, letter in enumerate(folded.sequence):
        for name in residues.atoms_of(letter):
            slot = residues.ATOM37.index(name)
            if folded.mask[row, slot]:
                listed.append(Atom(row, name, folded.positions[row, slot]))
    return listed


@dataclass(frozen=True)
class Numbering:
    """Of each residue its chain's id, its chain's entity and its number in the chain, as text.

    authors  the chain's name, the number and the insertion code that others gave it
    """

    chains: list[str]
    entities: list[str]
    numbers: list[str]
    authors: list[tuple[str, str, str]]


def numbering(folded: Folded, authors: list[tuple[str, str, str]] | None = None) -> Numbering:
    """authors: names and numbers of another file, which are kept beside ours."""
    found = Numbering([], [], [], authors or [])
    sequences = [folded.sequence[rows] for rows in folded.chain_rows()]
    known = list(dict.fromkeys(sequences))
    for number, sequence in enumerate(sequences, 1):
        found.chains.extend([chain_id(number)] * len(sequence))
        found.entities.extend([str(known.index(sequence) + 1)] * len(sequence))
        found.numbers.extend(map(str, range(1, len(sequence) + 1)))
    if authors is None:
        found.authors.extend((chain, number, "?") for chain, number in zip(found.chains, found.numbers))
    return found


def _sequences(folded: Folded, name: str) -> Categories:
    sequences = [folded.sequence[rows] for rows in folded.chain_rows()]
    known = list(dict.fromkeys(sequences))
    chains = [(chain_id(number), str(known.index(one) + 1)) for number, one in enumerate(sequences, 1)]
    return about_sequences(known, name, chains)


def write_mmcif(
    path: Path,
    folded: Folded,
    name: str,
    title: str,
    listed: Sequence[Atom] | None = None,
    authors: list[tuple[str, str, str]] | None = None,
) -> None:
    """Chains A to Z, then AA, BA, …; residues are numbered from 1 in each.

    name     of the entry, in which the format takes ASCII without spaces alone; _ stands for the rest
    listed   the atoms, where they are not the heavy ones alone
    authors  of each residue its chain, number and insertion code, where the authors' are others
    """
    from Bio.PDB.mmcifio import MMCIFIO

    name = re.sub(r"[^\x21-\x7e]+", "_", name).strip("_") or "model"
    listed = atoms(folded) if listed is None else listed
    three = three_letters(folded.sequence)
    at = numbering(folded, authors)
    count = len(listed)
    of_atoms = [atom.residue for atom in listed]
    placed = sorted(set(of_atoms))  # ModelCIF has local scores of residues with atoms alone
    author_chains, author_numbers, codes = zip(*(at.authors[row] for row in of_atoms))
    xyz = [[f"{atom.position[axis]:.3f}" for atom in listed] for axis in range(3)]
    plddt = [f"{value:.2f}" for value in folded.plddt]
    io = MMCIFIO()
    io.set_dict(
        {
            "data_": name,
            "_entry.id": name,
            "_struct.entry_id": name,
            "_struct.title": title,
            "_struct.pdbx_structure_determination_methodology": "computational",
            **about_software(),
            **_sequences(folded, name),
            **about_residues(at.chains, at.entities, three, at.numbers, at.authors),
            **about_model(title),
            "_ma_qa_metric_global.ordinal_id": ["1"],
            "_ma_qa_metric_global.model_id": ["1"],
            "_ma_qa_metric_global.metric_id": ["1"],
            "_ma_qa_metric_global.metric_value": [f"{folded.mean_plddt:.2f}"],
            "_ma_qa_metric_local.ordinal_id": [str(number) for number in range(1, len(placed) + 1)],
            "_ma_qa_metric_local.model_id": ["1"] * len(placed),
            "_ma_qa_metric_local.label_asym_id": [at.chains[row] for row in placed],
            "_ma_qa_metric_local.label_seq_id": [at.numbers[row] for row in placed],
            "_ma_qa_metric_local.label_comp_id": [three[row] for row in placed],
            "_ma_qa_metric_local.metric_id": ["2"] * len(placed),
            "_ma_qa_metric_local.metric_value": [plddt[row] for row in placed],
            "_atom_type.symbol": sorted({atom.name[0] for atom in listed}),
            "_atom_site.group_PDB": ["ATOM"] * count,
            "_atom_site.id": [str(number) for number in range(1, count + 1)],
            "_atom_site.type_symbol": [atom.name[0] for atom in listed],
            "_atom_site.label_atom_id": [atom.name for atom in listed],
            "_atom_site.label_alt_id": ["."] * count,
            "_atom_site.label_comp_id": [three[row] for row in of_atoms],
            "_atom_site.label_asym_id": [at.chains[row] for row in of_atoms],
            "_atom_site.label_entity_id": [at.entities[row] for row in of_atoms],
            "_atom_site.label_seq_id": [at.numbers[row] for row in of_atoms],
            "_atom_site.pdbx_PDB_ins_code": list(codes),
            "_atom_site.Cartn_x": xyz[0],
            "_atom_site.Cartn_y": xyz[1],
            "_atom_site.Cartn_z": xyz[2],
            "_atom_site.occupancy": ["1.0"] * count,
            "_atom_site.B_iso_or_equiv": [plddt[row] for row in of_atoms],
            "_atom_site.auth_seq_id": list(author_numbers),
            "_atom_site.auth_asym_id": list(author_chains),
            "_atom_site.auth_comp_id": [three[row] for row in of_atoms],
            "_atom_site.auth_atom_id": [atom.name for atom in listed],
            "_atom_site.pdbx_PDB_model_num": ["1"] * count,
        }
    )
    io.save(str(path))


def fits_pdb(folded: Folded, num_atoms: int | None = None) -> bool:
    """num_atoms: where these are not the heavy ones alone."""
    longest = max(folded.lengths, default=len(folded.sequence))
    return (
        longest <= PDB_RESIDUES
        and (num_atoms or int(folded.mask.sum())) + len(folded.lengths) <= PDB_ATOMS
        and len(folded.lengths) <= len(PDB_CHAINS)
    )


def write_pdb(path: Path, folded: Folded, title: str, listed: Sequence[Atom] | None = None) -> None:
    """Chains of one letter, residues numbered from 1 in each; only what `fits_pdb`.  listed: as in `write_mmcif`."""
    from Bio.PDB.PDBIO import PDBIO
    from Bio.PDB.StructureBuilder import StructureBuilder

    listed = atoms(folded) if listed is None else listed
    assert fits_pdb(folded, len(listed))
    builder = StructureBuilder()
    builder.init_structure("model")
    builder.init_model(0)
    begins = {rows.start: letter for rows, letter in zip(folded.chain_rows(), PDB_CHAINS)}
    last, first = -1, 0
    for atom in listed:
        row, name = atom.residue, atom.name
        for start in range(last + 1, row + 1):  # a chain may begin with residues without atoms
            if start in begins:
                builder.init_chain(begins[start])
                builder.init_seg("    ")
                first = start
        if row != last:
            builder.init_residue(residues.THREE_LETTERS[folded.sequence[row]], " ", row - first + 1, " ")
            last = row
        padded, plddt = f" {name:<3}" if len(name) < 4 else name, float(folded.plddt[row])
        builder.init_atom(name, atom.position, plddt, 1.0, " ", padded, None, name[0])
    io = PDBIO()
    io.set_structure(builder.get_structure())
    with open(path, "w", encoding="utf-8") as file:
        for number, line in enumerate(textwrap.wrap(title, 69), 1):
            file.write(f"TITLE   {number if number > 1 else '':>2}{' ' if number > 1 else ''}{line}".ljust(80) + "\n")
        io.save(file)


def write_confidence(folder: Path, stem: str, folded: Folded, extra: dict[str, Any]) -> None:
    """STEM_confidence.json; STEM_pae.npz and STEM_pae.json where there is a PAE; STEM_distogram.npz if asked for.

    extra  what else is to be said of the prediction; a note among it goes into every file
    """
    numbers = {
        **extra,
        "mean_plddt": round(folded.mean_plddt, 3),
        "ptm": None if folded.ptm is None else round(folded.ptm, 4),
        **interfaces(folded),
        **faults(folded),
        "plddt": [round(float(value), 2) for value in folded.plddt],
    }
    (folder / f"{stem}_confidence.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    note = {"note": extra["note"]} if "note" in extra else {}
    if folded.distances is not None:
        edges = distogram_edges().numpy()
        np.savez_compressed(folder / f"{stem}_distogram.npz", probabilities=folded.distances, edges=edges, **note)
    if folded.pae is None:
        return
    np.savez_compressed(folder / f"{stem}_pae.npz", pae=folded.pae.astype(np.float16), **note)
    if len(folded.sequence) <= JSON_RESIDUES:
        matrix = np.round(folded.pae.astype(np.float64), 1).tolist()
        schema = [{"predicted_aligned_error": matrix, "max_predicted_aligned_error": max_aligned_error(), **note}]
        (folder / f"{stem}_pae.json").write_text(json.dumps(schema, separators=(",", ":")), encoding="utf-8")
