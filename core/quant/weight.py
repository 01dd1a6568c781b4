"""A weight whose storage is small integers and scales, and which still is a tensor of its old shape and dtype.

Whoever multiplies by it through `F.linear`, looks rows up through `F.embedding`, convolves or calls `torch.addmm` gets
the product with the integers (`core.quant.products`). For any other operator it is widened to what it stands for, so
that every module computes the right thing, if not the fastest. It cannot be written to.

So a parameter keeps its name, shape and dtype, modules and their forwards stay as they are, and weights that are tied
stay one tensor. Storage is by output channels, whatever the layer:

    codes  int8 [O, I], or uint8 [O, G group / 2] with two 4-bit codes a byte, as `core.kernels.quantized_matmul` packs
    scale  fp32 [O]; for 4 bits bf16 [O, G], where there are zeros with 5 significant bits: see `core.quant.packed`
    zero   uint8 [O, G], only for 4 bits that are not symmetric
    gain   fp32 [I], only for llm.int8 where columns differ much: powers of two that the codes' columns stand for

Columns that are much smaller than the others are those that meet outliers. In steps of their rows' largest elements
little of them would be left, so they are rounded larger, and the inputs taken by so much smaller: exact, both.

Shapes: O output channels, I inputs of each (kernel positions included), G groups of them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from core.compat import tree_map, without_torch_function
from core.config import UserError
from core.kernels.quantized_matmul import dequantize_int4, dequantize_int8, quantize_int4, quantize_int8
from core.layout import local
from core.quant.gptq import Moments, Steps, gptq
from core.quant.scheme import Scheme

PARTS = ("codes", "scale", "zero", "gain")
# Elements of a weight that are rounded at a time: temporaries stay small beside one layer.
_SLAB = 1 << 16
# And on a device, where some dozens of operators on little take as long as on much.
_SLAB_OF_A_DEVICE = 1 << 24
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Of a group's range that 4 bits may cover; others were hardly ever the best."""
_SMALL = 0.25
"""Of the usual column's largest element: columns whose own is smaller get a gain."""

Prepared = TypeVar("Prepared")
Function = Callable[..., Any]
FUNCTIONS: dict[Any, Function] = {}
"""Functions of torch that know a quantized weight; filled by `core.quant.products`."""


class QuantizedWeight(Tensor):
    """`transposed`: the weight stands as [I, O], as in GPT-2's layers of transformers. Never differentiated."""

    scheme: Scheme
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    transposed: bool
    gain: Tensor | None

    @staticmethod
    def __new__(
        cls,
        scheme: Scheme,
        codes: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        transposed: bool = False,
        gain: Tensor | None = None,
    ) -> QuantizedWeight:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)  # pyright: ignore

    def __init__(
        self,
        scheme: Scheme,
        codes: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        transposed: bool = False,
        gain: Tensor | None = None,
    ):
        self.scheme, self.codes, self.scale, self.zero, self.transposed = scheme, codes, scale, zero, transposed
        self.gain = gain
        self.packed: Any = None  # another form of the same, for the products of `core.quant.packed`
        self._prepared: tuple[Tensor, Any] | None = None

    # --- what it stands for -------------------------------------------------------------------------------------------

    @property
    def num_columns(self) -> int:
        """I, without the filling of a last group."""
        return self.shape[0] if self.transposed else self.shape[1:].numel()

    def matrix(self, rows: slice | Tensor = slice(None), dtype: torch.dtype | None = None) -> Tensor:
        """The weight's values by output channels, [O, I], or some of its rows."""
        zero = None if self.zero is None else self.zero[rows]
        codes, scale, dtype = self.codes[rows], self.scale[rows], dtype or self.dtype
        if self.scheme.name == "int4":
            return dequantize_int4(codes, scale, zero, self.num_columns, dtype)
        matrix_OI = dequantize_int8(codes, scale, dtype)
        return matrix_OI if self.gain is None else matrix_OI * self.gain.to(dtype)

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain tensor of the same shape."""
        matrix_OI = self.matrix(dtype=dtype)
        return matrix_OI.T if self.transposed else matrix_OI.view(self.shape)

    def prepared(self, make: Callable[[QuantizedWeight], Prepared]) -> Prepared:
        """Data that products keep of it, such as where its codes lie; made once, and again when these have moved."""
        if self._prepared is None or self._prepared[0] is not self.codes:
            self._prepared = (self.codes, make(self))
        return self._prepared[1]

    @property
    def parts(self) -> dict[str, Tensor]:
        """The stored tensors, by name."""
        return {name: part for name in PARTS if (part := getattr(self, name)) is not None}

    @property
    def stored_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def mapped(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> QuantizedWeight:
        """The same weight with each of its parts changed (moved, copied)."""
        parts = [None if part is None else change(part) for part in (self.codes, self.scale, self.zero, self.gain)]
        codes, scale, zero, gain = parts
        assert codes is not None
        assert scale is not None
        return QuantizedWeight(
            self.scheme, codes, scale, zero, tuple(self.shape), dtype or self.dtype, self.transposed, gain
        )

    def alike(self) -> QuantizedWeight:
        """The same parts in another tensor."""
        same = self.mapped(lambda part: part)
        same.packed = self.packed
        return same

    def cut(self, box: tuple[slice, ...]) -> QuantizedWeight:
        """Some rows and columns of a matrix [O, I] that stands as it is, as a rank of several holds them.

        Raises UserError for columns that do not begin and end with groups.
        """
        assert not self.transposed
        rows, columns = (slice(*s.indices(n)) for s, n in zip(box, self.shape, strict=True))
        parts = [None if part is None else part[rows] for part in (self.codes, self.scale, self.zero)]
        if columns != slice(0, self.num_columns, 1):
            parts = self._columns(parts, columns)
        codes, scale, zero = parts
        assert codes is not None
        assert scale is not None
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        gain = None if self.gain is None else self.gain[columns].clone()
        return QuantizedWeight(self.scheme, codes, scale, zero, shape, self.dtype, gain=gain)

    def _columns(self, parts: list[Tensor | None], columns: slice) -> list[Tensor | None]:
        codes, scale, zero = parts
        assert codes is not None
        assert scale is not None
        if self.scheme.name != "int4":
            return [codes[:, columns].contiguous(), scale, zero]
        group, last = self.scheme.group_size, self.num_columns
        if columns.start % group or (columns.stop % group and columns.stop != last):
            raise UserError(
                f"{last} columns in groups of {group} are not cut at {columns.start} and {columns.stop}, inside a "
                "group; use a smaller group_size, or fewer ranks"
            )
        groups = slice(columns.start // group, -(-columns.stop // group))
        codes = codes.unflatten(1, (-1, group // 2))[:, groups].flatten(1).contiguous()
        return [codes, scale[:, groups].contiguous(), None if zero is None else zero[:, groups].contiguous()]

    # --- torch's protocols --------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = FUNCTIONS.get(func)
        with without_torch_function():
            return (known or func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0].alike()
        if func is torch.ops.aten.clone.default:
            return args[0].mapped(torch.clone)
        if func is torch.ops.aten._to_copy.default and (kwargs.get("dtype") or torch.float32).is_floating_point:
            device, waits = kwargs.get("device") or args[0].device, not kwargs.get("non_blocking", False)
            moved = args[0].mapped(lambda part: part.to(device, non_blocking=not waits), kwargs.get("dtype"))
            moved.packed = args[0].packed if moved.device == args[0].device else None
            return moved
        if func._schema.is_mutable and isinstance(args[0], QuantizedWeight):
            raise TypeError(f"{func} would write to a quantized weight; quantize again from the weights to change it")
        args, kwargs = tree_map(_plain, (args, kwargs))
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.parts), (self.scheme, tuple(self.shape), self.dtype, self.transposed)

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any) -> Tensor:
        scheme, shape, dtype, transposed = context
        zero, gain = parts.get("zero"), parts.get("gain")
        return QuantizedWeight(scheme, parts["codes"], parts["scale"], zero, shape, dtype, transposed, gain)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self.mapped(torch.clone)
        copy.packed = self.packed
        memo[id(self)] = copy = _as_before(self, copy)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        stored = (self.scheme, self.codes, self.scale, self.zero)
        context = (tuple(self.shape), self.dtype, self.transposed, self.gain)
        return _rebuilt, (*stored, *context, isinstance(self, nn.Parameter))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"QuantizedWeight({self.scheme.name}, shape={tuple(self.shape)}, dtype={self.dtype})"


# A parameter is made by detaching. By dispatch torch would import DTensor for it, which takes a third of a second.
FUNCTIONS[Tensor.detach] = QuantizedWeight.alike


def _plain(value: Any) -> Any:
    return value.dequantized() if isinstance(value, QuantizedWeight) else value


def _as_before(old: Tensor, new: QuantizedWeight) -> Tensor:
    return nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new


def _rebuilt(*arguments: Any) -> Tensor:
    *context, is_parameter = arguments
    weight = QuantizedWeight(*context)
    return nn.Parameter(weight, requires_grad=False) if is_parameter else weight


@torch.no_grad()
def quantized_weight(
    weight: Tensor, scheme: Scheme, transposed: bool = False, moments: Moments | None = None
) -> QuantizedWeight:
    """Round a weight [O, ..] (transposed: [I, O]), some rows at a time; int4 by what its inputs are, if that is known.

    Raises ValueError for values that are not finite.
    """
    matrix_OI = weight.T if transposed else weight.flatten(1)
    if moments is not None:
        _check_finite(matrix_OI)
        parts = gptq(matrix_OI, moments, Steps(scheme.group_size, scheme.symmetric, _scale_bits(scheme), _SHARES))
        return QuantizedWeight(scheme, *parts, tuple(weight.shape), weight.dtype, transposed)
    num_rows, num_columns = matrix_OI.shape
    slab = _SLAB if matrix_OI.device.type == "cpu" else _SLAB_OF_A_DEVICE
    step = max(1, slab // max(num_columns, 1))
    gain_I = _gain(matrix_OI, step) if scheme.name == "llm.int8" and weight.ndim == 2 else None
    nothing = _rounded(matrix_OI[:0].float(), scheme)
    whole = [None if part is None else part.new_empty(num_rows, *part.shape[1:]) for part in nothing]

    def fill(start: int) -> None:
        slab_OI = matrix_OI[start : start + step]
        slab = _rounded(slab_OI if gain_I is None else slab_OI.float() / gain_I, scheme)
        for part, piece in zip(whole, slab):
            if part is not None and piece is not None:
                part[start : start + step] = piece

    _in_slabs(fill, matrix_OI, step)
    codes, scale, zero = whole
    assert codes is not None
    assert scale is not None
    return QuantizedWeight(scheme, codes, scale, zero, tuple(weight.shape), weight.dtype, transposed, gain_I)


def _in_slabs(work: Callable[[int], None], matrix_OI: Tensor, step: int) -> None:
    """work(first row) for each slab of so many rows; on a CPU for as many at once as torch has threads.

    Each operator on a slab is then on one thread: it is so short that threads which share it mostly wait for each
    other, above all on a machine that has more to do.
    """
    starts, threads = range(0, len(matrix_OI), step), torch.get_num_threads()
    if matrix_OI.device.type != "cpu" or threads == 1 or len(starts) < 2:
        for start in starts:
            work(start)
        return
    inferring = torch.is_inference_mode_enabled()

    def alone(start: int) -> None:
        with torch.inference_mode() if inferring else torch.no_grad():  # modes are a thread's own
            work(start)

    try:
        with ThreadPoolExecutor(min(threads, len(starts)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(alone, starts))
    finally:
        torch.set_num_threads(threads)  # threads to come have as many as were set last, by whoever


def _gain(matrix_OI: Tensor, step: int) -> Tensor | None:
    """Each column's gain, so that none is much smaller than the usual; None where none is, beside columns of zeros."""
    largest_I, turn = matrix_OI.new_zeros(matrix_OI.shape[1], dtype=torch.float32), Lock()

    def look(start: int) -> None:
        slab_I = matrix_OI[start : start + step].float().abs().amax(0)
        with turn:
            torch.maximum(largest_I, slab_I, out=largest_I)

    _in_slabs(look, matrix_OI, step)
    some_I = (largest_I > 0) & largest_I.isfinite()
    if not bool(some_I.any()):
        return None
    share_I = (largest_I / largest_I[some_I].median()).clamp(min=2.0**-20)
    small_I = some_I & (share_I < _SMALL)
    if not bool(small_I.any()):
        return None
    return torch.where(small_I, share_I / torch.frexp(share_I).mantissa, 1.0)  # the power of two above it


def _rounded(matrix_OI: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | None]:
    _check_finite(matrix_OI)
    if scheme.name == "int4":
        return quantize_int4(matrix_OI, scheme.group_size, scheme.symmetric, _scale_bits(scheme), _SHARES)
    return *quantize_int8(matrix_OI), None


def _scale_bits(scheme: Scheme) -> int:
    return 8 if scheme.symmetric else 5


def _check_finite(matrix_OI: Tensor) -> None:
    if not bool(matrix_OI.isfinite().all()):
        raise ValueError("holds values that are not finite")


def stored_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers as this rank stores them; what is tied counts once."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(t.stored_bytes if isinstance(t, QuantizedWeight) else local(t).nbytes for t in tensors.values())
