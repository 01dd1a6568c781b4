"""Serving for as long and as often as it takes to believe it: `make soak`."""

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from apps.serve.compiled import compile_runner
from apps.serve.runner import Runner
from apps.serve.scheduler import Limits
from tests.support.http_load import Tally, storm
from tests.support.http_server import served, small_model
from tests.support.serving import random_aborts, random_schedule, real_engine, stand_in_engine
from tests.unit.models.test_pretrained import example, random_decoder
from tests.unit.serve.test_exact import flat_model, sampled_requests, written_alone
from tests.unit.serve.test_http import PROMPT, complete

# What does not come to an end is found by counting steps, however slow the machine.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]


@pytest.mark.parametrize(("compiled", "graphs"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_a_thousand_schedules_write_the_same(scheme: str | None, compiled: bool, graphs: bool) -> None:
    decoder, asked, preempted = flat_model(scheme), sampled_requests(), 0
    graph = compile_runner(real_engine(decoder, Limits(), 4).runner) if compiled else None
    assert compiled is (graph is not None)

    def prepare(runner: Runner) -> None:
        if graph is not None:
            compile_runner(runner, graph)

    alone = written_alone(decoder, asked, prepare)
    for seed in range(1000):
        found, preemptions = random_schedule(decoder, asked, seed, prepare, graphs)
        assert found == alone, seed
        preempted += preemptions
    assert preempted > 100


@pytest.mark.parametrize("kind", ["stand-in", "stand-in, ahead", "decoder", "decoder, captured"])
def test_ten_thousand_requests_of_which_a_third_leaves(kind: str) -> None:
    limits = Limits(page_size=4, max_batch_tokens=64, prefill_chunk=32, max_running=16)
    if kind.startswith("stand-in"):
        engine = stand_in_engine(120, limits, ahead=kind != "stand-in")
    else:
        decoder = random_decoder(example("opt", max_length=32)).float()
        engine = real_engine(decoder, limits, 120, graphs=kind != "decoder")
    written = random_aborts(engine, 10_000)
    assert engine.counts.aborted > 2000
    assert engine.pages.num_free == 120
    assert len(written.finish) + engine.counts.aborted == 10_000


@pytest.mark.timeout(3600)
def test_sixty_four_clients_for_two_minutes(tmp_path: Path) -> None:
    """No wrong answer, no page lost, memory flat."""
    with served(small_model(tmp_path / "tiny"), max_queue=128, timeout_s=3600) as running:
        prompts = [f"{n} {PROMPT}" for n in range(16)]
        known = {prompt: complete(running, prompt=prompt, max_tokens=24)["choices"] for prompt in prompts}
        resident, stop = [], threading.Event()

        def watch() -> None:
            while not stop.wait(1):
                resident.append(_resident_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            began = time.monotonic()

            def enough(tally: Tally) -> bool:
                return time.monotonic() - began >= 120 and tally.right > 200 and tally.left > 50

            tally = asyncio.run(storm(running.port, known, max_tokens=24, clients=64, until=enough))
        finally:
            stop.set()
            watcher.join()
        running.wait(running.is_idle)
        time.sleep(1)
        assert running.is_idle()
    print(tally.right, "right,", tally.left, "left,", tally.refused, "refused")
    assert tally.wrong == []
    early, late = sorted(resident[20:40]), sorted(resident[-20:])
    assert late[10] - early[10] < 16e6, [value // 1_000_000 for value in resident]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
