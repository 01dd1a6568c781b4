"""Rules: what a strategy's ranks compute of their parts is, combined, what the operator computes of the whole."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.auto import rules
from core.auto.rule import Call, Rule, describe
from core.auto.rules import RULES, rule_of
from core.auto.specs import parse
from tests.support.one_process_mesh import faults
from tests.support.operators import NOTHING_TO_COMPARE, aten, case_of, cases, drawn, rule_of_case


def told(rule: Rule, mesh: tuple[int, ...]) -> set[str]:
    return {str(strategy) for strategy in rule.strategies(mesh)}


def test_every_rule_has_a_case() -> None:
    assert {str(op) for op, _, _ in cases()} >= RULES.keys() - NOTHING_TO_COMPARE


def test_every_rule_on_one_axis() -> None:
    """Of two ranks and of three: nothing divides by both."""
    wrong = [said for case in cases() for parts in (2, 3) for said in faults(rule_of_case(case), (parts,))]
    assert not wrong, "\n".join(wrong)


def test_a_sample_on_two_and_three_axes() -> None:
    wrong = [
        said
        for n, case in enumerate(cases())
        for mesh, every in (((2, 3), 13 + n % 7), ((2, 2, 2), 97 + n % 7))
        if len(mesh) == 2 or n % 6 == 0
        for said in faults(rule_of_case(case), mesh, every)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.soak
@pytest.mark.parametrize("mesh", [(4,), (2, 2), (2, 3), (3, 2), (2, 2, 2)], ids=str)
def test_every_rule_on_every_mesh(mesh: tuple[int, ...]) -> None:
    wrong, seen = [], 0
    for case in cases():
        rule = rule_of_case(case)
        seen += len(rule.strategies(mesh))
        wrong += faults(rule, mesh)
    print(f"{seen} strategies on {mesh}")
    assert not wrong, "\n".join(wrong[:20])


def test_strategies_of_a_product() -> None:
    rule = rule_of_case(case_of(aten.mm.default))
    assert told(rule, (2,)) == {
        "RR, RR -> RR",
        "S0R, RR -> S0R",  # rows of the first: data parallel
        "RR, RS0 -> RS0",  # columns of the second: Megatron's column parallel
        "RS0, S0R -> RR{0}",  # the dim between: row parallel
        "RR{0}, RR -> RR{0}",
        "RR, RR{0} -> RR{0}",
    }
    two = told(rule, (2, 2))
    assert {"S01R, RR -> S01R", "S10R, RR -> S10R", "S0R, RS1 -> S0S1", "S0S1, S1R -> S0R{1}"} <= two
    # Six ways on either axis; cut by both, a letter is cut in either order, but 3 columns have no 4 parts.
    assert len(two) == 6 * 6 + 3 - 2


def test_what_is_not_linear_is_not_partial() -> None:
    for op, given in ((aten.gelu.default, [drawn(3, 5)]), (aten.add.Tensor, [drawn(3, 5), 1e-6])):
        assert not any("{" in one for one in told(rule_of(op, given, {}, op(*given)), (2,)))
    assert "RR{0}, RR{0} -> RR{0}" in told(rule_of_case((aten.add.Tensor, [drawn(3, 5), drawn(3, 5)], {})), (2,))


def test_a_bias_is_added_once() -> None:
    case = case_of(aten.addmm.default)
    assert "R{0}, RS0, S0R -> RR{0}" in told(rule_of_case(case), (2,))
    assert not any(one.startswith("R, RS0") for one in told(rule_of_case(case), (2,)))


def test_a_view_is_cut_by_its_first_letter_into_equal_parts() -> None:
    def view(before: list[int], after: list[int], mesh: int) -> set[str]:
        return told(rule_of_case((aten.view.default, [drawn(*before), after], {})), (mesh,))

    assert "S0RR -> S0R" in view([4, 5, 6], [20, 6], 2)
    assert not {
        one for one in view([4, 5, 6], [20, 6], 2) if one.startswith("RS0R")
    }  # rows between: of every row a part
    assert "RRS0 -> RS0" in view([4, 5, 6], [20, 6], 2)
    assert not {one for one in view([3, 5], [15], 2) if "S" in one}  # 2 + 1 rows of 5 are not 8 + 7
    assert "RS0 -> RS0R" in view([5, 12], [5, 4, 3], 2)  # heads


def test_shards_that_leave_a_rank_without_rows_do_not_exist() -> None:
    rule = rule_of_case((aten.neg.default, [drawn(5)], {}))
    assert "S0 -> S0" in told(rule, (3,))
    assert told(rule, (4,)) == {"R -> R", "R{0} -> R{0}"}  # 2, 2, 1, 0


def test_norm_over_rows_of_several_ranks_talks() -> None:
    rule = rule_of_case(case_of(aten._native_batch_norm_legit_functional.default))
    cut = next(s for s in rule.strategies((2,)) if s.inputs[0] == parse("S0RR"))
    assert [(message.axes, message.elements) for message in cut.messages] == [((0,), 3), ((0,), 3)]
    assert not next(s for s in rule.strategies((2,)) if s.inputs[0] == parse("RS0R")).messages


def test_operators_without_a_rule_run_whole() -> None:
    for op in (aten.native_dropout.default, aten.linalg_inv_ex.default):
        given = [drawn(6, 6)] if "inv" in str(op) else [drawn(6, 6), 0.5, True]
        assert all("S" not in one and "{" not in one for one in told(rule_of(op, given, {}, op(*given)), (2,)))


# --- mutations --------------------------------------------------------------------------------------------------------


def _partial_gelu() -> Rule:
    given = drawn(3, 5)
    op = aten.gelu.default
    return describe(Call.of(op, [given], {}, op(given)), {"self": "a b"}, "a b", linear=("self",))


def _bias_on_every_rank() -> Rule:
    return replace(rule_of_case(case_of(aten.addmm.default)), added=frozenset())


def _mean_of_means() -> Rule:
    rule = rule_of_case(case_of(aten.mean.default))
    return replace(rule, run=lambda parts, here: rule.call(parts))


def _softmax_alone() -> Rule:
    return replace(rule_of_case(case_of(aten._softmax.default)), talk=None)


def _batch_norm_alone() -> Rule:
    return replace(
        rule_of_case(case_of(aten._native_batch_norm_legit_functional.default)), talk=None, whole=frozenset()
    )


def _vocabulary_without_its_place() -> Rule:
    rule = rule_of_case(case_of(aten.embedding.default))
    return replace(rule, run=lambda parts, here: parts[0][parts[1] % len(parts[0])])


def _causal_rows() -> Rule:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    rule = rule_of_case(case_of(forward, lambda case: case[1][-1] is True))
    return replace(rule, whole=rule.whole - {"l"})


def _linear_in_both() -> Rule:
    return replace(rule_of_case(case_of(aten.mm.default)), linear=(frozenset((0, 1)),))


def _bias_gradient_over_channels() -> Rule:
    rule = rule_of_case(case_of(aten.convolution_backward.default))
    return replace(rule, reads=(frozenset(range(3)),) * 3)


def _put_added_on_every_rank() -> Rule:
    return replace(rule_of_case(case_of(aten.index_put.default, lambda case: case[1][3] is True)), added=frozenset())


def _written_where_another_rank_writes() -> Rule:
    return replace(rule_of_case(case_of(aten.index_put.default, lambda case: not case[1][3])), whole=frozenset())


def _moments_by_running_ones() -> Rule:
    rule = rule_of_case(case_of(aten.native_batch_norm_backward.default))
    return replace(rule, talk=None)


@pytest.mark.parametrize(
    "broken",
    [
        _put_added_on_every_rank,
        _written_where_another_rank_writes,
        _moments_by_running_ones,
        _partial_gelu,
        _bias_on_every_rank,
        _mean_of_means,
        _softmax_alone,
        _batch_norm_alone,
        _vocabulary_without_its_place,
        _causal_rows,
        _linear_in_both,
        _bias_gradient_over_channels,
    ],
)
def test_a_rule_that_is_wrong_is_seen(broken: Callable[[], Any]) -> None:
    assert list(faults(broken(), (2,)))


def test_torch_still_says_what_is_pointwise() -> None:
    assert rules.is_pointwise(aten.gelu.default)
    assert rules.is_pointwise(aten.add.Tensor)
    assert not rules.is_pointwise(aten.native_dropout.default)
    assert not rules.is_pointwise(aten.add_.Tensor)
    assert not rules.is_pointwise(torch.ops.aten.mm.default)
