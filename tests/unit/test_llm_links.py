"""`llm plan` of a link: forms of messages by a mean step, and what each is expected to cost with its source."""

from dataclasses import replace
from typing import Any

import pytest

from apps.llm import links
from apps.llm.__main__ import APP
from apps.llm.config import run_shape
from apps.llm.links import (
    NONE,
    Form,
    Penalty,
    forms,
    is_compared,
    local_steps,
    penalty_of,
    planned,
    ranked,
    whole_steps,
)
from apps.llm.plan_config import LLMPlanConfig
from apps.llm.recipes import RECIPES
from benchmarks.result import Measured, Number, Row, beginning, result_of, write
from core.estimate import Machine, decoder_shape, estimate_time, sent_bytes
from core.mesh import MeshConfig
from core.optim.build import OptimConfig
from core.parallel.compress import CommConfig
from core.parallel.local import LocalTrainingConfig
from core.parallel.local_steps import is_due
from tests.support import link_results

SLOW, FAST = Machine(1e14, bandwidth=12.5e6), Machine(1e14, bandwidth=float("inf"))


def a_run(**options: Any) -> LLMPlanConfig:
    """Of the debug recipe on eight ranks."""
    return LLMPlanConfig(**(vars(RECIPES["debug"]()) | {"nproc": 8, "steps": 100} | options))


def of(config: LLMPlanConfig, machine: Machine) -> dict[str, links.Planned]:
    found, _ = ranked(config, decoder_shape(config.model), machine)
    return {one.form.kind: one for one in found}


def test_a_slow_link_ranks_what_sends_less_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all is as published: that nothing takes more steps."""
    monkeypatch.setattr(links, "MEASURED", {})
    config = a_run(optim=OptimConfig("muon"))
    found, refused = ranked(config, decoder_shape(config.model), SLOW)
    known = [one for one in found if one.penalty is not None]
    assert found[: len(known)] == known  # what is not known stands behind
    assert [one.expected_s for one in known] == sorted(one.expected_s for one in known)
    assert known[0].form.kind == "MuLoCo"
    assert known[-1].form.kind in ("all-reduce", "ZeRO-1", "ZeRO-2", "ZeRO-3")
    assert "it sends the momenta of adam" in refused["1-bit Adam"]
    fast = of(config, FAST)
    assert {one.step_s for one in fast.values()} == {fast["all-reduce"].step_s}


def test_seconds_and_bytes_are_the_plans() -> None:
    """Of a form that sends all steps alike; and of signs, those of the mean step."""
    config, model = a_run(), decoder_shape(RECIPES["debug"]().model)
    found = of(config, SLOW)
    run = run_shape(replace(config, zero=0, comm=CommConfig("powersgd")))
    assert found["PowerSGD"].step_s == estimate_time(model, run, SLOW).step_s
    assert found["PowerSGD"].sent_bytes == sent_bytes(model, run)
    whole, signs = (
        sent_bytes(model, run_shape(replace(config, zero=0, comm=comm)))
        for comm in (CommConfig(), CommConfig("one_bit", start=10))
    )
    assert found["1-bit Adam"].sent_bytes == pytest.approx(0.1 * whole + 0.9 * signs)
    local = run_shape(replace(config, zero=0, local=LocalTrainingConfig(every=50)))
    assert found["DiLoCo"].sent_bytes == sent_bytes(model, local) == pytest.approx(whole / 50)
    assert found["all-reduce"].sent_bytes == whole


@pytest.mark.parametrize("start", [1, 3, 16])
@pytest.mark.parametrize("steps", [1, 2, 17, 100, 1001])
def test_whole_steps_are_counted(start: int, steps: int) -> None:
    config = a_run(zero=0, comm=CommConfig("zero_one", start=start), steps=steps)
    assert whole_steps(config) == sum(is_due(step, start) for step in range(steps))
    assert whole_steps(replace(config, comm=CommConfig("one_bit", start=start))) == min(start, steps)
    assert whole_steps(replace(config, comm=CommConfig())) == 0


@pytest.mark.parametrize("steps", [1, 20, 100, 1001])
@pytest.mark.parametrize("stop_after", [None, 19, 400])
def test_local_steps_send_nothing(steps: int, stop_after: int | None) -> None:
    """A mean step is of those whose gradients go whole, of sums in signs, and of steps without messages."""
    comm = CommConfig("zero_one", start=4, local_start=18, local_steps=5, local_each=3)
    config, model = a_run(zero=1, comm=comm, steps=steps, stop_after=stop_after), decoder_shape(a_run().model)
    last = min(steps, stop_after or steps)
    sums = [step >= 18 and (is_due(step - 18, 3, 5) or step == steps - 1) for step in range(last)]
    whole = [step < 18 and is_due(step, 4) for step in range(last)]
    assert local_steps(config) == max(0, last - 18) - sum(sums)
    each = sent_bytes(model, run_shape(config)), sent_bytes(model, run_shape(replace(config, comm=CommConfig())))
    found = planned(Form("0/1 Adam", 1, comm), config, model, SLOW)
    signs = sum(sums) + min(last, 18) - sum(whole)
    assert found.sent_bytes == pytest.approx((signs * each[0] + sum(whole) * each[1]) / last)
    assert found.step_s == pytest.approx(
        found.sent_bytes / SLOW.bandwidth + estimate_time(model, run_shape(config), FAST).step_s
    )


def test_a_penalty_is_that_of_the_nearest_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MEASURED", {("PowerSGD", 2): ("slow_links", 0.03), ("PowerSGD", 8): ("a", -0.02)})
    assert penalty_of("PowerSGD", 3) == Penalty(0.03, "benchmarks/results/slow_links.json, 2 workers")
    assert penalty_of("PowerSGD", 64) == Penalty(-0.02, "benchmarks/results/a.json, 8 workers")
    assert penalty_of("ZeRO-2", 64) == NONE
    assert penalty_of("random-k", 2) is None
    one = planned(Form("PowerSGD", 0, CommConfig("powersgd")), a_run(), decoder_shape(a_run().model), SLOW)
    assert one.expected_s == one.step_s * 0.98


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"zero": 2}, "ZeRO-2"),
        ({"zero": 0, "comm": CommConfig("powersgd", rank=8)}, "PowerSGD"),
        ({"zero": 3, "comm": CommConfig(weights="int4")}, "ZeRO++"),
        ({"zero": 2, "comm": CommConfig(gradients="int4", feedback=True)}, "ZeRO++ with feedback"),
        ({"zero": 0, "local": LocalTrainingConfig(every=7, bits=4, fragments=2)}, "Streaming DiLoCo"),
        ({"zero": 0, "mesh": MeshConfig(pp=2), "comm": CommConfig(activations="int8")}, "8-bit activations"),
    ],
)
def test_the_run_s_own_form_is_among_them(options: dict[str, Any], kind: str) -> None:
    config = a_run(**options)
    own, *others = forms(config)
    assert (own.kind, own.is_own) == (kind, True)
    assert own.of(config) == config
    assert len({form.options for form in (own, *others)}) == len(others) + 1


def test_what_does_not_go_is_named() -> None:
    config = a_run(zero=0, mesh=MeshConfig(pp=2))
    _, refused = ranked(config, decoder_shape(config.model), SLOW)
    assert "comm.compress=powersgd with mesh.pp=2" in refused["PowerSGD"]
    assert "ZeRO-3" not in refused


def test_forms_are_compared_where_a_link_or_a_form_is_given() -> None:
    assert not is_compared(a_run(), set())
    assert is_compared(a_run(), {"bandwidth_gb_s"})
    assert is_compared(a_run(zero=0, comm=CommConfig("powersgd")), set())
    assert not is_compared(a_run(nproc=1), {"bandwidth_gb_s"})


def test_the_command_prints_each_with_its_source(capsys) -> None:
    words = ["plan", "--recipe", "debug", "--nproc", "4", "--zero", "0", "--gpu", "A100", "--steps", "100"]
    assert APP.dispatch(words) == 0
    plain = capsys.readouterr().out
    assert "arXiv" not in plain
    assert APP.dispatch([*words, "--bandwidth-gb-s", "0.0125"]) == 0
    said = capsys.readouterr().out
    assert "over a link of 0.1 Gbit/s" in said
    assert "--zero 0 --comm.compress powersgd; benchmarks/results/slow_links.json, 4 workers" in said
    assert "--zero 0 --comm.compress top_k; Lin et al. 2018" in said
    assert "--zero 0; gradients go whole" in said
    assert "--comm.compress random_k; what it costs is not known" in said


def test_a_search_takes_messages_in_few_bits(capsys) -> None:
    """And says what they are expected to cost; with what they do not go with nothing is tried."""
    words = ["plan", "--recipe", "debug", "--gpus", "4", "--gpu", "l4", "--batch", "8", "--bandwidth-gb-s", "0.01"]
    assert APP.dispatch([*words, "--comm.compress", "powersgd", "--precision", "fp32"]) == 0
    said = capsys.readouterr().out
    assert "1: megalith llm pretrain --recipe debug --comm.compress powersgd" in said
    assert "PowerSGD (--zero" not in said.split("not known:")[1]
    expected = penalty_of("PowerSGD", 4)
    assert expected is not None
    assert f"expected to take {expected.share:+.1%} steps; {expected.source}" in " ".join(said.split())


MEASURED = [("all-reduce", 2, 800.0), ("PowerSGD", 2, 840.0), ("DiLoCo", 2, 760.0), ("2bw", 2, 1500.0)]


def test_what_is_measured_is_the_committed_result_s(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert link_results.between() == link_results.made()
    monkeypatch.setattr(link_results, "RESULTS", tmp_path)
    assert link_results.made() == ""
    rows = [
        Row({"from": "time to the loss", "form": form, "workers": n, "link": link}, {"steps": Number(steps, "")})
        for form, n, steps in MEASURED
        for link in ("none", "1 Gbit/s")
    ]
    write(result_of("slow_links", "links", "a command", Measured(tuple(rows)), beginning()), tmp_path)
    lines = ['    ("PowerSGD", 2): ("slow_links", 0.050),\n', '    ("MuLoCo", 2): ("slow_links", -0.050),\n']
    assert link_results.made() == "".join(lines)
    of_activations = [Row({"form": form}, {"steps": Number(s, "")}) for form, s in (("stages", 0.0), ("experts", 0.02))]
    made = result_of("coded_activations", "bits", "a command", Measured(tuple(of_activations)), beginning())
    write(made, tmp_path)
    assert link_results.made() == "".join([*lines, '    ("8-bit activations", 2): ("coded_activations", 0.020),\n'])
