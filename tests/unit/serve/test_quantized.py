"""Quantized weights behind the engine: the tokens of the quantized model by itself; made while loading, or once."""

import logging
import re
from dataclasses import replace

import pytest
import torch

from apps.serve.__main__ import APP
from apps.serve.model import build_engine, find_model
from apps.serve.runner import Runner, Step
from apps.serve.text import load_text
from core.config import in_words, run_command
from core.kernels.vnni import offered
from core.models import generate
from core.quant import Scheme, load_quantized, quantize, stored_bytes
from tests.support.http_server import ENGINE, small_model
from tests.support.serving import greedy, run
from tests.unit.models.test_pretrained import example, random_decoder

PROMPTS = ([1, 2, 3], [*range(40)], [*range(30), 99], [200])
CONFIG = replace(ENGINE, prefill_chunk=7)


def tokens_of(engine):
    written = run(engine, [greedy(str(n), prompt, 12) for n, prompt in enumerate(PROMPTS)])
    return [written.ids(str(n)) for n in range(len(PROMPTS))]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_tokens_are_those_of_the_quantized_model(scheme, tmp_path, capsys, monkeypatch):
    # 4 bits are rounded by what is the fastest here for so many rows, and the engine's steps have fewer than a prompt
    monkeypatch.setattr("core.quant.packed._fastest_int4", lambda *shape: "stored" if offered() else "packed")
    monkeypatch.setattr("core.quant.packed._widening_is_faster", lambda *given: False)
    folder = small_model(tmp_path / "model", dim=64, ffn_dim=128)
    source = find_model(folder)
    engine = build_engine(source, CONFIG, "cpu", scheme=Scheme(scheme))
    found = tokens_of(engine)
    alone = load_quantized(folder, scheme, embeddings=True, head=True, packed=True)
    assert found == written_by(alone)
    assert found != tokens_of(build_engine(source, CONFIG, "cpu"))
    assert stored_bytes(alone) < 0.4 * stored_bytes(load_plain(folder))

    target = tmp_path / f"model-{scheme}"
    assert run_command(APP.dispatch, ["quantize", str(folder), str(target), "--scheme", scheme]) == 0
    assert "of weights in" in capsys.readouterr().out
    assert tokens_of(build_engine(find_model(target), CONFIG, "cpu")) == written_by(load_quantized(target))


def test_a_start_that_takes_long_says_how_far_it_is(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("apps.serve.model._SAID_EACH_S", 0.0)
    folder = small_model(tmp_path / "small")
    (folder / "consolidated.safetensors").write_bytes(bytes(1 << 22))  # the same once more, which is not read
    with caplog.at_level(logging.INFO):
        build_engine(find_model(folder), CONFIG, "cpu", scheme=Scheme("int8"))
    said = [record.getMessage() for record in caplog.records]
    size = re.fullmatch(r"small: loading (.*), which are rounded to int8", said[0])[1].removesuffix(" of weights")
    assert size == in_words((folder / "model.safetensors").stat().st_size), "what is read, and nothing else"
    assert said[-2].endswith(f" of {size}"), "the last weight is told, too"
    assert re.fullmatch(r"small: loaded in \d+\.\d s", said[-1])


def test_calibrated_by_text(tmp_path, capsys, monkeypatch):
    """`serve quantize --calibration FILE` rounds by the file's text, as `quantize` does by its tokens."""
    folder = small_model(tmp_path / "model", dim=64, ffn_dim=128)
    text, few = tmp_path / "text.txt", tmp_path / "few.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and so on. " * 40)
    few.write_text("too few")
    source = find_model(folder)
    options = ["--scheme", "int4", "--calibration-tokens", str(3 * source.config.max_length - 1), "--calibration"]
    for name, given in (("plain", []), ("calibrated", [*options, str(text)])):
        command = ["quantize", str(folder), str(tmp_path / name), *(given or ["--scheme", "int4"])]
        assert run_command(APP.dispatch, command) == 0
    length = source.config.max_length
    ids = torch.tensor(load_text(folder).encode(text.read_text())[: 2 * length]).view(2, length)
    expected = quantize(load_plain(folder), "int4", embeddings=True, head=True, calibration=[ids])
    found, plain = (load_quantized(tmp_path / name, packed=False) for name in ("calibrated", "plain"))
    with torch.no_grad():
        assert torch.equal(found(ids), expected(ids))
        wanted = load_plain(folder)(ids)
        assert (found(ids) - wanted).norm() < 0.8 * (plain(ids) - wanted).norm()
    assert tokens_of(build_engine(find_model(tmp_path / "calibrated"), CONFIG, "cpu"))
    capsys.readouterr()
    assert (
        run_command(APP.dispatch, ["quantize", str(tmp_path / "plain"), str(tmp_path / "new"), *options, str(text)])
        == 2
    )
    assert "plain is quantized already" in capsys.readouterr().err
    monkeypatch.setattr("apps.serve.quantize.available_bytes", lambda: 100_000)
    assert run_command(APP.dispatch, ["quantize", str(folder), str(tmp_path / "new"), *options, str(text)]) == 2
    assert "calibration holds the weights of model in fp32" in capsys.readouterr().err
    monkeypatch.undo()
    for arguments, says in (
        ([*options, str(few)], "calibration needs"),
        ([*options, str(tmp_path / "nowhere")], "nowhere"),
        (["--calibration", str(text)], "calibration is for int4, and int8 was asked for"),
        ([*options[:2], "--calibration-tokens", "0"], "calibration_tokens=0"),
    ):
        assert run_command(APP.dispatch, ["quantize", str(folder), str(tmp_path / "new"), *arguments]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1, said
    assert not (tmp_path / "new").exists()


def written_by(model):
    """What the model writes by itself after each prompt."""
    return [generate(model, torch.tensor([p]), 12)[0, len(p) :].tolist() for p in PROMPTS]


def load_plain(folder):
    from core.models import load_pretrained

    return load_pretrained(folder)


def test_refusals(tmp_path, capsys):
    folder, target = small_model(tmp_path / "model"), tmp_path / "quantized"
    for arguments, says in (
        (["--model", folder, "--quantize", "int3"], "int3"),
        (["--model", folder, "--quantize", "int4", "--group-size", 7], "group_size=7"),
        (["quantize", folder], "IN OUT"),
        (["quantize", folder, folder], "in use"),
        (["quantize", "/nowhere", target], "/nowhere"),
        (["quantize", folder, target, "--scheme", "int8", "--group-size", 32], "group_size is an option of int4"),
    ):
        assert run_command(APP.dispatch, [str(a) for a in arguments]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
        if says != "in use":
            assert says in said
    assert not target.exists()
    assert run_command(APP.dispatch, ["quantize", str(folder), str(target)]) == 0
    assert run_command(APP.dispatch, ["--model", str(target), "--quantize", "int8"]) == 2
    assert "quantized already" in capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["int8", "w8a8", "llm.int8"])
def test_logits_do_not_depend_on_neighbours(scheme):
    """Bit for bit: a sequence alone, and among others of other lengths, in pages that follow each other or do not."""
    model = quantize(random_decoder(example("opt", max_length=64)).float(), scheme, embeddings=True, head=True)
    runner, generator = Runner(model, 200, 4, torch.float32), torch.Generator().manual_seed(0)
    for layer in runner.pages:
        layer.k.normal_(generator=generator)
        layer.v.normal_(generator=generator)
    lengths = [1, 2, 5, 16, 17, 40, 63, 9, 31]
    tables = [torch.randperm(200, generator=generator)[:16].tolist() for _ in lengths]
    tables[3] = list(range(100, 116))

    def logits(chosen):
        step = Step(starts=list(range(len(chosen) + 1)), rows=list(range(len(chosen))))
        for n in chosen:
            step.ids.append(n)
            step.positions.append(lengths[n] - 1)
            step.slots.append(tables[n][(lengths[n] - 1) // 4] * 4 + (lengths[n] - 1) % 4)
            step.tables.append(tables[n])
            step.lengths.append(lengths[n])
        return dict(zip(chosen, runner.run(step)))

    together = logits(list(range(len(lengths))))
    for chosen in ([n] for n in range(len(lengths))):
        assert torch.equal(logits(chosen)[chosen[0]], together[chosen[0]]), chosen
    for n, row in logits([8, 0, 3]).items():
        assert torch.equal(row, together[n])
