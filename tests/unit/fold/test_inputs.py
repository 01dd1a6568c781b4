"""FASTA, alignments and the MSA's features: hand-made cases with the original's semantics, and what is refused."""

import bz2
import gzip
import lzma
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from apps.fold.features.alignment import check_query, merge, parse_a3m, parse_stockholm, read_alignment, single_sequence
from apps.fold.features.msa import Draw, assign, draw, features_of, num_centres
from apps.fold.features.sequences import Record, alone, chain_id, one_complex, read_fasta, residue_types
from apps.fold.model.config import preset, tiny
from apps.fold.model.residues import LETTERS, RESTYPES
from apps.fold.targets import find_target
from core.config import UserError

# --- FASTA ---


def test_fasta(tmp_path: Path) -> None:
    (tmp_path / "in.fasta").write_text(
        "; a comment\n>one a description\nMKT\nayi*\n\n>two/x\nXBZUOM\n>three\n\n>four\nMK-T\n>five\nMK1\n"
        ">six\nACGTACGTACGTACGTACGTACGT\n>one\nMMM\n>two_x\nMMM\n>seven\nMKT:GGG\n>\nGGG\n"
    )
    records, refused = read_fasta(tmp_path / "in.fasta")
    assert [(r.number, r.name, r.sequence) for r in records] == [
        (1, "one", "MKTAYI"),
        (2, "two/x", "XBZUOM"),
        (9, "seven", "MKTGGG"),
        (10, "", "GGG"),
    ]
    assert [r.safe_name for r in records] == ["one", "two_x", "seven", "record_10"]
    assert [(chain.name, chain.sequence) for chain in records[2].chains] == [("seven_A", "MKT"), ("seven_B", "GGG")]
    twice = one_complex([records[0], records[1], replace(records[0], name="again")], "all")
    assert [one.name for one in alone([*records, twice])][2:] == ["seven_A", "seven_B", "", "one", "two/x"]
    assert [chain_id(number) for number in (1, 26, 27, 28, 53, 703)] == ["A", "Z", "AA", "BA", "AB", "AAA"]
    said = {r.number: str(r) for r in refused}
    for number, word in {3: "empty", 4: "gaps", 5: "'1' at position 3", 6: "DNA or RNA"}.items():
        assert word in said[number]
    assert "record 1;" in said[7]
    assert "record 2;" in said[8]
    assert all("\n" not in line for line in said.values())


def test_what_editors_and_databases_leave_in_a_fasta(tmp_path: Path) -> None:
    """A byte order mark, ends of lines as on Windows, a letter that is not UTF-8, names longer than a file's may be."""
    long = "n" * 300
    (tmp_path / "in.fasta").write_bytes(
        b"\xef\xbb\xbf>one\r\nMKT\r\nAYI\r\n>caf\xe9\nMKA\n>bad\nMK\xe9\n" + f">{long}a\nMKC\n>{long}b\nMKD\n".encode()
    )
    records, refused = read_fasta(tmp_path / "in.fasta")
    assert [r.sequence for r in records] == ["MKTAYI", "MKA", "MKC"]
    assert records[1].safe_name == "caf"
    assert records[2].name == f"{long}a"
    (tmp_path / records[2].safe_name).mkdir()
    assert [one.number for one in refused] == [3, 5]
    assert "position 3 is no amino acid" in str(refused[0])
    assert "record 4; rename" in str(refused[1])


@pytest.mark.parametrize(
    ("pack", "encoding"),
    [(bytes, f"utf-{width}{order}") for width in (16, 32) for order in ("", "-le", "-be")]
    + [(pack, "utf-8") for pack in (gzip.compress, bz2.compress, lzma.compress)],
)
def test_packed_files_and_those_of_16_or_32_bits_a_letter_are_read(
    tmp_path: Path, pack: Callable[[bytes], bytes], encoding: str
) -> None:
    """Whatever they are called; a packed file that was cut off is said to be."""
    content = pack(">one\nMKT\nAYI\n>two\nMKA\n".encode(encoding))
    (tmp_path / "in.fasta").write_bytes(content)
    records, refused = read_fasta(tmp_path / "in.fasta")
    assert [(r.name, r.sequence) for r in records] == [("one", "MKTAYI"), ("two", "MKA")]
    assert not refused
    (tmp_path / "x.a3m").write_bytes(pack(">q\nMKT\n>a\nM-T\n".encode(encoding)))
    assert _text(read_alignment(tmp_path / "x.a3m")) == ["MKT", "M-T"]
    if encoding == "utf-8":
        (tmp_path / "in.fasta").write_bytes(content[:-12])
        with pytest.raises(UserError, match=r"cannot read .*; give a FASTA file"):
            read_fasta(tmp_path / "in.fasta")


@pytest.mark.parametrize(("start", "kind"), [(b"PK\x03\x04", "a zip archive"), (b"\x28\xb5\x2f\xfd", "zstd")])
def test_what_is_packed_otherwise_is_named(tmp_path: Path, start: bytes, kind: str) -> None:
    (tmp_path / "in.fasta").write_bytes(start + bytes(20))
    with pytest.raises(UserError, match=f"{kind}; unpack it and give a FASTA file"):
        read_fasta(tmp_path / "in.fasta")


@pytest.mark.parametrize("content", [bytes(range(256)), b"\x89PNG\r\n\x1a\n" + bytes(9)])
def test_what_is_no_text_is_called_that(tmp_path: Path, content: bytes) -> None:
    """Not a sequence without its name."""
    (tmp_path / "in.fasta").write_bytes(content)
    with pytest.raises(UserError, match=r"in\.fasta, line 1: bytes that are no text; give a FASTA file"):
        read_fasta(tmp_path / "in.fasta")


def test_a_file_that_unpacks_to_any_length_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "in.fasta").write_bytes(gzip.compress(b">a\n" + b"M" * 5000))
    with patch("apps.fold.features.text._MOST_BYTES", 4000):
        with pytest.raises(UserError, match=r"in\.fasta unpacks to more than 3\.91 KiB; unpack it, or split it"):
            read_fasta(tmp_path / "in.fasta")
        (tmp_path / "in.fasta").write_bytes(b">a\n" + b"M" * 5000)
        assert len(read_fasta(tmp_path / "in.fasta")[0][0].sequence) == 5000, "plain, it is as long as it says"


def test_a_sequence_without_a_known_residue_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.fasta").write_text(">a\nXXXXXXXX\n>b\nBZUOJ\n>c\nXXXAXXX\n>d\nUUUUUUUUUUUUUUUUUUUUUU\n")
    records, refused = read_fasta(tmp_path / "in.fasta")
    assert [r.name for r in records] == ["c"]
    assert all("none of its residues is known; give" in str(one) for one in refused)


def test_proteins_of_nucleotides_letters(tmp_path: Path) -> None:
    """One letter alone is a protein; of several the user says whether they are."""
    (tmp_path / "in.fasta").write_text(f">a\n{'A' * 25}\n>g\n{'G' * 40}\n>ag\n{'GA' * 15}\n>rna\n{'ACGU' * 6}\n")
    records, refused = read_fasta(tmp_path / "in.fasta")
    assert [r.name for r in records] == ["a", "g"]
    assert all("DNA or RNA; give the protein's sequence, or --proteins if it is one" in str(one) for one in refused)
    assert [r.name for r in read_fasta(tmp_path / "in.fasta", proteins=True)[0]] == ["a", "g", "ag", "rna"]


def test_no_dash_dot_or_underline_hides_what_a_name_is(tmp_path: Path) -> None:
    names = ("-summary.csv", "_-.summary.csv", "-.x", "-_-y", "z-")
    assert [Record(1, name, "MKT").safe_name for name in names] == ["summary.csv_", "summary.csv_", "x", "y", "z-"]


def test_names_in_any_script_are_names_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distinct, no longer than a file's name may be, and the same however an accent is written."""
    names = ("日本語", "中国", "हिन्दी", "café", "cafe\u0301", "α/β", "\u202eabc", "…", "語" * 200)
    (tmp_path / "in.fasta").write_text("".join(f">{name} protein\nMKT\n" for name in names), encoding="utf-8")
    records, refused = read_fasta(tmp_path / "in.fasta")
    found = [r.safe_name for r in records]
    assert found == ["日本語", "中国", "हिन्दी", "café", "α_β", "abc", "record_8", "語" * 50]
    assert [str(one) for one in refused] == [
        "record 5 (cafe\u0301): its files would be named like those of record 4; rename one of them"
    ]
    for name in found:
        (tmp_path / f".{name}.part").mkdir()
    (tmp_path / "cafe\u0301.a3m").write_text(">q\nMKT\n>a\nMKV\n")
    assert len(find_target(records[3], tmp_path, None, alone=False).alignment) == 2
    monkeypatch.setattr(os, "fsencode", lambda name: name.encode("latin-1"))
    assert [r.safe_name for r in records][:5] == ["record_1", "record_2", "record_3", "café", "record_6"]


def test_names_that_are_no_names_of_folders(tmp_path: Path) -> None:
    names = ("summary.csv", "SUMMARY.csv", "../x", "..", "-rf", "--", "a\\b", "\0", ".hidden", "summary.csv_")
    (tmp_path / "in.fasta").write_text("".join(f">{name}\nMKT\n" for name in names))
    records, refused = read_fasta(tmp_path / "in.fasta")
    assert [r.safe_name for r in records] == [
        *("summary.csv_", "SUMMARY.csv_", "x", "record_4", "rf", "record_6", "a_b", "record_8", "hidden"),
    ]
    assert [str(one) for one in refused] == [
        "record 10 (summary.csv_): its files would be named like those of record 1; rename one of them"
    ]


@pytest.mark.parametrize(("text", "word"), [("", "holds no sequence"), ("MKT\n", "line 1"), ("\n\n", "no sequence")])
def test_what_is_no_fasta_is_refused(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "in.fasta").write_text(text)
    with pytest.raises(UserError, match=word):
        read_fasta(tmp_path / "in.fasta")
    with pytest.raises(UserError, match="cannot read"):
        read_fasta(tmp_path / "none.fasta")


def test_unusual_letters() -> None:
    """The network sees them as X; the alignment's first row has their nearest amino acid, as the original's."""
    assert residue_types("AXBZUOJ").tolist() == [0, 20, 20, 20, 20, 20, 20]
    row = single_sequence("AXBZUOJ").letters[0]
    assert "".join((RESTYPES + "X")[i] for i in row) == "AXDECXX"


# --- alignments ---


def _text(alignment) -> list[str]:
    return ["".join((RESTYPES + "X-")[i] for i in row) for row in alignment.letters]


def test_a3m() -> None:
    a = parse_a3m(">q\nMKTA\n>a b\nM-Taa\nA\n>c\nkkMKtTA..\n>d\nMKTAgg\n")
    assert _text(a) == ["MKTA", "M-TA", "MKTA", "MKTA"]
    assert a.deletions.tolist() == [[0, 0, 0, 0], [0, 0, 0, 2], [2, 0, 1, 0], [0, 0, 0, 0]]
    assert a.names == ("q", "a b", "c", "d")


def test_stockholm() -> None:
    text = "# STOCKHOLM 1.0\n#=GF ID x\nq   MK-T\na/1 mkG.\n\nq   A--\na/1 AGG\n#=GC RF xxxxxxx\n//\n"
    a = parse_stockholm(text)
    assert _text(a) == ["MKTA", "MK-A"]
    assert a.deletions.tolist() == [[0, 0, 0, 0], [0, 0, 1, 0]]


def test_the_two_formats_say_the_same() -> None:
    """One alignment in both formats."""
    sto = parse_stockholm("# STOCKHOLM 1.0\nq MK--TAY-\na MKGGT-YV\nb -KG-TAYV\nc MK---A--\n//\n")
    a3m = parse_a3m(">q\nMKTAY\n>a\nMKggT-Yv\n>b\n-KgTAYv\n>c\nMK-A-\n")
    assert np.array_equal(sto.letters, a3m.letters)
    assert np.array_equal(sto.deletions, a3m.deletions)


def test_merging_keeps_the_first_of_equal_rows() -> None:
    merged = merge([parse_a3m(">q\nMKT\n>a\nMggKT\n>b\nMK-\n"), parse_a3m(">q\nMKT\n>c\nMaK-\n>d\n-KT\n")])
    assert _text(merged) == ["MKT", "MK-", "-KT"]
    assert merged.names == ("q", "b", "d")
    assert merged.deletions[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (">q\nMKT\n>a\nMK\n", "row 2 .* 2 columns and the query 3"),
        (">q\nMKT\n>a\nMK4\n", "'4' in column 3"),
        ("MKT\n", "begins neither"),
        ("# STOCKHOLM 1.0\nq MKT\na MK\n//\n", "2 columns and the query 3"),
        ("# STOCKHOLM 1.0\n//\n", "holds no sequence"),
        ("# STOCKHOLM 1.0\nq MKT x\n//\n", "not a name and letters"),
        (">q\nMKT\n>a\nM\0KT\n", r"x\.a3m, line 4: a NUL byte; the file is damaged"),
        (">q\nMKT\n>a\nMKT\n\0\0", "line 5: a NUL byte"),
        (">q\nMKT\n>a\0\nMKT\n", "line 3: a NUL byte"),
        ("# STOCKHOLM 1.0\nq MKT\na MKT\n", r"x\.a3m is cut off at line 3: it lacks the closing line '//'"),
        ("# STOCKHOLM 1.0\nq MKT\n//\n\n# STOCKHOLM 1.0\na MKT\n//\n", "line 5: more behind the closing line"),
        ("#4\t1\n>101\nMKT\n", r"its first line, '#4\\t1', describes another query than the row below, of 3 residues"),
        ("#3\t1,1\n>101\nMKT\n", "describes another query"),
        (">q\n>a\nMKT\n", "the query, has no columns"),
        (">q\nmkt\n>a\nMKT\n", "no columns, which in A3M are capitals"),
    ],
)
def test_damaged_alignments_are_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "x.a3m"
    path.write_text(text)
    with pytest.raises(UserError, match=word) as refusal:
        read_alignment(path)
    assert "; " in str(refusal.value), "what is wrong, and what to do"


def test_what_servers_and_editors_leave_in_an_a3m(tmp_path: Path) -> None:
    """ColabFold's header and its NUL between parts, a byte order mark, ends of lines as on Windows."""
    (tmp_path / "x.a3m").write_bytes(b"\xef\xbb\xbf#3\t1\r\n>101\r\nMKT\r\n\x00>a\r\nM-T\r\n\x00")
    assert _text(read_alignment(tmp_path / "x.a3m")) == ["MKT", "M-T"]


def test_the_alignment_of_another_query_is_refused() -> None:
    a = parse_a3m(">q\nMKT\n")
    check_query(a, "MKT", "it")
    check_query(a, "MXT", "it")
    for sequence, word in (("MKV", "residue 3 is T and not V; give"), ("MKTA", "3 residues, not of 4; give")):
        with pytest.raises(UserError, match=word):
            check_query(a, sequence, "it")


# --- features of the MSA ---


def _alignment(rows: int = 30, length: int = 11, seed: int = 0):
    generator = np.random.default_rng(seed)
    letters = generator.integers(0, 22, (rows, length), dtype=np.uint8)
    letters[0] = single_sequence("MKTAYIAKQRQ").letters[0][:length]
    a = single_sequence("MKTAYIAKQRQ"[:length])
    deletions = generator.integers(0, 3, (rows, length), dtype=np.int32)
    return type(a)(letters, deletions, tuple(str(i) for i in range(rows)))


def test_features_are_those_of_the_definition() -> None:
    """Clusters, profiles and deletions written with loops, from one draw."""
    alignment, sequence = _alignment(), "MKTAYIAKQRQ"
    config = tiny()
    generator = np.random.default_rng(1)
    one = draw(alignment, config, generator)
    f = features_of(sequence, alignment, one, config)
    S, N = 16 - 4, 11
    assert f.msa_BSNF.shape == (1, S, N, 49)
    centres = [0, *one.order[: S - 1]]
    others = list(one.order[S - 1 :])
    clusters: list[list[int]] = [[] for _ in centres]
    for row in others:
        agree = [
            sum(one.letters[s, n] == alignment.letters[row, n] and alignment.letters[row, n] < 21 for n in range(N))
            for s in range(S)
        ]
        clusters[agree.index(max(agree))].append(row)
    for s in range(S):
        for n in range(N):
            count = 1e-6 + 1 + len(clusters[s])
            profile = np.zeros(23)
            profile[one.letters[s, n]] += 1
            for row in clusters[s]:
                profile[alignment.letters[row, n]] += 1
            skipped = alignment.deletions[centres[s], n]
            mean = (skipped + sum(alignment.deletions[row, n] for row in clusters[s])) / count
            expected = [
                *np.eye(23)[one.letters[s, n]],
                min(skipped, 1),
                2 / np.pi * np.arctan(skipped / 3),
                *(profile / count),
                2 / np.pi * np.arctan(mean / 3),
            ]
            assert np.abs(f.msa_BSNF[0, s, n].numpy() - expected).max() < 1e-6
    extra = np.array(others)[one.extra]
    assert np.array_equal(f.extra_msa_BEN[0].numpy(), alignment.letters[extra])
    assert f.target_BNF[0, :, 0].sum() == 0
    assert np.array_equal(f.target_BNF[0, :, 1:].argmax(-1).numpy(), residue_types(sequence))


def test_rows_that_agree_equally_join_the_first() -> None:
    centres = np.array([[0, 1, 2], [0, 1, 3], [21, 21, 21]], np.uint8)
    extra = np.array([[0, 1, 4], [0, 1, 3], [21, 21, 21], [22, 22, 22]], np.uint8)
    assert assign(centres, extra).tolist() == [0, 1, 0, 0]


def test_what_is_drawn_has_the_right_odds() -> None:
    """15 % hidden; of these 70 % masked, 10 % from the profile, 10 % uniform, 10 % as they were."""
    N = 400
    letters = np.full((200, N), LETTERS["A"], np.uint8)
    alignment = type(_alignment())(letters, np.zeros((200, N), np.int32), ("x",) * 200)
    one = draw(alignment, preset("model_3"), np.random.default_rng(0))
    assert one.letters.shape == (200, N)
    share = np.bincount(one.letters.ravel(), minlength=23) / one.letters.size
    assert share[22] == pytest.approx(0.15 * 0.7, rel=0.03)
    assert share[LETTERS["A"]] == pytest.approx(1 - 0.15 * (0.7 + 0.1 * 19 / 20), rel=0.003)
    assert share[LETTERS["W"]] == pytest.approx(0.15 * 0.1 / 20, rel=0.2)
    assert share[20:22].sum() == 0


def test_a_draw_is_a_function_of_the_seed_and_keeps_the_query_first() -> None:
    alignment = _alignment()
    draws = [draw(alignment, tiny(), np.random.default_rng(seed)) for seed in (3, 3, 4)]
    assert np.array_equal(draws[0].letters, draws[1].letters)
    assert not np.array_equal(draws[0].letters, draws[2].letters)
    assert sorted(draws[0].order) == list(range(1, 30))
    kept = draws[0].letters[0] == alignment.letters[0]
    assert kept.mean() > 0.5


def test_rows_for_templates_are_reserved() -> None:
    alignment = _alignment(rows=600)
    assert num_centres(preset("model_1"), alignment) == 508
    assert num_centres(preset("model_3"), alignment) == 512
    assert num_centres(preset("model_3"), _alignment(rows=5)) == 5


def test_a_sequence_alone() -> None:
    alignment = single_sequence("MKTAYI")
    one = draw(alignment, tiny(), np.random.default_rng(0))
    f = features_of("MKTAYI", alignment, one, tiny())
    assert f.msa_BSNF.shape == (1, 1, 6, 49)
    assert f.extra_msa_BEN.shape == (1, 1, 6)
    assert f.extra_mask_BEN.sum() == 0
    assert f.templates is None


def test_extra_rows_are_limited() -> None:
    alignment = _alignment(rows=100)
    one = draw(alignment, tiny(), np.random.default_rng(0))
    assert features_of("MKTAYIAKQRQ", alignment, one, tiny()).extra_msa_BEN.shape[1] == 32
    given = Draw(np.arange(1, 100), alignment.letters[:12], np.arange(88), np.zeros((12, 11), bool))
    f = features_of("MKTAYIAKQRQ", alignment, given, tiny())
    assert np.array_equal(f.extra_msa_BEN[0].numpy(), alignment.letters[12 : 12 + 32])


def test_files_are_found_by_name(tmp_path: Path) -> None:
    record = Record(1, "a/b", "MKT")
    (tmp_path / "msa").mkdir()
    (tmp_path / "msa" / "a_b.a3m").write_text(">q\nMKT\n>x\nMKV\n")
    (tmp_path / "msa" / "other.a3m").write_text(">q\nMMM\n")
    assert len(find_target(record, tmp_path / "msa", None, alone=False).alignment) == 2
    (tmp_path / "msa" / "a_b").mkdir()
    (tmp_path / "msa" / "a_b" / "uniref.sto").write_text("# STOCKHOLM 1.0\nq MKT\ny M-T\n//\n")
    target = find_target(record, tmp_path / "msa", None, alone=False)
    assert len(target.alignment) == 3
    assert len(find_target(Record(2, "c", "MMM"), tmp_path / "msa", None, alone=False).alignment) == 1
    before = target.digest()
    (tmp_path / "msa" / "a_b.a3m").write_text(">q\nMKT\n")
    assert find_target(record, tmp_path / "msa", None, alone=False).digest() != before
    with pytest.raises(UserError, match="one file"):
        find_target(record, tmp_path / "msa" / "a_b.a3m", None, alone=False)
    with pytest.raises(UserError, match="does not exist"):
        find_target(record, tmp_path / "nowhere", None, alone=True)


@pytest.mark.parametrize("name", ["", ".", "..", "n" * 300])
def test_a_name_that_is_no_file_s_finds_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "msa").mkdir()
    for file in (tmp_path / "msa" / "other.a3m", tmp_path / "above.a3m"):
        file.write_text(">q\nMMM\n")
    assert find_target(Record(7, name, "MKT"), tmp_path / "msa", None, alone=False).files == ()
    (tmp_path / "msa" / f"{Record(7, name, 'MKT').safe_name}.a3m").write_text(">q\nMKT\n")
    assert len(find_target(Record(7, name, "MKT"), tmp_path / "msa", None, alone=False).files) == 1
