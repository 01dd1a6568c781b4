"""Steps as problems: the solver finds by itself what was found by hand."""

import math

import pytest
import torch
from torch import Tensor, nn

from core.auto.costs import Link
from core.auto.formulate import Formulation, formulate
from core.auto.simulate import simulate
from core.auto.solve import Plan, least_peak, solve
from core.config import UserError
from core.trace.machine import Speed
from core.trace.record import trace_graph
from tests.support.planned import BYTES, FLOPS, SLOW, Block, Blocks, Gpt, formulated, on_meta

WIDE = Link(0.0, 1e10)


def test_a_gpt_block_is_cut_as_megatron_cuts_it() -> None:
    """Few tokens and wide layers: columns, then rows, one all-reduce a sublayer forward and one backward."""
    blocks = on_meta(lambda: Blocks(dim=512, heads=8, layers=2))
    fixed = {"x_BLD": "RRR", "output.0": "RRR"}
    problem = formulated(blocks, {"x_BLD": torch.zeros(1, 64, 512)}, [4], [WIDE], fixed=fixed)
    plan = solve(problem.problem)
    assert plan.gap <= 1e-4
    specs = {name: str(of[0]) for name, of in problem.specs(plan.choice).items() if of}
    for block in ("blocks.0", "blocks.1"):
        columns, rows = [f"{block}.{name}" for name in ("q", "k", "v", "up")], [f"{block}.out", f"{block}.down"]
        assert {name: specs[f"{name}.weight"] for name in columns} == dict.fromkeys(columns, "S0R")
        assert {name: specs[f"{name}.weight"] for name in rows} == dict.fromkeys(rows, "RS0")
        assert {name: specs[f"{name}.bias"] for name in columns} == dict.fromkeys(columns, "S0")
    changes = problem.changes(plan.choice)
    sent = {step.operation for change in changes for step in change.path.steps}
    # An all-reduce is a reduce-scatter and an all-gather, which cost the same and may stand apart: around a norm.
    assert sent <= {"all_reduce", "reduce_scatter", "all_gather", "split", "embed"}
    all_reduce = 2 * (3 / 4) * 64 * 512 * 4
    # Nothing before the first norm wants a gradient, so of that sublayer's only those of the norm's weights are summed.
    assert 7 <= sum(change.path.bytes_sent for change in changes) / all_reduce <= 7.1


def test_many_tokens_are_cut_by_the_batch() -> None:
    """Many sequences, narrow layers: gradients are smaller than activations; each is reduced, and nothing else sent."""
    block = on_meta(lambda: Block(dim=32, heads=4))
    fixed = {"gradient of output.0": "S0RR"}
    problem = formulated(block, {"x_BLD": torch.zeros(64, 64, 32)}, [4], [WIDE], fixed=fixed)
    plan = solve(problem.problem)
    assert {str(of[0]) for name, of in problem.specs(plan.choice).items() if name.startswith("native_layer_norm")} >= {
        "S0RR"
    }
    sent = sum(change.path.bytes_sent for change in problem.changes(plan.choice))
    parameters = sum(parameter.numel() * 4 for parameter in block.parameters())
    assert sent == pytest.approx(2 * (3 / 4) * parameters)


def test_two_axes_share_batch_and_width() -> None:
    """A slow axis and a fast one, a sequence for each rank of the slow one: data parallel outside, Megatron inside.

    Solved apart, either axis takes the batch, whose two sequences are too few for both.
    """
    block = on_meta(lambda: Block(dim=256, heads=4))
    slow, fast = Link(0.0, 2e9), Link(0.0, 1e11)

    def products(sizes: list[int], links: list[Link]) -> tuple[Formulation, Plan, list[str]]:
        inputs = {"x_BLD": torch.zeros(2, 1024, 256)}
        problem = formulated(block, inputs, sizes, links, speed=Speed(1e11, float("inf")))
        plan = solve(problem.problem)
        assert plan.gap <= 1e-4
        taken = problem.taken(plan.choice)
        # Queries, keys, values, what comes out of attention, and the two products behind it.
        return problem, plan, [taken[f"addmm_{n}"].split(" -> ")[1] for n in range(1, 7)]

    assert products([2], [slow])[2] == products([2], [fast])[2] == ["S0R"] * 6
    problem, plan, taken = products([2, 2], [slow, fast])
    assert taken[:3] == ["S0S1"] * 3  # tokens outside, columns inside
    assert taken[4:] == ["S0S1", "S0R{1}"]  # columns, then rows that are summed
    norms = [of[0] for name, of in problem.specs(plan.choice).items() if name.startswith("native_layer_norm")]
    assert all(spec is None or not spec.dims or 1 not in spec.dims[0] for spec in norms)


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


@pytest.mark.parametrize(("tokens", "outputs"), [(64, 96), (92, 96), (100, 96), (192, 96), (48, 64), (80, 64)])
def test_columns_and_tokens_cross_where_tokens_equal_output_features(tokens: int, outputs: int) -> None:
    """By the bytes that a rank reads: M K + K N / T of columns, M K / T + K N of tokens (M tokens, N features)."""
    linear = on_meta(lambda: Linear(48, outputs))
    problem = formulated(linear, {"x": torch.zeros(tokens, 48)}, [4], speed=BYTES, train=False)
    plan = solve(problem.problem)
    (product,) = [text for name, text in problem.taken(plan.choice).items() if name.startswith("mm")]
    assert product.split(" -> ")[1] == ("RS0" if tokens < outputs else "S0R"), plan


@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"),
    [(32, 64, 48), (64, 32, 48), (40, 64, 48), (96, 48, 64), (16, 64, 64), (16, 16, 128)],
)
def test_what_is_sent_crosses_there_too(tokens: int, inputs: int, outputs: int) -> None:
    """Tokens and the weight's input features are cut, and the result is to be by tokens.

    Tokens: the weight is gathered. Rows: activations change their cut, and partial sums are reduce-scattered. Columns:
    activations are gathered, the weight and the result change theirs.
    """
    parts = 4
    linear = on_meta(lambda: Linear(inputs, outputs))
    fixed = {"x": "S0R", "up.weight": "RS0", "output.0": "S0R"}
    problem = formulated(linear, {"x": torch.zeros(tokens, inputs)}, [parts], fixed=fixed, train=False, speed=FLOPS)
    plan = solve(problem.problem)
    (product,) = [text for name, text in problem.taken(plan.choice).items() if name.startswith("mm")]
    gather, exchange = (parts - 1) / parts, (parts - 1) / parts**2
    bytes_sent = {
        "S0R": inputs * outputs * gather,
        "RR{0}": tokens * inputs * exchange + tokens * outputs * gather,
        "RS0": tokens * inputs * gather + (inputs + tokens) * outputs * exchange,
    }
    assert product.split(" -> ")[1] == min(bytes_sent, key=lambda name: bytes_sent[name])
    assert sum(change.path.bytes_sent for change in problem.changes(plan.choice)) == pytest.approx(
        4 * min(bytes_sent.values())
    )


def test_equal_blocks_choose_alike() -> None:
    """Four blocks are as many nodes as two: the first, before which nothing wants a gradient, and those behind it."""
    shape = {"x_BLD": torch.zeros(2, 16, 32)}
    few, many = (
        formulated(on_meta(lambda layers=layers: Blocks(32, 4, layers)), shape, [4], state=2.0) for layers in (2, 4)
    )
    assert len(many.problem.nodes) == len(few.problem.nodes) < len(many.whole.nodes) / 2
    plan = solve(many.problem)
    account = simulate(many.whole, many.folded.unfold(plan.choice))
    assert account.seconds == pytest.approx(plan.seconds)
    assert account.peak_bytes == plan.peak_bytes
    specs = many.specs(plan.choice)
    assert specs["blocks.1.up.weight"] == specs["blocks.3.up.weight"]


def test_less_memory_cuts_more_and_takes_longer() -> None:
    block = on_meta(lambda: Block(32, 4))
    problem = formulated(block, {"x_BLD": torch.zeros(64, 16, 32)}, [4], train=False).problem
    free = solve(problem)
    least, _, _ = least_peak(problem)
    plans = [free, solve(problem, (free.peak_bytes + least) // 2), solve(problem, least)]
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    assert plans[-1].peak_bytes == least < free.peak_bytes
    assert plans[-1].seconds > free.seconds * 1.01


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="no input, output or node is called y"):
        formulated(on_meta(lambda: Linear(4, 4)), {"x": torch.zeros(4, 4)}, [2], fixed={"x": "RR"} | {"y": "RR"})


def test_memory_of_replicas_is_the_graphs() -> None:
    """Nothing is cut: at its fullest a rank holds what the graph of the step does until each tensor's last use."""
    graph = trace_graph(Blocks(32, 4, 2), {"x_BLD": torch.zeros(2, 16, 32)}, train=True)
    problem = formulate(graph, [3], [SLOW], FLOPS).whole
    account = simulate(problem, [0] * len(problem.nodes))
    assert account.peak_bytes == graph.peak("used").num_bytes
    assert sum(account.edge_s) == 0


@pytest.mark.soak
def test_gpt3_on_64_ranks() -> None:
    """96 layers on 8 x 8, a network outside, NVLink inside: batch outside, inside Megatron's cuts with norms by rows.

    All layers are a few dozen nodes. Head and loss are cut by the vocabulary, and nothing as large as logits is sent.
    """
    ids = torch.zeros(64, 2048, dtype=torch.int64, device="meta")
    links, speed = [Link(1e-5, 25e9), Link(5e-6, 240e9)], Speed(0.5 * 312e12, 1.5e12)
    gpt3 = on_meta(lambda: Gpt(51200, 12288, 96, layers=96))
    problem = formulated(gpt3, {"ids_BL": ids, "labels_BL": ids}, [8, 8], links, speed=speed, state=3.0)
    assert len(problem.problem.nodes) < 150 < len(problem.whole.nodes) / 50
    plan = solve(problem.problem)
    assert plan.gap <= 1e-3
    account = simulate(problem.whole, problem.folded.unfold(plan.choice))
    assert account.seconds == pytest.approx(plan.seconds)
    specs = {name: str(of[0]) for name, of in problem.specs(plan.choice).items() if of}
    assert {specs[f"blocks.blocks.{n}.up.weight"] for n in range(96)} == {"S1R"}
    assert {specs[f"blocks.blocks.{n}.down.weight"] for n in range(96)} == {"RS1"}
    assert specs["head.weight"] == "S1R"
    logits = 64 * 2048 * 51200
    assert all(math.prod(change.value.shape) < logits for change in problem.changes(plan.choice))
