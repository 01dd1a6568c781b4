"""The loss that a model is trained on, and what it is a mean over: the targets, next tokens or masked ones."""

from torch import Tensor, nn

from core.data.batches import IGNORED
from core.nn.attention import StepContext
from core.optim.prediction import Prediction


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy in nats over the targets of a microbatch (0 where there are none)."""
    return summed_loss(model, batch) / num_targets(batch).clamp(min=1)


def summed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The same, summed over the targets."""
    context = StepContext(batch.get("documents"))
    return model(batch["input_ids"], positions=batch.get("positions"), context=context, targets=batch["targets"])


def predicted(model: nn.Module, batch: dict[str, Tensor]) -> Prediction:
    """The logits at each place, which `token_loss` is of; what optimizers that look at curvature ask for."""
    context = StepContext(batch.get("documents"))
    logits = model(batch["input_ids"], positions=batch.get("positions"), context=context)
    return Prediction(logits, "targets", "categorical")


def num_targets(batch: dict[str, Tensor]) -> Tensor:
    """Targets of the microbatch that are counted."""
    return (batch["targets"] != IGNORED).sum()
