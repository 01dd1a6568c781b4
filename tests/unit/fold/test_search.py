"""`fold msa` on small databases, with the real tools where they are: hits, shards, the cache, what is refused."""

import os
import random
import re
import resource
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from apps.fold.features.alignment import check_query, read_alignment
from apps.fold.features.pairing import species_of
from apps.fold.msa import main
from apps.fold.search.database import open_database
from apps.fold.search.hhblits import rows_of
from apps.fold.search.hits import Hit, aligned_row, ranked
from apps.fold.search.jackhmmer import Jackhmmer, _a3m
from apps.fold.search.jobs import SearchedDatabase, Searches, jobs_of
from apps.fold.search.mmseqs import Mmseqs, open_mmseqs
from apps.fold.search.program import Killed, run
from core.config import UserError
from tests.support.programs import require_program

ROOT = Path(__file__).parents[3]
UBIQUITIN = "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"
CRAMBIN = "TTCCPSIVARSNFNVCRLPGTPEALCATYTGCIIIPGATCPGDYAN"
LETTERS = "ACDEFGHIKLMNPQRSTVWY"

needs_jackhmmer = pytest.mark.skipif(
    shutil.which("jackhmmer") is None, reason="no jackhmmer; ends where Debian's hmmer is installed (.ci/run does)"
)


def _database(path: Path, num: int = 60) -> Path:
    """Random sequences; every fourth is ubiquitin with a quarter of it changed, some with insertions and deletions."""
    draw = random.Random(0)
    lines = []
    for number in range(num):
        sequence = "".join(draw.choice(LETTERS) for _ in range(90))
        if number % 4 == 0:
            like = [draw.choice(LETTERS) if draw.random() < 0.25 else letter for letter in UBIQUITIN]
            if number % 8 == 0:
                like.insert(20, "GG")
            if number % 12 == 0:
                del like[40:43]
            sequence = sequence[:10] + "".join(like)
        lines.append(f">seq{number} of a test\n{sequence[:50]}\n{sequence[50:]}\n")
    path.write_text("".join(lines))
    return path


def _a3m_rows(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text().splitlines()
    return list(zip(lines[::2], lines[1::2]))


def test_shards_hold_every_sequence_once_and_none_is_empty(tmp_path: Path) -> None:
    path = _database(tmp_path / "db.fasta", 11)
    whole = path.read_text().split(">")[1:]
    for count in (1, 2, 3, 7, 11):
        database = open_database(path, count, tmp_path / "cache", "db")
        assert database.num_sequences == 11
        parts = [shard.file.read_text().split(">")[1:] for shard in database.shards]
        assert len(parts) == count
        assert all(parts)
        assert [one for part in parts for one in part] == whole
    with pytest.raises(UserError, match="11 sequences, too few for 12 shards"):
        open_database(path, 12, tmp_path / "cache", "db")


def test_a_database_is_known_by_its_contents(tmp_path: Path) -> None:
    path = _database(tmp_path / "db.fasta", 5)
    first = open_database(path, 1, tmp_path / "cache", "db").identity
    assert open_database(path, 1, tmp_path / "cache", "db").identity == first
    path.write_text(path.read_text().replace("seq1", "seq9"))
    assert open_database(path, 1, tmp_path / "cache", "db").identity != first
    path.write_bytes(b"\x1f\x8b" + b"x" * 9)
    with pytest.raises(UserError, match="compressed"):
        open_database(path, 1, tmp_path / "cache", "db")
    path.write_text("MKT")
    with pytest.raises(UserError, match="FASTA"):
        open_database(path, 1, tmp_path / "cache", "db")


def test_rows_of_a_stockholm_alignment_as_a3m() -> None:
    columns = [letter == "x" for letter in "xx..x"]
    assert _a3m("AC-GT", columns) == "ACgT"
    assert _a3m("-C..t", columns) == "-CT"
    hits = [Hit("b/1-2", "AA", 5.0), Hit("a/1-2", "AA", 5.0), Hit("c/1-2", "AA", 9.0), Hit("c/1-2", "AA", 9.0)]
    assert [hit.name for hit in ranked(hits, 2)] == ["c/1-2", "a/1-2"]


@needs_jackhmmer
def test_searches_find_the_family_and_are_kept(tmp_path: Path, capsys) -> None:
    database = _database(tmp_path / "family.fasta")
    (tmp_path / "in.fasta").write_text(f">ubi\n{UBIQUITIN}\n>bad\nMK7\n>cram/bin\n{CRAMBIN}\n>again\n{UBIQUITIN}\n")
    options = [str(tmp_path / "in.fasta"), "--databases", str(database)]

    def run(name: str, *more: str) -> str:
        assert main([*options, "--out", str(tmp_path / name), "--cache", str(tmp_path / "cache"), *more]) == 2
        said = capsys.readouterr()
        assert said.err.count("error:") == 1
        assert "record 2 (bad)" in said.err
        return said.out

    assert "2 searches run, 0 known" in run("whole")
    found = read_alignment(tmp_path / "whole" / "ubi" / "family.a3m")
    check_query(found, UBIQUITIN, "ubi")
    rows = _a3m_rows(tmp_path / "whole" / "ubi" / "family.a3m")
    names = [name[1:].rpartition("/")[0] for name, _ in rows[1:]]
    assert sorted(names) == sorted(f"seq{number}" for number in range(0, 60, 4))
    assert found.deletions.max() == 2
    assert (found.letters == 21).any()
    assert _a3m_rows(tmp_path / "whole" / "cram_bin" / "family.a3m") == [(">query", CRAMBIN)]
    assert _a3m_rows(tmp_path / "whole" / "again" / "family.a3m") == rows

    assert "8 searches run, 0 known" in run("shards", "--shards", "4", "--workers", "3")
    for name in ("ubi", "cram_bin", "again"):
        whole, parts = (tmp_path / folder / name / "family.a3m" for folder in ("whole", "shards"))
        assert parts.read_bytes() == whole.read_bytes()

    # Of four shards one is lost, as if the run had been killed in it: only its searches run again.
    results = sorted((tmp_path / "cache" / "searches").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    results[-1].unlink()
    assert "1 searches run, 7 known" in run("shards", "--shards", "4")
    assert "0 searches run, 2 known" in run("whole")
    assert "2 searches run, 0 known" in run("strict", "--e-value", "1e-30")
    assert len(_a3m_rows(tmp_path / "strict" / "ubi" / "family.a3m")) < len(rows)


@needs_jackhmmer
def test_a_name_that_repeats_costs_no_hit(tmp_path: Path, capsys) -> None:
    """HMMER then numbers all names of its alignment. Each row has its own target's score, in shards as in the whole."""
    family = _database(tmp_path / "family.fasta").read_text().split(">seq")[1::4]
    like = [one.partition("\n")[2].replace("\n", "") for one in family]
    names = ["one", "two", "same", "same", "#=GR", "//", "x|1/2", "same", "vo\u00e0", "last"]
    sequences = [*like[:7], like[7] + "G" * 40 + like[8], *like[9:11]]
    text = "".join(f">{name} of a test\n{sequence}\n" for name, sequence in zip(names, sequences))
    (tmp_path / "in.fasta").write_text(f">ubi\n{UBIQUITIN}\n")
    options = [str(tmp_path / "in.fasta"), "--cache", str(tmp_path / "cache")]

    def found(name: str, text: str, *more: str) -> list[tuple[str, str]]:
        (tmp_path / "repeats.fasta").write_text(text)
        given = ["--databases", str(tmp_path / "repeats.fasta"), "--out", str(tmp_path / name), *more]
        assert main([*options, *given]) == 0
        return _a3m_rows(tmp_path / name / "ubi" / "repeats.a3m")

    whole = found("whole", text)
    unique = text
    for number in range(3):
        unique = unique.replace(">same ", f">same{number} ", 1)
    expected = [(re.sub(r"same\d", "same", name), row) for name, row in found("unique", unique)]
    assert sorted(whole) == sorted(expected)
    assert [row for _, row in whole] == [row for _, row in expected]
    assert sorted(name[1:].rpartition("/")[0] for name, _ in whole[1:]) == sorted([*names, "same"])
    assert found("shards", text, "--shards", "3") == whole
    twice = text + f">one of a test\n{sequences[0]}\n"
    assert found("twice", twice) == whole


@needs_jackhmmer
def test_without_the_whole_database_s_size_shards_would_find_more(tmp_path: Path) -> None:
    """That shards give the hits of the whole is due to Z: an E-value is proportional to it."""
    from apps.fold.search.jackhmmer import search

    database = _database(tmp_path / "family.fasta")
    found = [len(search("jackhmmer", UBIQUITIN, database, z, 1e-30, 1, tmp_path)) for z in (60, 60_000_000)]
    assert found[0] > found[1] > 0


def test_a_failing_search_stops_only_its_sequence(tmp_path: Path, capsys) -> None:
    program = tmp_path / "jackhmmer"
    program.write_text(
        '#!/bin/sh\nif [ "$1" = -h ]; then echo "# HMMER 9"; exit 0; fi\n'
        'for last in "$@"; do before=$query; query=$last; done\n'
        'if grep -q CCPS "$before"; then echo "Fatal: out of luck" >&2; exit 1; fi\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    (tmp_path / "in.fasta").write_text(f">ubi\n{UBIQUITIN}\n>crambin\n{CRAMBIN}\n")
    options = ["--databases", str(_database(tmp_path / "db.fasta", 4)), "--jackhmmer", str(program)]
    options += ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    assert main([str(tmp_path / "in.fasta"), *options]) == 2
    said = capsys.readouterr()
    assert "1 searches run, 0 known from before, 1 failed\n" in said.out
    assert "record 2 (crambin)" in said.err
    assert "Fatal: out of luck" in said.err
    assert _a3m_rows(tmp_path / "out" / "ubi" / "db.a3m") == [(">query", UBIQUITIN)]
    assert not (tmp_path / "out" / "crambin").exists()


def test_a_database_that_changes_under_a_search_is_said_to(tmp_path: Path, capsys) -> None:
    """Its results would be kept under what it was; the record that was searched before has its alignment."""
    database = _database(tmp_path / "db.fasta", 4)
    program = tmp_path / "jackhmmer"
    program.write_text(
        '#!/bin/sh\nif [ "$1" = -h ]; then echo "# HMMER 9"; exit 0; fi\n'
        'for last in "$@"; do before=$query; query=$last; done\n'
        f'if grep -q CCPS "$before"; then printf ">more\\nMKT\\n" >> {database}; fi\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    (tmp_path / "in.fasta").write_text(f">ubi\n{UBIQUITIN}\n>crambin\n{CRAMBIN}\n")
    options = [str(tmp_path / "in.fasta"), "--databases", str(database), "--jackhmmer", str(program), "--workers", "1"]
    options += ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    assert main(options) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1
    assert f"record 2 (crambin): the database {database} changed while it was in use" in said
    assert (tmp_path / "out" / "ubi" / "db.a3m").exists()
    assert not (tmp_path / "out" / "crambin").exists()


def test_what_a_tool_says_need_not_be_text(tmp_path: Path) -> None:
    """What cstranslate says of entries with long names is none."""
    run(["sh", "-c", r"printf 'Processing entry: \357\314'"], "db")
    with pytest.raises(UserError, match=r"sh failed on db \(exit code 3\): at \S+ of it"):
        run(["sh", "-c", r"printf 'at \357 of it' >&2; exit 3"], "db")


@pytest.mark.parametrize(
    ("script", "killed"),
    [
        ("kill -9 $$", True),
        ("kill -15 $$", True),
        ("kill -9 $PPID; sleep 600", True),  # what stands between us and the tool, which ends with it
        ("sh -c 'kill -9 $$'; echo 'a stage died'; exit 1", True),  # as mmseqs, a script whose stages are programs
        ("kill -11 $$", False),  # it would crash again
        ("echo Killed; exit 1", False),
    ],
)
def test_a_tool_that_was_killed_is_told_from_one_that_failed(script: str, killed: bool) -> None:
    with pytest.raises(UserError) as said:
        run(["sh", "-c", script], "db")
    assert isinstance(said.value, Killed) == killed


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.fasta").write_text(">a\nMKT\n")
    one = str(tmp_path / "in.fasta")
    with pytest.raises(UserError, match="needs a FASTA file and databases"):
        main([one])
    with pytest.raises(UserError, match="apt-get install hmmer"):
        main([one, "--databases", one, "--jackhmmer", "no-such-program"])
    with pytest.raises(UserError, match="shards=0"):
        main([one, "--databases", one, "--shards", "0"])


# --- hhblits and MMseqs2 ----------------------------------------------------------------------------------------------


def test_rows_of_the_other_tools() -> None:
    assert aligned_row("MK-TA", "MRG-A", 2, 8) == "--MRg-A--"
    hits = rows_of(">query\nMKTA\n>one of many\nMKg\nTA\n>two\n-K-A\n", "MKTA", "db")
    assert [(hit.name, hit.row) for hit in ranked(hits, 9)] == [("one", "MKgTA"), ("two", "-K-A")]
    with pytest.raises(UserError, match="two of db does not have the query's 4 columns"):
        rows_of(">query\nMKTA\n>one\nMKTA\n>two\nMKT\n", "MKTA", "db")


_STAND_IN = r"""#!{python}
import os, pathlib, sys, time
NAME, FOLDER = {name!r}, pathlib.Path({folder!r})
given = sys.argv[1:]
if given in (["-h"], ["version"]):
    told = {{"jackhmmer": "# HMMER 9; now", "hhblits": "HHblits 9:", "hhsearch": "HHsearch 9:", "mmseqs": "9-now"}}
    sys.exit(print(told[NAME]))
if "createdb" in given:
    pathlib.Path(given[2]).write_text("made")
    sys.exit()
if NAME == "hhsearch":
    value = dict(zip(given, given[1:]))
    rows = pathlib.Path(value["-i"]).read_text().split()
    (FOLDER / "asked").write_text(" ".join(rows))
    pathlib.Path(value["-o"]).write_text("Query query\nNo 1\n>1abc_A\nProbab=99 \n" if len(rows) > 2 else "")
    sys.exit(0)
(FOLDER / f"{{NAME}}-{{os.getpid()}}.began").touch()
while len({{path.name.partition("-")[0] for path in FOLDER.glob("*.began")}}) < 3:  # until all three tools are at it
    time.sleep(0.01)
value = dict(zip(given, given[1:]))
if NAME == "hhblits":
    query = pathlib.Path(value["-i"]).read_text().splitlines()[1]
    pathlib.Path(value["-oa3m"]).write_text(f">query\n{{query}}\n>profile\n{{query[:-1]}}-\n")
if NAME == "mmseqs":
    assert pathlib.Path(given[2]).read_text() == "made"
    query = pathlib.Path(given[1]).read_text().splitlines()[1]
    pathlib.Path(given[3]).write_text(
        f"target\t50\t2\t7\t9\t{{query[1:3]}}-\t{{query[1:3]}}G\ttr|A1|A1_YEAST said of it\n"
    )
"""


def _stand_in(folder: Path, name: str) -> str:
    program = folder / name
    program.write_text(_STAND_IN.format(python=sys.executable, name=name, folder=str(folder)))
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return str(program)


def _profiles(folder: Path) -> Path:
    for part in ("a3m", "hhm", "cs219"):
        for suffix in ("ffdata", "ffindex"):
            (folder / f"profiles_{part}.{suffix}").write_text(part)
    return folder / "profiles"


def test_three_tools_search_at_once(tmp_path: Path, capsys) -> None:
    """Each stand-in waits until the others have begun: one after another they would wait for ever."""
    (tmp_path / "in.fasta").write_text(">crambin\n" + CRAMBIN + "\n")
    options = [str(tmp_path / "in.fasta"), "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    for name in ("jackhmmer", "hhblits", "mmseqs"):
        options += [f"--{name}", _stand_in(tmp_path, name)]
    family, other = _database(tmp_path / "family.fasta", 4), _database(tmp_path / "other.fasta", 5)
    options += ["--databases", str(family), "--hhblits-databases", str(_profiles(tmp_path))]
    options += ["--mmseqs-databases", str(other), "--workers", "3"]
    assert main(options) == 0
    assert "3 searches run, 0 known" in capsys.readouterr().out
    rows = {path.stem: _a3m_rows(path) for path in (tmp_path / "out" / "crambin").iterdir()}
    query = (">query", CRAMBIN)
    assert rows == {
        "family": [query],
        "profiles": [query, (">profile", CRAMBIN[:-1] + "-")],
        "other": [query, (">tr|A1|A1_YEAST/7-9", "-" + CRAMBIN[1:3] + "g" + "-" * 43)],
    }
    assert main(options) == 0
    assert "0 searches run, 3 known" in capsys.readouterr().out
    assert main([*options, "--hhblits-e-value", "1e-6"]) == 0
    assert "1 searches run, 2 known" in capsys.readouterr().out
    (tmp_path / "profiles_hhm.ffdata").write_text("changed")
    assert main(options) == 0
    assert "1 searches run, 2 known" in capsys.readouterr().out

    (tmp_path / "profiles_hhm.ffdata").unlink()
    with pytest.raises(UserError, match=r"no .*profiles_hhm\.ffdata; give the prefix"):
        main(options)
    with pytest.raises(UserError, match="two databases are called family"):
        main([*options[:-4], "--hhblits-databases", "x", "--mmseqs-databases", str(family)])


def test_mmseqs_finds_the_family(tmp_path: Path, capsys) -> None:
    """By words of five letters: its tables of six take longer than all else."""
    require_program("mmseqs")
    program = tmp_path / "mmseqs"
    program.write_text('#!/bin/sh\n[ "$1" = easy-search ] && set -- "$@" -k 5\nexec mmseqs "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    (tmp_path / "in.fasta").write_text(f">ubi\n{UBIQUITIN}\n>crambin\n{CRAMBIN}\n")
    options = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache"), "--mmseqs", str(program)]
    family = _database(tmp_path / "family.fasta")
    assert main([str(tmp_path / "in.fasta"), "--mmseqs-databases", str(family), *options]) == 0
    path = tmp_path / "out" / "ubi" / "family.a3m"
    found = read_alignment(path)
    check_query(found, UBIQUITIN, "ubi")
    names = {name[1:].rpartition("/")[0] for name, _ in _a3m_rows(path)[1:]}
    assert names == {f"seq{number}" for number in range(0, 60, 4)}
    assert found.deletions.max() == 2
    assert (found.letters == 21).any()
    assert len(_a3m_rows(tmp_path / "out" / "crambin" / "family.a3m")) == 1
    made = next((tmp_path / "cache" / "databases").glob("*/mmseqs/database"))
    capsys.readouterr()
    options[1] = str(tmp_path / "again")
    (tmp_path / "one.fasta").write_text(f">ubi\n{UBIQUITIN}\n")
    assert main([str(tmp_path / "one.fasta"), "--mmseqs-databases", str(made), *options]) == 0
    again = _a3m_rows(tmp_path / "again" / "ubi" / "database.a3m")
    assert sorted(again) == sorted(_a3m_rows(path))


def test_rows_that_mmseqs_finds_in_uniprot_can_be_paired(tmp_path: Path) -> None:
    """It calls a row by the accession alone; its species is in the name."""
    require_program("mmseqs")
    names = "sp|P0CG48|UBC_HUMAN", "tr|A0A146SKV9|A0A146SKV9_FUNHE", "UniRef100_P12345"
    rows = zip(names, (UBIQUITIN, UBIQUITIN.replace("KTLT", "KTLS"), UBIQUITIN.replace("VEPS", "VEGS")))
    database = tmp_path / "uniprot.fasta"
    database.write_text("".join(f">{name} of a test\n{row}\n" for name, row in rows))
    options = {"program": "mmseqs", "version": "", "e_value": 1e-4, "sensitivity": 1.0, "threads": 1}
    opened = open_mmseqs(database, "mmseqs", tmp_path / "cache", "uniprot")
    hits = Mmseqs(**options).search(UBIQUITIN, opened, opened.shards[0], tmp_path)
    assert {hit.name for hit in hits} == {f"{name}/1-76" for name in names}
    assert sorted(species_of(hit.name) for hit in hits) == ["", "FUNHE", "HUMAN"]


def test_templates_are_searched_with_the_first_alignment(tmp_path: Path, capsys) -> None:
    (tmp_path / "in.fasta").write_text(f">ubi\n{UBIQUITIN}\n>crambin\n{CRAMBIN}\n")
    program = tmp_path / "jackhmmer"  # of crambin it finds nothing
    row, columns = UBIQUITIN[:-1] + "-", "x" * len(UBIQUITIN)
    program.write_text(
        '#!/bin/sh\nif [ "$1" = -h ]; then echo "# HMMER 9"; exit 0; fi\nwhile [ "$1" != -A ]; do shift; done\n'
        'grep -q CCPS "$5" && exit 0\n'
        f'printf "# STOCKHOLM 1.0\\nquery {UBIQUITIN}\\nseq0/1-76 {row}\\n#=GC RF {columns}\\n//\\n" > "$2"\n'
        'echo "seq0 - 76 query - 9 1e-9 50.0 0 1 1 1e-9 1e-9 9 0 1 9 1 76 1 9 1 -" > "$4"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    options = [str(tmp_path / "in.fasta"), "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    options += ["--jackhmmer", str(program), "--hhsearch", _stand_in(tmp_path, "hhsearch")]
    options += ["--databases", str(_database(tmp_path / "family.fasta", 4)), "--hhsearch-databases"]
    options.append(str(_profiles(tmp_path)))
    assert main(options) == 2
    said = capsys.readouterr()
    assert "2 searches run, 0 known" in said.out
    assert "1 searches for templates run, 0 known from before, 1 failed" in said.out
    assert "ubi: 1 rows of family, 1 templates of profiles" in said.out
    assert said.err.count("error:") == 1
    assert "record 2 (crambin)" in said.err
    assert "wrote no result" in said.err
    assert (tmp_path / "out" / "ubi" / "profiles.hhr").read_text().startswith("Query")
    assert [path.name for path in (tmp_path / "out" / "crambin").iterdir()] == ["family.a3m"]
    assert main(options) == 2
    said = capsys.readouterr()
    assert "0 searches for templates run, 1 known from before, 1 failed" in said.out
    with pytest.raises(UserError, match="hhsearch begins with an alignment"):
        main([options[0], *options[-2:]])
    with pytest.raises(UserError, match="apt-get install hhsuite"):
        main([*options, "--hhsearch", "no-such-program"])


_WAITING = """#!/bin/sh
if [ "$1" = -h ]; then echo "# HMMER 9"; exit 0; fi
for last in "$@"; do :; done
echo "$last" >> {folder}/begun
echo "$$ $(date +%s.%N)" >> {folder}/pids
number=$(basename "$last" .fasta)
[ -e {folder}/hold-$number ] && {{ sleep 600 & echo "$! 0" >> {folder}/pids; }}
while [ -e {folder}/hold-$number ]; do sleep 0.05; done
sleep {delay}
date +%s.%N >> {folder}/ended
"""


def _waiting(folder: Path, delay: str = "0") -> str:
    """A jackhmmer that finds nothing, and of shard N does not end while there is a file hold-N."""
    program = folder / "jackhmmer"
    program.write_text(_WAITING.format(folder=folder, delay=delay))
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return str(program)


def _command(tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "in.fasta").write_text(f">ubi\n{UBIQUITIN}\n")
    options = ["--databases", str(_database(tmp_path / "db.fasta", 12)), "--shards", "3", "--workers", "3"]
    folders = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    return [sys.executable, "-m", "apps.fold", "msa", str(tmp_path / "in.fasta"), *options, *folders, *more]


def _run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def _wait_until(true: Callable[[], bool]) -> None:
    for _ in range(2400):
        if true():
            return
        time.sleep(0.05)
    raise TimeoutError("two minutes were not enough")


def _runs(pid: int) -> bool:
    """Whether the process is there, other than as an entry that nobody has asked for (state Z, where /proc tells)."""
    try:
        os.kill(pid, 0)
        if not Path("/proc/self/stat").exists():
            return True
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_run_that_was_killed_redoes_only_the_shard_that_was_not_done(tmp_path: Path) -> None:
    command = _command(tmp_path, "--jackhmmer", _waiting(tmp_path))
    (tmp_path / "hold-1").touch()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    searches = tmp_path / "cache" / "searches"
    begun = tmp_path / "pids"
    _wait_until(lambda: len(list(searches.glob("*.json"))) == 2 and begun.read_text().count("\n") == 4)
    tools = [int(line.split()[0]) for line in begun.read_text().splitlines()]
    assert sum(map(_runs, tools)) == 2, "the search that is held, and what it began"
    process.kill()  # it alone: a search that would not end with it would be one of nobody's
    process.wait()
    _wait_until(lambda: not any(map(_runs, tools)))
    assert len(list(searches.glob("*.json"))) == 2
    assert not (tmp_path / "out").exists()
    (tmp_path / "hold-1").unlink()
    (tmp_path / "begun").unlink()
    done = _run(command)
    assert done.returncode == 0, done.stderr
    assert "1 searches run, 2 known" in done.stdout
    assert [Path(line).name for line in (tmp_path / "begun").read_text().split()] == ["1.fasta"]
    assert (tmp_path / "out" / "ubi" / "db.a3m").is_file()

    # All of it known, the command takes less than a second, which on a machine with others is told by its CPU time.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = _run(command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "0 searches run, 3 known" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_shards_and_sequences_side_by_side_take_as_long_as_the_longest(tmp_path: Path) -> None:
    """Searches that only sleep: what is beyond the longest of them is ours.

    They sleep so long because eight processes have to begin within what is allowed, on a machine that others use, too.
    """
    delay = 10.0
    tool = Jackhmmer(_waiting(tmp_path, str(delay)), "9", 1e-4, 1)
    database = open_database(_database(tmp_path / "db.fasta", 12), 4, tmp_path / "cache", "db")
    searches, jobs = Searches(tmp_path / "cache"), jobs_of([UBIQUITIN, CRAMBIN], [SearchedDatabase(tool, database)])
    assert len(jobs) == 8
    began = time.monotonic()
    assert searches.run(jobs, workers=8) == {}
    took = time.monotonic() - began
    starts = [float(line.split()[1]) for line in (tmp_path / "pids").read_text().splitlines()]
    ends = [float(line) for line in (tmp_path / "ended").read_text().splitlines()]
    assert len(starts) == len(ends) == 8
    assert max(starts) < min(ends), "a search began when another had ended"
    assert took <= 1.15 * delay
    assert searches.run(jobs, workers=8) == {}
    assert len((tmp_path / "pids").read_text().splitlines()) == 8, "what was known was searched again"


def test_the_command_needs_no_torch() -> None:
    """So that a run that finds everything in its cache takes a moment."""
    code = "import sys, apps.fold.__main__, apps.fold.msa; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == 0
