"""The commands without --model: what the pipeline that comes with the program paints, and what learns from it."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from PIL import Image

from apps.diffusion.demo.captions import caption, subject_prompt, things
from apps.diffusion.demo.metrics import things_seen
from apps.diffusion.demo.pictures import as_pixels, write_subject_folder
from apps.diffusion.loading import load_pipeline
from apps.diffusion.pipeline import EMBEDDED
from tests.support.command import run

RIGHT = 0.9
"""share of pictures whose shape, colour and ground a viewer calls what the caption says"""


def test_what_is_painted_is_what_the_captions_say(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    shown = things()[::5]  # every colour on every ground, in shapes of which each is there as often as another
    (tmp_path / "prompts.txt").write_text("\n".join(map(caption, shown)))
    options = ("--prompts", tmp_path / "prompts.txt", "--batch", 24, "--steps", 15, "--guidance", 3)
    done = run("-m", "apps.diffusion", "sample", *options, "--out", tmp_path / "out", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    painted = as_pixels(Image.open(path) for path in sorted((tmp_path / "out").glob("*.png")))
    found = asdict(things_seen(painted, shown))
    assert min(found[name] for name in ("shape", "colour", "ground")) >= RIGHT, found
    mixed = asdict(things_seen(painted, shown[::-1]))
    assert max(mixed[name] for name in ("shape", "colour", "ground")) < 0.5, "the captions of other pictures are wrong"


def test_dreambooth_begins_with_it(tmp_path: Path) -> None:
    subject = write_subject_folder(tmp_path / "subject")
    options = ("--instance-dir", subject, "--instance-prompt", subject_prompt(), "--steps", 2, "--device", "cpu")
    out = tmp_path / "out"
    done = run("-m", "apps.diffusion", "dreambooth", *options, "--optim.lr", "1e-5", "--out", out)
    assert done.returncode == 0, done.stderr
    before, after = load_pipeline(EMBEDDED), load_pipeline(out)
    moved = {
        name: (parameter - after.unet.get_parameter(name)).abs().max().item()
        for name, parameter in before.unet.named_parameters()
    }
    assert 1e-6 < max(moved.values()) == pytest.approx(2e-5, rel=0.1), "two steps of Adam from where it was"
    same = zip(before.text_encoder.parameters(), after.text_encoder.parameters())
    assert all(torch.equal(one, other) for one, other in same)
