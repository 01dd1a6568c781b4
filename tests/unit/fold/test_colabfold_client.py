"""ColabFold's own client, unchanged, against `fold msa-server` with the real tools.

Its pauses between two looks, 5 s and more, are made short; nothing else of it is.
"""

import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from colabfold import colabfold

from apps.fold.complexes import read_for_pairing
from apps.fold.features.alignment import parse_a3m
from apps.fold.features.entries import read_entries
from apps.fold.features.hhr import read_hhr
from apps.fold.features.pairing import pair_rows
from apps.fold.msa import main
from apps.fold.service.answers import _cigar
from apps.fold.toy import HELDOUT
from tests.support.hhsuite import HAS_HHSUITE, LETTERS, database, family, like
from tests.support.msa_server import CRAMBIN, UBIQUITIN, Running, configured, databases, serving

STRUCTURE = read_entries(HELDOUT / "1a7g.cif")[0]

pytestmark = pytest.mark.skipif(
    not HAS_HHSUITE or shutil.which("jackhmmer") is None,
    reason="no jackhmmer or HH-suite; ends where Debian's hmmer and hhsuite are installed (.ci/run does)",
)

Client = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    draw = random.Random(1)
    families = {
        f"{number}xyz_B": family(f"{number}XYZ_B", "".join(draw.choice(LETTERS) for _ in range(90)), 6, draw)
        for number in range(1, 8)
    }
    own = family("1A7G_E", STRUCTURE.sequence, 6, draw)
    structures = database(folder / "pdb70", {**families, "1a7g_E": own})
    paths = [*databases(folder), folder / "bfd.fasta"]
    paths[-1].write_text("".join(f">MGYP{n}\n{like(STRUCTURE.sequence, draw, 0.2)}\n" for n in range(4)))
    more = {"hhsearch_databases": (structures,), "templates": HELDOUT, "jackhmmer": "jackhmmer"}
    with serving(configured(folder, *paths, **more)) as server:
        yield server


@pytest.fixture
def ask(running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(colabfold, "time", SimpleNamespace(sleep=lambda _: time.sleep(0.05)))

    def asked(sequences: Any, **options: Any) -> Any:
        given = {"host_url": running.url, "user_agent": "megalith/tests"}
        return colabfold.run_mmseqs2(sequences, str(tmp_path / "asked"), **given | options)

    return asked


def rows(a3m: str) -> list[tuple[str, str]]:
    lines = a3m.splitlines()
    return list(zip(lines[::2], lines[1::2], strict=True))


def test_monomers(ask: Client) -> None:
    found = ask([UBIQUITIN, CRAMBIN, UBIQUITIN])
    assert found[0] == found[2] != found[1]
    assert rows(found[0])[0] == (">101", UBIQUITIN)
    names = [name for name, _ in rows(found[0])]
    assert sum(name.startswith(">UniRef90_") for name in names) == 8
    assert sum(name.startswith(">MGYP") for name in names) == 8
    without = ask(UBIQUITIN, use_env=False)
    assert [name for name, _ in rows(without[0])] == [n for n in names if "MGYP" not in n][:9]
    assert ask(UBIQUITIN, use_filter=False) == [found[0]], "so few rows are not filtered"
    assert len(parse_a3m(found[1])) == len(rows(found[1]))


def test_pairs_are_those_of_fold_predict(ask: Client, folder: Path, tmp_path: Path) -> None:
    found = ask([UBIQUITIN, CRAMBIN], use_pairing=True, use_env=False)
    (tmp_path / "in.fasta").write_text(f">two\n{UBIQUITIN}:{CRAMBIN}\n")
    options = [str(tmp_path / "in.fasta"), "--databases", str(folder / "uniprot.fasta")]
    assert main([*options, "--out", str(tmp_path / "out"), "--cache", str(folder / "cache")]) == 0
    chains = [
        read_for_pairing(sequence, [tmp_path / "out" / name / "uniprot.a3m"])
        for sequence, name in ((UBIQUITIN, "two_A"), (CRAMBIN, "two_B"))
    ]
    expected = pair_rows(chains).rows
    assert len(expected) == 9
    for column, (a3m, chain) in enumerate(zip(found, chains)):
        assert np.array_equal(parse_a3m(a3m).letters, chain.letters[expected[:, column]])
    assert ask([UBIQUITIN, CRAMBIN], use_pairing=True, pairing_strategy="complete", use_env=False) == found
    three = ask([UBIQUITIN, CRAMBIN, STRUCTURE.sequence], use_pairing=True)
    assert [len(rows(one)) for one in three] == [9, 9, 9]
    assert {row for _, row in rows(three[2])[1:]} == {"-" * len(STRUCTURE.sequence)}, "gaps, where a chain has none"
    whole = ask([UBIQUITIN, CRAMBIN, STRUCTURE.sequence], use_pairing=True, pairing_strategy="complete")
    assert [len(rows(one)) for one in whole] == [1, 1, 1]


def test_templates_as_the_client_searches_them(ask: Client, running: Running, tmp_path: Path) -> None:
    query = like(STRUCTURE.sequence, random.Random(2), 0.1)
    (a3m, *_), (path, other) = ask([query, CRAMBIN], use_templates=True)
    assert other is None
    there = {one.name for one in Path(path).iterdir()}
    assert {"pdb70_a3m.ffdata", "pdb70_a3m.ffindex", "pdb70_cs219.ffindex", "1a7g.cif"} <= there
    assert (Path(path) / "1a7g.cif").read_text() == (HELDOUT / "1a7g.cif").read_text()
    lines = (tmp_path / "asked_env" / "pdb70.m8").read_text().splitlines()
    columns = lines[0].split("\t")
    assert (columns[0], columns[1], len(columns)) == ("101", "1a7g_E", 13)
    assert float(columns[2]) > 0.8
    assert float(columns[10]) < 1e-5
    (tmp_path / "query.a3m").write_text(a3m)
    searched = ["hhsearch", "-i", tmp_path / "query.a3m", "-d", f"{path}/pdb70", "-o", tmp_path / "found.hhr"]
    subprocess.run(searched, check=True, capture_output=True)  # as colabfold.batch.mk_template does
    assert [(hit.entry, hit.chain) for hit in read_hhr(tmp_path / "found.hhr")] == [("1a7g", "E")]
    assert running.ask("template/9zzz_A")[0] == 404
    assert running.ask("template/1a7g_Z")[0] == 404


def test_many_rows_are_filtered(running: Running, ask: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hhfilter, which leaves out those that are much like others, from some number of rows on."""
    from apps.fold.service import answers

    monkeypatch.setattr(answers, "_FILTERED_FROM", 2)
    monkeypatch.setattr(answers, "_FILTER", ("-id", "60", "-v", "0"))
    query = CRAMBIN[2:]
    kept, whole = (rows(ask(query, use_filter=chosen)[0]) for chosen in (True, False))
    assert 1 < len(kept) < len(whole)
    assert kept[0] == whole[0] == (">101", query)
    assert [row for row in whole if row in kept] == kept


def test_a_refusal_ends_the_client(ask: Client) -> None:
    with pytest.raises(Exception, match="valid protein sequence"):
        ask("MKTMK7")


def test_pairs_of_residues_as_a_cigar() -> None:
    assert _cigar(np.array([0, 1, 2, 5, 6]), np.array([3, 4, 6, 7, 9])) == "2M1D1M2I1M1D1M"
