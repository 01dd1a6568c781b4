"""Memory over one step, tier by tier, as a PNG: what was planned, and beside it what a real step had."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.files import save_figure
from core.gemini.residency import ResidencyPlan
from core.gemini.trace import Trace

_COLOURS = {
    "resident chunks": "#00798c",
    "buffers that come and go": "#66a182",
    "activations and temporaries": "#edae49",
    "parameters": "#66a182",
    "masters and optimizer state": "#00798c",
    "gradients": "#edae49",
    "places for the disk": "#8d96a3",
    "chunks that live there": "#00798c",
    "durable copies of others": "#66a182",
    "gradients that wait": "#edae49",
}
_KINDS = {"forward": "#ffffff", "backward": "#eeeeee", "reduce": "#eeeeee", "update": "#dfe7ef"}


def planned_memory(trace: Trace, plan: ResidencyPlan) -> dict[str, dict[str, np.ndarray]]:
    """tier -> kind -> [moment] bytes, as the plan has them."""
    chunks, num_moments = trace.chunks, len(trace.moments)
    outside = [chunk for chunk in chunks if chunk.index not in plan.resident]
    away = [chunk for chunk in outside if chunk.index not in plan.on_disk]
    resident = sum(chunks[c].param_bytes + chunks[c].shard_bytes for c in plan.resident)
    others = np.array([moment.other_bytes for moment in trace.moments])
    gradients = np.zeros(num_moments, dtype=np.int64)
    for chunk in away:
        if chunk.away_bytes is not None:  # its gradient has a place for good
            continue
        reduces, updates = (
            [k for k, m in enumerate(trace.moments) if m.kind == kind and m.chunks[0] == chunk.index]
            for kind in ("reduce", "update")
        )
        for update in updates:
            gradients[reduces[0] : update + 1] += chunk.param_bytes
    shards = sum(chunk.shard_bytes for chunk in away)
    passing = sum(chunk.param_bytes for chunk in away if chunk.trainable and chunk.away_bytes is None)
    of_disk = sum(chunk.grad_bytes for chunk in outside if chunk.index in plan.on_disk - plan.waiting)
    gradients += of_disk
    of_host = plan.host_bytes - of_disk - sum(chunk.host_bytes for chunk in away)
    tiers = {
        "device": {
            "resident chunks": np.full(num_moments, resident),
            "buffers that come and go": np.array(plan.device_bytes) - resident - others,
            "activations and temporaries": others,
        },
        "host": {
            "masters and optimizer state": np.full(num_moments, shards),
            "parameters": np.full(num_moments, sum(chunk.host_bytes for chunk in away) - shards - passing),
            "gradients": gradients,
        },
    }
    if plan.disk_bytes:
        tiers["host"]["places for the disk"] = np.full(num_moments, of_host)
        there = 2 * sum(chunks[c].slot_bytes for c in plan.on_disk)
        waiting = sum(chunks[c].wait_bytes for c in plan.waiting)
        tiers["disk"] = {
            "chunks that live there": np.full(num_moments, there),
            "durable copies of others": np.full(num_moments, plan.disk_bytes - there - waiting),
        }
        if waiting:
            tiers["disk"]["gradients that wait"] = np.full(num_moments, waiting)
    return tiers


def draw_memory(
    png: str | Path,
    trace: Trace,
    plan: ResidencyPlan,
    measured_device_bytes: Sequence[int | None] | None = None,
    measured_host_bytes: Sequence[int | None] | None = None,
) -> Path:
    """Draw the step that was planned as areas, and a measured one as lines; both moment by moment.

    measured_…  everything on that tier at each moment of the trace; None of one that was not measured

    Returns the path of the PNG. Raises ValueError where a measured step has another number of moments.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = {"device": measured_device_bytes, "host": measured_host_bytes, "disk": None}
    for tier, found in measured.items():
        if found is not None and len(found) != len(trace.moments):
            raise ValueError(f"{len(found)} moments of the {tier} were measured, and {len(trace.moments)} traced")
    planned = planned_memory(trace, plan)
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        size = (9, 3 * len(planned))
        figure, panels = plt.subplots(len(planned), 1, figsize=size, sharex=True, layout="constrained")
        for axes, tier in zip(panels, planned, strict=True):
            _draw_tier(axes, trace, tier, planned[tier], measured[tier])
        panels[0].axhline(plan.budget_bytes / 2**30, color="#d1495b", linewidth=1.2, label="budget")
        for axes in panels:
            axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        panels[-1].set_xlabel("moments of a step: forward, backward (grey), update (blue)")
        figure.suptitle(plan.describe().replace("; ", "\n"), fontsize=8)
        save_figure(figure, Path(png), 150)
        plt.close(figure)
    return Path(png)


def _draw_tier(
    axes: Any, trace: Trace, tier: str, planned: dict[str, np.ndarray], measured: Sequence[int | None] | None
) -> None:
    edges = np.arange(len(trace.moments) + 1)
    for k, moment in enumerate(trace.moments):
        axes.axvspan(k, k + 1, color=_KINDS[moment.kind], linewidth=0, zorder=0)
    below = np.zeros(len(trace.moments))
    for kind, num_bytes in planned.items():
        top = below + num_bytes / 2**30
        axes.stairs(top, edges, baseline=below, fill=True, color=_COLOURS[kind], label=kind, zorder=1)
        below = top
    if measured is not None:
        heights = np.array([np.nan if num_bytes is None else num_bytes / 2**30 for num_bytes in measured])
        axes.stairs(heights, edges, baseline=None, color="#222222", linewidth=1.2, label="measured")
    axes.set_ylabel(f"{tier}, GiB")
    axes.set_xlim(0, max(1, len(trace.moments)))
    axes.set_ylim(bottom=0)
