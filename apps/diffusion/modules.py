"""The three modules of a pipeline, as a type checker takes them: as they come.

What diffusers annotates denies what its classes have (`config` is a dict without attributes, `to` a function that lacks
its module, `decode` takes a tensor type that nothing makes), so tests say whether they are used rightly.
"""

from typing import Any, TypeAlias

UNet: TypeAlias = Any
"""diffusers' UNet2DConditionModel"""
VAE: TypeAlias = Any
"""diffusers' AutoencoderKL"""
TextEncoder: TypeAlias = Any
"""transformers' CLIPTextModel"""
