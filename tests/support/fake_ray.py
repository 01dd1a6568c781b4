"""A stand-in for Ray's package: nodes that are threads' names, tasks that run at once when somebody waits for them.

What Ray does by processes and a network is not here: that is in tests/unit/fold/test_ray.py, with the real one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """Ray's errors are of this class."""


class RayTaskError(RayError):
    """A task raised an error."""


class WorkerCrashedError(RayError):
    """A task's process was killed."""


def _pinned(node: str, soft: bool) -> SimpleNamespace:
    return SimpleNamespace(node=node, soft=soft)


@dataclass
class FakeRay:
    """nodes      id -> its resources, of those that are alive
    befalls    what happens to a task in the place of its result; asked with the node's id and the task's arguments
    refuses    what joining a cluster raises
    starts     what the next attempts to start one raise
    """

    nodes_there: dict[str, dict[str, float]]
    befalls: Callable[[str, Any], Exception | None] = lambda node, given: None
    tasks: list[dict[str, Any]] = field(default_factory=list)
    cancelled: list[Any] = field(default_factory=list)
    inits: list[dict[str, Any]] = field(default_factory=list)
    refuses: Exception | None = None
    starts: list[Exception] = field(default_factory=list)
    here: str = ""
    __version__ = "0"

    def __post_init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
        self.util = SimpleNamespace(scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=_pinned))

    def init(self, **options: Any) -> None:
        if self.starts and options["address"] == "local":
            raise self.starts.pop()
        self.inits.append(options)
        if self.refuses and options["address"] != "local":
            raise self.refuses

    def shutdown(self) -> None:
        self.inits.append({})

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": node, "Alive": bool(has), "NodeManagerHostname": f"host-{node}", "Resources": has}
            for node, has in self.nodes_there.items()
        ]

    def put(self, value: Any) -> Any:
        return value

    def remote(self, function: Callable[..., Any]) -> Any:
        ray = self

        class Task:
            def __init__(self, options: dict[str, Any]):
                self.given = options

            def options(self, **more: Any) -> "Task":
                return Task(more)

            def remote(self, *arguments: Any) -> int:
                strategy = self.given["scheduling_strategy"]
                assert not strategy.soft
                ray.tasks.append(self.given | {"node": strategy.node, "function": function, "arguments": arguments})
                return len(ray.tasks) - 1

        return Task({})

    def wait(self, handles: Sequence[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        assert handles
        assert num_returns == 1
        return [min(handles)], sorted(handles)[1:]

    def get(self, handle: int) -> Any:
        task = self.tasks[handle]
        if not self.nodes_there.get(task["node"]):
            raise WorkerCrashedError("The node died.\nA hint of many lines.")
        if error := self.befalls(task["node"], task["arguments"]):
            raise error
        self.here = task["node"]
        return task["function"](*task["arguments"])

    def cancel(self, handle: int, force: bool) -> None:
        self.cancelled.append(handle)
