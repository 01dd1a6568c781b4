"""The heads' reading of the pairs, a few rows at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from apps.fold.model.heads import aligned_tm_scores, chain_tm_scores, predicted_aligned_error
from apps.fold.model.network import NetworkHeads
from apps.fold.subbatch.slices import each, put
from core.link import Coming


@dataclass(frozen=True)
class PairNumbers:
    """The heads' results from pairs, in host memory: distances fp16[N, N, 64], pae fp32[N, N] and ptm, or None.

    iptm, chain_pairs  of a complex, [] and [chains, chains] (`apps.fold.model.heads.chain_tm_scores`): the best of the
                       residues that are aligned on
    """

    distances: Tensor | None
    pae: Tensor | None
    ptm: Tensor | None
    iptm: Tensor | None = None
    chain_pairs: Tensor | None = None


def read_pairs(
    heads: NetworkHeads,
    z_BNNZ: Tensor,
    mask_BN: Tensor,
    slices: list[slice],
    host: Callable[..., Tensor] = torch.empty,
    *,
    distances: bool = True,
    chains_N: Tensor | None = None,
) -> PairNumbers:
    """The heads on z[1, N, N, Z], slice by slice of rows; no logits of all pairs are ever there.

    host       makes the results' tensors
    distances  whether they are asked for, which are the largest of all
    chains_N   the chain of each residue of a complex, from 0
    """
    N = z_BNNZ.shape[1]
    near = host((N, N, heads.distogram.out_features), dtype=torch.float16) if distances else None
    pae = None if heads.pae is None else host((N, N), dtype=torch.float32)
    scores, across, by_chain = [], [], []

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
            if chains_N is not None:
                found = chain_tm_scores(logits[0], chains_N, chains_N[at])
                across.append(found[0])
                by_chain.append(found[1])

    each(z_BNNZ, mask_BN, slices, views, read)
    ptm = torch.cat(scores, 1).amax() if scores else None
    if chains_N is None or not across:
        return PairNumbers(near, pae, ptm)
    return PairNumbers(near, pae, ptm, torch.cat(across).amax(), _of_pairs(torch.cat(by_chain), chains_N))


def _of_pairs(by_chain_NC: Tensor, chains_N: Tensor) -> Tensor:
    """The best of the residues of both chains, [chains, chains]."""
    return best_of_both(torch.stack([by_chain_NC[chains_N == chain].amax(0) for chain in range(by_chain_NC.shape[1])]))


def best_of_both(by_chain_CC: Tensor) -> Tensor:
    """Of two chains the better one to be aligned on, [chains, chains]."""
    return torch.maximum(by_chain_CC, by_chain_CC.T)
