"""What the results async_pipeline and async_gap say, where others say it: docs/async_pipelines.md and `llm plan`.

    python -m tests.support.async_results    prints which of them are no longer right, and writes them anew

tests/unit/test_llm_schedules.py holds both to the results.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.result import RESULTS, ROOT, Row, read

RESULT, STUDY = RESULTS / "async_pipeline.json", RESULTS / "async_gap.json"
PAGE = ROOT / "docs" / "async_pipelines.md"
CODE = ROOT / "apps" / "llm" / "schedules.py"
MARKS: dict[Path, tuple[str, str]] = {
    PAGE: ("<!-- measured: python -m tests.support.async_results -->\n", "<!-- end -->\n"),
    CODE: ("    # measured: python -m tests.support.async_results\n", "    # end\n"),
}


def between(path: Path) -> str:
    """What stands between a file's marks."""
    begin, end = MARKS[path]
    return path.read_text().split(begin)[1].split(end)[0]


def made() -> dict[Path, str]:
    """What is to stand there: nothing without a result."""
    if not RESULT.exists():
        return dict.fromkeys(MARKS, "")
    rows = read(RESULT).figures
    gaps = [row for row in rows if row.case["from"] == "gaps"]
    page = f"\n{_gaps(gaps)}\n\n{_times(list(rows))}\n\n"
    if several := [row for row in rows if row.case.get("replicas") and row.case["microbatches"] == 6]:
        page += _replicas(several) + "\n\n"
    judged = [row for row in read(STUDY).figures if row.case["from"] == "gaps"] if STUDY.exists() else []
    if judged:
        page += _judged(judged) + "\n\n"
    return {PAGE: page, CODE: _penalties({"async_pipeline": gaps, "async_gap": judged})}


def _judged(rows: list[Row]) -> str:
    """A line for each form that was judged."""
    lines = ["| 2bw, by the study: held-out nats of a byte beyond no delay | rate | gap |", "|---|---|---|"]
    for row in rows:
        what = f"{row.case['optimizer']}, {row.case['correction']}".removesuffix(", none")
        lines.append(f"| {what}{' (chosen)' * int(row.case['chosen'])} | {row.case['rate']} | {_gap(row)} |")
    return "\n".join(lines)


def _gaps(rows: list[Row]) -> str:
    """A line for each optimizer and correction, a column for each schedule."""
    kinds = list(dict.fromkeys((row.case["schedule"], row.case["stages"]) for row in rows))
    of = {
        (row.case["optimizer"], row.case["correction"], row.case["schedule"], row.case["stages"]): row for row in rows
    }
    names = [str(name) if name == "2bw" else f"{name}, {stages} stages" for name, stages in kinds]
    lines = [f"| held-out nats of a byte beyond no delay | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for optimizer, correction in dict.fromkeys((row.case["optimizer"], row.case["correction"]) for row in rows):
        cells = [_gap(of.get((optimizer, correction, *kind))) for kind in kinds]
        what = f"{optimizer}, {correction}".removesuffix(", none")
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _gap(row: Row | None) -> str:
    if row is None:
        return ""
    gap, low, high = (row.numbers[name].value for name in ("gap", "gap from", "gap to"))
    return f"{gap:+.3f} ({low:+.3f} to {high:+.3f})"


def _times(rows: list[Row]) -> str:
    """Of each schedule a step on two ranks, and on the clock of four stages with four microbatches."""
    ranks = {
        row.case["schedule"]: row.numbers
        for row in rows
        if row.case["from"] == "ranks" and row.case["microbatches"] == 2
    }
    clock = [row for row in rows if row.case["from"] == "clock" and row.case["microbatches"] == 4]
    links = list(dict.fromkeys(row.case["link"] for row in clock))
    of = {(row.case["schedule"], row.case["link"]): row.numbers for row in clock}
    head = ["schedule", "two ranks, 2 microbatches: a step", "of the time computing", "1f1b / this"]
    head += [f"four stages, 4 microbatches, link {link}: 1f1b / this" for link in links]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in dict.fromkeys(row.case["schedule"] for row in clock):
        own = ranks.get(name)
        cells = [""] * 3
        if own is not None:
            faster = own["1f1b / this"].value
            cells = [f"{own['step'].value:.3f} s", f"{own['utilisation'].value:.0%}", f"{faster:.2f}"]
        cells += [f"{of[name, link]['1f1b / this'].value:.2f}" for link in links]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _replicas(rows: list[Row]) -> str:
    """Of each form a step on three ranks."""
    lines = ["| three ranks, 6 microbatches | ranks of each stage | a step | 1f1b / this |", "|---|---|---|---|"]
    for row in rows:
        step, faster = (row.numbers[name].value for name in ("step", "1f1b / this"))
        lines.append(f"| {row.case['schedule']} | {row.case['replicas']} | {step:.3f} s | {faster:.2f} |")
    return "\n".join(lines)


def _penalties(results: Mapping[str, list[Row]]) -> str:
    """A line for each optimizer and correction under 2bw, of the last result that has it."""
    lines = {}
    for result, rows in results.items():
        for row in rows:
            if row.case["schedule"] == "2bw":
                values = ", ".join(f"{row.numbers[name].value:.3f}" for name in ("gap", "gap from", "gap to"))
                form = f'("{row.case["optimizer"]}", "{row.case["correction"]}")'
                lines[form] = f'    {form}: ("{result}", {values}),\n'
    return "".join(lines.values())


def main() -> None:
    for path, text in made().items():
        begin, end = MARKS[path]
        if (old := between(path)) != text:
            print(f"{path.relative_to(ROOT)} is new", file=sys.stderr)
            path.write_text(path.read_text().replace(begin + old + end, begin + text + end))


if __name__ == "__main__":
    main()
