"""What a viewer sees: names of drawn pictures are right, and what is nearly right has another name."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import ImageFilter

from apps.diffusion.demo import metrics
from apps.diffusion.demo.autoencoder import reconstruct
from apps.diffusion.demo.captions import COLOURS, GROUNDS, Thing, caption, drawing_of, drawing_of_subject, things
from apps.diffusion.demo.drawing import draw
from apps.diffusion.demo.pictures import as_pixels, pixels_of
from apps.diffusion.demo.viewer import LOOKED_FOR, PALETTE, Sight, in_words, lab, see
from apps.diffusion.loading import load_pipeline
from apps.diffusion.pipeline import EMBEDDED
from tests.support.drawn import painter


def test_every_thing_is_called_what_it_is_and_so_is_the_subject() -> None:
    rng, wanted = np.random.default_rng(3), things()
    for thing, sight in zip(wanted, see(pixels_of(drawing_of(thing, rng) for thing in wanted))):
        assert (sight.shape, sight.colour, sight.ground) == (thing.shape, thing.colour, thing.ground)
        assert sight.overlap > 0.85
    subject = pixels_of(drawing_of_subject(ground, rng) for ground in GROUNDS for _ in range(4))
    assert {in_words(sight) for sight in see(subject)} == {"teal upside-down star"}


def test_corners_wrong_colours_and_blots_have_names_of_their_own() -> None:
    """What the detector called a circle and the subject: a circle with five corners, and a star that is blue."""
    rng = np.random.default_rng(4)
    circles = [drawing_of(Thing("circle", colour, ground), rng) for colour in COLOURS for ground in GROUNDS]
    for name in ("pentagon", "hexagon"):
        turned = [replace(drawing, turn_deg=float(rng.uniform(0, 360))) for drawing in circles]
        images = [draw(drawing, 32, LOOKED_FOR[name]) for drawing in turned]
        assert {sight.shape for sight in see(as_pixels(images))} == {name}
    blue = [replace(drawing_of_subject(ground, rng), colour=(0, 110, 210)) for ground in ("white", "black")]
    assert {in_words(sight) for sight in see(pixels_of(blue))} == {"azure upside-down star"}
    noise = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)).mul(2).sub(1)
    assert {sight.shape for sight in see(noise)} == {None}


@pytest.mark.parametrize("give_back", [pytest.param(True, id="vae"), pytest.param(False, id="blur")])
def test_what_was_blurred_keeps_its_name(give_back: bool) -> None:
    """By the VAE that comes with the program, and by far more than that; sharp outlines took stars for pentagons."""
    rng, words = np.random.default_rng(5), [in_words(Sight(thing.shape, thing.colour, "", 1.0)) for thing in things()]
    drawings = [(drawing_of(thing, rng), None) for thing in things()]
    for ground in GROUNDS:
        subject = drawing_of_subject(ground, rng)
        around = replace(subject, turn_deg=float(rng.uniform(0, 360)))
        words += ["teal upside-down star", "teal pentagon", "teal hexagon"]
        drawings += [(subject, None), (around, LOOKED_FOR["pentagon"]), (around, LOOKED_FOR["hexagon"])]
    pictures = [draw(drawing, 32, corners) for drawing, corners in drawings]
    if give_back:
        seen = see(reconstruct(load_pipeline(EMBEDDED).vae, as_pixels(pictures)))
        assert min(sight.overlap for sight in seen) > 0.85
    else:
        seen = see(as_pixels(picture.filter(ImageFilter.GaussianBlur(1.75)) for picture in pictures))
    assert [in_words(sight) for sight in seen] == words


def test_lab_is_the_standards() -> None:
    known = {"white": ((1.0, 1.0, 1.0), (100, 0, 0)), "red": ((1.0, 0, 0), (53.24, 80.09, 67.20))}
    for rgb, wanted in known.values():
        assert lab(torch.tensor([rgb], dtype=torch.float64))[0].tolist() == pytest.approx(wanted, abs=0.02)
    assert len(set(PALETTE.values())) == len(PALETTE)


def test_shares_tell_a_good_painter_from_bad_ones() -> None:
    wanted = things()
    good = metrics.things_seen(painter()([caption(thing) for thing in wanted], 0), wanted)
    assert good.all_three > 0.99
    red_only = metrics.things_seen(painter()(["a red star on a white ground"] * len(wanted), 0), wanted)
    assert (red_only.shape, red_only.colour, red_only.ground) == pytest.approx((1 / 5, 1 / 6, 1 / 4))
    subject = metrics.subject_seen(painter()(["a sks star on a black ground"] * 8, 0), "black")
    assert (subject.all_three, subject.mostly) == (1.0, "teal upside-down star")
    other = metrics.subject_seen(painter()(["a blue star on a black ground"] * 8, 0), "black")
    assert (other.colour, other.shape, other.ground, other.mostly) == (0.0, 0.0, 1.0, "blue star")
