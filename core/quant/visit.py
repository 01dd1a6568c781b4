"""A model that stays on the host is read on a device: what runs is there, the rest is not.

What is outside of the blocks (embeddings, norms, the head) lies on the device meanwhile, and of the blocks the one that
runs. It stays until another comes, so that a block that is read many times moves once, and so that its backward, which
follows on its being computed again, finds it there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from core.compat import tree_map_only


class Visit:
    """device: where modules are read; None: where they are, and nothing moves."""

    def __init__(self, device: torch.device | None):
        self.device = device
        self.here: nn.Module | None = None
        self._home = torch.device("cpu")

    def bring(self, block: nn.Module) -> None:
        """The block is on the device from now on, and the one before is not."""
        if self.device is None or self.here is block:
            return
        self.leave()
        _move(block, self.device)
        self.here = block

    def leave(self) -> None:
        """The block that is on the device goes home."""
        if self.here is not None:
            _move(self.here, self._home)
            self.here = None

    def copied(self, block: nn.Module) -> nn.Module:
        """A copy of a block beside it, which runs there."""
        self.bring(block)
        twin = copy.deepcopy(block)
        if self.device is not None:
            del twin.forward  # which would bring the block
        return twin

    def moved(self, value: Any) -> Any:
        """Tensors in it, on the device."""
        if self.device is None:
            return value
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), value)

    @contextmanager
    def through(self, model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Let the model and its blocks be called inside. A model without blocks is on the device whole."""
        if self.device is None:
            yield
            return
        inside = {id(module) for block in blocks for module in block.modules()}
        outer = [module for module in model.modules() if id(module) not in inside]
        self._home = next((p.device for p in model.parameters()), self._home)
        for module in outer:
            _move(module, self.device, recurse=False)
        own = [vars(block).get("forward") for block in blocks]
        for block in blocks:
            block.forward = self._visiting(block)
        try:
            yield
        finally:
            self.leave()
            for block, forward in zip(blocks, own, strict=True):
                del block.forward
                if forward is not None:
                    block.forward = forward
            for module in outer:
                _move(module, self._home, recurse=False)

    def _visiting(self, block: nn.Module) -> Any:
        forward = block.forward

        def here(*args: Any, **kwargs: Any) -> Any:
            self.bring(block)
            return forward(*args, **kwargs)

        def visited(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return here(*args, **kwargs)
            # Computed again in the backward: by then the block has left.
            return checkpoint(here, *args, use_reentrant=False, **kwargs)

        return visited


def _move(module: nn.Module, device: torch.device, recurse: bool = True) -> None:
    module._apply(lambda tensor: tensor.to(device), recurse=recurse)
