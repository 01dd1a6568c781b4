"""The tasks of `benchmarks.large_batch`, what trains on them, and how many steps it takes to a target.

Rows are drawn independently of one another from the training rows, as the theory of the noise scale has it; so a batch
may be of any size. Nothing decays, neither rates nor weights, on the way to a target: batch, optimizer and rate are all
that differs.
"""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.llm.corpus import Corpus, prepare
from apps.llm.loss import predicted, token_loss
from apps.llm.recipes import debug, demo
from benchmarks.result import ROOT
from core.compose import parallelize
from core.data import TokenBatches
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.optim import KFAC, OptimConfig, ScheduleConfig, build_optimizer
from core.optim.prediction import Drawing, Prediction, drawn_targets, mean_loss
from core.precision import LossScale
from core.runtime import start
from core.train import TrainConfig, TrainState, num_rows, train_step
from core.train.noise import NoiseScale

EXAMPLE = ROOT / "docs" / "examples" / "vision.py"
GROUP = 8
"""Rows of the smallest batch, and those over which batch norm takes its statistics whatever the batch."""
LOOKS = 1.05
"""The loss is looked at whenever the steps have grown by this factor."""
AVERAGE = 10
"""Steps that --noise-scale-steps averages over here."""
NEAR = 1
"""Steps on either side whose estimates a step's noise scale is taken of, too."""

Batch = dict[str, Tensor]


class GhostNorm(nn.BatchNorm2d):
    """Batch norm over GROUP rows at a time (Hoffer et al. 2017, arXiv:1705.08741, section 4.2), in one call.

    So batches of all sizes have one objective, that of a run with microbatches, or ranks, of GROUP rows. In evaluation
    the statistics are those of all rows together.
    """

    def forward(self, input: Tensor) -> Tensor:
        rows, channels, *spatial = input.shape
        groups = rows // GROUP if self.training and rows % GROUP == 0 else 1
        by_group = input.reshape(rows // groups, groups * channels, *spatial)
        scale, shift = self.weight.repeat(groups), self.bias.repeat(groups)
        return F.batch_norm(by_group, None, None, scale, shift, True, 0.0, self.eps).view_as(input)


@dataclass(frozen=True)
class Task:
    """What is learned, and how far.

    model    seed -> the module, its values drawn
    plain    the same for microbatches of GROUP rows
    draw     (rows, seed) -> step -> batch
    look     model -> the loss that is to come down to `target`
    batches  rows of a step
    group    rows of a microbatch, where the noise scale is estimated
    """

    name: str
    model: Callable[[int], nn.Module]
    plain: Callable[[int], nn.Module]
    draw: Callable[[int, int], Callable[[int], Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    predict: Callable[[nn.Module, Batch], Prediction]
    look: Callable[[nn.Module], float]
    target: float
    batches: tuple[int, ...]
    group: int


@dataclass(frozen=True)
class Contender:
    """rate: where the search for the best begins, at the smallest batch; options: of its `OptimConfig`"""

    name: str
    rate: float
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, rate: float, **more: Any) -> OptimConfig:
        return OptimConfig(self.name, lr=rate, clip_norm=None, **self.options, **more)


KERNELS = ("matrix", "experts", "kernel")
CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("sgd", 0.02, {"momentum": 0.9, "weight_decay": 0.0}),
        Contender("lars", 0.1, {"momentum": 0.9, "weight_decay": 0.0, "trust": 0.02}),
        Contender("lamb", 4e-3, {"weight_decay": 0.0}),
        Contender("adamw", 2e-3, {"weight_decay": 0.0}),
        Contender("adafactor", 8e-3, {"relative_step": False}),
        Contender("muon", 2e-3, {"weight_decay": 0.0, "whole": KERNELS}),
        Contender("soap", 2e-3, {"weight_decay": 0.0, "whole": KERNELS}),
        Contender("kfac", 0.02, {"damping": 1e-2, "kl_clip": 1e-2}),
    )
}


# --- tasks ------------------------------------------------------------------------------------------------------------


@cache
def example() -> Any:
    """docs/examples/vision.py, whose model and digits these are."""
    spec = importlib.util.spec_from_file_location("vision_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@cache
def split_digits() -> tuple[Batch, Batch]:
    """What is trained on, and what is held out."""
    whole, held = example().digits(), example().HELDOUT
    return {k: v[:-held] for k, v in whole.items()}, {k: v[-held:] for k, v in whole.items()}


def _resnet(seed: int, norm: type[nn.Module], widths: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(seed)
    return example().ResNet(widths, norm)


def _drawn_digits(rows: int, seed: int) -> Callable[[int], Batch]:
    training, _ = split_digits()
    generator = torch.Generator().manual_seed(seed)

    def draw(_: int) -> Batch:
        chosen = torch.randint(0, len(training["y"]), (rows,), generator=generator)
        return {name: tensor[chosen] for name, tensor in training.items()}

    return draw


@torch.no_grad()
def loss_of(model: nn.Module, rows: Batch) -> float:
    """The mean loss, in evaluation."""
    model.eval()
    found = float(example().loss(model, rows))
    model.train()
    return found


def digits_task(quick: bool) -> Task:
    widths = (4, 8) if quick else (8, 16, 32)
    part = {name: tensor[:504] for name, tensor in split_digits()[0].items()}
    return Task(
        "digits",
        partial(_resnet, norm=GhostNorm, widths=widths),
        partial(_resnet, norm=nn.BatchNorm2d, widths=widths),
        _drawn_digits,
        example().loss,
        example().predicted,
        lambda model: loss_of(model, part),
        target=2.0 if quick else 0.05,
        batches=(GROUP, 3 * GROUP) if quick else tuple(GROUP * 3**n for n in range(5)),
        group=GROUP,
    )


TEXT_LENGTH = 32
TEXT_ROWS = 64
"""Held-out sequences that are looked at."""


def _text(quick: bool) -> Corpus:
    recipe = debug() if quick else demo()
    data = replace(recipe.data, tokenizer="byte", sequence_length=TEXT_LENGTH, global_batch=TEXT_ROWS)
    return prepare(data, ROOT / "runs" / "corpora")


def _decoder(seed: int, config: DecoderConfig) -> nn.Module:
    model = Decoder(config)
    initialise(model, seed)
    return model


def text_task(quick: bool) -> Task:
    corpus, dim = _text(quick), 16 if quick else 64
    assert corpus.heldout is not None
    size = DecoderConfig(
        vocab_size=corpus.tokenizer.vocab_size, dim=dim, num_layers=2, num_heads=4, ffn_dim=4 * dim,
        max_length=TEXT_LENGTH,
    )  # fmt: skip
    heldout = TokenBatches(corpus.heldout, TEXT_LENGTH, TEXT_ROWS, seed=0).batch(0, 0, 1)

    def draw(rows: int, seed: int) -> Callable[[int], Batch]:
        batches = TokenBatches(corpus.train, TEXT_LENGTH, rows, seed)
        return lambda step: batches.batch(step, 0, 1)

    @torch.no_grad()
    def look(model: nn.Module) -> float:
        return float(token_loss(model, heldout))

    return Task(
        "text",
        partial(_decoder, config=size),
        partial(_decoder, config=size),
        draw,
        token_loss,
        predicted,
        look,
        target=5.0 if quick else 2.4,
        batches=(1, 4) if quick else tuple(4**n for n in range(4)),
        group=1,
    )


# --- training ---------------------------------------------------------------------------------------------------------


def built(contender: Contender, rate: float, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = build_optimizer(contender.config(rate), dict(model.named_parameters()))
    if isinstance(optimizer, KFAC):
        optimizer.watch(model)
    return optimizer


def trained(
    task: Task, contender: Contender, rows: int, rate: float, seed: int, factor: Callable[[int], float]
) -> Iterable[tuple[int, nn.Module]]:
    """Train for ever. Yields the number of steps behind each, and the model.

    factor  step, from 1 -> what the rate is multiplied by
    """
    model, draw = task.model(seed), task.draw(rows, seed)
    optimizer, step = built(contender, rate, model), 0
    own = [group["lr"] for group in optimizer.param_groups]
    while True:
        batch = draw(step)
        step += 1
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = lr * factor(step)
        if isinstance(optimizer, KFAC) and optimizer.due:
            optimizer.observe(partial(_drawn_loss, task, model, batch, Drawing(seed, step, 0)), items=rows)
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        yield step, model


def _drawn_loss(task: Task, model: nn.Module, batch: Batch, drawing: Drawing) -> Tensor:
    made = task.predict(model, batch)
    return mean_loss(made, drawn_targets(made, batch[made.targets], drawing))


def ramp(warmup: int) -> Callable[[int], float]:
    """A linear warm-up of that many steps; then 1."""
    return lambda step: min(1.0, step / warmup) if warmup else 1.0


@dataclass(frozen=True)
class Reached:
    """steps: to the target, in parts of a step; where it was not reached the limit. loss: the last that was seen"""

    steps: float
    loss: float
    there: bool

    def score(self, target: float) -> float:
        """What a search for a rate makes small: a run that did not come down is the better the further it came."""
        return self.steps if self.there else self.steps * (1 + self.loss / target)


def to_target(
    task: Task, contender: Contender, rows: int, rate: float, seed: int, limit: float, warmup: int = 0
) -> Reached:
    """Train until the loss is at the target, it diverges, or `limit` steps are over.

    Between two looks the logarithm of the loss is taken for linear.
    """
    first = before = task.look(task.model(seed))
    look, last, most = 1, 0, max(1, round(limit))
    for step, model in trained(task, contender, rows, rate, seed, ramp(warmup)):
        if step < min(look, most):
            continue
        loss = task.look(model)
        if not loss < 3 * first:
            return Reached(most, math.inf, False)
        if loss <= task.target:
            share = math.log(before / task.target) / math.log(before / loss)
            return Reached(last + share * (step - last), loss, True)
        if step >= most:
            return Reached(most, loss, False)
        before, last, look = loss, step, max(step + 1, int(step * LOOKS))
    raise AssertionError("training does not end by itself")


def best_rate(score: Callable[[float, float], float], begin: float, budget: int) -> float:
    """The rate of the least score among `budget` of them: a walk by factors of two, then by their roots.

    score  (rate, the least score so far) -> score
    """
    found: dict[float, float] = {}
    while len(found) < budget:
        place = 0.0
        if found:
            best = min(found, key=lambda at: (found[at], at))
            more = [best + by for by in (1.0, -1.0, 0.5, -0.5, 0.25, -0.25)]
            if math.isinf(found[best]):
                more = [min(found) - 2.0]
            place = next(at for at in more if at not in found)
        found[place] = score(begin * 2**place, min(found.values(), default=math.inf))
    return begin * 2 ** min(found, key=lambda at: (found[at], at))


# --- the noise scale --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """Noise scales of the steps of a run that have one: of each with its neighbours; averaged as --noise-scale does"""

    near: list[float]
    averaged: list[float]


def noise_along(task: Task, contender: Contender, rows: int, rate: float, seed: int, steps: int) -> Noise:
    """What `--noise-scale --noise-scale-steps AVERAGE` writes of the steps of such a run."""
    optim = contender.config(rate, schedule=ScheduleConfig(shape="constant"))
    config = TrainConfig(
        precision="fp32", microbatch=task.group, noise_scale=True, noise_scale_steps=AVERAGE, device="cpu", seed=seed,
        steps=steps, optim=optim, out=Path("nowhere"),
    )  # fmt: skip
    averaged, traces, squares, draw = list[float](), list[float](), list[float](), task.draw(rows, seed)
    with start(config.device, seed) as runtime:
        parallel = parallelize(task.plain(seed), runtime.mesh(config.mesh, config.zero), config)
        scale = LossScale(config.precision, config.loss_scale)
        state = TrainState(parallel, build_optimizer(optim, parallel.masters), scale, {})
        state.noise = NoiseScale(parallel, config.noise_scale_steps)
        for step in range(steps):
            row = train_step(state, draw(step), task.loss, num_rows, config, step)
            traces.append(row["noise_trace"])
            squares.append(row["noise_square"])
            if row["noise_scale"] is not None:
                averaged.append(row["noise_scale"])
    spans = [slice(max(0, step - NEAR), step + NEAR + 1) for step in range(steps)]
    near = [max(sum(traces[span]), 0.0) / sum(squares[span]) for span in spans if sum(squares[span]) > 0]
    return Noise(near or [1.0], averaged or [1.0])


@dataclass(frozen=True)
class Curve:
    """S = S_min (1 + B_c / B): McCandlish et al. 2018, arXiv:1812.06162, equation 2.11 with E_min = B_c S_min."""

    fewest: float
    critical: float

    def __call__(self, rows: float) -> float:
        return self.fewest * (1 + self.critical / rows)


def fitted(steps: dict[int, float]) -> Curve:
    """rows -> steps.  Returns the curve that is nearest in the squares of logarithms; its B_c on a grid of 1 %."""

    def at(critical: float) -> tuple[float, Curve]:
        logs = [math.log(s / (1 + critical / rows)) for rows, s in steps.items()]
        mean = sum(logs) / len(logs)
        return sum((log - mean) ** 2 for log in logs), Curve(math.exp(mean), critical)

    low, high = min(steps) / 100, max(steps) * 100
    grid = (low * 1.01**n for n in range(math.ceil(math.log(high / low, 1.01))))
    return min(map(at, grid), key=lambda pair: pair[0])[1]


def interval(values: list[float]) -> tuple[float, float, float]:
    """The geometric mean, and the 95 % interval around it by Student's t of the logarithms."""
    logs = [math.log(value) for value in values]
    mean, n = sum(logs) / len(logs), len(logs)
    if n == 1:
        return values[0], values[0], values[0]
    deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / (n - 1) / n)
    half = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}[n] * deviation
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)
