"""The schemes of quantization and their options."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from core.config import UserError
from core.kernels.quantized_matmul import GROUPS

SchemeName = Literal["int8", "w8a8", "llm.int8", "int4"]
SCHEMES: tuple[str, ...] = get_args(SchemeName)


@dataclass(frozen=True)
class Scheme:
    """The rounding of a layer's weights, and what its inputs go through.

    int8      weights of 8 bits, one scale for each output channel
    w8a8      the same, and each token's input is rounded to 8 bits in steps of its own largest element
    llm.int8  w8a8 in which elements of the input above `threshold` are kept apart and not rounded (Dettmers et al.
              2022, arXiv:2208.07339), and columns of the weight that are much smaller than the others have a power of
              two each, so that rounding leaves something of them
    int4      weights of 4 bits, one scale for `group_size` columns of an output channel; and one zero, unless symmetric

    Results of a token depend on no other token. Convolutions round weights only, by all schemes.
    """

    name: str
    group_size: int = 64
    symmetric: bool = False
    threshold: float = 6.0

    def __post_init__(self) -> None:
        """Raises UserError for an unknown scheme, an impossible value, or an option that the scheme does not have."""
        if self.name not in SCHEMES:
            close = difflib.get_close_matches(str(self.name).lower(), SCHEMES, n=1)
            hint = f", did you mean {close[0]}?" if close else ""
            raise UserError(f"no quantization scheme {self.name!r}{hint}; the schemes are {', '.join(SCHEMES)}")
        if self.group_size not in GROUPS:
            raise UserError(f"group_size={self.group_size}; int4 has groups of {', '.join(map(str, GROUPS))} columns")
        if not self.threshold > 0:
            raise UserError(f"threshold={self.threshold}; give a positive number (LLM.int8 takes 6.0)")
        for option in fields(self)[1:]:
            if getattr(self, option.name) != option.default and option.name not in OPTIONS.get(self.name, ()):
                owner = next(name for name, options in OPTIONS.items() if option.name in options)
                raise UserError(f"{option.name} is an option of {owner}, and {self.name} was asked for; leave it out")

    @property
    def rounds_inputs(self) -> bool:
        return self.name in ("w8a8", "llm.int8")

    @property
    def bits(self) -> int:
        """Bits of a weight, without scales and zeros."""
        return 4 if self.name == "int4" else 8

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Scheme":
        """Raises UserError for what is no scheme."""
        types = {"name": (str,), "group_size": (int,), "symmetric": (bool,), "threshold": (int, float)}
        whole = isinstance(content, Mapping) and set(content) == set(types)
        if not whole or not all(isinstance(content[name], kinds) for name, kinds in types.items()):
            raise UserError(f"{content!r} is no description of a scheme; quantize the model again")
        return Scheme(**content)


OPTIONS: dict[str, tuple[str, ...]] = {"int4": ("group_size", "symmetric"), "llm.int8": ("threshold",)}
