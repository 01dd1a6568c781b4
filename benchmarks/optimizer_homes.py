"""The step of Muon on two ranks beside that on one, at the shape of GPT-2 124M: homes share the work.

Parameters and gradients lie as ZeRO 1 has them, cut by rows; a step brings each matrix home, orthogonalises it there,
and sends the update back (core/optim/home.py). Ranks are processes of one thread, so on a machine whose cores are idle
the two have twice the machine of the one; rounds of one and of two take turns. The time of a step is that of the
slowest rank.
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import device_of_rank, on_ranks
from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import run_command
from core.layout import Layout, tag
from core.mesh import MeshConfig, build_mesh
from core.models.decoder import Decoder
from core.models.shapes import SHAPES
from core.optim import OptimConfig, build_optimizer

WANTED = 0.55
RANKS = (1, 2)


def steps(shape: str, num_steps: int) -> list[float]:
    """Seconds of each step on this rank, all ranks having begun together."""
    device, num_ranks = device_of_rank(), dist.get_world_size()
    mesh = build_mesh(MeshConfig(dp_shard=num_ranks).resolve(num_ranks, zero=1), device.type)
    with torch.device("meta"):
        model = Decoder(SHAPES[shape])
    masters: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        layout = Layout(tuple(parameter.shape)).cut(mesh, "dp_shard", 0)
        value, grad = (torch.randn(layout.local_shape(), device=device) / 50 for _ in range(2))
        masters[name] = tag(value, layout).requires_grad_()
        masters[name].grad = grad
    optimizer = build_optimizer(OptimConfig(name="muon"), masters)
    optimizer.step()
    found = []
    for _ in range(num_steps):
        dist.barrier()
        began = time.perf_counter()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found


def measure(options: Options) -> Measured:
    shape, num_steps, rounds = ("debug", 2, 1) if options.quick else ("gpt2_124m", 3, 3)
    found: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
    for _ in range(rounds):
        for ranks in RANKS:
            each = on_ranks(ranks, steps, shape, num_steps, preload=["core.models.decoder", "core.optim"])
            found[ranks] += map(max, zip(*each, strict=True))
    rows = []
    for ranks, seconds in found.items():
        numbers = {
            "a step": Number(statistics.median(seconds), "s"),
            "least": Number(min(seconds), "s"),
            "most": Number(max(seconds), "s"),
        }
        rows.append(Row({"model": shape, "optimizer": "muon", "ranks": ranks}, numbers))
        options.kept(rows[-1])
    share = statistics.median(found[2]) / statistics.median(found[1])
    target = Target(f"{WANTED} / a step on 2 ranks of one on 1 rank", 1.0, WANTED / share)
    return Measured(tuple(rows), () if options.quick else (target,))


MEASURES = ("core/optim/home.py", "core/optim/muon.py", "core/optim/matrices.py", "core/optim/sharded.py",
            "benchmarks/ranks.py", "benchmarks/optimizer_homes.py")  # fmt: skip
BENCHMARK = Benchmark("optimizer_homes", "Muon's step on two ranks and on one", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="optimizer_homes"), sys.argv[1:]))
