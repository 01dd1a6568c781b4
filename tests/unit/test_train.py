"""The loop: skipped steps, stopping, refusals, what is recorded and when."""

import json
import math
import os
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from core.checkpoint import CheckpointConfig, Checkpointer, complete_steps
from core.config import UserError
from core.layout import full_tensor, local
from core.mesh import Zero
from core.metrics import read_metrics
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.nn.routing import MoEConfig
from core.optim.build import OptimConfig
from core.precision import LossScaleConfig
from core.runtime import start
from core.train import (
    TrainConfig,
    TrainState,
    checkpoint_path,
    fit,
    num_rows,
    open_run,
    train_step,
)
from core.train.state import MOST_SKIPPED_IN_A_ROW
from tests.support.full_disk import limited_files
from tests.support.small import Rows, Small, build, config_of, loss, train


def everything(state: TrainState) -> dict[str, Tensor]:
    """Masters, parameters and optimizer state that this rank holds."""
    found = {n: t.detach().clone() for n, t in state.tensors().items() if not n.startswith("buffer")}
    return found | {n: local(p.detach()).clone() for n, p in state.parallel.model.named_parameters()}


def step_of(state: TrainState, config: TrainConfig, step: int, spoil: float = 1.0) -> dict[str, Any]:
    """One step on two ranks; `spoil` multiplies this rank's loss."""
    batch = Rows().batch(step, dist.get_rank(), 2)
    return train_step(state, batch, lambda model, part: loss(model, part) * spoil, num_rows, config, step)


def skips(zero: Zero, precision: str) -> list[Any]:
    """A good step, one whose gradient is infinite on one rank alone, a good one."""
    config = config_of(Path("/nowhere"), zero=zero, precision=precision, loss_scale=LossScaleConfig(initial=64.0))
    state = build(config)
    step_of(state, config, 0)
    before = everything(state)
    row = step_of(state, config, 1, spoil=float("inf") if dist.get_rank() else 1.0)
    after = everything(state)
    untouched = before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    good = step_of(state, config, 2)
    unmoved = [n for n, t in everything(state).items() if t.numel() and torch.equal(after[n], t)]
    return [untouched, row["skipped_steps"], row["loss_scale"], good.get("skipped_steps"), unmoved]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_step_with_an_infinite_gradient_changes_nothing_and_is_counted(ranks, zero: Zero, precision: str) -> None:
    for untouched, skipped, scale, still_skipped, unmoved in ranks(2).run(skips, zero, precision):
        assert untouched
        assert (skipped, still_skipped) == (1, 1)
        assert scale == (32.0 if precision == "fp16" else 1.0)
        # fp16 resolves some of these steps only in the masters.
        assert not [n for n in unmoved if n.startswith(("model/", "optim/"))]


class HostReads(TorchFunctionMode):
    """Where Python reads what a tensor holds, and copies to a device for which it waits."""

    READS = ("tolist", "item", "__float__", "__int__", "__bool__", "__index__", "cpu", "numpy", "nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        waits = name == "to" and any(isinstance(a, torch.device) for a in args) and not kwargs.get("non_blocking")
        if name in self.READS or waits:
            self.found.append(name)
        return func(*args, **kwargs)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_waits_for_the_device_once(precision: str) -> None:
    config = config_of(Path("/nowhere"), precision=precision, microbatch=2)
    with start("cpu"):
        state = build(config)
        step_alone(state, config, 0)
        with HostReads() as reads:
            figures = step_alone(state, config, 1)
    assert reads.found == ["tolist"]
    assert math.isfinite(figures["grad_norm"])
    assert figures["grad_norm"] > 0


def decoder_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["input_ids"], targets=batch["targets"]) / batch["targets"].numel()


def step_alone(state: TrainState, config: TrainConfig, step: int) -> dict[str, Any]:
    return train_step(state, Rows().batch(step, 0, 1), loss, num_rows, config, step)


def test_a_step_of_experts_waits_once(tmp_path: Path) -> None:
    config = config_of(tmp_path, precision="fp32")
    moe = MoEConfig(4, router="switch")
    model = DecoderConfig(vocab_size=41, dim=16, num_layers=2, num_heads=2, ffn_dim=64, max_length=9, moe=moe)
    ids = torch.randint(41, (4, 9), generator=torch.Generator().manual_seed(1))
    decoder = Decoder(model)
    initialise(decoder, 0)
    with start("cpu"):
        state = build(config, decoder)
        batch = {"input_ids": ids, "targets": ids}
        with HostReads() as reads, patch("core.nn.moe.COUNTS_ROWS", ()):
            figures = train_step(state, batch, decoder_loss, num_rows, config, 0)
    # One product an expert, and so a wait for each of their matrices, is what there is without bf16 on a GPU.
    products = 2 * 2  # matrices of each layer
    figures_read = ["tolist", "__float__", "tolist"]  # of what was read, on the host
    assert reads.found == [*["tolist"] * (products + 1), *figures_read]
    assert len(figures["moe_load"]) == 2
    assert sum(figures["moe_load"][0]) <= ids.numel()


def test_endless_overflow_is_an_error(tmp_path: Path) -> None:
    overflow = LossScaleConfig(initial=2.0**30, minimum=2.0**30)
    with pytest.raises(UserError, match=f"not finite in {MOST_SKIPPED_IN_A_ROW} steps in a row .*lower optim.lr"):
        train(config_of(tmp_path, steps=50, precision="fp16", loss_scale=overflow))


def test_the_first_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    """By a line that names the step and what to lower; the steps before it are in the record."""
    config = config_of(tmp_path, steps=50)
    config = replace(config, optim=replace(config.optim, lr=1e308))
    with pytest.raises(UserError, match=r"the loss is (nan|inf) at step 2; lower optim\.lr \(now 1e\+308\)") as caught:
        train(config)
    assert "\n" not in str(caught.value)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_full_disk_at_the_start_is_one_line(tmp_path: Path) -> None:
    with start("cpu") as runtime:
        with (
            limited_files(1000),
            pytest.raises(UserError, match=r"config\.json.*: File too large; free space"),
            open_run(config_of(tmp_path / "run"), runtime),
        ):
            pass
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
        with open_run(config_of(tmp_path / "run"), runtime):
            assert json.loads((tmp_path / "run" / "config.json").read_text())["steps"]


def test_a_run_of_skipped_steps_alone_can_be_resumed(tmp_path: Path) -> None:
    overflow = LossScaleConfig(initial=2.0**30)
    config = config_of(tmp_path, steps=30, stop_after=2, precision="fp16", loss_scale=overflow)
    assert train(config)[0]["skipped_steps"] == 2
    summary, resumed = train(replace(config, stop_after=None, resume="auto"))
    assert 2 < summary["skipped_steps"] < 20
    _, straight = train(replace(config, stop_after=None, out=tmp_path / "straight"))
    assert all(torch.equal(resumed[n], straight[n]) for n in straight)


def test_what_a_run_leaves(tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=5, evaluate_every=2, checkpoint=CheckpointConfig(every=2, keep=5))
    summary, _ = train(config, evaluate=lambda model: {"heldout": 1.5})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5]
    assert [r.get("heldout") for r in rows] == [None, 1.5, None, 1.5, None]
    assert all({"loss", "lr", "grad_norm", "tokens_per_s", "step_s"} <= r.keys() for r in rows)
    assert list(complete_steps(tmp_path / "checkpoints")) == [2, 4, 5]
    assert summary["heldout"] == 1.5
    assert (summary["status"], summary["step"], summary["num_ranks"]) == ("complete", 5, 1)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["loss"] == summary["loss"] == rows[-1]["loss"]


def test_accumulated_loss_is_the_weighted_mean(tmp_path: Path) -> None:
    """8 rows as 3 + 3 + 2, weighted by rows, give the loss and the step of all 8 at once."""
    whole = train(config_of(tmp_path / "whole", steps=3))
    parts = train(config_of(tmp_path / "parts", steps=3, microbatch=3))
    assert parts[0]["loss"] == pytest.approx(whole[0]["loss"], rel=1e-13)
    assert (whole[1].pop("seen"), parts[1].pop("seen")) == (3, 9)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-12, atol=1e-13)


def test_evaluation_restores_the_mode_of_every_module(tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=2, evaluate_every=1)
    seen = []
    with start("cpu") as runtime:
        state = build(config)
        model = state.parallel.model
        model.get_submodule("blocks.0").eval()
        evaluate = lambda m: seen.append([m.training, torch.is_grad_enabled()]) or {}  # noqa: E731
        fit(state.parallel, state.optimizer, Rows(), loss, config, runtime, evaluate=evaluate)
    assert seen == [[False, False]] * 2
    assert model.training
    assert not model.get_submodule("blocks.0").training
    assert not model.get_submodule("blocks.0.dropout").training


def test_a_fresh_run_does_not_write_over_an_earlier_one(tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=2)
    train(config)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"already holds a run \(step 2\); add --resume to continue it, or"):
        train(config)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_resume_goes_on_from_a_run_a_checkpoint_or_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path / "a", steps=4, checkpoint=CheckpointConfig(every=2))
    _, straight = train(replace(config, resume="auto"))  # nothing there: from the beginning
    folder = tmp_path / "a"
    assert checkpoint_path(folder) == checkpoint_path(folder / "checkpoints") == folder / "checkpoints/step-00000004"
    for number, path in enumerate((folder / "checkpoints/step-00000002", folder)):
        out = tmp_path / f"b{number}"
        _, found = train(replace(config, out=out, resume=str(path)))
        assert all(torch.equal(found[n], straight[n]) for n in straight)
        assert max(complete_steps(out / "checkpoints")) == 4
    with pytest.raises(UserError, match="nowhere"):
        train(replace(config, out=tmp_path / "c", resume=str(tmp_path / "nowhere")))


def test_stop_after_is_a_stop_like_any_other(tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=5, stop_after=3, evaluate_every=0)
    summary, _ = train(config, evaluate=lambda model: {"heldout": 1.0})
    assert (summary["status"], summary["step"]) == ("stopped", 3)
    assert "heldout" not in summary
    assert list(complete_steps(tmp_path / "checkpoints")) == [3]


class Signalling(Rows):
    """Rows that, on one rank, ask the process to stop while step 2 is under way."""

    def __init__(self, rank: int, at: int = 1):
        self.rank, self.at = rank, at

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        batch = super().batch(step, rank, num_ranks)
        return batch | {"stop": torch.full((len(batch["x"]), 1), float(step == self.at and rank == self.rank))}


def signalled_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if batch["stop"].any():
        os.kill(os.getpid(), signal.SIGTERM)
    return loss(model, batch)


def stopped_by_one(out: Path, every: int) -> tuple[int, str, list[int], bool]:
    config = config_of(out, steps=9, checkpoint=CheckpointConfig(every=every))
    handler = signal.getsignal(signal.SIGTERM)
    with start("cpu") as runtime:
        state = build(config)
        summary = fit(state.parallel, state.optimizer, Signalling(rank=1), signalled_loss, config, runtime)
    restored = signal.getsignal(signal.SIGTERM) == handler
    return summary["step"], summary["status"], list(complete_steps(out / "checkpoints")), restored


@pytest.mark.parametrize("every", [0, 2])
def test_a_signal_on_one_rank_stops_all_after_the_same_step(ranks, tmp_path: Path, every: int) -> None:
    # The step in which the signal comes may have been saved already when they leave.
    assert ranks(2).run(stopped_by_one, tmp_path, every) == [(2, "stopped", [2], True)] * 2


def test_the_model_and_compiled_blocks_train_alike(tmp_path: Path) -> None:
    """Compiles two blocks, which takes most of this file's time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = train(config_of(tmp_path / "compiled", steps=2, compile=True))
    eager = train(config_of(tmp_path / "eager", steps=2))
    assert compiled[0]["loss"] == pytest.approx(eager[0]["loss"], rel=1e-12)
    torch.testing.assert_close(compiled[1], eager[1], rtol=1e-9, atol=1e-11)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_rates_and_figures_leave_out_what_is_between_the_steps(tmp_path: Path) -> None:
    """Time that an evaluation takes is no training time."""
    config = config_of(tmp_path, steps=3, evaluate_every=1)
    train(config, evaluate=lambda model: time.sleep(0.5) or {})
    assert max(row["step_s"] for row in read_metrics(tmp_path / "metrics.jsonl")) < 0.5


@pytest.mark.parametrize("option", ["steps", "stop_after", "microbatch"])
def test_numbers_that_make_no_run_are_refused(option: str) -> None:
    with pytest.raises(UserError, match=f"{option}=0; give a positive number"):
        TrainConfig(**{option: 0})


def test_buffers_are_saved_and_loaded(tmp_path: Path) -> None:
    train(config_of(tmp_path, steps=4, stop_after=3))
    assert float(train(config_of(tmp_path, steps=4, resume="auto"))[1]["seen"]) == 4


@pytest.mark.parametrize("zero", [0, 3])
def test_frozen_parameters_are_saved_and_loaded(ranks, tmp_path: Path, zero: Zero) -> None:
    saved, loaded = ranks(2).run(frozen, tmp_path, zero)[1]
    assert torch.equal(saved, loaded)


def frozen(folder: Path, zero: Zero) -> tuple[Tensor, Tensor]:
    """A frozen weight as it was saved, and as a model with other weights finds it after loading."""
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = Small()
        model.head.weight.requires_grad_(False)
        config = config_of(folder, zero=zero)
        with start("cpu", config.seed) as runtime:
            state = build(config, model)
            checkpointer = Checkpointer(folder, config.checkpoint, runtime.mesh(config.mesh, zero))
            state.save(checkpointer, 1) if seed == 1 else state.load(checkpointer, None)
            checkpointer.close()
        weights.append(full_tensor(state.parallel.model.get_parameter("head.weight")).clone())
    return weights[0], weights[1]


def test_resuming_a_finished_run_leaves_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path, steps=2)
    summary, _ = train(config)
    before = (tmp_path / "summary.json").read_bytes()
    again, _ = train(replace(config, resume="auto"))
    assert (tmp_path / "summary.json").read_bytes() == before
    assert again["loss"] == summary["loss"]
    assert "nothing to do" in capsys.readouterr().out


def test_each_group_keeps_its_own_learning_rate(tmp_path: Path) -> None:
    """Under the schedule, and when the run goes on from a checkpoint."""
    config = config_of(tmp_path, steps=4, checkpoint=CheckpointConfig(every=2))

    def run(config: TrainConfig) -> list[float]:
        with start("cpu", config.seed) as runtime:
            state = build(config)
            head = [m for n, m in state.parallel.masters.items() if n.startswith("head")]
            body = [m for n, m in state.parallel.masters.items() if not n.startswith("head")]
            optimizer = torch.optim.SGD([{"params": head, "lr": 1e-3}, {"params": body, "lr": 1e-5}])
            fit(state.parallel, optimizer, Rows(), loss, config, runtime)
            return [group["lr"] for group in optimizer.param_groups]

    assert run(replace(config, stop_after=2)) == [1e-3, 1e-5]  # the end of the warm-up
    last = run(replace(config, resume="auto"))
    assert last[0] == pytest.approx(100 * last[1], rel=1e-12)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["lr"] for row in rows] == pytest.approx([5e-4, 1e-3, 1e-3, 0.55e-3])
    assert [row["lr_1"] for row in rows] == pytest.approx([5e-6, 1e-5, 1e-5, 0.55e-5])


class Killed(BaseException):
    """In the place of kill -9."""


@pytest.mark.parametrize("options", [{}, {"noise_scale": True, "microbatch": 4}])
def test_a_run_that_is_killed_in_its_last_evaluation_comes_to_its_end(tmp_path: Path, options: dict[str, Any]) -> None:
    """Behind its last checkpoint, when the summary is still that of an earlier stop: a resume does what is left."""
    config = config_of(tmp_path, steps=4, **options)
    train(replace(config, stop_after=2))

    def killed(model: nn.Module) -> dict[str, float]:
        raise Killed

    with pytest.raises(Killed):
        train(replace(config, resume="auto"), evaluate=killed)
    summary, _ = train(replace(config, resume="auto"), evaluate=lambda model: {"heldout": 1.5})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert (summary["status"], summary["step"], summary["heldout"]) == ("complete", 4, 1.5)
    assert summary["loss"] == rows[-1]["loss"]
    before = (tmp_path / "summary.json").read_bytes()
    again, _ = train(replace(config, resume="auto"), evaluate=killed)
    assert (tmp_path / "summary.json").read_bytes() == before
    assert again["heldout"] == 1.5


def test_a_stop_that_becomes_the_end_is_one(tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=4)
    train(replace(config, stop_after=2))
    summary, _ = train(replace(config, steps=2, resume="auto"), evaluate=lambda model: {"heldout": 1.5})
    assert (summary["status"], summary["step"], summary["heldout"]) == ("complete", 2, 1.5)


def test_a_run_that_is_refused_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    """What reads config.json, such as an export, needs it to be that of the checkpoints."""

    def opened(config: TrainConfig) -> None:
        with start("cpu") as runtime, open_run(config, runtime):
            train(config)

    config = config_of(tmp_path, steps=2)
    opened(config)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(UserError, match="lacks optim/momentum_buffer"):
        opened(replace(config, steps=3, resume="auto", optim=OptimConfig("sgd")))
    assert (tmp_path / "config.json").read_bytes() == before
    opened(replace(config, steps=3, resume="auto"))
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 3


def test_a_checkpoint_of_elsewhere_does_not_write_over_a_run(tmp_path: Path) -> None:
    """Steps that come before the folder's last one would be there beside it, and the next resume goes on from that."""
    config = config_of(tmp_path / "a", steps=4, checkpoint=CheckpointConfig(every=2))
    train(config)
    train(replace(config, out=tmp_path / "b", steps=3))
    checkpoints = tmp_path / "a" / "checkpoints"
    for path in (tmp_path / "b", checkpoints / "step-00000002"):
        before = (tmp_path / "a" / "metrics.jsonl").read_bytes()
        with pytest.raises(
            UserError, match=r"a already holds a run \(step 4\).*give --resume alone .* or another --out"
        ):
            train(replace(config, steps=6, resume=str(path)))
        assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == before
        assert list(complete_steps(checkpoints)) == [2, 4]
    for steps, path in ((6, tmp_path / "a"), (8, checkpoints / "step-00000006")):
        train(replace(config, steps=steps, resume=str(path)))
        assert max(complete_steps(checkpoints)) == steps


def test_an_evaluation_that_is_due_where_a_run_stops_is_made(tmp_path: Path) -> None:
    """The run that goes on from there begins behind it."""
    config = config_of(tmp_path, steps=5, stop_after=2, evaluate_every=2)
    for stop in (2, None):
        train(replace(config, stop_after=stop, resume="auto"), evaluate=lambda model: {"heldout": 1.5})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row.get("heldout") for row in rows] == [None, 1.5, None, 1.5, None]
