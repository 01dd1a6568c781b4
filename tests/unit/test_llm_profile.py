"""`megalith llm profile`: what is printed of a step, as a table, as JSON and as a picture, and what is refused."""

import json

import pytest
from PIL import Image

from apps.llm.__main__ import APP
from core.config import UserError
from core.models.decoder import Decoder, DecoderConfig
from core.models.pretrained import save_pretrained

SMALL = DecoderConfig(vocab_size=37, dim=16, num_layers=3, num_heads=2, ffn_dim=24, max_length=16)
QWEN = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("small")
    save_pretrained(Decoder(SMALL), SMALL, path)
    return path


def profiled(capsys, *words):
    assert APP.dispatch(["profile", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_training_step(folder, tmp_path, capsys):
    """The same in a table, in JSON and in a picture."""
    said = profiled(capsys, folder, "--microbatch", 2, "--sequence-length", 11, "--draw", tmp_path / "step.png")
    number = sum(parameter.numel() for parameter in Decoder(SMALL).parameters())
    assert said.startswith(f"Decoder, {number:,} parameters: a training step of 2 x 11 tokens in fp32\n")
    for part in ("by module; FLOPs, bytes", "blocks.*.attention", "by operator, those that touch most (12 of", "peak "):
        assert part in said
    with Image.open(tmp_path / "step.png") as picture:
        assert picture.size == (1650, 750)
        assert len(set(picture.convert("RGB").getdata())) > 50
    found = json.loads(profiled(capsys, folder, "--microbatch", 2, "--sequence-length", 11, "--json"))
    whole, *modules = found["by_module"]
    assert (whole["name"], whole["parameters_bytes"]) == ("", 4 * number)
    assert (whole["flops_forward"], whole["flops_backward"]) == (found["flops"]["forward"], found["flops"]["backward"])
    blocks = next(share for share in modules if share["name"] == "blocks.*")
    assert 2 <= blocks["flops_backward"] / blocks["flops_forward"] < 2.5  # of products twice, of attention 2.5 times
    operators = found["by_operator"]
    assert sum(share["bytes_read"] for share in operators) == whole["bytes_read"] == found["bytes_read"]
    assert found["bytes"]["gradients"] == found["bytes"]["parameters"] == 4 * number
    assert whole["kept_bytes"] == found["bytes"]["activations"]
    peak = found["peak"]
    assert sum(peak["by_kind"].values()) == peak["bytes"] == sum(held["num_bytes"] for held in peak["alive"])
    assert peak["bytes_by_last_use"] <= peak["bytes"]
    assert found["flops"]["recomputed"] == found["flops"]["update"] == 0


def test_a_forward_recomputation_and_formats(folder, capsys):
    def numbers(*more):
        return json.loads(profiled(capsys, folder, "--json", *more))

    plain, forward = numbers(), numbers("--mode", "eval")
    assert plain["sequence_length"] == 16  # for which the model has positions
    assert forward["flops"] == plain["flops"] | {"forward": forward["flops"]["forward"], "backward": 0}
    assert forward["bytes"]["activations"] == forward["bytes"]["gradients"] == 0
    again = numbers("--recompute.mode", "full")
    assert again["flops"]["recomputed"] == again["flops"]["backward"] - plain["flops"]["backward"] > 0
    assert again["bytes"]["activations"] < plain["bytes"]["activations"]
    assert numbers("--precision", "bf16")["bytes"]["parameters"] == plain["bytes"]["parameters"] / 2
    assert "train" not in profiled(capsys, folder, "--mode", "eval").splitlines()[0]


def test_a_model_of_another_family_and_a_recipes(tmp_path, capsys):
    described = QWEN | {"model_type": "qwen2", "num_key_value_heads": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert profiled(capsys, tmp_path).startswith("Qwen2ForCausalLM, ")
    assert "a forward of 1 x 128 tokens" in profiled(capsys, "debug_moe", "--mode", "eval")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no model; give --model FOLDER, or the name of a recipe"),
        ("nowhere", "nowhere holds no config.json"),
        ("FOLDER --mode test", "mode"),
        ("FOLDER --microbatch 0", "microbatch=0; give at least 1"),
        ("FOLDER --sequence-length 17", "sequence_length=17 and the model has positions for 16; shorten the sequence"),
        ("FOLDER --draw step.jpg", r"draw=step\.jpg; the picture is a PNG"),
        ("FOLDER --mode eval --recompute.mode full", r"--recompute\.mode with mode=eval, which has no backward"),
        ("FOLDER --json --top 3", "--top with --json, which prints all"),
        ("FOLDER --rows 3", "megalith llm profile has no option --rows"),
    ],
)
def test_what_is_refused(words, said, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said) as refused:
        APP.dispatch(["profile", *words.replace("FOLDER", str(folder)).split()])
    assert "\n" not in str(refused.value)


def test_seconds_of_a_gpu_are_those_of_its_operators(folder, capsys):
    slow, fast = (
        json.loads(profiled(capsys, folder, "--json", "--gpu", gpu, "--precision", "bf16"))["seconds"]
        for gpu in ("l4", "h100")
    )
    assert fast < slow
    found = json.loads(profiled(capsys, folder, "--json", "--gpu", "l4", "--precision", "bf16"))
    assert slow >= 0.999 * (found["bytes_read"] + found["bytes_written"]) / 300e9
    assert "on l4: each operator" in profiled(capsys, folder, "--gpu", "l4")
    with pytest.raises(UserError, match="gpu=t4 does not compute in bf16"):
        APP.dispatch(["profile", str(folder), "--gpu", "t4", "--precision", "bf16"])
