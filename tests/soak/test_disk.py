"""The disk below the host for as long as it takes to believe it: `make soak`.

DISK_PLANS sets how many random plans.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import disk_faults
from tests.support.disk import FAULTS
from tests.support.disk_plans import main
from tests.support.gemini_memory import LARGE, Size, measured

pytestmark = [pytest.mark.soak, pytest.mark.timeout(4 * 3600)]


def told_by(*arguments: object) -> dict[str, Any]:
    """What `tests.support.disk_faults` tells."""
    command = [sys.executable, "-m", "tests.support.disk_faults", *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_random_plans_are_bit_equal_to_no_offload_and_in_their_budgets(tmp_path: Path) -> None:
    count = int(os.environ.get("DISK_PLANS", "300"))
    found = main(tmp_path, count)
    print(found)
    assert found["failed"] == {}
    assert found["on disk"] > count // 3
    assert found["on disk whole"] > 0
    assert found["on device too"] > 0
    assert found["updated early"] > 0
    assert found["parts"] > 1.2 * count
    assert found.get("cached pages", 0) == 0


@pytest.mark.parametrize("run", sorted(disk_faults.RUNS))
def test_a_fault_at_every_call(tmp_path: Path, run: str) -> None:
    found = told_by(tmp_path, run, ",".join(FAULTS))
    print(found)
    assert found["wrong"] == []
    assert found["exits"]["kill -9"] >= 200
    for fault in ("EIO", "ENOSPC"):  # some are of calls that may fail, or that another order of threads does not make
        assert found["exits"][f"{fault} 2"] >= 0.8 * found["cases"][fault]
    assert found["cases"]["short"] == found["exits"]["short 0"] >= 200
    assert found["resumed"] >= sum(found["cases"].values()) // disk_faults.RESUMED


@pytest.mark.parametrize(
    "size",
    [
        Size(LARGE, "150MB", host="350MB"),
        Size(LARGE, "150MB", "bf16", host="420MB"),
    ],
)
def test_the_process_takes_what_the_two_budgets_allow(size: Size) -> None:
    """On a CPU the device is memory, too. Beside both there may be a tenth of what is accounted for."""
    found = measured(size)
    assert found.rise <= 1.1 * (found.device + found.host)
