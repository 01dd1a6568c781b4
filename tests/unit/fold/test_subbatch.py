"""Any plan gives the same numbers, and holds its budget by what is really allocated, counted operator by operator."""

import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.config import HeadsConfig, ModelConfig, preset, tiny
from apps.fold.model.features import Features
from apps.fold.subbatch import (
    HEADS,
    FoldJob,
    How,
    Plan,
    apply_subbatches,
    counting,
    least_bytes,
    longest,
    plan_subbatches,
)
from apps.fold.subbatch.counting import MetaAccount
from apps.fold.subbatch.operations import operations_of
from apps.fold.subbatch.planner import RATES, free_bytes, meta_features
from apps.fold.subbatch.reading import PairNumbers, read_pairs
from apps.fold.subbatch.slices import every
from core.config import UserError
from core.kernels.operator import forced
from core.trace.account import MemoryAccount
from tests.support.fold import random_features, random_parameters


def _model(config: ModelConfig, dtype: torch.dtype) -> AlphaFold:
    model = AlphaFold(config).to(dtype).eval()
    model.load_state_dict(random_parameters(config))
    return model


def _read(model: AlphaFold, z: torch.Tensor, rows: int) -> PairNumbers:
    return read_pairs(model.heads, z, torch.ones(z.shape[:2]), every(z.shape[1], rows))


def _with(model: AlphaFold, rows: int, product: How) -> dict[str, How]:
    names = [name for name, _, _ in operations_of(model)]
    products = ("outgoing", "incoming")
    return {name: product if name.endswith(products) else How("rows", rows) for name in names}


@pytest.mark.parametrize(
    ("rows", "product"),
    [
        (1, How("copy", 1)),
        (3, How("copy", 2)),
        (2, How("cross", 1, 1)),
        (4, How("cross", 2, 3)),
        (5, How("cross", 3, 4)),
        (100, How("whole", 7)),
        (4, How("channels", 3, 5)),
        (4, How("channels", 8, 16)),
    ],
)
def test_any_slices_give_the_same(rows: int, product: How) -> None:
    model = _model(tiny(), torch.float64)
    names = list(model.state_dict())
    features = [random_features(7, rows=5, extra=4, templates=2, pad=1).to("cpu", torch.float64)] * 2
    with torch.inference_mode():
        expected = model(features)
        apply_subbatches(model, _with(model, rows, product))
        got = model(features)
        read = _read(model, got.pair_BNNZ, rows)
        apply_subbatches(model, {})
        again = model(features)
        whole = _read(model, expected.pair_BNNZ, 8)
    assert list(model.state_dict()) == names
    for name in ("positions_BN373", "pair_BNNZ", "msa_BSND"):
        assert (getattr(got, name) - getattr(expected, name)).abs().max() < 1e-10, name
        assert (getattr(again, name) - getattr(expected, name)).abs().max() == 0, name
    assert read.pae is not None
    assert read.ptm is not None
    assert (read.pae - whole.pae).abs().max() < 1e-5
    assert abs(float(read.ptm) - float(whole.ptm)) < 1e-10
    assert (read.distances - whole.distances).abs().max() < 1e-3


def test_pairs_in_host_memory_give_the_same() -> None:
    model = _model(tiny(), torch.float64)
    features = [random_features(6, rows=3, extra=2, templates=1).to("cpu", torch.float64)] * 2
    with torch.inference_mode():
        expected = model.fold(features)
        apply_subbatches(model, _with(model, 2, How("copy", 2)), offload=True)
        got = model.fold(features)
    assert (got.positions_BN373 - expected.positions_BN373).abs().max() < 1e-10


def test_slices_have_the_same_gradients() -> None:
    model = _model(tiny(), torch.float64)
    features = [random_features(5, rows=4, extra=3, templates=1).to("cpu", torch.float64)]
    grads = []
    for sliced in (False, True):
        apply_subbatches(model, _with(model, 2, How("copy", 2)) if sliced else {})
        model.zero_grad()
        (model(features).positions_BN373 ** 2).mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    largest = max(g.abs().max() for g in grads[0].values())  # some gradients are truly 0, and rounding noise here
    assert max((grads[0][n] - grads[1][n]).abs().max() for n in grads[0]) < 1e-10 * largest


# --- what is allocated ------------------------------------------------------------------------------------------------


def _narrow() -> ModelConfig:
    """Small widths in about the proportions of the released ones, and no templates."""
    config = tiny(templates=False)
    stack = replace(config.evoformer, num_blocks=1, msa_heads=2, outer_dim=4)
    heads = HeadsConfig(plddt_dim=16, distogram_bins=8, pae_bins=8)
    return replace(config, pair_dim=32, evoformer=stack, extra=replace(stack, msa_head_dim=4), heads=heads)


def _allocated(model: AlphaFold, features: list[Features], plan: Plan) -> int:
    """The most bytes of tensors alive at once in a prediction that follows the plan."""
    apply_subbatches(model, {name: how for name, how in plan.choices.items() if name != HEADS})
    with torch.no_grad(), MemoryAccount() as account:
        account.add(model.parameters())
        features[0].map(lambda tensor: account.add([tensor]) or tensor)
        found = model.fold(features)
        _read(model, found.pair_BNNZ, plan.choices[HEADS].rows)
    return account.peak_bytes


SHARES = (1.0, 1.02, 1.1, 1.3, 2, 20)


def _sweep(num_sizes: int) -> list[tuple[int, int, float]]:
    """Each share, of two sizes in turn; or all pairs of five sizes, which have no common factor with six shares."""
    draw = random.Random(0)
    sizes = [(draw.randint(9, 44), draw.randint(1, 12)) for _ in range(num_sizes)]
    return [(*sizes[n % num_sizes], SHARES[n % 6]) for n in range(30 if num_sizes == 5 else 6)]


@pytest.mark.parametrize("num_sizes", [2, pytest.param(5, marks=pytest.mark.soak)])
def test_no_budget_is_exceeded_and_peaks_are_as_predicted(num_sizes: int) -> None:
    """Lengths, depths and budgets, from the smallest that works on. By dispatch, within 5 %."""
    config = _narrow()
    model, methods = _model(config, torch.float32), set()
    for residues, rows, share in _sweep(num_sizes):
        job = FoldJob(config, residues, rows, rows + 1, iterations=2)
        budget = int(share * least_bytes(job))
        plan = plan_subbatches(job, budget)
        assert plan.peak_bytes <= budget
        features = random_features(residues, rows=rows, extra=rows + 1, templates=0)
        features = replace(features, templates=None)
        measured = _allocated(model, [features] * 2, plan)
        assert measured <= budget, (residues, rows, share)
        assert abs(plan.peak_bytes - measured) <= 0.05 * measured, (residues, rows, share, plan.peak_bytes, measured)
        methods |= {how.method for how in plan.choices.values()}
    assert methods >= {"whole", "rows", "copy"}


def test_hidden_keys_and_templates_are_foreseen() -> None:
    model = _model(tiny(), torch.float32)
    features = random_features(24, rows=6, extra=6, templates=2)
    assert features.templates is not None
    features.templates.torsion_mask_BTNA[:, :, 3, 2] = 0
    job = FoldJob(tiny(), 24, 6, 6, 2, iterations=2, hidden=True)
    for share in (1.0, 1.3):
        plan = plan_subbatches(job, int(share * least_bytes(job)))
        measured = _allocated(model, [features] * 2, plan)
        assert measured <= plan.peak_bytes <= 1.05 * measured


def test_results_that_are_remembered_are_those_of_torch() -> None:
    """Operator by operator, the first time and from memory, with kernels, in slices; and so are the bytes alive."""
    config = replace(tiny(), evoformer=replace(tiny().evoformer, num_blocks=1))
    with torch.device("meta"):
        model = AlphaFold(config).to(torch.bfloat16).eval()
    apply_subbatches(model, _with(model, 2, How("copy", 2)))
    features = meta_features(FoldJob(config, 7, 3, 2, 1, dtype=torch.bfloat16))
    counting._results.clear()
    from_memory, remembered = Counter[bool](), counting._remembered

    def compared(func: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(counting._results)
        found = remembered(func, *args, **kwargs)
        if counting._kind(func) == "new":
            from_memory[len(counting._results) == before] += 1
            wanted = func(*args, **kwargs)
            assert _likeness(found, args) == _likeness(wanted, args), func
        return found

    peaks = []
    for account in (MemoryAccount("meta"), MetaAccount(), MetaAccount()):
        with torch.no_grad(), forced(), account, patch.object(counting, "_remembered", compared):
            model.fold([features])
        peaks.append(account.peak_bytes)
    assert peaks == peaks[:1] * 3
    assert from_memory[True] > from_memory[False] > 0


def _likeness(value: Any, given: Any) -> list[tuple]:
    tensors, storages = value if isinstance(value, tuple) else [value], {id(x.untyped_storage()) for x in _some(given)}
    return [(x.shape, x.stride(), x.dtype, x.storage_offset(), x.untyped_storage().nbytes(),
             id(x.untyped_storage()) in storages) for x in tensors]  # fmt: skip


def _some(given: Any) -> list[torch.Tensor]:
    return [x for x in given if isinstance(x, torch.Tensor)]


# --- the decision -----------------------------------------------------------------------------------------------------


def test_slices_are_taken_only_where_they_have_to_be() -> None:
    job = FoldJob(_narrow(), 40, 6, 6)
    free = plan_subbatches(job, 10**12)
    assert {how.method for how in free.choices.values()} == {"rows", "whole"}
    tight = plan_subbatches(job, least_bytes(job))
    assert tight.peak_bytes < free.peak_bytes
    assert tight.seconds > free.seconds
    assert plan_subbatches(job, free.peak_bytes).seconds == free.seconds


def test_on_a_cpu_slices_that_fit_the_cache_are_the_fastest_way() -> None:
    """The published block's widths and a small shape; 36 MB are the L3 that the rates are of."""
    job = FoldJob(preset("model_5_ptm"), 128, 32, 1, iterations=1)
    free, cache = plan_subbatches(job, 10**15), RATES["cpu"].cache

    def allocates(plan: Plan, name: str) -> int:
        return plan.peaks[name] - plan.beside[name]

    names = [name for name in free.choices if name.startswith("blocks.")]
    with patch.dict(RATES, cpu=replace(RATES["cpu"], cache=0.0)):
        whole = plan_subbatches(replace(job, iterations=2), 10**15)
    assert all(how.method == "whole" or how.rows in (1, 32, 128) for how in whole.choices.values())
    assert any(allocates(whole, name) > 2 * cache for name in names)
    for name in names:
        if free.choices[name].method == "whole":
            assert name.endswith(("outgoing", "incoming")), "a product with a copy takes longer than whole"
            continue
        before, after = allocates(whole, name), allocates(free, name)
        assert after <= 1.25 * cache, name
        assert after >= min(before, cache / 2), "smaller slices than fit the cache only add launches"
    assert free.peak_bytes < whole.peak_bytes
    # With less than that memory decides, as before; a GPU's operators meet in memory anyway.
    tight = plan_subbatches(job, least_bytes(job))
    assert tight.peak_bytes < free.peak_bytes
    assert tight.seconds > free.seconds
    on_gpu = plan_subbatches(replace(job, device="cuda"), 10**15)
    assert all(how.method == "whole" or how.rows in (1, 32, 128) for how in on_gpu.choices.values())


def test_a_budget_that_cannot_work_says_which_would() -> None:
    job = FoldJob(preset("model_5_ptm"), 2000, 512, 1024, dtype=torch.bfloat16)
    with pytest.raises(UserError, match="2000 residues with 512 \\+ 1024 rows need at least") as caught:
        plan_subbatches(job, 2**30)
    enough = float(str(caught.value).partition("--memory ")[2].split(",")[0])
    assert plan_subbatches(job, int(enough * 2**30)).peak_bytes <= enough * 2**30


def test_released_widths_reach_their_targets() -> None:
    """Counted on the meta device as on a GPU, in bf16. A block: z = 256 r^2 bytes and what is allocated beside it."""
    job = FoldJob(preset("model_5_ptm"), 4000, 512, 1024, dtype=torch.bfloat16, device="cuda")
    z = 256 * 4000**2
    product = "blocks.*.pair.outgoing"

    def block(plan: Plan) -> int:
        return z + max(plan.peaks[n] - plan.beside[n] for n in plan.choices if n.startswith("blocks."))

    free = plan_subbatches(job, 10**12)
    fast = plan_subbatches(job, free.beside[product] + int(1.1 * z))
    assert fast.seconds <= 1.25 * free.seconds
    assert block(fast) <= 2.1 * z
    assert block(plan_subbatches(job, least_bytes(job))) <= 1.35 * z

    job = replace(job, residues=10_000)
    begin = time.process_time()
    fast, least = plan_subbatches(job, int(60e9)), least_bytes(job)
    seconds = time.process_time() - begin
    assert fast.choices["blocks.*.pair.outgoing"].method == "copy"
    assert least <= 40e9
    assert seconds < 20, "planning takes under 2 s on a machine that does nothing else"


@pytest.mark.parametrize("residues", [1000, 4000])
def test_half_of_the_memory_takes_little_more_time(residues: int) -> None:
    """By FLOPs, bytes and launches, of what a prediction would take without a budget."""
    job = FoldJob(preset("model_5_ptm"), residues, 512, 1024, dtype=torch.bfloat16, device="cuda")
    free = plan_subbatches(job, 10**15)
    half = plan_subbatches(job, free.peak_bytes // 2)
    assert half.peak_bytes <= free.peak_bytes // 2
    assert free.seconds < half.seconds <= 1.1 * free.seconds


def test_the_longest_sequence_is_the_longest() -> None:
    job = FoldJob(_narrow(), 1, 4, 4)
    budget = 3_000_000
    residues = longest(job, budget)
    assert least_bytes(replace(job, residues=residues)) <= budget
    assert least_bytes(replace(job, residues=residues + max(2, residues // 50))) > budget


def test_memory_in_which_files_are_cached_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives it back when it is asked for; after a copy of databases there may be nothing else."""
    monkeypatch.setattr("core.runtime.os.sysconf", lambda name: 1)
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    assert free_bytes("cpu") == pytest.approx(0.9 * 1024 * available, rel=0.2)
