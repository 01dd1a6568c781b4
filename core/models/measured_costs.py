"""Measured costs of a decoder's parts on this machine: for stages balanced by time, not by FLOPs."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from core.models.decoder import Decoder, DecoderConfig, initialise, rotary_angles
from core.nn.attention import StepContext
from core.placement.stages import Costs

_REPEATS = 5


def measured_costs(config: DecoderConfig, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> Costs:
    """Seconds, forward and backward, of a microbatch of [rows, length] tokens in the embedding, a block and the head.

    Blocks of a decoder are alike, or of two kinds, with experts and without; one of each kind is measured, whole, as on
    one rank of tensor and expert parallelism. The least of some repetitions counts.
    """
    period = config.moe.every if config.moe.num_experts else 1
    one = Decoder(replace(config, num_layers=period)).to(device=device, dtype=dtype)
    initialise(one, 0)
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
    positions, context = one.default_positions(ids, None), StepContext()
    x_BLD = torch.randn(rows, length, config.dim, dtype=dtype, device=device, requires_grad=True)
    rotary = rotary_angles(config, positions, dtype) if config.positions == "rotary" else None

    def behind() -> Tensor:
        out = x_BLD if one.norm is None else one.norm(x_BLD)
        out = out if one.project_out is None else one.project_out(out)
        out = out if one.head_transform is None else one.head_transform(out)
        return one.head(out, ids, length)

    def of_block(index: int) -> float:
        return _seconds(lambda: one.blocks[index](x_BLD, positions, rotary, None, context))

    plain, last = of_block(0), of_block(period - 1)
    return Costs(
        blocks=tuple(plain if (index + 1) % period else last for index in range(config.num_layers)),
        before=_seconds(lambda: one.embedding(ids, positions)),
        behind=_seconds(behind),
    )


def _seconds(forward: Callable[[], Tensor]) -> float:
    found = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        out = forward()
        out.sum().backward()
        if out.is_cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found)
