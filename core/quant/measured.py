"""The fastest way of each product with a quantized weight on a GPU, measured when a model is loaded, kept by device.

The first load on a device times each size of weight that the model has, for five numbers of rows, which takes seconds;
later ones read what was found. On a CPU there is nothing to do: `core.quant.integers` and `core.quant.packed` measure
what they choose from themselves.
"""

import logging
from pathlib import Path

import torch
from torch import nn

from core.kernels import ways
from core.kernels.quantized_matmul import measure_products
from core.quant.weight import QuantizedWeight

log = logging.getLogger("quant")


def measure_weights(model: nn.Module, dtype: torch.dtype, folder: Path | None = None) -> list[str]:
    """Have every product of the model with quantized weights measured that was not; their descriptions, if on a GPU.

    dtype   of what the weights are multiplied with
    folder  where results are kept; None: the user's. One that cannot be written is a warning
    """
    sizes = {_size(weight): weight for weight in model.parameters() if isinstance(weight, QuantizedWeight)}
    on_gpu = {size: weight for size, weight in sizes.items() if weight.ndim == 2 and _is_on_gpu(weight)}
    if not on_gpu:
        return []
    device = next(iter(on_gpu.values())).codes.device
    folder = folder or ways.default_folder()
    ways.load(folder, device)
    before = ways.known()
    found = [
        f"{size} {rows} rows: {_measured(weight, dtype, rows)}"
        for size, weight in on_gpu.items()
        if size[0] != "llm.int8"  # whose outliers only tiles take
        for rows in ways.ROWS
    ]
    if ways.known() > before:
        _keep(folder, device)
    return found


def _keep(folder: Path, device: torch.device) -> None:
    try:
        ways.keep(folder, device)
    except OSError as error:  # as in a container whose home cannot be written
        log.warning("products are measured again at the next start: %s", error)


def _is_on_gpu(weight: QuantizedWeight) -> bool:
    return weight.codes.is_cuda


def _size(weight: QuantizedWeight) -> tuple:
    return weight.scheme.name, weight.scheme.group_size, tuple(weight.codes.shape), weight.zero is None


def _measured(weight: QuantizedWeight, dtype: torch.dtype, rows: int) -> str:
    group = weight.scheme.group_size if weight.scheme.name == "int4" else None
    return measure_products(
        weight.codes, weight.scale, weight.zero, weight.num_columns, dtype, rows,
        group=group, rounds_inputs=weight.scheme.name == "w8a8",
    )  # fmt: skip
