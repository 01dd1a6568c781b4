"""The comparison with diffusers' script: both are given the same, and are watched alike."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import dreambooth, dreambooth_run
from benchmarks.run import Options
from core.config import UserError

SCRIPT = """
import sys
import torch
from torchvision import transforms
from PIL import Image
[steps] = (int(word.removeprefix("--max_train_steps=")) for word in sys.argv[1:])
to_pixels = transforms.Compose([transforms.Resize(8, interpolation=transforms.InterpolationMode.BILINEAR),
    transforms.CenterCrop(8), transforms.ToTensor(), transforms.Normalize([0.5], [0.5])])
pixels = to_pixels(Image.new("RGB", (16, 8), (255, 0, 0)))
assert pixels.shape == (3, 8, 8) and pixels[0].eq(1).all() and pixels[1].eq(-1).all()
weight = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.AdamW([weight])
for step in range(steps):
    (weight @ weight).backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the figures go, and what is run."""
    (tmp_path / "script.py").write_text(SCRIPT)
    for name in ("torchvision", "torchvision.transforms"):
        monkeypatch.setitem(sys.modules, name, None)  # a machine without it
    monkeypatch.setattr(sys, "argv", [])
    return [str(tmp_path / "seen.json"), str(tmp_path / "script.py")]


def test_a_run_is_watched_from_outside(tmp_path: Path, script: list[str]) -> None:
    assert dreambooth_run.main([*script, "--max_train_steps=4"]) == 0
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert "profile" not in seen
    assert len(seen["times_s"]) == 4
    assert seen["times_s"] == sorted(seen["times_s"])
    assert len(seen["cpu_s"]) == 4
    assert seen["cpu_s"] == sorted(seen["cpu_s"])
    assert seen["rss_bytes"] > 1e7
    assert dreambooth.steps_per_s({"times_s": [0, 50, 100, 102, 104]}) == pytest.approx(0.5)
    assert dreambooth.cpu_per_step({"cpu_s": [0, 50, 100, 102, 105]}) == pytest.approx(2.5)


def test_a_profile_is_of_the_steps_behind_the_warm_up(tmp_path: Path, script: list[str]) -> None:
    steps = dreambooth_run.WARM_UP + dreambooth_run.PROFILED
    counts = []
    for more in (0, 20):  # what comes behind does not count
        assert dreambooth_run.main(["--profile", *script, f"--max_train_steps={steps + more}"]) == 0
        seen = json.loads((tmp_path / "seen.json").read_text())
        assert len(seen["times_s"]) == steps + more
        counts.append(seen["profile"].pop("operators"))
        assert 0 < seen["profile"]["gradients and copies"] < 1
        assert seen["profile"]["optimizer"] > 0
        assert seen["profile"]["pictures"] == seen["profile"]["convolutions and products"] == 0
    assert 5 < counts[0] < 60
    assert counts[1] == counts[0]


def test_both_are_given_the_same(tmp_path: Path) -> None:
    for name in ("subject", "class"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "0.png")
    folders = tmp_path / "weights", tmp_path / "subject", tmp_path / "class"
    job = dreambooth.DreamBoothJob(*folders, pixels=32, batch=8, steps=7, lr=3e-4, schedule="cosine", train_text=True)
    commands = dreambooth.commands(tmp_path / "script.py", Path("peer/bin/python"))
    ours, theirs = (commands[name](job, tmp_path / "out") for name in ("ours", "diffusers"))
    assert theirs[:2] == ["peer/bin/python", str(tmp_path / "script.py")]
    for mine, other in {
        "model": "pretrained_model_name_or_path", "instance-dir": "instance_data_dir",
        "instance-prompt": "instance_prompt", "class-dir": "class_data_dir", "class-prompt": "class_prompt",
        "num-class-images": "num_class_images", "data.resolution": "resolution",
        "data.global-batch": "train_batch_size",
        "optim.lr": "learning_rate", "optim.schedule.shape": "lr_scheduler", "steps": "max_train_steps",
    }.items():  # fmt: skip
        assert _value(ours, mine) == _value(theirs, other), mine
    assert "--train-text-encoder" in ours
    assert {"--train_text_encoder", "--with_prior_preservation"} <= set(theirs)
    assert list(dreambooth.commands(None, None)) == ["ours"]


def _value(command: list[str], name: str) -> str:
    [found] = [word.partition("=")[2] for word in command if word.startswith(f"--{name}=")]
    return found


def test_a_folder_without_the_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no examples/dreambooth/train_dreambooth\.py; give a checkout of"):
        dreambooth.measure(Options(peers_source=tmp_path))


def test_a_run_that_fails_is_told_by_its_last_words(tmp_path: Path) -> None:
    python = tmp_path / "python"  # whose every program fails
    python.write_text("#!/bin/sh\necho first >&2\necho $PWD $2 $3 $4 >&2\nexit 3\n")
    python.chmod(0o755)
    words = f"{dreambooth.ROOT} benchmarks.dreambooth_run none.json nothing.py"
    with pytest.raises(UserError, match=rf"failed: \['{words}'\]"):
        dreambooth.watched([str(python), "nothing.py"], Path("none.json"))


def test_a_run_finds_what_its_parent_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of a pack are on PYTHONPATH, behind this checkout."""
    given: list[str] = []

    def run(line: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        given.append(options["env"]["PYTHONPATH"])
        return subprocess.CompletedProcess(line, 1, "", "")

    monkeypatch.setattr(dreambooth.subprocess, "run", run)
    for before in ("", "pack"):
        monkeypatch.setenv("PYTHONPATH", before)
        with pytest.raises(UserError, match="failed"):
            dreambooth.watched([sys.executable, "ours"], tmp_path / "none.json")
    assert given == [str(dreambooth.ROOT), f"{dreambooth.ROOT}:pack"]
