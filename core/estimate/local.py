"""Bytes of local training (`core.parallel.local`) beside those of a worker's step, by closed forms.

On a rank whose optimizer updates u of a worker's parameters, in a format of w bytes (that of the masters):

    kept    u w of theta, and u w of the outer momentum where there is one; with messages in few bits and error feedback
            u w of a worker's error, and an n-th of that of the error of the part that it adds up
    sent    once a round, over the n workers: 2 (n - 1) / n u w, round a ring; an H-th of it a step. In few bits a block
            of B elements is of the code's bytes in each direction instead (`core.comm.block_code`)

A plain step sends 2 (N - 1) / N u w over all N ranks whose gradients are added up.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.comm.volume import wire_share
from core.config import in_words

if TYPE_CHECKING:
    from core.estimate.shape import ModelShape, RunShape


@dataclass(frozen=True)
class OuterMessage:
    """What a rank sends to other workers: bytes a round, and a step of it on average."""

    a_round: float
    every: int

    @property
    def a_step(self) -> float:
        return self.a_round / self.every


def outer_bytes(num_updated: int, run: "RunShape") -> int:
    """Bytes of theta and of the outer momentum on a rank that updates so many elements; 0 without local training."""
    if not run.local_every:
        return 0
    errors = 1 + 1 / run.num_workers if run.local_error and run.num_workers > 1 else 0
    return round((1 + run.outer_momentum + errors) * run.wide_bytes * num_updated)


def outer_message(model: "ModelShape", run: "RunShape") -> OuterMessage:
    """The message of a round, of a run that trains locally; stages are taken to be of equal size."""
    dense, experts = (model.num_parameters(experts=which) / (run.tp * run.pp) for which in (False, True))
    shards = run.shard_ranks if run.zero else 1
    own_experts = experts / run.ep / (shards // run.ep if run.zero else 1)
    width = run.wide_bytes if run.local_code is None else run.local_code.num_bytes / run.local_code.block
    num_bytes = width * (dense / shards + own_experts)
    return OuterMessage(wire_share("all_reduce", run.num_workers) * num_bytes, run.local_every)


def outer_in_words(model: "ModelShape", run: "RunShape") -> str:
    """A line for a plan."""
    sent = outer_message(model, run)
    workers = f"{run.num_workers} worker{'s' * (run.num_workers > 1)}"
    parts = f" in {run.fragments} parts" if run.fragments > 1 else ""
    return (
        f"{workers} of {run.local_every} step{'s' * (run.local_every > 1)} a round: a rank sends "
        f"{in_words(round(sent.a_round))} to the others a round{parts}, {in_words(round(sent.a_step))} a step"
    )
