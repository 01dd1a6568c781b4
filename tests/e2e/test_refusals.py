"""What a user gets wrong: one line that names it, and exit code 2."""

import os
from pathlib import Path

import pytest

from apps.llm.__main__ import APP
from core.config import run_command
from tests.support.command import llm, run

PIPEDREAM = ("--nproc", 2, "--mesh.pp", 2, "--pipeline.schedule", "pipedream")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The line with which a command refuses."""
    code = run_command(APP.dispatch, [str(a) for a in arguments])
    said = capsys.readouterr().err.strip()
    assert code == 2, said
    assert said.startswith("error: ")
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--stpes", 3), ("--stpes", "--steps")),
        (("--steps", "many"), ("--steps", "many")),
        (("--steps", 0), ("steps=0",)),
        (("--zero", 4), ("--zero 4", "give 0, 1, 2 or 3")),
        (("--kernels", "--no-shown-kernels"), ("--shown-kernels with kernels", "leave one out")),
        (("--optim.name", "hessian_free", "--no-shown-kernels"), ("--shown-kernels with optim.name=hessian_free",)),
        (("--precision", "fp8"), ("fp8", "bf16")),
        (("--recipe", "gpt2_125m"), ("gpt2_125m", "gpt2_124m")),
        (("--nproc", 3, "--mesh.tp", 3), ("8 heads", "tp=3", "{1, 2, 4, 8}")),
        (("--mesh.tp", 2), ("tp=2", "1 is running", "--nproc 2")),
        (("--nproc", 4, "--mesh.tp", 2, "--mesh.dp-shard", 4, "--zero", 2), ("8 ranks", "4 are running")),
        (("--nproc", 5), ("24", "5 data-parallel ranks")),
        (("--optim.name", "adan"), ("'adan'", "adafactor", "sm3")),
        (("--optim.name", "lars", "--optim.betas", 0.9, 0.95), ("lars has no option betas", "momentum", "trust")),
        (("--optim.name", "adafactor", "--optim.d", 0.5), ("adafactor: d=0.5", ">= 1")),
        (("--mesh.dp-shard", 2), ("zero=0", "--zero")),
        (("--nproc", 2, "--comm.compress", "powersgd", "--comm.rank", 999), ("comm.compress=powersgd", "--comm.rank")),
        (("--nproc", 4, "--zero", 3, "--comm.secondary", "--comm.node", 3), ("comm.node=3", "4 ranks", "1, 2, 4")),
        (("--nproc", 2, "--local.every", 5, "--noise-scale"), ("noise_scale", "use no --noise-scale")),
        (("--mesh.pp", 2), ("pp=2", "1 is running", "--nproc 2")),
        (("--nproc", 17, "--mesh.pp", 17), ("17 stages", "16 blocks", "mesh.pp=16")),
        (("--nproc", 12, "--mesh.pp", 12, "--pipeline.schedule", "zbv"), ("24 stages", "mesh.pp=8")),
        (("--nproc", 2, "--mesh.pp", 2, "--pipeline.split", 3, 5), ("3 5", "16 blocks", "2 numbers")),
        (("--nproc", 2, "--mesh.pp", 2, "--pipeline.schedule", "dualpipe"), ("dualpipe", "zbv")),
        (("--nproc", 4, "--mesh.pp", 2, "--zero", 3, "--pipeline.schedule", "zb-h1"), ("zero=3", "1f1b", "--zero 2")),
        (("--nproc", 4, "--mesh.pp", 2, "--zero", 2, "--pipeline.schedule", "2bw"), ("zero=2", "1f1b", "--zero 1")),
        (("--nproc", 4, "--mesh.pp", 2, "--zero", 3, "--pipeline.schedule", "2bw"), ("zero=3", "1f1b", "--zero 1")),
        (("--nproc", 2, "--mesh.pp", 2, "--compile", "--pipeline.schedule", "2bw"), ("compile", "no compile")),
        (
            (*PIPEDREAM, "--precision", "fp16"),
            ("precision=fp16", "pipedream", "overflow", "--precision bf16"),
        ),
        (
            ("--nproc", 4, "--mesh.pp", 2, "--zero", 2, "--pipeline.schedule", "pipedream_sync"),
            ("zero=2", "pipedream_sync", "1f1b", "--zero 1"),
        ),
        (
            ("--nproc", 4, "--mesh.pp", 2, "--zero", 3, "--pipeline.schedule", "pipedream"),
            ("zero=3", "pipedream", "one version", "--zero 1"),
        ),
        (
            (*PIPEDREAM, "--recompute.mode", "budget", "--recompute.budget", "1GiB"),
            ("recompute.mode=budget", "pipedream", "one version", "--recompute.mode full"),
        ),
        (
            ("--nproc", 2, "--mesh.pp", 2, "--pipeline.schedule", "pipedream_sync", "--pipeline.clip", "last"),
            ("pipeline.clip", "pipedream_sync", "leave it out"),
        ),
        (
            ("--nproc", 2, "--mesh.pp", 2, "--gemini.budget", "1GiB", "--zero", 3, "--pipeline.schedule", "2bw"),
            ("gemini.budget=1GiB", "2bw", "one version", "1f1b"),
        ),
        (
            ("--nproc", 4, "--mesh.pp", 4, "--pipeline.schedule", "2bw", "--pipeline.microbatches", 3),
            ("2bw", "3 microbatches", "mesh.pp=4", "--pipeline.microbatches 4"),
        ),
        (
            ("--nproc", 2, "--mesh.pp", 2, "--pipeline.schedule", "2bw", "--microbatch", 24),
            ("2bw", "1 microbatch a step", "mesh.pp=2"),
        ),
        (("--nproc", 2, "--mesh.pp", 2, "--microbatch", 2, "--pipeline.microbatches", 4), ("give one of them",)),
        (("--pipeline.schedule", "zbv"), ("mesh.pp=1", "--mesh.pp 2")),
        (("--nproc", 6, "--mesh.tp", 6, "--mesh.tp-mode", "2d"), ("square", "mesh.tp=4 or 9")),
        (("--nproc", 8, "--mesh.tp", 8, "--mesh.tp-mode", "2.5d"), ("square", "tp_depth=1", "mesh.tp=4 or 9")),
        (("--nproc", 4, "--mesh.tp", 4, "--mesh.tp-mode", "3d"), ("cube", "mesh.tp=8")),
        (("--nproc", 25, "--mesh.tp", 25, "--mesh.tp-mode", "2d"), ("8 key/value heads", "tp_col=5", "at most 4")),
        (("--optim.name", "muon", "--optim.trust", 1), ("optim.name=muon", "no option trust", "momentum, betas")),
        (("--optim.name", "soap", "--optim.whole", "heads"), ("heads", "matrix", "experts")),
        (("--optim.name", "shampoo", "--optim.root", 5), ("shampoo: root=5", "2, 3 or 4")),
        (("--optim.name", "muon", "--optim.head-dim", 7), ("rows=7", "divisor")),
        (("--mesh.cp", 2), ("cp=2", "1 is running", "--nproc 2")),
        (("--nproc", 40, "--mesh.cp", 40), ("32 tokens", "cp=40", "smaller cp")),
        (("--nproc", 12, "--mesh.cp", 12, "--mesh.cp-mode", "ulysses"), ("8 heads", "12 ranks", "cp_mode=ring")),
        (("--nproc", 4, "--mesh.cp", 4, "--mesh.cp-mode", "mixed"), ("cp_ulysses=1", "divides cp")),
        *((("--optim.lr", value), ("optim.lr", value, "finite")) for value in ("nan", "inf", "-inf")),
        *((("--optim.eps", value), ("optim.eps", value, "finite")) for value in ("nan", "inf")),
        *((("--optim.clip-norm", value), ("optim.clip_norm", value, "finite")) for value in ("nan", "inf")),
        *((("--optim.weight-decay", value), ("optim.weight_decay", value, "finite")) for value in ("nan", "inf")),
        (("--optim.betas", "0.9", "nan"), ("optim.betas", "nan", "finite")),
        (("--optim.schedule.final", "nan"), ("final=nan", "0 <= final <= 1")),
        *((("--model.norm-eps", value), ("norm_eps", value, "1e-5")) for value in ("nan", "inf", "-1e-05")),
        (("--seed", "12345678901234567890123"), ("seed=12345678901234567890123", "2^63")),
        (("--seed", -1), ("seed=-1", "from 0")),
        (("--steps", 10**23), ("steps=1000", "2^63")),
        (("--loss-scale.initial", 0), ("loss_scale.initial=0", "positive")),
        (("--loss-scale.growth-interval", 0), ("loss_scale.growth_interval=0", "at least 1")),
        (("--loss-scale.minimum", -1), ("loss_scale.minimum=-1", "positive")),
        (("--device", "tpu"), ("device=tpu", "cpu and cuda")),
        (("--device", "cuda:1"), ("device=cuda:1", "CUDA_VISIBLE_DEVICES")),
        (("--data.path", "/does/not/exist"), ("/does/not/exist",)),
        (("--data.sequence-length", 100000), ("100000", "128")),
        (("--data.tokenizer", "bpe", "--data.vocab-size", 1000), ("1000", "257")),
    ],
)
def test_options(capsys, tmp_path: Path, options: tuple, expected: tuple) -> None:
    said = refusal(capsys, "pretrain", "--out", tmp_path / "run", *options)
    for word in expected:
        assert word in said


def test_commands(capsys) -> None:
    assert "pretrain" in refusal(capsys, "pretran")
    assert "config.json" in refusal(capsys, "generate", "--model", "/nowhere")
    assert "--model" in refusal(capsys, "finetune")


@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_devices_and_folders_of_inference(capsys, tmp_path: Path, command: str) -> None:
    assert "cpu and cuda" in refusal(capsys, command, "--model", tmp_path, "--device", "tpu")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "quantization.json").write_text("{}")
    said = refusal(capsys, command, "--model", tmp_path)
    assert "is quantized" in said
    assert f"serve --model {tmp_path}" in said
    (tmp_path / "quantization.json").unlink()
    (tmp_path / "config.json").write_text("[]")
    assert "config.json is of no model" in refusal(capsys, command, "--model", tmp_path)


def test_a_folder_that_cannot_be_written_is_one_line_of_one_rank(tmp_path: Path) -> None:
    """Rank 0 alone meets it: the other hears of it, and nobody prints a traceback."""
    (tmp_path / "file").touch()
    options = ("pretrain", "--recipe", "debug", "--no-hf", "--steps", 1, "--data.cache", tmp_path / "corpora")
    done = run("-m", "apps.llm", *options, "--nproc", 2, "--out", tmp_path / "file" / "run")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if "file/run" in line]
    assert lines == [f"error: {tmp_path / 'file' / 'run'}: Not a directory; choose another path"]
    assert [line for line in done.stderr.splitlines() if "error" in line.lower()] == lines


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ("text.txt",)),
        (b"fine\xff\xfe", ("text.txt", "UTF-8")),
        (b"too little", ("tokens",)),
    ],
)
def test_bad_text(capsys, tmp_path: Path, content: bytes, expected: tuple) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    options = ("--data.path", text, "--data.suffixes", ".txt", "--data.heldout-fraction", 0)
    said = refusal(capsys, "pretrain", "--out", tmp_path / "run", *options)
    for word in expected:
        assert word in said


def test_a_broken_record_is_named_or_skipped_and_counted(capsys, tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text('{"text": "a fine text, and long enough"}\n{"txt": "misspelled"}\n' * 3)
    options = ("--data.path", records, "--data.heldout-fraction", 0, "--data.cache", tmp_path / "corpora")
    said = refusal(capsys, "pretrain", "--data.suffixes", ".jsonl", "--out", tmp_path / "run", *options)
    assert "records.jsonl" in said
    assert "2" in said
    printed = llm("tokenize", *options, "--data.tokenizer", "byte", "--data.on-error", "skip", "--out", tmp_path)
    assert "skipped 3 records: 3 missing field" in printed


def test_a_second_run_does_not_write_over_the_first(capsys, tmp_path: Path) -> None:
    options = ("pretrain", "--recipe", "debug", "--steps", 1, "--no-hf", "--out", tmp_path / "run")
    llm(*options, "--data.cache", tmp_path / "corpora")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert "--resume" in refusal(capsys, *options, "--data.cache", tmp_path / "corpora")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before

    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    shards = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(shards, shards.stat().st_size // 2)
    said = refusal(capsys, *options, "--data.cache", tmp_path / "corpora", "--resume", "--steps", 2)
    assert "step-00000001" in said
