"""A step of the decoder in one traced graph: fewer passes over memory and no thousand small operators
(`serve --engine.compile`).

1. The decoder is traced once, up to its head, for any number of tokens. In its `attend` slots stands a call of what the
   layer of the runner at hand has there; products of quantized weights become calls of operators. No second forward is
   written.
2. torch's inductor makes loops in C++ of the rest: what stands around products, norms and residuals too, is a few
   passes over memory instead of dozens.

It is traced with some tokens, so a lone one goes through the same loops.

Needs a C++ compiler when it is made. On CPUs, one rank, no experts.

Shapes: T tokens, H query heads, J heads of keys and values, K head size, D model.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from apps.serve.runner import PagedAttend, PagedContext, Runner
from core.compat import compiled_alone
from core.config import UserError
from core.models.decoder import Decoder
from core.nn.attention import Attention

log = logging.getLogger("serve")

_EXAMPLE = 11
"""tokens that it is traced with; no size of a model"""


class _Slot:
    """In place of `attend` while tracing: a call of what the layer of the runner at hand has there."""

    def __init__(self, layer: int):
        self.layer = layer

    def __call__(
        self, q_1THK: Tensor, k_1TJK: Tensor, v_1TJK: Tensor, /, *, slopes: Tensor | None, **_others: Any
    ) -> Tensor:
        # Contiguous, so that the loops before write them so.
        q_THK, k_TJK, v_TJK = (x[0].contiguous() for x in (q_1THK, k_1TJK, v_1TJK))
        return torch.ops.megalith.attend_of_layer(q_THK, k_TJK, v_TJK, slopes, self.layer)[None]


@dataclass(frozen=True)
class _Step:
    """The operator's knowledge of the step that this thread computes."""

    attends: Sequence[PagedAttend]
    context: PagedContext


_STEP = threading.local()
torch.library.define("megalith::attend_of_layer", "(Tensor q, Tensor k, Tensor v, Tensor? slopes, int layer) -> Tensor")


@torch.library.impl("megalith::attend_of_layer", "CPU")
def _attend_of_layer(q_THK: Tensor, k_TJK: Tensor, v_TJK: Tensor, slopes: Tensor | None, layer: int) -> Tensor:
    step: _Step = _STEP.step
    return step.attends[layer].attend(q_THK, k_TJK, v_TJK, slopes, step.context).contiguous()


@torch.library.register_fake("megalith::attend_of_layer")
def _attended_shape(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, layer: int) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


class CompiledDecoder:
    """A decoder up to its head in one graph, over any runner's pages."""

    def __init__(self, model: Decoder):
        attentions = [module for module in model.modules() if isinstance(module, Attention)]

        def compute(ids_1T: Tensor, positions_1T: Tensor) -> tuple[Tensor]:
            return (model(ids_1T, positions=positions_1T),)

        example = torch.zeros(1, _EXAMPLE, dtype=torch.int64)
        with _replaced(model, attentions):
            self._compute = _graph(compute, [example, example.clone()])

    def __call__(
        self, ids_1T: Tensor, positions_1T: Tensor, context: PagedContext, attends: Sequence[PagedAttend]
    ) -> Tensor:
        """The head's input, [1, T, D]; `attends` of all layers, which keep the keys and values."""
        _STEP.step = _Step(attends, context)
        try:
            return self._compute(ids_1T, positions_1T)[0]
        finally:
            del _STEP.step


def _graph(function: Any, given: Sequence[Tensor]) -> Any:
    with torch.no_grad():
        traced = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*given)
    # Without torch.compile's checks of what is given and of what operators return, which are always the same but for
    # sizes.
    checks = ("assert_indirect_indexing", "size_asserts", "alignment_asserts")
    options: Any = {"config_patches": dict.fromkeys(checks, False)}
    return compiled_alone(traced, list(given), options)


class _Through(nn.Module):
    """In place of a head: nothing."""

    def forward(self, x_1TD: Tensor, *_others: Any) -> Tensor:
        return x_1TD


@contextmanager
def _replaced(model: Decoder, attentions: Sequence[Attention]) -> Iterator[None]:
    """Inside, attention is a call, and there is no head."""
    head, attends = model.head, [attention.attend for attention in attentions]
    model.head = _Through()  # pyright: ignore[reportAttributeAccessIssue]
    for layer, attention in enumerate(attentions):
        attention.attend = _Slot(layer)
    try:
        yield
    finally:
        model.head = head
        for attention, attend in zip(attentions, attends, strict=True):
            attention.attend = attend


def compile_runner(runner: Runner, known: CompiledDecoder | None = None) -> CompiledDecoder | None:
    """Let a runner compute by a compiled graph, which is made now.

    known  that of another runner of the same model

    Returns the graph. None if it could not be made: the log says why in one line, and the runner computes as before.
    """
    try:
        with torch.inference_mode():
            compiled = known or CompiledDecoder(runner.model)
    except Exception as error:  # whatever a compiler does not like: the decoder itself computes the same
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        log.warning("steps are not compiled: %s; install a C++ compiler (g++), or leave --engine.compile out", reason)
        return None

    def graph(ids_1T: Tensor, positions_1T: Tensor, context: PagedContext) -> Tensor:
        return compiled(ids_1T, positions_1T, context, runner.pages)

    runner.graph = graph
    return compiled


def check_compilable(device: str, ranks: int, num_experts: int) -> None:
    """Raises UserError for what is not compiled."""
    if torch.device(device).type != "cpu":
        raise UserError(f"compile is for CPUs, and the device is {device}; leave --engine.compile out")
    if ranks > 1:
        raise UserError(f"compile is for one rank, and tp is {ranks}; leave one of them out")
    if num_experts:
        raise UserError("compile is not for models with experts; leave --engine.compile out")
