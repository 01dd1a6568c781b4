"""K-FAC and Hessian-free on n ranks are those on one: fp64, ragged shapes, every layer kind, messages counted."""

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import pytest
import torch

from core.comm.volume import count_volume
from core.config import UserError
from core.gemini.chunk import Chunk
from core.gemini.config import GeminiConfig
from core.gemini.transport import Transport
from core.mesh import MeshConfig, data_axis
from core.optim import KFAC as KFACOptimizer
from core.optim import OptimConfig
from core.optim.kfac_cut import GridCut
from core.parallel.pipeline.schedule import PipelineConfig
from core.train import TrainConfig
from core.train.curvature import curvature_of
from tests.parity.gemini.test_ranks import planned
from tests.parity.test_experts import CHOICE, GSHARD, PAIR, SWITCH, TOPK
from tests.parity.test_pipeline import FULL, deep, staged
from tests.parity.test_tensor_grid import CUBE, DEEP, RAGGED, ROTARY, SQUARE, TESSERACT, UNEVEN, WIDE
from tests.parity.test_train import GPT2, LLAMA, parallel
from tests.support import small
from tests.support.curved import BATCH, Case, batch_of, build, loss, run, train_step, weight
from tests.support.grid_resume import resumed_elsewhere
from tests.support.small import config_of, predicted, train
from tests.support.training import Case as TrainingCase
from tests.support.training import batch_of as decoder_batch
from tests.support.training import build as build_decoder
from tests.support.training import difference_from_single, largest_difference, of_one_rank
from tests.support.training import loss as decoder_loss
from tests.support.training import run as run_decoder
from tests.support.training import weight as decoder_weight

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
    "experts": (2, Case(zero=1, experts=True, options=(("fisher", "empirical"),))),
}
MORE = {
    "experts zero 3": (2, Case(zero=3, experts=True, options=EKFAC)),
    "experts microbatches": (3, Case(zero=1, microbatch=2, experts=True)),
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
    "tp": (2, Case(MeshConfig(tp=2), microbatch=4)),
}
MORE_HESSIAN_FREE = {
    "three": (3, Case(zero=1)),
    "hybrid": (4, Case(MeshConfig(dp_replicate=2, dp_shard=2), zero=1)),
    "tp zero 1": (6, Case(MeshConfig(tp=3), zero=1)),
}


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


# Batches of EKFAC have more tokens than factors have directions: of others the basis is arbitrary.
LONG = (("max_dim", 40), ("sharing", "reduce"))
"""A vocabulary with a diagonal factor."""
WITHOUT_EXPERTS = (("exclude", ("*positions*", "*experts*")),)
DECODER = {
    "tp": (3, TrainingCase(GPT2, MeshConfig(tp=3), parallel(), batch=24, options=EKFAC)),
    "2d": (4, TrainingCase(WIDE, SQUARE, parallel(), batch=31, options=EKFAC)),
    "2.5d reduce": (2, TrainingCase(ROTARY, DEEP, parallel(1), batch=5, microbatch=3, options=LONG)),
    "3d": (8, TrainingCase(WIDE, CUBE, parallel(), batch=29, options=EKFAC)),
}
MORE_DECODER = {
    "tp zero 3": (4, TrainingCase(LLAMA, MeshConfig(tp=2), parallel(3))),
    "tp long": (2, TrainingCase(LLAMA, MeshConfig(tp=2), parallel(), options=(("max_dim", 40),))),
    "zero 2": (2, TrainingCase(GPT2, parallel=parallel(2), microbatch=4)),
    "2d tied": (4, TrainingCase(RAGGED, SQUARE, parallel(), batch=1)),
    "2d zero 3": (8, TrainingCase(RAGGED, SQUARE, parallel(3), options=LONG)),
    "2.5d": (8, TrainingCase(RAGGED, TESSERACT, parallel(), batch=11)),
    "3d reduce": (8, TrainingCase(ROTARY, CUBE, parallel(), batch=11, microbatch=7, options=LONG)),
    "3d empirical": (8, TrainingCase(RAGGED, CUBE, parallel(), batch=11, options=(("fisher", "empirical"),))),
    "experts left out": (2, TrainingCase(SWITCH, MeshConfig(ep=2), parallel(1), options=WITHOUT_EXPERTS)),
    "experts of 2 left out": (4, TrainingCase(UNEVEN, SQUARE, parallel(), batch=11, options=WITHOUT_EXPERTS)),
}


@pytest.mark.parametrize("name", DECODER)
def test_kfac_of_the_decoder_whose_rows_and_features_are_cut(ranks, name: str) -> None:
    """Along the sequence, over grids; its head's loss never holds all logits."""
    num_ranks, case = DECODER[name]
    difference, where = difference_from_single(ranks, num_ranks, replace(case, optim="kfac", steps=3))
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


@pytest.mark.soak
@pytest.mark.parametrize("name", [*DECODER, *MORE_DECODER])
def test_ten_steps_of_kfac_of_the_decoder(ranks, name: str) -> None:
    num_ranks, case = (DECODER | MORE_DECODER)[name]
    difference, where = difference_from_single(ranks, num_ranks, replace(case, optim="kfac", steps=10))
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


EMPIRICAL = (("fisher", "empirical"),)
EXACT = (("fisher", "exact"),)
EP = MeshConfig(ep=2)
GEMINI = {
    "one": (1, TrainingCase(ROTARY, parallel=parallel(3), budget="400KB", microbatch=5)),
    "two ekfac": (2, TrainingCase(GPT2, parallel=parallel(3), batch=24, budget="800KB", options=EKFAC)),
}
MORE_GEMINI = {
    "copies": (2, TrainingCase(GPT2, parallel=parallel(0), budget="700KB")),
    "three": (3, TrainingCase(GPT2, parallel=parallel(3), budget="700KB", microbatch=2)),
    "wide": (2, TrainingCase(GPT2, parallel=parallel(3), budget="20MB")),
    "hybrid": (4, TrainingCase(GPT2, MeshConfig(dp_replicate=2, dp_shard=2), parallel(3), budget="700KB")),
    "tp": (4, TrainingCase(GPT2, MeshConfig(tp=2), parallel(3), budget="700KB")),
    "recomputed": (2, TrainingCase(GPT2, parallel=parallel(3, recompute=FULL), budget="700KB")),
    "empirical": (2, TrainingCase(GPT2, parallel=parallel(3), budget="700KB", options=(("fisher", "empirical"),))),
    "exact": (2, TrainingCase(GPT2, parallel=parallel(3), budget="700KB", options=(("fisher", "exact"),))),
    "experts": (2, TrainingCase(TOPK, parallel=parallel(3), budget="2MB")),
    "experts ep": (4, TrainingCase(TOPK, EP, parallel(3), batch=48, budget="3MB", options=EKFAC)),
    "stages": (4, TrainingCase(deep(LLAMA, 3), MeshConfig(pp=2), staged("1f1b", 3), budget="2MB")),
}


def check_in_a_budget(ranks, num_ranks: int, case: TrainingCase, share: float | None = None) -> None:
    """share: of the model data that fits on the device, by a plan; None: the case's budget, without one"""
    case = replace(case, optim="kfac")
    results = ranks(num_ranks).run(run_decoder, case) if share is None else ranks(num_ranks).run(planned, case, share)
    difference, where = largest_difference(results, of_one_rank(ranks, case), case.steps)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank without Gemini"
    for found in results:
        assert found["peak"] <= found["budget"]


@pytest.mark.parametrize("name", GEMINI)
def test_kfac_in_a_budget_is_that_without_one(ranks, name: str) -> None:
    num_ranks, case = GEMINI[name]
    check_in_a_budget(ranks, num_ranks, replace(case, steps=3))


@pytest.mark.soak
@pytest.mark.parametrize("name", [*GEMINI, *MORE_GEMINI])
def test_ten_steps_of_kfac_in_a_budget(ranks, name: str) -> None:
    num_ranks, case = (GEMINI | MORE_GEMINI)[name]
    check_in_a_budget(ranks, num_ranks, replace(case, steps=10))


def reductions_of_steps(case: TrainingCase) -> list[int]:
    """Chunks that are reduced in each of two steps, of which the first has a look."""
    state, config = build_decoder(case)
    rows, found, reduce = case.batch // data_axis(state.parallel.mesh).size(), [], Transport.reduce
    mine = {k: v[:rows] for k, v in decoder_batch(case, 0).items()}
    for step in range(2):
        reduced: list[int] = []

        def counted(transport: Transport, chunk: Chunk, reduced: list[int] = reduced) -> None:
            reduced.append(chunk.index)
            reduce(transport, chunk)

        with patch.object(Transport, "reduce", counted):
            train_step(state, mine, decoder_loss, decoder_weight, config, step)
        found.append(len(reduced))
    return found


def test_a_look_reduces_no_chunk(ranks) -> None:
    options = (("factor_every", 2),)
    case = TrainingCase(GPT2, parallel=parallel(3), budget="20MB", microbatch=3, optim="kfac", options=options)
    for with_look, without in ranks(2).run(reductions_of_steps, case):
        assert with_look == without > 0


PLANNED = ((1, "static", 0.4, 2), (2, "auto", 0.3, 3))
MORE_PLANNED = (
    *((num_ranks, policy, share, 10) for num_ranks in (1, 2) for policy in ("static", "auto") for share in (0.1, 1.0)),
    (2, "cpu", 0.2, 10),
)


@pytest.mark.parametrize(
    ("num_ranks", "policy", "share", "steps"),
    [*PLANNED, *(pytest.param(*row, marks=pytest.mark.soak) for row in MORE_PLANNED)],
)
def test_kfac_by_a_plan_is_that_without_one(ranks, num_ranks: int, policy: str, share: float, steps: int) -> None:
    """Masters, factors and inverses on the host, on the device, and some here and some there."""
    case = TrainingCase(GPT2, parallel=parallel(3), batch=24, policy=policy, steps=steps, options=EKFAC)
    check_in_a_budget(ranks, num_ranks, case, share)


EXPERTS = {
    "ep": (2, TrainingCase(TOPK, EP, parallel(), microbatch=4)),
    "ep ekfac": (4, TrainingCase(TOPK, EP, parallel(1), batch=48, options=EKFAC)),
    "ep tp": (4, TrainingCase(SWITCH, MeshConfig(ep=2, tp=2), parallel())),
    "zero 1": (2, TrainingCase(TOPK, parallel=parallel(1))),
}
MORE_EXPERTS = {
    "ep zero 3": (2, TrainingCase(TOPK, EP, parallel(3))),
    "ep zero 2 over two": (4, TrainingCase(TOPK, EP, parallel(2), batch=48, microbatch=2, options=EKFAC)),
    "ep zero 3 over two": (4, TrainingCase(TOPK, EP, parallel(3))),
    "ep hybrid": (8, TrainingCase(TOPK, replace(EP, dp_replicate=2), parallel(1), batch=16)),
    "ep uneven": (3, TrainingCase(TOPK, MeshConfig(ep=3), parallel())),
    "ep tp ekfac": (4, TrainingCase(TOPK, MeshConfig(ep=2, tp=2), parallel(1), batch=48, options=EKFAC)),
    "ep alone": (4, TrainingCase(SWITCH, MeshConfig(ep=4), parallel())),
    "few": (4, TrainingCase(PAIR, EP, parallel(2), options=(("method", "eigen"),))),
    "few zero 3": (4, TrainingCase(PAIR, parallel=parallel(3))),
    "gshard": (2, TrainingCase(GSHARD, EP, parallel())),
    "expert choice": (2, TrainingCase(CHOICE, EP, parallel(1))),
    "tp": (2, TrainingCase(TOPK, MeshConfig(tp=2), parallel(), batch=48, options=EKFAC)),
    "tp eigen": (2, TrainingCase(SWITCH, MeshConfig(tp=2), parallel(), options=(("method", "eigen"),))),
    "tp zero 1": (4, TrainingCase(TOPK, MeshConfig(tp=2), parallel(1))),
    "empirical": (4, TrainingCase(TOPK, MeshConfig(ep=2, cp=2), parallel(1), options=EMPIRICAL)),
    "reduce": (2, TrainingCase(SWITCH, EP, parallel(), options=(("sharing", "reduce"),))),
    "recomputed": (2, TrainingCase(SWITCH, EP, parallel(recompute=FULL))),
    "2d": (4, TrainingCase(UNEVEN, SQUARE, parallel(), batch=31)),
    "2d reduce": (4, TrainingCase(UNEVEN, SQUARE, parallel(), batch=11, options=LONG)),
    "2.5d": (2, TrainingCase(UNEVEN, DEEP, parallel(), batch=11)),
    "2d ep": (8, TrainingCase(UNEVEN, replace(SQUARE, ep=2), parallel(), batch=12)),
    "stages": (4, TrainingCase(deep(SWITCH), MeshConfig(pp=2, ep=2), staged("1f1b", 1))),
    "stages empirical": (4, TrainingCase(deep(SWITCH), MeshConfig(pp=2, ep=2), staged("gpipe"), options=EMPIRICAL)),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_kfac_of_experts_is_that_of_one_rank(ranks, name: str) -> None:
    """Of each expert from the rows that came to it, and of the router, whose gradient tensor parallelism parts."""
    num_ranks, case = EXPERTS[name]
    difference, where = difference_from_single(ranks, num_ranks, replace(case, optim="kfac", steps=3))
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


@pytest.mark.soak
@pytest.mark.parametrize("name", [*EXPERTS, *MORE_EXPERTS])
def test_ten_steps_of_kfac_of_experts(ranks, name: str) -> None:
    num_ranks, case = (EXPERTS | MORE_EXPERTS)[name]
    difference, where = difference_from_single(ranks, num_ranks, replace(case, optim="kfac", steps=10))
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


@pytest.mark.soak
def test_a_run_with_experts_goes_on_on_another_mesh(ranks, tmp_path: Path) -> None:
    """Factors and inverses of each, from ep to tp, to a budget, to one rank's; inverted once, in the first step."""
    legs = [(2, EP, 0), (4, MeshConfig(ep=2, tp=2), 1), (2, MeshConfig(), 3, "4MB"), (1, MeshConfig(), 0)]
    assert resumed_elsewhere(ranks, tmp_path, TOPK, "kfac", legs) < TOLERANCE


def homes_of_experts(case: TrainingCase) -> list[tuple[bool, bool, bool]]:
    """Of each expert: whether this rank computes with it, is its home, and holds its factors."""
    state, config = build_decoder(case)
    rows = case.batch // data_axis(state.parallel.mesh).size()
    mine = {k: v[:rows] for k, v in decoder_batch(case, 0).items()}
    train_step(state, mine, decoder_loss, decoder_weight, config, 0)
    optimizer = state.optimizer
    assert isinstance(optimizer, KFACOptimizer)
    pool, found = optimizer._homes(), []
    for index, layer in enumerate(optimizer._layers):
        if layer.expert is not None:
            held = optimizer._state_of(layer)["row_lower"].numel() > 0
            found.append((optimizer._computes(index), pool.home_of(optimizer._key(layer)) == pool.rank, held))
    return found


def test_factors_of_an_expert_lie_with_one_of_the_ranks_that_have_it(ranks) -> None:
    found = ranks(4).run(homes_of_experts, TrainingCase(TOPK, EP, parallel(1), optim="kfac"))
    for of_expert in zip(*found, strict=True):
        assert sum(computes for computes, _, _ in of_expert) == 2
        assert sum(held for _, _, held in of_expert) == 1
        assert all(computes or not held for computes, _, held in of_expert)
        assert all(home == held for _, home, held in of_expert)
    assert all(any(home for _, home, _ in of_rank) for of_rank in found)


CONTEXT_TP = MeshConfig(cp=2, tp=2)
LONG_EKFAC = (*EKFAC, ("max_dim", 40))
CONTEXT = {
    "ring": (2, TrainingCase(LLAMA, MeshConfig(cp=2), parallel(), options=EMPIRICAL)),
    "ulysses zero 3": (
        3,
        TrainingCase(replace(GPT2, num_heads=6), MeshConfig(cp=3, cp_mode="ulysses"), parallel(3), options=EMPIRICAL),
    ),
    "long ekfac": (2, TrainingCase(GPT2, MeshConfig(cp=2), parallel(), batch=24, options=(*EKFAC, *EMPIRICAL))),
    "grid": (4, TrainingCase(ROTARY, replace(DEEP, cp=2), parallel())),
    "sampled": (2, TrainingCase(LLAMA, MeshConfig(cp=2), parallel(), microbatch=5)),
    "exact": (2, TrainingCase(GPT2, MeshConfig(cp=2), parallel(), options=EXACT)),
    "tp": (4, TrainingCase(GPT2, CONTEXT_TP, parallel())),
    "tp empirical": (4, TrainingCase(LLAMA, CONTEXT_TP, parallel(), options=EMPIRICAL)),
    "tp ulysses": (4, TrainingCase(GPT2, replace(CONTEXT_TP, cp_mode="ulysses"), parallel(1), length=5)),
    "tp 3": (6, TrainingCase(GPT2, MeshConfig(cp=2, tp=3), parallel(), options=EMPIRICAL)),
    "tp long ekfac": (4, TrainingCase(LLAMA, CONTEXT_TP, parallel(3), batch=24, microbatch=5, options=LONG_EKFAC)),
    "tp experts": (4, TrainingCase(TOPK, CONTEXT_TP, parallel(1))),
    "tp stages": (
        8, TrainingCase(deep(GPT2, 3), replace(CONTEXT_TP, pp=2), staged("1f1b"), batch=11, options=EMPIRICAL)),
    "stages": (4, TrainingCase(deep(GPT2, 3), MeshConfig(pp=2, cp=2), staged("1f1b"), batch=11)),
}  # fmt: skip


def check_of_parts(ranks, name: str, steps: int) -> None:
    """Of rows that their parts fill up: what fills up is no case, and items count once."""
    num_ranks, case = CONTEXT[name]
    difference, where = difference_from_single(ranks, num_ranks, replace(case, optim="kfac", steps=steps))
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


@pytest.mark.parametrize("name", ["ring", "tp"])
def test_kfac_of_parts_of_rows_is_that_of_one_rank(ranks, name: str) -> None:
    check_of_parts(ranks, name, 3)


@pytest.mark.soak
@pytest.mark.parametrize("name", CONTEXT)
def test_ten_steps_of_kfac_of_parts_of_rows(ranks, name: str) -> None:
    check_of_parts(ranks, name, 10)


STAGES = {
    "1f1b tied": (2, TrainingCase(deep(GPT2, 3), MeshConfig(pp=2), staged("1f1b"), batch=11, options=EMPIRICAL)),
    "interleaved zero 1": (
        4, TrainingCase(deep(LLAMA, 4), MeshConfig(pp=2), staged("interleaved", 1), options=(*EKFAC, *EMPIRICAL))
    ),
    "sampled": (2, TrainingCase(deep(GPT2, 3), MeshConfig(pp=2), staged("1f1b"), batch=11)),
}  # fmt: skip
MORE_STAGES = {
    "sampled interleaved": (
        4,
        TrainingCase(deep(GPT2, 4), MeshConfig(pp=2), staged("interleaved", 2), options=(*EKFAC, ("factor_every", 2))),
    ),
    "sampled zero 3": (4, TrainingCase(deep(LLAMA, 3), MeshConfig(pp=2), staged("1f1b", 3))),
    "sampled tp": (4, TrainingCase(deep(GPT2, 3), MeshConfig(pp=2, tp=2), staged("gpipe"))),
    "sampled recomputed": (2, TrainingCase(deep(GPT2, 3), MeshConfig(pp=2), staged("1f1b", recompute=FULL))),
    "sampled experts": (2, TrainingCase(deep(SWITCH), MeshConfig(pp=2), staged("1f1b", 1), options=WITHOUT_EXPERTS)),
    "sampled tp zero 2": (8, TrainingCase(deep(GPT2, 3), MeshConfig(pp=2, tp=2), staged("1f1b", 2), batch=16)),
    "sampled hybrid": (
        8,
        TrainingCase(deep(LLAMA, 3), MeshConfig(pp=2, dp_replicate=2, dp_shard=2), staged("1f1b", 1), batch=16),
    ),
    "sampled grid": (4, TrainingCase(deep(ROTARY, 3), replace(DEEP, pp=2), staged("1f1b"))),
    "cp": (4, TrainingCase(deep(LLAMA, 3), MeshConfig(pp=2, cp=2), staged("1f1b"), options=EMPIRICAL)),
    "gpipe": (2, TrainingCase(deep(GPT2, 3), MeshConfig(pp=2), staged("gpipe", 2), options=(*EKFAC, *EMPIRICAL))),
    "tied over two": (4, TrainingCase(deep(GPT2, 3), MeshConfig(pp=2), staged("1f1b", 1), options=EMPIRICAL)),
    "four": (4, TrainingCase(deep(GPT2, 5), MeshConfig(pp=4), staged("1f1b"), options=(*EMPIRICAL, *LONG))),
    "tp": (4, TrainingCase(deep(GPT2, 3), MeshConfig(pp=2, tp=2), staged("1f1b"), options=EMPIRICAL)),
    "zero 3": (4, TrainingCase(deep(LLAMA, 3), MeshConfig(pp=2), staged("1f1b", 3), options=EMPIRICAL)),
    "recomputed": (2, TrainingCase(deep(GPT2, 3), MeshConfig(pp=2), staged("1f1b", recompute=FULL), options=EMPIRICAL)),
}


@pytest.mark.parametrize("name", STAGES)
def test_kfac_of_stages_is_that_of_one_rank(ranks, name: str) -> None:
    """Each observes its own layers; what the last sees of a tied head counts at the first."""
    num_ranks, case = STAGES[name]
    difference, where = difference_from_single(ranks, num_ranks, replace(case, optim="kfac", steps=3))
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


@pytest.mark.soak
@pytest.mark.parametrize("name", [*STAGES, *MORE_STAGES])
def test_ten_steps_of_kfac_of_stages(ranks, name: str) -> None:
    num_ranks, case = (STAGES | MORE_STAGES)[name]
    difference, where = difference_from_single(ranks, num_ranks, replace(case, optim="kfac", steps=10))
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


def test_sampled_targets_are_not_the_true_ones(ranks) -> None:
    case = Case(steps=3)
    sampled, empirical = (
        ranks(1).run(run, replace(case, options=options))[0]["losses"] for options in ((), (("fisher", "empirical"),))
    )
    assert abs(sampled[-1] - empirical[-1]) > 1e-4


def figures_of_steps(case: Case, broken: str) -> list[dict[str, Any]]:
    """Of three steps, in the second of which a function of this rank, if it is the last, makes what is not finite."""
    state, config = build(case)
    axis = data_axis(state.parallel.mesh)
    mine = {k: v.chunk(axis.size())[axis.get_local_rank()] for k, v in batch_of(0).items()}
    figures, function = [], resolve_name(broken)

    def not_finite(*args: Any) -> torch.Tensor:
        return function(*args) * float("nan")

    for step in range(3):
        is_broken = step == 1 and axis.get_local_rank() == axis.size() - 1
        with patch(broken, not_finite) if is_broken else nullcontext():
            figures.append(train_step(state, mine, loss, weight, config, step))
    return figures


@pytest.mark.parametrize(
    ("optim", "broken", "count"),
    [
        ("kfac", "core.optim.kfac_observer.outer_sum", 8),
        ("hessian_free", "core.optim.hessian_free._Problem.product", 1),
    ],
)
def test_a_step_without_finite_curvature_is_counted_in_the_metrics(ranks, optim: str, broken: str, count: int) -> None:
    """On all ranks, where one of them has none: of K-FAC its layers, which keep what they had."""
    for before, during, after in ranks(2).run(figures_of_steps, Case(optim=optim), broken):
        assert "curvature_fallbacks" not in before
        assert during["curvature_fallbacks"] == after["curvature_fallbacks"] == count
        assert math.isfinite(after["loss"])


def ended(config: TrainConfig, by_closure: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    summary, tensors = train(config, predict=predicted) if by_closure else train(config)
    return summary, tensors


RESUMED = {
    "kfac": (2, OptimConfig("kfac", inverse_every=3), {"zero": 1}),
    "ekfac": (2, OptimConfig("kfac", method="ekfac", inverse_every=3), {"zero": 3}),
    "empirical": (2, OptimConfig("kfac", fisher="empirical", factor_every=2), {"microbatch": 2}),
    "hessian_free": (2, OptimConfig("hessian_free", cg_steps=5), {"zero": 1}),
    "kfac tp": (2, OptimConfig("kfac", method="eigen", inverse_every=3), {"mesh": MeshConfig(tp=2)}),
    "hessian_free tp": (2, OptimConfig("hessian_free", cg_steps=5), {"mesh": MeshConfig(tp=2)}),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_where_it_was(ranks, tmp_path: Path, name: str) -> None:
    """To the bit on the same mesh, between two inversions too; to rounding on one rank."""
    num_ranks, optim, options = RESUMED[name]
    config = config_of(tmp_path / "stopped", steps=6, optim=optim, **options)
    by_closure = name != "empirical"
    ranks(num_ranks).run(ended, replace(config, stop_after=4), by_closure)
    ranks(num_ranks).run(ended, replace(config, out=tmp_path / "other", stop_after=4), by_closure)
    [(_, found), *_] = ranks(num_ranks).run(ended, replace(config, resume="auto"), by_closure)
    [(_, expected), *_] = ranks(num_ranks).run(ended, replace(config, out=tmp_path / "straight"), by_closure)
    there = replace(config, out=tmp_path / "other", resume="auto", zero=0, mesh=MeshConfig())
    [(_, moved)] = ranks(1).run(ended, there, by_closure)
    for parameter, value in expected.items():
        assert torch.equal(found[parameter], value), parameter
        if parameter != "seen":
            torch.testing.assert_close(moved[parameter], value, rtol=1e-10, atol=1e-12, msg=parameter)


def refusals() -> dict[str, str]:
    """What fit says of combinations that cannot be, on two ranks."""
    found = {}
    for name, optim, options, predict in (
        ("no predict", "kfac", {}, None),
        ("kfac stages", "kfac exact", {"mesh": MeshConfig(pp=2)}, predicted),
        ("kfac parts", "kfac", {"mesh": MeshConfig(pp=2), "pipeline": PipelineConfig("zb-h1")}, predicted),
        ("kfac ahead", "kfac", {"mesh": MeshConfig(pp=2), "pipeline": PipelineConfig("2bw")}, predicted),
        ("no closure", "hessian_free", {}, None),
        ("hf zero 3", "hessian_free", {"zero": 3}, predicted),
        ("hf stages", "hessian_free", {"mesh": MeshConfig(pp=2)}, predicted),
        ("hf gemini", "hessian_free", {"gemini": GeminiConfig("1MB")}, predicted),
        ("hf bf16", "hessian_free", {"precision": "bf16"}, predicted),
    ):
        given = {"fisher": "exact"} if optim == "kfac exact" else {}
        config = config_of(Path("unused"), optim=OptimConfig(optim.partition(" ")[0], **given), **options)
        state = small.build(config)
        try:
            curvature_of(state.parallel, state.optimizer, predict, config)
        except UserError as refused:
            found[name] = str(refused)
    cut = MeshConfig(tp=2)
    for name, case in (
        ("hf grid", TrainingCase(ROTARY, DEEP, parallel(), optim="hessian_free")),
        ("kfac reduce tp", TrainingCase(GPT2, cut, parallel(), optim="kfac", options=(("sharing", "reduce"),))),
        ("kfac exact tp", TrainingCase(GPT2, cut, parallel(), optim="kfac", options=EXACT)),
        ("kfac one token tp", TrainingCase(GPT2, cut, parallel(), length=1, optim="kfac")),
        ("hf cp", TrainingCase(GPT2, MeshConfig(cp=2), parallel(), optim="hessian_free")),
    ):
        try:
            state, config = build_decoder(case)
            train_step(state, decoder_batch(case, 0), decoder_loss, decoder_weight, config, 0)
        except UserError as refused:
            found[name] = str(refused)
    try:
        build(Case(cut, experts=True))
    except UserError as refused:
        found["kfac stack tp"] = str(refused)
    return found


def test_what_they_do_not_go_with_is_refused_by_name(ranks) -> None:
    for found in ranks(2).run(refusals):
        assert {name: text.partition(":")[0] for name, text in found.items()} == {
            "no predict": "optim.name=kfac",
            "kfac stages": "optim.name=kfac with mesh.pp",
            "kfac parts": "optim.name=kfac with pipeline.schedule=zb-h1",
            "kfac ahead": "optim.name=kfac with pipeline.schedule=2bw",
            "no closure": "optim.name=hessian_free",
            "hf zero 3": "optim.name=hessian_free with zero=3",
            "hf stages": "optim.name=hessian_free with mesh.pp",
            "hf gemini": "optim.name=hessian_free with gemini.budget",
            "hf grid": "optim.name=hessian_free with mesh.tp_mode",
            "kfac reduce tp": "kfac",
            "kfac exact tp": "kfac",
            "kfac one token tp": "kfac",
            "kfac stack tp": "kfac",
            "hf cp": "optim.name=hessian_free with mesh.cp",
            "hf bf16": "optim.name=hessian_free with precision=bf16",
        }
        for text in found.values():
            assert "\n" not in text


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


HESSIAN_FREE_DECODER = {
    "tp": (3, TrainingCase(GPT2, MeshConfig(tp=3), parallel(), steps=2)),
    "tp zero 1": (4, TrainingCase(LLAMA, MeshConfig(tp=2), parallel(1), steps=3, microbatch=4)),
}


@pytest.mark.parametrize("name", [pytest.param("tp"), pytest.param("tp zero 1", marks=pytest.mark.soak)])
def test_hessian_free_passes_the_messages_of_a_cut_sequence(ranks, name: str) -> None:
    """Both backwards of its products, through gathers and scatters of rows and a head whose logits are gathered."""
    num_ranks, case = HESSIAN_FREE_DECODER[name]
    case = replace(case, optim="hessian_free", options=(("cg_steps", 6), ("damping", 0.5)))
    difference, where = difference_from_single(ranks, num_ranks, case)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


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


def messages_with_experts(case: TrainingCase) -> dict[str, int]:
    """Collectives of an optimizer's step, by operation."""
    state, config = build_decoder(case)
    rows = case.batch // data_axis(state.parallel.mesh).size()
    mine = {k: v[:rows] for k, v in decoder_batch(case, 0).items()}
    found: Counter[str] = Counter()
    step = state.optimizer.step

    def counted(*args: Any, **options: Any) -> None:
        with count_volume(state.parallel.mesh) as volume:
            step(*args, **options)
        for (operation, _), calls in volume.calls.items():
            found[operation] += calls

    with patch.object(state.optimizer, "step", counted):
        train_step(state, mine, decoder_loss, decoder_weight, config, 0)
    return dict(found)


@pytest.mark.parametrize(("num_ranks", "mesh", "sums"), [(2, MeshConfig(), 0), (2, EP, 0), (4, EP, 1)])
def test_experts_that_ranks_have_apart_send_one_message_more(
    ranks, num_ranks: int, mesh: MeshConfig, sums: int
) -> None:
    """Among those that have the same, where there are several."""
    for found in ranks(num_ranks).run(messages_with_experts, TrainingCase(TOPK, mesh, parallel(), optim="kfac")):
        assert found == {"all_reduce": 2 + sums, "all_to_all": 2}


def messages_of_a_look(case: TrainingCase) -> tuple[int, int]:
    """How often activations are put together on a grid in a step of one microbatch, and uses of layers."""
    state, config = build_decoder(case)
    sent, together = [], GridCut.together
    with patch.object(GridCut, "together", lambda *arguments: sent.append(1) or together(*arguments)):
        train_step(state, decoder_batch(case, 0), decoder_loss, decoder_weight, config, 0)
    assert isinstance(state.optimizer, KFACOptimizer)
    return len(sent), sum(len(layer.uses) for layer in state.optimizer._layers)


def test_on_a_grid_a_look_sends_a_message_a_layer(ranks) -> None:
    """Of inputs and gradients together."""
    case = TrainingCase(ROTARY, DEEP, parallel(), optim="kfac")
    for sent, uses in ranks(2).run(messages_of_a_look, case):
        assert sent == uses > 5


def test_hessian_free_sends_one_message_a_product(ranks) -> None:
    """And one for the gradient, one for the direction of before where that is cut, and one for each loss."""
    case = hessian_free(Case(zero=1), 2)
    for found in ranks(2).run(messages_of_a_step, case):
        assert set(found) == {"all_reduce"}
        assert 12 + 2 < found["all_reduce"] <= 12 + 2 + 1 + 12 + 3
