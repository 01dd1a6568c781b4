"""Muon: momentum whose matrices are orthogonalised before they are applied; AdamW for everything else.

For a hidden matrix W[O, I] with gradient G, each step

1. M <- mu M + G, and with Nesterov's look-ahead U = G + mu M
2. U <- the nearest (semi-)orthogonal matrix to U, by five Newton-Schulz iterations of a quintic polynomial
3. W <- (1 - lr wd) W - lr 0.2 sqrt(max(O, I)) U, so that an entry moves about as far as under AdamW

Embeddings, heads, norms and biases get AdamW. Orthogonalising needs whole matrices, so nothing may be sharded.

Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks; Liu et al. 2025, Muon is scalable for LLM
training, section 2.2 (the factor of step 3).
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from core.precision import bf16_units

_QUINTIC = (3.4445, -4.7750, 2.0315)  # steepest at 0 among those that keep singular values within about [0.7, 1.2]


class Muon(torch.optim.Optimizer):
    """Muon for the parameter groups with `orthogonalise`, AdamW for the others."""

    def __init__(
        self,
        groups: Iterable[dict],
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ):
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, {**defaults, "orthogonalise": False})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None, "a closure would be called before the gradients are reduced"
        for group in self.param_groups:
            (self._muon if group["orthogonalise"] else self._adamw)(group)

    def _muon(self, group: dict) -> None:
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momentum: Tensor = state["momentum_buffer"].mul_(group["momentum"]).add_(parameter.grad)
            update = orthogonalised(parameter.grad.add(momentum, alpha=group["momentum"]))
            scale = 0.2 * max(parameter.shape) ** 0.5
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)

    def _adamw(self, group: dict) -> None:
        parameters = group["params"]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[p] for p in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [p.grad for p in parameters],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            max_exp_avg_sqs=[],
            state_steps=[s["step"] for s in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


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
