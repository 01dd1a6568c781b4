"""Templates by hhsearch's hits: the file's format, which hits count, what of a structure lies where, draws."""

import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from apps.fold.features import templates
from apps.fold.features.entries import read_entries
from apps.fold.features.hhr import TemplateHit, check_hits, read_hhr
from apps.fold.features.sequences import Record
from apps.fold.features.templates import Allowed, align, drawn, features_of_templates, templates_of_hits
from apps.fold.loss.total import LossConfig
from apps.fold.model import residues
from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.config import tiny
from apps.fold.search.kalign import align_by_kalign, has_kalign
from apps.fold.targets import find_target
from apps.fold.toy import HELDOUT, STRUCTURES
from apps.fold.training.batches import BatchConfig, FoldBatches, iterations_of, stacked, templates_of
from apps.fold.training.config import FoldTrainConfig, model_config
from apps.fold.training.dataset import Example, Selection, beside, load, prepare
from apps.fold.training.objective import Objective
from apps.fold.training.recipes import RECIPES
from core.config import UserError
from tests.support.fold import TemplateChains, hhr_text, random_parameters, random_templates, small_template_model

SEEN = read_entries(STRUCTURES / "1a8o.cif")[0]


def dated(path: Path, to: Path, *dates: str) -> Path:
    """A structure with the dates of its revisions."""
    names = [f"_pdbx_audit_revision_history.{name}" for name in ("ordinal", "revision_date")]
    rows = [f"{number} {date}" for number, date in enumerate(dates, 1)]
    to.write_text("\n".join([path.read_text(), "loop_", *names, *rows, "#", ""]))
    return to


def _aligned() -> tuple[str, str, str]:
    """A query made of 1A8O's residues 6 to 60, three more at 20 and without those at 40 and 41; both rows."""
    chain = SEEN.sequence
    below = chain[5:20] + "---" + chain[20:60]
    above = chain[5:20] + "GGG" + chain[20:40] + "--" + chain[42:60]
    return "MM" + above.replace("-", "") + "KKK", above, below


def _hits_file(path: Path, query: str, *hits: tuple) -> Path:
    path.write_text(hhr_text(query, list(hits)))
    return path


def test_a_hit_s_residues_are_those_of_the_structure(tmp_path: Path) -> None:
    query, above, below = _aligned()
    path = _hits_file(tmp_path / "a.hhr", query, ("1A8O_A", above, below, 3, 6, 50.25))
    (hit,) = read_hhr(path)
    assert (hit.entry, hit.chain, hit.columns, hit.sum_probs, hit.first) == ("1a8o", "A", 53, 50.2, 2)
    assert hit.sequence == SEEN.sequence[5:60]
    check_hits([hit], query, path)
    (found,), left_out = templates_of_hits([hit], query, STRUCTURES)
    assert left_out == []
    q, t, expected = 2, 5, {}
    for a, b in zip(above, below):
        if a != "-" and b != "-":
            expected[q] = t
        q, t = q + (a != "-"), t + (b != "-")
    assert len(expected) == 53
    for residue, letter in enumerate(query):
        if residue in expected:
            there = expected[residue]
            assert residues.RESTYPES[found.aatype[residue]] == letter == SEEN.sequence[there]
            assert np.array_equal(found.positions[residue], SEEN.positions[there])
            assert np.array_equal(found.mask[residue], SEEN.mask[there])
        else:
            assert found.aatype[residue] == residues.GAP
            assert found.mask[residue].sum() == 0


def test_hits_are_ranked_and_those_that_teach_nothing_are_left_out(tmp_path: Path) -> None:
    query, above, below = _aligned()
    folder = tmp_path / "mmcifs"
    (folder / "a8").mkdir(parents=True)
    dated(STRUCTURES / "1a8o.cif", folder / "a8" / "1a8o.cif", "2011-07-13", "1998-06-10")
    (folder / "1a7g.cif").write_bytes((HELDOUT / "1a7g.cif").read_bytes())
    changed = "W" + below[1:9] + "W" + below[10:]  # another version of the sequence: 53 of 55 residues
    hits = read_hhr(
        _hits_file(
            tmp_path / "a.hhr",
            query,
            ("1a8o_A", above, below, 3, 6, 40.0),
            ("9xyz_A", above, below, 3, 6, 50.0),
            ("1a8o_A", above[:5], below[:5], 3, 6, 49.0),
            ("1a8o_A", above[:9], below[:9], 3, 6, 48.0),
            ("1a8o_A", query, query, 1, 1, 47.0),
            ("1a7g_E", above, below, 3, 6, 46.0),
            ("1a8o_Z", above, changed, 3, 6, 45.0),
        )
    )
    assert [hit.sum_probs for hit in hits] == [50, 49, 48, 47, 46, 45, 40]
    found, left_out = templates_of_hits(hits, query, folder)
    assert [one.name for one in found] == ["1a8o_Z", "1a8o_A"]
    for words, line in zip(
        ("holds no 9xyz.cif", "only 5 residues", "only 9 residues", "the sequence itself", "another sequence"), left_out
    ):
        assert words in line
    assert len(left_out) == 5
    assert np.array_equal(found[0].positions[12], found[1].positions[12])
    assert [one.name for one in templates_of_hits(hits, query, folder, most=1)[0]] == ["1a8o_Z"]
    assert read_entries(folder / "a8" / "1a8o.cif")[0].released == "1998-06-10"
    for allowed, count in ((Allowed("1998-06-10"), 2), (Allowed("1998-06-09"), 0), (Allowed(without="1a8o"), 0)):
        assert len(templates_of_hits(hits, query, folder, allowed)[0]) == count
    with pytest.raises(UserError, match="'June' is no date"):
        Allowed("June")


def _another_version(tmp_path: Path) -> tuple[str, list[TemplateHit]]:
    """A query, and its hit with three residues that the structure does not have, and one that is another there."""
    _, above, below = _aligned()
    letters = list(below)
    letters[20:20] = "WCW"
    letters[30] = "W"
    above = above[:20] + "WCW" + above[20:]
    return above.replace("-", ""), read_hhr(
        _hits_file(tmp_path / "a.hhr", above.replace("-", ""), ("1a8o_A", above, "".join(letters), 1, 6, 40.0))
    )


@pytest.mark.skipif(shutil.which("kalign") is None, reason="no kalign; ends where Debian's kalign is")
def test_a_structure_with_another_sequence_is_aligned_by_kalign(tmp_path: Path) -> None:
    """The real one, and what is aligned without it: the same residues here, since nothing is ambiguous."""
    query, hits = _another_version(tmp_path)
    (hit,) = hits
    pairs = align_by_kalign(hit.sequence, SEEN.sequence)
    assert np.array_equal(pairs, align(hit.sequence, SEEN.sequence))
    assert {(0, 5), (len(hit.sequence) - 1, 59)} <= set(map(tuple, pairs.tolist()))
    calls = []
    with patch.object(templates, "align_by_kalign", lambda *given: calls.append(given) or align_by_kalign(*given)):
        (found,), left_out = templates_of_hits(hits, query, STRUCTURES)
    assert calls == [(hit.sequence, SEEN.sequence)]
    assert left_out == []
    assert np.array_equal(found.positions[0], SEEN.positions[5])
    with pytest.raises(UserError, match="kalign failed on a template's two sequences"):
        align_by_kalign("", "")


def test_without_kalign_it_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    query, hits = _another_version(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    has_kalign.cache_clear()
    try:
        for _ in range(2):
            (found,), left_out = templates_of_hits(hits, query, STRUCTURES)
    finally:
        has_kalign.cache_clear()
    assert left_out == []
    assert np.array_equal(found.positions[0], SEEN.positions[5])
    (record,) = caplog.records
    assert "no kalign on the PATH" in record.getMessage()
    assert "apt-get install kalign" in record.getMessage()


def test_a_chain_learns_from_what_was_published_before_it() -> None:
    chain = replace(SEEN, released="2000-03-01", name="1abc_A")
    assert Allowed().before(chain) == Allowed("2000-01-01", "1abc")
    assert Allowed("1999-05-05").before(chain).latest == "1999-05-05"
    assert Allowed("2001-05-05").before(chain).latest == "2000-01-01"
    assert Allowed().before(replace(chain, released="")) == Allowed("", "1abc")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: "nonsense", "does not begin with 'Query'"),
        (lambda text: text.replace(">1a8o_A", ">sp|P12345"), "is no chain of the PDB"),
        (lambda text: text.replace("T 1a8o_A ", "T 1a8o_A x"), "do not fit; the file is damaged"),
        (lambda text: text.replace("Aligned_cols", "Columns"), "do not fit; the file is damaged"),
        (lambda text: text.replace("Sum_probs=4", "Sum_probs=4..4"), "Sum_probs=4..40.0 is no number; the file is"),
    ],
)
def test_damaged_results_are_refused(tmp_path: Path, change, said: str) -> None:
    query, above, below = _aligned()
    (tmp_path / "a.hhr").write_text(change(hhr_text(query, [("1a8o_A", above, below, 3, 6, 40.0)])))
    with pytest.raises(UserError, match=said) as caught:
        read_hhr(tmp_path / "a.hhr")
    assert "\n" not in str(caught.value)


def test_a_record_s_hits_are_found_by_its_name(tmp_path: Path) -> None:
    query, above, below = _aligned()
    hit = ("1a8o_A", above, below, 3, 6, 40.0)
    (tmp_path / "msa" / "a").mkdir(parents=True)
    _hits_file(tmp_path / "msa" / "a" / "pdb70.hhr", query, hit, ("9xyz_A", above, below, 3, 6, 50.0))
    record = Record(1, "a", query)
    target = find_target(record, tmp_path / "msa", STRUCTURES, alone=False)
    assert [one.name for one in target.templates] == ["1a8o_A"]
    assert STRUCTURES / "1a8o.cif" in target.files
    assert any("1 templates of 2 hits" in note for note in target.notes)
    assert any("9xyz" in note for note in target.notes)
    (features,) = target.iterations(replace(tiny(), num_recycles=0), 0)
    assert features.templates is not None
    assert features.templates.mask_BT.shape == (1, 1)
    without = find_target(record, tmp_path / "msa", None, alone=False)
    assert without.templates == ()
    assert "give --templates" in without.notes[0]
    with pytest.raises(UserError, match="search of another query"):
        find_target(Record(1, "a", query[::-1]), tmp_path / "msa", STRUCTURES, alone=False)
    lacking = find_target(Record(2, "b", query), tmp_path / "msa", STRUCTURES, alone=False)
    assert "no template" in lacking.notes[0]


# --- training ---------------------------------------------------------------------------------------------------------


def test_a_random_number_of_random_templates_is_drawn() -> None:
    """min(n', 4) of n, n' uniform from 0 to n; each as often as the others."""
    templates = random_templates(SEEN, 6, 0)
    generator = np.random.default_rng(0)
    draws = [drawn(templates, 4, generator) for _ in range(3000)]
    counts = np.bincount([len(one) for one in draws], minlength=5) / len(draws)
    assert np.abs(counts - np.array([1, 1, 1, 1, 3]) / 7).max() < 0.03
    shares = [sum(any(t is one for t in draw) for draw in draws) for one in templates]
    assert max(shares) / min(shares) < 1.15
    assert {draw[0].name for draw in draws if draw} == {f"t{n}" for n in range(6)}
    assert all(len({one.name for one in draw}) == len(draw) for draw in draws)
    assert drawn((), 4, generator) == ()


def test_rows_carry_their_templates_cropped_alike() -> None:
    batches = FoldBatches(TemplateChains(), BatchConfig(global_batch=5, crop=9), small_template_model(), seed=1)  # pyright: ignore
    seen = set()
    for step in range(12):
        for number in range(5):
            row = batches.row(step, number)
            features = templates_of(stacked([row]))
            assert features is not None
            (example,) = (e for e in map(TemplateChains().__getitem__, range(5)) if _is_of(row, e))
            first, length = int(row["residue_index"][0]), len(row["aatype"])
            assert row["template_mask"].shape == (3,), "every rank runs the stack of templates equally often"
            assert row["template_mask"].sum() <= len(example.templates)
            for t in range(int(row["template_mask"].sum())):
                aatype = row["template_aatype"][t].numpy()
                parts = [one.aatype[first : first + length] for one in example.templates]
                (which,) = (n for n, part in enumerate(parts) if np.array_equal(part, aatype))
                whole = features_of_templates([example.templates[which]])
                assert whole is not None
                there = slice(first, first + length)
                for name, value in vars(features).items():
                    # The first residue's torsions need the one that was cropped before it.
                    if value is not None and name != "mask_BT":
                        expected = getattr(whole, name)[:, 0, there]
                        assert torch.allclose(value[:, t, 1:], expected[:, 1:], atol=1e-3), name
                seen.add((len(example.templates), t))
    assert {(6, 2), (7, 2), (1, 0), (2, 1)} <= seen


def _is_of(row: dict[str, torch.Tensor], example: Example) -> bool:
    index = row["residue_index"].numpy()
    if index[-1] >= len(example.entry):
        return False
    atoms = (example.entry.positions * example.entry.mask[..., None])[index]
    return np.allclose(row["positions_milli"].numpy() / 1000, atoms, atol=6e-4)


def test_padding_changes_nothing_and_every_parameter_learns() -> None:
    """A row has the same loss alone and beside others with more templates; also where none has one."""
    batches = FoldBatches(TemplateChains(), BatchConfig(global_batch=6, crop=64), small_template_model(), seed=3)  # pyright: ignore
    network = AlphaFold(small_template_model()).double().eval()
    network.load_state_dict({k: v.double() for k, v in random_parameters(small_template_model()).items()})
    rows = [batches.row(1, row) for row in range(5)]
    counts = [int(row["template_mask"].sum()) for row in rows]
    assert len(set(counts)) > 2, counts
    assert 0 in counts
    objective = Objective(LossConfig())
    with torch.no_grad():
        together = objective.parts(network, _wide(stacked(rows)))
        for number, row in enumerate(rows):
            alone = objective.parts(network, _wide(stacked([row])))
            for name, part in alone.items():
                assert part.item() == pytest.approx(together[name][number].item(), rel=1e-9, abs=1e-12), name
        batch = _wide(stacked([rows[counts.index(max(counts))]]))
        other = batch | {"template_positions_milli": batch["template_positions_milli"] + 2000 * batch["taught"]}
        moved = batch | {"template_positions_milli": batch["template_positions_milli"].flip(2)}
        plain, same, differs = (network(iterations_of(b)).positions_BN373 for b in (batch, other, moved))
        assert (plain - same).abs().max() < 1e-6, "templates have no place of their own"
        assert (plain - differs).abs().max() > 1e-3
    objective(network, _wide(stacked([rows[counts.index(0)]]))).backward()
    embedder = network.template_embedder
    assert embedder is not None
    assert all(p.grad is not None for p in embedder.parameters())


def _wide(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def test_a_folder_of_templates(tmp_path: Path) -> None:
    """By hits, without the chain's own entry and what came after it; by a folder of the chain's name."""
    chain = read_entries(HELDOUT / "1a7g.cif")[0]
    structures, alignments, mirror = (tmp_path / name for name in ("structures", "alignments", "mirror"))
    for folder in (structures, alignments, mirror):
        folder.mkdir()
    (structures / "1a7g.cif").write_bytes((HELDOUT / "1a7g.cif").read_bytes())
    dated(STRUCTURES / "1a8o.cif", structures / "1a8o.cif", "2008-06-10")
    for name in ("1a7g", "1a8o"):
        (mirror / f"{name}.cif").write_bytes((structures / f"{name}.cif").read_bytes())
    own = ("1a7g_E", chain.sequence[:60], chain.sequence[:60], 1, 1, 60.0)
    other = ("1a8o_A", chain.sequence[:50], SEEN.sequence[:50], 1, 1, 30.0)
    _hits_file(alignments / "1a7g_E.hhr", chain.sequence, own, other)
    cache = tmp_path / "cache"

    def read(selection: Selection, templates: Path | None):
        there = beside(alignments, templates)
        prepare(structures, there, selection, cache)
        return load(structures, there, selection, cache)

    dataset = read(Selection(), mirror)
    assert [(one.name, one.num_templates) for one in dataset.chains] == [("1a7g_E", 0), ("1a8o_A", 0)]
    assert chain.released < "2008-06-10", "1A8O came later, so it is no template of 1A7G"
    dated(STRUCTURES / "1a8o.cif", mirror / "1a8o.cif", "1990-06-10")
    dataset = read(Selection(), mirror)  # another file, another place in the cache
    assert [one.num_templates for one in dataset.chains] == [1, 0]
    (template,) = dataset[0].templates
    assert template.name == "1a8o_A"
    assert np.array_equal(template.positions[3], SEEN.positions[3])
    assert (template.aatype[50:] == residues.GAP).all()
    assert [one.num_templates for one in read(Selection(max_template_date="1989-01-01"), mirror).chains] == [0, 0]
    assert [one.num_templates for one in read(Selection(), None).chains] == [0, 0]
    (mirror / "1a8o_A").mkdir()
    (mirror / "1a8o_A" / "own.cif").write_bytes((structures / "1a8o.cif").read_bytes())
    assert [one.num_templates for one in read(Selection(), mirror).chains] == [1, 1]
    with pytest.raises(UserError, match="no folder of templates at"):
        beside(alignments, tmp_path / "nowhere")


def test_models_with_templates_need_a_folder_of_them(tmp_path: Path) -> None:
    config = replace(RECIPES["debug"](), model="model_1_ptm")
    with pytest.raises(UserError, match=r"model_1_ptm has templates; give --data\.templates"):
        model_config(config)
    given = replace(config, data=replace(config.data, templates=tmp_path))
    assert model_config(given).templates is not None
    with pytest.raises(UserError, match=r"model_3 takes no templates; leave out --data\.templates"):
        model_config(replace(given, model="model_3"))
    with pytest.raises(UserError, match="is no date"):
        replace(config.data, max_template_date="2000")
    assert isinstance(config, FoldTrainConfig)
