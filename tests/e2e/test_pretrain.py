"""The real commands on real text: train, stop, resume on other meshes, evaluate, generate, export, fine-tune."""

import concurrent
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from core.checkpoint import complete_steps, read_full
from tests.support.command import Forked, ended, hang, llm, losses, metrics, run, summary

STEPS = 3
TEXT = ("--data.path", Path(concurrent.__file__).parent, "--data.heldout-fraction", 0.3)
"""A package of which a short file is held out: five batches, the last of them ragged."""
SHALLOW = ("--recipe", "debug", "--model.num-layers", 4, "--data.global-batch", 12, "--precision", "fp64", *TEXT)
"""The recipe with 4 of its 16 layers, enough for stages of unequal length, and half of its rows."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpora")


@pytest.fixture
def pretrain(corpora: Path):
    """`llm pretrain --recipe debug`, a quarter as deep and in fp64, with more options; the run's folder."""

    def call(out: Path, *options: object) -> Path:
        llm("pretrain", *SHALLOW, "--data.cache", corpora, "--out", out, *options)
        return out

    return call


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Path:
    """Uninterrupted steps on one rank: what every other way of running is compared with."""
    out = tmp_path_factory.mktemp("one_rank") / "run"
    llm("pretrain", *SHALLOW, "--steps", STEPS, "--data.cache", corpora, "--out", out)
    return out


def test_debug_learns_and_leaves_a_run_folder(one_rank: Path) -> None:
    rows = metrics(one_rank)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < 0.95 * rows[0]["loss"]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    figures = summary(one_rank)
    assert figures["status"] == "complete"
    assert figures["device_peak_bytes"] > 0
    assert 0 < figures["heldout_bits_per_byte"] < 8
    assert json.loads((one_rank / "config.json").read_text())["steps"] == STEPS
    assert (one_rank / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_adafactor_learns_on_shards_what_one_rank_learns(pretrain, tmp_path: Path) -> None:
    """On a batch that grows after two steps."""
    options = ("--steps", 3, "--optim.name", "adafactor", "--optim.lr", 1e-2, "--data.ramp.start", 6)
    options = (*options, "--data.ramp.steps", 2)
    one = pretrain(tmp_path / "one", *options)
    shards = pretrain(tmp_path / "shards", *options, "--nproc", 2, "--zero", 3)
    assert losses(shards) == pytest.approx(losses(one), rel=1e-9)
    assert losses(one)[-1] < losses(one)[0]
    tokens = [round(row["tokens_per_s"] * row["step_s"]) for row in metrics(one)]
    assert tokens == [tokens[-1] // 2] * 2 + [tokens[-1]]


def test_hugging_face_folder_is_the_model(one_rank: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from core.models import load_pretrained

    theirs = AutoModelForCausalLM.from_pretrained(one_rank / "hf", dtype=torch.float64)
    ids = torch.tensor([AutoTokenizer.from_pretrained(one_rank / "hf").encode("import os\n")])
    ours = load_pretrained(one_rank / "hf", dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--nproc", 3), marks=pytest.mark.soak),
        ("--nproc", 4, "--mesh.tp", 2, "--zero", 3, "--microbatch", 5),
        pytest.param(
            ("--nproc", 4, "--mesh.dp-replicate", 2, "--zero", 2, "--recompute.mode", "full"), marks=pytest.mark.soak
        ),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_any_mesh_sees_what_one_rank_sees(one_rank: Path, pretrain, tmp_path: Path, options: tuple) -> None:
    out = pretrain(tmp_path / "run", "--steps", STEPS, *options)
    assert losses(out) == pytest.approx(losses(one_rank), rel=1e-10)
    assert summary(out)["heldout_bits_per_byte"] == pytest.approx(summary(one_rank)["heldout_bits_per_byte"], rel=1e-10)


def test_shared_sequences_learn_what_one_rank_learns_and_go_on_elsewhere(one_rank: Path, pretrain, tmp_path: Path):
    """A ring of three, whose parts of 32 tokens are ragged; then heads exchanged by two."""
    out = pretrain(tmp_path / "run", "--steps", STEPS, "--stop-after", 2, "--nproc", 3, "--mesh.cp", 3, "--zero", 2)
    exchange = ("--mesh.cp", 2, "--mesh.cp-mode", "ulysses")
    pretrain(out, "--steps", STEPS, "--resume", "--nproc", 2, "--zero", 3, *exchange)
    assert losses(out) == pytest.approx(losses(one_rank), rel=1e-9)
    assert summary(out)["heldout_bits_per_byte"] == pytest.approx(summary(one_rank)["heldout_bits_per_byte"], rel=1e-9)


def test_stages_learn_what_one_rank_learns_and_go_on_as_others(one_rank: Path, pretrain, tmp_path: Path) -> None:
    """Two ranks of two stages each, twice; then three of unequal length, which evaluate and export."""
    turn = ("--nproc", 4, "--mesh.pp", 2, "--zero", 1, "--pipeline.schedule", "zbv", "--pipeline.microbatches", 5)
    out = pretrain(tmp_path / "run", "--steps", STEPS, "--stop-after", 2, *turn)
    pretrain(out, "--steps", STEPS, "--resume", "--nproc", 3, "--mesh.pp", 3, "--pipeline.cost", "measured")
    assert losses(out) == pytest.approx(losses(one_rank), rel=1e-9)
    assert summary(out)["heldout_bits_per_byte"] == pytest.approx(summary(one_rank)["heldout_bits_per_byte"], rel=1e-9)
    assert (out / "hf" / "model.safetensors").exists()


def test_gemini_learns_the_same_and_its_checkpoints_go_on_without_it(one_rank: Path, pretrain, tmp_path: Path) -> None:
    """A step in a tight budget, one without, and one in one again, on two ranks."""
    budget = ("--gemini.budget", "4MB", "--microbatch", 4, "--recompute.mode", "full")
    out = pretrain(tmp_path / "run", "--steps", STEPS, "--stop-after", 1, *budget)
    figures = summary(out)
    assert figures["device_peak_bytes"] <= 4_000_000
    assert figures["gemini_moved_bytes"] > 0
    pretrain(out, "--steps", STEPS, "--stop-after", 2, "--resume")
    pretrain(out, "--steps", STEPS, "--resume", "--nproc", 2, "--zero", 3, *budget)
    assert losses(out) == pytest.approx(losses(one_rank), rel=1e-9)
    assert summary(out)["heldout_bits_per_byte"] == pytest.approx(summary(one_rank)["heldout_bits_per_byte"], rel=1e-9)


def test_torchrun_runs_the_same_command(one_rank: Path, corpora: Path, tmp_path: Path) -> None:
    done = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "apps.llm", "pretrain"),
        *(*SHALLOW, "--steps", STEPS, "--zero", 2),
        *("--data.cache", corpora, "--out", tmp_path / "run"),
    )
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(one_rank), rel=1e-10)


def test_resume_on_the_same_mesh_is_exact(one_rank: Path, pretrain, tmp_path: Path) -> None:
    again = pretrain(tmp_path / "again", "--steps", STEPS, "--stop-after", 2)
    assert [row["step"] for row in metrics(again)] == [1, 2]
    pretrain(again, "--steps", STEPS, "--resume")
    assert losses(again) == losses(one_rank)
    assert summary(again)["heldout_bits_per_byte"] == summary(one_rank)["heldout_bits_per_byte"]


@pytest.mark.parametrize("with_3d", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_every_form_of_tensor_parallelism_goes_on_where_another_stopped(
    pretrain, tmp_path: Path, with_3d: bool
) -> None:
    """2D on 2 x 2, then 3D on 2 x 2 x 2, then 2.5D on 1 x 1 x 2; evaluated and exported."""
    short = ("--steps", 3, "--model.num-layers", 2)
    one = pretrain(tmp_path / "one", *short)
    out = pretrain(tmp_path / "run", *short, "--stop-after", 1, "--nproc", 4, "--mesh.tp", 4, "--mesh.tp-mode", "2d")
    if with_3d:
        pretrain(out, *short, "--stop-after", 2, "--resume", "--nproc", 8, "--mesh.tp", 8, "--mesh.tp-mode", "3d")
    tesseract = ("--mesh.tp", 2, "--mesh.tp-mode", "2.5d", "--mesh.tp-depth", 2)
    pretrain(out, *short, "--resume", "--nproc", 2, *tesseract)
    assert losses(out) == pytest.approx(losses(one), rel=1e-9)
    assert summary(out)["heldout_bits_per_byte"] == pytest.approx(summary(one)["heldout_bits_per_byte"], rel=1e-9)
    assert (out / "hf" / "model.safetensors").exists()


SHORT = ("pretrain", "--recipe", "debug", "--model.num-layers", 4, "--data.global-batch", 4, "--steps", 100000)


def _long(corpora: Path, out: Path, *options: object) -> tuple[object, ...]:
    """The words of a long run of short steps."""
    return ("-m", "apps.llm", *SHORT, "--data.cache", corpora, "--out", out, *options)


def _under_way(process: subprocess.Popen | Forked, out: Path, saved: bool = False) -> None:
    """Wait until it has written some steps; with `saved`, a checkpoint too, which is written beside the steps."""
    deadline = time.monotonic() + 240
    while (
        not (out / "metrics.jsonl").exists()
        or len(metrics(out)) < 5
        or (saved and not complete_steps(out / "checkpoints"))
    ):
        assert process.poll() is None, process.communicate()[1]
        if time.monotonic() > deadline:
            hang(process, "no steps within 240 s")
        time.sleep(0.1)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_sigterm_saves_and_exits_0(corpora: Path, tmp_path: Path, num_ranks: int) -> None:
    out = tmp_path / "run"
    with Forked(*_long(corpora, out, "--nproc", num_ranks)) as process:
        _under_way(process, out)
        process.send_signal(signal.SIGTERM)
        assert ended(process, 120) == 0, process.communicate()[1]
    assert summary(out)["status"] == "stopped"
    assert max(complete_steps(out / "checkpoints")) == metrics(out)[-1]["step"]


def test_a_stage_that_dies_brings_the_job_down(corpora: Path, tmp_path: Path) -> None:
    """The ranks that wait for it, and those that wait for these, do not wait on (until their timeout, half an hour)."""
    out = tmp_path / "run"
    with Forked(*_long(corpora, out, "--nproc", 4, "--mesh.pp", 4)) as process:
        _under_way(process, out)
        ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        assert len(ranks) == 4
        os.kill(ranks[2], signal.SIGKILL)
        assert ended(process, 60) not in (0, 2)


def test_kill_loses_no_more_than_since_the_last_checkpoint(corpora: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Forked(*_long(corpora, out, "--checkpoint.every", 2)) as process:
        _under_way(process, out, saved=True)
        process.send_signal(signal.SIGKILL)
        assert ended(process, 30) == -signal.SIGKILL
    last = max(complete_steps(out / "checkpoints"))
    steps = last + 3
    llm(*SHORT, "--stop-after", steps, "--resume", "--data.cache", corpora, "--out", out)
    assert [row["step"] for row in metrics(out)] == list(range(1, steps + 1))


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        pytest.param("2bw", ("--pipeline.microbatches", 2), marks=pytest.mark.soak),
        ("pipedream", ("--pipeline.clip", "last")),
        pytest.param("pipedream_sync", ("--pipeline.microbatches", 2), marks=pytest.mark.soak),
    ],
)
def test_steps_that_overlap_are_killed_and_go_on_to_the_bit(
    corpora: Path, tmp_path: Path, schedule: str, options: tuple
):
    """With kill -9, at whatever moment it is then, of a run that stops for checkpoints; the other one does not."""
    out, straight = tmp_path / "run", tmp_path / "straight"
    options = ("--nproc", 2, "--mesh.pp", 2, "--pipeline.schedule", schedule, *options, "--no-hf")
    with Forked(*_long(corpora, out, *options, "--checkpoint.every", 3)) as process:
        _under_way(process, out, saved=True)
        process.send_signal(signal.SIGKILL)
        assert ended(process, 30) == -signal.SIGKILL
    steps = max(complete_steps(out / "checkpoints")) + 4
    for folder, more in ((out, ("--resume", "--checkpoint.every", 3)), (straight, ("--checkpoint.every", 0))):
        llm(*SHORT, *options, *more, "--stop-after", steps, "--data.cache", corpora, "--out", folder)
    found, expected = (read_full(folder / "checkpoints" / f"step-{steps:08d}") for folder in (out, straight))
    assert found.keys() == expected.keys()
    assert any(name.startswith("stashed/") for name in expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert losses(out) == losses(straight)


@pytest.mark.parametrize(
    "options",
    [
        ("parameter_server",),
        pytest.param(("hogwild", "--optim.name", "sgd", "--optim.momentum", 0), marks=pytest.mark.soak),
    ],
    ids=lambda options: options[0],
)
def test_a_worker_dies_and_all_go_on_until_they_are_stopped(corpora: Path, tmp_path: Path, options: tuple) -> None:
    """Workers that do not wait for one another: kill -9 of one ends all, and SIGTERM stops all after the same step."""
    out = tmp_path / "run"
    options = ("--nproc", 2, "--no-hf", "--checkpoint.every", 4, "--local.async", *options)
    with Forked(*_long(corpora, out, *options)) as process:
        _under_way(process, out)
        ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        os.kill(ranks[1], signal.SIGKILL)
        assert ended(process, 60) not in (0, 2)
    seen = metrics(out)[-1]["step"]
    with Forked(*_long(corpora, out, *options, "--resume")) as process:
        deadline = time.monotonic() + 240
        # Rows behind the checkpoint go at the start: all, where the kill came before the first.
        while len(metrics(out)) < seen + 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert ended(process, 120) == 0, process.communicate()[1]
    figures, rows = summary(out), metrics(out)
    assert figures["status"] == "stopped"
    assert [row["step"] for row in rows] == list(range(1, figures["step"] + 1))
    assert max(complete_steps(out / "checkpoints")) == figures["step"] >= seen + 2
    assert figures["most_staleness"] <= 3


def test_fp16_counts_skipped_steps(pretrain, tmp_path: Path) -> None:
    out = pretrain(tmp_path / "run", "--steps", 3, "--precision", "fp16", "--loss-scale.initial", 1e8)
    assert summary(out)["skipped_steps"] > 0
    assert metrics(out)[-1]["loss_scale"] < 1e8


def test_evaluate_generate_export_and_finetune(one_rank: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("import os\n\n\ndef main():\n    return os.getcwd()\n" * 20)
    figures = tmp_path / "figures.json"
    for model in (one_rank, one_rank / "hf"):
        llm("evaluate", "--model", model, "--data.path", text, "--data.sequence-length", 32, "--out", figures)
        bits = json.loads(figures.read_text())["bits_per_byte"]
        assert 0 < bits < 8
    written = llm("generate", "--model", one_rank, "--prompt", "import ", "--max-new-tokens", 12, "--temperature", 0)
    assert written.startswith("import ")
    assert written == llm(
        "generate", "--model", one_rank / "hf", "--prompt", "import ", "--max-new-tokens", 12, "--temperature", 0
    )
    llm("export", "--model", one_rank, "--out", tmp_path / "hf16", "--dtype", "bf16")
    assert (tmp_path / "hf16" / "model.safetensors").stat().st_size < 0.6 * (
        one_rank / "hf" / "model.safetensors"
    ).stat().st_size

    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": f"{i} + 1 = ", "completion": str(i + 1)}) + "\n" for i in range(64)))
    for source in (one_rank, one_rank / "hf"):
        tuned = tmp_path / f"tuned-{source.name}"
        llm(
            *("finetune", "--model", source, "--data.path", pairs, "--data.pairs", "--data.sequence-length", 32),
            *("--steps", 5, "--optim.lr", 5e-3, "--nproc", 2, "--zero", 3, "--out", tuned),
        )
        assert losses(tuned)[-1] < 0.9 * losses(tuned)[0]
    assert losses(tmp_path / "tuned-run") == pytest.approx(losses(tmp_path / "tuned-hf"), rel=1e-3)


SIX_RUNS = """
import sys
from apps.llm.pretrain import main
for dim, steps in ((8, 2), (8, 4), (16, 2), (16, 8), (24, 4), (24, 8)):
    shape = ["--model.dim", str(dim), "--model.num-layers", "1", "--model.num-heads", "2", "--model.ffn-dim", str(dim)]
    main([*sys.argv[2:], *shape, "--steps", str(steps), "--no-hf", "--out", f"{sys.argv[1]}/{dim}-{steps}"])
"""


def test_a_scaling_law_of_real_runs(corpora: Path, tmp_path: Path) -> None:
    file = tmp_path / "six.py"
    file.write_text(SIX_RUNS)
    options = ("--recipe", "debug", "--data.global-batch", 12, *TEXT, "--data.cache", corpora)
    done = run(file, tmp_path, *options)
    assert done.returncode == 0, done.stderr
    folders = sorted(path.parent for path in tmp_path.glob("*/summary.json"))
    assert len(folders) == 6
    said = llm("scaling", *folders, "--budget", 1e9, "--samples", 40, "--draw", tmp_path / "law.png")
    assert "6 runs" in said
    assert "1e+09 FLOPs = 6 N D should train" in said
    found = json.loads(llm("scaling", *folders, "--budget", 1e9, "--samples", 40, "--json"))
    for ran in found["runs"]:
        assert ran["loss"] == summary(Path(ran["folder"]))["heldout_loss"]
        assert ran["fitted"] == pytest.approx(ran["loss"], rel=0.05)
    refused = run("-m", "apps.llm", "scaling", *folders[:5])
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: 5 runs, and a law of five constants is fitted to at least 6; give more folders of runs of megalith llm "
        "pretrain\n"
    )


def test_plan_and_recipes() -> None:
    planned = llm("plan", "--recipe", "gpt3_175b", "--mesh.tp", 8, "--nproc", 128, "--zero", 3, "--gpu", "A100")
    assert "GiB" in planned
    assert "tokens/s" in planned
    assert "opt_175b" in llm("recipes")
