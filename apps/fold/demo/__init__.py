"""PDB entries that the package carries, as the archive gives them (CC0).

structures/  1UBI, 1EJG and 1A8O, to learn from
heldout/     1A7G, held out
"""

from pathlib import Path

FOLDER = Path(__file__).parent
STRUCTURES, HELDOUT = FOLDER / "structures", FOLDER / "heldout"
