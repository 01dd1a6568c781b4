"""Adam (Kingma and Ba 2015, arXiv:1412.6980): torch's own, fused, over this rank's shards.

Weight decay is added to the gradient, as the name says in torch; `adamw` decays parameters apart from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.optim.spec import OptimConfig, OptimizerSpec, Part, check_moments, decay_groups, with_elements


@dataclass(frozen=True)
class AdamConfig(OptimConfig):
    name: str = "adam"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """times the parameter, added to the gradient of matrices; vectors (norms, biases) are never decayed"""
    amsgrad: bool = False
    """divide by the largest second moment that there was (Reddi et al. 2018)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_moments(self.name, self.lr, self.betas, self.eps, self.weight_decay)


def _build(config: AdamConfig, masters: Mapping[str, Tensor]) -> torch.optim.Adam:
    groups = decay_groups(with_elements(masters), config.weight_decay)
    options = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "amsgrad": config.amsgrad}
    return torch.optim.Adam(groups, **options, fused=True)


def _state_bytes(config: AdamConfig, part: Part) -> int:
    return (3 if config.amsgrad else 2) * part.num_bytes


SPEC = OptimizerSpec(AdamConfig, _state_bytes, _build, sized_by=("amsgrad",))
