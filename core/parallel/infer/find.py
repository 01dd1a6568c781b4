"""The tensor parallelism of a model that brings no plan: found from its forward, and proved by it.

1. `flow` runs the forward without values and learns which axes of which parameters are one.
2. An axis is cut where that is sure to compute the same: nothing is summed over it, normalised or sorted along it
   between the products with parameters in which it comes in (columns: heads, hidden features) and those in which it
   goes out in a sum (rows); or where it is a vocabulary, whose rows are looked up and whose logits leave the model.
3. Every module that owns a part of that gets a `Role`, from how its operations meet the axis.
4. The roles are tried: the model runs once more without values, as one rank would run it. It must call the same
   operators in the same order, each of the shape that the rank's part of its axes has. Where a module's own code counts
   with the whole (a number of heads), the attribute that says so gets the rank's count; which one, trying shows.

What is not sure stays whole. A model of which nothing can be cut is refused, with what stood in the way.

Gradients need no trial: of what every rank has whole and uses for its part they are sums over the ranks, and a
`copy_to` stands wherever that begins. A value that is used both ways is not cut.
"""

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from core.compat import FAKE_TENSOR_LOG, FakeTensorMode
from core.config import UserError
from core.parallel.infer.axes import Axis
from core.parallel.infer.choose import Chosen, Unsure, choose, left_whole
from core.parallel.infer.flow import Trace, trace
from core.parallel.infer.roles import Roles
from core.parallel.infer.sequence import shard_rows
from core.parallel.infer.trial import fit
from core.placement.style import Plan

NO_MODULES: Mapping[str, int | str] = MappingProxyType({})


@dataclass
class Found:
    """A plan, and what is left whole.

    left  modules with large parameters of which nothing is cut -> why
    """

    plan: Plan
    left: dict[str, str]


def infer_plan(model: nn.Module, ranks: int, sample: Mapping[str, Any], *, sequence: bool = True) -> Found:
    """The plan over so many ranks; the model stays as it is.

    sample    keyword arguments of its forward, whose values do not matter; two sequences at least
    sequence  shard activations along the sequence between the pairs, in lists of blocks where that is sure

    Raises UserError where no axis can be cut, and where one that could be has a size that the ranks do not divide.
    """
    with on_tensors_without_values(model, sample) as (whole, inputs):
        found, roles, refused = fitted(whole, ranks, inputs, sequence)
    plan = {name: role.style(roles.axes) for name, role in roles.roles.items()}
    return Found(plan, left_whole(found, roles.chosen, refused))


@contextmanager
def on_tensors_without_values(
    model: nn.Module, sample: Mapping[str, Any]
) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """A copy of the model and of its arguments, in its format, for forwards on tensors without values."""
    with FakeTensorMode(allow_non_fake_inputs=True), quiet():
        formats = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        dtype = next(formats, torch.get_default_dtype())
        inputs = {name: without_value(value) for name, value in sample.items()}
        floating = {n: x.to(dtype) for n, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
        yield without_values(model), inputs | floating


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's own log of operators that cannot run without values, which are expected."""
    logger = logging.getLogger(FAKE_TENSOR_LOG)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def fitted(
    whole: nn.Module, ranks: int, inputs: Mapping[str, Any], sequence: bool = True
) -> tuple[Trace, Roles, dict[Axis, str]]:
    """The roles of a model's modules, tried; and the axes that were given up, and why."""
    found, refused = traced(whole, inputs), dict[Axis, str]()
    while True:
        chosen = choose(found, ranks, refused)
        try:
            return found, _tried_roles(found, chosen, whole, inputs, ranks, sequence), refused
        except Unsure as unsure:
            given_up = {axis.root for axis in unsure.axes} & chosen.axes
            if not given_up:
                raise UserError(f"no plan of tensor parallelism was found for this model: {unsure}") from unsure
            refused |= dict.fromkeys(given_up, str(unsure))


def _tried_roles(
    found: Trace, chosen: Chosen, whole: nn.Module, inputs: Mapping[str, Any], ranks: int, sequence: bool
) -> Roles:
    """With sequence parallelism, where that stands the trial.  Raises Unsure where nothing does."""
    for shards in (True, False) if sequence else (False,):
        roles = Roles(found, chosen, whole)
        roles.find()
        if shards:
            shard_rows(roles)
            if not roles.made_by_rows:
                continue
        try:
            fit(whole, inputs, roles, ranks)
        except Unsure:
            if not shards:
                raise
        else:
            return roles
    raise AssertionError


def without_values(model: nn.Module) -> nn.Module:
    """A copy of the model, its tensors without memory; nothing that the model holds is copied."""
    memo: dict[int, Tensor] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        made = without_value(tensor)
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return copy.deepcopy(model, memo).train()  # with its dropouts


def without_value(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value


def traced(
    model: nn.Module, inputs: Mapping[str, Any], attention: bool = False, by_token: Mapping[str, int | str] = NO_MODULES
) -> Trace:
    """The trace, around modules that cannot run without values.

    attention  torch's function of attention is one operation
    by_token   modules that compute each token by itself, which are one operation -> which of their arguments is tokens
    """
    opaque = dict.fromkeys(by_token, "")
    while True:
        attempt = Trace(opaque=dict(opaque), by_token=by_token, attention=attention)
        try:
            return trace(model, inputs, attempt)
        except RuntimeError as error:  # torch's, or below it: a value that is not there, an operator without shapes
            running = [call.name for call in attempt.running]
            if not running or not running[-1] or running[-1] in opaque:
                raise UserError(f"{_cannot_run(opaque, error)}; say how its modules are cut") from error
            opaque[running[-1]] = next(iter(str(error).splitlines()), type(error).__name__)
        except (AttributeError, TypeError, ValueError, KeyError) as error:  # of what was put in a module's place
            raise UserError(f"{_cannot_run(opaque, error)}; say how its modules are cut") from error


def _cannot_run(opaque: Mapping[str, str], error: Exception) -> str:
    said = next(iter(str(error).splitlines()), type(error).__name__)
    where, why = next(iter(opaque.items()), ("the model", said))
    return f"{where}: its forward cannot be run without values ({why})"
