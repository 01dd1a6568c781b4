"""The record of an optimizer: its options, the size of its state, how it is made. `core.optim.build` has all.

An optimizer is a file. It ends with its config, a dataclass that adds its own options to those of `OptimConfig`, and
with its `OptimizerSpec`; a line in `core.optim.build` makes it known.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from core.config import UserError, require_finite
from core.layout import layout_of
from core.optim.roles import Role
from core.optim.schedule import ScheduleConfig

OPTIMIZERS: "dict[str, OptimizerSpec]" = {}
"""By name; `core.optim.build` fills it."""


@dataclass(frozen=True)
class OptimConfig:
    """An optimizer by name: OptimConfig(name="lamb", max_norm=10.0) is the config that LAMB owns."""

    name: str = "adamw"
    """the optimizer, each has options of its own:
    adafactor, adagrad, adam, adamw, adamw8bit, came, galore, hessian_free, kfac, lamb, lars, muon, rmsprop, sgd,
    shampoo, sm3 or soap"""
    lr: float = 3e-4
    """peak learning rate; of adafactor: bound of the relative step"""
    clip_norm: float | None = 1.0
    """global gradient norm beyond which gradients are scaled down; None: never"""
    plan: bool = False
    """print before the first step which parameters get what"""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __new__(cls, name: str = "adamw", *rest: Any, **options: Any) -> Any:
        """Raises UserError for a name that is none, and for an option that the optimizer does not have."""
        if cls is not OptimConfig:
            return object.__new__(cls)
        kind = spec_of(name).config
        for given, value in options.items():
            if given not in {item.name for item in fields(kind)}:
                raise UserError(f"{_without(name, given, f'={value}')}; leave it out")
        return object.__new__(kind)

    def __post_init__(self) -> None:
        assert type(self) is spec_of(self.name).config, f"a {type(self).__name__} is not of {self.name}"
        for item in fields(self):
            value = getattr(self, item.name)
            for one in value if isinstance(value, tuple) else (value,):
                require_finite(f"optim.{item.name}", one)
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise UserError(f"optim.clip_norm={self.clip_norm}; give a positive norm, or None for no clipping")

    def named(self, name: str) -> "OptimConfig":
        """Another optimizer's config, with what this one changes of its defaults where that one takes such values."""
        there = {item.name: item.type for item in fields(spec_of(name).config) if item.name != "name"}
        alike = [item.name for item in fields(self) if there.get(item.name) == item.type]
        changed = {key: getattr(self, key) for key in alike}
        usual = {item.name: _default(item) for item in fields(self)}
        return OptimConfig(name, **{key: value for key, value in changed.items() if value != usual[key]})

    def foreign(self, option: str) -> str | None:
        """The reason to refuse an option that another optimizer has; None where none has it."""
        others = {item.name for spec in OPTIMIZERS.values() for item in fields(spec.config)}
        return _without(self.name, option) if option in others else None


def _default(item: Field) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _without(name: str, option: str, given: str = "") -> str:
    own = ", ".join(("lr", *own_options(spec_of(name).config)))
    return f"optim.name={name} has no option {option}{given}; its options are {own}"


def own_options(config: "type[OptimConfig] | OptimConfig") -> list[str]:
    """Names of the options that an optimizer has beside those of all."""
    common = {item.name for item in fields(OptimConfig)}
    return [item.name for item in fields(config) if item.name not in common]


def spec_of(name: str) -> "OptimizerSpec":
    """Raises UserError for a name that is none."""
    if name not in OPTIMIZERS:
        raise UserError(f"no optimizer '{name}'; the optimizers are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


@dataclass(frozen=True)
class Part:
    """A rank's part of one parameter, of whose state the size is asked.

    shape       of the part
    whole       shape of the parameter
    wide_bytes  of an element of masters and state
    role        what it is in the model (`core.optim.roles`)
    ranks       that have a stage's parameters between them
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    wide_bytes: int
    role: Role = "vector"
    ranks: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of one state tensor like the part."""
        return self.wide_bytes * math.prod(self.shape)


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer.

    config       the class of its options
    state_bytes  bytes that it keeps of one parameter on a rank, step counters left out
    build        the optimizer over local tensors that say where they lie (`core.layout`)
    sized_by     options that the size of the state depends on
    beside_bytes what it takes for one parameter of the device where the model computes, wherever its state lies
    looks        whether it looks at the model beside gradients, and is to `watch` it first
    """

    config: type[OptimConfig]
    state_bytes: Callable[[Any, Part], int]
    build: Callable[[Any, Mapping[str, Tensor]], torch.optim.Optimizer]
    sized_by: tuple[str, ...] = ()
    beside_bytes: Callable[[Any, Part], int] = lambda config, part: 0
    looks: bool = False

    @property
    def name(self) -> str:
        (item,) = (item for item in fields(self.config) if item.name == "name")
        assert isinstance(item.default, str)
        return item.default


def own_values(config: OptimConfig) -> dict[str, Any]:
    """Option -> value of those that the optimizer has beside those of all."""
    return {name: getattr(config, name) for name in own_options(config)}


def decay_groups(masters: Mapping[str, Tensor], weight_decay: float | None = None) -> list[dict[str, Any]]:
    """Matrices, which decay, and vectors, which do not; what counts is the shape of the whole."""
    matrices = [m for m in masters.values() if len(layout_of(m).shape) >= 2]
    vectors = [m for m in masters.values() if len(layout_of(m).shape) < 2]
    if weight_decay is None:
        return [{"params": matrices}, {"params": vectors}]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def with_elements(masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Empty shards left out, where a step is a matter of this rank alone: there is nothing to update."""
    return {name: master for name, master in masters.items() if master.numel()}


def check_options(name: str, **ranges: tuple[Any, bool, str]) -> None:
    """Raises UserError that names the first option whose value is out of range: option -> (value, fine, allowed)."""
    for option, (value, fine, allowed) in ranges.items():
        if not fine:
            raise UserError(f"{name}: {option}={value}; give {allowed}")


def check_moments(name: str, lr: float, betas: tuple[float, ...], eps: float, weight_decay: float) -> None:
    """The options of Adam's kin.  Raises UserError for values out of range."""
    check_options(
        name,
        lr=(lr, lr >= 0, "a number >= 0"),
        betas=(betas, len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "two numbers from 0 to below 1"),
        eps=(eps, eps > 0, "a number > 0"),
        weight_decay=(weight_decay, weight_decay >= 0, "a number >= 0"),
    )


def check_momentum(name: str, lr: float, momentum: float, weight_decay: float = 0.0) -> None:
    """The options of plain momentum's kin.  Raises UserError for values out of range."""
    check_options(
        name,
        lr=(lr, lr >= 0, "a number >= 0"),
        momentum=(momentum, 0 <= momentum < 1, "a number from 0 to below 1"),
        weight_decay=(weight_decay, weight_decay >= 0, "a number >= 0"),
    )
