"""The curves of a run as a PNG, drawn from its metrics.jsonl."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.files import save_figure
from core.metrics.log import read_metrics

_PANELS = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "noise_scale": "noise scale (rows)",
    "tokens_per_s": "tokens per second",
}
_COLOURS = ["#d1495b", "#edae49", "#00798c", "#66a182"]


def plot_loss(
    metrics_jsonl: str | Path,
    png: str | Path,
    *,
    series: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    title: str = "",
    unit: str = "nats per token",
    counted: str = "tokens",
) -> Path:
    """Draw loss over step, with panels for learning rate, gradient norm and throughput where the rows have them.

    unit, counted  of the loss, and what the throughput counts, for the labels
    series  further points to draw over the loss: label -> [(step, loss), …], such as held-out losses
    Returns the path of the PNG.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # pyplot is for windows, and takes longer to import than a curve to draw

    rows = read_metrics(metrics_jsonl)
    panels = [key for key in _PANELS if any(row.get(key) is not None for row in rows)]
    with rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        heights = [3.2, 1.0] if panels else [1.0]
        figure = Figure(figsize=(9, 5.6 if panels else 4.2))
        # Fixed margins: a layout that looks for them draws everything twice, a quarter of a short run's processor time.
        margins = {"left": 0.08, "right": 0.98, "top": 0.94, "bottom": 0.06 if panels else 0.12}
        spaces = {"hspace": 0.42, "wspace": 0.28}
        grid = figure.add_gridspec(len(heights), max(1, len(panels)), height_ratios=heights, **margins, **spaces)
        _draw_loss(figure.add_subplot(grid[0, :]), rows, series or {}, title, unit)
        for column, key in enumerate(panels):
            label = _PANELS[key].replace("tokens", counted)
            _draw_panel(figure.add_subplot(grid[1, column]), rows, key, label)
        save_figure(figure, Path(png), 150)
    return Path(png)


def _column(rows: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of `key`; a value that is missing or null is a gap (NaN)."""
    values = [np.nan if row.get(key) is None else float(row[key]) for row in rows]
    return np.array([row["step"] for row in rows], dtype=float), np.array(values)


def _draw_loss(axes: Any, rows: list[dict[str, Any]], series: Mapping[str, Any], title: str, unit: str) -> None:
    steps, losses = _column(rows, "loss")
    window = max(1, len(losses) // 50)
    axes.plot(steps, losses, color="#30638e", alpha=0.3 if window > 1 else 1.0, linewidth=1.0, label="training")
    if window > 1:
        label = f"training, mean of {window} steps"
        axes.plot(steps, _running_mean(losses, window), color="#30638e", linewidth=1.8, label=label)
    for colour, (label, points) in zip(_COLOURS * len(series), series.items(), strict=False):
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, "o-", color=colour, markersize=4, linewidth=1.2, label=label)
    low, high = np.nanmin(losses), np.nanmax(losses)
    if low > 0 and high / low > 3:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="step", ylabel=f"loss ({unit})" if unit else "loss", title=title)
    axes.grid(True, which="major", alpha=0.25)
    axes.legend(frameon=False)


def _draw_panel(axes: Any, rows: list[dict[str, Any]], key: str, label: str) -> None:
    axes.plot(*_column(rows, key), color="#555555", linewidth=1.0)
    axes.set_title(label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))  # 1e5: mathematics has a parser, half of the time
    axes.yaxis.get_offset_text().set_fontsize(8)
    axes.set_ylim(bottom=0)
    axes.grid(True, alpha=0.25)


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` values (fewer at the start), gaps left out."""
    known = ~np.isnan(values)
    total, count = np.cumsum(np.where(known, values, 0.0)), np.cumsum(known)
    total[window:], count[window:] = total[window:] - total[:-window], count[window:] - count[:-window]
    return total / np.where(count == 0, np.nan, count)
