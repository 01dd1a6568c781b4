"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): torch's own, fused, over this rank's shards."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.optim.spec import OptimConfig, OptimizerSpec, Part, check_moments, decay_groups, with_elements


@dataclass(frozen=True)
class AdamWConfig(OptimConfig):
    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    """of matrices; vectors (norms, biases) are never decayed"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_moments(self.name, self.lr, self.betas, self.eps, self.weight_decay)


def _build(config: AdamWConfig, masters: Mapping[str, Tensor]) -> torch.optim.AdamW:
    groups = decay_groups(with_elements(masters), config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def two_moments(_: OptimConfig, part: Part) -> int:
    return 2 * part.num_bytes


SPEC = OptimizerSpec(AdamWConfig, two_moments, _build)
