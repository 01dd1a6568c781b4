"""n ranks with experts train as one rank does: every router, on ep, data, tensor and context axes, every ZeRO level.

In fp64. Ragged: experts, rows, lengths, tokens without targets; and experts that no token is sent to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from core.comm import collectives
from core.comm.volume import count_volume
from core.mesh import MeshConfig, data_axis, gradient_axis
from core.models.decoder import DecoderConfig
from core.nn.moe import AuxiliaryLoss
from core.nn.routing import MoEConfig
from core.parallel import data as data_module
from core.parallel import expert
from core.parallel.data import Completion
from core.parallel.recompute import RecomputeConfig
from core.placement.style import Style
from core.train import train_step
from tests.parity.test_train import GPT2, LLAMA, TOLERANCE, parallel
from tests.support.grid_resume import resumed_elsewhere
from tests.support.training import (
    Case,
    batch_of,
    build,
    difference_from_single,
    few_cases,
    largest_difference,
    loss,
    of_one_rank,
    run,
    table,
    weight,
)

TOPK = replace(LLAMA, ffn_dim=22, moe=MoEConfig(5, balance_weight=0.05, z_weight=0.01))
SWITCH = replace(GPT2, ffn_dim=22, moe=MoEConfig(4, every=2, router="switch", capacity_factor=1.0, z_weight=0.01))
GSHARD = replace(GPT2, ffn_dim=22, moe=MoEConfig(4, router="gshard", capacity_factor=0.8, second_expert="always"))
# On learned positions: without, two equal tokens at the front of a row tie, and rounding decides which one is taken.
CHOICE = replace(GPT2, ffn_dim=22, moe=MoEConfig(4, router="expert_choice", experts_per_token=1, z_weight=0.1))
# Fewer experts than ranks that share them: they are sharded by the rows of their matrices.
PAIR = replace(LLAMA, ffn_dim=24, moe=MoEConfig(2, every=2, router="switch", capacity_factor=1.5))
ROUTERS = {"topk": TOPK, "switch": SWITCH, "gshard": GSHARD, "expert_choice": CHOICE}


def check(ranks, num_ranks: int, case: Case) -> None:
    difference, where = difference_from_single(ranks, num_ranks, case)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


EVERY_ROUTER = (
    (2, MeshConfig(ep=2), 0),
    (2, MeshConfig(), 1),
    (4, MeshConfig(ep=2), 1),
    (4, MeshConfig(ep=2), 3),
    (4, MeshConfig(ep=2, cp=2), 2),
    (4, MeshConfig(ep=2, tp=2), 0),
)
OTHERS = (
    (TOPK, 1, MeshConfig(), 3, 5),
    (GSHARD, 2, MeshConfig(tp=2), 3, None),
    (GSHARD, 2, MeshConfig(cp=2), 1, None),
    (SWITCH, 2, MeshConfig(cp=2, cp_mode="ulysses"), 3, None),
    (CHOICE, 3, MeshConfig(cp=3), 0, None),
    (TOPK, 3, MeshConfig(ep=3), 3, None),
    (replace(TOPK, num_kv_heads=None), 3, MeshConfig(tp=3), 0, None),
    (SWITCH, 4, MeshConfig(ep=4), 2, 2),
    (TOPK, 4, MeshConfig(ep=2), 2, 2),
    (TOPK, 4, MeshConfig(ep=4), 3, None),
    (TOPK, 4, MeshConfig(ep=2, dp_replicate=2, dp_shard=2), 3, None),
    (SWITCH, 4, MeshConfig(ep=2, dp_replicate=2, dp_shard=2), 1, None),
    (PAIR, 4, MeshConfig(ep=2), 2, None),
    (PAIR, 4, MeshConfig(ep=2), 3, 2),
    (PAIR, 4, MeshConfig(), 3, None),
    (PAIR, 4, MeshConfig(tp=2), 1, None),
    (TOPK, 8, MeshConfig(ep=2, dp_replicate=2, dp_shard=4), 3, None),
    (GSHARD, 8, MeshConfig(ep=2, cp=2, tp=2), 3, None),
    (SWITCH, 8, MeshConfig(ep=2, dp_replicate=2, dp_shard=2, cp=2), 3, None),
    (CHOICE, 8, MeshConfig(ep=4, tp=2), 2, 2),
    (TOPK, 8, MeshConfig(cp=2), 1, None),
)
CASES = table(
    (num_ranks, Case(model, mesh, parallel(zero), microbatch=microbatch, batch=16 if num_ranks == 8 else 12))
    for model, num_ranks, mesh, zero, microbatch in (
        *((model, *row, None) for model in ROUTERS.values() for row in EVERY_ROUTER),
        *OTHERS,
    )
)
LONG = ["topk of 5 on 2 ep=2 zero 0"]


@pytest.mark.parametrize(("name", "steps"), few_cases(CASES, "router", "beside", "zero", many=LONG))
def test_trains_as_one_rank_does(ranks, name: str, steps: int) -> None:
    num_ranks, case = CASES[name]
    check(ranks, num_ranks, replace(case, steps=steps))


@pytest.mark.parametrize(
    ("model", "mesh", "zero", "options"),
    [
        (TOPK, MeshConfig(ep=2), 3, {"recompute": RecomputeConfig("full")}),
        (GSHARD, MeshConfig(ep=2), 1, {"recompute": RecomputeConfig("selective")}),
        (GSHARD, MeshConfig(ep=2), 2, {"recompute": RecomputeConfig("offload")}),
        (TOPK, MeshConfig(ep=2), 2, {"reduce_each": True}),
    ],
)
def test_recomputation_and_accumulation(ranks, model: DecoderConfig, mesh: MeshConfig, zero: int, options) -> None:
    check(ranks, 4, Case(model, mesh=mesh, parallel=parallel(zero, **options), microbatch=2, documents=True))


@pytest.mark.parametrize(("optim", "zero"), [("adafactor", 1), ("adafactor", 3), ("lamb", 2)])
def test_optimizers_that_need_the_whole_of_a_stack(ranks, optim: str, zero: int) -> None:
    check(ranks, 4, Case(PAIR, mesh=MeshConfig(ep=2), parallel=parallel(zero), optim=optim))


@pytest.mark.parametrize(("mesh", "zero"), [(MeshConfig(ep=4), 0), (MeshConfig(ep=4), 3), (MeshConfig(ep=2, cp=2), 1)])
def test_experts_and_ranks_without_tokens(ranks, mesh: MeshConfig, zero: int) -> None:
    """Eight experts and a handful of tokens; nearly all messages are empty."""
    few = replace(SWITCH, moe=MoEConfig(8, router="switch"))
    check(ranks, 4, Case(few, mesh=mesh, parallel=parallel(zero), batch=8, length=3 if mesh.cp > 1 else 1))


def collapsed(mesh: MeshConfig, zero: int) -> tuple[list[float], list[list[int]], float]:
    """Three steps of routers that send every token to the first expert: losses, loads, and the others' gradients."""
    model = replace(SWITCH, moe=replace(SWITCH.moe, capacity_factor=float("inf"), balance_weight=0.0, z_weight=0.0))
    state, config = build(Case(model, mesh=mesh, parallel=parallel(zero), steps=3))
    for name, master in state.parallel.masters.items():
        if "router" in name:
            master.data.zero_()
            master.requires_grad_(False)
    state.parallel.publish()
    axis = data_axis(state.parallel.mesh)
    found, loads = [], []
    for step in range(3):
        case = Case(model)
        rows = case.batch // axis.size()
        mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(case, step).items()}
        with patch.object(state.optimizer, "step", lambda: None):
            figures = train_step(state, mine, loss, weight, config, step)
        found.append(figures["grad_norm"])
        loads += figures["moe_load"]
    return found, loads, figures["moe_dropped"]


@pytest.mark.parametrize(
    ("num_ranks", "mesh", "zero"),
    [
        (4, MeshConfig(ep=4), 0),
        (4, MeshConfig(ep=4), 3),
        (4, MeshConfig(ep=2, tp=2, tp_mode="2.5d", tp_depth=2), 3),
        pytest.param(8, MeshConfig(tp=4, tp_mode="2.5d", tp_depth=4), 0, marks=pytest.mark.soak),  # 6 rows over 4
        pytest.param(8, MeshConfig(tp=8, tp_mode="3d"), 1, marks=pytest.mark.soak),
    ],
)
def test_a_collapsed_router_is_no_hang(ranks, num_ranks: int, mesh: MeshConfig, zero: int) -> None:
    (norms, loads, dropped), *_ = ranks(1).run(collapsed, MeshConfig(), 0)
    assert loads == [[12 * 7, 0, 0, 0]] * 3
    assert dropped == 0
    for found, found_loads, _ in ranks(num_ranks).run(collapsed, mesh, zero):
        assert found == pytest.approx(norms, rel=1e-10)
        assert found_loads == loads


def sent(mesh: MeshConfig) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """What a rank sends in a step, and the elements of its parameters: experts' and others'."""
    state, config = build(Case(TOPK, mesh=mesh, parallel=parallel(0)))
    axis = data_axis(state.parallel.mesh)
    rows = 12 // axis.size()
    mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(Case(TOPK), 0).items()}
    # What says which parameters were used is counted in tests/unit/test_volume.py.
    used = patch.object(Completion, "used_anywhere", lambda _, masters, together: set(masters))
    with used, count_volume(state.parallel.mesh) as volume:
        train_step(state, mine, loss, weight, config, 0)
    elements = {"experts": 0, "others": 0}
    for name, master in state.parallel.masters.items():
        elements["experts" if ".experts." in name else "others"] += master.numel()
    return {f"{op}/{name}": (n, volume.bytes[op, name]) for (op, name), n in volume.calls.items()}, elements


def test_bytes_are_those_of_the_closed_form(ranks) -> None:
    """All-to-all: 4 k T D w of all ranks together, 8 E of counts each; gradients: only among those who hold copies."""
    layers, width, counts = TOPK.num_layers, 8, 8 * TOPK.moe.num_experts
    found = ranks(4).run(sent, MeshConfig(ep=2))
    exchanged = [volume["all_to_all/ep"] for volume, _ in found]
    assert {calls for calls, _ in exchanged} == {5 * layers}
    tokens = 12 * 7
    expected = layers * (4 * TOPK.moe.per_token * tokens * TOPK.dim * width + 4 * counts)
    assert sum(num_bytes for _, num_bytes in exchanged) == expected
    for volume, elements in found:
        # Beside the gradients: the batch's weight, their norm, loss and stop, the experts' load.
        figures = width * (1 + 1 + 2 + layers * (TOPK.moe.num_experts + 5))
        assert volume["all_reduce/world"] == (5, width * elements["others"] + figures)
        assert volume["all_reduce/dp_replicate+dp_shard"] == (1, width * elements["experts"])


def test_a_run_goes_on_on_another_ep(ranks, tmp_path: Path) -> None:
    legs = [(2, MeshConfig(ep=2), 0), (4, MeshConfig(ep=2, tp=2), 1), (3, MeshConfig(ep=3), 3)]
    assert resumed_elsewhere(ranks, tmp_path, TOPK, "adamw", legs) < 1e-10


@contextmanager
def without_the_way_back() -> Iterator[None]:
    """The backward of the all-to-all sends nothing."""

    def backward(ctx, grad: Tensor):
        _, sent, *_ = ctx.way
        return grad.new_zeros(sum(sent), *grad.shape[1:]), None, None, None, None

    with patch.object(collectives._ExchangeRows, "backward", staticmethod(backward)):
        yield


@contextmanager
def gradients_of_experts_over_all() -> Iterator[None]:
    with patch.object(data_module, "gradient_axis", lambda mesh, cut=(): gradient_axis(mesh)):
        yield


@contextmanager
def rows_of_this_rank_alone() -> Iterator[None]:
    """Context parallelism without sums over the row."""
    with patch.object(expert, "all_reduce", lambda x, axis: x):
        yield


@contextmanager
def losses_of_every_rank() -> Iterator[None]:
    """Under tensor parallelism every rank adds the whole gradient of the routers' loss."""
    attach = AuxiliaryLoss.attach
    with patch.object(AuxiliaryLoss, "attach", lambda self, y, loss, share, rows: attach(self, y, loss, 1.0, rows)):
        yield


@contextmanager
def routers_of_one_rank() -> Iterator[None]:
    """Under tensor parallelism the routers' gradients are taken for whole."""
    partial_of = Style.partial_of

    def none_of_experts(style: Style, module: Any) -> Any:
        return {} if style is expert.tensor_parallel else partial_of(style, module)

    with patch.object(Style, "partial_of", none_of_experts):
        yield


def mutated(case: Case, mutation: str) -> dict[str, Any]:
    with globals()[mutation]():
        return run(case)


@pytest.mark.parametrize(
    ("mesh", "num_ranks", "mutation"),
    [
        (MeshConfig(ep=2), 2, "without_the_way_back"),
        (MeshConfig(ep=2), 4, "gradients_of_experts_over_all"),
        (MeshConfig(cp=2), 2, "rows_of_this_rank_alone"),
        (MeshConfig(tp=2), 2, "losses_of_every_rank"),
        (MeshConfig(tp=2), 2, "routers_of_one_rank"),
    ],
)
def test_a_mistake_is_seen(ranks, mesh: MeshConfig, num_ranks: int, mutation: str) -> None:
    case = Case(replace(TOPK, moe=replace(TOPK.moe, num_experts=4)), mesh=mesh, parallel=parallel(), steps=3)
    found = ranks(num_ranks).run(mutated, case, mutation)
    assert largest_difference(found, of_one_rank(ranks, case), case.steps)[0] > 1e4 * TOLERANCE


def test_a_missing_message_is_seen(ranks) -> None:
    case = Case(TOPK, mesh=MeshConfig(ep=2), parallel=parallel(), steps=3)
    difference, _ = difference_from_single(ranks, 2, case, ("core.comm.collectives", "all_to_all_single"))
    assert not difference <= 1e4 * TOLERANCE
