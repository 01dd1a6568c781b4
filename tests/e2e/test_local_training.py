"""The real commands with local training: train on two ranks, go on, evaluate theta, plan, refuse."""

import json
from pathlib import Path

import pytest

from tests.e2e.test_pretrain import TEXT
from tests.e2e.test_refusals import refusal
from tests.support.command import llm, losses, metrics, summary

LOCAL = ("--recipe", "debug", "--model.num-layers", 2, "--local.every", 3, "--steps", 6)


def test_workers_learn_others_go_on_and_theta_is_what_is_evaluated(tmp_path: Path) -> None:
    run, options = tmp_path / "run", (*LOCAL, "--local.bits", 8, "--local.fragments", 2, *TEXT)
    llm("pretrain", *options, "--nproc", 2, "--out", run, "--stop-after", 4)
    said = llm("pretrain", *options, "--nproc", 3, "--out", run, "--resume")
    assert "continuing after step 4, with local workers 2 -> 3" in said
    rows = metrics(run)
    assert [row["step"] for row in rows if "outer_norm" in row] == [1, 3, 4, 6]
    assert summary(run)["heldout_bits_per_byte"] > 0
    text = tmp_path / "text.txt"
    text.write_text("import os\n" * 200)
    llm("evaluate", "--model", run, "--data.path", text, "--data.sequence-length", 32, "--out", tmp_path / "figures")
    assert 0 < json.loads((tmp_path / "figures").read_text())["bits_per_byte"] < 9


@pytest.mark.soak
@pytest.mark.parametrize(("recipe", "inside"), [("debug", ("--mesh.cp", 2)), ("debug_moe", ("--mesh.ep", 2))])
def test_a_worker_of_two_ranks_is_one_of_one_rank(tmp_path: Path, recipe: str, inside: tuple) -> None:
    options = ("--recipe", recipe, "--model.num-layers", 2, "--precision", "fp64", "--steps", 5, "--local.every", 3)
    for name, more in (("one", ()), ("two", ("--nproc", 2, *inside))):
        llm("pretrain", *options, "--data.global-batch", 4, *TEXT, *more, "--out", tmp_path / name)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)


def test_plan_prices_a_round() -> None:
    plain, local = (
        llm(
            "plan",
            "--recipe",
            "gpt2_124m",
            "--nproc",
            8,
            "--gpu",
            "H100",
            "--data.global-batch",
            64,
            "--zero",
            0,
            *options,
        )
        for options in ((), ("--local.every", 50, "--local.bits", 2))
    )
    assert "8 workers of 50 steps a round: a rank sends" in local
    assert "workers" not in plain
    assert plain != local


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--local.every", 4, "--local.outer-lr", 0), ("local.outer_lr=0.0", "positive")),
        (("--local.outer-lr", 1), ("--local.outer-lr", "without local.every")),
        (("--local.every", 4, "--local.keep", 0.02), ("local.keep", "--local.bits")),
        (("--local.every", 40, "--local.fragments", 33), ("local.fragments=33", "blocks", "at most")),
        (("--local.every", 4, "--zero", 2), ("zero=2", "--mesh.dp-replicate")),
        (("--local.every", 4, "--mesh.pp", 2, "--pipeline.schedule", "2bw"), ("2bw", "1f1b")),
    ],
)
def test_refusals(capsys, tmp_path: Path, options: tuple, expected: tuple) -> None:
    said = refusal(capsys, "pretrain", "--nproc", 2, "--out", tmp_path / "run", *options)
    for word in expected:
        assert word in said
