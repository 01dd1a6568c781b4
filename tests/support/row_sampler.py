"""The sampler a row at a time, as it reads: the reference of `apps.serve.sampler`, which takes all rows at once."""

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from apps.serve.request import Sampling, Sequence
from apps.serve.sampler import Sampled, uniform

_LIKELY = 256
_IMPOSSIBLE = -9999.0


def sample(logits_RV: Tensor, sequences: Many[Sequence], ranked: Many[bool]) -> list[Sampled | None]:
    """The next token of each sequence from its row; None where the row names none: NaN, inf, or nothing but -inf.

    ranked  whether a row's logprob is wanted beside those that its request asks for
    """
    largest_R, likeliest_R = logits_RV.max(-1)  # NaN where a row has one
    finite, likeliest = largest_R.isfinite().tolist(), likeliest_R.tolist()
    sampled: list[Sampled | None] = []
    for row, sequence in enumerate(sequences):
        token = None
        if finite[row]:
            token = likeliest[row] if _is_plain(sequence) else _choose(logits_RV[row], sequence)
        count = sequence.request.logprobs
        if token is None:
            sampled.append(None)
        elif count is None and not ranked[row]:
            sampled.append(Sampled(token))
        else:
            sampled.append(report(logits_RV[row], token, count or 0))
    return sampled


def report(logits_V: Tensor, token: int, count: int) -> Sampled:
    """A token with its logprob and the `count` likeliest, of the model's own distribution.

    What has no probability at all gets the logprob _IMPOSSIBLE, since JSON has no infinity.
    """
    logprobs_V = logits_V.double().log_softmax(-1).clamp_min(_IMPOSSIBLE)
    values, ids = logprobs_V.topk(min(count, len(logprobs_V)))
    return Sampled(token, float(logprobs_V[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _is_plain(sequence: Sequence) -> bool:
    """Is it the argmax of the logits as they are?"""
    s = sequence.request.sampling
    unchanged = s.repetition_penalty == 1 and s.presence_penalty == s.frequency_penalty == 0 and not s.logit_bias
    return s.temperature == 0 and unchanged and sequence.num_written >= sequence.request.min_tokens


def _choose(logits_V: Tensor, sequence: Sequence) -> int | None:
    request = sequence.request
    logits_V = adjusted(logits_V, sequence)
    if sequence.num_written < request.min_tokens:
        logits_V[list(request.stop_ids)] = -torch.inf
    if not logits_V.max().isfinite():
        return None
    if request.sampling.temperature == 0:
        return int(logits_V.argmax())
    u = uniform(request.sampling.seed, sequence.index, sequence.num_written)
    return draw(logits_V, request.sampling, u)


def adjusted(logits_V: Tensor, sequence: Sequence) -> Tensor:
    """A copy of the logits with bias and penalties."""
    s, logits_V = sequence.request.sampling, logits_V.clone()
    if s.logit_bias:
        logits_V[list(s.logit_bias)] += torch.tensor(list(s.logit_bias.values()), device=logits_V.device)
    if s.repetition_penalty != 1:
        seen = list(set(sequence.tokens))
        values = logits_V[seen]
        logits_V[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if sequence.written and (s.presence_penalty or s.frequency_penalty):
        counts = torch.tensor(list(sequence.written.values()), device=logits_V.device, dtype=logits_V.dtype)
        logits_V[list(sequence.written)] -= s.presence_penalty + s.frequency_penalty * counts
    return logits_V


def draw(logits_V: Tensor, s: Sampling, u: float) -> int:
    """The token at the quantile `u` of those that are kept, in the order in which they are cumulated."""
    logits_V = logits_V.double()
    probs_V = ((logits_V - logits_V.max()) / s.temperature).softmax(-1)  # so that a tiny temperature overflows to 0
    if s.top_k is None and s.top_p == 1:
        order = None
        if s.min_p > 0:
            probs_V = probs_V.where(probs_V >= s.min_p * probs_V.max(), 0)
        kept_N = probs_V
    else:
        kept_N, order = _likeliest(probs_V, s)
        kept_N = kept_N.where(kept_N >= s.min_p * kept_N[0], 0)
    cumulative_N = kept_N.cumsum(-1)
    place = int(torch.searchsorted(cumulative_N, u * cumulative_N[-1], right=True))
    place = min(place, int(kept_N.nonzero()[-1]))  # u below 1 by less than the sum's rounding
    return place if order is None else int(order[place])


def _likeliest(probs_V: Tensor, s: Sampling) -> tuple[Tensor, Tensor]:
    """(probabilities, tokens) that top-k and top-p keep, likeliest first."""
    vocab_size = len(probs_V)
    count = min(s.top_k or min(_LIKELY, vocab_size), vocab_size)
    probs_N, order_N = probs_V.topk(count)
    if s.top_p == 1:
        return probs_N, order_N
    if s.top_k is None and float(probs_N.sum()) < s.top_p:
        probs_N, order_N = probs_V.sort(descending=True)
    mass = probs_N.sum() if s.top_k is not None else 1.0
    keep = int((probs_N.cumsum(-1) - probs_N < s.top_p * mass).sum())  # what is likelier does not reach p yet
    return probs_N[: max(1, keep)], order_N[: max(1, keep)]
