"""The styles of context parallelism that was found: each rank's blocks have its places of a sequence.

    x[B, L, D] -> take -> x[B, L_cp, D] -> blocks, whose attention is a ring's or Ulysses' -> gather -> x[B, L, D]

1. `Block`, the style of a block: the first takes this rank's places of the activations, each takes those of what else
   it is given along the sequence, and the last gathers the whole. While it runs, torch's function of attention is
   replaced (a torch function mode). Padding has the values of the last place: no module meets what it would not.
2. `whole`, the style of the model: what lies around the blocks every rank computes. The gradient of what it returns is
   divided by the ranks, so that the gradients of all parameters are partial sums over them, as of those inside.

Shapes: B batch, L length, D features, H query heads, J key/value heads, K head size, N ranks.
"""

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from core.comm.collectives import copy_to
from core.compat import FakeTensor, tree_leaves, tree_map
from core.config import UserError
from core.kernels.torch_attention import torch_attention
from core.mesh import AnyMesh, axis_size
from core.parallel.context import SequenceCut, check_length, gather_sequence
from core.parallel.infer.styles import Trial, moving
from core.parallel.ring import attend_to_places, elements_passed, ring_messages
from core.parallel.ulysses import check_exchange, exchange, exchange_messages
from core.placement.style import AXIS, Message, Messages, Site, Style

Mode = Literal["ring", "ulysses"]
Held = int | Literal["whole", "here", "unused"]
"""An argument of a block: the dim along which a rank takes its places; it is whole on every rank; its places are here;
no operation uses it."""
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Attention:
    """A call of attention that a block makes: its heads and their size, by which its messages are counted.

    With a mask, which it makes of inputs without values, transformers gives each query head keys of its own.

    own  it attends to the sequence itself, and not to another one that every rank has whole
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    own: bool


@dataclass
class Sequence:
    """The sequence of a list of blocks, in the forward that runs.

    What is recomputed in a backward must be of the forward that ran last, or of one of an equal length.

    zigzag  each rank has a piece from either end
    """

    mode: Mode
    zigzag: bool
    cut: SequenceCut = field(default_factory=lambda: SequenceCut(0, 1, False))

    def begin(self, length: int, axis: Any) -> None:
        """Raises UserError for a sequence that is too short."""
        self.cut = SequenceCut(length, axis.size(), self.zigzag)
        check_length(length, axis.size())
        if self.cut.local_length < 2:  # code takes a sequence of one place for a step of generation
            raise UserError(
                f"a sequence of {length} tokens leaves one for each of cp={axis.size()} ranks; use a smaller cp"
            )


@dataclass
class Block:
    """One block of a list.

    held      its arguments that are tensors, by their places
    attends   its calls of attention, in their order
    features  of its activations
    unknown   why arguments that are not among `held` are not known
    """

    name: str
    sequence: Sequence
    held: dict[str, Held]
    attends: list[Attention]
    features: int
    first: bool
    last: bool
    unknown: str = ""

    def style(self) -> Style:
        messages = Messages()
        for attention in self.attends:
            if attention.own:
                messages += _messages(attention, self.sequence.mode)
        if self.last:
            gathered = [
                Message(operation, lambda site: site.size() * site.batch * site.length * self.features)
                for operation in ("all_gather", "reduce_scatter")
            ]
            messages += Messages((gathered[0],), (gathered[1],))
        return Style(messages=messages, refuse=self._refuse, wrap=self.wrap)

    def _refuse(self, module: Any, mesh: AnyMesh, axis: str) -> None:
        for attention in self.attends:
            if attention.own and self.sequence.mode == "ulysses":
                check_exchange(attention.num_heads // _tensor_ranks(mesh), axis_size(mesh, axis))

    def wrap(self, block: Any, axis: Any) -> Any:
        inner = block.forward
        block.sequence_cut = None  # dropouts ask it where their input lies

        def forward(*args: Any, **kwargs: Any) -> Any:
            with moving():
                if self.first:
                    self.sequence.begin(args[0].shape[1], axis)
                args, kwargs = given(args, kwargs, lambda place, x: self._taken(place, x, axis))
            before, block.sequence_cut = block.sequence_cut, (self.sequence.cut, axis.get_local_rank())
            try:
                with _Replaced(self, axis):
                    result = inner(*args, **kwargs)
            finally:
                block.sequence_cut = before
            with moving():
                return self._gathered(result, axis) if self.last else result

        block.forward = forward
        return block

    def _taken(self, place: str, x: Tensor, axis: Any) -> Tensor:
        if place not in self.held:
            raise UserError(f"{self.name} is given a tensor as its argument {place}, and {self.unknown}; use mesh.cp=1")
        dim, cut = self.held[place], self.sequence.cut
        if isinstance(dim, str):
            return x
        if dim >= x.ndim or x.shape[dim] != cut.length:
            raise UserError(
                f"{self.name}: its argument {place} of shape {list(x.shape)} does not have the {cut.length} places of "
                f"the sequence as dim {dim}; use mesh.cp=1"
            )
        return x.index_select(dim, cut.places(axis.get_local_rank(), x.device).clamp_(max=cut.length - 1))

    def _gathered(self, result: Any, axis: Any) -> Any:
        x, *rest = result if isinstance(result, tuple) else (result,)
        cut = self.sequence.cut
        if isinstance(axis, Trial):
            whole = x.new_empty(x.shape[0], cut.length, *x.shape[2:])
        else:
            whole = gather_sequence(x, cut, axis)
        return (whole, *rest) if isinstance(result, tuple) else whole


def _tensor_ranks(mesh: AnyMesh) -> int:
    return axis_size(mesh, "tp") if "tp" in (mesh.mesh_dim_names or ()) else 1


def _messages(attention: Attention, mode: Mode) -> Messages:
    def heads(site: Site) -> tuple[int, int]:
        tp = _tensor_ranks(site.mesh)
        return attention.num_heads // tp, attention.num_kv_heads // tp

    def passed(site: Site) -> int:
        return elements_passed(site.size(), site.batch * site.length, heads(site)[1], attention.head_size)

    if mode == "ring":
        return ring_messages(passed)
    return exchange_messages(AXIS, heads, lambda site: attention.head_size)


def given(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], change: Callable[[str, Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block, of which each tensor is changed by `change(place, tensor)`.

    A place is "0", "mask", or "positions.1" for the second of a tuple. Raises UserError for what may hold tensors that
    are not seen, such as a cache.
    """

    def changed(place: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(place, value)
        if type(value) in (tuple, list):
            return type(value)(changed(f"{place}.{n}", x) for n, x in enumerate(value))
        if type(value) is dict:
            return {name: changed(f"{place}.{name}", x) for name, x in value.items()}
        if isinstance(value, _SIMPLE):
            return value
        raise UserError(
            f"a block is given a {type(value).__name__} as its argument {place}, which may hold tensors of a sequence "
            "and is not looked into; call the model without it (use_cache=False), or use mesh.cp=1"
        )

    return tuple(changed(str(n), x) for n, x in enumerate(args)), {n: changed(n, x) for n, x in kwargs.items()}


# --- attention --------------------------------------------------------------------------------------------------------


class _Replaced(TorchFunctionMode):
    """Puts that of this rank's places in the place of torch's attention, for one call of a block."""

    def __init__(self, place: Block, axis: Any):
        super().__init__()
        self.place, self.axis, self.calls = place, axis, iter(place.attends)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        known = next(self.calls, None)
        if known is None:
            raise UserError(
                f"{self.place.name} calls attention more often than where its plan was found; use mesh.cp=1"
            )
        return self._attend(known, *args, **(kwargs or {}))

    def _attend(
        self,
        known: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        cut = self.place.sequence.cut
        self._check(known, cut, query, key, value, attn_mask, dropout_p, is_causal)
        if isinstance(self.axis, Trial):
            with moving():
                return query.new_empty(*query.shape[:3], value.shape[3])
        if not known.own:
            mask = None if attn_mask is None else self._rows_of(attn_mask)
            return torch_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if self.place.sequence.mode == "ulysses":
            attend = _to_the_whole(attn_mask, is_causal, scale)
            return exchange(q, k, v, cut, self.axis, attend).transpose(1, 2)
        if isinstance(query, FakeTensor):  # transformers makes a mask wherever it cannot read positions
            attn_mask, is_causal = None, is_causal or cut.zigzag
        if attn_mask is not None:
            raise UserError(
                f"{self.place.name}: attention is given a mask (of padding, or of a window), which mesh.cp_mode=ring "
                "does not take without a plan; use --mesh.cp-mode ulysses"
            )
        if scale is not None:
            q = q * (scale * math.sqrt(q.shape[-1]))  # a ring's own scale is the usual one
        return attend_to_places(q, k, v, cut, self.axis, is_causal).transpose(1, 2)

    def _check(
        self,
        known: Attention,
        cut: SequenceCut,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        p: float,
        causal: bool,
    ) -> None:
        """Raises UserError for a call that is not as the plan has it."""
        name, length = self.place.name, cut.local_length
        if p:
            raise UserError(
                f"{name}: attention drops {p:g} of its weights, and the ranks of mesh.cp would not draw what one rank "
                "draws; set the dropout of attention to 0"
            )
        if not known.own and causal:
            raise UserError(f"{name}: causal attention to another sequence is not cut; use mesh.cp=1")
        if q.shape[2] != length or (known.own and (k.shape[2] != length or q.shape[3] != v.shape[3])):
            raise UserError(
                f"{name}: attention of queries {list(q.shape)}, keys {list(k.shape)} and values {list(v.shape)} is not "
                f"that of the {length} places of this rank with heads of one size; use mesh.cp=1"
            )
        if known.own and mask is not None and not {*mask.shape[-2:]} <= {1, cut.length}:
            raise UserError(
                f"{name}: the mask of attention, of shape {list(mask.shape)}, is not of the {cut.length} places of the "
                "whole sequence; use mesh.cp=1"
            )

    def _rows_of(self, mask: Tensor) -> Tensor:
        """This rank's queries of a mask of what they see of another sequence."""
        cut = self.place.sequence.cut
        if mask.shape[-2] == 1:
            return mask
        if mask.shape[-2] != cut.length:
            raise UserError(
                f"{self.place.name}: a mask of shape {list(mask.shape)} is not of {cut.length} queries; use mesh.cp=1"
            )
        places = cut.places(self.axis.get_local_rank(), mask.device).clamp_(max=cut.length - 1)
        return mask.index_select(mask.ndim - 2, places)


def _to_the_whole(mask: Tensor | None, causal: bool, scale: float | None) -> Callable[..., Tensor]:
    """Torch's attention of q[B, L, H_r, K] to the whole sequence, with the mask of these heads."""

    def attend(q: Tensor, k: Tensor, v: Tensor, heads: range) -> Tensor:
        own = mask
        if own is not None and own.ndim > 2 and own.shape[-3] > 1:
            own = own.narrow(own.ndim - 3, heads.start, len(heads))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        o = torch_attention(q, k, v, own, is_causal=causal, scale=scale, enable_gqa=grouped)
        return o.transpose(1, 2)

    return attend


# --- around the blocks ------------------------------------------------------------------------------------------------


class _Share(Function):
    """Identity; of the gradient each rank has an equal share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] / ctx.num_ranks, None


def _whole(model: Any, axis: Any) -> Any:
    inner, signature = model.forward, inspect.signature(model.forward)

    def entered(x: Any) -> Any:
        return copy_to(x, axis) if isinstance(x, Tensor) and x.requires_grad else x

    def left(x: Any) -> Any:
        if isinstance(x, Tensor):
            return _Share.apply(x, axis.size()) if x.requires_grad else x
        if hasattr(x, "__dict__") and any(isinstance(leaf, Tensor) for leaf in tree_leaves(vars(x))):
            x = copy.copy(x)
            vars(x).update(tree_map(left, vars(x)))
        return x

    def forward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(*args, **kwargs).arguments
        _check_switches(model, bound | kwargs)
        if "use_cache" in signature.parameters and "use_cache" not in bound:
            kwargs["use_cache"] = False
        args, kwargs = tree_map(entered, (args, kwargs))
        return tree_map(left, inner(*args, **kwargs))

    model.forward = forward
    return model


def _check_switches(model: Any, given: Mapping[str, Any]) -> None:
    """Raises UserError where a caller wants what the ranks have parts of."""
    config = getattr(model, "config", None)
    for name in ("use_cache", "output_hidden_states", "output_attentions"):
        of_config = name != "use_cache" and getattr(config, name, False)
        if given.get(name) or (of_config and given.get(name) is None):
            raise UserError(
                f"{name}=True with mesh.cp: inside of the blocks a rank has its places of a sequence alone; leave it "
                "out, or use mesh.cp=1"
            )


whole = Style(wrap=_whole)
"""The model around its blocks, which every rank computes."""
