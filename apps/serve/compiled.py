"""A step of the decoder as one compiled graph in place of thousands of small operators (`serve --compile`).

1. The decoder is traced once, with any number of tokens and without its head: `attend` slots and products of integers
   become calls of operators, everything else the graph of their arithmetic. No second forward is written.
2. torch.compile makes loops in C++ of what lies between the calls.

All steps go through it, prompts too, and through the same loops: for one token torch.compile would make others, which
round otherwise, so a lone token is given twice. So a token's arithmetic does not depend on what else is in its step.

Needs a C++ compiler when it is made. On CPUs, one rank, no experts.

Shapes: T tokens of the step, D model.
"""

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from apps.serve.runner import Runner, Step
from core.config import UserError
from core.models.decoder import Decoder
from core.nn.attention import Attend, Attention

log = logging.getLogger("serve")


class _Layer:
    """An `attend` of the model, and what the graph does not carry: slopes, mask-free positions, the step's context."""

    def __init__(self, attend: Attend):
        self.attend, self.slopes, self.context = attend, None, None
        self.number = next(_NUMBERS)
        _LAYERS[self.number] = self

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, /, *, slopes: Tensor | None, **step: Any) -> Tensor:
        """In place of `attend` while tracing."""
        self.slopes = slopes
        return torch.ops.megalith.attend_of_layer(q, k, v, self.number)


_LAYERS: dict[int, _Layer] = {}
_NUMBERS = itertools.count()

torch.library.define("megalith::attend_of_layer", "(Tensor q, Tensor k, Tensor v, int number) -> Tensor")


@torch.library.impl("megalith::attend_of_layer", "CPU")
def _attend(q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
    layer = _LAYERS[number]
    count = len(layer.context.slots_T)  # one less than there are, of a lone token
    q_1THK, k_1TJK, v_1TJK = (x[:, :count] for x in (q, k, v))
    step: Any = {"slopes": layer.slopes, "mask": None, "positions": None, "context": layer.context}
    o_1THK = layer.attend(q_1THK, k_1TJK, v_1TJK, **step)
    return o_1THK if count == q.shape[1] else torch.cat((o_1THK, o_1THK), 1)


@torch.library.register_fake("megalith::attend_of_layer")
def _attend_shape(q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
    return q.new_empty(q.shape)


class CompiledBody:
    """ids[1, T], positions[1, T] -> what the head is given, [1, T, D]: the decoder, compiled."""

    def __init__(self, model: Decoder):
        attentions = [module for module in model.modules() if isinstance(module, Attention)]
        self._layers = [_Layer(attention.attend) for attention in attentions]
        with _replaced(model, attentions, self._layers), torch.no_grad():
            ids_1T, positions_1T = (
                torch.zeros(1, 3, dtype=torch.int64) for _ in range(2)
            )  # one would be taken for both
            traced = make_fx(
                lambda ids, positions: model(ids, positions=positions),
                tracing_mode="symbolic",
                _allow_non_fake_inputs=True,
            )(ids_1T, positions_1T)
        self._call: Callable[[Tensor, Tensor], Tensor] = torch.compile(traced, dynamic=True, fullgraph=True)

    def __call__(self, ids_1T: Tensor, positions_1T: Tensor, context: Any) -> Tensor:
        count = ids_1T.shape[1]
        if count == 1:
            ids_1T, positions_1T = (torch.cat((x, x), 1) for x in (ids_1T, positions_1T))
        for layer in self._layers:
            layer.context = context
        try:
            return self._call(ids_1T, positions_1T)[:, :count]
        finally:
            for layer in self._layers:
                layer.context = None

    def __del__(self) -> None:
        for layer in self._layers:
            _LAYERS.pop(layer.number, None)


class _Through(nn.Module):
    """In place of a head: nothing."""

    def forward(self, x_1TD: Tensor, *_others: Any) -> Tensor:
        return x_1TD


@contextmanager
def _replaced(model: Decoder, attentions: list[Attention], layers: list[_Layer]) -> Iterator[None]:
    """Inside, attention calls operators, and there is no head."""
    head, attends = model.head, [attention.attend for attention in attentions]
    model.head = _Through()  # pyright: ignore[reportAttributeAccessIssue]
    for attention, layer in zip(attentions, layers, strict=True):
        attention.attend = layer
    try:
        yield
    finally:
        model.head = head
        for attention, attend in zip(attentions, attends, strict=True):
            attention.attend = attend


def compile_runner(runner: Runner) -> bool:
    """Let a runner compute by a compiled graph, which is made now.

    Returns whether it could be made; if not, the log says why in one line, and the runner computes as before.
    """
    try:
        runner.body = CompiledBody(runner.model)
        runner.run(Step([0], [0], [0], [[0]], [1], [0, 1], [0]))  # what it is compiled for is known now
    except Exception as error:  # whatever a compiler does not like: the decoder itself computes the same
        runner.body = None
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        log.warning("steps are not compiled: %s; install a C++ compiler (g++), or leave --engine.compile out", reason)
        return False
    return True


def check_compilable(device: str, ranks: int, num_experts: int) -> None:
    """Raises UserError for what is not compiled."""
    if torch.device(device).type != "cpu":
        raise UserError(f"compile is for CPUs, and the device is {device}; leave --engine.compile out")
    if ranks > 1:
        raise UserError(f"compile is for one rank, and tp is {ranks}; leave one of them out")
    if num_experts:
        raise UserError("compile is not for models with experts; leave --engine.compile out")
