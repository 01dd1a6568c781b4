"""Training and drawing by diffusion on a device: what the CPU learns, and the picture that the CPU draws."""

import json
from pathlib import Path

import pytest
import torch

from apps.diffusion import finetune
from apps.diffusion.generate import PictureJob, Sampling, generate
from apps.diffusion.loading import load_pipeline
from apps.diffusion.pipeline import save_pipeline
from tests.support.diffusion_training import tiny_pipeline, write_pictures

pytestmark = pytest.mark.gpu


def test_three_steps_of_diffusion_and_a_picture(tmp_path: Path, device: torch.device) -> None:
    weights = save_pipeline(tiny_pipeline(), tmp_path / "weights")
    images, losses = write_pictures(tmp_path / "pictures", 3), {}
    for turn, where in enumerate(("cpu", device.type)):
        out = tmp_path / f"run-{turn}"
        given = {
            "model": weights,
            "data.images": images,
            "data.global-batch": 2,
            "steps": 3,
            "device": where,
            "out": out,
        }
        finetune.main([*(f"--{name}={value}" for name, value in given.items()), "--log.no-tensorboard"])
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses[turn] = [row["loss"] for row in rows]
    assert len(losses[0]) == 3
    # Noise is drawn on the host, so that a step is the same step anywhere.
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    pictures = {}
    for where in ("cpu", device.type):
        pipeline = load_pipeline(tmp_path / "run-1")
        for module in pipeline.modules.values():
            module.to(where)
        with torch.no_grad():
            ((_, picture),) = generate(pipeline, [PictureJob("a dog", 1)], Sampling("ddim", 3, 7.5), 1)
        pictures[where] = picture.cpu().double()
    assert float((pictures["cpu"] - pictures[device.type]).abs().max()) <= 1e-2
