"""The device mesh: how many ranks each form of parallelism gets, and the one place that knows the axes' order.

Ranks are numbered with tensor parallelism innermost (its collectives are the most frequent, so its ranks should share
a machine) and the pipeline outermost: (pp, dp_replicate, dp_shard, cp, tp). World size 1 is a mesh of five axes of
size 1.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core.config import UserError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA_AXES = ("dp_replicate", "dp_shard")

Zero = Literal[0, 1, 2, 3]


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes. What the data axes leave as None takes the ranks that remain."""

    dp_replicate: int | None = None
    """ranks that hold copies; given together with ZeRO: hybrid shard"""
    dp_shard: int | None = None
    """ranks over which ZeRO shards; all data-parallel ranks unless dp_replicate or this is given"""
    tp: int = 1
    """tensor parallel ranks"""
    tp_mode: Literal["1d"] = "1d"
    """layout of tensor parallelism"""
    tp_depth: int = 1
    """depth of 2.5D tensor parallelism"""
    cp: int = 1
    """context parallel ranks"""
    pp: int = 1
    """pipeline stages"""
    ep: int = 1
    """expert parallel ranks"""

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "dp_shard", "tp", "tp_depth", "cp", "pp", "ep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"mesh.{name}={value}: an axis has at least 1 rank; give a positive number")
        for name, what in (
            ("cp", "context"),
            ("pp", "pipeline"),
            ("ep", "expert"),
            ("tp_depth", "2.5D tensor"),
        ):
            if getattr(self, name) != 1:
                raise UserError(
                    f"mesh.{name}={getattr(self, name)}: {what} parallelism is not built yet; "
                    f"use mesh.{name}=1 and dp_replicate, dp_shard or tp"
                )

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
        return replace(self, dp_replicate=replicate, dp_shard=shard)

    def describe(self) -> str:
        """`dp_shard=2 x tp=2`: the axes that are given and larger than 1."""
        sizes = {name: getattr(self, name) for name in (*AXES, "ep")}
        return " x ".join(f"{k}={v}" for k, v in sizes.items() if v not in (None, 1)) or "of one rank"

    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of AXES; only of a resolved mesh."""
        sizes = tuple(getattr(self, axis) for axis in AXES)
        assert None not in sizes, "resolve the mesh first"
        return sizes

    @property
    def data_ranks(self) -> int:
        """Ranks that see different data; only of a resolved mesh."""
        assert self.dp_replicate is not None, "resolve the mesh first"
        assert self.dp_shard is not None, "resolve the mesh first"
        return self.dp_replicate * self.dp_shard


def build_mesh(config: MeshConfig, device_type: str) -> DeviceMesh:
    """The DeviceMesh of a resolved config, with named axes.  Needs a process group of exactly its ranks."""
    return init_device_mesh(device_type, config.sizes(), mesh_dim_names=AXES)


def data_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The one-dimensional mesh of the ranks that see different data: dp_replicate x dp_shard.

    A collective when it is first asked for; the mesh remembers it.
    """
    return mesh[DATA_AXES]._flatten("dp")
