"""A process that runs entries of a command, one after another, as `benchmarks.gpu.protocol` asks for them by name.

What it says is lines of JSON on its standard output; whatever an entry prints goes to standard error.
"""

import gc
import json
import os
import sys
import traceback
from typing import Any

import torch

from benchmarks.gpu.entries import phases
from benchmarks.gpu.protocol import Entry, Where, as_json
from tests.support.chosen import choose_in_a_moment
from tests.support.device import INTERPRETED
from tests.support.interpreter import take_interpreter


def main(argv: list[str]) -> None:
    where = Where(argv[1], "--quick" in argv)
    if where.quick:
        choose_in_a_moment()
    if INTERPRETED:
        take_interpreter()
    entries = {entry.name: entry for phase in phases(argv[0], where) for entry in phase.entries}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        for answer in answers_of(entries[line.strip()], where):
            print(json.dumps(answer), file=answers, flush=True)


def answers_of(entry: Entry, where: Where) -> Any:
    """Its figures, and how it ended."""
    try:
        for row in entry.run(where):
            yield {"note": row} if isinstance(row, str) else {"row": as_json(row)}
    except Exception as error:
        traceback.print_exc()
        said = " ".join(str(error).split())[:300]
        yield {"failed": f"{type(error).__name__}: {said}", "broken": is_broken()}
    _free()
    yield {"done": True}


def is_broken() -> bool:
    """Whether CUDA gives nothing but the same error from now on."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except RuntimeError:
        return True
    return False


def _free() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        try:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        except RuntimeError:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
