"""The plans of a search as a picture: time beside memory, and a step of the fastest on a clock."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.auto.machines import GIB, Cluster
from core.auto.step_time import StepClock
from core.auto.strategies import Plan
from core.estimate.draw import draw_timeline
from core.estimate.shape import ModelShape
from core.files import save_figure


def draw_plans(png: str | Path, model: ModelShape, plans: Sequence[Plan], cluster: Cluster) -> Path:
    """Draw the plans, and a step of the first: the bars of its pipeline's ranks, or what the step is made of.

    Returns the path of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first = plans[0]
    height = 1.5 + 0.35 * first.run.pp
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (front, step) = plt.subplots(
            2, 1, figsize=(11, 4 + height), height_ratios=(4, height), layout="constrained"
        )
        times, memory = [plan.step_s for plan in plans], [plan.memory_bytes / GIB for plan in plans]
        front.plot(times, memory, "-o", color="#30638e", markersize=4)
        if max(memory) > 0.4 * cluster.memory_bytes / GIB:  # else the plans would lie on one line
            front.axhline(cluster.memory_bytes / GIB, color="#d1495b", linewidth=0.8, linestyle="--")
        front.set_xlabel("s a step")
        front.set_ylabel("GiB of a device")
        front.set_title(f"plans on {cluster.ranks} x {cluster.gpu.name} that none beats in time and memory", loc="left")
        for number, (x, y) in enumerate(zip(times, memory, strict=True), 1):
            if number <= 16:
                front.annotate(str(number), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
        clock = StepClock(model, first.run, cluster, first.budget_bytes)
        if first.run.pp > 1:
            timeline = clock.timeline()
            draw_timeline(step, timeline)
            step.set_title(f"plan 1: stages idle for {timeline.bubble:.1%} of {timeline.step_s:.3g} s", loc="left")
        else:
            _draw_parts(step, first)
            step.set_title(f"plan 1: {first.step_s:.3g} s", loc="left")
        step.set_xlabel("s")
        save_figure(figure, Path(png), 150)
        plt.close(figure)
    return Path(png)


def _draw_parts(axes: Any, plan: Plan) -> None:
    """What a step without stages takes, one part behind the other."""
    time, begin = plan.time, 0.0
    parts = {
        "computing": time.compute_s,
        "messages": time.messages_s,
        "gradients": time.reduced_s,
        "update": time.update_s,
        "host": time.host_s,
    }
    colours = ("#30638e", "#edae49", "#d1495b", "#66a182", "#8d96a3")
    for (name, seconds), colour in zip(parts.items(), colours, strict=True):
        if seconds:
            axes.barh(0, seconds, left=begin, color=colour, label=name, height=0.5)
            begin += seconds
    axes.set_yticks([])
    axes.legend(loc="lower right", ncols=len(parts), frameon=False)
