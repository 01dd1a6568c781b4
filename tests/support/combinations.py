"""The tables of docs/parallelism.md that say what goes with what, and why the rest does not.

    python -m tests.support.combinations    prints which of them are no longer right, and writes them anew

A table is options in rows and columns. What stands in a cell, and the reasons below a table, no list has: the check
with which every run begins says it, and that asks the records of schedules, grids, forms and optimizers.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from apps.llm.config import check_combination
from apps.llm.recipes import RECIPES
from core.config import UserError, parse

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
RANKS = ("--nproc", "8")


@dataclass(frozen=True)
class Combinations:
    """Options in the columns of a table, and in its rows; of the `debug` recipe, where they name none."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]


TABLES = {
    "pairs": Combinations(
        (
            "--zero 3",
            "--mesh.tp 2",
            "--mesh.tp 4 --mesh.tp-mode 2d",
            "--mesh.cp 2",
            "--mesh.pp 2",
            "--mesh.pp 2 --pipeline.schedule zbv",
            "--recipe debug_moe --mesh.ep 2",
        ),
        (
            "--zero 1",
            "--zero 3",
            "--mesh.tp 2",
            "--mesh.tp 4 --mesh.tp-mode 2d",
            "--mesh.tp 4 --mesh.tp-mode 2.5d --mesh.tp-depth 1",
            "--mesh.tp 8 --mesh.tp-mode 3d",
            "--mesh.cp 2",
            "--mesh.cp 2 --mesh.cp-mode ulysses",
            "--mesh.pp 2",
            "--mesh.pp 2 --pipeline.schedule interleaved",
            "--mesh.pp 2 --pipeline.schedule zbv",
            "--mesh.pp 2 --mesh.tp 2 --mesh.cp 2",
            "--recipe debug_moe --mesh.ep 2",
            "--recompute.mode full",
            "--recompute.mode recursive",
            "--recompute.mode budget --recompute.budget 1GiB",
            "--recompute.mode offload",
            "--recompute.mode compressed",
            "--compile",
            "--optim.name lamb",
            "--optim.name muon",
            "--optim.name soap",
            "--optim.name shampoo",
            "--optim.name galore",
        ),
    ),
    "tensor": Combinations(
        (
            "--mesh.tp 2",
            "--mesh.tp 4 --mesh.tp-mode 2d",
            "--mesh.tp 8 --mesh.tp-mode 2.5d --mesh.tp-depth 2",
            "--mesh.tp 8 --mesh.tp-mode 3d",
        ),
        (
            "--zero 0",
            "--zero 2 --microbatch 1 --reduce-each",
            "--zero 3 --precision bf16",
            "--zero 3 --mesh.dp-replicate 2",
            "--optim.name adafactor",
            "--optim.name lamb",
            "--optim.name muon",
            "--optim.name soap",
            "--optim.name shampoo",
            "--optim.name galore",
            "--recompute.mode selective",
            "--model.vocab-size 261 --model.dim 72 --model.ffn-dim 275",
            "--model.num-heads 1",
            "--compile",
            "--mesh.cp 2",
            "--recipe debug_moe",
            "--recipe debug_bert",
        ),
    ),
    "context": Combinations(
        (
            "--mesh.cp 2",
            "--mesh.cp 2 --mesh.cp-mode ulysses",
            "--mesh.cp 4 --mesh.cp-mode mixed --mesh.cp-ulysses 2",
        ),
        (
            "--zero 0",
            "--zero 1",
            "--zero 3 --precision bf16",
            "--zero 2 --microbatch 1 --reduce-each",
            "--zero 3 --mesh.dp-replicate 2",
            "--mesh.tp 2 --zero 3",
            "--recompute.mode selective",
            "--compile",
            "--data.mask-documents",
            "--mesh.tp 4 --mesh.tp-mode 2d",
            "--mesh.pp 2",
            "--mesh.ep 2 --model.moe.num-experts 4",
        ),
    ),
    "pipeline": Combinations(
        (
            "--mesh.pp 2",
            "--mesh.pp 2 --pipeline.schedule interleaved",
            "--mesh.pp 2 --pipeline.schedule zb-h1",
            "--mesh.pp 2 --pipeline.schedule zbv",
            "--mesh.pp 2 --pipeline.schedule 2bw",
            "--mesh.pp 2 --pipeline.schedule pipedream",
            "--mesh.pp 2 --pipeline.schedule pipedream_sync",
        ),
        (
            "--pipeline.microbatches 6",
            "--pipeline.cost measured",
            "--pipeline.split 9 7",
            "--zero 1",
            "--zero 2 --microbatch 1 --reduce-each",
            "--zero 2 --mesh.dp-replicate 2",
            "--zero 3",
            "--gemini.budget 100MiB --zero 3",
            "--mesh.tp 2",
            "--mesh.tp 4 --mesh.tp-mode 2d",
            "--mesh.tp 4 --mesh.tp-mode 2.5d --mesh.tp-depth 1",
            "--mesh.cp 2 --mesh.cp-mode ulysses",
            "--mesh.cp 2 --mesh.tp 2",
            "--recompute.mode full",
            "--compile",
            "--precision fp16",
            "--optim.name muon",
            "--optim.name soap",
            "--optim.name shampoo",
            "--optim.name galore",
            "--data.mask-documents",
        ),
    ),
    "experts": Combinations(
        (
            "--recipe debug_moe",
            "--recipe debug_moe --mesh.ep 2",
        ),
        (
            "--zero 0",
            "--zero 1 --model.moe.router gshard",
            "--zero 2 --microbatch 1 --reduce-each",
            "--zero 3 --precision bf16",
            "--zero 3 --mesh.dp-replicate 2",
            "--mesh.tp 2 --zero 3",
            "--mesh.cp 2",
            "--gemini.budget 100MiB --zero 3",
            "--mesh.cp 2 --mesh.cp-mode ulysses --mesh.tp 2 --zero 1",
            "--recompute.mode selective",
            "--compile",
            "--optim.name muon",
            "--optim.name soap",
            "--optim.name shampoo",
            "--optim.name galore",
            "--mesh.tp 4 --mesh.tp-mode 2d",
            "--mesh.pp 2 --zero 1",
            "--mesh.pp 2 --pipeline.schedule zbv --mesh.tp 2",
        ),
    ),
}


def refusal(row: str, column: str) -> str | None:
    """Why two sets of options do not go together; None where they do."""
    try:
        check_combination(parse(RECIPES, [*RANKS, *column.split(), *row.split()], "llm", default="debug"))
    except UserError as why:
        return str(why)
    return None


def shown(table: Combinations) -> str:
    """The table and the reasons of what it refuses; cells of two settings of one option are empty."""
    lines = [
        "| | " + " | ".join(f"`{column}`" for column in table.columns) + " |",
        "|---" * (len(table.columns) + 1) + "|",
    ]
    reasons: dict[str, dict[frozenset[str], str]] = {}
    for row in table.rows:
        cells = [f"`{row}`"]
        for column in table.columns:
            if _options(row) & _options(column):
                cells.append("")
                continue
            why = refusal(row, column)
            cells.append("yes" if why is None else "no")
            if why is not None:
                reasons.setdefault(_reason(why), {}).setdefault(frozenset((row, column)), f"`{row}` with `{column}`")
        lines.append("|" + "".join(f" {cell} |" if cell else " |" for cell in cells))
    if reasons:
        lines += ["", "| refused | why |", "|---|---|"]
        lines += [f"| {', '.join(pairs.values())} | {why} |" for why, pairs in reasons.items()]
    return "\n".join(lines)


def _reason(refusal: str) -> str:
    """The middle of a line that says what was given, why not, and what to do."""
    said = refusal.split("; use ")[0].split("; give ")[0].split("; leave ")[0]
    given, _, why = said.partition(": ")
    return why or given


def _options(words: str) -> set[str]:
    return {word for word in words.split() if word.startswith("--")}


def on_page(page: str, name: str) -> str:
    """The table of that name as the page has it."""
    return page.split(_begin(name))[1].split(END)[0]


def _begin(name: str) -> str:
    return f"<!-- {name}: python -m tests.support.combinations -->\n\n"


END = "\n\n<!-- end -->"


def main() -> None:
    page = PAGE.read_text()
    for name, table in TABLES.items():
        old, text = on_page(page, name), shown(table)
        if old != text:
            print(f"{name} is new", file=sys.stderr)
            page = page.replace(_begin(name) + old + END, _begin(name) + text + END)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
