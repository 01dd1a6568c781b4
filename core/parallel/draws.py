"""Dropout whose masks are those of one rank, however the model is spread.

torch draws a mask as long as the tensor at hand from the generator of the rank. On n ranks that is another mask than on
one, and ranks with equal seeds draw equal masks for shards that are different parts of a whole. Here an element is
dropped by a hash of where it stands:

    key     of (seed, step, name of the module, number of its call in this forward)
    element key, row in the step's global batch, place along each further dim of the whole

1. `Draws` gives every dropout module of a model a forward that does so. Where it is called outside of `Draws.at`, as in
   a loop of one's own that does not say which step it is at, torch draws as ever.
2. `Draws.at` says, around the forward of a microbatch, which step and rows of the batch it is.
3. What is recomputed in the backward draws again what it drew. Each call also draws a number from torch's generator,
   whose state every checkpoint puts back, so that the second call is known by the same number: also under checkpoints
   that the model has of its own, and when other microbatches have run since.
4. Where tensor parallelism gives a dropout a part of the whole, its plan says which (`replicated`, `sharded`); where
   context parallelism does, the cut of the sequence is that of the model's forward.

Covered: torch.nn's Dropout, Dropout1d to 3d, AlphaDropout and FeatureAlphaDropout, and torch.nn.functional's of these
names, where a module of the model calls them in the first step (not under --compile, whose graphs they are part of).
Activations have the batch in dim 0, or what each of its rows has, flattened into it.

Not covered, and said once by name: attention that is given a dropout (scaled_dot_product_attention,
MultiheadAttention), and all other random functions that a model calls. They draw from the rank's generator, which is
alike on ranks of tensor parallelism and not on others. Under tensor parallelism scaled_dot_product_attention is worked
out here, by place, where the plan says which heads a rank has: alike on any number of such ranks, not on one.

SplitMix64's finaliser (Steele, Lea and Flood 2014) mixes; in integers, so that every device has the same masks.
"""

import hashlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.overrides import TorchFunctionMode

from core.compat import uncompiled
from core.config import UserError
from core.layout import shares
from core.mesh import pipeline_ranks, tensor_axes
from core.parallel.plan import RECOMPUTED
from core.placement.style import AXIS, Style

_ALPHA = 1.7580993408473766  # -(SELU's lower bound), what alpha dropout puts in the place of zero
UNCALLED = "uncalled"
"""The mark of a dropout that was not called where a plan was found: the part that it is given is unknown."""
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed number
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685
_CPU_ELEMENTS, _GPU_ELEMENTS = 1 << 15, 1 << 22
"""Elements of a mask that are worked out at a time: a hash takes 8 bytes, and a few of them are alive."""


# --- where the input of a dropout lies --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The part of a dim that a rank has.

    index, ranks  its place among the ranks of the axis
    size          of the whole dim; None: all parts are equally long
    """

    dim: int
    index: int
    ranks: int
    size: int | None

    def start(self, name: str, length: int) -> int:
        """The begin of the part in the whole.  Raises UserError for one of another length than the size says."""
        if self.size is None:
            return self.index * length
        part = shares(self.size, self.ranks)[self.index]
        if part.stop - part.start != length:
            raise UserError(
                f"{name}: the plan says that dim {self.dim} of its input is cut from {self.size} over {self.ranks} "
                f"ranks, and this rank has {length} of it instead of {part.stop - part.start}; give the right size"
            )
        return part.start


def sharded(dim: int, size: int | None = None) -> Style:
    """A style for a dropout, or a module that calls one, whose input is cut along a dim over the axis.

    size  of the whole dim, where the axis does not divide it
    """
    return Style(inputs={AXIS: Shard(dim)}, wrap=lambda module, axis: mark_sharded(module, axis, dim, size))


def mark_sharded(module: nn.Module, axis: DeviceMesh, dim: int, size: int | None = None) -> nn.Module:
    """Mark a module's draws as parts of a whole that is cut over the axis on `dim`; see `sharded`."""
    return _marked(module, Part(dim, axis.get_local_rank(), axis.size(), size))


def _marked(module: nn.Module, part: Part | None) -> nn.Module:
    for inner in module.modules():
        inner.part_of_draws = part  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return module


replicated = Style(wrap=lambda module, axis: _marked(module, None))
"""A dropout, or a module that calls one, whose input is whole on every rank of the axis: all drop alike."""


# --- masks ------------------------------------------------------------------------------------------------------------


def kept(key: int, places: list[Tensor], p: float, device: torch.device) -> Tensor:
    """The mask of elements that stay, bool [len(places[0]), ..]: each with probability 1 - p, by its place alone.

    key     64 bits, signed
    places  int64, along each dim
    """
    hashed = _mix(torch.tensor([key], dtype=torch.int64, device=device))
    shape = [len(place) for place in places]
    for dim, place in enumerate(places[:-1]):
        hashed = _mix((hashed[:, None] ^ _mix(place + _GOLDEN * (dim + 1) % 2**62)).flatten())
    last = (
        _mix(places[-1] + _GOLDEN * len(places) % 2**62) if places else torch.zeros(1, dtype=torch.int64, device=device)
    )
    mask = torch.empty(len(hashed), len(last), dtype=torch.bool, device=device)
    least = min(int(p * 2**63), 2**63 - 1)
    rows = max(1, (_CPU_ELEMENTS if device.type == "cpu" else _GPU_ELEMENTS) // max(1, len(last)))
    for own, some in zip(mask.split(rows), hashed.split(rows)):
        torch.ge(_mix(some[:, None] ^ last) & (2**63 - 1), least, out=own)
    return mask.view(shape)


def _mix(x: Tensor) -> Tensor:
    """Mix the bits in place of a tensor that nobody else has."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        x *= factor
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


# --- a model's dropouts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Moment:
    seed: int
    step: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class _Call:
    """The record of a dropout's call, for when it is made again in the backward."""

    moment: _Moment
    index: int
    sequence: Any


class Draws:
    """The random masks of a model.

    model  whose dropouts are given a forward that draws by place; its names are those of the whole model
    mesh   the ranks that it is spread over

    Raises UserError for a dropout of which is not known what part of the whole its input is.
    """

    def __init__(self, model: nn.Module | None = None, mesh: DeviceMesh | None = None):
        self._cut: list[Any] = []  # modules whose forward cuts the sequence
        self._now: _Moment | None = None
        self._step: tuple[int, int] | None = None
        self._counts: dict[str, int] = {}
        self._calls: dict[tuple[str, int], _Call] = {}
        self._earlier = self._calls  # of the step before: a pipeline may compute it again when it has begun the next
        self._names: dict[int, str] = {}
        self._owners: set[int] = set()  # modules that call functional dropout
        self._first: tuple[int, int] | None = None
        self._said: set[str] = set()
        self._tensor_ranks = 1 if mesh is None else tensor_axes(mesh).size()
        self._is_grid = mesh is not None and tensor_axes(mesh).ndim > 1
        self._leads = True
        self._all_ranks = 1 if mesh is None else mesh.size()
        if model is None or mesh is None:
            return
        self._leads = mesh.get_rank() == 0
        self._cut = [module for module in model.modules() if hasattr(module, "sequence_cut")]
        named: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            named.setdefault(id(module), []).append(name)
            self._names.setdefault(id(module), name)
        for module in model.modules():
            function = _FUNCTION_OF.get(type(module))
            if function is None:
                continue
            names, drops = named[id(module)], bool(module.p)
            if len(names) > 1 and pipeline_ranks(mesh) > 1 and drops:
                raise UserError(
                    f"{names[0]} and {names[1]} are one dropout, and a stage of a pipeline cannot tell the number of "
                    "its calls; give each place a module of its own, or use mesh.pp=1"
                )
            if drops and getattr(module, "part_of_draws", None) != UNCALLED:
                self._part_of(module, names[0])
            module.forward = partial(self._forward, module, names[0], function)

    @contextmanager
    def at(self, seed: int, step: int, first_row: int, rows: int, watch: bool = True) -> Iterator[None]:
        """Surround a forward of `rows` rows of the step's global batch, from `first_row` on.

        watch  in the first step of all, find the modules that call functional dropout, and what is not covered
        """
        if self._step != (seed, step):
            self._step, self._earlier, self._calls = (seed, step), self._calls, {}
            self._first = self._first or self._step
        before, self._now, self._counts = self._now, _Moment(seed, step, first_row, rows), {}
        try:
            with _Functional(self, watches=True) if watch and self._step == self._first else nullcontext():
                yield
        finally:
            self._now = before

    def forget(self) -> None:
        """Know no call any more: torch's generator is put back, and what draws the same numbers may have other rows."""
        self._step, self._calls, self._earlier = None, {}, {}

    def adopt(self, owner: nn.Module) -> None:
        """Draw, from now on, for a module that calls functional dropout, also where it is recomputed."""
        if id(owner) not in self._owners:
            self._owners.add(id(owner))
            forward = RECOMPUTED if hasattr(owner, RECOMPUTED) else "forward"
            setattr(owner, forward, partial(_by_functional, self, getattr(owner, forward)))

    def _forward(self, module: nn.Module, name: str, function: str, x: Tensor) -> Tensor:
        if not module.training or not module.p:
            return x
        return self.dropped(module, name, function, x, module.p)  # pyright: ignore[reportArgumentType]

    @uncompiled
    def dropped(self, module: nn.Module, name: str, function: str, x: Tensor, p: float) -> Tensor:
        """x after the dropout of torch.nn.functional's `function` that a module calls."""
        call = self._call(name)
        if call is None or not x.numel():
            return getattr(F, function)(x, p, True)
        by_channel = function not in ("dropout", "alpha_dropout")
        dims = x.ndim if not by_channel else min(2, x.ndim)
        places = self._places(x, dims, call, self._part_of(module, name), name)
        mask = kept(_key(call, name), places, p, x.device).view(*x.shape[:dims], *[1] * (x.ndim - dims))
        if "alpha" in function:
            scale = ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5 if p < 1 else 0.0
            return torch.where(mask, x, -_ALPHA) * scale + _ALPHA * scale * p
        return torch.where(mask, x / (1 - p), 0.0) if p < 1 else x * 0.0

    def _call(self, name: str) -> _Call | None:
        """Which call this is; None: of no step that is known."""
        if self._now is None and not self._calls:
            return None
        mark = int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))
        known = self._calls.get((name, mark)) or self._earlier.get((name, mark))
        if known is not None or self._now is None:
            return known
        index = self._counts[name] = self._counts.get(name, -1) + 1
        call = _Call(self._now, index, next((c for m in self._cut if (c := m.sequence_cut) is not None), None))
        self._calls[name, mark] = call
        return call

    def _places(self, x: Tensor, dims: int, call: _Call, part: Part | None, name: str) -> list[Tensor]:
        places = [torch.arange(n, dtype=torch.int64, device=x.device) for n in x.shape[:dims]]
        if dims and x.shape[0] % call.moment.rows == 0:
            places[0] += call.moment.first_row * (x.shape[0] // call.moment.rows)
        if part is not None:
            dim = part.dim % x.ndim
            if dim < dims:
                places[dim] += part.start(name, x.shape[dim])
        if call.sequence is not None:
            cut, rank = call.sequence
            if x.ndim < 2 or x.shape[1] != cut.local_length or (part is not None and part.dim % x.ndim == 1):
                raise UserError(
                    f"{name}: a dropout of {list(x.shape)} under mesh.cp={cut.num_ranks}: its dim 1 must be the "
                    f"{cut.local_length} places of the sequence that this rank has; set its p to 0, or use mesh.cp=1"
                )
            if dims > 1:
                places[1] = cut.places(rank, x.device)
        return places

    def _part_of(self, module: nn.Module, name: str) -> Part | None:
        """The part that the plan gives.  Raises UserError where it must give one and does not."""
        if getattr(module, "part_of_draws", None) == UNCALLED:
            raise UserError(
                f"{name} is a dropout that was not called where the model's plan was found, and it is not known what "
                "part of the whole it is given; set its p to 0, or give a plan"
            )
        if hasattr(module, "part_of_draws"):
            return module.part_of_draws  # pyright: ignore[reportReturnType]
        if self._is_grid and self._tensor_ranks > 1:
            raise UserError(
                f"{name} is a dropout, and on a grid of tensor parallelism it is not known what part of the whole it "
                "is given; set its p to 0, or use --mesh.tp-mode 1d"
            )
        if self._tensor_ranks > 1:
            raise UserError(
                f"{name} is a dropout, and the plan does not say how its input lies on the {self._tensor_ranks} ranks "
                "of tensor parallelism; add it with the style core.parallel.draws.replicated or sharded(dim), or set "
                "its p to 0"
            )
        return None

    def functional(self, owner: nn.Module, function: str, x: Tensor, p: float) -> Tensor:
        return self.dropped(owner, f"{self._names[id(owner)]}.{function}", function, x, p)

    def attends(self, owner: nn.Module) -> bool:
        """Return whether a module's attention draws by place: where its plan says which heads a rank has."""
        return self._tensor_ranks > 1 and hasattr(owner, "part_of_draws")

    def attention(
        self,
        owner: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """torch.nn.functional.scaled_dot_product_attention, with all scores in memory, its dropout by place."""
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.transpose(-2, -1)
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self.functional(owner, "dropout", scores.softmax(-1), dropout_p) @ value

    def owner(self) -> nn.Module | None:
        """The innermost module of the model in whose forward this is called."""
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_varnames[:1] == ("self",):
                found = frame.f_locals.get("self")
                if isinstance(found, nn.Module) and id(found) in self._names:
                    return found
            frame = frame.f_back
        return None

    def say(self, owner: nn.Module, function: str) -> None:
        """Name once what draws from the rank's own generator.

        Raises UserError for attention with a dropout under tensor parallelism.
        """
        who = f"{self._names[id(owner)] or 'the model'} calls {function}"
        if self._all_ranks == 1 or who in self._said:
            return
        self._said.add(who)
        if self._tensor_ranks > 1 and function in _ATTENTION:
            raise UserError(
                f"{who} with a dropout: ranks of tensor parallelism would draw one mask for different heads; set its "
                "dropout to 0, or use mesh.tp=1"
            )
        if self._leads:
            warnings.warn(
                f"{who}, which draws from each rank's own generator: {self._all_ranks} ranks draw otherwise than one",
                stacklevel=2,
            )


def _by_functional(draws: Draws, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Functional(draws, watches=False):
        return forward(*args, **kwargs)


class _Functional(TorchFunctionMode):
    """Gives functional dropout to `draws`; one that watches also tells it who calls that, and what else draws."""

    def __init__(self, draws: Draws, watches: bool):
        super().__init__()
        self.draws, self.watches = draws, watches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in _FUNCTIONS:
            return self._dropout(func, name, *args, **kwargs)
        if func is F.scaled_dot_product_attention and _draws(name, args, kwargs):
            owner = self.draws.owner()
            if owner is not None and self.draws.attends(owner):
                self.draws.adopt(owner)
                return self.draws.attention(owner, *args, **kwargs)
        if self.watches and _draws(name, args, kwargs) and (owner := self.draws.owner()) is not None:
            self.draws.say(owner, name)
        return func(*args, **kwargs)

    def _dropout(
        self, func: Any, name: str, input: Tensor, p: float = 0.5, training: bool | None = None, inplace: bool = False
    ) -> Tensor:
        training = "alpha" not in name if training is None else training  # torch's defaults
        owner = self.draws.owner()
        if not training or p == 0 or owner is None:
            return func(input, p, training, inplace)
        self.draws.adopt(owner)
        return self.draws.functional(owner, name, input, p)


class UnplacedDraws(TorchFunctionMode):
    """Notes what is called inside that draws from the rank's generator, and so by the order of calls, not by place.

    names  of these functions
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func not in _FUNCTIONS and _draws(name, args, kwargs):
            self.names.add(name)
        return func(*args, **kwargs)


def is_dropout(module: nn.Module) -> bool:
    """Return whether a module draws by place, and drops anything."""
    return type(module) in _FUNCTION_OF and bool(module.p)


def _draws(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    if name in _ATTENTION:
        at = _ATTENTION[name]
        return bool(options.get("dropout_p", args[at] if len(args) > at else 0)) and options.get("training", True)
    return name in _RANDOM and options.get("generator") is None


_FUNCTION_OF = {
    nn.Dropout: "dropout",
    nn.Dropout1d: "dropout1d",
    nn.Dropout2d: "dropout2d",
    nn.Dropout3d: "dropout3d",
    nn.AlphaDropout: "alpha_dropout",
    nn.FeatureAlphaDropout: "feature_alpha_dropout",
}
_FUNCTIONS = {getattr(F, name) for name in _FUNCTION_OF.values()}
_ATTENTION = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Where each takes its dropout."""
_RANDOM = (
    "bernoulli", "bernoulli_", "rand", "rand_like", "randn", "randn_like", "uniform_", "normal_", "exponential_",
    "multinomial", "rrelu", "rrelu_", "randperm", "native_dropout",
)  # fmt: skip


def _key(call: _Call, name: str) -> int:
    text = f"{call.moment.seed}/{call.moment.step}/{name}/{call.index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
