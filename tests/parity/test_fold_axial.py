"""The model over n ranks equals one rank: outputs, gradients, slices in place; and what travels for it is counted."""

import errno
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import Tensor

from apps.fold.axial import AXIAL, axial_plan, read_shards, shard_evoformer
from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.config import ModelConfig, preset, tiny
from apps.fold.model.features import Features
from apps.fold.model.folding import Folding
from apps.fold.model.heads import Logits
from apps.fold.output.unfinished import Unfinished
from apps.fold.predict import main
from apps.fold.shares import Absent, plan_shares, rank_bytes
from apps.fold.subbatch import HEADS, FoldJob, How, plan_subbatches
from apps.fold.subbatch.operations import operations_of
from apps.fold.subbatch.planner import gib_up, planned
from apps.fold.subbatch.reading import read_pairs
from apps.fold.subbatch.slices import every
from apps.fold.weights.folder import save_folder
from core.comm.collectives import all_reduce, all_reduce_max
from core.comm.volume import count_volume
from core.config import UserError
from core.mesh import MeshConfig, build_mesh
from core.parallel.axial import pieces, shard_of, switch, transpose_
from core.parallel.recompute import RecomputeConfig
from core.trace.account import MemoryAccount
from tests.support.fold import BUDGET, of_blocks, one_block, random_features, random_parameters, sent_in_training
from tests.support.training import removed


def _model(config: ModelConfig) -> AlphaFold:
    model = AlphaFold(config).double().eval()
    model.load_state_dict(random_parameters(config))
    return model


def _features(config: ModelConfig, pad: int = 0) -> Features:
    made = random_features(7, rows=5, extra=3, templates=2 if config.templates else 0, pad=pad)
    return (made if config.templates else replace(made, templates=None)).to("cpu", torch.float64)


TOLERANCE = 1e-10


def _off(got: torch.Tensor, expected: torch.Tensor) -> float:
    got, expected = got.detach(), expected.detach()
    return float((got - expected).abs().max() / max(1.0, float(expected.abs().max())))


def _largest(values: list[float]) -> float:
    """Not a number where one of them is none, unlike `max`."""
    return float(torch.tensor(values).max())


def _all_cases(size: int) -> None:
    axis = build_mesh(MeshConfig(tp=size).resolve(size), "cpu")["tp"]
    _switch(axis)
    _transpose(axis)
    _pieces(axis)
    assert _prediction(axis, tiny()) <= TOLERANCE
    assert _gradients(axis, tiny()) <= TOLERANCE


def _switch(axis) -> None:
    """There and back, with lengths that do not divide, and its gradient."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 5, 7, 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(2, 5, 7, 3, generator=generator, dtype=torch.float64)
    padded = torch.cat([whole, whole.new_zeros(2, -5 % axis.size(), 7, 3)], 1)
    rows = padded.chunk(axis.size(), 1)[axis.get_local_rank()].clone().requires_grad_()
    columns = switch(rows, 1, 2, 5, axis)
    mine = shard_of(7, axis)
    count = mine.stop - mine.start
    assert torch.equal(columns[:, :, :count], whole[:, :, mine])
    assert not columns[:, :, count:].any()
    (columns[:, :, :count] * weight[:, :, mine]).sum().backward()
    own = shard_of(5, axis)
    assert rows.grad is not None
    assert torch.equal(rows.grad[:, : own.stop - own.start], weight[:, own])
    back = switch(columns, 2, 1, 7, axis)
    assert torch.equal(back[:, : own.stop - own.start], whole[:, own])


def _transpose(axis) -> None:
    """In place, with lengths that do not divide, some of which leave the last ranks nothing."""
    for batch, length in ((1, 1), (1, 5), (2, 7), (1, 8), (1, 9)):
        whole = torch.randn(batch, length, length, 3, generator=torch.Generator().manual_seed(0))
        rows, mine = -(-length // axis.size()), shard_of(length, axis)
        count = mine.stop - mine.start
        own = torch.full((batch, rows, length, 3), 7.0)
        own[:, :count] = whole[:, mine]
        assert transpose_(own, length, axis) is own
        assert torch.equal(own[:, :count], whole.transpose(1, 2)[:, mine])
        assert (own[:, count:] == 7).all(), "the filling stays what it was"


def _pieces(axis) -> None:
    for length, parts in ((5, 1), (5, 2), (11, 3), (11, 8)):
        x = torch.arange(2.0 * length).view(length, 2)
        rows = -(-length // axis.size())
        mine = shard_of(length, axis)
        own = torch.zeros(rows, 2)
        own[: mine.stop - mine.start] = x[mine]
        out, largest = torch.zeros_like(x), 0
        for at, piece in pieces(own, 0, length, axis, parts):
            out[at] = piece
            largest = max(largest, len(piece))
        assert torch.equal(out, x)
        assert largest <= -(-rows // parts)


@cache  # for all cases that a rank runs
def _single(config: ModelConfig) -> tuple[list[Features], Folding]:
    """Features of all iterations, and what one rank makes of them."""
    features = [_features(config, pad=1)] * (1 + config.num_recycles)
    with torch.inference_mode():
        return features, _model(config).fold(features)


def _prediction(axis, config: ModelConfig, sliced: tuple[bool, ...] = (False, True)) -> float:
    """The largest difference of an output, whole and in slices."""
    off = []
    features, expected = _single(config)
    model, mine = _model(config), shard_of(8, axis)
    names = {name: How("rows", 2) for name, _, _ in operations_of(model)}
    for choices in (names if one else {} for one in sliced):
        sharded = shard_evoformer(model, axis, choices)
        with torch.inference_mode():
            got = sharded.fold(features)
        off.append(_off(got.positions_BN373, expected.positions_BN373))
        off.append(_off(got.msa_BSND, expected.msa_BSND))
        off.append(_off(got.pair_BNNZ[:, : mine.stop - mine.start], expected.pair_BNNZ[:, mine]))
    return _largest(off)


def _whole(axis, config: ModelConfig) -> float:
    return _prediction(axis, config, (False,))


def _learned(config: ModelConfig, axis=None) -> tuple[Logits, dict[str, Tensor]]:
    """Logits and gradients; on one rank, or over the axis."""
    features = [_features(config)]
    model = _model(config)
    if axis is not None:
        shard_evoformer(model, axis)
    prediction = model(features)
    logits = prediction.logits
    loss = (prediction.positions_BN373**2).mean() + (logits.distogram**2).mean() + (logits.masked_msa**2).mean()
    assert logits.pae is not None
    (loss + (logits.pae**2).mean()).backward()
    grads, sums = {}, AXIAL[""].partial_of(model)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            partial = axis is not None and name in sums
            grads[name] = all_reduce(parameter.grad, axis) if partial else parameter.grad
    return logits, grads


_learned_by_one = cache(_learned)


def _gradients(axis, config: ModelConfig) -> float:
    """The largest difference of a logit or, relative to the largest of all, of a gradient."""
    (single, expected), (several, got) = _learned_by_one(config), _learned(config, axis)
    assert several.pae is not None
    assert single.pae is not None
    off = [_off(several.distogram, single.distogram), _off(several.pae, single.pae)]
    assert got.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    return _largest([*off, *(float((got[n] - expected[n]).abs().max()) / largest for n in expected)])


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.soak), 3, pytest.param(4, marks=pytest.mark.soak)])
def test_n_ranks_equal_one(ranks, size: int) -> None:
    ranks(size).run(_all_cases, size)


# What the prediction or the gradients need, by the module that calls it.
_COLLECTIVES = (
    ("core.parallel.axial", "all_to_all_single", _whole),
    ("core.parallel.axial", "batch_isend_irecv", _whole),
    ("core.parallel.axial", "broadcast", _whole),
    ("core.comm.collectives", "all_gather_into_tensor", _whole),
    ("core.parallel.axial", "all_to_all_single", _gradients),
    ("core.comm.collectives", "all_gather_into_tensor", _gradients),
    ("core.comm.collectives", "reduce_scatter_tensor", _gradients),
    ("core.comm.collectives", "all_reduce", _gradients),
)


def _without_each(size: int) -> list[float]:
    axis = build_mesh(MeshConfig(tp=size).resolve(size), "cpu")["tp"]
    found, config = [], replace(one_block(), num_recycles=0)
    for module, collective, case in _COLLECTIVES:
        with removed(module, collective):
            found.append(case(axis, config))
    return found


def test_a_missing_collective_is_seen(ranks) -> None:
    for off in ranks(2).run(_without_each, 2):
        for (module, collective, case), one in zip(_COLLECTIVES, off, strict=True):
            assert not one <= 1e4 * TOLERANCE, (module, collective, case.__name__)


PLAIN = ["--no-plots", "--num-recycles", "0"]  # what recycling needs of the ranks is compared above


def _predict(folder: str, size: int) -> None:
    """`fold predict` as one of `size` ranks that a launcher started."""
    rank = torch.distributed.get_rank()
    started = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    options = ["--model", f"{folder}/weights", *PLAIN, "--device", "cpu", "--out", f"{folder}/ranks"]
    with patch.dict(os.environ, started):
        assert main([f"{folder}/in.fasta", *options]) == 0


def test_predict_over_ranks_writes_what_one_process_does(ranks, tmp_path: Path) -> None:
    save_folder(tmp_path / "weights", tiny(), random_parameters(tiny()))
    (tmp_path / "in.fasta").write_text(">a\nMKTAYWCAAGG\n>b\nMKTAY\n")
    options = ["--model", str(tmp_path / "weights"), *PLAIN, "--out", str(tmp_path / "one")]
    assert main([str(tmp_path / "in.fasta"), *options]) == 0
    ranks(2).run(_predict, str(tmp_path), 2)
    for name in ("a", "b"):
        pae = [np.load(tmp_path / which / name / "rank_1_pae.npz")["pae"] for which in ("one", "ranks")]
        assert pae[0].shape == pae[1].shape
        assert np.abs(pae[0].astype(float) - pae[1].astype(float)).max() < 1e-3
        assert (tmp_path / "ranks" / name / "rank_1.cif").is_file()


def _predict_two_seeds(folder: str, out: str, spoilt: str) -> tuple[int, list[str]]:
    """Exit code and the names of what is in the folder; `spoilt` is what goes wrong, on one of two ranks."""
    rank = torch.distributed.get_rank()
    started = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    options = [
        "--model",
        f"{folder}/weights",
        "--no-plots",
        "--num-seeds",
        "2",
        "--num-recycles",
        "0",
        "--device",
        "cpu",
        "--out",
        out,
    ]
    done = Path(out) / "a"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def late(*given: Any) -> Unfinished:
        """Looks when rank 0, if it does not wait for this one, has given the record its name."""
        waited = time.monotonic() + 1
        while not done.exists() and time.monotonic() < waited:
            time.sleep(0.01)
        return Unfinished(*given)

    spoils = {
        ("write", 0): ("apps.fold.predict.write_confidence", Mock(side_effect=[full, None, None])),
        ("finish", 0): ("apps.fold.output.unfinished.Unfinished.finish", Mock(side_effect=full)),
        ("late", 1): ("apps.fold.predict.Unfinished", late),
    }
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, started))
        if (spoilt, rank) in spoils:
            stack.enter_context(patch(*spoils[spoilt, rank]))
        code = main([f"{folder}/in.fasta", *options])
    torch.distributed.barrier()
    return code, sorted(path.name for path in Path(out).iterdir())


def test_what_one_rank_cannot_write_fails_on_all_and_the_next_record_is_folded(ranks, tmp_path: Path) -> None:
    """All go on with the same record: with different ones they would wait for each other without end."""
    save_folder(tmp_path / "weights", tiny(), random_parameters(tiny()))
    (tmp_path / "in.fasta").write_text(">a\nMKTAY\n>b\nMKTAYWCAAGG\n")
    found = ranks(2).run(_predict_two_seeds, str(tmp_path), str(tmp_path / "out"), "write")
    assert found == [(2, ["b", "summary.csv"]), (0, ["b", "summary.csv"])]
    assert "failed: [Errno 28] No space left on device" in (tmp_path / "out" / "summary.csv").read_text()


def test_a_slow_rank_hears_of_the_predictions_that_are_left(ranks, tmp_path: Path) -> None:
    """Not from the files, which rank 0 may have given other names by then."""
    save_folder(tmp_path / "weights", tiny(), random_parameters(tiny()))
    (tmp_path / "in.fasta").write_text(">a\nMKTAY\n")
    for spoilt, left in (("finish", ".a.part"), ("late", "a")):
        found = ranks(2).run(_predict_two_seeds, str(tmp_path), str(tmp_path / "out"), spoilt)
        assert found == [(2 if spoilt == "finish" else 0, [left, "summary.csv"]), (0, [left, "summary.csv"])]


def _budgets(size: int, shares: tuple[float, ...]) -> list[tuple[int, int, int, float]]:
    """(budget, counted, allocated, largest difference) for budgets of so many times the least."""
    axis = build_mesh(MeshConfig(tp=size).resolve(size), "cpu")["tp"]
    whole = tiny(templates=False)  # with two layers of structure, of which one is counted, and what the other leaves
    config = replace(whole, evoformer=replace(whole.evoformer, num_blocks=1))
    features = replace(random_features(31, rows=6, extra=5, templates=0), templates=None)
    job = FoldJob(config, 31, 6, 5, iterations=1)
    least = _least(job, axis)
    results = []
    for share in shares:
        budget = int(share * least)
        choices = plan_shares(job, budget, axis)
        sharded = shard_evoformer(_random(config), axis, choices)
        with torch.inference_mode(), MemoryAccount() as account:
            account.add(sharded.parameters())
            features.map(lambda tensor, account=account: account.add([tensor]) or tensor)
            found = sharded.fold([features])  # all of which is kept while the heads read
            read_shards(sharded.heads, found.pair_BNNZ, features.mask_BN, axis, choices[HEADS])
        counted = rank_bytes(job, choices, axis)
        off = _off_whole(config, features.to("cpu", torch.float64), choices, axis)
        results.append((budget, counted, account.peak_bytes, off))
    with pytest.raises(UserError, match=f"on each of {size} ranks"):
        plan_shares(job, int(0.9 * least), axis)
    return results


def _random(config: ModelConfig) -> AlphaFold:
    model = AlphaFold(config).eval()
    model.load_state_dict(random_parameters(config))
    return model


def _off_whole(config: ModelConfig, features: Features, choices: dict[str, How], axis) -> float:
    """How far the ranks with these slices are from one rank without, in fp64."""
    whole, sharded = _random(config).double(), shard_evoformer(_random(config).double(), axis, choices)
    mask_BN = features.mask_BN
    with torch.inference_mode():
        expected, got = whole.fold([features]), sharded.fold([features])
        pairs = read_pairs(whole.heads, expected.pair_BNNZ, mask_BN, every(31, 31))
        mine = read_shards(sharded.heads, got.pair_BNNZ, mask_BN, axis, choices[HEADS])
    off = [_off(got.positions_BN373, expected.positions_BN373), _off(mine.ptm, pairs.ptm)]
    if axis.get_local_rank() == 0:
        beyond = (mine.pae - pairs.pae).abs() - torch.finfo(torch.float32).eps * pairs.pae  # it is kept in fp32
        off.append(float(beyond.max().clamp(min=0)))
    return _largest(off)


def _least(job: FoldJob, axis) -> int:
    """What a rank takes where every operation goes row by row; a budget of nothing is refused with this, in GiB."""
    rowwise = dict.fromkeys(planned(job, 0).choices, How("rows", 1))
    least = float(all_reduce_max(torch.tensor(float(rank_bytes(job, rowwise, axis)), dtype=torch.float64), axis))
    with pytest.raises(UserError, match=f"give --memory {gib_up(int(least))}, fewer rows"):
        plan_shares(job, 1, axis)
    return int(least)


@pytest.mark.parametrize("shares", [(1.0,), pytest.param((1.0, 1.4), marks=pytest.mark.soak)])
def test_no_rank_takes_more_than_its_budget(ranks, shares: tuple[float, ...]) -> None:
    """By dispatch, operator by operator, on every rank; what was counted without traffic is within 5 % of it."""
    for found in ranks(2).run(_budgets, 2, shares):
        for budget, counted, allocated, off in found:
            assert allocated <= budget
            assert counted <= budget
            assert abs(counted - allocated) <= 0.05 * allocated, (budget, counted, allocated)
            assert off <= TOLERANCE


@pytest.mark.parametrize("sizes", [(4,), pytest.param((2, 4, 8), marks=pytest.mark.soak)])
def test_more_ranks_need_less_memory_each(sizes: tuple[int, ...]) -> None:
    """Counted on the meta device, at released widths: of what one rank takes with a copy, an n-th and 15 % more."""
    job = FoldJob(preset("model_5_ptm"), 4000, 512, 1024, dtype=torch.bfloat16, device="cuda", iterations=2)
    rowwise = dict.fromkeys(planned(job, 0).choices, How("rows", 1))
    single = plan_subbatches(job, int(10.5e9))
    assert single.choices["blocks.*.pair.outgoing"].method == "copy"
    peaks = {size: rank_bytes(job, rowwise, Absent(size)) for size in sizes}
    for size, peak in peaks.items():
        assert peak <= (1 / size + 0.15) * single.peak_bytes, (size, peak)
    for size, share in ((4, 0.55), (8, 0.65)):
        assert not {size // 2, size} <= peaks.keys() or peaks[size] <= share * peaks[size // 2]
    plan_shares(job, int(1.1 * peaks[4]), Absent(4))


def _traffic(size: int) -> dict:
    axis = build_mesh(MeshConfig(tp=size).resolve(size), "cpu")["tp"]
    config = replace(tiny(templates=False), num_recycles=0)
    model = shard_evoformer(AlphaFold(config).eval(), axis)
    features = replace(random_features(8, rows=4, extra=4, templates=0), templates=None)
    with torch.inference_mode(), count_volume(build_mesh(MeshConfig(tp=size).resolve(size), "cpu")) as volume:
        model.fold([features])
    return dict(volume.calls)


def test_what_travels(ranks) -> None:
    """A block: m twice by all-to-all, z four times rank by rank, biases and a factor gathered, factors in pieces."""
    calls = {op: n for (op, _), n in ranks(2).run(_traffic, 2)[0].items()}
    blocks, layers = 3, 2
    assert calls["all_to_all"] == 2 * blocks
    assert calls["send"] == calls["recv"] == 4 * blocks  # with one other rank
    assert calls["all_gather"] == 4 * blocks + layers + 1
    assert calls["broadcast"] == 2 * 2 * blocks


def _sent(
    size: int, config: ModelConfig, residues: int, recomputes: tuple[RecomputeConfig | None, ...] = (None,)
) -> list[tuple[dict, dict]]:
    """Bytes of a forward with gradients and of its backward, counted, and by the closed forms, one by one."""
    rows, extra, templates = config.max_msa, config.max_extra_msa, config.max_templates if config.templates else 0
    features = random_features(residues, rows=rows, extra=extra, templates=templates)
    features = features if templates else replace(features, templates=None)
    return [sent_in_training(size, _model(config), features, recompute) for recompute in recomputes]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)])
def test_training_sends_what_the_closed_forms_say(ranks, size: int) -> None:
    """Of lengths that do not divide, with templates."""
    config = replace(one_block(templates=True), num_recycles=0, max_msa=5, max_extra_msa=7, max_templates=2)
    for ((counted, expected),) in ranks(size).run(_sent, size, config, 9):
        assert counted == expected


MODES = (
    BUDGET,
    *(RecomputeConfig(mode) for mode in ("recursive", "full", "sqrt", "selective", "offload", "compressed")),
    *(RecomputeConfig(mode, 2) for mode in ("full", "selective")),
)


@pytest.mark.parametrize(
    ("size", "modes"),
    [(2, MODES[:2]), *(pytest.param(n, (mode,), marks=pytest.mark.soak) for n in (2, 3, 4) for mode in MODES)],
)
def test_blocks_that_are_computed_again_send_again(ranks, size: int, modes: tuple[RecomputeConfig, ...]) -> None:
    """As often as their mode has them run, in stacks of two, three and five blocks."""
    config = of_blocks(one_block(templates=True), evoformer=5, extra=3, templates=2)
    config = replace(config, num_recycles=0, max_msa=5, max_extra_msa=7, max_templates=2)
    for found in ranks(size).run(_sent, size, config, 9, modes):
        for mode, (counted, expected) in zip(modes, found, strict=True):
            assert counted == expected, mode


def test_a_mode_whose_messages_nobody_knows_is_refused() -> None:
    with pytest.raises(UserError, match=r"budget with axial parallelism: nobody has chosen .* use full, sqrt"):
        axial_plan(BUDGET)
