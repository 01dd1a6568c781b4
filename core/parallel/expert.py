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

On a grid (`on_grid`) both forms meet: the ranks of one of its rows gather the features of their tokens, route alike and
hold each a part of the hidden features; its rows, which see other sequences, hold different experts. So a rank has 1/P
of the experts and of their work, as of all else, and no weight travels: as products of the grid each expert's matrices
would, for however few tokens.

Bytes that leave a rank for one layer, forward and backward, of A rows sent and R received, w bytes an element:
2 (A + R) D w, and 8 E for the counts; a token's own rank among them, so a wire carries (ep - 1) / ep of it.

Lepikhin et al. 2020 (GShard), section 3.2; Rajbhandari et al. 2022 (DeepSpeed-MoE), section 5.

Shapes: B batch, L length, A and R rows, E experts, D model, F hidden, N ranks of the axis.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from core.comm.coded_rows import RowCode
from core.comm.collectives import all_gather, all_reduce, exchange_rows, gather_from, scatter_to
from core.config import UserError
from core.layout import even_shares, largest_share
from core.mesh import EXPERT_AXIS, AnyMesh, axis_size, joined_axis, whole_of
from core.parallel.context import ShardedContext
from core.parallel.grid import FIRST, Spread
from core.parallel.sequence import GATHER, SCATTER
from core.parallel.tensor1d import in_features
from core.placement.style import AXIS, Cut, Message, Messages, Site, Style
from core.trace.balanced import numbers


def require_experts(num_experts: int, ranks: int, axes: tuple[str, ...] = (EXPERT_AXIS,)) -> None:
    """Raises UserError where one of the ranks of the axes would hold no expert."""
    if num_experts >= ranks:
        return
    if axes == (EXPERT_AXIS,):
        raise UserError(
            f"{num_experts} experts leave a rank of mesh.ep={ranks} without any; use a mesh.ep of at most {num_experts}"
        )
    raise UserError(
        f"{num_experts} experts leave some of the {ranks} ranks without any over which a grid deals them out; use "
        f"a smaller mesh.tp{' or mesh.ep' if EXPERT_AXIS in axes else ''}, or --mesh.tp-mode 1d"
    )


def experts_held(num_experts: int, *sizes: int) -> list[int]:
    """How many experts each rank holds, dealt out over axes of these sizes one after the other."""
    held = [num_experts]
    for size in sizes:
        held = [share.stop - share.start for many in held for share in even_shares(many, size)]
    return held


def _exchanged(moe: Any, mesh: DeviceMesh, axes: tuple[str, ...] = (EXPERT_AXIS,)) -> nn.Module:
    root, experts = whole_of(mesh), moe.experts
    axis = joined_axis(root, axes)
    held = experts_held(experts.num_experts, *(axis_size(root, name) for name in axes))
    inner = experts.forward
    experts.row_code = None
    experts.forward = lambda x_AD, rows_E: exchanged(inner, x_AD, rows_E, held, axis, experts.row_code)
    return moe


def exchanged(
    inner: Callable[[Tensor, Tensor], Tensor],
    x_AD: Tensor,
    rows_E: Tensor,
    held: list[int],
    axis: DeviceMesh,
    code: RowCode | None = None,
) -> Tensor:
    """Rows by expert, through the experts of all ranks.

    inner  (rows that came here, by expert; how many each of the experts held here has) -> their results
    rows_E the rows of each expert; x may have more behind them, whose results are zeros
    held   experts of each rank
    code   of the rows on their way there and back
    """
    arriving_NE = _counts(rows_E, held, axis)
    sent, received = _splits(rows_E, held, arriving_NE, x_AD.shape[0])
    filling = x_AD.shape[0] - sum(sent)
    x_RD = exchange_rows(x_AD[: sum(sent)], sent, received, axis, code)
    order_R = _by_expert(arriving_NE, sum(received))
    y_RD = inner(x_RD.index_select(0, order_R), arriving_NE.sum(0))
    y_AD = exchange_rows(y_RD.index_select(0, order_R.argsort()), received, sent, axis, code)
    return nn.functional.pad(y_AD, (0, 0, 0, filling)) if filling else y_AD


def code_rows(model: nn.Module, code: RowCode) -> None:
    """Send so what the experts of a model exchange, where parts of it do."""
    for module in model.modules():
        if "row_code" in vars(module):
            vars(module)["row_code"] = code


def _counts(rows_E: Tensor, held: list[int], axis: DeviceMesh) -> Tensor:
    """int64[N, experts held here]: the rows that each rank has for each of this rank's experts."""
    own = rows_E.split(held)[axis.get_local_rank()]
    mine, arriving = len(own), own.repeat(axis.size())  # of ranks that do not exist: what this one has
    dist.all_to_all_single(arriving, rows_E.contiguous(), [mine] * axis.size(), held, group=axis.get_group())
    return arriving.view(axis.size(), mine)


def _splits(rows_E: Tensor, held: list[int], arriving_NE: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
    """Rows to each rank, and from each; one wait for the device.  num_rows: of all, if loads are balanced"""
    leaving_N = torch.stack([rows.sum() for rows in rows_E.split(held)])
    both = numbers(torch.stack([leaving_N, arriving_NE.sum(1)], 1).flatten(), 2 * num_rows)
    return both[::2], both[1::2]


def _by_expert(arriving_NE: Tensor, num_rows: int) -> Tensor:
    """The rows' places, those of one expert after those of another, where they came rank by rank."""
    ranks, experts = arriving_NE.shape
    expert_R = torch.arange(experts, device=arriving_NE.device).repeat(ranks)
    expert_R = expert_R.repeat_interleave(arriving_NE.flatten(), output_size=num_rows)
    return expert_R.argsort(stable=True)


def messages(rows: Callable[[Site], float], num_experts: Callable[[Site], int], axis: str = EXPERT_AXIS) -> Messages:
    """Closed forms of a layer's: elements of its rows, both ways, and counts."""
    both_ways = Message("all_to_all", rows, axis, width="exchanged")
    counts = Message("all_to_all", num_experts, axis, width=8)
    return Messages((both_ways, counts), (both_ways,))


def _messages(tokens: Callable[[Site], int], axes: tuple[str, ...] = (EXPERT_AXIS,)) -> Messages:
    """Those of our layer, where loads are balanced: as many rows come back as a rank sends away."""

    def both_ways(site: Site) -> float:
        config = site.module.config
        return 2 * tokens(site) * config.per_token * min(1.0, config.capacity) * in_features(site)

    return messages(both_ways, lambda site: site.module.experts.num_experts, "+".join(axes))


expert_parallel = Style(
    cuts={"experts.**": Cut(0, EXPERT_AXIS, even=True)},
    messages=_messages(lambda site: site.batch * site.length),
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


class RowsOfGrid:
    """Rows of a batch of which each row of a grid holds its own, whole (`core.nn.routing.Rows`).

    batch  what is known of them without the grid
    """

    def __init__(self, at: Spread, batch: Any):
        self.at, self.batch = at, batch

    def real(self, x_BLD: Tensor, mask: Tensor | None, context: Any) -> Tensor:
        real_BL = self.batch.real(x_BLD, None if mask is None else self.own(mask), context)
        auxiliary = getattr(context, "auxiliary", None)
        if auxiliary is None:
            return real_BL
        return real_BL & self.own(torch.ones_like(auxiliary.weight_B, dtype=torch.bool))[:, None]

    def gather(self, x_BLE: Tensor, context: Any) -> Tensor:
        return self.batch.gather(x_BLE, context)

    def take(self, x_BSE: Tensor, context: Any) -> Tensor:
        return self.batch.take(x_BSE, context)

    def total(self, x_BE: Tensor) -> Tensor:
        return self.batch.total(x_BE)

    def own(self, x_B: Tensor) -> Tensor:
        return self.at.batch(x_B)

    def of_batch(self, x: Tensor) -> Tensor:
        for axis in self.at.row_axes:
            x = all_reduce(x, axis)
        return x


def _on_grid(moe: Any, mesh: DeviceMesh, axes: tuple[str, ...]) -> nn.Module:
    at, dim = Spread(mesh), moe.router.weight.shape[1]
    columns = at.columns(dim)
    width, most = columns[at.col].stop - columns[at.col].start, columns[0].stop
    _exchanged(moe, mesh, axes)
    if moe.experts.down.bias is not None:
        moe.experts.down.bias_share = 1 / at.col_axis.size()
    moe.share = 1 / at.col_axis.size()
    moe.rows = RowsOfGrid(at, moe.rows)
    inner, axis = moe.forward, at.col_axis

    def forward(x: Tensor, *step: Any) -> Tensor:
        whole = gather_from(nn.functional.pad(x, (0, most - width)), 2, axis)[..., :dim]
        return scatter_to(inner(whole, *step), 2, axis)[..., :width]

    moe.forward = forward
    return moe


def on_grid(axes: tuple[str, ...] = FIRST.rows) -> Style:
    """A MoE layer on a grid.  x[B_rows, L, D_cols] -> y[B_rows, L, D_cols].

    axes  over which experts are dealt out: the grid's rows, behind the mesh's ep axis where it has one

    The router is repeated; of its gradient a rank has what its tokens and features give. The closed forms are of
    balanced loads, without what routers tell each other.
    """

    def whole(site: Site) -> int:
        return FIRST.tokens(site) * site.size(FIRST.cols) * largest_share(in_features(site), site.size(FIRST.cols))

    def size_of(mesh: AnyMesh) -> int:
        return math.prod(axis_size(mesh, axis) for axis in axes)

    gather, scatter = (Message(operation, whole, FIRST.cols) for operation in ("all_gather", "reduce_scatter"))
    return Style(
        cuts={
            pattern: (*(Cut(0, axis, even=True) for axis in axes), *features)
            for pattern, features in {
                "experts.up.*": (Cut(1, FIRST.cols),),
                "experts.gate.*": (Cut(1, FIRST.cols),),
                "experts.down.weight": (Cut(2, FIRST.cols),),
                "experts.down.bias": (),
            }.items()
        },
        partial={"experts.down.bias": (FIRST.cols,), "router.weight": (*FIRST.rows, FIRST.cols)},
        inputs=FIRST.lies(),
        outputs=FIRST.lies(),
        messages=Messages((gather, scatter), (scatter, gather)) + _messages(FIRST.tokens, axes),
        refuse=lambda moe, mesh, axis: require_experts(moe.experts.num_experts, size_of(mesh), axes),
        wrap=lambda moe, mesh: _on_grid(moe, mesh, axes),
        is_local=True,
    )


class SharedRows:
    """Rows of a batch of which the ranks of a cp axis hold parts (`core.nn.routing.Rows`).

    batch  what is known of the rows without that
    """

    def __init__(self, axis: DeviceMesh, batch: Any):
        self.axis, self.rank, self.batch = axis, axis.get_local_rank(), batch

    def real(self, x_BLD: Tensor, mask: Tensor | None, context: ShardedContext) -> Tensor:
        cut, whole = context.cut, context.mask_BL
        if whole is not None:
            return self.batch.real(x_BLD, cut.take(whole.bool(), 1, self.rank), context)
        places_1L = torch.ones(1, cut.length, dtype=torch.bool, device=x_BLD.device)
        return self.batch.real(x_BLD, None, context) & cut.take(places_1L, 1, self.rank)

    def gather(self, x_BLE: Tensor, context: ShardedContext) -> Tensor:
        as_numbers = x_BLE.to(torch.uint8) if x_BLE.dtype == torch.bool else x_BLE
        return context.cut.join(list(all_gather(as_numbers[None], 0, self.axis)), 1)

    def take(self, x_BSE: Tensor, context: ShardedContext) -> Tensor:
        return context.cut.take(x_BSE, 1, self.rank)

    def total(self, x_BE: Tensor) -> Tensor:
        return all_reduce(x_BE, self.axis)

    def own(self, x_B: Tensor) -> Tensor:
        return self.batch.own(x_B)

    def of_batch(self, x: Tensor) -> Tensor:
        return self.batch.of_batch(x)


def _shared_rows(moe: Any, axis: DeviceMesh) -> nn.Module:
    moe.rows = SharedRows(axis, moe.rows)
    return moe


share_rows = Style(inputs={AXIS: Shard(1)}, outputs={AXIS: Shard(1)}, wrap=_shared_rows)
"""A MoE layer on x[B, L_cp, D]: tokens have room, and loads are balanced, by whole rows.

What routers tell each other of the rows, a few numbers a row and expert, has no closed form here.
"""
