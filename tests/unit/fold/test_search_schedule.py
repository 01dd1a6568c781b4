"""The schedule of searches on nodes that only exist here: what goes where, what a lost node costs, what fails."""

import random
from collections.abc import Hashable, Iterable, Mapping

import pytest

from apps.fold.search.program import Killed
from apps.fold.search.schedule import ATTEMPTS, Outcome, Threads, run_all
from core.config import UserError

Job = tuple[int, int]  # a sequence and the shard that it is searched in
NODES = {"a": 2, "b": 2, "c": 1}


class Pretended:
    """Nodes whose searches end one at a time, the oldest first, or as they are drawn.

    fate  number of an attempt, from 0 -> its outcome, or the node that dies then with all that runs on it
    """

    def __init__(
        self,
        nodes: Mapping[str, int] = NODES,
        held: Mapping[str, set[int]] | None = None,
        most: float = 99,
        draw: random.Random | None = None,
    ):
        self.nodes, self.held, self.most, self.draw = dict(nodes), held, most, draw
        self.begun: list[tuple[Job, str]] = []
        self.fate: dict[int, Outcome | str] = {}
        self.running: list[int] = []
        self.late: dict[str, int] = {}
        self.at_once = 0
        self.stopped = False

    def places(self) -> Mapping[str, int]:
        return self.nodes

    def part(self, job: Job) -> Hashable:
        return job[1]

    def holds(self, node: str, part: Hashable) -> bool:
        return self.held is None or part in self.held[node]

    def begin(self, job: Job, node: str) -> Hashable:
        assert node in self.nodes
        self.begun.append((job, node))
        self.running.append(len(self.begun) - 1)
        on_node = sum(self.begun[number][1] == node for number in self.running)
        assert on_node <= self.nodes[node], f"{node} has {self.nodes[node]} places"
        self.at_once = max(self.at_once, len(self.running))
        return len(self.begun) - 1

    def ended(self) -> Iterable[tuple[Hashable, Outcome]]:
        if not self.running:
            self.nodes |= self.late
            self.late = {}
            return []
        number = self.draw.choice(self.running) if self.draw else self.running[0]
        fate = self.fate.get(number, Outcome())
        if isinstance(fate, Outcome):
            self.running.remove(number)
            return [(number, fate)]
        del self.nodes[fate]
        dead = [one for one in self.running if self.begun[one][1] == fate]
        self.running = [one for one in self.running if one not in dead]
        return [(one, Outcome(lost=f"node {fate} died")) for one in dead]

    def expects(self) -> bool:
        return bool(self.late)

    def nowhere(self, job: Job) -> str:
        return f"no node holds shard {job[1]}"

    def stop(self) -> None:
        self.stopped = True


JOBS = [(sequence, shard) for sequence in range(6) for shard in range(5)]


def run(machines: Pretended, jobs: list[Job] = JOBS) -> dict[Job, str]:
    ended = list(run_all(jobs, machines))
    assert machines.stopped
    assert sorted(job for job, _ in ended) == sorted(jobs), "every job ends once"
    return {job: reason for job, reason in ended if reason}


def nodes_of(machines: Pretended) -> dict[int, set[str]]:
    """shard -> the nodes that read it."""
    return {shard: {node for (_, read), node in machines.begun if read == shard} for shard in range(5)}


def test_every_job_runs_once_on_a_node_that_has_a_place() -> None:
    machines = Pretended()
    assert run(machines) == {}
    assert sorted(job for job, _ in machines.begun) == JOBS
    assert machines.at_once == sum(NODES.values())
    few = Pretended(most=2)
    assert run(few) == {}
    assert few.at_once == 2


def test_one_node_takes_jobs_in_their_order() -> None:
    machines = Pretended({"a": 3})
    assert run(machines) == {}
    assert [job for job, _ in machines.begun] == JOBS


def test_a_shard_stays_where_it_is_read_and_no_node_waits_for_that() -> None:
    for seed in range(3):
        machines = Pretended({"a": 1, "b": 2}, draw=random.Random(seed))
        assert run(machines, [(sequence, shard) for sequence in range(20) for shard in range(5)]) == {}
        del machines.begun[-20:]  # in the end a node that has nothing left helps the other
        assert sum(map(len, nodes_of(machines).values())) <= 8, "of ten, were shards read wherever there is a place"
    shared = Pretended()
    assert run(shared, [(sequence, 0) for sequence in range(9)]) == {}
    assert nodes_of(shared)[0] == set(NODES), "a single shard is read by all rather than that nodes wait"


def test_a_shard_is_read_where_it_is() -> None:
    held = {"a": {0, 1}, "b": {1, 2, 3}, "c": {0, 4}}
    machines = Pretended(held=held)
    assert run(machines) == {}
    assert all(shard in held[node] for (_, shard), node in machines.begun)
    assert nodes_of(machines)[4] == {"c"}


def test_what_no_node_holds_fails_and_the_others_go_on() -> None:
    machines = Pretended(held={"a": {0, 1}, "b": {1, 2}, "c": {0}})
    failed = run(machines)
    assert failed == {job: f"no node holds shard {job[1]}" for job in JOBS if job[1] in (3, 4)}


def test_a_node_that_dies_loses_nothing() -> None:
    machines = Pretended()
    machines.fate = {7: "a"}
    assert run(machines) == {}
    assert len(machines.begun) == len(JOBS) + NODES["a"], "what ran on it is all that began again"
    died = max(number for number, (_, node) in enumerate(machines.begun) if node == "a")
    again = [job for job, _ in machines.begun[died + 1 :]]
    lost = [job for job, node in machines.begun if node == "a" and job in again]
    assert set(lost) <= set(again[: len(lost) + sum(NODES.values())]), "before those that had not begun"


def test_the_last_node_that_holds_a_shard_dies() -> None:
    machines = Pretended(held={"a": {0}, "b": {1, 2, 3, 4}, "c": {1, 2, 3, 4}})
    machines.fate = {7: "a"}
    failed = run(machines)
    assert {shard for _, shard in failed} == {0}
    assert 0 < len(failed) < 6


def test_nodes_that_come_later_are_waited_for() -> None:
    machines = Pretended({}, held={"a": set(range(5))})
    machines.late = {"a": 1}
    assert run(machines) == {}


def test_what_is_lost_goes_elsewhere_and_is_given_up_in_the_end() -> None:
    machines = Pretended({"a": 1, "b": 1})
    machines.fate = {0: Outcome(lost="killed")}
    assert run(machines, [(0, 0), (1, 0), (2, 0)]) == {}
    assert [node for job, node in machines.begun if job == (0, 0)] == ["a", "b"]
    always = Pretended({"a": 1})
    always.fate = dict.fromkeys(range(ATTEMPTS), Outcome(lost="killed"))
    assert run(always, [(0, 0), (1, 0)]) == {(0, 0): f"killed ({ATTEMPTS} times)"}
    assert len(always.begun) == ATTEMPTS + 1


def test_what_fails_is_not_tried_again() -> None:
    machines = Pretended()
    machines.fate = {3: Outcome(failed="out of luck")}
    assert list(run(machines).values()) == ["out of luck"]
    assert len(machines.begun) == len(JOBS)


def test_threads_of_this_machine() -> None:
    calls: list[str] = []

    def work(job: str) -> None:
        calls.append(job)
        if job == "killed once" and calls.count(job) == 1:
            raise Killed("exit code 137")
        if job == "fails":
            raise UserError("out of luck\nand more")

    jobs = ["one", "killed once", "fails"]
    assert dict(run_all(jobs, Threads(2, work))) == {"one": "", "killed once": "", "fails": "out of luck"}
    assert sorted(calls) == sorted([*jobs, "killed once"])

    def broken(job: str) -> None:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        list(run_all(jobs, Threads(2, broken)))
