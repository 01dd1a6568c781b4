"""The disk below the host for as long as it takes to believe it: `make soak`.

DISK_PLANS sets how many random plans, DISK_KILLS how many kills.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.disk_plans import main
from tests.support.gemini_memory import LARGE, Size, measured

pytestmark = [pytest.mark.soak, pytest.mark.timeout(4 * 3600)]


def told_by(*arguments: object) -> dict[str, Any]:
    """What a run of `tests.support.disk` tells."""
    command = [sys.executable, "-m", "tests.support.disk", *map(str, arguments)]
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


@pytest.mark.parametrize("early", [(), ("early",), ("early", "average")], ids=["late", "early", "average"])
def test_many_kills(tmp_path: Path, early: tuple[str, ...]) -> None:
    found = told_by(tmp_path, int(os.environ.get("DISK_KILLS", "200")) // 2, len(early), *early)
    assert found["wrong"] == 0
    assert len(set(found["from_step"])) > 1


@pytest.mark.parametrize("early", [(), ("early",)], ids=["late", "early"])
@pytest.mark.parametrize("fault", ["EIO", "ENOSPC", "short"])
def test_a_fault_at_every_call(tmp_path: Path, fault: str, early: tuple[str, ...]) -> None:
    found = told_by(tmp_path, fault, *early)
    assert found["wrong"] == []
    assert found["failures"] >= (0 if fault == "short" else found["calls"] - found["unhit"] - 5)
    assert found["unhit"] <= 0.1 * found["calls"]


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
