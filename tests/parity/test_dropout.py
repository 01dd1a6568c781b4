"""Dropout on n ranks has the masks of one rank: losses and parameters of a model that drops everywhere, in fp64."""

import warnings
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from core.compose import parallelize
from core.config import UserError
from core.gemini.config import GeminiConfig
from core.layout import full_tensor
from core.mesh import MeshConfig, build_mesh, data_axis
from core.nn.loss import Head
from core.optim.build import OptimConfig, build_optimizer
from core.parallel import draws, sequence, tensor1d
from core.parallel.context import shard_sequence
from core.parallel.draws import replicated, sharded
from core.parallel.pipeline.schedule import PipelineConfig
from core.parallel.recompute import RecomputeConfig
from core.placement.stages import PipelinePlan
from core.placement.style import Plan
from core.placement.table import ModelPlan
from core.precision import LossScale
from core.train import TrainConfig, TrainState, train_step
from tests.support.training import of_all_stages

STEPS, ROWS, LENGTH, WIDTH, INNER, VOCABULARY = 3, 8, 7, 6, 10, 11


class Block(nn.Module):
    """Drops what is cut by tensor parallelism, twice by one module, by a function, and by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.inner, self.twice, self.alpha = nn.Dropout(0.4), nn.Dropout(0.3), nn.AlphaDropout(0.2)
        self.rows = nn.Dropout1d(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.twice(self.down(self.inner(self.up(x).tanh())))
        return x + F.dropout(self.alpha(self.twice(y)), 0.25, self.training) + self.rows(x)


class Dropping(nn.Module):
    def __init__(self, checkpointed: bool, num_blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed = checkpointed
        self.embed, self.drop = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.3)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = Head(VOCABULARY, WIDTH)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        context: Any = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        x = self.drop(self.embed(input_ids))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x, targets, input_ids.shape[1])


TENSOR: Plan = {
    "drop": replicated,
    "blocks.*": replicated,
    "embed": tensor1d.vocab_embedding,
    "blocks.*.up": tensor1d.colwise,
    "blocks.*.inner": sharded(-1, INNER),
    "blocks.*.down": tensor1d.rowwise,
    "head": tensor1d.vocab_head,
}
SEQUENCE: Plan = {
    "drop": sequence.replicate,
    "blocks.*": sharded(1),
    "embed": sequence.vocab_embedding,
    "blocks.*.up": sequence.colwise,
    "blocks.*.inner": sharded(-1, INNER),
    "blocks.*.down": sequence.rowwise,
    "head": sequence.vocab_head,
}


@dataclass(frozen=True)
class Case:
    ranks: int
    options: dict[str, Any] = field(default_factory=dict)
    plan: str | None = None
    checkpointed: bool = False
    num_blocks: int = 2


CASES = {
    "microbatches": Case(1, {"microbatch": 3}),
    "recomputed": Case(1, {"recompute": RecomputeConfig("full"), "microbatch": 4}),
    "checkpoints of its own": Case(1, {"microbatch": 4}, checkpointed=True),
    "replicas": Case(2, {"microbatch": 2}),
    "ZeRO 3": Case(2, {"zero": 3, "recompute": RecomputeConfig("full", 2)}),
    "Gemini": Case(2, {"zero": 3, "gemini": GeminiConfig("1MB"), "recompute": RecomputeConfig("full")}),
    "offloaded": Case(2, {"zero": 2, "recompute": RecomputeConfig("offload"), "microbatch": 2}),
    "compressed": Case(2, {"zero": 3, "recompute": RecomputeConfig("compressed")}),
    "tensor": Case(2, {"mesh": MeshConfig(tp=2)}, "tensor"),
    "tensor, ragged": Case(3, {"mesh": MeshConfig(tp=3), "recompute": RecomputeConfig("full")}, "tensor"),
    "sequence": Case(2, {"mesh": MeshConfig(tp=2)}, "sequence"),
    "sequence, ragged": Case(3, {"mesh": MeshConfig(tp=3), "recompute": RecomputeConfig("selective")}, "sequence"),
    "sequence x data": Case(4, {"mesh": MeshConfig(tp=2), "zero": 1, "microbatch": 2}, "sequence"),
    "context": Case(2, {"mesh": MeshConfig(cp=2)}),
    "context, ragged": Case(3, {"mesh": MeshConfig(cp=3), "recompute": RecomputeConfig("full")}),
    "pipeline": Case(2, {"mesh": MeshConfig(pp=2)}),
    "pipeline, interleaved": Case(
        2,
        {
            "mesh": MeshConfig(pp=2),
            "pipeline": PipelineConfig("interleaved", microbatches=4),
            "recompute": RecomputeConfig("full"),
        },
        num_blocks=4,
    ),
    "pipeline, zero bubble": Case(2, {"mesh": MeshConfig(pp=2), "pipeline": PipelineConfig("zb-h1")}),
}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["input_ids"], targets=batch["targets"]) / len(batch["targets"])


def trained(case: Case) -> dict[str, Any]:
    """Losses, and the whole values of all parameters at the end."""
    config = TrainConfig(precision="fp64", seed=5, steps=STEPS, optim=OptimConfig(name="sgd", lr=0.1), **case.options)
    mesh = build_mesh(config.mesh.resolve(dist.get_world_size(), config.zero), "cpu")
    parallel = parallelize(
        Dropping(case.checkpointed, case.num_blocks),
        mesh,
        config,
        ModelPlan(
            tensor={"tensor": TENSOR, "sequence": SEQUENCE}.get(case.plan or ""),
            context={"": shard_sequence(zigzag=True)},
            pipeline=PipelinePlan("blocks", before=("embed", "drop")),
        ),
    )
    optimizer = build_optimizer(config.optim, parallel.masters)
    parallel.prepare(optimizer, None)
    state = TrainState(parallel, optimizer, LossScale("fp64"), {})
    torch.manual_seed(dist.get_rank())  # what the generator holds is no matter
    axis, losses = data_axis(mesh), []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        mine = tokens.chunk(axis.size())[axis.get_local_rank()]
        batch = {"input_ids": mine[:, :-1], "targets": mine[:, 1:]}
        losses.append(train_step(state, batch, loss, lambda b: torch.tensor(len(b["targets"])), config, step)["loss"])
    values = {name: full_tensor(master).clone() for name, master in parallel.masters.items()}
    return {"losses": losses, "values": of_all_stages(values, mesh)}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-11)
    for name, value in expected["values"].items():
        torch.testing.assert_close(found["values"][name], value, rtol=1e-10, atol=1e-12, msg=name)


_OF_ONE_RANK: dict[int, dict[str, Any]] = {}


def of_one_rank(ranks, num_blocks: int = 2) -> dict[str, Any]:
    """What `trained` finds on one rank; computed once."""
    if num_blocks not in _OF_ONE_RANK:
        _OF_ONE_RANK[num_blocks] = ranks(1).run(trained, Case(1, num_blocks=num_blocks))[0]
    return _OF_ONE_RANK[num_blocks]


@pytest.mark.parametrize("name", CASES)
def test_dropout_is_that_of_one_rank(ranks, name: str) -> None:
    case = CASES[name]
    for found in ranks(case.ranks).run(trained, case):
        assert_same(found, of_one_rank(ranks, case.num_blocks))


def without_parts(case: Case) -> dict[str, Any]:
    with patch.object(draws.Part, "start", lambda *_: 0):
        return trained(case)


def test_a_repeated_mask_is_seen(ranks) -> None:
    found = ranks(2).run(without_parts, CASES["sequence"])[0]
    assert found["losses"] != pytest.approx(of_one_rank(ranks)["losses"], rel=1e-4)


def refused(case: Case, left_out: tuple[str, ...] = (), given: tuple[str, ...] = (), inner: int = INNER) -> str:
    plan = {name: style for name, style in TENSOR.items() if name not in left_out}
    plan |= dict.fromkeys(given, replicated) | {"blocks.*.inner": sharded(-1, inner)}
    with patch.dict(TENSOR, plan, clear=True):
        try:
            trained(case)
        except UserError as error:
            return str(error)
    return "accepted"


def test_a_dropout_that_the_plan_leaves_out_is_named(ranks) -> None:
    case, left_out = CASES["tensor"], ("blocks.*",)
    said = ranks(2).run(refused, case, left_out)
    assert said[0].startswith("blocks.0.twice is a dropout, and the plan does not say")
    given = ("blocks.*.twice", "blocks.*.alpha", "blocks.*.rows")
    said = ranks(2).run(refused, case, left_out, given)
    assert said[0].startswith("blocks.0.dropout is a dropout, and the plan does not say")
    said = ranks(2).run(refused, case, inner=12)
    assert said[0].startswith("blocks.0.inner: the plan says that dim -1 of its input is cut from 12 over 2 ranks")


def warned() -> list[str]:
    """What is said of modules whose draws are those of the rank."""

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = x * torch.bernoulli(torch.full((4,), 0.5, dtype=x.dtype)) * self.weight
            x, _ = self.attention(x, x, x)
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

    mesh = build_mesh(MeshConfig().resolve(2), "cpu")
    parallel = parallelize(Drawing(), mesh, TrainConfig(precision="fp64"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            with parallel.draws.at(0, 0, 0, 2):
                parallel.run([torch.ones(2, 3, 4, dtype=torch.float64)], lambda x: parallel.model(x).sum())
    return sorted(str(w.message).partition(",")[0] for w in said if "generator" in str(w.message))


def test_what_is_not_covered_is_named_once(ranks) -> None:
    first, second = ranks(2).run(warned)
    assert first == [
        "attention calls multi_head_attention_forward",
        "the model calls bernoulli",
        "the model calls scaled_dot_product_attention",
    ]
    assert second == []


def test_masks_lie_on_the_device_that_is_asked_for() -> None:
    """A scalar's, too, which has no places that tell."""
    assert draws.kept(1, [], 0.5, torch.device("meta")).is_meta
    with torch.device("meta"):
        assert draws.kept(1, [], 0.5, torch.device("cpu")).device.type == "cpu"


def test_masks_have_their_share_and_are_independent() -> None:
    places = [torch.arange(64), torch.arange(50), torch.arange(40)]
    for p in (0.1, 0.5, 0.9):
        first, other = (draws.kept(key, places, p, torch.device("cpu")) for key in (1, 2))
        count = first.numel()
        error = (p * (1 - p) / count) ** 0.5
        assert abs(float((~first).double().mean()) - p) < 5 * error
        for a, b in (
            (first, other),
            (first[1:], first[:-1]),
            (first[:, 1:], first[:, :-1]),
            (first[..., 1:], first[..., :-1]),
        ):
            both = float((~a & ~b).double().mean())
            assert abs(both - p * p) < 5 * (p * p * (1 - p * p) / a.numel()) ** 0.5
    assert draws.kept(1, places, 0.0, torch.device("cpu")).all()
    part = draws.kept(1, [places[0][5:9], places[1][[3, 30]], places[2][7:]], 0.5, torch.device("cpu"))
    assert torch.equal(part, draws.kept(1, places, 0.5, torch.device("cpu"))[5:9][:, [3, 30]][..., 7:])
