"""The device mesh: how many ranks each form of parallelism gets, and the one place that knows the axes' order.

Ranks are numbered with tensor parallelism innermost (its collectives are the most frequent, so its ranks should share
a machine) and the pipeline outermost: (pp, dp_replicate, dp_shard, cp, tp). World size 1 is a mesh of five axes of
size 1. Where tensor parallelism is 2D, 2.5D or 3D, three axes stand in the place of tp: (tp_depth, tp_row, tp_col).

Ranks of the cp axis hold parts of the same sequences, so they see the same rows of data, and their gradients are added
up like those of data-parallel ranks: ZeRO shards over both (`shard_axis`). An axis called "a+b" is a and b as one.

With expert parallelism neighbouring data-parallel ranks are an axis of their own, ep, between dp_shard and cp: the two
data axes are then as much smaller. Parameters that ep cuts are copied, and sharded by ZeRO, over the others.

Workers that train by themselves (`core.parallel.local`) are the ranks of dp_replicate, and each has a mesh of its own,
of the same axes (`worker_mesh`).

Every process group is made with the mesh (`derive_axes`), also those of axes that only some ranks use (an expert's on a
pipeline stage without experts): making one is a collective of all ranks, which name it by counting. A group that some
ranks make and others do not is waited for without end, by it or by the next.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core.compat import flattened, group_named, root_of, unflattened
from core.config import UserError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA_AXES = ("dp_replicate", "dp_shard")
GRID_AXES = ("tp_depth", "tp_row", "tp_col")
EXPERT_AXIS = "ep"
WORKER_AXIS = "worker"
"""Of the mesh whose parts are those of workers; nothing but `worker_mesh` asks for it."""
CONTEXT_AXES = ("cp_ring", "cp_ulysses")
"""Of cp under cp_mode mixed."""

Zero = Literal[0, 1, 2, 3]
TpMode = Literal["1d", "2d", "2.5d", "3d"]
ContextMode = Literal["ring", "ulysses", "mixed"]


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes. What the data axes leave as None takes the ranks that remain."""

    dp_replicate: int | None = None
    """ranks that hold copies; given together with ZeRO: hybrid shard"""
    dp_shard: int | None = None
    """ranks over which ZeRO shards; all data-parallel ranks unless dp_replicate or this is given"""
    tp: int = 1
    """tensor parallel ranks"""
    tp_mode: TpMode = "1d"
    """layout of tensor parallelism: 1d (Megatron), 2d on q x q ranks, 2.5d on q x q x tp_depth, 3d on p x p x p"""
    tp_depth: int = 1
    """depth of 2.5D tensor parallelism; tp is q x q x tp_depth"""
    cp: int = 1
    """context parallel ranks: each holds a part of every sequence"""
    cp_mode: ContextMode = "ring"
    """keys and values go round a ring; or heads for sequence, all to all; or rings of cp_ulysses ranks each"""
    cp_ulysses: int = 1
    """ranks that exchange heads under cp_mode mixed"""
    pp: int = 1
    """pipeline stages"""
    ep: int = 1
    """expert parallel ranks, of the data-parallel ones: each holds a part of the experts"""

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "dp_shard", "tp", "tp_depth", "cp", "cp_ulysses", "pp", "ep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"mesh.{name}={value}: an axis has at least 1 rank; give a positive number")
        if (self.cp_mode == "mixed") != (self.cp_ulysses > 1) or self.cp % self.cp_ulysses:
            raise UserError(
                f"mesh.cp={self.cp}, cp_mode={self.cp_mode} and cp_ulysses={self.cp_ulysses} do not fit together; "
                "under mixed cp_ulysses is above 1 and divides cp, under ring and ulysses leave it out"
            )
        self._check_grid()

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        found = {}
        if self.tp == 1 and self.tp_mode != "1d":
            found["tp_mode"] = f"{self.tp_mode} with mesh.tp=1, where nothing is cut; give --mesh.tp"
        if self.cp == 1 and self.cp_mode != "ring":
            found["cp_mode"] = f"{self.cp_mode} with mesh.cp=1, where nothing is cut; give --mesh.cp"
        return found

    def _check_grid(self) -> None:
        """Raises UserError unless tp ranks make the grid of the mode, naming the nearest that do."""
        if self.tp_depth != 1 and self.tp_mode != "2.5d":
            raise UserError(
                f"mesh.tp_depth={self.tp_depth} with tp_mode={self.tp_mode}: only 2.5d has a depth; "
                f"use --mesh.tp-mode 2.5d, or mesh.tp_depth=1"
            )
        if self.tp_mode == "1d":
            return
        sizes = [math.prod(_grid(self.tp_mode, n, self.tp_depth)) for n in range(1, self.tp + 2)]
        if self.tp not in sizes:
            form = {"2d": "a square", "2.5d": f"a square times tp_depth={self.tp_depth}", "3d": "a cube"}[self.tp_mode]
            nearest = sorted({max(n for n in (1, *sizes) if n <= self.tp), min(n for n in sizes if n > self.tp)} - {1})
            raise UserError(
                f"mesh.tp={self.tp} with tp_mode={self.tp_mode}: the ranks must be {form}; "
                f"use mesh.tp={' or '.join(map(str, nearest))}, or --mesh.tp-mode 1d"
            )

    @property
    def grid(self) -> tuple[int, int, int]:
        """Sizes of GRID_AXES; of a mode other than 1d."""
        side = next(n for n in range(1, self.tp + 1) if math.prod(_grid(self.tp_mode, n, self.tp_depth)) == self.tp)
        return _grid(self.tp_mode, side, self.tp_depth)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh's axes, in their order."""
        axes = AXES if self.tp_mode == "1d" else (*AXES[:-1], *GRID_AXES)
        before = axes.index("cp")
        return (*axes[:before], EXPERT_AXIS, *axes[before:]) if self.ep > 1 else axes

    def resolve(self, world_size: int, zero: Zero = 0) -> "MeshConfig":
        """The same mesh with every size given, for `world_size` ranks.  Raises UserError when it cannot be laid out."""
        fixed = self.pp * self.cp * self.tp
        replicate, shard = self.dp_replicate, self.dp_shard
        if zero == 0:
            if shard not in (None, 1):
                raise UserError(
                    f"mesh.dp_shard={shard} with zero=0 shards nothing; "
                    f"use --zero 1, 2 or 3, or mesh.dp_replicate={shard}"
                )
            shard = 1
        elif replicate is None and shard is None:
            replicate = 1
        given = fixed * (replicate or 1) * (shard or 1)
        if given > world_size or world_size % given:
            raise UserError(
                f"the mesh {self.describe()} takes {given} rank{'s' * (given != 1)} or a multiple of it, "
                f"and {world_size} {'is' if world_size == 1 else 'are'} running; "
                f"use --nproc {max(given, world_size // given * given)}, or a smaller mesh"
            )
        rest = world_size // given
        if replicate is None:
            replicate = rest
        elif shard is None:
            shard = rest
        elif rest != 1:
            raise UserError(
                f"the mesh {self.describe()} takes exactly {given} ranks, and {world_size} are running; "
                f"use --nproc {given}, or leave mesh.dp_replicate or mesh.dp_shard open"
            )
        assert shard is not None
        divided, name = (replicate, "dp_replicate") if zero == 0 else (shard, "dp_shard")
        if divided % self.ep:
            divisors = ", ".join(str(n) for n in range(1, divided + 1) if divided % n == 0)
            raise UserError(
                f"mesh.ep={self.ep} does not divide the {divided} rank{'s' * (divided != 1)} of {name}; "
                f"use mesh.ep in {{{divisors}}}, or more data-parallel ranks"
            )
        return replace(self, dp_replicate=replicate, dp_shard=shard)

    def describe(self) -> str:
        """`dp_shard=2 x tp=2`: the axes that are given and larger than 1."""
        sizes = {name: getattr(self, name) for name in (*AXES, "ep")}
        return " x ".join(f"{k}={v}" for k, v in sizes.items() if v not in (None, 1)) or "of one rank"

    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of `axes`; only of a resolved mesh."""
        sizes = tuple(getattr(self, axis) for axis in AXES)
        assert None not in sizes, "resolve the mesh first"
        pp, replicate, shard, *rest = sizes if self.tp_mode == "1d" else (*sizes[:-1], *self.grid)
        if self.ep == 1:
            return (pp, replicate, shard, *rest)
        if shard % self.ep == 0:
            return (pp, replicate, shard // self.ep, self.ep, *rest)
        return (pp, replicate // self.ep, shard, self.ep, *rest)

    @property
    def data_ranks(self) -> int:
        """Ranks that see different data; only of a resolved mesh."""
        assert self.dp_replicate is not None, "resolve the mesh first"
        assert self.dp_shard is not None, "resolve the mesh first"
        return self.dp_replicate * self.dp_shard

    @property
    def exchange_ranks(self) -> int:
        """Ranks over which context parallelism deals out the heads; 1: it does not."""
        return self.cp if self.cp_mode == "ulysses" else self.cp_ulysses


@dataclass(frozen=True)
class MeshShape:
    """Axes of a mesh by name and size, and one rank of it; neither the ranks nor their process groups need exist.

    ulysses  ranks of the inner of CONTEXT_AXES, as which cp is seen too
    """

    mesh_dim_names: tuple[str, ...]
    shape: tuple[int, ...]
    rank: int = 0
    ulysses: int = 1

    def size(self) -> int:
        return math.prod(self.shape)

    def at(self, rank: int) -> "MeshShape":
        """The same mesh seen from another rank."""
        return replace(self, rank=rank)


AnyMesh = DeviceMesh | MeshShape


def mesh_shape(config: MeshConfig, rank: int = 0) -> MeshShape:
    """The mesh of a resolved config, without ranks."""
    return MeshShape(config.axes, config.sizes(), rank, config.cp_ulysses)


def seen_from(mesh: DeviceMesh, ranks: Sequence[int]) -> list[MeshShape]:
    """The whole mesh that this one is a part of, seen from each of some of its ranks."""
    root = whole_of(mesh)
    whole = MeshShape(root.mesh_dim_names or tuple(map(str, range(root.ndim))), tuple(root.shape))
    places = {rank: place for place, rank in enumerate(root.mesh.flatten().tolist())}
    return [whole.at(places[rank]) for rank in ranks]


def axis_size(mesh: AnyMesh, axis: str) -> int:
    """Ranks on an axis. "a+b" is a and b as one; axes of a mesh without names are called by their position."""
    return _remembered(_axis_size, mesh, axis)


def _axis_size(mesh: AnyMesh, axis: str) -> int:
    if _is_joint(mesh, axis):
        return math.prod(axis_size(mesh, part) for part in axis.split("+"))
    names = mesh.mesh_dim_names or ()
    if isinstance(mesh, DeviceMesh) and axis not in names and not axis.isdigit():
        return sub_mesh(mesh, axis).size()  # of others made later
    if isinstance(mesh, MeshShape) and axis in CONTEXT_AXES:
        return mesh.ulysses if axis == CONTEXT_AXES[1] else axis_size(mesh, "cp") // mesh.ulysses
    return mesh.shape[names.index(axis) if axis in names else int(axis)]


def axis_index(mesh: AnyMesh, axis: str) -> int:
    """This rank's place on an axis."""
    return _remembered(_axis_index, mesh, axis)


def _axis_index(mesh: AnyMesh, axis: str) -> int:
    if _is_joint(mesh, axis):
        index = 0
        for part in axis.split("+"):
            index = index * axis_size(mesh, part) + axis_index(mesh, part)
        return index
    if isinstance(mesh, DeviceMesh):
        return mesh.get_local_rank(int(axis)) if axis.isdigit() else sub_mesh(mesh, axis).get_local_rank()
    if axis in CONTEXT_AXES:
        return divmod(axis_index(mesh, "cp"), mesh.ulysses)[CONTEXT_AXES.index(axis)]
    place = mesh.mesh_dim_names.index(axis)
    return mesh.rank // math.prod(mesh.shape[place + 1 :]) % mesh.shape[place]


def _remembered(find: Callable[[AnyMesh, str], int], mesh: AnyMesh, axis: str) -> int:
    """What is found of an axis, kept by a mesh of ranks: it is asked for with every tensor, and torch looks long."""
    if isinstance(mesh, MeshShape):
        return find(mesh, axis)
    known: dict[tuple[str, str, int], int] = vars(mesh).setdefault("_of_axes", {})
    key = find.__name__, axis, mesh.get_rank()  # a process that pretends to be several has equal meshes of each
    if key not in known:
        known[key] = find(mesh, axis)
    return known[key]


def axis_group(mesh: AnyMesh, axis: str) -> ProcessGroup:
    """The process group of this rank's line along an axis."""
    assert isinstance(mesh, DeviceMesh), f"the ranks of {mesh} do not exist"
    if _is_joint(mesh, axis):
        return flat_axis(mesh, axis).get_group()
    return mesh.get_group(int(axis)) if axis.isdigit() else sub_mesh(mesh, axis).get_group()


def _is_joint(mesh: AnyMesh, axis: str) -> bool:
    return "+" in axis and axis not in (mesh.mesh_dim_names or ())


def _grid(mode: TpMode, side: int, depth: int) -> tuple[int, int, int]:
    """(tp_depth, tp_row, tp_col) of a grid of that side."""
    return {"2d": (1, side, side), "2.5d": (depth, side, side), "3d": (side, side, side)}[mode]


def build_mesh(config: MeshConfig, device_type: str) -> DeviceMesh:
    """The DeviceMesh of a resolved config, with named axes and all that are derived of them.

    Needs a process group of exactly its ranks.
    """
    mesh = init_device_mesh(device_type, config.sizes(), mesh_dim_names=config.axes)
    derive_axes(mesh)
    vars(mesh)["_context_mode"] = config.cp_mode
    if config.cp_mode == "mixed":
        split_axis(sub_mesh(mesh, "cp"), config.cp_ulysses, CONTEXT_AXES)
    return mesh


def context_mode(mesh: DeviceMesh) -> ContextMode:
    """The cp_mode of the config that a mesh was built from; of another one, the default's."""
    return vars(mesh).get("_context_mode", MeshConfig.cp_mode)


def worker_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """This worker's part of a mesh, by itself: of the same axes, with one rank on dp_replicate.

    A collective of all ranks. Raises UserError for groups of ranks that a part does not have.
    """
    names = mesh.mesh_dim_names or ()
    if context_mode(mesh) == "mixed":
        raise UserError("mesh.cp_mode=mixed in a worker: its two axes are of the whole mesh; use ring or ulysses")
    place = names.index("dp_replicate")
    ranks = mesh.mesh.movedim(place, 0).unsqueeze(1 + place)
    own = sub_mesh(DeviceMesh(mesh.device_type, ranks, mesh_dim_names=(WORKER_AXIS, *names)), *names)
    derive_axes(own)
    vars(own)["_context_mode"] = context_mode(mesh)
    vars(own)["_ranks_group"] = flattened(own, "ranks").get_group().group_name
    return own


def whole_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a mesh is a part of: that of its worker, where each has its own."""
    root = root_of(mesh)
    names = root.mesh_dim_names or ()
    return sub_mesh(root, *names[1:]) if names[:1] == (WORKER_AXIS,) else root


def group_of_ranks(mesh: DeviceMesh) -> ProcessGroup | None:
    """The group of all ranks of a mesh; None, which torch takes for all that there are, unless it is a worker's."""
    return _group_of(mesh, "_ranks_group")


def derive_axes(mesh: DeviceMesh) -> None:
    """Make the process groups of every axis that is derived of this mesh's, `host_group` and `checkpoint_group`; once.

    A collective of all ranks. `build_mesh` has done it; a mesh of somebody else's needs it before it is used, and has
    only those of the axes that it names.
    """
    if host_group(mesh) is not None:
        return
    for axes in derived_axes(mesh):
        if len(axes) > 1:
            _flatten(mesh, axes)
    if pipeline_ranks(mesh) > 1:
        _flatten(mesh, _beside_pp(mesh))
    backend = None if dist.get_backend() == "fake" else "gloo"  # ranks that are not there connect to nobody
    for name in ("_host_group", "_checkpoint_group"):
        vars(mesh)[name] = cast(ProcessGroup, dist.new_group(backend=backend)).group_name


def derived_axes(mesh: AnyMesh) -> list[tuple[str, ...]]:
    """Axes that data parallelism sums and shards over, each as those that it joins; of a mesh with its names.

    And those of a grid over which experts are dealt out, and its planes.
    """
    names = set(mesh.mesh_dim_names or ())
    if not set(DATA_AXES) <= names:
        return []
    experts = tuple(axis for axis in (EXPERT_AXIS, *GRID_AXES[:-1]) if axis in names)
    joined = {data_axes(mesh), *(f(mesh, cut) for f in (gradient_axes, shard_axes) for cut in _CUTS)}
    return sorted(joined | ({experts, GRID_AXES[1:]} if set(GRID_AXES) <= names else set()))


def joined_axis(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Some axes as one: themselves, or what `derive_axes` has made of them."""
    if len(axes) == 1:
        return sub_mesh(mesh, *axes)
    made = _joined_axes(mesh)
    assert axes in made, f"the axes {axes} are not joined when the mesh {mesh} is made, and later not all ranks would"
    return made[axes]


def host_group(mesh: DeviceMesh | None) -> ProcessGroup | None:
    """A gloo group of all ranks, for what they say within the steps of what lies on the host; made with the mesh.

    None of no mesh, and of one whose axes nobody has derived.
    """
    return _group_of(mesh, "_host_group")


def checkpoint_group(mesh: DeviceMesh | None) -> ProcessGroup | None:
    """Another one, for what a thread says while the steps go on: collectives of two threads must not share a group."""
    return _group_of(mesh, "_checkpoint_group")


def _group_of(mesh: DeviceMesh | None, key: str) -> ProcessGroup | None:
    # By name, as the mesh keeps its own: a copy of a mesh, in that of a model, has the same groups.
    name = None if mesh is None else vars(mesh).get(key)
    return None if name is None else group_named(name)


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device where a mesh's ranks compute and their messages lie; the tensors that they send may lie elsewhere."""
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def sub_mesh(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """The mesh of some of the axes: `mesh[axes]`, remembered by `mesh`.

    Slicing makes a new mesh, which takes milliseconds; what a step asks for a hundred times is asked here.
    """
    known: dict[tuple[str, ...], DeviceMesh] = vars(mesh).setdefault("_sub_meshes", {})
    if axes not in known:
        known[axes] = mesh[axes]
    return known[axes]


def tensor_axes(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh for tensor parallelism: the axis tp, or the three of its grid."""
    return sub_mesh(mesh, *tensor_names(mesh))


def tensor_names(mesh: AnyMesh) -> tuple[str, ...]:
    """Names of the axes that `tensor_axes` has."""
    return ("tp",) if "tp" in (mesh.mesh_dim_names or ()) else GRID_AXES


def data_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The one-dimensional mesh of the ranks that see different data: dp_replicate x dp_shard, and ep where it is."""
    return joined_axis(mesh, data_axes(mesh))


def gradient_axis(mesh: DeviceMesh, cut: Collection[str] = ()) -> DeviceMesh:
    """The ranks whose gradients are added up: those of `data_axis`, and with context parallelism its ranks, too.

    cut  axes that cut the parameter, so that their ranks hold other parts of it
    """
    return joined_axis(mesh, gradient_axes(mesh, cut))


def shard_axis(mesh: DeviceMesh, cut: Collection[str] = ()) -> DeviceMesh:
    """The ranks over which ZeRO shards: dp_shard, with experts dp_shard+ep, and with context parallelism also cp.

    cut  as above
    """
    return joined_axis(mesh, shard_axes(mesh, cut))


def stage_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """The ranks that hold the same stages of a pipeline; None where all do."""
    return None if pipeline_ranks(mesh) == 1 else joined_axis(mesh, _beside_pp(mesh))


def stage_group(mesh: DeviceMesh) -> ProcessGroup:
    """The ranks of a mesh that hold the same stages of a pipeline as this one; a part of a mesh stands for the whole.

    Raises UserError where no group has just these ranks.
    """
    root = whole_of(mesh)
    if (stage := stage_axis(root)) is not None:
        return stage.get_group()
    if (own := group_of_ranks(root)) is not None:
        return own
    if root.ndim == 1:
        return root.get_group()
    if root.size() != dist.get_world_size():
        raise UserError(
            f"a mesh of {root.size()} of {dist.get_world_size()} ranks in {root.ndim} dims has no group of all its "
            "ranks; make it of all that there are, or of one dim"
        )
    return cast(ProcessGroup, dist.group.WORLD)


_CUTS = ((), (EXPERT_AXIS,))
"""Which axes of those whose ranks see different data may cut a parameter."""


def data_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Names of the axes that `data_axis` joins."""
    return (*DATA_AXES, *_of_mesh(mesh, EXPERT_AXIS))


def gradient_axes(mesh: AnyMesh, cut: Collection[str] = ()) -> tuple[str, ...]:
    """Names of the axes that `gradient_axis` joins."""
    return (*(axis for axis in data_axes(mesh) if axis not in cut), *_sequence_axis(mesh))


def shard_axes(mesh: AnyMesh, cut: Collection[str] = ()) -> tuple[str, ...]:
    """Names of the axes that `shard_axis` joins."""
    return tuple(axis for axis in gradient_axes(mesh, cut) if axis != "dp_replicate")


def _beside_pp(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(name for name in mesh.mesh_dim_names or () if name != "pp")


def pipeline_ranks(mesh: AnyMesh) -> int:
    """Ranks of the pp axis, which hold different parameters; a mesh of somebody else's need not name one."""
    return axis_size(mesh, "pp") if "pp" in (mesh.mesh_dim_names or ()) else 1


def _of_mesh(mesh: AnyMesh, name: str) -> tuple[str, ...]:
    """The axis, where the mesh has it; one of somebody else's need not name all of ours."""
    return (name,) if name in (mesh.mesh_dim_names or ()) else ()


def _sequence_axis(mesh: AnyMesh) -> tuple[str, ...]:
    """cp, where it has several ranks."""
    return tuple(axis for axis in _of_mesh(mesh, "cp") if axis_size(mesh, axis) > 1)


def flat_axis(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The axes "a+b" of the mesh as one, which was made with it."""
    return joined_axis(mesh, tuple(name.split("+")))


def _flatten(mesh: DeviceMesh, axes: tuple[str, ...]) -> None:
    name = "dp" if axes == data_axes(mesh) else "+".join(axes)
    made = _joined_axes(mesh)
    if axes not in made:
        made[axes] = flattened(sub_mesh(mesh, *axes), name)


def _joined_axes(mesh: DeviceMesh) -> dict[tuple[str, ...], DeviceMesh]:
    return vars(mesh).setdefault("_joined_axes", {})


def split_axis(axis: DeviceMesh, inner: int, names: tuple[str, str]) -> tuple[DeviceMesh, DeviceMesh]:
    """One axis as two, the inner of that many neighbours; `build_mesh` has made those of its config."""
    known: dict[tuple[Any, ...], tuple[DeviceMesh, DeviceMesh]]
    known = vars(root_of(axis)).setdefault("_split_axes", {})
    key = axis.mesh_dim_names, inner, names
    if key not in known:
        both = unflattened(axis, (axis.size() // inner, inner), names)
        known[key] = both[names[0]], both[names[1]]
    return known[key]
