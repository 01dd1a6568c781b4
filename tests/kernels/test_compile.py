"""Every kernel compiles for four chips without a GPU, and no shipped configuration spills registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.kernels import compile, specs

ROOT = Path(__file__).parents[2]
CHIPS = ("sm_80", "sm_90", "sm_100", "gfx942")
# A tile of 32768 elements does not fit the registers of four warps.
SPILLING = """
import sys
from core.kernels import compile, softmax
compile.TARGETS = {"sm_90": compile.TARGETS["sm_90"]}
softmax._blocks = lambda length: {"ROWS": 1, "BLOCK": 32768, "num_warps": 4}
sys.exit(compile.main(["--quick", "softmax"]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python without the interpreter, which these tests run under."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


@pytest.mark.timeout(1800)
def test_every_family_compiles_without_spills() -> None:
    """For one chip, whose turn it is; `make soak` compiles every configuration for all four."""
    done = run("-m", "core.kernels.compile", "--quick", "--turns")
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = [tuple(line.split()[0:3:2]) for line in done.stdout.splitlines()[1:-1]]
    assert set(compiled) == {(name, CHIPS[n % 4]) for n, name in enumerate(specs())}
    loops = {line.split()[1]: int(line.split()[6]) for line in done.stdout.splitlines()[1:-1]}
    assert loops["_int4_words"] > 4 * 8 * 2  # a bit operation and a sum for each of 8 numbers in 4 rows, at least
    assert loops["_swiglu_forward_kernel"] == 0  # which has none
    assert loops["_rope"] == 0  # of AMD, where none is counted


def test_spills_are_seen() -> None:
    done = run("-c", SPILLING)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "kernels spill registers" in done.stdout


def test_an_unknown_kernel_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert compile.main(["sofmax"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: no kernel 'sofmax'; the kernels are ")
    assert said.count("\n") == 1


def test_what_was_compiled_is_shown_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kept by family: a second run replaces its own lines only."""
    path = tmp_path / "binaries.jsonl"
    one = {"spec": "softmax", "chip": "sm_90", "kernel": "_f", "case": "", "registers": 40, "shared_bytes": 2048}
    lines = [one | {"spilled_bytes": 0}, one | {"registers": 50, "spilled_bytes": 8, "chip": "gfx942"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, lines[0] | {"registers": 64}]))
    assert compile.main(["--table", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| family | kernel | binaries | sm_90 | gfx942 |",
        "|---|---|---|---|---|",
        "| softmax | `_f` | 3 | 64, 2 | 50, 2, **spills 8** |",
    ]
