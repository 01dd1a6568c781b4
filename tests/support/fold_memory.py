"""How much memory a prediction takes of its process, beside what it may: a child folds 20 residues, then a sequence.

python -m tests.support.fold_memory 0 30     prints a line of json for each of the seeds 0 to 29, and for what was found
"""

import io
import json
import random
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from apps.fold.model.config import ModelConfig, preset
from apps.fold.predict import main
from apps.fold.subbatch import FoldJob, least_bytes
from apps.fold.weights.folder import save_folder
from core.runtime import process_holding
from tests.support.fold import random_parameters
from tests.support.resident import in_child, rise_of

_LETTERS = "ACDEFGHIKLMNPQRSTVWY"


@dataclass(frozen=True)
class Size:
    """Of a prediction: rows of its alignment beside the query, and bytes that it may take."""

    residues: int
    rows: int
    budget: int


@dataclass(frozen=True)
class Rise:
    """The most resident memory of a prediction over what there was before it, in bytes, and its exit code."""

    size: Size
    rise: int
    code: int


FOUND = (Size(300, 40, 400_000_000), Size(257, 1500, 600_000_000))
"""Two predictions that took 623 and 1,372 MB when they were first measured."""


def model() -> ModelConfig:
    """Released widths, one block of each stack."""
    config = preset("model_5_ptm")
    return replace(
        config,
        evoformer=replace(config.evoformer, num_blocks=1),
        extra=replace(config.extra, num_blocks=1),
        structure=replace(config.structure, num_layers=1),
        num_recycles=1,
    )


def rise(size: Size, seed: int = 0) -> Rise:
    """Of a random sequence and alignment, in a child of its own."""
    return in_child(_measured, size, seed)


def random_size(seed: int) -> Size:
    """Its budget is the least that there is a plan for, or some more."""
    draw = random.Random(seed)
    residues, rows = draw.randint(24, 120), draw.choice((1, draw.randint(2, 60), draw.randint(100, 1500)))
    return Size(residues, rows, process_holding(int(draw.choice((1.02, 1.2, 1.7, 3.0)) * least(residues, rows))))


def least(residues: int, rows: int) -> int:
    """Bytes of tensors of the plan with the lowest peak."""
    return least_bytes(_job(residues, rows))


def _measured(size: Size, seed: int) -> Rise:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name, redirect_stdout(io.StringIO()):
        folder = Path(name)
        save_folder(folder / "weights", model(), random_parameters(model()))
        _rise(folder, draw, Size(20, 3, 500_000_000))  # imports, and what libraries make at their first use
        return _rise(folder, draw, size)


def _job(residues: int, rows: int) -> FoldJob:
    centres = min(rows + 1, model().max_msa)
    extra = max(1, min(rows + 1 - centres, model().max_extra_msa))
    return FoldJob(model(), residues, centres, extra, iterations=2, hidden=rows < centres, distances=False)


def _rise(folder: Path, draw: random.Random, size: Size) -> Rise:
    query = "".join(draw.choices(_LETTERS, k=size.residues))
    others = ("".join(draw.choice((c, c, draw.choice(_LETTERS), "-")) for c in query) for _ in range(size.rows))
    (folder / "in.fasta").write_text(f">a\n{query}\n")
    (folder / "a.a3m").write_text("".join(f">r\n{row}\n" for row in (query, *others)))
    arguments = (folder / "in.fasta", "--model", folder / "weights", "--msa", folder, "--out", folder / "out")
    arguments = [*map(str, arguments), "--no-plots", "--overwrite", "--memory", f"{size.budget}B"]
    return Rise(size, *rise_of(lambda: main(arguments)))


if __name__ == "__main__":
    first, last = map(int, sys.argv[1:])
    for size in (*map(random_size, range(first, last)), *FOUND):
        print(json.dumps(asdict(rise(size))), flush=True)
