"""What the results slow_links and coded_activations say of steps, where `llm plan` tells it.

    python -m tests.support.link_results    prints whether apps/llm/links.py is no longer right, and writes it anew

tests/unit/test_llm_links.py holds it to the results.
"""

import sys
from collections.abc import Iterator

from benchmarks.coded_activations import RANKS
from benchmarks.result import RESULTS, ROOT, Row, read

CODE = ROOT / "apps" / "llm" / "links.py"
BEGIN, END = "    # measured: python -m tests.support.link_results\n", "    # end\n"
SLOW_LINKS, ACTIVATIONS = "slow_links", "coded_activations"
KINDS = {"ZeRO++": "ZeRO++", "ZeRO++ with feedback": "ZeRO++ with feedback", "PowerSGD": "PowerSGD", "DiLoCo": "MuLoCo"}
"""A form of the benchmark, which trains with Muon -> that of the plan."""
SYNCHRONOUS = "all-reduce"


def between() -> str:
    """What stands between the marks."""
    return CODE.read_text().split(BEGIN)[1].split(END)[0]


def made() -> str:
    """What is to stand there: nothing without a result."""
    lines = {SLOW_LINKS: _of_forms, ACTIVATIONS: _of_activations}
    there = {name: path for name in lines if (path := RESULTS / f"{name}.json").exists()}
    return "".join(line for name, path in there.items() for line in lines[name](list(read(path).figures)))


def _of_forms(rows: list[Row]) -> Iterator[str]:
    """A line for each form and number of workers: the steps to the loss that all reach, beside all-reduce's."""
    steps = {
        (str(row.case["form"]), int(row.case["workers"])): row.numbers["steps"].value
        for row in rows
        if row.case["from"] == "time to the loss"  # of which a link changes the seconds alone
    }
    for (form, workers), of_form in steps.items():
        if form in KINDS:
            share = of_form / steps[SYNCHRONOUS, workers] - 1
            yield f'    ("{KINDS[form]}", {workers}): ("{SLOW_LINKS}", {share:.3f}),\n'


def _of_activations(rows: list[Row]) -> Iterator[str]:
    """The line of 8 bits, of whichever of stages and experts costs more; that rounding gains some is a seed's luck."""
    steps = [row.numbers["steps"].value for row in rows if "steps" in row.numbers]
    yield f'    ("8-bit activations", {RANKS}): ("{ACTIVATIONS}", {max(0.0, *steps):.3f}),\n'


def main() -> None:
    if (old := between()) != (text := made()):
        print(f"{CODE.relative_to(ROOT)} is new", file=sys.stderr)
        CODE.write_text(CODE.read_text().replace(BEGIN + old + END, BEGIN + text + END))


if __name__ == "__main__":
    main()
