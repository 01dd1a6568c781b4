"""Muon: momentum whose matrices are orthogonalised before they are applied; AdamW for everything else.

For a hidden matrix W[O, I] with gradient G, each step

1. M <- mu M + G, and with Nesterov's look-ahead U = G + mu M
2. U <- the nearest (semi-)orthogonal matrix to U, by five Newton-Schulz iterations of a quintic polynomial
3. W <- (1 - lr wd) W - lr 0.2 sqrt(max(O, I)) U, so that an entry moves about as far as under AdamW

A convolution's kernel [O, I, ..] is the matrix [O, I ..], as in the authors' code. A stack of matrices, as experts'
weights are, is none. Embeddings, heads, norms and biases get AdamW. Orthogonalising needs whole matrices: a sharded one
goes to its home rank (core/optim/home.py), which has its momentum.

Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks; Liu et al. 2025, Muon is scalable for LLM
training, section 2.2 (the factor of step 3).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.config import UserError
from core.kernels.adamw import adamw
from core.optim.adamw import two_moments
from core.optim.home import WholeMatrixOptimizer
from core.optim.sharded import Batch, Held
from core.optim.spec import OptimConfig, OptimizerSpec, Part, check_moments, check_momentum, own_values
from core.precision import bf16_units

_QUINTIC = (3.4445, -4.7750, 2.0315)  # steepest at 0 among those that keep singular values within about [0.7, 1.2]


class Muon(WholeMatrixOptimizer):
    """Muon for the parameter groups with `orthogonalise` True, AdamW for those with False; each group says which.

    Raises UserError for values out of range, a group that does not say `orthogonalise`, and a parameter that is to be
    orthogonalised and has fewer than two dims.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1, *,
        maximize: bool = False,
    ):  # fmt: skip
        _check(lr, momentum, betas, eps, weight_decay)
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, defaults | {"maximize": maximize})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not isinstance(param_group.get("orthogonalise"), bool):
            raise UserError(
                f"muon: parameter group {len(self.param_groups)} does not say orthogonalise; give groups "
                '{"params": …, "orthogonalise": True} of hidden matrices, and False of embeddings, heads and vectors'
            )
        super().add_param_group(param_group)
        if param_group["orthogonalise"]:
            for parameter in param_group["params"]:
                if parameter.ndim < 2:
                    raise UserError(
                        f"muon: a parameter of shape {list(parameter.shape)} is no matrix that can be orthogonalised; "
                        "put it into a group with orthogonalise False"
                    )

    def _is_whole(self, options: dict[str, Any]) -> bool:
        return options["orthogonalise"]

    def _cost(self, shape: Sequence[int]) -> float:
        """Multiplications with the smaller Gram matrix, which take nearly all of the time."""
        sides = shape[0], math.prod(shape[1:])
        return float(max(sides) * min(sides) ** 2)

    def _home_state(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"momentum_buffer": shape}

    def _new_state(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        if options["orthogonalise"]:
            return super()._new_state(parameter, options)
        return {"exp_avg": self._zeros(parameter), "exp_avg_sq": self._zeros(parameter)}

    def _direction(self, grad: Tensor, h: Held, batch: Batch) -> Tensor:
        momentum = h.own("momentum_buffer").mul_(batch.options["momentum"]).add_(grad)
        ahead = grad.add(momentum, alpha=batch.options["momentum"])
        return orthogonalised(ahead.flatten(1)).reshape(grad.shape)

    def _move(self, h: Held, update: Tensor, batch: Batch) -> None:
        options, shape = batch.options, h.place.layout.shape
        size = options["lr"] * 0.2 * max(shape[0], math.prod(shape[1:])) ** 0.5
        h.value.mul_(1 - options["lr"] * options["weight_decay"])
        h.value.add_(update, alpha=size if options["maximize"] else -size)

    def _update_parts(self, batches: list[Batch]) -> None:
        for batch in batches:
            held = [h for h in batch.held if h.value.numel()]
            options = {name: batch.options[name] for name in ("lr", "betas", "eps", "weight_decay", "maximize")}
            moments = ([h.own(name) for h in held] for name in ("exp_avg", "exp_avg_sq"))
            adamw([h.value for h in held], [h.grad for h in held], *moments, step=batch.step, **options)


def orthogonalised(matrix_OI: Tensor, num_iterations: int = 5) -> Tensor:
    """About U V^T of the singular value decomposition of a matrix, in its dtype.

    fp32 is iterated in bf16, as the authors do, where the device is fast at it: it only has to come near, and it is the
    whole cost of the step.
    """
    a, b, c = _QUINTIC
    wide = matrix_OI.shape[0] <= matrix_OI.shape[1]
    x = matrix_OI if wide else matrix_OI.T
    x = x / (x.norm() + 1e-7)
    x = x.bfloat16() if x.dtype == torch.float32 and bf16_units(x.device) else x
    for _ in range(num_iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.T).to(matrix_OI.dtype)


def _check(lr: float, momentum: float, betas: tuple[float, ...], eps: float, weight_decay: float) -> None:
    check_momentum("muon", lr, momentum)
    check_moments("muon", lr, betas, eps, weight_decay)


@dataclass(frozen=True)
class MuonConfig(OptimConfig):
    name: str = "muon"
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    """of what AdamW updates"""
    eps: float = 1e-8
    """of what AdamW updates"""
    weight_decay: float = 0.1
    """of matrices; vectors (norms, biases) are never decayed"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.lr, **own_values(self))


def is_hidden(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix of the repeated blocks."""
    return parameter.ndim == 2 and any(part.isdigit() for part in name.split("."))


def _state_bytes(config: MuonConfig, part: Part) -> int:
    if not part.hidden:
        return two_moments(config, part)
    return -(-part.wide_bytes * math.prod(part.whole) // part.ranks)


def _build(config: MuonConfig, masters: Mapping[str, Tensor]) -> Muon:
    """Muon for the matrices of the repeated blocks, whose names hold a number; AdamW for the others."""
    hidden = {n for n, m in masters.items() if is_hidden(n, m)}
    matrices = [m for n, m in masters.items() if n not in hidden and m.ndim >= 2]
    vectors = [m for m in masters.values() if m.ndim < 2]
    groups = [
        {"params": [masters[n] for n in masters if n in hidden], "orthogonalise": True},
        {"params": matrices, "orthogonalise": False},
        {"params": vectors, "orthogonalise": False, "weight_decay": 0.0},
    ]
    return Muon(groups, lr=config.lr, **own_values(config))


SPEC = OptimizerSpec(MuonConfig, _state_bytes, _build)
