"""Slices give the same numbers, and the plan holds its budget, by what is really allocated."""

import math

import pytest
import torch

from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.config import preset, tiny
from apps.fold.subbatch import _cuts, peak_bytes, plan, slice_operations
from core.config import UserError
from core.metrics import MemoryAccount
from tests.support.fold import random_features, random_parameters


def _model(dtype: torch.dtype) -> AlphaFold:
    model = AlphaFold(tiny()).to(dtype).eval()
    model.load_state_dict(random_parameters(tiny()))
    return model


@pytest.mark.parametrize("limit", [1.0, 1e5])
def test_any_slices_give_the_same(limit: float) -> None:
    model = _model(torch.float64)
    names = list(model.state_dict())
    features = [random_features(7, rows=5, extra=4, templates=2).to("cpu", torch.float64)] * 2
    with torch.inference_mode():
        expected = model(features)
        slice_operations(model, limit)
        got = model(features)
        slice_operations(model, math.inf)
        again = model(features)
    assert list(model.state_dict()) == names
    for name in ("positions_BN373", "pair_BNNZ", "msa_BSND"):
        assert (getattr(got, name) - getattr(expected, name)).abs().max() < 1e-10, name
        assert (getattr(again, name) - getattr(expected, name)).abs().max() < 1e-10, name


def test_slices_have_the_same_gradients() -> None:
    model = _model(torch.float64)
    features = [random_features(5, rows=4, extra=3, templates=1).to("cpu", torch.float64)]
    grads = []
    for limit in (math.inf, 1.0):
        slice_operations(model, limit)
        model.zero_grad()
        (model(features).positions_BN373 ** 2).mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    largest = max(g.abs().max() for g in grads[0].values())  # some gradients are truly 0, and rounding noise here
    assert max((grads[0][n] - grads[1][n]).abs().max() for n in grads[0]) < 1e-10 * largest


def test_slices_do_not_cross_what_is_shared() -> None:
    assert _cuts(10, 3, 5) == [slice(0, 3), slice(3, 5), slice(5, 8), slice(8, 10)]
    assert _cuts(4, 9, 4) == [slice(0, 4)]


@pytest.mark.parametrize("limit", [math.inf, 2e4])
def test_the_predicted_peak_is_what_is_allocated(limit: float) -> None:
    """Counted by dispatch in a real forward: 5 % under at most; over where attention on a CPU keeps no scores."""
    model, features = _model(torch.float32), random_features(24, rows=6, extra=6, templates=2)
    slice_operations(model, limit)
    with torch.no_grad(), MemoryAccount() as account:
        account.add(model.parameters())
        model([features] * 2)
    predicted = peak_bytes(tiny(), 24, 6, 6, 2, torch.float32, limit)
    assert 0.95 * account.peak_bytes <= predicted <= 1.3 * account.peak_bytes


def test_the_plan_takes_slices_only_where_it_has_to() -> None:
    sizes = (64, 6, 6, 0)  # long enough for attention to take more than the triangle product, which has no slices
    whole, sliced = (peak_bytes(tiny(), *sizes, torch.float32, limit) for limit in (math.inf, 1e6))
    assert sliced < whole
    assert plan(tiny(), *sizes, torch.float32, int(1.1 * whole)) == math.inf
    assert plan(tiny(), *sizes, torch.float32, int((sliced + whole) / 2 / 0.95)) < math.inf
    with pytest.raises(UserError, match="64 residues need"):
        plan(tiny(), *sizes, torch.float32, 100_000)


def test_a_sequence_beyond_all_memory_is_refused_at_once() -> None:
    with pytest.raises(UserError, match="60000 residues need"):
        plan(preset("model_1_ptm"), 60_000, 508, 5120, 0, torch.bfloat16, 80 * 2**30)
