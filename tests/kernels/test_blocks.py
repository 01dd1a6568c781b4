"""Blocks: the default until somebody tuned, then what the folder holds, which processes add to."""

import json
from pathlib import Path

import pytest

from core.kernels import blocks

KEY, DEFAULT, WINNER = (64, "bf16"), {"BLOCK": 32}, {"BLOCK": 64}


def chosen() -> blocks.Blocks:
    return blocks.choose("kernel", KEY, DEFAULT, [WINNER], run=lambda _: pytest.fail("nothing is tuned without a GPU"))


def test_winners_are_read_and_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_winners", {})
    monkeypatch.setattr(blocks, "_folder", None)
    monkeypatch.setattr(blocks.torch.cuda, "is_available", lambda: False)
    assert chosen() == DEFAULT
    path = tmp_path / "sm_90.json"
    path.write_text(json.dumps({"kernel 64 bf16": WINNER}))
    blocks.autotune(tmp_path)
    assert chosen() == WINNER
    blocks._winners.clear()
    blocks._winners["other"] = DEFAULT
    blocks._keep(path)
    assert json.loads(path.read_text()) == {"kernel 64 bf16": WINNER, "other": DEFAULT}


def test_a_chip_that_is_compiled_for_is_the_chip() -> None:
    with blocks.compiling_for("gfx942"):
        assert blocks.chip() == "gfx942"
