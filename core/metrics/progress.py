"""Progress of a run: a live display on a terminal, single plain lines anywhere else.

Fed with the same row as the log, so that what is shown is what is recorded. Rows may lack any figure but `step`.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from core.config import in_words

_LINE_INTERVAL_S = 15.0
_NUM_LINES = 20
_NUM_RECENT_STEPS = 32


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# Figures shown when the row has them, in this order: key -> label and format.
_FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "loss": ("loss", "{:.4f}".format),
    "heldout_loss": ("held-out", "{:.4f}".format),
    "lr": ("lr", "{:.2e}".format),
    "grad_norm": ("grad norm", "{:.2f}".format),
    "noise_scale": ("critical batch", "{:,.3g} rows".format),
    "tokens_per_s": ("tokens/s", "{:,.0f}".format),
    "mfu": ("MFU", _percent),
    "memory_bytes": ("memory", in_words),
    "skipped_steps": ("skipped", "{:d}".format),
}


class Progress:
    """Shows how a run proceeds; silent where `active` is False (ranks other than 0).

    num_steps   the last step of the run
    first_step  steps already taken (of a run that resumes)
    console     where to show it; stdout by default. On a terminal the display is live; elsewhere a line is printed
                for the first and the last step, every 5 % of the way, and after every 15 s
    """

    def __init__(self, num_steps: int, *, first_step: int = 0, active: bool = True, console: Console | None = None):
        self.num_steps = num_steps
        self._active = active
        self._console = console or Console(file=sys.stdout, soft_wrap=True, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal and active else None
        self._recent_s: deque[tuple[int, float]] = deque(maxlen=_NUM_RECENT_STEPS)
        self._printed_step, self._printed_s = first_step, -math.inf

    def update(self, row: Mapping[str, Any]) -> None:
        """Show the figures of the step `row["step"]`."""
        if not self._active:
            return
        step, now_s = row["step"], time.monotonic()
        self._recent_s.append((step, now_s))
        figures = [(label, show(row[key])) for key, (label, show) in _FIGURES.items() if row.get(key) is not None]
        figures.append(("ETA", _clock(self.eta_s())))
        if self._live is not None:
            if not self._live.is_started:
                self._live.start()
            self._live.update(self._display(step, figures))
        elif self._is_due(step, now_s):
            self._printed_step, self._printed_s = step, now_s
            width = len(str(self.num_steps))
            text = "  ".join(f"{label} {value}" for label, value in figures)
            self._console.print(f"step {step:{width}d}/{self.num_steps}  {text}", markup=False)

    def message(self, text: str) -> None:
        """A line of its own, above the live display."""
        if self._active:
            self._console.print(text, markup=False)

    def eta_s(self) -> float:
        """Seconds that the remaining steps will take at the pace of the last ones; NaN before the second step."""
        if len(self._recent_s) < 2:
            return math.nan
        (first, first_s), (last, last_s) = self._recent_s[0], self._recent_s[-1]
        return (self.num_steps - last) * (last_s - first_s) / (last - first)

    def close(self) -> None:
        if self._live is not None and self._live.is_started:
            self._live.stop()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        self.close()

    def _is_due(self, step: int, now_s: float) -> bool:
        every = max(1, self.num_steps // _NUM_LINES)
        passed = step // every > self._printed_step // every
        return passed or step == self.num_steps or now_s - self._printed_s >= _LINE_INTERVAL_S

    def _display(self, step: int, figures: list[tuple[str, str]]) -> Group:
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column()
        bar.add_column(ratio=1)
        bar.add_row(f"step {step}/{self.num_steps}", ProgressBar(total=self.num_steps, completed=step))
        line = Text()
        for label, value in figures:
            line.append(f"{label} ", style="dim").append(value, style="bold").append("   ")
        return Group(bar, line)


def _clock(seconds: float) -> str:
    if math.isnan(seconds):
        return "--:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
