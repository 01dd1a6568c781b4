"""Hessian-free optimization: Newton steps by conjugate gradients on products with the Gauss-Newton matrix.

For the mean loss f(w) = L(z(w)) with outputs z, Jacobian J and the Hessian H_L of the loss by the outputs, a step

1. g, and the diagonal of the (empirical) Fisher information: rows' gradients under random signs, squared,
   averaged over `probes`                                                               -> one all-reduce
2. (J^T H_L J + l I) d = -g by conjugate gradients (core/optim/conjugate.py) from `start` times the d of before;
   preconditioner (diagonal + l)^exponent                                               -> one all-reduce a product
3. d is the iterate, from the last one back, after which f grows                        -> one of a number for each f
4. l <- 3/2 l where (f(w + d) - f(w)) / phi(d) < 1/4, 2/3 l where it is > 3/4
5. the longest of lr, 0.8 lr, 0.64 lr, … times d for which f falls by 0.01 of what g promises; else none

Products are two backwards: v -> J v is the derivative, by u, of the product u -> J^T u. The batch is one and the same
throughout a step. Vectors are whole on every rank; d is kept as the parameters' masters are. Under tensor parallelism
both backwards send what the layers send in theirs (core/comm/collectives.py), beside the one message of a product.

A step whose curvature is not finite leaves the parameters, doubles l, and is counted in `fallbacks`.

Martens 2010, Deep learning via Hessian-free optimization; Schraudolph 2002 (Gauss-Newton products); Martens and
Sutskever 2012, Training deep and recurrent networks with Hessian-free optimization. The signs are Bekas et al.'s 2007.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from core.compat import own_part
from core.config import UserError
from core.layout import Layout, is_dtensor, layout_of
from core.mesh import axis_size, stage_group
from core.optim.conjugate import solve
from core.optim.prediction import Drawing
from core.optim.sharded import Batch, ShardedOptimizer, trained_by_name
from core.optim.spec import OptimConfig, OptimizerSpec, Part, check_options, own_values

Closure = Callable[[], tuple[Tensor, Tensor]]
"""() -> (loss, outputs): this rank's part of the mean loss of the whole batch, so that the parts of all microbatches
and ranks add up to it; and the outputs [rows, ..] that it is made from. No backward."""


@dataclass(frozen=True)
class Found:
    """What a step did.

    loss        before it
    norm        of the gradient
    iterations  of conjugate gradients
    ratio       of the reduction of the loss and the model's; 0 where there was none
    length      of the step, in units of d
    """

    loss: float
    norm: float
    iterations: int
    ratio: float
    length: float
    damping: float


class HessianFree(ShardedOptimizer):
    """Hessian-free optimization of a model.

    model          the model; or name -> parameter, as `core.parallel`'s masters, and `watch` is given the model
    lr             the longest step, in units of d
    damping        l at first; 0 stays 0
    start          conjugate gradients begin at this times the direction of before
    cg_steps       iterations at most
    cg_tolerance   see `core.optim.conjugate.solve`
    exponent       of the preconditioner; 0: none
    probes         of its diagonal
    backtrack      whether an earlier iterate is taken where the loss is lower there
    seed           of the signs of the probes

    `step(closure)` takes a `Closure`, or one for each microbatch; `found` then says what it did. With several, forwards
    are computed again for each product, so that the values of one are in memory.

    Raises UserError for values out of range, parameters that are cut by more than tp, and without a closure.
    """

    def __init__(
        self, model: nn.Module | Mapping[str, Tensor], lr: float = 1.0, *, damping: float = 1.0, start: float = 0.95,
        cg_steps: int = 250, cg_tolerance: float = 5e-4, exponent: float = 0.75, probes: int = 4,
        backtrack: bool = True, seed: int = 0,
    ):  # fmt: skip
        options = {name: value for name, value in locals().items() if name not in ("self", "model", "__class__")}
        _check(**options)
        self._masters = trained_by_name(model, "HessianFree")
        self._parameters: list[_Held] = []
        self.fallbacks = 0
        self.found: Found | None = None
        super().__init__(list(self._masters.values()), options)
        if isinstance(model, nn.Module):
            self.watch(model)

    def watch(self, model: nn.Module, table: Mapping[str, Any] | None = None) -> None:
        """Take the parameters of the model that computes, whose masters these are; once, before the first step.

        table  name -> `core.placement.table.Placed`: how ranks share parameters in forwards
        """
        own, copies = dict(model.named_parameters()), self._tensor_ranks()
        self._parameters = []
        for name in self._masters:
            parameter = own[name]
            cuts = {axis for axis, _ in layout_of(parameter).cuts}
            if (cuts - {"tp"}) or (cuts and table is None):
                raise UserError(
                    f"hessian_free: parameter {name} is cut over {' and '.join(sorted(cuts))}, and products by two "
                    "backwards do not pass the messages of its layer; use --zero 0, 1 or 2, --mesh.tp-mode 1d, "
                    "--mesh.ep 1 and no --gemini.budget"
                )
            layout = layout_of(parameter) if table is None else table[name].layout
            alike = not cuts and (table is None or "tp" not in table[name].partial)
            self._parameters.append(_Held(parameter, layout, 1 / copies if alike else 1.0))

    def _new_state(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        damping = torch.full((1,), float(options["damping"]), dtype=torch.float64, device=parameter.device)
        return {"direction": self._zeros(parameter), "damping": damping}

    def _lies(self, parameter: Tensor, key: str) -> Layout:
        return Layout((1,)) if key == "damping" else super()._lies(parameter, key)

    def _update(self, batches: list[Batch]) -> None:
        raise AssertionError("a step is made of a closure")

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Closure | Sequence[Closure] | None = None, only: Any = None, first_row: int | None = None
    ) -> Any:
        """One step.  Returns the loss before it, of the whole batch.

        first_row  of this rank in the whole batch; None: all ranks have as many
        """
        if closure is None:
            raise UserError(
                "hessian_free: the closure is missing: a step evaluates the model many times; give "
                "step(lambda: (loss, outputs)), or give fit a predict"
            )
        if only is not None or not self._parameters:
            raise UserError("hessian_free: a step is of all parameters of a model; give HessianFree the model")
        closures = [closure] if callable(closure) else list(closure)
        self.init_state()
        for parameter in self._masters.values():
            self.state[parameter]["step"] += 1
        problem = _Problem(self._parameters, closures, self._group(), self._tensor_ranks())
        try:
            self._minimise(problem, first_row)
        finally:
            problem.forget()
        assert self.found is not None
        return torch.tensor(self.found.loss, dtype=torch.float64)

    def _minimise(self, problem: "_Problem", first_row: int | None) -> None:
        options, states = self.param_groups[0], [self.state[p] for p in self._masters.values()]
        damping = float(states[0]["damping"])
        loss, gradient, diagonal = problem.begin(options, int(states[0]["step"]), first_row)
        self.found = Found(loss, float(gradient.norm()), 0, 0.0, 0.0, damping)
        before = self._whole_directions() * options["start"]
        floor = torch.finfo(diagonal.dtype).eps * diagonal.max().clamp(min=torch.finfo(diagonal.dtype).tiny ** 0.5)
        precondition = (diagonal + damping + floor) ** options["exponent"]
        try:
            if not bool(gradient.isfinite().all() & diagonal.isfinite().all()):
                raise ArithmeticError("the gradient is not finite")
            solution = solve(
                lambda v: problem.product(v) + damping * v, -gradient, before, precondition,
                options["cg_steps"], options["cg_tolerance"],
            )  # fmt: skip
        except ArithmeticError:
            self.fallbacks += 1
            for state in states:
                state["damping"].mul_(2)
                state["direction"].zero_()
            return
        direction, phi, reached = self._backtracked(problem, solution.iterates, options)
        self._keep(solution.iterates[-1][0])
        ratio = (reached - loss) / phi if phi < 0 else 0.0
        length = self._searched(problem, direction, float(gradient @ direction), loss, reached, options["lr"])
        factor = 1.5 if not ratio >= 0.25 else 2 / 3 if ratio > 0.75 else 1.0
        for state in states:
            state["damping"].mul_(factor)
        for master, change in zip(self._masters.values(), problem.parted(direction * length)):
            master.add_(self.place(master).layout.local(change).to(master))
        damping = float(states[0]["damping"])
        self.found = Found(loss, self.found.norm, solution.iterations, ratio, length, damping)

    def _backtracked(
        self, problem: "_Problem", iterates: list[tuple[Tensor, float]], options: dict[str, Any]
    ) -> tuple[Tensor, float, float]:
        """(d, phi(d), f(w + d)): the last iterate, or one before, as long as the loss is lower there."""
        direction, phi = iterates[-1]
        reached = problem.loss_at(direction)
        for earlier, its_phi in reversed(iterates[:-1] if options["backtrack"] else []):
            there = problem.loss_at(earlier)
            if not there < reached and reached == reached:
                break
            direction, phi, reached = earlier, its_phi, there
        return direction, phi, reached

    def _searched(
        self, problem: "_Problem", direction: Tensor, slope: float, loss: float, reached: float, longest: float
    ) -> float:
        length = longest
        if longest != 1.0:
            reached = problem.loss_at(direction * length)
        for _ in range(60):
            if reached <= loss + min(0.0, 0.01 * length * slope):
                return length
            length *= 0.8
            reached = problem.loss_at(direction * length)
        return 0.0

    def _group(self) -> Any:
        """All ranks that share parameters; None: this one."""
        meshes = self._meshes()
        return stage_group(max(meshes, key=lambda mesh: mesh.size())) if meshes else None

    def _tensor_ranks(self) -> int:
        """Ranks that evaluate the model on the same rows."""
        return max((axis_size(m, "tp") for m in self._meshes() if "tp" in (m.mesh_dim_names or ())), default=1)

    def _meshes(self) -> list[DeviceMesh]:
        return [mesh for p in self._masters.values() if isinstance(mesh := self.place(p).layout.mesh, DeviceMesh)]

    def _whole_directions(self) -> Tensor:
        """The d of before, put together where masters are cut: one message."""
        wholes = []
        for master in self._masters.values():
            layout, own = self.place(master).layout, self.state[master]["direction"]
            if layout.cuts:
                whole = own.new_zeros(layout.shape)
                for here, there in layout.boxes():
                    whole[there].copy_(own[here])
                if any(layout.axis_index(a) for a in _replicas(layout)):
                    whole.zero_()  # another rank has the same
            else:
                whole = own.clone()
            wholes.append(whole.flatten())
        cut = [bool(self.place(m).layout.cuts) for m in self._masters.values()]
        if any(cut) and (group := self._group()) is not None and group.size() > 1:
            message = torch.cat([w for w, is_cut in zip(wholes, cut) if is_cut])
            dist.all_reduce(message, group=group)
            pieces = iter(message.split([w.numel() for w, is_cut in zip(wholes, cut) if is_cut]))
            wholes = [next(pieces) if is_cut else w for w, is_cut in zip(wholes, cut)]
        return torch.cat(wholes)

    def _keep(self, direction: Tensor) -> None:
        start = 0
        for master in self._masters.values():
            layout = self.place(master).layout
            size = self.place(master).num_elements
            own = layout.local(direction[start : start + size].view(layout.shape))
            self.state[master]["direction"].copy_(own)
            start += size


def _replicas(layout: Layout) -> list[str]:
    """Axes whose ranks hold the same part as this one."""
    mesh = layout.mesh
    assert isinstance(mesh, DeviceMesh)
    cutting = {part for axis in layout.axes() for part in axis.split("+")}
    return [axis for axis in mesh.mesh_dim_names or () if axis not in cutting and layout.axis_size(axis) > 1]


@dataclass(frozen=True)
class _Held:
    """A parameter as this rank's forwards have it.

    layout  of that
    share   of this rank's gradient in the sum over all ranks
    """

    parameter: Tensor
    layout: Layout
    share: float = 1.0

    @property
    def local(self) -> Tensor:
        return _plain(self.parameter)

    def like(self, part: Tensor) -> Tensor:
        """A local tensor as a gradient of the parameter is."""
        parameter = self.parameter
        if not isinstance(parameter, DTensor):
            return part
        mesh, placements = parameter.device_mesh, parameter.placements
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )

    def whole(self, gradient: Tensor) -> Tensor:
        """[elements of the whole], with this rank's part of the sum over all ranks."""
        if not self.layout.cuts:
            return _plain(gradient).flatten() * self.share
        made = _plain(gradient).new_zeros(self.layout.shape)
        for here, there in self.layout.boxes():
            made[there] = _plain(gradient)[here]
        return made.flatten() * self.share


def _plain(tensor: Tensor) -> Tensor:
    return own_part(tensor) if is_dtensor(tensor) else tensor


class _Problem:
    """One batch: its loss, gradient and Gauss-Newton products as functions of the parameters, all ranks' together.

    copies  ranks that evaluate it on the same rows
    """

    def __init__(self, held: Sequence[_Held], closures: list[Closure], group: Any, copies: int = 1):
        self.held, self.closures, self.copies = held, closures, copies
        self.parameters = [h.parameter for h in held]
        self.group = group if group is not None and group.size() > 1 else None
        self.sizes = [math.prod(h.layout.shape) for h in held]
        self.values = [h.local.detach().clone() for h in held]
        self._graphs: list[tuple[Tensor, Tensor]] | None = None

    def forget(self) -> None:
        self._graphs = None

    def parted(self, vector: Tensor) -> list[Tensor]:
        """Of each parameter the whole."""
        return [v.view(h.layout.shape) for v, h in zip(vector.split(self.sizes), self.held)]

    def owned(self, vector: Tensor) -> list[Tensor]:
        """Of each parameter what this rank's forwards have."""
        return [h.layout.local(whole) for whole, h in zip(self.parted(vector), self.held)]

    def begin(self, options: dict[str, Any], step: int, first_row: int | None) -> tuple[float, Tensor, Tensor]:
        """Loss, gradient, and the diagonal of the mean over rows of their squared gradients: one message."""
        probes = options["probes"] if options["exponent"] else 0
        loss = self.values[0].new_zeros(2, dtype=torch.float64)
        vectors = [self.values[0].new_zeros(sum(self.sizes)) for _ in range(1 + probes)]
        graphs = []
        for closure in self.closures:
            value, outputs = self._evaluated(closure)
            rows = len(outputs)
            if first_row is None:
                first_row = 0 if self.group is None else self.group.rank() * rows * len(self.closures)
            assert first_row is not None
            loss += loss.new_tensor([float(value), float(rows)])
            vectors[0] += self._gradient(value, None)
            (slope,) = _grad(value, [outputs])
            signs = Drawing(options["seed"], step, first_row).uniform((rows, probes)) if probes else None
            for probe in range(probes):
                assert signs is not None
                sign = (signs[:, probe] < 0.5).to(outputs) * 2 - 1
                vectors[1 + probe] += self._gradient(outputs, slope * sign.view(-1, *[1] * (outputs.ndim - 1)))
            first_row += rows
            graphs.append((value, outputs))
        self._graphs = graphs if len(graphs) == 1 else None
        message = torch.cat([loss, *(v.double() for v in vectors)])
        if self.group is not None:
            dist.all_reduce(message, group=self.group)
        (total, rows_of_all), message = (message[:2] / self.copies).tolist(), message[2:].to(vectors[0].dtype)
        gradient, *squares = message.split(len(vectors[0]))
        diagonal = torch.stack([s.square() for s in squares]).mean(0) * rows_of_all if squares else 0 * gradient
        return total, gradient, diagonal

    def product(self, vector: Tensor) -> Tensor:
        """J^T H_L J v, summed over the batch."""
        parts = [h.like(part.contiguous()) for h, part in zip(self.held, self.owned(vector))]
        found = torch.zeros_like(vector)
        for index in range(len(self.closures)):
            loss, outputs = self._graphs[0] if self._graphs is not None else self._evaluated(self.closures[index])
            found += self._gradient(outputs, _output_product(loss, outputs, self.parameters, parts))
        if self.group is not None:
            dist.all_reduce(found, group=self.group)
        return found

    def loss_at(self, direction: Tensor) -> float:
        """The loss of the batch at w + d."""
        for h, value, change in zip(self.held, self.values, self.owned(direction)):
            h.local.copy_(value + change)
        try:
            total = torch.zeros(1, dtype=torch.float64, device=self.values[0].device)
            for closure in self.closures:
                total += closure()[0].detach()
        finally:
            for h, value in zip(self.held, self.values):
                h.local.copy_(value)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return float(total) / self.copies

    @staticmethod
    def _evaluated(closure: Closure) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            return closure()

    def _gradient(self, of: Tensor, along: Tensor | None) -> Tensor:
        grads = _grad(of, self.parameters, along)
        return torch.cat([h.whole(g) for h, g in zip(self.held, grads)])


def _output_product(loss: Tensor, outputs: Tensor, parameters: list[Tensor], vector: list[Tensor]) -> Tensor:
    """H_L J v of a batch, in the shape of the outputs."""
    with torch.enable_grad():
        dummy = torch.zeros_like(outputs, requires_grad=True)
        back = [
            (g, v)
            for g, v in zip(_grad(outputs, parameters, dummy, create=True), vector, strict=True)
            if g.requires_grad
        ]
        (moved,) = _grad([g for g, _ in back], [dummy], [v for _, v in back])
        (slope,) = _grad(loss, [outputs], create=True)
        (curved,) = _grad(slope, [outputs], moved) if slope.requires_grad else (torch.zeros_like(outputs),)
    return curved


def _grad(of: Any, by: list[Tensor], along: Any = None, create: bool = False) -> list[Tensor]:
    """Derivatives, zeros where there are none; the graph stays.  Raises UserError for what has no second ones."""
    try:
        found = torch.autograd.grad(of, by, along, retain_graph=True, create_graph=create, allow_unused=True)
    except RuntimeError as error:  # and what derives from it, as torch's missing derivatives do
        if "derivative for" not in str(error) and "twice" not in str(error):
            raise
        raise UserError(
            f"hessian_free: an operator of the model has no second derivative ({str(error).splitlines()[0]}); use "
            "operators of torch, such as its math attention, or --optim.name kfac"
        ) from error
    return [torch.zeros_like(b) if f is None else f for f, b in zip(found, by)]


def _check(
    *, lr: float, damping: float, start: float, cg_steps: int, cg_tolerance: float, exponent: float, probes: int,
    backtrack: bool, seed: int,
) -> None:  # fmt: skip
    check_options(
        "hessian_free",
        lr=(lr, lr >= 0, "a number >= 0"),
        damping=(damping, damping >= 0, "a number >= 0"),
        start=(start, 0 <= start <= 1, "a number from 0 to 1"),
        cg_steps=(cg_steps, cg_steps >= 1, "a number of iterations, at least 1"),
        cg_tolerance=(cg_tolerance, 0 <= cg_tolerance < 1, "a number from 0 to below 1"),
        exponent=(exponent, 0 <= exponent <= 1, "a number from 0 to 1"),
        probes=(probes, probes >= 1, "a number >= 1"),
    )


@dataclass(frozen=True)
class HessianFreeConfig(OptimConfig):
    name: str = "hessian_free"
    lr: float = 1.0
    """the longest step, in units of the solution of conjugate gradients"""
    clip_norm: float | None = None
    """must stay None: the gradient is a side of an equation, which is solved"""
    damping: float = 1.0
    """what is added to the curvature at first"""
    start: float = 0.95
    """conjugate gradients begin at this times the direction of the step before"""
    cg_steps: int = 250
    """iterations of conjugate gradients at most"""
    cg_tolerance: float = 5e-4
    """relative gain of an iteration below which they end"""
    exponent: float = 0.75
    """of the preconditioner, the diagonal of the Fisher information; 0: none"""
    probes: int = 4
    """random signs that this diagonal is averaged over"""
    backtrack: bool = True
    """take an earlier iterate where the loss is lower"""
    seed: int = 0
    """of the signs"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(lr=self.lr, **own_values(self))
        check_options(self.name, clip_norm=(self.clip_norm, self.clip_norm is None, "None: nothing is clipped here"))


def _state_bytes(_: HessianFreeConfig, part: Part) -> int:
    return part.num_bytes + 8


def _build(config: HessianFreeConfig, masters: Mapping[str, Tensor]) -> HessianFree:
    return HessianFree(masters, lr=config.lr, **own_values(config))


SPEC = OptimizerSpec(HessianFreeConfig, _state_bytes, _build, looks=True)
