"""hhblits and hhsearch themselves, by `fold msa`, on small databases that HH-suite's programs have made."""

import random
from pathlib import Path

import numpy as np
import pytest

from apps.fold.features.alignment import check_query, read_alignment
from apps.fold.features.entries import read_entries
from apps.fold.features.hhr import check_hits, read_hhr
from apps.fold.features.templates import features_of_templates, templates_of_hits
from apps.fold.model import residues
from apps.fold.msa import main
from apps.fold.search.hhblits import Hhblits, open_profiles, rows_of, version
from apps.fold.toy import HELDOUT
from core.config import UserError
from tests.support.hhsuite import HAS_HHSUITE, LETTERS, database, family, like

UBIQUITIN = "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"
CRAMBIN = "TTCCPSIVARSNFNVCRLPGTPEALCATYTGCIIIPGATCPGDYAN"
STRUCTURE = read_entries(HELDOUT / "1a7g.cif")[0]


needs_hhsuite = pytest.mark.skipif(
    not HAS_HHSUITE, reason="no HH-suite; ends where Debian's hhsuite is installed (.ci/run does)"
)


def _random(draw: random.Random, length: int = 90) -> str:
    return "".join(draw.choice(LETTERS) for _ in range(length))


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """24 families of which four are like ubiquitin, and the letters of these by their names."""
    draw, families, planted = random.Random(0), {}, {}
    for number in range(24):
        sequence = _random(draw)
        if number % 6 == 0:
            one = like(UBIQUITIN, draw, 0.25)
            sequence = sequence[:10] + (one[:20] + "GG" + one[20:40] + one[43:] if number == 12 else one)
        families[f"family{number}"] = family(f"f{number}", sequence, 6, draw)
        if number % 6 == 0:
            planted |= {header.split()[0]: letters for header, letters in families[f"family{number}"]}
    return database(tmp_path_factory.mktemp("hhblits") / "profiles", families), planted


@needs_hhsuite
def test_hhblits_finds_the_families_and_is_kept(profiles: tuple[Path, dict[str, str]], tmp_path: Path, capsys) -> None:
    prefix, planted = profiles
    (tmp_path / "in.fasta").write_text(f">ubi\n{UBIQUITIN}\n>crambin\n{CRAMBIN}\n")
    options = [str(tmp_path / "in.fasta"), "--hhblits-databases", str(prefix), "--cache", str(tmp_path / "cache")]
    assert main([*options, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "2 searches run, 0 known" in said
    assert "crambin: 0 rows of profiles" in said
    path = tmp_path / "out" / "ubi" / "profiles.a3m"
    found = read_alignment(path)
    check_query(found, UBIQUITIN, "ubi")
    assert found.deletions.max() == 2
    lines = path.read_text().splitlines()
    rows = dict(zip((line[1:] for line in lines[2::2]), lines[3::2], strict=True))
    assert set(rows) == set(planted)
    for name, row in rows.items():
        assert row.replace("-", "").upper() in planted[name]
        if name.split("_")[0] != "f12":  # every residue is below the one it was made of, but at ragged ends
            columns = planted[name][10:]
            assert sum(a == b for a, b in zip(row, columns, strict=True)) >= len(columns) - 5

    assert main([*options, "--out", str(tmp_path / "again"), "--threads", "2"]) == 0
    assert "0 searches run, 2 known" in capsys.readouterr().out
    assert (tmp_path / "again" / "ubi" / "profiles.a3m").read_bytes() == path.read_bytes()
    (tmp_path / "one.fasta").write_text(f">ubi\n{UBIQUITIN}\n")
    options[0] = str(tmp_path / "one.fasta")
    assert main([*options, "--out", str(tmp_path / "strict"), "--hhblits-e-value", "1e-60"]) == 0
    assert "1 searches run, 0 known" in capsys.readouterr().out
    assert len((tmp_path / "strict" / "ubi" / "profiles.a3m").read_text().splitlines()) < len(lines)


@needs_hhsuite
def test_threads_of_hhblits_change_no_hit(profiles: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """Which is why a result is kept without their number."""
    opened = open_profiles(profiles[0], "profiles")
    one, two = (
        Hhblits("hhblits", version("hhblits"), 1e-3, threads).search(UBIQUITIN, opened, opened.shards[0], tmp_path)
        for threads in (1, 2)
    )
    assert one == two
    assert len(one) == len(profiles[1])
    assert version("hhblits").startswith("HHblits 3.")


@needs_hhsuite
def test_a_database_that_is_cut_off_is_said_to_be(
    profiles: tuple[Path, dict[str, str]], tmp_path: Path, capsys
) -> None:
    for part in profiles[0].parent.glob("profiles_*"):
        content = part.read_bytes()
        (tmp_path / part.name).write_bytes(content[:9] if part.name == "profiles_cs219.ffindex" else content)
    (tmp_path / "in.fasta").write_text(f">ubi\n{UBIQUITIN}\n")
    options = ["--hhblits-databases", str(tmp_path / "profiles"), "--cache", str(tmp_path / "cache")]
    assert main([str(tmp_path / "in.fasta"), *options, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1
    assert "hhblits failed on" in said
    assert not (tmp_path / "out").exists()


def test_headers_may_hold_what_begins_them() -> None:
    """As UniRef's do: (1->4)-alpha-D-glucan …"""
    hits = rows_of(">query\nMKTA\n>one (1->4)-alpha-D-glucan\nMKg\nTA\n>two>x\n-K-A\n", "MKTA", "db")
    assert [(hit.name, hit.row) for hit in hits] == [("one", "MKgTA"), ("two>x", "-K-A")]
    with pytest.raises(UserError, match="two of db does not have the query's 4 columns"):
        rows_of(">query\nMKTA\n>one 3'->5'\nMKTA\n>two\nMKT\n", "MKTA", "db")


@needs_hhsuite
def test_hhsearch_finds_the_structure_and_its_residues_lie_where_they_belong(
    profiles: tuple[Path, dict[str, str]], tmp_path: Path, capsys
) -> None:
    """A query like 1A7G, with GG more behind 30 and without 50 to 52, aligned in two blocks of lines."""
    draw, chain = random.Random(1), STRUCTURE.sequence
    one = like(chain, draw, 0.2)
    query = one[:30] + "GG" + one[30:50] + one[53:]
    expected = {n: n if n < 30 else n - 2 if n < 52 else n + 1 for n in range(len(query)) if n not in (30, 31)}
    families = {f"{number}xyz": family(f"{number}XYZ_B", _random(draw), 6, draw) for number in range(1, 8)}
    own = family("1A7G_E", chain, 6, draw)
    own[0] = ("1A7G_E REGULATORY PROTEIN E2; (1->4), 2.4A {Human papillomavirus}", chain)
    aside = [(kind, letters * len(chain)) for kind, letters in (("ss_dssp", "E"), ("ss_pred", "H"), ("ss_conf", "9"))]
    structures = database(tmp_path / "structures", {**families, "1a7g": [*aside, *own]})

    (tmp_path / "in.fasta").write_text(f">e2\n{query}\n")
    options = [str(tmp_path / "in.fasta"), "--hhblits-databases", str(profiles[0]), "--hhsearch-databases"]
    options += [str(structures), "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    assert main(options) == 0
    assert "1 searches for templates run, 0 known" in capsys.readouterr().out
    assert main(options) == 0
    said = capsys.readouterr().out
    assert "1 searches for templates run, 1 known" not in said
    assert "0 searches for templates run, 1 known" in said

    path = tmp_path / "out" / "e2" / "structures.hhr"
    hits = read_hhr(path)
    assert f"{len(hits)} templates of structures" in said
    check_hits(hits, query, path)
    best = hits[0]
    assert (best.entry, best.chain, best.columns) == ("1a7g", "E", len(best.pairs))
    assert best.sequence in chain
    assert best.query in query
    assert 0.9 * len(expected) < best.sum_probs <= best.columns
    assert "T ss_pred" in path.read_text()

    templates, left_out = templates_of_hits(hits, query, HELDOUT)
    assert [one.name for one in templates] == ["1a7g_E"]
    assert all("holds no" in line or "residues" in line for line in left_out)
    (found,) = templates
    right = 0
    for residue, there in expected.items():
        right += bool(
            found.aatype[residue] == residues.LETTERS[chain[there]]
            and np.array_equal(found.positions[residue], STRUCTURE.positions[there])
            and np.array_equal(found.mask[residue], STRUCTURE.mask[there])
        )
    assert right >= len(expected) - 6  # a gap may lie a residue beside where it was made
    features = features_of_templates(templates)
    assert features is not None
    assert features.aatype_BTN.shape == (1, 1, len(query))
