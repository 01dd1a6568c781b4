"""What one training step of a decoder needs of a device, before it runs: under Gemini, and at least by three others.

`foreseen` traces a step on fake tensors. Gemini's need is what its planner says; the others' stand in closed form (see
`benchmarks.gemini`). Everything recomputes its activations by block, and has AdamW with fp32 state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from benchmarks.offload import CONTENDERS, Shape, shaped
from core.gemini.chunk import aligned
from core.gemini.search import ParameterInfo, least_budget
from core.models.decoder import Decoder
from core.parallel.recompute import RecomputeConfig, apply_recompute
from core.precision import Precision, compute_dtype
from core.trace.machine import Bandwidth, Speed
from core.trace.tracer import StepTrace, trace_step

WIDTHS = (64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1600)
DEPTHS = (2, 4, 8, 12, 16, 24, 36, 48)

# (layers, width, heads): the released ones up to GPT-2 XL, then those of table 1 of OPT, for both families.
RELEASED = (
    (12, 768, 12), (24, 1024, 16), (36, 1280, 20), (48, 1600, 25), (32, 2560, 32), (32, 4096, 32), (40, 5120, 40),
    (48, 7168, 56), (64, 9216, 72), (96, 12288, 96),
)  # fmt: skip

# Of one A100: half of its dense bf16, its memory; PCIe 4.0 x16 as measured; AdamW on a server's cores and on the GPU.
A100 = Speed(0.5 * 312e12, 1.5e12)
A100_LINK = Bandwidth(to_device=22e9, to_host=22e9, host_update=40e9, device_update=1e12, latency_s=2e-5)


@dataclass(frozen=True)
class Foreseen:
    """A traced step.

    left_bytes   the most that its forward has at once beside parameters
    other_bytes  that of the whole step: also what autograd holds of single gradients before anybody can take them
    """

    step: StepTrace
    parameters: tuple[ParameterInfo, ...]
    itemsize: int
    num_parameters: int
    num_outside: int
    num_in_block: int

    @property
    def left_bytes(self) -> int:
        return max(s.other_bytes for stretches in self.step.microbatches for s in stretches if s.kind == "forward")

    @property
    def other_bytes(self) -> int:
        return max(s.other_bytes for stretches in self.step.microbatches for s in stretches)


@cache
def foreseen(shape: Shape, rows: int, length: int, precision: Precision) -> Foreseen:
    """The step of a model without memory, on one rank, with AdamW and fp32 masters."""
    dtype = compute_dtype(precision)
    with torch.device("meta"):
        model = Decoder(shape.config()).to(dtype)
    apply_recompute(model, RecomputeConfig("full"))
    ids_BL = torch.zeros(rows, length, dtype=torch.long)
    step = trace_step(model, lambda m: m(ids_BL, targets=ids_BL), A100)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    in_blocks = sum(size for name, size in sizes.items() if name.startswith("blocks."))
    total = sum(sizes.values())
    infos = tuple(_info(name, sizes[name], dtype) for name in step.order)
    return Foreseen(step, infos, dtype.itemsize, total, total - in_blocks, in_blocks // shape.num_layers)


def _info(name: str, size: int, dtype: torch.dtype) -> ParameterInfo:
    """As the runtime has it: masters of the buffer's own format are no others; AdamW's two and a gradient beside."""
    size = aligned(size)
    return ParameterInfo(name, size * dtype.itemsize, 0 if dtype == torch.float32 else 4 * size, 12 * size, True)


def needs_gemini(found: Foreseen) -> int:
    return least_budget(found.parameters, found.step)


def needs_plain(found: Foreseen) -> int:
    return max(16 * found.num_parameters, 12 * found.num_parameters + found.other_bytes)


def needs_fsdp2(found: Foreseen) -> int:
    fetched = found.itemsize * (found.num_outside + 2 * found.num_in_block)
    gradients = found.itemsize * max(found.num_outside, found.num_in_block)
    kept = found.itemsize * found.num_outside
    return max(fetched + found.left_bytes, fetched + gradients, kept + found.other_bytes)


def needs_zero_offload(found: Foreseen) -> int:
    return found.itemsize * found.num_parameters + found.other_bytes


NEEDS: dict[str, Callable[[Foreseen], int]] = dict(
    zip(CONTENDERS, (needs_gemini, needs_plain, needs_fsdp2, needs_zero_offload), strict=True)
)


def needs_at_most(
    budget_bytes: int, contender: str, rows: int, length: int, precision: Precision, shape: Shape
) -> bool:
    """Whether a step fits. What is clear without tracing it, or from two of its layers, is not traced."""
    itemsize = compute_dtype(precision).itemsize
    kept = {"plain PyTorch": 16, "DeepSpeed ZeRO-Offload": itemsize}.get(contender, 0) * shape.num_parameters()
    if max(kept, 2 * itemsize * shape.vocab_size * shape.dim) > budget_bytes:
        return False
    return all(
        NEEDS[contender](foreseen(replace(shape, num_layers=num_layers), rows, length, precision)) <= budget_bytes
        for num_layers in (min(2, shape.num_layers), shape.num_layers)
    )


def largest(shapes: Sequence[Shape], fits: Callable[[Shape], bool]) -> Shape | None:
    """The first that fits, from the largest down. shapes: ascending."""
    return next((shape for shape in reversed(shapes) if fits(shape)), None)


def grid(family: str, widths: Sequence[int], depths: Sequence[int], most_parameters: int) -> list[Shape]:
    """Shapes of up to so many parameters, ascending."""
    shapes = [shaped(family, depth, width) for width in widths for depth in depths]
    sizes = {shape: shape.num_parameters() for shape in shapes}
    return sorted((shape for shape in shapes if sizes[shape] <= most_parameters), key=lambda shape: sizes[shape])


def host_holds() -> int:
    """Parameters that train in fp32 in what is free of this host's memory, a fifth of it left for the rest.

    Value, gradient, AdamW's two: 16 bytes each.
    """
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(0.8 * 1024 * int(lines["MemAvailable"].split()[0]) / 16)
