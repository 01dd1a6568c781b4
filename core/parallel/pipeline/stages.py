"""The stages of a model on one rank, without a second forward.

`Stages` leaves every module in its place and takes the parameters away that no stage of this rank has, so names stay.
While a stage computes, everything before its first block is replaced by modules that give back what was received, and
the first block behind its last one by a module that ends the forward: what a model, a style or a loss does behind the
blocks belongs to the last stage, whatever it is. Ids, positions, masks and targets are known to every stage, because
the ranks of a pipeline read the same rows; only the tensor that blocks hand on travels, and with it what they add to
the loss otherwise (`Carried`), one number.

Called while no stage computes (an evaluation), the model is the whole model on every rank: the ranks take their stages
in turn, and all get what the last one returns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from core.config import UserError
from core.parallel.pipeline.schedule import SCHEDULES, PipelineConfig, owners
from core.placement.stages import PipelinePlan, StageSplit, split_by_cost, stage_ranges
from core.placement.table import parameter_names, set_parameter


def split_into_stages(model: nn.Module, plan: PipelinePlan, num_ranks: int, config: PipelineConfig) -> StageSplit:
    """Split the blocks into the stages of so many ranks.

    Raises UserError for a plan that does not fit the model, and for more stages than blocks.
    """
    num_blocks = len(blocks_of(model, plan))
    config.check_ranks(num_ranks)
    config.check_stages(num_ranks, num_blocks)
    owner_of = owners(config.schedule, num_ranks, config.chunks, config.replicas)
    split = config.split or split_by_cost(num_blocks, len(owner_of), plan.costs, config.replicas)
    return StageSplit(tuple(stage_ranges(split)), owner_of, plan, config.replicas)


def cut_into_stages(model: nn.Module, split: StageSplit, axis: DeviceMesh, config: PipelineConfig) -> "Stages":
    """Take from the model what other ranks of the axis have."""
    stages = Stages(model, split, axis.get_local_rank())
    for name in stages.shared:
        config.check_shared(name)
    if SCHEDULES[config.schedule].splits_backward:
        stages.note_ends()
    return stages


def blocks_of(model: nn.Module, plan: PipelinePlan) -> nn.ModuleList:
    """Raises UserError where the plan names what the model has not."""
    known = dict(model.named_modules())
    for name in (plan.blocks, *plan.before):
        if name not in known or (name == plan.blocks and not isinstance(known[name], nn.ModuleList)):
            children = ", ".join(list(dict(model.named_children()))[:8])
            raise UserError(
                f"the pipeline's plan names '{name}', which is no {'module' if name not in known else 'module list'} "
                f"of the model; the model's modules are {children}, …"
            )
    blocks = known[plan.blocks]
    assert isinstance(blocks, nn.ModuleList)
    return blocks


class StageEnd(Exception):
    """Raised where the forward of a stage ends that is not the last; carries what the next stage takes."""

    def __init__(self, activation: Any):
        super().__init__("the forward of this stage ends here")
        self.activation = activation


class Carried(Protocol):
    """A sum to the model's result that blocks add beside the tensor that they hand on, as routers of experts do.

    Blocks are given it as the `auxiliary` of an argument. See `core.nn.moe.AuxiliaryLoss`.
    """

    value: Tensor | None
    open: bool
    grad: Tensor | None


def _find_carried(*arguments: Any) -> Carried | None:
    found = (getattr(argument, "auxiliary", None) for argument in arguments)
    return next((carried for carried in found if carried is not None), None)


@dataclass
class _Input:
    """The activations that the computing stage goes on from, and what the stages before have added to the loss."""

    activation: Tensor | None = None
    added: Tensor | None = None
    carried: Carried | None = None


class _StandIn(nn.Module):
    """In the place of a module that does not compute; code around it still finds that module's attributes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["replaced"] = module  # not a child

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["replaced"], name)


class _Received(_StandIn):
    """In the place of what comes before a stage. A block's returns a tuple where blocks do, otherwise empty."""

    def __init__(self, module: nn.Module, given: _Input, tuple_size: int) -> None:
        super().__init__(module)
        self.given, self.tuple_size = given, tuple_size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = self.given
        if given.carried is None and (carried := _find_carried(*args, *kwargs.values())) is not None:
            given.carried, carried.value = carried, None if given.added is None else given.added.view(())
        return (given.activation, *[None] * (self.tuple_size - 1)) if self.tuple_size else given.activation


class _End(_StandIn):
    """In the place of the block behind a stage."""

    def __init__(self, module: nn.Module, given: _Input) -> None:
        super().__init__(module)
        self.given = given

    def forward(self, activation: Any, *args: Any, **kwargs: Any) -> Any:
        carried = _find_carried(*args, *kwargs.values())
        if carried is not None:
            self.given.carried, carried.open = self.given.carried or carried, False
        raise StageEnd(activation)


@dataclass(frozen=True)
class _Slot:
    """A module that comes before the blocks, or a block, and what stands in its place while a stage computes."""

    parent: nn.Module
    leaf: str
    module: nn.Module
    received: _Received
    end: _End

    def put(self, module: nn.Module) -> None:
        self.parent._modules[self.leaf] = module


class Stages:
    """The parts of `model` that this rank has, and the switch between them.

    owners     rank (on the pp axis) of each stage, of several the first
    ranges     blocks of each stage
    own        the stages of this rank
    current    the stage that computes; None: none
    entrance   the tensor that its blocks go on from, as far as the backward needs it
    exit       what the last block returns, and the copy that the rest of the forward takes; None but for `note_ends`
    shared     name -> the ranks that hold it, owner first, of the parameters that stages of several ranks share
    """

    def __init__(self, model: nn.Module, split: StageSplit, rank: int):
        self.model, self.split, self.rank = model, split, rank
        self.owners, self.ranges, self.own = split.owners, split.ranges, split.own(rank)
        self.blocks = blocks_of(model, split.plan)
        self.current: int | None = None
        self.entrance: Tensor | None = None
        self.exit: tuple[Tensor, Tensor] | None = None
        self._given = _Input()
        self._slots = self._find_slots()
        self.shared: dict[str, list[int]] = {}
        self._drop_what_others_have()
        self._inner = model.forward
        model.forward = self._forward
        self.evaluate: Callable[..., Any] | None = None

    @property
    def num_stages(self) -> int:
        return len(self.owners)

    def _find_slots(self) -> list[_Slot]:
        """Those before the blocks, and the blocks."""
        plan, found = self.split.plan, []
        blocks = [f"{plan.blocks}.{index}" for index in range(len(self.blocks))]
        for name in (*plan.before, *blocks):
            parent, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(name)
            received = _Received(module, self._given, plan.tuple_size if name in blocks else 0)
            end = _End(module, self._given)
            found.append(_Slot(self.model.get_submodule(parent), leaf, module, received, end))
        return found

    def _drop_what_others_have(self) -> None:
        """Parameters of other ranks' stages; and the buffers of modules that have lost their parameters."""
        for names in parameter_names(self.model):
            holders = list(self.split.holders(names))
            if len(self.split.stages_with(names)) > 1 and len(holders) > 1:
                self.shared[names[0]] = holders
            if self.rank not in holders:
                for name in names:
                    self._drop(name)

    def _drop(self, name: str) -> None:
        """Take a parameter away; a tensor of its shape and format, without its memory, stays for who asks for those."""
        path, _, leaf = name.rpartition(".")
        module, parameter = self.model.get_submodule(path), self.model.get_parameter(name)
        set_parameter(self.model, name, None)
        module.__dict__[leaf] = parameter.detach().new_empty(()).expand(parameter.shape)
        module._buffers.clear()

    def note_ends(self) -> None:
        """Note, for a backward in two parts, the ends of the graph on the first and the last stage.

        From now on `entrance` is also known on the first, where it is what the first block is given; and on the last
        what lies behind the blocks is a graph of its own, from `exit`'s copy to the loss: the head's forward has made
        its gradients already, so there is nothing to put off.
        """

        def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
            if self.current == 0 and args and isinstance(args[0], Tensor):
                self.entrance = args[0]

        def leave(_: nn.Module, __: Any, out: Any) -> Any:
            if self.current != self.num_stages - 1 or not torch.is_grad_enabled():
                return out
            first, *rest = out if self.split.plan.tuple_size else (out,)
            self.exit = check_activation(first), first.detach().requires_grad_()
            return (self.exit[1], *rest) if self.split.plan.tuple_size else self.exit[1]

        self.blocks[0].register_forward_pre_hook(enter)
        self.blocks[-1].register_forward_hook(leave)

    @contextmanager
    def computing(self, stage: int, received: Tensor | None, added: Tensor | None = None) -> Iterator[None]:
        """The model is this stage, and goes on from `received`, the activations of the one before.

        added  to the loss by the stages before
        """
        assert self.current is None, f"stage {self.current} is computing"
        blocks, first_block = self.ranges[stage], len(self.split.plan.before)
        self.current, self.entrance = stage, received
        self._given.activation, self._given.added = received, added
        for index, slot in enumerate(self._slots):
            if stage > 0 and index < first_block + blocks.start:
                slot.put(slot.received)
            elif index == first_block + blocks.stop:
                slot.put(slot.end)
        try:
            yield
        finally:
            for slot in self._slots:
                slot.put(slot.module)
            self.current = self.entrance = self.exit = None
            self._given.activation = self._given.added = self._given.carried = None

    @property
    def carried(self) -> Carried | None:
        """The sum that the computing stage's blocks added to, once its forward is over."""
        return self._given.carried

    def start_again(self) -> None:
        """Have the computing stage's next forward begin as this one did, from the same that was received."""
        self._given.carried = None

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.current is None:
            assert self.evaluate is not None
            return self.evaluate(*args, **kwargs)
        return self.compute(*args, **kwargs)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the current stage: activations for the next one, or what the model returns."""
        try:
            return self._inner(*args, **kwargs)
        except StageEnd as end:
            return end.activation

    def leave_before_the_loss(self) -> None:
        """Let a call of the model end in `StageEnd`, from now on, where its stage is not the last.

        To be called when all other hooks of the model are registered: they see the forward return.
        """

        def leave(_: nn.Module, __: Any, out: Any) -> None:
            if self.current is not None and self.current < self.num_stages - 1:
                raise StageEnd(out)

        self.model.register_forward_hook(leave)


def check_activation(activation: Any) -> Tensor:
    """Raises UserError unless the blocks hand on one floating tensor."""
    if not isinstance(activation, Tensor) or not activation.is_floating_point():
        raise UserError(
            f"a block hands on a {type(activation).__name__}; a pipeline needs blocks that take and return one "
            "floating tensor, so use mesh.pp=1 for this model"
        )
    return activation
