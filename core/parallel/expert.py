"""Expert parallelism: the ranks of the ep axis hold different experts, and send each other the tokens that they take.

    rows[A, D] by expert -> all-to-all -> rows of the experts held here -> by expert -> MLPs -> all-to-all -> rows[A, D]

`expert_parallel`, a style for a block's `core.nn.moe.MoE`. The ranks of the axis see different data, as data-parallel
ranks do; all but the experts' weights is replicated over them.

1. Every rank tells each other how many rows it has for each of its experts: one all-to-all of E counts. This is the one
   place where the host waits for the device.
2. The rows travel, as many as there are; they come ordered by rank, then by expert, and are put in order by expert.
3. The experts, and the same way back. The backward sends the gradients along the same ways.

A rank that sends nothing, or whose experts receive nothing, takes part in every one of these collectives, forward and
backward: with empty messages. (Its products are empty, but they are in the graph: see `core.nn.experts`.)

An expert's weights get the gradient of the rows of all ranks of the axis, so what is left to add up are the sums of
those ranks that hold copies: on the data axes, at the same place of ep. `core.parallel.data` reads it off the layout.

Under tensor parallelism (`tensor_parallel`) a rank holds the same hidden features of all its experts: the ranks of tp
route the whole sequence alike, exchange it each over an ep axis of their own, and scatter the sums of what comes back.
Under context parallelism (`share_rows`) ranks hold parts of rows; routers see what they must know of the others.

Bytes that leave a rank for one layer, forward and backward, of A rows sent and R received, w bytes an element:
2 (A + R) D w, and 8 E for the counts; a token's own rank among them, so a wire carries (ep - 1) / ep of it.

Lepikhin et al. 2020 (GShard), section 3.2; Rajbhandari et al. 2022 (DeepSpeed-MoE), section 5.

Shapes: B batch, L length, A and R rows, E experts, D model, F hidden, N ranks of the axis.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from core.comm.collectives import all_gather, all_reduce, exchange_rows
from core.config import UserError
from core.layout import even_shares
from core.mesh import EXPERT_AXIS, axis_size, sub_mesh
from core.parallel.context import ShardedContext
from core.parallel.sequence import GATHER, SCATTER
from core.parallel.tensor1d import in_features
from core.placement.style import AXIS, Cut, Message, Messages, Site, Style


def require_experts(num_experts: int, ep: int) -> None:
    """Raises UserError where a rank of the ep axis would hold no expert."""
    if num_experts < ep:
        raise UserError(
            f"{num_experts} experts leave a rank of mesh.ep={ep} without any; use a mesh.ep of at most {num_experts}"
        )


def _exchanged(moe: Any, mesh: DeviceMesh) -> nn.Module:
    axis, experts = sub_mesh(mesh, EXPERT_AXIS), moe.experts
    held = experts_held(experts.num_experts, axis.size())
    inner = experts.forward
    experts.forward = lambda x_AD, rows_E: exchanged(inner, x_AD, rows_E, held, axis)
    return moe


def experts_held(num_experts: int, ranks: int) -> list[int]:
    """How many experts each rank holds."""
    return [share.stop - share.start for share in even_shares(num_experts, ranks)]


def exchanged(
    inner: Callable[[Tensor, Tensor], Tensor], x_AD: Tensor, rows_E: Tensor, held: list[int], axis: DeviceMesh
) -> Tensor:
    """Rows by expert, through the experts of all ranks.

    inner  (rows that came here, by expert; how many each of the experts held here has) -> their results
    rows_E the rows of each expert; x may have more behind them, whose results are zeros
    held   experts of each rank
    """
    arriving_NE = _counts(rows_E, held, axis)
    sent, received = _splits(rows_E, held, arriving_NE)
    filling = x_AD.shape[0] - sum(sent)
    x_RD = exchange_rows(x_AD[: sum(sent)], sent, received, axis)
    order_R = _by_expert(arriving_NE, sum(received))
    y_RD = inner(x_RD.index_select(0, order_R), arriving_NE.sum(0))
    y_AD = exchange_rows(y_RD.index_select(0, order_R.argsort()), received, sent, axis)
    return nn.functional.pad(y_AD, (0, 0, 0, filling)) if filling else y_AD


def _counts(rows_E: Tensor, held: list[int], axis: DeviceMesh) -> Tensor:
    """int64[N, experts held here]: the rows that each rank has for each of this rank's experts."""
    own = rows_E.split(held)[axis.get_local_rank()]
    mine, arriving = len(own), own.repeat(axis.size())  # of ranks that do not exist: what this one has
    dist.all_to_all_single(arriving, rows_E.contiguous(), [mine] * axis.size(), held, group=axis.get_group())
    return arriving.view(axis.size(), mine)


def _splits(rows_E: Tensor, held: list[int], arriving_NE: Tensor) -> tuple[list[int], list[int]]:
    """Rows to each rank, and from each; one wait for the device."""
    leaving_N = torch.stack([rows.sum() for rows in rows_E.split(held)])
    both = torch.cat([leaving_N, arriving_NE.sum(1)]).tolist()
    return both[: len(held)], both[len(held) :]


def _by_expert(arriving_NE: Tensor, num_rows: int) -> Tensor:
    """The rows' places, those of one expert after those of another, where they came rank by rank."""
    ranks, experts = arriving_NE.shape
    expert_R = torch.arange(experts, device=arriving_NE.device).repeat(ranks)
    expert_R = expert_R.repeat_interleave(arriving_NE.flatten(), output_size=num_rows)
    return expert_R.argsort(stable=True)


def _balanced(site: Site) -> float:
    """Elements of the rows that a rank sends away, where loads are balanced: as many as come back."""
    config = site.module.config
    return site.batch * site.length * config.per_token * min(1.0, config.capacity) * in_features(site)


def _both_ways(site: Site) -> float:
    return 2 * _balanced(site)


def messages(rows: Callable[[Site], float], num_experts: Callable[[Site], int]) -> Messages:
    """Closed forms of a layer's: elements of its rows, both ways, and counts."""
    both_ways = Message("all_to_all", rows, EXPERT_AXIS)
    counts = Message("all_to_all", num_experts, EXPERT_AXIS, width=8)
    return Messages((both_ways, counts), (both_ways,))


expert_parallel = Style(
    cuts={"experts.**": Cut(0, EXPERT_AXIS, even=True)},
    messages=messages(_both_ways, lambda site: site.module.experts.num_experts),
    refuse=lambda moe, mesh, axis: require_experts(moe.experts.num_experts, axis_size(mesh, EXPERT_AXIS)),
    wrap=_exchanged,
    is_local=True,
)
"""Deal out the experts of a MoE layer over the mesh's ep axis; it is given the whole mesh.

The closed forms are of balanced loads.
"""


def _features_of_all(moe: Any, axis: DeviceMesh) -> nn.Module:
    if moe.experts.down.bias is not None:
        moe.experts.down.bias_share = 1 / axis.size()
    moe.share = 1 / axis.size()
    inner = moe.forward

    def forward(x: Tensor, *step: Any) -> Tensor:
        return SCATTER.move(inner(GATHER.move(x, axis), *step), axis)

    moe.forward = forward
    return moe


tensor_parallel = Style(
    cuts={"experts.up.*": Cut(1), "experts.gate.*": Cut(1), "experts.down.weight": Cut(2)},
    partial={"experts.down.bias": (AXIS,), "router.weight": (AXIS,)},
    inputs={AXIS: Shard(1)},
    outputs={AXIS: Shard(1)},
    messages=GATHER.messages(in_features) + SCATTER.messages(in_features),
    wrap=_features_of_all,
    is_local=True,
)
"""Shard the hidden features of all experts.  x[B, L_tp, D] -> y[B, L_tp, D], the sequence sharded in between.

Every rank routes the whole sequence; of the router's gradient it has what its part of the features gives.
"""


class SharedRows:
    """Rows of a batch of which the ranks of a cp axis hold parts (`core.nn.routing.Rows`)."""

    def __init__(self, axis: DeviceMesh):
        self.axis, self.rank = axis, axis.get_local_rank()

    def real(self, x_BLD: Tensor, mask: Tensor | None, context: ShardedContext) -> Tensor:
        whole = context.mask_BL
        if whole is None:
            whole = torch.ones(x_BLD.shape[0], context.cut.length, dtype=torch.bool, device=x_BLD.device)
        return context.cut.take(whole.bool(), 1, self.rank)

    def gather(self, x_BLE: Tensor, context: ShardedContext) -> Tensor:
        as_numbers = x_BLE.to(torch.uint8) if x_BLE.dtype == torch.bool else x_BLE
        return context.cut.join(list(all_gather(as_numbers[None], 0, self.axis)), 1)

    def take(self, x_BSE: Tensor, context: ShardedContext) -> Tensor:
        return context.cut.take(x_BSE, 1, self.rank)

    def total(self, x_BE: Tensor) -> Tensor:
        return all_reduce(x_BE, self.axis)


def _shared_rows(moe: Any, axis: DeviceMesh) -> nn.Module:
    moe.rows = SharedRows(axis)
    return moe


share_rows = Style(inputs={AXIS: Shard(1)}, outputs={AXIS: Shard(1)}, wrap=_shared_rows)
"""A MoE layer on x[B, L_cp, D]: tokens have room, and loads are balanced, by whole rows.

What routers tell each other of the rows, a few numbers a row and expert, has no closed form here.
"""
