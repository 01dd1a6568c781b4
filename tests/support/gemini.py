"""Small models that are awkward for whoever moves parameters, trained plainly and under Gemini."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from core.gemini import Gemini, replicas, wrap
from core.gemini.executor import Executor
from core.trace.tracer import StepTrace

WIDTH = 16


@dataclass
class Output:
    """What a module may return that no pytree knows."""

    x: Tensor


class Block(nn.Module):
    """Takes and returns dicts or dataclasses; one parameter of its own, read before and behind its children."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x = state["x"].x * self.gain
        return {"x": Output(x + self.gain * self.down(F.gelu(self.up(self.norm(x))))), "note": "no tensor"}


class Net(nn.Module):
    """Tied head, an unused layer, a block called twice, a list of parameters, a module of torch's that reads inside."""

    def __init__(self, num_blocks: int = 4, twice: bool = False, recompute: bool | None = None):
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.twice, self.recompute = twice, recompute

    def forward(self, ids: Tensor, order: int = 1) -> dict[str, Tensor]:
        x = self.embedding(ids)
        state = {"x": Output(x + self.attention(x, x, x, need_weights=False)[0])}
        for block in list(self.blocks)[::order] * (2 if self.twice else 1):
            if self.recompute is None:
                state = block(state)
            else:
                x = checkpoint(
                    lambda x, b=block: b({"x": Output(x)})["x"].x, state["x"].x, use_reentrant=self.recompute
                )
                state = {"x": Output(x)}
        return {"logits": self.head(state["x"].x * self.scales[0] + self.scales[1])}


class Tempered(Net):
    """With a parameter of no dims, of which no rank can have a part, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, ids: Tensor, order: int = 1) -> dict[str, Tensor]:
        return {"logits": super().forward(ids, order)["logits"] * self.temperature.exp() + self.nothing.sum()}


def batch(step: int) -> Tensor:
    return torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(model(ids, **options)["logits"].flatten(0, 1), ids.flatten())


@dataclass
class Run:
    losses: list[float]
    values: dict[str, Tensor]
    gemini: Gemini | None


def train(
    make: Callable[[], nn.Module],
    budget: int | str | None,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int = 4,
    step: Callable[[nn.Module, int], Tensor] = lambda model, index: loss(model, batch(index)),
    **options: Any,
) -> Run:
    """Train plainly (budget None) or under Gemini."""
    torch.manual_seed(0)
    model = make()
    if budget is None:
        model.to(torch.float64 if options.get("precision") == "fp64" else torch.float32)
    parameters = [p for p in model.parameters() if p.requires_grad]
    made = optimizer(parameters)
    gemini = None if budget is None else wrap(model, made, budget, **options)
    losses = []
    for index in range(steps):
        value = step(model, index)
        value.backward()
        made.step()
        made.zero_grad()
        losses.append(float(value.detach()))
    values = {n: v.detach().clone() for n, v in model.state_dict().items()} if gemini is None else gemini.state_dict()
    return Run(losses, values, gemini)


def require_equal(found: Run, expected: Run) -> None:
    """Bit for bit."""
    assert found.losses == expected.losses
    for name, value in expected.values.items():
        assert torch.equal(found.values[name], value), name


@contextmanager
def traced_once() -> Iterator[None]:
    """Within, the first step that is traced is that of all: of one model and its rows, in one budget after another."""
    trace, kept = replicas.trace_step, []

    def kept_trace(*args: Any, **options: Any) -> StepTrace:
        if not kept:
            kept.append(trace(*args, **options))
        return kept[0]

    with patch.object(replicas, "trace_step", kept_trace):
        yield


def model_bytes(make: Callable[[], nn.Module]) -> int:
    return sum(p.numel() * p.element_size() for p in make().parameters())


class Accounted:
    """Within, no parameter can be reached outside of the account of the device, whenever a module begins or ends.

    Every parameter's memory is that of a chunk's buffer which is there, or a single element; what buffers take is
    booked, to the byte; and a chunk that is not there has no memory.
    """

    def __init__(self) -> None:
        self.num_checks = 0
        self._at = Executor.at

    def __enter__(self) -> "Accounted":
        at = self._at

        def checked(executor: Executor, *args: Any) -> None:
            at(executor, *args)
            self._check(executor)

        Executor.at = checked
        return self

    def __exit__(self, *error: object) -> None:
        Executor.at = self._at

    def _check(self, executor: Executor) -> None:
        self.num_checks += 1
        there, booked = 0, sum(message.nbytes for message in executor.transport.messages)
        for chunk in executor.chunks:
            memory = chunk.buffer.untyped_storage()
            there += memory.nbytes()
            booked += chunk.num_bytes if chunk.is_filled or chunk.resident else 0
            assert memory.nbytes() == (chunk.num_bytes if chunk.is_filled or chunk.resident else 0), chunk.name
            for member in chunk.members:
                own = member.tensor.untyped_storage()
                assert own.data_ptr() == memory.data_ptr() if chunk.is_filled else own.nbytes() <= 8, member.name
        shards = executor.tier.current_bytes - booked
        assert shards >= 0
        assert (shards > 0) == any(chunk.resident and chunk.trainable for chunk in executor.chunks)
        assert executor.tier.current_bytes + executor.tier.other_bytes <= executor.tier.budget_bytes
