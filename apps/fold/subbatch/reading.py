"""The heads' reading of the pairs, a few rows at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from apps.fold.model.heads import aligned_tm_scores, predicted_aligned_error
from apps.fold.model.network import NetworkHeads
from apps.fold.subbatch.slices import each, put
from core.link import Coming


@dataclass(frozen=True)
class PairNumbers:
    """The heads' results from pairs, in host memory: distances fp16[N, N, 64], pae fp32[N, N] and ptm, or None."""

    distances: Tensor | None
    pae: Tensor | None
    ptm: Tensor | None


def read_pairs(
    heads: NetworkHeads,
    z_BNNZ: Tensor,
    mask_BN: Tensor,
    slices: list[slice],
    host: Callable[..., Tensor] = torch.empty,
    *,
    distances: bool = True,
) -> PairNumbers:
    """The heads on z[1, N, N, Z], slice by slice of rows; no logits of all pairs are ever there.

    host       makes the results' tensors
    distances  whether they are asked for, which are the largest of all
    """
    N = z_BNNZ.shape[1]
    near = host((N, N, heads.distogram.out_features), dtype=torch.float16) if distances else None
    pae = None if heads.pae is None else host((N, N), dtype=torch.float32)
    scores = []

    def views(at: slice) -> list[Tensor]:
        return [z_BNNZ[:, at]] + [z_BNNZ[:, :, at]] * (near is not None)

    def read(at: slice, rows: Coming, *columns: Coming) -> None:
        z_BINZ = rows.take()
        if near is not None:
            back_BINZ = columns[0].take().transpose(1, 2)
            logits = heads.distogram(z_BINZ).add_(heads.distogram(back_BINZ))
            put(near[at], torch.softmax(logits.float(), -1)[0])
            del back_BINZ, logits
        if heads.pae is not None and pae is not None:
            logits = heads.pae(z_BINZ)
            put(pae[at], predicted_aligned_error(logits)[0])
            scores.append(aligned_tm_scores(logits, mask_BN))

    each(z_BNNZ, mask_BN, slices, views, read)
    return PairNumbers(near, pae, torch.cat(scores, 1).amax() if scores else None)
