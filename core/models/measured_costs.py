"""What a decoder's parts cost on this machine, measured: for stages balanced by time, not by FLOPs."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from core.models.decoder import Decoder, DecoderConfig, initialise, rotary_angles
from core.nn.attention import StepContext
from core.parallel.pipeline.split import Costs

_REPEATS = 5


def measured_costs(config: DecoderConfig, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> Costs:
    """Seconds, forward and backward, of a microbatch of [rows, length] tokens in the embedding, a block and the head.

    All blocks of a decoder are alike, so one is built, whole, as on one rank of tensor parallelism; the least of some
    repetitions counts.
    """
    one = Decoder(replace(config, num_layers=1)).to(device=device, dtype=dtype)
    initialise(one, 0)
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
    positions, context = one.default_positions(ids, None), StepContext()
    x_BLD = torch.randn(rows, length, config.dim, dtype=dtype, device=device, requires_grad=True)
    rotary = rotary_angles(config, positions, dtype) if config.positions == "rotary" else None

    def behind() -> Tensor:
        out = x_BLD if one.norm is None else one.norm(x_BLD)
        out = out if one.project_out is None else one.project_out(out)
        return one.head(out, ids, length)

    return Costs(
        blocks=(_seconds(lambda: one.blocks[0](x_BLD, positions, rotary, None, context)),) * config.num_layers,
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
