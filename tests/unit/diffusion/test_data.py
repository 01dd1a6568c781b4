"""What training learns from: any kind of image file, folders with faults, sizes, the store, rows of a step."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from apps.diffusion.data.batches import Draws, LatentBatches
from apps.diffusion.data.buckets import Variant, bucket_sizes, lay, nearest, variants
from apps.diffusion.data.encoding import Entry
from apps.diffusion.data.folder import read_folder, report_refused, write_refused
from apps.diffusion.data.images import Unusable, read_image
from apps.diffusion.data.store import Store, fingerprint, key_of
from core.config import UserError
from tests.support.checkpoints import flipped

RAMP = np.linspace(0, 255, 32 * 24).reshape(24, 32).astype(np.uint8)


def _saved(path: Path, image: Image.Image, **options) -> Path:
    image.save(path, **options)
    return path


def test_every_kind_of_image_is_the_same_picture(tmp_path: Path) -> None:
    grey = Image.fromarray(RAMP)
    colour = Image.merge("RGB", [grey, grey.rotate(180), grey])
    wanted = np.asarray(grey.convert("RGB")).astype(int)
    sixteen = Image.fromarray(RAMP.astype(np.uint16) * 257)
    for name, image, tolerance in (
        ("grey.png", grey, 0),
        ("sixteen.png", sixteen, 0),
        ("sixteen.tif", sixteen, 0),
        ("thirtytwo.tif", Image.fromarray(RAMP.astype(np.int32) * 257), 0),
        ("la.png", Image.merge("LA", [grey, Image.new("L", grey.size, 255)]), 0),
        ("palette.png", grey.convert("P"), 0),
        ("bits.png", grey.convert("RGB").quantize(256), 3),
        ("grey.jpg", grey, 4),
        ("cmyk.jpg", grey.convert("RGB").convert("CMYK"), 6),
        ("lossless.webp", grey.convert("RGB"), 12),
    ):
        found = read_image(_saved(tmp_path / name, image))
        assert found.mode == "RGB", name
        assert np.abs(np.asarray(found).astype(int) - wanted).max() <= tolerance, name
    assert np.array_equal(np.asarray(read_image(_saved(tmp_path / "rgb.png", colour))), np.asarray(colour))


def test_what_is_transparent_lies_on_white(tmp_path: Path) -> None:
    clear = Image.new("RGBA", (20, 20), (255, 0, 0, 0))
    clear.paste((0, 0, 255, 255), (0, 0, 10, 20))
    for name, image in (("clear.png", clear), ("palette.png", clear.quantize(4)), ("clear.webp", clear)):
        found = np.asarray(read_image(_saved(tmp_path / name, image, lossless=True))).astype(int)
        assert np.abs(found[:, :9] - (0, 0, 255)).max() < 4, name
        assert np.abs(found[:, 11:] - 255).max() < 4, name


def test_exif_turns_the_picture_upright(tmp_path: Path) -> None:
    upright = Image.fromarray(RAMP)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held so that the file has to be turned by 270 degrees
    turned = _saved(tmp_path / "turned.png", upright.transpose(Image.Transpose.ROTATE_90), exif=exif)
    found = read_image(turned)
    assert found.size == upright.size
    assert np.array_equal(np.asarray(found)[..., 0], RAMP)


def test_what_cannot_be_used_is_told_in_one_line(tmp_path: Path) -> None:
    whole = _saved(
        tmp_path / "whole.png", Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    )
    (tmp_path / "cut.png").write_bytes(whole.read_bytes()[:4000])
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty.jpg").write_bytes(b"")
    _saved(tmp_path / "pixel.png", Image.new("RGB", (1, 1)))
    _saved(tmp_path / "long.png", Image.new("L", (20_000, 100)))
    _saved(tmp_path / "huge.png", Image.new("1", (20_000, 20_000)))
    _saved(tmp_path / "large.png", Image.new("1", (20_000, 6000)))
    _saved(tmp_path / "float.tif", Image.fromarray(RAMP.astype(np.float32)))
    _saved(tmp_path / "deep.tif", Image.fromarray(RAMP.astype(np.int32) * 70_000))
    for name, said in (
        ("cut.png", "broken"),
        ("text.png", "no image"),
        ("empty.jpg", "no image"),
        ("pixel.png", "1 x 1"),
        ("long.png", "20000 x 100"),
        ("huge.png", "pixels"),
        ("large.png", "20000 x 6000"),
        ("float.tif", "floating-point"),
        ("deep.tif", "32 bits"),
    ):
        with pytest.raises(Unusable, match=said) as refused:
            read_image(tmp_path / name)
        assert "\n" not in str(refused.value)


def test_captions_beside_and_in_metadata_and_a_line_for_what_is_left_out(tmp_path: Path, capsys) -> None:
    picture = Image.new("RGB", (40, 30))
    (tmp_path / "sub").mkdir()
    for name in ("a.png", "b.PNG", "sub/c.jpg", "d.png", "e.png", ".hidden.png"):
        picture.save(tmp_path / name, format="PNG")
    (tmp_path / "a.txt").write_text("  a red\nsquare \n")
    (tmp_path / "e.txt").write_text(" \n")
    lines = [{"file_name": "b.PNG", "text": "b"}, {"file_name": "sub/c.jpg", "text": "c"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = read_folder(tmp_path)
    captions = {picture.path.name: picture.caption for picture in found.pictures}
    assert captions == {"a.png": "a red square", "b.PNG": "b", "c.jpg": "c"}
    assert {picture.size for picture in found.pictures} == {(40, 30)}
    report_refused(found, tmp_path / "left_out.txt")
    said = capsys.readouterr().out
    assert "left out: d.png: it has no caption" in said
    assert "left out: e.png: its caption is empty" in said
    assert "2 of 5 images" in said
    assert {p.caption for p in read_folder(tmp_path, "a photo").pictures} == {"a photo"}
    lines += [{"file_name": "d.png", "text": None}, {"file_name": "gone.png", "text": "it went"}]
    lines += [{"file_name": "e.png", "text": "half a \ud83d"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = read_folder(tmp_path)
    assert {picture.caption for picture in found.pictures} == {"a red square", "b", "c"}
    report_refused(found, tmp_path / "left_out.txt")
    said = capsys.readouterr().out
    assert "left out: d.png: its text in metadata.jsonl is null" in said
    assert "left out: e.png: its caption holds half a character (a lone surrogate)" in said
    assert "left out: gone.png: metadata.jsonl describes it, and it is not there" in said
    assert said.endswith(f"3 of 6 images in {tmp_path} left out\n")
    report_refused(found, tmp_path / "left_out.txt", most=1)
    said = capsys.readouterr().out
    assert said.count("left out:") == 1
    assert said.endswith(f"left out; all of them are listed in {tmp_path / 'left_out.txt'}\n")
    write_refused([found, found], tmp_path / "left_out.txt")
    listed = (tmp_path / "left_out.txt").read_text().splitlines()
    assert listed == [f"{tmp_path}/{line}" for line in found.refused] * 2
    write_refused([replace(found, refused=())], tmp_path / "left_out.txt")
    assert not (tmp_path / "left_out.txt").exists()
    for folder, message in ((tmp_path / "none", "no folder"), (tmp_path / "sub" / "none", "no folder")):
        with pytest.raises(UserError, match=message):
            read_folder(folder)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="holds no image"):
        read_folder(tmp_path / "nothing")
    (tmp_path / "nothing" / "x.png").write_text("x")
    with pytest.raises(UserError, match=r"no image in .* can be used: x\.png"):
        read_folder(tmp_path / "nothing", "prompt")
    for wrong in ('{"file_name": "a.png"}', '{"file_name": "a.png", "text": 5}'):
        (tmp_path / "metadata.jsonl").write_text(wrong)
        with pytest.raises(UserError, match="line 1"):
            read_folder(tmp_path)


def test_sizes_have_one_area_and_every_ratio() -> None:
    sizes = bucket_sizes(512, 64)
    assert sizes[0] == (512, 512)
    assert {(512, 512), (448, 576), (384, 640), (704, 352)} & set(sizes) >= {(512, 512), (448, 576), (384, 640)}
    for width, height in sizes:
        assert width % 64 == height % 64 == 0
        assert 0.7 * 512**2 <= width * height <= 512**2
        assert (height, width) in sizes
        assert 0.5 <= width / height <= 2
    assert nearest(sizes, (1000, 1000)) == (512, 512)
    assert nearest(sizes, (300, 400)) in {(448, 576), (384, 512)}
    with pytest.raises(UserError, match="give 512"):
        bucket_sizes(500, 64)
    with pytest.raises(UserError, match="give 64"):
        bucket_sizes(8, 64)


def test_an_image_covers_its_size_undistorted() -> None:
    """A disc stays a disc, and what is cropped is the overhang."""
    y, x = np.mgrid[0:120, 0:200]
    disc = Image.fromarray((255 * ((x - 100) ** 2 + (y - 60) ** 2 < 40**2)).astype(np.uint8)).convert("RGB")
    for size in ((64, 64), (96, 64), (64, 96)):
        shown = lay(disc, Variant(size))
        assert shown.shape == (size[1], size[0], 3)
        ys, xs = np.nonzero(shown[..., 0] > 127)
        assert abs(np.ptp(xs) - np.ptp(ys)) <= 1
        assert abs(xs.mean() - (size[0] - 1) / 2) < 1
    mirrored = lay(disc.crop((0, 0, 100, 120)), Variant((48, 48), mirrored=True))
    assert np.array_equal(mirrored[:, ::-1], lay(disc.crop((0, 0, 100, 120)), Variant((48, 48))))
    left, right = (lay(disc, Variant((64, 64), crop)) for crop in (0.0, 1.0))
    assert left[32, -1, 0] > 127 > left[32, 0, 0]
    assert right[32, 0, 0] > 127 > right[32, -1, 0]
    assert len(variants((200, 120), (64, 64), 3, True)) == 6
    assert [v.crop for v in variants((200, 120), (64, 64), 3, False)] == [0.0, 0.5, 1.0]
    assert len(variants((64, 64), (64, 64), 3, False)) == 1


def test_the_store_is_keyed_by_all_that_matters_and_survives_damage(tmp_path: Path) -> None:
    store = Store(tmp_path, held_bytes=100)
    key = key_of("latents", "digest", (64, 64), 0.5, False)
    assert (
        len({key, key_of("latents", "digest", (64, 64), 0.5, True), key_of("latents", "digest", (64, 96), 0.5, False)})
        == 3
    )
    assert key not in store
    store[key] = torch.arange(6.0).view(2, 3).T
    assert torch.equal(store[key], torch.arange(6.0).view(2, 3).T)
    for number in range(9):
        store[f"{number}0"] = torch.full((8,), float(number))
        assert store[f"{number}0"][0] == number
    assert store._room >= 0
    store.path(key).write_bytes(b"cut")
    assert key not in Store(tmp_path)
    save_file({"other": torch.zeros(1)}, store.path(key))
    assert key not in Store(tmp_path)
    store[key] = torch.arange(6.0)
    for at in range(store.path(key).stat().st_size):
        with flipped(store.path(key), at, 1):
            assert key not in Store(tmp_path), at
    assert torch.equal(Store(tmp_path)[key], torch.arange(6.0))
    assert not list(tmp_path.rglob("*.part"))
    layer = torch.nn.Linear(2, 2)
    before = fingerprint(layer, {})
    assert before == fingerprint(layer, {}) != fingerprint(layer, {"scale": 2})
    with torch.no_grad():
        layer.bias[1] += 1e-6
    assert fingerprint(layer, {}) != before


def _batches(num: int = 5, sizes=((64, 64), (64, 96)), rows: int = 4, classes: int = 0, **draws) -> LatentBatches:
    def moments(key: str) -> torch.Tensor:
        number, variant = map(int, key.split("."))
        return torch.stack([torch.full((4, 8, 8), 100.0 * number + variant), torch.full((4, 8, 8), -40.0)])

    entries = [Entry(f"c{n}", {sizes[n % len(sizes)]: (f"{n}.0", f"{n}.1")}) for n in range(num)]
    class_entries = [Entry("class", dict.fromkeys(sizes, (f"{50 + n}.0",))) for n in range(classes)]
    options = {"num_timesteps": 1000, "scaling_factor": 2.0, **draws}

    def text(caption: str) -> torch.Tensor:
        return torch.full((3, 2), -1.0 if not caption else float(hash(caption) % 1000))

    return LatentBatches(entries, moments, text, rows, 3, Draws(**options), class_entries)


def test_a_row_depends_on_the_step_and_its_number_alone() -> None:
    for batches, rows in ((_batches(), 4), (_batches(classes=3, rows=2), 4)):
        for step in (0, 7):
            wanted = [batches.row(step, row) for row in range(rows)]
            for ranks in (1, 2, 4):
                for rank in range(ranks):
                    found = batches.batch(step, rank, ranks)
                    assert (found["steps"] == step).all()
                    for place, row in enumerate(wanted[rank * rows // ranks : (rank + 1) * rows // ranks]):
                        assert all(torch.equal(found[name][place], row[name]) for name in row)


def test_noise_is_drawn_anew_in_every_step_and_row() -> None:
    batches = _batches(num=1, sizes=((64, 64),))
    noises = torch.stack([batches.row(step, row)["noise"] for step in range(4) for row in range(4)])
    assert abs(noises.mean()) < 0.05
    assert abs(noises.std() - 1) < 0.05
    flat = noises.flatten(1)
    assert (torch.corrcoef(flat) - torch.eye(16)).abs().max() < 0.3
    steps = [int(batches.row(step, row)["timesteps"]) for step in range(60) for row in range(4)]
    assert min(steps) < 50
    assert max(steps) >= 950
    shown = {round(float(batches.row(step, 0)["latents"].mean()), 3) for step in range(20)}
    assert shown == {0.0, 2.0}  # both variants, scaled


def test_an_epoch_shows_every_image_and_a_step_has_one_size() -> None:
    batches = _batches(num=7, rows=2)
    for epoch in range(3):
        seen = []
        for step in range(epoch * batches.steps_an_epoch, (epoch + 1) * batches.steps_an_epoch):
            shown = [batches.shown(step, row) for row in range(2)]
            assert len({size for size, _, _ in shown}) == 1
            seen += [entry.caption for _, entry, _ in shown]
        assert set(seen) == {f"c{n}" for n in range(7)}
        assert len(seen) == 8
    assert batches._epoch(0) != batches._epoch(1)


def test_class_images_alternate_with_the_others_in_their_size() -> None:
    batches = _batches(num=4, rows=2, classes=3)
    assert batches.global_batch == 4
    seen = []
    for step in range(12):
        batch = batches.batch(step, 0, 1)
        assert batch["prior"].tolist() == [False, True, False, True]
        shown = [batches.shown(step, row) for row in range(4)]
        assert len({size for size, _, _ in shown}) == 1
        seen += [entry.keys[shown[0][0]][0] for _, entry, prior in shown if prior]
    assert {key: seen.count(key) for key in seen} == {"50.0": 8, "51.0": 8, "52.0": 8}


def test_of_class_images_alone_captions_are_dropped() -> None:
    """Or guidance would lead away from the subject, and what is drawn without a prompt would become it."""
    batches = _batches(caption_dropout=0.5, classes=3, rows=2)
    dropped = np.array([[bool((batches.row(s, row)["text"] == -1).all()) for row in range(4)] for s in range(60)])
    assert not dropped[:, ::2].any()
    assert 0.35 < dropped[:, 1::2].mean() < 0.65


def test_dropped_captions_and_offset_noise_and_the_posterior() -> None:
    dropped = [bool((_batches(caption_dropout=0.3).row(s, 0)["text"] == -1).all()) for s in range(200)]
    assert 0.2 < np.mean(dropped) < 0.4
    noise = torch.stack([_batches(num=1, offset_noise=0.5).row(s, 0)["noise"] for s in range(200)])
    means = noise.mean((2, 3)).flatten()
    assert means.var().item() == pytest.approx(0.25 + 1 / 64, rel=0.2)
    batches = _batches(num=1)
    batches.moments = lambda key: torch.stack([torch.zeros(4, 8, 8), torch.full((4, 8, 8), np.log(0.25))])
    latents = torch.stack([batches.row(s, 0)["latents"] for s in range(100)])
    assert latents.std().item() == pytest.approx(2.0 * 0.5, rel=0.05)
