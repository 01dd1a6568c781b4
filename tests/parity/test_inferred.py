"""Parallelism that was inferred: n ranks train transformers' own models as one rank does."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.checkpoint import CheckpointConfig, Checkpointer, read_full
from core.comm.volume import count_volume
from core.compose import ParallelConfig, parallelize
from core.config import UserError, size_in_bytes
from core.estimate import estimate_step
from core.gemini.config import GeminiConfig
from core.layout import full_tensor, local
from core.mesh import MeshConfig, Zero, build_mesh
from core.optim.build import OptimConfig, build_optimizer
from core.parallel import infer
from core.parallel.data import Completion
from core.parallel.expert import exchanged
from core.parallel.infer import experts, infer_context, infer_experts, infer_plan, infer_stages, sample_of
from core.parallel.pipeline.schedule import PipelineConfig
from core.parallel.recompute import RecomputeConfig
from core.placement.messages import microbatch_bytes, partial_sum_bytes
from core.placement.table import ModelPlan, placement
from core.precision import LossScale
from core.trace.machine import Speed
from core.train import TrainConfig, TrainState, num_rows, train_step
from tests.support.covering import FEW, MANY
from tests.support.foreign import CASES, DROPPING, EXPERTS, LENGTH, PADDED, QUIET, ROWS, UNSEEN, Case, batch_of
from tests.support.gemini import traced_once
from tests.support.zoo import in_fp64

LR = 1e-2
ONE_AFTER_ONE = PipelineConfig("1f1b")
NOT_AGAIN = RecomputeConfig()

_FOUND: dict[Any, Any] = {}


@contextmanager
def found_once(name: str) -> Iterator[None]:
    """Within, what a rank has found out about a model of that name it finds again: how it is cut, not its values."""

    def once(find: Callable[..., Any]) -> Callable[..., Any]:
        def found(model: nn.Module, *given: Any, **options: Any) -> Any:
            plain = [one for one in given if not isinstance(one, dict)]
            key = (name, find.__name__, *plain, *options.items())
            if key not in _FOUND:
                _FOUND[key] = find(model, *given, **options)
            return _FOUND[key]

        return found

    with ExitStack() as stack:
        for find in (infer_plan, infer_context, infer_experts):
            stack.enter_context(patch.object(infer, find.__name__, once(find)))
        yield


def trained(
    name: str,
    tp: int,
    zero: Zero,
    pp: int = 1,
    pipeline: PipelineConfig = ONE_AFTER_ONE,
    steps: int = FEW,
    cp: int = 1,
    cp_mode: Any = "ring",
    recompute: RecomputeConfig = NOT_AGAIN,
    budget: str | None = None,
    ep: int = 1,
    microbatch: int | None = None,
    optim: Any = "adamw",
    folder: Path | None = None,
    leg: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Losses, and where the parameters began and ended, whole; and a loss afterwards.

    leg  steps (first, behind the last) of the run that are made; from the checkpoint in `folder`, and to another one
    """
    first, last = leg or (0, steps)
    case = (CASES | DROPPING | UNSEEN | PADDED | EXPERTS | QUIET)[name]
    torch.manual_seed(0)
    with in_fp64(), found_once(name):
        model = case.make().double().train()
        config = TrainConfig(
            zero=zero,
            precision="fp64",
            steps=steps,
            optim=OptimConfig(name=optim, lr=LR, clip_norm=0.5),
            mesh=MeshConfig(tp=tp, pp=pp, cp=cp, cp_mode=cp_mode, ep=ep),
            microbatch=microbatch,
            pipeline=pipeline,
        )
        mesh = build_mesh(config.mesh.resolve(dist.get_world_size(), zero), "cpu")
        gemini = GeminiConfig(budget)
        spread = ParallelConfig(zero=zero, precision="fp64", pipeline=pipeline, recompute=recompute, gemini=gemini)
        parallel = parallelize(model, mesh, spread)
        state = TrainState(parallel, build_optimizer(config.optim, parallel.masters), LossScale("fp64"), {})
        start = {n: full_tensor(m).clone() for n, m in parallel.masters.items()}
        losses, norms = [], []
        data_ranks = dist.get_world_size() // (tp * pp * cp)
        data_rank = dist.get_rank() % (dist.get_world_size() // pp) // (tp * cp)
        rows = slice(data_rank * ROWS // data_ranks, (data_rank + 1) * ROWS // data_ranks)
        sample = {k: v[rows] for k, v in batch_of(0).items()}
        parallel.prepare(state.optimizer, lambda: [lambda model: case.loss(model, sample) / num_rows(sample)])
        checkpointer = None if folder is None else Checkpointer(folder, CheckpointConfig(), mesh)
        if checkpointer and first:
            assert state.load(checkpointer, None) == first
        for step in range(first, last):
            batch = {k: v[rows] for k, v in batch_of(step).items()}
            figures = train_step(state, batch, case.loss, num_rows, config, step)
            losses.append(figures["loss"])
            norms.append(figures["grad_norm"])
        if checkpointer:
            state.save(checkpointer, last)
            checkpointer.close()
        end = {n: full_tensor(m).clone() for n, m in parallel.masters.items()}
        loss = evaluated(case, parallel.model)
    cut = sum(m.numel() for m in parallel.masters.values()) / sum(m.numel() for m in end.values())
    found = {"losses": losses, "norms": norms, "start": start, "end": end, "cut": cut, "evaluated": loss}
    return found if budget is None else found | {"moved": parallel.tier.moved_bytes, "peak": parallel.tier.peak_bytes}


@torch.no_grad()
def evaluated(case: Case, model: nn.Module) -> float:
    """The loss of the first batch, of what each rank is returned."""
    if hasattr(model, "config"):
        model.config.use_cache = False  # stages do not hand it on
    return float(case.loss(model.eval(), batch_of(0)))


_REFERENCES: dict[Any, dict[str, Any]] = {}


def of_one_rank(ranks, name: str, steps: int, **options: Any) -> dict[str, Any]:
    """What `trained` finds on one rank; computed once."""
    key = (name, steps, *options.items())
    if key not in _REFERENCES:
        _REFERENCES[key] = ranks(1).run(trained, name, 1, 0, steps=steps, **options)[0]
    return _REFERENCES[key]


LONG = {
    "test_four_ranks_equal_one": "gpt2",
    "test_stages_equal_one_rank": "gpt2",
    "test_places_of_a_sequence_equal_one_rank": "llama",
    "test_experts_that_are_dealt_out_equal_one_rank": "qwen2_moe",
}
"""Of each form of parallelism the model that takes many steps in every run."""


@pytest.fixture
def steps(request: pytest.FixtureRequest) -> int:
    """Of `make soak` many, and of `LONG`; else few."""
    node: Any = request.node
    parameters = node.callspec.params if hasattr(node, "callspec") else {}
    is_long = LONG.get(node.originalname, "") == parameters.get("name")
    return MANY if is_long or node.get_closest_marker("soak") else FEW


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Norms, too: from clipped gradients, and by Adam, a model learns the same if all are twice as large."""
    for figures in ("losses", "norms", "evaluated"):
        assert found[figures] == pytest.approx(expected[figures], rel=1e-10)
    assert found["end"].keys() == expected["end"].keys()
    for name, end in expected["end"].items():
        assert torch.equal(found["start"][name], expected["start"][name]), name
        moved = end - expected["start"][name]
        floor = LR * len(expected["losses"]) * moved.numel() ** 0.5
        assert (found["end"][name] - end).norm() <= 1e-10 * max(float(moved.norm()), floor), name


FORMS = [(4, 0), (2, 1), (2, 2), (2, 3)]
"""(tp, ZeRO) on four ranks."""
EACH = [("bert", 4, 0), ("gpt2", 2, 1), ("whisper", 2, 3)]
"""What every run tests; the other cases it tests on two ranks."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak) if name in [name for name, *_ in EACH] else name for name in CASES],
)
def test_two_ranks_equal_one(ranks, steps: int, name: str) -> None:
    expected = of_one_rank(ranks, name, steps)
    for found in ranks(2).run(trained, name, 2, 0, steps=steps):
        check_equal(found, expected)
        assert found["cut"] < (0.95 if name == "mixtral" else 0.75)  # its experts stay whole


@pytest.mark.parametrize(
    ("name", "tp", "zero"),
    [
        pytest.param(name, tp, zero, marks=() if (name, tp, zero) in EACH else pytest.mark.soak)
        for name in CASES
        for tp, zero in FORMS
    ],
)
def test_four_ranks_equal_one(ranks, steps: int, name: str, tp: int, zero: Zero) -> None:
    expected = of_one_rank(ranks, name, steps)
    for found in ranks(4).run(trained, name, tp, zero, steps=steps):
        check_equal(found, expected)


FUSED = [("gpt2", "muon", [(2, 3), (4, 0)]), ("phi3", "adafactor", [(2, 2), (1, 3)])]
"""Models with several matrices in one: the optimizer, and the (tp, ZeRO) of each leg of a run, on four ranks."""
MORE_FUSED = [
    ("phi3", "muon", [(4, 0), (2, 3), (2, 1)]),
    ("gpt2", "adafactor", [(2, 2), (4, 0), (1, 0)]),
    ("gpt2", "sm3", [(1, 2), (2, 3), (4, 0)]),
    ("phi3", "came", [(4, 0), (1, 1), (2, 2)]),
    ("gpt2", "lamb", [(2, 1), (1, 3), (4, 0)]),
]


@pytest.mark.parametrize(
    ("name", "optim", "legs"), [*FUSED, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE_FUSED)]
)
def test_several_matrices_in_one_go_on_on_another_mesh(
    ranks, steps: int, tmp_path: Path, name: str, optim: Any, legs: list[tuple[int, Zero]]
) -> None:
    """A run that goes on from mesh to mesh is one rank's; its checkpoint has the matrices as one rank has them."""
    expected = of_one_rank(ranks, name, steps, optim=optim)
    ends = [round(steps * number / len(legs)) for number in range(len(legs) + 1)]
    found = [
        ranks(4).run(trained, name, tp, zero, steps=steps, optim=optim, folder=tmp_path, leg=leg)
        for (tp, zero), leg in zip(legs, pairwise(ends), strict=True)
    ]
    for of_rank in zip(*found, strict=True):
        together = {figures: [x for leg in of_rank for x in leg[figures]] for figures in ("losses", "norms")}
        check_equal(of_rank[-1] | together, expected)
    for key, value in read_full(tmp_path).items():
        if key.startswith("model/"):
            assert torch.equal(value, found[-1][0]["end"][key.removeprefix("model/")]), key


def held_and_said(name: str, spread: ParallelConfig, mesh: MeshConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of this rank's parameters, gradients and AdamW's state: counted in a step, and by the table."""
    case, here = (CASES | UNSEEN)[name], (lambda tensors: sum(local(tensor).nbytes for tensor in tensors))
    with in_fp64():
        parallel = parallelize(case.make().double(), build_mesh(mesh, "cpu"), spread)
        optimizer = build_optimizer(OptimConfig(), parallel.masters)
        held = {"parameters": here(parallel.model.parameters())}
        with parallel.microbatch(last=True):
            case.loss(parallel.model, batch_of(0)).backward()
        parallel.reduce()
        held["gradients"] = here(master.grad for master in parallel.masters.values())
        optimizer.step()
        held["state"] = here(value for state in optimizer.state.values() for value in state.values())
    rows = [row for key, row in parallel.table.items() if key == row.names[0]]
    masters = sum(8 * math.prod(row.master.local_shape()) for row in rows)
    whole = sum(8 * math.prod(row.layout.local_shape()) for row in rows)
    steps_bytes = 4 * len(rows)
    parameters = masters if spread.zero == 3 else whole
    return held, {"parameters": parameters, "gradients": masters, "state": 2 * masters + steps_bytes}


@pytest.mark.parametrize(
    ("name", "tp", "zero"),
    [
        ("phi3", 2, 2),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("gpt2", 2, 0), ("gpt2", 2, 3), ("phi3", 4, 0))),
    ],
)
def test_a_rank_holds_its_part_of_several_matrices_in_one(ranks, name: str, tp: int, zero: Zero) -> None:
    """What is counted, what the table says, and what the estimator says of the first rank."""
    case, spread = (CASES | UNSEEN)[name], ParallelConfig(zero=zero, precision="fp64")
    mesh = MeshConfig(tp=tp).resolve(4, zero)
    counted = ranks(4).run(held_and_said, name, spread, mesh)
    for held, said in counted:
        assert held == said
    with in_fp64():
        batch = batch_of(0)
        found = estimate_step(
            case.make().double(), lambda model: case.loss(model, batch), mesh, spread, Speed(1e12, 1e11)
        )
    assert counted[0][0] == {kind: getattr(found, f"{kind}_bytes") for kind in counted[0][0]}


STAGED = {
    "gpt2": ONE_AFTER_ONE,
    "bloom": PipelineConfig("zb-h1"),
    "vit": PipelineConfig("gpipe", microbatches=3),
}
"""Models of every run: a tied head, blocks that return tuples, a weight whose format is asked for before the blocks."""
IN_ONE_PIECE = {
    "t5": "uses what was made in front of the blocks",
    "whisper": "uses what was made in front of the blocks",
    "bart": "uses what was made in front of the blocks",
    "albert": "called once each",
    "twice": "called once each",
    "swin": "swin.embeddings, in front of the blocks, returns a tuple",
}
"""Models without stages -> why."""
IN_STAGES = [name for name in CASES | UNSEEN if name not in IN_ONE_PIECE]


@pytest.mark.parametrize("name", IN_ONE_PIECE)
def test_encoders_with_decoders_and_blocks_called_again_have_no_stages(name: str) -> None:
    model = (CASES | UNSEEN)[name].make()
    with pytest.raises(UserError, match=IN_ONE_PIECE[name]):
        infer_stages(model, sample_of(model))


@pytest.mark.parametrize(
    "name", [name if name in STAGED else pytest.param(name, marks=pytest.mark.soak) for name in IN_STAGES]
)
def test_stages_equal_one_rank(ranks, steps: int, name: str) -> None:
    expected = of_one_rank(ranks, name, steps)
    check_stages(ranks(2).run(trained, name, 1, 0, 2, STAGED.get(name, ONE_AFTER_ONE), steps=steps), expected)


def check_stages(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Each rank has its stages' parameters, and all have the losses."""
    together: dict[str, Any] = {"start": {}, "end": {}}
    for each in found:
        assert (each["losses"], each["evaluated"]) == (found[0]["losses"], found[0]["evaluated"])
        assert len(each["end"]) < len(expected["end"])
        together["start"] |= each["start"]
        together["end"] |= each["end"]
    check_equal(found[0] | together, expected)


@pytest.mark.parametrize("zero", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_stages_of_inferred_tensor_parallelism_equal_one_rank(ranks, steps: int, zero: Zero) -> None:
    expected = of_one_rank(ranks, "llama", steps)
    check_stages(ranks(4).run(trained, "llama", 2, zero, 2, steps=steps), expected)


IN_PLACES = {"gpt2": "ring", "llama": "ring", "bert with padding": "ulysses"}
"""Models of every run, by the mode of context parallelism."""
MORE_IN_PLACES = [name for name in CASES | UNSEEN | PADDED if name not in IN_PLACES]
WHOLE = {
    **dict.fromkeys(("bloom", "gptj", "gemma2"), "argument attention_mask that has a sequence twice"),
    "falcon": "joins places with what all ranks have of the whole sequence",
    "t5": "decoder.block.1 is given an argument 2 that another block has made",
    **dict.fromkeys(("twice", "albert"), "it has no list of blocks that"),
    "swin": "swin.encoder.layers.0.blocks are not sure to do so",
}
"""Models whose sequences are not cut -> why."""


@pytest.mark.parametrize("name", IN_PLACES)
def test_places_of_a_sequence_equal_one_rank(ranks, steps: int, name: str) -> None:
    expected = of_one_rank(ranks, name, steps)
    for found in ranks(2).run(trained, name, 1, 0, cp=2, cp_mode=IN_PLACES[name], steps=steps):
        check_equal(found, expected)


@pytest.mark.soak
@pytest.mark.parametrize("cp_mode", ["ring", "ulysses"])
@pytest.mark.parametrize("name", MORE_IN_PLACES)
def test_places_of_more_models_equal_one_rank_or_are_refused(ranks, steps: int, name: str, cp_mode: str) -> None:
    expected = of_one_rank(ranks, name, steps)
    why = WHOLE.get(name)
    if name in PADDED and cp_mode == "ring":
        why = "attention is given a mask .* use --mesh.cp-mode ulysses"
    for found in ranks(2).run(tried, name, 1, cp=2, cp_mode=cp_mode, steps=steps):
        if why is None:
            assert isinstance(found, dict), found
            check_equal(found, expected)
        else:
            assert isinstance(found, str)
            assert re.search(why, found), found


@pytest.mark.parametrize(
    ("name", "cp_mode", "cp", "tp", "zero"),
    [
        ("llama", "ulysses", 2, 1, 3),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                ("llama", "ring", 2, 2, 1),
                ("gpt2", "ulysses", 2, 2, 0),
                ("llama", "ring", 4, 1, 2),
                ("bert with padding", "ulysses", 4, 1, 0),
                ("vit", "ring", 4, 1, 1),
                ("gpt2", "ring", 2, 1, 3),
            )
        ),
    ],
)
def test_places_on_four_ranks_equal_one(
    ranks, steps: int, name: str, cp_mode: str, cp: int, tp: int, zero: Zero
) -> None:
    expected = of_one_rank(ranks, name, steps)
    for found in ranks(4).run(trained, name, tp, zero, cp=cp, cp_mode=cp_mode, steps=steps):
        check_equal(found, expected)


@pytest.mark.parametrize(
    ("num_ranks", "name", "zero", "tp"),
    [
        (2, "llama", 3, 1),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                (2, "gpt2", 0, 1),
                (2, "bert with padding", 3, 1),
                (2, "vit", 3, 1),
                (2, "bart", 3, 1),
                (4, "llama", 3, 1),
                (4, "llama", 0, 2),
                (4, "gpt2", 3, 2),
            )
        ),
    ],
)
def test_places_in_the_least_memory_equal_one_rank(
    ranks, steps: int, num_ranks: int, name: str, zero: Zero, tp: int
) -> None:
    """Gemini's chunks come and go while each rank has its places; the smallest budget is the one that is told."""
    options = {"cp": 2, "cp_mode": IN_PLACES.get(name, "ring"), "steps": steps}
    expected = of_one_rank(ranks, name, steps)
    for found in ranks(num_ranks).run(in_the_least_memory, name, tp, zero, **options):
        check_equal(found, expected)
        assert found["moved"] > 0
        assert found["peak"] <= size_in_bytes(found["least"], "")


@pytest.mark.parametrize(
    ("num_ranks", "name", "cp_mode", "ep", "zero"),
    [
        (4, "qwen2_moe in silence", "ring", 2, 1),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                (2, "olmoe in silence", "ulysses", 1, 3),
                (2, "mixtral", "ulysses", 1, 1),
                (4, "mixtral", "ulysses", 2, 3),
                (4, "olmoe in silence", "ring", 2, 0),
            )
        ),
    ],
)
def test_places_beside_experts_equal_one_rank(
    ranks, steps: int, num_ranks: int, name: str, cp_mode: str, ep: int, zero: Zero
) -> None:
    """Each rank routes its places; those of a sequence go to experts of all ranks of ep."""
    expected = of_one_rank(ranks, name, steps)
    for found in ranks(num_ranks).run(trained, name, 1, zero, cp=2, cp_mode=cp_mode, ep=ep, steps=steps):
        check_equal(found, expected)
        assert ep == 1 or found["cut"] < 0.9


@pytest.mark.parametrize(
    ("num_ranks", "name", "ep", "zero"),
    [
        (2, "qwen2_moe", 2, 3),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in ((4, "6 of mixtral", 4, 3), (4, "olmoe", 2, 3), (2, "olmoe", 2, 0), (4, "6 of mixtral", 2, 0))
        ),
    ],
)
def test_experts_in_the_least_memory_equal_one_rank(
    ranks, steps: int, num_ranks: int, name: str, ep: int, zero: Zero
) -> None:
    expected = of_one_rank(ranks, name, steps, microbatch=1)
    options = {"ep": ep, "microbatch": 1, "steps": steps}
    for found in ranks(num_ranks).run(in_the_least_memory, name, 1, zero, **options):
        check_equal(found, expected)
        assert found["moved"] > 0
        assert found["peak"] <= size_in_bytes(found["least"], "")


def in_the_least_memory(name: str, tp: int, zero: Zero, **options: Any) -> dict[str, Any]:
    with traced_once():
        refused = tried(name, tp, zero, budget="4KB", **options)
        least = re.findall(r"give at least ([\d.]+ \w+)", str(refused))[0].replace(" ", "")
        return trained(name, tp, zero, budget=least, **options) | {"least": least}


def test_places_that_are_recomputed_and_dropouts_equal_one_rank(ranks, steps: int) -> None:
    name, each = "gpt2 with dropout outside of attention", RecomputeConfig("full")
    expected = of_one_rank(ranks, name, steps)
    for found in ranks(2).run(trained, name, 1, 0, cp=2, recompute=each, steps=steps):
        check_equal(found, expected)


def test_dropout_drops_what_one_rank_drops(ranks, steps: int) -> None:
    """Where attention is written out; torch's own operator on one rank draws for itself."""
    expected = of_one_rank(ranks, "gpt2 with dropout", steps)
    for found in ranks(2).run(trained, "gpt2 with dropout", 2, 0, steps=steps):
        check_equal(found, expected)


def test_dropout_of_fused_attention_is_alike_on_any_ranks_of_tensor_parallelism(ranks, steps: int) -> None:
    expected = ranks(2).run(trained, "gpt2 with fused dropout", 2, 0, steps=steps)[0]
    for found in ranks(4).run(trained, "gpt2 with fused dropout", 4, 0, steps=steps):
        check_equal(found, expected)


EACH_EXPERT = [("6 of mixtral", 4, 4, 1, 3), ("qwen2_moe", 2, 2, 1, 0)]
"""Of every run: (name, ranks, ep, tp, ZeRO); six experts over four ranks, and beside a shared one."""
MORE_EXPERTS = [
    *((name, 2, 2, 1, 1) for name in EXPERTS),
    *((name, 4, 2, 2, 1) for name in EXPERTS if name != "olmoe"),  # tp is refused, whose norms are of all heads
    *(("6 of mixtral", 4, 4, 1, zero) for zero in (0, 1, 2)),
    *(("olmoe", 4, 2, 1, zero) for zero in (0, 1, 2, 3)),
    ("mixtral", 4, 2, 2, 3),
    ("deepseek_v3", 4, 4, 1, 2),
    ("gpt_oss", 4, 4, 1, 3),
    ("6 of mixtral, eager", 4, 4, 1, 0),
]


@pytest.mark.parametrize(
    ("name", "num_ranks", "ep", "tp", "zero"),
    [*EACH_EXPERT, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE_EXPERTS)],
)
def test_experts_that_are_dealt_out_equal_one_rank(
    ranks, steps: int, name: str, num_ranks: int, ep: int, tp: int, zero: Zero
):
    """What routers add to the loss is of the tokens of one forward, so all forwards are of one row."""
    expected = of_one_rank(ranks, name, steps, microbatch=1)
    for found in ranks(num_ranks).run(trained, name, tp, zero, ep=ep, microbatch=1, steps=steps):
        check_equal(found, expected)
        assert found["cut"] < 0.9


@pytest.mark.soak
def test_experts_in_stages_and_recomputed_equal_one_rank(ranks, steps: int) -> None:
    expected = of_one_rank(ranks, "mixtral", steps)
    check_stages(ranks(4).run(trained, "mixtral", 1, 1, 2, ep=2, steps=steps), expected)
    for found in ranks(2).run(trained, "mixtral", 1, 0, ep=2, recompute=RecomputeConfig("full"), steps=steps):
        check_equal(found, expected)


def trained_of_other_experts(name: str, **options: Any) -> dict[str, Any]:
    """With shares of the experts that are shifted by one."""
    shifted = lambda inner, x, rows_E, *how: exchanged(inner, x, rows_E.roll(1), *how)  # noqa: E731
    with patch.object(experts, "exchanged", shifted):
        return trained(name, 1, 0, **options)


def test_shifted_shares_of_experts_are_seen(ranks) -> None:
    expected = of_one_rank(ranks, "qwen2_moe", FEW, microbatch=1)
    found = ranks(2).run(trained_of_other_experts, "qwen2_moe", ep=2, microbatch=1, steps=1)[0]
    assert abs(found["losses"][0] - expected["losses"][0]) > 1e-6


def sent_and_said_of_experts(name: str) -> tuple[int, int]:
    """Bytes of a microbatch of balanced loads, and those that left the ranks."""
    model, mesh = EXPERTS[name].make().train(), MeshConfig(ep=2).resolve(2, 0)
    with found_once(name):
        plan = ModelPlan(experts=infer.infer_experts(model, 2, sample_of(model)))
    said = microbatch_bytes(model, plan, mesh, ROWS // 2, LENGTH)
    parallel = parallelize(model, build_mesh(mesh, "cpu"), ParallelConfig(), plan)
    rows = slice(dist.get_rank() * 2, dist.get_rank() * 2 + 2)
    with count_volume(parallel.mesh) as volume, parallel.microbatch(last=True):
        EXPERTS[name].loss(parallel.model, {k: v[rows] for k, v in batch_of(0).items()}).backward()
    return volume.bytes["all_to_all", "ep"], said["all_to_all", "ep"]


def test_messages_of_experts_are_those_of_the_closed_forms(ranks) -> None:
    """Of all ranks together: a rank sends as many rows as its experts get only where loads are balanced."""
    found = ranks(2).run(sent_and_said_of_experts, "olmoe")
    assert sum(sent for sent, _ in found) == sum(said for _, said in found)


def sent_and_said(name: str) -> tuple[dict[Any, int], dict[Any, int]]:
    """Bytes of a microbatch and of the sums of partial gradients: counted, and by the plan's closed forms."""
    model = CASES[name].make().train()
    with found_once(name):
        found = infer.infer_plan(model, 2, sample_of(model), sequence=True).plan
    mesh = MeshConfig(tp=2).resolve(2, 0)
    said = microbatch_bytes(model, found, mesh, ROWS, LENGTH) + partial_sum_bytes(placement(model, found, mesh))
    parallel = parallelize(model, build_mesh(mesh, "cpu"), ParallelConfig(), found)
    # What data parallelism sends is counted in tests/unit/test_volume.py.
    used = patch.object(Completion, "used_anywhere", lambda _, masters, together: set(masters))
    with used, count_volume(parallel.mesh) as volume:
        with parallel.microbatch(last=True):
            CASES[name].loss(parallel.model, batch_of(0)).backward()
        parallel.reduce()
    return {key: n for key, n in volume.bytes.items() if key[1] == "tp" and n}, dict(said)


def sent_and_said_of_places(name: str, cp_mode: Any) -> tuple[dict[Any, int], dict[Any, int]]:
    """The same of context parallelism."""
    model, mesh = CASES[name].make().train(), MeshConfig(cp=2, cp_mode=cp_mode).resolve(2, 0)
    with found_once(name):
        plan = ModelPlan(context=infer.infer_context(model, 2, sample_of(model), cp_mode))
    said = microbatch_bytes(model, plan, mesh, ROWS, -(-LENGTH // 4) * 2 if cp_mode == "ring" else LENGTH // 2)
    parallel = parallelize(model, build_mesh(mesh, "cpu"), ParallelConfig(), plan)
    with count_volume(parallel.mesh) as volume, parallel.microbatch(last=True):
        CASES[name].loss(parallel.model, batch_of(0)).backward()
    of_data = ("all_reduce", "recv")
    return {key: n for key, n in volume.bytes.items() if key[1] == "cp" and key[0] not in of_data}, dict(said)


@pytest.mark.parametrize(("name", "cp_mode"), [("gpt2", "ring"), ("gpt2", "ulysses")])
def test_messages_of_places_are_those_of_the_closed_forms(ranks, name: str, cp_mode: str) -> None:
    for counted, said in ranks(2).run(sent_and_said_of_places, name, cp_mode):
        assert counted == said


@pytest.mark.parametrize("name", ["bert", "gpt2", "opt", "bloom", "llama"])
def test_messages_are_those_of_the_closed_forms(ranks, name: str) -> None:
    for counted, said in ranks(2).run(sent_and_said, name):
        assert counted == said


REFUSED = {"gpt_bigcode": "transformer.h.0.attn"}
"""Models that are refused -> the module that the line names: one head of keys stands in a matrix with the queries."""


@pytest.mark.soak
@pytest.mark.parametrize("name", UNSEEN)
def test_models_that_the_inference_was_not_written_with(ranks, steps: int, name: str) -> None:
    """Right, or refused in a line: what runs equals one rank."""
    expected = of_one_rank(ranks, name, steps)
    found = ranks(2).run(tried, name, 2, steps=steps)
    for each in found:
        if name in REFUSED:
            assert isinstance(each, str)
            assert each.startswith("mesh.tp=2 without a plan: ")
            assert REFUSED[name] in each
        else:
            assert isinstance(each, dict), each
            check_equal(each, expected)


def tried(name: str, tp: int, zero: Zero = 0, **options: Any) -> dict[str, Any] | str:
    try:
        return trained(name, tp, zero, **options)
    except UserError as refused:
        return str(refused)
