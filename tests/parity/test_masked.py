"""A masked language model on n ranks is that on one: every mesh, in fp64 over ten steps, shapes that do not divide.

Vocabulary, lengths and MLP are odd; a third of the tokens count, in some rows none, so ranks and microbatches weigh
unequally.
"""

from dataclasses import replace

import pytest

from core.config import UserError
from core.mesh import MeshConfig
from core.models.plan import decoder_table
from core.parallel.pipeline.schedule import PipelineConfig
from tests.parity.test_train import TOLERANCE, parallel
from tests.support.masked import bert
from tests.support.training import Case, difference_from_single, few_cases, table

BERT = bert(dim=48, num_heads=6, max_length=9)
RING, ULYSSES = MeshConfig(cp=2), MeshConfig(cp=2, cp_mode="ulysses")
CASES = table(
    (num_ranks, Case(BERT, mesh=mesh, parallel=parallel(zero), masked=True, documents=True))
    for num_ranks, mesh, zero in (
        (2, MeshConfig(), 1),
        (2, MeshConfig(), 3),
        (2, MeshConfig(tp=2), 0),
        (3, MeshConfig(tp=3), 0),
        (4, MeshConfig(tp=2), 3),
        (4, MeshConfig(tp=4, tp_mode="2d"), 0),
        (2, RING, 0),
        (3, replace(RING, cp=3), 2),
        (3, replace(ULYSSES, cp=3), 1),
        (4, MeshConfig(cp=4, cp_mode="mixed", cp_ulysses=2), 3),
        (4, replace(RING, tp=2), 1),
        (2, MeshConfig(pp=2), 0),
        (4, MeshConfig(pp=2, tp=2), 1),
        (4, MeshConfig(pp=2, cp=2), 1),
    )
)
LONG = ["bert on 2 tp=2 zero 0", "bert on 2 cp=2 ring zero 0"]


def check(ranks, num_ranks: int, case: Case) -> None:
    difference, where = difference_from_single(ranks, num_ranks, case)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


@pytest.mark.parametrize(("name", "steps"), few_cases(CASES, "beside", "stages", "zero", many=LONG, strength=1))
def test_every_mesh(ranks, name: str, steps: int) -> None:
    num_ranks, case = CASES[name]
    check(ranks, num_ranks, replace(case, steps=steps))


@pytest.mark.parametrize("schedule", ["zb-h1"])
def test_a_backward_in_two_parts(ranks, schedule) -> None:
    options = parallel(0, pipeline=PipelineConfig(schedule=schedule, microbatches=3))
    check(ranks, 2, Case(BERT, mesh=MeshConfig(pp=2), parallel=options, masked=True))


def test_gemini(ranks) -> None:
    check(ranks, 2, Case(BERT, mesh=MeshConfig(tp=2), parallel=parallel(0), masked=True, budget="300000"))


@pytest.mark.soak
def test_a_grid_with_depth(ranks) -> None:
    mesh = MeshConfig(tp=8, tp_mode="2.5d", tp_depth=2)
    check(ranks, 8, Case(BERT, mesh=mesh, parallel=parallel(0), masked=True, documents=True))


def test_a_cube_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"tp_mode=3d: the layer before the head of family bert .*1d, 2d or 2.5d"):
        decoder_table(BERT, MeshConfig(tp=8, tp_mode="3d").resolve(8))


@pytest.mark.parametrize(
    ("mesh", "without"),
    [(MeshConfig(), ("core.train.loop", "all_reduce")), (RING, ("core.comm.collectives", "batch_isend_irecv"))],
)
def test_a_missing_collective_is_seen(ranks, mesh: MeshConfig, without: tuple[str, str]) -> None:
    """The first is that which counts the masked tokens of all ranks."""
    case = Case(BERT, mesh=mesh, parallel=parallel(0), steps=3, masked=True)
    difference, _ = difference_from_single(ranks, 2, case, without)
    assert not difference <= 1e4 * TOLERANCE
