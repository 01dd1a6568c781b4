"""Sparse gradients: a share of the elements of each, with error feedback for the rest.

    top_k      of each parameter every rank sends its ceil(density n) elements of the largest magnitude, with their
               places, to all others, which add up what has come, in the order of ranks
    random_k   the same ceil(density n) places on every rank, drawn anew in each step: only values are sent, and summed

random_k's places are one of each of k equal stretches of the flat parameter, from a generator seeded by its name and
the step, so that all ranks know them: n ranks do what one does with the sum of their gradients and errors. What top_k
finds depends on each rank's own gradient. Of a parameter that a plan cuts, each part is one by itself.

Stich et al. 2018, Sparsified SGD with memory, arXiv:1809.07599, algorithm 1; Lin et al. 2018, Deep gradient
compression, arXiv:1712.01887, section 3.1.
"""

import hashlib
import math

import torch
from torch import Tensor

from core.parallel.feedback import Feedback, gathered, sum_together

PLACE_BYTES = 4


def num_kept(num_elements: int, density: float) -> int:
    return math.ceil(density * num_elements)


class Sparse(Feedback):
    """Option: density, the share of a parameter's elements that is sent, above 0 and at most 1."""

    @property
    def density(self) -> float:
        return self.options["density"]


class TopK(Sparse):
    name = "top_k"

    def exchange(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        flat = {name: c.view(-1) for name, c in given.items()}
        places = {n: c.abs().topk(num_kept(len(c), self.density), sorted=False).indices for n, c in flat.items()}
        values = torch.cat([flat[name][at] for name, at in places.items()])
        whole_values = gathered(values, self.axis)
        whole_places = gathered(torch.cat([*places.values()]).int(), self.axis)
        found = {name: torch.zeros_like(c) for name, c in flat.items()}
        lengths = [len(at) for at in places.values()]
        for of_rank, at_rank in zip(whole_values, whole_places, strict=True):
            for name, own, at in zip(flat, of_rank.split(lengths), at_rank.split(lengths), strict=True):
                found[name].index_add_(0, at, own)
        for name, at in places.items():
            flat[name][at] = 0
        return {name: total.view_as(given[name]) for name, total in found.items()}


class RandomK(Sparse):
    name = "random_k"

    def exchange(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        flat = {name: c.view(-1) for name, c in given.items()}
        places = self._all_places(flat)
        values = [flat[name][at] for name, at in places.items()]
        sum_together(values, self.axis)
        found = {name: torch.zeros_like(c) for name, c in flat.items()}
        for (name, at), summed in zip(places.items(), values, strict=True):
            found[name][at] = summed
            flat[name][at] = 0
        return {name: total.view_as(given[name]) for name, total in found.items()}

    def _all_places(self, flat: dict[str, Tensor]) -> dict[str, Tensor]:
        """In one copy, for which nobody waits."""
        drawn = [self._places(name, len(c)) for name, c in flat.items()]
        whole, device = torch.cat(drawn), next(iter(flat.values())).device
        if device.type == "cuda":
            whole = whole.pin_memory()
        whole = whole.to(device, non_blocking=True)
        return dict(zip(flat, whole.split([len(places) for places in drawn]), strict=True))

    def _places(self, name: str, num_elements: int) -> Tensor:
        """Of this rank's part, flat, the elements that are sent in this step."""
        key = f"random_k/{name}/{self.table[name].layout.stretches()}/{self.steps}"
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
        kept = num_kept(num_elements, self.density)
        drawn = torch.empty(kept, dtype=torch.float64, device="cpu").uniform_(generator=generator)
        places = (torch.arange(kept, dtype=torch.float64, device="cpu") + drawn) * (num_elements / max(1, kept))
        return places.long().clamp_(max=num_elements - 1)
