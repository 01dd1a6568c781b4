"""Paths between sharding specs: the published heuristic step by step, and that no path is cheaper than the cheapest."""

import itertools
import math

import pytest
import torch

from core.auto.conversion import FREE, Path, cheapest, distance, greedy, main, one_step, paths_from
from core.auto.costs import Link, seconds_of
from core.auto.specs import Spec, all_specs, parse
from core.config import UserError, run_command

BYTES = (Link(0.0, 1.0),)
"""A second for each byte."""
UNLIKE = (Link(3.0, 1.0), Link(0.5, 8.0), Link(0.0, 2.0))
SHAPES = {1: (24,), 2: (24, 24), 3: (24, 24, 24)}
UNEVEN = {1: (7,), 2: (7, 3), 3: (7, 3, 2)}
MESHES = ((2, 2), (2, 3), pytest.param((2, 2, 2), marks=pytest.mark.soak))


def path(way, source: str, target: str, sizes: tuple[int, ...] = (2, 2), links=BYTES, shape=None) -> Path:
    dims = len(parse(source).dims)
    return way(parse(source), parse(target), shape or SHAPES[dims], 1, sizes, links)


# --- the published heuristic ------------------------------------------------------------------------------------------

CANDIDATES = {
    "S01RR": {"S0RR", "S0RS1", "S0S1R"},
    "S0RR": {"RRR", "S0S1R", "S0RS1", "RS0R", "RRS0"},
    "RS0R": {"RRR", "RS01R", "S1S0R", "RS0S1", "S0RR", "RRS0"},
}
"""Published: the one-step transforms on the way from S01RR to RS01R. The second row leaves S01RR out, where the path
comes from; the third row has S0RR, where it comes from."""


@pytest.mark.parametrize("source", CANDIDATES)
def test_one_step_transforms_are_the_published(source: str) -> None:
    found = [str(step.target) for step in one_step(parse(source), 2)]
    assert len(found) == len(set(found))
    assert set(found) == CANDIDATES[source] | ({"S01RR"} if source == "S0RR" else set())


@pytest.mark.parametrize(
    "published",
    ["S01RR -> S0RR -> RS0R -> RS01R", "RS01R -> RS0R -> S0RR -> S01RR"],
)  # fmt: skip
@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (4, 4)])
def test_the_greedy_path_is_the_published(published: str, sizes: tuple[int, ...]) -> None:
    specs = published.split(" -> ")
    assert str(path(greedy, specs[0], specs[-1], sizes)) == published


def test_each_choice_is_the_published() -> None:
    target = parse("RS01R")
    for source, best in (("S01RR", "S0RR"), ("S0RR", "RS0R"), ("RS0R", "RS01R")):
        nearest = min(CANDIDATES[source], key=lambda spec: distance(parse(spec), target))
        assert nearest == best


def test_distances_are_the_published_table() -> None:
    """Of one dim on two axes: a gather 20, a split 5, a step between 6."""
    names = ("R", "S0", "S1", "S01")
    table = {
        "R": (0, 5, 5, 16),
        "S0": (20, 0, 31, 5),
        "S1": (20, 31, 0, 42),
        "S01": (46, 20, 57, 0),
    }
    assert {s: tuple(distance(parse(s), parse(t)) for t in names) for s in names} == table
    assert distance(parse("S01RR"), parse("RS01R")) == 46 + 16


def test_steps_name_what_they_do() -> None:
    steps = {str(step.target): (step.operation, step.axis) for step in one_step(parse("S01R{2}"), 3)}
    assert steps == {
        "S0R{2}": ("all_gather", 1),
        "S0S1{2}": ("all_to_all", 1),
        "S01R": ("all_reduce", 2),
        "S012R": ("reduce_scatter", 2),
        "S01S2": ("reduce_scatter", 2),
    }
    into = {str(step.target): step.operation for step in one_step(parse("S0R"), 2, into=(0, 1))}
    assert into["RR{0}"] == into["S0R{1}"] == "embed"
    assert into["S01R"] == into["S0S1"] == "split"


# --- costs ------------------------------------------------------------------------------------------------------------


def test_each_step_costs_its_closed_form() -> None:
    """On 2 x 4 ranks, b bytes of the whole."""
    b = math.prod(SHAPES[2]) * 1
    costs = {
        ("S01R", "S0R"): b / 2 * 3 / 4,
        ("S0R", "RR"): b / 2,
        ("S0R", "RS0"): b / 4,
        ("S01R", "S0S1"): b / 2 * 3 / 16,
        ("RR", "S1R"): 0,
        ("RR{1}", "RR"): 2 * b * 3 / 4,
        ("RR{1}", "S1R"): b * 3 / 4,
        ("S0R{1}", "S01R"): b / 2 * 3 / 4,
    }
    for (source, target), seconds in costs.items():
        (step,) = [step for step in one_step(parse(source), 2) if step.target == parse(target)]
        assert step.bytes_sent(SHAPES[2], 1, (2, 4)) == seconds, (source, target)
        assert path(greedy, source, target, (2, 4)).seconds == seconds
        assert path(cheapest, source, target, (2, 4)).seconds <= seconds


def test_uneven_shards_travel_padded() -> None:
    """Seven rows over three ranks are 3, 3 and 1; a gather brings nine, an exchange what the first rank has."""
    sizes = (3,)
    assert path(cheapest, "S0", "R", sizes, shape=(7,)).seconds == 9 * 2 / 3
    assert path(cheapest, "S0R", "RS0", sizes, shape=(7, 2)).seconds == 3 * 2 * 2 / 3
    assert path(cheapest, "R{0}", "S0", sizes, shape=(7,)).seconds == 9 * 2 / 3


def test_axes_change_places_by_the_cheapest_legal_path() -> None:
    """Published converters replicate; a second dim spares one of the gathers, a third both."""
    b = {dims: math.prod(shape) for dims, shape in SHAPES.items()}
    assert path(cheapest, "S01", "S10").bytes_sent == 3 / 4 * b[1]
    assert path(cheapest, "S01R", "S10R").bytes_sent == 5 / 8 * b[2]
    assert path(cheapest, "S01RR", "S10RR").bytes_sent == 1 / 2 * b[3]
    assert path(greedy, "S01RR", "S10RR").bytes_sent == 3 / 4 * b[3]


def test_partial_sums() -> None:
    assert [step.operation for step in path(cheapest, "RR{0}", "S0R").steps] == ["reduce_scatter"]
    # What is to stay partial is not added up.
    assert [step.operation for step in path(cheapest, "RR{0}", "S1R{0}").steps] == ["split"]
    # Half of the sum on half of the ranks, and a gather over the others, is less than all of it on all.
    assert str(path(cheapest, "RR{1}", "RR", (2, 4))) == "RR{1} -> S0R{1} -> S0R -> RR"
    # The sum of a piece is half of a sum; the heuristic takes the long step first.
    assert str(path(cheapest, "RR{0}", "S1R")) == "RR{0} -> S1R{0} -> S1R"
    assert path(greedy, "RR{0}", "S1R").bytes_sent == 2 * path(cheapest, "RR{0}", "S1R").bytes_sent
    for source in ("RR", "S0R"):
        assert path(cheapest, source, "RR{0}").seconds == 0
    assert path(cheapest, "RR{0}", "RR{0}").steps == path(greedy, "RR{0}", "RR{0}").steps == ()


def test_the_path_says_what_it_holds() -> None:
    assert path(cheapest, "S0R", "S1R").largest_bytes == 576
    assert path(cheapest, "S0R", "RS0").largest_bytes == 288


def pairs(num_dims: int, num_axes: int) -> list[tuple[Spec, Spec]]:
    return list(itertools.product(all_specs(num_dims, num_axes, partial=True), repeat=2))


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_the_greedy_path_arrives_and_is_never_cheaper(sizes: tuple[int, ...], num_dims: int) -> None:
    for source, target in pairs(num_dims, len(sizes)):
        given = source, target, UNEVEN[num_dims], 2, sizes, UNLIKE[: len(sizes)]
        found, best = greedy(*given), cheapest(*given)
        for way in (found, best):
            specs = [source, *(step.target for step in way.steps)]
            assert specs[-1] == target
            assert specs[:-1] == [step.source for step in way.steps]
            assert len(set(specs)) == len(specs)
        assert best.seconds <= found.seconds + 1e-9, f"{source} to {target}"


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize(("num_dims", "links"), [(2, BYTES), (3, UNLIKE)])
def test_no_path_is_cheaper_than_the_cheapest(sizes: tuple[int, ...], num_dims: int, links: tuple[Link, ...]) -> None:
    """Floyd and Warshall's algorithm over all pairs, from the costs of the steps alone."""
    specs, shape = all_specs(num_dims, len(sizes), partial=True), UNEVEN[num_dims]
    place = {spec: index for index, spec in enumerate(specs)}
    links = links * len(sizes) if len(links) == 1 else links[: len(sizes)]
    least = torch.full((len(specs),) * 2, math.inf, dtype=torch.float64)
    least.fill_diagonal_(0)
    for spec in specs:
        for step in one_step(spec, len(sizes)):
            seconds = 0.0
            if step.operation not in FREE:
                full = step.full_bytes(shape, 2, sizes)
                seconds = seconds_of(step.operation, full, sizes[step.axis], links[step.axis])
            least[place[spec], place[step.target]] = seconds
    for middle in range(len(specs)):
        least = torch.minimum(least, least[:, middle, None] + least[middle])
    for spec in specs:
        found = paths_from(spec, shape, 2, sizes, links)
        row = torch.tensor([found[other].seconds if other in found else math.inf for other in specs]).double()
        torch.testing.assert_close(row, least[place[spec]], rtol=1e-6, atol=1e-6)


# --- refusals and the command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [greedy, cheapest])
def test_what_cannot_lie_so_is_refused(way) -> None:
    for source, target, sizes, links, says in (
        ("S0R", "RS2", (2, 2), BYTES, "RS2 names axis 2 of the mesh 2x2"),
        ("S0R", "R", (2, 2), BYTES, "R is of 1 dims and the tensor 24x24 has 2"),
        ("S0R", "RR", (2, 2), BYTES * 3, "3 links for a mesh of 2 axes; give one for each, or one for all"),
    ):
        with pytest.raises(UserError, match=says):
            path(way, source, target, sizes, links)


def test_the_command_prints_both_paths(capsys) -> None:
    assert run_command(main, ["S01RR", "RS01R", "--mesh", "2x4", "--shape", "512x512x64", "--itemsize", "4"]) == 0
    printed = capsys.readouterr().out
    assert "S01RR to RS01R: 4 x 512x512x64 bytes on 2x4 ranks" in printed
    assert "greedy: S01RR -> S0RR -> RS0R -> RS01R" in printed
    assert "cheapest: S01RR -> " in printed
    assert "all_gather     axis 1" in printed
    assert run_command(main, ["S(0)S(0)", "RS01", "--mesh", "2x4", "--shape", "8x8", "--link", "0:1e9"]) == 0
    assert "S01R to RS01" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["S0X", "RR", "--mesh", "2x2"], "'S0X' is no sharding spec"),
        (["S0R", "RRR", "--mesh", "2x2"], "'RRR' is of 3 dims, and the tensor has 2"),
        (["S0R", "RR", "--mesh", "2xx"], "--mesh 2xx: give positive whole numbers with x between them"),
        (["S0R", "RR", "--mesh", "2x0"], "--mesh 2x0: give positive whole numbers"),
        (["S0R", "RR", "--mesh", "2x2", "--link", "fast"], "--link fast: give seconds and bytes a second"),
        (["S0R", "RR", "--mesh", "2x2", "--link", "0:nan"], "bytes_per_s=nan of a link"),
        (["S0R", "RR", "--mesh", "2x2", "--itemsize", "0"], "--itemsize 0: an element has at least 1 byte"),
        (["S(0)R", "RR", "--mesh", "2x2"], "say also how many dims the tensor has"),
    ],
)
def test_the_command_refuses_in_one_line(argv: list[str], says: str, capsys) -> None:
    assert run_command(main, argv) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert says in told
    assert told.count("\n") == 1
