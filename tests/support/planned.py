"""Steps of small modules as the solver's problems, on machines whose prices are round."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from core.auto.costs import Link
from core.auto.formulate import Formulation, formulate
from core.auto.specs import Spec, parse
from core.trace.machine import Speed
from core.trace.record import trace_graph

SLOW = Link(0.0, 1e9)
"""No latency, and a byte in a nanosecond."""
FLOPS = Speed(1e12, float("inf"))
"""Products alone take time."""
BYTES = Speed(float("inf"), 1e9)
"""Memory alone takes time."""


class Block(nn.Module):
    """GPT's block: norm, attention, residual, norm, two products with a gelu between, residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        normed = self.norm1(x_BLD)
        parts = (of(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for of in (self.q, self.k, self.v))
        attended = scaled_dot_product_attention(*parts, is_causal=True)
        x_BLD = x_BLD + self.out(attended.transpose(1, 2).flatten(2))
        return x_BLD + self.down(gelu(self.up(self.norm2(x_BLD))))


class Blocks(nn.Module):
    def __init__(self, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))

    def forward(self, x_BLD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return x_BLD


class Gpt(nn.Module):
    """Embedding, blocks, norm, head and loss."""

    def __init__(self, vocabulary: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(vocabulary, dim), Blocks(dim, heads, layers)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids_BL: Tensor, labels_BL: Tensor) -> Tensor:
        logits_BLV = self.head(self.norm(self.blocks(self.table(ids_BL))))
        return cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten())


def formulated(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    sizes: Sequence[int],
    links: Sequence[Link] = (),
    speed: Speed = FLOPS,
    fixed: Mapping[str, str] | None = None,
    train: bool = True,
    state: float = 0.0,
) -> Formulation:
    graph = trace_graph(model, inputs, train=train)
    dims = {name: len(value.shape) for name, value in graph.inputs.items()}
    dims |= {f"output.{n}": len(value.shape) for n, value in enumerate(graph.outputs)}
    specs: dict[str, Spec] = {name: parse(text, dims.get(name)) for name, text in (fixed or {}).items()}
    return formulate(graph, sizes, links or [SLOW] * len(sizes), speed, specs, state)


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()
