"""Pipeline steps as pictures: a line a rank, a bar an action, the gaps are the bubble."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.estimate.pipeline import Timeline
from core.files import save_figure
from core.parallel.pipeline.schedule import Kind

_COLOURS = {Kind.FORWARD: "#30638e", Kind.BACKWARD: "#d1495b", Kind.INPUT: "#edae49", Kind.WEIGHTS: "#66a182"}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "gradient of the input",
    Kind.WEIGHTS: "gradients of the weights",
}
_MOST_NUMBERED = 64  # actions of a rank whose microbatch is written into its bar


def draw_timelines(png: str | Path, timelines: Mapping[str, Timeline], unit: str = "s") -> Path:
    """One panel each, under its label and its bubble, beside the published one.  Returns the path of the PNG.

    Bars of a rank's later stages are paler.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heights = [1.0 + 0.45 * len(timeline.schedule.ranks) for timeline in timelines.values()]
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, panels = plt.subplots(
            len(timelines),
            1,
            sharex=True,
            figsize=(11, sum(heights) + 0.6),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
        )
        for axes, (label, timeline) in zip(panels[:, 0], timelines.items(), strict=True):
            draw_timeline(axes, timeline)
            axes.set_title(f"{label}: bubble {timeline.bubble:.1%}, in theory {timeline.theory:.1%}", loc="left")
        panels[-1, 0].set_xlabel(unit)
        kinds = {action.kind for timeline in timelines.values() for action in timeline.times}
        handles = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[kind]) for kind in Kind if kind in kinds]
        labels = [_NAMES[kind] for kind in Kind if kind in kinds]
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False)
        save_figure(figure, Path(png), 150)
        plt.close(figure)
    return Path(png)


def draw_timeline(axes: Any, timeline: Timeline) -> None:
    """The bars of one step, into a panel."""
    start = min(begin for begin, _ in timeline.times.values())
    for rank, actions in enumerate(timeline.schedule.ranks):
        own = timeline.schedule.stages_of(rank)
        for action in actions:
            begin, end = timeline.times[action]
            later = own.index(action.stage) / len(own)
            colour = _COLOURS[action.kind]
            axes.barh(
                rank, end - begin, left=begin - start, height=0.84, color=colour, alpha=1 - 0.55 * later,
                edgecolor="white", linewidth=0.6,
            )  # fmt: skip
            if len(actions) <= _MOST_NUMBERED:
                centre = (begin + end) / 2 - start
                axes.text(centre, rank, str(action.microbatch), ha="center", va="center", fontsize=6, color="white")
    axes.set_yticks(range(len(timeline.schedule.ranks)), [f"rank {r}" for r in range(len(timeline.schedule.ranks))])
    axes.invert_yaxis()
    axes.margins(x=0)
