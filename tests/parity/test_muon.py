"""Optimizers of whole matrices do on n ranks what they do on one, whatever cuts: fp64, ragged, two messages a step."""

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import core.gemini
from core.comm.volume import count_volume
from core.mesh import MeshConfig
from core.optim.matrices import MatrixOptimizer
from core.optim.muon import Muon
from tests.parity.test_experts import SWITCH, TOPK
from tests.parity.test_pipeline import TWO, deep, staged
from tests.parity.test_tensor_grid import CUBE, RAGGED, ROTARY, SQUARE, TESSERACT
from tests.parity.test_train import GPT2, HYBRID, LLAMA, TOLERANCE, parallel
from tests.support.covering import FEW, MANY
from tests.support.training import Case, batch_of, build, data_axis, difference_from_single, loss, train_step, weight

CASES = {
    "zero 0": (3, Case(GPT2, parallel=parallel())),
    "zero 1": (3, Case(GPT2, parallel=parallel(1))),
    "zero 2": (2, Case(GPT2, parallel=parallel(2), microbatch=4)),
    "zero 3": (3, Case(GPT2, parallel=parallel(3))),
    "hybrid": (4, Case(LLAMA, HYBRID, parallel(3))),
    "tp": (3, Case(GPT2, MeshConfig(tp=3), parallel())),
    "tp zero 1": (4, Case(LLAMA, MeshConfig(tp=2), parallel(1))),
    "tp zero 3": (4, Case(LLAMA, MeshConfig(tp=2), parallel(3))),
    "cp zero 2": (4, Case(GPT2, MeshConfig(cp=2), parallel(2))),
    "2d": (4, Case(RAGGED, SQUARE, parallel(), batch=11)),
    "2.5d": (8, Case(RAGGED, TESSERACT, parallel(), batch=11)),
    "3d": (8, Case(ROTARY, CUBE, parallel(), batch=11)),
    "2d zero 3": (8, Case(RAGGED, SQUARE, parallel(3))),
    "experts": (4, Case(TOPK, MeshConfig(ep=2), parallel(3))),
    "experts tp": (4, Case(SWITCH, MeshConfig(ep=2, tp=2), parallel())),
    "stages": (2, Case(deep(GPT2), TWO, staged("zbv"), batch=11)),
    "stages zero 1 tp": (8, Case(deep(LLAMA, 3), replace(TWO, tp=2), staged("1f1b", 1, microbatches=2))),
    "gemini": (2, Case(GPT2, parallel=parallel(3), budget="420KB", planned=True)),
    "gemini zero 0": (2, Case(GPT2, parallel=parallel(0), budget="420KB")),
    "gemini tp": (4, Case(GPT2, MeshConfig(tp=2), parallel(3), budget="420KB")),
}


_CUT = ("rank_rtol", 1e-4)
OTHERS = {
    "soap": ("soap", (("precondition_frequency", 2), ("rank_rtol", 1e-3))),
    "shampoo": ("shampoo", (("precondition_frequency", 2), ("max_preconditioner_dim", 20), ("eps", 1e-3), _CUT)),
    "one-sided shampoo": ("shampoo", (("sides", "one"), ("graft", "sgd"), ("precondition_frequency", 1), _CUT)),
    "galore": ("galore", (("rank", 4), ("update_gap", 2), ("eps", 1e-3))),
}
"""name -> optimizer, options. Eigenvectors of eigenvalues a share s of the largest are known to 1e-16 / s. Gradients of
this small model have directions down to s = 1e-10: rank_rtol keeps those out, or in a basis that is known."""
LONG = ("zero 0", "tp")
STEPS = [pytest.param(name, MANY if name in LONG else FEW, id=name) for name in CASES]
STEPS += [
    pytest.param(name, MANY, id=f"{name}-{MANY}-steps", marks=pytest.mark.soak) for name in CASES if name not in LONG
]


@pytest.mark.parametrize(("name", "steps"), STEPS)
def test_on_every_layout(ranks, name: str, steps: int) -> None:
    num_ranks, case = CASES[name]
    difference, where = difference_from_single(ranks, num_ranks, replace(case, optim="muon", steps=steps))
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


def with_optimizer(which: str, case: Case, steps: int = FEW) -> Case:
    optim, options = OTHERS[which]
    return replace(case, optim=optim, options=options, steps=steps)


SHORT = [("soap", "tp zero 3"), ("soap", "gemini"), ("shampoo", "2d"), ("galore", "experts")]


@pytest.mark.parametrize(("which", "name"), SHORT)
def test_others_on_some_layouts(ranks, which: str, name: str) -> None:
    num_ranks, case = CASES[name]
    difference, where = difference_from_single(ranks, num_ranks, with_optimizer(which, case))
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("which", OTHERS)
def test_others_on_every_layout(ranks, which: str, name: str) -> None:
    num_ranks, case = CASES[name]
    difference, where = difference_from_single(ranks, num_ranks, with_optimizer(which, case, MANY))
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


@pytest.mark.parametrize("name", ["zero 0", "zero 3", "tp", "gemini"])
def test_a_missing_message_is_seen(ranks, name: str) -> None:
    num_ranks, case = CASES[name]
    without = ("core.optim.home", "all_to_all_single")
    difference, _ = difference_from_single(ranks, num_ranks, replace(case, optim="muon"), without)
    assert not difference <= 1e4 * TOLERANCE


def messages_of_a_step(case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of an optimizer's step, by operation; and elements of the state of matrices here, by matrix."""
    state, config = build(case)
    axis = data_axis(state.parallel.mesh)
    rows = case.batch // axis.size()
    mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(case, 0).items()}
    found: Counter[str] = Counter()
    step = state.optimizer.step

    def counted() -> None:
        with count_volume(state.parallel.mesh) as volume:
            step()
        found.clear()
        for (operation, _), calls in volume.calls.items():
            found[operation] += calls

    with patch.object(state.optimizer, "step", counted):
        for index in range(2):
            train_step(state, mine, loss, weight, config, index)
    optimizer = state.optimizer
    assert isinstance(optimizer, MatrixOptimizer)
    whole = {name: master for name, master in state.parallel.masters.items() if optimizer.takes_whole(master)}
    return dict(found), {n: sum(t.numel() for t in optimizer.state[m].values() if t.ndim) for n, m in whole.items()}


@pytest.mark.parametrize(
    ("which", "name"),
    [
        *(("muon", name) for name in ("zero 0", "zero 3", "tp zero 1", "2d", "experts", "stages zero 1 tp")),
        *(("soap", "zero 3"), ("shampoo", "tp zero 1"), ("galore", "zero 0")),
    ],
)
def test_two_messages_a_step_and_each_state_at_one_home(ranks, which: str, name: str) -> None:
    """Whatever the number of matrices; among the ranks of a stage every matrix's state is whole, once."""
    num_ranks, case = CASES[name]
    case = replace(case, optim="muon") if which == "muon" else with_optimizer(which, case)
    found = ranks(num_ranks).run(messages_of_a_step, case)
    assert [calls for calls, _ in found] == [{"all_to_all": 2}] * num_ranks
    held: Counter[str] = Counter()
    for _, states in found:
        held.update(states)
        assert sum(states.values()) > 0, "a rank has no home"
    [(_, whole)] = ranks(1).run(messages_of_a_step, replace(case, mesh=MeshConfig(), parallel=parallel()))
    assert held == whole


def stepped(wrapped: bool, steps: int) -> dict[str, torch.Tensor]:
    """Steps of a small model by hand, the last of them under `gemini.wrap`: whole values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7), nn.Linear(7, 6)).double()
    matrices, vectors = ([p for p in model.parameters() if (p.ndim == 2) is kind] for kind in (True, False))
    groups = [{"params": matrices, "orthogonalise": True}, {"params": vectors, "orthogonalise": False}]
    optimizer, gemini = Muon(groups, lr=0.01), None
    for step in range(steps):
        if wrapped and step == 2:
            gemini = core.gemini.wrap(model, optimizer, "1MB", precision="fp64", device="cpu")
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().div(dist.get_world_size() if gemini else 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return gemini.state_dict() if gemini else {name: p.detach() for name, p in model.named_parameters()}


def test_a_momentum_that_was_whole_everywhere_goes_home(ranks) -> None:
    """Gemini takes over a model and its optimizer in the middle of a run."""
    expected = ranks(1).run(stepped, False, 5)[0]
    for found in ranks(2).run(stepped, True, 5):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)
