"""What an asynchronous pipeline learns, on one rank and without a pipeline: the recurrence that its stages follow.

    w(t + 1) = w(t) + u(t),  u(t) by the real optimizer and correction of the gradient at v(max(t - tau, 0))

where tau is the delay of a parameter's stage and v(s) what the stage computed with after s updates, the weights
themselves or what the correction makes of them (`core.parallel.correction`). Gradients of all stages are
clipped together. tests/parity/test_async_pipeline.py shows that real ranks follow the same recurrence, to 1e-10.

The model is a decoder of bytes, and the text is the demo's, the source of this Python's standard library.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor, nn

from apps.llm.corpus import DataConfig, heldout_bytes, source_of
from core.data import Faults, split_of
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import pipeline_plan
from core.optim.build import OptimConfig, build_optimizer
from core.optim.schedule import learning_rate
from core.optim.sharded import step_over
from core.parallel.correction import CORRECTIONS, CorrectionName
from core.parallel.pipeline.schedule import PipelineConfig
from core.parallel.pipeline.stages import split_into_stages

MOST_NATS = 20.0
"""what is told of a run that has diverged"""


@dataclass(frozen=True)
class Sizes:
    """The decoder, the batch and the run."""

    dim: int = 128
    num_layers: int = 8
    ffn_dim: int = 256
    rows: int = 2
    length: int = 64
    steps: int = 500
    heldout_rows: int = 192
    train_bytes: int = 1 << 21

    @property
    def model(self) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=256, dim=self.dim, num_layers=self.num_layers, num_heads=4, ffn_dim=self.ffn_dim,
            max_length=self.length, tied_head=False,
        )  # fmt: skip


class Recurrence:
    """Masters of which those of each stage are late by its delay.

    delays  name of a parameter -> updates that its weights are late
    """

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        delays: Mapping[str, int],
        optimizer: torch.optim.Optimizer,
        correction: CorrectionName = "none",
        correction_steps: int = 1,
    ):
        self.masters, self.delays, self.optimizer = masters, delays, optimizer
        spec, alike = CORRECTIONS[correction], sorted(set(delays.values()))
        own = [{name: master for name, master in masters.items() if delays[name] == delay} for delay in alike]
        self.corrections = [
            spec.make(of, delay, spec.strength or 0.0, correction_steps) for delay, of in zip(alike, own, strict=True)
        ]
        self.versions: deque[dict[str, Tensor]] = deque(maxlen=alike[-1] + 1)
        self._note()

    @torch.no_grad()
    def _note(self) -> None:
        version = dict[str, Tensor]()
        for correction in self.corrections:
            if correction.delay or correction.looks_ahead:
                with correction.looking_ahead():
                    version |= {name: master.detach().clone() for name, master in correction.masters.items()}
        self.versions.append(version)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Within, the masters hold what this step's forward and backward compute with."""
        newest = {name: master.data for name, master in self.masters.items()}
        for name, master in self.masters.items():
            version = self.versions[max(len(self.versions) - 1 - self.delays[name], 0)]
            master.data = version.get(name, newest[name])
        try:
            yield
        finally:
            for name, master in self.masters.items():
                master.data = newest[name]

    def update(self) -> None:
        for correction in self.corrections:
            own = correction.masters.values()
            alone = len(self.corrections) == 1
            correction.update(self.optimizer, self.optimizer.step if alone else partial(step_over, self.optimizer, own))
        self._note()


def stage_of(model: nn.Module, num_stages: int) -> Callable[[str], int]:
    """Name of a parameter -> its stage."""
    return split_into_stages(model, pipeline_plan(), num_stages, PipelineConfig("1f1b")).stage_of


@lru_cache
def text(part: str, num_bytes: int) -> np.ndarray:
    """Bytes of the demo's text: of "train" the first so many, of "heldout" those from its documents."""
    config = DataConfig()
    if part == "heldout":
        found = heldout_bytes(config)
    else:
        documents = source_of(config).documents(Faults())
        found = bytearray()
        for document in documents:
            if split_of(document.name, config.heldout_fraction) == "train":
                found += document.text.encode()
            if len(found) >= num_bytes:
                break
    return np.frombuffer(bytes(found[:num_bytes]), dtype=np.uint8)


def batch(sizes: Sizes, seed: int, step: int) -> Tensor:
    """[rows, length + 1], the same of a seed and step whatever learns from it."""
    data = text("train", sizes.train_bytes)
    starts = np.random.default_rng((seed, step)).integers(0, len(data) - sizes.length - 1, sizes.rows)
    return torch.from_numpy(np.stack([data[s : s + sizes.length + 1] for s in starts]).astype(np.int64))


def heldout(sizes: Sizes) -> Tensor:
    """[heldout_rows, length + 1], evenly over the held-out text."""
    data = text("heldout", 1 << 30)
    starts = np.linspace(0, len(data) - sizes.length - 2, sizes.heldout_rows).astype(int)
    return torch.from_numpy(np.stack([data[s : s + sizes.length + 1] for s in starts]).astype(np.int64))


def nats(model: nn.Module, rows: Tensor) -> Tensor:
    """The mean over the bytes."""
    return model(rows[:, :-1], targets=rows[:, 1:]) / rows[:, 1:].numel()


@dataclass(frozen=True)
class Learned:
    """nats: held-out, of a byte; update_s: seconds of an update, forward and backward included."""

    nats: float
    update_s: float


def learn(
    sizes: Sizes,
    optim: OptimConfig,
    delay: Callable[[int, int], int],
    num_stages: int,
    correction: CorrectionName,
    seed: int,
) -> Learned:
    """Train a decoder by the recurrence.  delay: (stage, stages) -> updates that its weights are late"""
    model = Decoder(sizes.model)
    with torch.no_grad():
        initialise(model, seed)
    masters = dict(model.named_parameters())
    stage = stage_of(model, num_stages)
    optimizer = build_optimizer(optim, masters)
    late = {name: delay(stage(name), num_stages) for name in masters}
    run = Recurrence(masters, late, optimizer, correction, max(1, sizes.steps // 4))
    rates = [group["lr"] for group in optimizer.param_groups]
    begin = time.perf_counter()
    for step in range(sizes.steps):
        with run.computing():
            loss = nats(model, batch(sizes, seed, step))
            loss.backward()
        if not math.isfinite(loss.item()):
            return Learned(MOST_NATS, (time.perf_counter() - begin) / (step + 1))
        if optim.clip_norm is not None:
            nn.utils.clip_grad_norm_(masters.values(), optim.clip_norm)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = learning_rate(step, sizes.steps, rate, optim.schedule)
        run.update()
        optimizer.zero_grad()
    update_s = (time.perf_counter() - begin) / sizes.steps
    with torch.no_grad():
        found = float(torch.stack([nats(model, rows) for rows in heldout(sizes).split(32)]).mean())
    return Learned(found if math.isfinite(found) else MOST_NATS, update_s)


def paired_interval(differences: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of differences of paired runs, by Student's t."""
    count, mean = len(differences), sum(differences) / len(differences)
    if count < 2:
        return mean, mean
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / (count - 1))
    half = _STUDENT[count] * deviation / math.sqrt(count)
    return mean - half, mean + half


_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 16: 2.131}
"""Number of pairs -> the 97.5 % quantile with one degree of freedom fewer."""
