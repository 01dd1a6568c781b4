"""Activation checkpointing: what the forward does not keep, the backward computes again.

    none        keep everything
    full        keep each block's input (Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost)
    selective   keep matrix products and convolutions, compute again what is cheap and large: attention, norms,
                activations (Korthikanti et al. 2022, section 5)

    offload     keep what blocks save on the host, or with `disk` on a drive, and fetch it a block ahead
                (`core.parallel.offload`, `core.parallel.drive`)
    compressed  keep it in fewer bytes, without loss, or, with `bits`, in few bits a number (`core.parallel.encoded`)

`every` n does so with one block of n, the first, the (n+1)-th, … and leaves the others as they are. The last two
compute nothing again.

And over several blocks (`core.trace.segments`, `core.parallel.recompute_chain`):

    sqrt        keep the input of one block in sqrt(l), of l in a module list, and compute a segment again together
    recursive   halves of halves: keep the inputs of log2(l) blocks at a time
    budget      what `core.auto.checkpointing` finds the fastest in the memory that there is, of each block whether it
                keeps its input, results, or everything, there, on the host or in fewer bytes; handed in as segments
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

from core.config import UserError, size_in_bytes
from core.parallel.drive import DiskTier, Drive, OnDrive
from core.parallel.encoded import Compressed
from core.parallel.offload import Offloaded
from core.parallel.pipeline.recompute import Contexts, checkpoint_once
from core.parallel.plan import RECOMPUTED, block_lists, blocks_of
from core.parallel.recompute_chain import RecomputedChain
from core.parallel.results import PRODUCTS, KeptResults
from core.parallel.stored import StoredBlocks
from core.trace.segments import NAMED, Form, Segments, check_segments, size_of

RecomputeMode = Literal["none", "full", "selective", "sqrt", "recursive", "budget", "offload", "compressed"]
SEGMENTED = (*NAMED, "budget")
"""Modes that compute several blocks again from the input of the first."""
STORED = ("offload", "compressed")
"""Modes that compute nothing again, and keep what is saved in another place or form (`core.parallel.stored`)."""


@dataclass(frozen=True)
class RecomputeConfig:
    mode: RecomputeMode = "none"
    every: int = 1
    """recompute, offload or compress one block of this many"""
    budget: str | None = None
    """with mode budget: what a device may hold in a step, all together, such as 8GiB; as little as that asks for is
    computed again"""
    bits: Literal[8, 4] | None = None
    """with mode compressed or budget: bits of a floating number that waits for the backward in fewer; gradients are
    then approximate. None: only what is shorter without loss"""
    host: str | None = None
    """with mode budget: host memory of a rank for activations that wait there, such as 16GiB. None: as much as they
    take, and where the device is a CPU, whose memory it is, none"""
    disk: Path | None = None
    """folder on a drive for activations: with mode offload all of them wait there, with mode budget those that the plan
    sends there"""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"recompute.every={self.every}: one block of how many is recomputed; give at least 1")
        if self.host is not None:
            size_in_bytes(self.host, "recompute.host")
        if self.budget is not None:
            size_in_bytes(self.budget, "recompute.budget")
        elif self.mode == "budget":
            raise UserError(
                "recompute.mode=budget without one; give --recompute.budget, such as 8GiB, or --recompute.mode full"
            )

    @property
    def segmented(self) -> bool:
        """Whether several blocks are computed again from the input of the first."""
        return self.mode in SEGMENTED

    @property
    def recomputes(self) -> bool:
        """Whether blocks are computed again, each from its own input."""
        return self.mode in ("full", "selective")

    @property
    def stored(self) -> bool:
        """Whether what blocks save is kept in another place or form."""
        return self.mode in STORED

    @property
    def room(self) -> dict[Form, int]:
        """Bytes for what waits elsewhere, where an option says them."""
        return {} if self.host is None else {"host": size_in_bytes(self.host, "recompute.host")}

    def unread(self) -> dict[str, str]:
        found = {}
        if self.mode == "none":
            found["every"] = "and nothing is recomputed; give --recompute.mode full"
        elif self.segmented:
            found["every"] = f"with recompute.mode={self.mode}, which says itself what is recomputed; leave it out"
        if self.mode != "budget":
            for name in ("budget", "host"):
                found[name] = f"with recompute.mode={self.mode}, which keeps to none; give --recompute.mode budget"
        if self.mode not in ("offload", "budget"):
            found["disk"] = f"with recompute.mode={self.mode}, which sends nothing there; give --recompute.mode offload"
        if self.mode not in ("compressed", "budget"):
            found["bits"] = f"with recompute.mode={self.mode}, which rounds nothing; give --recompute.mode compressed"
        return found


def apply_recompute(
    model: nn.Module,
    config: RecomputeConfig,
    *,
    in_parts: bool = False,
    segments: Segments | None = None,
    lengths: Sequence[int] | None = None,
    single: bool = False,
    drive: Callable[[], Drive] | None = None,
) -> RecomputedChain | StoredBlocks | None:
    """Wrap the forward of the model's blocks, which stays as `recomputed_forward`; names and parameters stay.

    in_parts  the backward comes in several, each block's values computed again in the first of them
    segments  those of mode budget, of all blocks
    lengths   of the runs of blocks that feed one another; by default of the model's module lists
    single    in the backward of a block the parameters of no other are there, so that no segment may be of several
    drive     makes the file of `config.disk`, when something is sent there

    Returns the chain of a mode that goes over several blocks, or the blocks that store what they save.

    Raises UserError for mode budget without segments, or with some that are of several blocks where none may.
    """
    if config.mode == "none":
        return None
    again = checkpoint_once if in_parts else partial(checkpoint, use_reentrant=False)
    if config.segmented:
        blocks = blocks_of(model)
        if config.mode != "budget":
            if lengths is None or sum(lengths) != len(blocks):
                lengths = [len(some) for some in block_lists(model)]
            segments = tuple(item for length in lengths for item in NAMED[config.mode](length))
        elif segments is None:
            raise UserError(
                "recompute.mode=budget and nobody has chosen what is computed again (core.train.segments does); use "
                "--recompute.mode full, sqrt or recursive here"
            )
        segments = check_segments(segments, len(blocks))
        if single and any(isinstance(item, tuple) and size_of(item) > 1 for item in segments):
            raise UserError(
                f"recompute.mode={config.mode} with zero=3 and segments {segments}: in the backward of a block the "
                "parameters of others are not gathered; let each segment be of one block, or use --zero 2"
            )
        stores: dict[Form, StoredBlocks] = {
            "host": Offloaded([]),
            "compressed": Compressed([], config.bits, foreseen=True),
        }
        if (disk := _disk(config, drive)) is not None:
            stores["disk"] = OnDrive([], disk)
        return RecomputedChain(blocks, segments, stores)
    if config.stored:
        chosen = blocks_of(model)[:: config.every]
        if config.mode == "compressed":
            return Compressed(chosen, config.bits)
        disk = _disk(config, drive)
        return Offloaded(chosen) if disk is None else OnDrive(chosen, disk)
    if config.mode == "selective":
        again = partial(again, context_fn=_products_kept)
    for block in blocks_of(model)[:: config.every]:
        setattr(block, RECOMPUTED, block.forward)
        block.forward = partial(again, partial(_forward, block))
    return None


def _forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return getattr(block, RECOMPUTED)(*args, **kwargs)


def _disk(config: RecomputeConfig, drive: Callable[[], Drive] | None) -> DiskTier | None:
    if config.disk is None:
        return None
    name = f"recompute.disk={config.disk}"
    if drive is None:
        raise UserError(f"{name}: nobody opens files here; leave it out")
    return DiskTier(name, drive)


def _products_kept() -> Contexts:
    """torch's own contexts raise where a product is written into, as a ReLU in place does."""
    products = KeptResults(PRODUCTS)
    return products.keep_all(), products.hand_out()
