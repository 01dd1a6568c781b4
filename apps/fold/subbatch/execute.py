"""Long sequences in the memory there is: the model's operations in slices, set from outside.

    plan = plan_subbatches(FoldJob(...), budget_bytes)    which operation in which slices (planner.py)
    apply_subbatches(model, plan.choices)                 from now on the model works so
    apply_subbatches(model, {})                           as it was

Results are those of the whole operations, to rounding: no sum changes its terms. Without gradients residuals are
added in place: what a module of the model is given as z or m is overwritten.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from apps.fold.model.features import Features
from apps.fold.model.folding import FoldingModel, Recycled
from apps.fold.model.structure import StructureModule
from apps.fold.subbatch.operations import OPERATIONS, Operation, operations_of
from apps.fold.subbatch.slices import Cuts, How, every, host_zeros

Choices = Mapping[str, How]


def apply_subbatches(model: nn.Module, choices: Choices, *, offload: bool = False, cuts: Cuts = every) -> None:
    """Do each operation as `choices` says by its name (`operations_of`); those without a choice as the model has it.

    offload  the pair representation lies in host memory; every operation has to have a choice
    cuts     which slices are computed; only a plan leaves some out

    Raises KeyError for a name that the model does not have.
    """
    known = {name for name, _, _ in operations_of(model)}
    for name in choices:
        if name not in known:
            raise KeyError(f"the model has no operation '{name}'; it has {', '.join(sorted(known))}")
    restore(model)
    for name, module, operation in operations_of(model):
        how = choices.get(name)
        if how is not None:
            wrap(module, operation, partial(_as_chosen, operation, how, cuts))
    if any(name.endswith("structure_module.attention") for name in choices):
        normalise_in_slices(model)
    if offload:
        offload_pairs(model)


def _as_chosen(
    operation: Operation, how: How, cuts: Cuts, module: nn.Module, whole: Callable[..., object], *given: object
) -> object:
    return operation.run(module, whole, how, cuts, *given)


def wrap(module: nn.Module, operation: Operation, run: Callable[..., object]) -> None:
    """Put `run(module, the method as it was, *arguments)` in the operation's slot."""
    setattr(module, operation.slot, _Sliced(run, module, as_the_model_has_it(module, operation.slot)))


def as_the_model_has_it(module: nn.Module, slot: str) -> Callable[..., object]:
    """The method of the slot without what wraps it; compiled, where it was (apps/fold/compiled.py)."""
    return module.__dict__.get("compiled", {}).get(slot) or getattr(type(module), slot).__get__(module)


def replace_method(module: nn.Module, slot: str, run: Callable[..., object]) -> None:
    """Let the module's method of that name be `run`, until `restore`; it takes what the method takes, by position."""
    module.__dict__[slot] = run


class _Sliced:
    """A wrapped method."""

    def __init__(self, run: Callable[..., object], module: nn.Module, original: Callable[..., object]):
        self.run, self.module, self.original = run, module, original

    def __call__(self, *arguments: object) -> object:
        return self.run(self.module, self.original, *arguments)


def normalise_in_slices(model: nn.Module) -> None:
    """Let the structure module's attention normalise the slices of z that it reads: no normalised copy of z."""
    for module in model.modules():
        if isinstance(module, StructureModule):
            replace_method(module.attention, "normalise", type(module.pair_norm).forward.__get__(module.pair_norm))
            replace_method(module.pair_norm, "forward", lambda z: z)


def restore(model: nn.Module) -> None:
    """The model as it was."""
    for module in model.modules():
        if isinstance(module, StructureModule):
            vars(module.pair_norm).pop("forward", None)
            vars(module.attention).pop("normalise", None)
        operation = OPERATIONS.get(type(module))
        if operation is not None:
            vars(module).pop(operation.slot, None)
        if isinstance(module, FoldingModel):
            vars(module).pop("nothing", None)


def offload_pairs(model: nn.Module, empty: Callable[..., Tensor] | None = None) -> None:
    """Let z begin, and so stay, in host memory.

    empty  (shape, dtype) -> zeros there; by default pinned where there is a GPU
    """
    empty = empty or host_zeros
    assert isinstance(model, FoldingModel)
    config = model.config

    def nothing(features: Features) -> Recycled:
        like, (B, N) = features.msa_BSNF, features.aatype_BN.shape
        row = like.new_zeros(B, N, config.msa_dim)
        pairs = empty((B, N, N, config.pair_dim), like.dtype)
        return Recycled(row, pairs, torch.zeros(B, N, 3, device=like.device))

    model.nothing = nothing
