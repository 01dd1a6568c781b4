"""Layers whose Fisher information factors, as they are found in a model; and the sums that their factors are made of.

A layer's parameters are one matrix V[m, n]: a Linear's [out, in], the bias its last column; a convolution's [out,
in x places of the kernel]; a Conv1D's of transformers [in, out], the bias its last row; an embedding's [rows, size].
Its Fisher information is taken for R x C (Kronecker), one factor of inputs a, one of gradients g of the outputs:

    of inputs     A = mean of a a^T over the positions of all rows       embedding: how often each row is looked up
    of gradients  G = sum of g g^T over the positions, mean over the items

R is G and C is A where the outputs come first, and the other way round in Conv1D and embedding. Where a row has several
positions (tokens, places of a picture), sharing="expand" takes each as a case of its own, and "reduce" the mean of a
and the sum of g over a row first (Eschenhagen et al. 2023, arXiv:2311.00636, section 3).

Of a stack of matrices (experts) each is a layer of its own, which sees the rows that were routed to it. Its A is a mean
over these rows, and its G a sum over them, divided by the items of the whole batch:

    F_e = sum over e's rows of (a a^T x g g^T) / items  ~  (sum a a^T / e's rows) x (sum g g^T / items)

which is what the first two lines say with e's rows for all positions. An A over all rows would count twice how seldom
an expert is chosen, and the step of an expert that sees one row in p would be p times too long.

A weight that several modules share has a pair (R_u, C_u) of each use. Of their sum the product with the same partial
traces is taken: R = sum_u R_u tr C_u / T, C = sum_u C_u tr R_u, with T = sum_u tr R_u tr C_u.

Where a side is longer than `max_dim`, and of an embedding's inputs always, a factor is its diagonal.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.optim.spectra import packed, packed_size, unpacked

Sharing = Literal["expand", "reduce"]
Kind = Literal["linear", "conv", "conv1d", "embedding", "head", "router", "experts", "stack"]


@dataclass(frozen=True)
class Use:
    """A module that computes with a layer's weight, its parameter `leaf`."""

    name: str
    module: Any
    kind: Kind
    leaf: str = "weight"

    @property
    def inputs_first(self) -> bool:
        """Return whether the factor of inputs is R."""
        return self.kind in ("conv1d", "embedding")


@dataclass(frozen=True)
class Layer:
    """weight, bias  names of its parameters; None: no bias, or one that does not belong to it
    shape         of V
    uses          the modules that share the weight
    diagonal      whether R, and whether C, is a diagonal
    expert        its place in the stack of matrices that weight and bias are; None: they are no stack
    """

    weight: str
    bias: str | None
    shape: tuple[int, int]
    uses: tuple[Use, ...]
    diagonal: tuple[bool, bool]
    expert: int | None = None

    @property
    def inputs_first(self) -> bool:
        return self.uses[0].inputs_first

    def key(self, name: str) -> str:
        """The name of a state tensor among those of the weight."""
        return name if self.expert is None else f"{name}.{self.expert}"

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def factor_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of R and C: [n, n], or of a diagonal [n]."""
        r, c = ((n,) if short else (n, n) for n, short in zip(self.shape, self.diagonal))
        return r, c

    def joined(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """V[m, n] of a weight and its bias, in their shapes."""
        matrix = weight.flatten(1)
        if bias is None:
            return matrix
        if self.inputs_first:
            return torch.cat([matrix, bias[None]])
        return torch.cat([matrix, bias[:, None]], 1)

    def parted(self, matrix: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """The weight, of that shape, and the bias of a V[m, n]."""
        if self.bias is None:
            return matrix.reshape(shape), None
        if self.inputs_first:
            return matrix[:-1].reshape(shape), matrix[-1]
        return matrix[:, :-1].reshape(shape), matrix[:, -1]


def kind_of(module: nn.Module) -> Kind | None:
    """What K-FAC takes a module for; None: its Fisher information does not factor.

    A head is a linear layer [V, D] with its loss, whose logits nobody holds: it calls its `show_gradients`, where that
    is set, with its inputs [B, L, D], a slice of their tokens, and the gradients [C, V] of these tokens' logits, of the
    sum of the losses that it returns.

    A module of one's own says by an attribute `factored_as` that it is a

    "router"   a linear layer without bias, to whose outputs ranks of tensor parallelism have parts of one gradient each
    "experts"  linear layers weight[E, O, I], bias[E, O], called with rows [A, I], those of one matrix after those of
               another, and how many each has, int64[E]; what lies behind these is none

    What else has a stack of matrices is found by `find_layers` ("stack", core/optim/kfac_stacks.py).
    """
    named = getattr(module, "factored_as", None)
    if named in ("router", "experts"):
        return named
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        plain = module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return "conv" if plain else None
    if isinstance(module, nn.Embedding):
        return None if module.max_norm is not None or module.scale_grad_by_freq or module.sparse else "embedding"
    weight = getattr(module, "weight", None)
    if hasattr(module, "show_gradients") and isinstance(weight, Tensor) and weight.ndim == 2:
        return "head"
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.ndim == 2:
        return "conv1d"
    return None


def find_layers(
    model: nn.Module,
    trained: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    max_dim: int,
    exclude: tuple[str, ...] = (),
) -> list[Layer]:
    """The layers of a model, in its order.

    trained  names of the parameters that are updated; of what modules share any one of the names
    shapes   whole shape of each of these
    max_dim  the longest side with a factor that is no diagonal
    exclude  patterns of names of modules that are left out

    A parameter that also a module of another kind has (one's own) is no layer's. Several matrices in one parameter of a
    module that does not say which rows each has are a "stack".
    """
    names: dict[int, str] = {}
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{leaf}" if prefix else leaf
            owners.setdefault(id(parameter), []).append((prefix, module, leaf))
            if full in trained:
                names.setdefault(id(parameter), full)
    found = []
    for key, name in names.items():
        uses = [Use(prefix, module, kind, leaf) for prefix, module, leaf in owners[key]
                if (kind := _kind_of_parameter(module, leaf, shapes[name])) is not None
                and not any(fnmatchcase(prefix, pattern) for pattern in exclude)]  # fmt: skip
        if len(uses) != len(owners[key]) or 0 in shapes[name]:
            continue
        bias = None
        if len(uses) == 1 and uses[0].kind not in ("embedding", "stack"):
            own = uses[0].module._parameters.get("bias")
            bias = names.get(id(own)) if own is not None and len(owners[id(own)]) == 1 else None
        if uses[0].kind in ("experts", "stack"):
            stack = shapes[name]
            found += [_layer(name, bias, stack[1:], tuple(uses), max_dim, expert) for expert in range(stack[0])]
        else:
            found.append(_layer(name, bias, shapes[name], tuple(uses), max_dim))
    return found


def _kind_of_parameter(module: nn.Module, leaf: str, shape: tuple[int, ...]) -> Kind | None:
    kind = kind_of(module)
    if kind is not None:
        return kind if leaf == "weight" else None
    is_stack = len(shape) == 3 and shape[0] > 1 and not isinstance(module, nn.Conv1d | nn.ConvTranspose1d)
    return "stack" if is_stack else None


def _layer(
    name: str, bias: str | None, whole: tuple[int, ...], uses: tuple[Use, ...], max_dim: int, expert: int | None = None
) -> Layer:
    rows, columns = whole[0], prod(whole[1:])
    if bias is not None:
        rows, columns = (rows + 1, columns) if uses[0].inputs_first else (rows, columns + 1)
    looked_up = all(use.kind == "embedding" for use in uses)
    return Layer(name, bias, (rows, columns), uses, (looked_up or rows > max_dim, columns > max_dim), expert)


# --- rows of inputs and gradients -------------------------------------------------------------------------------------


def input_rows(use: Use, x: Tensor, bias: bool, rows: int, sharing: Sharing) -> Tensor:
    """a[cases, in] of a module's input, with a last column of ones for a bias; of an embedding its indices [cases]."""
    if use.kind == "embedding":
        indices = x.reshape(-1)
        padding = use.module.padding_idx
        return indices if padding is None else indices[indices != padding]
    a = _patches(use.module, x) if use.kind == "conv" else x
    a = a.reshape(rows, -1 if a.numel() else 0, a.shape[-1])
    if bias:
        a = torch.cat([a, a.new_ones(*a.shape[:2], 1)], -1)
    return a.mean(1) if sharing == "reduce" else a.flatten(0, 1)


def gradient_rows(use: Use, g: Tensor, x: Tensor, rows: int, sharing: Sharing) -> Tensor:
    """g[cases, out] of the gradient of a module's output; x: its input."""
    if use.kind == "conv":
        g = g.movedim(1, -1)
    if use.kind == "embedding" and use.module.padding_idx is not None:
        g = g.masked_fill((x == use.module.padding_idx)[..., None], 0.0)
    g = g.reshape(rows, -1 if g.numel() else 0, g.shape[-1])
    return g.sum(1) if sharing == "reduce" else g.flatten(0, 1)


def _patches(conv: Any, x: Tensor) -> Tensor:
    """x[B, in, ..] -> [B, places, in x kernel]: what each output of a convolution is made from."""
    is_line = x.ndim == 3  # a Conv1d is a Conv2d of one line
    x = x[:, :, None] if is_line else x
    one, none = ((1,), (0,)) if is_line else ((), ())
    sizes = [(*one, *conv.kernel_size), (*one, *conv.dilation), (*none, *conv.padding), (*one, *conv.stride)]
    return F.unfold(x, *sizes).mT


# --- factors ----------------------------------------------------------------------------------------------------------


def outer_sum(cases: Tensor, size: int, diagonal: bool) -> Tensor:
    """Sum of x x^T over the cases [.., size], or its diagonal; of indices [..] the diagonal, or a diagonal matrix."""
    if not cases.is_floating_point():
        counts = torch.bincount(cases, minlength=size)
        return counts if diagonal else counts.diag()
    return cases.square().sum(0) if diagonal else cases.T @ cases


def packed_factor(factor: Tensor) -> Tensor:
    """A symmetric matrix [n, n] without what is above its diagonal; a diagonal [n] as it is."""
    return factor if factor.ndim == 1 else packed(factor)


def packed_factor_size(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 1 else packed_size(shape[0])


def unpacked_factor(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The factor, of that shape, that `packed_factor` was given."""
    return values if len(shape) == 1 else unpacked(values, shape[0])


def trace(factor: Tensor) -> Tensor:
    return factor.sum() if factor.ndim == 1 else factor.trace()


def one_product(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """R and C of a weight with several uses: the product with the partial traces of the sum of their products."""
    if len(pairs) == 1:
        return pairs[0]
    traces = [(trace(r), trace(c)) for r, c in pairs]
    total = torch.stack([r * c for r, c in traces]).sum()
    total = torch.where(total > 0, total, torch.ones_like(total))
    rows = torch.stack([r * t for (r, _), (_, t) in zip(pairs, traces)]).sum(0) / total
    columns = torch.stack([c * t for (_, c), (t, _) in zip(pairs, traces)]).sum(0)
    return rows, columns
