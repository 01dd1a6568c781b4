"""Gemini's bytes, moves and seconds of a training step in a budget, before there is any rank.

The same planner decides here and in a run (`core.gemini.search`), on the same trace of the model's modules; here on
tensors without memory, of a machine that is only described. What differs in a run: bandwidths are measured there, and
on a GPU the plan is corrected after its first step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from core.compat import own_part
from core.gemini.chunk import Member
from core.gemini.planning import infos
from core.gemini.residency import Policy, ResidencyPlan
from core.gemini.search import choose_chunk_size, least_budget
from core.gemini.transport import message_bytes
from core.layout import largest_share
from core.optim.build import OptimConfig
from core.optim.muon import is_hidden
from core.optim.size import state_bytes
from core.trace.machine import Bandwidth
from core.trace.tracer import StepTrace


@dataclass(frozen=True)
class GeminiEstimate:
    """A rank's estimate.

    plan            what lives and moves on its device, messages left out
    messages_bytes  of messages between ranks, on the device throughout
    least_bytes     the smallest budget in which the step fits
    """

    plan: ResidencyPlan
    messages_bytes: int
    least_bytes: int

    @property
    def device_bytes(self) -> int:
        """The most on the device at once."""
        return self.plan.device_peak_bytes + self.messages_bytes


def estimate_gemini(
    model: nn.Module,
    step: StepTrace,
    budget_bytes: int,
    bandwidth: Bandwidth,
    optimizer: OptimConfig,
    wide: torch.dtype,
    *,
    ranks: int = 1,
    sends: bool = False,
    policy: Policy = "auto",
) -> GeminiEstimate:
    """The plan of one rank.  Raises UserError where no step fits the budget, with the smallest in which one does.

    model      as it computes, in its format, without memory; a rank's part of it
    step       its trace (`core.trace.tracer.trace_step`)
    wide       format of masters, reductions and the optimizer's state
    ranks      over which chunks are sharded
    sends      whether gradients are added up over several ranks
    """
    parameters = dict(model.named_parameters())
    members = {name: _member(name, parameters[name], ranks, wide) for name in step.order}
    state = {
        name: state_bytes(
            optimizer,
            tuple(member.master.shape),
            wide.itemsize,
            whole=tuple(parameters[name].shape),
            hidden=is_hidden(name, parameters[name]),
        )
        for name, member in members.items()
        if member.trainable
    }
    known = infos(list(members.values()), ranks, wide, state, alone=not sends)

    def messages(chunks: Sequence[Sequence[str]]) -> int:
        return sum(message_bytes([[members[name] for name in chunk] for chunk in chunks], wide, ranks, sends))

    chunking = choose_chunk_size(known, step, budget_bytes, bandwidth, policy, messages)
    return GeminiEstimate(chunking.plan, messages(chunking.parameters), least_budget(known, step, messages))


def _member(name: str, parameter: nn.Parameter, ranks: int, wide: torch.dtype) -> Member:
    """With this rank's rows: those of the first, who has the most."""
    whole: Tensor = own_part(parameter) if isinstance(parameter, DTensor) else parameter
    shape = (largest_share(whole.shape[0], ranks), *whole.shape[1:]) if whole.ndim else ()
    return Member(name, parameter, torch.empty(shape, dtype=wide, device="meta"))
