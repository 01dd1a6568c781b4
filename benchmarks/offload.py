"""One model trained for a few steps in limited device memory: under Gemini, and by three others.

All train the same decoder from the same weights on the same batch with torch's fused AdamW, activations recomputed by
block. A contender is a function of a `Turn` that builds what it needs and returns the step:

    plain       everything on the device; under bf16 by autocast
    Gemini      `core.gemini.wrap` with the budget, and nothing else said
    FSDP2       `fully_shard` by block with CPUOffloadPolicy; bf16 parameters, fp32 masters and reductions
    DeepSpeed   ZeRO-Offload: stage 2, optimizer and gradients on the host, its own Adam there; ZeRO-Infinity: stage 3,
                optimizer state and masters on a drive, for which it compiles an operator that wants libaio's headers

`python -m benchmarks.offload TURN.json RESULT.json` is one turn. On a GPU the budget is of what is allocated, and the
process's memory fraction, set before anything else, leaves room for the allocator's loss beside it. On a CPU the peers'
offload moves nothing, and the budget is that of Gemini's account.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.config import UserError
from core.gemini import Gemini, wrap
from core.gemini.residency import ResidencyPlan
from core.models.decoder import Decoder, DecoderConfig, constant_of, init_std, initialise
from core.models.shapes import gpt, opt
from core.parallel.recompute import RecomputeConfig, apply_recompute
from core.precision import Precision, compute_dtype
from core.runtime import join

SEED = 0
TURN_LIMIT_S = 1800
ROOM_TO_RESERVE = 1.25
"""times the budget that the allocator may reserve"""


@dataclass(frozen=True)
class Shape:
    """GPT-2's or OPT's form in any size. family: "GPT-2" or "OPT"."""

    family: str
    num_layers: int
    dim: int
    num_heads: int
    vocab_size: int
    max_length: int

    @property
    def name(self) -> str:
        return f"{self.family} {self.num_layers} x {self.dim}"

    def config(self) -> DecoderConfig:
        made = (opt if self.family == "OPT" else gpt)(self.num_layers, self.dim, self.num_heads)
        return replace(made, vocab_size=self.vocab_size, max_length=self.max_length)

    def num_parameters(self) -> int:
        return self.config().num_parameters()


def shaped(family: str, num_layers: int, dim: int, num_heads: int | None = None) -> Shape:
    """With the family's vocabulary and positions, and heads of 64."""
    vocab_size, max_length = {"GPT-2": (50257, 1024), "OPT": (50272, 2048)}[family]
    return Shape(family, num_layers, dim, num_heads or dim // 64, vocab_size, max_length)


@dataclass(frozen=True)
class Turn:
    """What one contender is to do: `num_steps` after the first, in `budget_bytes` (None: as much as there is).

    disk  folder on a drive for what `host_bytes` of the host do not hold
    """

    contender: str
    shape: Shape
    rows: int
    length: int
    num_steps: int
    budget_bytes: int | None
    device: str = "cpu"
    precision: Precision = "fp32"
    disk: str | None = None
    host_bytes: int | None = None

    @staticmethod
    def from_json(text: str) -> "Turn":
        fields = json.loads(text)
        return Turn(**(fields | {"shape": Shape(**fields["shape"])}))


@dataclass(frozen=True)
class Ran:
    """seconds: of each step after the first. peak_bytes: allocated on the device; reserved_bytes: by the allocator.

    moved_bytes: over its link, in a step.
    """

    seconds: list[float]
    peak_bytes: int = 0
    moved_bytes: int = 0
    reserved_bytes: int = 0


class Training:
    """A contender with its model: `step()` trains once and returns the loss.

    early  with a disk: updates begin beside the backward
    """

    def __init__(self, turn: Turn, step: Callable[[], Tensor], gemini: Gemini | None = None):
        self.turn, self.step, self.gemini, self.early = turn, step, gemini, True

    @property
    def moved_bytes(self) -> int:
        return self.gemini.moved_bytes if self.gemini is not None else 0

    @property
    def plan(self) -> ResidencyPlan:
        assert self.gemini is not None
        assert self.gemini.parallel.planned is not None
        return self.gemini.parallel.planned.plan

    def timed(self) -> float:
        """Seconds of a step.  Raises ArithmeticError where it does not train."""
        begin = time.perf_counter()
        loss = float(self.step())
        if self.turn.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        if not math.isfinite(loss):
            raise ArithmeticError(f"{self.turn.contender}: the loss of {self.turn.shape.name} is {loss}")
        return seconds


def built(turn: Turn) -> nn.Module:
    """The model with its first weights on the host; blocks recompute."""
    with torch.device("meta"):
        model = Decoder(turn.shape.config())
    model.to_empty(device="cpu")
    if turn.device == "cuda":
        draw_on(turn.device, model)
    else:
        initialise(model, SEED)
    apply_recompute(model, RecomputeConfig("full"))
    return model


def draw_on(device: str, model: nn.Module) -> None:
    """`initialise` with other values of the same distributions, drawn on the device, one parameter at a time.

    A host draws 1.3 billion of them for longer than a turn's steps take.
    """
    assert isinstance(model, Decoder)
    generator = torch.Generator(device).manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = init_std(name, model.config)
            if std is None:
                parameter.fill_(constant_of(name, model.config))
            else:
                drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                parameter.copy_(drawn.normal_(0.0, std, generator=generator))
    if device == "cuda":
        torch.cuda.empty_cache()


def loss_of(turn: Turn) -> Callable[[nn.Module], Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    ids_BL = torch.randint(turn.shape.vocab_size, (turn.rows, turn.length), generator=generator).to(turn.device)
    return lambda model: model(ids_BL, targets=ids_BL) / ids_BL.numel()


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[nn.Module], Tensor], context: Any = None
) -> Callable[[], Tensor]:
    """The step of torch's tutorials."""

    def step() -> Tensor:
        with context or contextlib.nullcontext():
            value = loss(model)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def plain(turn: Turn) -> Training:
    model = built(turn).to(turn.device)
    dtype = compute_dtype(turn.precision)
    autocast = torch.autocast(turn.device, dtype) if dtype.itemsize == 2 else None
    return Training(turn, _loop(model, _adamw(model), loss_of(turn), autocast))


def gemini(turn: Turn) -> Training:
    assert turn.budget_bytes is not None
    model, loss = built(turn), loss_of(turn)
    optimizer = _adamw(model)
    wrapped = wrap(
        model,
        optimizer,
        turn.budget_bytes,
        precision=turn.precision,
        sample=lambda: loss,
        host=turn.host_bytes,
        disk=turn.disk,
        device=turn.device,
    )
    if turn.disk is None:
        return Training(turn, _loop(model, optimizer, loss), wrapped)
    steps = count(1)

    def durable_step() -> Tensor:
        value = loss(model)
        with wrapped.last_backward() if training.early else contextlib.nullcontext():
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
        wrapped.commit(next(steps))
        return value.detach()

    training = Training(turn, durable_step, wrapped)
    return training


def fsdp2_offload(turn: Turn) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    join(turn.device)
    model = built(turn)
    options = {
        "mesh": init_device_mesh(turn.device, (1,)),
        "mp_policy": MixedPrecisionPolicy(compute_dtype(turn.precision), torch.float32, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=turn.device == "cuda"),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return Training(turn, _loop(model, _adamw(model), loss_of(turn)))


def zero_offload(turn: Turn) -> Training:
    return _deepspeed(turn, {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}})


def zero_infinity(turn: Turn) -> Training:
    """Optimizer state on the drive, in the settings of DeepSpeed's own example; parameters stay in memory."""
    buffers = {"device": "nvme", "nvme_path": turn.disk, "buffer_count": 4, "pin_memory": turn.device == "cuda"}
    pieces = {"sub_group_size": max(parameter_sizes(turn))}
    aio = {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True}
    return _deepspeed(turn, {"stage": 3, "offload_optimizer": buffers, **pieces}, {"aio": aio})


def parameter_sizes(turn: Turn) -> list[int]:
    """Elements of each parameter."""
    with torch.device("meta"):
        return [parameter.numel() for parameter in Decoder(turn.shape.config()).parameters()]


def _deepspeed(turn: Turn, zero: dict[str, Any], others: dict[str, Any] | None = None) -> Training:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": turn.rows,
        "zero_optimization": zero,
        **(others or {}),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},  # DeepSpeedCPUAdam, since the optimizer is offloaded
        "bf16": {"enabled": turn.precision == "bf16"},
        "steps_per_print": 1_000_000,
    }
    join(turn.device)
    os.environ.setdefault("LOCAL_RANK", "0")  # which its own launcher sets
    model = built(turn)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    loss = loss_of(turn)

    def step() -> Tensor:
        value = loss(engine)
        engine.backward(value)
        engine.step()
        return value.detach()

    return Training(turn, step)


CONTENDERS: dict[str, Callable[[Turn], Training]] = {
    "Gemini": gemini,
    "plain PyTorch": plain,
    "FSDP2 + CPUOffloadPolicy": fsdp2_offload,
    "DeepSpeed ZeRO-Offload": zero_offload,
}
ON_DISK = {"Gemini on a disk": gemini, "DeepSpeed ZeRO-Infinity": zero_infinity}


def take_turn(turn: Turn) -> Ran:
    """Train.  Raises UserError or torch.OutOfMemoryError where the budget is too small."""
    if turn.device == "cuda":
        if turn.budget_bytes is not None:
            _cap(turn.budget_bytes)
        torch.cuda.reset_peak_memory_stats()
    training = (CONTENDERS | ON_DISK)[turn.contender](turn)
    try:
        training.timed()
        before = training.moved_bytes
        seconds = [training.timed() for _ in range(turn.num_steps)]
        moved = (training.moved_bytes - before) // turn.num_steps
        peak, reserved = training.gemini.device_peak_bytes if training.gemini is not None else 0, 0
    finally:
        if training.gemini is not None:  # its last step may still be on its way to the drive
            training.gemini.close()
    if turn.device == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        if turn.budget_bytes is not None and peak > turn.budget_bytes:
            raise torch.OutOfMemoryError(f"{peak} bytes were allocated, and the budget is {turn.budget_bytes}")
    return Ran(seconds, peak, moved, reserved)


def _cap(budget_bytes: int) -> None:
    """Nothing can go far beyond a budget.

    The budget is of bytes that are allocated; a memory fraction caps what the allocator reserves, which is more by
    what lies between: blocks that were cut and not filled. So the fraction leaves room for that, and whoever went
    over the budget all the same is found by the peak of what was allocated.
    """
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, ROOM_TO_RESERVE * budget_bytes / total))


def attempt(turn: Turn, python: Path) -> Ran | None:
    """A turn in a process of its own; None where the budget is too small.  Raises UserError where it fails."""
    with tempfile.TemporaryDirectory(prefix="turn-") as name:
        given, found = Path(name) / "turn.json", Path(name) / "found.json"
        given.write_text(json.dumps(asdict(turn)))
        command = [python, "-m", "benchmarks.offload", given, found]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TURN_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise UserError(f"{turn.contender} took more than {TURN_LIMIT_S} s for {turn.shape.name}") from None
        if done.returncode != 0:
            said = " ".join(done.stderr.strip().splitlines()[-1:])
            raise UserError(f"{turn.contender} failed on {turn.shape.name}: {said}")
        content = json.loads(found.read_text())
    return None if content is None else Ran(**content)


def main(given: str, found: str) -> None:
    turn = Turn.from_json(Path(given).read_text())
    try:
        content = asdict(take_turn(turn))
    except (UserError, torch.OutOfMemoryError):
        content = None
    Path(found).write_text(json.dumps(content))


if __name__ == "__main__":
    main(*sys.argv[1:])
