"""Solvers that say how a module is spread: they read the table, a trace and a machine, and return plans.

    model = core.auto.parallelize(model, {"input_ids": ids, "labels": ids})

costs       bytes and seconds of every collective, by the one function that search, solver and executor share
machines    GPUs and links by name, and which link the ranks of an axis have
measure     what a machine does: products, kernels, memory, links between groups of ranks
measured    that as a file, and as a machine for plans
check       a plan held against one rank that runs it, to the byte
step_time   seconds of a decoder's step on a cluster
strategies  the search over all ways to train a decoder: those that none beats in time and memory
draw        its picture
specs       how a tensor lies on a mesh of one to three axes: S01, S10, R, partial
conversion  paths from one spec to another, greedy and cheapest, and the collectives that execute them
checkpointing  which blocks keep their activations and which compute them again, in a given memory
rule        what an operator allows, from one description of its dims: specs of inputs and outputs
rules       that description for every operator of ATen
functional  operators that write in place, and what takes their place
formulate   a step's graph as a problem: strategies and prices on a mesh, liveness
prune       strategies that no cheapest plan needs
problem     nodes, edges and bytes as values; equal blocks and followers folded into one
solve       the cheapest plan by linear programming, with its optimality gap
simulate    a plan's cost, counted again
staged      pipeline stages, layouts and recomputation together
execute     a rank's part of a step, as a plan spreads it
readable    a plan as text: what is cut, explain, compare
spread      a module's forward, spread over a mesh
stages      a step's graph cut into stages, and what they send each other
pipelined   a module's forward in stages
apply       parallelize: the one line
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.auto.apply import parallelize, plan_of, plans_of
    from core.auto.costs import Link
    from core.auto.pipelined import clip_grad_norm_

_ELSEWHERE = {"Link": "costs", "clip_grad_norm_": "pipelined"}
__all__ = ["Link", "clip_grad_norm_", "parallelize", "plan_of", "plans_of"]


def __getattr__(name: str) -> Any:
    """The solvers go without torch's distributed machinery: it is imported when asked for."""
    if name in __all__:
        return getattr(import_module(f"core.auto.{_ELSEWHERE.get(name, 'apply')}"), name)
    raise AttributeError(name)
