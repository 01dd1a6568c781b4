"""Group norm, with the SiLU that follows it in a U-Net: y = silu(z), z = weight (x - mean) rstd + bias.

Mean and variance are of a sample's group of C / G channels at all places (Wu and He 2018). With M elements in a group,
x^ = (x - mean) rstd and dz = dy silu'(z), or dy without SiLU:

    dbias_c = sum dz,  dweight_c = sum dz x^                                   over samples and places
    dx = rstd (weight dz - (s1 + x^ s2) / M),  s1 = sum weight dz,  s2 = sum weight dz x^         over the group

Where a group fits a program's registers (the inner levels of a U-Net), a program takes a group, and x is read once, in
the backward dy and x. A larger group has to be read twice, for nothing on the chip holds it, and groups are fewer than
programs: there both directions have three phases, each over tiles of channels and places, whichever of the two is dense
in memory (contiguous and channels_last tensors both stay as they are):

    1. each channel over a run of places: forward mean and sum of squared deviations, backward sum dz and sum dz x^
    2. one program a group puts them together: forward mean and rstd, by the parallel formula for variances
       (Chan, Golub and LeVeque 1979), so nothing cancels; backward s1 and s2
    3. every element: forward y, backward dx

Nothing but mean and rstd is saved; the backward computes z again. No atomics: gradients are the same in every run.
Arithmetic is in fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.blocks import Blocks
from core.kernels.language import tl, triton
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.spec import Case, KernelSpec, Traffic, drawing

LARGEST_GROUP = 16_384
"""Elements, each dim rounded up to a power of two, that a program takes whole; in an fp32 backward half of them."""
_PROGRAMS = 1024
"""Of a phase 1: enough to fill a chip, few enough that phase 2 has little to read."""


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor, bias: Tensor, *, eps: float = 1e-5, silu: bool = False
) -> Tensor:
    """Group norm of x, then SiLU if asked, of x's shape, dtype and memory format; gradients for x, weight and bias.

    x             [N, C, *places], contiguous or channels_last; anything else is copied first
    weight, bias  [C]

    Raises ValueError where the groups do not divide the channels or a shape does not fit.
    """
    if x.ndim < 2 or num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError(f"group_norm: {num_groups} groups do not divide the channels of x {list(x.shape)} [N, C, ..]")
    if weight.shape != x.shape[1:2] or bias.shape != x.shape[1:2]:
        shapes = f"weight {list(weight.shape)} and bias {list(bias.shape)}"
        raise ValueError(f"group_norm: {shapes} are not one number for each of the {x.shape[1]} channels")
    if runs_kernel("group_norm", x, unless=unsupported_dtype(x, weight, bias)):
        return _forward(x, num_groups, weight, bias, eps, silu)[0]
    return reference(x, num_groups, weight, bias, eps=eps, silu=silu)


def reference(
    x: Tensor, num_groups: int, weight: Tensor, bias: Tensor, *, eps: float = 1e-5, silu: bool = False
) -> Tensor:
    """The same by torch; what runs on a CPU."""
    y = torch.group_norm(x, num_groups, weight.to(x.dtype), bias.to(x.dtype), eps)
    return F.silu(y) if silu else y


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _tile(num_channels, num_runs, CHANNELS: tl.constexpr):
    """This program's sample, channels [CHANNELS, 1] and run of places."""
    program = tl.program_id(0).to(tl.int64)
    run, program = program % num_runs, program // num_runs
    num_tiles = tl.cdiv(num_channels, CHANNELS)
    channel = (program % num_tiles) * CHANNELS + tl.arange(0, CHANNELS)[:, None]
    return program // num_tiles, channel, run


@triton.jit
def _slope(z):
    """silu'(z)."""
    s = tl.sigmoid(z)
    return s * (1.0 + z * (1.0 - s))


@triton.jit
def _group(num_groups, group_channels, num_places, CHANNELS: tl.constexpr, PLACES: tl.constexpr):
    """This program's sample, its channels [CHANNELS, 1] and which there are, places [1, PLACES], and what is inside."""
    program = tl.program_id(0).to(tl.int64)
    member, place = tl.arange(0, CHANNELS)[:, None], tl.arange(0, PLACES).to(tl.int64)[None, :]
    known = member < group_channels
    channel = program % num_groups * group_channels + member
    return program // num_groups, channel, known, place, known & (place < num_places)


@triton.jit
def _whole_forward(
    x, weight, bias, mean, rstd, y, num_groups, group_channels, num_places, size, eps, x_n, x_c, x_s, y_n, y_c, y_s,
    CHANNELS: tl.constexpr, PLACES: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """All of a group at once."""
    sample, channel, known, place, inside = _group(num_groups, group_channels, num_places, CHANNELS, PLACES)
    value = tl.load(x + sample * x_n + channel * x_c + place * x_s, mask=inside, other=0.0).to(tl.float32)
    centre = tl.sum(value) / size
    off = tl.where(inside, value - centre, 0.0)
    scale = tl.rsqrt(tl.sum(off * off) / size + eps)
    tl.store(mean + tl.program_id(0), centre)
    tl.store(rstd + tl.program_id(0), scale)
    w = tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    z = off * scale * w + tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    if SILU:
        z = z * tl.sigmoid(z)
    tl.store(y + sample * y_n + channel * y_c + place * y_s, z, mask=inside)


@triton.jit
def _whole_backward(
    dy, x, weight, bias, mean, rstd, plain_sums, weighted_sums, dx, num_groups, group_channels, num_places, size,
    dy_n, dy_c, dy_s, x_n, x_c, x_s, dx_n, dx_c, dx_s,
    CHANNELS: tl.constexpr, PLACES: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """All of a group at once: dx, and each channel's sum dz and sum dz x^."""
    sample, channel, known, place, inside = _group(num_groups, group_channels, num_places, CHANNELS, PLACES)
    scale = tl.load(rstd + tl.program_id(0))
    w = tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    value = tl.load(x + sample * x_n + channel * x_c + place * x_s, mask=inside, other=0.0).to(tl.float32)
    dz = tl.load(dy + sample * dy_n + channel * dy_c + place * dy_s, mask=inside, other=0.0).to(tl.float32)
    normal = (value - tl.load(mean + tl.program_id(0))) * scale
    if SILU:
        dz *= _slope(normal * w + tl.load(bias + channel, mask=known, other=0.0).to(tl.float32))
    plain, weighted = tl.sum(dz, 1)[:, None], tl.sum(dz * normal, 1)[:, None]
    at = sample * num_groups * group_channels + channel
    tl.store(plain_sums + at, plain, mask=known)
    tl.store(weighted_sums + at, weighted, mask=known)
    s1, s2 = tl.sum(w * plain) / size, tl.sum(w * weighted) / size
    tl.store(dx + sample * dx_n + channel * dx_c + place * dx_s, scale * (w * dz - s1 - normal * s2), mask=inside)


@triton.jit
def _moments(
    x, means, deviations, num_channels, num_places, num_runs, run_length, x_n, x_c, x_s,
    CHANNELS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Phase 1, forward: mean and sum of squared deviations of each channel over a run."""
    sample, channel, run = _tile(num_channels, num_runs, CHANNELS)
    mean = tl.zeros((CHANNELS, 1), tl.float32)
    spread = tl.zeros((CHANNELS, 1), tl.float32)
    for start in range(0, run_length, PLACES):
        first = run * run_length + start
        place = first + tl.arange(0, PLACES)[None, :]
        inside = (channel < num_channels) & (place < num_places)
        here = tl.minimum(tl.maximum(num_places - first, 0), PLACES).to(tl.float32)
        value = tl.load(x + sample * x_n + channel * x_c + place * x_s, mask=inside, other=0.0).to(tl.float32)
        tile_mean = tl.sum(value, 1)[:, None] / tl.maximum(here, 1.0)
        off = tl.where(inside, value - tile_mean, 0.0)
        share = here / tl.maximum(start + here, 1.0)  # of the places so far: all tiles before a short one are full
        change = tile_mean - mean
        spread += tl.sum(off * off, 1)[:, None] + change * change * (start * share)
        mean += change * share
    at = (sample * num_channels + channel) * num_runs + run
    tl.store(means + at, mean, mask=channel < num_channels)
    tl.store(deviations + at, spread, mask=channel < num_channels)


@triton.jit
def _merge_moments(
    means, deviations, mean, rstd, group_channels, num_places, num_runs, run_length, size, eps, BLOCK: tl.constexpr
):
    """Phase 2, forward: mean and rstd of a group, from each of its channels' runs."""
    group = tl.program_id(0).to(tl.int64)
    parts = group_channels * num_runs
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        count = tl.minimum(num_places - (part % num_runs) * run_length, run_length).to(tl.float32)
        total += tl.load(means + group * parts + part, mask=part < parts, other=0.0) * (count / size)
    middle = tl.sum(total)
    spread = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        count = tl.minimum(num_places - (part % num_runs) * run_length, run_length).to(tl.float32)
        off = tl.load(means + group * parts + part, mask=part < parts, other=middle) - middle
        spread += tl.load(deviations + group * parts + part, mask=part < parts, other=0.0) + count * off * off
    tl.store(mean + group, middle)
    tl.store(rstd + group, tl.rsqrt(tl.sum(spread) / size + eps))


@triton.jit
def _normalize(
    x, weight, bias, mean, rstd, y, num_channels, num_groups, num_places, num_runs,
    x_n, x_c, x_s, y_n, y_c, y_s, CHANNELS: tl.constexpr, PLACES: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Phase 3, forward."""
    sample, channel, run = _tile(num_channels, num_runs, CHANNELS)
    place = run * PLACES + tl.arange(0, PLACES)[None, :]
    known = channel < num_channels
    inside = known & (place < num_places)
    group = sample * num_groups + channel // (num_channels // num_groups)
    scale = tl.load(rstd + group, mask=known, other=0.0)
    centre = tl.load(mean + group, mask=known, other=0.0)
    w = tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    value = tl.load(x + sample * x_n + channel * x_c + place * x_s, mask=inside, other=0.0).to(tl.float32)
    z = (value - centre) * scale * w + b
    if SILU:
        z = z * tl.sigmoid(z)
    tl.store(y + sample * y_n + channel * y_c + place * y_s, z, mask=inside)


@triton.jit
def _channel_sums(
    dy, x, weight, bias, mean, rstd, plain_sums, weighted_sums, num_channels, num_groups, num_places, num_runs,
    run_length, dy_n, dy_c, dy_s, x_n, x_c, x_s, CHANNELS: tl.constexpr, PLACES: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Phase 1, backward: sum dz and sum dz x^ of each channel over a run."""
    sample, channel, run = _tile(num_channels, num_runs, CHANNELS)
    known = channel < num_channels
    group = sample * num_groups + channel // (num_channels // num_groups)
    scale = tl.load(rstd + group, mask=known, other=0.0)
    centre = tl.load(mean + group, mask=known, other=0.0)
    w = tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    plain = tl.zeros((CHANNELS, 1), tl.float32)
    weighted = tl.zeros((CHANNELS, 1), tl.float32)
    for start in range(0, run_length, PLACES):
        place = run * run_length + start + tl.arange(0, PLACES)[None, :]
        inside = known & (place < num_places)
        value = tl.load(x + sample * x_n + channel * x_c + place * x_s, mask=inside, other=0.0).to(tl.float32)
        dz = tl.load(dy + sample * dy_n + channel * dy_c + place * dy_s, mask=inside, other=0.0).to(tl.float32)
        normal = (value - centre) * scale
        if SILU:
            dz *= _slope(normal * w + b)
        plain += tl.sum(dz, 1)[:, None]
        weighted += tl.sum(dz * normal, 1)[:, None]
    at = (sample * num_channels + channel) * num_runs + run
    tl.store(plain_sums + at, plain, mask=known)
    tl.store(weighted_sums + at, weighted, mask=known)


@triton.jit
def _merge_sums(
    plain_sums, weighted_sums, weight, means, group_channels, num_groups, num_runs, size, BLOCK: tl.constexpr
):
    """Phase 2, backward: means[.., 0] = s1 / M and means[.., 1] = s2 / M of a group."""
    group = tl.program_id(0).to(tl.int64)
    parts = group_channels * num_runs
    s1 = tl.zeros((BLOCK,), tl.float32)
    s2 = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        inside = part < parts
        channel = (group % num_groups) * group_channels + part // num_runs
        w = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
        s1 += w * tl.load(plain_sums + group * parts + part, mask=inside, other=0.0)
        s2 += w * tl.load(weighted_sums + group * parts + part, mask=inside, other=0.0)
    tl.store(means + group * 2, tl.sum(s1) / size)
    tl.store(means + group * 2 + 1, tl.sum(s2) / size)


@triton.jit
def _input_gradient(
    dy, x, weight, bias, mean, rstd, means, dx, num_channels, num_groups, num_places, num_runs,
    dy_n, dy_c, dy_s, x_n, x_c, x_s, dx_n, dx_c, dx_s,
    CHANNELS: tl.constexpr, PLACES: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Phase 3, backward."""
    sample, channel, run = _tile(num_channels, num_runs, CHANNELS)
    place = run * PLACES + tl.arange(0, PLACES)[None, :]
    known = channel < num_channels
    inside = known & (place < num_places)
    group = sample * num_groups + channel // (num_channels // num_groups)
    scale = tl.load(rstd + group, mask=known, other=0.0)
    centre = tl.load(mean + group, mask=known, other=0.0)
    s1 = tl.load(means + group * 2, mask=known, other=0.0)
    s2 = tl.load(means + group * 2 + 1, mask=known, other=0.0)
    w = tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    value = tl.load(x + sample * x_n + channel * x_c + place * x_s, mask=inside, other=0.0).to(tl.float32)
    dz = tl.load(dy + sample * dy_n + channel * dy_c + place * dy_s, mask=inside, other=0.0).to(tl.float32)
    normal = (value - centre) * scale
    if SILU:
        dz *= _slope(normal * w + b)
    change = scale * (w * dz - s1 - normal * s2)
    tl.store(dx + sample * dx_n + channel * dx_c + place * dx_s, change, mask=inside)


# --- operators --------------------------------------------------------------------------------------------------------


@operator("group_norm_forward")
def _forward(
    x: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and mean and rstd [N, G] in fp32."""
    flat = _flat(x)
    y = torch.empty_like(flat)
    N, C, S = flat.shape
    mean, rstd = (torch.empty((N, num_groups), dtype=torch.float32, device=x.device) for _ in range(2))
    if launches(x) and (whole := _whole_blocks(flat, num_groups)):
        width = C // num_groups
        _whole_forward[(N * num_groups,)](
            flat, weight.contiguous(), bias.contiguous(), mean, rstd, y, num_groups, width, S, float(width * S), eps,
            *flat.stride(), *y.stride(), SILU=silu, **whole,
        )  # fmt: skip
    elif launches(x):
        weight, bias, blocks = weight.contiguous(), bias.contiguous(), _blocks(flat)
        run_length, num_runs = _runs(flat, blocks)
        moments = torch.empty((2, N, C, num_runs), dtype=torch.float32, device=x.device)
        _moments[_grid(flat, blocks, num_runs)](flat, *moments, C, S, num_runs, run_length, *flat.stride(), **blocks)
        width, size = C // num_groups, float(C // num_groups * S)
        _merge_moments[(N * num_groups,)](*moments, mean, rstd, width, S, num_runs, run_length, size, eps, BLOCK=1024)
        num_tiles = triton.cdiv(S, blocks["PLACES"])
        _normalize[_grid(flat, blocks, num_tiles)](
            flat, weight, bias, mean, rstd, y, C, num_groups, S, num_tiles, *flat.stride(), *y.stride(),
            SILU=silu, **blocks,
        )  # fmt: skip
    return y.view(x.shape), mean, rstd


@operator("group_norm_backward")
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """dx, and dbias and dweight [2, C] in fp32."""
    flat, dy_flat, num_groups = _flat(x), _flat(dy), mean.shape[1]
    dx = torch.empty_like(flat)
    N, C, S = flat.shape
    if not launches(x):
        return dx.view(x.shape), torch.zeros((2, C), dtype=torch.float32, device=x.device)
    weight, bias, width, size = weight.contiguous(), bias.contiguous(), C // num_groups, float(C // num_groups * S)
    if whole := _whole_blocks(flat, num_groups, backward=True):
        sums = torch.empty((2, N, C), dtype=torch.float32, device=x.device)
        _whole_backward[(N * num_groups,)](
            dy_flat, flat, weight, bias, mean, rstd, *sums, dx, num_groups, width, S, size,
            *dy_flat.stride(), *flat.stride(), *dx.stride(), SILU=silu, **whole,
        )  # fmt: skip
        return dx.view(x.shape), sums.sum(1)
    blocks = _blocks(flat)
    run_length, num_runs = _runs(flat, blocks)
    sums = torch.empty((2, N, C, num_runs), dtype=torch.float32, device=x.device)
    means = torch.empty((N, num_groups, 2), dtype=torch.float32, device=x.device)
    read = (dy_flat, flat, weight, bias, mean, rstd)
    strides = (*dy_flat.stride(), *flat.stride())
    _channel_sums[_grid(flat, blocks, num_runs)](
        *read, *sums, C, num_groups, S, num_runs, run_length, *strides, SILU=silu, **blocks
    )
    _merge_sums[(N * num_groups,)](*sums, weight, means, width, num_groups, num_runs, size, BLOCK=1024)
    num_tiles = triton.cdiv(S, blocks["PLACES"])
    _input_gradient[_grid(flat, blocks, num_tiles)](
        *read, means, dx, C, num_groups, S, num_tiles, *strides, *dx.stride(), SILU=silu, **blocks
    )
    return dx.view(x.shape), sums.sum((1, 3))


def _setup(ctx, inputs, output) -> None:
    x, _, weight, bias, _, ctx.silu = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd)


def _gradients(ctx, dy: Tensor, dmean: Tensor, drstd: Tensor):
    x, weight, bias, mean, rstd = ctx.saved_tensors
    dx, (dbias, dweight) = _backward(dy, x, weight, bias, mean, rstd, ctx.silu)
    return dx, None, dweight.to(weight.dtype), dbias.to(bias.dtype), None, None


_forward.register_autograd(_gradients, setup_context=_setup)


def _flat(x: Tensor) -> Tensor:
    """x as [N, C, places]: a view of contiguous and of channels_last tensors."""
    return x.flatten(2) if x.ndim > 2 else x[:, :, None]


def _grid(flat: Tensor, blocks: Blocks, num_runs: int) -> tuple[int]:
    return (flat.shape[0] * triton.cdiv(flat.shape[1], blocks["CHANNELS"]) * num_runs,)


def _whole_blocks(flat: Tensor, num_groups: int, backward: bool = False) -> Blocks | None:
    """The tile that holds a group; None where it is too large, or where its memory comes in pieces under 32 bytes."""
    largest = LARGEST_GROUP // 2 if backward and flat.itemsize > 2 else LARGEST_GROUP
    _, C, S = flat.shape
    width = C // num_groups
    channels, places = triton.next_power_of_2(width), triton.next_power_of_2(S)
    in_pieces = flat.stride(2) != 1 and S > 1 and width * flat.itemsize < 32
    if channels * places > largest or in_pieces:
        return None
    return {"CHANNELS": channels, "PLACES": places, "num_warps": min(16, max(1, channels * places // 512))}


def _blocks(flat: Tensor) -> Blocks:
    """A tile of 2048 elements, long where x[N, C, S] is dense: along channels in channels_last, else along places."""
    _, C, S = flat.shape
    if flat.stride(1) == 1 and S > 1:
        channels = min(128, triton.next_power_of_2(C))
        return {"CHANNELS": channels, "PLACES": 2048 // channels, "num_warps": 4}
    places = min(1024, triton.next_power_of_2(S))
    return {"CHANNELS": min(2048 // places, triton.next_power_of_2(C)), "PLACES": places, "num_warps": 4}


def _runs(flat: Tensor, blocks: Blocks) -> tuple[int, int]:
    """Length and number of the runs of places that phase 1 sums: whole tiles."""
    num_places, place_block = flat.shape[2], blocks["PLACES"]
    wanted = triton.cdiv(_PROGRAMS, _grid(flat, blocks, 1)[0])
    length = place_block * triton.cdiv(num_places, wanted * place_block)
    return length, triton.cdiv(num_places, length)


# --- spec -------------------------------------------------------------------------------------------------------------


def _inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    draw = drawing(dtype, device, generator)
    N, C, places = case["N"], case["C"], case["places"]
    x = 2 * draw(N, C, *places) + 3  # a mean that a plain sum of squares would suffer from
    if case.get("channels_last"):
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    silu = case.get("silu", True)
    return {"x": x, "num_groups": case["G"], "weight": 1 + 0.5 * draw(C), "bias": draw(C), "silu": silu}


def _traffic(case: Case, dtype: torch.dtype) -> Traffic:
    """A group that is larger than a program's registers has to be read twice."""
    x = _inputs(case, dtype, "meta", torch.Generator())["x"]
    again, both = (_whole_blocks(_flat(x), case["G"], backward) is None for backward in (False, True))
    bytes_ = x.numel() * dtype.itemsize
    return Traffic((2 + again) * bytes_, (3 + 2 * both) * bytes_, 12 * x.numel(), 24 * x.numel())


SPECS = (KernelSpec(
    name="group_norm",
    function=group_norm,
    reference=reference,
    inputs=_inputs,
    grads=("x", "weight", "bias"),
    cases=(
        {"N": 2, "C": 12, "G": 3, "places": (5, 7)},
        {"N": 2, "C": 12, "G": 3, "places": (5, 7), "channels_last": True},
        {"N": 1, "C": 3, "G": 3, "places": (LARGEST_GROUP + 100,), "silu": False},
        {"N": 1, "C": 140, "G": 2, "places": (3, 2, 3), "channels_last": True, "silu": False},
        {"N": 3, "C": 63, "G": 1, "places": ()},
        {"N": 1, "C": 1, "G": 1, "places": (1, 3)},  # of two elements the gradient would be rounding
        {"N": 0, "C": 4, "G": 2, "places": (3,)},
    ),
    space={"N": range(1, 3), "C": (4, 8, 36, 100), "G": (1, 2, 4), "places": ((3,), (1, 63), (9, 31), (2, 3, 4)),
           "channels_last": (False, True), "silu": (False, True)},
    timed=(
        {"N": 2, "C": 320, "G": 32, "places": (64, 64)},
        {"N": 2, "C": 320, "G": 32, "places": (64, 64), "channels_last": True},
        {"N": 2, "C": 1280, "G": 32, "places": (16, 16)},
        {"N": 1, "C": 128, "G": 32, "places": (512, 512), "channels_last": True, "silu": False},
    ),
    # In fp32 a mean of 1.5 deviations is subtracted, and the backward subtracts two sums: some tens of roundings.
    # 16-bit results are rounded once at the end: 2^-8 of bf16 (2^-7 where the interpreter cuts off), 2^-11 of fp16.
    tolerance={torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 6e-4},
    traffic=_traffic,
    gradcheck={"N": 2, "C": 4, "G": 2, "places": (2,)},
),)  # fmt: skip
