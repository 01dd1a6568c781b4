"""Experimental structures as training targets: each chain with its whole sequence, seen or not.

An mmCIF file says what was in the crystal (`_entity_poly_seq`) apart from what was seen (`_atom_site`), so unresolved
residues are there, masked, and the sequence is the one that alignments were made of. A PDB file is taken as it reads:
the residues that were seen, at the numbers that it gives them.

Of alternate locations the one with the highest occupancy is taken (of several residues in one place the first of the
sequence); of several models the first; modified amino acids
count as their parents (selenomethionine as methionine), others as X.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from apps.fold.features.structures import (
    ATOM_SLOTS,
    Chain,
    check_finite,
    is_mmcif,
    number_of,
    one_letter,
    order_arginine,
    read_mmcif,
    read_structure,
    read_structure_text,
)
from apps.fold.features.text import unpacked_name
from apps.fold.model import residues
from core.config import UserError

_RESOLUTION_NAMES = ("_refine.ls_d_res_high", "_em_3d_reconstruction.resolution", "_reflns.d_resolution_high")
_REVISIONS = "_pdbx_audit_revision_history.revision_date"  # the first one is the release
_GENERATOR = ("assembly_id", "oper_expression", "asym_id_list")
_PROTEIN = "polypeptide(L)"


@dataclass(frozen=True)
class Entry:
    """One chain of an experiment, N residues.

    name                      the file's name without ending, _ and the chain
    index                     positions in the chain, int64[N], rising
    positions, mask           atom37 in Angstrom, float32[N, 37, 3] and [N, 37]
    resolution                in Angstrom; 0 where the experiment has none (NMR)
    released                  when it was published, as 2001-12-31; empty where the file does not say
    """

    name: str
    sequence: str
    index: np.ndarray
    positions: np.ndarray
    mask: np.ndarray
    resolution: float
    released: str = ""

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def num_seen(self) -> int:
        """Residues whose CA is known."""
        return int(self.mask[:, residues.CA].sum())


def read_entries(path: Path, *, assembly: bool = False) -> list[Entry]:
    """The protein chains of an mmCIF (.cif, .mmcif) or PDB file.

    assembly  those of the first assembly that an mmCIF file describes, copies by symmetry among them: the second copy
              of chain A is called A-2; of files that describe none all chains as they lie

    Raises UserError when the file cannot be read or holds no protein.
    """
    if is_mmcif(path):
        found = _entries_of_mmcif(path, assembly)
        if found is not None:
            return found
    resolution = _pdb_resolution(path)
    return [_of_chain(unpacked_name(path).stem, chain, resolution) for chain in read_structure(path)]


def _of_chain(stem: str, chain: Chain, resolution: float) -> Entry:
    """A chain as it reads; where its numbers do not rise (insertion codes), residues count on from the last one."""
    index: list[int] = []
    for number in chain.numbers:
        given = int(re.sub(r"[^0-9-]", "", number) or 0)
        index.append(given if not index or given > index[-1] else index[-1] + 1)
    return Entry(
        f"{stem}_{chain.name.strip() or 'A'}",
        chain.sequence,
        np.array(index) - index[0],
        chain.positions,
        chain.mask,
        resolution,
    )


def _pdb_resolution(path: Path) -> float:
    """From REMARK 2; 0 where there is none, and for files that are no PDB."""
    found = re.search(r"^REMARK   2 RESOLUTION\.\s+([0-9.]+) ANGSTROM", read_structure_text(path), re.MULTILINE)
    return float(found[1]) if found else 0.0


def _entries_of_mmcif(path: Path, assembly: bool) -> list[Entry] | None:
    """None where the file does not say what its chains' sequences are."""
    content = read_mmcif(path)
    if "_atom_site.label_seq_id" not in content or "_entity_poly_seq.mon_id" not in content:
        return None
    resolution = next((r for name in _RESOLUTION_NAMES if (r := number_of((content.get(name) or ["?"])[0]))), 0.0)
    dates = [date for date in content.get(_REVISIONS, []) if re.fullmatch(r"\d{4}-\d\d-\d\d", date)]
    of_file = (resolution, min(dates, default=""))
    try:
        sequences = _sequences(content)
        chains = {of: rows for of, rows in _atoms_by_chain(content).items() if of[1] in sequences}
        found = [
            _entry(unpacked_name(path).stem, name, sequences[entity], rows, content, of_file)
            for (name, entity), rows in chains.items()
        ]
        if assembly:
            found = _assembled(
                found, [content["_atom_site.label_asym_id"][rows[0]] for rows in chains.values()], content
            )
    except (KeyError, ValueError, IndexError) as error:
        reason = f"it lacks {error.args[0]}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} cannot be read as a structure ({reason}); give a whole mmCIF or PDB file") from error
    if not found:
        raise UserError(f"{path} holds no protein chain")
    for entry in found:
        check_finite(entry.positions, path, entry.name.rpartition("_")[2])
    return found


def _assembled(entries: list[Entry], asym_ids: list[str], content: dict) -> list[Entry]:
    """The chains of the first assembly, each as often as the file says, moved; all where it describes none."""
    generator = {name: content.get(f"_pdbx_struct_assembly_gen.{name}", []) for name in _GENERATOR}
    first = generator["assembly_id"][:1]
    found: list[Entry] = []
    for assembly, expression, asym_list in zip(*generator.values()):
        if [assembly] != first:
            continue
        wanted = set(asym_list.replace(" ", "").split(","))
        for number, (turn, shift) in enumerate(_operations(expression, content)):
            for entry, asym in zip(entries, asym_ids):
                if asym in wanted:
                    moved = (entry.positions @ turn.T + shift) * entry.mask[..., None]
                    name = entry.name + (f"-{number + 1}" if number else "")
                    found.append(replace(entry, name=name, positions=moved.astype(np.float32)))
    return found or entries


def _operations(expression: str, content: dict) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rotations and shifts of an expression as 1,2 or (1-60) or (1-5)(6,7), whose last factor acts first."""
    ids, operations = content["_pdbx_struct_oper_list.id"], {}
    for row, name in enumerate(ids):
        turn = [[float(content[f"_pdbx_struct_oper_list.matrix[{i}][{j}]"][row]) for j in "123"] for i in "123"]
        shift = [float(content[f"_pdbx_struct_oper_list.vector[{i}]"][row]) for i in "123"]
        operations[name] = np.array(turn), np.array(shift)
    found = [(np.eye(3), np.zeros(3))]
    for factor in re.findall(r"[^()]+", expression.replace(" ", "")):
        parts = [operations[name] for name in _listed_operations(factor)]
        found = [(turn @ t, turn @ s + shift) for turn, shift in found for t, s in parts]
    return found


def _listed_operations(text: str) -> list[str]:
    names: list[str] = []
    for part in filter(None, text.split(",")):
        span = re.fullmatch(r"(\d+)-(\d+)", part)
        names += map(str, range(int(span[1]), int(span[2]) + 1)) if span else [part]
    return names


def _sequences(content: dict) -> dict[str, str]:
    """entity -> one-letter sequence, of the polypeptides; of several residues at one place the first counts."""
    kinds = dict(zip(content.get("_entity_poly.entity_id", []), content.get("_entity_poly.type", [])))
    columns = (content[f"_entity_poly_seq.{name}"] for name in ("entity_id", "num", "mon_id"))
    found: dict[str, dict[int, str]] = {}
    for entity, number, three in zip(*columns):
        if kinds.get(entity, _PROTEIN) == _PROTEIN:
            found.setdefault(entity, {}).setdefault(int(number), one_letter(three) or "X")
    return {entity: "".join(rows[n] for n in sorted(rows)) for entity, rows in found.items()}


def _atoms_by_chain(content: dict) -> dict[tuple[str, str], list[int]]:
    """(the authors' name of a chain, entity) -> rows of the atoms of its first model that belong to a residue."""
    site = {name: content[f"_atom_site.{name}"] for name in ("label_seq_id", "label_entity_id")}
    chains = content.get("_atom_site.auth_asym_id") or content["_atom_site.label_asym_id"]
    models = content.get("_atom_site.pdbx_PDB_model_num") or ["1"] * len(chains)
    found: dict[tuple[str, str], list[int]] = {}
    for row, (number, entity, chain, model) in enumerate(zip(*site.values(), chains, models)):
        if number not in (".", "?") and model == models[0]:
            found.setdefault((chain, entity), []).append(row)
    return found


def _place(number: str, length: int) -> int:
    """From 0.  Raises ValueError for one that the sequence has not."""
    if not number.isdecimal() or not 1 <= int(number) <= length:
        raise ValueError(f"an atom of residue {number}, and its sequence has {length}")
    return int(number) - 1


def _entry(stem: str, chain: str, sequence: str, rows: list[int], content: dict, of_file: tuple[float, str]) -> Entry:
    positions = np.zeros((len(sequence), residues.NUM_ATOM37, 3), np.float32)
    mask = np.zeros((len(sequence), residues.NUM_ATOM37), np.float32)
    occupancy = np.full(mask.shape, -1.0)
    numbers, names = content["_atom_site.label_seq_id"], content["_atom_site.label_atom_id"]
    shares = content.get("_atom_site.occupancy")
    axes = [content[f"_atom_site.Cartn_{axis}"] for axis in "xyz"]
    places = [_place(numbers[row], len(sequence)) for row in rows]
    letters = [one_letter(content["_atom_site.label_comp_id"][row]) or "X" for row in rows]
    of_sequence = {at for at, letter in zip(places, letters) if letter == sequence[at]}
    for row, at, letter in zip(rows, places, letters):
        if at in of_sequence and letter != sequence[at]:
            continue  # another residue that was seen in the same place
        name = names[row].strip('"')
        slot = ATOM_SLOTS.get("SD" if name == "SE" and sequence[at] == "M" else name)
        share = 1.0 if shares is None else number_of(shares[row])
        if slot is not None and share > occupancy[at, slot]:
            occupancy[at, slot], mask[at, slot] = share, 1
            positions[at, slot] = [float(axis[row]) for axis in axes]
    for at in np.nonzero(np.array(list(sequence)) == "R")[0]:
        order_arginine(positions[at], mask[at])
    return Entry(f"{stem}_{chain}", sequence, np.arange(len(sequence)), positions, mask, *of_file)
