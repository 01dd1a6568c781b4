"""The inputs of a model's weights, to round them by (`core.quant.gptq`): block after block, while they are rounded.

    1. The model as it is reads the data. Blocks are the modules of the list (nn.ModuleList) that holds most of the
       weights, if each reads what the one before wrote; where there is no such list, the model is one block.
    2. Embeddings and what else is outside of the blocks. A layer is told by its inputs. An embedding, whose inputs are
       no vectors, by the gradients at its outputs: H = sum of g g^T, where g is the gradient of log p(token) for a
       token drawn from the model's own distribution. That is the Fisher information, what an error does to the
       distribution. A weight that is both embedding and head is told by both, each scaled to a mean of 1 on its
       diagonal.
    3. Block after block, two streams of data go through: x from the model as it was, and x' from the one whose weights
       are rounded so far; a weight is told by both. Weights of a block that read the same tensor are one stage.

Weights that no input comes to, and convolutions, are told by nothing. The data is read some times a block. In memory
are, beside the model, both streams before and behind a block, two matrices [I, I] and one plain block (or the model,
where it is one). With a device these are there and the model is not, but for the block that is read and what is outside
of the blocks (`core.quant.visit`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.config import UserError
from core.quant.choose import Chosen
from core.quant.gptq import Moments
from core.quant.visit import Visit

_CACHES = ("past_key_values", "past_key_value")
_SEED = 0


@dataclass(frozen=True)
class Call:
    """The arguments of a module's call, for one batch of the data."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def of(self, module: nn.Module) -> Any:
        return module(*self.args, **self.kwargs)

    def with_first(self, result: Any) -> Call:
        """The same, behind what a block gave."""
        return Call((_output(result), *self.args), self.kwargs)


def calls_of(inputs: Iterable[Any]) -> list[Call]:
    """Each a tensor, a tuple of arguments or a mapping of keywords. Raises UserError where there is none."""
    calls = [
        Call((), each) if isinstance(each, Mapping) else Call(each if isinstance(each, tuple) else (each,), {})
        for each in inputs
    ]
    if not calls:
        raise UserError("the calibration data holds no batch; give some text, best some ten thousand tokens")
    return calls


def moments(
    model: nn.Module, calls: list[Call], chosen: Sequence[Chosen], device: torch.device | None = None
) -> Iterator[tuple[Chosen, Moments | None]]:
    """(weight, what its inputs are; None where none came), each once. It is to be rounded before the next is asked for.

    device  where the model is read, block after block; None: where it is

    The model is in eval mode meanwhile. Raises UserError for embeddings of a model that does not give logits, and for
    inputs that are not finite.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for item, found in _moments(model, calls, chosen, Visit(device)):
                if found is not None and not bool(found.hessian_II.isfinite().all()):
                    raise UserError(
                        f"{item.name} meets inputs that are not finite; a model that has diverged cannot be calibrated"
                    )
                yield item, found
    finally:
        model.train(training)


def _moments(
    model: nn.Module, calls: list[Call], chosen: Sequence[Chosen], visit: Visit
) -> Iterator[tuple[Chosen, Moments | None]]:
    calls = [Call(visit.moved(call.args), visit.moved(dict(call.kwargs))) for call in calls]
    listed = _listed(model, chosen)
    with visit.through(model, listed):
        chained = bool(listed) and _is_chain(model, listed, calls[0])
        if chained:
            yield from _by_blocks(model, listed, calls, chosen, visit)
            return
    with visit.through(model, []):
        plain = copy.deepcopy(model)
        outside = [item for item in chosen if _is_looked_up(item)]
        yield from _outer_moments(model, calls, outside)
        inside = [item for item in chosen if not _is_looked_up(item)]
        yield from _block_moments(plain, model, calls, calls, inside)


def _by_blocks(
    model: nn.Module, blocks: list[nn.Module], calls: list[Call], chosen: Sequence[Chosen], visit: Visit
) -> Iterator[tuple[Chosen, Moments | None]]:
    number_of = {id(module): number for number, block in enumerate(blocks) for module in block.modules()}
    of_block: list[list[Chosen]] = [[] for _ in blocks]
    outside = []
    for item in chosen:
        number = number_of.get(id(item.holders[0][0]))
        (outside if _is_looked_up(item) or number is None else of_block[number]).append(item)
    later = [_calls_within(model, blocks, call) for call in calls]
    plain_calls = [each.pop(0) for each in later]
    yield from _outer_moments(model, calls, outside)
    rounded_calls = [_calls_within(model, blocks[:1], call)[0] for call in calls]
    for number, block in enumerate(blocks):
        plain = visit.copied(block)
        yield from _block_moments(plain, block, plain_calls, rounded_calls, of_block[number])
        if number + 1 < len(blocks):
            following = [each[number] for each in later]
            plain_calls = [after.with_first(call.of(plain)) for call, after in zip(plain_calls, following)]
            rounded_calls = [after.with_first(call.of(block)) for call, after in zip(rounded_calls, following)]


def _is_looked_up(item: Chosen) -> bool:
    return any(isinstance(module, nn.Embedding) for module, _ in item.holders)


def _block_moments(
    plain: nn.Module, block: nn.Module, plain_calls: list[Call], calls: list[Call], items: list[Chosen]
) -> Iterator[tuple[Chosen, Moments | None]]:
    twins = dict(zip(block.modules(), plain.modules(), strict=True))
    calibrated = set()
    for reader, stage in _stages(block, calls, items):
        cross_II = hessian_II = torch.zeros((), dtype=torch.float64, device="cpu")
        for plain_call, call in zip(plain_calls, calls):
            x_NI, rounded_NI = _read(plain, twins[reader], plain_call), _read(block, reader, call)
            if rounded_NI is None:  # an expert without tokens
                continue
            if x_NI is None or x_NI.shape != rounded_NI.shape:  # it had other tokens: nothing is known of these
                x_NI = rounded_NI
            hessian_II = hessian_II + (rounded_NI.T @ rounded_NI).double()
            cross_II = cross_II + (x_NI.T @ rounded_NI).double()
        for item in stage:
            calibrated.add(item.name)
            yield item, Moments(hessian_II, cross_II)
    yield from ((item, None) for item in items if item.name not in calibrated)


def _stages(block: nn.Module, calls: list[Call], items: list[Chosen]) -> list[tuple[nn.Module, list[Chosen]]]:
    """Weights in the order of their use, those that read the same tensor together, with who reads it first."""
    stages: list[tuple[nn.Module, list[Chosen]]] = []
    items_of = {module: item for item in items for module, _ in item.holders}
    seen: set[str] = set()
    read: list[tuple[Tensor, list[Chosen]]] = []

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        item = items_of[module]
        if item.name in seen or not args or not _is_read(item, args[0]):
            return
        seen.add(item.name)
        stage = next((stage for tensor, stage in read if tensor is args[0]), [])
        if not stage:
            stages.append((module, stage))
            read.append((args[0], stage))  # keeps the tensor, so that no other is taken for it
        stage.append(item)

    with _hooks((module, note) for module in items_of):
        for call in calls:
            call.of(block)
            read.clear()
            if len(seen) == len(items):  # as a rule at once; experts may have to wait for tokens
                break
    return stages


def _is_read(item: Chosen, x: Any) -> bool:
    """Return whether a weight is a matrix, and x what it is multiplied with."""
    weight = item.weight
    columns = weight.shape[0 if item.transposed else -1]
    return weight.ndim == 2 and isinstance(x, Tensor) and x.is_floating_point() and x.shape[-1] == columns


class _Reached(Exception):
    """No error: a module has its input."""


def _read(block: nn.Module, reader: nn.Module, call: Call) -> Tensor | None:
    """x [N, I], what a module inside is called with first, if it is."""
    found = []

    def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
        found.append(args[0])
        raise _Reached

    with _hooks([(reader, stop)]), suppress(_Reached):
        call.of(block)
    return _rows(found[0]) if found else None


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).to(torch.promote_types(x.dtype, torch.float32))


# --- blocks -----------------------------------------------------------------------------------------------------------


def _listed(model: nn.Module, chosen: Sequence[Chosen]) -> list[nn.Module]:
    """Those of the list that holds most of the weights, or none."""
    holders = {id(module): item.weight.numel() for item in chosen for module, _ in item.holders}
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]

    def held(blocks: list[nn.Module]) -> int:
        return sum(holders.get(id(module), 0) for block in blocks for module in block.modules())

    blocks = max(lists, key=held, default=[])
    return blocks if held(blocks) else []


def _is_chain(model: nn.Module, blocks: list[nn.Module], call: Call) -> bool:
    """Return whether each is called once, in order, with the result of the one before as its first argument."""
    order: list[nn.Module] = []
    written: list[Any] = []
    linked = [True]

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        linked[0] = linked[0] and bool(args) and (not order or args[0] is written[-1])
        order.append(module)

    def leave(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        written.append(_output(result))

    handles = [block.register_forward_hook(leave) for block in blocks]
    try:
        with _hooks((block, enter) for block in blocks):
            call.of(model)
    finally:
        for handle in handles:
            handle.remove()
    return linked[0] and order == blocks


def _calls_within(model: nn.Module, blocks: list[nn.Module], call: Call) -> list[Call]:
    """The blocks' arguments; of all but the first without the first argument, which would fill memory."""
    found: list[Call] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        without = {name: value for name, value in kwargs.items() if name not in _CACHES}
        found.append(Call(args[1:] if found else args, without))
        if len(found) == len(blocks):
            raise _Reached

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    try:
        call.of(model)
    except _Reached:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return found


def _output(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


# --- outside of the blocks --------------------------------------------------------------------------------------------


def _outer_moments(
    model: nn.Module, calls: list[Call], outside: list[Chosen]
) -> Iterator[tuple[Chosen, Moments | None]]:
    tables = [(module, item) for item in outside for module, _ in item.holders if isinstance(module, nn.Embedding)]
    layers = [(module, item) for item in outside for module, _ in item.holders if not isinstance(module, nn.Embedding)]
    found: dict[str, list[Tensor]] = {item.name: [] for item in outside}
    for hessians in (_by_inputs(model, calls, layers), _by_gradients(model, calls, tables) if tables else {}):
        for name, hessian_II in hessians.items():
            mean = hessian_II.diagonal().mean()
            found[name].append(hessian_II / mean if mean > 0 else hessian_II)
    for item in outside:
        yield item, Moments(torch.stack(found[item.name]).sum(0)) if found[item.name] else None


def _by_inputs(model: nn.Module, calls: list[Call], layers: Sequence[tuple[nn.Module, Chosen]]) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    item_of = dict(layers)

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        item = item_of[module]
        if args and _is_read(item, args[0]):
            x_NI = _rows(args[0])
            sums[item.name] = sums.get(item.name, 0) + (x_NI.T @ x_NI).double()

    if layers:
        with _hooks((module, note) for module, _ in layers):
            for call in calls:
                call.of(model)
    return sums


def _by_gradients(model: nn.Module, calls: list[Call], tables: Sequence[tuple[nn.Module, Chosen]]) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    looked_up: list[tuple[str, Tensor]] = []
    name_of = {module: item.name for module, item in tables}

    def leaf(module: nn.Module, args: tuple[Any, ...], result: Tensor) -> Tensor:
        result = result.detach().requires_grad_()
        looked_up.append((name_of[module], result))
        return result

    dice: dict[torch.device, torch.Generator] = {}
    handles = [module.register_forward_hook(leaf) for module, _ in tables]
    try:
        for call in calls:
            looked_up.clear()
            with torch.enable_grad(), _frozen(model):
                logits_NV = _logits(call.of(model))
                generator = dice.setdefault(logits_NV.device, torch.Generator(logits_NV.device).manual_seed(_SEED))
                drawn_N1 = torch.multinomial(logits_NV.detach().softmax(1), 1, generator=generator)
                loss = F.cross_entropy(logits_NV, drawn_N1[:, 0], reduction="sum")
                gradients = torch.autograd.grad(loss, [x for _, x in looked_up], allow_unused=True)
            for (name, _), gradient in zip(looked_up, gradients):
                if gradient is not None:
                    g_NI = _rows(gradient)
                    sums[name] = sums.get(name, 0) + (g_NI.T @ g_NI).double()
    finally:
        for handle in handles:
            handle.remove()
    return sums


def _logits(result: Any) -> Tensor:
    """[N, V], in fp32 or wider."""
    logits = getattr(result, "logits", _output(result))
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.ndim < 2:
        raise UserError(
            f"the model gives {type(result).__name__}, and embeddings are calibrated by logits [.., V]; leave "
            "embeddings out, or give a model with its head"
        )
    return _rows(logits)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Inside, no parameter asks for a gradient."""
    asking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


@contextmanager
def _hooks(hooks: Iterable[tuple[nn.Module, Callable[[nn.Module, tuple[Any, ...]], None]]]) -> Iterator[None]:
    """Inside, each is told what its module is called with."""
    handles = [module.register_forward_pre_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
