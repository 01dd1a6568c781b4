"""Messages of rows in a few bits: a gather and a sum of the rows that ranks hold, each coded once.

A message [ranks, elements] has a row for each rank, of parts one behind another (`core.parallel.rows`). A part is coded
in blocks of its own (`core.comm.block_code.RoundedCode`), the last one filled with zeros, or sent as it is.

    gather   every rank codes its own row; all decode what has come, and so their own
    sum      every rank codes all rows; those that are a rank's go to it, which decodes and adds them up, in the order
             of ranks. Between nodes of several ranks in two steps: first within the node, then what that comes to is
             coded again and goes to the rank in the same place of the row's node

So a sum has one error of quantization a step, whatever the number of ranks: sums that go round a ring would have one
for each rank. Sums are in the format of what is given.

Wang et al. 2023, ZeRO++, arXiv:2306.10209, sections 3.1 and 3.3.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from core.comm.block_code import RoundedCode

AT_A_TIME = 2**21
"""Elements that are coded together, in the format of the sums."""


class RowPart(NamedTuple):
    """Elements of one rank's row that are of one tensor."""

    elements: int
    is_coded: bool


class CodedRows:
    """How rows of such parts are sent: the blocks of all that are coded, then the others."""

    def __init__(self, code: RoundedCode, parts: Sequence[RowPart]):
        self.code, self.elements = code, sum(part.elements for part in parts)
        self._coded: list[tuple[slice, slice]] = []  # of each part: its place in a row, and in its blocks
        self._plain: list[slice] = []
        at = blocks = 0
        for elements, is_coded in parts:
            here = slice(at, at + elements)
            if is_coded:
                self._coded.append((here, slice(blocks * code.block, blocks * code.block + elements)))
                blocks += -(-elements // code.block)
            else:
                self._plain.append(here)
            at += elements
        self.num_blocks = blocks
        self.num_plain = sum(here.stop - here.start for here in self._plain)

    def num_bytes(self, width: int) -> int:
        """Of a row, whose elements have `width` bytes each."""
        return self.num_blocks * self.code.num_bytes + width * self.num_plain

    @torch.no_grad()
    def encode(self, rows: Tensor) -> Tensor:
        """[R, elements] -> uint8[R, num_bytes]."""
        assert rows.shape[1] == self.elements, f"rows of {rows.shape[1]} elements are not those of {self.elements}"
        wide = torch.promote_types(rows.dtype, torch.float32)
        message = rows.new_empty(len(rows), self.num_bytes(rows.element_size()), dtype=torch.uint8)
        behind = self.num_blocks * self.code.num_bytes
        for some in self._some(len(rows)):
            given = rows[some]
            blocks = given.new_zeros(len(given), self.num_blocks * self.code.block, dtype=wide)
            for here, there in self._coded:
                blocks[:, there] = given[:, here]
            message[some, :behind] = self.code.encode(blocks.view(-1, self.code.block)).view(len(given), -1)
        if self._plain:
            plain = torch.cat([rows[:, here] for here in self._plain], 1)
            message[:, behind:] = plain.view(torch.uint8)
        return message

    @torch.no_grad()
    def decode(self, message: Tensor, rows: Tensor) -> None:
        """uint8[R, num_bytes] -> into [R, elements]."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        behind = self.num_blocks * self.code.num_bytes
        for some in self._some(len(rows)):
            found = rows[some]
            coded = message[some, :behind].reshape(-1, self.code.num_bytes)
            blocks = self.code.decode(coded, wide).view(len(found), -1)
            for here, there in self._coded:
                found[:, here] = blocks[:, there]
        if self._plain:
            plain = message[:, behind:].clone(memory_format=torch.contiguous_format).view(rows.dtype)
            sizes = [here.stop - here.start for here in self._plain]
            for here, part in zip(self._plain, plain.split(sizes, 1), strict=True):
                rows[:, here] = part

    def _some(self, num_rows: int) -> Iterator[slice]:
        if not self.num_blocks:
            return
        step = max(1, AT_A_TIME // (self.num_blocks * self.code.block))
        for first in range(0, num_rows, step):
            yield slice(first, min(first + step, num_rows))


RowCode = Callable[[int], CodedRows]
"""Features of a row -> how it is sent, by itself."""


def rows_in_8_bits(features: int) -> CodedRows:
    """Of each token, in blocks of up to 256 features that are as long as they divide."""
    num_blocks = max(1, -(-features // 256))
    return CodedRows(RoundedCode(8, max(1, -(-features // num_blocks))), [RowPart(features, is_coded=True)])


def gather_coded(whole: Tensor, own: Tensor, rows: CodedRows, group: ProcessGroup) -> None:
    """own[elements] of each rank, coded and decoded again -> into whole[ranks, elements], alike on all of them.

    own may lie in whole.
    """
    message = rows.encode(own.view(1, -1))
    messages = message.new_empty(len(whole), message.shape[1])
    dist.all_gather_into_tensor(messages.view(-1), message.view(-1), group=group)
    rows.decode(messages, whole)


def sum_coded(
    whole: Tensor,
    rows: CodedRows,
    within: ProcessGroup | None,
    between: ProcessGroup | None,
    lost: Tensor | None = None,
) -> Tensor:
    """whole[ranks, elements] of each rank -> this rank's row of their sum.

    within   the ranks of a node, which are neighbours; None: each is a node
    between  those in the same place of other nodes; None: there is one node
    lost     [ranks, elements], is filled with what this rank's codes have left out: of `whole`, and of the node's sums
             that it has coded for the ranks in its place of other nodes. Over all ranks it is what the sums lack
    """
    for group in filter(None, (within, between)):
        message = rows.encode(whole)
        if lost is not None and group is between and within is not None:
            of_sums = _left_out(message, whole, rows, torch.empty_like(whole))
            lost.unflatten(0, (-1, within.size()))[:, within.rank()] += of_sums
        elif lost is not None:
            _left_out(message, whole, rows, lost)
        whole = _summed(message.unflatten(0, (-1, group.size())), whole, rows, group)
    return whole.view(-1)


def _left_out(message: Tensor, given: Tensor, rows: CodedRows, lost: Tensor) -> Tensor:
    """What decoding lacks of what was given, in `lost`."""
    rows.decode(message, lost)
    return torch.sub(given, lost, out=lost)


def _summed(message: Tensor, like: Tensor, rows: CodedRows, group: ProcessGroup) -> Tensor:
    """message uint8[R, ranks, num_bytes], the second dim to whom -> [R, elements]."""
    sent = message.transpose(0, 1).contiguous()
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived.view(-1), sent.view(-1), group=group)
    total = like.new_zeros(arrived.shape[1], rows.elements)
    one = torch.empty_like(total)
    for of_rank in arrived:
        rows.decode(of_rank, one)
        total += one
    return total
