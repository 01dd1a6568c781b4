"""Predictions as targets: which residues are trusted, which rows they have, what they teach, what is refused."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from apps.fold.features.alignment import Alignment
from apps.fold.loss.total import LossConfig
from apps.fold.model import residues
from apps.fold.model.alphafold import AlphaFold
from apps.fold.output.confidence import Folded
from apps.fold.output.files import write_confidence, write_mmcif
from apps.fold.training.batches import BatchConfig, FoldBatches, Predictions, stacked
from apps.fold.training.config import FoldTrainConfig, model_config
from apps.fold.training.dataset import Dataset, Example, Selection, beside, load, prepare
from apps.fold.training.distillation import (
    By,
    Confidence,
    DistillConfig,
    distances_of,
    divergence,
    prediction_files,
    reference_of,
    some_of,
    turns_of,
)
from apps.fold.training.objective import OF_EXPERIMENTS, Objective
from core.config import UserError
from tests.support.fold import Chains, random_parameters, small_model

LENGTHS = {"one": 12, "three": 30, "two": 150}


def write(folder: Path, name: str, length: int, lengths: tuple[int, ...] = ()) -> None:
    """A prediction as `fold predict --distogram` leaves it."""
    generator = np.random.default_rng(length)
    sequence = "".join(generator.choice(list(residues.RESTYPES), length))
    exists = np.stack([residues.ATOM37_MASK[residues.RESTYPES.index(letter)] for letter in sequence])
    positions = generator.normal(0, 9, (length, 37, 3)).astype(np.float32)
    shares = generator.dirichlet(np.full(64, 0.3), (length, length))
    shares = ((shares + shares.swapaxes(0, 1)) / 2).astype(np.float16)
    plddt = generator.uniform(20, 100, length).astype(np.float32)
    one = Folded(sequence, positions, exists, plddt, None, None, shares, lengths)
    (folder / name).mkdir(parents=True)
    write_mmcif(folder / name / "rank_1.cif", one, name, name)
    write_confidence(folder / name, "rank_1", one, {"name": name})


@pytest.fixture
def predicted(tmp_path: Path) -> Path:
    for name, length in LENGTHS.items():
        write(tmp_path / "folded", name, length)
    (tmp_path / "folded" / ".four.part").mkdir()  # of a run that was stopped
    return tmp_path / "folded"


def read(folder: Path, confidence: Confidence, alignments: Path | None = None, least: int = 1) -> Dataset:
    there, selection = beside(alignments), Selection(min_residues=least, confidence=confidence)
    prepare(folder, there, selection, folder.parent / "cache")
    return load(folder, there, selection, folder.parent / "cache")


def example(dataset: Dataset, number: int) -> Example:
    found = dataset[number]
    assert isinstance(found, Example)
    return found


def test_residues_of_little_plddt_are_no_targets(predicted: Path, tmp_path: Path) -> None:
    dataset = read(predicted, Confidence("plddt", 70))
    assert [chain.name for chain in dataset.chains] == sorted(LENGTHS)
    alignments = tmp_path / "alignments"
    alignments.mkdir()
    (alignments / "three.a3m").write_text(f">q\n{example(dataset, 1).entry.sequence}\n>a\n{'W' * 30}\n")
    aligned = read(predicted, Confidence("plddt", 70), alignments)
    assert [chain.num_rows for chain in aligned.chains] == [1, 2, 1]
    for number, name in enumerate(sorted(LENGTHS)):
        entry = example(dataset, number).entry
        scores = np.array(json.loads((predicted / name / "rank_1_confidence.json").read_text())["plddt"])
        kept = entry.mask[:, residues.CA] > 0
        np.testing.assert_array_equal(kept, scores >= 70)
        assert 0 < kept.sum() < len(entry)
        assert not entry.mask[~kept].any()
        assert entry.resolution == 0
    few = read(predicted, Confidence("plddt", 70), least=20)
    assert [chain.name for chain in few.chains] == ["two"]
    assert "residues have a confidence of 70 or more; at least 20 are needed" in few.refused[0]


def test_divergence_is_what_the_paper_writes(predicted: Path, tmp_path: Path) -> None:
    """Pair by pair, from the definitions; separations beyond 128 and those of one residue with itself are left out."""
    files = prediction_files(predicted)
    reference = reference_of(files, tmp_path / "cache", write=True)
    shares = {path.parent.name: distances_of(path).astype(np.float64) for path in files}
    mean = np.zeros((128, 64))
    for apart in range(1, 129):
        pairs = [one[i, i + apart] for one in shares.values() for i in range(len(one) - apart)]
        mean[apart - 1] = np.mean(pairs, 0) / np.mean(pairs, 0).sum()
    np.testing.assert_allclose(np.load(reference), mean, rtol=1e-12, atol=1e-15)
    for one in shares.values():
        want = []
        for i in range(len(one)):
            near = [j for j in range(len(one)) if 1 <= abs(i - j) <= 128]
            p = [mean[abs(i - j) - 1] for j in near]
            known = [np.maximum(one[i, j], 2.0**-24) for j in near]
            terms = [(a * np.log(np.where(a > 0, a, 1)) - a * np.log(b)).sum() for a, b in zip(p, known)]
            want.append(np.mean(terms))
        np.testing.assert_allclose(divergence(one, mean), want, rtol=1e-10)
        assert min(want) > 0
    least = float(np.median(divergence(shares["two"], mean)))
    entry = example(read(predicted, Confidence("divergence", least, reference)), 2).entry
    kept = entry.mask[:, residues.CA] > 0
    np.testing.assert_array_equal(kept, divergence(shares["two"], mean) >= least)
    stamp = reference.stat().st_mtime_ns
    assert reference_of(files, tmp_path / "cache", write=True) == reference
    assert reference.stat().st_mtime_ns == stamp


def test_distances_that_say_nothing_have_no_divergence() -> None:
    mean = np.random.default_rng(0).dirichlet(np.ones(64))
    whole = np.broadcast_to(mean, (9, 9, 64))
    reference = np.broadcast_to(mean, (128, 64))
    np.testing.assert_allclose(divergence(whole, reference), 0, atol=1e-12)
    sure = np.zeros((9, 9, 64))
    sure[..., 5] = 1
    assert (divergence(sure, reference) > 3).all()


@pytest.mark.parametrize("share", [0.75, 0.1, 1 / 3])
def test_every_beginning_of_a_run_has_its_share(share: float) -> None:
    turns, counts = turns_of(share), Counter()
    for row in range(1000):
        predicted, place = turns.place(row)
        assert place == counts[predicted], "each kind counts its own rows"
        counts[predicted] += 1
        assert counts[True] == int((row + 1) * turns.share)
    assert abs(counts[True] - 1000 * share) < 1


def batches(predicted: Path, **options) -> FoldBatches:
    predictions = Predictions(read(predicted, Confidence("plddt", 60)), turns_of(0.75), 3)
    config = BatchConfig(**{"global_batch": 4, "crop": 200, **options})
    return FoldBatches(Chains(), config, small_model(), 5, predictions=predictions)  # pyright: ignore


def test_a_row_depends_on_the_step_and_its_number_alone(predicted: Path) -> None:
    """So a run that goes on has the rows of one that was not stopped, on any number of ranks; each its own epochs."""
    of, seen = batches(predicted), []
    for step in range(5):
        rows = [batches(predicted).row(step, row) for row in range(4)]
        seen += [(bool(row["measured"]), len(row["aatype"])) for row in rows]
        for ranks in (1, 2, 4):
            for rank in range(ranks):
                got = of.batch(step, rank, ranks)
                want = stacked(rows[rank * 4 // ranks : (rank + 1) * 4 // ranks])
                assert all(torch.equal(got[name], want[name]) for name in want)
    assert Counter(measured for measured, _ in seen) == {True: 5, False: 15}
    assert sorted(length for measured, length in seen if measured) == [len(Chains()[n].entry) for n in range(5)]
    assert Counter(length for measured, length in seen if not measured) == dict.fromkeys(LENGTHS.values(), 5)


def test_decoys_are_experiments(predicted: Path) -> None:
    rows = [batches(predicted, decoys=0.99).row(step, row) for step in range(3) for row in range(4)]
    assert Counter((bool(row["measured"]), bool(row["taught"])) for row in rows) == {(True, False): 3, (False, True): 9}


def test_an_alignment_is_thinned_without_replacement() -> None:
    letters = np.arange(50, dtype=np.uint8)[:, None] % 21
    alignment = Alignment(letters, np.arange(50, dtype=np.int32)[:, None], tuple(map(str, range(50))))
    counts = Counter()
    for seed in range(200):
        found = some_of(alignment, 11, np.random.default_rng(seed))
        assert found.names[0] == "0"
        assert len(found) == len(set(found.names)) == 11
        assert list(found.names) == [str(n) for n in found.deletions[:, 0]]
        counts.update(found.names)
    assert len(counts) == 50
    assert max(counts[str(n)] for n in range(1, 50)) < 80  # 40 of 200 each
    assert some_of(alignment, 50, np.random.default_rng(0)) is alignment


def test_a_prediction_teaches_trusted_residues_and_no_confidence(predicted: Path) -> None:
    row = next(row for n in range(9) if not (row := batches(predicted).row(0, n))["measured"])
    model = small_model()
    network = AlphaFold(model)
    network.load_state_dict(random_parameters(model))
    network.eval()
    config = LossConfig(violation=0.1, experimentally_resolved=0.01, resolution=(0.0, 3.0))
    batch = stacked([row])
    moved = batch["positions_milli"].clone()
    hidden = ~batch["atom_mask"]
    assert hidden.all(-1).any()
    moved[hidden] += 70_000
    with torch.no_grad():
        parts = Objective(config).parts(network, batch)
        others = Objective(config).parts(network, batch | {"positions_milli": moved})
        measured = Objective(config).parts(network, batch | {"measured": torch.tensor([True])})
    assert {name for name, part in measured.items() if part.item() == 0} == set()
    assert {name for name, part in parts.items() if part.item() == 0} == set(OF_EXPERIMENTS) & parts.keys()
    for name, part in parts.items():
        assert others[name].item() == pytest.approx(part.item(), rel=1e-6), f"{name} knows residues that are no targets"


@pytest.mark.parametrize(
    ("by", "missing", "said"),
    [
        ("plddt", "rank_1_confidence.json", "lacks the pLDDT of its residues, in rank_1_confidence.json"),
        ("divergence", "rank_1_distogram.npz", "lacks its distances, in rank_1_distogram.npz; predict it with"),
    ],
)
def test_what_lacks_confidences_is_refused_in_a_line(predicted: Path, by: By, missing: str, said: str) -> None:
    reference = reference_of(prediction_files(predicted), predicted.parent / "cache", write=True)
    confidence = Confidence(by, 0.0, reference)
    assert len(read(predicted, confidence)) == 3
    (predicted / "two" / missing).unlink()
    dataset = read(predicted, confidence)
    assert [chain.name for chain in dataset.chains] == ["one", "three"]
    assert said in dataset.refused[0]
    for name in ("one", "three"):
        (predicted / name / missing).unlink()
    with pytest.raises(UserError, match=f"no chain of .* can be used; the first: .*{missing}"):
        read(predicted, confidence)
    if by == "divergence":
        with pytest.raises(UserError, match="predict it with --distogram"):
            reference_of(prediction_files(predicted), predicted.parent / "cache", write=True)


def test_what_cannot_be_learned_from_is_refused(predicted: Path, tmp_path: Path) -> None:
    write(predicted, "pair", 20, (12, 8))
    other = predicted / "one" / "rank_1_confidence.json"
    other.write_text(json.dumps({"plddt": [90.0] * 7}))
    refused = read(predicted, Confidence("plddt", 70)).refused
    assert "has 12 residues and the confidence of 7; predict it again" in refused[0]
    assert "is a complex of 2 chains" in refused[1]
    for folder, said in ((tmp_path / "nowhere", "there is no such folder"), (tmp_path, r"holds no NAME/rank_1\.cif")):
        with pytest.raises(UserError, match=said):
            prediction_files(folder)
    for options, said in (
        ({"share": 1.0}, r"distill\.share=1\.0"),
        ({"least": 101.0}, r"distill\.least=101\.0 with distill\.confidence=plddt; give 0 to 100"),
        ({"least": -1.0, "confidence": "divergence"}, "give 0 or more nats"),
        ({"max_rows": 0}, r"distill\.max_rows=0"),
    ):
        with pytest.raises(UserError, match=said):
            DistillConfig(**options)
    given = DistillConfig(predictions=predicted)
    with pytest.raises(UserError, match="learns=confidence with distill"):
        FoldTrainConfig(model=str(tmp_path), learns="confidence", distill=given)
    with pytest.raises(UserError, match="is of complexes; leave out --distill"):
        model_config(FoldTrainConfig(model="debug_multimer", distill=given))
    unread = replace(DistillConfig(), share=0.5).unread()
    assert unread["share"].endswith("give --distill.predictions FOLDER")
