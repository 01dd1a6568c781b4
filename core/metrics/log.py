"""The record of a run: one JSON object a step, a summary at the end, and the same scalars for TensorBoard and W&B.

1. Open: a fresh run starts an empty metrics.jsonl; a run that resumes from step k first drops the rows after k, because
   those steps will be taken again.
2. Each step: one row, written by one system call, so a killed process leaves whole lines (at worst a torn last one,
   which `read_metrics` and the next resume leave out).
3. Close: summary.json, written aside and renamed.

JSON has no NaN: a loss that is not finite is written as null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from core.config import UserError
from core.files import naming, replace_file


class RunLog:
    """Writes the metrics of a run into `folder`; does nothing on ranks where `active` is False.

    resume_step    the step of the checkpoint from which the run goes on; None starts the record anew
    tensorboard    "auto" writes TensorBoard events when tensorboard is installed, True insists on it, False leaves it
    wandb_project  the Weights & Biases project to report to; None reports nowhere

    Raises UserError when TensorBoard or Weights & Biases is asked for and not installed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        active: bool,
        resume_step: int | None = None,
        tensorboard: bool | Literal["auto"] = "auto",
        wandb_project: str | None = None,
    ):
        self.folder = Path(folder)
        self.active = active
        self._summary: dict[str, Any] = {}
        self._rows = self._board = self._wandb = None
        if not active:
            return
        self._board = _tensorboard_writer(self.folder, resume_step, tensorboard) if tensorboard else None
        self._wandb = _wandb_run(self.folder, resume_step, wandb_project) if wandb_project else None
        self.folder.mkdir(parents=True, exist_ok=True)
        if resume_step is not None:
            _drop_rows_after(self.metrics_path, resume_step)
        # Unbuffered: each row is one write and is in the file when `write` returns.
        self._rows = open(self.metrics_path, "wb" if resume_step is None else "ab", buffering=0)  # noqa: SIM115

    @property
    def metrics_path(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def summary_path(self) -> Path:
        return self.folder / "summary.json"

    def write(self, row: Mapping[str, Any]) -> None:
        """Add one row; `row["step"]` is the step, counted from 1, and other numbers are the step's scalars."""
        if self._rows is None:
            return
        with naming(self.metrics_path):
            self._rows.write(json.dumps(_finite(row), allow_nan=False).encode() + b"\n")
        scalars = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, row["step"])
        if self._wandb is not None:
            self._wandb.log(scalars, step=row["step"])

    def summarise(self, figures: Mapping[str, Any]) -> None:
        """Merge `figures` into summary.json; the file is always whole."""
        if not self.active:
            return
        self._summary.update(figures)
        text = json.dumps(_finite(self._summary), indent=2, allow_nan=False) + "\n"
        replace_file(self.summary_path, text.encode())
        if self._wandb is not None:
            self._wandb.summary.update(dict(figures))

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._rows = self._board = self._wandb = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        self.close()


def read_metrics(metrics_jsonl: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line torn by a crash is left out."""
    return [json.loads(line) for line in _whole_lines(Path(metrics_jsonl))]


def _whole_lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _drop_rows_after(path: Path, step: int) -> None:
    if path.exists():
        replace_file(path, b"".join(line for line in _whole_lines(path) if json.loads(line)["step"] <= step))


def _finite(value: Any) -> Any:
    """`value` with every float that is not finite, at any depth, replaced by None."""
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tensorboard_writer(folder: Path, resume_step: int | None, wanted: bool | Literal["auto"]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        if wanted == "auto":
            return None
        raise UserError(
            "TensorBoard is asked for and not installed; pip install tensorboard, or leave it out"
        ) from None
    purge_step = None if resume_step is None else resume_step + 1
    return SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=purge_step)


def _wandb_run(folder: Path, resume_step: int | None, project: str) -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            f"Weights & Biases project {project!r} is asked for and wandb is not installed; pip install wandb, "
            "or leave the project out"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    id_path = folder / "wandb_id"
    run_id = id_path.read_text().strip() if resume_step is not None and id_path.exists() else None
    run = wandb.init(project=project, name=folder.name, dir=str(folder), id=run_id, resume="allow")
    replace_file(id_path, f"{run.id}\n".encode())
    return run
