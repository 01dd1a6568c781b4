"""pLDDT along the chain and the PAE matrix, as PNGs."""

from pathlib import Path
from typing import Any

from apps.fold.output.confidence import Folded

# Bands of confidence and their colours, as the AlphaFold database has them.
_BANDS = ((0, 50, "#ff7d45"), (50, 70, "#ffdb13"), (70, 90, "#65cbf3"), (90, 100, "#0053d6"))


def plot(folder: Path, stem: str, folded: Folded, title: str) -> None:
    """STEM_plddt.png, and STEM_pae.png where there is a PAE."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    _draw_plddt(axes, folded)
    axes.set_title(f"{title}: mean pLDDT {folded.mean_plddt:.1f}", fontsize=10)
    figure.savefig(folder / f"{stem}_plddt.png", dpi=120)
    plt.close(figure)
    if folded.pae is None:
        return
    figure, axes = plt.subplots(figsize=(5, 4.2), layout="constrained")
    end = len(folded.sequence) + 0.5
    image = axes.imshow(folded.pae, cmap="Greens_r", vmin=0, vmax=31.75, extent=(0.5, end, end, 0.5))
    figure.colorbar(image, label="expected position error (Å)")
    axes.set(xlabel="scored residue", ylabel="aligned residue")
    axes.set_title(f"{title}: pTM {folded.ptm:.2f}", fontsize=10)
    figure.savefig(folder / f"{stem}_pae.png", dpi=120)
    plt.close(figure)


def _draw_plddt(axes: Any, folded: Folded) -> None:
    numbers = range(1, len(folded.plddt) + 1)
    for low, high, colour in _BANDS:
        axes.axhspan(low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(numbers, folded.plddt, color="#333333", linewidth=1.2)
    axes.set(xlabel="residue", ylabel="pLDDT", ylim=(0, 100), xlim=(1, max(2, len(folded.plddt))))
