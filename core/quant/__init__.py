"""Weights in 8 and 4 bits, for any nn.Module.

    quantize(model, "int8")                          # in place; "w8a8", "llm.int8", "int4" with group_size=…
    quantize_folder("opt-125m", "opt-125m-int8", "int8", embeddings=True, head=True)
    model = load_quantized("opt-125m-int8")          # by memory map

A quantized weight is a tensor that is stored as integers (weight.py); the schemes are in scheme.py. What torch's
functions do with such a weight stands in products.py, and how a CPU multiplies by 8 bits in integers.py and by 4 in
packed.py. choose.py finds the weights of a model; folder.py goes from a checkpoint to a quantized folder and back.
"""

import core.quant.products  # noqa: F401 (torch's functions get to know quantized weights)
from core.quant.folder import Architecture, is_quantized, load_quantized, quantize_folder, save_quantized
from core.quant.packed import pack
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
    "pack",
    "quantize",
    "quantize_folder",
    "save_quantized",
    "stored_bytes",
]
