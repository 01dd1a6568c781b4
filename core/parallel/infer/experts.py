"""The expert parallelism of a model that brings no plan: which modules hold experts, and that they can be dealt out.

1. A forward without values shows which modules are called with tokens x[.., D] and a router's choice of each: numbers
   of experts and weights, both [T, k]. All their parameters must be stacks of as many parts: those are the experts.
   What is outside of them stays as it is, on the tokens of each rank: the router, its softmax and whatever it adds to
   the loss, shared experts.
2. Each such module is tried with values, small ones, as the ranks would run it: every choice a row by itself, with
   weight 1, through the part of the stacks that one rank has; the results times their weights are summed. Outputs and
   gradients must be those of the module. What looks at other tokens, uses its weights in another way, draws, or knows
   of more experts than its stacks have, differs. Where its code counts with the experts (`num_experts`), that
   attribute gets the rank's count; whether it must, trying shows.

What is not sure is refused, by the name of the module and why.

Shapes: T tokens, k choices of each, E experts, D model, A = T k rows sent, R rows that come.
"""

import copy
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from core.compat import uncompiled
from core.config import UserError
from core.layout import even_shares
from core.mesh import EXPERT_AXIS, axis_size, sub_mesh
from core.parallel.expert import exchanged, experts_held, messages, require_experts
from core.parallel.infer.find import on_tensors_without_values, traced
from core.parallel.infer.flow import Call
from core.parallel.infer.styles import Place
from core.placement.style import Cut, Plan, Style

_MOST_ELEMENTS = 1 << 22
"""Elements of a module that is tried in its own sizes."""
_ALIGNED = 16
"""The unit of the sizes of others: rows of whole 16 bytes, which products of groups demand."""
_EACH_BY_ITSELF = "experts with parameters of their own each are not dealt out"
_CLOSE = 1e-4
"""In fp32, in which all implementations compute, of values of about one."""


class _Unsure(Exception):
    """The reason why a module's experts are not dealt out."""


@dataclass(frozen=True)
class Stacks:
    """A module whose parameters are stacks, a part for each expert.

    tokens, numbers, weights  places among its arguments
    features, per_token       D and k
    counts                    its attributes that say how many experts it has
    """

    name: str
    num_experts: int
    tokens: Place
    numbers: Place
    weights: Place
    features: int
    per_token: int
    counts: tuple[str, ...] = ()

    def style(self) -> Style:
        def rows(site: Any) -> float:
            return 2 * site.batch * site.length * self.per_token * self.features

        return Style(
            cuts={"**": Cut(0, EXPERT_AXIS, even=True)},
            messages=messages(rows, lambda site: self.num_experts),
            refuse=lambda module, mesh, axis: require_experts(self.num_experts, axis_size(mesh, EXPERT_AXIS)),
            wrap=self.wrap,
            is_local=True,
        )

    def wrap(self, module: Any, mesh: Any) -> Any:
        """The module, which has its rank's experts already, with a forward that sends each row to its expert."""
        axis, inner = sub_mesh(mesh, EXPERT_AXIS), module.forward
        held = experts_held(self.num_experts, axis.size())
        vars(module)["row_code"] = None
        vars(module).update(dict.fromkeys(self.counts, held[axis.get_local_rank()]))

        def own(x_RD: Tensor, rows_E: Tensor) -> Tensor:
            if x_RD.shape[0]:
                return self.rows(inner, x_RD, rows_E)
            # The backward calls the collectives on every rank, and every parameter has a gradient.
            return x_RD + sum(parameter.flatten()[:0].sum() for parameter in module.parameters())

        @uncompiled
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            given = dict(enumerate(args)) | kwargs
            x, numbers_TK, weights_TK = (given[place] for place in (self.tokens, self.numbers, self.weights))
            numbers_A = numbers_TK.flatten().long()
            order_A, rows_E = numbers_A.argsort(stable=True), numbers_A.new_zeros(self.num_experts)
            rows_E = rows_E.index_add(0, numbers_A, torch.ones_like(numbers_A))  # an error for a number beyond
            x_AD = x.reshape(-1, x.shape[-1]).index_select(0, order_A // numbers_TK.shape[1])
            y_AD = exchanged(own, x_AD, rows_E, held, axis, module.row_code).index_select(0, order_A.argsort())
            return _summed(y_AD, weights_TK).view_as(x)

        module.forward = forward
        return module

    def rows(self, inner: Callable[..., Tensor], x_RD: Tensor, rows_E: Tensor) -> Tensor:
        """Rows by expert, each through its own, by a module that has as many experts as `rows_E` counts."""
        numbers_R = torch.arange(len(rows_E), device=x_RD.device).repeat_interleave(rows_E, output_size=len(x_RD))
        return self.call(inner, x_RD, numbers_R[:, None], x_RD.new_ones(len(x_RD), 1))

    def call(self, inner: Callable[..., Tensor], x_TD: Tensor, numbers_TK: Tensor, weights_TK: Tensor) -> Tensor:
        given = {self.tokens: x_TD, self.numbers: numbers_TK, self.weights: weights_TK}
        args = [given[place] for place in sorted(place for place in given if isinstance(place, int))]
        return inner(*args, **{place: x for place, x in given.items() if isinstance(place, str)})


def _summed(y_AD: Tensor, weights_TK: Tensor) -> Tensor:
    """The results of the rows of each token times their weights, summed."""
    y_TKD = y_AD.view(*weights_TK.shape, y_AD.shape[-1])
    return (y_TKD * weights_TK[..., None]).sum(1).to(y_AD.dtype)


def infer_experts(model: nn.Module, ranks: int, sample: Mapping[str, Any]) -> Plan:
    """The plan over so many ranks; the model stays as it is.

    sample  keyword arguments of its forward, whose values do not matter

    Raises UserError where no module is found that holds experts, and where one is not sure to compute the same.
    """
    return {stacks.name: stacks.style() for stacks in _holding_experts(model, ranks, sample)}


def by_token(model: nn.Module, sample: Mapping[str, Any]) -> dict[str, Place]:
    """Modules that hold experts and compute each token by itself -> which of their arguments is the tokens."""
    if all(parameter.ndim < 3 for parameter in model.parameters()):
        return {}
    try:
        return {stacks.name: stacks.tokens for stacks in _holding_experts(model, 2, sample)}
    except UserError:
        return {}


def _holding_experts(model: nn.Module, ranks: int, sample: Mapping[str, Any]) -> list[Stacks]:
    """Raises UserError as `infer_experts` does."""
    with on_tensors_without_values(model, sample) as (bare, inputs):
        trace = traced(bare, inputs)
    called: dict[str, list[Call]] = {}
    for call in trace.calls:
        called.setdefault(call.name, []).append(call)
    found, why, tried = list[Stacks](), dict[str, str](), dict[Any, tuple[str, ...]]()
    for name, each in called.items():
        if (stacks := _routed(name, each[0])) is None:
            continue
        module = model.get_submodule(name)
        try:
            stacks = _stacked(module, stacks)
        except _Unsure as unsure:
            why[name] = str(unsure)
            continue
        require_experts(stacks.num_experts, ranks)
        kind = type(module), replace(stacks, name=""), tuple(p.shape for p in module.parameters())
        try:
            if any(_routed(name, call) != _routed(name, each[0]) for call in each):
                raise _Unsure("its calls are not alike")
            if kind not in tried:
                tried[kind] = _tried(module, stacks, ranks)
        except _Unsure as unsure:
            raise UserError(
                f"the experts of {name} ({type(module).__name__}) are not sure to compute the same on {ranks} ranks: "
                f"{unsure}; use mesh.ep=1"
            ) from unsure
        found.append(replace(stacks, counts=tried[kind]))
    if not found:
        raise UserError(f"{_none(model, why, trace.opaque)}; use mesh.ep=1, or say which modules hold experts")
    return found


def _none(model: nn.Module, why: Mapping[str, str], opaque: Collection[str]) -> str:
    """Why no module is known to hold experts.  opaque: modules that look at values"""
    if why:
        name, reason = next(iter(why.items()))
        return f"{name} takes what a router chooses, and {reason}"
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and name.startswith(tuple(f"{n}." for n in opaque)):
            of_each = {tuple(p.shape for p in part.parameters()) for part in module.children()}
            if len(module) > 1 and len(of_each) == 1 and of_each != {()}:
                return f"the {len(module)} modules of {name} look like experts, and {_EACH_BY_ITSELF}"
    said = "no module of this model is called with tokens, the numbers of their experts and their weights"
    stacked = next((n for n, p in model.named_parameters() if p.ndim == 3 and "conv" not in n), None)
    return said if stacked is None else f"{said} ({stacked} may be a stack of experts, called in another way)"


def _routed(name: str, call: Call) -> Stacks | None:
    """The places of a call's arguments, where they are tokens and what a router has chosen for each."""
    given: dict[Place, Any] = {**dict(enumerate(call.args)), **call.kwargs}
    tensors = {place: x for place, x in given.items() if isinstance(x, Tensor)}
    whole = [p for p, x in tensors.items() if x.dtype in (torch.int32, torch.int64) and x.ndim == 2]
    floating = [place for place, x in tensors.items() if x.is_floating_point() and x.ndim > 1]
    if not name or any(x is not None for p, x in given.items() if p not in tensors):
        return None
    if len(tensors) != 3 or len(whole) != 1 or len(floating) != 2:
        return None
    num_tokens, per_token = tensors[whole[0]].shape
    for tokens, weights in (floating, floating[::-1]):
        features = tensors[tokens].shape[-1]
        chosen = tuple(tensors[weights].shape) == (num_tokens, per_token)
        if chosen and tensors[tokens].numel() == num_tokens * features:
            return Stacks(name, 0, tokens, whole[0], weights, features, per_token)
    return None


def _stacked(module: nn.Module, stacks: Stacks) -> Stacks:
    """With the number of experts.  Raises _Unsure where not all parameters are stacks of that many."""
    first = {name: parameter.shape[0] if parameter.ndim > 1 else 0 for name, parameter in module.named_parameters()}
    if not first:
        raise _Unsure("has no parameters")
    (num_experts, name), (other, another) = (f(zip(first.values(), first, strict=True)) for f in (max, min))
    if num_experts != other:
        raise _Unsure(
            f"its parameters are no stacks with a part for each expert ({name} and {another} differ in their dim 0); "
            f"{_EACH_BY_ITSELF}"
        )
    if buffer := next((name for name, _ in module.named_buffers()), None):
        raise _Unsure(f"it has a buffer {buffer}, which is not dealt out")
    return replace(stacks, num_experts=num_experts)


# --- the trial --------------------------------------------------------------------------------------------------------


def _tried(module: nn.Module, stacks: Stacks, ranks: int) -> tuple[str, ...]:
    """The attributes that get the rank's count of experts.  Raises _Unsure where the parts do not compute the whole."""
    small, features = _small(module, stacks.features)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float32, generator=generator)

    with torch.no_grad():
        for parameter in small.parameters():
            parameter.copy_(drawn(*parameter.shape) / math.sqrt(parameter.shape[-1]))
    num_tokens = 2 * stacks.num_experts + 1
    x_TD = drawn(num_tokens, features).requires_grad_()
    numbers_TK = drawn(num_tokens, stacks.num_experts).topk(min(stacks.per_token, stacks.num_experts)).indices
    weights_TK = drawn(*numbers_TK.shape).requires_grad_()
    learned, seen = [x_TD, weights_TK, *small.parameters()], drawn(num_tokens, features)

    def gradients(y_TD: Tensor) -> list[Tensor]:
        made = torch.autograd.grad((y_TD * seen).sum(), learned, allow_unused=True)
        return [y_TD, *(torch.zeros_like(x) if g is None else g for x, g in zip(learned, made, strict=True))]

    def parts(counts: tuple[str, ...]) -> Tensor:
        y_AD = x_TD.new_zeros(numbers_TK.numel(), features)
        for share in even_shares(stacks.num_experts, ranks):
            part = copy.deepcopy(small)
            vars(part).update(dict.fromkeys(counts, share.stop - share.start))
            own = {name: parameter[share].clone() for name, parameter in small.named_parameters()}
            rows_E = torch.stack([(numbers_TK == expert).sum() for expert in range(share.start, share.stop)])
            order = torch.cat(
                [(numbers_TK == expert).flatten().nonzero()[:, 0] for expert in range(share.start, share.stop)]
            )
            inner = lambda *args, **kwargs: functional_call(part, own, args, kwargs)  # noqa: B023, E731
            y_AD = y_AD.index_add(0, order, stacks.rows(inner, x_TD[order // numbers_TK.shape[1]], rows_E))
        return _summed(y_AD, weights_TK)

    try:
        wanted = gradients(stacks.call(small, x_TD, numbers_TK, weights_TK).view_as(x_TD))
    except Exception as error:  # of the module's own code
        raise _Unsure(f"it cannot be tried by itself on a CPU ({_first_line(error)})") from error
    counting = [name for name, value in vars(small).items() if type(value) is int and value == stacks.num_experts]
    said = ""
    for counts in (c for n in range(len(counting), -1, -1) for c in combinations(counting, n)):
        try:
            found = gradients(parts(counts))
        except Exception as error:  # of the module's own code, as above
            said = said or _first_line(error)
            continue
        if all(torch.allclose(a, b, rtol=_CLOSE, atol=_CLOSE) for a, b in zip(found, wanted, strict=True)):
            return counts
        said = said or "the weighted sum of each choice by itself is not what it returns"
    raise _Unsure(said)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _small(module: nn.Module, features: int) -> tuple[nn.Module, int]:
    """A copy on the host in fp32, its dims but that of the experts scaled down alike where it is large; and its D."""
    shapes = [parameter.shape[1:] for parameter in module.parameters()]
    unit = math.gcd(features, *(size for shape in shapes for size in shape))
    large = sum(parameter.numel() for parameter in module.parameters()) > _MOST_ELEMENTS

    def scaled(size: int) -> int:
        return _ALIGNED * size // unit if large and unit > _ALIGNED else size

    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        shape = (parameter.shape[0], *map(scaled, parameter.shape[1:]))
        memo[id(parameter)] = nn.Parameter(torch.empty(shape, dtype=torch.float32))
    small = copy.deepcopy(module, memo).train()
    sizes = {features, *(size for shape in shapes for size in shape)}
    for part in small.modules():
        attributes = {name: value for name, value in vars(part).items() if type(value) is int and value in sizes}
        vars(part).update({name: scaled(value) for name, value in attributes.items()})
    return small, scaled(features)
