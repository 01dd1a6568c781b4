"""Find the plan of one model's step and print what that took: a process of its own, for `benchmarks.auto_parallel`.

    python -m benchmarks.auto_parallel_search '{"model": "gpt3", "mesh": [8, 8]}'

Prints seconds of trace, build and solve, the resident peak and what of it was there before, the plan's seconds, its
peak and its optimality gap. The model is one of `LARGE` or of the forty in `tests.support.auto_models`.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.resident import status_bytes
from core.auto.costs import Link
from core.auto.formulate import formulate
from core.auto.solve import solve
from core.trace.machine import Speed
from core.trace.record import trace_graph
from tests.support.auto_models import made
from tests.support.planned import Blocks, Gpt, on_meta

NETWORK, NVLINK = Link(1e-5, 25e9), Link(5e-6, 240e9)
A100 = Speed(0.5 * 312e12, 1.5e12)
STATE = 3.0
"""Bytes of AdamW's state and master by byte of a parameter."""


@dataclass(frozen=True)
class Large:
    """A model on the meta device, and its tokens."""

    make: Callable[[], nn.Module]
    vocabulary: int
    rows: int = 64
    length: int = 2048
    names: tuple[str, str] = ("ids_BL", "labels_BL")

    def inputs(self) -> dict[str, Any]:
        ids = torch.zeros(self.rows, self.length, dtype=torch.int64, device="meta")
        given: dict[str, Any] = dict.fromkeys(self.names, ids)
        return given if self.names[0] == "ids_BL" else given | {"use_cache": False}


class Unlike(Blocks):
    """Blocks of which no two are equally wide within."""

    def __init__(self, dim: int, heads: int, layers: int) -> None:
        super().__init__(dim, heads, layers)
        for number, block in enumerate(self.blocks):
            wide = 4 * dim + 64 * number
            block.up, block.down = nn.Linear(dim, wide), nn.Linear(wide, dim)


def gpt(dim: int, heads: int, layers: int, blocks: type[Blocks] = Blocks) -> Gpt:
    model = Gpt(51200, dim, heads, 0)
    model.blocks = blocks(dim, heads, layers)
    return model


def llama3(layers: int = 32) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8))


_HUGGING_FACE = ("input_ids", "labels")
LARGE = {
    "gpt3": Large(lambda: gpt(12288, 96, 96), 51200),
    "llama3_8b": Large(llama3, 128256, names=_HUGGING_FACE),
    "unlike": Large(lambda: gpt(4096, 32, 32, Unlike), 51200),
    "small": Large(lambda: gpt(64, 4, 5), 51200, rows=8, length=16),
}


def search(model: str, mesh: Sequence[int]) -> dict[str, float]:
    importlib.import_module("scipy.optimize")  # with the model's library: what is timed is the search
    if model in LARGE:
        module, inputs, loss = on_meta(LARGE[model].make), LARGE[model].inputs(), None
    else:
        module, inputs, loss = made(model, torch.float32)
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    begin = time.perf_counter()
    graph = trace_graph(module, inputs, loss)
    traced = time.perf_counter()
    links = [NETWORK, *[NVLINK] * (len(mesh) - 1)]
    problem = formulate(graph, mesh, links, A100, state=STATE)
    built = time.perf_counter()
    plan = solve(problem.problem)
    solved = time.perf_counter()
    return {
        "trace_s": traced - begin,
        "build_s": built - traced,
        "solve_s": solved - built,
        "peak_bytes": status_bytes("VmHWM"),
        "before_bytes": before,
        "gap": plan.gap,
        "step_s": plan.seconds,
        "plan_bytes": plan.peak_bytes,
        "operators": len(graph.nodes),
        "nodes": len(problem.problem.nodes),
    }


if __name__ == "__main__":
    print(json.dumps(search(**json.loads(sys.argv[1]))))
