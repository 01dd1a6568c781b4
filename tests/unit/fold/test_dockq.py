"""DockQ equals what DockQ 2.1.3 gives (tests/support/dockq_numbers.py), and what is missing is said in a line."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apps.fold.dockq import DockQ, _Pairs, dockq
from apps.fold.evaluate import main
from apps.fold.features.sequences import chain_id
from apps.fold.features.structures import Chain, read_structure
from core.config import UserError
from tests.support.dockq_numbers import NUMBERS, PROBLEMS, VERSION, write_problem

NAMES = {
    "DockQ": "dockq",
    "iRMSD": "irmsd",
    "LRMSD": "lrmsd",
    "F1": "f1",
    "nat_total": "contacts",
    "fnat": "fnat",
    "fnonnat": "fnonnat",
    "clashes": "clashes",
}


def _score(folder: Path, name: str) -> DockQ:
    problem = PROBLEMS[name]
    files = write_problem(problem, folder)
    predicted, reference = (read_structure(path, hetero=False) for path in files)
    return dockq(predicted, [chain for chain in reference if chain.name in (problem.named or "ABCDEF")], files)


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_it_is_that_of_the_original(name: str, tmp_path: Path) -> None:
    """To the rounding of coordinates in fp32, in which the original superposes."""
    written = json.loads(NUMBERS.read_text())
    assert written["version"] == VERSION
    wanted, found = written["problems"][name], _score(tmp_path, name)
    assert found.chains == wanted["chains"]
    assert found.dockq == pytest.approx(wanted["whole"], abs=1e-5)
    assert {"".join(one.reference) for one in found.interfaces} == set(wanted["interfaces"])
    for one in found.interfaces:
        numbers = wanted["interfaces"]["".join(one.reference)]
        assert one.predicted == (numbers.pop("chain1"), numbers.pop("chain2"))
        for key, value in numbers.items():
            assert getattr(one, NAMES[key]) == pytest.approx(value, rel=1e-5, abs=1e-4), key


def test_the_best_of_all_assignments_is_found(tmp_path: Path) -> None:
    """What the bound leaves aside is no better: beside all permutations of chains that are equal, one by one."""
    files = write_problem(PROBLEMS["of three that are equal"], tmp_path)
    predicted, reference = (read_structure(path) for path in files)
    found = dockq(predicted, reference, files)
    names = [chain.name for chain in reference]
    letters = [chr(ord("A") + number) for number in range(3)]
    sums = {order: _sum_of(predicted, reference, order, files) for order in itertools.permutations(letters)}
    best = max(sums, key=lambda order: sums[order])
    assert len(set(sums.values())) == len(sums), "assignments differ"
    assert found.chains == dict(zip(names, best))


def _ring(num: int) -> list[Chain]:
    """Equal chains of four residues, each of which touches its two neighbours."""
    found = []
    for number in range(num):
        positions, mask = np.zeros((4, 37, 3), np.float32), np.zeros((4, 37), np.float32)
        angle = 2 * np.pi * number / num
        place = 4 / (2 * np.sin(np.pi / num)) * np.array([np.cos(angle), np.sin(angle), 0])
        for slot, shift in enumerate(((0, 0, 1), (0, 0, 2), (0, 0, 3))):
            positions[:, slot], mask[:, slot] = place + 4 * np.arange(4)[:, None] * (0, 0, 1) + shift, 1
        found.append(Chain(chain_id(number + 1), "GAGA", tuple("1234"), positions, mask, np.zeros(4, np.float32)))
    return found


@pytest.fixture
def drawn_scores(monkeypatch) -> Callable[[tuple[int, int], tuple[int, int]], float]:
    """DockQ of two chains as the other two, low as in a bad prediction, of which only some thousands may be asked."""
    scores, asked = 0.1 * np.random.default_rng(0).random((12, 12, 13, 13)) ** 2, itertools.count()

    def score(ends: tuple[int, int], two: tuple[int, int]) -> float:
        return float(scores[(*ends, *two)])

    def counted(pairs: object, ends: tuple[int, int], two: tuple[int, int]) -> float:
        assert next(asked) < 20_000, "assignments are looked at without end"
        return score(ends, two)

    monkeypatch.setattr(_Pairs, "score", counted)
    return score


def test_of_drawn_scores_the_best_assignment_is_found(drawn_scores) -> None:
    """Beside all permutations; one more chain was predicted than there are."""
    files = Path("p.cif"), Path("r.cif")
    found = dockq(_ring(7), _ring(6), files)
    touching = [(number, number + 1) for number in range(5)] + [(0, 5)]
    sums = {
        order: sum(drawn_scores(ends, (order[ends[0]], order[ends[1]])) for ends in touching)
        for order in itertools.permutations(range(7), 6)
    }
    best = max(sums, key=lambda order: sums[order])
    assert found.certain
    assert [*found.chains.values()] == [chain_id(number + 1) for number in best]


def test_a_dozen_equal_chains_that_lie_wrong_are_scored_and_what_lacks_one_is_refused(
    drawn_scores, monkeypatch
) -> None:
    found = dockq(_ring(12), _ring(12), (Path("p.cif"), Path("r.cif")))
    assert sorted(found.chains.values()) == sorted(found.chains)
    assert found.certain
    assert "p.cif has no chain left" in _refused(_ring(11), _ring(12))
    with monkeypatch.context() as few:
        few.setattr("apps.fold.dockq._LOOKED_AT", 20)
        cut = dockq(_ring(12), _ring(12), (Path("p.cif"), Path("r.cif")))
    assert not cut.certain
    assert sorted(cut.chains.values()) == sorted(cut.chains)


def _sum_of(predicted: list[Chain], reference: list[Chain], order: tuple[str, ...], files: tuple[Path, Path]) -> float:
    """Of one assignment: letters are changed so that no other is possible."""
    by_name = {chain.name: chain for chain in predicted}
    marked = [(_marked(by_name[name], i), _marked(chain, i)) for i, (name, chain) in enumerate(zip(order, reference))]
    found = dockq([mine for mine, _ in marked], [theirs for _, theirs in marked], files)
    return sum(one.dockq for one in found.interfaces)


def _marked(chain: Chain, number: int) -> Chain:
    """With another first letter, which says which chain it is."""
    letters = list(chain.sequence)
    letters[0] = "WHY"[number]
    return replace(chain, sequence="".join(letters))


def _refused(predicted: list[Chain], reference: list[Chain]) -> str:
    with pytest.raises(UserError) as error:
        dockq(predicted, reference, (Path("p.cif"), Path("r.cif")))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_chains_that_are_missing_or_wrong_are_named(tmp_path: Path) -> None:
    predicted, reference = map(read_structure, write_problem(PROBLEMS["of three that are equal"], tmp_path))
    assert "no chain left with the sequence of chain A of r.cif (it has A, B)" in _refused(predicted[:2], reference)
    other = _marked(reference[1], 0)
    assert "sequence of chain B of r.cif" in _refused(predicted, [reference[0], other])
    apart = replace(reference[1], positions=reference[1].positions + np.float32(500))
    assert "no two chains of r.cif have atoms within 5 Angstrom" in _refused(predicted, [reference[0], apart])


def test_the_command_tells_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predicted, reference = write_problem(PROBLEMS["a chain more"], tmp_path)
    out = tmp_path / "scores.json"
    files = ["--predicted", str(predicted), "--reference", str(reference)]
    assert main([*files, "--chain", "A", "B", "--out", str(out)]) == 0
    written, said = json.loads(out.read_text()), capsys.readouterr().out
    wanted = json.loads(NUMBERS.read_text())["problems"]["a chain more"]["whole"]
    assert written["complex"]["dockq"] == pytest.approx(wanted, abs=1e-5)
    assert f"{wanted:.4f}" in said
    assert main([*files, "--chain", "A", "--out", str(out)]) == 0
    assert "complex" not in json.loads(out.read_text()), "a chain alone has no interface"
    for chains, word in ((["A", "Q"], "no protein chain Q"), (["A", "A"], "twice")):
        with pytest.raises(UserError, match=word):
            main([*files, "--chain", *chains])
