"""Databases of HH-suite's, made by its own programs of families that are made up."""

import random
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# Debian's wrapper of this program looks for it in the wrong folder.
_CSTRANSLATE = Path("/usr/libexec/hhsuite/cstranslate-plain")
_DATA = Path("/usr/share/hhsuite/data")
LETTERS = "ACDEFGHIKLMNPQRSTVWY"

HAS_HHSUITE = bool(shutil.which("hhblits") and shutil.which("hhsearch")) and _CSTRANSLATE.exists()


def like(sequence: str, draw: random.Random, changed: float) -> str:
    """The sequence with about this share of its letters replaced by random ones."""
    return "".join(draw.choice(LETTERS) if draw.random() < changed else letter for letter in sequence)


def family(name: str, sequence: str, members: int, draw: random.Random, changed: float = 0.3) -> list[tuple[str, str]]:
    """(header, letters) of a sequence and others like it, `changed` of their letters random.

    Their headers are like those of UniRef, which have '>' in them where a protein cuts or makes sugars.
    """
    rows = [sequence, *(like(sequence, draw, changed) for _ in range(members - 1))]
    names = [name, *(f"{name}_{number}" for number in range(1, members))]
    return [(f"{one} (1->4)-alpha-D-glucan lyase n=1", row) for one, row in zip(names, rows, strict=True)]


def database(prefix: Path, families: Mapping[str, Sequence[tuple[str, str]]]) -> Path:
    """The prefix of a database of these alignments, which are the lines of A3M files: (header, letters)."""
    parts = prefix.with_name(f"{prefix.name}-parts")
    parts.mkdir(parents=True)
    for name, rows in families.items():
        made = parts / f"{name}.a3m"
        made.write_text("".join(f">{header}\n{letters}\n" for header, letters in rows))
        _run(parts, "hhmake", "-i", made, "-o", made.with_suffix(".hhm"), "-v", "0")
    for part in ("a3m", "hhm"):
        files = (prefix.with_name(f"{prefix.name}_{part}.{suffix}") for suffix in ("ffdata", "ffindex"))
        # Names without a folder: an index cuts a name that is long, here in the middle of a folder's.
        _run(parts, "ffindex_build", "-s", *files, *sorted(file.name for file in parts.glob(f"*.{part}")))
    profiles, states = (prefix.with_name(f"{prefix.name}_{part}") for part in ("a3m", "cs219"))
    context = ("-A", _DATA / "cs219.lib", "-D", _DATA / "context_data.lib")
    _run(parts, _CSTRANSLATE, "-f", "-x", "0.3", "-c", "4", "-I", "a3m", "-i", profiles, "-o", states, *context)
    return prefix


def _run(folder: Path, *arguments: str | Path) -> None:
    done = subprocess.run(arguments, cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
