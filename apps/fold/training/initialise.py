"""Parameters from a seed: each module's values follow from the seed, its name and its shapes, on any mesh."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from core.config import UserError
from core.layout import layout_of, local


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter of a (sharded) model as its modules' `reset_parameters` do; each rank keeps its part.

    A module draws from a generator of its own, into whole tensors on the CPU, one module at a time.
    """
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        whole = {key: nn.Parameter(torch.empty(layout_of(parameter).shape)) for key, parameter in own.items()}
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        with torch.random.fork_rng(devices=[]), _holding(module, whole):
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            module.reset_parameters()  # pyright: ignore[reportCallIssue]
        for key, parameter in own.items():
            local(parameter).copy_(layout_of(parameter).local(whole[key]))


@contextmanager
def _holding(module: nn.Module, parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """The module has other parameters of its own within, in place of those by the same names."""
    kept = module._parameters
    module._parameters = {**kept, **parameters}
    try:
        yield
    finally:
        module._parameters = kept


@torch.no_grad()
def fill(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give every parameter of a (sharded) model its part of the value of its name."""
    for name, parameter in model.named_parameters():
        if name not in values:
            raise UserError(f"the weights have no {name}; give weights of this model")
        local(parameter).copy_(layout_of(parameter).local(values[name]))
