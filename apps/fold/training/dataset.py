"""A folder of structures, with alignments where there are any, as chains to train on.

1. every file is read once: its chains, their sequences, their atoms, and the alignments that bear a chain's name
2. what cannot be used is refused with a line of its own; the rest trains
3. the result lies in a cache, by the contents of the files: a second run, and every other rank, finds it there

An alignment of chain A of 1abc.cif is 1abc_A.a3m (or .sto, or several files in a folder 1abc_A); where the file has one
protein chain, 1abc.a3m will do. Without one a chain is learned from its sequence alone.
"""

import hashlib
import json
import os
import shutil
import sys
import uuid
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from apps.fold.features.alignment import Alignment, check_query, merge, read_alignment, single_sequence
from apps.fold.features.entries import Entry, read_entries
from apps.fold.targets import ALIGNMENTS, STRUCTURES
from core.config import UserError

_VERSION = "1"
_CACHED = 256  # chains held in memory


@dataclass(frozen=True)
class Selection:
    """Which chains can be used."""

    min_residues: int = 10
    """chains of which fewer residues were seen are left out"""
    max_resolution: float = 9.0
    """structures that are less precise are left out, in Angstrom"""

    def refuses(self, entry: Entry) -> str | None:
        """Why a chain is not used; None where it is."""
        if entry.num_seen < self.min_residues:
            return f"only {entry.num_seen} residues were seen; at least {self.min_residues} are needed"
        if entry.resolution > self.max_resolution:
            return f"its resolution of {entry.resolution:g} Angstrom is beyond {self.max_resolution:g}"
        if set(entry.sequence) == {"X"}:
            return "none of its residues is an amino acid"
        return None


@dataclass(frozen=True)
class Listed:
    """A chain in the cache: what has to be known of it before it is read."""

    name: str
    num_residues: int
    num_rows: int
    file: Path


@dataclass(frozen=True)
class Example:
    """A chain with its alignment, whose first row is the chain's sequence."""

    entry: Entry
    alignment: Alignment


@dataclass(frozen=True)
class Dataset:
    """The chains of a folder in the order of their names, and a line for each that is not used."""

    chains: tuple[Listed, ...]
    refused: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.chains)

    def __getitem__(self, number: int) -> Example:
        return _load(self.chains[number].file)

    def digest(self) -> str:
        """Changes with the chains and with what is known of them."""
        named = "\n".join(f"{chain.name} {chain.file.parent.name}" for chain in self.chains)
        return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()


def prepare(
    structures: Path,
    alignments: Path | None,
    selection: Selection,
    cache: Path,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Read what the cache does not hold yet.

    share  (k, n): of n processes that prepare the same folder together this is number k

    Raises UserError where a folder is not there or holds no structure.
    """
    files = structure_files(structures)
    if alignments is not None and not alignments.is_dir():
        raise UserError(f"there is no folder of alignments at {alignments}")
    there = _alignment_files(alignments)
    first, step = share
    for path in files[first::step]:
        folder = cache / _key(path, there, selection)
        if not (folder / "index.json").exists():
            _read_one(path, there, selection, folder)


def load(structures: Path, alignments: Path | None, selection: Selection, cache: Path) -> Dataset:
    """What `prepare` put into the cache.  Raises UserError where no chain is left."""
    there = _alignment_files(alignments)
    chains: list[Listed] = []
    refused: list[str] = []
    for path in structure_files(structures):
        folder = cache / _key(path, there, selection)
        content = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        refused += [f"{path}{where}: {why}" for where, why in content["refused"]]
        chains += [
            Listed(c["name"], c["residues"], c["rows"], folder / f"{number}.npz")
            for number, c in enumerate(content["chains"])
        ]
    if not chains:
        why = f"; the first: {refused[0]}" if refused else ""
        raise UserError(f"no chain of {structures} can be used{why}")
    return Dataset(tuple(sorted(chains, key=lambda chain: chain.name)), tuple(refused))


def report_refused(dataset: Dataset) -> None:
    """A line on stderr for each file or chain that is not used."""
    for line in dataset.refused:
        print(f"left out: {line}", file=sys.stderr)


def structure_files(folder: Path) -> list[Path]:
    """Structures in a folder, in the order of their names (a file stands for itself)."""
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise UserError(f"there is no folder of structures at {folder}; give one of mmCIF or PDB files")
    found = sorted(path for path in folder.iterdir() if path.suffix in STRUCTURES)
    if not found:
        raise UserError(f"{folder} holds no structure; its files end in {', '.join(STRUCTURES)}")
    return found


def _alignment_files(folder: Path | None) -> dict[str, list[Path]]:
    """name -> files, of a folder's files and of its folders' files."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()) if folder is not None else ():
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        found.setdefault(path.name if path.is_dir() else path.stem, []).extend(
            one for one in inside if one.suffix in ALIGNMENTS
        )
    return found


def _key(path: Path, alignments: dict[str, list[Path]], selection: Selection) -> str:
    found = hashlib.blake2b(f"{_VERSION} {path.name} {selection}".encode(), digest_size=16)
    found.update(path.read_bytes())
    for name in sorted(alignments):
        if name == path.stem or name.startswith(f"{path.stem}_"):
            for file in alignments[name]:
                found.update(f"\0{name}/{file.name}\0".encode())
                found.update(file.read_bytes())
    return found.hexdigest()


def _read_one(path: Path, alignments: dict[str, list[Path]], selection: Selection, folder: Path) -> None:
    """A structure's chains into the cache: written aside and renamed, since other ranks may do the same."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    aside.mkdir()
    chains: list[dict[str, Any]] = []
    refused: list[tuple[str, str]] = []
    try:
        entries = read_entries(path)
    except UserError as error:
        entries = []
        refused.append(("", str(error).removeprefix(f"{path} ")))
    for entry in entries:
        files = alignments.get(entry.name) or (alignments.get(path.stem, []) if len(entries) == 1 else [])
        try:
            example = _example(entry, files, selection)
        except UserError as error:
            refused.append((f", chain {entry.name.removeprefix(path.stem + '_')}", str(error)))
            continue
        _save(aside / f"{len(chains)}.npz", example)
        chains.append({"name": entry.name, "residues": len(entry), "rows": len(example.alignment)})
    content = {"chains": chains, "refused": refused}
    (aside / "index.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    try:
        os.rename(aside, folder)
    except OSError:  # another rank was faster
        shutil.rmtree(aside)


def _example(entry: Entry, files: Sequence[Path], selection: Selection) -> Example:
    if why := selection.refuses(entry):
        raise UserError(why)
    read = [read_alignment(path) for path in files]
    for path, alignment in zip(files, read):
        check_query(alignment, entry.sequence, path)
    return Example(entry, merge([single_sequence(entry.sequence), *read]))


def _save(path: Path, example: Example) -> None:
    entry, alignment = example.entry, example.alignment
    np.savez_compressed(
        path,
        name=np.array(entry.name),
        sequence=np.array(entry.sequence),
        index=entry.index,
        positions=entry.positions,
        mask=entry.mask.astype(np.uint8),
        resolution=np.array(entry.resolution),
        letters=alignment.letters,
        deletions=alignment.deletions.astype(np.uint16),
    )


@lru_cache(_CACHED)
def _load(path: Path) -> Example:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"cannot read {path} of the cache ({error}); remove {path.parent} to read it anew") from error
    entry = Entry(
        str(arrays["name"]),
        str(arrays["sequence"]),
        arrays["index"],
        arrays["positions"],
        arrays["mask"].astype(np.float32),
        float(arrays["resolution"]),
    )
    letters = arrays["letters"]
    return Example(entry, Alignment(letters, arrays["deletions"].astype(np.int32), ("",) * len(letters)))
