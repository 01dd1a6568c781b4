"""pLDDT along the chain and the PAE matrix, as PNGs."""

from pathlib import Path
from typing import Any

from apps.fold.output.confidence import Folded

# Bands of confidence and their colours, as the AlphaFold database has them.
_BANDS = ((0, 50, "#ff7d45"), (50, 70, "#ffdb13"), (70, 90, "#65cbf3"), (90, 100, "#0053d6"))


def plot(folder: Path, stem: str, folded: Folded, title: str) -> None:
    """STEM_plddt.png, and STEM_pae.png where there is a PAE."""
    from matplotlib.figure import Figure  # pyplot is for windows, and takes longer to import than this to draw

    # Fixed margins: a layout that looks for them draws everything twice.
    figure = Figure(figsize=(8, 3))
    axes = figure.add_axes((0.07, 0.17, 0.915, 0.72))
    _draw_plddt(axes, folded)
    axes.set_title(f"{title}: mean pLDDT {folded.mean_plddt:.1f}", fontsize=10)
    for border in _borders(folded):
        axes.axvline(border, color="#333333", linewidth=0.8)
    figure.savefig(folder / f"{stem}_plddt.png", dpi=120)
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
    of_interfaces = "" if folded.iptm is None else f", ipTM {folded.iptm:.2f}"
    axes.set_title(f"{title}: pTM {folded.ptm:.2f}{of_interfaces}", fontsize=10)
    figure.savefig(folder / f"{stem}_pae.png", dpi=120)


def _borders(folded: Folded) -> list[float]:
    """Between chains."""
    return [rows.start + 0.5 for rows in folded.chain_rows()[1:]]


def _draw_plddt(axes: Any, folded: Folded) -> None:
    numbers = range(1, len(folded.plddt) + 1)
    for low, high, colour in _BANDS:
        axes.axhspan(low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(numbers, folded.plddt, color="#333333", linewidth=1.2)
    axes.set(xlabel="residue", ylabel="pLDDT", ylim=(0, 100), xlim=(1, max(2, len(folded.plddt))))
