"""AdamW for a list of parameters (Loshchilov and Hutter 2019, arXiv:1711.05101), with torch.optim.AdamW's names.

    g <- grad_scale g, or its negative to maximize
    m <- m + (1 - beta1) (g - m)                       v <- beta2 v + (1 - beta2) g^2
    p <- p (1 - lr weight_decay) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

One launch for all tensors that share their dtypes, one read of g, one read and one write of p, m and v. The update is
in fp32 whatever the dtypes; `grad_scale` may stay on the device, so clipping costs no pass and no wait.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw as adamw_of_torch

from core.kernels.language import tl, triton
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.spec import Case, KernelSpec, Traffic, drawing
from core.kernels.tensor_lists import (
    TYPES,
    aligned,
    count_at,
    on_clones,
    on_keywords,
    owners,
    pointer_at,
    rounded_at_random,
    starts,
    store_rounded,
    table,
    write_back,
)

_BLOCK = 4096


@torch.no_grad()
def adamw(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor], *,
    step: int, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
    weight_decay: float = 1e-2, maximize: bool = False, grad_scale: float | Tensor = 1.0, seed: int | None = None,
) -> None:  # fmt: skip
    """One step of AdamW, in place on parameters and state; four lists of one length, of any shapes that agree.

    step        counted from 1, the same for all: parameters that started later are another call
    grad_scale  factor of every gradient, which stays as it is; a number, or a tensor of one element
    seed        round bf16 parameters at random, by this seed (a new one each step); others round to nearest

    fp32, bf16 and fp16 in any mixture (bf16 parameters with a state in fp32, say). Where the four tensors of a
    parameter do not lie alike in memory, or lie with gaps, they are copied, and copied back.
    Raises ValueError when lengths or shapes do not fit.
    """
    _check(params, grads, exp_avgs, exp_avg_sqs)
    if not params:
        return
    lists = (list(params), list(grads), list(exp_avgs), list(exp_avg_sqs))
    if runs_kernel("adamw", params[0], unless=_unsupported([t for tensors in lists for t in tensors])):
        scale, factor = (grad_scale, 1.0) if isinstance(grad_scale, Tensor) else (None, grad_scale)
        _update(*lists, scale, -factor if maximize else factor, step, lr, *betas, eps, weight_decay, seed)
    else:
        options = {"step": step, "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        reference(*lists, **options, maximize=maximize, grad_scale=grad_scale, seed=seed)


@torch.no_grad()
def reference(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor], *,
    step: int, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
    weight_decay: float = 1e-2, maximize: bool = False, grad_scale: float | Tensor = 1.0, seed: int | None = None,
) -> None:  # fmt: skip
    """The same by torch; what runs on a CPU: torch's fused update where it applies, one pass there, too."""
    if isinstance(grad_scale, Tensor) or grad_scale != 1.0:
        grads = [g * grad_scale for g in grads]
    lists = (list(params), list(grads), list(exp_avgs), list(exp_avg_sqs))
    if seed is None and _fuses(lists):
        steps = [torch.tensor(float(step - 1), dtype=torch.float32, device="cpu") for _ in params]
        adamw_of_torch(
            *lists, [], steps, fused=True, amsgrad=False, beta1=betas[0], beta2=betas[1], lr=lr, eps=eps,
            weight_decay=weight_decay, maximize=maximize,
        )  # fmt: skip
        return
    generator = None if seed is None else torch.Generator(params[0].device).manual_seed(seed)
    size, root = lr / (1 - betas[0] ** step), math.sqrt(1 - betas[1] ** step)
    for p, g, m, v in zip(*lists):
        wide = torch.promote_types(p.dtype, torch.float32)
        g = -g.to(wide) if maximize else g.to(wide)
        new_m = m.to(wide).lerp(g, 1 - betas[0])
        new_v = (v.to(wide) * betas[1]).addcmul_(g, g, value=1 - betas[1])
        new_p = (p.to(wide) * (1 - lr * weight_decay)).addcdiv_(new_m, new_v.sqrt().div_(root).add_(eps), value=-size)
        m.copy_(new_m)
        v.copy_(new_v)
        p.copy_(rounded_at_random(new_p, generator) if generator is not None and p.dtype == torch.bfloat16 else new_p)


def _fuses(lists: tuple[list[Tensor], ...]) -> bool:
    """Return whether torch's fused update takes them, which reads all memory as if it were contiguous."""
    tensors = [t for given in lists for t in given]
    on_cpu = all(t.device.type == "cpu" and t.is_contiguous() for t in tensors)
    return on_cpu and len({t.dtype for t in tensors}) == 1 and all(t.numel() > 0 for t in tensors)


def _check(*lists: Sequence[Tensor]) -> None:
    lengths = [len(tensors) for tensors in lists]
    if len(set(lengths)) > 1:
        raise ValueError(f"adamw: lists of params, grads, exp_avgs, exp_avg_sqs have lengths {lengths}")
    for shapes in zip(*([list(t.shape) for t in tensors] for tensors in lists)):
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"adamw: shapes of parameter, gradient, exp_avg, exp_avg_sq differ: {shapes}")


def _unsupported(tensors: Sequence[Tensor]) -> str | None:
    if any(t.device != tensors[0].device for t in tensors):
        return "the tensors lie on several devices"
    return unsupported_dtype(*tensors)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["seed", "stream"])
def _adamw(
    owners, table, scale, factor, size, root, beta2, rest1, rest2, eps, decay, seed, stream,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr, HAS_SCALE: tl.constexpr, AT_RANDOM: tl.constexpr,
):  # fmt: skip
    """Columns: number of elements, first program, p, g, m, v. rest = 1 - beta, which fp32 would lose digits of."""
    owner = table + tl.load(owners + tl.program_id(0)).to(tl.int64) * 6
    start = (tl.program_id(0) - tl.load(owner + 1)) * BLOCK
    lane = tl.arange(0, BLOCK)
    inside = lane < count_at(owner, ALIGNED) - start
    if HAS_SCALE:
        factor = factor * tl.load(scale).to(tl.float32)
    g = tl.load(pointer_at(owner + 3, G, ALIGNED) + start + lane, mask=inside, other=0.0).to(tl.float32) * factor
    m_at, v_at = pointer_at(owner + 4, M, ALIGNED) + start + lane, pointer_at(owner + 5, V, ALIGNED) + start + lane
    m = tl.load(m_at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(v_at, mask=inside, other=0.0).to(tl.float32)
    m += rest1 * (g - m)
    v = beta2 * v + rest2 * g * g
    tl.store(m_at, m.to(M), mask=inside)
    tl.store(v_at, v.to(V), mask=inside)
    p_at = pointer_at(owner + 2, P, ALIGNED) + start + lane
    p = tl.load(p_at, mask=inside, other=0.0).to(tl.float32)
    p = p * decay - size * m / (tl.sqrt(v) / root + eps)
    store_rounded(p_at, p, inside, lane, seed, stream + tl.program_id(0), P, AT_RANDOM)


# --- operators --------------------------------------------------------------------------------------------------------


@operator("adamw", mutates=("params", "exp_avgs", "exp_avg_sqs"))
def _update(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    scale: Tensor | None, factor: float, step: int, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, seed: int | None,
) -> None:  # fmt: skip
    members = [i for i, p in enumerate(params) if launches(p)]
    quadruples = {i: _alike(params[i], grads[i], exp_avgs[i], exp_avg_sqs[i]) for i in members}
    launched: dict[tuple, list[int]] = {}
    for i, tensors in quadruples.items():
        is_aligned = aligned(tensors) and tensors[0].numel() % 16 == 0
        launched.setdefault((*(TYPES[t.dtype] for t in tensors), is_aligned), []).append(i)
    size, root, stream = lr / (1 - beta1**step), math.sqrt(1 - beta2**step), 0
    for (P, G, M, V, is_aligned), members in launched.items():
        device = params[members[0]].device
        counts = [triton.cdiv(params[i].numel(), _BLOCK) for i in members]
        pointers = [[t.data_ptr() for t in quadruples[i]] for i in members]
        rows = tuple((params[i].numel(), at, *row) for i, at, row in zip(members, starts(counts), pointers))
        _adamw[(sum(counts),)](
            owners(tuple(counts), device), table(rows, device), scale, factor, size, root, beta2, 1 - beta1,
            1 - beta2, eps, 1 - lr * weight_decay, seed or 0, stream, P=P, G=G, M=M, V=V, BLOCK=_BLOCK,
            ALIGNED=is_aligned, HAS_SCALE=scale is not None, AT_RANDOM=seed is not None and P is tl.bfloat16,
            num_warps=8,
        )  # fmt: skip
        stream += sum(counts)
    for i, (p, _, m, v) in quadruples.items():
        write_back((params[i], exp_avgs[i], exp_avg_sqs[i]), (p, m, v))


def _alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors if one walk through memory meets their elements in one order (transposed alike, channels last, ..),
    else contiguous copies of those that are not contiguous."""
    p = tensors[0]
    order = sorted(range(p.ndim), key=p.stride, reverse=True)
    if p.permute(order).is_contiguous() and all(t.stride() == p.stride() for t in tensors):
        return tensors
    return tuple(t.contiguous() for t in tensors)


# --- spec -------------------------------------------------------------------------------------------------------------


_KINDS = ("param", "grad", "exp_avg", "exp_avg_sq")


def updated(**inputs) -> tuple[Tensor, ...]:
    """`adamw` as a function."""
    return on_clones(adamw, _KINDS, inputs)


def updated_reference(**inputs) -> tuple[Tensor, ...]:
    """`reference` as a function."""
    return on_clones(reference, _KINDS, inputs)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    return list(case.get("shapes") or [(case["N"],), (3, case["M"])]) * case.get("copies", 1)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    # A step as long as the parameters are large: a tolerance must not hide it.
    inputs: dict = {"step": 3, "lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}
    inputs |= {name: case[name] for name in ("maximize", "seed", "grad_scale") if name in case}
    if case.get("scaled"):
        inputs["grad_scale"] = torch.tensor(0.5, device=device)

    draw = drawing(torch.float32, device, generator)
    for index, shape in enumerate(_shapes(case)):
        inputs[f"param_{index}"], inputs[f"grad_{index}"] = draw(*shape).to(dtype), draw(*shape).to(dtype)
        inputs[f"exp_avg_{index}"], inputs[f"exp_avg_sq_{index}"] = draw(*shape), draw(*shape).square()
    return inputs


def _traffic(case: Case, dtype: torch.dtype) -> Traffic:
    elements = sum(math.prod(shape) for shape in _shapes(case))
    return Traffic(elements * (3 * dtype.itemsize + 4 * 4), 0, 14 * elements)


SPECS = (KernelSpec(
    name="adamw",
    function=updated,
    reference=updated_reference,
    inputs=_inputs,
    cases=(
        {"shapes": ((63, 100), (1000,), (), (3, 5, 2)), "scaled": True, "seed": 1},
        {"shapes": ((4097,), (1, 1)), "maximize": True, "grad_scale": 0.5},
        {"shapes": ((1,),)},
        {"shapes": ((0, 4), (0,))},
        {"shapes": ((0, 4), (5, 4))},
    ),
    space={"N": range(1, 9000), "M": range(1, 100), "maximize": (False, True), "grad_scale": (1.0, -0.3)},
    timed=(
        {"shapes": ((4096, 4096),)},
        {"shapes": ((1024, 4096), (4096, 1024), (1024,), (4096,)), "copies": 24, "scaled": True, "seed": 1},
        {"shapes": ((256, 255), (255,)), "copies": 64},
    ),
    # A dozen roundings of fp32, and p minus a step of its own size; in 16 bits p is rounded, to either neighbour where
    # that is at random.
    tolerance={torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
    traffic=_traffic,
    in_place=(functools.partial(on_keywords, adamw, _KINDS), functools.partial(on_keywords, reference, _KINDS)),
),)  # fmt: skip
