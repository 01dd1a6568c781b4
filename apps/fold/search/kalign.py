"""kalign (Debian's kalign, 3.x): two sequences below each other, as the original pipeline does it where a structure's
sequence is not that of the hit that names it.
"""

import logging
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np

from apps.fold.search.program import run
from core.config import UserError

log = logging.getLogger(__name__)


@lru_cache(1)
def has_kalign() -> bool:
    """Return whether kalign is on the PATH; where it is not, say once what that means."""
    there = shutil.which("kalign") is not None
    if not there:
        log.warning(
            "there is no kalign on the PATH: templates whose structure has another sequence than the hit are aligned "
            "by BLOSUM62 here, not as in the original; to have it as there, apt-get install kalign"
        )
    return there


def align_by_kalign(first: str, second: str) -> np.ndarray:
    """Pairs [n, 2] of residue numbers, from 0, that kalign puts below each other.

    Raises UserError with the last that it said, where it fails.
    """
    with tempfile.TemporaryDirectory(prefix="kalign-") as folder:
        given, aligned = Path(folder) / "in.fasta", Path(folder) / "out.fasta"
        given.write_text(f">1\n{first}\n>2\n{second}\n", encoding="utf-8")
        run(["kalign", "-i", given, "-o", aligned, "-format", "fasta"], "a template's two sequences")
        rows = ["".join(part.split("\n")[1:]) for part in aligned.read_text(encoding="utf-8").split(">")[1:]]
    if [row.replace("-", "") for row in rows] != [first, second] or len(rows[0]) != len(rows[1]):
        raise UserError("kalign gave back other sequences than it was given")
    numbers = [np.cumsum([letter != "-" for letter in row]) - 1 for row in rows]
    both = [a != "-" and b != "-" for a, b in zip(*rows, strict=True)]
    return np.stack(numbers, 1)[both]
