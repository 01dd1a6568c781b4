"""Muon: momentum whose matrices are orthogonalised before they are applied; AdamW for everything else.

For a hidden matrix W[O, I] with gradient G, each step

1. M <- mu M + G, and with Nesterov's look-ahead U = G + mu M
2. U <- the nearest (semi-)orthogonal matrix to U: by five Newton-Schulz iterations of a quintic polynomial, or exactly
3. W <- (1 - lr wd) W - lr s U, with s = 0.2 sqrt(max(O, I)), so that an entry moves about as far as under AdamW, or
   Jordan's s = sqrt(max(1, O / I)), so that outputs move alike for every shape

A convolution's kernel [O, I, ..] is the matrix [O, I ..], as in the authors' code. Of a stack, as experts' weights are,
each matrix is orthogonalised by itself, and with `head_dim` each head of a fused query, key and value. Embeddings,
heads, norms and biases get AdamW. Orthogonalising needs whole matrices: a sharded one goes to its home rank
(core/optim/home.py), which has its momentum.

Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks; Liu et al. 2025, Muon is scalable for LLM
training, section 2.2 (the factor of step 3).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from core.config import UserError
from core.optim.matrices import WHOLE, MatrixConfig, MatrixOptimizer, Shapes, batch_of, matrix_state_bytes
from core.optim.narrow import MomentumFormat
from core.optim.sharded import Batch, Held
from core.optim.spec import OptimizerSpec, check_moments, check_momentum, check_options, own_values
from core.optim.spectra import has_values, negligible
from core.precision import bf16_units

_QUINTIC = (3.4445, -4.7750, 2.0315)  # steepest at 0 among those that keep singular values within about [0.7, 1.2]
_ROWS = 256
"""rows of a block of a symmetric product; of fewer, a CPU multiplies more slowly than it saves"""
_FUSED = re.compile(r"(^|\.)(qkv|qkv_proj|query_key_value|Wqkv)(\.|$)")
"""modules whose weight is queries, keys and values, the rows of a head one behind the other"""

Scale = Literal["rms", "jordan"]
Polar = Literal["newton_schulz", "exact"]


class Muon(MatrixOptimizer):
    """Muon for the parameter groups with `orthogonalise` True, AdamW for those with False; each group says which.

    Named parameters, `Muon(model.named_parameters(), lr=…)`, are grouped by `core.optim.matrices`. A group with `rows`
    has matrices of so many rows each, one under another.

    scale     rms: an update's entries have a root mean square of 0.2, as AdamW's about have; jordan
    polar     exact: by a singular value decomposition in fp64, instead of iterations
    head_dim  rows of a head, of which named fused queries, keys and values (qkv, qkv_proj, query_key_value, Wqkv) are
              orthogonalised each by itself

    Raises UserError for values out of range, a group that does not say `orthogonalise`, and a parameter that is to be
    orthogonalised and has fewer than two dims.
    """

    name, flag, done, by_shape = "muon", "orthogonalise", "orthogonalised", False
    moments = ("momentum_buffer",)
    head_dim: int | None = None
    _num_fused: int = 0

    def __init__(
        self, groups: Iterable[Any], lr: float, momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1, *,
        scale: Scale = "rms", polar: Polar = "newton_schulz", head_dim: int | None = None,
        whole: tuple[str, ...] = WHOLE, momentum_format: MomentumFormat = "fp32", maximize: bool = False,
    ):  # fmt: skip
        _check(lr, momentum, betas, eps, weight_decay, scale=scale, polar=polar, head_dim=head_dim)
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        own = {"scale": scale, "polar": polar, "rows": None}
        self.head_dim = head_dim
        super().__init__(groups, defaults | own | {"maximize": maximize}, whole, momentum_format)
        if head_dim is not None and not self._num_fused:
            raise UserError(
                f"muon: head_dim={head_dim}: no named matrix is fused queries, keys and values (qkv, qkv_proj, "
                'query_key_value, Wqkv); leave it out, or give a group {"params": …, "orthogonalise": True, "rows": …}'
            )

    def _sorted(self, named: list[tuple[str | None, Tensor]]) -> list[dict[str, Any]]:
        fused = [(name, p) for name, p in named if self.head_dim and name and p.ndim == 2 and _FUSED.search(name)]
        if not fused:
            return super()._sorted(named)
        self._num_fused += len(fused)
        gone = {id(parameter) for _, parameter in fused}
        split = {"params": [p for _, p in fused], "orthogonalise": True, "rows": self.head_dim}
        return [split, *super()._sorted([one for one in named if id(one[1]) not in gone])]

    def _fault(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> str | None:
        rows = options["rows"]
        if fault := super()._fault(shape, options):
            return fault
        if rows and (options["stacked"] or shape[0] % rows):
            return f"does not divide into matrices of rows={rows}; give a divisor of {shape[0]}, and no stacked"
        return None

    def _cost(self, shape: tuple[int, ...], options: dict[str, Any]) -> float:
        """Multiplications of an iteration, which takes nearly all of the time."""
        batch, *both = batch_of(shape, options)
        return float(batch * (2 * max(both) + min(both)) * min(both) ** 2)

    @staticmethod
    def shapes(shape: tuple[int, ...], options: Mapping[str, Any]) -> Shapes:
        return {"momentum_buffer": shape}

    def _update_of(self, grad_BMN: Tensor, h: Held, batch: Batch) -> Tensor:
        grad = grad_BMN.reshape(h.own("momentum_buffer").shape)
        momentum = h.own("momentum_buffer")
        torch.add(grad, momentum, alpha=batch.options["momentum"], out=momentum)
        ahead = grad.add(momentum, alpha=batch.options["momentum"]).reshape(grad_BMN.shape)
        if batch.options["polar"] == "exact":
            return self._polar(ahead)
        return orthogonalised(ahead[0])[None] if len(ahead) == 1 else orthogonalised(ahead)

    def _update_dtype(self, batch: Batch) -> torch.dtype:
        iterated = batch.options["polar"] == "newton_schulz"
        return torch.bfloat16 if iterated and batch.wide == torch.float32 else batch.wide

    def _polar(self, matrices_BMN: Tensor) -> Tensor:
        try:
            return polar_factor(matrices_BMN)
        except torch.linalg.LinAlgError:
            self.fallbacks += 1
            return orthogonalised(matrices_BMN)

    def _move(self, h: Held, update: Tensor, batch: Batch) -> None:
        options = batch.options
        _, m, n = batch_of(h.place.layout.shape, options)
        size = options["lr"] * (0.2 * max(m, n) ** 0.5 if options["scale"] == "rms" else max(1.0, m / n) ** 0.5)
        h.value.mul_(1 - options["lr"] * options["weight_decay"])
        h.value.add_(update, alpha=size if options["maximize"] else -size)


def orthogonalised(matrix_OI: Tensor, num_iterations: int = 5) -> Tensor:
    """About U V^T of the singular value decomposition of a matrix, or of each of a batch; of fp32 in bf16.

    fp32 is iterated in bf16, as the authors do, where the device is fast at it: it only has to come near, and it is the
    whole cost of the step. Elsewhere it is rounded at the end, so that every home has updates of one format.
    """
    a, b, c = _QUINTIC
    wide = matrix_OI.shape[-2] <= matrix_OI.shape[-1]
    x = matrix_OI if wide else matrix_OI.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    added = torch.addmm if x.ndim == 2 else torch.baddbmm
    x = (x.bfloat16() if x.dtype == torch.float32 and bf16_units(x.device) else x).contiguous()
    for _ in range(num_iterations):
        gram = _symmetric(x, lambda own, upto, x=x: x[..., own, :] @ x[..., upto, :].mT)
        quintic = _symmetric(
            x, lambda own, upto, g=gram: added(g[..., own, upto], g[..., own, :], g[..., upto], beta=b, alpha=c)
        )
        x = added(x, quintic, x, beta=a)
    x = x.to(torch.bfloat16 if matrix_OI.dtype == torch.float32 else matrix_OI.dtype)
    return x if wide else x.mT.contiguous()  # row after row, as what it is added to and sent in


def _symmetric(x_MN: Tensor, block: Callable[[slice, slice], Tensor]) -> Tensor:
    """A symmetric matrix [M, M], or a batch of them, of which blocks (rows, columns up to their end) are computed.

    What is above the diagonal's blocks is copied: of three or more, a third of a product or more is saved. A GPU
    multiplies large matrices faster as one.
    """
    size = x_MN.shape[-2]
    num = min(size // _ROWS, 6) if x_MN.device.type == "cpu" else 1
    if num < 2:
        return block(slice(size), slice(size))
    made = x_MN.new_empty(*x_MN.shape[:-1], size)
    for start, stop in pairwise(size * index // num for index in range(num + 1)):
        own = slice(start, stop)
        made[..., own, :stop] = block(own, slice(stop))
        made[..., :start, own] = made[..., own, :start].mT
    return made


def polar_factor(matrix_OI: Tensor) -> Tensor:
    """U V^T, of a matrix or of each of a batch, of the directions that it has, in its dtype; decomposed in fp64."""
    u, sizes, vt = torch.linalg.svd(matrix_OI.double(), full_matrices=False)
    if has_values(matrix_OI):
        u = u * (sizes > negligible(matrix_OI.dtype) * sizes[..., :1])[..., None, :]
    return (u @ vt).to(matrix_OI.dtype)


def _check(
    lr: float, momentum: float, betas: tuple[float, ...], eps: float, weight_decay: float, *, scale: str, polar: str,
    head_dim: int | None,
) -> None:  # fmt: skip
    check_momentum("muon", lr, momentum)
    check_moments("muon", lr, betas, eps, weight_decay)
    check_options(
        "muon",
        scale=(scale, scale in ("rms", "jordan"), "rms or jordan"),
        polar=(polar, polar in ("newton_schulz", "exact"), "newton_schulz or exact"),
        head_dim=(head_dim, head_dim is None or head_dim >= 1, "the rows of a head, or None"),
    )


@dataclass(frozen=True)
class MuonConfig(MatrixConfig):
    name: str = "muon"
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    """of what AdamW updates"""
    eps: float = 1e-8
    """of what AdamW updates"""
    weight_decay: float = 0.1
    """of matrices; vectors (norms, biases) are never decayed"""
    scale: Scale = "rms"
    """length of an update: rms (as AdamW's) or jordan (by the shape)"""
    polar: Polar = "newton_schulz"
    """how a matrix is orthogonalised; exact: by a singular value decomposition"""
    head_dim: int | None = None
    """rows of a head, for fused queries, keys and values orthogonalised head by head; None: as one matrix"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.lr, **self.options())


def _build(config: MuonConfig, masters: Mapping[str, Tensor]) -> Muon:
    return Muon(masters.items(), lr=config.lr, **own_values(config))


SPEC = OptimizerSpec(MuonConfig, partial(matrix_state_bytes, Muon), _build, sized_by=("whole", "momentum_format"))
