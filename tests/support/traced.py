"""Models of transformers, diffusers and our own, tiny, on ragged shapes: what the tracer of graphs is held to."""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import foreign, zoo

os.environ["HF_HUB_OFFLINE"] = "1"
ROWS, LENGTH = 3, 5


@dataclass(frozen=True)
class Case:
    """A model, what it is given, and its loss where its output has none."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    loss: Callable[[Any], Tensor] | None = None


def _text(vocabulary: int = foreign.VOCABULARY) -> dict[str, Any]:
    ids = torch.randint(3, vocabulary, (ROWS, LENGTH))
    return {"input_ids": ids, "labels": ids.flip(1)}


def _tokens() -> dict[str, Any]:
    return _text() | {"use_cache": False}


def _pictures() -> dict[str, Any]:
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": torch.arange(ROWS) % 2}


def gpt2() -> nn.Module:
    """With its dropout."""
    return foreign.DROPPING["gpt2 with dropout"].make()


def convnext(drop_path: float = 0.1) -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes: dict[str, Any] = {"num_stages": 2, "hidden_sizes": [12, 20], "depths": [1, 2], "patch_size": 4}
    return ConvNextForImageClassification(ConvNextConfig(**sizes, drop_path_rate=drop_path, num_labels=5))


def _noisy() -> dict[str, Any]:
    context = torch.randn(ROWS, 3, 8)
    return {"sample": torch.randn(ROWS, 2, 4, 4), "timestep": torch.arange(ROWS), "encoder_hidden_states": context}


def evoformer() -> nn.Module:
    from apps.fold.model.evoformer import EvoformerBlock
    from tests.support.fold import one_block

    config = one_block()
    return EvoformerBlock(config.msa_dim, config.pair_dim, config.evoformer)


def alignment() -> dict[str, Any]:
    from tests.support.fold import one_block

    config, num_rows, num_residues = one_block(), 5, 7
    drawn = {"m_BSND": torch.randn(1, num_rows, num_residues, config.msa_dim)}
    drawn |= {"z_BNNZ": torch.randn(1, num_residues, num_residues, config.pair_dim)}
    masks = {"msa_mask_BSN": torch.ones(1, num_rows, num_residues)}
    return drawn | masks | {"pair_mask_BNN": torch.ones(1, num_residues, num_residues)}


CASES = {
    "gpt2": Case(gpt2, _tokens),
    "opt": Case(foreign.opt, _tokens),
    "bloom": Case(foreign.bloom, _tokens),
    "t5": Case(foreign.t5, _tokens),
    "vit": Case(foreign.vit, _pictures),
    "convnext": Case(convnext, _pictures),
    "unet": Case(zoo.unet, _noisy, lambda output: output.sample.square().mean()),
    "evoformer": Case(evoformer, alignment, lambda output: sum(part.square().mean() for part in output)),
}


def broad(few: Collection[str]) -> list[Any]:
    """Those beyond the few are for `make soak`."""
    return [pytest.param(name, id=name, marks=() if name in few else pytest.mark.soak) for name in CASES]
