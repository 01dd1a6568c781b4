"""rank_N.html: a prediction's structure, to be turned, and its numbers, in one file that needs no network.

The page and its script lie in `page/`, with 3Dmol.js 2.5.5 (npm, BSD-3-Clause, 3Dmol.LICENSE.txt beside it), which
draws the structure. All that comes from a prediction or from names stands in JSON, whose "<" are escaped.
"""

import base64
import html
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from apps.fold.features.sequences import chain_id
from apps.fold.model import residues
from apps.fold.output.confidence import Folded
from apps.fold.output.interfaces import interfaces
from apps.fold.output.plots import BANDS, SPECIES, rows_of_several
from apps.fold.output.topology import faults
from core.files import replace_file

_PAGE = Path(__file__).parent / "page"
_MOST_PAE = 1_200  # rows and columns; of more, the means of squares
_RELAXED = '<script type="application/json" id="relaxed">'


@dataclass(frozen=True)
class AlignmentPicture:
    """Letters [S, N] of the alignment's rows, 21 a gap, and how many rows are paired of each species."""

    letters: np.ndarray
    species: Counter[str] = field(default_factory=Counter)


def write_report(
    path: Path, folded: Folded, structure: str, name: str, origin: str, alignment: AlignmentPicture, note: str = ""
) -> None:
    """structure: the prediction's mmCIF; origin: what predicted it; note: a warning, shown first."""
    data = _data(folded, name, origin, alignment, note)
    parts = {
        "TITLE": html.escape(f"{name}, {origin}"),
        "CSS": _page("report.css"),
        "DATA": _json(data),
        "PREDICTED": _json(structure),
        "VIEWER": _page("3Dmol-min.js"),
        "SCRIPT": _page("report.js"),
    }
    first, *rest = _page("report.html").split("@")
    text = [first]
    for part in rest:  # names and what stands between them in turn
        text.append(parts.get(part, part))
    replace_file(path, "".join(text).encode())


def add_relaxed(path: Path, structure: str) -> None:
    """Let a report show the relaxed structure, too; structure: its mmCIF."""
    before, mark, after = path.read_text(encoding="utf-8").partition(_RELAXED)
    assert mark, path
    rest = after[after.index("</script>") :]
    replace_file(path, (before + mark + _json(structure) + rest).encode())


def _page(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """For within a script element, which "</script>" or "<!--" in a name would end."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _data(folded: Folded, name: str, origin: str, alignment: AlignmentPicture, note: str) -> dict[str, Any]:
    rows = folded.chain_rows()
    between, wrong = interfaces(folded), faults(folded)
    scores = [("mean pLDDT", f"{folded.mean_plddt:.1f}")]
    scores += [] if folded.ptm is None else [("pTM", f"{folded.ptm:.3f}")]
    if folded.iptm is not None:
        scores += [("ipTM", f"{folded.iptm:.3f}"), ("confidence", f"{folded.confidence:.1f}")]
    scores.append(("pairs of atoms that clash", f"{wrong['clashes']:,}"))
    scores.append(("knotted chains", ", ".join(wrong["knotted_chains"]) or "none"))
    chains = f" in {len(rows)} chains" if len(rows) > 1 else ""
    scores.append((f"residues{chains}", f"{len(folded.sequence):,}"))
    scores.append(("rows of the alignment", f"{len(alignment.letters):,}"))
    return {
        "name": name,
        "origin": f"predicted by {origin}",
        "note": note,
        "scores": scores,
        "bands": BANDS,
        "chains": [
            {"id": chain_id(number), "start": one.start, "length": one.stop - one.start}
            for number, one in enumerate(rows, 1)
        ],
        "sequence": folded.sequence,
        "plddt": [round(float(value), 1) for value in folded.plddt],
        "pae": None if folded.pae is None else _pae(folded.pae),
        "matrices": [(label, (between | wrong)[key]) for key, label in _MATRICES.items() if key in between | wrong],
        "coverage": _coverage(folded, alignment.letters),
        "pairing": alignment.species.most_common(SPECIES),
    }


_MATRICES = {
    "chain_pair_iptm": "ipTM of pairs of chains (of a chain with itself its pTM)",
    "pdockq2": "pDockQ2: row aligned on, column scored",
    "ipsae": "ipSAE: row aligned on, column scored",
    "chain_pair_clashes": "pairs of atoms that clash",
}


def _pae(pae: np.ndarray) -> dict[str, Any]:
    """Eighths of an Angstrom as bytes, row by row."""
    step = -(-len(pae) // _MOST_PAE)
    starts = np.arange(0, len(pae), step)
    sums = np.add.reduceat(np.add.reduceat(pae.astype(np.float64), starts, 0), starts, 1)
    widths = np.diff(np.append(starts, len(pae)))
    means = sums / (widths[:, None] * widths)
    values = np.clip(np.round(8 * means), 0, 255).astype(np.uint8)
    return {"size": len(starts), "step": step, "values": base64.b64encode(values.tobytes()).decode()}


def _coverage(folded: Folded, letters_SN: np.ndarray) -> dict[str, Any] | None:
    """Rows with a residue at each position; of several chains, if there are.  None without an alignment."""
    if len(letters_SN) < 2:
        return None
    there = letters_SN != residues.GAP
    found: dict[str, Any] = {"rows": len(letters_SN), "all": there.sum(0).tolist()}
    if len(folded.lengths) > 1:
        found["several"] = there[rows_of_several(there, folded.lengths)].sum(0).tolist()
    return found
