"""The real commands on models with experts: train on any mesh, go on on another, load in transformers, plan, refuse."""

import json
from pathlib import Path

import pytest
import torch

from tests.e2e.test_pretrain import TEXT
from tests.e2e.test_refusals import refusal
from tests.support.command import llm, losses, metrics, summary

STEPS = ("--steps", 3, "--precision", "fp64", "--recipe", "debug_moe", "--model.num-layers", 2, *TEXT)


def test_experts_learn_on_any_mesh_what_one_rank_learns(tmp_path: Path) -> None:
    """Two ranks with half of the experts each, then four: experts, hidden features and the rest cut.

    By Muon, which has whole matrices at home on a rank, and AdamW for what is no matrix.
    """
    options = ("pretrain", *STEPS, "--data.global-batch", 12, "--optim.name", "muon")
    options += ("--data.cache", tmp_path / "corpora")
    llm(*options, "--out", tmp_path / "one")
    moving = (*options, "--out", tmp_path / "moving", "--zero", 3, "--mesh.ep", 2)
    llm(*moving, "--nproc", 2, "--stop-after", 2)
    llm(*moving, "--nproc", 4, "--mesh.tp", 2, "--resume")
    assert losses(tmp_path / "moving") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    assert losses(tmp_path / "one")[-1] < losses(tmp_path / "one")[0]
    figures = (summary(tmp_path / name)["heldout_bits_per_byte"] for name in ("one", "moving"))
    assert next(figures) == pytest.approx(next(figures), rel=1e-9)
    for here, there in zip(metrics(tmp_path / "one"), metrics(tmp_path / "moving"), strict=True):
        assert here["moe_load"] == there["moe_load"]
        assert [sum(layer) for layer in here["moe_load"]] == [2 * 12 * 32] * 2
        for name in ("moe_dropped", "moe_balance", "moe_z", "moe_imbalance"):
            assert here[name] == pytest.approx(there[name], rel=1e-9)

    from transformers import AutoModelForCausalLM

    from core.models import load_pretrained

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "moving" / "hf", dtype=torch.float32)
    assert type(theirs).__name__ == "MixtralForCausalLM"
    ids = torch.arange(30)[None]
    with torch.no_grad():
        ours = load_pretrained(tmp_path / "moving" / "hf", dtype=torch.float32)(ids)
        torch.testing.assert_close(ours, theirs(ids).logits, rtol=1e-4, atol=1e-4)
    written = llm("generate", "--model", tmp_path / "one", "--prompt", "import ", "--max-new-tokens", 4)
    assert written.startswith("import ")


def test_what_transformers_has_no_class_for_keeps_its_own_names(capsys, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = llm(
        *("pretrain", "--recipe", "debug", "--steps", 2, "--data.cache", tmp_path / "corpora", "--out", run),
        *("--model.num-layers", 2, "--model.moe.num-experts", 4, "--model.moe.router", "switch"),
        *("--model.moe.z-weight", 0.001, "--microbatch", 12),
    )
    assert "none: transformers has no architecture of these experts" in said
    assert "no architecture" in refusal(capsys, "export", "--model", run)
    text = tmp_path / "text.txt"
    text.write_text("import os\n" * 200)
    llm("evaluate", "--model", run, "--data.path", text, "--data.sequence-length", 32, "--out", tmp_path / "figures")
    assert 0 < json.loads((tmp_path / "figures").read_text())["bits_per_byte"] < 9


def test_plan_knows_experts() -> None:
    cluster = ("--nproc", 64, "--gpu", "H100", "--zero", 3, "--mesh.ep", 8)
    planned = llm("plan", "--recipe", "mixtral_8x7b", *cluster, "--data.global-batch", 128)
    assert "46,702,792,704 parameters" in planned
    assert "12,748,587,008" in planned  # multiply a token: two experts a layer, and the router
    assert "tokens/s" in planned


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--nproc", 2, "--mesh.ep", 2), ("no experts", "mesh.ep=1")),
        (("--recipe", "debug_moe", "--mesh.ep", 2), ("ep=2", "1 rank of dp_replicate", "{1}")),
        (("--recipe", "debug_moe", "--nproc", 6, "--mesh.ep", 4, "--zero", 3), ("6 ranks of dp_shard", "{1, 2, 3, 6}")),
        (("--recipe", "debug_moe", "--nproc", 12, "--mesh.ep", 12), ("8 experts", "ep=12", "at most 8")),
        (("--recipe", "debug_moe", "--nproc", 27, "--mesh.tp", 27, "--mesh.tp-mode", "3d"), ("8 experts", "9 ranks")),
        (("--model.moe.router", "switch"), ("no experts", "moe.num_experts")),
    ],
)
def test_refusals(capsys, tmp_path: Path, options: tuple, expected: tuple) -> None:
    said = refusal(capsys, "pretrain", "--out", tmp_path / "run", *options)
    for word in expected:
        assert word in said
