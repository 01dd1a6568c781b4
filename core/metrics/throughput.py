"""FLOPs of a token, the peak of the device, and the share of it that a run achieves (MFU).

Only the model's own work counts: what activation checkpointing computes a second time is not useful work, so it lowers
the MFU (PaLM, Chowdhery et al. 2022, appendix B).
"""

import time
from functools import lru_cache

import torch

# Dense (no structured sparsity) peaks in TFLOP/s with fp32 accumulation, from the vendors' data sheets. The first name
# contained in the device's name wins, so the longer names come first.
_GPU_TFLOPS: dict[str, dict[str, float]] = {
    "B200": {"16": 2250, "tf32": 1125, "fp32": 75, "fp64": 37},
    "H200 NVL": {"16": 835, "tf32": 417, "fp32": 60, "fp64": 60},
    "H200": {"16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9},
    "GH200": {"16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9},
    "H100 NVL": {"16": 835, "tf32": 417, "fp32": 60, "fp64": 60},
    "H100 PCIe": {"16": 756, "tf32": 378, "fp32": 51.2, "fp64": 51.2},
    "H100": {"16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9},
    "A100": {"16": 312, "tf32": 156, "fp32": 19.5, "fp64": 19.5},
    "A10G": {"16": 70, "tf32": 35, "fp32": 31.2},
    "A10": {"16": 125, "tf32": 62.5, "fp32": 31.2},
    "A40": {"16": 149.7, "tf32": 74.8, "fp32": 37.4},
    "RTX A6000": {"16": 154.8, "tf32": 77.4, "fp32": 38.7},
    "L40S": {"16": 362, "tf32": 183, "fp32": 91.6},
    "L4": {"16": 121, "tf32": 60, "fp32": 30.3},
    "RTX 5090": {"16": 209.5, "tf32": 104.8, "fp32": 104.8},
    "RTX 4090": {"16": 165.2, "tf32": 82.6, "fp32": 82.6},
    "RTX 3090": {"16": 71, "tf32": 35.6, "fp32": 35.6},
    "RTX 3080": {"16": 59.5, "tf32": 29.8, "fp32": 29.8},
    "V100": {"fp16": 125, "fp32": 15.7, "fp64": 7.8},
    "T4": {"fp16": 65, "fp32": 8.1},
    "MI300X": {"16": 1307.4, "tf32": 653.7, "fp32": 163.4, "fp64": 163.4},
}
_CPU_BUDGET_S = 0.1


def transformer_flops_per_token(
    num_matmul_parameters: int, num_layers: int, dim: int, sequence_length: int, *, backward: bool = True
) -> float:
    """FLOPs that one token costs, forward and (by default) backward: 6 N + 12 layers x dim x length.

    num_matmul_parameters  N: the weights that multiply every token. Blocks and head count (a tied head too); looking up
                           token and position embeddings costs nothing
    sequence_length        with windows the keys that a layer's tokens see, of all layers added up if num_layers is 1
    dim                    heads x head size; the second term is q k^T and the sum over v, counted without the causal
                           half, as is the convention

    PaLM (Chowdhery et al. 2022), appendix B; Megatron-LM (Narayanan et al. 2021, section 5.1) agrees with it.
    """
    return (3 if backward else 1) * (2 * num_matmul_parameters + 4 * num_layers * dim * sequence_length)


def mfu(
    tokens_per_s: float, flops_per_token: float, peak_flops_per_device: float | None, num_devices: int = 1
) -> float | None:
    """Model FLOPs utilisation: achieved model FLOP/s over the peak of all devices; None when the peak is not known."""
    if peak_flops_per_device is None:
        return None
    return tokens_per_s * flops_per_token / (peak_flops_per_device * num_devices)


def peak_flops(device: torch.device | str, dtype: torch.dtype) -> float | None:
    """Peak dense FLOP/s of one device in `dtype`; None for a GPU that is not in the table.

    A GPU's is from its data sheet; fp32 means TF32 where torch's matmul precision allows it. A CPU's is measured once
    per process and number of threads: the fastest of a few short square matrix products.
    """
    if torch.device(device).type == "cuda":
        tf32 = torch.get_float32_matmul_precision() != "highest"
        return gpu_peak_flops(torch.cuda.get_device_name(device), dtype, tf32=tf32)
    return _cpu_peak_flops(dtype, torch.get_num_threads())


def gpu_peak_flops(name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """Peak dense FLOP/s of the GPU that calls itself `name`, for instance "NVIDIA A100-SXM4-80GB"; in any case."""
    # Whole words: "A100" must not be found in "A1000".
    words = f" {name.replace('-', ' ')} ".upper()
    tflops = next((t for gpu, t in _GPU_TFLOPS.items() if f" {gpu.upper()} " in words), {})
    keys = {torch.float64: ["fp64"], torch.float32: ["tf32", "fp32"] if tf32 else ["fp32"]}
    keys |= {torch.float16: ["16", "fp16"], torch.bfloat16: ["16"]}
    return next((tflops[key] * 1e12 for key in keys[dtype] if key in tflops), None)


@lru_cache
def _cpu_peak_flops(dtype: torch.dtype, num_threads: int) -> float:
    best, deadline = 0.0, time.perf_counter() + _CPU_BUDGET_S
    for size in (256, 512, 1024):
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        for _ in range(8):
            started = time.perf_counter()
            torch.mm(a, b)
            best = max(best, 2 * size**3 / (time.perf_counter() - started))
            if time.perf_counter() > deadline:
                return best
    return best
