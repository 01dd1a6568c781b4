"""One line: any module, spread over the ranks that there are, by the plan that takes the least time.

    model = core.auto.parallelize(model, {"input_ids": ids, "labels": ids})
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=ids, labels=ids).loss.backward()

1. The call is traced on tensors without memory (`core.trace.record`), made a problem (`core.auto.formulate`) and solved
   by the first rank, whose plan all take.
2. Parameters become DTensors under their own names, in the modules that have them, with the first rank's values: what
   reads `state_dict` or `parameters` goes on. Buffers stay whole.
3. The module's `forward` runs the plan (`core.auto.spread`), its backward as one function of autograd. The result is
   of the module's own type.
4. A call of another kind (other shapes, evaluation, other parameters that learn) is planned once more when it first
   comes, with the parameters as they lie.
5. With `stages` the graph is cut between blocks (`core.auto.stages`), and each stage's ranks hold and run its part
   alone (`core.auto.pipelined`).

What the backward begins with, the loss or all outputs, is whole and has a gradient; other outputs are whole, or
DTensors where the plan leaves them cut, and have none. Modules inside are not called any more: their hooks do not run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core.auto.costs import Link
from core.auto.exchange import ALIKE
from core.auto.machines import cluster_of, gpu_named
from core.auto.pipelined import STAGE, StagedForward
from core.auto.readable import SpreadStep
from core.auto.specs import MOST_AXES
from core.auto.spread import Options, SpecText, SpreadForward
from core.config import UserError, size_in_bytes
from core.mesh import device_of, sub_mesh
from core.runtime import launcher_mesh
from core.trace.machine import Speed, speed_of

ADAMW_STATE = 2.0
"""Bytes that AdamW keeps by byte of a parameter."""


def parallelize(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    *,
    mesh: DeviceMesh | Sequence[int] | None = None,
    stages: int | Sequence[int] = 1,
    microbatches: int = 1,
    loss: Callable[[Any], Any] | None = None,
    budget: str | int | None = None,
    links: Sequence[Link] | None = None,
    speed: Speed | None = None,
    state: float = ADAMW_STATE,
    input: Mapping[str, SpecText] | None = None,
    output: Mapping[str, SpecText] | None = None,
    node: Mapping[str, SpecText] | None = None,
) -> nn.Module:
    """The same module, which from now on computes on all ranks; a collective of all ranks.

    example_inputs  keyword arguments of the call that is planned, or its arguments; the whole batch, alike on every
                    rank, or DTensors of the mesh
    mesh            by default all ranks of the launcher: one axis, of several machines two; or the ranks of each axis,
                    such as (2, 4). With stages, of one of them, or a mesh whose first axis is called stage
    stages          into how many the module is cut between the blocks of its lists, or how many blocks each has; a rank
                    then has the parameters of its own alone
    microbatches    with stages: parts of the batch, by rows, that pass through them one after another, all forwards and
                    then all backwards. What a call returns is then the rows of all, so a loss is the caller's
    loss            output -> what the call returns instead, so that it is part of the plan
    budget          memory that a rank may take, such as "16GiB", or bytes; of a stage for one microbatch
    links, speed    of each axis, or one for all, and of a device; by default those of data sheets
    state           bytes that the optimizer keeps by byte of a parameter
    input, output   name -> spec, such as S0R or S(0)R, as which it comes and leaves: a whole input is cut, and an
                    output that is not whole is a DTensor
    node            name of an operator, or pattern of modules or parameters -> spec of its (first) output

    An optimizer is made afterwards: parameters are other tensors.

    Raises UserError where the module cannot be traced (with the line of its code), nothing fits the budget, a
    constraint cannot be kept, or ranks are given different inputs.
    """
    if isinstance(getattr(model, "forward", None), SpreadForward):
        raise UserError(f"{type(model).__name__} is parallelized already; its calls are planned as they come")
    num_stages = stages if isinstance(stages, int) else len(stages)
    constraints = {"input": dict(input or {}), "output": dict(output or {}), "node": dict(node or {})}
    _check_stages(num_stages, microbatches, constraints)
    mesh = _mesh(mesh, num_stages)
    inner = mesh if num_stages == 1 else sub_mesh(mesh, *(mesh.mesh_dim_names or ())[1:])
    options = Options(
        inner,
        loss,
        None if budget is None else size_in_bytes(budget, "budget"),
        _links(inner, links),
        speed or _speed(model, inner),
        state,
        constraints,
    )
    if num_stages == 1:
        forward = SpreadForward(model, options)
    else:
        forward = StagedForward(model, options, mesh, stages, microbatches)
    forward.begin(example_inputs)
    model.forward = forward
    model.register_load_state_dict_pre_hook(forward.cut_whole)
    return model


def plan_of(model: nn.Module) -> SpreadStep:
    """The plan of the call with which a module was parallelized, with stages that of this rank's; `plans_of` has those
    of all calls so far."""
    return plans_of(model)[0]


def plans_of(model: nn.Module) -> list[SpreadStep]:
    """Plans of a module's calls, in the order in which they first came.  Raises UserError where it has none."""
    if not isinstance(model.forward, SpreadForward):
        raise UserError(f"{type(model).__name__} has no plan; core.auto.parallelize makes one")
    return [step.plan for step in model.forward.steps.values()]


def _check_stages(num_stages: int, microbatches: int, constraints: Mapping[str, Mapping[str, Any]]) -> None:
    if num_stages < 1 or microbatches < 1:
        raise UserError(f"stages={num_stages} with microbatches={microbatches}; give positive numbers")
    if num_stages == 1 and microbatches > 1:
        raise UserError(
            f"microbatches={microbatches} pass through stages, and there is one; give stages, or leave it out"
        )
    if num_stages > 1:
        for name, given in constraints.items():
            if given:
                raise UserError(f"{name}={given} with stages={num_stages}: stages take no constraints; leave them out")


def _mesh(mesh: DeviceMesh | Sequence[int] | None, num_stages: int) -> DeviceMesh:
    """The given mesh, or one of the launcher's ranks."""
    if isinstance(mesh, DeviceMesh):
        return _checked(mesh, num_stages)
    whole = launcher_mesh()
    ranks = dist.get_world_size()
    if mesh is None and num_stages == 1:
        return whole
    if mesh is None:
        if ranks % num_stages:
            raise UserError(f"stages={num_stages} on {ranks} ranks: stages have alike many; give a divisor of {ranks}")
        mesh = (ranks // num_stages,)
    sizes = tuple(mesh)
    if not 1 <= len(sizes) <= MOST_AXES or min(sizes) < 1:
        raise UserError(f"mesh={sizes}: give the ranks of 1 to {MOST_AXES} axes")
    if num_stages * math.prod(sizes) != ranks:
        of = f"{num_stages} stages of " if num_stages > 1 else ""
        raise UserError(
            f"mesh={sizes}: {of}{math.prod(sizes)} ranks, and there are {ranks}; give axes whose ranks multiply to "
            f"{_factors(ranks // num_stages) if ranks % num_stages == 0 else ranks}"
        )
    names = ("x", "y", "z")[: len(sizes)]
    if num_stages > 1:
        sizes, names = (num_stages, *sizes), (STAGE, *names)
    return init_device_mesh(whole.device_type, sizes, mesh_dim_names=names)


def _factors(ranks: int) -> str:
    if all(ranks % n for n in range(2, math.isqrt(ranks) + 1)):
        return f"{ranks}, which is prime: ({ranks},)"
    return str(ranks)


def _checked(mesh: DeviceMesh, num_stages: int) -> DeviceMesh:
    names, most = mesh.mesh_dim_names, MOST_AXES + (num_stages > 1)
    if names is None or not 1 <= mesh.ndim <= most:
        raise UserError(f"the mesh {tuple(mesh.shape)}: give one of 1 to {most} axes, with mesh_dim_names")
    if mesh.size() != dist.get_world_size():
        raise UserError(f"the mesh has {mesh.size()} ranks of {dist.get_world_size()}; give one of all ranks")
    if num_stages > 1 and (names[0] != STAGE or mesh.shape[0] != num_stages or mesh.ndim < 2):
        raise UserError(
            f"the mesh {dict(zip(names, mesh.shape))} with stages={num_stages}: give one whose first axis is called "
            f"{STAGE} and has {num_stages} ranks, with one more behind it"
        )
    return mesh


def _links(mesh: DeviceMesh, links: Sequence[Link] | None) -> tuple[Link, ...]:
    """One for each axis."""
    if links is None:
        links = _known_links(mesh) if mesh.device_type == "cuda" else ALIKE
    if len(links) not in (1, mesh.ndim):
        raise UserError(f"{len(links)} links for a mesh of {mesh.ndim} axes; give one for each, or one for all")
    return tuple(links) * (mesh.ndim if len(links) == 1 else 1)


def _known_links(mesh: DeviceMesh) -> Sequence[Link]:
    try:
        cluster = cluster_of(gpu_named(torch.cuda.get_device_name()), mesh.size())
    except UserError:
        return ALIKE
    sizes = tuple(mesh.shape)
    strides = [torch.Size(sizes[axis + 1 :]).numel() for axis in range(mesh.ndim)]
    return [cluster.link(stride, size) for stride, size in zip(strides, sizes, strict=True)]


def _speed(model: nn.Module, mesh: DeviceMesh) -> Speed:
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    return speed_of(device_of(mesh), dtype)
