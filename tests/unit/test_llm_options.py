"""Every option of the llm commands is read by a run, or refused where a run would not read it."""

import concurrent
import json
import re
from dataclasses import is_dataclass
from pathlib import Path
from unittest import mock

import pytest
import tyro
from transformers import AutoConfig, AutoModelForCausalLM

from apps.llm import plan
from apps.llm.__main__ import APP
from apps.llm.recipes import RECIPES
from core.config import UserError, option, option_names, parse
from core.data import RampConfig
from core.models.decoder import Decoder, DecoderConfig, RopeScaling
from core.models.pretrained import save_pretrained
from core.optim.build import OPTIMIZERS
from tests.support.options import TRAINING, Probe, another, hint_of, options_of, recorded, replaced
from tests.unit.test_llm_scaling import a_run

BASE = ["--recipe", "debug", "--optim.schedule.warmup-steps", "0"]
TEXT = ["--data.path", str(Path(concurrent.__file__).parent), "--data.heldout-fraction", "0.3"]
SMALLER = ["--model.num-layers", "2", *TEXT]
"""What a run of the recipe may be, so that it takes a moment."""
COMMANDS = {
    "pretrain": ["--steps 1", "--steps 1 --gemini.budget 60MB"],
    "finetune": ["--steps 1 --data.global-batch 2 --data.sequence-length 32"],
    "evaluate": ["", "--split heldout"],
    "generate": ["--max-new-tokens 2"],
    "export": [""],
    "tokenize": [""],
    "profile": ["", "--mode eval", "--json --draw TMP/step.png"],
    "plan": [
        "",
        "--gpu A100 --memory 80GiB",
        "--gpu A100 --gemini.budget 60MB",
        "--mesh.pp 2 --nproc 2 --pipeline.schedule interleaved --timeline TMP/step.png",
        "--gpus 2 --gpu A100 --mesh.pp 2",
    ],
    "scaling": ["", "--json --budget 1e9 --draw TMP/law.png"],
}
"""command -> words of each of its modes"""
VALUES = TRAINING | {
    "batch": 12,
    "data.completion_field": "answer",
    "data.prompt_field": "question",
    "data.ramp.increment": 2,
    "data.ramp.start": RampConfig(1, 2, 1),
    "data.ramp.steps": 2,
    "data.vocab_size": 999,
    "disk_gb_s": (3.0, 2.0),
    "draw": Path("plans.png"),
    "tokens": 1e6,
    "model.rope_scaling": RopeScaling(),
    "model.family": "opt",
    "model.moe.router": "switch",
    "model.moe.experts_per_token": 1,
    "model.moe.capacity_factor": 3.0,
    "model.moe.balance_weight": 0.3,
    "model.moe.every": 2,
    "model.moe.jitter": 0.3,
    "model.moe.second_expert": "always",
    "model.moe.z_weight": 0.3,
}
OF_A_PLAN = VALUES | {
    "device": "cpu",
    "model.activation": "relu",
    "optim.momentum": 0.0,
    "optim.max_dim": 2,
    "optim.rank": 2,
}
OF_A_PLAN |= {"optim.whole": ("embedding",), "optim.max_preconditioner_dim": 16, "optim.method": "ekfac"}


SMALL = DecoderConfig(vocab_size=37, dim=16, num_layers=2, num_heads=2, ffn_dim=24, max_length=16)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("llm") / "run"
    assert APP.dispatch(["pretrain", *BASE, *SMALLER, "--steps", "1", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of runs to which a law can be fitted."""
    folder = tmp_path_factory.mktemp("runs")
    return [a_run(folder / f"{dim}-{steps}", dim, steps) for dim in (8, 16, 32) for steps in (3, 7)] + [
        a_run(folder / "32-10", 32, 10)
    ]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"def number_{number}():\n    return {number}\n" * 9)
    return folder


@pytest.mark.parametrize(("command", "mode"), [(c, mode) for c, modes in COMMANDS.items() for mode in modes])
def test_an_option_is_obeyed_or_refused(command, mode, run, runs, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {
        "pretrain": [*BASE, *SMALLER],
        "finetune": ["--model", str(run), "--data.path", str(texts), "--optim.schedule.warmup-steps", "0"],
        "evaluate": ["--model", str(run), "--data.path", str(texts)],
        "generate": ["--model", str(run)],
        "export": ["--model", str(run), "--out", str(tmp_path / "hf")],
        "tokenize": ["--data.path", str(texts), "--data.tokenizer", "byte"],
        "profile": ["--model", str(run), "--sequence-length", "8"],
        "plan": BASE,
        "scaling": ["--runs", *map(str, runs), "--samples", "20"],
    }[command]
    probe = Probe(APP.dispatch, [command, *given, *mode.replace("TMP", str(tmp_path)).split()], VALUES)
    if command == "plan":
        probe.ignored, probe.held = plan.without_effect(probe.config()), plan.VALUES_ALONE
    probe.check()


def test_a_plan_takes_the_shape_of_a_folder(tmp_path, capsys):
    save_pretrained(Decoder(SMALL), SMALL, tmp_path)
    assert APP.dispatch(["plan", *BASE, "--model", str(tmp_path), "--data.sequence-length", "8"]) == 0
    assert f"{sum(p.numel() for p in Decoder(SMALL).parameters()):,} parameters" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--model\.dim beside --model: the shape is that of the folder; leave it out"):
        APP.dispatch(["plan", *BASE, "--model", str(tmp_path), "--model.dim", "32"])


def test_a_plan_says_what_it_is_the_same_without(capsys):
    assert APP.dispatch(["plan", *BASE, "--seed", "3", "--no-compile", "data.path=stdlib"]) == 0
    assert "the plan is the same without --compile, --data.path, --optim.schedule.warmup-steps, --seed\n" in (
        capsys.readouterr().out
    )


ALIKE = {
    "compile": "with a budget the compiled step is traced, which differs where blocks are larger",
    "data.ramp.start": "steps as short as these take no time that is printed",
    "mesh.dp_replicate": "1 is what it is without",
    "mesh.dp_shard": "1 is what it is without",
    "objective": "clm is what the model of the recipe is for",
    "optim.factored": "of a matrix the largest two dims are the last two",
}
"""Options that the plans below are rightly the same with, and why."""
NOT_OF_GEMINI = ("data.", "model.", "checkpoint.", "log.")


@pytest.mark.parametrize(
    ("mode", "probed"),
    [
        ("--nproc 2", lambda name: True),
        ("--mesh.pp 2 --nproc 2 --pipeline.schedule interleaved --model.moe.num-experts 4", lambda name: True),
        *((f"--optim.name {name}", lambda name: name.startswith("optim.")) for name in OPTIMIZERS),
        ("--gemini.budget 22MB --nproc 2 --zero 3", lambda name: name.startswith("gemini.")),
        pytest.param("--gpus 2 --mesh.pp 2", lambda name: True, marks=pytest.mark.soak),
        pytest.param(
            *("--gemini.budget 22MB --nproc 2 --zero 3", lambda name: not name.startswith(NOT_OF_GEMINI)),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_each_option_changes_a_plan_or_is_told_to_be_without_effect_or_refused(
    mode, probed, capsys, tmp_path, monkeypatch
):
    """Outputs are compared: that an option is read does not say that anything follows from it."""
    monkeypatch.chdir(tmp_path)  # --timeline and --gemini.figure write there
    words = ["plan", "--recipe", "debug", "--gpu", "A100", *mode.split()]
    config = options_of(APP.dispatch, words)

    def printed(name=None):
        try:
            if name is None:
                assert not APP.dispatch(words)
                return capsys.readouterr().out
            value = OF_A_PLAN[name] if name in OF_A_PLAN else another(name, *hint_of(config, name))
            if value == hint_of(config, name)[1]:  # rmsprop has no momentum by itself
                value = another(name, *hint_of(config, name))
            group = name.rpartition(".")[0]
            whole = is_dataclass(value) and isinstance(value, type(hint_of(config, group)[1]))
            changed = replaced(config, group if whole else name, value)
            with mock.patch.object(tyro, "cli", return_value=changed):
                assert not APP.dispatch([*words, f"{option(name)}={value}"])
            return capsys.readouterr().out
        except UserError as error:
            return str(error)

    before = printed()
    alike = [n for n in option_names(config) if n not in ALIKE and probed(n) and printed(n) == before]
    assert not alike


@pytest.mark.parametrize("more", [[], ["--gemini.budget", "60MB"]])
def test_a_plan_counts_the_steps_until_the_stop_and_the_smaller_batches_before(more, capsys):
    words = ["plan", *BASE, "--gpu", "A100", *more, "--data.global-batch", "24", "--microbatch", "1"]

    def seconds(*others):
        assert APP.dispatch([*words, "--steps", "9000000", *others]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        number, unit = re.search(r"(?:steps in|at least) ([\d.,]+) (\w+)", printed).groups()
        return float(number.replace(",", "")) * {"s": 1, "minutes": 60, "hours": 3600, "days": 86400}[unit]

    whole = seconds()
    assert seconds("--stop-after", "4500000") == pytest.approx(whole / 2, rel=0.05)
    ramp = ("--data.ramp.start", "12", "--data.ramp.steps", "9000000", "--data.ramp.increment", "12")
    assert 0.45 * whole < seconds(*ramp) < 0.7 * whole


def test_pairs_that_are_left_out_are_counted(run, tmp_path, capsys):
    pairs = tmp_path / "pairs.jsonl"
    texts = ("1", "2" * 200, "3", "4" * 200, "5")
    pairs.write_text("".join(json.dumps({"prompt": "a", "completion": text}) + "\n" for text in texts))
    words = ["finetune", "--model", str(run), "--data.path", str(pairs), "--data.pairs", "--data.heldout-fraction", "0"]
    words += ["--data.tokenizer", "byte", "--data.sequence-length", "32", "--data.global-batch", "2", "--steps", "1"]
    assert APP.dispatch([*words, "--data.on-error", "skip", "--no-hf", "--out", str(tmp_path / "run")]) == 0
    assert "skipped 2 pairs: longer than a sequence of 32 tokens\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["finetune", "evaluate"])
def test_a_tokenizer_of_ones_own_corpus_is_refused_beside_a_model(command, run):
    with pytest.raises(
        UserError, match=r"--data\.tokenizer bpe beside --model, whose tokenizer is taken; give byte or a"
    ):
        APP.dispatch(
            [command, "--model", str(run), *TEXT[:2], "--data.sequence-length", "32", "--data.tokenizer", "bpe"]
        )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--temperature -1", "temperature=-1.0; give a number >= 0"),
        ("--top-k 0", "top_k=0; give a number of tokens"),
        ("--top-p 0", "top_p=0.0; give a probability above 0"),
        ("--top-p 1.5", "top_p=1.5; give a probability above 0"),
        ("--temperature 0 --top-k 5", "--top-k with temperature=0, which takes the likeliest token"),
        ("--temperature 0 --num-samples 2", "--num-samples with temperature=0"),
    ],
)
def test_what_draws_no_token_is_refused(given, said, run):
    with pytest.raises(UserError, match=re.escape(said)):
        APP.dispatch(["generate", "--model", str(run), "--prompt", "a", "--max-new-tokens", "2", *given.split()])


@pytest.mark.parametrize("given", ["format=jsonl", "text-field=body", "pairs", "suffixes=.txt"])
def test_the_standard_library_is_read_as_it_is(given):
    with pytest.raises(UserError, match=rf"--data\.{given.partition('=')[0]} with data.path=stdlib"):
        parse(RECIPES, ["--recipe", "debug", "--data.path", "stdlib", f"--data.{given}"], "llm pretrain", "debug")


def test_what_a_recipe_gives_and_the_run_does_not_read_is_no_mistake():
    """The user typed neither of the two."""
    config = parse(RECIPES, ["--recipe", "gpt2_124m", "--data.tokenizer", "byte"], "llm pretrain", default="debug")
    assert config.data.vocab_size != 8192
    with pytest.raises(UserError, match=r"--data\.vocab-size with data\.tokenizer=byte"):
        parse(RECIPES, [*BASE, "--data.vocab-size=999"], "llm pretrain", default="debug")
    with pytest.raises(UserError, match=r"--data\.pairs with data\.path=stdlib"):
        parse(RECIPES, [*BASE, "--data.path", "stdlib", "--data.no-pairs"], "llm pretrain", default="debug")


@pytest.mark.parametrize("more", ["", "--recompute.host 1GiB --recompute.disk TMP"])
def test_a_run_in_a_budget_learns_what_it_learns_without(more, run, tmp_path, capsys):
    """In the smallest one, which a refusal says."""
    out = str(tmp_path / "run")
    words = ["pretrain", *BASE, *SMALLER, "--steps", "1", "--out", out, "--recompute.mode", "budget"]
    words += more.replace("TMP", str(tmp_path / "drive")).split()
    with pytest.raises(UserError, match=r"recompute\.budget=1KiB: a step takes at least") as refused:
        APP.dispatch([*words, "--recompute.budget", "1KiB"])
    least = str(refused.value).partition("(")[2].partition(" ")[0]
    assert APP.dispatch([*words, "--recompute.budget", least]) == 0
    assert "blocks run again" in capsys.readouterr().out
    losses = [json.loads((folder / "summary.json").read_text())["loss"] for folder in (run, tmp_path / "run")]
    assert losses[0] == losses[1]


def test_a_run_whose_activations_wait_on_a_drive_learns_what_it_learns_without(run, tmp_path):
    words = ["pretrain", *BASE, *SMALLER, "--steps", "1", "--out", str(tmp_path / "run"), "--recompute.mode", "offload"]
    assert APP.dispatch([*words, "--recompute.disk", str(tmp_path / "drive")]) == 0
    losses = [json.loads((folder / "summary.json").read_text())["loss"] for folder in (run, tmp_path / "run")]
    assert losses[0] == losses[1]
    with pytest.raises(UserError, match=r"recompute\.disk=/dev/shm lies in memory \(tmpfs\)"):
        APP.dispatch([*words, "--out", str(tmp_path / "other"), "--recompute.disk", "/dev/shm"])


def test_what_nobody_reads_is_seen():
    config = RECIPES["debug"]()
    with recorded(config) as read:
        assert config.optim.name == "adamw"
        repr(config), config == config
    assert read == {"optim", "optim.name"}
    assert "seed" in option_names(config)


QWEN = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FOREIGN = {
    "qwen2": QWEN | {"num_key_value_heads": 2, "max_position_embeddings": 512},
    "phi": QWEN | {"max_position_embeddings": 512},
}


def foreign_folder(tmp_path, family, **config):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **FOREIGN.get(family, {}), **config}))
    return ["plan", *BASE, "--model", str(tmp_path), "--gpu", "A100", "--data.sequence-length", "64"]


STEP = ("activations", "peak (", "FLOPs", "all_gather over dp_shard", "at 40% of the peak", "--seed", "ZeRO 3")


@pytest.mark.parametrize(
    ("family", "more", "lines"),
    [
        ("qwen2", "--nproc 2 --zero 3 --recompute.mode full --seed 3", ("2 ranks (dp_shard=2)", *STEP)),
        ("phi", "--gemini.budget 10MB", ("on the host",)),
        ("qwen2", "--recompute.mode budget --recompute.budget 1GiB", ("at most", "0 of 2 blocks run again", "peak (")),
        ("phi", "--nproc 2 --mesh.pp 2", ("send over pp",)),
    ],
)
def test_a_plan_is_of_any_causal_model_by_its_config_alone(family, more, lines, tmp_path, capsys):
    assert APP.dispatch([*foreign_folder(tmp_path, family), *more.split()]) == 0
    said = " ".join(capsys.readouterr().out.split())
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    for line in (f"{sum(p.numel() for p in model.parameters()):,} parameters, ", *lines):
        assert line in said


def test_heads_that_a_default_makes_impossible_are_named(tmp_path):
    """transformers build such a model and fail in its forward."""
    words = foreign_folder(tmp_path, "stablelm", **QWEN)
    with pytest.raises(UserError, match="num_key_value_heads=32 does not divide num_attention_heads=4"):
        APP.dispatch(words)


@pytest.mark.parametrize(
    ("family", "more", "said"),
    [
        ("qwen2", ["--nproc", "7", "--mesh.tp", "7"], r"mesh\.tp=7 without a plan: .* do not divide over tp=7"),
        ("qwen2", ["--nproc", "3", "--mesh.pp", "3"], r"mesh\.pp=3"),
        ("qwen2", ["--nproc", "2", "--mesh.ep", "2"], r"mesh\.ep=2 without a plan"),
        (
            "qwen2",
            ["--recompute.mode", "budget", "--recompute.budget", "1MiB"],
            r"recompute\.budget=1MiB: a step takes at least .* bytes",
        ),
        ("qwen2", ["--memory", "100KB"], r"the run needs .* per rank, the device has .*; try --zero 3"),
        ("qwen2", ["--data.sequence-length", "1024"], "has positions for 512"),
        ("t5", [], "nor do transformers build a causal model"),
        ("strange", [], "model_type is 'strange'; this decoder loads .* nor do transformers"),
    ],
)
def test_what_is_not_planned_of_a_foreign_model_is_refused_in_a_line(family, more, said, tmp_path):
    code = tmp_path / "ran.py"
    code.write_text("raise SystemExit('code of the folder ran')")
    words = foreign_folder(tmp_path, family, auto_map={"AutoConfig": "ran.Config", "AutoModelForCausalLM": "ran.Model"})
    with pytest.raises(UserError, match=said) as refused:
        APP.dispatch([*words, *more])
    assert "\n" not in str(refused.value)
