"""`llm plan --gemini.budget` says what the run's own planner says, of every rank's part of a model."""

import re

import pytest

from core.config import size_in_bytes
from tests.support.command import run

MESHES = {
    "one rank": ["--recompute.mode", "full"],
    "sharded": ["--nproc", 2, "--zero", 3],
    "tensor parallel, ragged": ["--nproc", 2, "--mesh.tp", 2, "--model.ffn-dim", 93],
    "context parallel, bf16": ["--nproc", 2, "--mesh.cp", 2, "--precision", "bf16"],
}
LEAST = re.compile(r"give at least ([\d.]+ \w+)")


@pytest.mark.soak
def test_the_smallest_budget_of_experts_on_ranks_of_their_own_is_nearly_that_of_the_run(tmp_path):
    """Routers send tokens elsewhere in the step that each of them traces."""
    experts = ["--model.num-layers", 2, "--nproc", 2, "--mesh.ep", 2, "--zero", 3]
    words = ["--recipe", "debug_moe", *experts, "--gemini.budget", "100KB"]
    planned = run("-m", "apps.llm", "plan", *words)
    started = run("-m", "apps.llm", "pretrain", *words, "--steps", 1, "--out", tmp_path / "run")
    least, found = (size_in_bytes(LEAST.findall(said.stderr)[0].replace(" ", ""), "") for said in (planned, started))
    assert least == pytest.approx(found, rel=0.15)


@pytest.mark.parametrize(
    "mesh", [pytest.param(name, marks=pytest.mark.soak) if name.startswith("context") else name for name in MESHES]
)
def test_the_smallest_budget_is_that_of_the_run(mesh, tmp_path):
    words = ["--recipe", "debug", "--model.num-layers", 2, *MESHES[mesh], "--gemini.budget"]
    planned = run("-m", "apps.llm", "plan", *words, "100KB")
    assert planned.returncode == 2
    [least] = LEAST.findall(planned.stderr)
    started = run("-m", "apps.llm", "pretrain", *words, "100KB", "--steps", 1, "--out", tmp_path / "run")
    assert LEAST.findall(started.stderr)[:1] == [least]
    fits = run("-m", "apps.llm", "plan", *words, least.replace(" ", ""), "--gpu", "A100")
    assert fits.returncode == 0, fits.stderr
    assert "on the host" in fits.stdout


def test_what_is_not_foreseen_is_refused_by_name(tmp_path):
    words = ["plan", "--recipe", "debug", "--gemini.budget", "100MB"]
    for options, said in (
        (["--mesh.pp", 2, "--nproc", 2], "mesh.pp=2: a stage's step"),
        (["--timeline", tmp_path / "step.png"], "--timeline with gemini.budget"),
        (["--gemini.figure", tmp_path / "step.png"], "--gemini.figure with gemini.budget"),
        (["--model.moe.num-experts", 8, "--model.dim", 16384, "--model.ffn-dim", 65536], "routers look at values"),
    ):
        refused = run("-m", "apps.llm", *words, *options)
        assert refused.returncode == 2
        assert said in refused.stderr
