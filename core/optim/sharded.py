"""The base of optimizers whose update of a parameter needs something of the whole of it: a mean, a norm.

A parameter is a plain tensor, a DTensor (any Shard and Replicate placements, uneven ones too: tensor parallelism,
FSDP2, both, hybrid shard), or a local tensor with a `core.layout`. A rank keeps the state of the box that it holds, and
a statistic that is smaller than the parameter (a mean over a dim) lies where the dims that are left lie.

`Reduction` completes partial sums of many tensors over the ranks that hold the other boxes: one message a process group
for all tensors together, axis after axis. A step with k of them sends k messages a process group, whatever the number
of parameters.

Every rank that shares parameters must take part in a step with the same of them, also a rank whose shards are empty.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from core.compat import follows_steps, own_part, uncompiled
from core.config import UserError
from core.kernels.blockwise import dequantize, quantize, scales_shape
from core.layout import Layout, layout_of, tag
from core.mesh import device_of

CODES, SCALES = "_codes", "_scales"
"""Endings of the two parts of a state tensor in 8 bits."""


def trained_by_name(model: nn.Module | Mapping[str, Tensor], optimizer: str) -> dict[str, Tensor]:
    """name -> parameter of those that learn.  Raises UserError for what has no names."""
    if not isinstance(model, nn.Module | Mapping):
        raise UserError(
            f"{optimizer} looks at layers, and a {type(model).__name__} has no names of them; give the model, or a "
            "dict of its named_parameters()"
        )
    named = model.named_parameters() if isinstance(model, nn.Module) else model.items()
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def is_signed(name: str) -> bool:
    """Return whether a state tensor in 8 bits has a sign: second moments have none."""
    return not name.endswith("_sq")


@dataclass(frozen=True)
class Line:
    """The ranks that hold the boxes of a parameter along an axis.

    device  where their messages lie; parts of some parameters may lie on the host meanwhile
    """

    group: ProcessGroup
    device: torch.device


class Reduction:
    """Sums (or maxima) of many tensors, each over its own lines of ranks, in place.

    parts  (tensor, lines); tensors without lines stay as they are. On all ranks of a line the same tensors, in the same
           order; on whatever devices

    The first message is on its way when this returns; `wait` returns when all tensors are complete.
    """

    def __init__(self, parts: Iterable[tuple[Tensor, tuple[Line, ...]]], op: Any = dist.ReduceOp.SUM):
        self._parts = [(tensor, lines) for tensor, lines in parts if lines]
        self._lines = list(dict.fromkeys(chain.from_iterable(lines for _, lines in self._parts)))
        self._op = op
        self._work: dist.Work | None = None
        self._launch()

    def _launch(self) -> None:
        """Send the next message that is not empty."""
        while self._lines and self._work is None:
            line = self._lines.pop(0)
            self._members = [tensor for tensor, lines in self._parts if line in lines and tensor.numel()]
            if self._members:
                self._message = torch.cat([tensor.flatten().to(line.device) for tensor in self._members])
                self._work = dist.all_reduce(self._message, self._op, group=line.group, async_op=True)

    def wait(self) -> None:
        while self._work is not None:
            self._work.wait()
            pieces = self._message.split([tensor.numel() for tensor in self._members])
            for tensor, piece in zip(self._members, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))
            self._work = None
            self._launch()


class Place:
    """The place of a parameter in the whole, and the ranks that its sums go over; made once a parameter."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self._over: dict[tuple[int, ...] | None, tuple[Line, ...]] = {}

    def over(self, dims: tuple[int, ...] | None = None) -> tuple[Line, ...]:
        """Lines of ranks that complete a sum over `dims` (by default over all elements)."""
        if dims not in self._over:
            mesh = self.layout.mesh
            assert mesh is None or isinstance(mesh, DeviceMesh), f"the ranks of {mesh} do not exist"
            self._over[dims] = (
                () if mesh is None else tuple(Line(group, device_of(mesh)) for group in self.layout.groups(dims))
            )
        return self._over[dims]

    def shaped(self, own_part: Tensor) -> Tensor:
        """A tensor with the shape of this rank's part: FSDP2 gives one without elements no rows either."""
        return own_part if own_part.numel() else own_part.new_empty(self.layout.local_shape())

    @property
    def num_elements(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.layout.shape)


@dataclass(frozen=True, eq=False)
class Held:
    """One parameter in a step, as this rank holds it: local value and gradient, and its state.

    index  among all that have a gradient: the order in which messages hold them, alike on all ranks
    """

    index: int
    parameter: Tensor
    value: Tensor
    grad: Tensor
    place: Place
    state: dict[str, Any]

    def own(self, key: str) -> Tensor:
        """This rank's part of a state tensor."""
        return own(self.state[key])


@dataclass
class Batch:
    """Parameters that one call updates: of one group and dtype, on one device, at one step."""

    options: dict[str, Any]
    step: int
    dtype: torch.dtype
    device: torch.device
    held: list[Held] = field(default_factory=list)

    @property
    def wide(self) -> torch.dtype:
        """The format of state and sums: fp32, or the parameters' own where that is wider."""
        return wide_dtype(self.dtype)


class ShardedOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer of sharded parameters; its step is a collective of the ranks that share them.

    State dicts are those of torch.optim; `init_state`, `stored` and `restore` are what a checkpoint that is independent
    of the mesh needs.

    sends  whether a step sends messages; steps of parts would send as many each
    """

    sends: ClassVar[bool] = True

    def __init__(self, params: Any, defaults: dict[str, Any]):
        super().__init__(params, defaults)
        self._places: dict[Tensor, Place] = {}

    @abstractmethod
    def _update(self, batches: list[Batch]) -> None:
        """One step of all parameters that have a gradient; `batch.step` counts from 1."""

    @abstractmethod
    def _new_state(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter before its first step, but for its step."""

    def _collapsed(self, parameter: Tensor, key: str) -> tuple[int, ...]:
        """Dims along which a state tensor has size 1 and the parameter has not."""
        return ()

    def _lies(self, parameter: Tensor, key: str) -> Layout:
        """Where a state tensor lies in its whole."""
        return self.place(parameter).layout.collapsed(self._collapsed(parameter, key))

    @uncompiled  # torch.compiler.disable, without importing torch's tracer, a second, in every process
    @torch.no_grad()
    def step(self, closure=None, only: Iterable[Tensor] | None = None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step.

        closure  reevaluates the model and returns the loss, which is then returned
        only     parameters that it is of; a step is the steps of its parts, in any order, alike on all ranks

        Code under torch.compile breaks its graph here: what there is to fuse is fused, and a graph that has seen the
        number of the step would be compiled again in the next.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(self._batches(None if only is None else {id(parameter) for parameter in only}))
        return loss

    @property
    def beside_bytes(self) -> int:
        """Bytes that it takes of the device where the model computes, wherever its state lies."""
        return 0

    def take_over(self, found: Mapping[Tensor, Tensor]) -> None:
        """Put other tensors in the place of parameters; their state is not moved.

        found  parameter -> what takes its place; others stay
        """
        self.param_groups = [
            {**group, "params": [found.get(parameter, parameter) for parameter in group["params"]]}
            for group in self.param_groups
        ]

    def init_state(self, only: Iterable[Tensor] | None = None) -> None:
        """Make the state of every parameter that has none, or of these, as it is before the first step."""
        wanted = None if only is None else {id(parameter) for parameter in only}
        for group in self.param_groups:
            for parameter in group["params"]:
                if wanted is None or id(parameter) in wanted:
                    self._ensure_state(parameter, group)

    def stored(self, parameter: Tensor) -> dict[str, Tensor]:
        """key -> state tensor of a parameter, each saying where it lies in the whole: what a checkpoint holds."""
        found, state = {}, self.state.get(parameter, {})
        for key, value in state.items():
            if key.endswith(CODES):  # values, on the CPU where a checkpoint is written from
                name = key.removesuffix(CODES)
                values = dequantize(value, state[name + SCALES], is_signed(name)).cpu()
                found[name] = tag(values, self._lies(parameter, name))
            elif key == "step" or isinstance(value, DTensor):
                found[key] = value
            elif not key.endswith(SCALES):
                found[key] = tag(value, self._lies(parameter, key))
        return found

    def restore(self, parameter: Tensor, tensors: dict[str, Tensor]) -> None:
        """Take over what was loaded into the tensors that `stored` gave, as far as they are not the state itself."""
        state = self.state.get(parameter, {})
        for key in [key for key in state if key.endswith(CODES)]:
            name = key.removesuffix(CODES)
            scales = state[name + SCALES]
            codes, scale_values = quantize(tensors[name].to(scales.device, scales.dtype), is_signed(name))
            state[key].copy_(codes)
            scales.copy_(scale_values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch's, but tensors of the state keep a format of integers, or one wider than the parameter's."""
        super().load_state_dict(state_dict)
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(ids, parameters, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if key != "step" and isinstance(value, Tensor):
                    wide = wide_dtype(value.dtype) if value.is_floating_point() else value.dtype
                    self.state[parameter][key] = value.to(parameter.device, wide, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._places = {}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def place(self, parameter: Tensor) -> Place:
        """The place of a parameter in the whole."""
        found = self._places.get(parameter)
        if found is None:
            found = self._places[parameter] = Place(layout_of(parameter))
        return found

    def _options_of(self, parameter: Tensor) -> dict[str, Any]:
        """The group that a parameter is in."""
        return next(group for group in self.param_groups if any(p is parameter for p in group["params"]))

    def _batches(self, only: set[int] | None) -> list[Batch]:
        """The parameters that have a gradient, each one step further.  only: ids of parameters; None: all"""
        found: dict[tuple, Batch] = {}
        count = itertools.count()
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is None or (only is not None and id(parameter) not in only):
                    continue
                state = self._ensure_state(parameter, group)
                state["step"] += 1
                step = int(state["step"])
                key = (index, step, parameter.dtype, parameter.device)
                batch = found.setdefault(key, Batch(group, step, parameter.dtype, parameter.device))
                place = self.place(parameter)
                value, grad = place.shaped(own(parameter)), place.shaped(_own_grad(parameter))
                batch.held.append(Held(next(count), parameter, value, grad, place, state))
        return list(found.values())

    def _ensure_state(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            if parameter.is_complex():
                raise UserError(
                    f"{type(self).__name__} takes no complex parameters; give their real and imaginary part"
                )
            with torch.no_grad():
                state.update({"step": torch.zeros((), dtype=torch.float32)} | self._new_state(parameter, options))
        return state

    def _zero_blocks(self, parameter: Tensor, name: str) -> dict[str, Tensor]:
        """A state tensor in 8 bits: codes and scales of this rank's part."""
        value = self.place(parameter).shaped(own(parameter))
        scales = value.new_zeros(scales_shape(tuple(value.shape)), dtype=wide_dtype(parameter.dtype))
        codes = torch.zeros(value.shape, dtype=torch.uint8, device=value.device)
        return {name + CODES: codes, name + SCALES: scales}

    def _zeros(self, parameter: Tensor, dtype: torch.dtype | None = None, collapsed: tuple[int, ...] = ()) -> Tensor:
        """A state tensor of the parameter's kind, with size 1 along `collapsed`; dtype: by default the wide one."""
        value, dtype = self.place(parameter).shaped(own(parameter)), dtype or wide_dtype(parameter.dtype)
        if collapsed:
            made = value.new_zeros([1 if dim in collapsed else n for dim, n in enumerate(value.shape)], dtype=dtype)
        else:
            made = torch.zeros_like(value, dtype=dtype)
        if not isinstance(parameter, DTensor):
            return made
        placements = [
            Replicate() if getattr(placement, "dim", None) in collapsed else placement
            for placement in parameter.placements
        ]
        shape = torch.Size(self.place(parameter).layout.collapsed(collapsed).shape)
        stride = torch.empty(shape, device="meta").stride() if collapsed else parameter.stride()
        return DTensor.from_local(made, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def step_over(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """One step of some of an optimizer's parameters. A step of all is such steps of its parts, in any order."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.step(only=parameters)
        return
    wanted = {id(parameter) for parameter in parameters}
    all_of_them = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in wanted]
        optimizer.step()
    finally:
        for group, whole in zip(optimizer.param_groups, all_of_them, strict=True):
            group["params"] = whole


def steps_apart(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether steps of parts cost no more than one of all: nothing is sent, and no hook follows each step."""
    return not (getattr(optimizer, "sends", False) or follows_steps(optimizer))


_BEGIN_AT_ONE, _BEGIN_AT_RATE = ("mu_product", "mu"), ("eta", "step_size")
"""Of torch's optimizers the state that does not begin at zero: of NAdam and ASGD, of ASGD and Rprop."""


def make_state(optimizer: torch.optim.Optimizer, masters: Iterable[Tensor]) -> None:
    """State as it is before the first step, of every master that has none.

    Of torch's optimizers by a step of rate zero with gradients of zero, its state put back to what it begins with: it
    exists, and nothing has moved. No parameter may have a gradient.
    """
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.init_state(masters)
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    bare = [master for master in masters if id(master) in held and not optimizer.state.get(master)]
    if not bare:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for master in bare:
        master.grad = torch.zeros_like(master)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    rate_of = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for master in bare:
        master.grad = None
        begins = dict.fromkeys(_BEGIN_AT_RATE, float(rate_of[id(master)])) | dict.fromkeys(_BEGIN_AT_ONE, 1.0)
        for key, value in optimizer.state.get(master, {}).items():
            if isinstance(value, Tensor):
                value.fill_(begins.get(key, 0.0))


def state_tensors(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """key -> tensor of a parameter's state in any optimizer, with its layout: what a checkpoint holds of it."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.stored(parameter)
    found = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor):
            alike = value.shape == parameter.shape and value.ndim
            found[key] = tag(value, layout_of(parameter)) if alike else value
    return found


def restore_state(optimizer: torch.optim.Optimizer, parameter: Tensor, tensors: dict[str, Tensor]) -> None:
    """Take over what was loaded into the tensors of `state_tensors`."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.restore(parameter, tensors)


def own(tensor: Tensor) -> Tensor:
    """The plain tensor that this rank stores of it."""
    return own_part(tensor) if isinstance(tensor, DTensor) else tensor


def _own_grad(parameter: Tensor) -> Tensor:
    """This rank's part of the gradient, placed as the parameter is."""
    grad = parameter.grad
    assert grad is not None
    if grad.is_sparse:
        raise UserError("sparse gradients are not taken; use sparse=False in the embedding")
    if not isinstance(parameter, DTensor):
        return grad
    if not isinstance(grad, DTensor):
        raise UserError("a DTensor parameter has a gradient that is a plain tensor; give a DTensor of its placements")
    if grad.placements != parameter.placements:
        grad = grad.redistribute(parameter.device_mesh, parameter.placements)
    return grad.to_local()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or the dtype itself where that is wider."""
    return torch.promote_types(dtype, torch.float32)


def numbers(values: Sequence[Tensor]) -> list[float]:
    """Scalars of one device as Python numbers, with one wait for it."""
    return torch.stack(list(values)).tolist() if values else []
