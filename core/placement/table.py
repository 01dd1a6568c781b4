"""The table that a plan makes of a model's parameters, name -> where it lies; and the one function that makes it so.

    table = placement(model_on_meta, ModelPlan(tensor=PLAN), MeshConfig(tp=8, dp_shard=512), zero=3)
    table["blocks.0.attention.qkv.weight"].layout         # the box that a forward has
    table["blocks.0.attention.qkv.weight"].master         # the box that the optimizer updates

No process group is asked, so a table of any number of ranks can be made anywhere; on ranks it is made of their mesh,
and its layouts then know their groups. Who wants to know where a tensor lies reads it here: data parallelism, ZeRO,
Gemini, the estimator, refusals. Tensors of their own (masters, optimizer state) carry the layout of their row, because
optimizers and checkpoints are handed tensors: `core.layout.tag`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from core.config import UserError
from core.layout import Layout, is_dtensor, largest_share, layout_of, local, tag
from core.mesh import (
    EXPERT_AXIS,
    AnyMesh,
    MeshConfig,
    Zero,
    axis_size,
    mesh_shape,
    shard_axes,
    sub_mesh,
    tensor_names,
)
from core.placement.stages import PipelinePlan, StageSplit
from core.placement.style import Plan, matched

Transforms = Mapping[str, Callable[[Any], Any]]
"""Module pattern -> (module) -> anything: changes the module in place."""


@dataclass(frozen=True)
class ModelPlan:
    """The plan, beside a model, of how it is spread and how it computes.

    tensor     its tensor parallelism, of the mesh's tp_mode; without one tp must be one rank
    context    its context parallelism; without one the cp axis must have one rank
    experts    its expert parallelism, of styles that are given the whole mesh; without one there is no ep axis
    pipeline   its blocks and what comes before them; without one the pp axis must have one rank
    kernels    what computes by other kernels; applied first, for a form may put its own in their place
    precision  what computes in other formats; applied to what the forms of parallelism have left
    recompute  the segments of its blocks (`core.trace.segments`), where recompute.mode is budget
    """

    tensor: Plan | None = None
    context: Plan | None = None
    experts: Plan | None = None
    pipeline: PipelinePlan | None = None
    kernels: Transforms = field(default_factory=dict)
    precision: Transforms = field(default_factory=dict)
    recompute: tuple[Any, ...] | None = None

    def steps(self, mesh: AnyMesh) -> Iterator[tuple[Plan, tuple[str, ...]]]:
        """(plan, the axes that it is applied over), in their order, of those that the mesh has several ranks for.

        Raises UserError for an axis of several ranks without a plan.
        """
        names = mesh.mesh_dim_names or ()
        for option, plan, axes, over, what in (
            ("tp", self.tensor, tensor_names(mesh), tensor_names(mesh), "say how the model's modules are cut"),
            ("cp", self.context, ("cp",), ("cp",), "say how the sequence is cut"),
            ("ep", self.experts, (EXPERT_AXIS,), names, "say which modules hold experts"),
            ("pp", self.pipeline, ("pp",), ("pp",), "say which modules are the model's blocks"),
        ):
            ranks = math.prod(axis_size(mesh, axis) for axis in axes if axis in names)
            if ranks == 1:
                continue
            if plan is None:
                raise UserError(f"mesh.{option}={ranks} without a plan: {what}, or use mesh.{option}=1")
            if not plan and option == "ep":
                raise UserError(
                    f"mesh.ep={ranks} and the model has no experts; use mesh.ep=1, or give model.moe.num_experts"
                )
            if not isinstance(plan, PipelinePlan):
                yield plan, over


NO_PLAN = ModelPlan()


def model_plan(plan: ModelPlan | Plan) -> ModelPlan:
    """A bare plan is of tensor parallelism."""
    return plan if isinstance(plan, ModelPlan) else ModelPlan(tensor=plan)


@dataclass(frozen=True)
class Placed:
    """A parameter's row of the table.

    layout    the box that forwards have, as the forms of parallelism other than data parallelism cut it
    master    the box that this rank's optimizer updates
    partial   axes of several ranks over which its gradient is a partial sum when the backward ends
    owners    ranks of the pp axis that hold it, its owner first
    names     all by which modules share it
    trained   whether it is updated
    is_local  a local tensor, not a DTensor, where it is cut
    whole     why ZeRO leaves it whole; empty where it does not
    """

    layout: Layout
    master: Layout
    partial: tuple[str, ...] = ()
    owners: tuple[int, ...] = (0,)
    names: tuple[str, ...] = ()
    trained: bool = True
    is_local: bool = False
    whole: str = ""

    def row_elements(self, ranks: int) -> int:
        """Elements of one of so many ranks' rows, over which ZeRO shards, with those that fill a ragged one."""
        if not (shape := self.layout.local_shape()):
            return 1
        dim = self.master.cuts[-1][1] if not self.whole else 0
        return largest_share(shape[dim], ranks) * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])


Table = dict[str, Placed]
"""Every name of every parameter; those that modules share have equal rows."""


def placement(
    model: nn.Module,
    plan: ModelPlan | Plan | None,
    mesh: MeshConfig | AnyMesh,
    zero: Zero = 0,
    *,
    stages: StageSplit | None = None,
    gemini: bool = False,
) -> Table:
    """The table of a model that a plan has not been applied to; it may lie on the meta device.

    plan    a bare one is of its tensor parallelism; None: the model lies as it is to lie
    mesh    a resolved config, a shape, or the mesh of this rank
    stages  which of its parameters the ranks of the pp axis have; None: all
    gemini  data parallelism is Gemini's, whose chunks are of rows

    Raises UserError for a pattern that matches no module, for a shared parameter that is not cut alike by all who share
    it, and for whatever a style finds indivisible.
    """
    mesh = mesh_shape(mesh) if isinstance(mesh, MeshConfig) else mesh
    table = parameter_table(model)
    for part, axes in () if plan is None else model_plan(plan).steps(mesh):
        table = cut_by(table, model, part, mesh, axes)
    return {name: _owned(row, mesh, zero, stages, gemini) for name, row in checked(table).items()}


def parameter_table(model: nn.Module) -> Table:
    """The table of a model as it lies, before plans and data parallelism."""
    table = {}
    for names in parameter_names(model):
        parameter = model.get_parameter(names[0])
        layout = layout_of(parameter)
        is_local, whole = bool(layout.cuts) and not is_dtensor(parameter), _unsharded(parameter)
        row = Placed(
            layout, layout, names=tuple(names), trained=parameter.requires_grad, is_local=is_local, whole=whole
        )
        table |= dict.fromkeys(names, row)
    return table


def parameter_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter: one, or several where modules share it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def cut_by(table: Table, model: nn.Module, plan: Plan, mesh: AnyMesh, axes: tuple[str, ...]) -> Table:
    """The table with what one plan adds to it."""
    table, axis = dict(table), axes[0] if len(axes) == 1 else ""
    for pattern, style in plan.items():
        for name in matched(model, pattern):
            module, prefix = model.get_submodule(name), f"{name}." if name else ""
            style.refuse(module, mesh, axis)
            for leaf, cuts in style.cuts_of(module).items():
                row = table[prefix + leaf]
                layout = row.layout
                for cut in cuts:
                    layout = layout.cut(mesh, cut.axis or axis, cut.dim, cut.unit, cut.even, cut.parts)
                is_local = row.is_local or style.is_local or any(cut.parts for cut in cuts)
                table[prefix + leaf] = replace(row, layout=layout, is_local=is_local)
            for leaf, over in style.partial_of(module).items():
                row = table[prefix + leaf]
                added = (a or axis for a in over)
                partial = dict.fromkeys((*row.partial, *(a for a in added if axis_size(mesh, a) > 1)))
                table[prefix + leaf] = replace(row, partial=tuple(partial))
    return table


def checked(table: Table) -> Table:
    """The table, in which names of one parameter have one row.  Raises UserError where they are cut differently."""
    found: Table = {}
    for name, row in table.items():
        first = table[row.names[0]]
        if _cuts_of(row) != _cuts_of(first):
            raise UserError(
                f"{row.names[0]} and {name} are one parameter, and the plan cuts them differently; "
                "give both modules styles that cut alike, or untie them"
            )
        partial = dict.fromkeys(axis for other in row.names for axis in table[other].partial)
        found[name] = replace(first, partial=tuple(partial))
    return found


def _cuts_of(row: Placed) -> tuple[Any, ...]:
    return row.layout.cuts, row.layout.units, row.layout.even, row.layout.parts


# --- data parallelism -------------------------------------------------------------------------------------------------


def _owned(row: Placed, mesh: AnyMesh, zero: Zero, stages: StageSplit | None, gemini: bool) -> Placed:
    owners = (0,) if stages is None else stages.holders(row.names)
    whole = row.whole
    if zero == 0:
        whole = "zero=0 keeps copies"
    elif zero < 3 and not gemini and not row.trained:
        whole = "nothing of it is updated"
    elif zero < 3 or gemini:
        whole = "" if row.layout.shape else row.whole
    elif row.is_local and 0 in row.layout.local_shape():
        whole = "this rank has no elements of it"
    master = row.layout if whole else shard_rows(row.layout, mesh, gemini)
    return replace(row, master=master, owners=owners, whole=whole)


def _unsharded(parameter: Tensor) -> str:
    """Why FSDP2, which cuts rows and casts what it gathers, leaves a parameter whole; empty where it does not."""
    for is_so, why in (
        (not parameter.ndim, "a scalar has no rows"),
        (not parameter.numel(), "it has no elements"),
        (not parameter.is_floating_point(), "its numbers are not floating"),
    ):
        if is_so:
            return why
    return ""


def shard_rows(layout: Layout, mesh: AnyMesh, gemini: bool = False) -> Layout:
    """A parameter's layout with the cut of ZeRO, over the ranks that hold copies of it."""
    axis = "+".join(shard_axes(mesh, layout.axes()))
    return layout.cut(mesh, axis, 0 if gemini else shard_dim(layout, axis_size(mesh, axis)))


def shard_dim(layout: Layout, ranks: int) -> int:
    """The dim of a parameter that `ranks` ranks share: 0, as FSDP2 does.

    Of a stack of fewer matrices than ranks the matrices' rows, where those divide evenly everywhere.
    """
    if len(layout.shape) < 3:
        return 0
    stacked, rows = (n // math.prod(layout.axis_size(a) for a, d in layout.cuts if d == dim)
                     for dim, n in enumerate(layout.shape[:2]))  # fmt: skip
    cut_rows = layout.shape[1] // rows if rows else 1
    return 1 if stacked < ranks and rows and layout.shape[1] % (cut_rows * ranks) == 0 else 0


def is_expert(row: Placed) -> bool:
    """Return whether expert parallelism deals a parameter out: fewer ranks hold copies of it."""
    return EXPERT_AXIS in row.layout.axes()


# --- from the table to the model --------------------------------------------------------------------------------------


def place(model: nn.Module, table: Table, mesh: Any) -> None:
    """Give each parameter of the model the box that its row says; each rank keeps its part of the full value.

    Names stay, and what modules share they go on sharing.
    """
    for names in parameter_names(model):
        row, parameter = table[names[0]], model.get_parameter(names[0])
        if len(row.layout.cuts) > len(layout_of(parameter).cuts):
            made = _local_part(parameter, row) if row.is_local else _dtensor(parameter, row, mesh)
            made.requires_grad_(parameter.requires_grad)
            for name in names:
                set_parameter(model, name, made)


def _local_part(parameter: nn.Parameter, row: Placed) -> nn.Parameter:
    before = layout_of(parameter)
    added = replace(row.layout, shape=before.local_shape(), cuts=row.layout.cuts[len(before.cuts) :])
    own = added.local(local(parameter.detach()))
    return tag(nn.Parameter(own.clone(memory_format=torch.contiguous_format)), row.layout)


def _dtensor(parameter: nn.Parameter, row: Placed, mesh: Any) -> nn.Parameter:
    from torch.distributed.tensor import Shard, distribute_tensor

    ((axis, dim),) = row.layout.cuts
    # Every rank has (or will draw) the same full value, so nothing is sent.
    axis_mesh = sub_mesh(mesh, axis) if mesh.mesh_dim_names else mesh
    return nn.Parameter(distribute_tensor(parameter.data, axis_mesh, [Shard(dim)], src_data_rank=None))


def set_parameter(model: nn.Module, name: str, value: nn.Parameter | None) -> None:
    """Put `value` where the parameter of that dotted name stands; None: it is gone, and its module stays."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path).register_parameter(leaf, value)
