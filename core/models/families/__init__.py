"""Model families, one a file: `FAMILY` in it is all that is known of it (`core.models.family`)."""

from importlib import import_module
from typing import TYPE_CHECKING, Literal

from core.models.family import Family

_FILES = ("gpt2", "opt", "bloom", "llama", "mistral", "mixtral", "gemma3_text", "qwen3", "phi3", "gpt_neox", "bert")
FAMILIES: dict[str, Family] = {name: import_module(f"{__name__}.{name}").FAMILY for name in _FILES}
"""model_type -> family"""

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[*(name for name, known in FAMILIES.items() if not known.family)]
    """DecoderConfig.family"""
