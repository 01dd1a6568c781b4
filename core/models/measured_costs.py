"""Measured costs of a decoder's parts on this machine: for stages balanced by time, not by FLOPs."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from core.models.decoder import Decoder, DecoderConfig, RotaryAngles, initialise
from core.nn.attention import StepContext
from core.placement.stages import Costs

_REPEATS = 5


def measured_costs(config: DecoderConfig, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> Costs:
    """Seconds, forward and backward, of a microbatch of [rows, length] tokens in the embedding, a block and the head.

    Blocks of a decoder are alike, or of a few kinds: with experts and without, with a window and without. One of each
    kind is measured, whole, as on one rank of tensor and expert parallelism. The least of some repetitions counts.
    """
    kinds = [(config.moe.has_experts(n), config.layer_window(n)) for n in range(config.num_layers)]
    first_of = {kind: kinds.index(kind) for kind in kinds}
    count = max(first_of.values()) + 1
    first_layers = replace(config, num_layers=count, full_layers=tuple(n for n in config.full_layers if n < count))
    one = Decoder(first_layers).to(device=device, dtype=dtype)
    initialise(one, 0)
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
    positions, context = one.default_positions(ids, None), StepContext()
    x_BLD = torch.randn(rows, length, config.dim, dtype=dtype, device=device, requires_grad=True)
    rotary = RotaryAngles(config, positions, dtype)

    def behind() -> Tensor:
        out = x_BLD if one.norm is None else one.norm(x_BLD)
        out = out if one.project_out is None else one.project_out(out)
        out = out if one.head_transform is None else one.head_transform(out)
        return one.head(out, ids, length)

    def of_block(index: int) -> float:
        return _seconds(lambda: one.blocks[index](x_BLD, positions, rotary.of_layer(index), None, context))

    costs = {kind: of_block(index) for kind, index in first_of.items()}
    return Costs(
        blocks=tuple(costs[kind] for kind in kinds),
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
