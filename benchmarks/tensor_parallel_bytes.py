"""What tensor parallelism sends on a rank, by the styles' closed forms: (operation, axis) -> bytes of full messages.

A linear pair, and a whole step of the decoder on one data-parallel rank: forward, backward, and the sums of partial
gradients at its end. `core.comm.volume` counts the same.
"""

import torch
from torch import nn

from core.mesh import MeshConfig, mesh_shape
from core.models.decoder import Decoder, DecoderConfig
from core.models.plan import tensor_parallel_plan
from core.placement.messages import Widths, microbatch_bytes, partial_sum_bytes
from core.placement.style import Plan
from core.placement.table import ModelPlan, placement

Counts = dict[tuple[str, str], int]


def pair_bytes(mesh: MeshConfig, plan: Plan, rows: int, inner: int, outer: int, itemsize: int) -> Counts:
    """Two linear layers `up` and `down`, x[rows, inner] -> [rows, outer] -> [rows, inner], without biases."""
    if mesh.tp == 1:
        return {}
    with torch.device("meta"):
        pair = nn.ModuleDict({"up": nn.Linear(inner, outer, False), "down": nn.Linear(outer, inner, False)})
    found = step_bytes(pair, plan, mesh, rows, 1, 0, itemsize)
    agreed = ("all_reduce", _all_ranks(mesh))
    return found | {agreed: found.get(agreed, 0) + used_bytes(2)}


def _all_ranks(mesh: MeshConfig) -> str:
    """The name under which messages among all ranks are counted: an axis's own, where it is the only one."""
    if mesh.tp_mode == "1d":
        return "tp"
    cut = [axis for axis, ranks in zip(("tp_depth", "tp_row", "tp_col"), mesh.grid, strict=True) if ranks > 1]
    return cut[0] if len(cut) == 1 else "world"


def used_bytes(parameters: int) -> int:
    """Of the message in which all ranks agree which parameters have a gradient: two marks of a byte each."""
    return 2 * parameters


def decoder_step_bytes(
    mesh: MeshConfig, config: DecoderConfig, batch: int, length: int, rank: int, itemsize: int
) -> Counts:  # fmt: skip
    """A step of the decoder on `rank`, its loss in one chunk and all sequences of one length and position."""
    with torch.device("meta"):
        model = Decoder(config)
    return step_bytes(model, tensor_parallel_plan(config, mesh.tp_mode), mesh, batch, length, rank, itemsize)


def step_bytes(
    model: nn.Module, plan: Plan, mesh: MeshConfig, batch: int, length: int, rank: int, itemsize: int
) -> Counts:  # fmt: skip
    here, whole = mesh_shape(mesh.resolve(mesh.tp), rank), ModelPlan(tensor=plan)
    sent = microbatch_bytes(model, whole, here, batch, length, Widths(itemsize, itemsize))
    return dict(sent + partial_sum_bytes(placement(model, whole, here), itemsize))
