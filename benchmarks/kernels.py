"""Every kernel against the roofline of this machine, beside eager torch, torch.compile, SDPA and Liger.

1. The roofline is measured: bytes a second of a large copy, FLOP/s of the fastest square matrix product of the dtype.
2. A family whose result is red on this device (against the fp64 reference, on its SPEC's first cases) is not timed: the
   benchmark ends.
3. Each SPEC's `timed` cases run forward, and forward with backward where there are gradients: medians. Bytes and FLOPs
   are those that the SPEC counts, the least that the mathematics needs; the share is of whichever bound is nearer.

On a machine without a GPU our public functions are their references (which is what runs there), so only those and
torch.compile are timed, and cases that would take long by the roofline are left out and named.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.result import Measured, Number, Result, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import UserError, run_command
from core.kernels import specs
from core.kernels.spec import Case, KernelSpec, Traffic, outputs_of
from core.runtime import start

COPY_BYTES = 1 << 28
LONGEST_S = 0.5  # by the roofline, on a CPU
MEMORY_SHARE, FORWARD_SHARE, BACKWARD_SHARE = 0.85, 0.60, 0.45
COMPUTE_BOUND = ("attention",)


@dataclass(frozen=True)
class Roofline:
    """What this machine reaches: bytes/s of a copy, and FLOP/s of matrix products by dtype."""

    bandwidth: float
    flops: Mapping[torch.dtype, float]

    def seconds(self, num_bytes: int, num_flops: int, dtype: torch.dtype) -> float:
        return max(num_bytes / self.bandwidth, num_flops / self.flops[dtype])


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds_of(run: Callable[[], Any], least: int = 3) -> float:
    """Median seconds of a call, after warming up."""
    if device().type == "cuda":
        from triton.testing import do_bench

        return do_bench(run, warmup=25, rep=100, return_mode="median") / 1e3  # pyright: ignore
    run()
    found, begin = [], time.perf_counter()
    while len(found) < least or time.perf_counter() - begin < 0.3:
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def measure_roofline(dtypes: tuple[torch.dtype, ...]) -> Roofline:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    bandwidth = 2 * COPY_BYTES / seconds_of(lambda: target.copy_(source))
    flops = {}
    for dtype in dtypes:
        size = 8192 if device().type == "cuda" else 1024
        a, b = (torch.randn(size, size, device=device()).to(dtype) for _ in range(2))
        flops[dtype] = 2 * size**3 / seconds_of(lambda a=a, b=b: a @ b)
    return Roofline(bandwidth, flops)


# --- what is compared -------------------------------------------------------------------------------------------------


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=options.get("causal", False), enable_gqa=True)


def peers_of(spec: KernelSpec, inputs: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """name -> a function of the SPEC's inputs that computes the same; only what is installed and can do it."""
    found: dict[str, Callable[..., Any]] = {}
    plain = not any(isinstance(inputs.get(name), Tensor) for name in ("bias", "mask", "slopes"))
    if spec.name == "attention" and plain and not inputs.get("window"):
        found["SDPA"] = _sdpa
    try:
        import liger_kernel.ops as liger  # pyright: ignore
    except ImportError:
        return found
    if spec.name == "rms_norm" and inputs.get("residual") is None:
        found["Liger"] = lambda x, weight, eps=1e-6, **_: liger.LigerRMSNormFunction.apply(x, weight, eps)
    if spec.name == "layer_norm" and inputs.get("residual") is None and inputs.get("bias") is not None:
        found["Liger"] = lambda x, weight, bias, eps=1e-5, **_: liger.LigerLayerNormFunction.apply(x, weight, bias, eps)
    return found


def contenders(spec: KernelSpec, inputs: Mapping[str, Any], compiled: bool) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"ours": spec.function}
    if device().type == "cuda":
        found["eager"] = spec.reference
    if compiled:
        torch._dynamo.reset()
        found["torch.compile"] = torch.compile(spec.reference)
    return found | (peers_of(spec, inputs) if device().type == "cuda" else {})


# --- one case ---------------------------------------------------------------------------------------------------------


def inputs_of(spec: KernelSpec, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    inputs = spec.inputs(case, dtype, device(), torch.Generator().manual_seed(0))
    for name in spec.grads:
        if isinstance(inputs.get(name), Tensor):
            inputs[name] = inputs[name].detach().requires_grad_()
    return inputs


def passes(function: Callable[..., Any], spec: KernelSpec, inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """ "forward", and "backward" alone where there is one."""
    plain = {n: v.detach() if isinstance(v, Tensor) else v for n, v in inputs.items()}
    found: dict[str, Callable[[], Any]] = {"forward": lambda: function(**plain)}
    leaves = [inputs[n] for n in spec.grads if isinstance(inputs.get(n), Tensor)]
    if leaves:
        outputs = [o for o in outputs_of(function(**inputs)) if o.requires_grad]
        grads = [torch.ones_like(o) for o in outputs]
        found["backward"] = lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True, allow_unused=True)
    return found


def check_green(spec: KernelSpec) -> None:
    """Raises UserError when the family is red on this device: then its speed means nothing."""
    for case in spec.cases[:2]:
        for dtype in spec.dtypes:
            inputs = spec.inputs(case, dtype, device(), torch.Generator().manual_seed(0))
            wide = {n: v.double() if _floating(v) else v for n, v in inputs.items()}
            found, expected = outputs_of(spec.function(**inputs)), outputs_of(spec.reference(**wide))
            for got, want in zip(found, expected, strict=True):
                at = want.isfinite()
                if not want.is_floating_point() or not at.any():
                    continue
                error = (got.double() - want)[at].abs().max() / want[at].abs().max().clamp(min=1e-30)
                if not error <= spec.tolerance[dtype]:
                    raise UserError(f"{spec.name} is off by {float(error):.2g} at {dict(case)} in {dtype}; no result")


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def rows_of(spec: KernelSpec, case: Case, dtype: torch.dtype, roofline: Roofline, compiled: bool) -> list[Row]:
    """The figures of one case: a row per contender and pass."""
    inputs, traffic = inputs_of(spec, case, dtype), spec.traffic(case, dtype)
    found = []
    for name, function in contenders(spec, inputs, compiled).items():
        for which, run in passes(function, spec, inputs).items():
            found.append(_row(spec, case, dtype, name, which, seconds_of(run), traffic, roofline))
    return found


def _row(
    spec: KernelSpec, case: Case, dtype: torch.dtype, contender: str, which: str, seconds: float, traffic: Traffic,
    roofline: Roofline,
) -> Row:  # fmt: skip
    num_bytes, num_flops = getattr(traffic, f"{which}_bytes"), getattr(traffic, f"{which}_flops")
    numbers = {
        "time": Number(1e6 * seconds, "us"),
        "bandwidth": Number(num_bytes / seconds / 1e9, "GB/s"),
        "arithmetic": Number(num_flops / seconds / 1e12, "TFLOP/s"),
        "share": Number(roofline.seconds(num_bytes, num_flops, dtype) / seconds, "of the roofline"),
    }
    sizes = " ".join(f"{k}={v}" for k, v in case.items())
    described = {"kernel": spec.name, "case": sizes, "dtype": str(dtype).removeprefix("torch.")}
    return Row(described | {"pass": which, "contender": contender}, numbers)


def measure(options: Options) -> Measured:
    with start():  # the allocator of a training process: without it every large result page-faults
        return _measure(options)


def _measure(options: Options) -> Measured:
    on_gpu = device().type == "cuda"
    dtypes = (torch.bfloat16, torch.float32) if on_gpu else (torch.float32,)
    roofline = measure_roofline(dtypes)
    figures, notes = [], []
    for spec in specs().values():
        check_green(spec)
        for case in spec.timed[:1] if options.quick else spec.timed:
            for dtype in dtypes:
                if dtype not in spec.dtypes:
                    continue
                traffic = spec.traffic(case, dtype)
                seconds = roofline.seconds(traffic.forward_bytes, traffic.forward_flops, dtype)
                if not on_gpu and seconds > LONGEST_S:
                    notes.append(f"{spec.name} {dict(case)} left out: {seconds:.1f} s by the roofline of this machine.")
                    continue
                figures += rows_of(spec, case, dtype, roofline, compiled=on_gpu or options.full)
    rates = ", ".join(f"{str(d).removeprefix('torch.')} {f / 1e12:.3g} TFLOP/s" for d, f in roofline.flops.items())
    notes.append(f"Roofline measured here: copy {roofline.bandwidth / 1e9:.3g} GB/s, matrix products {rates}.")
    if not on_gpu:
        notes.append(
            "No GPU: ours is the reference of each kernel, on one thread; the kernels themselves were not timed."
        )
    return Measured(tuple(figures), tuple(targets(figures) if on_gpu else ()), tuple(notes))


def targets(figures: list[Row]) -> list[Target]:
    """Shares of the roofline in bf16: memory-bound kernels 85 %, attention 60 % forward and 45 % backward."""
    found = []
    for row in figures:
        if row.case["contender"] != "ours" or row.case["dtype"] != "bfloat16":
            continue
        compute = row.case["kernel"] in COMPUTE_BOUND
        wanted = (FORWARD_SHARE if row.case["pass"] == "forward" else BACKWARD_SHARE) if compute else MEMORY_SHARE
        what = f"{row.case['kernel']} {row.case['pass']}, {row.case['case']}"
        found.append(Target(what, wanted, row.numbers["share"].value))
    return found


def plot(result: Result, folder: Path) -> Path:
    """Bars: the share of the roofline that ours reaches, by kernel, case and pass."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = [r for r in result.figures if r.case["contender"] == "ours"]
    labels = [f"{r.case['kernel']} {r.case['pass']} {r.case['case']} {r.case['dtype']}" for r in rows]
    figure, axes = plt.subplots(figsize=(11, 1 + 0.22 * len(rows)))
    axes.barh(range(len(rows)), [100 * r.numbers["share"].value for r in rows], color="#3b6ea5")
    axes.set_yticks(range(len(rows)), labels, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("% of the measured roofline")
    axes.set_title(f"{result.hardware['gpus'] or result.hardware['cpu']}", fontsize=8)
    figure.tight_layout()
    path = folder / f"{result.name}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


BENCHMARK = Benchmark("kernels", "Kernels against the roofline", measure, plot)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="kernels"), sys.argv[1:]))
