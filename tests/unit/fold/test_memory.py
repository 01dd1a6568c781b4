"""What a prediction takes of its process on a CPU, beside what it may."""

import tracemalloc
from unittest.mock import call, patch

import numpy as np
import pytest

from apps.fold.features.alignment import Alignment
from apps.fold.features.msa import draw, features_of
from apps.fold.features.sequences import Record
from apps.fold.model.config import preset
from apps.fold.predict import PredictConfig, _set_allocator
from apps.fold.subbatch import FoldJob, least_bytes, plan_subbatches
from apps.fold.targets import Target
from core.config import UserError
from core.runtime import process_holding, tensors_within
from tests.support.fold_memory import Size, least, rise


def test_the_process_stays_within_its_budget() -> None:
    """In a child that folds 20 residues first; tests/soak/test_fold.py takes 30 random sizes.

    With tensors that take all of the budget, freed memory that is kept, or features of all iterations at once it rises
    by half as much again.
    """
    size = Size(60, 60, process_holding(int(1.02 * least(60, 60))))
    found = rise(size)
    assert found.code == 0
    assert found.rise <= size.budget, found


@pytest.mark.parametrize("memory", ["400MB", None])
def test_freed_memory_is_given_back_where_the_user_says_what_there_is(memory: str | None) -> None:
    with (
        patch("apps.fold.predict.give_back_freed_memory") as gives_back,
        patch("apps.fold.predict.keep_freed_memory") as keeps,
    ):
        _set_allocator(PredictConfig(memory=memory, device="cpu"))
        assert (gives_back.call_args_list, keeps.call_count) == (([call(400_000_000)], 0) if memory else ([], 1))
        _set_allocator(PredictConfig(memory=memory, device="cuda"))
        assert gives_back.call_count + keeps.call_count == 1


def test_what_tensors_may_take_and_its_inverse() -> None:
    for tensors in (0, 1, 10**8, 123_456_789, 10**12):
        assert 0 <= tensors_within(process_holding(tensors)) - tensors <= 1
    assert tensors_within(10**6) == 0


def test_a_budget_of_the_process_leaves_room_and_says_which_would_do() -> None:
    job = FoldJob(preset("model_5_ptm"), 60, 4, 1)
    least = least_bytes(job)
    plan_subbatches(job, process_holding(least), of_process=True)
    with pytest.raises(UserError, match=f"at least {-(-process_holding(least) * 100 // 2**30) / 100:.2f} GiB"):
        plan_subbatches(job, least, of_process=True)


def _target(rows: int, residues: int) -> Target:
    generator = np.random.default_rng(0)
    letters = generator.integers(0, 22, (rows, residues), dtype=np.uint8)
    sequence = "A" * residues
    letters[0] = 0
    alignment = Alignment(letters, generator.integers(0, 3, letters.shape, dtype=np.int32), ("",) * rows)
    return Target(Record(1, "a", sequence), alignment, (), ())


def test_features_take_little_more_than_their_arrays() -> None:
    config, target = preset("model_5_ptm"), _target(900, 150)
    drawn = draw(target.alignment, config, np.random.default_rng(0))
    tracemalloc.start()
    features = features_of(target.sequence, target.alignment, drawn, config)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    arrays: list[int] = []
    features.map(lambda tensor: arrays.append(tensor.numel() * tensor.element_size()) or tensor)
    assert most <= 1.3 * sum(arrays), (most, sum(arrays))


def test_an_iteration_s_features_are_made_when_it_is_their_turn() -> None:
    """Several times the same: one iteration's arrays are alive at once, not those of all."""
    config, target = preset("model_5_ptm"), _target(600, 60)
    tracemalloc.start()
    iterations = target.iterations(config, 0)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    first, again, second = iterations[0], iterations[0], iterations[1]
    assert len(iterations) == config.num_recycles + 1
    assert first.msa_BSNF.equal(again.msa_BSNF)
    assert not first.msa_BSNF.equal(second.msa_BSNF)
    assert kept < 0.2 * first.msa_BSNF.numel() * 4, "what was drawn is bytes, not channels"
