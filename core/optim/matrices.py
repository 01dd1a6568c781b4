"""The base of optimizers with an update of their own for matrices, each whole at its home, and AdamW for the rest.

A parameter is seen as a batch of matrices [B, M, N]:

    W[O, I]           one matrix; with `rows` R, O / R of [R, I], as the heads of a fused query, key and value are
    W[O, I, ..]       a convolution's kernel: one matrix [O, I ..]
    W[E, O, I]        with `stacked`: the E matrices of a stack, as experts' weights are

Groups are found where names are given, `optimizer(model.named_parameters(), …)`: of the roles that names and shapes
tell (core/optim/roles.py), those in `whole` are updated as matrices, the others by AdamW, vectors without decay.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from core.config import UserError
from core.kernels.adamw import adamw
from core.layout import layout_of
from core.optim.adamw import two_moments
from core.optim.home import WholeMatrixOptimizer
from core.optim.narrow import MomentumFormat, check_format, format_of, keep, moment_bytes, narrowed, widened
from core.optim.roles import MATRICES, ROLES, Role, role_of
from core.optim.sharded import Batch, Held
from core.optim.spec import OptimConfig, Part, own_values

WHOLE: tuple[Role, ...] = ("matrix", "experts")
"""Roles that are updated as matrices by default."""

Shapes = dict[str, tuple[int, ...]]


class MatrixOptimizer(WholeMatrixOptimizer):
    """Groups say under `flag` whether their parameters are updated as matrices; or they are found.

    momentum_format  of the moments of matrices: see `core.optim.narrow`
    fallbacks        updates of matrices on this rank that were given up or made with an older basis, because the
                     gradient or the factors were not finite or a decomposition did not converge
    """

    name: ClassVar[str]
    flag: ClassVar[str]
    done: ClassVar[str]
    """the flag's participle"""
    by_shape: ClassVar[bool] = True
    """whether a group without flag and names is sorted by the shapes of its parameters"""
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    """state tensors of matrices that momentum_format is of"""
    whole: tuple[str, ...] = WHOLE
    fallbacks: int = 0

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], whole: Sequence[str], momentum_format: MomentumFormat
    ):
        check_whole(self.name, whole)
        self.whole = tuple(whole)
        super().__init__(params, {"stacked": False, "momentum_format": momentum_format} | defaults)

    @staticmethod
    @abstractmethod
    def shapes(shape: tuple[int, ...], options: Mapping[str, Any]) -> Shapes:
        """State tensor -> its shape, of a parameter that is updated as matrices."""

    @abstractmethod
    def _update_of(self, grad_BMN: Tensor, h: Held, batch: Batch) -> Tensor:
        """The update of all matrices of a parameter, whose state goes on; what is added is -lr times it."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UserError for options that are none, and for a parameter that cannot be updated as its group says."""
        index, known = len(self.param_groups), {*self.defaults, self.flag, "params", "name", "initial_lr"}
        if unknown := sorted(param_group.keys() - known):
            allowed = ", ".join(sorted(known - {"params", "initial_lr"}))
            raise UserError(f"{self.name}: parameter group {index} has no option {unknown[0]}; give some of {allowed}")
        given = param_group["params"]
        listed = [given] if isinstance(given, Tensor) else list(given)
        named: list[tuple[str | None, Tensor]] = [one if isinstance(one, tuple) else (None, one) for one in listed]
        if self.flag in param_group:
            self._add(param_group, [parameter for _, parameter in named])
            return
        if not self.by_shape and any(name is None for name, _ in named):
            raise UserError(
                f"{self.name}: parameter group {index} does not say {self.flag}; give named parameters, or groups "
                f'{{"params": …, "{self.flag}": True}} of hidden matrices, and False of embeddings, heads and vectors'
            )
        for group in self._sorted(named):
            self._add(group | {key: value for key, value in param_group.items() if key != "params"}, group["params"])

    def _sorted(self, named: list[tuple[str | None, Tensor]]) -> list[dict[str, Any]]:
        """The groups of parameters that no group was told of."""
        return grouped(named, self.whole, self.flag)

    def _add(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        if not isinstance(group[self.flag], bool):
            raise UserError(
                f"{self.name}: parameter group {len(self.param_groups)} does not say {self.flag} True or False"
            )
        options = self.defaults | group
        check_format(self.name, options["momentum_format"])
        for parameter in parameters if group[self.flag] else ():
            if fault := self._fault(tuple(layout_of(parameter).shape), options):
                raise UserError(f"{self.name}: a parameter of shape {list(layout_of(parameter).shape)} {fault}")
        super().add_param_group(group | {"params": parameters})

    def _fault(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> str | None:
        """Why a parameter cannot be updated as matrices."""
        if len(shape) < 2 or not math.prod(shape):
            return f"is no matrix that can be {self.done}; put it into a group with {self.flag} False"
        if options["stacked"] and len(shape) != 3:
            return "is no stack of matrices [E, O, I]; leave stacked out"
        return None

    def _is_whole(self, options: dict[str, Any]) -> bool:
        return options[self.flag]

    def _home_state(self, shape: tuple[int, ...], options: dict[str, Any]) -> Shapes:
        return self.shapes(shape, options)

    def _new_state(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        if self._is_whole(options):
            made = super()._new_state(parameter, options)
            shapes = self._home_state(self.place(parameter).layout.shape, options)
            for name in [name for name in self.moments if name in made]:
                made |= narrowed(name, made.pop(name), shapes[name], options["momentum_format"])
            return made
        return {"exp_avg": self._zeros(parameter), "exp_avg_sq": self._zeros(parameter)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for parameter in group["params"] if self._is_whole(group) else ():
                state, shapes = self.state[parameter], self._home_state(self.place(parameter).layout.shape, group)
                for name in [name for name in self.moments if name in state]:
                    if format_of(name, shapes[name], group["momentum_format"]) == "bf16":
                        state[name] = state[name].bfloat16()

    def _direction(self, grad: Tensor, h: Held, batch: Batch) -> Tensor:
        wide = widened(h.state, self.moments, batch.wide)
        grad_BMN = grad.reshape(batch_of(grad.shape, batch.options))
        update = self._update_of(grad_BMN, replace(h, state=h.state | wide), batch).reshape(grad.shape)
        keep(h.state, wide)
        return update

    def _move(self, h: Held, update: Tensor, batch: Batch) -> None:
        options = batch.options
        h.value.mul_(1 - options["lr"] * options["weight_decay"])
        h.value.add_(update, alpha=options["lr"] if options["maximize"] else -options["lr"])

    def _update_parts(self, batches: list[Batch]) -> None:
        for batch in batches:
            held = [h for h in batch.held if h.value.numel()]
            options = {name: batch.options[name] for name in ("lr", "betas", "eps", "weight_decay", "maximize")}
            moments = ([h.own(name) for h in held] for name in ("exp_avg", "exp_avg_sq"))
            adamw([h.value for h in held], [h.grad for h in held], *moments, step=batch.step, **options)


def batch_of(shape: Sequence[int], options: Mapping[str, Any]) -> tuple[int, int, int]:
    """B, M, N of the matrices that a parameter is."""
    if options["stacked"]:
        return shape[0], shape[1], shape[2]
    rows = options.get("rows") or shape[0]
    return shape[0] // rows, rows, math.prod(shape[1:])


def grouped(named: Iterable[tuple[str | None, Tensor]], whole: Sequence[str], flag: str) -> list[dict[str, Any]]:
    """The groups of parameters, those without any left out. What has no name is a matrix where its shape may be one.

    Raises UserError for a tensor of three dims without a name: it may be a stack of matrices, or one kernel.
    """
    matrices, stacks, others, vectors = found = ([], [], [], [])
    for name, parameter in named:
        shape = tuple(layout_of(parameter).shape)
        if name is None and len(shape) == 3:
            raise UserError(
                f"a parameter of shape {list(shape)} may be a stack of matrices or a kernel; give named parameters, or "
                f'its group as {{"params": …, "{flag}": True, "stacked": True}} (or False)'
            )
        role = role_of(name, shape) if name is not None else "matrix" if len(shape) > 1 else "vector"
        if role not in MATRICES:
            vectors.append(parameter)
        elif role not in whole and name is not None:
            others.append(parameter)
        else:
            (stacks if role == "experts" else matrices).append(parameter)
    options = ({flag: True}, {flag: True, "stacked": True}, {flag: False}, {flag: False, "weight_decay": 0.0})
    groups = [{"params": own, **told} for own, told in zip(found, options, strict=True) if own]
    return groups or [{"params": [], flag: False}]


def check_whole(name: str, whole: Sequence[str]) -> None:
    """Raises UserError for a role that is none, or that no matrices have."""
    for role in whole:
        if role not in MATRICES:
            what = "are no matrices" if role in ROLES else "is no group of parameters"
            raise UserError(f"{name}: whole={role}: {role} {what}; give some of {', '.join(MATRICES)}")


@dataclass(frozen=True)
class MatrixConfig(OptimConfig):
    """What the configs of these optimizers have in common."""

    whole: tuple[Role, ...] = WHOLE
    """parameters that are updated as matrices: matrix (of the blocks), experts, kernel, outer, embedding, head; others
    get AdamW"""
    momentum_format: MomentumFormat = "fp32"
    """of the moments of these: fp32, bf16 (first moments) or 8bit (both, of large matrices)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self.name, self.whole)
        check_format(self.name, self.momentum_format)

    def options(self) -> dict[str, Any]:
        """Option -> value of the optimizer's own, but for those that all of these have."""
        return {name: value for name, value in own_values(self).items() if name not in ("whole", "momentum_format")}


def matrix_state_bytes(kind: type[MatrixOptimizer], config: Any, part: Part) -> int:
    """Bytes of the state of one parameter on a rank, where homes are dealt out over all evenly."""
    if part.role not in config.whole:
        return two_moments(config, part)
    options = own_values(config) | {"stacked": part.role == "experts"}
    num_bytes = 0
    for name, shape in kind.shapes(part.whole, options).items():
        wanted = config.momentum_format if name in kind.moments else "fp32"
        num_bytes += moment_bytes(name, shape, wanted, part.wide_bytes)
    return -(-num_bytes // part.ranks)


def require_matrices(config: MatrixConfig, masters: Mapping[str, Tensor]) -> None:
    """Raises UserError where there is nothing to factor."""
    roles = {role_of(name, layout_of(master).shape) for name, master in masters.items()}
    if not roles & set(config.whole):
        there = ", ".join(role for role in ROLES if role in roles)
        raise UserError(
            f"optim.name={config.name}: nothing to factor: no parameter is of whole={','.join(config.whole)}; "
            f"there are {there}: name some of these with --optim.whole, or take --optim.name adamw"
        )
