"""PDB entries that the package carries, as the archive gives them (CC0), and a toy that has learned them by heart.

structures/  1UBI, 1EJG and 1A8O, to learn from
heldout/     1A7G, held out
demo-tiny/   what `fold train --recipe tiny`, then tiny_confidence made of them; what `fold predict` takes by default
"""

from pathlib import Path

FOLDER = Path(__file__).parent
STRUCTURES, HELDOUT, DEMO_WEIGHTS = FOLDER / "structures", FOLDER / "heldout", FOLDER / "demo-tiny"
NOTE = "not for science"
"""what its predictions are marked with"""
