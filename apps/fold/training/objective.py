"""A batch through the model to the loss of `fit`."""

from typing import Literal

from torch import Tensor, nn

from apps.fold.loss.total import LossConfig, losses, weighted
from apps.fold.model.alphafold import AlphaFold
from apps.fold.training.batches import iterations_of, resolution_of, truth_of

CONFIDENCE = ("plddt", "pae")
"""Parts of the loss that rows with a shuffled sequence have."""
OF_EXPERIMENTS = (*CONFIDENCE, "experimentally_resolved")
"""Parts of the loss that rows of predictions have not."""


def confidence_alone(network: AlphaFold) -> AlphaFold:
    """Let only the confidence heads learn from now on, of structures as predictions have them, without dropout."""
    network.eval().requires_grad_(False)
    for head in (network.heads.plddt, network.heads.pae):
        if head is not None:
            head.requires_grad_()
    return network


class Objective:
    """(model, batch) -> the mean over rows of the loss times the root of the row's residues (supplement, 1.9).

    learns  confidence: only its parts of the loss count
    """

    def __init__(self, config: LossConfig, learns: Literal["all", "confidence"] = "all"):
        self.config, self.learns = config, learns

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
            truth_of(batch, prediction.positions_BN373),
            batch["letters"],
            batch["hidden"].to(dtype),
            resolution_of(batch),
            self.config,
        )
        if self.learns == "confidence":
            return {name: found[name] for name in CONFIDENCE if name in found}
        taught, measured = batch["taught"].to(dtype), batch["measured"].to(dtype)
        found = {name: part if name in CONFIDENCE else part * taught for name, part in found.items()}
        return {name: part * measured if name in OF_EXPERIMENTS else part for name, part in found.items()}
