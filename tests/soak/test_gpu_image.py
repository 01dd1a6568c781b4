"""A machine as images for GPUs are: their Python, torch, triton and transformers, and of us a checkout and the pack.

No GPU is needed: the protocol runs in its quick form on the CPU, and so do the tests that are marked gpu.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.pack import HERE, names_in

ROOT = Path(__file__).parents[2]
PYTHON = "python3.12"
"""As images have it; where there is none, the pack is made for this interpreter's version."""
VERSIONS = {"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0"}

TESTS = """
import sys
from benchmarks.gpu.packed import use_pack
use_pack()
import pytest
from benchmarks.gpu.suite import files
here = [name for name in files() if not name.startswith("tests/kernels/")]  # which Triton's interpreter runs elsewhere
sys.exit(pytest.main(["-q", "-n", "2", "--dist", "worksteal", "-m", "gpu", "--device", "cpu", *here]))
"""
"""As `benchmarks.gpu tests` begins them, whose limit of time is a GPU's."""


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_the_protocol_runs_in_an_image(tmp_path: Path) -> None:
    python, checkout = tmp_path / "image" / "bin" / "python", tmp_path / "checkout"
    run(interpreter(), "-m", "venv", tmp_path / "image")
    version = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    run("git", "clone", "--quiet", ROOT, checkout)
    needed = [f"{name}=={VERSIONS[name]}" if name in VERSIONS else name for name in names_in(HERE / "image.txt")]
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *needed)
    run(sys.executable, "-m", "benchmarks.gpu.pack", "--python", version, cwd=checkout)
    for command in ("a", "b", "c", "d"):
        options = ("--device", "cpu", "--quick", "--minutes", 30, "--out", tmp_path / command)
        run(python, "-m", "benchmarks.gpu", command, *options, cwd=checkout)
    run(python, "-c", TESTS, cwd=checkout)


def interpreter() -> str:
    found = shutil.which(PYTHON)
    if found is None or subprocess.run([found, "--version"], capture_output=True, check=False).returncode:
        return sys.executable  # what is there may be a script that knows of none
    return found


def run(*command: object, cwd: Path | None = None) -> str:
    """What it printed; fails with the last words of that.  It hears nothing of this interpreter, and asks no hub."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=clean | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
