"""A complex over n ranks equals one rank: outputs, scores of chains, slices in place, and what a rank allocates."""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from apps.fold.axial import read_shards, shard_evoformer
from apps.fold.model.config import MultimerConfig, tiny_multimer
from apps.fold.model.features import Features
from apps.fold.model.folding import Folding
from apps.fold.model.multimer import Multimer
from apps.fold.plan import main as plan
from apps.fold.predict import main
from apps.fold.shares import plan_shares, rank_bytes
from apps.fold.subbatch import HEADS, FoldJob, How
from apps.fold.subbatch.operations import operations_of
from apps.fold.subbatch.reading import PairNumbers, read_pairs
from apps.fold.subbatch.slices import every
from apps.fold.weights.folder import save_folder
from core.mesh import MeshConfig, build_mesh
from core.parallel.axial import shard_of
from core.parallel.recompute import RecomputeConfig
from core.trace.account import MemoryAccount
from tests.support.fold import BUDGET, of_blocks, random_parameters, sent_in_training
from tests.support.original_multimer import features_of
from tests.support.training import removed

TOLERANCE = 1e-10
CHAINS = "ABA"  # 7, 5 and 7 residues, with templates


def _config() -> MultimerConfig:
    config = tiny_multimer()
    stack = replace(config.evoformer, num_blocks=1)
    return replace(config, evoformer=stack, extra=replace(config.extra, num_blocks=1), max_msa=5, max_extra_msa=7,
                   recycle_tolerance=-1.0)  # fmt: skip


def _model(config: MultimerConfig, dtype: torch.dtype = torch.float64) -> Multimer:
    model = Multimer(config).to(dtype).eval()
    model.load_state_dict(random_parameters(config))
    return model


def _features(config: MultimerConfig, dtype: torch.dtype = torch.float64, names: str = CHAINS) -> Features:
    return features_of(names, config).to("cpu", dtype)


def _chains(features: Features) -> torch.Tensor:
    assert features.chains is not None
    return features.chains.asym_BN[0] - 1


@cache
def _single(names: str) -> tuple[list[Features], Folding, PairNumbers]:
    """Features of all iterations, what one rank makes of them, and what the heads read."""
    config = _config()
    features, model = [_features(config, names=names)] * (1 + config.num_recycles), _model(config)
    with torch.inference_mode():
        found = model.fold(features)
        N = found.pair_BNNZ.shape[1]
        pairs = read_pairs(
            model.heads, found.pair_BNNZ, features[0].mask_BN, every(N, N), chains_N=_chains(features[0])
        )
    return features, found, pairs


def _off(got: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    assert got is not None
    assert expected is not None
    return float((got - expected).abs().max() / max(1.0, float(expected.abs().max())))


def _differences(axis, choices: dict[str, How], names: str = CHAINS) -> dict[str, float]:
    features, expected, scores = _single(names)
    sharded = shard_evoformer(_model(_config()), axis, choices)
    with torch.inference_mode():
        got = sharded.fold(features)
        read = read_shards(sharded.heads, got.pair_BNNZ, features[0].mask_BN, axis, How("rows", 2),
                           chains_N=_chains(features[0]))  # fmt: skip
    mine = shard_of(expected.pair_BNNZ.shape[1], axis)
    return {
        "positions": _off(got.positions_BN373, expected.positions_BN373),
        "msa": _off(got.msa_BSND, expected.msa_BSND),
        "pairs": _off(got.pair_BNNZ[:, : mine.stop - mine.start], expected.pair_BNNZ[:, mine]),
        "ptm": _off(read.ptm, scores.ptm),
        "iptm": _off(read.iptm, scores.iptm),
        "pairs of chains": _off(read.chain_pairs, scores.chain_pairs),
        "recycles": float(got.num_recycles != expected.num_recycles),
    }


def _all_cases(size: int) -> list[dict[str, float]]:
    axis = build_mesh(MeshConfig(tp=size).resolve(size), "cpu")["tp"]
    sliced = {name: How("rows", 2) for name, _, _ in operations_of(_model(_config()))}
    return [_differences(axis, choices) for choices in ({}, sliced)]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)])
def test_n_ranks_equal_one(ranks, size: int) -> None:
    for found in ranks(size).run(_all_cases, size):
        for differences in found:
            assert max(differences.values()) <= TOLERANCE, differences


_COLLECTIVES = (
    ("core.parallel.axial", "all_to_all_single"),
    ("core.parallel.axial", "batch_isend_irecv"),
    ("core.parallel.axial", "broadcast"),
    ("core.comm.collectives", "all_gather_into_tensor"),
    ("core.comm.collectives", "all_reduce"),
)


def _without_each(size: int) -> list[float]:
    axis = build_mesh(MeshConfig(tp=size).resolve(size), "cpu")["tp"]
    found = []
    for module, collective in _COLLECTIVES:
        with removed(module, collective):
            values = torch.tensor(list(_differences(axis, {}, "AB").values()))  # of 12 residues
            found.append(float(values.nan_to_num(torch.inf).max()))
    return found


@pytest.mark.soak
def test_a_missing_collective_is_seen(ranks) -> None:
    """On one rank at least: the best of all residues may be a rank's own."""
    for (module, collective), *off in zip(_COLLECTIVES, *ranks(2).run(_without_each, 2), strict=True):
        assert max(off) > 1e4 * TOLERANCE, (module, collective)


def _sent(size: int, modes: tuple[RecomputeConfig, ...]) -> list[tuple[dict, dict]]:
    """Of each mode, in stacks of two, three and five blocks."""
    small = replace(_config(), max_msa=4, max_extra_msa=3, max_templates=2)
    config = of_blocks(small, evoformer=5, extra=3, templates=2)
    return [sent_in_training(size, _model(config), _features(config, torch.float32), mode) for mode in modes]


MODES = (BUDGET, *(RecomputeConfig(mode) for mode in ("recursive", "full", "sqrt", "selective", "none", "offload")))


@pytest.mark.parametrize(
    ("size", "modes"),
    [(2, MODES[:2]), *(pytest.param(n, (mode,), marks=pytest.mark.soak) for n in (2, 3, 4) for mode in MODES)],
)
def test_training_sends_what_the_closed_forms_say(ranks, size: int, modes: tuple[RecomputeConfig, ...]) -> None:
    """Also where blocks are computed again, of 19 residues with templates."""
    for found in ranks(size).run(_sent, size, modes):
        for mode, (counted, expected) in zip(modes, found, strict=True):
            assert counted == expected, mode


def _budgets(size: int) -> tuple[int, int, int]:
    """Budget, what was counted, what was allocated."""
    axis = build_mesh(MeshConfig(tp=size).resolve(size), "cpu")["tp"]
    config = replace(_config(), structure=replace(_config().structure, num_layers=1))
    features = _features(config, torch.float32)
    job = FoldJob(config, *features.sizes(), iterations=1, hidden=True)
    names = {name: How("rows", 1) for name, _, _ in operations_of(_model(config))} | {HEADS: How("rows", 1)}
    budget = int(1.1 * rank_bytes(job, names, axis))
    choices = plan_shares(job, budget, axis)
    sharded = shard_evoformer(_model(config, torch.float32), axis, choices)
    with torch.inference_mode(), MemoryAccount() as account:
        account.add(sharded.parameters())
        features.map(lambda tensor: account.add([tensor]) or tensor)
        found = sharded.fold([features])
        read_shards(sharded.heads, found.pair_BNNZ, features.mask_BN, axis, choices[HEADS], chains_N=_chains(features))
    return budget, rank_bytes(job, choices, axis), account.peak_bytes


def test_no_rank_takes_more_than_its_budget(ranks) -> None:
    for budget, counted, allocated in ranks(2).run(_budgets, 2):
        assert allocated <= budget
        assert abs(counted - allocated) <= 0.05 * allocated, (budget, counted, allocated)


def _predict(folder: str, size: int) -> None:
    """`fold predict` as one of `size` ranks that a launcher started."""
    rank = torch.distributed.get_rank()
    started = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    with patch.dict(os.environ, started):
        assert main([*_arguments(Path(folder), "ranks"), "--device", "cpu"]) == 0


def _arguments(folder: Path, out: str) -> list[str]:
    return [str(folder / "in.fasta"), "--model", str(folder / "weights"), "--no-plots", "--num-recycles", "0", "--out",
            str(folder / out)]  # fmt: skip


def test_predict_over_ranks_writes_what_one_process_does(ranks, tmp_path: Path) -> None:
    save_folder(tmp_path / "weights", _config(), random_parameters(_config()))
    (tmp_path / "in.fasta").write_text(">pair\nMKTAYWC:GSHW\n")
    assert main(_arguments(tmp_path, "one")) == 0
    ranks(2).run(_predict, str(tmp_path), 2)
    rows = [(tmp_path / out / "summary.csv").read_text().splitlines()[1].split(",")[:-1] for out in ("one", "ranks")]
    assert rows[0] == rows[1]
    pae = [np.load(tmp_path / out / "pair" / "rank_1_pae.npz")["pae"].astype(float) for out in ("one", "ranks")]
    assert np.abs(pae[0] - pae[1]).max() < 1e-3


def test_plan_tells_what_a_rank_takes_of_a_complex(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_folder(tmp_path / "weights", _config(), random_parameters(_config()))
    sizes = ("--length", "60", "--nproc", "3", "--memory", "1GiB", "--device", "cpu")
    assert plan(["--model", str(tmp_path / "weights"), *sizes]) == 0
    said = capsys.readouterr().out
    assert "template_embedder.pairs" in said
    assert "predicted peak of a rank" in said
