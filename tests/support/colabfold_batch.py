"""`python -m tests.support.colabfold_batch PROGRAM [MODE …]`: the whole of ColabFold, unchanged, against our server.

PROGRAM is the colabfold_batch of an environment of its own (pip install 'colabfold[alphafold]'). It searches for
proteins, complexes and templates in each of its modes, makes its features of what it gets (--msa-only: without weights
it folds nothing), and takes the A3M files of `fold msa --server`. A line for each run that ends as it should.
colabfold_structure.py goes on to structures, by weights that it makes.
"""

import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from apps.fold.features.entries import read_entries
from apps.fold.msa import main as search
from apps.fold.toy import HELDOUT
from tests.support.hhsuite import LETTERS, database, family, like
from tests.support.msa_clients import KEY
from tests.support.msa_server import CRAMBIN, UBIQUITIN, Running, configured, databases, serving

STRUCTURE = read_entries(HELDOUT / "1a7g.cif")[0].sequence
RECORDS = {
    "alone": CRAMBIN,
    "templates": like(STRUCTURE, random.Random(2), 0.1),
    "strange": UBIQUITIN[:20].lower() + "XUBZ" + UBIQUITIN[24:],
    "copies": f"{CRAMBIN}:{CRAMBIN}",
    "several": f"{UBIQUITIN}:{CRAMBIN}:{UBIQUITIN}:{STRUCTURE}",
}
MODES = (
    "",
    "--templates",
    "--pair-strategy complete --msa-mode mmseqs2_uniref_env_envpair",
    "--pair-mode unpaired --msa-mode mmseqs2_uniref",
    "--pair-mode paired",
)
_WRONG = re.compile(r"Could not|Traceback|ERROR|WARNING: (?!no GPU)")


def options(folder: Path) -> dict[str, Any]:
    """A server's: alignments and structures by the real tools, and keys."""
    draw = random.Random(1)
    families = {
        f"{number}xyz_B": family(f"{number}XYZ_B", "".join(draw.choice(LETTERS) for _ in range(90)), 6, draw)
        for number in range(1, 8)
    }
    structures = database(folder / "pdb70", {**families, "1a7g_E": family("1A7G_E", STRUCTURE, 6, draw)})
    (folder / "keys").write_text(f"{KEY} anyone\n")
    more = {"hhsearch_databases": (structures,), "templates": HELDOUT, "jackhmmer": "jackhmmer"}
    return more | {"api_key_file": folder / "keys"}


def run(program: str, given: Path, out: Path, url: str, *options: str) -> str:
    """What the program says, by its own log."""
    words = [program, "--host-url", url, *options, str(given), str(out)]
    done = subprocess.run(words, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False)
    said = (out / "log.txt").read_text() if (out / "log.txt").exists() else ""
    wrong = _WRONG.search(said)
    if done.returncode or wrong:
        raise SystemExit(f"{' '.join(words[1:])}: exit code {done.returncode}\n{said}\n{done.stderr[-3000:]}")
    return said


def rows(path: Path) -> list[tuple[str, str]]:
    """Names and letters of an A3M file, without those that a query has of its own."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    found = list(zip((line.lstrip(">") for line in lines[::2]), lines[1::2], strict=True))
    return [row for row in found if not re.fullmatch(r"10\d|query", row[0])]


def main(program: str, *modes: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        given = folder / "in.fasta"
        given.write_text("".join(f">{name}\n{letters}\n" for name, letters in RECORDS.items()))
        with serving(configured(folder, *databases(folder), **options(folder)), KEY) as server:
            url = server.url.replace("//", f"//anyone:{KEY}@")
            for mode in modes or MODES:
                out = folder / f"out{mode}".replace(" ", "")
                said = run(program, given, out, url, "--msa-only", *mode.split())
                there = {path.stem for path in out.glob("*.a3m")}
                assert there == set(RECORDS), there
                depths = {name: len(rows(out / f"{name}.a3m")) for name in RECORDS}
                found = sorted(set(re.findall(r"found templates: (\[.*\])", said)))
                assert found == (["['1a7g_E']"] if "--templates" in mode else []), found
                print(f"colabfold_batch {mode or 'as it is'}: rows {depths}", flush=True)
            if not modes or "" in modes:
                _compare(program, folder, given, server, url)


def _compare(program: str, folder: Path, given: Path, server: Running, url: str) -> None:
    """The A3M files of its mode without options have the rows of ours, in our order, and it takes ours."""
    (folder / "key").write_text(f"{server.key}\n")
    words = ["--server", server.url, "--server-key-file", str(folder / "key"), "--out", str(folder / "ours")]
    assert search([str(given), *words, "--cache", str(folder / "mine")]) == 0
    for name in RECORDS:
        theirs, ours = (rows(folder / where / f"{name}.a3m") for where in ("out", "ours"))
        assert theirs == ours, name
    print("fold msa --server writes the same rows", flush=True)
    for name in ("copies", "several"):
        run(program, folder / "ours" / f"{name}.a3m", folder / "again", url, "--msa-only")
    print("colabfold_batch takes the A3M of a complex that fold msa --server writes", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
