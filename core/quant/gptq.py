"""Rounding a weight so that products with given inputs change little, not so that each of its elements does.

The error of a row w of a weight, rounded to q, over inputs X [N, I] is (w - q) H (w - q)^T with H = X^T X. GPTQ
(Frantar et al. 2023, arXiv:2210.17323) rounds column after column, and what a column loses is made good, as far as it
can be, by those that are not rounded yet. What remains is made less by coordinate descent (QuantEase, Behdin et al.
2023, arXiv:2309.01885):

    1. U with U^T U = (H + damping)^-1, upper triangular (GPTQ, section 3.3, step 3)
    2. for each column i: q_i is w_i in steps of its group; w_j -= (w_i - q_i) U_ij / U_ii for all j > i
    3. some times, for each column: q_i is w_i + sum over j != i of (w_j - q_j) H_ji / H_ii in the same steps

A group's steps are found when the turn of its first column comes, from the weights as they are by then; as in plain
rounding they cover the share of the group's range with the least squared error, where a column counts by what rounding
it costs, 1 / U_ii^2. What is stored and how it is multiplied with is the same as of any `int4` weight.

Where earlier layers are rounded, too, a weight meets x' instead of x. What it is to do to x' is what it did to x, as
far as that goes: W (sum x x'^T) (sum x' x'^T)^-1 is rounded in place of W.

The damping is a share of the mean of H's diagonal.

Shapes: O output channels, I columns, G groups, K columns of a group.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.quantized_matmul import int4_codes, int4_steps, pack_int4

_DAMPING = 0.01
_SWEEPS = 3
_SLAB = 1 << 21
"""Elements of a weight that are rounded at a time, in fp64."""


@dataclass(frozen=True)
class Steps:
    """The steps that a group of columns may have: see `quantize_int4`."""

    group: int
    symmetric: bool
    scale_bits: int
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Moments:
    """Moments of a weight's inputs: sums over tokens of x' x'^T and, where x' are not the plain model's, of x x'^T."""

    hessian_II: Tensor
    cross_II: Tensor | None = None


def gptq(weight_OI: Tensor, moments: Moments, steps: Steps) -> tuple[Tensor, Tensor, Tensor | None]:
    """(packed codes, scales, zeros) as of `quantize_int4`."""
    hessian_II = _damped(moments.hessian_II, moments.hessian_II)
    root_II = torch.linalg.cholesky(hessian_II)
    inverse_II = torch.cholesky_inverse(root_II)
    upper_II = torch.linalg.cholesky(inverse_II, upper=True)
    aim_II = None if moments.cross_II is None else _damped(moments.cross_II, moments.hessian_II) @ inverse_II
    step = max(1, _SLAB // max(weight_OI.shape[1], 1))
    slabs = []
    for start in range(0, max(len(weight_OI), 1), step):
        slab_OI = weight_OI[start : start + step].double()
        slab_OI = slab_OI if aim_II is None else slab_OI @ aim_II
        rounded = _column_by_column(slab_OI, upper_II, steps)
        for _ in range(_SWEEPS):
            rounded.descend(slab_OI, hessian_II)
        slabs.append((pack_int4(rounded.codes_OGK), rounded.scale_OG, rounded.zero_OG))
    codes, scale_OG, zero_OG = (torch.cat(each) for each in zip(*slabs))
    return codes, scale_OG, None if steps.symmetric else zero_OG.to(torch.uint8)


def _damped(matrix_II: Tensor, hessian_II: Tensor) -> Tensor:
    """In fp64; the Hessian itself becomes positive definite."""
    damped_II = matrix_II.double().clone()
    mean = float(hessian_II.diagonal().mean()) if hessian_II.numel() else 0.0
    damped_II.diagonal().add_(_DAMPING * mean if mean > 0 else 1.0)
    return damped_II


@dataclass
class _Rounded:
    """Some rows. The last group is filled up with zeros."""

    codes_OGK: Tensor
    scale_OG: Tensor
    zero_OG: Tensor

    def descend(self, weight_OI: Tensor, hessian_II: Tensor) -> None:
        columns, group = weight_OI.shape[1], self.codes_OGK.shape[2]
        scale_OG1, zero_OG1 = self.scale_OG.double()[..., None], self.zero_OG.double()[..., None]
        lost_OI = weight_OI - ((self.codes_OGK - zero_OG1) * scale_OG1).flatten(1)[:, :columns]
        for number, start in enumerate(range(0, columns, group)):
            within = slice(start, min(start + group, columns))
            lost_OK, hessian_KK = lost_OI[:, within], hessian_II[within, within]
            pull_OK = lost_OI @ hessian_II[:, within]
            scale_O, zero_O, codes_OK = scale_OG1[:, number, 0], zero_OG1[:, number, 0], self.codes_OGK[:, number]
            for column in range(lost_OK.shape[1]):
                best_O = (codes_OK[:, column] - zero_O) * scale_O + pull_OK[:, column] / hessian_KK[column, column]
                code_O = int4_codes(best_O, scale_O, zero_O)
                change_O = (codes_OK[:, column] - code_O) * scale_O
                codes_OK[:, column] = code_O
                lost_OK[:, column] += change_O
                pull_OK += change_O[:, None] * hessian_KK[column]


def _column_by_column(weight_OI: Tensor, upper_II: Tensor, steps: Steps) -> _Rounded:
    weight_OI, columns = weight_OI.clone(), weight_OI.shape[1]
    codes, scales, zeros = [], [], []
    for start in range(0, columns, steps.group):
        within, filling = slice(start, min(start + steps.group, columns)), (0, max(start + steps.group - columns, 0))
        w_OK, upper_KK = weight_OI[:, within], upper_II[within, within]
        importance_K = F.pad(upper_KK.diagonal() ** -2, filling).float()
        scale_O1, zero_O1 = int4_steps(
            F.pad(w_OK.float(), filling)[:, None], steps.symmetric, steps.scale_bits, steps.shares, importance_K
        )
        scale_O, zero_O = scale_O1[:, 0].double(), zero_O1[:, 0].double()
        codes_OK, lost_OK = zero_O1.double().repeat(1, steps.group), torch.empty_like(w_OK)
        for column in range(w_OK.shape[1]):
            codes_OK[:, column] = int4_codes(w_OK[:, column], scale_O, zero_O)
            lost_O = w_OK[:, column] - (codes_OK[:, column] - zero_O) * scale_O
            lost_OK[:, column] = lost_O / upper_KK[column, column]
            w_OK[:, column + 1 :] -= lost_OK[:, column : column + 1] * upper_KK[column, column + 1 :]
        weight_OI[:, within.stop :] -= lost_OK @ upper_II[within, within.stop :]
        codes.append(codes_OK)
        scales.append(scale_O1)
        zeros.append(zero_O1)
    return _Rounded(torch.stack(codes, 1), torch.cat(scales, 1), torch.cat(zeros, 1))
