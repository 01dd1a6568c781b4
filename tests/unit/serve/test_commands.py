"""The commands beside the server: plan, bench's figures, and what is refused in one line."""

import json
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import transformers  # noqa: F401 (its log keeps the stderr of the moment in which it is imported: not a test's)

from apps.serve.__main__ import APP
from apps.serve.bench import BenchConfig, Served, figures, loads
from apps.serve.config import EngineConfig
from apps.serve.memory import page_bytes
from apps.serve.model import find_model
from apps.serve.plan import PlannedEngine, ServePlanConfig, fewest, formats
from core.config import run_command
from core.models import SHAPES
from tests.support.command import ROOT
from tests.support.http_server import small_model


def refusal(capsys, *arguments):
    code = run_command(APP.dispatch, [str(a) for a in arguments])
    said = capsys.readouterr().err.strip()
    assert code == 2, said
    assert said.startswith("error: ")
    assert "\n" not in said
    return said


def test_plan_of_the_published_cases():
    """BLOOM-176B: 352 GB in fp16; in int8 half of that, which eight devices of 24 GB hold, the published case."""
    bloom = SHAPES["bloom_176b"]
    config = ServePlanConfig(shape="bloom_176b", memory="24GB", device="cuda", engine=PlannedEngine(1, 1024, 512))
    asked = formats(bloom)
    whole = {name: fewest(bloom, format, replace(config, memory="10TB")).need.weights for name, format in asked.items()}
    assert whole["fp16"] == pytest.approx(352.5e9, rel=0.01)
    assert whole["int8"] == pytest.approx(0.5 * whole["fp16"], rel=0.005)
    assert whole["int4"] == pytest.approx((4 + 24 / 64) / 16 * whole["fp16"], rel=0.005)  # bf16 scales, 8-bit zeros
    found = {name: fewest(bloom, format, config) for name, format in asked.items()}
    assert (found["fp16"].devices, found["int8"].devices, found["int4"].devices) == (16, 8, 7)
    assert found["int8"].total < 24e9
    opt = SHAPES["opt_175b"]
    config = ServePlanConfig(shape="opt_175b", memory="80GB", device="cuda", engine=PlannedEngine(1))
    assert fewest(opt, formats(opt)["int8"], config).devices == 3
    assert fewest(bloom, asked["fp16"], ServePlanConfig(shape="bloom_176b", memory="1GB")).devices is None


def test_pages_of_the_plan():
    """16 tokens x 2 (keys and values) x 96 layers x 12288 x 2 bytes."""
    import torch

    assert page_bytes(SHAPES["opt_175b"], 16, torch.float16) == 16 * 2 * 96 * 12288 * 2
    assert page_bytes(SHAPES["opt_175b"], 16, torch.int8, 2) == 16 * 2 * 96 * (12288 + 4 * 96) // 2


def test_plan_prints(capsys, tmp_path):
    assert run_command(APP.dispatch, ["plan", "--shape", "opt_175b"]) == 0
    printed = capsys.readouterr().out
    for word in ("fp16", "int8", "int4", "opt_175b"):
        assert word in printed
    small_model(tmp_path / "tiny")
    assert run_command(APP.dispatch, ["plan", "--model", str(tmp_path / "tiny")]) == 0
    assert "tiny" in capsys.readouterr().out


def test_plan_takes_the_names_of_the_server(capsys):
    """What a server would be started with, and the names of the version before, with a line each."""
    words = ["plan", "--shape", "gpt2_124m", "--device", "cuda"]
    given = ["--engine.max-running", "3", "--engine.max-length", "100", "--engine.max-batch-tokens", "50"]
    assert run_command(APP.dispatch, [*words, *given]) == 0
    now = capsys.readouterr()
    assert "3 sequences of 100 tokens" in now.out
    assert now.err == ""
    assert run_command(APP.dispatch, [*words, "--sequences", "3", "--length", "100", "--batch-tokens", "50"]) == 0
    before = capsys.readouterr()
    assert before.out == now.out
    for former, name in (("sequences", "max-running"), ("length", "max-length"), ("batch-tokens", "max-batch-tokens")):
        line = f"--{former} is called --engine.{name} now; the former name goes with the next version"
        assert line in before.err
    assert {one.name for one in fields(PlannedEngine)} <= {one.name for one in fields(EngineConfig)}
    assert "engine.max_running is 0; it must be positive" in refusal(capsys, *words, "--engine.max-running", 0)
    assert "did you mean" in refusal(capsys, *words, "--engine.max-runing", 3)


def test_loads_repeat():
    config = BenchConfig(requests=30, rate=5.0, shared_prefix=4, prompt_tokens=(2, 9), max_tokens=(1, 3))
    load = loads(config)
    assert load == loads(config)
    assert len({asked.prompt[:4] for asked in load}) == 1
    assert all(6 <= len(asked.prompt) <= 13 and 1 <= asked.max_tokens <= 3 for asked in load)
    arrivals = [asked.at_s for asked in load]
    assert arrivals == sorted(arrivals)
    assert 2 < arrivals[-1] < 18  # thirty at five a second


def test_figures():
    served = [Served(200, 10, [0.5, 0.6, 0.7], 3), Served(200, 20, [0.1, 0.3], 2), Served(429)]
    found = figures(served, 2.0)
    assert found["refused"] == 1
    assert found["tokens_per_s"] == 2.5
    assert found["prompt_tokens_per_s"] == 15
    assert found["first_token_p50_s"] == pytest.approx(0.3, abs=1e-3)
    assert found["per_token_p50_s"] == pytest.approx(0.1, abs=1e-3)


def test_serving_on_one_rank_does_not_wait_for_what_several_need():
    """DTensor, and sympy behind it, are a tenth of the time until a server listens."""
    listing = "import sys, apps.serve.serve; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch.distributed.tensor", "sympy", "core.parallel"} & set(done.stdout.split())


def test_a_run_folder_is_served_under_its_name(tmp_path):
    small_model(tmp_path / "runs" / "mine" / "hf")
    (tmp_path / "runs" / "mine" / "config.json").write_text("{}")
    for folder in ("runs/mine", "runs/mine/hf"):
        source = find_model(tmp_path / folder)
        assert source.name == "mine"
        assert source.folder == tmp_path / "runs" / "mine" / "hf"


def test_refusals(capsys, tmp_path):
    model = small_model(tmp_path / "model")
    assert "--model DIR" in refusal(capsys, "--port", 0)
    assert "no folder /nowhere" in refusal(capsys, "--model", "/nowhere")
    assert "serve --model DIR" in refusal(capsys, "srve")
    assert "4 heads do not divide over tp=3" in refusal(capsys, "--model", model, "--tp", 3)
    assert "called model" in refusal(capsys, "--model", model, model)
    assert "over tp=2" in refusal(capsys, "--model", model, model, "--tp", 2)
    assert "did you mean --port?" in refusal(capsys, "--model", model, "--prot", 1)
    assert "port 70000" in refusal(capsys, "--model", model, "--port", 70000)
    assert "cannot read the key" in refusal(capsys, "--model", model, "--api-key-file", "/nowhere")
    assert "give at least 65" in refusal(capsys, "--model", model, "--engine.max-batch-tokens", 3)
    assert "holds no sequence of" in refusal(capsys, "--model", model, "--engine.cache", "10KB")
    assert "positions for 512" in refusal(capsys, "--model", model, "--engine.max-length", 1000)
    assert "no address" in refusal(capsys, "bench", "--url", "nonsense")
    assert "no answer from http://127.0.0.1:9" in refusal(capsys, "bench", "--url", "http://127.0.0.1:9")
    assert "one of --model DIR and --shape" in refusal(capsys, "plan")
    assert "no shape 'gpt5'" in refusal(capsys, "plan", "--shape", "gpt5")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "t5"}'), "t5"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\x09" * 100),
            "truncated or not a file of weights",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer"),
        (lambda folder: _change(folder, vocab_size=100), "257 tokens, the model 100"),
        (lambda folder: _change(folder, n_embd=2**16, n_inner=2**18, n_layer=500), "TiB|GiB"),
    ],
)
def test_broken_folders(capsys, tmp_path, spoil, says):
    """Named in one line, before anything is loaded."""
    folder = small_model(tmp_path / "model")
    spoil(folder)
    said = refusal(capsys, "--model", folder, "--port", 0)
    assert any(word in said for word in says.split("|")), said


def _change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
