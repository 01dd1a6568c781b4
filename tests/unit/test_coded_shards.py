"""ZeRO++ without ranks: its code, what a message takes, what a plan says of it, and what is refused."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from apps.llm.__main__ import APP
from core.comm.block_code import RoundedCode
from core.comm.coded_rows import CodedRows, RowPart
from core.comm.volume import count_volume
from core.compose import ParallelConfig
from core.config import UserError
from core.estimate.messages import step_bytes
from core.estimate.shape import RunShape
from core.mesh import MeshConfig, MeshShape, build_mesh
from core.models.decoder import DecoderConfig, decoder_without_memory
from core.models.shapes import SHAPES
from core.parallel.coded_shards import NODES, CodedShards, check_nodes, gather_messages, sum_messages
from core.parallel.compress import CommConfig
from core.placement.table import placement
from core.runtime import pretended
from core.train import TrainConfig

ALL = CommConfig(weights="int8", gradients="int4", node=2, secondary=True)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_number_is_off_by_half_a_step_at_most(bits: int) -> None:
    code, draw = RoundedCode(bits, 256), torch.Generator().manual_seed(0)
    given = torch.randn(7, 256, generator=draw, dtype=torch.float64) * torch.logspace(-20, 20, 7)[:, None]
    given[2], given[3, :200] = 0, 0
    coded = code.encode(given.clone())
    assert coded.shape == (7, code.num_bytes)
    found = code.decode(coded, torch.float64)
    step = given.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert bool(((found - given).abs() <= 0.51 * step).all())
    assert not found[given == 0].any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """A step whose gradients have overflowed is skipped by their norm."""
    code, given = RoundedCode(4, 256), torch.ones(2, 256)
    given[1, 9] = bad
    found = code.decode(code.encode(given), torch.float32)
    assert bool(found[0].isfinite().all())
    assert not found[1].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_of_parts(dtype: torch.dtype) -> None:
    """Parts that are coded have blocks of their own; others arrive as they are."""
    rows = CodedRows(RoundedCode(8, 256), [RowPart(3, False), RowPart(300, True), RowPart(5, False), RowPart(2, True)])
    given = torch.randn(4, 310, generator=torch.Generator().manual_seed(0)).to(dtype)
    given[:, 308:] *= 1e-6  # the other part's scale would leave nothing of them
    message, found = rows.encode(given), torch.empty_like(given)
    assert message.shape == (4, 3 * 258 + 8 * dtype.itemsize) == (4, rows.num_bytes(dtype.itemsize))
    rows.decode(message, found)
    for plain in (slice(0, 3), slice(303, 308)):
        assert torch.equal(found[:, plain], given[:, plain])
    assert float((found - given)[:, 308:].abs().max()) < 0.02 * float(given[:, 308:].abs().max())


def between_nodes(config: DecoderConfig, num_nodes: int, node: int, comm: CommConfig = ALL) -> float:
    """What a node sends and receives of others, over what 16-bit ZeRO-3 does; the same share of both is its own."""
    run = RunShape(
        precision="bf16", zero=3, dp_shard=num_nodes * node, comm=replace(comm, node=node), sequence_length=512
    )
    sent = step_bytes(config, run)
    hop = sent["all_to_all", NODES] if node > 1 else sent["all_to_all", "dp_shard"]
    elements = sum(p.numel() for p in decoder_without_memory(config).parameters())
    return (sent["all_gather", "dp_shard"] + node * hop) / (3 * 2 * elements)


@pytest.mark.parametrize(
    ("name", "num_nodes", "node"),
    [("gpt2_124m", 2, 1), ("gpt2_124m", 3, 1), ("gpt2_124m", 3, 5), ("gpt2_124m", 4, 4), ("gpt2_124m", 8, 8),
     ("gpt3_6_7b", 512, 8)],
)  # fmt: skip
def test_a_quarter_of_zero_3_crosses_between_nodes(name: str, num_nodes: int, node: int) -> None:
    share = between_nodes(SHAPES[name], num_nodes, node)
    scales = (2 / 256 + 2 / 64) / (3 * 2)  # two bytes a block of a gather and of a sum, in bytes of 16-bit ZeRO-3
    assert 0.25 < share < 0.25 + scales + 0.003 < 0.26
    assert share > 0.25 + 0.9 * scales


@pytest.mark.parametrize(
    ("num_ranks", "node"), [(2, 1), (3, 1), (8, 8), (12, 4), pytest.param(4096, 1, marks=pytest.mark.soak), (4096, 8)]
)
def test_bytes_of_ranks_that_do_not_exist(num_ranks: int, node: int) -> None:
    comm, model = replace(ALL, node=node, secondary=False), nn.Linear(70, 1000)
    with pretended(num_ranks):
        mesh = build_mesh(MeshConfig(dp_replicate=1, dp_shard=num_ranks), "cpu")
        table = placement(model, None, mesh, 3)
        shards, (rows, names) = CodedShards(comm, mesh, table), (list(table.values()), list(table))
        whole = torch.zeros(num_ranks, sum(row.row_elements(num_ranks) for row in rows))
        with count_volume(mesh) as volume:
            shards.gather(whole, whole[0].clone(), names, mesh["dp_shard"])
            assert shards.sum(whole, names, mesh["dp_shard"]).shape == whole[0].shape
    said = [*gather_messages(comm, rows, num_ranks, 4, 1), *sum_messages(comm, rows, num_ranks, 4)]
    assert volume.bytes == {(kind, axis or "dp_shard"): num_bytes for kind, axis, num_bytes in said if num_bytes}
    elements, plain = 70 * -(-1000 // num_ranks), 4 * -(-1000 // num_ranks)
    assert volume.bytes["all_gather", "dp_shard"] == num_ranks * (258 * -(-elements // 256) + plain)
    assert sum(n for (kind, _), n in volume.bytes.items() if kind == "all_to_all") == (
        34 * -(-elements // 64) + plain
    ) * (num_ranks * (node > 1) + (num_ranks // node) * (node < num_ranks))


FEEDBACK_ALONE = CommConfig(weights="int8", feedback=True)
PLAN = ["plan", "--recipe", "debug", "--gpu", "A100", "--check"]
CODED = "--comm.weights int8 --comm.gradients int4"


@pytest.mark.parametrize(
    "words",
    [
        f"--zero 3 --nproc 6 --comm.node 2 --comm.secondary --microbatch 1 --precision bf16 {CODED}",
        f"--zero 3 --nproc 2 --microbatch 1 {CODED} --comm.feedback",
        *(
            pytest.param(words, marks=pytest.mark.soak)
            for words in (
                f"--zero 1 --nproc 3 --microbatch 4 {CODED}",
                f"--zero 3 --recipe gpt2_124m --nproc 60 --comm.node 4 --comm.secondary --precision bf16 {CODED}",
                f"--zero 2 --nproc 4 --microbatch 1 --mesh.dp-replicate 2 --comm.node 2 {CODED} --comm.feedback",
                f"--zero 1 --nproc 3 --microbatch 4 --precision bf16 {CODED} --comm.feedback",
                f"--zero 3 --nproc 4 --mesh.tp 2 {CODED} --comm.feedback",
                f"--zero 3 --nproc 4 --mesh.tp 2 {CODED}",
                f"--zero 3 --nproc 8 --mesh.cp 2 --comm.node 4 --comm.secondary {CODED}",
                f"--zero 3 --nproc 2 --comm.secondary {CODED}",
                f"--zero 2 --nproc 4 --mesh.dp-replicate 2 --comm.node 2 {CODED}",
                "--nproc 2 --mesh.pp 2 --comm.activations int8 --microbatch 2",
                "--recipe debug_moe --nproc 2 --mesh.ep 2 --zero 1 --comm.activations int8",
                "--zero 2 --nproc 3 --comm.weights int4 --comm.gradients int8",
            )
        ),
    ],
)
def test_a_plan_is_what_a_rank_has_and_sends(words: str, capsys) -> None:
    assert APP.dispatch([*PLAN, *words.split()]) == 0, capsys.readouterr().out


def test_a_plan_prices_the_link(capsys) -> None:
    """The nodes' share of ZeRO-3, of which reductions are of 32 bits."""
    slow = ["plan", "--recipe", "gpt2_124m", "--gpu", "A100", "--bandwidth-gb-s", "0.0125"]
    slow += ["--zero", "3", "--nproc", "16", "--precision", "bf16"]
    seconds = []
    for words in ([], f"{CODED} --comm.node 8 --comm.secondary".split()):
        assert APP.dispatch([*slow, *words]) == 0
        seconds.append(float(capsys.readouterr().out.split(" s communicating")[0].split()[-1]))
    assert seconds[1] < seconds[0] / 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero": 0, "comm": CommConfig(weights="int8")}, "comm.weights=int8 with zero=0: no weight is gathered; use"),
        ({"zero": 0, "comm": CommConfig(gradients="int4")}, "comm.gradients=int4 with zero=0: gradients are not"),
        ({"zero": 2, "comm": CommConfig(secondary=True)}, "comm.secondary with zero=2: no backward gathers"),
        (
            {"zero": 3, "reduce_each": True, "comm": CommConfig(gradients="int4")},
            "comm.gradients=int4 with reduce_each: .*; use no --reduce-each, or no --comm.gradients",
        ),
    ],
)
def test_forms_without_these_messages_are_refused(options, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ParallelConfig(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gemini": {"budget": "1GiB"}}, "comm.weights=int8 with gemini.budget=1GiB: parameters"),
        ({"local": {"every": 5}, "mesh": MeshConfig(dp_replicate=2)}, "comm.weights=int8 with local.every=5"),
    ],
)
def test_other_forms_are_refused(options, said: str) -> None:
    parts = {name: replace(getattr(ParallelConfig(), name), **options[name]) for name in options if name != "mesh"}
    with pytest.raises(UserError, match=said):
        TrainConfig(**parts, mesh=options.get("mesh", MeshConfig()), zero=3, comm=CommConfig(weights="int8"))


@pytest.mark.parametrize(
    ("node", "mesh", "said"),
    [
        (
            3,
            MeshShape(("dp_replicate", "dp_shard"), (1, 8)),
            "comm.node=3 does not divide the 8 ranks .*; use 1, 2, 4, 8",
        ),
        (8, MeshShape(("dp_replicate", "dp_shard"), (2, 8)), "comm.secondary with comm.node=8: ZeRO shards over one"),
        (2, MeshShape(("dp_replicate", "dp_shard", "ep"), (1, 4, 2)), "comm.node=2 with mesh.ep=2: experts are"),
    ],
)
def test_nodes_that_ranks_do_not_make(node: int, mesh: MeshShape, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_nodes(replace(ALL, node=node), mesh)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"node": 0}, "comm.node=0; give the number"),
        ({"compress": "powersgd"}, "comm.compress=powersgd with comm.gradients=int4: a gradient is sent in one way"),
    ],
)
def test_options_are_checked(options, said: str) -> None:
    with pytest.raises(UserError, match=said):
        replace(ALL, **options)


def test_there_are_errors_of_codes_alone() -> None:
    """Feedback without codes of gradients, which commands refuse, keeps nothing."""
    with pretended(2):
        mesh = build_mesh(MeshConfig(dp_replicate=1, dp_shard=2), "cpu")
        table = placement(nn.Linear(7, 10), None, mesh, 3)
        for comm, names in ((CommConfig(gradients="int4", feedback=True), {"weight"}), (FEEDBACK_ALONE, None)):
            unsent = CodedShards(comm, mesh, table).unsent
            assert (None if unsent is None else unsent.errors.keys()) == names


@pytest.mark.parametrize("axis", ["pp", "ep"])
def test_errors_have_no_place_on_stages_and_experts(axis: str) -> None:
    comm = CommConfig(gradients="int4", feedback=True)
    with pytest.raises(UserError, match=f"comm.feedback with mesh.{axis}=2: .*use --mesh.{axis} 1, or no --comm.feed"):
        TrainConfig(mesh=MeshConfig(**{axis: 2}), zero=2, comm=comm)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (MeshConfig(tp=2), "comm.activations=int8 without stages and without experts that are dealt out: none is sent"),
        (MeshConfig(tp=4, tp_mode="2d", pp=2), "comm.activations=int8 with mesh.tp_mode=2d: ranks hand on parts"),
    ],
)
def test_activations_that_nobody_sends(mesh: MeshConfig, said: str) -> None:
    with pytest.raises(UserError, match=said):
        TrainConfig(mesh=mesh, comm=CommConfig(activations="int8"))
