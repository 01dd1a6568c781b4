"""Given the same gradients, an optimizer on any mesh moves the parameters as it does on one rank.

Every optimizer of ours x row, column and 2D tensor parallelism x data-parallel shards of 1, 2 and 4 x shapes that
divide and that do not, as local tensors with a layout, DTensors, FSDP2, FSDP2 over tensor parallelism, hybrid shard.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from core.optim import SOAP, Adafactor, AdamW8bit, Came, GaLore, Lamb, Lars, Muon, Shampoo, Sm3
from tests.support.covering import FEW, MANY
from tests.support.sharded_optim import (
    LARGE,
    SHAPES,
    Case,
    difference_after_resharding,
    difference_from_one_rank,
    messages,
    without_collectives,
)


def _muon(parameters: list[torch.Tensor], **options: Any) -> Muon:
    whole, rest = ([p for p in parameters if (p.ndim in (2, 4)) is kind] for kind in (True, False))
    return Muon([{"params": whole, "orthogonalise": True}, {"params": rest, "orthogonalise": False}], **options)


def _by_matrices(kind: Any, parameters: list[torch.Tensor], **options: Any) -> torch.optim.Optimizer:
    """Matrices and kernels, stacks, and the rest with AdamW."""
    whole, stacks, rest = ([p for p in parameters if p.ndim in dims] for dims in ((2, 4), (3,), (0, 1)))
    told = [{"params": whole}, {"params": stacks, "stacked": True}, {"params": rest}]
    groups = [g | {kind.flag: g["params"] is not rest} for g in told if g["params"]]
    return kind(groups, **options)


MATRICES: dict[str, Any] = {
    "soap": partial(_by_matrices, SOAP, lr=0.03, weight_decay=0.1, precondition_frequency=2),
    "soap, one side": partial(_by_matrices, SOAP, lr=0.03, precondition_frequency=3, sides="one", shampoo_beta=0.8),
    "shampoo": partial(_by_matrices, Shampoo, lr=0.03, precondition_frequency=2, max_preconditioner_dim=11),
    "shampoo, one side": partial(_by_matrices, Shampoo, lr=0.03, sides="one", graft="none", shampoo_beta=1.0),
    "galore": partial(_by_matrices, GaLore, lr=0.03, weight_decay=0.1, rank=4, update_gap=2),
    "galore, rotated": partial(_by_matrices, GaLore, lr=0.03, rank=4, update_gap=3, rotate_moments=True),
    "muon, bf16 moment": partial(_by_matrices, Muon, lr=0.03, momentum_format="bf16"),
    "muon, exact": partial(_by_matrices, Muon, lr=0.03, scale="jordan", polar="exact"),
}
"""of whole matrices"""
ADAFACTOR: dict[str, Any] = {
    "adafactor": partial(Adafactor, lr=0.03),
    "adafactor, paper": partial(
        Adafactor, lr=0.03, convention="paper", beta1=0.9, weight_decay=0.1, relative_step=False, factored="largest"
    ),
}
FAMILY: dict[str, Any] = {
    "adafactor, bf16 moment": partial(
        Adafactor, beta1=0.5, momentum_format="bf16", weight_decay=0.1, maximize=True, scale_parameter=False
    ),
    "lamb": partial(Lamb, lr=0.03, weight_decay=0.1),
    "lars": partial(Lars, lr=3.0, weight_decay=0.1),
    "sm3": partial(Sm3, lr=0.03),
    "came": partial(Came, lr=0.03, weight_decay=0.1),
    "adamw8bit": partial(AdamW8bit, lr=0.03, weight_decay=0.1),
    "muon": partial(_muon, lr=0.03, weight_decay=0.1),
}
EIGHT_BITS: dict[str, Any] = {
    "adamw8bit": FAMILY["adamw8bit"],
    "adafactor, 8-bit moment": partial(Adafactor, beta1=0.5, momentum_format="8bit"),
    "muon, 8-bit moment": partial(_by_matrices, Muon, lr=0.03, momentum_format="8bit"),
    "soap, 8-bit moments": partial(
        _by_matrices, SOAP, lr=0.03, sides="one", precondition_frequency=2, momentum_format="8bit"
    ),
}
TENSOR = {"none": (1, 1), "row": (2, 1), "column": (1, 2), "2D": (2, 2)}
CROSS = [Case(dp, *tp) for tp in TENSOR.values() for dp in (1, 2, 4)]
FSDP = [
    Case(4, kind="fsdp"),
    Case(4, kind="fsdp", named=False),
    Case(2, 2, 1, "fsdp"),
    Case(2, 1, 2, "fsdp"),
    Case(2, kind="fsdp", hybrid=True),
    Case(2, 2, 1, "fsdp", hybrid=True),
]
SOME = [Case(2, 2, 1), Case(1, 2, 2, "dtensor"), Case(2, 1, 2, "fsdp")]
SEVERAL = ["matrix", "ragged_conv", "ragged_cube", "three_rows", "one_col", "ragged_vector", "scalar"]
NAMES, TOLERANCE = list(SHAPES), {torch.float64: 1e-10, torch.float32: 1e-5}
ALL = ADAFACTOR | FAMILY | MATRICES | EIGHT_BITS


def name_of(case: Case) -> str:
    tensor = next(name for name, sizes in TENSOR.items() if sizes == (case.tp_row, case.tp_col))
    return f"{tensor}-dp{case.dp_shard}-{case.kind}{'-hybrid' * case.hybrid}{'' if case.named else '-unnamed'}"


def check(
    ranks, which: str, case: Case, names: list[str] = NAMES, dtype: torch.dtype = torch.float64, steps: int = FEW
) -> None:
    arguments = (which, ALL[which], case, names, dtype, steps)
    found = max(ranks(case.num_ranks).run(difference_from_one_rank, *arguments))
    assert found <= TOLERANCE[dtype], f"{which} on {name_of(case)} is {found:.3g} from one rank"


SIXTEEN = Case(4, 2, 2)


@pytest.mark.parametrize(
    "case", [*(c for c in CROSS if c != SIXTEEN), pytest.param(SIXTEEN, marks=pytest.mark.soak)], ids=name_of
)
def test_adafactor_row_column_2d_by_data_shards(ranks, case: Case) -> None:
    check(ranks, "adafactor", case, steps=MANY if case == SOME[0] else FEW)


@pytest.mark.parametrize("case", [Case(2, 2, 2), Case(2, 2, 1, "fsdp")], ids=name_of)
def test_adafactor_in_fp32(ranks, case: Case) -> None:
    check(ranks, "adafactor", case, dtype=torch.float32)


FEW_MESHES = [Case(4), Case(2, 2, 1), Case(4, 1, 2), Case(1, 2, 2), Case(2, 2, 2)]
"""Each cut and each number of data shards; `test_ten_steps_in_every_layout` has all of them."""


@pytest.mark.parametrize("case", [replace(c, kind="dtensor") for c in FEW_MESHES], ids=name_of)
def test_adafactor_of_dtensors(ranks, case: Case) -> None:
    check(ranks, "adafactor", case)


@pytest.mark.parametrize("case", FSDP, ids=name_of)
def test_adafactor_under_fsdp2(ranks, case: Case) -> None:
    check(ranks, "adafactor", case)


@pytest.mark.parametrize("case", SOME, ids=name_of)
@pytest.mark.parametrize("which", ["adafactor, paper", *FAMILY, *MATRICES])
def test_its_family(ranks, which: str, case: Case) -> None:
    check(ranks, which, case, steps=MANY if case == SOME[0] else FEW)


EVERY_KIND = [*FEW_MESHES, *(replace(c, kind="dtensor") for c in CROSS[3::3]), *FSDP]


@pytest.mark.parametrize("case", EVERY_KIND, ids=name_of)
def test_muon_in_every_layout(ranks, case: Case) -> None:
    check(ranks, "muon", case, steps=MANY if case == SOME[0] else FEW)


@pytest.mark.parametrize("case", [Case(2, 2, 1), Case(4, kind="fsdp")], ids=name_of)
def test_muon_in_fp32(ranks, case: Case) -> None:
    """Gradients go home in fp32; updates, which are iterated in 16 bits, come back in those without loss."""
    check(ranks, "muon", case, dtype=torch.float32)


@pytest.mark.soak
@pytest.mark.parametrize("which", list(ADAFACTOR | FAMILY | MATRICES))
def test_ten_steps_in_every_layout(ranks, which: str) -> None:
    for case in (*CROSS, *(replace(c, kind="dtensor") for c in CROSS if c.num_ranks <= 8), *FSDP):
        check(ranks, which, case, steps=MANY)


@pytest.mark.parametrize("which", list(EIGHT_BITS))
def test_state_in_8_bits(ranks, which: str) -> None:
    for case in SOME:
        check(ranks, which, case, list(LARGE), steps=MANY if case == SOME[0] else FEW)


@pytest.mark.parametrize("which", list(ALL))
def test_state_goes_on_on_another_mesh(ranks, tmp_path: Path, which: str) -> None:
    """Rows and columns, accumulators and bytes: saved on data x row shards, loaded on others, and to one rank's end."""
    names, after = (list(LARGE), Case(4)) if which in EIGHT_BITS else (SEVERAL, Case(1, 2, 2, "dtensor"))
    arguments = (tmp_path, which, ALL[which], Case(2, 2, 1), after, names)
    assert max(ranks(4).run(difference_after_resharding, *arguments)) <= 1e-10


def test_a_missing_collective_is_seen(ranks) -> None:
    """The tests above can fail: where partial sums are not completed, they would."""
    for name, make in (ADAFACTOR | FAMILY).items():
        if name not in ("adamw8bit", "muon"):  # the one needs none, the other has a test of its own
            found = min(ranks(4).run(without_collectives, make, Case(2, 2, 1), ["matrix", "ragged_cube"]))
            assert found > 1e-3, name


MESSAGES = {"adafactor": 2, "lamb": 1, "lars": 1, "sm3": 1, "came": 3, "adamw8bit": 0}


def test_messages_of_a_step(ranks) -> None:
    """However many parameters: two messages of each process group for Adafactor, of the bytes that its sums have."""
    for name, num in MESSAGES.items():
        found = ranks(8).run(messages, (ADAFACTOR | FAMILY)[name], Case(2, 2, 2), SEVERAL)
        axes = ("dp_shard", "tp_row", "tp_col")
        for rank in found:
            assert {key: calls for key, (calls, _) in rank.items()} == {("all_reduce", a): num for a in axes if num}
    # A matrix [16, 32] on 2 x 2 ranks of tensor parallelism, its 8 rows again over 2 data shards.
    (found, *_) = ranks(8).run(messages, ADAFACTOR["adafactor"], Case(2, 2, 2), ["matrix"])
    rows, cols = 4, 16
    assert found["all_reduce", "tp_col"] == (2, 4 * (rows + 1 + 2))
    assert found["all_reduce", "tp_row"] == found["all_reduce", "dp_shard"] == (2, 4 * (cols + 1 + 2))


def test_what_muon_sends(ranks) -> None:
    """Of a matrix [16, 32] whose home has 8 of its rows: the others' gradient in fp32, their update in 16 bits."""
    found = ranks(2).run(messages, FAMILY["muon"], Case(2), ["matrix"])
    sent = [[key[0], *value] for rank in found for key, value in rank.items()]
    assert sorted(sent) == [["all_to_all", 2, 8 * 32 * 2], ["all_to_all", 2, 8 * 32 * 4]]


def test_what_is_not_cut_sends_nothing(ranks) -> None:
    assert ranks(8).run(messages, ADAFACTOR["adafactor"], Case(), NAMES) == [{}] * 8
