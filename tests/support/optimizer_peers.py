"""SOAP, Shampoo, Muon and GaLore beside pytorch-optimizer and heavyball: the same gradients, how far apart they end.

    PYTHONPATH=FOLDER python -m tests.support.optimizer_peers

FOLDER has the peers (`pip install --no-deps --target FOLDER pytorch-optimizer==4.1.0 heavyball==3.2.1 opt_einsum`). A
line for each case: the difference of the displacements after `STEPS` steps, relative to ours. pytorch-optimizer is
compared in fp64; heavyball in fp32, for it refuses new bases in fp64. SOAP rotates the shorter side, of which the first
gradient has every direction, but where the case says that factors lack rank.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.optim import SOAP, GaLore, Muon, Shampoo

STEPS, SQUARE, WIDE, TALL = 10, (6, 6), (5, 8), (8, 5)
Make = Callable[[list[Tensor]], torch.optim.Optimizer]


def drawn(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moved(make: Make, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The displacement of a matrix."""
    start = drawn(0, shape).to(dtype)
    parameter = start.clone().requires_grad_()
    optimizer = make([parameter])
    for step in range(1, STEPS + 1):
        parameter.grad = drawn(step, shape).to(dtype)
        optimizer.step()
    return parameter.detach() - start


def by_pytorch_optimizer() -> dict[str, tuple[Make, Make]]:
    """case -> ours, theirs"""
    theirs: Any = importlib.import_module("pytorch_optimizer")
    adam: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.8), "eps": 1e-15}
    muon: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}

    def soap(every: int, decay: float = 0.0, most: int | None = None) -> tuple[Make, Make]:
        given = adam | {"precondition_frequency": every, "weight_decay": decay}
        return (
            lambda p: SOAP(p, max_preconditioner_dim=most or min(p[0].shape), **given),
            lambda p: theirs.SOAP(p, max_precondition_dim=most or min(p[0].shape), **given),
        )

    def shampoo(momentum: float) -> tuple[Make, Make]:
        ours: dict[str, Any] = {"betas": (momentum, 0.9), "graft": "none", "shampoo_beta": 1.0, "weight_decay": 0.0}
        return (
            lambda p: Shampoo(p, lr=0.1, precondition_frequency=1, **ours),
            lambda p: theirs.Shampoo(p, lr=0.1, momentum=momentum, matrix_eps=1e-15),
        )

    def orthogonal(decay: float, adjusted: bool = False) -> tuple[Make, Make]:
        return (
            lambda p: Muon(
                [{"params": p, "orthogonalise": True}],
                weight_decay=decay,
                scale="rms" if adjusted else "jordan",
                **muon,
            ),
            lambda p: theirs.Muon(
                [{"params": p, "use_muon": True}], weight_decay=decay, use_adjusted_lr=adjusted, **muon
            ),
        )

    def galore(gap: int, decay: float) -> tuple[Make, Make]:
        low: dict[str, Any] = {"rank": 3, "projection_type": "std", "scale": 0.25, "update_proj_gap": gap}
        return (
            lambda p: GaLore(p, rank=3, update_gap=gap, alpha=0.25, weight_decay=decay, **adam),
            lambda p: theirs.GaLore([{"params": p, **low}], weight_decay=decay, **adam),
        )

    return {
        "SOAP, one basis": soap(1000),
        "SOAP, new bases each second step": soap(2),
        "SOAP, factors that lack rank": soap(1000, most=8),
        "SOAP, decay": soap(1000, 0.2),
        "Shampoo": shampoo(0.0),
        "Shampoo, momentum": shampoo(0.9),
        "Muon": orthogonal(0.0),
        "Muon, decay": orthogonal(0.2),
        "Muon, adjusted rate": orthogonal(0.0, adjusted=True),
        "GaLore, one projection": galore(1000, 0.0),
        "GaLore, new projections each fourth step": galore(4, 0.0),
        "GaLore, decay": galore(1000, 0.2),
    }


def by_heavyball() -> dict[str, tuple[Make, Make]]:
    """The same."""
    theirs: Any = importlib.import_module("heavyball")
    theirs.utils.compile_mode = None
    adam: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.8), "shampoo_beta": 0.7, "eps": 1e-8}

    def soap(every: int, decay: float = 0.0) -> tuple[Make, Make]:
        given = adam | {"precondition_frequency": every, "weight_decay": decay}
        off: dict[str, Any] = {"merge_dims": False, "use_precond_schedule": False, "compile_step": False}
        return (
            lambda p: SOAP(p, max_preconditioner_dim=min(p[0].shape), **given),
            lambda p: theirs.SOAP(p, max_precond_dim=min(p[0].shape), **given, **off),
        )

    def orthogonal(nesterov: bool) -> tuple[Make, Make]:
        return (
            lambda p: Muon(
                [{"params": p, "orthogonalise": True}], lr=0.1, momentum=0.9, weight_decay=0.0, scale="jordan"
            ),
            lambda p: theirs.Muon(
                p, lr=0.1, betas=(0.9, 0.99), nesterov=nesterov, heavyball_momentum=True, compile_step=False
            ),
        )

    return {
        "SOAP, one basis": soap(1000),
        "SOAP, new bases each second step": soap(2),
        "SOAP, new bases each step": soap(1),
        "SOAP, decay": soap(1000, 0.2),
        "Muon": orthogonal(True),
    }


def main() -> None:
    peers = (("pytorch-optimizer", by_pytorch_optimizer, torch.float64), ("heavyball", by_heavyball, torch.float32))
    for peer, cases, dtype in peers:
        try:
            found = cases()
        except ImportError as error:
            print(f"{peer} is left out: {error}", file=sys.stderr)
            continue
        for name, (ours, theirs) in found.items():
            for shape in (SQUARE, WIDE, TALL):
                try:
                    expected = moved(ours, shape, dtype)
                    difference = float((moved(theirs, shape, dtype) - expected).norm() / expected.norm())
                    print(f"{peer:18} {name:42} {list(shape)!s:7} {difference:.1e}")
                except Exception as error:
                    print(f"{peer:18} {name:42} {list(shape)!s:7} {type(error).__name__}: {str(error)[:60]}")


if __name__ == "__main__":
    main()
