"""Workers that average every so many steps: any of them is a simulation of all in one process, to 1e-10 in fp64."""

from collections.abc import Mapping
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from apps.llm.loss import num_targets, token_loss
from core.checkpoint import CheckpointConfig, Checkpointer, read_full
from core.checkpoint.stored import inspect
from core.comm.volume import wire_share
from core.compose import parallelize
from core.config import UserError
from core.layout import full_tensor
from core.mesh import MeshConfig
from core.metrics import read_metrics
from core.models.decoder import Decoder
from core.models.plan import decoder_plan
from core.optim.adamw import AdamWConfig
from core.optim.average import WeightAverage, ramp
from core.optim.build import OptimConfig, build_optimizer
from core.optim.schedule import ScheduleConfig, learning_rate
from core.optim.sgd import SgdConfig
from core.parallel.local import LocalTraining, LocalTrainingConfig
from core.parallel.pipeline.schedule import PipelineConfig
from core.parallel.regroup import ERRORS
from core.runtime import start
from core.train import TrainConfig, fit
from tests.parity.test_train import GPT2
from tests.support.small import Rows, Small, build, config_of, loss, train

STEPS, TOLERANCE = 8, 1e-10
SCHEDULE = ScheduleConfig(warmup_steps=2)
ADAMW = AdamWConfig(lr=1e-2, clip_norm=0.3, schedule=SCHEDULE)
MUON = OptimConfig("muon", lr=1e-2, clip_norm=0.3, schedule=SCHEDULE)
SGD = SgdConfig(lr=5e-2, momentum=0.0, clip_norm=None, schedule=SCHEDULE)
DILOCO = LocalTrainingConfig(every=3)
AVERAGE = LocalTrainingConfig(every=1, outer_lr=1.0, outer_momentum=0.0)


class Found(NamedTuple):
    """What a rank has: its worker's values, theta, the outer momentum, before and after, whole."""

    summary: dict[str, Any]
    worker: int
    begin: dict[str, Tensor]
    end: dict[str, Tensor]
    outer: dict[str, Tensor]
    momentum: dict[str, Tensor]


def seen(batch: Mapping[str, Tensor]) -> Tensor:
    """Rows count as often as their first feature says, so that workers have other numbers of items."""
    return (batch["x"][:, :1] > -0.5).double() + 1e-3


def items(batch: dict[str, Tensor]) -> Tensor:
    return seen(batch).sum()


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (seen(batch) * (model(batch["x"]) - batch["y"]).square()).sum() / seen(batch).sum()


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: full_tensor(value).clone() for name, value in tensors.items()}


def heldout_loss(model: nn.Module) -> dict[str, float]:
    return {"heldout": float(weighted(model, Rows().batch(99, 0, 1)))}


def run(given: TrainConfig, dropout: float = 0.0, evaluated: bool = False) -> Found:
    with start("cpu", given.seed) as runtime:
        state = build(given, Small(dropout))
        parallel, local = state.parallel, state.parallel.local
        assert isinstance(local, LocalTraining)
        begin, evaluate = whole(parallel.masters), heldout_loss if evaluated else None
        given_to = parallel, state.optimizer, Rows(), weighted, given, runtime
        summary = fit(*given_to, weight=items, evaluate=evaluate)
        return Found(summary, local.worker, begin, whole(parallel.masters), whole(local.outer), whole(local.momentum))


def tp_cut(name: str) -> int | None:
    """The dim that `tests.support.small.PLAN` cuts."""
    return 0 if ".up." in name else 1 if name.endswith("down.weight") else None


class Sent(NamedTuple):
    """What workers have added up of a fragment: its mean way, and sum a_w |D_w|^2."""

    mean: dict[str, Tensor]
    square: float


class Simulation:
    """n workers in one process: plain modules, their optimizers, and the outer one in a few lines."""

    def __init__(self, begin: Mapping[str, Tensor], given: TrainConfig, num_workers: int, ranks: int):
        self.given, self.n, self.ranks = given, num_workers, ranks
        self.models = [Small().double() for _ in range(num_workers)]
        for model in self.models:
            model.load_state_dict(dict(begin), strict=False)
        self.theta = {name: value.clone() for name, value in begin.items()}
        self.momentum = {name: torch.zeros_like(value) for name, value in begin.items()}
        self.optimizers = [build_optimizer(given.optim, dict(model.named_parameters())) for model in self.models]
        self.rows: list[dict[str, float]] = []
        number = given.local.fragments
        of = [0 if name.startswith("blocks.0") else number - 1 for name in begin]
        self.fragments = [[n for n, place in zip(begin, of, strict=True) if place == p] for p in range(number)]
        self.items = [[0.0] * num_workers for _ in self.fragments]
        self.arriving: dict[int, tuple[int, Sent]] = {}
        self.errors: dict[tuple[Any, int], Tensor] = {}  # of a fragment: each worker's, and that of the sum under -1

    def gradients(self, worker: int, step: int) -> tuple[float, list[Tensor]]:
        """Items and gradients of a worker's rows, those of several ranks."""
        inside = self.ranks // self.n
        parts = [Rows().batch(step, worker * inside + rank, self.ranks) for rank in range(inside)]
        batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        model = self.models[worker]
        return float(items(batch)), list(torch.autograd.grad(weighted(model, batch), list(model.parameters())))

    def update(self, worker: int, step: int, grads: list[Tensor]) -> None:
        clip, rate = self.given.optim.clip_norm, self.given.optim.lr
        norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
        factor = 1.0 if clip is None or norm <= clip else clip / norm
        for parameter, grad in zip(self.models[worker].parameters(), grads, strict=True):
            parameter.grad = grad * factor
        for group in self.optimizers[worker].param_groups:
            group["lr"] = learning_rate(step, STEPS, rate, SCHEDULE)
        self.optimizers[worker].step()

    @torch.no_grad()
    def regrouped(self, n: int, ranks: int) -> "Simulation":
        """n workers that go on: worker v in v mod n, and new ones at theta, with the first one's optimizer."""
        found = Simulation(self.theta, self.given, n, ranks)
        found.momentum, found.arriving, found.rows = self.momentum, self.arriving, self.rows
        found.errors = {(place, -1): error for (place, worker), error in self.errors.items() if worker < 0}
        for worker, model in enumerate(found.models):
            of = range(worker, self.n, n)
            found.optimizers[worker].load_state_dict(deepcopy(self.optimizers[worker if of else 0].state_dict()))
            for place, names in enumerate(self.fragments):
                items = [self.items[place][v] for v in of]
                found.items[place][worker] = sum(items)
                if any((place, v) in self.errors for v in of):
                    found.errors[place, worker] = torch.stack([self.errors[place, v] for v in of]).sum(0)
                for v, own in zip(of, items, strict=True):
                    share = own / sum(items) if sum(items) else 1 / len(of)
                    for name in names:
                        model.get_parameter(name).sub_(share * (self.theta[name] - self.models[v].get_parameter(name)))
        if n == 1:  # sends nothing
            for (place, _), error in found.errors.items():
                for name, piece in self.pieces(place, error).items():
                    found.models[0].get_parameter(name).sub_(piece)
            found.errors = {}
        return found

    def run(self, last: int = STEPS, first: int = 0) -> "Simulation":
        local = self.given.local
        for step in range(first, last):
            found = [self.gradients(worker, step) for worker in range(self.n)]
            if step < local.start:
                total = sum(n for n, _ in found)
                mean = [torch.stack([n / total * g[i] for n, g in found]).sum(0) for i in range(len(found[0][1]))]
                found = [(n, [grad.clone() for grad in mean]) for n, _ in found]
            for worker, (number, grads) in enumerate(found):
                self.update(worker, step, grads)
                for of_fragment in self.items:
                    of_fragment[worker] += number
            if (done := step + 1 - local.start) <= 0:
                self.theta = {n: p.detach().clone() for n, p in self.models[0].named_parameters()}
                self.items = [[0.0] * self.n for _ in self.fragments]
            else:
                self.end_rounds(step + 1, done)
        return self

    @torch.no_grad()
    def end_rounds(self, step: int, done: int) -> None:
        local, taken, is_last = self.given.local, list[Sent](), step == STEPS
        for place in [p for p, (due, _) in self.arriving.items() if is_last or due == step]:
            taken.append(self.take(self.arriving.pop(place)[1], local.mix))
        for place in range(local.fragments):
            if not is_last and (done - local.every * place // local.fragments) % local.every:
                continue
            sent = self.send(place)
            if local.overlap and not is_last:
                self.arriving[place] = step + local.overlap, sent
            else:
                taken.append(self.take(sent, 0.0))
        if taken:
            norm = sum(sent.square for sent in taken) ** 0.5
            outer = float(torch.cat([v.flatten() for sent in taken for v in sent.mean.values()]).norm())
            row = {"step": step, "displacement_norm": norm, "displacement_cosine": outer / norm, "outer_norm": outer}
            self.rows.append(row)

    def send(self, place: int) -> Sent:
        names, shares = self.fragments[place][::-1], [n / sum(self.items[place]) for n in self.items[place]]
        self.items[place] = [0.0] * self.n
        values = [dict(model.named_parameters()) for model in self.models]
        ways = [torch.cat([(self.theta[name] - own[name]).flatten() for name in names]) for own in values]
        square = sum(a * float(way @ way) for a, way in zip(shares, ways, strict=True))
        mean = self.added(place, [a * way for a, way in zip(shares, ways, strict=True)])
        return Sent(self.pieces(place, mean), square)

    def pieces(self, place: int, flat: Tensor) -> dict[str, Tensor]:
        """Of a fragment's message, which is in the order of the backward."""
        names = self.fragments[place][::-1]
        split = flat.split([self.theta[name].numel() for name in names])
        return {name: piece.view_as(self.theta[name]) for name, piece in zip(names, split, strict=True)}

    def added(self, place: int, given: list[Tensor]) -> Tensor:
        if self.given.local.code is None or self.n == 1:
            return torch.stack(given).sum(0)
        if self.given.mesh.tp == 1:
            return self.added_in_bits(place, given)
        of_workers = [self.pieces(place, own) for own in given]
        found = {name: torch.empty_like(piece) for name, piece in of_workers[0].items()}
        for rank in range(self.given.mesh.tp):
            for is_cut in (False, True):  # what ranks have of their own is in blocks of its own
                names = [name for name in found if (tp_cut(name) is not None) == is_cut]
                parts = [[self.part(pieces[name], name, rank) for name in names] for pieces in of_workers]
                key = (place, rank, is_cut)
                flat = self.added_in_bits(key, [torch.cat([part.flatten() for part in own]) for own in parts])
                for name, piece in zip(names, flat.split([part.numel() for part in parts[0]]), strict=True):
                    own = self.part(found[name], name, rank)
                    own.copy_(piece.view_as(own))
        return torch.cat([piece.flatten() for piece in found.values()])

    def part(self, whole: Tensor, name: str, rank: int) -> Tensor:
        """A view of what a worker's rank of tensor parallelism has."""
        dim = tp_cut(name)
        return whole if dim is None else whole.chunk(self.given.mesh.tp, dim)[rank]

    def added_in_bits(self, place: Any, given: list[Tensor]) -> Tensor:
        """place: whose errors these are"""
        code, size = self.given.local.code, given[0].numel()
        assert code is not None
        num_blocks = -(-size // (code.block * self.n)) * self.n

        def coded(key: int, own: Tensor) -> Tensor:
            own = own + self.errors.get((place, key), 0.0)
            padded = torch.nn.functional.pad(own, (0, num_blocks * code.block - size)).view(-1, code.block)
            found = code.decode(code.encode(padded), own.dtype).flatten()[:size]
            if self.given.local.error_feedback:
                self.errors[place, key] = own - found
            return found

        return coded(-1, torch.stack([coded(worker, own) for worker, own in enumerate(given)]).sum(0))

    def take(self, sent: Sent, mix: float) -> Sent:
        local = self.given.local
        for name, way in sent.mean.items():
            self.momentum[name] = local.outer_momentum * self.momentum[name] + way
            nesterov = way + local.outer_momentum * self.momentum[name]
            self.theta[name] = self.theta[name] - local.outer_lr * (nesterov if local.nesterov else self.momentum[name])
            for model in self.models:
                own = dict(model.named_parameters())[name]
                own.copy_(mix * own + (1 - mix) * self.theta[name])
        return sent


def difference(end: Mapping[str, Tensor], expected: Mapping[str, Tensor], begin: Mapping[str, Tensor]) -> float:
    assert end
    return max(
        float((value - expected[n]).detach().norm() / (expected[n] - begin[n]).detach().norm().clamp(min=1e-6))
        for n, value in end.items()
    )


def config(out: Path, local: LocalTrainingConfig = DILOCO, optim: Any = ADAMW, **options: Any) -> TrainConfig:
    return config_of(out, steps=STEPS, optim=optim, local=local, **options)


def same_as_simulated(ranks: Any, given: TrainConfig, size: int, num_workers: int, data_ranks: int) -> None:
    found: list[Found] = ranks(size).run(run, given)
    begin = begun(found)
    compare(found, Simulation(begin, given, num_workers, data_ranks).run(), begin, given)


def begun(found: list[Found]) -> dict[str, Tensor]:
    """What a run began with, also one that goes on."""
    return {name: value for each in found for name, value in each.begin.items()}


def compare(found: list[Found], simulated: Simulation, begin: Mapping[str, Tensor], given: TrainConfig) -> None:
    assert {each.worker for each in found} == set(range(simulated.n))
    for each in found:
        assert difference(each.outer, simulated.theta, begin) <= TOLERANCE
        assert difference(each.end, simulated.theta, begin) <= TOLERANCE  # the last step ends a round
        for name, value in each.momentum.items():
            torch.testing.assert_close(value, simulated.momentum[name], rtol=1e-9, atol=1e-12)
    rows = [row for row in read_metrics(given.out / "metrics.jsonl") if "outer_norm" in row]
    for row, expected in zip(rows, simulated.rows, strict=True):
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-8), name


@pytest.mark.parametrize(
    ("size", "workers", "data", "local", "optim", "options"),
    [
        (2, 2, 2, DILOCO, ADAMW, {"microbatch": 3}),
        (3, 3, 3, replace(DILOCO, start=2, nesterov=False), ADAMW, {}),
        (4, 2, 2, replace(DILOCO, every=2), ADAMW, {"mesh": MeshConfig(tp=2)}),
        (4, 2, 4, DILOCO, MUON, {"zero": 1, "mesh": MeshConfig(dp_replicate=2)}),
        (4, 2, 4, DILOCO, ADAMW, {"zero": 3, "mesh": MeshConfig(dp_replicate=2), "microbatch": 1}),
    ],
)
def test_workers_are_simulated(
    ranks, tmp_path: Path, size: int, workers: int, data: int, local: LocalTrainingConfig, optim: Any, options: dict
) -> None:
    same_as_simulated(ranks, config(tmp_path, local, optim, **options), size, workers, data)


@pytest.mark.parametrize(
    ("size", "local"),
    [
        (2, replace(DILOCO, bits=2)),
        (3, replace(DILOCO, every=2, bits=4, keep=0.01)),
        (2, replace(DILOCO, fragments=2)),
        (3, replace(DILOCO, fragments=2, overlap=2, bits=8, start=1)),
    ],
)
def test_messages_in_few_bits_and_fragments_are_simulated(
    ranks, tmp_path: Path, size: int, local: LocalTrainingConfig
) -> None:
    same_as_simulated(ranks, config(tmp_path, local), size, size, size)


@pytest.mark.parametrize(
    ("size", "local"),
    [
        (4, replace(DILOCO, bits=2)),
        pytest.param(6, replace(DILOCO, bits=4, fragments=2, overlap=1), marks=pytest.mark.soak),
        pytest.param(4, replace(DILOCO, bits=8, keep=0.02, error_feedback=False), marks=pytest.mark.soak),
    ],
)
def test_few_bits_are_simulated_where_workers_are_of_several_ranks(
    ranks, tmp_path: Path, size: int, local: LocalTrainingConfig
) -> None:
    given = config(tmp_path, local, mesh=MeshConfig(tp=2))
    same_as_simulated(ranks, given, size, size // 2, size // 2)


class Tokens:
    """A global batch of 4 rows that depends on the step alone."""

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(step)
        rows = torch.randint(61, (4, 10), generator=draw).chunk(num_ranks)[rank]
        return {"input_ids": rows[:, :-1], "targets": rows[:, 1:]}


def theta_of_decoder(given: TrainConfig) -> dict[str, Tensor]:
    with start("cpu", given.seed) as runtime:
        mesh = runtime.mesh(given.mesh, given.zero)
        parallel = parallelize(Decoder(GPT2), mesh, given, decoder_plan(GPT2, given.mesh))
        optimizer = build_optimizer(given.optim, parallel.masters)
        fit(parallel, optimizer, Tokens(), token_loss, given, runtime, weight=num_targets)
        assert isinstance(parallel.local, LocalTraining)
        return whole(parallel.local.outer)


def test_what_a_worker_s_ranks_hold_alike_stays_alike(ranks, tmp_path: Path) -> None:
    """A number's code depends on its block: what several ranks have is coded among what they all have."""
    given = config(tmp_path, replace(DILOCO, bits=2), mesh=MeshConfig(tp=2))
    first, *others = ranks(4).run(theta_of_decoder, given)
    for name, value in first.items():
        for theta in others:
            assert torch.equal(theta[name], value), name


@pytest.mark.soak
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize(("bits", "keep", "feeds_back"), [(None, None, True), (8, None, True), (2, 0.02, False)])
def test_all_messages_are_simulated(
    ranks, tmp_path: Path, fragments: int, overlap: int, bits: Any, keep: float | None, feeds_back: bool
) -> None:
    more = {"bits": bits, "keep": keep, "error_feedback": feeds_back, "mix": 0.3}
    local = replace(DILOCO, fragments=fragments, overlap=overlap, **more)
    same_as_simulated(ranks, config(tmp_path, local, MUON), 3, 3, 3)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("size", "workers", "data", "local", "optim", "options"),
    [
        (4, 2, 2, replace(DILOCO, fragments=2, overlap=1), ADAMW, {"mesh": MeshConfig(tp=2)}),
        (4, 2, 2, replace(DILOCO, fragments=2, overlap=1), ADAMW, {"mesh": MeshConfig(pp=2)}),
        (1, 1, 1, DILOCO, ADAMW, {}),
        (4, 4, 4, DILOCO, SGD, {"microbatch": 1}),
        (4, 2, 2, replace(DILOCO, start=3), ADAMW, {"mesh": MeshConfig(pp=2), "pipeline": PipelineConfig("1f1b")}),
        (4, 2, 4, DILOCO, ADAMW, {"zero": 2, "mesh": MeshConfig(dp_replicate=2), "microbatch": 1, "reduce_each": True}),
        (8, 2, 4, DILOCO, ADAMW, {"zero": 1, "mesh": MeshConfig(dp_replicate=2, tp=2), "microbatch": 1}),
        (8, 2, 4, DILOCO, ADAMW, {"zero": 3, "mesh": MeshConfig(dp_replicate=2, tp=2)}),
        (8, 2, 2, replace(DILOCO, start=3), MUON, {"mesh": MeshConfig(pp=2, tp=2)}),
    ],
)
def test_workers_of_any_mesh_are_simulated(
    ranks, tmp_path: Path, size: int, workers: int, data: int, local: LocalTrainingConfig, optim: Any, options: dict
) -> None:
    same_as_simulated(ranks, config(tmp_path, local, optim, **options), size, workers, data)


def plain(given: TrainConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return train(given, 0.3, weight=items)


@pytest.mark.parametrize(
    ("local", "optim"), [(AVERAGE, SGD), (LocalTrainingConfig(every=3, start=STEPS), ADAMW)], ids=["h1", "start"]
)
def test_where_it_is_data_parallelism(ranks, tmp_path: Path, local: LocalTrainingConfig, optim: Any) -> None:
    """Dropout draws as on one rank; `start` also clips by the norm of all workers' gradient."""
    given = config(tmp_path / "local", local, optim, microbatch=3)
    found = ranks(2).run(plain, given)
    expected = ranks(2).run(plain, replace(given, local=LocalTrainingConfig(), out=tmp_path / "plain"))[0][1]
    begin = {name: p.detach() for name, p in ranks(2).run(first_values, given)[0].items()}
    for _, end in found:
        assert difference({name: end[name] for name in begin}, expected, begin) <= TOLERANCE
    rows, others = (list(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("local", "plain"))
    for row, other in zip(rows, others, strict=True):
        assert row["round_loss"] == pytest.approx(other["loss"], rel=1e-10)


def first_values(given: TrainConfig) -> dict[str, Tensor]:
    return whole(build(given, Small(0.3)).parallel.masters)


def test_without_the_average_it_is_another_run(ranks, tmp_path: Path) -> None:
    """What the simulation holds is seen: workers that do not meet end elsewhere, and not alike."""
    given = config(tmp_path, replace(DILOCO, every=100))
    found: list[Found] = ranks(2).run(run, replace(given, stop_after=5))
    simulated = Simulation(found[0].begin, given, 2, 2).run(last=5)
    for each in found:
        own = dict(simulated.models[each.worker].named_parameters())
        assert difference(each.end, own, each.begin) <= TOLERANCE
        assert difference(each.end, dict(simulated.models[1 - each.worker].named_parameters()), each.begin) > 1e-3
        assert all(torch.equal(value, each.begin[name]) for name, value in each.outer.items())


def test_resumed_to_the_bit_within_a_round(ranks, tmp_path: Path) -> None:
    """Also with errors of few bits, and averages on their way: the first fragment's is when the run is stopped."""
    streaming = replace(DILOCO, fragments=2, overlap=2, bits=2)
    for name, local, options in (
        ("shards", replace(DILOCO, start=1), {"zero": 2, "mesh": MeshConfig(dp_replicate=1)}),
        ("few", replace(streaming, fragments=1, overlap=0, start=1), {}),
        ("streams", streaming, {}),
    ):
        given = config(tmp_path / name, local, microbatch=3, **options)
        ranks(2).run(run, replace(given, stop_after=6), 0.3)
        resumed: list[Found] = ranks(2).run(run, replace(given, resume="auto"), 0.3)
        straight: list[Found] = ranks(2).run(run, replace(given, out=tmp_path / f"{name}-straight"), 0.3)
        for one, other in zip(resumed, straight, strict=True):
            assert one.summary["loss"] == other.summary["loss"], name
            for mine, theirs in ((one.end, other.end), (one.outer, other.outer), (one.momentum, other.momentum)):
                assert mine
                assert all(torch.equal(value, theirs[key]) for key, value in mine.items()), name


def test_resumed_on_another_mesh_inside_its_workers(ranks, tmp_path: Path) -> None:
    given = config(tmp_path, zero=1, mesh=MeshConfig(dp_replicate=2))
    ranks(4).run(run, replace(given, stop_after=5))
    same_as_simulated(ranks, config(tmp_path, mesh=MeshConfig(tp=2), resume="auto"), 4, 2, 2)


TWO_OF_ONE, THREE_OF_ONE = (2, 2, 2, {}), (3, 3, 3, {})
TWO_OF_TP, ONE_OF_SHARDS = (
    (4, 2, 2, {"mesh": MeshConfig(tp=2)}),
    (2, 1, 2, {"zero": 1, "mesh": MeshConfig(dp_replicate=1)}),
)
TWO_OF_SHARDS, FOUR_OF_ONE = (4, 2, 4, {"zero": 3, "mesh": MeshConfig(dp_replicate=2)}), (4, 4, 4, {})
STREAMING = replace(DILOCO, fragments=2, overlap=2, bits=2)


def same_as_regrouped(ranks: Any, out: Path, stop: int, local: LocalTrainingConfig, before: Any, now: Any) -> None:
    size, workers, data, options = before
    given = config(out, local, **options)
    ranks(size).run(run, replace(given, stop_after=stop))
    size, others, other_data, options = now
    found: list[Found] = ranks(size).run(run, config(out, local, resume="auto", **options))
    begin = begun(found)
    simulated = Simulation(begin, given, workers, data).run(last=stop).regrouped(others, other_data)
    compare(found, simulated.run(first=stop), begin, given)


@pytest.mark.parametrize(
    ("stop", "local", "before", "now"),
    [
        (5, replace(DILOCO, bits=2), THREE_OF_ONE, TWO_OF_ONE),
        (4, STREAMING, TWO_OF_ONE, THREE_OF_ONE),
        (6, DILOCO, TWO_OF_TP, THREE_OF_ONE),
        (5, STREAMING, TWO_OF_ONE, ONE_OF_SHARDS),
    ],
)
def test_other_workers_that_go_on_are_simulated(
    ranks, tmp_path: Path, stop: int, local: LocalTrainingConfig, before: Any, now: Any
) -> None:
    """More and fewer, within a round, at its end, with averages on their way, and with other meshes inside."""
    same_as_regrouped(ranks, tmp_path, stop, local, before, now)


BETWEEN = [
    (FOUR_OF_ONE, ONE_OF_SHARDS),
    (FOUR_OF_ONE, TWO_OF_TP),
    (TWO_OF_SHARDS, THREE_OF_ONE),
    (ONE_OF_SHARDS, FOUR_OF_ONE),
    (FOUR_OF_ONE, THREE_OF_ONE),
]
UNCUT = [pair for pair in BETWEEN if TWO_OF_TP not in pair and TWO_OF_SHARDS not in pair]
"""Whose messages are of whole parameters: the simulation's blocks of few bits are of those."""


@pytest.mark.soak
@pytest.mark.parametrize("stop", [1, 3, 4, 5])
@pytest.mark.parametrize(
    ("local", "before", "now"),
    [
        *((local, *pair) for local in (replace(DILOCO, start=2), replace(STREAMING, bits=None)) for pair in BETWEEN),
        *((STREAMING, *pair) for pair in UNCUT),
    ],
)
def test_any_workers_that_go_on_are_simulated(
    ranks, tmp_path: Path, stop: int, local: LocalTrainingConfig, before: Any, now: Any
) -> None:
    same_as_regrouped(ranks, tmp_path, stop, local, before, now)


def taken_over(given: TrainConfig, into: Path) -> None:
    """What a run is that has just gone on, as a checkpoint."""
    with start("cpu", given.seed):
        state = build(given)
        mesh, saving = state.parallel.whole_mesh, CheckpointConfig(asynchronous=False)
        with closing(Checkpointer(given.out / "checkpoints", saving, mesh)) as loads:
            step = state.load(loads, None)
        with closing(Checkpointer(into, saving, mesh)) as saves:
            state.save(saves, step)


def what_theta_depends_on(path: Path, num_workers: int) -> dict[str, Tensor]:
    """name -> sum of items (theta - theta_w) in a round, and of the errors of few bits."""
    stored, found = read_full(path), {}
    for name in (name.removeprefix("outer/momentum/") for name in stored if name.startswith("outer/momentum/")):
        workers = [f"worker/{worker}/" for worker in range(num_workers)]
        ways = [stored[f"{w}rounds"][0, 0] * (stored[f"model/{name}"] - stored[f"{w}model/{name}"]) for w in workers]
        found[f"way {name}"] = torch.stack(ways).sum(0)
        found[f"error {name}"] = torch.stack([stored[f"{w}{e}{name}"] for w in workers for e in ERRORS]).sum(0)
    return found


def test_ways_and_errors_of_workers_that_are_gone_go_to_the_others(ranks, tmp_path: Path) -> None:
    given = config(tmp_path, replace(DILOCO, every=2, bits=2))
    ranks(3).run(run, replace(given, stop_after=5))
    before = what_theta_depends_on(tmp_path / "checkpoints", 3)
    ranks(2).run(taken_over, given, tmp_path / "by-2")
    after = what_theta_depends_on(tmp_path / "by-2", 2)
    for name, value in before.items():
        assert value.norm() > 1e-6, name
        assert float((after[name] - value).norm() / value.norm()) < 1e-12, name


def test_a_checkpoint_is_of_theta_and_an_evaluation_too(ranks, tmp_path: Path) -> None:
    given = config(tmp_path, replace(DILOCO, every=4), evaluate_every=3, stop_after=6)
    found: list[Found] = ranks(2).run(run, given, 0.0, True)
    simulated = Simulation(found[0].begin, given, 2, 2)
    rows = {row["step"]: row for row in read_metrics(tmp_path / "metrics.jsonl")}
    for step in (3,):  # of the first round: theta is where it began
        assert rows[step]["heldout"] == pytest.approx(held_out(simulated.theta), rel=1e-10)
    simulated.run(last=6)
    own = {name: p.detach() for name, p in simulated.models[found[0].worker].named_parameters()}
    assert difference(found[0].end, own, found[0].begin) <= TOLERANCE  # behind an evaluation its weights are its own
    names = set(inspect(tmp_path / "checkpoints" / "step-00000006").tensors)
    for name in found[0].outer:
        assert {f"model/{name}", f"outer/momentum/{name}", f"worker/1/model/{name}"} <= names
    said = ranks(2).run(refused, replace(given, local=LocalTrainingConfig(), resume="auto"))[0]
    assert "a checkpoint of 2 local workers, and this run has none; resume it with --local.every" in said
    other = replace(DILOCO, every=4, outer_momentum=0.0, fragments=2)
    said = ranks(2).run(refused, replace(given, local=other, resume="auto"))[0]
    assert "with an outer momentum and 1 fragment, and this run has no outer momentum and 2 fragments" in said
    assert said.endswith("with --local.outer-momentum 0.9 and --local.fragments 1, or begin anew with its weights")


def refused(given: TrainConfig) -> str:
    try:
        train(given)
    except UserError as error:
        return str(error)
    return ""


def held_out(at: Mapping[str, Tensor]) -> float:
    model = Small().double()
    model.load_state_dict(dict(at), strict=False)
    return float(weighted(model, Rows().batch(99, 0, 1)))


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_are_their_closed_form(ranks, tmp_path: Path, size: int) -> None:
    """A message of 5 numbers a round, the masters once, and a buffer of one number."""
    given = config(tmp_path, replace(DILOCO, every=4))
    ranks(size).run(train, given)
    elements = sum(p.numel() for p in Small().parameters())
    sent = [row.get("sent_bytes_dp_replicate") for row in read_metrics(tmp_path / "metrics.jsonl")]
    expected = wire_share("all_reduce", size) * 8 * (elements + 1 + 5)
    assert sent[3] == sent[7] == pytest.approx(expected)
    assert [n for n in sent if n is not None] == [sent[3]] * 2


def count_bytes(given: TrainConfig) -> float:
    """What a rank sends to others in a step that ends no round."""
    return train(given)[0]["communication_bytes_per_step"]


def test_a_step_within_a_round_sends_nothing(ranks, tmp_path: Path) -> None:
    assert ranks(2).run(count_bytes, config(tmp_path, replace(DILOCO, every=4))) == [0, 0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero": 1}, r"zero=1 and no mesh.dp_replicate"),
        ({"precision": "fp16"}, "precision=fp16"),
        ({"noise_scale": True}, "noise_scale"),
        ({"optim": OptimConfig("kfac")}, "optim.name=kfac"),
        ({"mesh": MeshConfig(cp=4, cp_mode="mixed", cp_ulysses=2)}, "mesh.cp_mode=mixed"),
        ({"mesh": MeshConfig(pp=2), "pipeline": PipelineConfig("2bw")}, "pipeline.schedule=2bw"),
    ],
)
def test_what_it_does_not_go_with(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"local.every=3 with {said}"):
        config_of(tmp_path, **{"local": DILOCO, **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": -1}, "local.every=-1; give a number, at least 0"),
        ({"every": 2, "start": -1}, "local.start=-1; give a number"),
        ({"every": 2, "outer_lr": 0.0}, "local.outer_lr=0.0; give a positive number"),
        ({"every": 2, "outer_momentum": 1.0}, "local.outer_momentum=1.0; give a number from 0 to below 1"),
        ({"every": 2, "bits": 2, "keep": 1.0}, "local.keep=1.0; give a share above 0 and below 1"),
        ({"every": 2, "overlap": 2}, "local.overlap=2 with local.every=2.*at most 1"),
        ({"every": 2, "fragments": 3}, "local.fragments=3 with local.every=2.*at most 2"),
        ({"every": 2, "overlap": 1, "mix": 1.0}, "local.mix=1.0; give a number"),
        ({"every": 2, "asynchronous": "hogwild"}, "local.every=2 with local.async=hogwild"),
    ],
)
def test_bad_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        LocalTrainingConfig(**options)


def test_fewer_bits_are_their_closed_form(ranks, tmp_path: Path) -> None:
    """Each rank's ways and its run of their sum, in whole blocks for each rank; 149 elements are one block of each."""
    local = replace(DILOCO, every=4, bits=2)
    ranks(2).run(train, config(tmp_path, local))
    sent = [row.get("sent_bytes_dp_replicate") for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert local.code is not None
    assert sent[3] == sent[7] == 2 * local.code.num_bytes * 2 / 2 + 8 * (1 + 5)


def test_more_fragments_than_blocks_are_refused(ranks, tmp_path: Path) -> None:
    said = ranks(2).run(refused, config(tmp_path, replace(DILOCO, every=4, fragments=3)))[0]
    assert said.startswith("local.fragments=3 and the model has 2 blocks")
    assert said.endswith("give at most 2")


def refused_average(given: TrainConfig) -> str:
    with start("cpu", given.seed) as runtime:
        state = build(given)
        average = WeightAverage(state.parallel.masters, ramp(0.9))
        try:
            fit(state.parallel, state.optimizer, Rows(), loss, given, runtime, average=average)
        except UserError as error:
            return str(error)
    return ""


def test_an_average_is_refused(ranks, tmp_path: Path) -> None:
    assert "local.every with an average of the weights" in ranks(1).run(refused_average, config(tmp_path))[0]
