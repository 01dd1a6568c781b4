"""pLDDT along the chain, the PAE matrix, the structure, and the alignment's coverage and pairing, as PNGs."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from apps.fold.features.sequences import chain_id
from apps.fold.model import residues
from apps.fold.output.confidence import Folded
from core.files import save_figure

# Bands of confidence and their colours, as the AlphaFold database has them.
BANDS = ((0, 50, "#ff7d45"), (50, 70, "#ffdb13"), (70, 90, "#65cbf3"), (90, 100, "#0053d6"))
SPECIES = 30  # by name, in a plot


def plot(folder: Path, stem: str, folded: Folded, title: str) -> None:
    """STEM_plddt.png, STEM_structure.png, and STEM_pae.png where there is a PAE."""
    from matplotlib.figure import Figure  # pyplot is for windows, and takes longer to import than this to draw

    # Fixed margins: a layout that looks for them draws everything twice.
    figure = Figure(figsize=(8, 3))
    axes = figure.add_axes((0.07, 0.17, 0.915, 0.72))
    _draw_plddt(axes, folded)
    axes.set_title(f"{title}: mean pLDDT {folded.mean_plddt:.1f}", fontsize=10)
    for border in _borders(folded):
        axes.axvline(border, color="#333333", linewidth=0.8)
    _save(figure, folder / f"{stem}_plddt.png")
    figure = Figure(figsize=(5, 5))
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.9))
    _draw_structure(axes, folded)
    axes.set_title(f"{title}: mean pLDDT {folded.mean_plddt:.1f}", fontsize=10)
    _save(figure, folder / f"{stem}_structure.png")
    if folded.pae is None:
        return
    figure = Figure(figsize=(5, 4.2))
    axes = figure.add_axes((0.13, 0.12, 0.67, 0.8))
    end = len(folded.sequence) + 0.5
    image = axes.imshow(folded.pae, cmap="Greens_r", vmin=0, vmax=31.75, extent=(0.5, end, end, 0.5))
    figure.colorbar(image, cax=figure.add_axes((0.83, 0.12, 0.035, 0.8)), label="expected position error (Å)")
    axes.set(xlabel="scored residue", ylabel="aligned residue")
    for border in _borders(folded):
        axes.axvline(border, color="black", linewidth=0.8)
        axes.axhline(border, color="black", linewidth=0.8)
    _name_chains(axes, folded)
    of_interfaces = "" if folded.iptm is None else f", ipTM {folded.iptm:.2f}"
    axes.set_title(f"{title}: pTM {folded.ptm:.2f}{of_interfaces}", fontsize=10)
    _save(figure, folder / f"{stem}_pae.png")


def _save(figure: Any, path: Path) -> None:
    """A letter of a name that no font here has is drawn as a box; other files have the name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        save_figure(figure, path, 120)


def _borders(folded: Folded) -> list[float]:
    """Between chains."""
    return [rows.start + 0.5 for rows in folded.chain_rows()[1:]]


def _draw_plddt(axes: Any, folded: Folded) -> None:
    numbers = range(1, len(folded.plddt) + 1)
    for low, high, colour in BANDS:
        axes.axhspan(low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(numbers, folded.plddt, color="#333333", linewidth=1.2)
    axes.set(xlabel="residue", ylabel="pLDDT", ylim=(0, 100), xlim=(1, max(2, len(folded.plddt))))


def _name_chains(axes: Any, folded: Folded) -> None:
    """Above and right of a matrix of several chains; where there is no room for all, of some."""
    rows = folded.chain_rows()
    if len(rows) == 1:
        return
    for number, one in enumerate(rows, 1):
        if one.stop - one.start < len(folded.sequence) / 40:
            continue
        middle, place = (one.start + one.stop) / 2 / len(folded.sequence), {"fontsize": 8, "color": "#333333"}
        axes.text(middle, 0.99, chain_id(number), transform=axes.transAxes, ha="center", va="top", **place)
        axes.text(0.99, 1 - middle, chain_id(number), transform=axes.transAxes, ha="right", va="center", **place)


def _draw_structure(axes: Any, folded: Folded) -> None:
    """The trace of CA of each chain, seen along the direction of the least spread, in the colours of the bands.

    What is in front is drawn last, and wider. A letter without atoms (X) is a gap.
    """
    from matplotlib.collections import LineCollection

    ca = folded.positions[:, residues.CA].astype(np.float64)
    there = folded.mask[:, residues.CA] > 0
    centred = ca - (ca[there].mean(0) if there.any() else 0)
    axes_of_spread = np.linalg.svd(centred[there].T @ centred[there])[2]
    if np.linalg.det(axes_of_spread) < 0:  # a mirror image would be another molecule
        axes_of_spread[2] *= -1
    seen = centred @ axes_of_spread.T
    starts = np.concatenate([np.arange(rows.start, rows.stop - 1) for rows in folded.chain_rows()]).astype(np.int64)
    starts = starts[there[starts] & there[starts + 1]]
    depth = (seen[starts, 2] + seen[starts + 1, 2]) / 2
    order = np.argsort(depth, kind="stable")
    starts, depth = starts[order], depth[order]
    segments = np.stack([seen[starts, :2], seen[starts + 1, :2]], 1)
    confidence = (folded.plddt[starts] + folded.plddt[starts + 1]) / 2
    nearness = (depth - depth.min(initial=0)) / max(1e-6, np.ptp(depth) if len(depth) else 0.0)
    edges = 2.4 + 2.4 * nearness
    axes.add_collection(LineCollection(list(segments), colors="#222222", linewidths=edges + 1.2, capstyle="round"))
    colours = [_colour(value) for value in confidence]
    axes.add_collection(LineCollection(list(segments), colors=colours, linewidths=edges, capstyle="round"))
    for number, rows in enumerate(folded.chain_rows() if folded.lengths else [], 1):
        axes.annotate(chain_id(number), seen[rows.start, :2], fontsize=9, fontweight="bold")
    axes.scatter(*seen[there, :2].T, s=4, c=[_colour(value) for value in folded.plddt[there]])
    axes.set_aspect("equal", adjustable="datalim")  # a straight chain would leave a box without height
    axes.set_axis_off()


def _colour(plddt: float) -> str:
    return next((colour for _, high, colour in BANDS if plddt < high), BANDS[-1][2])


def plot_coverage(folder: Path, letters_SN: np.ndarray, lengths: tuple[int, ...], title: str) -> None:
    """coverage.png: how many rows of an alignment have a residue at each position, and of several chains, if there are.

    letters_SN  of the rows, 21 a gap; lengths: of the chains, one behind the other
    """
    from matplotlib.figure import Figure

    there, ends = letters_SN != residues.GAP, np.cumsum(lengths)
    figure = Figure(figsize=(8, 3))
    axes = figure.add_axes((0.09, 0.17, 0.895, 0.72))
    numbers = np.arange(1, letters_SN.shape[1] + 1)
    axes.plot(numbers, there.sum(0), color="#333333", linewidth=1.2, label="all rows")
    if len(lengths) > 1:
        joint = rows_of_several(there, lengths)
        axes.plot(numbers, there[joint].sum(0), color="#0053d6", linewidth=1.2, label="rows of several chains")
        axes.legend(fontsize=8)
        for end in ends[:-1]:
            axes.axvline(end + 0.5, color="#333333", linewidth=0.8)
    axes.set(xlabel="residue", ylabel="rows of the alignment", xlim=(1, max(2, len(numbers))))
    axes.set_ylim(bottom=0)
    axes.set_title(f"{title}: {len(letters_SN)} rows", fontsize=10)
    _save(figure, folder / "coverage.png")


def rows_of_several(there_SN: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """bool[S]: rows with residues of two chains or more."""
    parts = np.split(there_SN, np.cumsum(lengths)[:-1], 1)
    return np.sum([part.any(1) for part in parts], 0) > 1


def plot_pairing(folder: Path, counts: Counter[str], title: str) -> None:
    """pairing.png: paired rows of each species, of the 30 that have most."""
    from matplotlib.figure import Figure

    named = counts.most_common(SPECIES)
    figure = Figure(figsize=(8, 3))
    axes = figure.add_axes((0.09, 0.24, 0.895, 0.65))
    axes.bar(range(len(named)), [count for _, count in named], color="#65cbf3")
    axes.set_xticks(range(len(named)), [species for species, _ in named], rotation=90, fontsize=7)
    axes.set(ylabel="paired rows")
    axes.set_title(f"{title}: {sum(counts.values())} paired rows of {len(counts)} species", fontsize=10)
    _save(figure, folder / "pairing.png")
