"""K-FAC and Hessian-free on n ranks are those on one: fp64, ragged shapes, every layer kind, messages counted."""

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from core.comm.volume import count_volume
from core.mesh import MeshConfig, data_axis
from tests.parity.test_train import GPT2, LLAMA, parallel
from tests.support.curved import BATCH, Case, batch_of, build, loss, run, train_step, weight
from tests.support.training import Case as TrainingCase
from tests.support.training import difference_from_single, largest_difference

TOLERANCE = 1e-10
EKFAC = (("method", "ekfac"), ("inverse_every", 2))
KFAC = {
    "zero 0": (2, Case(microbatch=4)),
    "zero 1": (2, Case(zero=1, options=EKFAC)),
    "zero 2": (2, Case(zero=2, microbatch=3, options=(("sharing", "reduce"), ("method", "eigen")))),
    "zero 3": (2, Case(zero=3, microbatch=4)),
    "zero 3 ekfac": (2, Case(zero=3, options=EKFAC)),
    "tp": (2, Case(MeshConfig(tp=2))),
    "tp ekfac": (2, Case(MeshConfig(tp=2), options=EKFAC)),
    "tied": (2, Case(tied=True, zero=1)),
    "empirical": (2, Case(microbatch=4, zero=1, options=(("fisher", "empirical"),))),
    "exact": (2, Case(options=(("fisher", "exact"), ("factor_every", 2)))),
}
MORE = {
    "three": (3, Case(zero=1, microbatch=2)),
    "three zero 3": (3, Case(zero=3)),
    "hybrid": (4, Case(MeshConfig(dp_replicate=2, dp_shard=2), zero=1, options=EKFAC)),
    "tp zero 1": (4, Case(MeshConfig(tp=2), zero=1)),
    "tp zero 3": (4, Case(MeshConfig(tp=2), zero=3)),
    "tp 4": (4, Case(MeshConfig(tp=4))),
}
HESSIAN_FREE = {
    "zero 0": (2, Case(microbatch=4)),
    "zero 1": (2, Case(zero=1)),
    "zero 2": (2, Case(zero=2, tied=True)),
}
MORE_HESSIAN_FREE = {"three": (3, Case(zero=1)), "hybrid": (4, Case(MeshConfig(dp_replicate=2, dp_shard=2), zero=1))}


def check(ranks, num_ranks: int, case: Case) -> None:
    plain = replace(case, mesh=MeshConfig(), zero=0, microbatch=None)
    if plain not in _ONE:
        _ONE[plain] = ranks(1).run(run, plain)[0]
    difference, where = largest_difference(ranks(num_ranks).run(run, case), _ONE[plain], case.steps)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


_ONE: dict[Case, dict[str, Any]] = {}


@pytest.mark.parametrize("name", KFAC)
def test_kfac_on_two_ranks_is_that_on_one(ranks, name: str) -> None:
    check(ranks, *KFAC[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", [*KFAC, *MORE])
def test_ten_steps_of_kfac(ranks, name: str) -> None:
    num_ranks, case = (KFAC | MORE)[name]
    check(ranks, num_ranks, replace(case, steps=10))


DECODER = {
    "tp": (3, TrainingCase(GPT2, MeshConfig(tp=3), parallel())),
    "tp zero 3": (4, TrainingCase(LLAMA, MeshConfig(tp=2), parallel(3))),
    "zero 2": (2, TrainingCase(GPT2, parallel=parallel(2), microbatch=4)),
}


@pytest.mark.parametrize("name", DECODER)
def test_kfac_of_the_decoder_whose_sequence_is_cut(ranks, name: str) -> None:
    num_ranks, case = DECODER[name]
    difference, where = difference_from_single(ranks, num_ranks, replace(case, optim="kfac"))
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


def hessian_free(case: Case, steps: int) -> Case:
    return replace(case, optim="hessian_free", steps=steps, options=(("cg_steps", 12), ("damping", 0.5)))


@pytest.mark.parametrize("name", HESSIAN_FREE)
def test_hessian_free_on_two_ranks_is_that_on_one(ranks, name: str) -> None:
    num_ranks, case = HESSIAN_FREE[name]
    check(ranks, num_ranks, hessian_free(case, 3))


@pytest.mark.soak
@pytest.mark.parametrize("name", [*HESSIAN_FREE, *MORE_HESSIAN_FREE])
def test_ten_steps_of_hessian_free(ranks, name: str) -> None:
    num_ranks, case = (HESSIAN_FREE | MORE_HESSIAN_FREE)[name]
    check(ranks, num_ranks, hessian_free(case, 10))


def messages_of_a_step(case: Case) -> dict[str, int]:
    """Collectives of an optimizer's step, by operation."""
    state, config = build(case)
    axis = data_axis(state.parallel.mesh)
    rows = BATCH // axis.size()
    mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(0).items()}
    found: Counter[str] = Counter()
    step = state.optimizer.step

    def counted(*args: Any, **options: Any) -> None:
        with count_volume(state.parallel.mesh) as volume:
            step(*args, **options)
        found.clear()
        for (operation, _), calls in volume.calls.items():
            found[operation] += calls

    with patch.object(state.optimizer, "step", counted):
        for index in range(2):
            train_step(state, mine, loss, weight, config, index)
    return dict(found)


@pytest.mark.parametrize("name", ["zero 0", "zero 1", "zero 3", "tp"])
def test_a_step_of_kfac_sends_four_messages(ranks, name: str) -> None:
    num_ranks, case = KFAC[name]
    for found in ranks(num_ranks).run(messages_of_a_step, case):
        assert found == {"all_reduce": 2, "all_to_all": 2}


def test_hessian_free_sends_one_message_a_product(ranks) -> None:
    """And one for the gradient, one for the direction of before where that is cut, and one for each loss."""
    case = hessian_free(Case(zero=1), 2)
    for found in ranks(2).run(messages_of_a_step, case):
        assert set(found) == {"all_reduce"}
        assert 12 + 2 < found["all_reduce"] <= 12 + 2 + 1 + 12 + 3
