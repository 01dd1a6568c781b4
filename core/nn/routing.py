"""The routers of mixtures of experts, which expert takes which token: functions of the routers' probabilities.

    topk           the k experts of the highest probability, whatever their load: nothing is dropped. Gates are the
                   probabilities divided by their sum (Jiang et al. 2024, Mixtral of Experts, section 2.1)
    switch         the best expert, as far as it has room; the gate is its probability (Fedus et al. 2021, Switch
                   Transformers, section 2.1 and 2.2)
    gshard         the best two, as far as they have room; the second with probability 2 g2 (Lepikhin et al. 2020,
                   GShard, algorithm 1). First choices of all tokens have room before second ones
    expert_choice  each expert takes the tokens that give it the highest probability, of equal ones the earliest (Zhou
                   et al. 2022, Mixture-of-Experts with Expert Choice Routing, section 3.2). It sees later tokens, so a
                   causal model generates otherwise than it was trained

The group in which experts have room, tokens queue and loads are balanced is a row of the batch (GShard's local groups).
So what becomes of a token depends on its row alone: not on the other rows, and thus not on microbatches or ranks.
Room of an expert in a row of n tokens: ceil(capacity_factor k n / E), earlier tokens first. A token that finds none
passes by the residual. Padding is routed nowhere and counts for nothing.

Where ranks share rows (context parallelism), `Rows` is what the routers ask for the other ranks' part.

Shapes: B batch (rows), L length held here, S whole length, E experts.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from core.config import UserError

RouterName = Literal["topk", "switch", "gshard", "expert_choice"]

_CAPACITY = {"switch": 1.25, "gshard": 1.25, "expert_choice": 1.0}
_FIXED_PER_TOKEN = {"switch": 1, "gshard": 2}


@dataclass(frozen=True)
class MoEConfig:
    """Experts in the place of MLPs."""

    num_experts: int = 0
    """MLPs that a router chooses from, in the blocks that have experts; 0: every block has one plain MLP"""
    every: int = 1
    """one block of this many has experts: the last of them"""
    router: RouterName = "topk"
    """topk (nothing dropped), switch (top-1), gshard (top-2) or expert_choice"""
    experts_per_token: int | None = None
    """of topk and, on average, expert_choice; 2 by default"""
    capacity_factor: float | None = None
    """room of an expert in a row, in units of an equal share; 1.25 by default, of expert_choice 1; topk has no limit"""
    balance_weight: float = 0.01
    """of the auxiliary loss that balances the experts' loads; it is 1 where they are equal"""
    z_weight: float = 0.0
    """of the mean square of the routers' log-sum-exp (Zoph et al. 2022, ST-MoE, section 3.3)"""
    jitter: float = 0.0
    """in training the routers' input is multiplied by noise from 1 - jitter to 1 + jitter (Switch, appendix)"""
    second_expert: Literal["random", "always"] = "random"
    """of gshard: in training the second expert takes part with probability 2 g2, or wherever it has room"""

    def __post_init__(self) -> None:
        if not self.num_experts:
            for item in fields(self):
                if (value := getattr(self, item.name)) != item.default:
                    raise UserError(
                        f"moe.{item.name}={value} and no experts; give moe.num_experts, or leave {item.name} out"
                    )
            return
        self._check_ranges()
        if self.router in _FIXED_PER_TOKEN and self.experts_per_token not in (None, _FIXED_PER_TOKEN[self.router]):
            raise UserError(
                f"moe.experts_per_token={self.experts_per_token} with router {self.router}, which takes "
                f"{_FIXED_PER_TOKEN[self.router]}; leave it out, or use router topk"
            )
        if self.router == "topk" and self.capacity_factor is not None:
            raise UserError(
                f"moe.capacity_factor={self.capacity_factor} with router topk, which drops nothing; "
                "leave it out, or use router switch, gshard or expert_choice"
            )
        if self.router == "topk" and self.experts_per_token == 1:
            raise UserError(
                "moe.experts_per_token=1 with router topk: a gate divided by itself teaches the router nothing; "
                "use router switch"
            )
        if self.second_expert != "random" and self.router != "gshard":
            raise UserError(f"moe.second_expert={self.second_expert} with router {self.router}; it is of gshard alone")

    def _check_ranges(self) -> None:
        if self.num_experts < max(2, self.per_token):
            raise UserError(
                f"moe.num_experts={self.num_experts} and {self.per_token} a token; "
                f"give at least {max(2, self.per_token)}, or 0 for plain MLPs"
            )
        for name, value, fine, allowed in (
            ("every", self.every, self.every >= 1, "at least 1"),
            ("experts_per_token", self.per_token, self.per_token >= 1, "at least 1"),
            ("capacity_factor", self.capacity, self.capacity > 0, "a positive factor"),
            ("balance_weight", self.balance_weight, self.balance_weight >= 0, "0 or more"),
            ("z_weight", self.z_weight, self.z_weight >= 0, "0 or more"),
            ("jitter", self.jitter, 0 <= self.jitter < 1, "from 0 to below 1"),
        ):
            if not fine:
                raise UserError(f"moe.{name}={value}; give {allowed}")

    @property
    def per_token(self) -> int:
        """Experts that a token is meant for; of expert_choice on average."""
        return _FIXED_PER_TOKEN.get(self.router) or (2 if self.experts_per_token is None else self.experts_per_token)

    @property
    def capacity(self) -> float:
        """The capacity factor; of topk infinite."""
        given = self.capacity_factor
        return given if given is not None else _CAPACITY.get(self.router, float("inf"))

    def has_experts(self, block: int) -> bool:
        """Return whether block number `block` has experts."""
        return self.num_experts > 0 and (block + 1) % self.every == 0


class Rows(Protocol):
    """A rank's view of a batch's rows, of which it may hold a part only. No gradients."""

    def real(self, x_BLD: Tensor, mask: Tensor | None, context: Any) -> Tensor:
        """bool[B, L]: where there is a token and not padding."""
        ...

    def gather(self, x_BLE: Tensor, context: Any) -> Tensor:
        """[B, L, E] -> the whole rows [B, S, E], in order."""
        ...

    def take(self, x_BSE: Tensor, context: Any) -> Tensor:
        """[B, S, E] -> what is held here, [B, L, E]."""
        ...

    def total(self, x_BE: Tensor) -> Tensor:
        """Sums over the part of the rows held here -> over the whole rows."""
        ...

    def own(self, x_B: Tensor) -> Tensor:
        """Figures of all rows of the batch -> of those held here."""
        ...

    def of_batch(self, x: Tensor) -> Tensor:
        """A sum over the rows held here -> over those of the batch."""
        ...


class WholeRows:
    """Rows that this rank holds whole."""

    def real(self, x_BLD: Tensor, mask: Tensor | None, context: Any) -> Tensor:
        batch, length = x_BLD.shape[:2]
        if mask is None:
            return torch.ones(batch, length, dtype=torch.bool, device=x_BLD.device)
        return mask[:, mask.shape[1] - length :].bool()

    def gather(self, x_BLE: Tensor, context: Any) -> Tensor:
        return x_BLE

    def take(self, x_BSE: Tensor, context: Any) -> Tensor:
        return x_BSE

    def total(self, x_BE: Tensor) -> Tensor:
        return x_BE

    def own(self, x_B: Tensor) -> Tensor:
        return x_B

    def of_batch(self, x: Tensor) -> Tensor:
        return x


class Choice(NamedTuple):
    """A router's decision.

    wanted_BLE   bool: what tokens chose, or were chosen for
    kept_BLE     bool: those of them that have room
    gates_BLE    weights of the experts' outputs, with gradients; only where kept they count
    counted_BLE  bool: the choices whose share the balance loss takes
    """

    wanted_BLE: Tensor
    kept_BLE: Tensor
    gates_BLE: Tensor
    counted_BLE: Tensor


class Routing(NamedTuple):
    """The input of `choose` beside the probabilities: the configuration, the rows, and one forward's data."""

    config: MoEConfig
    rows: Rows
    real_BL: Tensor
    tokens_B: Tensor
    context: Any
    training: bool


def choose(p_BLE: Tensor, routing: Routing) -> Choice:
    """The decision of the configured router on the probabilities of all tokens held here."""
    return _ROUTERS[routing.config.router](p_BLE, routing)


class Order(NamedTuple):
    """The origins of all experts' rows, those of one expert behind those of another.

    token_A, expert_A  of each row
    real_A             bool: whether it is one, or fills up to a number that is known beforehand; None: all are
    place_TK           the rows of each token, in the order of its experts, -1 where it has fewer. None: rows are added
                       to their tokens, by a CPU as they lie, by a GPU's atomics in any order, so that sums of three or
                       more (expert choice) differ in the last bits from run to run
    """

    token_A: Tensor
    expert_A: Tensor
    real_A: Tensor | None
    place_TK: Tensor | None = None

    def real(self, x_AD: Tensor) -> Tensor:
        """x, zeros in the rows that are none; so are their gradients."""
        return x_AD if self.real_A is None else torch.where(self.real_A[:, None], x_AD, 0)

    def dealt(self, x_TD: Tensor) -> Tensor:
        """The rows of experts, [A, D], zeros in those that are none."""
        if self.place_TK is None:
            return self.real(x_TD.index_select(0, self.token_A))
        return _Dealt.apply(x_TD, self)  # pyright: ignore[reportReturnType]

    def summed(self, y_AD: Tensor, num_tokens: int) -> Tensor:
        """The sums of the tokens' rows, [T, D]: zeros where a token has none."""
        if self.place_TK is None:
            return y_AD.new_zeros(num_tokens, y_AD.shape[1]).index_add(0, self.token_A, y_AD)
        return _Summed.apply(y_AD, self)  # pyright: ignore[reportReturnType]


class _Dealt(Function):
    """`Order.dealt`. Gradients are summed in one order, too; autograd would add them by atomics on a GPU."""

    @staticmethod
    def forward(ctx, x_TD, order):
        ctx.order = order
        return order.real(x_TD.index_select(0, order.token_A))

    @staticmethod
    def backward(ctx, *grads):
        return _Summed.apply(grads[0], ctx.order), None


class _Summed(Function):
    """`Order.summed`, by each token's rows in their order."""

    @staticmethod
    def forward(ctx, y_AD, order):
        ctx.order = order
        T, K = order.place_TK.shape
        y_TKD = y_AD.index_select(0, order.place_TK.clamp(min=0).flatten()).view(T, K, y_AD.shape[1])
        return torch.where(order.place_TK[..., None] >= 0, y_TKD, 0).sum(1)

    @staticmethod
    def backward(ctx, *grads):
        return _Dealt.apply(grads[0], ctx.order), None


def by_expert(kept_TE: Tensor, most: int | None, per_token: int | None = None) -> Order:
    """The rows of what is kept, bool[T, E].

    most       rows to make, at least as many as are kept: then nobody has to wait for their number
    per_token  rows of a token at most, where that is known
    """
    if most is None:
        expert_A, token_A = kept_TE.T.nonzero(as_tuple=True)
        return Order(token_A, expert_A, None)
    T, E = kept_TE.shape
    kept_N = kept_TE.T.flatten()
    place_N = torch.where(kept_N, kept_N.cumsum(0) - 1, most)  # what is not kept goes behind the rows, all to one place
    source_A = kept_N.new_full((most + 1,), T * E, dtype=torch.long)
    source_A = source_A.scatter(0, place_N, torch.arange(T * E, device=kept_TE.device))[:most]
    real_A = torch.arange(most, device=kept_TE.device) < kept_N.sum()
    source_A = torch.where(real_A, source_A, 0)
    place_TK = None
    if per_token is not None and per_token > 2:
        first_E = torch.arange(E, 0, -1, device=kept_TE.device)
        held_TK, expert_TK = (kept_TE * first_E).topk(per_token, dim=1)
        place_TK = place_N.view(E, T).T.gather(1, expert_TK).masked_fill(held_TK == 0, -1)
    return Order(source_A % T, source_A // T, real_A, place_TK)


def most_per_token(config: MoEConfig) -> int | None:
    """The most experts that a token has; None of expert choice, where they may be all."""
    return None if config.router == "expert_choice" else min(config.per_token, config.num_experts)


def most_rows(config: MoEConfig, rows: Rows, batch: int, length: int) -> int | None:
    """The most rows that experts of this rank's tokens can have; None where that is so many that waiting is better."""
    per_token = most_per_token(config)
    if per_token is not None:
        return batch * length * per_token
    if not isinstance(rows, WholeRows):  # an expert may want all that is held here
        return None
    return batch * config.num_experts * min(length, math.ceil(length * _share(config)))


def _topk(p_BLE: Tensor, routing: Routing) -> Choice:
    wanted = _marked(p_BLE.topk(routing.config.per_token, dim=-1).indices, p_BLE) & routing.real_BL[..., None]
    return Choice(wanted, wanted, _normalised(p_BLE, wanted), wanted)


def _switch(p_BLE: Tensor, routing: Routing) -> Choice:
    wanted = _marked(p_BLE.argmax(-1, keepdim=True), p_BLE) & routing.real_BL[..., None]
    return Choice(wanted, wanted & _has_room(wanted, None, routing), p_BLE, wanted)


def _gshard(p_BLE: Tensor, routing: Routing) -> Choice:
    best = p_BLE.topk(2, dim=-1).indices
    real = routing.real_BL[..., None]
    first, second = (_marked(best[..., n : n + 1], p_BLE) & real for n in range(2))
    gates = _normalised(p_BLE, first | second)
    # As in the paper a second choice that is not sent still queues.
    room = _has_room(second, routing.rows.total(first.sum(1)), routing)
    sent = second
    if routing.training and routing.config.second_expert == "random":
        drawn_BL = torch.rand(p_BLE.shape[:2], dtype=p_BLE.dtype, device=p_BLE.device)
        sent = second & (2 * gates.detach() > drawn_BL[..., None])
    kept = (first & _has_room(first, None, routing)) | (sent & room)
    return Choice(first | sent, kept, gates, first)


def _expert_choice(p_BLE: Tensor, routing: Routing) -> Choice:
    rows, context = routing.rows, routing.context
    score_BLE = p_BLE.detach().masked_fill(~routing.real_BL[..., None], -1.0)
    order_BSE = rows.gather(score_BLE, context).argsort(dim=1, descending=True, stable=True)
    place_BSE = torch.empty_like(order_BSE)
    places = torch.arange(order_BSE.shape[1], device=order_BSE.device)[None, :, None].expand_as(order_BSE)
    place_BSE.scatter_(1, order_BSE, places)
    kept = rows.take(place_BSE < _room(routing), context) & routing.real_BL[..., None]
    return Choice(kept, kept, p_BLE, kept)


_ROUTERS = {"topk": _topk, "switch": _switch, "gshard": _gshard, "expert_choice": _expert_choice}


def _marked(index_BLK: Tensor, like_BLE: Tensor) -> Tensor:
    """bool[B, L, E]: True at the indices."""
    return torch.zeros_like(like_BLE, dtype=torch.bool).scatter_(-1, index_BLK, True)


def _normalised(p_BLE: Tensor, wanted_BLE: Tensor) -> Tensor:
    """Probabilities of the wanted experts divided by their sum; padding, which wants none, gets zeros."""
    chosen = p_BLE * wanted_BLE
    total = chosen.sum(-1, keepdim=True)
    return chosen / total.masked_fill(~wanted_BLE.any(-1, keepdim=True), 1.0)


def _room(routing: Routing) -> Tensor:
    """[B, 1, 1]: tokens that an expert takes of each row."""
    tokens = routing.tokens_B.double()
    share = (tokens * _share(routing.config)).ceil()
    return torch.minimum(share, tokens)[:, None, None]


def _share(config: MoEConfig) -> float:
    """The share of a row's tokens that an expert has room for."""
    return config.capacity * config.per_token / config.num_experts


def _has_room(wanted_BLE: Tensor, before_BE: Tensor | None, routing: Routing) -> Tensor:
    """bool[B, L, E]: whether fewer tokens than an expert takes stand before this one in its queue.

    before_BE  tokens in front of all of these
    """
    whole_BSE = routing.rows.gather(wanted_BLE, routing.context).long()
    place_BSE = whole_BSE.cumsum(1) - whole_BSE
    if before_BE is not None:
        place_BSE = place_BSE + before_BE[:, None]
    return routing.rows.take(place_BSE < _room(routing), routing.context)
