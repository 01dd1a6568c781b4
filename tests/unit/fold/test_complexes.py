"""Complexes: features as the original's own code makes them, pairing by hand, and what is found by name."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from apps.fold.complexes import find_complex, in_input_order
from apps.fold.features import pairing
from apps.fold.features.alignment import Alignment, parse_a3m
from apps.fold.features.complexes import assemble
from apps.fold.features.pairing import pair_rows, species_of
from apps.fold.features.sampling import Drawn, clusters, draw_rows, features_of_complex
from apps.fold.features.sequences import read_fasta
from apps.fold.model.config import MultimerConfig
from apps.fold.model.heads import chain_tm_scores, predicted_tm_score
from apps.fold.output.confidence import Folded
from core.config import UserError
from tests.support.original_complex import CASES, FILE, chains


@pytest.mark.parametrize("case", CASES)
def test_features_are_the_original_s_to_the_bit(case: str) -> None:
    with np.load(FILE) as file:
        theirs = {name.partition("/")[2]: file[name] for name in file.files if name.startswith(f"{case}/")}
    given = chains()
    one = assemble([given[name] for name in CASES[case]], 4).complex
    ours = {
        **{name: getattr(one, name) for name in ("msa", "msa_mask", "bert_mask", "aatype", "residue_index")},
        **{name: getattr(one, name) for name in ("asym_id", "entity_id", "sym_id", "template_aatype")},
        "deletion_matrix": one.deletions,
        "cluster_bias_mask": one.cluster_bias,
        "seq_mask": one.mask,
        "template_all_atom_mask": one.template_mask,
    }
    assert set(ours) == set(theirs)
    for name, array in theirs.items():
        assert np.array_equal(ours[name], array), name


def _rows(query: str, *rows: tuple[str, str]) -> Alignment:
    return parse_a3m(f">query\n{query}\n" + "".join(f">{name}\n{row}\n" for name, row in rows))


def _named(species: str) -> str:
    return f"tr|A0A123|A0A123_{species}/3-9"


def test_rows_are_paired_by_species_as_by_hand() -> None:
    """Of HUMAN the row that is more like the chain; YEAST and MOUSE of two chains each, by the product of numbers."""
    a = _rows("MKT", (_named("HUMAN"), "MAA"), (_named("HUMAN"), "MKA"), (_named("YEAST"), "AAA"), ("other", "MKV"))
    b = _rows("GSH", (_named("MOUSE"), "GGG"), (_named("HUMAN"), "GGH"), (_named("YEAST"), "GSG"))
    c = _rows("WWL", (_named("HUMAN"), "WWW"), (_named("MOUSE"), "LLL"))
    found = pair_rows([a, b, c])
    assert found.rows.tolist() == [[0, 0, 0], [2, 2, 1], [-1, 1, 2], [3, 3, -1]]
    assert found.species == ("", "HUMAN", "MOUSE", "YEAST")
    with patch.object(pairing, "_MOST_OF_SPECIES", 1):  # HUMAN has two of the first chain
        assert "HUMAN" not in pair_rows([a, b, c]).species


def test_rows_of_many_chains_are_ordered_by_numbers_of_any_size() -> None:
    """Of twelve chains the product of the rows' numbers has more than 64 bits; 2^64 of them would count as 0."""
    names = {3: _named("HUMAN"), 64: _named("MOUSE")}
    found = pair_rows([_rows("MKV", *((names.get(number, "other"), "MKT") for number in range(1, 65)))] * 12)
    assert found.species == ("", "HUMAN", "MOUSE")
    assert found.rows[:, 0].tolist() == [0, 3, 64]


def test_a_species_is_in_the_name_that_uniprot_gives() -> None:
    names = {
        "tr|A0A146SKV9|A0A146SKV9_FUNHE/2-90 a description": "FUNHE",
        "sp|P12345_1|AATM_RABIT": "RABIT",
        "tr|A0A146SKV9|A0A146SKV9_FUNHE_12": "FUNHE",
        "UniRef100_A0A146SKV9_FUNHE": "",
        "tr|A0A146SKV9|A0A146SKV9_FUNHES": "",
        "": "",
    }
    assert {name: species_of(name) for name in names} == names


def test_extra_rows_are_shared_by_centres_as_near_and_count_by_their_columns() -> None:
    """The definition, row by row."""
    generator = np.random.default_rng(0)
    centres, extra = generator.integers(0, 23, (3, 6)), generator.integers(0, 22, (70, 6))
    centres[2] = centres[1]  # so that the two are as near
    deletions, extra_deletions = generator.integers(0, 3, (3, 6)), generator.integers(0, 3, (70, 6))
    mask, extra_mask = np.ones((3, 6)), np.ones((70, 6))
    extra_mask[5], extra_mask[6, 3:] = 0, 0
    sums, skipped, counts = np.eye(23)[centres], deletions.astype(float), np.ones(3)
    for row, row_mask, gone in zip(extra, extra_mask, extra_deletions):
        agreement = ((row == centres) & (centres < 21) & (row_mask > 0)).sum(1)
        nearest = agreement == agreement.max()
        for n in np.flatnonzero(nearest):
            weight = row_mask.sum() / nearest.sum()
            sums[n] += weight * np.eye(23)[row] * row_mask[:, None]
            skipped[n] += weight * gone * row_mask
            counts[n] += weight
    profile, mean = clusters(centres, deletions, mask, extra, extra_deletions, extra_mask)
    assert np.allclose(profile, sums / counts[:, None, None], rtol=0, atol=1e-12)
    assert np.allclose(mean, skipped / counts[:, None], rtol=0, atol=1e-12)


def test_drawn_rows_begin_with_the_chains_and_hide_a_share_of_letters() -> None:
    given = chains()
    one = assemble([given["A"], given["B"]], 4).complex
    config = replace(MultimerConfig(), max_msa=8, max_extra_msa=5)
    hidden = 0.0
    for seed in range(40):
        drawn = draw_rows(one, config, np.random.default_rng(seed))
        assert drawn.order[0] == 0
        assert sorted(drawn.order) == list(range(len(one.msa)))
        hidden += (drawn.letters != one.msa[drawn.order[:8]]).mean() / 40
        again = draw_rows(one, config, np.random.default_rng(seed))
        assert np.array_equal(again.letters, drawn.letters)
    assert 0.1 < hidden < 0.15  # a tenth of what is hidden is kept, and some letters replace themselves
    features = features_of_complex(one, drawn, config)
    assert features.sizes() == (len(one.aatype), 8, 5, 4)
    assert features.target_BNF.shape[-1] == 21
    few = replace(config, max_msa=500)
    alone = features_of_complex(one, Drawn(drawn.order, one.msa[drawn.order]), few)
    assert alone.extra_mask_BEN.sum() == 0


def test_scores_of_chains() -> None:
    """Against sums over residues, one by one, in fp64."""
    generator = torch.Generator().manual_seed(0)
    chains_N = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    logits = torch.randn(9, 9, 64, generator=generator, dtype=torch.float64)
    across, by_chain = chain_tm_scores(logits, chains_N, chains_N)
    share, centres = torch.softmax(logits, -1), (torch.arange(64) + 0.5) * 31 / 62

    def term(i: int, j: int, length: int) -> float:
        d0 = 1.24 * (max(length, 19) - 15) ** (1 / 3) - 1.8
        return float((share[i, j] / (1 + (centres.double() / d0) ** 2)).sum())

    lengths = [3, 2, 4]
    for i in range(9):
        own = int(chains_N[i])
        others = [term(i, j, 9) for j in range(9) if chains_N[j] != own]
        assert abs(float(across[i]) - sum(others) / len(others)) < 1e-7
        for b in range(3):
            length = lengths[own] + (lengths[b] if b != own else 0)
            terms = [term(i, j, length) for j in range(9) if chains_N[j] == b]
            assert abs(float(by_chain[i, b]) - sum(terms) / len(terms)) < 1e-7
    one_chain = chain_tm_scores(logits, torch.zeros(9, dtype=torch.long), torch.zeros(9, dtype=torch.long))[1]
    assert torch.allclose(one_chain.amax(), predicted_tm_score(logits[None], torch.ones(1, 9))[0], rtol=1e-6)


_FASTA = ">dimer\nMKT:GSHM:MKT\n"


def test_files_of_a_complex_are_found_by_its_chains_names(tmp_path: Path) -> None:
    (tmp_path / "in.fasta").write_text(_FASTA)
    (record,), _ = read_fasta(tmp_path / "in.fasta")
    for chain, rows in {"dimer_A": (">q\nMKT\n>x\nMKV\n", "MAT"), "dimer_B": (">q\nGSHM\n>x\nGSHH\n", "GSGM")}.items():
        folder = tmp_path / "msa" / chain
        folder.mkdir(parents=True)
        (folder / "bfd.a3m").write_text(rows[0])
        query = rows[0].split("\n")[1]
        (folder / "uniprot_hits.sto").write_text(f"# STOCKHOLM 1.0\nquery {query}\n{_named('HUMAN')} {rows[1]}\n//\n")
    found = find_complex(record, tmp_path / "msa", None, True)
    one = found.assembly.complex
    assert one.entity_id.tolist() == [1] * 6 + [2] * 4
    assert found.assembly.chains.tolist() == [0, 2, 1]
    assert found.assembly.input_order().tolist() == [0, 1, 2, 6, 7, 8, 9, 3, 4, 5]
    numbers = 10.0 * one.asym_id
    pairs, by_chain = numbers[:, None] + numbers / 100, np.array([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
    at = Folded(record.sequence, numbers, numbers, numbers, pairs, 0.5, None, (), 0.5, by_chain)
    given = in_input_order(at, found)
    assert given.plddt.tolist() == [10.0] * 3 + [30.0] * 4 + [20.0] * 3
    assert given.pae is not None
    assert given.pae[0].tolist() == [10.1] * 3 + [10.3] * 4 + [10.2] * 3
    assert given.chain_pairs is not None
    assert given.chain_pairs.tolist() == [[1, 3, 2], [7, 9, 8], [4, 6, 5]]
    assert given.lengths == (3, 4, 3)
    letters = ["".join("ARNDCQEGHILKMFPSTWYVX-"[letter] for letter in row) for row in one.msa]
    assert letters == ["MKTMKTGSHM", "MATMATGSGM", "MKVMKV----", "------GSHH"]
    assert found.notes == ("1 rows of several chains are paired of 1 species (HUMAN 1)",)
    changed = found.digest()
    (tmp_path / "msa" / "dimer_A" / "uniprot_hits.sto").unlink()
    without = find_complex(record, tmp_path / "msa", None, True)
    assert without.digest() != changed
    assert "dimer_A" in without.notes[0]


def test_an_a3m_of_colabfold_is_paired_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "in.fasta").write_text(_FASTA)
    (record,), _ = read_fasta(tmp_path / "in.fasta")
    path = tmp_path / "dimer.a3m"
    path.write_text(
        "#3,4\t2,1\n>101\t102\nMKTGSHM\n>a\tb\nMaKVGS-M\n>101\nMKT----\n>x\nM-T----\n>102\n---GSHM\n>y\n---GSHH\n"
    )
    found = find_complex(record, path, None, True)
    one = found.assembly.complex
    letters = ["".join("ARNDCQEGHILKMFPSTWYVX-"[letter] for letter in row) for row in one.msa]
    assert letters == ["MKTMKTGSHM", "MKVMKVGS-M", "M-TM-T----", "------GSHH"]
    assert one.deletions[1].tolist() == [0, 1, 0, 0, 1, 0, 0, 0, 0, 0]
    path.write_text("#3,4\t1,1\n>101\t102\nMKTGSHM\n")
    with pytest.raises(UserError, match=r"3 residues \(1\) and 4 residues \(1\), and dimer has 3 residues \(2\)"):
        find_complex(record, path, None, True)
    path.write_text(">q\nMKT\n")
    with pytest.raises(UserError, match="is no A3M of a complex"):
        find_complex(record, path, None, True)
