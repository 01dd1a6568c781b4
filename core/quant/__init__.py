"""Weights in 8 and 4 bits, for any nn.Module.

quantize(model, "int8")                          # in place; "w8a8", "llm.int8", "int4" with group_size=…
quantize_folder("opt-125m", "opt-125m-int8", "int8", embeddings=True, head=True)
model = load_quantized("opt-125m-int8")          # by memory map

scheme.py     the schemes and their options
weight.py     a weight that is stored as integers and is a tensor like any other
products.py   what torch's functions do with such a weight
integers.py   products with 8-bit weights on a CPU
quantize.py   which weights of a model, and quantizing them
folder.py     from a checkpoint to a quantized folder, and loading that
"""

import core.quant.products  # noqa: F401 (torch's functions get to know quantized weights)
from core.quant.folder import Architecture, is_quantized, load_quantized, quantize_folder, save_quantized
from core.quant.quantize import dequantize, quantize
from core.quant.scheme import SCHEMES, Scheme
from core.quant.weight import QuantizedWeight, stored_bytes

__all__ = [
    "SCHEMES",
    "Architecture",
    "QuantizedWeight",
    "Scheme",
    "dequantize",
    "is_quantized",
    "load_quantized",
    "quantize",
    "quantize_folder",
    "save_quantized",
    "stored_bytes",
]
