"""Features beside those that the original's own pipeline made of the same files with the same draws."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apps.fold.features.alignment import check_query, merge, read_alignment, single_sequence
from apps.fold.features.hhr import read_hhr
from apps.fold.features.msa import Draw, features_of, num_centres, true_letters
from apps.fold.features.templates import features_of_templates, templates_of_hits
from apps.fold.model.config import preset
from apps.fold.toy import HELDOUT, STRUCTURES
from tests.support.original_features import FILE, LIMITS

ROUNDING = 2e-7  # of fp32 numbers up to 1, computed in another order


def _case(name: str) -> dict[str, np.ndarray]:
    with np.load(FILE, allow_pickle=False) as file:
        return {key.removeprefix(f"{name}/"): file[key] for key in file.files if key.startswith(f"{name}/")}


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_of_an_alignment(tmp_path: Path, name: str) -> None:
    theirs = _case(name)
    sequence, path = str(theirs["sequence"]), tmp_path / "alignment"
    path.write_text(str(theirs["text"]))
    read = read_alignment(path)
    check_query(read, sequence, path)
    alignment = merge([single_sequence(sequence), read])
    centres, extra = LIMITS[name]
    config = replace(preset("model_5_ptm"), max_msa=centres, max_extra_msa=extra)
    assert num_centres(config, alignment) == len(theirs["msa_feat"])
    assert len(alignment) == len(theirs["order"]) + 1
    letters = theirs["msa_feat"][..., :23].argmax(-1).astype(np.uint8)
    drawn = Draw(theirs["order"], letters, theirs["chosen"], theirs["bert_mask"] > 0)
    assert np.array_equal(true_letters(alignment, drawn), theirs["true_msa"])
    ours = features_of(sequence, alignment, drawn, config)
    rows = len(theirs["extra_msa"])
    assert rows == min(extra, len(alignment) - len(letters))
    assert int(ours.extra_mask_BEN[0, :, 0].sum()) == rows
    pairs = {
        "aatype": ours.aatype_BN,
        "residue_index": ours.residue_index_BN,
        "target_feat": ours.target_BNF,
        "msa_feat": ours.msa_BSNF,
        "extra_msa": ours.extra_msa_BEN[:, :rows],
        "extra_has_deletion": ours.extra_has_deletion_BEN[:, :rows],
        "extra_deletion_value": ours.extra_deletion_BEN[:, :rows],
    }
    assert theirs["msa_feat"][..., 23:25].max() > 0, "a case without deletions would say little"
    for key, tensor in pairs.items():
        assert tensor[0].shape == theirs[key].shape, key
        if tensor.numel():
            assert np.abs(tensor[0].numpy().astype(np.float64) - theirs[key]).max() <= ROUNDING, key


def test_of_templates(tmp_path: Path) -> None:
    theirs = _case("templates")
    for path in (STRUCTURES / "1a8o.cif", HELDOUT / "1a7g.cif"):
        shutil.copy(path, tmp_path)
    (tmp_path / "query.hhr").write_text(str(theirs["text"]))
    hits = sorted(read_hhr(tmp_path / "query.hhr"), key=lambda hit: -hit.sum_probs)
    found, left_out = templates_of_hits(hits, str(theirs["sequence"]), tmp_path)
    assert not left_out
    ours = features_of_templates(found)
    assert ours is not None
    assert np.array_equal(ours.aatype_BTN[0], theirs["aatype"])
    there = theirs["all_atom_masks"][..., None]
    for number, one in enumerate(found):
        assert one.mask.sum() > 200
        assert np.array_equal(one.mask, theirs["all_atom_masks"][number])
        positions = theirs["all_atom_positions"][number]
        assert np.array_equal(one.positions * there[number], positions * there[number])
    known = theirs["pseudo_beta_mask"]
    assert np.array_equal(ours.pseudo_beta_mask_BTN[0], known)
    assert np.array_equal(ours.pseudo_beta_BTN3[0].numpy() * known[..., None], theirs["pseudo_beta"] * known[..., None])
