"""The plan of a training run: the bytes that the run's own step takes, before it runs."""

import json
import re
from dataclasses import replace

import pytest

from apps.fold import plan
from apps.fold.train import main as train
from apps.fold.training.config import _OWN_MODELS, model_config, resolved_mesh
from apps.fold.training.plan import FoldTrainPlanConfig, recipes, step_of
from apps.fold.training.recipes import RECIPES
from benchmarks import fold_training
from core.config import UserError
from core.estimate import StepEstimate
from tests.support.fold import one_block

TINY = ("--recipe", "debug", "--max-msa", "1", "--max-extra-msa", "1", "--data.crop", "20", "--average", "None")
TINY += ("--num-recycles", "0")


@pytest.fixture(autouse=True)
def a_block_alone(monkeypatch) -> None:
    monkeypatch.setitem(_OWN_MODELS, "debug", one_block)


def test_a_plan_says_what_a_run_takes(tmp_path, capsys) -> None:
    """Of chains without alignments, of which the crop is shorter than each."""
    more = ("--precision", "bf16", "--recompute.mode", "full")
    more += ("--data.global-batch", "1", "--data.validation", "None")
    words = [*TINY, *more, "--optim.schedule.warmup-steps", "0"]
    assert train([*words, "--steps", "2", "--out", str(tmp_path / "run"), "--device", "cpu"]) == 0
    measured = json.loads((tmp_path / "run" / "summary.json").read_text())["device_peak_bytes"]
    capsys.readouterr()
    assert plan.main([*words, "--memory", f"{1.02 * measured / 2**20}MiB"]) == 0
    said = capsys.readouterr().out
    [peak] = re.findall(r"peak \(\w+\) +│ +([\d.]+) MiB", said)
    assert float(peak) * 2**20 == pytest.approx(measured, rel=0.02)
    assert "the plan is the same without --data.validation, --optim.schedule.warmup-steps" in " ".join(said.split())


def test_every_recipe_is_planned_as_it_trains() -> None:
    assert recipes().keys() == RECIPES.keys()
    for name, recipe in recipes().items():
        planned, config = recipe(), RECIPES[name]()
        assert isinstance(planned, FoldTrainPlanConfig)
        assert all(getattr(planned, field) == value for field, value in vars(config).items())


def test_ranks_that_share_a_chain(capsys) -> None:
    """By `fold train --plan`: messages over their axis, and what all ranks compute in a second."""
    words = [*TINY, "--data.global-batch", "2", "--gpu", "A100", "--nproc", "4", "--axial", "2"]
    assert train([*words, "--plan", "--max-msa", "2", "--max-extra-msa", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "dp_replicate=2 x axial=2" in said
    assert "all_to_all over tp" in said
    assert "PFLOP/s of all 4 ranks" in said
    with pytest.raises(UserError, match=r"axial=2 with max_msa=1: there are more ranks than rows"):
        plan.main(words)


def test_the_published_run_is_what_its_steps_make() -> None:
    """67.5 hours, by what was printed of both phases; a figure that was copied wrongly is seen."""
    assert fold_training.check_arithmetic() == pytest.approx(67.5, abs=0.05)
    first, second = fold_training.PHASES
    assert (first.steps, second.steps) == (78_125, 11_719)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_of_several_keeps_its_share(ranks: int) -> None:
    """Of what a block's forward leaves, and of the fullest moment, an n-th and 15 % more: released widths, crop 256."""
    one, several = (_step_of_released(axial) for axial in (1, ranks))
    limit = 1 / ranks + 0.15
    assert several.activations_bytes <= limit * one.activations_bytes
    fixed = one.parameters_bytes + one.gradients_bytes + one.optimizer_bytes
    assert several.phases["backward"] - fixed <= limit * (one.phases["backward"] - fixed)


def _step_of_released(axial: int) -> StepEstimate:
    config = replace(recipes()["initial_training"](), axial=axial, nproc=axial, gpu="A100")
    config = replace(config, data=replace(config.data, global_batch=1))
    return step_of(config, resolved_mesh(config), model_config(config), config.speed, 1)


def test_ranks_a_machine_and_a_budget(capsys) -> None:
    words = [*TINY, "--nproc", "2", "--gpu", "A100", "--steps", "1000", "--optim.lr", "0.5"]
    with pytest.raises(UserError, match=r"the run needs .* per rank, the device has 1 MiB; try --recompute\.mode full"):
        plan.main([*words, "--zero", "3", "--memory", "1MiB"])
    said = capsys.readouterr().out
    assert "2 ranks" in said
    assert "all_gather over dp_shard" in said
    assert "1,000 steps in" in said
    assert plan.main([*words, "--gemini.budget", "40MB"]) == 0
    assert "the smallest budget is" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"does not divide over 2 data-parallel ranks"):
        plan.main([*words, "--data.global-batch", "3"])
    with pytest.raises(UserError, match=r"has templates; give --data\.templates"):
        plan.main([*words, "--model", "model_1"])
