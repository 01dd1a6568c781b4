"""Modules that were never written for this: n ranks train them as one rank does, at every ZeRO level."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from core.compose import ParallelConfig, parallelize
from core.layout import full_tensor
from core.mesh import MeshConfig, Zero, build_mesh
from core.optim.build import OptimConfig, build_optimizer
from core.precision import LossScale
from core.train import TrainConfig, TrainState, num_rows, train_step

LR, STEPS = 1e-2, 6


def gpt2() -> nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 23, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 3}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def gpt2_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["input_ids"]
    logits = model(input_ids=ids).logits  # its own loss computes in fp32
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Convolutional(nn.Module):
    """Batch norm with its running statistics in buffers, a channels-last weight, and a layer that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 2)
        self.convolution.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.convolution(x)).relu().mean((2, 3)))


def convolutional_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "input_ids": torch.randint(0, 23, (4, 7), generator=generator),
        "x": torch.randn(4, 3, 6, 6, dtype=torch.float64, generator=generator),
        "y": torch.randn(4, 2, dtype=torch.float64, generator=generator),
    }


def trained(kind: str, zero: Zero, same_rows: bool) -> dict[str, Any]:
    """Losses, and where the parameters began and ended, whole.

    same_rows  give every rank the whole batch, not its share: statistics over a batch do not split over ranks
    """
    model, loss = {"gpt2": (gpt2, gpt2_loss), "convolutional": (Convolutional, convolutional_loss)}[kind]
    config = TrainConfig(zero=zero, precision="fp64", steps=STEPS, optim=OptimConfig(lr=LR, clip_norm=0.5))
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = build_mesh(MeshConfig().resolve(ranks, zero), "cpu")
    parallel = parallelize(model(), mesh, ParallelConfig(zero=zero, precision="fp64"))
    state = TrainState(parallel, build_optimizer(config.optim, parallel.masters), LossScale("fp64"), {})
    start = {n: full_tensor(m).clone() for n, m in parallel.masters.items()}
    losses = []
    for step in range(STEPS):
        rows = slice(None) if same_rows else slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
        batch = {k: v[rows] for k, v in batch_of(step).items()}
        losses.append(train_step(state, batch, loss, num_rows, config, step)["loss"])
    return {"losses": losses, "start": start, "end": {n: full_tensor(m).clone() for n, m in parallel.masters.items()}}


@pytest.mark.parametrize("kind", ["gpt2", "convolutional"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_ranks_equal_one(ranks, kind: str, zero: Zero) -> None:
    same_rows = kind == "convolutional"
    expected = ranks(1).run(trained, kind, 0, same_rows)[0]
    for found in ranks(2).run(trained, kind, zero, same_rows):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        for name, end in expected["end"].items():
            assert torch.equal(found["start"][name], expected["start"][name])
            moved = end - expected["start"][name]
            difference = (found["end"][name] - end).norm()
            floor = 1e-3 * LR * STEPS * moved.numel() ** 0.5
            assert difference <= 1e-10 * max(float(moved.norm()), floor), name
