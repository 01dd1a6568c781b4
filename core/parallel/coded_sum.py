"""A sum over workers in a few bits, in both directions, with error feedback on both sides.

The elements of a message are dealt out in blocks: worker w adds up the w-th of n runs of them. With C a code of blocks
(`core.comm.block_code`), D what it decodes to, and e and f errors, zero at first:

    c_w = x_w + e_w                  e_w = c_w - D(C(c_w))        all to all: each run of C(c_w) to who adds it up
    a   = sum_w D(C(c_w)) + f        f   = a - D(C(a))            in the order of workers; all-gather of C(a)
    sum = D(C(a))                    alike on all workers

Sums are in the format of what is given: two errors of quantization, whatever n. A message of d elements is of d b / 8
bytes in each direction, and its blocks' scales; a worker sends (n - 1) / n of it, of an all-reduce's 4 d as often.

Tang et al. 2019, DoubleSqueeze, arXiv:1905.05957, algorithm 1; Thérien et al. 2025, MuLoCo, arXiv:2505.23725.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from core.comm.block_code import BlockCode
from core.comm.volume import wire_share
from core.layout import layout_of, tag


class CodedSum:
    """errors  name -> e of this worker, tagged as what is summed
    sent  bytes that this worker has sent since it was set to zero
    """

    def __init__(
        self,
        code: BlockCode,
        like: Mapping[str, Tensor],
        messages: Sequence[Sequence[str]],
        group: ProcessGroup,
        feeds_back: bool = True,
    ):
        """like: name -> a tensor of the kind that is summed, which says how it lies.  messages: names of each."""
        self.code, self.like, self.messages, self.group = code, like, messages, group
        self.num_workers, self.worker, self.feeds_back, self.sent = group.size(), group.rank(), feeds_back, 0.0
        self.errors: dict[str, Tensor] = {}
        if feeds_back:
            self.errors = {n: tag(torch.zeros_like(value), layout_of(value)) for n, value in like.items()}
        self._own = [self._zeros(names) for names in messages] if feeds_back else []
        self._dense: dict[str, Tensor] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """What this keeps from sum to sum."""
        return [*self.errors.values(), *self._own]

    def _zeros(self, names: Sequence[str]) -> Tensor:
        """A run of blocks of a message."""
        some = self.like[names[0]]
        return some.detach().new_zeros(self._num_blocks(names), self.code.block)

    def _num_blocks(self, names: Sequence[str]) -> int:
        """Blocks of each worker's run."""
        elements = sum(self.like[name].numel() for name in names)
        return -(-elements // (self.code.block * self.num_workers))

    @torch.no_grad()
    def sum(self, index: int, given: Tensor) -> Tensor:
        """The sum of the workers' messages of that index, flat, in the order of their names."""
        names, code = self.messages[index], self.code
        self._dense = {}  # of a checkpoint that is written
        if not given.numel():
            return given
        blocks = given.new_zeros(self.num_workers * self._num_blocks(names), code.block)
        flat = blocks.view(-1)[: given.numel()]
        flat.copy_(given)
        if self.feeds_back:
            flat += torch.cat([self.errors[name].flatten() for name in names])
        coded = code.encode(blocks)
        if self.feeds_back:
            blocks -= code.decode(coded, given.dtype)
            for name, left in self._pieces(names, flat):
                self.errors[name].copy_(left)
        arrived = torch.empty_like(coded)
        dist.all_to_all_single(arrived, coded, group=self.group)
        own = self._zeros(names)
        for of_worker in arrived.chunk(self.num_workers):
            own += code.decode(of_worker, given.dtype)
        if self.feeds_back:
            own += self._own[index]
        behind = max(0, given.numel() - self.worker * own.numel())  # elements; then zeros that fill the last blocks
        own.view(-1)[behind:] = 0
        coded_sum = code.encode(own)
        if self.feeds_back:
            self._own[index] = own - code.decode(coded_sum, given.dtype)
            self._own[index].view(-1)[behind:] = 0
        dist.all_gather_into_tensor(coded.view(-1), coded_sum.view(-1), group=self.group)
        for operation in ("all_to_all", "all_gather"):
            self.sent += wire_share(operation, self.num_workers) * coded.nbytes
        return code.decode(coded, given.dtype).flatten()[: given.numel()]

    def waiting(self, index: int) -> Tensor:
        """What of this worker's has not been sent of a message, flat: e, and f of the run that it adds up."""
        names = self.messages[index]
        if not self.feeds_back:
            return torch.cat([torch.zeros_like(self.like[name]).flatten() for name in names])
        found, own = torch.cat([self.errors[name].flatten() for name in names]), self._own[index].flatten()
        run = found[self.worker * own.numel() :][: own.numel()]
        run += own[: run.numel()]
        return found

    def _pieces(self, names: Sequence[str], flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        for name, piece in zip(names, flat.split([self.like[name].numel() for name in names]), strict=True):
            yield name, piece.view_as(self.like[name])

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def stored(self, worker: str) -> dict[str, Tensor]:
        """Tensors of a checkpoint, under names that begin with `worker`.

        f is stored as every worker's part of it, zero elsewhere: what matters is their sum. `restored` takes it back.
        """
        found = {f"{worker}error/{name}": error for name, error in self.errors.items()}
        self._dense = {}
        for names, own in zip(self.messages, self._own):
            whole = own.new_zeros(self.num_workers, own.numel())
            whole[self.worker] = own.flatten()
            elements = sum(self.like[name].numel() for name in names)
            for name, piece in self._pieces(names, whole.flatten()[:elements]):
                self._dense[name] = tag(piece.contiguous(), layout_of(self.like[name]))
        return found | {f"{worker}sum_error/{name}": value for name, value in self._dense.items()}

    @torch.no_grad()
    def restored(self) -> None:
        """Take over what was loaded into `stored`'s tensors.  A collective of the workers."""
        for index, names in enumerate(self.messages):
            if not self._own:
                break
            own = self._own[index]
            flat = own.new_zeros(self.num_workers * own.numel())
            elements = sum(self.like[name].numel() for name in names)
            torch.cat([self._dense[name].flatten() for name in names], out=flat[:elements])
            dist.all_reduce(flat, group=self.group)
            self._own[index] = flat.view(self.num_workers, *own.shape)[self.worker].clone()
        self._dense = {}
