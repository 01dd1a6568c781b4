"""A small model of every kind of layer that K-FAC factors, trained by the real training step on any mesh."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from core.compose import ParallelConfig, parallelize
from core.mesh import MeshConfig, build_mesh, data_axis
from core.optim.build import OptimConfig, build_optimizer
from core.optim.prediction import Prediction
from core.optim.schedule import ScheduleConfig
from core.parallel.tensor1d import colwise, rowwise, vocab_embedding
from core.placement.style import Plan
from core.placement.table import ModelPlan
from core.precision import LossScale
from core.train import TrainConfig, TrainState, train_step
from core.train.curvature import curvature_of
from tests.support.training import held, moved_since

PLAN: Plan = {"embedding": vocab_embedding, "blocks.*.up": colwise, "blocks.*.down": rowwise}
BATCH, LENGTH, VOCABULARY, DIM = 12, 5, 11, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(DIM, 7), nn.Linear(7, DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Experts(nn.Module):
    """A token goes to one of four experts, whose matrices are stacked as those of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 4)
        self.up_proj, self.down_proj = nn.Parameter(torch.randn(4, 7, DIM)), nn.Parameter(torch.randn(4, DIM, 7) / 3)

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for expert in chosen.unique():
            here = chosen == expert
            hidden = F.linear(x[here], self.up_proj[expert]).tanh()
            y = y.masked_scatter(here[..., None], F.linear(hidden, self.down_proj[expert]) * shares[here][:, None])
        return x + y


class Curved(nn.Module):
    """tokens [B, L] -> logits [B, L, V], by an embedding, a convolution, linear layers and a Conv1D.

    tied     the head has the embedding's table
    experts  whether there are some
    """

    def __init__(self, tied: bool = False, experts: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.conv, self.mix = nn.Conv1d(DIM, DIM, 3, padding=1), Conv1D(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        if experts:
            self.blocks.append(Experts())
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.mix(self.conv(x.mT).mT.contiguous().tanh())
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def predict(model: nn.Module, batch: dict[str, Tensor]) -> Prediction:
    return Prediction(model(batch["tokens"]), "targets", "categorical")


def weight(batch: dict[str, Tensor]) -> Tensor:
    return (batch["targets"] != -100).sum().double()


@dataclass(frozen=True)
class Case:
    mesh: MeshConfig = field(default_factory=MeshConfig)
    zero: Any = 0
    microbatch: int | None = None
    tied: bool = False
    experts: bool = False
    steps: int = 4
    optim: Any = "kfac"
    options: tuple[tuple[str, Any], ...] = ()


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(50 + step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, : 1 + step % 3] = -100
    return {"tokens": tokens[:, :-1], "targets": targets}


def build(case: Case) -> tuple[TrainState, TrainConfig]:
    schedule = ScheduleConfig(warmup_steps=2)
    config = TrainConfig(
        **vars(ParallelConfig(zero=case.zero, precision="fp64")),
        mesh=case.mesh,
        steps=case.steps,
        microbatch=case.microbatch,
        optim=OptimConfig(case.optim, schedule=schedule, **dict(case.options)),
    )
    mesh = build_mesh(config.mesh.resolve(dist.get_world_size(), config.zero), "cpu")
    torch.manual_seed(1)
    model = Curved(case.tied, case.experts).double()
    parallel = parallelize(model, mesh, config, ModelPlan(tensor=PLAN if case.mesh.tp > 1 else None))
    optimizer = build_optimizer(config.optim, parallel.masters)
    state = TrainState(parallel, optimizer, LossScale(config.precision), {})
    state.curvature = curvature_of(parallel, optimizer, predict, config)
    parallel.prepare(optimizer, None)
    return state, config


def run(case: Case) -> dict[str, Any]:
    """Losses, and this rank's pieces of the start and the displacement."""
    state, config = build(case)
    axis = data_axis(state.parallel.mesh)
    rows = BATCH // axis.size()
    start, losses = held(state.parallel.masters), []
    for step in range(case.steps):
        mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(step).items()}
        losses.append(train_step(state, mine, loss, weight, config, step)["loss"])
    return {"losses": losses, "start": start, "displacement": moved_since(start, state.parallel.masters)}
