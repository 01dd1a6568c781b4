"""Every kernel compiles for four chips without a GPU, and no shipped configuration spills registers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.kernels import specs

ROOT = Path(__file__).parents[2]
CHIPS = ("sm_80", "sm_90", "sm_100", "gfx942")
# A tile of 16384 elements does not fit the registers of four warps.
SPILLING = """
import sys
from core.kernels import compile, softmax
compile.TARGETS = {"sm_90": compile.TARGETS["sm_90"]}
softmax._blocks = lambda length: {"ROWS": 1, "BLOCK": 16384, "num_warps": 4}
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
def test_every_family_compiles_for_every_chip_without_spills() -> None:
    done = run("-m", "core.kernels.compile", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = {(line.split()[0], line.split()[2]) for line in done.stdout.splitlines()[1:-1]}
    assert compiled == {(name, chip) for name in specs() for chip in CHIPS}


def test_spills_are_seen() -> None:
    done = run("-c", SPILLING)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "kernels spill registers" in done.stdout


def test_an_unknown_kernel_is_one_line_and_exit_code_2() -> None:
    done = run("-m", "core.kernels.compile", "sofmax")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no kernel 'sofmax'; the kernels are ")
    assert done.stderr.count("\n") == 1
