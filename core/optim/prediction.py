"""What a model says of its targets before there is a loss: a distribution for each item, which curvature is made from.

    categorical  outputs[rows, .., C] are logits of C classes     targets[rows, ..], int64; -100: no item
    bernoulli    outputs[rows, .., C] are C logits                targets[rows, .., C], from 0 to 1
    normal       outputs[rows, .., C] are means                   targets[rows, .., C]

The loss of an item is -log p(target), over the C outputs of an item a sum, up to a constant, and that of a batch the
mean over its items. `drawn_targets` samples the targets of K-FAC's Fisher information: those of a row follow from
(seed, step, row of the whole batch), so n ranks draw what one does. `exact_fisher` needs no samples and C backwards.

Martens and Grosse 2015, arXiv:1503.05671, section 2 (why the model's own targets); Kunstner et al. 2019 (what the
empirical Fisher, of the true targets, is not).
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.config import UserError

IGNORED = -100


@dataclass(frozen=True)
class Prediction:
    """outputs  [rows, .., C], as the module's docstring says
    targets   the entry of the batch that they predict
    variance  of a normal's every output; F.mse_loss, a mean over C outputs, is -log p at C / 2
    """

    outputs: Tensor
    targets: str
    kind: Literal["categorical", "bernoulli", "normal"]
    variance: float = 1.0


Predict = Callable[[nn.Module, dict[str, Tensor]], Prediction]
"""(model, batch) -> what the model predicts of the batch."""


@dataclass(frozen=True)
class Drawing:
    """Which draws: those of some rows of a step's whole batch, the first of which is `first_row`."""

    seed: int
    step: int
    first_row: int

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """[rows, ..] from 0 to 1, fp64 on the CPU, each row's own."""
        return torch.stack([torch.rand(shape[1:], dtype=torch.float64, generator=g) for g in self._of_rows(shape[0])])

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """The same of the standard normal distribution."""
        return torch.stack([torch.randn(shape[1:], dtype=torch.float64, generator=g) for g in self._of_rows(shape[0])])

    def _of_rows(self, rows: int) -> Iterator[torch.Generator]:
        for row in range(self.first_row, self.first_row + rows):
            digest = hashlib.blake2b(f"fisher/{self.seed}/{self.step}/{row}".encode(), digest_size=8).digest()
            yield torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def drawn_targets(prediction: Prediction, given: Tensor, drawing: Drawing) -> Tensor:
    """Targets that the model itself draws, like the given ones; what is no item of those stays none."""
    outputs, kind = prediction.outputs.double(), prediction.kind
    _check(prediction, given)
    if kind == "normal":
        noise = drawing.normal(tuple(outputs.shape)).to(outputs.device)
        return (outputs + prediction.variance**0.5 * noise).to(given.dtype)
    if kind == "bernoulli":
        return (drawing.uniform(tuple(outputs.shape)).to(outputs.device) < outputs.sigmoid()).to(given.dtype)
    up_to = outputs.softmax(-1).cumsum(-1)
    places = drawing.uniform(tuple(given.shape)).to(outputs.device)[..., None] * up_to[..., -1:]
    drawn = torch.searchsorted(up_to.contiguous(), places.contiguous(), right=True)[..., 0]
    return drawn.clamp_(max=outputs.shape[-1] - 1).masked_fill_(given == IGNORED, IGNORED)


def mean_loss(prediction: Prediction, given: Tensor) -> Tensor:
    """The mean of -log p over the items of the batch, a scalar (0 where there are none)."""
    outputs, num_outputs = prediction.outputs, prediction.outputs.shape[-1]
    _check(prediction, given)
    if prediction.kind == "categorical":
        summed = F.cross_entropy(outputs.reshape(-1, num_outputs), given.reshape(-1), reduction="sum")
        return summed / (given != IGNORED).sum().clamp(min=1)
    if prediction.kind == "bernoulli":
        summed = F.binary_cross_entropy_with_logits(outputs, given.to(outputs.dtype), reduction="sum")
    else:
        summed = (outputs - given).square().sum() / (2 * prediction.variance)
    return summed / max(1, outputs.numel() // max(1, num_outputs))


def exact_fisher(prediction: Prediction, given: Tensor) -> list[Tensor]:
    """C scalars, the outer products of whose gradients sum up to the Fisher information of the outputs.

    Each is a mean over the items, like the loss: columns of a root of the loss's Hessian, times the outputs.
    """
    outputs, kind = prediction.outputs, prediction.kind
    _check(prediction, given)
    counted = given != IGNORED if kind == "categorical" else torch.ones_like(outputs[..., 0], dtype=torch.bool)
    count = counted.sum().clamp(min=1)
    if kind == "normal":
        roots = outputs / prediction.variance**0.5
    elif kind == "bernoulli":
        p = outputs.detach().sigmoid()
        roots = outputs * (p * (1 - p)).sqrt()
    else:
        p = outputs.detach().softmax(-1)
        roots = p.sqrt() * (outputs - (p * outputs).sum(-1, keepdim=True))
    return [(column * counted).sum() / count for column in roots.unbind(-1)]


def _check(prediction: Prediction, given: Tensor) -> None:
    wanted = prediction.outputs.shape[:-1] if prediction.kind == "categorical" else prediction.outputs.shape
    if given.shape != wanted:
        raise UserError(
            f"a {prediction.kind} prediction of {list(prediction.outputs.shape)} outputs has targets "
            f"'{prediction.targets}' of {list(given.shape)}; give targets of {list(wanted)}"
        )
