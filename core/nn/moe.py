"""Mixture of experts: in the place of a block's MLP many of them, and a router that sends each token to a few.

    x[B, L, D] -> probabilities[B, L, E] -> choice -> rows[A, D] by expert -> experts -> gated sums[B, L, D]

1. The router: softmax(W x), in fp32 or wider whatever the model's format (Switch Transformers, section 2.4).
2. `core.nn.routing` decides which expert takes which token.
3. The tokens that experts take are laid out expert by expert: on a CPU as many rows as were kept; on a GPU, where the
   host would have to wait to know how many, as many as there can be, with zeros behind (`core.nn.routing.most_rows`).
4. The experts; under expert parallelism those of all ranks (`core.parallel.expert`).
5. Each token's outputs, times their gates, are summed; a token that no expert takes gets zeros, and the residual of the
   block carries it on.

What routers add to the loss (`AuxiliaryLoss`) is defined for each row of the batch:

    balance   E sum_e f_e P_e     f_e the share of the row's choices that fell on e, P_e the mean of its probability
                                  (Switch, equation 4; 1 when balanced; of gshard f counts first choices, as in its
                                  algorithm 1; expert choice is balanced by construction and has none)
    z         mean_l logsumexp(h_l)^2                                             (ST-MoE, equation 5)

and enters the sum of the token losses times the row's targets: the mean over targets that training takes is then the
mean over rows, weighted by their targets, summed over the layers. It is the same on any ranks and in any microbatches.

Shapes: B batch, L length, T = B L, D model, E experts, A rows of all experts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from core.compat import uncompiled
from core.nn.experts import Experts
from core.nn.mlp import ActivationName
from core.nn.routing import Choice, MoEConfig, Routing, Rows, WholeRows, by_expert, choose, most_per_token, most_rows
from core.trace.balanced import are_balanced

COUNTS_ROWS = ("cpu", "meta")
"""Devices that the host need not wait for to know how many rows there are."""


class Router(nn.Module):
    """The logits of the experts, in fp32 or wider: weight[E, D]."""

    factored_as = "router"  # see `core.optim.kfac_layers.kind_of`

    def __init__(self, dim: int, num_experts: int):
        super().__init__()
        self.weight = nn.Linear(dim, num_experts, bias=False).weight

    def forward(self, x_BLD: Tensor) -> Tensor:
        wide = torch.promote_types(x_BLD.dtype, torch.float32)
        return nn.functional.linear(x_BLD.to(wide), self.weight.to(wide))


class MoE(nn.Module):
    """Experts behind a router; takes the place of `core.nn.mlp.MLP`.

    rows    a slot: what is known of rows of which this rank holds a part only
    share   the part of the auxiliary loss whose gradient this rank contributes, where several compute the same router
    """

    def __init__(self, dim: int, hidden: int, activation: ActivationName, bias: bool, config: MoEConfig):
        super().__init__()
        self.config = config
        self.router = Router(dim, config.num_experts)
        self.experts = Experts(config.num_experts, dim, hidden, activation, bias)
        self.rows: Rows = WholeRows()
        self.share = 1.0
        self.load: Tensor | None = None

    @uncompiled  # torch.compiler.disable, without importing torch's tracer, a second, in every process
    def forward(
        self, x_BLD: Tensor, positions_BL: Tensor | None = None, mask: Tensor | None = None, context: Any = None
    ) -> Tensor:
        """x[B, L, D] -> [B, L, D].

        positions  [B or 1, L]; rows of x beyond its L are padding of a sharded sequence and dropped
        mask       [B, L], or of more keys: nonzero where there is a token; what is padding goes to no expert
        context    its `auxiliary`, where it has one, takes what the router adds to the loss
        """
        if positions_BL is not None:
            x_BLD = x_BLD[:, : positions_BL.shape[1]]
        real_BL = self.rows.real(x_BLD, mask, context)
        tokens_B = self.rows.total(real_BL.sum(1, keepdim=True))[:, 0]
        logits_BLE = self.router(self._noisy(x_BLD))
        p_BLE = logits_BLE.softmax(-1)
        routing = Routing(self.config, self.rows, real_BL, tokens_B, context, self.training)
        choice = choose(p_BLE, routing)
        y_BLD = self._through_experts(x_BLD, choice)
        auxiliary = getattr(context, "auxiliary", None)
        if auxiliary is None:
            return y_BLD
        return self._account(y_BLD, logits_BLE, p_BLE, choice, routing, auxiliary)

    def _noisy(self, x_BLD: Tensor) -> Tensor:
        jitter = self.config.jitter
        if not self.training or jitter == 0:
            return x_BLD
        return x_BLD * torch.empty_like(x_BLD).uniform_(1 - jitter, 1 + jitter)

    def _through_experts(self, x_BLD: Tensor, choice: Choice) -> Tensor:
        x_TD, kept_TE, gates_TE = (x.flatten(0, 1) for x in (x_BLD, choice.kept_BLE, choice.gates_BLE))
        counts = x_BLD.device.type in COUNTS_ROWS
        most = None if counts and not are_balanced() else most_rows(self.config, self.rows, *x_BLD.shape[:2])
        order = by_expert(kept_TE, most, None if counts else most_per_token(self.config))
        y_AD = self.experts(order.dealt(x_TD), kept_TE.sum(0))
        y_AD = y_AD * order.real(gates_TE[order.token_A, order.expert_A].to(y_AD.dtype)[:, None])
        return order.summed(y_AD, len(x_TD)).view_as(x_BLD)

    def _account(
        self,
        y_BLD: Tensor,
        logits_BLE: Tensor,
        p_BLE: Tensor,
        choice: Choice,
        routing: Routing,
        auxiliary: "AuxiliaryLoss",
    ) -> Tensor:
        """Join the router's losses to the forward's, and note the experts' load where this is the first time."""
        real_BL1 = routing.real_BL[..., None]
        per_token_B1 = 1 / routing.tokens_B.clamp(min=1).to(p_BLE.dtype)[:, None]
        counts_BE = self.rows.total(choice.counted_BLE.sum(1)).to(p_BLE.dtype)
        share_BE = counts_BE / counts_BE.sum(1, keepdim=True).clamp(min=1)
        mean_BE = (p_BLE * real_BL1).sum(1) * per_token_B1
        balance_B = self.config.num_experts * (share_BE * mean_BE).sum(1)
        z_B = (logits_BLE.logsumexp(-1).square() * routing.real_BL).sum(1) * per_token_B1[:, 0]
        if self.config.router == "expert_choice":
            balance_B = torch.zeros_like(balance_B)
        weight_B = self.rows.own(auxiliary.weight_B).to(p_BLE.dtype)
        balance, z = (balance_B * weight_B).sum(), (z_B * weight_B).sum()
        if auxiliary.open and torch.is_grad_enabled():
            self._note(choice, routing, balance.detach(), z.detach(), weight_B)
        loss = self.config.balance_weight * balance + self.config.z_weight * z
        return auxiliary.attach(y_BLD, loss, self.share, self.rows.of_batch)

    def _note(self, choice: Choice, routing: Routing, balance: Tensor, z: Tensor, weight_B: Tensor) -> None:
        rows_E = choice.kept_BLE.sum((0, 1)).double()
        if self.config.router == "expert_choice":  # what counts there is whether any expert took a token
            wanted = routing.real_BL.sum()
            dropped = wanted - choice.kept_BLE.any(-1).sum()
        else:
            wanted = choice.wanted_BLE.sum()
            dropped = wanted - choice.kept_BLE.sum()
        # Rows that ranks share are counted by each for its part.
        weight = (weight_B * routing.real_BL.sum(1) / routing.tokens_B.clamp(min=1)).sum()
        load = torch.cat([rows_E, torch.stack([wanted, dropped, balance, z, weight]).double()])
        self.load = load if self.load is None else self.load + load


class AuxiliaryLoss:
    """The sum that the routers of one forward add to its loss.

    Values are summed as the layers compute them; their gradient is the one that the loss itself gets, whatever it is
    multiplied by, and goes to each layer together with the gradient of that layer's output. So it needs no place in the
    blocks' outputs, and a layer that is computed again for its backward gets it, too.

    A forward that other ranks begin, or go on with, takes `value` from rank to rank, and the backward `grad` the other
    way (`core.parallel.pipeline`).

    weight_B  of each row: its targets, those that other ranks hold included
    value     the sum so far; None: nothing was attached
    open      whether what is attached is counted; not, when the forward is over and a block is computed again
    grad      of the total, from the beginning of the backward on
    """

    def __init__(self, weight_B: Tensor):
        self.weight_B = weight_B
        self.open = True
        self.grad: Tensor | None = None
        self.value: Tensor | None = None

    def attach(
        self, y: Tensor, loss: Tensor, share: float = 1.0, of_batch: Callable[[Tensor], Tensor] = lambda x: x
    ) -> Tensor:
        """y, whose backward also gives `loss` the gradient of the total, times `share`.

        of_batch  what counts is this of the loss
        """
        if self.open:
            value = of_batch(loss.detach())
            self.value = value if self.value is None else self.value + value
        return _Attach.apply(y, loss, share, self)  # pyright: ignore[reportReturnType]

    def added_to(self, total: Tensor) -> Tensor:
        """The total of the forward with all that was attached in it; what is attached after this is not counted."""
        self.open = False
        if self.value is None:
            return total
        return _Collect.apply(total, self.value.to(total.dtype), self)  # pyright: ignore[reportReturnType]


class _Attach(Function):
    @staticmethod
    def forward(ctx, y, loss, share, auxiliary):
        ctx.share, ctx.auxiliary, ctx.dtype = share, auxiliary, loss.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx, *grads):
        grad = ctx.auxiliary.grad
        assert grad is not None, "the layers' gradients come after that of the loss"
        return grads[0], grad.to(ctx.dtype) * ctx.share, None, None


class _Collect(Function):
    @staticmethod
    def forward(ctx, total, value, auxiliary):
        ctx.auxiliary = auxiliary
        return total + value

    @staticmethod
    def backward(ctx, *grads):
        ctx.auxiliary.grad = grads[0]
        return grads[0], None, None


def take_load(model: nn.Module, device: torch.device) -> Tensor | None:
    """fp64[layers, E + 5]: what this rank's experts were given since this was last asked, to be summed over the ranks.

    None for a model without experts; zeros for layers that this rank does not compute. For each layer: rows of each
    expert, choices, those dropped, then sums of balance loss, z-loss and weights.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    found = [
        torch.zeros(m.config.num_experts + 5, dtype=torch.float64, device=device) if m.load is None else m.load
        for m in layers
    ]
    for module in layers:
        module.load = None
    return torch.stack(found) if found else None


def load_figures(load: Tensor) -> dict[str, Any]:
    """The metrics of a step's load (see `take_load`), summed over all ranks.

    moe_dropped    choices that found no room, of all (expert choice: tokens that no expert took)
    moe_balance    the auxiliary loss, mean over rows and layers, without its weight
    moe_z          likewise
    moe_imbalance  the rows of the fullest expert over those of the mean, in the layer where that is worst
    moe_load       for each layer with experts, the rows of each expert
    """
    rows_NE, (wanted, dropped, balance, z, weight) = load[:, :-5], load[:, -5:].sum(0).tolist()
    mean_N = rows_NE.mean(1).clamp(min=1e-300)
    return {
        "moe_dropped": dropped / max(wanted, 1.0),
        "moe_balance": balance / max(weight, 1e-300),
        "moe_z": z / max(weight, 1e-300),
        "moe_imbalance": float((rows_NE.amax(1) / mean_N).max()),
        "moe_load": [[round(rows) for rows in layer] for layer in rows_NE.tolist()],
    }
