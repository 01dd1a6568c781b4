"""The fold commands as a user runs them, with a tiny model of random weights."""

import csv
import json
import re
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from apps.fold.__main__ import APP
from apps.fold.demo.__main__ import main as demo
from apps.fold.features.entries import read_entries
from apps.fold.features.msa import features_of
from apps.fold.features.structures import read_structure
from apps.fold.predict import _predict
from apps.fold.predict import main as predict
from apps.fold.score import compare, corresponding
from apps.fold.toy import DEMO_WEIGHTS, DIMERS, HELDOUT, NOTE, STRUCTURES
from apps.fold.training.config import _OWN_MODELS
from apps.fold.weights.folder import save_folder
from core.config import run_command
from tests.support import esmfold
from tests.support.command import losses, run, summary
from tests.support.fold import GOLDEN, MULTIMER_GOLDEN, hhr_text, one_block, random_parameters

FASTA = ">long one\nMKTAYIAKQRQISFVKSHFSRQ\n>short\nMKTAYWC\n>bad\nMK7\n>with/slash\nMXBGGGAAAA\n>[/b]\nMK8\n"


@pytest.fixture(autouse=True)
def a_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_OWN_MODELS, "debug", one_block)
    monkeypatch.setitem(_OWN_MODELS, "debug_templates", partial(one_block, templates=True))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "tiny"
    save_folder(folder, one_block(True), random_parameters(one_block(True)))
    return folder


def fold(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a command in this process."""
    code = run_command(APP.dispatch, [str(a) for a in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_doctor_finds_this_installation_well_and_a_damaged_one_sick(tmp_path: Path, capsys) -> None:
    done = run("-m", "apps.fold", "doctor", "--golden", GOLDEN)
    assert "fold msa --ray: " in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal within what rounding explains" in done.stdout
    code, said, _ = fold(capsys, "doctor", "--golden", GOLDEN, "--limit", 1e-5)
    assert code == 0
    assert "equal within 1e-05" in said
    for name in ("params.npz", "batch.npz", "config.json"):
        (tmp_path / name).write_bytes((GOLDEN / name).read_bytes())
    with np.load(GOLDEN / "out.npz") as file:
        out = dict(file)
    out["representations/pair"] = out["representations/pair"] + 1e-3
    np.savez(tmp_path / "out.npz", **out)
    code, said, _ = fold(capsys, "doctor", "--golden", tmp_path)
    assert code == 1
    assert "differs beyond what rounding explains: representations/pair" in said
    code, said, _ = fold(capsys, "doctor", "--golden", tmp_path, "--limit", 1e-5)
    assert code == 1
    assert "differs beyond 1e-05: representations/pair" in said


def test_predict_complexes(tmp_path: Path, weights: Path, capsys) -> None:
    (tmp_path / "in.fasta").write_text(">trimer\nMKTAYWC:GSHML:MKTAYWC\n>alone\nMKTAYWC\n>half\nMKT:\n")
    for chain, query in {"trimer_A": "MKTAYWC", "trimer_B": "GSHML"}.items():
        (tmp_path / "msa" / chain).mkdir(parents=True)
        (tmp_path / "msa" / chain / "uniprot.a3m").write_text(f">q\n{query}\n>tr|A0A123|A0A123_HUMAN\n{query[::-1]}\n")
    multimer = tmp_path / "params_model_1_multimer_v3.npz"
    multimer.write_bytes((MULTIMER_GOLDEN / "params.npz").read_bytes())
    options = ("--out", tmp_path / "out", "--msa", tmp_path / "msa", "--num-recycles", 1)
    code, said, err = fold(capsys, "predict", tmp_path / "in.fasta", "--model", multimer, *options)
    assert code == 2, err
    assert "record 2 (alone): params_model_1_multimer_v3 is a model of complexes" in err
    assert "record 3 (half): chain 2: the sequence is empty" in err
    assert err.count("error:") == 2
    assert "trimer: 1 rows of several chains are paired of 1 species (HUMAN 1)" in said
    out = tmp_path / "out" / "trimer"
    for drawn in ("coverage.png", "pairing.png", "rank_1_structure.png", "rank_1.html"):
        assert (out / drawn).stat().st_size > 5000, drawn
    confidence = json.loads((out / "rank_1_confidence.json").read_text())
    assert confidence["chains"] == ["A", "B", "C"]
    assert confidence["confidence"] == pytest.approx(80 * confidence["iptm"] + 20 * confidence["ptm"], abs=0.02)
    for name in ("chain_pair_iptm", "pdockq2", "ipsae", "chain_pair_clashes"):
        assert np.array(confidence[name]).shape == (3, 3)
    assert confidence["clashes"] == np.triu(confidence["chain_pair_clashes"]).sum()
    assert set(confidence["knotted_chains"]) <= {"A", "B", "C"}
    for suffix in ("cif", "pdb"):
        chains = read_structure(out / f"rank_1.{suffix}")
        assert [(chain.name, chain.sequence) for chain in chains] == [
            ("A", "MKTAYWC"),
            ("B", "GSHML"),
            ("C", "MKTAYWC"),
        ]

    code, _, err = fold(
        capsys, "predict", tmp_path / "in.fasta", "--model", weights, *options[2:], "--out", tmp_path / "o"
    )
    assert code == 2
    assert "record 1 (trimer): a complex of 3 chains needs weights of AlphaFold-Multimer" in err
    assert (tmp_path / "o" / "alone" / "rank_1.cif").exists()

    (tmp_path / "pair.fasta").write_text(">trimer_A\nMKTAYWC\n>trimer_B\nGSHML\n")
    code, said, err = fold(capsys, "predict", tmp_path / "pair.fasta", "--model", multimer, *options)
    assert code == 0, err
    assert [chain.sequence for chain in read_structure(tmp_path / "out" / "pair" / "rank_1.cif")] == [
        "MKTAYWC",
        "GSHML",
    ]
    assert "pair: 1 rows of several chains are paired" in said


def test_predict_and_relax(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "openmm", None)
    (tmp_path / "in.fasta").write_text(">one\nTTCCPSIVARSNFNVCRLPG\n>unknown\nMKXA\n")
    options = (tmp_path / "in.fasta", "--out", tmp_path / "out", "--num-seeds", 2, "--no-plots")
    code, said, err = fold(capsys, "predict", *options, "--relax", "best")
    assert code == 2
    assert "record 2 (unknown): residue 3 (X) is predicted without atoms, and so cannot be relaxed" in err
    assert "relaxed: violations by L-BFGS (no force field)" in said
    out = tmp_path / "out" / "one"
    assert [path.name for path in sorted(out.glob("*relax*"))] == [
        "rank_1_relaxation.json",
        "rank_1_relaxed.cif",
        "rank_1_relaxed.pdb",
    ]
    before, after = (read_structure(out / name)[0] for name in ("rank_1.cif", "rank_1_relaxed.cif"))
    assert (before.name, before.sequence, before.numbers) == (after.name, after.sequence, after.numbers)
    np.testing.assert_array_equal(before.b_factors, after.b_factors)
    assert compare(after, before).rmsd > 0.001
    assert NOTE in (out / "rank_1_relaxed.cif").read_text()

    code, said, _ = fold(capsys, "predict", *options, "--proteins")
    assert "one: done before" in said
    code, _, err = fold(capsys, "predict", *options, "--relax", "all")
    assert "is of a run without relax all; give --overwrite" in err
    code, said, _ = fold(capsys, "predict", *options, "--relax", "all", "--overwrite")
    assert len(list(out.glob("*_relaxed.cif"))) == 2


def test_predict(tmp_path: Path, weights: Path, capsys) -> None:
    (tmp_path / "in.fasta").write_text(FASTA)
    (tmp_path / "msa").mkdir()
    (tmp_path / "msa" / "short.a3m").write_text(">short\nMKTAYWC\n>a\nMK-AYWC\n>b\nMRTaaAYFC\n")
    options = ("--model", weights, "--out", tmp_path / "out", "--msa", tmp_path / "msa", "--num-seeds", 2)
    code, said, err = fold(capsys, "predict", tmp_path / "in.fasta", *options)
    assert code == 2, err
    assert re.search(r"record 3 \(bad\): letter '7' at position 3", err)
    assert err.count("error:") == 2
    assert "long: no alignment" in said
    assert "short: no alignment" not in said

    out = tmp_path / "out"
    assert sorted(p.name for p in out.iterdir()) == ["long", "short", "summary.csv", "with_slash"]
    with open(out / "summary.csv") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["long", "short", "bad", "with/slash", "[/b]"]
    assert rows["short"]["msa_rows"] == "3"
    assert rows["bad"]["status"].startswith("refused")
    ranking = json.loads((out / "short" / "ranking.json").read_text())["predictions"]
    assert [row["rank"] for row in ranking] == [1, 2]
    assert ranking[0]["mean_plddt"] >= ranking[1]["mean_plddt"]
    assert {row["seed"] for row in ranking} == {0, 1}
    suffixes = (
        ".cif",
        ".pdb",
        ".html",
        "_confidence.json",
        "_pae.npz",
        "_pae.json",
        "_plddt.png",
        "_pae.png",
        "_structure.png",
    )
    assert {p.name for p in (out / "short").iterdir()} == {
        "ranking.json",
        "coverage.png",
        *(f"rank_{rank}{suffix}" for rank in (1, 2) for suffix in suffixes),
    }
    before = {p: p.stat().st_mtime_ns for p in out.rglob("rank_*")}
    short = (out / "short" / "rank_1.cif").read_bytes()

    files = ("--predicted", out / "long" / "rank_1.cif", "--reference", out / "long" / "rank_1.pdb")
    code, said, _ = fold(capsys, "evaluate", *files, "--out", tmp_path / "scores.json")
    assert code == 0
    assert "22 of 22" in said
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["tm_score"] == pytest.approx(1, abs=1e-4)
    assert scores["rmsd"] < 1e-3
    code, _, err = fold(capsys, "evaluate", *files, "--chain", "Q")
    assert code == 2
    assert "no protein chain Q; it has A" in err

    # A second run has nothing to do; without one folder it makes that one, the same to the byte.
    for path in (out / "short").iterdir():
        path.unlink()
    (out / "short").rmdir()
    code, said, _ = fold(capsys, "predict", tmp_path / "in.fasta", *options)
    assert code == 2
    assert "long: done before" in said
    assert (out / "short" / "rank_1.cif").read_bytes() == short
    assert all(p.stat().st_mtime_ns == before[p] for p in before if p.parent.name != "short")

    # Other options do not silently reuse or destroy what is there.
    code, _, err = fold(capsys, "predict", tmp_path / "in.fasta", *options, "--seed", 5)
    assert code == 2
    assert err.count("--overwrite") == 3
    (tmp_path / "one.fasta").write_text(">short\nMKTAYWC\n")
    code, _, err = fold(capsys, "predict", tmp_path / "one.fasta", *options, "--seed", 5, "--overwrite")
    assert code == 0, err


def test_each_prediction_is_written_when_it_is_there_and_a_stopped_run_goes_on(
    tmp_path: Path, weights: Path, capsys
) -> None:
    """The third prediction is stopped: two are on the disk, and the next run makes the last ones only."""
    (tmp_path / "in.fasta").write_text(">a\nMKTAYWC\n")
    options = ("--model", weights, "--no-plots", "--num-seeds", 4, "--out")
    code, _, err = fold(capsys, "predict", tmp_path / "in.fasta", *options, tmp_path / "whole")
    assert code == 0, err
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole" / "a").iterdir()}
    assert not [name for name in whole if "distogram" in name], "written on request"

    aside = tmp_path / "out" / ".a.part"
    there: list[list[str]] = []

    def stopped(target, model, seed, config):
        there.append(sorted(path.name for path in aside.glob("prediction_*.cif")))
        if seed == 2 and len(there) == 3:
            raise KeyboardInterrupt
        return _predict(target, model, seed, config)

    with patch("apps.fold.predict._predict", stopped):
        with pytest.raises(KeyboardInterrupt):
            predict(["--input", str(tmp_path / "in.fasta"), *map(str, (*options, tmp_path / "out"))])
        assert there == [[], ["prediction_0.cif"], ["prediction_0.cif", "prediction_1.cif"]]
        code, said, err = fold(capsys, "predict", tmp_path / "in.fasta", *options, tmp_path / "out")
    assert code == 0, err
    assert len(there) == 5, "two were made before"
    assert said.count("predicted before") == 2
    assert not aside.exists()
    made = {path.name: path.read_bytes() for path in (tmp_path / "out" / "a").iterdir()}
    assert made.keys() == whole.keys()
    assert all(made[name] == whole[name] for name in whole if name != "ranking.json" and not name.endswith(".npz"))

    # What is there is not made anew where less is asked for, nor where an earlier version did not say what is there.
    code, said, err = fold(capsys, "predict", tmp_path / "in.fasta", "--no-pdb", *options, tmp_path / "out")
    assert (code, "done before" in said) == (0, True), err
    ranking = tmp_path / "out" / "a" / "ranking.json"
    ranked = json.loads(ranking.read_text())
    assert ranked["key"].pop("files") == ["pdb"]
    ranking.write_text(json.dumps(ranked))
    code, said, err = fold(capsys, "predict", tmp_path / "in.fasta", *options, tmp_path / "out")
    assert (code, "done before" in said) == (0, True), err
    code, _, err = fold(capsys, "predict", tmp_path / "in.fasta", "--distogram", *options, tmp_path / "out")
    assert code == 2
    assert "is of a run without distogram; give --overwrite" in err
    code, _, err = fold(
        capsys, "predict", tmp_path / "in.fasta", "--distogram", "--overwrite", *options, tmp_path / "out"
    )
    assert code == 0, err
    assert np.load(tmp_path / "out" / "a" / "rank_4_distogram.npz")["probabilities"].shape == (7, 7, 64)


def test_records_named_like_files_of_ours_or_of_the_user(tmp_path: Path, weights: Path, capsys) -> None:
    (tmp_path / "in.fasta").write_text(">summary.csv\nMKTAYWC\n>notes.txt\nMKTAYWC\n>b\nMKTAYWCA\n>-rf\nMKT\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    options = ("--model", weights, "--no-plots", "--overwrite", "--out", tmp_path / "out")
    code, _, err = fold(capsys, "predict", tmp_path / "in.fasta", *options)
    assert code == 2
    assert err.count("error:") == 1
    assert "notes.txt, where its folder goes, is a file" in err
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    for name in ("summary.csv_", "b", "rf"):
        assert (tmp_path / "out" / name / "rank_1.cif").is_file()
    with open(tmp_path / "out" / "summary.csv") as file:
        assert [row["status"][:6] for row in csv.DictReader(file)] == ["folded", "failed", "folded", "folded"]
    (tmp_path / "other" / "summary.csv").mkdir(parents=True)
    code, _, err = fold(capsys, "predict", tmp_path / "in.fasta", "--model", weights, "--out", tmp_path / "other")
    assert code == 2
    assert "summary.csv is a folder" in err


def test_what_other_weights_folded_is_not_taken_for_done(tmp_path: Path, capsys) -> None:
    """Weights of the same name, as a second training leaves them; moved, they are the same."""
    (tmp_path / "in.fasta").write_text(">a\nMKTAYWC\n")
    options = ("--no-plots", "--out", tmp_path / "out")
    save_folder(tmp_path / "model", one_block(True), random_parameters(one_block(True)))
    code, _, err = fold(capsys, "predict", tmp_path / "in.fasta", "--model", tmp_path / "model", *options)
    assert code == 0, err
    (tmp_path / "moved").mkdir()
    (tmp_path / "model").rename(tmp_path / "moved" / "model")
    code, said, _ = fold(capsys, "predict", tmp_path / "in.fasta", "--model", tmp_path / "moved" / "model", *options)
    assert code == 0
    assert "a: done before" in said
    parameters = random_parameters(one_block(True))
    parameters["heads.plddt.norm.weight"] += 1
    save_folder(tmp_path / "model", one_block(True), parameters)
    code, said, err = fold(capsys, "predict", tmp_path / "in.fasta", "--model", tmp_path / "model", *options)
    assert code == 2
    assert "done before" not in said
    assert "stems from other options or files; give --overwrite" in err


def test_without_weights_the_toy_folds_and_marks_all_that_it_writes(tmp_path: Path, capsys) -> None:
    """What the package carries is what it says: three chains by heart, and no confidence in one never seen."""
    files = [*sorted(STRUCTURES.iterdir()), *HELDOUT.iterdir()]
    records = {path.stem: read_entries(path)[0].sequence for path in files}
    (tmp_path / "in.fasta").write_text("".join(f">{name}\n{sequence}\n" for name, sequence in records.items()))
    with patch("apps.fold.predict.keep_freed_memory") as kept:
        code, said, err = fold(capsys, "predict", tmp_path / "in.fasta", "--distogram", "--out", tmp_path / "out")
    assert code == 0, err
    kept.assert_called_once_with()
    for words in ("params_model_N_ptm.npz", "alphafold_params_2022-12-06.tar", "--model", NOTE):
        assert words in err
    assert said.count(f"demo-tiny ({NOTE})") >= 4
    assert (tmp_path / "out" / "summary.csv").read_text().count(NOTE) == 4
    folder = tmp_path / "out" / "1ubi"
    written = {path.name: path for path in folder.iterdir()}
    for name in ("rank_1.cif", "rank_1.pdb", "rank_1.html", "rank_1_confidence.json", "ranking.json"):
        assert NOTE in written.pop(name).read_text(), name
    with np.load(written.pop("rank_1_distogram.npz")) as file:
        assert str(file["note"]) == NOTE
    assert set(written) == {"rank_1_plddt.png", "rank_1_structure.png"}  # whose titles have it

    confidences, scores = [], []
    for path in files:
        (predicted,), experiment = read_structure(tmp_path / "out" / path.stem / "rank_1.cif"), read_structure(path)[0]
        scores.append(compare(predicted, experiment).lddt_per_residue)
        confidences.append(predicted.b_factors[corresponding(predicted, experiment)[0]])
        if path.parent == STRUCTURES:
            assert np.mean(scores[-1]) >= 0.8, path
        else:
            assert confidences[-1].mean() <= 40, "sure of a chain that it has never seen"
    assert min(one.mean() for one in confidences[:-1]) >= 80
    assert np.corrcoef(np.concatenate(confidences), np.concatenate(scores))[0, 1] >= 0.6
    assert sum(path.stat().st_size for path in DEMO_WEIGHTS.iterdir()) < 3_000_000


def test_esmfold_from_its_folder(tmp_path: Path, capsys) -> None:
    folder = esmfold.save(tmp_path / "esmfold")
    (tmp_path / "in.fasta").write_text(FASTA)
    (tmp_path / "short.a3m").write_text(">short\nMKTAYWC\n>a\nMK-AYWC\n")
    options = ("--model", folder, "--out", tmp_path / "out", "--msa", tmp_path)
    code, said, err = fold(capsys, "predict", tmp_path / "in.fasta", *options)
    assert code == 2, err
    assert err.count("error:") == 2
    assert "no alignment" not in said
    assert "short: ESMFold reads the sequence alone" in said
    ranking = json.loads((tmp_path / "out" / "long" / "ranking.json").read_text())["predictions"]
    assert [row["model"] for row in ranking] == ["esmfold"]
    assert ranking[0]["ptm"] > 0
    (predicted,) = read_structure(tmp_path / "out" / "long" / "rank_1.cif")
    assert len(predicted.sequence) == 22
    code, said, _ = fold(capsys, "plan", "--model", folder, "--length", 300)
    assert code == 0
    assert "blocks.*.sequence_to_pair" in said
    for command in (
        ("convert", "--model", folder, "--out", tmp_path / "ours"),
        ("train", "--recipe", "debug", "--model", folder, "--out", tmp_path / "run"),
    ):
        code, _, err = fold(capsys, *command)
        assert code == 2
        assert "holds ESMFold" in err
    code, _, err = fold(capsys, "predict", tmp_path / "in.fasta", "--model", folder, "--nproc", 2)
    assert code == 2
    assert "which one rank predicts" in err


def test_an_alignment_or_template_that_does_not_fit_stops_only_its_record(
    tmp_path: Path, weights: Path, capsys
) -> None:
    (tmp_path / "in.fasta").write_text(">a\nMKTAYWC\n>b\nMKTAYWW\n>c\nMKTAYWY\n")
    (tmp_path / "msa").mkdir()
    (tmp_path / "msa" / "a.a3m").write_text(">a\nMKTAYWV\n")
    (tmp_path / "msa" / "c.a3m").write_text(">c\nMKTAYWY\n>same\nMKTAYWY\n")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "b.cif").write_text("nonsense")
    options = ("--model", weights, "--out", tmp_path / "out", "--no-plots", "--no-pdb")
    options += ("--msa", tmp_path / "msa", "--templates", tmp_path / "templates")
    code, said, err = fold(capsys, "predict", tmp_path / "in.fasta", *options)
    assert code == 2
    assert "record 1 (a)" in err
    assert "another query" in err
    assert "record 2 (b)" in err
    assert "c: no row of its alignment differs from the query; a sequence alone folds poorly" in said
    assert (tmp_path / "out" / "c" / "rank_1.cif").is_file()
    assert not (tmp_path / "out" / "c" / "rank_1.pdb").exists()


def test_a_sequence_that_does_not_fit_is_refused_and_the_others_are_folded(
    tmp_path: Path, weights: Path, capsys
) -> None:
    """Before its features are made, which alone may be more than there is."""
    (tmp_path / "in.fasta").write_text(">huge\n" + "MKTAYWCAAG" * 6000 + "\n>small\nMKTAYWC\n")
    options = ("--model", weights, "--out", tmp_path / "out", "--no-plots", "--memory", 0.5)
    with patch("apps.fold.targets.features_of", side_effect=features_of) as made:
        code, _, err = fold(capsys, "predict", tmp_path / "in.fasta", *options)
    assert code == 2
    assert {len(call.args[0]) for call in made.call_args_list} == {7}
    assert re.search(
        r"record 1 \(huge\): 60000 residues with .* need at least [0-9.]+ GiB, and there are 0.50",
        err,
    )
    assert (tmp_path / "out" / "small" / "rank_1.cif").is_file()


def test_predict_within_a_budget(tmp_path: Path, weights: Path, capsys) -> None:
    """As much memory as it needs at least, and the same structure."""
    (tmp_path / "in.fasta").write_text(">a\n" + "MKTAYWCAAG" * 4 + "\n")
    options = ("--model", weights, "--no-plots", "--out")
    code, _, err = fold(capsys, "predict", tmp_path / "in.fasta", *options, tmp_path / "free")
    assert code == 0, err
    code, _, err = fold(capsys, "predict", tmp_path / "in.fasta", *options, tmp_path / "tight", "--memory", 0.0001)
    assert code == 2
    least = re.search(r"give --memory ([0-9.]+)", err)
    assert least is not None
    code, _, err = fold(
        capsys, "predict", tmp_path / "in.fasta", *options, tmp_path / "tight", "--memory", f"{least[1]}GiB"
    )
    assert code == 0, err
    plddt = [json.loads((tmp_path / n / "a" / "ranking.json").read_text())["predictions"][0] for n in ("free", "tight")]
    assert plddt[0]["mean_plddt"] == pytest.approx(plddt[1]["mean_plddt"], abs=1e-3)
    assert plddt[0]["ptm"] == pytest.approx(plddt[1]["ptm"], abs=1e-4)


def test_half_precision_predicts_alike(tmp_path: Path, weights: Path, capsys) -> None:
    (tmp_path / "in.fasta").write_text(">a\nMKTAYIAKQRQISFVKSHFSRQ\n")
    said = {}
    for precision in ("fp32", "bf16", "fp16"):
        options = ("--model", weights, "--no-plots", "--precision", precision, "--out", tmp_path / precision)
        code, _, err = fold(capsys, "predict", tmp_path / "in.fasta", *options)
        assert code == 0, err
        said[precision] = json.loads((tmp_path / precision / "a" / "ranking.json").read_text())["predictions"][0]
    for precision, most in (("bf16", 3.0), ("fp16", 0.5)):  # of pLDDT's 100, for 8 and 11 bits
        assert said[precision]["mean_plddt"] == pytest.approx(said["fp32"]["mean_plddt"], abs=most)


def test_a_prediction_that_is_not_finite_is_a_failure_and_leaves_nothing(tmp_path: Path, capsys) -> None:
    parameters = random_parameters(one_block(True))
    parameters["structure_module.single_norm.weight"][3] = float("nan")
    save_folder(tmp_path / "sick", one_block(True), parameters)
    (tmp_path / "in.fasta").write_text(">a\nMKTAYWC\n")
    options = ("--model", tmp_path / "sick", "--no-plots", "--out", tmp_path / "out")
    code, said, err = fold(capsys, "predict", tmp_path / "in.fasta", *options)
    assert code == 2
    assert "record 1 (a): sick, seed 0: what it predicts in fp32 is not finite; give" in err
    assert err.count("\n") == 1
    assert "folded" not in said
    assert not (tmp_path / "out" / "a").exists()


def test_plan(weights: Path, capsys) -> None:
    model = ("--model", "model_5_ptm", "--device", "cuda", "--precision", "bf16")
    code, said, _ = fold(capsys, "plan", "--length", 1000, *model, "--memory", "40GiB")
    assert code == 0
    found = re.search(r"longest sequence: ([0-9,]+) residues", said)
    assert found
    assert 10_000 < int(found[1].replace(",", "")) < 12_000  # whose pairs alone are 24 to 34 GiB of the 40
    assert "predicted peak" in said
    assert "blocks.*.pair.outgoing" in said
    options = ("--length", 1000, *model, "--nproc", 4, "--memory")
    code, said, _ = fold(capsys, "plan", *options, 3)
    assert code == 0
    peak = re.search(r"predicted peak of a rank: ([0-9.]+) GiB, ([0-9.]+) of these", said)
    assert peak
    assert float(peak[1]) <= 3
    model = ("--model", weights, *model[2:])
    code, _, err = fold(capsys, "plan", "--length", 1000, *model, "--nproc", 4, "--memory", 0.01)
    assert code == 2
    assert "on each of 4 ranks" in err
    code, _, err = fold(capsys, "plan", "--length", 30_000, *model, "--memory", 4)
    assert code == 2
    assert "30000 residues" in err
    assert "--memory" in err


def test_convert(tmp_path: Path, capsys) -> None:
    code, said, _ = fold(capsys, "convert", "--model", GOLDEN / "params.npz", "--out", tmp_path / "ours")
    assert code == 0
    assert "numbers" in said
    code, _, _ = fold(capsys, "convert", "--model", tmp_path / "ours", "--out", tmp_path / "back.npz")
    assert code == 0
    with np.load(GOLDEN / "params.npz") as before, np.load(tmp_path / "back.npz") as after:
        assert all(before[name].tobytes() == after[name].tobytes() for name in before.files)


def test_recipes(capsys) -> None:
    code, said, _ = fold(capsys, "recipes")
    assert code == 0
    assert "93,237,338" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("predikt",), ("predikt", "predict")),
        (("predict",), ("FASTA",)),
        (("predict", "none.fasta"), ("none.fasta",)),
        (("predict", "in.fasta", "--model", "w", "--num-seeds", 0), ("num_seeds=0",)),
        (("predict", "in.fasta", "--wieghts", "w"), ("--wieghts", "--model")),
        (("predict", "none.fasta", "--model", "w"), ("none.fasta",)),
        (("doctor",), ("--golden",)),
        (("doctor", "--golden", "/nowhere"), ("/nowhere",)),
        (("doctor", "--golden", GOLDEN, "--limit", "nan"), ("limit=nan", "1e-5")),
        (("convert", "--model", "/nowhere.npz", "--out", "x"), ("/nowhere.npz",)),
        (("convert",), ("--model",)),
        (("recipes", "--all"), ("--all",)),
        (("evaluate",), ("--predicted", "--reference")),
        (("evaluate", "--predicted", "/nowhere.cif", "--reference", "/nowhere.pdb"), ("/nowhere.cif",)),
        (("predict", "in.fasta", "--model", "w", "--memory", 0), ("memory=0: that is no size", "10GiB")),
        (("predict", "in.fasta", "--model", "w", "--memory", "much"), ("memory=much: that is no size", "10GiB")),
        (("plan", "--memory", "-1"), ("memory=-1: that is no size", "10GiB")),
        (("predict", "in.fasta", "--model", "w", "--max-template-date", "May"), ("'May' is no date", "2018-04-30")),
        (("plan", "--length", 0), ("length=0",)),
        (("plan", "--nproc", 2), ("--length 10000",)),
        (("plan", "--model", "model_9"), ("model_9", "model_1")),
        (("plan", "--model", "model_5", "--templates", 2), ("templates",)),
    ],
)
def test_refusals(capsys, arguments: tuple, words: tuple) -> None:
    code, _, err = fold(capsys, *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert err.strip().count("\n") == 0
    for word in words:
        assert word in err


def test_train_stop_resume_and_fold_with_what_was_learned(tmp_path: Path, capsys) -> None:
    """A run that was stopped and continued is the run that was not, to the bit, its averaged weights too."""
    structures = tmp_path / "structures"
    structures.mkdir()
    for path in (STRUCTURES / "1ejg.pdb", STRUCTURES / "1a8o.cif"):
        (structures / path.name).write_bytes(path.read_bytes())
    (structures / "damaged.cif").write_text("data_nothing\n")
    options = ("--recipe", "debug", "--data.structures", structures, "--data.cache", tmp_path / "cache")
    options += ("--log.no-tensorboard", "--steps", 3, "--num-recycles", 1)
    code, said, err = fold(capsys, "train", *options, "--out", tmp_path / "whole")
    assert code == 0, err
    assert err.count("left out:") == 1
    assert "damaged.cif" in err
    assert "2 chains to learn from, 2 of them without an alignment" in said
    whole = tmp_path / "whole"
    assert {"config.json", "loss.png", "metrics.jsonl", "model", "summary.json"} <= {p.name for p in whole.iterdir()}
    assert 0 <= summary(whole)["validation_lddt_ca"] <= 1

    parts = tmp_path / "parts"
    code, said, err = fold(capsys, "train", *options, "--out", parts, "--stop-after", 2)
    assert code == 0, err
    assert "stopped after step 2" in said
    assert not (parts / "model").exists()
    code, _, err = fold(capsys, "train", *options, "--out", parts)
    assert code == 2
    assert "--resume" in err
    code, said, err = fold(capsys, "train", *options, "--out", parts, "--resume")
    assert code == 0, err
    assert losses(parts) == losses(whole)
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (parts, whole)]
    assert weights[0] == weights[1]
    assert summary(parts)["validation_lddt_ca"] == summary(whole)["validation_lddt_ca"]

    (tmp_path / "in.fasta").write_text(">a\nMKTAYWC\n")
    options = ("--model", whole / "model", "--out", tmp_path / "folded", "--no-plots")
    code, said, err = fold(capsys, "predict", tmp_path / "in.fasta", *options)
    assert code == 0, err
    assert "not for science" not in (tmp_path / "folded" / "a" / "rank_1.cif").read_text()
    options = ("--recipe", "debug", "--model", whole / "model", "--steps", 1, "--out", tmp_path / "tuned")
    code, _, err = fold(capsys, "train", *options, "--data.cache", tmp_path / "cache")
    assert code == 0, err


def test_a_complex_is_trained_resumed_folded_and_scored(tmp_path: Path, capsys) -> None:
    """To the bit, as with chains; what was learned folds complexes, which `fold evaluate` reads."""
    options = ("--recipe", "debug_complexes", "--data.cache", tmp_path / "cache", "--log.no-tensorboard", "--steps", 3)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, said, err = fold(capsys, "train", *options, "--out", whole)
    assert code == 0, err
    assert "2 complexes to learn from" in said
    for more in (("--stop-after", 2), ("--resume",)):
        code, _, err = fold(capsys, "train", *options, "--out", parts, *more)
        assert code == 0, err
    assert losses(parts) == losses(whole)
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (parts, whole)]
    assert weights[0] == weights[1]
    assert summary(parts)["validation_lddt_ca"] == summary(whole)["validation_lddt_ca"]

    dimer = DIMERS / "1ubi_dimer.pdb"
    (tmp_path / "in.fasta").write_text(">d\n" + ":".join(chain.sequence for chain in read_structure(dimer)) + "\n")
    folded = ("--model", whole / "model", "--out", tmp_path / "folded", "--no-plots")
    code, _, err = fold(capsys, "predict", tmp_path / "in.fasta", *folded)
    assert code == 0, err
    predicted = tmp_path / "folded" / "d" / "rank_1.cif"
    code, said, err = fold(capsys, "evaluate", "--predicted", predicted, "--reference", dimer)
    assert code == 0, err
    assert "DockQ" in said
    for refused, word in ((("--data.decoys", 0.5), "data.decoys"), (("--mesh.tp", 2, "--nproc", 2), "mesh.tp=2")):
        code, _, err = fold(capsys, "train", *options, "--out", tmp_path / "not", *refused)
        assert code == 2
        assert word in err
    code, _, err = fold(capsys, "train", "--recipe", "debug", "--loss.centres", 2, "--out", tmp_path / "not")
    assert code == 2
    assert "--loss.centres" in err
    assert "is of single chains" in err


def test_train_with_templates_and_fold_with_them(tmp_path: Path, capsys) -> None:
    """1A8O for 1A7G, as hhsearch names it; 1EJG has none."""
    folders = {name: tmp_path / name for name in ("structures", "alignments", "mmcifs")}
    for folder in folders.values():
        folder.mkdir()
    for path in (HELDOUT / "1a7g.cif", STRUCTURES / "1ejg.pdb"):
        (folders["structures"] / path.name).write_bytes(path.read_bytes())
    (folders["mmcifs"] / "1a8o.cif").write_bytes((STRUCTURES / "1a8o.cif").read_bytes())
    query, template = (read_entries(path)[0].sequence for path in (HELDOUT / "1a7g.cif", STRUCTURES / "1a8o.cif"))
    hit = ("1a8o_A", query[5:55], template[:50], 6, 1, 30.0)
    (folders["alignments"] / "1a7g_E.hhr").write_text(hhr_text(query, [hit]))
    options = ("--recipe", "debug", "--model", "debug_templates", "--steps", 2, "--log.no-tensorboard")
    options += ("--data.structures", folders["structures"], "--data.validation", None)
    given = ("--data.alignments", folders["alignments"], "--data.templates", folders["mmcifs"])
    code, said, err = fold(capsys, "train", *options, *given, "--out", tmp_path / "run")
    assert code == 0, err
    assert "2 chains to learn from" in said
    assert "1 of them have templates" in said

    (tmp_path / "in.fasta").write_text(f">1a7g_E\n{query}\n>other\nMKTAYWC\n")
    options = ("--model", tmp_path / "run" / "model", "--no-plots", "--msa", folders["alignments"])
    plddt = []
    for name, more in (("with", ("--templates", folders["mmcifs"])), ("without", ())):
        code, said, err = fold(capsys, "predict", tmp_path / "in.fasta", *options, *more, "--out", tmp_path / name)
        assert code == 0, err
        assert ("1a7g_E: 1 templates of 1 hits: 1a8o_A" in said) == (name == "with")
        assert ("give --templates" in said) == (name == "without")
        assert ("other: no template" in said) == (name == "with")
        plddt.append(read_structure(tmp_path / name / "1a7g_E" / "rank_1.cif")[0].positions)
    assert np.abs(plddt[0] - plddt[1]).max() > 1e-3, "the template was not read"


@pytest.mark.soak
@pytest.mark.parametrize("recipe", ["debug", "debug_complexes"])
def test_ranks_that_share_a_chain_are_launched(tmp_path: Path, capsys, recipe: str) -> None:
    """`fold train --axial 2 --nproc 2` has the losses of two ranks with a chain each."""
    options = ("train", "--recipe", recipe, "--precision", "fp64", "--log.no-tensorboard", "--steps", 3, "--nproc", 2)
    for axial in (1, 2):
        given = ("--axial", axial, "--data.cache", tmp_path / "cache", "--out", tmp_path / str(axial))
        code, _, err = fold(capsys, *options, *given)
        assert code == 0, err
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-10)


def test_train_on_what_predict_wrote(tmp_path: Path, capsys) -> None:
    """By pLDDT, and by the distances that --distogram leaves; a folder that lacks these is refused in a line."""
    (tmp_path / "in.fasta").write_text(">mine\nTTCCPSIVARSNFNVCRLPG\n")
    given = ("--no-plots", "--distogram", "--num-recycles", 0, "--out", tmp_path / "folded")
    code, _, err = fold(capsys, "predict", tmp_path / "in.fasta", *given)
    assert code == 0, err
    options = ("train", "--recipe", "debug", "--steps", 2, "--log.no-tensorboard", "--data.validation", None)
    options += ("--distill.predictions", tmp_path / "folded", "--distill.least", 0)
    for confidence in ("plddt", "divergence"):
        by = ("--distill.confidence", confidence, "--out", tmp_path / confidence)
        code, said, err = fold(capsys, *options, *by)
        assert code == 0, err
        assert "1 predictions to learn from, in 0.75 of the rows" in said
    (tmp_path / "folded" / "mine" / "rank_1_distogram.npz").unlink()
    code, _, err = fold(capsys, *options, "--distill.confidence", "divergence", "--out", tmp_path / "not")
    assert code == 2
    assert err.count("\n") == 1
    assert "predict it with --distogram, or give --distill.confidence plddt" in err
    assert not (tmp_path / "not").exists()


def test_the_demo_shows_what_it_learned_and_says_when_that_is_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--steps", "1", "--optim.schedule.warmup-steps", "0", "--model", "debug", "--log.no-tensorboard"]
    code = run_command(demo, options)
    said = capsys.readouterr()
    assert code == 1
    assert "fell short: lDDT" in said.err
    assert "fell short: DockQ" in said.err
    first, out = (tmp_path / "runs" / "demo-fold" / name for name in ("tiny", "tiny_confidence"))
    before, after = (load_file(run / "model" / "model.safetensors") for run in (first, out))
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed, "the second run taught nothing"
    assert all(name.startswith(("heads.plddt.", "heads.pae.")) for name in changed)
    shown = json.loads((out / "demo.json").read_text())
    assert {one["name"]: one["memorised"] for one in shown["chains"]} == {
        "1a8o": True, "1ejg": True, "1ubi": True, "1a7g": False
    }  # fmt: skip
    for one in shown["chains"]:
        assert 0 <= one["lddt_ca"] < 0.5
        assert one["name"] in said.out
    files = [out / "folded" / name / "1ubi" / "rank_1.cif" for name in ("trained", "untrained")]
    trained, untrained = (read_structure(path)[0].positions for path in files)
    assert np.abs(trained - untrained).max() > 0.01
    assert "knows them by heart" in said.out
    assert (out / "demo.png").stat().st_size > 20_000
    assert NOTE in (out / "folded" / "trained" / "1a7g" / "rank_1.cif").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--data.structures FOLDER"),
        (("--data.structures", "nowhere"), "no folder of structures at nowhere"),
        (("--recipe", "debug", "--data.alignments", "nowhere"), "no folder of alignments at nowhere"),
        (("--recipe", "debug", "--nproc", "3"), "data.global_batch=2 does not divide over 3"),
        (("--recipe", "debug", "--mesh.tp", "2", "--nproc", "2"), "no tensor parallelism"),
        (("--recipe", "debug", "--axial", "2", "--nproc", "3"), "axial=2 does not divide the 3 ranks that run"),
        (("--recipe", "debug", "--axial", "25", "--nproc", "25"), "there are more ranks than rows of pairs"),
        (("--recipe", "debug", "--axial", "20", "--nproc", "20"), "axial=20 with max_msa=16: there are more ranks"),
        (("--recipe", "debug", "--axial", "2", "--nproc", "2", "--compile"), "axial=2 with compile"),
        (("--recipe", "debug", "--recompute.mode", "budget"), "recompute.mode=budget without one"),
        (("--recipe", "debug_complexes", "--axial", "9", "--max-msa", "8", "--nproc", "9"), "axial=9 with max_msa=8"),
        (("--recipe", "debug", "--model", "model_1"), "has templates"),
        (("--recipe", "debug", "--data.templates", "."), "takes no templates"),
        (("--recipe", "debug", "--model", "debug_templates", "--data.templates", "nowhere"), "no folder of templates"),
        (("--recipe", "debug", "--model", "modle"), "modle"),
        (("--recipe", "debug", "--average", "1.5"), "average=1.5"),
        (("--recipe", "debug", "--learns", "confidence"), "give --model"),
        (("--recipe", "debug", "--distill.predictions", "nowhere"), "distill.predictions=nowhere: there is no such"),
        (("--recipe", "debug", "--distill.share", "0.5"), "give --distill.predictions FOLDER"),
    ],
)
def test_train_refuses_in_one_line(tmp_path: Path, capsys, options: tuple[str, ...], said: str) -> None:
    code, _, err = fold(capsys, "train", *options, "--out", tmp_path / "run")
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_train_leaves_no_run_where_no_chain_can_be_used(tmp_path: Path, capsys) -> None:
    (tmp_path / "structures").mkdir()
    (tmp_path / "structures" / "damaged.cif").write_text("data_nothing\n")
    options = ("--recipe", "debug", "--data.structures", tmp_path / "structures", "--data.cache", tmp_path / "cache")
    code, _, err = fold(capsys, "train", *options, "--out", tmp_path / "run")
    assert code == 2
    assert "no chain of" in err
    assert not (tmp_path / "run").exists()
