"""The example of docs/any_module.md: it learns, on two ranks what it learns alone, and goes on elsewhere."""

from pathlib import Path

import pytest

from tests.support.command import ROOT, metrics, run, summary

EXAMPLE = ROOT / "docs/examples/vision.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def vision(out: Path, *options: object, num_ranks: int = 1) -> str:
    done = run(*((*TORCHRUN, num_ranks) if num_ranks > 1 else ()), EXAMPLE, "--out", out, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_learns(tmp_path: Path) -> None:
    said = vision(tmp_path / "run", "--steps", 60)
    error = summary(tmp_path / "run")["heldout_error"]
    assert error < 0.1
    assert f"held-out error {error:.2%}" in said


def test_two_ranks_learn_what_microbatches_of_one_do(tmp_path: Path) -> None:
    """Batch norm sees the rows of a microbatch, so 32 of one rank are 32 of each of two."""
    options = ("--steps", 6, "--precision", "fp64", "--noise-scale")
    vision(tmp_path / "alone", *options, "--microbatch", 32)
    vision(tmp_path / "two", *options, "--zero", 2, "--stop-after", 4, num_ranks=2)
    vision(tmp_path / "two", *options, "--microbatch", 32, "--resume")
    alone, two = metrics(tmp_path / "alone"), metrics(tmp_path / "two")
    assert len(alone) == len(two) == 6
    for key in ("loss", "noise_scale"):
        assert [row[key] for row in two] == pytest.approx([row[key] for row in alone], rel=1e-10)


def test_what_it_does_not_obey_is_refused(tmp_path: Path) -> None:
    for option, said in (("--rows=0", "rows=0"), ("--row=3", "no option --row"), ("--optim.name=lion", "lion")):
        done = run(EXAMPLE, option, "--out", tmp_path / "run")
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stderr.count("\n") == 1


def test_the_page_shows_its_commands() -> None:
    page, module = (ROOT / "docs/any_module.md").read_text(), EXAMPLE.read_text()
    for line in module.split('"""')[1].strip().splitlines()[2:]:
        assert line in page
