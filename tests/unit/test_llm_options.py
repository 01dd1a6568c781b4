"""Every option of `llm pretrain` is read by a run, or refused where a run would not read it."""

import pytest

from apps.llm import pretrain
from apps.llm.config import check_combination
from apps.llm.recipes import RECIPES
from core.config import UserError, parse
from tests.support.options import recorded, unread

BASE = ["--recipe", "debug", "--optim.schedule.warmup_steps", "0"]
# What a run of one rank in fp32 on the standard library has no use for, with a value other than the default.
REFUSED = {
    "data.completion_field": "answer",
    "data.prompt_field": "question",
    "data.ramp.increment": "2",
    "data.ramp.steps": "2",
    "data.vocab_size": "999",
    "gemini.policy": "cpu",
    "gemini.trace": "step.png",
    "loss_scale.growth_interval": "7",
    "loss_scale.initial": "128",
    "loss_scale.minimum": "2",
    "mesh.cp_ulysses": "2",
    "mesh.tp_depth": "2",
    "model.moe.balance_weight": "0.3",
    "model.moe.capacity_factor": "3",
    "model.moe.every": "2",
    "model.moe.experts_per_token": "1",
    "model.moe.jitter": "0.3",
    "model.moe.router": "switch",
    "model.moe.second_expert": "always",
    "model.moe.z_weight": "0.3",
    "model.rope_theta": "100",
    "optim.beta1": "0.3",
    "optim.beta2_decay": "-0.3",
    "optim.convention": "paper",
    "optim.d": "2",
    "optim.eps2": "0.01",
    "optim.factored": "largest",
    "optim.max_norm": "3",
    "optim.momentum": "0.3",
    "optim.momentum_format": "bf16",
    "optim.relative_step": "True",
    "optim.scale_parameter": "True",
    "optim.schedule.base_batch": "99",
    "optim.schedule.decay": "0.5",
    "optim.trust": "0.3",
    "optim.warmup_init": "True",
    "pipeline.chunks": "3",
    "pipeline.cost": "measured",
    "pipeline.microbatches": "3",
    "pipeline.schedule": "gpipe",
    "pipeline.split": "1 2",
    "recompute.every": "2",
}
ELSEWHERE = {"model.rope_scaling"}  # a group of its own, which needs rotary positions


def check(name: str, value: str) -> None:
    check_combination(parse(RECIPES, [*BASE, f"--{name}", *value.split()], "llm pretrain", default="debug"))


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_the_run_would_not_read_is_refused_by_name(name):
    said = "pipeline options" if name.startswith("pipeline.") else name.rpartition(".")[2]
    with pytest.raises(UserError, match=said):
        check(name, REFUSED[name])


@pytest.mark.parametrize("option", ["format=jsonl", "text_field=body", "pairs", "suffixes=.txt"])
def test_the_standard_library_is_read_as_it_is(option):
    with pytest.raises(UserError, match=rf"--data\.{option.partition('=')[0]} with data.path=stdlib"):
        parse(RECIPES, ["--recipe", "debug", "--data.path", "stdlib", f"--data.{option}"], "llm pretrain", "debug")


def test_a_run_reads_every_other_option(tmp_path):
    config = parse(RECIPES, BASE, "llm pretrain", default="debug")
    with recorded(config) as read:
        assert pretrain.main([*BASE, "--steps", "2", "--out", str(tmp_path / "run")]) == 0
    assert set(unread(config, read)) - ELSEWHERE <= set(REFUSED)


def test_what_a_recipe_gives_and_the_run_does_not_read_is_no_mistake():
    """The user typed neither of the two."""
    config = parse(RECIPES, ["--recipe", "gpt2_124m", "--data.tokenizer", "byte"], "llm pretrain", default="debug")
    assert config.data.vocab_size != 8192
    with pytest.raises(UserError, match=r"--data\.vocab_size with data\.tokenizer=byte"):
        parse(RECIPES, [*BASE, "--data.vocab-size=999"], "llm pretrain", default="debug")
    with pytest.raises(UserError, match=r"--data\.pairs with data\.path=stdlib"):
        parse(RECIPES, [*BASE, "--data.path", "stdlib", "--data.no-pairs"], "llm pretrain", default="debug")


def test_what_nobody_reads_is_seen():
    config = RECIPES["debug"]()
    with recorded(config) as read:
        assert config.optim.name == "adamw"
        repr(config), config == config
    assert read == {"optim", "optim.name"}
    assert "seed" in unread(config, read)
