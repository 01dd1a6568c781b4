"""A machine that was measured: latencies and bandwidths from times, the file, and plans for it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from apps.llm.__main__ import APP
from core.auto.costs import COLLECTIVES, Link, seconds_of
from core.auto.measure import fit_link, measure
from core.auto.measured import MeasuredLink, MeasuredMachine, read_machine, write_machine
from core.auto.step_time import step_time
from core.config import UserError
from core.estimate import RunShape, decoder_shape
from core.models.shapes import SHAPES
from core.runtime import Runtime

CURVE = ((1e6, 1e9), (1e9, 4e9))
LINKS = (
    MeasuredLink("all_gather", 2, 1, 1e-4, 1e9),
    MeasuredLink("all_reduce", 2, 1, 3e-4, 1e9),
    MeasuredLink("all_reduce", 2, 2, 3e-4, 5e8),
    MeasuredLink("all_reduce", 4, 1, 2e-4, 7e8),
)
MACHINE = MeasuredMachine("cpu of 2 cores", "cpu", 2, 2**34, 1e10, 1e-5, 5e9, 4e9, {"fp32": CURVE}, LINKS)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("link", [Link(2e-5, 3e9), Link(0.0, 1e8), Link(1e-3, 5e10)])
def test_the_times_of_a_link_give_the_link(collective: str, link: Link) -> None:
    sizes = (1 << 12, 1 << 18, 1 << 24)
    found = fit_link(collective, 4, sizes, [seconds_of(collective, size, 4, link) for size in sizes])
    assert found.latency_s == pytest.approx(link.latency_s, rel=1e-6, abs=1e-12)
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-6)


def test_times_that_fall_with_the_size_give_no_latency_below_none() -> None:
    found = fit_link("all_reduce", 2, (1 << 10, 1 << 20), (1e-9, 1e-2))
    assert found.latency_s >= 0
    assert found.bytes_per_s > 0


def test_a_machine_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_machine(tmp_path / "here.json", MACHINE)
    assert read_machine(tmp_path / "here.json") == MACHINE


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"devices": 2', b'"devices": 3'))


def rewritten(**changed):
    return lambda path: write_machine(path, replace(MACHINE, **changed))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.unlink(), "cannot be read"),
        (damaged, "is damaged"),
        (lambda path: path.write_text("{"), "is damaged"),
        (lambda path: path.write_text(json.dumps({"plans": []})), "is damaged"),
        (rewritten(devices=0), "a number in it is not above 0 and finite"),
        (rewritten(memory_bytes_per_s=float("nan")), "a number in it is not above 0 and finite"),
        (rewritten(products={}), "it has no products"),
        (rewritten(products={"fp8": CURVE}), "it tells of fp8, which is not known here"),
        (rewritten(links=(MeasuredLink("shout", 2, 1, 0.0, 1.0),)), "it tells of shout"),
    ],
)
def test_a_file_of_no_machine_is_refused_in_a_line(tmp_path: Path, spoil, says: str) -> None:
    path = tmp_path / "here.json"
    write_machine(path, MACHINE)
    spoil(path)
    with pytest.raises(UserError, match=says) as refused:
        APP.dispatch(["plan", "--model", "gpt2_124m", "--gpus", "2", "--gpu", str(path), "--batch", "8"])
    assert "\n" not in str(refused.value)
    assert f"--measure{path}" in "".join(str(refused.value).split())  # a long path is wrapped


def test_ranks_share_what_there_is() -> None:
    two, four = MACHINE.cluster(2), MACHINE.cluster(4)
    assert (two.crowd, four.crowd) == (1.0, 2.0)
    assert four.memory_bytes == two.memory_bytes // 2
    model, run = decoder_shape(SHAPES["gpt2_124m"]), RunShape(sequence_length=128, dp_replicate=4)
    alone, crowded = (step_time(model, run, replace(four, devices=n)) for n in (4, 2))
    assert alone.shared_s == 0
    assert crowded.step_s - alone.step_s == pytest.approx(crowded.shared_s)
    assert crowded.shared_s > 0.9 * alone.compute_s
    staged = RunShape(sequence_length=128, pp=4)
    waits = step_time(model, staged, replace(four, devices=4))
    assert step_time(model, staged, replace(four, devices=2)).step_s < 1.1 * waits.step_s, "one stage works at a time"


def test_ranks_without_links_are_refused() -> None:
    with pytest.raises(UserError, match="2 ranks of a machine whose links nobody has measured; measure it anew"):
        replace(MACHINE, links=()).cluster(2)
    assert replace(MACHINE, links=()).cluster(1).crowd == 1


def test_an_axis_has_the_link_that_was_measured_in_its_crowd() -> None:
    four = MACHINE.cluster(4)
    assert four.link(1, 2).of("all_reduce") == Link(3e-4, 5e8)
    assert MACHINE.cluster(2).link(1, 2).of("all_reduce") == Link(3e-4, 1e9)
    assert four.link(1, 4).of("all_reduce") == Link(2e-4, 7e8)
    assert seconds_of("all_reduce", 1e6, 2, MACHINE.cluster(2).link(1, 2)) == 2 * 3e-4 + 1e6 / 1e9


def test_a_product_runs_as_fast_as_one_of_its_size() -> None:
    gpu = MACHINE.gpu()
    assert gpu.peak_flops(torch.float32) == 4e9
    assert gpu.peak_flops(torch.bfloat16) is None
    rates = [gpu.flops_per_s(torch.float32, flops) for flops in (1.0, 1e6, 1e9**0.5 * 1e3, 1e9, 1e15)]
    assert rates == pytest.approx([1e9, 1e9, 2e9, 4e9, 4e9], rel=1e-6)


def measured_here() -> MeasuredMachine:
    rank = dist.get_rank()
    return measure(Runtime(rank, rank, dist.get_world_size(), torch.device("cpu")), quick=True)


def test_two_ranks_measure_and_agree(ranks) -> None:
    first, second = ranks(2).run(measured_here)
    assert first == second
    assert {(link.collective, link.ranks, link.groups) for link in first.links} >= {
        ("all_reduce", 2, 1),
        ("send", 2, 1),
    }
    assert all(link.bytes_per_s > 1e6 for link in first.links)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--measure", "here.txt"], "measure=here.txt: a machine is a JSON file"),
        (["--measure", "here.json", "--zero", "1"], "--zero with --measure, which plans nothing"),
    ],
)
def test_what_does_not_go_with_measuring_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        APP.dispatch(["plan", *words])
    assert "\n" not in str(refused.value)
