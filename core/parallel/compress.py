"""Compressed messages between data-parallel ranks: their options, what they are of, and their bytes by closed forms.

Each compression is a `Feedback` (`core.parallel.feedback`) in a file of its own; a `CompressionSpec` says which
parameters it takes and what it sends of them. `core.parallel.data` lets one take the place of its reductions.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from core.comm.coded_rows import RowCode, rows_in_8_bits
from core.comm.volume import wire_share
from core.config import UserError
from core.layout import Layout
from core.mesh import EXPERT_AXIS, AnyMesh, MeshConfig, axis_size, gradient_axes, pipeline_ranks
from core.parallel.feedback import Feedback
from core.parallel.one_bit import OneBit, served
from core.parallel.powersgd import Matrices, PowerSGD, stack_dims
from core.parallel.sparse import PLACE_BYTES, RandomK, TopK, num_kept
from core.parallel.zero_one import ZeroOne
from core.placement.messages import Sent
from core.placement.table import Placed, Table

CompressionName = Literal["powersgd", "top_k", "random_k", "one_bit", "zero_one"]
IN_SIGNS = ("one_bit", "zero_one")
"""Of momenta, not gradients."""
LOCAL = ("local_steps", "local_start", "local_each")
FewBits = Literal["int8", "int4"]

Message = tuple[str, str, int]
"""(operation, axis, bytes of the full message) of a step; the axis "" for the data-parallel ranks."""


@dataclass(frozen=True)
class CommConfig:
    """The options of messages between data-parallel ranks."""

    compress: CompressionName | None = None
    """compress gradients of matrices, with error feedback: powersgd sends each as a product of two thin ones, top_k its
    largest elements, random_k as many drawn at random; one_bit and zero_one, with adam, adamw and one_bit also with
    lamb, the signs of all momenta (1-bit Adam, 0/1 Adam, 1-bit LAMB); by default they are sent whole"""
    rank: int = 4
    """columns of powersgd's thin ones: a matrix of M x N is sent in rank (M + N) elements"""
    density: float = 0.01
    """share of the elements that top_k and random_k send"""
    start: int = 0
    """steps whose gradients are sent whole before the first that is compressed; of zero_one also of as many a twice as
    long interval each"""
    settled: float | None = None
    """of one_bit: behind the start gradients are sent whole until the sum of second moments is this share of what it
    was 1 / (1 - beta2) steps before, or the other way round (1-bit Adam's authors take 0.96); by default no longer"""
    local_steps: int = 1
    """of zero_one: the most steps that each rank takes by itself between two sums of momenta, in the paper 16; 1:
    momenta are added up in every step"""
    local_start: int | None = None
    """of zero_one with local_steps: the step from which on there are such, and second moments stay; the last one of the
    warm-up in the paper"""
    local_each: int = 16
    """of zero_one with local_steps: sums at each distance, which then doubles, from 1 step up to local_steps"""
    report_every: int = 0
    """steps between figures of what compression loses, each of which sends gradients whole, twice; 0: none"""
    weights: FewBits | None = None
    """gather the sharded weights of matrices in so few bits, block by block (ZeRO++'s qwZ); masters stay exact"""
    gradients: FewBits | None = None
    """reduce and scatter the gradients of matrices in so few bits, all to all, coded once within a node and once
    between nodes (ZeRO++'s qgZ)"""
    feedback: bool = False
    """of gradients in few bits: what the codes of a rank's gradients leave out goes along in its next step; each rank
    keeps that of all matrices, whole, in the format of the reductions"""
    node: int = 1
    """neighbouring ranks, of those over which ZeRO shards, that share a node"""
    activations: Literal["int8"] | None = None
    """send what stages of a pipeline hand on and the rows that experts exchange, and their gradients, in 8 bits"""
    secondary: bool = False
    """keep a second copy of gathered weights, spread over a node's ranks: between two updates all gathers but the first
    are within the node (ZeRO++'s hpZ)"""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"comm.rank={self.rank}; give a number of columns, at least 1")
        if not 0 < self.density <= 1:
            raise UserError(f"comm.density={self.density}; give a share above 0 and at most 1")
        for name in ("start", "report_every"):
            if getattr(self, name) < 0:
                raise UserError(f"comm.{name}={getattr(self, name)}; give a number of steps, or 0")
        if self.settled is not None and not 0 < self.settled < 1:
            raise UserError(f"comm.settled={self.settled}; give a share above 0 and below 1, such as 0.96")
        if self.compress in IN_SIGNS and self.start < 1 and (self.settled is None or self.compress == "zero_one"):
            raise UserError(
                f"comm.compress={self.compress} with comm.start={self.start}: second moments are learned in the steps "
                "that are sent whole; give --comm.start some"
                + (" such as a tenth of all, or --comm.settled 0.96" if self.compress == "one_bit" else ", such as 16")
            )
        self._check_local_steps()
        if self.node < 1:
            raise UserError(f"comm.node={self.node}; give the number of a node's ranks, at least 1")
        if self.compress is not None and self.gradients is not None:
            raise UserError(
                f"comm.compress={self.compress} with comm.gradients={self.gradients}: a gradient is sent in one way; "
                "leave one out"
            )

    def _check_local_steps(self) -> None:
        for name in ("local_steps", "local_each"):
            if getattr(self, name) < 1:
                raise UserError(f"comm.{name}={getattr(self, name)}; give a number, at least 1")
        if not self.has_local_steps:
            return
        if self.local_start is None:
            raise UserError(
                f"comm.local_steps={self.local_steps} without comm.local_start: second moments stay from there on; "
                "give --comm.local-start, such as the last step of the warm-up"
            )
        if self.local_start < self.start:
            raise UserError(
                f"comm.local_start={self.local_start} with comm.start={self.start}, in whose steps second moments are "
                f"learned; give --comm.local-start {self.start} or more"
            )

    @property
    def has_local_steps(self) -> bool:
        return self.compress == "zero_one" and self.local_steps > 1

    @property
    def feeds_back(self) -> bool:
        """Whether what codes of gradients leave out goes along later."""
        return self.gradients is not None and self.feedback

    @property
    def keeps_errors(self) -> bool:
        """Whether each rank keeps what of its gradients has not been sent."""
        return self.compress is not None or self.feeds_back

    @property
    def codes_shards(self) -> bool:
        """Whether ZeRO's messages are others than they are by default."""
        return self.weights is not None or self.gradients is not None or self.secondary

    @property
    def is_of_data(self) -> bool:
        """Whether messages of data parallelism are others than they are by default."""
        return self.compress is not None or self.codes_shards

    @property
    def is_given(self) -> bool:
        return self.is_of_data or self.activations is not None

    @property
    def given(self) -> str:
        """The first of the options that change messages, for a refusal."""
        return next(
            f"comm.{name}" if value is True else f"comm.{name}={value}"
            for name in ("compress", "gradients", "weights", "secondary", "activations")
            if (value := getattr(self, name))
        )

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        found: dict[str, str] = {}
        if self.compress is None:
            why = "without comm.compress: gradients are sent whole; give --comm.compress powersgd"
            found |= dict.fromkeys(("rank", "density", "start", "settled", *LOCAL), why)
            if self.weights is None and self.gradients is None:
                found["report_every"] = why
        elif self.compress == "powersgd":
            found |= {"density": "with comm.compress=powersgd, whose size --comm.rank says; leave it out"}
        elif self.compress in IN_SIGNS:
            why = f"with comm.compress={self.compress}, which sends a bit of each element; leave it out"
            found |= dict.fromkeys(("rank", "density"), why)
        else:
            found |= {"rank": f"with comm.compress={self.compress}, whose size --comm.density says; leave it out"}
        if self.compress not in (None, "one_bit"):
            found["settled"] = f"with comm.compress={self.compress}, which does not wait for that; leave it out"
        if self.compress not in (None, "zero_one"):
            why = f"with comm.compress={self.compress}, whose ranks take all steps together; give zero_one"
            found |= dict.fromkeys(LOCAL, why)
        elif self.compress == "zero_one" and self.local_steps == 1:
            why = "without comm.local_steps: ranks take all steps together; give --comm.local-steps 16"
            found |= dict.fromkeys(LOCAL[1:], why)
        if self.gradients is None:
            found["feedback"] = "without comm.gradients, whose codes it is of; give --comm.gradients int4"
        if self.gradients is None and not self.secondary:
            found["node"] = "without comm.gradients or comm.secondary; give --comm.gradients int4, or leave it out"
        return found

    def check_mesh(self, pp: int, ep: int, cp: int) -> None:
        """Raises UserError for ranks whose gradients are not those that a compression knows."""
        if self.has_local_steps and cp > 1:
            raise UserError(
                f"comm.local_steps={self.local_steps} with mesh.cp={cp}: ranks that share a sequence compute it with "
                "the same weights; use --mesh.cp 1, or no --comm.local-steps"
            )
        for axis, ranks, why in (
            ("pp", pp, "stages that share a parameter add up its gradient behind the reduction"),
            ("ep", ep, "experts' gradients are summed over other ranks than those of the rest"),
        ):
            if self.keeps_errors and ranks > 1:
                given = "comm.feedback" if self.compress is None else f"comm.compress={self.compress}"
                raise UserError(
                    f"{given} with mesh.{axis}={ranks}: {why}; use --mesh.{axis} 1, or no --{given.split('=')[0]}"
                )

    @property
    def row_code(self) -> RowCode | None:
        """Of activations."""
        return None if self.activations is None else rows_in_8_bits

    def check_activations(self, mesh: MeshConfig) -> None:
        """Raises UserError where no activations are sent that the option is of, or in parts of features."""
        if self.activations is None:
            return
        given = f"comm.activations={self.activations}"
        if mesh.pp == mesh.ep == 1:
            raise UserError(
                f"{given} without stages and without experts that are dealt out: none is sent; use --mesh.pp 2 or "
                "--mesh.ep 2, or leave it out"
            )
        if mesh.tp_mode != "1d":
            raise UserError(
                f"{given} with mesh.tp_mode={mesh.tp_mode}: ranks hand on parts of a token's features; use "
                "--mesh.tp-mode 1d, or leave it out"
            )


UNCOMPRESSED = CommConfig()


@dataclass(frozen=True)
class CompressionSpec:
    """takes     (full shape, config): whether a parameter of that shape is compressed
    messages  (layout, config, data-parallel ranks, bytes of an element) -> what a rank sends of it
    makes     what acts
    options   those that a checkpoint must agree in
    kept      (config, elements of this part, data-parallel ranks, bytes of an element, and of one as the model computes
              with it) -> bytes that stay from step to step
    """

    takes: Callable[[tuple[int, ...], CommConfig], bool]
    messages: Callable[[Layout, CommConfig, int, int], Iterator[Message]]
    makes: type[Feedback]
    options: tuple[str, ...]
    kept: Callable[[CommConfig, int, int, int, int], int] = lambda comm, elements, ranks, wide, width: wide * elements


def _powersgd_messages(layout: Layout, comm: CommConfig, ranks: int, wide: int) -> Iterator[Message]:
    dims = stack_dims(layout.shape, comm.rank)
    assert dims is not None
    return (("all_reduce", axis, wide * n) for axis, n in Matrices(layout, dims, comm.rank).messages())


def _kept(layout: Layout, comm: CommConfig) -> int:
    return num_kept(math.prod(layout.local_shape()), comm.density)


def _top_k_messages(layout: Layout, comm: CommConfig, ranks: int, wide: int) -> Iterator[Message]:
    yield "all_gather", "", ranks * _kept(layout, comm) * (wide + PLACE_BYTES)


def _random_k_messages(layout: Layout, comm: CommConfig, ranks: int, wide: int) -> Iterator[Message]:
    yield "all_reduce", "", wide * _kept(layout, comm)


def _signed_messages(layout: Layout, comm: CommConfig, ranks: int, wide: int) -> Iterator[Message]:
    num_bytes = ranks * served(layout.local_shape(), ranks)
    yield "all_to_all", "", num_bytes
    yield "all_gather", "", num_bytes + 2 * ranks * wide


def _signs_kept(comm: CommConfig, elements: int, ranks: int, wide: int, width: int) -> int:
    """Errors, momenta, which elements move, and the errors of the rows that are served.

    Of local steps: a rank's own momenta, ways and roots, and the weights of the last sum.
    """
    own = (3 * wide + width) * elements if comm.has_local_steps else 0
    return own + (2 * wide + 1) * elements + wide * -(-elements // ranks)


def _is_matrix(shape: tuple[int, ...], comm: CommConfig) -> bool:
    return len(shape) > 1 and math.prod(shape) > 1


def _has_elements(shape: tuple[int, ...], comm: CommConfig) -> bool:
    return math.prod(shape) > 0


COMPRESSIONS: dict[CompressionName, CompressionSpec] = {
    "powersgd": CompressionSpec(
        lambda shape, comm: stack_dims(shape, comm.rank) is not None, _powersgd_messages, PowerSGD, ("rank",)
    ),
    "top_k": CompressionSpec(_is_matrix, _top_k_messages, TopK, ("density",)),
    "random_k": CompressionSpec(_is_matrix, _random_k_messages, RandomK, ("density",)),
    "one_bit": CompressionSpec(_has_elements, _signed_messages, OneBit, ("settled",), _signs_kept),
    "zero_one": CompressionSpec(_has_elements, _signed_messages, ZeroOne, ("start", *LOCAL), _signs_kept),
}


def takes(shape: tuple[int, ...], comm: CommConfig) -> bool:
    """Whether the gradient of a parameter of that shape, whole, is compressed."""
    return comm.compress is not None and COMPRESSIONS[comm.compress].takes(shape, comm)


def trained_rows(table: Mapping[str, Placed]) -> Iterator[tuple[str, Placed]]:
    """Each parameter that is trained, by its first name, in the table's order."""
    return ((name, row) for name, row in table.items() if name == row.names[0] and row.trained)


def compressed_names(table: Mapping[str, Placed], comm: CommConfig) -> list[str]:
    """First names of the parameters whose gradients are compressed, in the table's order."""
    return [name for name, row in trained_rows(table) if takes(row.layout.shape, comm)]


def names_to_compress(table: Mapping[str, Placed], comm: CommConfig) -> list[str]:
    """`compressed_names`.  Raises UserError where there are none."""
    names = compressed_names(table, comm)
    if comm.compress is not None and not names:
        raise UserError(
            f"comm.compress={comm.compress}: no parameter of this model is a matrix that it makes smaller"
            + (
                f" with comm.rank={comm.rank}; give a lower --comm.rank, or"
                if comm.compress == "powersgd"
                else "; give"
            )
            + " no --comm.compress"
        )
    return names


def compressed_bytes(table: Table, comm: CommConfig, mesh: AnyMesh, wide: int = 4) -> Sent:
    """Bytes of the messages of a step in which all of these take part; `wide` of an element."""
    sent: Sent = Sent()
    if comm.compress is None:
        return sent
    data, spec = "+".join(gradient_axes(mesh)), COMPRESSIONS[comm.compress]
    ranks = math.prod(axis_size(mesh, axis) for axis in gradient_axes(mesh))
    for name in compressed_names(table, comm):
        for operation, axis, num_bytes in spec.messages(table[name].layout, comm, ranks, wide):
            sent[operation, axis or data] += num_bytes
    return +sent


def wire_bytes(layout: Layout, comm: CommConfig, ranks: int, wide: int = 4) -> float:
    """Of a compressed parameter, what a rank sends to the data-parallel ranks over its link, by rings."""
    assert comm.compress is not None
    messages = COMPRESSIONS[comm.compress].messages(layout, comm, ranks, wide)
    return sum(num_bytes * wire_share(operation, ranks) for operation, axis, num_bytes in messages if not axis)


def check_axes(comm: CommConfig, mesh: DeviceMesh) -> None:
    """`CommConfig.check_mesh` of a mesh."""
    ep, cp = (axis_size(mesh, axis) if axis in (mesh.mesh_dim_names or ()) else 1 for axis in (EXPERT_AXIS, "cp"))
    comm.check_mesh(pipeline_ranks(mesh), ep, cp)


def compression_of(
    comm: CommConfig, mesh: DeviceMesh, table: Table, dtype: torch.dtype, device: torch.device
) -> Feedback | None:
    """Make what the options say; None without.

    Raises UserError for a mesh that it does not know, and as `names_to_compress` does.
    """
    if comm.compress is None:
        return None
    check_axes(comm, mesh)
    names = names_to_compress(table, comm)
    spec = COMPRESSIONS[comm.compress]
    options = {name: getattr(comm, name) for name in spec.options}
    return spec.makes(names, mesh, table, dtype, device, options, comm.start, comm.report_every)
