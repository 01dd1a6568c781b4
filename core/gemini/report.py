"""The report of a plan to the user: a line at the start, and a figure of a step."""

from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from core.gemini.figure import draw_memory
from core.gemini.gauge import Gauge
from core.gemini.order import Orders
from core.gemini.residency import ResidencyPlan
from core.gemini.search import Chunking
from core.mesh import stage_axis


def announce(plan: ResidencyPlan, mesh: DeviceMesh, orders: Orders | None = None) -> None:
    """One line from the first rank, and one of the order of microbatches; of a pipeline one for each of its ranks."""
    if stage_axis(mesh) is None:
        if dist.get_rank() == 0:
            print(f"gemini: {plan.describe()}")
            if orders is not None:
                print(f"gemini: {orders.describe()}")
        return
    said = [""] * mesh["pp"].size()
    dist.all_gather_object(said, plan.describe(), group=mesh["pp"].get_group())
    if dist.get_rank() == 0:
        for rank, words in enumerate(said):
            print(f"gemini, pipeline rank {rank}: {words}")


def draw(png: Path, planned: Chunking, gauge: Gauge, mesh: DeviceMesh) -> None:
    """The step as planned and as measured, of the first rank; of a pipeline one figure for each of its ranks."""
    axis = stage_axis(mesh)
    if axis is not None:
        png = png.with_stem(f"{png.stem}_rank{mesh.get_local_rank('pp')}")
    if (dist.get_rank() if axis is None else axis.get_local_rank()) == 0:
        draw_memory(png, planned.trace, planned.plan, gauge.device, gauge.host)
