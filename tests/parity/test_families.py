"""n ranks train what each family computes as one rank does, on every form of parallelism, in fp64.

Beside those of test_train.py: norms of queries and keys, heads of another size than the model's, a part of a head
turned, stretched positions, attention and MLP side by side.
"""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from core.mesh import MeshConfig
from core.models.rope import RopeScaling
from core.parallel.pipeline.schedule import PipelineConfig
from core.placement.style import Style
from tests.parity.test_train import GPT2, LLAMA, TOLERANCE, parallel
from tests.support.covering import FEW, MANY
from tests.support.training import Case, difference_from_single, largest_difference, of_one_rank, run

# Texts of seven tokens: yarn stretches some pairs and not others, dynamic all of them, longrope by its long factors.
QWEN3 = replace(LLAMA, family="qwen3", head_dim=6, qk_norm=True, rope_scaling=RopeScaling(2.0, kind="linear"))
PHI3 = replace(
    LLAMA, family="phi3", num_heads=4, head_dim=None, rotary_share=2 / 3, num_kv_heads=2, vocab_size=37,
    rope_scaling=RopeScaling(
        kind="longrope", original_max_length=6, short_factor=(1.0, 2.0), long_factor=(1.5, 3.0)
    ),
)  # fmt: skip
NEOX = replace(
    GPT2, family="gpt_neox", positions="rotary", activation="gelu", rotary_share=0.5, parallel_residual=True,
    tied_head=False, dim=48, rope_scaling=RopeScaling(4.0, kind="yarn", original_max_length=8, beta_fast=2.0),
)  # fmt: skip
DYNAMIC = replace(NEOX, max_length=5, rotary_share=1.0, rope_scaling=RopeScaling(3.0, kind="dynamic"))
MODELS = {"qwen3": QWEN3, "phi3": PHI3, "neox": NEOX, "dynamic": DYNAMIC}
MESHES = {
    "tp": (2, MeshConfig(tp=2), 0),
    "tp-zero1": (4, MeshConfig(tp=2), 1),
    "tp-zero3": (4, MeshConfig(tp=2), 3),
    "ring": (3, MeshConfig(cp=3), 2),
    "ulysses": (2, MeshConfig(cp=2, cp_mode="ulysses"), 1),
    "tp-ring": (4, MeshConfig(tp=2, cp=2), 3),
    "stages-tp": (4, MeshConfig(pp=2, tp=2), 1),
    "2d": (4, MeshConfig(tp=4, tp_mode="2d"), 0),
    "2d-zero3": (8, MeshConfig(tp=4, tp_mode="2d"), 3),
    "2.5d": (2, MeshConfig(tp=2, tp_mode="2.5d", tp_depth=2), 0),
    "2.5d-zero2": (8, MeshConfig(tp=4, tp_mode="2.5d", tp_depth=1), 2),
    "3d": (8, MeshConfig(tp=8, tp_mode="3d"), 0),
}
ROWS = {f"{model}-{mesh}": {"model": model, "mesh": mesh} for model in MODELS for mesh in MESHES}
QUICK = ("qwen3-tp", "qwen3-2d", "qwen3-3d", "phi3-tp-zero3", "neox-stages-tp", "neox-2.5d", "dynamic-ring")
CASES = [pytest.param(name, FEW, id=name) for name in QUICK]
CASES += [pytest.param(name, MANY, id=f"{name}-{MANY}-steps", marks=pytest.mark.soak) for name in ROWS]


def case(model: str, mesh: str, **options: Any) -> tuple[int, Case]:
    num_ranks, config, zero = MESHES[mesh]
    stages = {"pipeline": PipelineConfig(microbatches=2)} if config.pp > 1 else {}
    return num_ranks, Case(MODELS[model], config, parallel(zero, **stages), **options)


@pytest.mark.parametrize(("name", "steps"), CASES)
def test_trains_as_one_rank_does(ranks, name: str, steps: int) -> None:
    num_ranks, given = case(**ROWS[name], steps=steps)
    difference, where = difference_from_single(ranks, num_ranks, given)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
def test_documents_apart_and_gemini(ranks, model: str) -> None:
    for options in ({"documents": True}, {"budget": "1MB"}):
        num_ranks, given = case(model, "tp-zero3", **options)
        difference, where = difference_from_single(ranks, num_ranks, given)
        assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


def with_own_heads_only(given: Case) -> dict[str, Any]:
    """Norms of heads whose gradients are not added up over the ranks that have other heads."""
    with patch("core.models.plan.norm_of_heads", Style()):
        return run(given)


def test_a_sum_over_heads_that_is_missing_is_seen(ranks) -> None:
    num_ranks, given = case("qwen3", "tp")
    found = ranks(num_ranks).run(with_own_heads_only, given)
    difference, _ = largest_difference(found, of_one_rank(ranks, given), given.steps)
    assert difference > 1e4 * TOLERANCE
