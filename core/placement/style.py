"""A style: the facts of one way to cut a module over a mesh, and the wrapper that makes its forward do so.

    colwise = Style(
        cuts={"weight": Cut(0), "bias": Cut(0)},         # dims of parameters
        outputs={AXIS: Shard(-1)},                       # how activations lie; what is not named is replicated
        messages=Messages(backward=(Message("all_reduce", features),)),  # with their sizes as closed forms
        wrap=...)                                        # the only thing that touches a forward

A plan says how a model is cut: a dict from module-name pattern to style. `*` stands for one part of a dotted name (or
some of its letters), so a pattern has as many dots as what it matches. A pattern that matches nothing is an error, so a
plan cannot silently do less than it says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from core.config import UserError
from core.layout import Layout, largest_share, shares
from core.mesh import AnyMesh, axis_index, axis_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

AXIS = ""
"""The one axis over which a plan is applied, in styles that do not name theirs."""


@dataclass(frozen=True)
class Cut:
    """A dim of a parameter, cut over an axis.

    unit   rows that its cut keeps together, those of an attention head
    even   ranks' rows differ by one at most
    parts  lengths of matrices that lie one behind the other along the dim, each of which is cut by itself; such a
           parameter is a local tensor, for no DTensor lies so
    """

    dim: int
    axis: str = AXIS
    unit: int = 1
    even: bool = False
    parts: tuple[int, ...] = ()


Cuts = Mapping[str, "Cut | tuple[Cut, ...]"]
"""Pattern of a parameter's name within the module -> its cuts, in their order.

A pattern is as those of a plan; `**` at its end stands for all that follows.
"""


@dataclass(frozen=True)
class Site:
    """A module on one rank of a step: what the closed forms of its messages are of.

    module   as it was before it was cut
    layouts  of its parameters, by their names in it
    axis     that of the plan
    batch, length  of the tokens that the rank is given: all of a batch, and of a sequence what context parallelism
                   leaves
    """

    module: Any
    layouts: Mapping[str, Layout]
    mesh: AnyMesh
    axis: str
    batch: int
    length: int

    def size(self, axis: str = AXIS) -> int:
        return axis_size(self.mesh, axis or self.axis)

    def index(self, axis: str = AXIS) -> int:
        return axis_index(self.mesh, axis or self.axis)

    def shape(self, name: str = "weight") -> tuple[int, ...]:
        """The shape of a whole parameter."""
        return self.layouts[name].shape

    def share(self, rows: int, axis: str, unit: int = 1) -> int:
        """The rows of this rank, of `rows` that are cut over an axis."""
        own = shares(rows, self.size(axis), unit)[self.index(axis)]
        return own.stop - own.start

    def padded_length(self) -> int:
        """The padded length of a sequence that is cut over the plan's axis."""
        return largest_share(self.length, self.size()) * self.size()


@dataclass(frozen=True)
class Message:
    """A style's message in a forward, or in a backward, of one microbatch.

    operation  as `core.comm.volume` calls it
    elements   closed form of the full message's elements, all calls of it together
    axis       over which
    width      of an element: that in which the model computes, that of its sums, that of exchanged rows, or bytes
    """

    operation: str
    elements: Callable[[Site], float]
    axis: str = AXIS
    width: Literal["computing", "wide", "exchanged"] | int = "computing"


@dataclass(frozen=True)
class Messages:
    """The messages of a microbatch's forward, and of its backward."""

    forward: tuple[Message, ...] = ()
    backward: tuple[Message, ...] = ()

    def __add__(self, other: "Messages") -> "Messages":
        return Messages(self.forward + other.forward, self.backward + other.backward)


def unchanged(module: Any, axis: Any) -> Any:
    """The wrapper of a style that changes no forward."""
    return module


@dataclass(frozen=True)
class Style:
    """One way to cut a module.

    cuts       which dims of which parameters, or a function of the module that says so
    partial    pattern of parameters -> axes over which their gradients are partial sums
    inputs     axis -> how the first argument lies on it, and
    outputs    how the result does; replicated where nothing is said
    messages   what it sends
    refuse     (module, mesh, axis) -> raises UserError for a module that cannot be cut so over a mesh of these sizes
    wrap       (module, mesh of the plan's axes) -> module; its parameters are cut already
    is_local   parameters are local tensors that a layout describes, not DTensors
    """

    cuts: Cuts | Callable[[Any], Cuts] = field(default_factory=dict)
    partial: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    inputs: "Mapping[str, Placement]" = field(default_factory=dict)
    outputs: "Mapping[str, Placement]" = field(default_factory=dict)
    messages: Messages = Messages()
    refuse: Callable[[Any, AnyMesh, str], None] = lambda module, mesh, axis: None
    wrap: "Callable[[Any, DeviceMesh], Any]" = unchanged
    is_local: bool = False

    def cuts_of(self, module: nn.Module) -> dict[str, tuple[Cut, ...]]:
        """name -> cuts of the module's parameters, in the style's order."""
        cuts = self.cuts(module) if callable(self.cuts) else self.cuts
        found = {}
        for name, _ in module.named_parameters(remove_duplicate=False):
            for pattern, cut in cuts.items():
                if _covers(pattern, name):
                    found[name] = cut if isinstance(cut, tuple) else (cut,)
        return found

    def partial_of(self, module: nn.Module) -> dict[str, tuple[str, ...]]:
        """name -> axes over which the gradients of the module's parameters are partial."""
        return {
            name: axes
            for name, _ in module.named_parameters(remove_duplicate=False)
            for pattern, axes in self.partial.items()
            if _covers(pattern, name)
        }


Plan = Mapping[str, Style]


def matches(name: str, pattern: str) -> bool:
    """Does each dotted part of the name match that of the pattern?"""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _covers(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-2]) if pattern.endswith("**") else matches(name, pattern)


def matched(model: nn.Module, pattern: str) -> list[str]:
    """Names of the modules that a pattern means.  Raises UserError where there are none."""
    names = [name for name, _ in model.named_modules() if matches(name, pattern)]
    if not names:
        known = ", ".join(list(dict(model.named_children()))[:8])
        raise UserError(f"the plan's pattern '{pattern}' matches no module; the model's modules are {known}, …")
    return names
