"""`llm plan --model FOLDER --gpus N` of models that our decoder does not compute: stages, layouts and recomputation."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apps.llm.__main__ import APP
from core.config import UserError

VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 32, "num_hidden_layers": 2}
VIT |= {"num_attention_heads": 2, "intermediate_size": 48, "image_size": 16, "patch_size": 8}
VIT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 41, "d_model": 16, "d_kv": 8}
T5 |= {"d_ff": 24, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 2, "n_positions": 16}
T5 |= {"decoder_start_token_id": 0}


def folder(path: Path, described: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(described))
    return str(path)


def test_a_model_of_pictures(tmp_path: Path, capsys) -> None:
    words = ["plan", "--model", folder(tmp_path, VIT), "--gpus", "2", "--gpu", "a100-40gb", "--batch"]
    assert APP.dispatch([*words, "7", "--json", "--price", "2"]) == 0
    said = json.loads(capsys.readouterr().out)
    plans = said["plans"]
    assert (said["model"], said["gpus"], said["batch"]) == ("ViTForImageClassification", 2, 7)
    assert [plan["step_time_s"] for plan in plans] == sorted(plan["step_time_s"] for plan in plans)
    asked: list[dict[str, Any]] = []
    core = SimpleNamespace(auto=SimpleNamespace(parallelize=lambda model, inputs, **options: asked.append(options)))
    for plan in plans:
        assert plan["money"] == pytest.approx(2 * plan["gpu_hours"])
        assert sum(plan["shares_s"].values()) == pytest.approx(plan["step_time_s"])
        assert 0 < plan["memory_bytes"] <= said["memory_limit_bytes"]
        assert plan["command"] == "torchrun --nproc-per-node 2 train.py"
        assert plan["gap"] <= 1e-3
        assert plan["layouts"]["classifier.weight"]
        eval(plan["call"], {"core": core, "model": None, "inputs": None})
        options, stages = asked.pop(), plan["options"]["stages"]
        assert list(options["mesh"]) == plan["options"]["mesh"]
        assert sum(stages) == 2
        if len(stages) > 1:
            assert (list(options["stages"]), options["microbatches"]) == (stages, plan["options"]["microbatches"])
    assert APP.dispatch([*words, "8", "--mesh.pp", "2", "--microbatch", "1"]) == 0
    said = capsys.readouterr().out
    for part in (
        "2 stages of 1 ranks",
        "core.auto.parallelize(model, inputs, mesh=(1,), stages=(1, 1), microbatches=8)",
        "not known:",
    ):
        assert part in said


def test_an_encoder_with_a_decoder(tmp_path: Path, capsys) -> None:
    """Its decoder reads the encoder from afar, and it drops: it has one stage."""
    words = ["plan", "--model", folder(tmp_path, T5), "--gpus", "2", "--gpu", "a100-40gb", "--batch", "4"]
    assert APP.dispatch([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert all(plan["options"]["stages"] == [6] for plan in said["plans"])
    assert all(plan["options"]["microbatches"] == 1 for plan in said["plans"])
    with pytest.raises(UserError, match=r"mesh.pp=2: the model draws random numbers, such as dropout"):
        APP.dispatch([*words, "--mesh.pp", "2"])
    folder(tmp_path, T5 | {"dropout_rate": 0.0})
    with pytest.raises(UserError, match="blocks ahead of it"):
        APP.dispatch([*words, "--mesh.pp", "2"])


@pytest.mark.parametrize(
    ("described", "words", "said"),
    [
        (VIT, ["--zero", "3"], "--zero with a model that is spread as it is"),
        (VIT, ["--utilisation", "nan"], "utilisation=nan; give a positive number"),
        (VIT, ["--check"], "--check with a model that is spread as it is"),
        (VIT, ["--microbatch", "3"], "microbatch=3 of a batch of 8 rows"),
        (VIT, ["--memory", "1KiB", "--mesh.pp", "1"], "no plan fits 1 KiB on 2 ranks with 1 microbatches; [1-9]"),
        (T5, ["--data.sequence-length", "17"], "has positions for 16"),
        ({"model_type": "no_such"}, [], "nor do transformers build a model"),
    ],
)
def test_refusals(described: dict[str, Any], words: list[str], said: str, tmp_path: Path) -> None:
    always = ["plan", "--model", folder(tmp_path, described), "--gpus", "2", "--gpu", "a100-40gb", "--batch", "8"]
    with pytest.raises(UserError, match=said):
        APP.dispatch([*always, *words])
