"""The folder of a training run: who holds it, what produces it, which checkpoint it means, what it has come to."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from core.checkpoint import complete_steps
from core.config import UserError, as_json, in_one_line
from core.files import replace_file
from core.metrics import RunLog, read_metrics
from core.run_folder import hold
from core.runtime import Runtime, agreed, launch
from core.train.config import TrainConfig


def nothing_to_do(config: TrainConfig, runtime: Runtime, first: int, last: int) -> dict[str, Any]:
    """A run that was complete already: its summary stays as it is."""
    if runtime.leads:
        print(f"nothing to do: {config.out} is at step {first}, and this run ends at {last}; give more --steps")
    path = config.out / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {"step": first, "status": "complete"}


def is_told(config: TrainConfig, step: int) -> bool:
    """Whether summary.json is of that step, and of the end where that is one, alike on every rank.

    That of a run which was killed behind its last checkpoint is of an earlier step, or not there.
    """
    path = config.out / "summary.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    is_end = step < config.steps or found.get("status") != "stopped"
    return agreed(found.get("step") == step and is_end)


def told_loss(config: TrainConfig, step: int) -> float:
    """The loss of a step by the record, alike on every rank; not a number where it has none."""
    path = config.out / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    found = next((row["loss"] for row in reversed(rows) if row["step"] == step), None)
    return agreed(float("nan") if found is None else found)


def changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    """`, with mesh.tp 2 -> 4, …`: what is configured otherwise than when the checkpoint was made."""
    found = [
        f"{name} {old} -> {new}"
        for name, (old, new) in sorted(_differences(before, now).items())
        if name.rpartition(".")[2] not in ("resume", "stop_after", "nproc", "out")
    ]
    return f", with {', '.join(found)}" if found else ""


def _differences(before: Any, now: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (before, now) of the leaves of two JSON values that differ."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return {} if before == now else {name: (before, now)}
    found = {}
    for key in {*before, *now}:
        found |= _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    return found


def checkpoint_path(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the latest of the run folder that it is."""
    for folder in (path, path / "checkpoints"):
        if steps := complete_steps(folder):
            return steps[max(steps)]
    return path


def dotted(value: Any, name: str = "") -> dict[str, Any]:
    """Dotted name -> leaf of a JSON value."""
    if not isinstance(value, dict):
        return {name: value}
    found = {}
    for key, inner in value.items():
        found |= dotted(inner, f"{name}.{key}" if name else key)
    return found


@contextmanager
def open_run(config: TrainConfig, runtime: Runtime) -> Iterator[None]:
    """The run's folder is this run's for the length of the block; config.json tells what produces it.

    Of a run that goes on `fit` writes it, once the run has taken over what is there: one that is refused changes
    nothing. Of an elastic run the replica that leads does both by itself (`core.train.elastic`).

    Raises UserError, alike on every rank, where another run holds the folder or it cannot be written.
    """
    if config.elastic.store is not None:
        yield
        return
    with ExitStack() as stack:
        said = None
        if runtime.leads:
            try:
                stack.enter_context(hold(config.out))
                if config.resume is None or not (config.out / "config.json").exists():
                    write_config(config)
            except (UserError, OSError) as error:
                said = in_one_line(error)
                if said is None:
                    raise
        if (refused := agreed(said)) is not None:
            raise UserError(refused)
        yield


def write_config(config: TrainConfig) -> None:
    """config.json of the run, before it trains: what produced this folder, also when it is interrupted."""
    if config.resume is None and complete_steps(config.out / "checkpoints"):
        return  # a folder that holds a run is refused by `fit`, with its config as it was
    replace_file(config.out / "config.json", json.dumps(as_json(config), indent=2).encode() + b"\n")


def launch_run(out: Path, nproc: int, package: str, arguments: list[str]) -> int:
    """`python -m package arguments` in one process a rank.  Returns the exit code.

    A run that SIGTERM stopped and that saved, as the summary in `out` says, has done what it was asked.
    """
    summary = out / "summary.json"
    before = _identity(summary)
    code = launch(nproc, package, arguments)
    saved = _identity(summary) != before  # by this run: an earlier one's summary stays, whatever becomes of this one
    if code == 128 + 15 and saved and json.loads(summary.read_text())["status"] == "stopped":
        return 0
    return code


def _identity(path: Path) -> tuple[int, int] | None:
    """Changes whenever a file is replaced."""
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None


def run_log(config: TrainConfig, runtime: Runtime, first: int | None) -> RunLog:
    tensorboard = "auto" if config.log.tensorboard else False
    return RunLog(
        config.out,
        active=runtime.leads,
        resume_step=first,
        tensorboard=tensorboard,
        wandb_project=config.log.wandb_project,
    )
