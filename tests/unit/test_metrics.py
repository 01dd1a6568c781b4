"""The record of a run, its display, its figures."""

import io
import json
import lzma
import subprocess
import sys
import types
import zlib

import pytest
import torch
from rich.console import Console

from core.config import UserError
from core.metrics import (
    Progress,
    RunLog,
    bits_per_byte,
    compression_baselines,
    mfu,
    peak_flops,
    plot_loss,
    read_metrics,
    transformer_flops_per_token,
)
from core.metrics.throughput import gpu_peak_flops


def write_steps(folder, steps, **options):
    with RunLog(folder, active=True, tensorboard=False, **options) as log:
        for step in steps:
            log.write({"step": step, "loss": 1.0 / step})


def test_each_row_is_in_the_file_when_write_returns(tmp_path):
    log = RunLog(tmp_path, active=True, tensorboard=False)
    log.write({"step": 1, "loss": 2.5})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.5}\n'
    log.close()


def test_a_killed_process_leaves_whole_rows(tmp_path):
    code = (
        "import os, signal; from core.metrics import RunLog\n"
        f"log = RunLog({str(tmp_path)!r}, active=True, tensorboard=False)\n"
        "for step in range(1, 4): log.write({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_resuming_drops_later_rows_and_a_torn_line(tmp_path):
    write_steps(tmp_path, [1, 2, 3, 4])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    write_steps(tmp_path, [3], resume_step=2)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_fresh_run_starts_anew(tmp_path):
    write_steps(tmp_path, [1, 2])
    write_steps(tmp_path, [1])
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_a_loss_that_is_not_finite_is_null(tmp_path):
    with RunLog(tmp_path, active=True, tensorboard=False) as log:
        log.write({"step": 1, "loss": float("nan"), "norms": [float("inf"), 1.0]})
        log.summarise({"loss": float("nan")})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "norms": [None, 1.0]}]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": None}


def test_summary_merges_and_leaves_nothing_aside(tmp_path):
    with RunLog(tmp_path, active=True, tensorboard=False) as log:
        log.summarise({"tokens_per_s": 10.0, "steps": 1})
        log.summarise({"steps": 2})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"tokens_per_s": 10.0, "steps": 2}
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "summary.json"}


def test_other_ranks_write_nothing(tmp_path):
    with RunLog(tmp_path / "run", active=False, tensorboard=True, wandb_project="p") as log:
        log.write({"step": 1})
        log.summarise({"a": 1})
    assert not (tmp_path / "run").exists()


def test_tensorboard_gets_the_scalars(tmp_path):
    pytest.importorskip("tensorboard", reason="an optional extra; the dev extra installs it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(tmp_path, active=True) as log:
        log.write({"step": 3, "loss": 1.5, "note": "text is no scalar"})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(3, 1.5)]


@pytest.mark.parametrize(
    ("module", "options"),
    [("torch.utils.tensorboard", {"tensorboard": True}), ("wandb", {"tensorboard": False, "wandb_project": "p"})],
)
def test_a_tracker_that_is_not_installed_is_named(tmp_path, monkeypatch, module, options):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match="not installed; pip install"):
        RunLog(tmp_path, active=True, **options)


def test_wandb_keeps_its_run_over_a_resume(tmp_path, monkeypatch):
    inits, logged = [], []

    def init(**options):
        inits.append(options)
        return types.SimpleNamespace(
            id="abc", log=lambda row, step: logged.append((step, row)), summary={}, finish=lambda: None
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    write_steps(tmp_path, [1], wandb_project="p")
    write_steps(tmp_path, [2], wandb_project="p", resume_step=1)
    assert [i["id"] for i in inits] == [None, "abc"]
    assert logged == [(1, {"loss": 1.0}), (2, {"loss": 0.5})]


def progress_text(num_steps, rows, *, terminal, **options):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, soft_wrap=True)
    with Progress(num_steps, console=console, **options) as progress:
        for row in rows:
            progress.update(row)
    return out.getvalue()


def test_plain_lines_are_few_and_whole():
    rows = [{"step": s, "loss": 2.0, "mfu": 0.5, "memory_bytes": 3e9} for s in range(1, 1004)]
    lines = progress_text(1003, rows, terminal=False).splitlines()
    assert len(lines) == 22
    assert lines[0].startswith("step    1/1003  loss 2.0000  MFU 50.0 %  memory 2.79 GiB  ETA")
    assert lines[-1].startswith("step 1003/1003")
    assert lines[-1].endswith("ETA 0:00")


def test_a_short_run_prints_every_step_and_a_resumed_one_the_rest():
    rows = [{"step": s} for s in range(6, 11)]
    assert len(progress_text(10, rows, terminal=False, first_step=5).splitlines()) == 5


def test_live_display_shows_the_last_row():
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.125, "skipped_steps": 1}]
    text = progress_text(2, rows, terminal=True)
    assert "step 2/2" in text
    assert "2.1250" in text
    assert "skipped" in text


def test_other_ranks_show_nothing():
    assert progress_text(1, [{"step": 1}], terminal=True, active=False) == ""


def test_eta_is_the_pace_of_the_last_steps(monkeypatch):
    clock = iter([0.0, 2.0, 4.0])
    monkeypatch.setattr("core.metrics.progress.time.monotonic", lambda: next(clock))
    progress = Progress(13, console=Console(file=io.StringIO()))
    for step in (1, 2, 3):
        progress.update({"step": step})
    assert progress.eta_s() == 20.0


def test_flops_of_a_token_count_every_product_once():
    """A two-layer decoder by hand: 2 FLOPs per weight, q k^T and the sum over v; backward twice the forward."""
    dim, length, vocabulary = 4, 8, 10
    per_block = dim * 3 * dim + dim * dim + 2 * dim * 4 * dim
    forward = 2 * (2 * per_block + dim * vocabulary) + 2 * (2 * 2 * length * dim)
    num_parameters = 2 * per_block + dim * vocabulary
    assert transformer_flops_per_token(num_parameters, 2, dim, length, backward=False) == forward
    assert transformer_flops_per_token(num_parameters, 2, dim, length) == 3 * forward


def test_mfu():
    assert mfu(1000, 6e9, 24e12, num_devices=2) == pytest.approx(0.125)
    assert mfu(1000, 6e9, None) is None


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, False, 312),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156),
        ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5),
        ("NVIDIA H100 PCIe", torch.float16, False, 756),
        ("NVIDIA H100 80GB HBM3", torch.float16, False, 989.4),
        ("NVIDIA H200", torch.bfloat16, False, 989.4),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, False, 165.2),
        ("Tesla T4", torch.float16, False, 65),
        ("Tesla T4", torch.bfloat16, False, None),
        ("NVIDIA L40S", torch.bfloat16, False, 362),
        ("NVIDIA RTX A1000", torch.float16, False, None),
    ],
)
def test_gpu_peaks_by_name(name, dtype, tf32, tflops):
    assert gpu_peak_flops(name, dtype, tf32=tf32) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_cpu_peak_is_measured_once():
    measured = peak_flops("cpu", torch.float32)
    assert measured is not None
    assert measured > 1e7  # a machine that is busy with ten other things reaches a hundred million
    assert peak_flops("cpu", torch.float32) == measured


def test_bits_per_byte_and_compressors():
    data = bytes(range(256)) * 64
    assert bits_per_byte(8 * 0.6931471805599453 * 100, 100) == pytest.approx(8.0)
    baselines = compression_baselines(data)
    assert baselines["xz_bits_per_byte"] == 8 * len(lzma.compress(data, preset=9)) / len(data)
    # gzip's header and trailer are 12 bytes longer than zlib's
    assert baselines["gzip_bits_per_byte"] == 8 * (len(zlib.compress(data, 9)) + 12) / len(data)


def test_plot_draws_rows_with_gaps(tmp_path):
    pytest.importorskip("matplotlib", reason="an optional extra; the llm extra installs it")
    with RunLog(tmp_path, active=True, tensorboard=False) as log:
        for step in range(1, 121):
            log.write({"step": step, "loss": float("nan") if step == 7 else 9.0 / step, "lr": 1e-3})
    png = plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", series={"held-out": [(10, 1.0), (20, 0.5)]})
    assert png.read_bytes().startswith(b"\x89PNG")
