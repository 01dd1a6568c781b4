"""The measurements of a run and their display: rows of metrics, progress, throughput against the peak, memory, plots.

log         RunLog: metrics.jsonl, summary.json, TensorBoard, Weights & Biases
progress    Progress: live display on a terminal, plain lines elsewhere
throughput  FLOPs of a token, peak FLOP/s of the device, MFU
plot        the curves of a run as a PNG
text        bits per byte, beside gzip and xz
"""

from core.metrics.log import RunLog, read_metrics
from core.metrics.plot import plot_loss
from core.metrics.progress import Progress
from core.metrics.text import bits_per_byte, compression_baselines
from core.metrics.throughput import mfu, peak_flops, transformer_flops_per_token

__all__ = [
    "Progress",
    "RunLog",
    "bits_per_byte",
    "compression_baselines",
    "mfu",
    "peak_flops",
    "plot_loss",
    "read_metrics",
    "transformer_flops_per_token",
]
