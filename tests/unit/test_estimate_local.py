"""What local training keeps and sends, before it runs: closed forms of any number of workers."""

from dataclasses import replace

import pytest

from core.comm.block_code import BlockCode
from core.estimate import Machine, RunShape, decoder_shape, estimate_memory, estimate_time
from core.estimate.local import outer_in_words, outer_message
from core.models.shapes import SHAPES

MODEL = decoder_shape(SHAPES["debug"])
RUN = RunShape(dp_replicate=2, sequence_length=64)
LOCAL = replace(RUN, local_every=50, outer_momentum=True)
MULOCO = replace(LOCAL, local_code=BlockCode(2), local_error=True)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8, 4096])
def test_a_round_sends_the_masters_once(workers: int) -> None:
    ring = 2 * (workers - 1) / workers * MODEL.num_parameters()
    assert outer_message(MODEL, replace(LOCAL, dp_replicate=workers)).a_round == pytest.approx(4 * ring)
    assert outer_message(MODEL, replace(MULOCO, dp_replicate=workers)).a_round == pytest.approx(ring * 66 / 256)
    inside = replace(LOCAL, dp_replicate=workers, dp_shard=4, tp=2, zero=3)
    assert outer_message(MODEL, inside).a_round == pytest.approx(4 * ring / 8)


def test_a_step_sends_a_share_of_it() -> None:
    """2 bits in both directions, every 50 steps, with their scales: below a 750th of an fp32 all-reduce a step."""
    machine = Machine(1e15, bandwidth=1.0)
    plain, local, few = (estimate_time(MODEL, run, machine).communication_s for run in (RUN, LOCAL, MULOCO))
    assert plain / local == pytest.approx(50)
    assert plain / few == pytest.approx(50 * 4 * 256 / 66)
    assert plain / few > 750


def test_theta_and_its_momentum_are_kept() -> None:
    masters = 4 * MODEL.num_parameters()
    plain = estimate_memory(MODEL, replace(RUN, dp_replicate=1))  # a worker of one rank has no message to keep
    for run, words in ((LOCAL, 2), (replace(LOCAL, outer_momentum=False), 1), (MULOCO, 3.5)):
        found = estimate_memory(MODEL, run)
        assert found.optimizer_bytes - plain.optimizer_bytes == words * masters
        assert found.peak_bytes - plain.peak_bytes == words * masters


def test_in_words() -> None:
    said = outer_in_words(MODEL, replace(MULOCO, fragments=2))
    assert said.startswith("2 workers of 50 steps a round: a rank sends ")
    assert "a round in 2 parts" in said
