"""Every kernel against the roofline of this machine, beside eager torch, torch.compile, SDPA and Liger.

1. The roofline is measured: bytes a second of a large copy, FLOP/s of the fastest square matrix product of the dtype.
2. A family whose result is red on this device (results and gradients against the fp64 reference, on its SPEC's first
   cases, in what is timed) is not timed: the benchmark ends.
3. Each SPEC's `timed` cases, on a CPU those of ON_CPU, run forward, and backward where there are gradients: medians.
   On a GPU a call is captured and its graph replayed, so that what Python takes is not timed, and the second-level
   cache is overwritten before each, as most callers find it. A contender that fails is named, and the rest is timed.
   Bytes and FLOPs are those that the SPEC counts, the least that has to be; the share is of whichever bound is nearer.
4. Peak memory of the loss, fused and unfused, at full size: on a GPU by its allocator, elsewhere by counting the bytes
   of meta tensors, along the path of the kernels. Inputs are not counted. "peak" has the gradients of x and the weight
   in it, "working" has not: those any loss hands back, and what is left are logits, their gradient and sums.

On a machine without a GPU our public functions are their references (which is what runs there), so only those, SDPA and
with --full torch.compile are timed. Liger's kernels (benchmarks/liger.py) need a GPU; a note says where they are not
installed. --family NAME measures that family alone, --no-compile leaves torch.compile out. Every family's first case
comes before any second one; --quick takes the first on a GPU, and on a CPU the first of the tests.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import liger
from benchmarks.result import Measured, Number, Result, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import UserError, run_command
from core.files import save_figure
from core.kernels import specs
from core.kernels.operator import forced
from core.kernels.spec import Case, KernelSpec, Traffic, outputs_of
from core.runtime import start
from core.trace.account import MemoryAccount

COPY_BYTES = 1 << 28
CACHE_BYTES = 1 << 28
"""more than the second-level cache of any GPU has"""
FLUSH_S = 2e-4
"""about what overwriting it takes"""
SCORES_BYTES = 8 << 30
"""most that the scores of a reference may take: beside them are their softmax, gradients, and copies in fp32"""
MEMORY_SHARE, FORWARD_SHARE, BACKWARD_SHARE = 0.85, 0.60, 0.45
WITH_BIAS = 1.3  # times as long as without, at most
PEAK_SHARE = 0.10  # of the unfused loss' working memory
ADAFACTOR_MS = 0.12  # of a 4096 x 4096 step in fp32
PRODUCTS = ("linear_cross_entropy", "triangle_multiply", "gated_output", "grouped_matmul")
"""Of which most time is that of torch's matrix products."""
TOGETHER = ("linear_cross_entropy",)
"""Whose gradients are made in the forward, and once."""
WITHOUT_BIAS = "ours without bias"
ON_CPU: dict[str, Case] = {
    "softmax": {"B": 1, "S": 16, "H": 8, "L": 128, "N": 128, "mask": True, "bias": True},
    "layer_norm": {"B": 64, "L": 256, "N": 128, "weight": True, "bias": True},
    "rms_norm": {"B": 1, "L": 1024, "N": 2048, "weight": True},
    "group_norm": {"N": 1, "C": 320, "G": 32, "places": (64, 64)},
    "rope": {"B": 1, "L": 1024, "H": 16, "J": 16, "K": 64},
    "swiglu": {"rows": (1024,), "F": 2048},
    "attention": {"B": 1, "L": 512, "S": 512, "J": 8, "G": 1, "K": 64, "causal": True},
    "attention_varlen": {"q_lengths": (384, 128), "k_lengths": (384, 128), "J": 8, "G": 1, "K": 64, "causal": True},
    "paged_attention": {"B": 4, "L": 512, "Q": 1, "J": 8, "G": 4, "K": 64, "page": 16, "even": True},
    "write_pages": {"T": 1024, "J": 8, "K": 128, "P": 128, "page": 16},
    "linear_cross_entropy": {"N": 512, "D": 256, "V": 8192},
    "cross_entropy_of_shard": {"C": 256, "V": 8192},
    "int8_matmul": {"M": 1, "N": 1024, "K": 1024, "bias": True},
    "int8_dynamic_matmul": {"M": 64, "N": 1024, "K": 1024},
    "int4_matmul": {"M": 1, "N": 1024, "K": 1024, "group": 128, "bias": True},
    "grouped_matmul": {"rows": (128,) * 8, "I": 256, "O": 512},
    "adamw": {"shapes": ((1024, 2048),)},
    "adamw_8bit": {"shapes": ((1024, 2048),)},
    "adafactor": {"shapes": ((1024, 2048),)},
    "triangle_multiply": {"N": 96, "C": 64, "D": 64, "outgoing": True, "residual": True},
    "gate_channels_first": {"lead": (1, 128, 128), "C": 64},
    "norm_channels_last": {"lead": (1, 128, 128), "C": 128},
    "gated_residual": {"rows": (128, 128), "F": 128, "parts": ("gate", "bias", "dropout", "residual")},
    "gated_output": {"rows": (128, 128), "H": 128, "F": 128},
}
"""Sizes of some millions of elements, beyond a core's cache, for machines where a GPU's sizes take minutes."""


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
        return seconds_of_replays(run)

    def seconds() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    if (first := seconds()) > 1.0:  # nothing to warm up that would show
        return first
    found, begin = [], time.perf_counter()
    while len(found) < least or time.perf_counter() - begin < 0.3:
        found.append(seconds())
    return statistics.median(found)


def seconds_of_replays(run: Callable[[], Any], budget_s: float = 0.15, most: int = 200) -> float:
    """Median seconds of a call on a GPU, in a graph that overwrites the cache before it.

    The clock is read in the graph, too: from outside, its launch would be 5 us of every call.
    """
    flushed = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda")
    before, after = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))

    def flushed_and_timed() -> None:
        flushed.zero_()
        before.record()
        run()
        after.record()

    replay = captured(flushed_and_timed)

    def seconds() -> float:
        replay()
        torch.cuda.synchronize()
        return before.elapsed_time(after) / 1e3

    def timed(count: int) -> float:
        return statistics.median(seconds() for _ in range(count))

    return timed(max(5, min(most, int(budget_s / (timed(3) + FLUSH_S)))))


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """What replays the call as a graph; the call itself where it cannot be captured, as one that waits for the host."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # On the stream that computed what is differentiated: a backward takes that of its forward.
        with torch.cuda.graph(graph, stream=None if stream == torch.cuda.default_stream() else stream):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return run
    graph.replay()
    return graph.replay


def measure_roofline(dtypes: tuple[torch.dtype, ...]) -> Roofline:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device())
    target = source.clone()  # in memory already
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
    attends = spec.name == "attention" and plain and not inputs.get("window")
    if attends:
        found["SDPA"] = _sdpa
    if device().type != "cuda":
        return found
    if attends and inputs["q"].element_size() == 2:
        found["SDPA, cuDNN"] = partial(_sdpa_by, SDPBackend.CUDNN_ATTENTION)
        found["SDPA, flash"] = partial(_sdpa_by, SDPBackend.FLASH_ATTENTION)
    found |= _fused_by_torch(spec, inputs)
    ops = liger.operators()
    theirs = None if ops is None else liger.liger(ops, spec.name, inputs)
    return found if theirs is None else found | {"Liger": theirs}


def absent_peers() -> list[str]:
    """Peers of a GPU's kernels that are not installed, each with what to do."""
    return [liger.ABSENT] if device().type == "cuda" and liger.operators() is None else []


def _sdpa_by(backend: SDPBackend, /, **inputs: Any) -> Tensor:
    with sdpa_kernel(backend):
        return _sdpa(**inputs)


def _fused_by_torch(spec: KernelSpec, inputs: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """torch's own fused kernels, where it has one that computes the same."""
    alone = inputs.get("residual") is None
    if spec.name == "rms_norm" and alone:
        return {"torch fused": lambda x, weight, eps=1e-6, **_: F.rms_norm(x, x.shape[-1:], weight, eps)}
    if spec.name == "layer_norm" and alone:
        return {"torch fused": lambda x, weight, bias, eps=1e-5, **_: F.layer_norm(x, x.shape[-1:], weight, bias, eps)}
    if spec.name == "group_norm" and inputs.get("weight") is not None:
        return {"torch fused": _group_norm_of_torch}
    return {}


def _group_norm_of_torch(
    x: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5, silu: bool = False
) -> Tensor:
    y = F.group_norm(x, num_groups, weight, bias, eps)
    return F.silu(y) if silu else y


def contenders(spec: KernelSpec, inputs: Mapping[str, Any], compiled: bool) -> dict[str, Callable[..., Any]]:
    ours, reference = spec.in_place or (spec.function, spec.reference)
    found: dict[str, Callable[..., Any]] = {"ours": ours}
    if spec.name == "attention" and inputs.get("bias") is not None:
        found[WITHOUT_BIAS] = lambda bias, **others: spec.function(**others)
    fits = scores_bytes(spec, inputs) <= SCORES_BYTES
    if device().type == "cuda" and fits:
        found["eager"] = reference
    if compiled and fits:
        torch._dynamo.reset()
        found["torch.compile"] = torch.compile(reference)
    return found | peers_of(spec, inputs)


def scores_bytes(spec: KernelSpec, inputs: Mapping[str, Any]) -> int:
    """Of the scores that a reference of attention has in memory, in fp32."""
    if spec.name != "attention":
        return 0
    B, L, H, _ = inputs["q"].shape
    return 4 * B * H * L * inputs["k"].shape[1]


# --- one case ---------------------------------------------------------------------------------------------------------


def inputs_of(spec: KernelSpec, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    inputs = spec.inputs(case, dtype, device(), torch.Generator().manual_seed(0))
    for name in spec.grads:
        if isinstance(inputs.get(name), Tensor):
            inputs[name] = inputs[name].detach().requires_grad_()
    return inputs


def passes(function: Callable[..., Any], spec: KernelSpec, inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """ "forward", and "backward" alone where there is one; "both" where the gradients are made in the forward."""
    plain = {n: v.detach() if isinstance(v, Tensor) else v for n, v in inputs.items()}
    leaves = [inputs[n] for n in spec.grads if isinstance(inputs.get(n), Tensor)]
    if spec.name in TOGETHER:
        return {"both": lambda: torch.autograd.grad(function(**inputs), leaves)}
    found: dict[str, Callable[[], Any]] = {"forward": lambda: function(**plain)}
    if leaves:
        outputs = [o for o in outputs_of(function(**inputs)) if o.requires_grad]
        grads = [torch.ones_like(o) for o in outputs]
        found["backward"] = lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True, allow_unused=True)
    return found


def check_green(spec: KernelSpec, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> None:
    """Raises UserError when the family is red on this device, forward or backward: then its speed means nothing."""
    for case in spec.cases[:2]:
        for dtype in dtypes:
            error = error_of(spec, case, dtype)
            if not error <= spec.tolerance[dtype]:
                raise UserError(f"{spec.name} is off by {error:.2g} at {dict(case)} in {dtype}; no result")


def error_of(spec: KernelSpec, case: Case, dtype: torch.dtype) -> float:
    """The largest error of a result or gradient against the fp64 reference, relative to its largest element.

    Where the reference is not finite the result has to be as it is: else the error is infinite.
    """
    inputs, worst = spec.inputs(case, dtype, device(), torch.Generator().manual_seed(0)), 0.0
    wide = {n: v.double() if _floating(v) else v for n, v in inputs.items()}
    found, expected = _results(spec.function, spec, inputs), _results(spec.reference, spec, wide)
    for got, want in zip(found, expected, strict=True):
        at = want.isfinite()
        if not torch.equal(got.isfinite(), at):
            return math.inf
        if want.is_floating_point() and at.any():
            error = (got.double() - want)[at].abs().max() / want[at].abs().max().clamp(min=1e-30)
            worst = max(worst, float(error))
    return worst


def _results(function: Callable[..., Any], spec: KernelSpec, inputs: dict[str, Any]) -> list[Tensor]:
    """Results, and gradients of their sum with weights."""
    leaves = [n for n in spec.grads if isinstance(inputs.get(n), Tensor)]
    inputs = inputs | {n: inputs[n].detach().requires_grad_() for n in leaves}
    outputs = outputs_of(function(**inputs))
    differentiable = [o for o in outputs if o.requires_grad]
    if not differentiable:
        return list(outputs)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(o.shape, generator=generator).to(spec.dtypes[-1]).to(o) for o in differentiable]
    gradients = torch.autograd.grad(differentiable, [inputs[n] for n in leaves], weights, allow_unused=True)
    return [*(o.detach() for o in outputs), *(g for g in gradients if g is not None)]


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def rows_of(
    spec: KernelSpec, case: Case, dtype: torch.dtype, roofline: Roofline, compiled: bool,
    failed: Callable[[str], None] | None = None,
) -> Iterator[Row]:  # fmt: skip
    """The figures of one case as they come: a row per contender and pass.

    failed  is told of a contender that fails, and the others are timed; without it the error is raised. Ours fails
            where it does: then there is nothing to compare
    """
    traffic = spec.traffic(case, dtype)
    with _beside_the_default_stream():
        inputs = inputs_of(spec, case, dtype)
        for name, function in contenders(spec, inputs, compiled).items():
            try:
                for which, run in passes(function, spec, inputs).items():
                    yield _row(spec, case, dtype, name, which, seconds_of(run), traffic, roofline)
            except (RuntimeError, TypeError, ValueError) as error:
                if failed is None or name == "ours":
                    raise
                where = f"{spec.name}, {_described(spec.name, case, dtype)['case']}"
                failed(f"{name} failed: {where}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}")


def _beside_the_default_stream() -> AbstractContextManager[Any]:
    """On a GPU a stream that can be captured."""
    return torch.cuda.stream(torch.cuda.Stream()) if device().type == "cuda" else nullcontext()


def _row(
    spec: KernelSpec, case: Case, dtype: torch.dtype, contender: str, which: str, seconds: float, traffic: Traffic,
    roofline: Roofline,
) -> Row:  # fmt: skip
    whole = ("forward", "backward") if which == "both" else (which,)
    num_bytes, num_flops = (sum(getattr(traffic, f"{w}_{what}") for w in whole) for what in ("bytes", "flops"))
    numbers = {
        "time": Number(1e6 * seconds, "us"),
        "bandwidth": Number(num_bytes / seconds / 1e9, "GB/s"),
        "arithmetic": Number(num_flops / seconds / 1e12, "TFLOP/s"),
        "share": Number(roofline.seconds(num_bytes, num_flops, dtype) / seconds, "of the roofline"),
    }
    in_memory = num_bytes / roofline.bandwidth >= num_flops / roofline.flops[dtype]
    bound = {"bound": "memory" if in_memory else "arithmetic"}
    return Row(_described(spec.name, case, dtype) | bound | {"pass": which, "contender": contender}, numbers)


def _described(name: str, case: Case, dtype: torch.dtype) -> dict[str, str | int]:
    sizes = " ".join(f"{k}={v}" for k, v in case.items())
    return {"kernel": name, "case": sizes, "dtype": str(dtype).removeprefix("torch.")}


# --- peak memory ------------------------------------------------------------------------------------------------------


def peaks_of_loss(case: Case, dtype: torch.dtype) -> dict[str, int]:
    """Bytes that the loss and its gradients need at once, without their inputs: "ours", and "eager" with all logits."""
    spec = specs()["linear_cross_entropy"]
    return {"ours": _peak(spec, spec.function, case, dtype), "eager": _peak(spec, spec.reference, case, dtype)}


def _peak(spec: KernelSpec, function: Callable[..., Any], case: Case, dtype: torch.dtype) -> int:
    on_gpu = device().type == "cuda"
    inputs = spec.inputs(case, dtype, device() if on_gpu else "meta", torch.Generator().manual_seed(0))
    inputs = {n: v if on_gpu or not isinstance(v, Tensor) else v.to("meta") for n, v in inputs.items()}
    leaves = [inputs[n].requires_grad_() for n in spec.grads]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(function(**inputs), leaves)
        return torch.cuda.max_memory_allocated() - before
    with forced(), MemoryAccount("meta") as account:
        account.add(v for v in inputs.values() if isinstance(v, Tensor))
        before = account.current_bytes
        torch.autograd.grad(function(**inputs), leaves)
    return account.peak_bytes - before


def peak_rows(dtype: torch.dtype) -> list[Row]:
    found = []
    for case in specs()["linear_cross_entropy"].timed:
        gradients = dtype.itemsize * (case["N"] + case["V"]) * case["D"]
        for contender, peak in peaks_of_loss(case, dtype).items():
            described = _described("linear_cross_entropy", case, dtype) | {"pass": "peak memory"}
            numbers = {"peak": Number(peak / 2**20, "MiB"), "working": Number((peak - gradients) / 2**20, "MiB")}
            found.append(Row(described | {"contender": contender}, numbers))
    return found


# --- all of them ------------------------------------------------------------------------------------------------------


def measure(options: Options) -> Measured:
    with start():  # the allocator of a training process: without it every large result page-faults
        return _measure(options)


def _measure(options: Options) -> Measured:
    on_gpu = device().type == "cuda"
    dtypes = (torch.bfloat16, torch.float32) if on_gpu else (torch.float32,)
    families = chosen(options.families)
    roofline = measure_roofline(dtypes)
    for spec in families.values():
        check_green(spec, tuple(d for d in dtypes if d in spec.dtypes))
    figures = peak_rows(torch.bfloat16) if "linear_cross_entropy" in families else []
    notes = absent_peers()
    compiled = options.compiled and (options.full or (on_gpu and not options.quick))
    for spec, case in _in_turn(on_gpu, options.quick):
        for dtype in dtypes if spec.name in families else ():
            for row in rows_of(spec, case, dtype, roofline, compiled, notes.append) if dtype in spec.dtypes else ():
                figures.append(row)
                options.kept(row)
    rates = ", ".join(f"{str(d).removeprefix('torch.')} {f / 1e12:.3g} TFLOP/s" for d, f in roofline.flops.items())
    notes.append(f"Roofline measured here: copy {roofline.bandwidth / 1e9:.3g} GB/s, matrix products {rates}.")
    if not on_gpu:
        notes.append(
            "No GPU: ours is the reference of each kernel, on one thread; the kernels themselves were not timed. Peaks "
            "are counted from meta tensors, along the path of the kernels."
        )
    return Measured(tuple(figures), tuple(targets(figures)), tuple(notes))


def chosen(names: Sequence[str]) -> dict[str, KernelSpec]:
    """The families of those names; all where there is none.  Raises UserError for one that is not there."""
    if unknown := [name for name in names if name not in specs()]:
        raise UserError(f"--family {unknown[0]}: no kernel has that name; the families are {', '.join(specs())}")
    return {name: spec for name, spec in specs().items() if not names or name in names}


def _in_turn(on_gpu: bool, quick: bool) -> list[tuple[KernelSpec, Case]]:
    """What is timed: every family's first case, then every one's second, .."""

    def cases_of(spec: KernelSpec) -> tuple[Case, ...]:
        if on_gpu:
            return spec.timed[: 1 if quick else None]
        return (spec.cases[0] if quick else ON_CPU[spec.name],)

    cases = [(index, spec, case) for spec in specs().values() for index, case in enumerate(cases_of(spec))]
    return [(spec, case) for _, spec, case in sorted(cases, key=lambda item: item[0])]


def targets(figures: list[Row]) -> list[Target]:
    """What was aimed at, of what was measured: times on a GPU only."""
    found = [t for row in figures if row.case["contender"] == "ours" for t in targets_of(row, figures)]
    return [*found, *_peak_targets(figures)]


def targets_of(row: Row, figures: list[Row]) -> list[Target]:
    """Shares of the roofline in bf16; attention with a bias beside itself without; Adafactor's step in fp32."""
    if device().type != "cuda" or row.case["pass"] not in ("forward", "backward"):
        return []
    kernel, which, sizes, dtype = (row.case[name] for name in ("kernel", "pass", "case", "dtype"))
    what, share = f"{kernel} {which}, {sizes}", row.numbers["share"].value
    if dtype == "float32":
        if kernel == "adafactor" and sizes == "shapes=((4096, 4096),)":
            return [Target(f"{what}: {ADAFACTOR_MS} ms", 1.0, 1e3 * ADAFACTOR_MS / row.numbers["time"].value)]
        return []
    if kernel == "attention":
        alike = (r for r in figures if r.case == row.case | {"contender": WITHOUT_BIAS})
        if without := next(alike, None):
            ratio = without.numbers["time"].value / row.numbers["time"].value
            return [Target(f"{what}: share of the speed without bias", 1 / WITH_BIAS, ratio)]
        if "K=64 " in f"{sizes} " or "K=128 " in f"{sizes} ":
            wanted = FORWARD_SHARE if which == "forward" else BACKWARD_SHARE
            return [Target(f"{what}: share of the matrix products' rate", wanted, share)]
        return []
    if kernel in PRODUCTS or row.case["bound"] != "memory":
        return []
    return [Target(f"{what}: share of the copy's bandwidth", MEMORY_SHARE, share)]


def _peak_targets(figures: list[Row]) -> list[Target]:
    found, rows = [], [r for r in figures if r.case["pass"] == "peak memory"]
    for row in rows:
        if row.case["contender"] == "ours":
            eager = next(r for r in rows if r.case == row.case | {"contender": "eager"})
            ratio = eager.numbers["working"].value / row.numbers["working"].value
            what = f"linear_cross_entropy, {row.case['case']}: unfused working memory over ours"
            found.append(Target(what, 1 / PEAK_SHARE, ratio))
    return found


def plot(result: Result, folder: Path) -> Path:
    """Bars: the share of the roofline that ours reaches, by kernel, case and pass."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = [r for r in result.figures if r.case["contender"] == "ours" and "share" in r.numbers]
    labels = [f"{r.case['kernel']} {r.case['pass']} {r.case['case']} {r.case['dtype']}" for r in rows]
    figure, axes = plt.subplots(figsize=(11, 1 + 0.22 * len(rows)))
    axes.barh(range(len(rows)), [100 * r.numbers["share"].value for r in rows], color="#3b6ea5")
    axes.set_yticks(range(len(rows)), labels, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("% of the measured roofline")
    axes.set_title(f"{result.hardware['gpus'] or result.hardware['cpu']}", fontsize=8)
    figure.tight_layout()
    path = folder / f"{result.name}.png"
    save_figure(figure, path, 120)
    plt.close(figure)
    return path


MEASURES = (
    "core/kernels",
    "benchmarks/kernels.py",
)
BENCHMARK = Benchmark("kernels", "Kernels against the roofline", measure, MEASURES, plot, ("--family", "--no-compile"))

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="kernels"), sys.argv[1:]))
