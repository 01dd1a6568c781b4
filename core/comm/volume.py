"""Counts the collectives of a region: calls and bytes, by operation and by mesh axis.

    with count_volume(mesh) as volume:
        train_step()
    volume.bytes["all_gather", "dp_shard"]

Every collective of torch.distributed passes the dispatcher (c10d:: and _c10d_functional:: operators), so a dispatch
mode sees them all, those of FSDP2 and DTensor too. Bytes are those of the full message: the gathered output of an
all-gather, the input of a reduce-scatter or all-reduce, the tensor of a broadcast or reduce, what a rank sends in an
all-to-all. A message from rank to rank is a `send` here and a `recv` there; totals count it where it is sent. What
travels over a wire is that times (s - 1) / s for gathers and scatters and twice it for a ring all-reduce on s ranks
(`wire_bytes`). An operator that this file does not know counts under its own name, with its first argument.

`slow_link` makes messages take as long as they would over a slow link.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core.compat import TorchDispatchMode, tree_leaves
from core.config import UserError
from core.mesh import derived_axes, joined_axis

# operator name -> (our name, which argument holds the full message)
_FULL_MESSAGE = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
}
_SENDS_NO_MESSAGE = ("barrier", "monitored_barrier_", "check_for_nan", "wait_tensor", "_wrap_tensor_autograd")
_WIRE = {
    "all_reduce": lambda s: 2 * (s - 1) / s,
    "all_gather": lambda s: (s - 1) / s,
    "reduce_scatter": lambda s: (s - 1) / s,
    "all_to_all": lambda s: (s - 1) / s,
    "recv": lambda s: 0.0,
}


def wire_share(operation: str, size: int) -> float:
    """The share of a full message that each of `size` ranks sends with ring algorithms."""
    return _WIRE.get(operation, lambda _: 1.0)(size)


@dataclass
class Volume:
    """calls and bytes by (operation, axis); an axis that is not of the mesh is called `other`."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def total_calls(self) -> int:
        return sum(n for (operation, _), n in self.calls.items() if operation != "recv")

    @property
    def total_bytes(self) -> int:
        return sum(n for (operation, _), n in self.bytes.items() if operation != "recv")

    @property
    def by_axis(self) -> dict[str, int]:
        """Of `total_bytes`, those of each axis."""
        found: Counter[str] = Counter()
        for (operation, axis), n in self.bytes.items():
            found[axis] += n * (operation != "recv")
        return dict(+found)

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends with ring algorithms."""
        return sum(n * wire_share(op, self.sizes.get(axis, 1)) for (op, axis), n in self.bytes.items())


Passes = Callable[[str, str, int], None]
"""Is told the operation, axis and bytes of each message."""


class _Counter(TorchDispatchMode):
    def __init__(self, volume: Volume, axis_of: dict[str, str], passes: Passes | None):
        super().__init__()
        self.volume, self.axis_of, self.passes = volume, axis_of, passes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace not in ("c10d", "_c10d_functional"):
            return func(*args, **(kwargs or {}))
        is_known_by_result = "all_gather_into_tensor" in func._schema.name
        if not is_known_by_result:  # a message that has been sent is there, however long its sender then waits
            self._count(func, args, kwargs or {}, None)
        out = func(*args, **(kwargs or {}))
        if is_known_by_result:
            self._count(func, args, kwargs or {}, out)
        return out

    def _count(self, func, args, kwargs, out) -> None:
        name = func._schema.name.split("::")[1]
        if name in _SENDS_NO_MESSAGE:
            return
        if name.startswith("all_gather_into_tensor"):  # functional: the full message is what comes out
            operation, message = "all_gather", out
        else:
            operation, position = _FULL_MESSAGE.get(name, (name, 0))
            message = args[position]
        key = (operation, self._axis((args, kwargs)))
        num_bytes = sum(t.numel() * t.element_size() for t in tree_leaves(message) if isinstance(t, Tensor))
        self.volume.calls[key] += 1
        self.volume.bytes[key] += num_bytes
        if self.passes is not None:
            self.passes(*key, num_bytes)

    def _axis(self, arguments) -> str:
        """The axis of the process group among an operator's arguments: an object (c10d) or a name (functional)."""
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
                group = torch.distributed.ProcessGroup.unbox(leaf)
                leaf = group.group_name
                if leaf not in self.axis_of and group.group_desc.startswith("mesh_"):  # of an axis made of others
                    self.axis_of[leaf] = group.group_desc.removeprefix("mesh_")
                    self.volume.sizes[self.axis_of[leaf]] = group.size()
            if isinstance(leaf, str) and leaf in self.axis_of:
                return self.axis_of[leaf]
        return "other"


@contextmanager
def count_volume(mesh: DeviceMesh, passes: Passes | None = None) -> Iterator[Volume]:
    """Count every collective inside, also those of the backward pass."""
    names = mesh.mesh_dim_names or ()
    axis_of: dict[str, str] = {mesh[axis].get_group().group_name: axis for axis in reversed(names)}
    axis_of.setdefault(torch.distributed.group.WORLD.group_name, "world")  # pyright: ignore[reportOptionalMemberAccess]
    volume = Volume(sizes={axis: mesh[axis].size() for axis in names})
    for axis in (joined_axis(mesh, axes) for axes in derived_axes(mesh)):
        (name,) = axis.mesh_dim_names or ("dp",)
        axis_of.setdefault(axis.get_group().group_name, name)
        volume.sizes[name] = axis.size()
    volume.sizes["world"] = torch.distributed.get_world_size()
    with _Counter(volume, axis_of, passes):
        yield volume


@contextmanager
def slow_link(mesh: DeviceMesh, bits_per_s: float, axes: Collection[str] | None = None) -> Iterator[Volume]:
    """Inside, each message over these axes takes as long as a link of so many bits a second needs for its wire bytes.

    The rank that sends sleeps for that time, so no message travels while it computes, and two wait for each other. What
    a thread sends that was begun inside is not seen. `math.inf` only counts.

    axes  all by default

    Raises UserError for a rate that is not positive.
    """
    if not bits_per_s > 0:
        raise UserError(f"a slow link of {bits_per_s} bits/s; give a positive rate, such as 1e8 for 100 Mbit/s")

    def passes(operation: str, axis: str, num_bytes: int) -> None:
        size = volume.sizes.get(axis, 1)
        if size > 1 and (axes is None or axis in axes):
            time.sleep(8 * wire_share(operation, size) * num_bytes / bits_per_s)

    with count_volume(mesh, passes) as volume:
        yield volume
