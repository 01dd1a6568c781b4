"""Frequencies of rotary positions, and how they are stretched beyond the length of pretraining.

Of R pairs of a head, pair k of a token at position t turns by t f_k, f_k = theta^(-k / R). Stretched:

    linear    f_k / factor                                              Chen et al., "Position Interpolation", 2023
    dynamic   theta grows with the length L of a text that is longer than max_length M:
              theta (factor L / M - factor + 1)^(R / (R - 1))           "NTK-aware" (bloc97, emozilla 2023)
    llama3    f_k / factor where f_k makes fewer than low_freq_factor rounds in the original length, f_k where it makes
              more than high_freq_factor, smoothly in between           Llama 3 herd, 2024
    yarn      likewise, between beta_slow and beta_fast rounds, linearly in k; cos and sin times
              attention_factor, by default 0.1 ln(factor) + 1           Peng et al., "YaRN", 2023
    longrope  f_k / short_factor[k] in texts up to the original length N, f_k / long_factor[k] in longer ones; cos and
              sin times attention_factor, by default sqrt(1 + ln(M / N) / ln N)       Ding et al., "LongRoPE", 2024

Keys and their meaning are those of transformers' `rope_parameters`. The length of a text is its last position and one
more; transformers takes the longest text of a batch for all of it, here each has its own.

Shapes: B batch, L length, R turned pairs of a head.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
from torch import Tensor

from core.config import UserError

RopeKind = Literal["llama3", "linear", "dynamic", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeScaling:
    """One kind of stretching: see the module's docstring for what each field does in which kind.

    original_max_length  tokens of the texts before stretching
    truncate             yarn's bounds are whole numbers of pairs
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192
    kind: RopeKind = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    READ: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_length"),
        "yarn": ("factor", "original_max_length", "beta_fast", "beta_slow", "attention_factor", "truncate"),
        "longrope": ("original_max_length", "short_factor", "long_factor", "attention_factor"),
    }
    """kind -> the fields that it reads"""

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            if isinstance(value := getattr(self, name), list):  # of a file
                object.__setattr__(self, name, tuple(value))
        for name in self.READ[self.kind]:
            value = getattr(self, name)
            several = name in ("short_factor", "long_factor")
            if several and not isinstance(value, tuple):
                raise UserError(f"{name} of rope_scaling is {value!r}; give a number for each pair of a head")
            if name != "truncate" and value is not None and not all(map(_is_positive, value if several else (value,))):
                raise UserError(f"{name} of rope_scaling is {value!r}; give a positive number")
        if self.original_max_length < 2:
            raise UserError(f"original_max_length of rope_scaling is {self.original_max_length}; give at least 2")

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        readers = {f.name: [kind for kind, read in self.READ.items() if f.name in read] for f in fields(self)}
        return {
            name: f"is not read with model.rope_scaling.kind={self.kind}, but with {' and '.join(kinds)}"
            for name, kinds in readers.items()
            if kinds and self.kind not in kinds
        }

    def alike_to(self, max_length: int) -> int | None:
        """The tokens up to which all texts are turned alike, whatever their length; None: of any length."""
        return {"dynamic": max_length, "longrope": self.original_max_length}.get(self.kind)

    def check(self, size: int) -> None:
        """Raises UserError unless a head's `size` turned features can be stretched so."""
        if self.kind == "dynamic" and size == 2:
            raise UserError("rope_scaling of kind dynamic does not stretch a single pair; turn more features of a head")
        for name in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            if len(getattr(self, name)) != size // 2:
                raise UserError(
                    f"{name} of rope_scaling has {len(getattr(self, name))} numbers; a head turns {size // 2} pairs, "
                    "so give as many"
                )

    def gain(self, max_length: int) -> float:
        """The factor of cos and sin."""
        if "attention_factor" not in self.READ[self.kind]:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn":
            return 0.1 * math.log(max(self.factor, 1.0)) + 1.0
        longer = max(max_length / self.original_max_length, 1.0)
        return math.sqrt(1 + math.log(longer) / math.log(self.original_max_length))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def frequencies(theta: float, size: int, scaling: RopeScaling | None, max_length: int, positions_BL: Tensor) -> Tensor:
    """fp64[R], or [B or 1, 1, R] where they depend on the texts' lengths.

    size       features of a head that turn, 2 R
    positions  [B or 1, L] of all tokens of the texts
    """
    exponent_R = torch.arange(0, size, 2, device=positions_BL.device, dtype=torch.float64) / size
    plain_R = theta**-exponent_R
    if scaling is None:
        return plain_R
    if scaling.kind == "linear":
        return plain_R / scaling.factor
    if scaling.kind == "llama3":
        return _by_rounds(plain_R, scaling)
    if scaling.kind == "yarn":
        return _by_pairs(plain_R, theta, scaling)
    length_B11 = positions_BL.amax(-1)[:, None, None] + 1
    if scaling.kind == "dynamic":
        longer_B11 = length_B11.clamp(min=max_length).double() / max_length
        return (theta * (scaling.factor * longer_B11 - scaling.factor + 1) ** (size / (size - 2))) ** -exponent_R
    short_R, long_R = plain_R / _filled(scaling.short_factor, plain_R), plain_R / _filled(scaling.long_factor, plain_R)
    return torch.where(length_B11 > scaling.original_max_length, long_R, short_R)


def _filled(numbers: tuple[float, ...], like: Tensor) -> Tensor:
    """A tensor of the numbers, made on its device: a step that is captured copies nothing from the host."""
    return torch.stack([like.new_full((), number) for number in numbers])


def _by_rounds(frequency_R: Tensor, scaling: RopeScaling) -> Tensor:
    """Wavelengths longer than the original length are stretched by `factor`, short ones kept, smoothly in between."""
    rounds_R = scaling.original_max_length * frequency_R / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept_R = ((rounds_R - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequency_R * (kept_R + (1 - kept_R) / scaling.factor)


def _by_pairs(frequency_R: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Pairs before that of beta_fast rounds are kept, those behind that of beta_slow stretched, linearly in between."""
    size = 2 * len(frequency_R)

    def pair(rounds: float) -> float:
        return size * math.log(scaling.original_max_length / (rounds * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last = last + 0.001 if first == last else last
    index_R = torch.arange(len(frequency_R), device=frequency_R.device, dtype=torch.float64)
    stretched_R = ((index_R - first) / (last - first)).clamp(0, 1)
    return frequency_R * (1 - stretched_R + stretched_R / scaling.factor)
