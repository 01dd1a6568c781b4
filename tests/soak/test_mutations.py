"""Every line of `tests.soak.mutations` broken in a copy of the tree, and seen: `make soak`.

What was seen is written to tests/soak/mutations.json, mutation by mutation, which is committed: `tests.soak.seen`.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.soak.mutations import MUTATIONS, Mutation
from tests.soak.seen import Seen, keep

ROOT = Path(__file__).parents[2]
FAILED = 1  # pytest's exit code for tests that fail; others say that it could not run them
TREE = ("core", "apps", "benchmarks", "tests", "pyproject.toml")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as it is, in a folder of its own."""
    folder = tmp_path_factory.mktemp("mutated")
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_the_suite_sees_it(copy: Path, mutation: Mutation) -> None:
    file = copy / mutation.file
    source = file.read_text()
    assert source.count(mutation.old) == 1
    file.write_text(source.replace(mutation.old, mutation.new))
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutation.tests]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    finally:
        file.write_text(source)
    assert done.returncode == FAILED, done.stdout + done.stderr
    failed = re.findall(r"^FAILED (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    assert failed, done.stdout
    keep(mutation, Seen(failed[0], round(time.monotonic() - began)))
