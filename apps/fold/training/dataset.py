"""A folder of structures, with alignments where there are any, as chains to train on.

1. every file is read once: its chains, their sequences, their atoms, and the alignments that bear a chain's name
2. what cannot be used is refused with a line of its own; the rest trains
3. the result lies in a cache, by the contents of the files: a second run, and every other rank, finds it there, and
   compares it with its checksum where it reads it

An alignment of chain A of 1abc.cif is 1abc_A.a3m (or .sto, or several files in a folder 1abc_A); where the file has one
protein chain, 1abc.a3m will do. Without one a chain is learned from its sequence alone.

Its templates are those of hhsearch's hits, 1abc_A.hhr beside the alignments, whose structures lie in a folder of mmCIF
files; or, where there are no hits, the structures in that folder's 1abc_A/, or 1abc_A.cif.

Models of complexes learn from a file's chains together (`Selection.complexes`): those of its first assembly. Chains of
one sequence have the alignments of the first that has any; what is called uniprot* among them, or 1abc_A.uniprot.a3m,
pairs rows of different chains, as in a prediction (apps/fold/complexes.py).

Predictions (`Selection.confidence`) lie in the folders that `fold predict` wrote, one a record, whose name is theirs;
residues of little confidence count as not seen (distillation.py).
"""

import hashlib
import io
import os
import re
import shutil
import sys
import uuid
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from apps.fold.complexes import is_uniprot, read_for_pairing
from apps.fold.features.alignment import Alignment, check_query, merge, read_alignment, single_sequence
from apps.fold.features.complexes import ChainInput
from apps.fold.features.entries import Entry, read_entries
from apps.fold.features.hhr import check_hits, read_hhr
from apps.fold.features.structures import structure_of
from apps.fold.features.templates import Allowed, Template, read_templates, templates_of_hits
from apps.fold.features.text import read_text, unpacked_name
from apps.fold.targets import ALIGNMENTS, HITS, STRUCTURES
from apps.fold.training.complexes import ComplexExample, complex_of_arrays, example_of, save_complex
from apps.fold.training.distillation import Confidence, beside_prediction, prediction_files, read_prediction
from core.config import UserError
from core.files import Damaged, crc32, naming, signed, stamp, unsigned, write_file

_VERSION = "6"
_CACHED = 256  # chains held in memory


@dataclass(frozen=True)
class Selection:
    """The choice of chains that can be used."""

    min_residues: int = 10
    """chains of which fewer residues were seen are left out"""
    max_resolution: float = 9.0
    """structures that are less precise are left out, in Angstrom"""
    max_template_date: str = ""
    """templates that were published later are left out"""
    complexes: bool = False
    """whether a file's chains are learned from together"""
    max_chains: int = 20
    """complexes of more chains are left out"""
    confidence: Confidence | None = None
    """of predictions, which residues are targets; None: structures are experiments"""

    def refuses(self, entry: Entry) -> str | None:
        """The reason not to use a chain; None where it is used."""
        if entry.num_seen < self.min_residues:
            kind = "were seen" if self.confidence is None else f"have a confidence of {self.confidence.least:g} or more"
            return f"only {entry.num_seen} residues {kind}; at least {self.min_residues} are needed"
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
    num_templates: int
    file: Path
    crc32: str


@dataclass(frozen=True)
class Example:
    """A chain with its alignment, whose first row is the chain's sequence, and its templates, the best first."""

    entry: Entry
    alignment: Alignment
    templates: tuple[Template, ...] = ()


@dataclass(frozen=True)
class Beside:
    """Files in the folders beside the structures: name -> files of alignments, of hits, of templates' structures."""

    alignments: dict[str, list[Path]] = field(default_factory=dict)
    hits: dict[str, list[Path]] = field(default_factory=dict)
    structures: dict[str, list[Path]] = field(default_factory=dict)
    templates: Path | None = None

    def of(self, stem: str) -> list[Path]:
        """All files that bear the name of a structure, or of a chain of it, and the structures that hits name."""
        found = []
        for files in (self.alignments, self.hits, self.structures):
            names = (name for name in sorted(files) if name == stem or name.startswith(f"{stem}_"))
            found += [file for name in names for file in files[name]]
        return found


def beside(alignments: Path | None, templates: Path | None = None) -> Beside:
    """List the folders' files.  Raises UserError for one that is not there."""
    for folder, of in ((alignments, "alignments"), (templates, "templates")):
        if folder is not None and not folder.is_dir():
            raise UserError(f"there is no folder of {of} at {folder}")
    hits = {} if templates is None else _files_by_name(alignments, HITS)
    return Beside(_files_by_name(alignments, ALIGNMENTS), hits, _files_by_name(templates, STRUCTURES), templates)


@dataclass(frozen=True)
class Dataset:
    """The chains, or complexes, of a folder in the order of their names, and a line for each that is not used."""

    chains: tuple[Listed, ...]
    refused: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.chains)

    def __getitem__(self, number: int) -> Example | ComplexExample:
        return _load(self.chains[number].file, self.chains[number].crc32)

    def digest(self) -> str:
        """Changes with the chains and with what is known of them."""
        named = "\n".join(f"{chain.name} {chain.file.parent.name}" for chain in self.chains)
        return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()


Clusters = tuple[tuple[int, ...], ...]
"""Of a dataset's chains, by their numbers."""


def clusters_of(dataset: Dataset, file: Path) -> Clusters:
    """The chains in the clusters of a file, one a line, of names such as 1UBI_A, in any case, with blanks between them.

    A chain that the file does not name is a cluster by itself. Raises UserError for a file that cannot be read, that
    names a chain twice, or that names none of the dataset's.
    """
    lines = [line.upper().split() for line in read_text(file, "a file with a cluster of chains a line").splitlines()]
    place: dict[str, int] = {}
    for number, names in enumerate(lines):
        for name in names:
            if place.setdefault(name, number) != number:
                raise UserError(f"data.clusters={file}: {name} is in two clusters; name each chain once")
    found: dict[str | int, list[int]] = {}
    for number, chain in enumerate(dataset.chains):
        found.setdefault(place.get(chain.name.upper(), chain.name), []).append(number)
    if not any(isinstance(key, int) for key in found):
        raise UserError(
            f"data.clusters={file} names none of the {len(dataset)} chains, such as {dataset.chains[0].name}; give the "
            "clusters of these"
        )
    return tuple(map(tuple, found.values()))


def prepare(
    structures: Path,
    there: Beside,
    selection: Selection,
    cache: Path,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Read what the cache does not hold yet.

    share  (k, n): of n processes that prepare the same folder together this is number k

    Raises UserError where a folder is not there or holds no structure.
    """
    first, step = share
    for path in _files_of(structures, selection)[first::step]:
        folder = cache / _key(path, there, selection)
        if not (folder / "index.json").exists():
            _read_one(path, there, selection, folder)


def load(structures: Path, there: Beside, selection: Selection, cache: Path) -> Dataset:
    """Load what `prepare` put into the cache.  Raises UserError where no chain is left."""
    chains: list[Listed] = []
    refused: list[str] = []
    for path in _files_of(structures, selection):
        folder = cache / _key(path, there, selection)
        content = _index(folder)
        refused += [f"{path}{where}: {why}" for where, why in content["refused"]]
        chains += [
            Listed(c["name"], c["residues"], c["rows"], c["templates"], folder / f"{number}.npz", c["crc32"])
            for number, c in enumerate(content["chains"])
        ]
    if not chains:
        why = f"; the first: {refused[0]}" if refused else ""
        raise UserError(f"no chain of {structures} can be used{why}")
    return Dataset(tuple(sorted(chains, key=lambda chain: chain.name)), tuple(refused))


def _index(folder: Path) -> dict[str, Any]:
    """Raises UserError for one that is not as it was written."""
    try:
        return unsigned((folder / "index.json").read_bytes())
    except Damaged as error:
        raise UserError(f"{folder / 'index.json'} of the cache {error}; remove {folder} to read it anew") from None


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
    found = sorted(path for path in folder.iterdir() if unpacked_name(path).suffix in STRUCTURES)
    if not found:
        raise UserError(f"{folder} holds no structure; its files end in {', '.join(STRUCTURES)}")
    return found


def _files_of(folder: Path, selection: Selection) -> list[Path]:
    return structure_files(folder) if selection.confidence is None else prediction_files(folder)


def _stem(path: Path, selection: Selection) -> str:
    """What the files beside a structure are called by: the file's name, of a prediction its record's."""
    return unpacked_name(path).stem if selection.confidence is None else path.parent.name


def _files_by_name(folder: Path | None, suffixes: tuple[str, ...]) -> dict[str, list[Path]]:
    """name -> files, of a folder's files and of its folders' files."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()) if folder is not None else ():
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        files = [one for one in inside if unpacked_name(one).suffix in suffixes]
        if files:
            found.setdefault(path.name if path.is_dir() else unpacked_name(path).stem, []).extend(files)
    return found


def _key(path: Path, there: Beside, selection: Selection) -> str:
    """A key of the contents of all files but those that hits name, and a prediction's confidences: these are known by
    name, size and time of change."""
    stem = _stem(path, selection)
    found = hashlib.blake2b(f"{_VERSION} {stem} {path.name} {selection} {there.templates}".encode(), digest_size=16)
    found.update(path.read_bytes())
    if selection.confidence is not None:
        found.update(_stat(beside_prediction(path, selection.confidence.by)))
    for file in there.of(stem):
        found.update(f"\0{file.parent.name}/{file.name}\0".encode())
        found.update(file.read_bytes())
        if unpacked_name(file).suffix in HITS and there.templates is not None:
            for structure in _named_by(file, there.templates):
                found.update(_stat(structure))
    return found.hexdigest()


def _stat(path: Path) -> bytes:
    if not path.exists():
        return f"{path.name} is not there\0".encode()
    stat = path.stat()
    return f"{path.name} {stat.st_size} {stat.st_mtime_ns}\0".encode()


def _named_by(hits: Path, folder: Path) -> list[Path]:
    """The structures in a folder that hits name."""
    entries = re.findall(r"^>(\w{4})_", read_text(hits, "a result of hhsearch", "latin-1"), re.MULTILINE)
    found = []
    for entry in sorted(set(entries)):
        try:
            found.append(structure_of(entry.lower(), folder))
        except UserError:
            continue
    return found


def _read_one(path: Path, there: Beside, selection: Selection, folder: Path) -> None:
    """A structure's chains into the cache: written aside and renamed, since other ranks may do the same."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    aside.mkdir()
    try:
        _put_chains(path, there, selection, aside)
        with suppress(OSError):  # another rank was faster
            os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _put_chains(path: Path, there: Beside, selection: Selection, folder: Path) -> None:
    chains: list[dict[str, Any]] = []
    refused: list[tuple[str, str]] = []
    stem = _stem(path, selection)
    try:
        if selection.confidence is None:
            entries = read_entries(path, assembly=selection.complexes)
        else:
            entries = [read_prediction(path, selection.confidence)]
    except UserError as error:
        entries = []
        refused.append(("", str(error).removeprefix(f"{path} ")))
    if selection.complexes:
        _put_complex(path, entries, there, selection, folder, chains, refused)
        entries = []
    for entry in entries:
        names = [entry.name, *([stem] if len(entries) == 1 and entry.name != stem else [])]
        try:
            example = _example(entry, names, there, selection)
        except UserError as error:
            chain = entry.name.removeprefix(f"{stem}_")
            refused.append(("" if chain == stem else f", chain {chain}", str(error)))
            continue
        file = folder / f"{len(chains)}.npz"
        with naming(file):
            _save(file, example)
        sizes = {"residues": len(entry), "rows": len(example.alignment), "templates": len(example.templates)}
        chains.append({"name": entry.name, **sizes, "crc32": stamp(file)["crc32"]})
    write_file(folder / "index.json", signed({"chains": chains, "refused": refused}))


def _put_complex(
    path: Path,
    entries: list[Entry],
    there: Beside,
    selection: Selection,
    folder: Path,
    chains: list[dict[str, Any]],
    refused: list[tuple[str, str]],
) -> None:
    """The chains of a file together, without those that cannot be used."""
    stem = unpacked_name(path).stem
    used, inputs = [], []
    of_sequence: dict[str, ChainInput] = {}
    for entry in entries:
        try:
            if why := selection.refuses(entry):
                raise UserError(why)
            if entry.sequence not in of_sequence:
                alike = [one for one in entries if one.sequence == entry.sequence]
                of_sequence[entry.sequence] = _chain_input(alike, stem, len(entries) == len(alike), there, selection)
        except UserError as error:
            refused.append((f", chain {entry.name.removeprefix(stem + '_')}", str(error)))
            continue
        used.append(entry)
        inputs.append(of_sequence[entry.sequence])
    if len(used) > selection.max_chains:
        refused.append(("", f"its assembly has {len(used)} chains; at most {selection.max_chains} are taken"))
    elif used:
        example = example_of(stem, used, inputs)
        file = folder / "0.npz"
        with naming(file):
            save_complex(file, example)
        sizes = {"rows": len(example.complex.msa), "templates": sum(example.num_templates)}
        chains.append({"name": stem, "residues": len(example), **sizes, "crc32": stamp(file)["crc32"]})


def _chain_input(alike: list[Entry], stem: str, alone: bool, there: Beside, selection: Selection) -> ChainInput:
    """A sequence with what lies beside the file of the chains that have it, or, if it is the only one, of the file."""
    entry = alike[0]
    names = [re.sub(r"-\d+$", "", one.name) for one in alike] + ([stem] if alone else [])
    files = _first(there.alignments, names)
    of_uniprot = [path for path in files if is_uniprot(path)] + _first(
        there.alignments, [f"{name}.uniprot" for name in names]
    )
    read = [single_sequence(entry.sequence)]
    for path in files:
        if path not in of_uniprot:
            read.append(read_alignment(path))
            check_query(read[-1], entry.sequence, path)
    paired = read_for_pairing(entry.sequence, of_uniprot)
    return ChainInput(entry.sequence, merge(read), paired, tuple(_templates(entry, names, there, selection)))


def _example(entry: Entry, names: Sequence[str], there: Beside, selection: Selection) -> Example:
    if why := selection.refuses(entry):
        raise UserError(why)
    files = _first(there.alignments, names)
    read = [read_alignment(path) for path in files]
    for path, alignment in zip(files, read):
        check_query(alignment, entry.sequence, path)
    merged = merge([single_sequence(entry.sequence), *read])
    return Example(entry, merged, tuple(_templates(entry, names, there, selection)))


def _first(files: dict[str, list[Path]], names: Sequence[str]) -> list[Path]:
    return next((files[name] for name in names if name in files), [])


def _templates(entry: Entry, names: Sequence[str], there: Beside, selection: Selection) -> list[Template]:
    """By hits, or of structures that bear the chain's whole name: the folder may hold the chain's own file."""
    files = _first(there.hits, names)
    if not files or there.templates is None:
        return read_templates(_first(there.structures, names[:1]), entry.sequence)
    hits = []
    for path in files:
        hits += read_hhr(path)
        check_hits(hits, entry.sequence, path)
    hits.sort(key=lambda hit: -hit.sum_probs)
    allowed = Allowed(selection.max_template_date).before(entry)
    return templates_of_hits(hits, entry.sequence, there.templates, allowed)[0]


def _save(path: Path, example: Example) -> None:
    entry, alignment, templates = example.entry, example.alignment, example.templates
    N = len(entry)
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
        template_names=np.array([one.name for one in templates], np.str_),
        template_aatype=np.array([one.aatype for one in templates], np.uint8).reshape(-1, N),
        template_positions=np.array([one.positions for one in templates], np.float32).reshape(-1, N, 37, 3),
        template_mask=np.array([one.mask for one in templates], np.uint8).reshape(-1, N, 37),
    )


@lru_cache(_CACHED)
def _load(path: Path, expected: str) -> Example | ComplexExample:
    try:
        raw = path.read_bytes()
        if crc32(raw) != expected:
            raise ValueError("its bytes have another checksum than when they were written")
        with np.load(io.BytesIO(raw), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"cannot read {path} of the cache ({error}); remove {path.parent} to read it anew") from error
    if "asym_id" in arrays:
        return complex_of_arrays(arrays)
    entry = Entry(
        str(arrays["name"]),
        str(arrays["sequence"]),
        arrays["index"],
        arrays["positions"],
        arrays["mask"].astype(np.float32),
        float(arrays["resolution"]),
    )
    letters = arrays["letters"]
    rows = zip(*(arrays[f"template_{name}"] for name in ("names", "aatype", "positions", "mask")))
    templates = [Template(str(n), a.astype(np.int64), x, m.astype(np.float32)) for n, a, x, m in rows]
    alignment = Alignment(letters, arrays["deletions"].astype(np.int32), ("",) * len(letters))
    return Example(entry, alignment, tuple(templates))
