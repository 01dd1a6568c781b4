"""What a run in mode budget computes again: chosen before it starts, alike on every rank, by a trace of its step."""

from collections.abc import Callable

from torch import Tensor, nn

from core.auto.checkpointing import Checkpointing, fastest, frontier
from core.compose import ParallelConfig
from core.config import UserError, in_words, size_in_bytes
from core.estimate.chain import estimate_chain
from core.mesh import MeshConfig
from core.optim.build import OptimConfig
from core.placement.style import Plan
from core.placement.table import NO_PLAN, ModelPlan
from core.trace.machine import Speed


def choose_segments(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    mesh: MeshConfig,
    parallel: ParallelConfig,
    speed: Speed,
    plan: ModelPlan | Plan = NO_PLAN,
    optimizer: OptimConfig | None = None,
    num_microbatches: int = 1,
) -> Checkpointing:
    """The fastest segments whose step keeps within `parallel.recompute.budget`; see `core.estimate.chain`.

    Raises UserError where none do, and says the smallest budget that some do.
    """
    given = parallel.recompute.budget
    assert given is not None
    budget = size_in_bytes(given, "recompute.budget")
    chain = estimate_chain(model, loss, mesh, parallel, speed, plan, optimizer, num_microbatches)
    choices = frontier(chain)
    found = fastest(choices, budget)
    if found is None:
        least = choices[0].peak_bytes
        raise UserError(
            f"recompute.budget={given}: a step takes at least {in_words(least)} ({least} bytes), with as much computed "
            f"again as helps; give that, a smaller --microbatch, or --zero 2 with more ranks"
        )
    return found


def described(found: Checkpointing) -> str:
    """A line that says what is computed again, and what for."""
    again = [runs - 1 for runs in found.step.runs]
    longer = found.step.again_s / max(found.step.seconds - found.step.again_s, 1e-30)
    return (
        f"at most {in_words(found.peak_bytes)} in a step: {sum(map(bool, again))} of {len(again)} blocks run again, "
        f"{sum(again)} times together, which takes {longer:.0%} of a step's time in blocks"
    )
