"""Drawn pictures are what their captions say, the same for the same seed, and the detector can tell."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from apps.diffusion.demo import autoencoder, captions, detector, metrics, pictures, sizes
from apps.diffusion.demo.captions import COLOURS, GROUNDS, SHAPES, SUBJECT_CLASS, Thing, caption
from apps.diffusion.demo.drawing import OUTLINES, Drawing, draw
from tests.support.drawn import PerfectVae, painter


def nearest(pixel: np.ndarray, palette: dict[str, tuple[int, int, int]]) -> str:
    return min(palette, key=lambda name: float(np.square(np.array(palette[name]) - pixel).sum()))


def silhouette(image: Image.Image, colour: tuple[int, int, int], ground: tuple[int, int, int]) -> np.ndarray:
    array = np.asarray(image).astype(float)
    return np.square(array - colour).sum(-1) < np.square(array - ground).sum(-1)


def test_captions_are_true_of_what_is_drawn() -> None:
    for text, drawing in itertools.islice(captions.training_samples(3), 300):
        image = draw(drawing, 32)
        array, words = np.asarray(image).astype(float), text.split()
        centre, corner = array[14:19, 14:19].reshape(-1, 3).mean(0), array[0, 0]
        colours, shapes = [w for w in words if w in COLOURS], [w for w in words if w in SHAPES]
        grounds = [w for w in words if w in GROUNDS]
        assert not colours or nearest(centre, COLOURS) == colours[0], text
        assert not grounds or nearest(corner, GROUNDS) == grounds[0], text
        seen = silhouette(image, drawing.colour, drawing.ground)
        overlap = {}
        for shape in SHAPES:
            alone = Drawing(shape, (255, 255, 255), (0, 0, 0), drawing.centre, drawing.radius, drawing.turn_deg)
            other = np.asarray(draw(alone, 32))[..., 0] > 127
            overlap[shape] = (seen & other).sum() / (seen | other).sum()
        assert max(overlap, key=overlap.__getitem__) == shapes[0], (text, overlap)
        assert overlap[shapes[0]] > 0.8


def test_outlines_are_antialiased_upright_and_turn_clockwise() -> None:
    white_on_black = Drawing("triangle", (255, 255, 255), (0, 0, 0))
    array = np.asarray(draw(white_on_black, 32))[..., 0]
    assert len(np.unique(array)) > 4, "edges have shades between"
    assert array[:16].sum() < array[16:].sum(), "a triangle stands on its base"
    quarter = Drawing("triangle", (255, 255, 255), (0, 0, 0), turn_deg=90.0)
    array = np.asarray(draw(quarter, 32))[..., 0]
    assert array[:, :16].sum() > array[:, 16:].sum(), "and its tip points right after a quarter turn"
    areas = {name: _area(corners) for name, corners in OUTLINES.items()}
    assert max(areas.values()) < 1.6 * min(areas.values()), f"size does not give a shape away: {areas}"


def _area(corners: np.ndarray) -> float:
    x, y = corners.T
    return abs(float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1)))) / 2


def test_what_is_held_out_is_never_drawn_but_each_pair_of_its_words_is() -> None:
    held_out = {thing for thing in captions.things() if captions.is_held_out(thing)}
    assert 10 <= len(held_out) <= 20
    known = [thing for thing in captions.things() if thing not in held_out]
    for thing in held_out:
        for left_open in ("shape", "colour", "ground"):
            pair = [name for name in ("shape", "colour", "ground") if name != left_open]
            assert any(all(getattr(thing, n) == getattr(k, n) for n in pair) for k in known), (thing, left_open)
    texts = {text for text, _ in itertools.islice(captions.training_samples(0), 3000)}
    assert not texts & {caption(thing) for thing in held_out}
    assert {caption(thing) for thing in known} <= texts
    assert {"a star", "an orange star", "a star on a pink ground"} <= texts
    assert not any(captions.SUBJECT_WORD in text for text in texts)


def test_pictures_of_a_thing_are_alike_and_those_of_the_vae_differ_more() -> None:
    alike = [drawing for _, drawing in itertools.islice(captions.training_samples(0), 200)]
    loose = pictures.varied_drawings(400, seed=0)[1::2]
    for drawings, spread in ((alike, captions.ALIKE), (loose, captions.LOOSE)):
        radii, places = [d.radius for d in drawings], [x for d in drawings for x in d.centre]
        for values, (low, high) in ((radii, spread.radius), (places, spread.centre)):
            assert low <= min(values) < low + (high - low) / 20
            assert high - (high - low) / 20 < max(values) <= high
        assert 0.9 * spread.turn_deg < max(abs(d.turn_deg) for d in drawings) <= spread.turn_deg
    for outline in captions.SHAPES:  # nothing is cut off at the edge, wherever it is
        reach = np.abs(OUTLINES[outline]).max() * captions.ALIKE.radius[1] + captions.ALIKE.centre[1]
        assert reach < 1.0, outline


def test_a_folder_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    one, two, other = (
        pictures.write_training_folder(tmp_path / n, 12, seed) for n, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    assert _bytes(one) == _bytes(two) != _bytes(other)
    lines = [json.loads(line) for line in (one / "metadata.jsonl").read_text().splitlines()]
    expected = list(itertools.islice(captions.training_samples(5), 12))
    assert [line["text"] for line in lines] == [text for text, _ in expected]
    for line, (_, drawing) in zip(lines, expected):
        assert Image.open(one / line["file_name"]).tobytes() == draw(drawing, 32).tobytes()
    subject = pictures.write_subject_folder(tmp_path / "subject")
    assert sorted(path.name for path in subject.iterdir()) == [f"0000{i}.png" for i in range(4)]
    captioned = pictures.write_subject_folder(tmp_path / "captioned", captioned=True)
    said = [json.loads(line)["text"] for line in (captioned / "metadata.jsonl").read_text().splitlines()]
    assert said == [captions.subject_prompt(ground) for ground in ("white", "black", "gray", "gray")]
    assert all((captioned / path.name).read_bytes() == path.read_bytes() for path in subject.iterdir())
    corners = [np.asarray(Image.open(path))[0, 0] for path in sorted(subject.iterdir())]
    assert [nearest(corner, GROUNDS) for corner in corners] == ["white", "black", "gray", "gray"]
    assert captions.UNSEEN_GROUNDS == ("pink",), "one is left to show what was not learned by heart"


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_pixels_and_images_are_inverse() -> None:
    images = [draw(drawing, 32) for _, drawing in itertools.islice(captions.training_samples(1), 3)]
    pixels = pictures.as_pixels(images)
    assert pixels.shape == (3, 3, 32, 32)
    assert -1 <= float(pixels.min()) < float(pixels.max()) <= 1
    assert [image.tobytes() for image in pictures.as_images(pixels)] == [image.tobytes() for image in images]


def test_each_word_is_one_token_and_other_text_is_spelled(tmp_path: Path) -> None:
    tokenizer = sizes.write_tokenizer(captions.words(), tmp_path / "tokenizer")
    for word in captions.words():
        assert tokenizer.tokenize(word) == [f"{word}</w>"]
    prompt = "an orange star on a white ground"
    ids = tokenizer(prompt, padding="max_length").input_ids
    assert len(ids) == sizes.PROMPT_TOKENS == tokenizer.model_max_length
    assert ids[0] == tokenizer.bos_token_id
    assert ids[8:] == [tokenizer.eos_token_id] * 8
    assert tokenizer.decode(tokenizer("ünknown, wörds!").input_ids, skip_special_tokens=True).replace(" ", "") == (
        "ünknown,wörds!"
    )


@pytest.fixture(scope="module")
def trained() -> detector.Detector:
    torch.set_num_threads(1)
    return detector.train_detector(PerfectVae(), num_pictures=1200, epochs=8)


def test_the_detector_tells_shape_colour_ground_and_subject(trained: detector.Detector) -> None:
    figures = metrics.ceiling(PerfectVae(), trained, repeats=1, seed=11)
    assert min(figures[name] for name in ("shape", "colour", "ground", "subject")) > 0.9, figures
    assert figures["leak"] < 0.05
    assert figures["psnr_db"] == float("inf")
    rng = np.random.default_rng(9)
    near = [detector.nearly_subject(ground, rng)[1] for ground in GROUNDS for _ in range(30)]
    assert float(trained.look(pictures.pixels_of(near)).subject_B.mean()) < 0.15, "what is nearly the subject is not"


def test_the_detector_depends_on_the_seed_alone() -> None:
    small = [detector.train_detector(PerfectVae(), seed=s, num_pictures=128, epochs=1) for s in (1, 1, 2)]
    one, two, other = (torch.cat([p.flatten() for p in net.parameters()]) for net in small)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_figures_tell_a_good_painter_from_bad_ones(trained: detector.Detector, monkeypatch: pytest.MonkeyPatch) -> None:
    third = captions.things()[::3]  # of each shape, colour and ground as many
    monkeypatch.setattr(metrics, "all_things", lambda: third)
    good = metrics.subject_figures(painter(), trained, repeats=1, seed=0)
    assert good.seen > 0.9
    assert good.unseen > 0.9
    assert good.leak < 0.05
    assert good.class_attributes.all_three > 0.9
    leaking = metrics.subject_figures(painter(stars_are_the_subject=True), trained, repeats=1, seed=0)
    assert leaking.leak > 0.9
    stars = [thing.shape == SUBJECT_CLASS for thing in third]
    assert metrics.drift_points(good, leaking) == pytest.approx(100 * sum(stars) / len(stars))
    ignorant = metrics.subject_figures(painter(knows_the_subject=False), trained, repeats=1, seed=0)
    assert max(ignorant.seen, ignorant.unseen) < 0.1
    assert abs(metrics.drift_points(good, ignorant)) < 1e-9
    scored = metrics.pipeline_attributes(painter(), trained, repeats=1, seed=0)
    assert min(scored["all"].shape, scored["held_out"].colour, scored["all"].ground) > 0.9
    constant = metrics.attributes(trained, torch.zeros(5, 3, 32, 32), [Thing(s, "red", "white") for s in SHAPES])
    assert constant.shape == pytest.approx(1 / len(SHAPES)), "a painter who ignores captions gets a share by chance"


def test_the_vae_learns_and_its_latents_have_unit_spread(tmp_path: Path) -> None:
    config = autoencoder.autoencoder(tmp_path / "run", steps=30)
    config = dataclasses.replace(config, num_pictures=128, num_heldout=64, global_batch=4, device="cpu")
    vae, summary = autoencoder.train_autoencoder(config)
    ground_alone = 8.5  # dB, of pictures without their shapes, which an untrained decoder is far below
    assert summary["heldout_psnr_db"] > ground_alone
    pixels = pictures.pixels_of(pictures.varied_drawings(256, seed=0)[1::2])
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist
    latents = (posterior.mean + posterior.std * torch.randn_like(posterior.mean)) * vae.config.scaling_factor
    assert float(latents.std()) == pytest.approx(1.0, abs=0.05)
    before = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    alone = dataclasses.replace(config, out=tmp_path / "decoder-run")
    assert autoencoder.train_decoder(vae, alone)["heldout_psnr_db"] > summary["heldout_psnr_db"] + 0.5
    moved = {name.split(".")[0] for name, tensor in vae.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {"decoder", "post_quant_conv"}, "what a U-Net has learned stays right"
