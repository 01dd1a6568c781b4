"""Sharded checkpoints that survive a crash, by parameter name, and load on any other mesh.

    checkpointer.py   `Checkpointer`: save (asynchronously, atomically, keeping the last n) and load
    shards.py         what PyTorch's Distributed Checkpoint (DCP) is told: this rank's box of each tensor, written once
    tensor_file.py    a rank's file of tensors, each with a checksum
    stored.py         a complete checkpoint on disk: its files, reading it, refusing what is foreign or damaged

What a caller hands over is `name -> tensor`; `core.layout` says which box of the whole each rank's tensor is. Which
form of parallelism cut it, this package does not know.
"""

from core.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from core.checkpoint.shards import staged_bytes
from core.checkpoint.stored import (
    Stored,
    StoredTensor,
    complete_steps,
    decode_rank_values,
    encode_rank_values,
    inspect,
    iterate_full,
    read_full,
)

__all__ = [
    "CheckpointConfig",
    "Checkpointer",
    "Stored",
    "StoredTensor",
    "complete_steps",
    "decode_rank_values",
    "encode_rank_values",
    "inspect",
    "iterate_full",
    "read_full",
    "staged_bytes",
]
