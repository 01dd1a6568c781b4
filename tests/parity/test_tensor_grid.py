"""2D, 2.5D and 3D tensor parallelism: n ranks compute, train, hold and send what the papers say, in fp64.

Shapes are ragged on purpose: 3 heads over 2 ranks, an odd vocabulary, dims, batches and positions that do not divide.
"""

from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from benchmarks.tensor_parallel_bytes import decoder_step_bytes
from core.mesh import ContextMode, MeshConfig
from core.models.decoder import DecoderConfig
from core.parallel.recompute import RecomputeConfig
from tests.parity.test_experts import CHOICE, GSHARD, SWITCH, TOPK
from tests.parity.test_train import BLOOM, GPT2, LLAMA, OPT_350M, TOLERANCE, parallel
from tests.support import grid
from tests.support.covering import FEW, MANY, few_rows, products
from tests.support.grid_resume import resumed_elsewhere
from tests.support.training import (
    Case,
    difference_from_single,
    few_cases,
    largest_difference,
    of_one_rank,
    run,
)

SQUARE = MeshConfig(tp=4, tp_mode="2d")
TESSERACT = MeshConfig(tp=8, tp_mode="2.5d", tp_depth=2)
FLAT_TESSERACT = MeshConfig(tp=4, tp_mode="2.5d", tp_depth=1)
DEEP = MeshConfig(tp=2, tp_mode="2.5d", tp_depth=2)
CUBE = MeshConfig(tp=8, tp_mode="3d")
RAGGED = replace(GPT2, num_layers=1, dim=27, num_heads=3, ffn_dim=51)
WIDE = replace(RAGGED, ffn_dim=20, tied_head=False)  # an MLP that is narrower than the model, an untied head
ROTARY = replace(LLAMA, num_layers=1, num_heads=6, num_kv_heads=3)
ALIBI = replace(BLOOM, num_layers=1)
NARROW = replace(OPT_350M, num_layers=1)

CASES = {
    "2d-ragged": (4, Case(RAGGED, SQUARE, parallel(), batch=11)),
    "2d-wide-selective": (4, Case(WIDE, SQUARE, parallel(recompute=RecomputeConfig("selective")), microbatch=7)),
    "2d-rotary-documents": (4, Case(ROTARY, SQUARE, parallel(), documents=True, batch=11)),
    "2d-alibi": (4, Case(ALIBI, SQUARE, parallel())),
    "2d-narrow-embeddings": (4, Case(NARROW, SQUARE, parallel(recompute=RecomputeConfig("full")))),
    "2d-one-sequence": (4, Case(RAGGED, SQUARE, parallel(), batch=1)),
    "2.5d-depth-1": (4, Case(RAGGED, FLAT_TESSERACT, parallel())),
    "2.5d-1x1x2": (2, Case(ROTARY, DEEP, parallel(), batch=11)),
    "2.5d-1x1x2-zero3": (4, Case(ALIBI, DEEP, parallel(3))),
    "2.5d-2x2x2": (8, Case(RAGGED, TESSERACT, parallel(), batch=11)),
    "2.5d-2x2x2-narrow-embeddings": (8, Case(NARROW, TESSERACT, parallel(), documents=True)),
    "3d-ragged": (8, Case(RAGGED, CUBE, parallel(), batch=11)),
    "3d-rotary-selective": (8, Case(ROTARY, CUBE, parallel(recompute=RecomputeConfig("selective")), documents=True)),
    "3d-alibi-microbatches": (8, Case(ALIBI, CUBE, parallel(recompute=RecomputeConfig("full")), microbatch=7)),
    "3d-narrow-embeddings": (8, Case(NARROW, CUBE, parallel())),
    "2d-dp": (8, Case(RAGGED, SQUARE, parallel())),
    "2d-zero1": (8, Case(RAGGED, SQUARE, parallel(1))),
    "2d-zero2-accumulated": (8, Case(ROTARY, SQUARE, parallel(2, reduce_each=True), microbatch=4)),
    "2d-zero3": (8, Case(RAGGED, SQUARE, parallel(3))),
    "2d-ring": (8, Case(ROTARY, replace(SQUARE, cp=2), parallel(1), documents=True, batch=11)),
    "2d-ring-microbatches": (8, Case(RAGGED, replace(SQUARE, cp=2), parallel(3), microbatch=7)),
    "2.5d-1x1x2-ring-full": (4, Case(ALIBI, replace(DEEP, cp=2), parallel(recompute=RecomputeConfig("full")))),
    "2.5d-1x1x2-ulysses": (4, Case(ALIBI, replace(DEEP, cp=2, cp_mode="ulysses"), parallel(), documents=True)),
    "2d-ulysses": (8, Case(ROTARY, replace(SQUARE, cp=2, cp_mode="ulysses"), parallel(2), microbatch=7)),
    "2.5d-mixed": (8, Case(ROTARY, replace(DEEP, cp=4, cp_mode="mixed", cp_ulysses=2), parallel(), batch=11)),
}


FACTORS = ("tp", "cp", "zero", "recompute", "accumulation", "documents")
LONG = ["2d-ragged", "2.5d-1x1x2", "3d-ragged"]


@pytest.mark.parametrize(("name", "steps"), few_cases(CASES, *FACTORS, many=LONG))
def test_trains_as_one_rank_does(ranks, name: str, steps: int) -> None:
    """Losses, and every parameter's displacement."""
    num_ranks, case = CASES[name]
    difference, where = difference_from_single(ranks, num_ranks, replace(case, steps=steps))
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


@pytest.mark.soak
@pytest.mark.parametrize("cp_mode", ["ring", "ulysses"])
def test_a_cube_of_parts_of_sequences(ranks, cp_mode: ContextMode) -> None:
    case = Case(ROTARY, replace(CUBE, cp=2, cp_mode=cp_mode), parallel(1), documents=True, batch=11)
    difference, where = difference_from_single(ranks, 16, case)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


UNEVEN = replace(SWITCH, dim=27, num_heads=3, ffn_dim=21)
EXPERTS = {
    "2d-switch": (4, Case(UNEVEN, SQUARE, parallel(), batch=11)),
    "2.5d-1x1x2-topk-ring": (4, Case(TOPK, replace(DEEP, cp=2), parallel(1), microbatch=5, batch=11)),
    "2.5d-1x1x2-gshard-ep": (4, Case(GSHARD, replace(DEEP, ep=2), parallel(3, recompute=RecomputeConfig("full")))),
    "2.5d-1x1x2-choice-stages": (4, Case(CHOICE, replace(DEEP, pp=2), parallel(), microbatch=4)),
    "2d-topk-ep-zero3": (8, Case(TOPK, replace(SQUARE, ep=2), parallel(3), documents=True)),
    "2d-choice-ulysses": (8, Case(CHOICE, replace(SQUARE, cp=2, cp_mode="ulysses"), parallel(2), batch=11)),
    "2.5d-2x2x2-switch": (8, Case(UNEVEN, TESSERACT, parallel(recompute=RecomputeConfig("selective")), batch=11)),
    "3d-topk": (8, Case(TOPK, CUBE, parallel(), batch=11)),
    "3d-choice": (8, Case(CHOICE, CUBE, parallel(), microbatch=5)),
    "3d-gshard": (8, Case(GSHARD, CUBE, parallel(), documents=True)),
}


FEW_EXPERTS = ("2d-switch", "2.5d-1x1x2-topk-ring", "2.5d-1x1x2-gshard-ep")


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *(pytest.param(name, FEW, id=name) for name in FEW_EXPERTS),
        *(pytest.param(name, MANY, id=f"{name}-{MANY}-steps", marks=pytest.mark.soak) for name in EXPERTS),
    ],
)
def test_experts_train_as_on_one_rank(ranks, name: str, steps: int) -> None:
    """Of every router, dealt out over the rows of a grid, and over ep."""
    num_ranks, case = EXPERTS[name]
    difference, where = difference_from_single(ranks, num_ranks, replace(case, steps=steps))
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


COMPILED = {
    "2.5d-1x1x2": (2, Case(ALIBI, DEEP, parallel(compile=True), documents=True, batch=11)),
    "2d": (4, Case(RAGGED, SQUARE, parallel(compile=True), batch=11)),
    "2d-ring-zero3": (8, Case(ROTARY, replace(SQUARE, cp=2), parallel(3, compile=True), documents=True)),
    "3d": (8, Case(ROTARY, CUBE, parallel(compile=True), documents=True, microbatch=5)),
    "2.5d-1x1x2-switch": (2, Case(SWITCH, DEEP, parallel(compile=True), documents=True)),
    "3d-full": (8, Case(RAGGED, CUBE, parallel(compile=True, recompute=RecomputeConfig("full")))),
}


def compiled(case: Case) -> tuple[int, dict[str, Any]]:
    """The number of graphs, and what `run` finds."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    module, function = (
        partialmethod(nn.Module.compile, backend="aot_eager"),
        partial(torch.compile, backend="aot_eager"),
    )
    with (
        patch.object(nn.Module, "compile", module),
        patch.object(torch, "compile", function),
        torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),
    ):
        result = run(case)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], result


@pytest.mark.soak  # in every run tests/unit/test_plan.py holds that blocks are compiled
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks_train_as_one_rank_does(ranks, name: str) -> None:
    """What lies between the messages that torch.compile does not trace is in graphs, which blocks share."""
    num_ranks, case = COMPILED[name]
    found = ranks(num_ranks).run(compiled, case)
    difference, where = largest_difference([result for _, result in found], of_one_rank(ranks, case), case.steps)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"
    assert all(graphs > 1 for graphs, _ in found)


FORMS = {"2d": SQUARE, "2.5d": DEEP, "3d": CUBE}
OPTIMIZERS = products(
    optim=["adafactor", "adagrad", "adamw8bit", "came", "lamb", "lars", "rmsprop", "sgd", "sm3"], form=FORMS
)


@pytest.mark.parametrize("name", few_rows(OPTIMIZERS, strength=1))
def test_every_optimizer(ranks, name: str) -> None:
    """On parts of matrices and of vectors, ragged ones, as on one rank."""
    optim, mesh = OPTIMIZERS[name]["optim"], FORMS[str(OPTIMIZERS[name]["form"])]
    difference, where = difference_from_single(ranks, mesh.tp, Case(ROTARY, mesh, parallel(), optim=optim))
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("mesh", [SQUARE, TESSERACT, CUBE], ids=["2d", "2.5d", "3d"])
def test_a_plain_block_equals_itself(ranks, mesh: MeshConfig, norm: type[nn.Module]) -> None:
    """Output, input gradient and parameter gradients of a module that is not ours, on a batch of 5."""
    expected = grid.plain(norm, MeshConfig())
    for found in ranks(mesh.tp).run(grid.plain, norm, mesh):
        assert found.keys() == expected.keys()
        for name, want in expected.items():
            assert found[name].shape == want.shape
            assert (found[name] - want).norm() <= TOLERANCE * want.norm(), name


def test_summa_of_uneven_blocks_and_its_gradients(ranks) -> None:
    for sizes in ((4, 6, 8), (5, 7, 3), (1, 3, 2), (3, 1, 5)):
        assert max(ranks(4).run(grid.products, sizes)) <= 1e-13, sizes


@pytest.mark.parametrize("mesh", [SQUARE, TESSERACT, CUBE], ids=["2d", "2.5d", "3d"])
def test_no_rank_holds_a_whole_weight_or_activation(ranks, mesh: MeshConfig) -> None:
    """From building to the end of the backward no operator returns so many elements as the smallest whole matrix."""
    for largest, operator in ranks(mesh.tp).run(grid.largest_allocation, mesh):
        assert largest < 128 * 128, operator


def test_megatron_does_hold_whole_activations(ranks) -> None:
    """What is held above can fail: 1D parallelism gathers activations."""
    assert min(ranks(4).run(grid.largest_allocation, MeshConfig(tp=4)))[0] >= 128 * 128


COUNTED = DecoderConfig(vocab_size=64, dim=32, num_layers=2, num_heads=8, ffn_dim=96, max_length=8)


@pytest.mark.parametrize("config", [COUNTED, replace(COUNTED, dim=30, num_heads=3, vocab_size=61)])
@pytest.mark.parametrize("mesh", [SQUARE, TESSERACT, CUBE], ids=["2d", "2.5d", "3d"])
def test_a_decoder_sends_the_closed_form_to_the_byte(ranks, mesh: MeshConfig, config: DecoderConfig) -> None:
    """By operation and axis, on every rank, whatever its share of what does not divide."""
    for rank, found in enumerate(ranks(mesh.tp).run(grid.volume_of_step, mesh, config, 16, 8)):
        assert found == decoder_step_bytes(mesh, config, 16, 8, rank, itemsize=4)


@pytest.mark.parametrize("optim", ["adafactor", pytest.param("adamw", marks=pytest.mark.soak)])
def test_half_of_the_steps_on_each_of_two_forms(ranks, tmp_path: Path, optim: str) -> None:
    """A checkpoint of one form goes on as another, ZeRO and the optimizer's factored state included.

    Without biases in attention: a key's has a true gradient of zero, and Adafactor turns rounding noise into steps.
    """
    legs = [(8, SQUARE, 1), (8, CUBE, 0), (4, DEEP, 3), (3, MeshConfig(tp=3), 0)]
    assert resumed_elsewhere(ranks, tmp_path, ROTARY, optim, legs) <= TOLERANCE


@pytest.mark.parametrize(
    ("mesh", "without"),
    [
        (SQUARE, ("core.parallel.summa", "broadcast")),
        (SQUARE, ("core.parallel.summa", "reduce")),
        (SQUARE, ("core.parallel.tensor2d", "all_reduce")),
        (SQUARE, ("core.comm.collectives", "all_reduce")),
        (SQUARE, ("core.parallel.data", "all_reduce")),
        (DEEP, ("core.parallel.data", "all_reduce")),
        (CUBE, ("core.comm.collectives", "all_gather_into_tensor")),
        (CUBE, ("core.comm.collectives", "reduce_scatter_tensor")),
        (CUBE, ("core.comm.collectives", "all_reduce")),
        (CUBE, ("core.parallel.data", "all_reduce")),
    ],
)
def test_a_missing_collective_is_seen(ranks, mesh: MeshConfig, without: tuple[str, str]) -> None:
    """The tests above can fail: without any one of the collectives they hold, they would."""
    case = Case(RAGGED, mesh, parallel(), steps=2)
    difference, _ = difference_from_single(ranks, mesh.tp, case, without)
    assert not difference <= 1e4 * TOLERANCE
