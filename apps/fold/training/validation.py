"""lDDT of chains, or of complexes, that a run does not learn from, with the average of its weights."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apps.fold.features.msa import draw
from apps.fold.loss.heads import lddt
from apps.fold.model import heads, residues
from apps.fold.model.config import ModelConfig, MultimerConfig
from apps.fold.training.batches import iterations_of, row_of, row_of_complex, stacked, truth_of
from apps.fold.training.complexes import ComplexExample
from apps.fold.training.dataset import Dataset
from core.optim.average import WeightAverage
from core.parallel.parallel_model import ParallelModel

FIGURES = ("validation_lddt_ca", "validation_plddt")


def validation(
    dataset: Dataset,
    model: ModelConfig,
    parallel: ParallelModel,
    average: WeightAverage | None,
    axis: Any,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> Callable[[nn.Module], Mapping[str, float]]:
    """model -> means over all chains: lDDT of CA against the experiment, and the lDDT that the model predicts, 0 to 1.

    Whole chains, one after the other, each rank its share; every rank calls the model equally often, since where
    parameters are sharded a call is a collective.
    """

    def evaluate(network: nn.Module) -> Mapping[str, float]:
        if average is None:
            return _mean(network)
        with parallel.showing(average):
            return _mean(network)

    def _mean(network: nn.Module) -> Mapping[str, float]:
        ranks = axis.size()
        total = torch.zeros(len(FIGURES), dtype=torch.float64, device=device)
        for first in range(0, len(dataset), ranks):
            number = first + axis.get_local_rank()
            batch = _batch(dataset, min(number, len(dataset) - 1), model, device, dtype, seed)
            if number < len(dataset):
                total += _scores(network, batch)
            else:
                network(iterations_of(batch))
        if ranks > 1:
            dist.all_reduce(total, group=axis.get_group())
        return dict(zip(FIGURES, (total / len(dataset)).tolist(), strict=True))

    return evaluate


def _batch(
    dataset: Dataset, number: int, model: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int
) -> dict[str, Tensor]:
    """One chain or complex, with all recycling iterations; the same draws at every validation."""
    example = dataset[number]
    generator = np.random.default_rng([seed, number])
    iterations = model.num_recycles + 1
    if isinstance(example, ComplexExample):
        assert isinstance(model, MultimerConfig)
        templates = [range(min(count, model.max_templates)) for count in example.num_templates]
        row = row_of_complex(example, model, iterations, generator, templates, np.arange(len(example)))
    else:
        example = replace(example, templates=example.templates[: model.max_templates])
        row = row_of(example, [draw(example.alignment, model, generator) for _ in range(iterations)], model)
    batch = stacked([row])
    return {k: v.to(device, dtype if v.is_floating_point() else None) for k, v in batch.items()}


def _scores(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    prediction = network(iterations_of(batch))
    truth = truth_of(batch, prediction.positions_BN373)
    mask_BN = truth.atom37_mask_BN37[..., residues.CA]
    predicted, true = (x[..., residues.CA, :] for x in (prediction.positions_BN373, truth.atom37_BN373))
    found = (lddt(predicted, true, mask_BN), heads.plddt(prediction.logits.plddt) / 100)
    return torch.stack([((x * mask_BN).sum() / mask_BN.sum()).double() for x in found])
