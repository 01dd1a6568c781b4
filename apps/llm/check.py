"""`llm plan --check`: a plan held against one rank that runs it, of a process group of which no other exists."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from apps.llm.config import PretrainConfig, check_combination, run_shape
from apps.llm.recompute import OwnModel
from core.auto.check import PEAK_WITHIN, Line, lines_of
from core.config import UserError
from core.estimate import decoder_shape
from core.estimate.memory import estimate_places as planned_places
from core.estimate.step import estimate_places as counted_places
from core.mesh import MeshConfig


def check_run(config: PretrainConfig) -> dict[int, list[Line]]:
    """Of each looked-at rank of a pipeline (one, without a pipeline) what it is held to.

    Looked at are those of which one is the fullest. Operators are those of a CPU, and so is the plan beside them.

    Raises UserError for a run whose step is not foreseen so.
    """
    for name, refused in _not_checked(config):
        raise UserError(f"--check with {name}, {refused}; leave one of them out")
    mesh, run = check_combination(config), run_shape(config)
    planned = planned_places(decoder_shape(config.model, device_type="cpu"), run)
    model = OwnModel(config)
    loss = model.loss(run.microbatch_size, run.sequence_length)
    made = model.build(), loss, mesh, config, model.plan, config.optim, run.num_microbatches
    counted = counted_places(*made, places=planned)
    return {place: lines_of(config.model, run, place, planned[place], counted[place]) for place in planned}


def _not_checked(config: PretrainConfig) -> Iterator[tuple[str, str]]:
    if config.local.every:
        yield f"local.every={config.local.every}", "whose workers' average is of no step"
    if config.gemini.budget is not None:
        yield f"gemini.budget={config.gemini.budget}", "whose plan is a trace of the step itself"
    if config.recompute.mode == "budget":
        yield "recompute.mode=budget", "whose plan is a trace of the step itself"


def show_check(found: dict[int, list[Line]], mesh: MeshConfig, console: Console) -> int:
    """Print a table, and a line that says whether all agree.  Returns the exit code: 1 where something does not."""
    table = Table("rank of the pipeline", "bytes of", "planned", "counted", "difference")
    for column in table.columns[2:]:
        column.justify = "right"
    for place, lines in found.items():
        for line in lines:
            numbers = (f"{n:,}" for n in (line.predicted, line.counted, line.difference))
            table.add_row(f"{place}", line.what, *numbers, style="" if line.agrees else "red")
    console.print(table)
    wrong = [(place, line) for place, lines in found.items() for line in lines if not line.agrees]
    ranks = mesh.data_ranks * mesh.cp * mesh.tp * mesh.pp
    if not wrong:
        number = sum(map(len, found.values()))
        console.print(
            f"the plan is what a rank of {ranks:,} does: {number} counts, to the byte but the fullest moment, which "
            f"is within {PEAK_WITHIN:.0%}"
        )
        return 0
    place, line = max(wrong, key=lambda one: abs(one[1].difference))
    console.print(
        f"the plan differs from what a rank of {ranks:,} does in {len(wrong)} counts; most in {line.what} of rank "
        f"{place} of the pipeline: planned {line.predicted:,} bytes, counted {line.counted:,}"
    )
    return 1


def as_json(found: dict[int, list[Line]]) -> list[dict[str, Any]]:
    return [
        {"place": place, "what": line.what, "planned": line.predicted, "counted": line.counted, "agrees": line.agrees}
        for place, lines in found.items()
        for line in lines
    ]
