"""A sequence's history on the device, for bias and penalties: which tokens it has, which come easier or not yet.

Each sequence that has any of them gets a lane, a row of tables over the vocabulary; most have none. The tables are
written by the step that draws a token, so the next one may begin before the host has read it.

Shapes: R rows of a step, L lanes, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from apps.serve.machine import Machine
from apps.serve.request import Sequence

BYTES = 9
"""Of a lane, a token."""


class Histories:
    """Lanes of one model. The last one is nobody's and stays empty.

    counts  int32[L + 1, V]: twice how often a token was written, and one more where it is in the prompt
    bias    fp32[L + 1, V]: what is added to logits
    ends    bool[L + 1, V]: tokens that end the text
    """

    def __init__(self, vocab_size: int, machine: Machine):
        self.vocab_size, self.machine = vocab_size, machine
        self.stays = False
        self._lanes: dict[int, int] = {}
        self._free: list[int] = []
        self._make(0)

    def _make(self, num_lanes: int) -> None:
        def table(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_lanes + 1, self.vocab_size, dtype=dtype, device=self.machine.device)

        self.counts, self.bias, self.ends = table(torch.int32), table(torch.float32), table(torch.bool)
        self.num_lanes = num_lanes

    def reserve(self, num_lanes: int) -> None:
        """Have so many lanes. Tables move where there were fewer, which must not be once a graph knows their places."""
        if num_lanes <= self.num_lanes:
            return
        assert not self.stays, "a captured step knows where the tables are"
        before, old = (self.counts, self.bias, self.ends), self.num_lanes
        self._make(num_lanes)
        for new, table in zip((self.counts, self.bias, self.ends), before, strict=True):
            new[:old] = table[:old]
        self._free.extend(range(num_lanes - 1, old - 1, -1))

    def lane(self, sequence: Sequence) -> int:
        """The lane of a sequence, all of whose tokens are known when it is asked for first."""
        if sequence.number not in self._lanes:
            if not self._free:
                self.reserve(max(4, 2 * self.num_lanes))
            lane = self._lanes[sequence.number] = self._free.pop()
            self._fill(lane, sequence)
        return self._lanes[sequence.number]

    def release(self, sequence: Sequence) -> None:
        lane = self._lanes.pop(sequence.number, None)
        if lane is not None:
            self._free.append(lane)

    def _fill(self, lane: int, sequence: Sequence) -> None:
        request, counts = sequence.request, np.zeros(self.vocab_size, dtype=np.int32)
        counts[list(request.prompt)] = 1
        for token, count in sequence.written.items():
            counts[token] += 2 * count
        self._put(self.counts[lane], counts)
        bias = np.zeros(self.vocab_size, dtype=np.float32)
        bias[list(request.sampling.logit_bias)] = list(request.sampling.logit_bias.values())
        self._put(self.bias[lane], bias.view(np.int32))
        self.ends[lane].zero_()
        if request.min_tokens and request.stop_ids:
            ends = np.zeros(self.vocab_size, dtype=np.int32)
            ends[list(request.stop_ids)] = 1
            self._put(self.ends[lane], ends)

    def _put(self, row: Tensor, values: np.ndarray) -> None:
        words = self.machine.words(len(values))
        words.numpy()[:] = values
        there = self.machine.put(words)
        row.copy_(there.view(row.dtype) if row.dtype.itemsize == 4 else there)

    # --- in a step ----------------------------------------------------------------------------------------------------

    def adjusted(
        self, logits_RV: Tensor, lane_R: Tensor, barred_R: Tensor, repetition_R: Tensor, presence_R: Tensor,
        frequency_R: Tensor, looks: bool = False,
    ) -> Tensor:  # fmt: skip
        """Logits with bias and penalties, and without ends where they are barred; rows without a lane stay as they are.

        lane_R and the others  fp64, as the sampler has them
        looks                  only tokens that are there are touched, which is looked up on the host
        """
        lane_R, dtype = self._index(lane_R), logits_RV.dtype
        counts_RV, bias_RV = self.counts[lane_R], self.bias[lane_R]
        paid_3R1 = [x.to(dtype)[:, None] for x in (repetition_R, presence_R, frequency_R)]
        if not looks:
            x_RV = _penalised(logits_RV + bias_RV, counts_RV, *paid_3R1)
            return x_RV.masked_fill(self.ends[lane_R] & (barred_R > 0)[:, None], -torch.inf)
        x_RV = logits_RV + bias_RV if bool(bias_RV.any()) else logits_RV.clone()
        row, token = counts_RV.nonzero(as_tuple=True)
        x_RV[row, token] = _penalised(x_RV[row, token], counts_RV[row, token], *(x[row, 0] for x in paid_3R1))
        if bool((barred_R > 0).any()):
            x_RV.masked_fill_(self.ends[lane_R] & (barred_R > 0)[:, None], -torch.inf)
        return x_RV

    def add(self, lane_R: Tensor, token_R: Tensor) -> None:
        """The tokens that were drawn."""
        at_R = self._index(lane_R) * self.vocab_size + token_R.clamp(min=0)
        self.counts.view(-1).scatter_add_(0, at_R, ((lane_R >= 0) * 2).to(torch.int32))

    def _index(self, lane_R: Tensor) -> Tensor:
        return lane_R.long().where(lane_R >= 0, self.num_lanes)


def _penalised(x: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Logits of tokens that a sequence has or has not, by `Histories.counts`."""
    x = torch.where(counts > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    written = counts >> 1
    return torch.where(written > 0, x - (presence + frequency * written.to(x.dtype)), x)
