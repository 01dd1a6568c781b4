"""`llm plan --gpus`: plans as JSON and as a table, commands that run them, refusals in a line."""

import json
import shlex

import pytest

from apps.llm.__main__ import APP
from apps.llm.config import FINETUNE, PretrainConfig, check_combination
from apps.llm.plan import run_shape
from apps.llm.recipes import RECIPES
from core.config import UserError, in_words, parse
from core.estimate import decoder_shape, estimate_memory
from core.gemini.tier import parse_bytes
from core.models.decoder import Decoder, DecoderConfig
from core.models.pretrained import save_pretrained

WORDS = ["plan", "--model", "gpt2_124m", "--gpu", "a100-40gb", "--batch", "48"]
DEBUG = ["--model", "debug", "--microbatch", "2", "--recompute.mode", "none", "--precision", "fp32"]
FEW_BITS = ["--comm.weights", "int8", "--comm.gradients", "int4", "--comm.secondary", "--comm.node", "2"]
STAGED = [*WORDS, "--gpus", "2", "--mesh.pp", "2"]
SMALL = DecoderConfig(vocab_size=97, dim=32, num_layers=4, num_heads=4, ffn_dim=48, max_length=64)


def plans(capsys, *words: str):
    assert APP.dispatch([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def parsed(command: str, ranks: int, monkeypatch) -> PretrainConfig:
    """The configuration that a plan's command starts."""
    words = shlex.split(command)
    monkeypatch.setenv("RANK", "0")
    if words[0] == "torchrun":
        size = int(words[words.index("--nnodes") + 1]) * int(words[words.index("--nproc-per-node") + 1])
        assert size == ranks
        monkeypatch.setenv("WORLD_SIZE", str(size))
        words = words[words.index("apps.llm") + 1 :]
    else:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        monkeypatch.delenv("RANK")
        assert words[:2] == ["megalith", "llm"]
        words = words[2:]
    if words[0] == "finetune":
        return parse({"default": lambda: FINETUNE}, words[1:], "megalith llm finetune", "default")
    assert words[0] == "pretrain"
    return parse(RECIPES, words[1:], "megalith llm pretrain", "debug")


@pytest.mark.parametrize(
    ("gpus", "more"),
    [
        (2, []),
        (16, ["--recompute.mode", "none", "--mesh.tp", "4"]),
        (1, ["--gpu", "rtx-3080", "--precision", "fp16", "--optim.name", "adafactor"]),
        (4, ["--model", "debug_moe", "--memory", "8MiB", "--data.sequence-length", "64"]),
        (4, [*DEBUG, "--comm.compress", "powersgd"]),
        (4, [*DEBUG, "--zero", "3", *FEW_BITS]),
        (4, [*DEBUG, "--comm.activations", "int8", "--mesh.pp", "2"]),
        (4, [*DEBUG, "--local.every", "50", "--local.bits", "2", "--mesh.dp-replicate", "2"]),
    ],
)
def test_every_command_starts_a_run_of_its_plan(gpus, more, capsys, monkeypatch) -> None:
    words = ["plan", *more, *([] if "--model" in more else WORDS[1:3])]
    words += [] if "--gpu" in more else WORDS[3:5]
    said = plans(capsys, *words, "--batch", "48", "--gpus", str(gpus))
    assert said["plans"]
    for plan in said["plans"]:
        config = parsed(plan["command"], gpus, monkeypatch)
        mesh = check_combination(config)
        assert mesh.data_ranks * mesh.tp * mesh.cp * mesh.pp == gpus
        assert config.data.global_batch == 48
        found = estimate_memory(decoder_shape(config.model), run_shape(config)).peak_bytes
        if config.gemini.budget is None:
            assert found == plan["memory_bytes"]
        assert plan["memory_bytes"] <= said["memory_limit_bytes"]


ON_A_DRIVE = ["plan", "--model", "debug", "--gpu", "l4", "--gpus", "1", "--batch", "8", "--optim.name", "adamw"]
ON_A_DRIVE += ["--microbatch", "1", "--recompute.mode", "full", "--precision", "fp32", "--memory", "2MiB"]
ON_A_DRIVE += ["--gemini.disk", "/not/here", "--gemini.host", "4MiB"]


def test_a_drive_makes_room_where_nothing_else_does(capsys, monkeypatch) -> None:
    """The plan's command is planned alone, by Gemini's planner as a run plans: its bytes are those of the search."""
    without = ON_A_DRIVE[: ON_A_DRIVE.index("--gemini.disk")]
    with pytest.raises(UserError, match="no plan"):
        APP.dispatch([*without, "--gemini.budget", "None"])
    rates = ["--disk-gb-s", "3.5", "2.5"]
    found = plans(capsys, *ON_A_DRIVE, *rates)["plans"]
    assert found
    for plan in found[:1]:
        gemini = parsed(plan["command"], 1, monkeypatch).gemini
        assert (str(gemini.disk), gemini.host) == ("/not/here", "4MiB")
        assert plan["device_bytes"] <= parse_bytes(gemini.budget) <= 2 * 2**20
        assert plan["host_bytes"] <= gemini.host_bytes
        assert plan["disk_bytes"] > 0
        alone = shlex.split(plan["command"])[3:]
        machine = ["--utilisation", "0.5", "--memory-gb-s", "300", "--bandwidth-gb-s", "25.6"]
        assert APP.dispatch(["plan", *alone, "--gpu", "l4", *machine, *rates]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"on the device │ {in_words(plan['device_bytes'])}" in said
        assert f"on the host │ {in_words(plan['host_bytes'])}" in said


def test_plans_that_need_no_drive_have_none(capsys, monkeypatch) -> None:
    words = ["16MiB" if word == "2MiB" else word for word in ON_A_DRIVE]
    found = plans(capsys, *words, "--disk-gb-s", "2")["plans"]
    for plan in found:
        gemini = parsed(plan["command"], 1, monkeypatch).gemini
        has = [gemini.budget is not None, gemini.disk is not None, gemini.host is not None, "disk_bytes" in plan]
        assert len(set(has)) == 1
    assert {"disk_bytes" in plan for plan in found} == {False, True}


def test_the_fields_have_their_names(capsys) -> None:
    said = plans(capsys, *WORDS, "--gpus", "2", "--price", "2", "--power", "500", "--carbon", "100", "--tokens", "1e9")
    times = [plan["step_time_s"] for plan in said["plans"]]
    assert len(times) >= 5
    assert times == sorted(times)
    assert said["steps"] == -(-(10**9) // (48 * 1024))
    for plan in said["plans"]:
        hours = said["steps"] * plan["step_time_s"] * 2 / 3600
        assert plan["gpu_hours"] == pytest.approx(hours)
        assert plan["money"] == pytest.approx(2 * hours)
        assert plan["energy_kwh"] == pytest.approx(hours / 2)
        assert plan["co2_kg"] == pytest.approx(hours / 20)
        assert sum(plan["shares_s"].values()) == pytest.approx(plan["step_time_s"])
    assert said["unknown"]


def test_the_table_says_what_is_known_and_what_is_not(capsys, tmp_path) -> None:
    png = tmp_path / "front.png"
    assert APP.dispatch([*WORDS, "--gpus", "2", "--mesh.pp", "2", "--draw", str(png)]) == 0
    said = capsys.readouterr().out
    for part in (
        "gpt2_124m on 2 x a100-40gb",
        "not known:",
        "1: megalith llm pretrain --recipe gpt2_124m",
        "--nproc 2",
    ):
        assert part in said
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_folders_model_is_finetuned(capsys, tmp_path, monkeypatch) -> None:
    save_pretrained(Decoder(SMALL), SMALL, tmp_path)
    words = ["plan", "--model", str(tmp_path), "--gpus", "4", "--gpu", "l4", "--batch", "8", "--precision", "bf16"]
    for plan in plans(capsys, *words)["plans"]:
        assert plan["command"].startswith(f"megalith llm finetune --model {tmp_path}")
        config = parsed(plan["command"], 4, monkeypatch)
        assert (config.precision, config.data.global_batch, config.data.sequence_length) == ("bf16", 8, 32)


def test_a_name_stands_for_its_recipe(capsys) -> None:
    assert APP.dispatch(["plan", "--model", "gpt2_124m", "--gpu", "A100"]) == 0
    named = capsys.readouterr().out
    assert APP.dispatch(["plan", "--recipe", "gpt2_124m", "--gpu", "A100"]) == 0
    assert capsys.readouterr().out == named


def test_2bw_is_tried_where_it_is_allowed(capsys, monkeypatch) -> None:
    """With what its old weights are expected to cost, and never without being asked for."""
    words = ["plan", "--model", "debug", "--gpus", "4", "--gpu", "a100-40gb", "--batch", "8", "--mesh.pp", "4"]
    plain = plans(capsys, *words)
    assert {plan["options"]["pipeline.schedule"] for plan in plain["plans"]}.isdisjoint({"2bw"})
    assert "--schedules 1f1b interleaved zb-h1 zbv 2bw" in plain["old_weights"][0]
    said = plans(capsys, *words, "--schedules", "1f1b", "2bw")
    late = [plan for plan in said["plans"] if plan["options"]["pipeline.schedule"] == "2bw"]
    assert late
    assert {plan["options"]["pipeline.schedule"] for plan in said["plans"]} <= {"1f1b", "2bw"}
    assert "one update old" in said["old_weights"][0]
    for plan in late:
        config = parsed(plan["command"], 4, monkeypatch)
        assert config.pipeline.schedule == "2bw"
        assert estimate_memory(decoder_shape(config.model), run_shape(config)).peak_bytes == plan["memory_bytes"]
    alone = plans(capsys, *words, "--pipeline.schedule", "2bw", "--pipeline.correction", "error_feedback")
    assert {plan["options"]["pipeline.schedule"] for plan in alone["plans"]} == {"2bw"}
    assert "adamw and error_feedback" in alone["old_weights"][0]
    config = parsed(alone["plans"][0]["command"], 4, monkeypatch)
    assert config.pipeline.correction == "error_feedback"
    found = estimate_memory(decoder_shape(config.model), run_shape(config)).peak_bytes
    assert found == alone["plans"][0]["memory_bytes"]


def test_what_is_as_good_as_2bw_is_said(capsys) -> None:
    words = ["plan", "--model", "debug", "--gpus", "2", "--gpu", "a100-40gb", "--batch", "64", "--mesh.pp", "2"]
    said = plans(capsys, *words, "--schedules", "zbv", "2bw", "--microbatch", "1")
    assert any("is as good here" in line and "newest weights" in line for line in said["old_weights"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*STAGED, "--schedules", "pipedream"], "schedules=pipedream: it is not searched, since its weights are older"),
        (
            [*STAGED, "--pipeline.schedule", "gpipe"],
            "pipeline.schedule=gpipe: it is not searched, since 1f1b takes as long",
        ),
        ([*STAGED, "--schedules", "2bw", "--pipeline.schedule", "zbv"], "both say what is tried; give one of them"),
        ([*WORDS, "--schedules", "2bw"], "without a search; give --gpus"),
        ([*WORDS[:3], "--gpus", "8", "--batch", "48"], "of which kind"),
        ([*WORDS[:4], "a100-60gb", "--gpus", "8"], "no GPU is called 'a100-60gb', did you mean a100"),
        (
            ["plan", "--model", "gpt2_124m", "--gpu", "t4", "--gpus", "2", "--precision", "bf16"],
            "precision=bf16 and a t4 does not compute in it; give --precision fp32 or fp16",
        ),
        ([*WORDS, "--gpus", "0"], "gpus=0; give a number that is at least 1"),
        ([*WORDS, "--gpus", "8", "--price", "nan"], "price=nan"),
        ([*WORDS, "--gpus", "8", "--price", "-1"], "price=-1.0; give a number that is at least 0"),
        ([*WORDS, "--gpus", "8", "--carbon", "inf"], "carbon=inf"),
        ([*WORDS, "--gpus", "8", "--power", "-3"], "power=-3.0"),
        (
            [*WORDS, "--gpus", "13"],
            "no mesh of 13 ranks divides a batch of 48 rows, 12 blocks and 12 heads; use --gpus 14",
        ),
        ([*WORDS, "--gpus", "2", "--memory", "10MiB"], "no plan fits 2 x a100-40gb: the least needs"),
        ([*WORDS, "--gpus", "2", "--draw", "front.pdf"], "the picture is a PNG"),
        ([*WORDS, "--gpus", "2", "--nproc", "2"], "--nproc with --gpus"),
        ([*WORDS, "--json"], "--json without a search; give --gpus"),
        ([*WORDS, "--data.global-batch", "3"], "mean the same"),
        (
            ["plan", *DEBUG, "--gpus", "2", "--gpu", "l4", "--batch", "8", "--local.every", "50"],
            "local.every=50 with --gpus and no mesh.dp_replicate",
        ),
        (
            [*STAGED, "--comm.compress", "powersgd"],
            "comm.compress=powersgd with mesh.pp=2: stages that share a parameter add up its gradient",
        ),
        ([*WORDS, "--recipe", "debug"], "beside --recipe"),
        (ON_A_DRIVE, "gemini.disk=/not/here with --gpus: it is no folder of this machine"),
        ([*ON_A_DRIVE, "--gemini.budget", "None"], "gemini.budget=None: nothing would move"),
        ([*ON_A_DRIVE, "--disk-gb-s", "0"], "disk_gb_s=0.0; give one number above 0"),
        ([*ON_A_DRIVE, "--optim.name", "kfac"], "optim.name=kfac: what looks at whole steps"),
        ([*STAGED, "--gemini.host", "1GiB"], "--gemini.host with --gpus and no gemini.disk"),
        ([*STAGED, "--disk-gb-s", "1"], "--disk-gb-s without a drive"),
        (["plan", "--gemini.disk", "x"], "--gemini.disk without a budget: nothing moves"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_a_line(words, said) -> None:
    with pytest.raises(UserError) as refused:
        APP.dispatch(words)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
