"""n ranks that share sequences train as one rank does: ring, Ulysses and both, with ZeRO, tensor and data parallelism.

In fp64. Lengths, heads and rows are ragged on purpose.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core.mesh import MeshConfig
from core.models.decoder import DecoderConfig
from core.nn.attention import StepContext
from core.parallel.recompute import RecomputeConfig, RecomputeMode
from tests.parity.test_train import BLOOM, GEMMA3, GPT2, LLAMA, OPT_350M, TOLERANCE, parallel
from tests.support.training import Case, batch_of, build, difference_from_single, few_cases, removed, table

RING, ULYSSES = MeshConfig(cp=2), MeshConfig(cp=2, cp_mode="ulysses")
BOTH = MeshConfig(cp=4, cp_mode="mixed", cp_ulysses=2)


def check(ranks, num_ranks: int, case: Case) -> None:
    difference, where = difference_from_single(ranks, num_ranks, case)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


CASES = table(
    (num_ranks, Case(GPT2, mesh=mesh, parallel=parallel(zero)))
    for num_ranks, mesh, zero in (
        (2, RING, 0),
        (2, RING, 2),
        (2, RING, 3),
        (2, ULYSSES, 1),
        (3, replace(RING, cp=3), 1),
        (3, replace(ULYSSES, cp=3), 3),
        (4, RING, 3),
        (4, replace(RING, tp=2), 1),
        (4, replace(ULYSSES, tp=2), 3),
        (4, replace(RING, dp_replicate=2), 1),
        (4, replace(RING, dp_replicate=2), 3),
        (4, replace(RING, cp=4), 0),
        (4, BOTH, 2),
        (8, replace(RING, tp=2), 3),
        (8, replace(BOTH, tp=2), 0),
    )
)
LONG = ["gpt2 on 2 cp=2 ring zero 0", "gpt2 on 2 cp=2 ulysses zero 1"]


@pytest.mark.parametrize(("name", "steps"), few_cases(CASES, "beside", "zero", many=LONG))
def test_every_mesh_and_zero_level(ranks, name: str, steps: int) -> None:
    num_ranks, case = CASES[name]
    check(ranks, num_ranks, replace(case, steps=steps))


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        *((model, RING) for model in (OPT_350M, BLOOM, LLAMA, GEMMA3)),
        *((model, ULYSSES) for model in (BLOOM, LLAMA, GEMMA3)),
    ],
    ids=lambda given: given.family if isinstance(given, DecoderConfig) else given.cp_mode,
)
def test_every_family(ranks, model: DecoderConfig, mesh: MeshConfig) -> None:
    check(ranks, 3, Case(model, mesh=replace(mesh, cp=3), parallel=parallel(1), documents=True))


def logits(mesh: MeshConfig, without: tuple[str, str] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Of all places and of two, with padding in front and behind; and the gradient of the position table.

    without  as in `removed`
    """
    case = Case(GPT2, mesh=mesh, parallel=parallel())
    spread = build(case)[0].parallel
    ids = batch_of(case, 0)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[1, 5:] = 0
    with removed(*without) if without else nullcontext():
        whole = spread.model(ids, mask)
    with spread.microbatch(last=True):
        whole[mask.bool()].sin().sum().backward()
    spread.reduce()
    some = spread.model(ids, mask, context=StepContext(rows_R=torch.tensor([2, 4])))
    grad = spread.masters["embedding.positions.weight"].grad
    assert grad is not None
    return whole.detach(), some.detach(), grad


def test_logits_are_those_of_the_whole_sequence_on_every_rank(ranks) -> None:
    expected = ranks(1).run(logits, MeshConfig())[0]
    for found in ranks(3).run(logits, replace(RING, cp=3)) + ranks(3).run(logits, replace(ULYSSES, cp=3)):
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    for found in ranks(3).run(logits, replace(RING, cp=3), ("core.comm.collectives", "all_gather_into_tensor")):
        assert (found[0] - expected[0]).norm() > 1e-3 * expected[0].norm()


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_and_accumulation(ranks, mode: RecomputeMode) -> None:
    options = parallel(3, recompute=RecomputeConfig(mode))
    check(ranks, 4, Case(GPT2, mesh=RING, parallel=options, microbatch=4, documents=True))


@pytest.mark.parametrize(
    ("mesh", "zero", "without"),
    [
        (RING, 0, ("core.parallel.data", "all_reduce")),
        (RING, 1, ("core.parallel.data", "reduce_scatter_tensor")),
        (RING, 1, ("core.parallel.data", "all_gather_into_tensor")),
        (RING, 3, ("torch.distributed.fsdp._fully_shard._fsdp_collectives", "fsdp")),
        (RING, 0, ("core.comm.collectives", "batch_isend_irecv")),
        (RING, 0, ("core.comm.collectives", "all_reduce")),
        (ULYSSES, 0, ("core.comm.collectives", "all_to_all_single")),
    ],
)
def test_a_missing_collective_is_seen(ranks, mesh: MeshConfig, zero: int, without: tuple[str, str]) -> None:
    case = Case(GPT2, mesh=mesh, parallel=parallel(zero), steps=3)
    difference, _ = difference_from_single(ranks, 2, case, without)
    assert not difference <= 1e4 * TOLERANCE
