"""A user's own module, data and loss: small, with dropout, a buffer that training updates, and uneven rows."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.compose import parallelize
from core.layout import full_tensor
from core.optim.build import OptimConfig, build_optimizer
from core.optim.prediction import Prediction
from core.optim.schedule import ScheduleConfig
from core.parallel.draws import replicated
from core.parallel.tensor1d import colwise, rowwise
from core.placement.stages import PipelinePlan
from core.placement.style import Plan
from core.placement.table import ModelPlan
from core.precision import LossScale
from core.runtime import start
from core.train import TrainConfig, TrainState, fit

PLAN: Plan = {"blocks.*.up": colwise, "blocks.*.down": rowwise, "blocks.*.dropout": replicated}


class Block(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(5, 6), nn.Linear(6, 5), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.up(x).tanh()))


class Small(nn.Module):
    seen: Tensor

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(5, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Rows:
    """A global batch of 8 rows that depends on the step alone."""

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        rows = 8 // num_ranks
        return {"x": x[rank * rows :][:rows], "y": x[rank * rows :][:rows].sum(-1, keepdim=True).sin()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def predicted(model: nn.Module, batch: dict[str, Tensor]) -> Prediction:
    return Prediction(model(batch["x"]), "y", "normal", variance=0.5)


def config_of(out: Path, **options: Any) -> TrainConfig:
    optim = OptimConfig(lr=1e-2, schedule=ScheduleConfig(warmup_steps=2))
    return TrainConfig(**{"out": out, "precision": "fp64", "optim": optim, "device": "cpu", "seed": 3, **options})


def build(config: TrainConfig, model: nn.Module | None = None) -> TrainState:
    """The small model (or another) spread over a fresh mesh, with its optimizer."""
    with start(config.device, config.seed) as runtime:
        mesh = runtime.mesh(config.mesh, config.zero)
        plan = PLAN if config.mesh.tp > 1 else None
        model = Small() if model is None else model
        parallel = parallelize(model, mesh, config, ModelPlan(tensor=plan, pipeline=PipelinePlan("blocks")))
        optimizer = build_optimizer(config.optim, parallel.masters)
        return TrainState(parallel, optimizer, LossScale(config.precision, config.loss_scale), {})


class Noisy(Small):
    """Draws from torch's generator, as a model of somebody else's may."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


def train(
    config: TrainConfig, dropout: float = 0.0, make: type[Small] = Small, **options: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`fit` the small model.  Returns its summary, and its masters and buffers, whole, on every rank."""
    with start(config.device, config.seed) as runtime:
        state = build(config, make(dropout).to(runtime.device))
        summary = fit(state.parallel, state.optimizer, Rows(), loss, config, runtime, **options)
        masters = {n: full_tensor(m).clone() for n, m in state.parallel.masters.items()}
        return summary, masters | dict(state.parallel.model.named_buffers())
