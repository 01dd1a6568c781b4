"""Layers with a window and layers without train on every mesh as on one rank, in fp64: what other files do not try."""

from dataclasses import replace

import pytest

from core.compose import ParallelConfig
from core.mesh import MeshConfig
from core.parallel.pipeline.schedule import PipelineConfig, ScheduleName
from core.parallel.recompute import RecomputeConfig
from tests.parity.test_train import GEMMA3, MISTRAL, TOLERANCE, parallel
from tests.support.training import Case, difference_from_single

LAYERS = replace(GEMMA3, num_layers=3, full_layers=(1,))


def staged(schedule: ScheduleName) -> ParallelConfig:
    return ParallelConfig(precision="fp64", pipeline=PipelineConfig(schedule, microbatches=4))


CASES = {
    "stages": (2, Case(LAYERS, MeshConfig(pp=2), staged("1f1b"))),
    "stages whose weight gradients wait": (2, Case(LAYERS, MeshConfig(pp=2), staged("zb-h1"))),
    "documents": (2, Case(LAYERS, MeshConfig(tp=2), parallel(), documents=True)),
    "recomputed": (2, Case(LAYERS, MeshConfig(tp=2), parallel(recompute=RecomputeConfig("selective")))),
    "a square": (4, Case(replace(GEMMA3, num_kv_heads=3), MeshConfig(tp=4, tp_mode="2d"), parallel())),
    "a cube": (8, Case(replace(GEMMA3, num_kv_heads=3), MeshConfig(tp=8, tp_mode="3d"), parallel())),
    "rings of Ulysses": (4, Case(LAYERS, MeshConfig(cp=4, cp_mode="mixed", cp_ulysses=2), parallel(2), length=13)),
    "a ring of one window": (4, Case(MISTRAL, MeshConfig(cp=4), parallel(), length=19, documents=True)),
    "a ring beside tensor parallelism": (4, Case(LAYERS, MeshConfig(cp=2, tp=2), parallel(1), length=13)),
}
ALWAYS = ("stages", "a square")


@pytest.mark.parametrize(
    "name", [*ALWAYS, *(pytest.param(n, marks=pytest.mark.soak) for n in CASES if n not in ALWAYS)]
)
def test_windows(ranks, name: str) -> None:
    num_ranks, case = CASES[name]
    difference, where = difference_from_single(ranks, num_ranks, replace(case, steps=10))
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"
