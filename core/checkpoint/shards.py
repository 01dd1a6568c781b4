"""Tensors for Distributed Checkpoint (DCP): each is the box of the whole that this rank holds.

DCP understands the placements of DTensor as far as torch cuts with them. Ours may be local tensors that a
layout describes, so every tensor goes in through DCP's `_Checkpointable` protocol as a `Shard`: offsets, sizes, data of
each box.

Replicas are written once. DCP's own removal of duplicates weighs a shard by the size of its whole tensor and goes by
name; `write_once` weighs what is written and places the largest first, so that the ranks write about the same.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from core.layout import layout_of, local
from core.pinned import host_empty


class Shard:
    """This rank's boxes of a tensor, as DCP's `_Checkpointable` protocol wants to see them: one, unless it is in parts.

    dtype  of the tensor
    shape  of the whole tensor
    boxes  where a box begins in the whole -> what is there, without gradient: views of the local tensor, so that
           loading writes into it; a save may put copies in their place. Empty where this rank holds nothing of it
    """

    def __init__(self, tensor: Tensor) -> None:
        layout, own = layout_of(tensor), local(tensor).detach()
        self.dtype, self.shape = own.dtype, torch.Size(layout.shape)
        # An empty shard of a tensor with elements has no item: its offset may be that of a neighbour that has rows.
        # A whole tensor without elements keeps one, for its name, shape and dtype.
        empty = own.numel() == 0 and math.prod(self.shape) > 0
        boxes = [] if empty else layout.boxes()
        self.boxes = {torch.Size(s.start for s in there): own[here] for here, there in boxes}

    def size(self) -> torch.Size:
        """Shape of the whole; DCP compares it with what was saved."""
        return self.shape

    def numel(self) -> int:
        """Elements that are here."""
        return sum(value.numel() for value in self.boxes.values())

    def __create_write_items__(self, name: str, _) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, value.shape) for offsets, value in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.boxes[index.offset]


class SavePlanner(DefaultSavePlanner):
    """Plans which rank writes which box.  `metadata` holds the whole plan afterwards, on the coordinator."""

    def __init__(self, shards: dict[str, Shard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.set_up_planner(shards)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return super().create_global_plan(write_once(all_plans))

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class LoadPlanner(DefaultLoadPlanner):
    """Plans which part of which stored chunk goes into which place of this rank's boxes.  `plan` is the result."""

    def __init__(self, shards: dict[str, Shard], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        # Not by set_up_planner, which would first walk through the shards for tensors on the meta device.
        self.state_dict, self.metadata = shards, metadata
        self.plan = self.create_local_plan()

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


def write_once(plans: list[SavePlan]) -> list[SavePlan]:
    """Leave each box to one of its holders: first what only one rank holds, then the largest to the least busy."""
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    nbytes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders[item.index].append(rank)
            nbytes[item.index] = item_bytes(item)
    planned_bytes, writer = [0] * len(plans), {}
    for index in sorted(holders, key=lambda i: (len(holders[i]) > 1, -nbytes[i])):
        writer[index] = min(holders[index], key=lambda rank: planned_bytes[rank])
        planned_bytes[writer[index]] += nbytes[index]
    return [
        replace(plan, items=[item for item in plan.items if writer[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def item_bytes(item: WriteItem) -> int:
    """Bytes of the box that an item writes."""
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def staged_bytes(tensor_bytes: int, holders: int = 1) -> int:
    """Bytes that an asynchronous save copies on a rank (`Staging`); they stay in CPU memory from the first save on.

    tensor_bytes  of the rank's tensors that are saved
    holders       ranks that hold the same; each box is left to one, so that all write about as much (`write_once`)
    """
    return -(-tensor_bytes // holders)


class Staging:
    """CPU copies of what a rank is to write, so that training may change the tensors while a thread writes them.

    The buffers (pinned where the tensors lie on CUDA) live on from save to save: allocating pinned memory is slow.
    """

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, Tensor] = {}

    def copy(self, boxes: Iterable[tuple[MetadataIndex, Shard]]) -> None:
        """Put a copy in the place of each box of a shard; returns when the copies are made."""
        kept, on_gpus = {}, set[torch.device]()
        for index, shard in boxes:
            assert index.offset is not None
            value = shard.boxes[index.offset]
            kept[index] = self._buffer(index, value)
            kept[index].copy_(value, non_blocking=True)
            if value.is_cuda:
                on_gpus.add(value.device)
            shard.boxes[index.offset] = kept[index]
        self._buffers = kept
        for device in on_gpus:
            torch.cuda.current_stream(device).synchronize()

    def _buffer(self, index: MetadataIndex, data: Tensor) -> Tensor:
        buffer = self._buffers.get(index)
        if buffer is None or buffer.shape != data.shape or buffer.dtype != data.dtype:
            return host_empty(data.numel(), data.dtype, pinned=data.is_cuda).view(data.shape)
        return buffer
