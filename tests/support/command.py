"""Running the commands as a user does: a process of their own, with one thread a rank."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}


def run(*arguments: object, cwd: Path = ROOT, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS`, to its end."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def llm(*arguments: object, cwd: Path = ROOT) -> str:
    """`llm ARGUMENTS`, which has to succeed; what it printed."""
    done = run("-m", "apps.llm", *arguments, cwd=cwd)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics(folder)]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())
