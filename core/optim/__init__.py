"""Optimizers, for one rank and for parameters that are sharded in any way; `build_optimizer` makes them by name."""

from core.optim.adafactor import Adafactor
from core.optim.adamw8bit import AdamW8bit
from core.optim.build import OPTIMIZERS, OptimConfig, build_optimizer
from core.optim.came import Came
from core.optim.galore import GaLore
from core.optim.hessian_free import HessianFree
from core.optim.kfac import KFAC
from core.optim.lamb import Lamb
from core.optim.lars import Lars
from core.optim.muon import Muon
from core.optim.schedule import ScheduleConfig, learning_rate
from core.optim.shampoo import Shampoo
from core.optim.sm3 import Sm3
from core.optim.soap import SOAP

__all__ = [
    "KFAC",
    "OPTIMIZERS",
    "SOAP",
    "Adafactor",
    "AdamW8bit",
    "Came",
    "GaLore",
    "HessianFree",
    "Lamb",
    "Lars",
    "Muon",
    "OptimConfig",
    "ScheduleConfig",
    "Shampoo",
    "Sm3",
    "build_optimizer",
    "learning_rate",
]
