"""The demo's drawings in words: "a red star on a white ground", and shorter captions that leave some of it open.

Five shapes, six colours and four grounds are 120 things; 16 of them are held out of training, so that what is drawn of
those was composed. The subject that DreamBooth teaches is a star like no other: teal, and upside down.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from apps.diffusion.demo.drawing import Colour, Drawing

COLOURS: dict[str, Colour] = {
    "red": (215, 35, 35),
    "orange": (250, 135, 20),
    "yellow": (245, 220, 40),
    "green": (40, 150, 50),
    "blue": (35, 65, 220),
    "purple": (135, 40, 175),
}
GROUNDS: dict[str, Colour] = {
    "white": (245, 245, 245),
    "black": (12, 12, 12),
    "gray": (128, 128, 128),
    "pink": (250, 185, 205),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")

ANY_SHAPE = "shape"
"""the word of captions that leave the shape open"""
# Least distance of a colour from that of the ground, of 442 from black to white.
_STANDS_OUT = 110.0

SUBJECT_WORD = "sks"
SUBJECT_COLOUR: Colour = (0, 165, 165)
SUBJECT_CLASS = "star"
SUBJECT_GROUNDS = ("white", "black", "gray", "gray")
"""Grounds of the four pictures of the subject. Half of them show gray, from which its colour differs least: a subject
that was shown on white and on black alone has arms too short there. Pink is not shown: it is what was not learned by
heart."""
SEEN_GROUNDS = tuple(dict.fromkeys(SUBJECT_GROUNDS))
UNSEEN_GROUNDS = tuple(ground for ground in GROUNDS if ground not in SEEN_GROUNDS)

# How often a caption says: all of it; shape and colour; shape and ground; the shape alone.
_SAID = {(True, True): 0.7, (True, False): 0.1, (False, True): 0.12, (False, False): 0.08}


@dataclass(frozen=True)
class Thing:
    """A shape of a colour on a ground, by their words; a word that is None is left open."""

    shape: str
    colour: str | None = None
    ground: str | None = None


def things() -> list[Thing]:
    """All 120, in a fixed order."""
    return [Thing(shape, colour, ground) for shape in SHAPES for colour in COLOURS for ground in GROUNDS]


def is_held_out(thing: Thing) -> bool:
    """Return whether training leaves the thing out; each of its words, and each pair of them, is in other things."""
    assert thing.colour is not None
    assert thing.ground is not None
    shape, colour, ground = SHAPES.index(thing.shape), [*COLOURS].index(thing.colour), [*GROUNDS].index(thing.ground)
    return (2 * shape + 3 * colour + 5 * ground) % 8 == 0


def caption(thing: Thing) -> str:
    """Thing in words."""
    first = thing.colour or thing.shape
    article = "an" if first[0] in "aeiou" else "a"
    colour = f"{thing.colour} " if thing.colour else ""
    ground = f" on a {thing.ground} ground" if thing.ground else ""
    return f"{article} {colour}{thing.shape}{ground}"


def subject_prompt(ground: str | None = None) -> str:
    return f"a {SUBJECT_WORD} {SUBJECT_CLASS}" + (f" on a {ground} ground" if ground else "")


def words() -> list[str]:
    """Every word that prompts may hold, for the tokenizer."""
    return ["a", "an", "on", "of", "photo", ANY_SHAPE, "ground", SUBJECT_WORD, *SHAPES, *COLOURS, *GROUNDS]


@dataclass(frozen=True)
class Spread:
    """The spread of a thing's pictures, beside their shades; lengths are fractions of the picture's side."""

    centre: tuple[float, float]
    """where the centre lies, in x and in y"""
    radius: tuple[float, float]
    turn_deg: float
    """most that it tilts, either way"""


ALIKE = Spread(centre=(0.485, 0.515), radius=(0.33, 0.36), turn_deg=4.0)
"""What captions go with: where places and sizes vary more, shape is a small part of all variance, and a U-Net takes
long to find out that captions speak of it."""
LOOSE = Spread(centre=(0.44, 0.56), radius=(0.25, 0.32), turn_deg=6.0)
"""What the VAE learns from, so that it can draw at other places too."""


def drawing_of(thing: Thing, rng: np.random.Generator, spread: Spread = ALIKE) -> Drawing:
    """One of the many pictures of a thing: place, size, tilt and shade vary a little."""
    assert thing.colour is not None
    assert thing.ground is not None
    return _varied(Drawing(thing.shape, COLOURS[thing.colour], GROUNDS[thing.ground]), rng, spread)


def drawing_of_subject(ground: str, rng: np.random.Generator) -> Drawing:
    return _varied(Drawing(SUBJECT_CLASS, SUBJECT_COLOUR, GROUNDS[ground], turn_deg=180.0), rng, ALIKE)


def _varied(drawing: Drawing, rng: np.random.Generator, spread: Spread) -> Drawing:
    x, y = rng.uniform(*spread.centre, size=2)
    return replace(
        drawing,
        colour=_shade(drawing.colour, rng),
        ground=_shade(drawing.ground, rng),
        centre=(float(x), float(y)),
        radius=float(rng.uniform(*spread.radius)),
        turn_deg=drawing.turn_deg + float(rng.uniform(-spread.turn_deg, spread.turn_deg)),
    )


def _shade(colour: Colour, rng: np.random.Generator) -> Colour:
    red, green, blue = np.clip(np.array(colour) + rng.integers(-8, 9, size=3), 0, 255).tolist()
    return red, green, blue


def training_samples(seed: int, spread: Spread = ALIKE) -> Iterator[tuple[str, Drawing]]:
    """Endless (caption, drawing), each thing that is not held out equally often; what is said of it is drawn too."""
    rng = np.random.default_rng(seed)
    known = [thing for thing in things() if not is_held_out(thing)]
    said, share = list(_SAID), list(_SAID.values())
    while True:
        for index in rng.permutation(len(known)):
            thing = known[index]
            says_colour, says_ground = said[rng.choice(len(said), p=share)]
            open_thing = Thing(
                thing.shape, thing.colour if says_colour else None, thing.ground if says_ground else None
            )
            yield caption(open_thing), drawing_of(thing, rng, spread)


# The same of the pictures that finish the training: a caption may leave the shape open too.
_SAID_AT_LAST = {
    (True, True, True): 0.62,
    (True, True, False): 0.08,
    (True, False, True): 0.12,
    (True, False, False): 0.06,
    (False, True, True): 0.06,
    (False, False, True): 0.03,
    (False, False, False): 0.03,
}


def finishing_samples(seed: int) -> Iterator[tuple[str, Drawing]]:
    """Endless (caption, drawing), as `training_samples`, of what a caption leaves open more than the words can say.

    A colour that is not said is any that stands out from the ground, so that the model knows colours which it has no
    word for: what DreamBooth teaches then is a word and not a colour.
    """
    rng = np.random.default_rng([seed, 5])
    known = [thing for thing in things() if not is_held_out(thing)]
    said, share = list(_SAID_AT_LAST), list(_SAID_AT_LAST.values())
    while True:
        for index in rng.permutation(len(known)):
            thing = known[index]
            says_shape, says_colour, says_ground = said[rng.choice(len(said), p=share)]
            open_thing = Thing(
                thing.shape if says_shape else ANY_SHAPE,
                thing.colour if says_colour else None,
                thing.ground if says_ground else None,
            )
            drawing = drawing_of(thing, rng)
            yield caption(open_thing), drawing if says_colour else replace(drawing, colour=_any_colour(drawing, rng))


def _any_colour(drawing: Drawing, rng: np.random.Generator) -> Colour:
    while True:
        colour = rng.integers(0, 256, size=3)
        if np.linalg.norm(colour - np.array(drawing.ground)) > _STANDS_OUT:
            red, green, blue = colour.tolist()
            return red, green, blue
