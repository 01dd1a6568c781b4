"""What a block keeps that does not keep everything, and not nothing: the results of some of its operators.

The first run keeps them, in their order, and the one in the backward is handed them in place of computing them again
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), section 5;
`torch.utils.checkpoint` calls it selective). More than torch's:

- A result behind which the block saves nothing for its backward but what it was made of is not kept: nothing is made of
  it in the second run, which mostly ends before it (the last product of a transformer's block). Where it does not
  (functions of our own save when they are done: core.kernels.matmul on a CPU), it is computed again.
- One that is written into (a ReLU in place, a sum in place) is computed again, and is let go when the block has run;
  so is attention that draws a dropout: what draws behind it has to find the generator where it was.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, UntypedStorage

from core.compat import TorchDispatchMode, alias_of, tree_leaves, tree_map_only
from core.trace.segments import Results

_LINEAR = frozenset(
    (
        *("aten::mm", "aten::addmm", "aten::convolution"),
        *("aten::_grouped_mm", "megalith::grouped_matmul"),  # what core.nn.experts takes on a GPU
        "mkldnn::_linear_pointwise",  # what core.kernels.matmul takes on a CPU
    )
)
PRODUCTS = _LINEAR | {"aten::bmm", "aten::baddbmm"}
_ATTENTION = frozenset(
    (
        *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
        *("megalith::attention_forward", "megalith::attention_varlen_forward", "megalith::attention_16_bits_forward"),
    )
)
OPERATORS: dict[Results, frozenset[str]] = {
    "attention": _ATTENTION,
    "linear": _LINEAR,
    "products": PRODUCTS | _ATTENTION,
}
"""By their names, since some are registered when they are first needed."""


class _Result(NamedTuple):
    """value: None where it is computed again"""

    operator: str
    value: Any = None
    versions: Sequence[int] = ()

    @property
    def is_as_it_was(self) -> bool:
        return _versions(self.value) == list(self.versions)


class KeptResults:
    """The results that one call of a block keeps.

    operators  whose results it is to keep; kept: whose it has kept
    """

    def __init__(self, operators: frozenset[str]):
        self.operators = operators
        self._kept: deque[_Result] = deque()
        self._made_of: list[ref[UntypedStorage]] = []  # the last one
        self._needed = 0

    @property
    def kept(self) -> set[str]:
        return {result.operator for result in self._kept if result.value is not None}

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Around the run that makes them, whose tensors for the backward are saved by way of `before`."""
        with self.keep_all():
            yield
        while len(self._kept) > self._needed:
            self._kept.pop()

    @contextmanager
    def keep_all(self) -> Iterator[None]:
        """The same of a run that nobody asks what it saves."""
        with _Keeping(self):
            yield
        self._kept = deque(result if result.is_as_it_was else _Result(result.operator) for result in self._kept)

    def before(self, save: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """The hook of a tensor that is saved for the backward: what there is by then will be needed."""

        def hook(x: Tensor) -> Any:
            memory = x.untyped_storage()
            is_made_of = any(storage() is memory for storage in self._made_of)
            self._needed = max(self._needed, len(self._kept) - is_made_of)
            return save(x)

        return hook

    def hand_out(self) -> AbstractContextManager[Any]:
        """Around the run that takes them, once."""
        return _Handing(self)

    def note(self, operator: str, given: Any, value: Any) -> None:
        value = tree_map_only(Tensor, alias_of, value)
        self._made_of = [ref(leaf.untyped_storage()) for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        self._kept.append(_Result(operator, value, _versions(value)))

    def take(self, operator: str) -> Any:
        """The next one, or None where it has changed since or is not kept."""
        if not self._kept:
            return None
        found = self._kept.popleft()
        assert found.operator == operator, f"a block computes {operator} when it runs again, and kept {found.operator}"
        return found.value if found.is_as_it_was else None

    def concerns(self, operator: Any, args: Any, kwargs: Any) -> bool:
        return operator.name() in self.operators and not _draws(operator, args, kwargs)


class _Keeping(TorchDispatchMode):
    def __init__(self, results: KeptResults):
        super().__init__()
        self.results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        if self.results.concerns(func, args, kwargs):
            self.results.note(func.name(), (args, kwargs), value)
        return value


class _Handing(TorchDispatchMode):
    def __init__(self, results: KeptResults):
        super().__init__()
        self.results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        value = self.results.take(func.name()) if self.results.concerns(func, args, kwargs) else None
        return func(*args, **kwargs) if value is None else value


def _versions(value: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _draws(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of attention draws a dropout."""
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value))
    return False
