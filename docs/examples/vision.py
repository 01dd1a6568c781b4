"""Train a module that knows nothing of this project: a narrow ResNet, on the digits of UCI.

python docs/examples/vision.py --optim.name lars --noise-scale --microbatch 16
torchrun --nproc-per-node 2 docs/examples/vision.py --zero 2
"""

import gzip
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.compose import parallelize
from core.config import UserError, parse, run_command
from core.data import MapBatches
from core.optim import ScheduleConfig, build_optimizer
from core.optim.prediction import Prediction
from core.optim.sgd import SgdConfig
from core.runtime import start
from core.train import TrainConfig, fit, open_run

DIGITS = Path(__file__).parents[2] / "benchmarks" / "data" / "digits.csv.gz"
HELDOUT = 797
CLASSES = 10


@dataclass(frozen=True)
class VisionConfig(TrainConfig):
    """A training run, and what this program adds to it: every field is an option of the command line."""

    ESSENTIAL: ClassVar[tuple[str, ...]] = ("rows", *TrainConfig.ESSENTIAL)

    rows: int = 64
    """images of a step, of all ranks"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows < 1:
            raise UserError(f"rows={self.rows}; give the images of a step, at least 1")


def debug() -> VisionConfig:
    schedule = ScheduleConfig(warmup_steps=10)
    optim = SgdConfig(lr=0.2, weight_decay=5e-4, clip_norm=None, schedule=schedule)
    return VisionConfig(steps=150, out=Path("runs/vision"), optim=optim)


class Block(nn.Module):
    """Two convolutions and a shortcut without parameters (He et al. 2015, arXiv:1512.03385, section 3.3, option A)."""

    def __init__(self, num_in: int, num_out: int, stride: int, norm: type[nn.Module]):
        super().__init__()
        self.stride, self.more = stride, num_out - num_in
        self.conv1, self.norm1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False), norm(num_out)
        self.conv2, self.norm2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False), norm(num_out)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more)) + y).relu()


class ResNet(nn.Module):
    """The shape of section 4.2 there, a block a stage, and an eighth as wide by default: x[B, 1, 8, 8] -> [B, 10]."""

    def __init__(self, widths: tuple[int, ...] = (8, 16, 32), norm: type[nn.Module] = nn.BatchNorm2d):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, widths[0], 3, padding=1, bias=False), norm(widths[0])
        wide = (widths[0], *widths)
        self.blocks = nn.ModuleList(
            Block(wide[n], wide[n + 1], stride=1 if n == 0 else 2, norm=norm) for n in range(len(widths))
        )
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def digits() -> dict[str, Tensor]:
    """x[1797, 1, 8, 8] from 0 to 1, y[1797]: in an order that is always the same, the last HELDOUT not for training."""
    lines = gzip.decompress(DIGITS.read_bytes()).decode().splitlines()
    rows = torch.tensor([[int(number) for number in line.split(",")] for line in lines])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return {"x": rows[:, :64].reshape(-1, 1, 8, 8) / 16, "y": rows[:, 64]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def predicted(model: nn.Module, batch: dict[str, Tensor]) -> Prediction:
    """What K-FAC and Hessian-free ask for: the distribution whose mean -log p is the loss."""
    return Prediction(model(batch["x"]), "y", "categorical")


def evaluate(model: nn.Module, heldout: dict[str, Tensor]) -> dict[str, float]:
    device = next(model.parameters()).device
    logits = model(heldout["x"].to(device, next(model.parameters()).dtype)).float().cpu()
    wrong = (logits.argmax(1) != heldout["y"]).double().mean()
    return {"heldout_loss": float(F.cross_entropy(logits, heldout["y"])), "heldout_error": float(wrong)}


def main(argv: list[str]) -> int:
    config = parse({"debug": debug}, argv, "python docs/examples/vision.py", default="debug")
    whole = digits()
    images = [{"x": x, "y": y} for x, y in zip(whole["x"][:-HELDOUT], whole["y"][:-HELDOUT], strict=True)]
    heldout = {name: tensor[-HELDOUT:] for name, tensor in whole.items()}
    with start(config.device, config.seed) as runtime, open_run(config, runtime):
        mesh = runtime.mesh(config.mesh, config.zero)
        parallel = parallelize(ResNet(), mesh, config)
        optimizer = build_optimizer(config.optim, parallel.masters)
        summary = fit(
            parallel,
            optimizer,
            MapBatches(images, config.rows, config.seed),
            loss,
            config,
            runtime,
            evaluate=partial(evaluate, heldout=heldout),
            predict=predicted,
        )
        if runtime.leads and "heldout_error" in summary:
            print(f"held-out error {summary['heldout_error']:.2%}, loss {summary['heldout_loss']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
