"""The benchmark of searches, with tools that only wait."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from apps.fold.search.database import Database, Shard
from apps.fold.search.hits import Hit
from apps.fold.search.jobs import SearchedDatabase
from benchmarks.msa import Round, Timed, _row, _targets, one_round
from core.config import UserError


@dataclass(frozen=True)
class _Waits:
    """Finds one hit after `seconds`: the same each time, or one of another name where it is `fickle`."""

    seconds: float
    fickle: bool = False
    calls: list[int] = field(default_factory=list, hash=False, compare=False)

    def depends_on(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def search(self, sequence: str, database: Database, shard: Shard, scratch: Path) -> list[Hit]:
        time.sleep(self.seconds)
        self.calls.append(shard.number)
        if not sequence:
            raise UserError("out of luck")
        return [Hit(f"hit{len(self.calls) * self.fickle}", sequence, 1.0)]


def _sources(folder: Path, *tools: _Waits) -> list[SearchedDatabase]:
    shards = tuple(Shard(folder, number, 2, folder) for number in range(2))
    return [
        SearchedDatabase(Timed(tool), Database(f"db{number}", folder, "", 0, shards))
        for number, tool in enumerate(tools)
    ]


def test_a_round_searches_all_twice_and_times_each(tmp_path: Path) -> None:
    tools = _Waits(0.2), _Waits(0.6)
    found = one_round("MKT", _sources(tmp_path, *tools), tmp_path, 4)
    assert [len(tool.calls) for tool in tools] == [4, 4]
    assert len(found.alone) == len(found.beside) == 4
    assert max(found.beside) <= found.wall < sum(found.alone)
    assert found.identical
    assert not one_round("MKT", _sources(tmp_path, _Waits(0.0, fickle=True)), tmp_path, 2).identical
    with pytest.raises(UserError, match="out of luck"):
        one_round("", _sources(tmp_path, _Waits(0.0)), tmp_path, 2)


def test_ratios_are_of_one_round() -> None:
    rounds = [Round([1.0, 2.0], [1.0, 2.5], 2.5, True), Round([10.0, 4.0], [12.0, 4.0], 15.0, True)]
    assert [target.reached for target in _targets("set", rounds)] == pytest.approx(
        [(1.15 + 1.15 * 12 / 15) / 2, (1.15 * 2 / 2.5 + 1.15 * 10 / 15) / 2]
    )
    numbers = {name: number.value for name, number in _row("set", rounds, 7).numbers.items()}
    assert numbers["wall/longest"] == pytest.approx((1 + 15 / 12) / 2)
    assert numbers["one_at_a_time_s"] == pytest.approx((3 + 14) / 2)
