"""What the embedded pipeline is made of, and what its training starts from."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from apps.diffusion.demo import __main__ as demo
from apps.diffusion.demo import autoencoder, captions, metrics, prepare, sizes
from apps.diffusion.demo.detector import Detector
from apps.diffusion.demo.sheet import SIDE, before_and_after
from apps.diffusion.generate import Sampling
from apps.diffusion.loading import load_pipeline
from apps.diffusion.pipeline import Pipeline, save_pipeline
from core.config import UserError

MOST_BYTES = 6_000_000


def test_training_starts_from_what_follows_from_a_seed(tmp_path: Path) -> None:
    config = autoencoder.autoencoder(tmp_path, steps=2)
    config = dataclasses.replace(config, num_pictures=16, num_heldout=4, global_batch=2, device="cpu")
    pictures, start = prepare.prepare(tmp_path / "one", config, config, num_pictures=6)
    assert len(list(pictures.glob("*.png"))) == 6
    files = {path.relative_to(start): path.read_bytes() for path in start.rglob("*") if path.is_file()}
    assert sum(map(len, files.values())) < MOST_BYTES
    assert prepare.prepare(tmp_path / "one", config, config, num_pictures=6) == (pictures, start), "what is there stays"
    _, again = prepare.prepare(tmp_path / "two", config, config, num_pictures=6)
    assert files == {path.relative_to(again): path.read_bytes() for path in again.rglob("*") if path.is_file()}
    pipeline = load_pipeline(start)
    assert pipeline.image_size == (sizes.PIXELS, sizes.PIXELS)
    assert pipeline.prediction_type == "v_prediction"
    # fp16 files of all three modules: a plain load makes them one format
    plain = StableDiffusionPipeline.from_pretrained(start, local_files_only=True)
    plain.set_progress_bar_config(disable=True)
    painted = plain(["a red star"], num_inference_steps=2, output_type="pt").images
    assert painted.shape == (1, 3, sizes.PIXELS, sizes.PIXELS)


def test_a_network_that_begins_as_identity_passes_signals_and_predicts_nothing() -> None:
    torch.manual_seed(0)
    unet, vae = sizes.tiny_unet(), sizes.tiny_vae()
    latents, text = torch.randn(2, 4, 8, 8), torch.randn(2, sizes.PROMPT_TOKENS, 64)
    with torch.no_grad():
        assert not unet(latents, torch.tensor(500), text).sample.any()
        spread = [
            hidden.std().item()
            for hidden in _outputs(vae.decoder.up_blocks, lambda: vae.decode(torch.randn(2, 4, 8, 8)))
        ]
    assert all(0.3 < one < 3 for one in spread), f"nothing fades or swells on the way: {spread}"


def _outputs(blocks: torch.nn.ModuleList, run) -> list[torch.Tensor]:
    """What each block gives while `run` runs."""
    seen: list[torch.Tensor] = []
    handles = [block.register_forward_hook(lambda module, args, output: seen.append(output)) for block in blocks]
    run()
    for handle in handles:
        handle.remove()
    return seen


def test_the_sheet_has_each_prompt_before_and_after(tmp_path: Path) -> None:
    (tmp_path / "subject").mkdir()
    Image.new("RGB", (32, 32), "teal").save(tmp_path / "subject" / "0.png")
    prompts = [captions.subject_prompt("white"), "a red star"]
    before = [Image.new("RGB", (32, 32), colour) for colour in ("red", "red", "blue", "blue")]
    after = [Image.new("RGB", (32, 32), colour) for colour in ("lime", "lime", "black", "black")]
    sheet = before_and_after(tmp_path / "subject", prompts, before, after)
    counts = {colour: count for count, colour in sheet.getcolors(1 << 16)}
    area = SIDE * SIDE
    assert counts[(0, 128, 128)] == area
    for colour in ((255, 0, 0), (0, 0, 255), (0, 255, 0)):
        assert counts[colour] == 2 * area
    pixel = sheet.getpixel((20, sheet.height // 3 + 20 + SIDE // 2))
    assert pytest.approx(pixel) == (255, 0, 0), "before stands at the left"


def test_the_demo_runs_from_pictures_to_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    tokenizer = sizes.write_tokenizer(captions.words(), tmp_path / "tokenizer")
    modules = sizes.tiny_unet(), sizes.tiny_vae(0.7), sizes.tiny_text_encoder(tokenizer)
    weights = save_pipeline(Pipeline(*modules, tokenizer, sizes.tiny_schedule()), tmp_path / "weights")
    monkeypatch.setattr(demo, "train_detector", lambda vae, seed: Detector().eval())
    monkeypatch.setattr(demo, "SHOWN", (captions.subject_prompt("white"), "a red star on a white ground"))
    monkeypatch.setattr(metrics, "class_things", lambda repeats: [captions.Thing("star", "red", "white")] * repeats)
    monkeypatch.setattr(metrics, "all_things", lambda: captions.things()[:4])
    paint, asked = demo.painter, list[int]()

    def painter(pipeline: Pipeline, sampling: Sampling) -> metrics.Paint:
        asked.append(sampling.steps)
        return paint(pipeline, replace(sampling, guidance=1.0))

    monkeypatch.setattr(demo, "painter", painter)
    out = tmp_path / "out"
    options = ["--model", str(weights), "--out", str(out), "--steps", "1", "--repeats", "1", "--class-images", "2"]
    options += ["--sampling-steps", "2"]
    assert demo.main(options) == 0
    assert asked == [2, 2]
    summary = json.loads((out / "summary.json").read_text())
    assert {"seen", "unseen", "leak", "class_attributes", "things_seen"} < set(summary["before"])
    assert set(summary["after"]["subject_seen"]) == set(captions.GROUNDS)
    assert Image.open(out / "before-after.png").size[0] > 8 * SIDE
    assert len(list((out / "class").glob("*.png"))) == 2
    assert len(list((out / "subject").glob("*.png"))) == 4
    taught = load_pipeline(out / "pipeline")
    assert any(not torch.equal(a, b) for a, b in zip(taught.unet.parameters(), modules[0].parameters()))
    said = capsys.readouterr().out
    assert "drift of everything, as seen" in said
    assert "subject on black" in said
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.png").touch()
    with pytest.raises(UserError, match="move it away, or give another --out"):
        demo.main(["--model", str(weights), "--out", str(tmp_path / "mine")])
    assert (tmp_path / "mine" / "photo.png").exists()
    with pytest.raises(UserError, match="holds no"):
        demo.main(["--model", str(tmp_path / "nowhere"), "--out", str(out)])
    assert (out / "summary.json").exists(), "an earlier run is there as long as the next cannot begin"
