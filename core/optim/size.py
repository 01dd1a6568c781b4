"""Bytes of an optimizer's state, before there is any: what the memory estimate asks."""

from core.optim.build import OPTIMIZERS
from core.optim.roles import Role
from core.optim.spec import OptimConfig, Part


def state_bytes(
    config: OptimConfig,
    shape: tuple[int, ...],
    wide_bytes: int,
    *,
    whole: tuple[int, ...] = (),
    role: Role = "vector",
    ranks: int = 1,
) -> int:
    """Bytes that the state of one parameter takes on a rank; arguments as of `Part`, `whole` by default `shape`."""
    return OPTIMIZERS[config.name].state_bytes(config, Part(shape, whole or shape, wide_bytes, role, ranks))


def beside_bytes(config: OptimConfig, whole: tuple[int, ...], wide_bytes: int, role: Role) -> int:
    """Bytes of the device where the model computes that it takes for one parameter, wherever the state lies."""
    return OPTIMIZERS[config.name].beside_bytes(config, Part(whole, whole, wide_bytes, role))
