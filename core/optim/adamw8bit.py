"""AdamW whose two moments take a byte an element (Dettmers et al. 2022, arXiv:2110.02861).

The moments are dequantised, updated as AdamW updates them, and quantised again: on a GPU in one kernel for all
parameters, elsewhere rows at a time (core/kernels/adamw8bit.py), so what is whole of them is never more than a slice.
Small parameters and vectors keep moments in fp32.

An element's step depends on its block alone, so nothing is sent. Cuts of the first dim (ZeRO, column-parallel weights)
never go through a block; a cut of a later dim that does (a row-parallel weight whose part is not a multiple of 256)
makes blocks of its own on each side, and the codes there may differ from those of one rank by a rounding.

A checkpoint holds the moments as AdamW's, under the same names: a run may change between the two.
"""

from typing import Any

from torch import Tensor

from core.kernels.adamw import adamw
from core.kernels.adamw8bit import adamw_8bit
from core.kernels.blockwise import in_8_bits
from core.optim.sharded import CODES, SCALES, Batch, ShardedOptimizer, check_options

_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW8bit(ShardedOptimizer):
    """AdamW with 8-bit state for plain tensors, DTensors and local tensors with a layout; names as in torch.optim.

    Raises UserError for values out of range.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, maximize: bool = False,
    ):  # fmt: skip
        check_options(
            "adamw8bit",
            lr=(lr, lr >= 0, "a number >= 0"),
            betas=(betas, all(0 <= beta < 1 for beta in betas), "numbers from 0 to below 1"),
            eps=(eps, eps > 0, "a number > 0"),
            weight_decay=(weight_decay, weight_decay >= 0, "a number >= 0"),
        )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def _new_state(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        if in_8_bits(self.place(parameter).layout.shape):
            return self._zero_blocks(parameter, "exp_avg") | self._zero_blocks(parameter, "exp_avg_sq")
        return {name: self._zeros(parameter) for name in _MOMENTS}

    def _update(self, batches: list[Batch]) -> None:
        for batch in batches:
            options = {name: batch.options[name] for name in ("lr", "betas", "eps", "weight_decay", "maximize")}
            held = [h for h in batch.held if h.value.numel()]
            whole = [h for h in held if "exp_avg" in h.state]
            moments = ([h.own(name) for h in whole] for name in _MOMENTS)
            adamw([h.value for h in whole], [h.grad for h in whole], *moments, step=batch.step, **options)
            packed = [h for h in held if "exp_avg" not in h.state]
            state = ([h.own(name + part) for h in packed] for name in _MOMENTS for part in (CODES, SCALES))
            adamw_8bit([h.value for h in packed], [h.grad for h in packed], *state, step=batch.step, **options)
