"""What a model's blocks cost, one by one: the chain (`core.trace.chain`) that segments are chosen for.

Two steps of the run's run on tensors without memory, as `core.estimate.step` runs them: one in which every block is a
segment of its own, so that it keeps its input and runs again, and one in which all blocks keep everything. Marks where
blocks begin and end, in both directions, cut them into sections, and of these come the levels and peaks of each block,
whatever it is: bytes of its own tensors, of the gradients that it makes, of buckets and messages between.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from core.compose import ParallelConfig, parallelize
from core.config import UserError
from core.estimate.step import StepAccount, make_state, traced, update, without_memory
from core.mesh import MeshConfig, build_mesh, mesh_shape
from core.optim.build import OptimConfig, build_optimizer
from core.parallel.parallel_model import ParallelModel
from core.parallel.plan import blocks_of
from core.parallel.recompute_chain import RecomputedChain, chain_of
from core.placement.style import Plan
from core.placement.table import NO_PLAN, ModelPlan, model_plan
from core.runtime import pretended
from core.trace.account import plain_tensors
from core.trace.alike import Label
from core.trace.chain import Chain, ChainBlock
from core.trace.machine import Speed
from core.trace.segments import Segments


def estimate_chain(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    mesh: MeshConfig,
    parallel: ParallelConfig,
    speed: Speed,
    plan: ModelPlan | Plan = NO_PLAN,
    optimizer: OptimConfig | None = None,
    num_microbatches: int = 1,
) -> Chain:
    """The chain of a model's blocks in a step of a run in mode budget; its arguments are those of `estimate_step`.

    The levels are of the whole device: parameters, gradients, the optimizer's state. The model is left as it was.

    Raises UserError for what `parallelize` refuses, for a model without blocks, and where its forward does not call
    them one after another, once each.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UserError("recompute.mode=budget: the model has no list of blocks that could be computed again")
    single: Segments = ((1,),) * len(blocks)
    given = replace(model_plan(plan), recompute=single)
    with pretended(mesh_shape(mesh).size()):
        built = build_mesh(mesh, "cpu")
        with traced(built, speed) as account:
            try:
                spread = parallelize(without_memory(copy.deepcopy(model)), built, parallel, given)
                state = build_optimizer(optimizer or OptimConfig(), spread.masters)
                make_state(account, spread, state)
                chain = chain_of(spread.model)
                few = min(num_microbatches, 2)
                again = _steps_of(account, spread, chain, few, loss)
                again.least = _rest(account, spread, state, again)
                chain.follow((len(blocks),))
                whole = _steps_of(account, spread, chain, few, loss)
                whole.least = _rest(account, spread, state, whole)
            except RuntimeError as error:
                said = next(iter(str(error).splitlines()), "")
                raise UserError(
                    f"recompute.mode=budget: this model's step cannot be foreseen without values "
                    f"({type(error).__name__}: {said}); use --recompute.mode full, sqrt or recursive"
                ) from error
    return _chain(again, whole, len(blocks))


@dataclass
class _Event:
    """A mark: what begins with it and of which block, and what was before."""

    what: str
    block: int
    section: int
    flops: float
    seconds: float


@dataclass
class _Steps:
    """A step's microbatches, mark by mark.

    passed, held  by block, storages that it was handed, and that are there for others, too; -1: what the last one hands
                  on
    alive         bytes at each moment of each section
    """

    microbatches: list[list[_Event]] = field(default_factory=list)
    passed: dict[int, dict[int, int]] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    alive: list[list[int]] = field(default_factory=list)
    least: int = 0


def _steps_of(
    account: StepAccount,
    spread: ParallelModel,
    chain: RecomputedChain,
    num_microbatches: int,
    loss: Callable[[nn.Module], Tensor],
) -> _Steps:
    found, last = _Steps(), len(chain.blocks) - 1

    def mark(what: str, block: int) -> None:
        account.mark(Label(what, "chain", block))
        event = _Event(what, block, len(account.sections) - 1, account.flops, account.seconds)
        found.microbatches[-1].append(event)

    def observe(what: str, block: int, passed: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        if what == "begin" and len(found.microbatches) == 1:
            found.passed[block] = _storages(passed)
            found.held |= _storages(held)
        if what == "end":
            if block == last and len(found.microbatches) == 1:
                found.passed[-1] = _storages(passed)
            for tensor in passed:
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: mark("back", block))
        mark(what, block)

    def forward(_: int) -> Tensor:
        if found.microbatches:
            mark("over", -1)
        found.microbatches.append([])
        return loss(spread.model)

    account.begin()
    chain.observe = observe
    spread.run(range(num_microbatches), forward)
    mark("over", -1)
    chain.observe = None
    return found


def _storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    plain = (inner.untyped_storage() for tensor in tensors for inner in plain_tensors(tensor))
    return {id(storage): storage.nbytes() for storage in plain}


def _rest(account: StepAccount, spread: ParallelModel, optimizer: torch.optim.Optimizer, steps: _Steps) -> int:
    """The most that is alive where no block is at work; the step is done then."""
    spread.reduce()
    update(account, spread, optimizer)
    steps.alive = [section.alive_bytes for section in account.sections[:-1]]
    at_work = {
        section
        for events in steps.microbatches
        for section in range(_first(events, "begin", 0).section, _first(events, "over", -1).section)
    }
    return max(max(alive, default=0) for index, alive in enumerate(steps.alive) if index not in at_work)


def _first(events: list[_Event], what: str, block: int) -> _Event:
    found = next((event for event in events if (event.what, event.block) == (what, block)), None)
    if found is None:
        of = f"block {block} is not computed, or has no gradient" if block >= 0 else "a microbatch has no end"
        raise UserError(f"recompute.mode=budget: {of}; use --recompute.mode full, sqrt or recursive")
    return found


class _Levels:
    """The bytes of one microbatch's marks."""

    def __init__(self, steps: _Steps, events: list[_Event], num_blocks: int):
        self.alive, self.events = steps.alive, events
        order = [event.block for event in events if event.what == "begin"]
        if order != list(range(num_blocks)):
            raise UserError(
                "recompute.mode=budget: the model's forward does not call its blocks one after another, once each; use "
                "--recompute.mode full, sqrt or recursive"
            )

    def at(self, what: str, block: int) -> int:
        return self.alive[_first(self.events, what, block).section][0]

    def most(self, begin: tuple[str, int], *ends: tuple[str, int]) -> int:
        """Between a mark and the first of others, that of it included."""
        first = _first(self.events, *begin).section
        last = min(_first(self.events, *end).section for end in ends)
        return max(max(alive) for alive in self.alive[first:last])


def _chain(again: _Steps, whole: _Steps, num_blocks: int) -> Chain:
    blocks = range(num_blocks)
    inputs = [sum(n for key, n in again.passed[k].items() if key not in again.held) for k in blocks]
    output = sum(n for key, n in again.passed[-1].items() if key not in again.held)
    kept_inputs = list(accumulate(inputs))
    chains = [
        _of_microbatch(_Levels(again, one, num_blocks), _Levels(whole, other, num_blocks), inputs, kept_inputs, output)
        for one, other in zip(again.microbatches, whole.microbatches, strict=True)
    ]
    least = max(again.least, whole.least)
    fields = [name for name in vars(chains[0][0][0]) if name not in ("begins", "input")]
    found = []
    for k in blocks:
        most = {name: max(getattr(of[k], name) for of, _ in chains) for name in fields}
        linked = bool(again.passed[k])
        found.append(ChainBlock(input=inputs[k], begins=k > 0 and not linked, **most))
    return Chain(tuple(found), output, max(head for _, head in chains), least)


def _of_microbatch(
    one: _Levels, all_kept: _Levels, inputs: list[int], kept_inputs: list[int], output: int
) -> tuple[list[ChainBlock], int]:
    """The blocks, and what is alive beside them while the head runs."""
    last = len(inputs) - 1
    first = [one.at("begin", k) - kept_inputs[k] for k in range(last + 1)]
    head = one.most(("end", last), ("ask", last)) - kept_inputs[last] - output
    before = [all_kept.at("begin", k) - first[k] for k in range(last + 1)]
    before.append(all_kept.most(("end", last), ("back", last)) - head)  # what all have kept
    found = []
    for k in range(last + 1):
        following = ("ask", k - 1) if k else ("over", -1)
        following_kept = ("back", k - 1) if k else ("over", -1)
        kept = before[k + 1] - before[k]
        ask, filled, back = one.at("ask", k), one.at("filled", k), all_kept.at("back", k)
        begin = _first(one.events, "begin", k), _first(one.events, "end", k)
        again = _first(one.events, "ask", k), _first(one.events, "filled", k)
        found.append(
            ChainBlock(
                input=inputs[k],
                first=first[k],
                again=ask - kept_inputs[k],
                back=back - before[k + 1],
                dropping_peak=one.most(("begin", k), ("end", k)) - one.at("begin", k),
                keeping_peak=all_kept.most(("begin", k), ("end", k)) - all_kept.at("begin", k),
                kept=kept,
                backward_peak=all_kept.most(("back", k), following_kept) - back,
                refill_peak=one.most(("ask", k), ("filled", k)) - ask,
                refilled=filled - ask,
                refilled_peak=one.most(("filled", k), following) - filled,
                forward_s=begin[1].seconds - begin[0].seconds,
                refill_s=again[1].seconds - again[0].seconds,
                backward_s=_first(one.events, *following).seconds - again[1].seconds,
                forward_flops=begin[1].flops - begin[0].flops,
                refill_flops=again[1].flops - again[0].flops,
            )
        )
    return found, head
