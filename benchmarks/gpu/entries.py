"""What each command of the protocol measures, by name; the modules are imported when a command asks for them."""

from collections.abc import Callable
from importlib import import_module

from benchmarks.gpu.protocol import Phase, Where
from benchmarks.result import Row, Target

MODULES = {
    "a": ("checks", "suite"),
    "b": ("speed", "decoding"),
    "c": ("training", "evoformer", "pictures"),
    "d": ("unmeasured",),
}
"""In the order in which they run; what they have as `late_phases` comes behind all."""


def phases(command: str, where: Where) -> list[Phase]:
    found = [import_module(f"benchmarks.gpu.{name}") for name in MODULES[command]]
    late = [module.late_phases for module in found if hasattr(module, "late_phases")]
    return [phase for phases_of in (*(module.phases for module in found), *late) for phase in phases_of(where)]


def targets_of(command: str) -> Callable[[list[Row]], list[Target]]:
    """What was aimed at, of the figures so far."""
    modules = [import_module(f"benchmarks.gpu.{name}") for name in MODULES[command]]
    return lambda figures: [t for module in modules for t in getattr(module, "targets", lambda _: [])(figures)]
