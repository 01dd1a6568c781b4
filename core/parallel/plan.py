"""A plan says how a model is cut over a mesh axis: a dict from module-name pattern to style.

    PLAN: Plan = {
        "blocks.*.attention.qkv": colwise,
        "blocks.*.attention.out": rowwise,
    }

`*` stands for one part of a dotted name (or some of its letters), so a pattern has as many dots as what it matches.

A style is a function (module, axis) -> module; 2D, 2.5D and 3D tensor parallelism give it a mesh of several axes. It
turns the module's parameters into DTensors, or into local tensors that a `core.layout` describes (their names stay),
and wraps its forward in the collectives that its placements call for. A pattern that matches nothing is an error, so a
plan cannot silently do less than it says.
"""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from core.compat import own_part
from core.config import UserError
from core.layout import Layout, layout_of, tag

Style = Callable[[nn.Module, DeviceMesh], nn.Module]
Plan = dict[str, Style]


def apply_plan(model: nn.Module, plan: Plan, axis: DeviceMesh) -> nn.Module:
    """Apply each style to the modules whose dotted name matches its pattern, in the plan's order.

    Parameters that modules share (a tied head) stay shared.
    Raises UserError for a pattern that matches no module, for a shared parameter that is not cut alike by all who share
    it, and for whatever a style finds indivisible.
    """
    shared = [names for names in parameter_names(model) if len(names) > 1]
    for pattern, style in plan.items():
        names = [name for name, _ in model.named_modules() if matches(name, pattern)]
        if not names:
            known = ", ".join(list(dict(model.named_children()))[:8])
            raise UserError(f"the plan's pattern '{pattern}' matches no module; the model's modules are {known}, …")
        for name in names:
            styled = style(model.get_submodule(name), axis)
            if name:
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, styled)
    for first, *others in shared:
        parameter = model.get_parameter(first)
        for name in others:
            if _cuts(model.get_parameter(name)) != _cuts(parameter):
                raise UserError(
                    f"{first} and {name} are one parameter, and the plan cuts them differently; "
                    "give both modules styles that cut alike, or untie them"
                )
            set_parameter(model, name, parameter)
    return model


def matches(name: str, pattern: str) -> bool:
    """Does each dotted part of the name match that of the pattern?"""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _cuts(parameter: nn.Parameter) -> tuple[tuple, tuple]:
    layout = layout_of(parameter)
    return layout.cuts, layout.units


def parameter_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter: one, or several where modules share it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: what is sharded, recomputed and compiled by itself.

    They are what its method `repeated_blocks()` says, or else the elements of its outermost module lists; one that is
    listed twice is one block.
    """
    if hasattr(model, "repeated_blocks"):
        return list(dict.fromkeys(model.repeated_blocks()))  # pyright: ignore[reportCallIssue]
    blocks, inside = [], set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            blocks += list(module)
            inside |= {id(m) for m in module.modules()}
    return list(dict.fromkeys(blocks))


def check_trained(model: nn.Module) -> None:
    """Raises UserError for a parameter that is to be trained and is not of floating numbers."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise UserError(
                f"parameter {name} is of {str(parameter.dtype).removeprefix('torch.')}, which no mode trains; keep its "
                "real and imaginary part as a parameter of floats (torch.view_as_real), or freeze it"
            )


def set_parameter(model: nn.Module, name: str, value: nn.Parameter | None) -> None:
    """Put `value` where the parameter of that dotted name stands; None: it is gone, and its module stays."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path).register_parameter(leaf, value)


def shard_parameter(module: nn.Module, name: str, axis: DeviceMesh, placement: Placement) -> None:
    """Make a parameter a DTensor on the axis; each rank keeps its own part of the full value."""
    parameter = module.get_parameter(name)
    # Every rank has (or will draw) the same full value, so nothing is sent.
    sharded = distribute_tensor(parameter.data, axis, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def cut_parameter(module: nn.Module, name: str, layout: Layout) -> None:
    """Make a parameter the local tensor of a layout of it; each rank keeps its own part of the full value."""
    parameter = module.get_parameter(name)
    own = layout.local(parameter.detach()).clone(memory_format=torch.contiguous_format)
    made = nn.Parameter(own, requires_grad=parameter.requires_grad)
    tag(made, layout)
    module.register_parameter(name, made)


def mark_partial(module: nn.Module, axes: DeviceMesh) -> None:
    """Note that the gradients of the module's own parameters are partial sums over the axes.

    Data parallelism all-reduces them, all in one message an axis, when the backward has ended.
    """
    names = axes.mesh_dim_names
    assert names is not None
    for parameter in module.parameters(recurse=False):
        mark_partial_parameter(parameter, names)


def mark_partial_parameter(parameter: nn.Parameter, axes: Iterable[str]) -> None:
    """The same for one parameter."""
    marked = getattr(parameter, "partial_over", ())
    parameter.partial_over = (*marked, *(a for a in axes if a not in marked))  # pyright: ignore[reportAttributeAccessIssue]


def partial_parameters(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """name -> axes of every parameter that `mark_partial` marked."""
    return {n: p.partial_over for n, p in model.named_parameters() if hasattr(p, "partial_over")}  # pyright: ignore[reportAttributeAccessIssue]


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
                module.__dict__[name] = _ToLocal.apply(parameter)
        try:
            out = inner(x, *args, **kwargs)
        finally:
            for name in stored:  # … and leaves again, so that names and state stay.
                module.__dict__.pop(name, None)
        return after(out)

    module.forward = forward
    return module
