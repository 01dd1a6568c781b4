"""The product of rows with a matrix of their group's, as in experts of a mixture: y[a] = W[e] x[a] for a row a of e.

    dx[a] = W[e]^T dy[a],   dW[e] = sum over the rows a of e of dy[a] x[a]^T

Rows lie group by group; where each group ends is known on the device alone: for one product a group the host would
have to wait for it.

Two kernels, whose grids follow from shapes alone:

    1. `_group_rows` makes y, and dx with the weight transposed: a program makes a tile of one group's rows. E groups of
       A rows have at most A / BM + E tiles; which group a program is of is counted from the groups' ends, and programs
       beyond the last tile have nothing to do
    2. `_group_weights` makes dW: a program goes through a group's rows for a tile of its matrix, in a fixed order

Sums are in fp32. A group without rows has a gradient of zeros.

Shapes: A rows, E groups, I in_features, O out_features.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.kernels.blocks import Blocks, chip, tuned
from core.kernels.language import tl, triton
from core.kernels.matmul import linear
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.spec import Case, KernelSpec, Traffic, drawing


def grouped_matmul(x_AI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """[A, O]: each row of x with the matrix of its group; gradients for both.

    ends_E  int64, where x is: where the rows of each group end, which lie behind those of the group before; the last
            has to be A

    Raises ValueError for other shapes.
    """
    E, _, I = weight_EOI.shape if weight_EOI.ndim == 3 else (0, 0, -1)
    if x_AI.ndim != 2 or x_AI.shape[1] != I or ends_E.shape != (E,) or E == 0:
        given = f"weight {list(weight_EOI.shape)} and ends {list(ends_E.shape)}"
        raise ValueError(f"grouped_matmul: x {list(x_AI.shape)} does not fit {given}: x [A, I], [E, O, I], [E]")
    unless = unsupported_dtype(x_AI, weight_EOI)
    if x_AI.dtype != weight_EOI.dtype:
        unless = f"x is {x_AI.dtype} and the weight {weight_EOI.dtype}"
    if runs_kernel("grouped_matmul", x_AI, unless):
        return _product(x_AI, weight_EOI, ends_E)
    return reference(x_AI, weight_EOI, ends_E)


def reference(x_AI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """One product a group, also for a group without rows: its weight then has a gradient; what runs on a CPU."""
    return one_by_one(x_AI, weight_EOI, ends_E.diff(prepend=ends_E.new_zeros(1)).tolist())


def one_by_one(x_AI: Tensor, weight_EOI: Tensor, rows_E: Sequence[int]) -> Tensor:
    """The same of groups whose numbers of rows the host knows."""
    groups = x_AI.split(list(rows_E))
    return torch.cat([linear(x, weight) for x, weight in zip(groups, weight_EOI.unbind(), strict=True)])


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _tile_of_group(ends, program, E, BE: tl.constexpr, BM: tl.constexpr):
    """The group of a program, the first row of its tile, and where the group's rows end; at least E beyond the last."""
    group = tl.arange(0, BE)
    end = tl.load(ends + group, mask=group < E, other=0).to(tl.int32)
    start = tl.load(ends + group - 1, mask=(group > 0) & (group < E), other=0).to(tl.int32)
    tiles = (end - start + BM - 1) // BM
    until = tl.cumsum(tiles, 0)
    found = tl.sum((until <= program).to(tl.int32), 0)
    mine = group == found
    first = tl.sum(tl.where(mine, start + (program - until + tiles) * BM, 0), 0)
    return found, first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def _group_rows(
    x, w, ends, y, E, N, K, xm, xk, we, wn, wk,
    BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[m, n] = sum over k of x[m, k] w[e, n, k]."""
    group, first, last = _tile_of_group(ends, tl.program_id(0), E, BE, BM)
    if group < E:
        m, n = first + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
        x_at = x + m.to(tl.int64)[:, None] * xm
        w_at = w + group.to(tl.int64) * we + n.to(tl.int64)[None, :] * wn
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            values = tl.load(
                x_at + k.to(tl.int64)[None, :] * xk, mask=(m < last)[:, None] & (k < K)[None, :], other=0.0
            )
            weights = tl.load(w_at + k.to(tl.int64)[:, None] * wk, mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
            acc = tl.dot(values, weights, acc, input_precision=PRECISION)
        inside = (m < last)[:, None] & (n < N)[None, :]
        tl.store(y + m.to(tl.int64)[:, None] * N + n[None, :], acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _group_weights(
    d, x, ends, dw, O, I, dm, do, xm, xi,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dw[e, o, i] = sum over the rows m of e of d[m, o] x[m, i]; BM by BN of its elements, BK rows at a time."""
    group = tl.program_id(0).to(tl.int64)
    o, i = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(2) * BN + tl.arange(0, BN)
    d += o.to(tl.int64)[:, None] * do
    x += i.to(tl.int64)[None, :] * xi
    first, last = tl.load(ends + group - 1, mask=group > 0, other=0).to(tl.int32), tl.load(ends + group).to(tl.int32)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(first, last, BK):
        m = start + tl.arange(0, BK)
        gradients = tl.load(d + m.to(tl.int64)[None, :] * dm, mask=(o < O)[:, None] & (m < last)[None, :], other=0.0)
        values = tl.load(x + m.to(tl.int64)[:, None] * xm, mask=(m < last)[:, None] & (i < I)[None, :], other=0.0)
        acc = tl.dot(gradients, values, acc, input_precision=PRECISION)
    inside = (o < O)[:, None] & (i < I)[None, :]
    to = (group * O + o.to(tl.int64)[:, None]) * I + i[None, :]
    tl.store(dw + to, acc.to(dw.dtype.element_ty), mask=inside)


# --- operators --------------------------------------------------------------------------------------------------------


@operator("grouped_matmul")
def _product(x_AI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    (A, I), (E, O, _) = x_AI.shape, weight_EOI.shape
    if not launches(x_AI) or O == 0:
        return x_AI.new_zeros(A, O)
    y_AO = torch.empty(A, O, dtype=x_AI.dtype, device=x_AI.device)

    def run(blocks: Blocks) -> None:
        tiles = triton.cdiv(A, blocks["BM"]) + E
        _group_rows[(tiles, triton.cdiv(O, blocks["BN"]))](
            x_AI, weight_EOI, ends_E, y_AO, E, O, I, *x_AI.stride(), *weight_EOI.stride(),
            BE=triton.next_power_of_2(E), PRECISION=_precision(), **blocks,
        )  # fmt: skip

    _tune("grouped_rows", (A, E, O, I, x_AI.dtype), run)
    return y_AO


@operator("grouped_matmul_weights")
def _weights(dy_AO: Tensor, x_AI: Tensor, ends_E: Tensor) -> Tensor:
    """The weight's gradient [E, O, I]."""
    (A, O), I, E = dy_AO.shape, x_AI.shape[1], len(ends_E)
    if not launches(dy_AO) or I == 0:
        return x_AI.new_zeros(E, O, I)
    dweight_EOI = torch.empty(E, O, I, dtype=x_AI.dtype, device=x_AI.device)

    def run(blocks: Blocks) -> None:
        _group_weights[(E, triton.cdiv(O, blocks["BM"]), triton.cdiv(I, blocks["BN"]))](
            dy_AO, x_AI, ends_E, dweight_EOI, O, I, *dy_AO.stride(), *x_AI.stride(), PRECISION=_precision(), **blocks
        )

    _tune("grouped_weights", (A, E, O, I, x_AI.dtype), run)
    return dweight_EOI


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx, dy_AO: Tensor):
    x_AI, weight_EOI, ends_E = ctx.saved_tensors
    wants_x, wants_weight, _ = ctx.needs_input_grad
    dx_AI = _product(dy_AO, weight_EOI.mT, ends_E) if wants_x else None
    return dx_AI, _weights(dy_AO, x_AI, ends_E) if wants_weight else None, None


_product.register_autograd(_gradients, setup_context=_setup)


def _tune(kernel: str, key: tuple, run: Callable[[Blocks], None]) -> None:
    """key: A, E, O, I and the format."""
    A, E, *others, dtype = key
    key = (triton.next_power_of_2(A), E, *others, dtype)
    tuned(kernel, key, _blocks(A // E, dtype), run, BM=(32, 64, 128), BN=(64, 128), num_warps=(4, 8), num_stages=(2, 3))


def _blocks(rows: int, dtype: torch.dtype) -> Blocks:
    """For so many rows a group in the mean. fp32 products keep more registers."""
    if dtype == torch.float32:
        return {"BM": 64, "BN": 64, "BK": 32, "num_warps": 8, "num_stages": 2}
    if rows < 128:
        return {"BM": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3}
    return {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}


def _precision() -> str:
    """The precision of products of fp32: exact unless torch's setting says otherwise."""
    return "tf32" if torch.get_float32_matmul_precision() != "highest" and chip().startswith("sm_") else "ieee"


# --- spec -------------------------------------------------------------------------------------------------------------


def _inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    draw, rows = drawing(dtype, device, generator), case["rows"]
    ends_E = torch.tensor(rows, dtype=torch.long).cumsum(0).to(device)
    x_AI, weight_EOI = draw(sum(rows), case["I"]), draw(len(rows), case["O"], case["I"])
    return {"x_AI": x_AI, "weight_EOI": weight_EOI, "ends_E": ends_E}


def _traffic(case: Case, dtype: torch.dtype) -> Traffic:
    A, E, O, I = sum(case["rows"]), len(case["rows"]), case["O"], case["I"]
    ends, elements, product = 8 * E, A * I + E * O * I + A * O, 2 * A * I * O
    return Traffic(
        dtype.itemsize * elements + ends, dtype.itemsize * (2 * elements - A * O) + ends, product, 2 * product
    )


SPECS = (
    KernelSpec(
        name="grouped_matmul",
        function=grouped_matmul,
        reference=reference,
        inputs=_inputs,
        grads=("x_AI", "weight_EOI"),
        cases=(
            {"rows": (70, 0, 5, 130), "I": 40, "O": 100},
            {"rows": (3, 1, 0, 0, 2, 1, 64, 0, 9), "I": 33, "O": 3},
            {"rows": (1,), "I": 1, "O": 1},
            {"rows": (0, 0, 0), "I": 5, "O": 4},
            {"rows": (2, 1), "I": 0, "O": 3},
            {"rows": (0, 3), "I": 4, "O": 0},
        ),
        space={"rows": ((0,), (5, 3), (0, 0, 7), (66, 1, 0, 80), (1,) * 33), "I": range(1, 80), "O": range(1, 140)},
        timed=(
            {"rows": (1024,) * 8, "I": 4096, "O": 14336},
            {"rows": (64,) * 16, "I": 2048, "O": 1024},
        ),
        # Products of fp32 are summed in another order; those of 16 bits are summed in fp32 and rounded once.
        tolerance={torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        traffic=_traffic,
        gradcheck={"rows": (2, 0, 1), "I": 2, "O": 3},
        alone=("ends_E",),
    ),
)
