"""Text from a decoder: greedy or sampled, batched, with a cache of keys and values.

1. The prompts, padded on the left, go through the decoder once; each layer's `attend` keeps keys and values.
2. Each further token goes through alone and attends over what is kept.

It is the decoder's one forward: the cache is an `attend` like any other, put into the slots for the time of the call.
For many requests at once, with pages and scheduling, there is `apps.serve`.

Shapes: B batch, L queries, S keys so far, H query heads, J key/value heads, K head size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from core.config import UserError
from core.kernels.attention import attention
from core.kernels.operator import runs_kernel
from core.models.decoder import Decoder, positions_from_mask
from core.nn.attention import Attention, StepContext, attention_bias, dot_product_attention, visible_keys


class CachedAttend:
    """`Attend` of one layer that appends keys and values to those of earlier calls and attends over all of them."""

    def __init__(self, capacity: int):
        """capacity: the most tokens that it will hold."""
        self.capacity = capacity
        self.length = 0

    def __call__(
        self,
        q_BLHK: Tensor,
        k_BLJK: Tensor,
        v_BLJK: Tensor,
        /,
        *,
        slopes: Tensor | None,
        mask: Tensor | None,
        positions: Tensor,
        context: StepContext,
    ) -> Tensor:
        k_BSJK, v_BSJK, positions_BS = self._append(k_BLJK, v_BLJK, positions)
        num_queries, num_keys = q_BLHK.shape[1], self.length
        if slopes is None and mask is None and num_queries in (1, num_keys):
            return dot_product_attention(q_BLHK, k_BSJK, v_BSJK, None, is_causal=num_queries > 1)

        if slopes is not None and mask is None and runs_kernel("attention", q_BLHK):
            return attention(q_BLHK, k_BSJK, v_BSJK, causal=True, slopes=slopes)

        def build() -> Tensor:
            visible = visible_keys(num_queries, num_keys, mask, None, q_BLHK.device)
            return attention_bias(visible, slopes, positions, positions_BS, q_BLHK.dtype)

        inputs = tuple(t for t in (mask, positions) if t is not None)
        bias = context.once(("cached bias", num_keys), inputs, build)
        return dot_product_attention(q_BLHK, k_BSJK, v_BSJK, bias, is_causal=False)

    def _append(self, k_BLJK: Tensor, v_BLJK: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.length == 0:
            B, _, J, K = k_BLJK.shape
            self.k = k_BLJK.new_empty(B, self.capacity, J, K)
            self.v = torch.empty_like(self.k)
            self.positions = positions.new_empty(positions.shape[0], self.capacity)
        new = slice(self.length, self.length + k_BLJK.shape[1])
        self.k[:, new], self.v[:, new], self.positions[:, new] = k_BLJK, v_BLJK, positions
        self.length = new.stop
        return self.k[:, : new.stop], self.v[:, : new.stop], self.positions[:, : new.stop]


@contextmanager
def cached(model: Decoder, capacity: int) -> Iterator[None]:
    """Inside, the decoder's calls continue each other, and give the last token's logits only: logits[B, 1, V]."""

    def last_row(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0][:, -1:], *args[1:]

    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    before = [attention.attend for attention in attentions]
    hook = model.head.register_forward_pre_hook(last_row)
    try:
        for attention in attentions:
            attention.attend = CachedAttend(capacity)
        yield
    finally:
        hook.remove()
        for attention, attend in zip(attentions, before, strict=True):
            attention.attend = attend


@torch.no_grad()
def generate(
    model: Decoder,
    input_ids_BL: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    eos_id: int | None = None,
    attention_mask: Tensor | None = None,
    stream: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """[B, L + N]: the prompts, then at most `max_new_tokens` tokens; after its `eos_id` a row repeats it.

    temperature     0 takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature)
    top_k, top_p    draw only from the k likeliest; from the likeliest that together reach probability p
    seed            of the draws; None: another one each time
    attention_mask  [B, L], zero where a prompt is padded on the left
    stream          called with each new token[B] as soon as it is known

    Raises UserError when the model has no positions for that many tokens, or a prompt is empty.
    """
    B, L = input_ids_BL.shape
    capacity = L + max_new_tokens
    _check(model, input_ids_BL, attention_mask, capacity)
    generator = torch.Generator(input_ids_BL.device)
    generator.seed() if seed is None else generator.manual_seed(seed)
    output = input_ids_BL.new_empty(B, capacity)
    output[:, :L] = input_ids_BL
    mask, positions = _mask_and_positions(input_ids_BL, attention_mask, capacity)
    ended_B = torch.zeros(B, dtype=torch.bool, device=input_ids_BL.device)
    first, length = 0, L
    with cached(model, capacity):
        while length < capacity and not ended_B.all():
            seen = None if mask is None else mask[:, :length]
            logits_BV = model(output[:, first:length], seen, positions[:, first:length])[:, -1]
            token_B = _choose(logits_BV, temperature, top_k, top_p, generator)
            if eos_id is not None:
                token_B = token_B.masked_fill(ended_B, eos_id)
                ended_B |= token_B == eos_id
            output[:, length] = token_B
            first, length = length, length + 1
            if stream is not None:
                stream(token_B)
    return output[:, :length]


def _check(model: Decoder, input_ids_BL: Tensor, mask: Tensor | None, capacity: int) -> None:
    if input_ids_BL.shape[1] == 0:
        raise UserError("the prompt is empty; give at least one token")
    if mask is not None and not bool(mask[:, -1].all()):
        raise UserError("a prompt ends in padding; pad prompts on the left")
    config = model.config
    if config.positions == "learned" and capacity > config.max_length:
        raise UserError(
            f"prompt and new tokens are {capacity}; this model has positions for {config.max_length}, so ask for fewer"
        )
    if config.rope_scaling is not None and config.rope_scaling.kind == "longrope":
        _check_turns(input_ids_BL, mask, capacity, config.rope_scaling.original_max_length)


def _check_turns(input_ids_BL: Tensor, mask: Tensor | None, capacity: int, short: int) -> None:
    """Keys are kept as they were turned, so no text may grow from the short factors to the long ones."""
    length = input_ids_BL.shape[1]
    for tokens in [length] if mask is None else (mask != 0).sum(1).tolist():
        most = tokens + capacity - length
        if tokens <= short < most - 1:  # the last token is not looked at
            raise UserError(
                f"prompt and new tokens are {most}; with more than {short} this model turns those before otherwise "
                "(rope_scaling of kind longrope), so ask for fewer, or begin with a prompt of more"
            )


def _mask_and_positions(ids_BL: Tensor, mask_BL: Tensor | None, capacity: int) -> tuple[Tensor | None, Tensor]:
    """Mask[B, capacity] or None, positions[B or 1, capacity]: each row counts from its first token."""
    if mask_BL is None:
        return None, torch.arange(capacity, device=ids_BL.device)[None]
    new = mask_BL.new_ones(mask_BL.shape[0], capacity - mask_BL.shape[1])
    mask = torch.cat((mask_BL, new), 1)
    return mask, positions_from_mask(mask)


def _choose(
    logits_BV: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """token[B]."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.float() / temperature
    if top_k is not None:
        least = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least, -torch.inf)
    probs_BV = logits_BV.softmax(-1)
    if top_p is not None:
        sorted_BV, order_BV = probs_BV.sort(-1, descending=True)
        sorted_BV[sorted_BV.cumsum(-1) - sorted_BV >= top_p] = 0  # what is likelier already reaches p
        probs_BV = torch.zeros_like(probs_BV).scatter_(-1, order_BV, sorted_BV)
    return torch.multinomial(probs_BV, 1, generator=generator).squeeze(1)
