"""The study of 2bw's gap: what is chosen, by which runs, and what the gaps are of."""

from unittest.mock import patch

import pytest

from benchmarks import async_gap
from benchmarks.async_gap import CORRECTED, Form, Study, judged, targets
from benchmarks.recurrence import Learned, Sizes
from benchmarks.run import Options
from core.optim.build import OptimConfig

JUDGING = {"muon": (10, 11), "adamw": (10, 11, 12)}
GAPS = {"none": 0.3, "prediction": 0.02, "error_feedback": 0.1}


def learned(sizes: Sizes, optim: OptimConfig, delay: object, stages: int, correction: str, seed: int) -> Learned:
    """AdamW's best rate is its first, Muon's its last; of other seeds prediction would look worse than it is."""
    late = callable(delay) and delay(0, 2) > 0
    rates = async_gap.RATES[optim.name]
    best = rates[0] if optim.name == "adamw" else rates[-1]
    gap = (GAPS[correction] if optim.name == "adamw" else GAPS[correction] / 10) if late else 0.0
    return Learned(2 + seed + gap + abs(optim.lr - best) + (late and seed >= 10) * 1e-3 * (seed - 10), 0.01)


def test_what_is_chosen_and_judged() -> None:
    kept = []
    with patch.object(async_gap, "learn", learned):
        study = Study(Options(kept=kept.append), Sizes())
        gaps, chosen = judged(study, (0, 1), JUDGING)
    assert chosen == Form("muon", True, "prediction")
    assert [row.case["correction"] for row in gaps] == ["none", "prediction"] * 2
    assert [row.case["rate"] for row in gaps] == ["0.005", "0.005", "0.0005", "0.0005"]
    assert [row.numbers["gap"].value for row in gaps] == pytest.approx([0.0305, 0.0025, 0.301, 0.021])
    for row in gaps:
        ends = [row.numbers[name].value for name in ("gap from", "gap to")]
        assert sum(ends) / 2 == pytest.approx(row.numbers["gap"].value)
        width = 12.706 * 1e-3 if row.case["optimizer"] == "muon" else 2 * 4.303 * 1e-3 / 3**0.5
        assert ends[1] - ends[0] == pytest.approx(width, rel=1e-3)
    met, interval = targets(gaps)
    assert met.met
    assert met.reached == pytest.approx(0.01 / 0.0025)
    assert interval.reached == pytest.approx(0.01 / (0.0025 + 12.706 * 5e-4), rel=1e-3)
    choosing = [row for row in kept if row.case["from"] == "choosing"]
    assert len(choosing) == sum(map(len, async_gap.RATES.values())) * (2 + len(CORRECTED)) * 2
    assert len(kept) == len(study.rows) == len(choosing) + 3 * (2 + 3)


def test_what_an_interrupted_study_has_is_not_run_again() -> None:
    kept = []
    with patch.object(async_gap, "learn", learned):
        first, _ = judged(Study(Options(kept=kept.append), Sizes()), (0,), JUDGING)
    with patch.object(async_gap, "learn", side_effect=AssertionError):
        again, _ = judged(Study(Options(earlier=tuple(kept)), Sizes()), (0,), JUDGING)
    assert again == first
