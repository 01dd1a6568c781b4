"""n ranks train as one rank does: every combination of ZeRO level, tensor parallelism and accumulation, in fp64.

Shapes are ragged on purpose: odd vocabulary, six heads, a length and rows that do not divide.
"""

from dataclasses import replace

import pytest

from core.mesh import MeshConfig
from core.models.decoder import DecoderConfig
from core.parallel.compose import ParallelConfig
from tests.support.training import Case, same_as_single

GPT2 = DecoderConfig(vocab_size=61, dim=24, num_layers=2, num_heads=6, ffn_dim=50, max_length=9, family="gpt2")


def parallel(zero: int) -> ParallelConfig:
    return ParallelConfig(zero=zero, precision="fp64")


@pytest.mark.parametrize(
    ("num_ranks", "mesh", "zero"),
    [
        (2, MeshConfig(), 0),
        (2, MeshConfig(), 1),
        (2, MeshConfig(), 2),
        (2, MeshConfig(), 3),
        (2, MeshConfig(tp=2), 0),
        (3, MeshConfig(), 0),
        (3, MeshConfig(), 2),
        (3, MeshConfig(), 3),
        (4, MeshConfig(tp=2), 0),
        (4, MeshConfig(tp=2), 1),
        (4, MeshConfig(tp=2), 2),
        (4, MeshConfig(tp=2), 3),
        (4, MeshConfig(dp_replicate=2, dp_shard=2), 1),
        (4, MeshConfig(dp_replicate=2, dp_shard=2), 2),
        (4, MeshConfig(dp_replicate=2, dp_shard=2), 3),
    ],
)
def test_gpt2(ranks, num_ranks: int, mesh: MeshConfig, zero: int) -> None:
    same_as_single(ranks, num_ranks, Case(GPT2, mesh=mesh, parallel=parallel(zero)))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_accumulation(ranks, zero: int) -> None:
    same_as_single(ranks, 2, Case(GPT2, parallel=parallel(zero), microbatches=3))
