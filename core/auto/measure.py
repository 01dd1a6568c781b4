"""The machine that this process runs on, measured by all its ranks: products, memory, links between groups of ranks.

1. products  FLOP/s of square matrix products by size and format, every rank at once
2. kernels   what one takes to begin: blocks of a decoder so small that nothing else takes time
3. memory    a device's, the link to the host, the host's
4. links     each collective in groups of each size, the groups beside each other as in a mesh: the time of several
             sizes, on which a latency and a bandwidth are fitted (`fit_link`)

Times are medians of rounds; a round goes on for a while, so that the clock is not what is measured. On a CPU several
ranks share a core where there are more of them: products, kernels and memory are measured by as many ranks as there are
cores, while the others wait; links by all, since that is how they run.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from core.auto.costs import Link, bytes_sent, messages_sent
from core.auto.measured import MeasuredLink, MeasuredMachine
from core.auto.step_time import BLOCK_LAUNCHES
from core.auto.strategies import divisors
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.precision import Precision, compute_dtype
from core.runtime import Runtime, agreed, device_bytes
from core.trace.machine import LEAST_PROBE_BYTES, MOST_PROBE_BYTES, bandwidth_of

PRODUCTS = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
"""Sides of the matrices."""
MESSAGES = {"cpu": (1 << 12, 1 << 16, 1 << 20, 1 << 23), "cuda": (1 << 14, 1 << 18, 1 << 22, 1 << 26, 1 << 28)}
"""Bytes of the full tensor of a collective."""
MEASURED: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
ROUND_S, ROUNDS = 0.01, 5
TINY = DecoderConfig(vocab_size=8, dim=8, num_layers=16, num_heads=2, ffn_dim=16, max_length=8)


def measure(runtime: Runtime, *, quick: bool = False) -> MeasuredMachine:
    """The machine, alike on all ranks.  quick: fewer sizes, to see that it works."""
    device, kind = runtime.device, runtime.device.type
    if kind == "cuda":
        name, devices = torch.cuda.get_device_name(device), torch.cuda.device_count()
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
    else:
        name, devices = _cpu_name(), max(1, _cores() // torch.get_num_threads())
        memory_bytes = device_bytes("cpu", 1)
    alone = _Alone(runtime, devices)
    sides = PRODUCTS[kind][:: 2 if quick else 1]
    products = {name: tuple(alone.product(side, name, device) for side in sides) for name in MEASURED}
    launch_s = alone.mean(lambda: _launch_s(device))
    bandwidths = alone.all(lambda: bandwidth_of(device, 1, LEAST_PROBE_BYTES if quick else MOST_PROBE_BYTES // 4))
    memory = statistics.mean(one.device_update for one in bandwidths)
    to_host = statistics.mean(min(one.to_device, one.to_host) for one in bandwidths)
    update = statistics.mean(one.host_update for one in bandwidths)
    links = tuple(_links(runtime, MESSAGES[kind][: 2 if quick else None]))
    return agreed(
        MeasuredMachine(name, kind, devices, memory_bytes, memory, launch_s, to_host, update, products, links)
    )


class _Alone:
    """Runs what is measured on as many ranks as there are devices, and tells all of what they found."""

    def __init__(self, runtime: Runtime, devices: int):
        self.runtime, self.runs = runtime, runtime.local_rank < devices

    def all(self, call: Callable[[], Any]) -> list[Any]:
        dist.barrier()
        found: list[Any] = [None] * self.runtime.world_size
        dist.all_gather_object(found, call() if self.runs else None)
        return [one for one in found if one is not None]

    def product(self, side: int, precision: Precision, device: torch.device) -> tuple[float, float]:
        """(FLOPs, FLOP/s) of a product of square matrices."""
        return 2.0 * side**3, self.mean(lambda: _product_rate(side, precision, device))

    def mean(self, call: Callable[[], float]) -> float:
        return statistics.mean(self.all(call))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    return f"cpu of {_cores()} cores, {torch.get_num_threads()} a rank"


def seconds_a_call(call: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """The median of several rounds of so many calls that a round takes a while."""
    call()
    number = 1
    while (taken := _timed(call, number, device)) < ROUND_S and number < 1 << 14:
        number = max(2 * number, round(number * ROUND_S / max(taken, 1e-6)))
    return statistics.median(_timed(call, number, device) / number for _ in range(rounds))


def _timed(call: Callable[[], object], number: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(number):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _product_rate(side: int, precision: Precision, device: torch.device) -> float:
    """FLOP/s."""
    a, b = (torch.ones(side, side, dtype=compute_dtype(precision), device=device) for _ in range(2))
    return 2 * side**3 / seconds_a_call(lambda: torch.mm(a, b), device, 3)


def _launch_s(device: torch.device) -> float:
    """Of a block's forward of the smallest decoder, by the number of its kernels."""
    model = Decoder(TINY).to(device)
    initialise(model, 0)
    ids = torch.zeros(1, TINY.max_length, dtype=torch.int64, device=device)
    return seconds_a_call(lambda: model(ids), device) / TINY.num_layers / BLOCK_LAUNCHES


# --- links ------------------------------------------------------------------------------------------------------------


def _links(runtime: Runtime, sizes: Sequence[int]) -> Iterator[MeasuredLink]:
    """Of every size of a group, and every number of such groups, whose product divides the ranks."""
    for taking_part in divisors(runtime.world_size)[1:]:
        for ranks in divisors(taking_part)[1:]:
            groups = [list(range(first, first + ranks)) for first in range(0, taking_part, ranks)]
            made = [dist.new_group(members) for members in groups]
            own = runtime.rank // ranks if runtime.rank < taking_part else None
            for collective in COLLECTIVES:
                found = [_seconds(runtime, None if own is None else made[own], collective, size) for size in sizes]
                link = fit_link(collective, ranks, sizes, found)
                yield MeasuredLink(
                    *(collective, ranks, len(groups), link.latency_s, link.bytes_per_s),
                    *(tuple(sizes), tuple(found)),
                )


def _seconds(runtime: Runtime, group: Any, collective: str, full_bytes: int) -> float:
    """Of one call, in the group that takes longest; ranks without one wait."""
    device, taken = runtime.device, 0.0
    if group is not None:
        call = _call(group, collective, full_bytes, device)
        for _ in range(2):
            call()
        number = torch.tensor([max(1, round(ROUND_S / max(_timed(call, 2, device) / 2, 1e-6)))], device=device)
        dist.all_reduce(number, op=dist.ReduceOp.MIN, group=group)
        times = min(int(number), 200)
        taken = statistics.median(_timed(call, times, device) / times for _ in range(ROUNDS))
    longest = torch.tensor([taken], dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def _call(group: Any, collective: str, full_bytes: int, device: torch.device) -> Callable[[], object]:
    ranks = dist.get_world_size(group)
    elements = max(1, full_bytes // 4 // ranks)
    whole, own = (torch.zeros(n, dtype=torch.float32, device=device) for n in (ranks * elements, elements))
    if collective == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if collective == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, own, group=group)
    if collective == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(own, whole, group=group)
    if collective == "all_to_all":
        sent = torch.zeros(max(ranks, elements // ranks * ranks), dtype=torch.float32, device=device)
        return lambda: dist.all_to_all_single(torch.empty_like(sent), sent, group=group)
    return lambda: _round(whole, group)


def _round(message: torch.Tensor, group: Any) -> None:
    """A message from each rank to the next, all at once."""
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    came = torch.empty_like(message)
    following, before = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]
    both = [
        dist.P2POp(dist.isend, message, following, group),
        dist.P2POp(dist.irecv, came, before, group),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def fit_link(collective: str, ranks: int, full_bytes: Sequence[int], seconds: Sequence[float]) -> Link:
    """The latency and bandwidth that come nearest to what was measured, by the squares of relative errors.

    The line is that of `core.auto.costs`: messages x latency + bytes sent / bandwidth. Neither is below 0.
    """
    messages = messages_sent(collective, ranks)
    rows = np.array([(messages / s, bytes_sent(collective, b, ranks) / s) for b, s in zip(full_bytes, seconds)])
    ones = np.ones(len(rows))
    found, *_ = np.linalg.lstsq(rows, ones, rcond=None)
    latency_s, inverse = (float(n) for n in found)
    if latency_s < 0 or inverse <= 0:  # of one alone, by the same squares
        alone = [float(column @ ones / (column @ column)) for column in rows.T]
        latency_s, inverse = (0.0, alone[1]) if latency_s < 0 else (alone[0], 1e-15)
    return Link(latency_s, 1 / inverse)
