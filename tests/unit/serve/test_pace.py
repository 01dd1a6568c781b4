"""Prompts beside a decode batch on a simulated clock: both keep within their bounds, whatever tokens cost."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from apps.serve.machine import OnHost
from apps.serve.pace import Pace
from apps.serve.runner import Step
from apps.serve.scheduler import Limits
from tests.support.serving import StandIn, expected, greedy, run, stand_in_engine

MOST, BATCH = 512, 2048


@dataclass(frozen=True)
class Machine:
    """decode_s of a step without prompts; chunk_s(n, before): what n tokens of a prompt take behind so many."""

    decode_s: float
    chunk_s: Callable[[int, int], float]

    def alone_s(self, prompt: int) -> float:
        """A prompt while no sequence decodes."""
        return sum(self.chunk_s(min(BATCH, prompt - done), done) for done in range(0, prompt, BATCH))


MACHINES = {
    # 4 bits on a CPU: a few tokens one by one, many by weights that are widened first.
    "int4": Machine(0.06, lambda n, before: min(0.015 * n, 0.3 + 0.0045 * n)),
    "int4, widened sooner": Machine(0.06, lambda n, before: min(0.015 * n, 0.1 + 0.0045 * n)),
    "a chunk costs something by itself": Machine(0.05, lambda n, before: 0.02 + 0.002 * n),
    "a chunk costs much by itself": Machine(0.05, lambda n, before: 0.5 + 0.004 * n),
    "in proportion": Machine(0.03, lambda n, before: 0.004 * n),
    "attention grows": Machine(0.05, lambda n, before: 0.02 + n * (0.002 + 1e-6 * (before + n / 2))),
}


@dataclass(frozen=True)
class Served:
    """Seconds to a prompt's first token, and of the decode steps until then."""

    first_s: float
    steps_s: list[float]
    chunks: list[int]

    @property
    def mean_s(self) -> float:
        return sum(self.steps_s) / len(self.steps_s)


def warm(machine: Machine, before: tuple[int, ...], stretch: float = 2.0) -> Pace:
    """After prompts that came while no sequence decoded, and some decode steps."""
    pace = Pace(stretch)
    for prompt in before:
        pace.observe(0, prompt, machine.chunk_s(prompt, 0))
    for _ in range(8):
        assert pace.chunk(MOST, 0) == 0
        pace.observe(4, 0, machine.decode_s)
    return pace


def served(pace: Pace, machine: Machine, prompt: int, most: int = MOST) -> Served:
    done, steps_s, chunks = 0, [], []
    while done < prompt:
        chunk = pace.chunk(most, prompt - done)
        assert 0 <= chunk <= min(most, prompt - done)
        seconds = machine.decode_s + (machine.chunk_s(chunk, done) if chunk else 0.0)
        pace.observe(4, chunk, seconds)
        steps_s.append(seconds)
        done += chunk
        chunks += [chunk] if chunk else []
        assert len(steps_s) < 10**5, "it does not come to an end"
    pace.chunk(most, 0)
    return Served(sum(steps_s), steps_s, chunks)


@pytest.mark.parametrize("before", [(16,), (64,), (1500,), (64, 1500)])
@pytest.mark.parametrize("prompt", [1500, 6000])
@pytest.mark.parametrize("name", MACHINES)
def test_a_long_prompt_beside_a_decode_batch(name: str, prompt: int, before: tuple[int, ...]) -> None:
    """First token within 3x of alone, the mean decode step until then within 2x; the first time, and from then on."""
    machine = MACHINES[name]
    pace = warm(machine, before)
    for _ in range(3):
        found = served(pace, machine, prompt)
        assert found.first_s <= 3 * machine.alone_s(prompt)
        assert found.mean_s <= 2 * machine.decode_s


@pytest.mark.parametrize("prompt", [5, 24, 200])
@pytest.mark.parametrize("name", MACHINES)
def test_a_short_prompt_once_its_length_is_known(name: str, prompt: int) -> None:
    machine = MACHINES[name]
    pace = warm(machine, (64, 1500))
    served(pace, machine, prompt)
    found = served(pace, machine, prompt)
    assert found.first_s <= 3 * machine.alone_s(prompt) + machine.decode_s
    assert found.mean_s <= 2 * machine.decode_s * 1.001


@pytest.mark.parametrize("stretch", [1.2, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("name", MACHINES)
def test_the_stretch_bounds_the_mean_step(name: str, stretch: float) -> None:
    """And the rest is the prompt's: T + T / (stretch - 1), but for what small chunks cost more."""
    machine = MACHINES[name]
    pace = warm(machine, (64, 1500), stretch)
    found = served(pace, machine, 6000)
    assert found.mean_s <= stretch * machine.decode_s
    assert found.first_s <= 1.6 * machine.alone_s(6000) * stretch / (stretch - 1)


def test_where_a_chunk_costs_nothing_steps_are_full() -> None:
    """A GPU: no step goes without a chunk, and none is smaller than it may be."""
    machine = Machine(0.02, lambda n, before: 0.001 + 1e-5 * n)
    found = served(warm(machine, (64,)), machine, 6000)
    assert found.chunks[:-1] == [MOST] * (6000 // MOST)
    assert len(found.steps_s) == len(found.chunks)


def test_the_longest_chunk_bounds_the_longest_step() -> None:
    machine = MACHINES["int4"]
    found = served(warm(machine, (64, 1500)), machine, 1500, most=64)
    assert max(found.steps_s) <= machine.decode_s + machine.chunk_s(64, 0)
    assert found.mean_s <= 2 * machine.decode_s


def test_it_follows_what_changes() -> None:
    """The machine becomes twice as slow, then ten times as fast."""
    machine = MACHINES["int4"]
    pace = warm(machine, (64, 1500))
    for factor in (2.0, 0.1):
        other = Machine(factor * machine.decode_s, lambda n, b, f=factor: f * machine.chunk_s(n, b))
        for _ in range(20):
            pace.observe(4, 0, other.decode_s)
        for _ in range(6):
            found = served(pace, other, 1500)
        assert found.first_s <= 3 * other.alone_s(1500)
        assert found.mean_s <= 2 * other.decode_s


class Asynchronous(StandIn):
    """A GPU: `run` only launches; its time passes where what it computes is read or waited for."""

    def __init__(self, num_pages: int, page_size: int):
        super().__init__(num_pages, page_size)
        self.now_s = self._left_s = 0.0

    def run(self, step: Step) -> torch.Tensor:
        self._left_s += seconds(step)
        return super().run(step)

    def wait(self) -> None:
        self.now_s, self._left_s = self.now_s + self._left_s, 0.0


class Behind(OnHost):
    """What is fetched is there when its steps are computed."""

    def __init__(self, runner: Asynchronous):
        super().__init__(torch.device("cpu"))
        self.runner = runner

    def fetch(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        kept = x.clone()
        return lambda: self.runner.wait() or kept

    def mark(self) -> Callable[[], None]:
        return self.runner.wait


def seconds(step: Step) -> float:
    return 0.05 + 0.004 * len(step.ids)


def test_a_step_is_over_when_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pace learns what each step took, also where `run` returns before, and where nothing of a chunk is read."""
    limits = Limits(page_size=4, max_batch_tokens=32, prefill_chunk=16, max_running=4)
    engine = stand_in_engine(100, limits)
    engine.runner = runner = Asynchronous(100, limits.page_size)
    runner.machine = engine.sampler.machine = Behind(runner)
    engine.pace, observed = Pace(2.0), []
    observe = engine.pace.observe
    monkeypatch.setattr(engine.pace, "observe", lambda *step: observed.append(step) or observe(*step))
    monkeypatch.setattr("apps.serve.engine.time.perf_counter", lambda: runner.now_s)
    run(engine, [greedy("a", range(40), 20), greedy("b", range(10, 45), 4)])
    assert [took for *_, took in observed] == pytest.approx([seconds(step) for step in runner.steps])
    assert any(not step.rows for step in runner.steps)


class Impatient(Pace):
    """Gives prompts nothing for a long time."""

    def chunk(self, most: int, pending: int) -> int:
        return 0


def test_the_engine_goes_without_prompts_and_comes_to_an_end() -> None:
    """Steps in which prompts get nothing, and pages so scarce that decoding waits for what a prompt holds."""
    limits = Limits(page_size=2, max_batch_tokens=32, prefill_chunk=8, max_running=4)
    for num_pages, pace in ((60, Pace(2.0)), (9, Pace(2.0)), (9, Impatient(2.0)), (60, Impatient(2.0))):
        engine = stand_in_engine(num_pages, limits)
        engine.pace = pace
        prompts = [[n, *range(n, n + 7)] for n in range(6)]
        written = run(engine, [greedy(str(n), prompt, 6) for n, prompt in enumerate(prompts)])
        assert [written.ids(str(n)) for n in range(6)] == [expected(prompt, 6) for prompt in prompts]
