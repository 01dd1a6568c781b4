"""The messages of a microbatch under a plan, by closed forms: elements and bytes by operation and axis, for any rank.

`core.comm.volume` counts the same on ranks. Bytes are those of full messages, as there.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from core.mesh import AnyMesh, MeshConfig, axis_size, mesh_shape
from core.placement.style import Message, Plan, Site, matched
from core.placement.table import ModelPlan, Table, model_plan, placement

Sent = Counter[tuple[str, str]]
"""(operation, axis) -> bytes."""


@dataclass(frozen=True)
class Widths:
    """Bytes of an element in which the model computes, in which it adds up, and in which experts' rows are exchanged.

    exchanged  None: as the model computes
    """

    computing: int = 4
    wide: int = 4
    exchanged: float | None = None

    def of(self, message: Message) -> float:
        if message.width == "exchanged":
            return self.computing if self.exchanged is None else self.exchanged
        return message.width if isinstance(message.width, int) else getattr(self, message.width)


def microbatch_bytes(
    model: nn.Module,
    plan: ModelPlan | Plan,
    mesh: MeshConfig | AnyMesh,
    batch: int,
    length: int,
    widths: Widths = Widths(),
) -> Sent:
    """Forward and backward of one microbatch, without the reductions of data parallelism.

    model   before the plan is applied; it may lie on the meta device
    length  of a sequence; under context parallelism what a rank has of it
    """
    sent: Sent = Counter()
    for one in module_messages(model, plan, mesh, batch, length, widths):
        sent[one.key] += one.num_bytes
    return +sent


def microbatch_calls(
    model: nn.Module,
    plan: ModelPlan | Plan,
    mesh: MeshConfig | AnyMesh,
    batch: int,
    length: int,
    widths: Widths = Widths(),
) -> Sent:
    """The number of those messages that are not empty, for their latencies."""
    messages = module_messages(model, plan, mesh, batch, length, widths)
    return Counter(one.key for one in messages if one.num_bytes)


class ModuleMessage(NamedTuple):
    """A message of a module by its name, in the microbatch's forward or backward; key: (operation, axis)."""

    module: str
    is_forward: bool
    key: tuple[str, str]
    num_bytes: int


def module_messages(
    model: nn.Module,
    plan: ModelPlan | Plan,
    mesh: MeshConfig | AnyMesh,
    batch: int,
    length: int,
    widths: Widths = Widths(),
) -> Iterator[ModuleMessage]:
    """Those of `microbatch_bytes` one by one; of axes of one rank there are none."""
    plan, mesh = model_plan(plan), mesh_shape(mesh) if isinstance(mesh, MeshConfig) else mesh
    table = placement(model, plan, mesh)
    for part, axes in plan.steps(mesh):
        axis = axes[0] if len(axes) == 1 else ""
        for pattern, style in part.items():
            for name in matched(model, pattern):
                module, prefix = model.get_submodule(name), f"{name}." if name else ""
                layouts = {n: table[prefix + n].layout for n, _ in module.named_parameters(remove_duplicate=False)}
                site = Site(module, layouts, mesh, axis, batch, length)
                both = (True, style.messages.forward), (False, style.messages.backward)
                for is_forward, message in ((way, message) for way, messages in both for message in messages):
                    if axis_size(mesh, message.axis or axis) > 1:
                        num_bytes = round(widths.of(message) * message.elements(site))
                        key = message.operation, message.axis or axis
                        yield ModuleMessage(name, is_forward, key, num_bytes)


def partial_sum_bytes(table: Table, wide: int = 4) -> Sent:
    """The sums of partial gradients at the end of a step's backward: of this rank's part of what is updated."""
    sent: Sent = Counter()
    for name, row in table.items():
        if name == row.names[0] and row.trained:
            for axis in row.partial:
                sent["all_reduce", axis] += wide * math.prod(row.master.local_shape())
    return +sent
