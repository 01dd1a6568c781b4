"""n ranks train as one rank does: ZeRO levels, tensor and sequence parallelism, accumulation, recomputation, in fp64.

Shapes are ragged on purpose: an odd vocabulary, six or twelve heads, MLPs, lengths and rows that do not divide.
"""

from dataclasses import replace

import pytest

from core.compose import ParallelConfig
from core.mesh import MeshConfig
from core.models.decoder import DecoderConfig
from core.parallel.recompute import RecomputeConfig
from core.trace.segments import Lean, Segments
from tests.support.covering import few_rows, products
from tests.support.training import Case, difference_from_single, few_cases, meshes_of_a_step, table

TOLERANCE = 1e-10

GPT2 = DecoderConfig(vocab_size=61, dim=24, num_layers=2, num_heads=6, ffn_dim=50, max_length=9)
OPT = replace(GPT2, family="opt", position_offset=2, activation="relu", tied_head=False)
OPT_350M = replace(OPT, embed_dim=10, norm_first=False, final_norm=False, tied_head=True)
BLOOM = replace(GPT2, ffn_dim=96, family="bloom", positions="alibi", embedding_norm=True)
LLAMA = replace(
    GPT2,
    family="llama",
    positions="rotary",
    norm="rms_norm",
    activation="swiglu",
    attention_bias=False,
    mlp_bias=False,
    num_kv_heads=2,
    tied_head=False,
)
MISTRAL = replace(LLAMA, family="mistral", window=3)
GEMMA3 = replace(
    MISTRAL,
    family="gemma3_text",
    norm="rms_norm_from_one",
    activation="geglu_tanh",
    tied_head=True,
    qk_norm=True,
    out_norms=True,
    scaled_embedding=True,
    full_layers=(1,),
    local_rope_theta=100.0,
    query_scalar=6,
)
HYBRID = MeshConfig(dp_replicate=2, dp_shard=2)


def parallel(zero: int = 0, **options) -> ParallelConfig:
    return ParallelConfig(zero=zero, precision="fp64", **options)


def check(ranks, num_ranks: int, case: Case) -> None:
    difference, where = difference_from_single(ranks, num_ranks, case)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


MESHES = table(
    (num_ranks, Case(GPT2, mesh=mesh, parallel=parallel(zero)))
    for num_ranks, mesh, zero in (
        (1, MeshConfig(), 1),
        (1, MeshConfig(), 2),
        (1, MeshConfig(), 3),
        (2, MeshConfig(), 0),
        (2, MeshConfig(), 1),
        (2, MeshConfig(), 2),
        (2, MeshConfig(), 3),
        (2, MeshConfig(tp=2), 0),
        (3, MeshConfig(), 0),
        (3, MeshConfig(), 1),
        (3, MeshConfig(), 2),
        (3, MeshConfig(), 3),
        (3, MeshConfig(tp=3), 0),
        (4, MeshConfig(tp=2), 0),
        (4, MeshConfig(tp=2), 1),
        (4, MeshConfig(tp=2), 2),
        (4, MeshConfig(tp=2), 3),
        (4, HYBRID, 1),
        (4, HYBRID, 2),
        (4, HYBRID, 3),
    )
)
LONG = [*(f"gpt2 on 3 zero {zero}" for zero in range(4)), "gpt2 on 2 tp=2 zero 0"]


@pytest.mark.parametrize(("name", "steps"), few_cases(MESHES, "ranks", "tp", "hybrid", "zero", many=LONG))
def test_every_mesh_and_zero_level(ranks, name: str, steps: int) -> None:
    num_ranks, case = MESHES[name]
    check(ranks, num_ranks, replace(case, steps=steps))


FAMILIES = table(
    (4, Case(model, mesh=MeshConfig(tp=2), parallel=parallel(zero)))
    for model in (OPT, OPT_350M, BLOOM, LLAMA, MISTRAL, GEMMA3)
    for zero in (1, 3)
)


@pytest.mark.parametrize(("name", "steps"), few_cases(FAMILIES, "family", "zero", strength=1))
def test_every_family(ranks, name: str, steps: int) -> None:
    num_ranks, case = FAMILIES[name]
    check(ranks, num_ranks, replace(case, steps=steps))


def test_four_way_tensor_parallelism(ranks) -> None:
    check(ranks, 4, Case(replace(GPT2, num_heads=12), mesh=MeshConfig(tp=4), parallel=parallel()))


@pytest.mark.parametrize("zero", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_eight_ranks(ranks, zero: int) -> None:
    mesh = replace(HYBRID, tp=2)
    check(ranks, 8, Case(GPT2, mesh=mesh, parallel=parallel(zero), microbatch=2))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_accumulation(ranks, zero: int) -> None:
    check(ranks, 2, Case(GPT2, parallel=parallel(zero), microbatch=4))  # 4 rows, then 2: unequal weights


@pytest.mark.parametrize("zero", [2, 3])
def test_accumulation_of_sharded_gradients(ranks, zero: int) -> None:
    check(ranks, 4, Case(GPT2, mesh=MeshConfig(tp=2), parallel=parallel(zero, reduce_each=True), microbatch=2))


RECOMPUTED = products(mode=["full", "selective", "offload", "compressed"], zero=[0, 3])


@pytest.mark.parametrize("name", few_rows(RECOMPUTED, strength=1))
def test_recomputation(ranks, name: str) -> None:
    mode, zero = RECOMPUTED[name].values()
    options = parallel(zero, recompute=RecomputeConfig(mode, every=1 if zero else 2))
    check(ranks, 4, Case(GPT2, mesh=MeshConfig(tp=2), parallel=options))


@pytest.mark.parametrize(
    ("zero", "config", "segments"),
    [
        (2, RecomputeConfig("recursive"), None),
        (3, RecomputeConfig("budget", budget="1GiB"), (Lean(1, "products"), (1,), Lean(1, "attention"))),
    ],
    ids=["zero 2", "zero 3"],
)
def test_recomputation_by_segments(ranks, zero: int, config: RecomputeConfig, segments: Segments | None) -> None:
    case = Case(replace(GPT2, num_layers=3), mesh=MeshConfig(tp=2), parallel=parallel(zero, recompute=config))
    check(ranks, 4, replace(case, microbatch=2, segments=segments))


@pytest.mark.parametrize(
    ("mesh", "zero"), [(MeshConfig(tp=2), 1), (MeshConfig(tp=4, tp_mode="2d"), 0), (MeshConfig(cp=2), 2)]
)
def test_a_step_makes_no_meshes(ranks, mesh: MeshConfig, zero: int) -> None:
    """Slices of the mesh were most of what a step of a small model took."""
    assert ranks(4).run(meshes_of_a_step, Case(GPT2, mesh, parallel(zero))) == [0] * 4


@pytest.mark.parametrize("model", [GPT2, BLOOM], ids=["gpt2", "bloom"])
def test_documents_apart(ranks, model: DecoderConfig) -> None:
    check(ranks, 2, Case(model, mesh=MeshConfig(tp=2), parallel=parallel(), documents=True))


@pytest.mark.parametrize(
    ("mesh", "zero", "without"),
    [
        (MeshConfig(), 0, ("core.parallel.data", "all_reduce")),
        (MeshConfig(), 1, ("core.parallel.data", "reduce_scatter_tensor")),
        (MeshConfig(), 2, ("core.parallel.data", "reduce_scatter_tensor")),
        (MeshConfig(), 1, ("core.parallel.data", "all_gather_into_tensor")),
        (MeshConfig(), 3, ("torch.distributed.fsdp._fully_shard._fsdp_collectives", "fsdp")),
        (HYBRID, 1, ("core.parallel.data", "all_reduce")),
        (MeshConfig(), 1, ("core.optim.clip", "all_reduce")),
        (MeshConfig(), 0, ("core.train.loop", "all_reduce")),
        (MeshConfig(tp=2), 0, ("core.parallel.data", "all_reduce")),
        (MeshConfig(tp=2), 0, ("core.comm.collectives", "all_reduce")),
        (MeshConfig(tp=2), 0, ("core.comm.collectives", "reduce_scatter_tensor")),
        (MeshConfig(tp=2), 0, ("core.comm.collectives", "all_gather_into_tensor")),
    ],
)
def test_a_missing_collective_is_seen(ranks, mesh: MeshConfig, zero: int, without: tuple[str, str]) -> None:
    """The tests above can fail: without any one of the collectives they hold, they would."""
    num_ranks = 4 if mesh == HYBRID else 2
    case = Case(GPT2, mesh=mesh, parallel=parallel(zero), steps=3)
    difference, _ = difference_from_single(ranks, num_ranks, case, without)
    assert not difference <= 1e4 * TOLERANCE
