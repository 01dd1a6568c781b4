"""A batch through the model to the loss of `fit`."""

from torch import Tensor, nn

from apps.fold.loss.total import LossConfig, losses, weighted
from apps.fold.training.batches import iterations_of, resolution_of, truth_of

CONFIDENCE = ("plddt", "pae")
"""Parts of the loss that rows with a shuffled sequence have."""


class Objective:
    """(model, batch) -> the mean over rows of the loss times the root of the row's residues (supplement, 1.9)."""

    def __init__(self, config: LossConfig):
        self.config = config

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        parts = self.parts(model, batch)
        residues_B = batch["mask"].to(next(iter(parts.values())).dtype).sum(-1)
        return (weighted(parts, self.config) * residues_B.sqrt()).mean()

    def parts(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The parts of the loss [B], before their weights."""
        iterations = iterations_of(batch)
        prediction = model(iterations)
        dtype = prediction.positions_BN373.dtype
        found = losses(
            prediction,
            iterations[-1],
            truth_of(batch),
            batch["letters"],
            batch["hidden"].to(dtype),
            resolution_of(batch),
            self.config,
        )
        taught = batch["taught"].to(dtype)
        return {name: part if name in CONFIDENCE else part * taught for name, part in found.items()}
