"""Plans at work: modules get the parameters that the table says, and forwards the wrappers of their styles.

What a style and a plan are, and what a plan makes of a model without touching it, is in `core.placement`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from core.compat import own_part
from core.config import UserError
from core.placement.style import Plan, matched
from core.placement.table import checked, cut_by, parameter_table, place

RECOMPUTED = "recomputed_forward"
"""The attribute of a block whose forward is run again: its forward as it was."""


def apply_plan(model: nn.Module, plan: Plan, axis: DeviceMesh) -> nn.Module:
    """Cut the modules whose dotted names match, and wrap their forwards, in the plan's order.

    axis  the mesh that the plan is applied over, of one axis or those that its styles name

    Parameters that modules share (a tied head) stay shared. Raises UserError as `core.placement.table.placement` does.
    """
    axes = axis.mesh_dim_names or ("0",)
    place(model, checked(cut_by(parameter_table(model), model, plan, axis, axes)), axis)
    return wrap(model, plan, axis)


def wrap(model: nn.Module, plan: Plan, axis: DeviceMesh) -> nn.Module:
    """The second half of it: the forwards, of modules whose parameters are cut already."""
    for pattern, style in plan.items():
        for name in matched(model, pattern):
            styled = style.wrap(model.get_submodule(name), axis)
            if name:
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, styled)
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: what is sharded, recomputed and compiled by itself.

    They are what its method `repeated_blocks()` says, or else the elements of its outermost module lists; one that is
    listed twice is one block.
    """
    return [block for blocks in block_lists(model) for block in blocks]


def block_lists(model: nn.Module) -> list[list[nn.Module]]:
    """The same, list by list."""
    if hasattr(model, "repeated_blocks"):
        return [list(dict.fromkeys(model.repeated_blocks()))]  # pyright: ignore[reportCallIssue]
    lists, inside, known = [], set(), dict[nn.Module, None]()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            lists.append([block for block in dict.fromkeys(module) if block not in known])
            known |= dict.fromkeys(module)
            inside |= {id(m) for m in module.modules()}
    return lists


def check_trained(model: nn.Module) -> None:
    """Raises UserError for a parameter that is to be trained and is not of floating numbers."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise UserError(
                f"parameter {name} is of {str(parameter.dtype).removeprefix('torch.')}, which no mode trains; keep its "
                "real and imaginary part as a parameter of floats (torch.view_as_real), or freeze it"
            )


class _ToLocal(torch.autograd.Function):
    """DTensor parameter -> its local tensor; the local gradient becomes a DTensor of the same placements."""

    @staticmethod
    def forward(ctx, parameter):
        ctx.spec = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
        return own_part(parameter).view_as(own_part(parameter))

    @staticmethod
    def backward(ctx, grad):
        mesh, placements, shape, stride = ctx.spec
        return DTensor.from_local(grad, mesh, placements, run_check=False, shape=shape, stride=stride)


def to_local(parameter: Tensor) -> Tensor:
    """The local tensor of a DTensor parameter, for a forward; gradients go back to the parameter."""
    return _ToLocal.apply(parameter)  # pyright: ignore[reportReturnType]


def on_local_parameters(
    module: nn.Module,
    before: Callable[[Tensor], Tensor] = lambda x: x,
    after: Callable[[Tensor], Tensor] = lambda y: y,
    hide: tuple[str, ...] = (),
) -> nn.Module:
    """Let the module's forward see the local shards of its DTensor parameters, between two functions on activations.

    before  first argument -> first argument (the gather or copy that the style calls for)
    after   output -> output
    hide    parameters that the forward is to take for absent, because `after` applies them
    """
    inner = module.forward

    def forward(x: Tensor, *args, **kwargs) -> Tensor:
        x = before(x)
        stored = dict(module._parameters)
        # A module's parameter slot takes only parameters, so what the forward sees shadows it in the instance …
        for name, parameter in stored.items():
            if name in hide:
                module.__dict__[name] = None
            elif isinstance(parameter, DTensor):
                module.__dict__[name] = to_local(parameter)
        try:
            out = inner(x, *args, **kwargs)
        finally:
            for name in stored:  # … and leaves again, so that names and state stay.
                module.__dict__.pop(name, None)
        return after(out)

    module.forward = forward
    return module
