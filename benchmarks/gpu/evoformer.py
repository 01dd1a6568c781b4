"""Command C, second: an Evoformer block at 256 and 768 residues and at the longest that fits, in bf16.

Forward, and forward with backward where its activations fit; 128 rows of MSA. The longest is what a plan of slices has
room for in the memory that is free (`apps.fold.subbatch.longest`), computed in those slices.
"""

from collections.abc import Iterator
from functools import partial

import torch

from apps.fold.subbatch import FoldJob, free_bytes, longest, plan_subbatches
from benchmarks.evoformer import (
    WORK,
    blocks_of,
    config_of,
    forward,
    inputs_of,
    seconds,
    slice_blocks,
)
from benchmarks.gpu.protocol import Entry, Phase, Where
from benchmarks.result import Number, Row

ROWS, LENGTHS, MOST = 128, (256, 768), 6000


def phases(where: Where) -> list[Phase]:
    lengths = (16,) if where.quick else LENGTHS
    entries = [Entry(f"Evoformer block, {n} residues", partial(block, n), least_s=15, most_s=60) for n in lengths]
    return [Phase([*entries, Entry("Evoformer block, the longest", longest_block, least_s=25, most_s=75)])]


def block(residues: int, where: Where) -> Iterator[Row]:
    device, dtype = torch.device(where.device), torch.bfloat16 if where.on_gpu else torch.float32
    rows = 4 if where.quick else ROWS
    blocks, inputs = blocks_of(1, device, dtype), inputs_of(rows, residues, device, dtype)
    for work, run in WORK.items():
        taken = seconds(partial(run, blocks, inputs), device, 1 if where.quick else 10)
        yield Row(_case(rows, residues, work), {"block": Number(1e3 * taken, "ms")} | _memory(where))


def longest_block(where: Where) -> Iterator[Row]:
    """A step less than planned each time that it does not fit all the same."""
    device, dtype = torch.device(where.device), torch.bfloat16 if where.on_gpu else torch.float32
    rows = 4 if where.quick else ROWS
    job = FoldJob(config_of(), 16, rows, 1, dtype=dtype, device=where.device)
    room = free_bytes(where.device)
    residues = 24 if where.quick else min(MOST, longest(job, room))
    while True:
        blocks = blocks_of(1, device, dtype)
        try:
            sized = FoldJob(config_of(), residues, rows, 1, dtype=dtype, device=where.device)
            slice_blocks(blocks, plan_subbatches(sized, room).choices)
            inputs = inputs_of(rows, residues, device, dtype)
            taken = seconds(partial(forward, blocks, inputs), device, 1)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            residues = int(0.85 * residues)
            continue
        yield Row(_case(rows, residues, "forward, in slices"), {"block": Number(1e3 * taken, "ms")} | _memory(where))
        return


def _case(rows: int, residues: int, work: str) -> dict[str, str | int]:
    return {"rows": rows, "residues": residues, "work": work}


def _memory(where: Where) -> dict[str, Number]:
    return {"peak": Number(torch.cuda.max_memory_allocated() / 2**30, "GiB")} if where.on_gpu else {}
