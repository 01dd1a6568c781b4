"""Bits per byte: a language model's loss in units that no tokenizer changes, beside what gzip and xz make of the text.

A model that assigns probability p to a text of n bytes can, with arithmetic coding, store it in -log2(p) bits; so bits
per byte compares a model with a compressor and with any other model. The model's own size is not counted.
"""

import lzma
import math
import zlib


def bits_per_byte(total_nats: float, num_bytes: int) -> float:
    """The summed token loss `total_nats` (natural logarithm) over a text of `num_bytes` bytes, in bits per byte."""
    return total_nats / math.log(2) / num_bytes


def compression_baselines(data: bytes) -> dict[str, float]:
    """The bits a byte that gzip -9 and xz -9 need for `data`: {"gzip_bits_per_byte": …, "xz_bits_per_byte": …}."""
    # zlib's gzip container is what gzip.compress writes, without a timestamp.
    gzip = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    num_gzip_bytes = len(gzip.compress(data)) + len(gzip.flush())
    num_xz_bytes = len(lzma.compress(data, preset=9))
    return {"gzip_bits_per_byte": 8 * num_gzip_bytes / len(data), "xz_bits_per_byte": 8 * num_xz_bytes / len(data)}
