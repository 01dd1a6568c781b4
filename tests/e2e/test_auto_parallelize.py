"""The example of docs/auto_parallelize.md runs under torchrun, and learns alone what it learns on two ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/auto_parallelize.py"


@pytest.mark.soak
def test_the_example_of_the_page() -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = []
    for before in (launcher, []):
        done = subprocess.run(
            [sys.executable, *before, str(EXAMPLE)], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert "parameters:" in done.stdout
        found.append(re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE))
    assert found[0] == found[1]
    assert len(found[0]) == 1
    assert (
        "torchrun --nproc-per-node 2 docs/examples/auto_parallelize.py"
        in (ROOT / "docs/auto_parallelize.md").read_text()
    )
