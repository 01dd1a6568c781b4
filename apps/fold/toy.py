"""PDB entries that the package carries, as the archive gives them (CC0), and a toy that has learned them by heart.

demo/structures/  1UBI, 1EJG and 1A8O, to learn from
demo/heldout/     1A7G, held out
demo/dimers/      residues 22 to 45 and 25 to 45 of the two chains of 1A8O's assembly (not quite alike, as chains alike
                  are learned less surely); 3 to 22 and 52 to 71 of 1UBI, as if of two chains
demo/demo-tiny/   what `fold train --recipe tiny`, then tiny_confidence made of them; `fold predict` takes it by default
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "demo"
STRUCTURES, HELDOUT, DEMO_WEIGHTS = FOLDER / "structures", FOLDER / "heldout", FOLDER / "demo-tiny"
DIMERS = FOLDER / "dimers"
NOTE = "not for science"
"""what its predictions are marked with"""
