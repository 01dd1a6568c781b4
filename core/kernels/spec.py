"""A kernel's promises as data: tests, ahead-of-time compilation and the benchmark are generated from it.

A case is a dict of sizes and flags, such as {"rows": 3, "length": 100, "bias": True}; `inputs` makes tensors of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Case = Mapping[str, Any]


@dataclass(frozen=True)
class Traffic:
    """The least that a call moves between the chip and its memory, and computes; forward and backward."""

    forward_bytes: int
    backward_bytes: int = 0
    forward_flops: int = 0
    backward_flops: int = 0


@dataclass(frozen=True)
class KernelSpec:
    """One kernel family.

    function    the public function: returns a tensor or a tuple of tensors
    reference   the same by torch alone, same arguments; differentiable in fp64 where `grads` names anything
    inputs      (case, dtype, device, generator) -> keyword arguments of both
    grads       arguments that have gradients
    cases       for the tests: one like a real one (but small), odd ones, the smallest, an empty one
    space       for random cases: name -> range of ints, or tuple of options
    timed       real sizes: compiled ahead of time in every dtype, and timed
    tolerance   dtype -> largest error allowed, relative to the largest element of the fp64 result; its reason stands
                beside it in the kernel's file
    traffic     (case, dtype) -> the least that has to be moved and computed
    dtypes      that are tested and timed
    gradcheck   a case small enough to differentiate numerically; None where nothing is differentiable
    alone       arguments that are not to be made strided (index tensors, cu_seqlens, …)
    in_place    where function and reference work on copies of what they change: the two without copies, to be timed
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[Case, torch.dtype, torch.device | str, torch.Generator], dict[str, Any]]
    cases: tuple[Case, ...]
    timed: tuple[Case, ...]
    tolerance: Mapping[torch.dtype, float]
    traffic: Callable[[Case, torch.dtype], Traffic]
    grads: tuple[str, ...] = ()
    space: Mapping[str, range | tuple[Any, ...]] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    gradcheck: Case | None = None
    alone: tuple[str, ...] = ()
    in_place: tuple[Callable[..., Any], Callable[..., Any]] | None = None


def outputs_of(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the result of a spec's function as a tuple."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def forward_and_backward(spec: KernelSpec, inputs: dict[str, Any]) -> None:
    """Call the family's function, and its backward where it has gradients; nothing of it is kept."""
    leaves = {n: inputs[n].detach().requires_grad_() for n in spec.grads if isinstance(inputs.get(n), Tensor)}
    outputs = [o for o in outputs_of(spec.function(**inputs | leaves)) if o.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])


def drawing(dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> Callable[..., Tensor]:
    """draw(*shape): normally distributed numbers; on the meta device nothing is drawn, however large the shape."""

    def draw(*shape: int) -> Tensor:
        if torch.device(device).type == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)

    return draw
