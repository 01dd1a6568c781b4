"""Where a step of decoding goes on a CPU: operators, and the shares of products and attention in the time.

One step of the engine's runner for 1, 8, 32 and 64 sequences of 130 tokens, random weights of a published shape, one
thread: the number of torch's operators (those inside others too), the processor's time of a step (median), and by
torch.profiler which of it is in products and in attention. The rest is Python and small operators. Quantized weights
are packed, as a loaded folder's are; all but fp32 have pages in bf16. Compiled: the same step by one graph
(`serve --engine.compile`), if there is a C++ compiler, with --quick of none. Its loops are no operators of torch.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from apps.serve.compiled import compile_runner
from apps.serve.runner import Runner, Step
from benchmarks.limits import SAME_ARITHMETIC
from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import run_command
from core.kernels.llvm import Kernel
from core.models import SHAPES, Decoder, DecoderConfig, initialise
from core.nn.packing import pack_linear
from core.quant import pack, quantize

PAGE_SIZE, LENGTH = 16, 130
BATCHES = (1, 8, 32, 64)
PRODUCTS = (
    "aten::addmm",
    "aten::mm",
    "aten::_int_mm",
    "onednn::qlinear_pointwise",
    "aten::_weight_int4pack_mm_for_cpu",
    "mkldnn::_linear_pointwise",
    *(f"llvm::{name}" for name in ("int8", "int4", "widened")),
)
ATTENTION = ("aten::_scaled_dot_product_flash_attention_for_cpu", "llvm::one_query")


def runner(shape: DecoderConfig, scheme: str, num_sequences: int) -> Runner:
    model = Decoder(shape).eval()
    initialise(model, 0)
    if scheme == "bf16":
        model.to(torch.bfloat16)
    if scheme in ("fp32", "bf16"):
        pack_linear(model)
    else:
        quantize(model, scheme, embeddings=True, head=True)
        pack(model)
    page_dtype = torch.float32 if scheme == "fp32" else torch.bfloat16
    made = Runner(model, num_sequences * _pages(), PAGE_SIZE, page_dtype)
    for layer in made.pages:
        for pages in (layer.k, layer.v):
            pages.copy_(torch.randn(pages.shape))
    return made


def _pages() -> int:
    return -(-LENGTH // PAGE_SIZE)


def step(batch: int) -> Step:
    """The last token of so many sequences."""
    tables = [list(range(b * _pages(), (b + 1) * _pages())) for b in range(batch)]
    slots = [table[(LENGTH - 1) // PAGE_SIZE] * PAGE_SIZE + (LENGTH - 1) % PAGE_SIZE for table in tables]
    every = list(range(batch))
    return Step([5] * batch, [LENGTH - 1] * batch, slots, tables, [LENGTH] * batch, [*every, batch], every)


def measure(options: Options) -> Measured:
    names = ["opt_125m", "bloom_560m"] if options.full else ["opt_125m"]
    shapes = {name: SHAPES[name] for name in names}
    if options.quick:
        tiny = {"vocab_size": 512, "dim": 64, "num_layers": 2, "num_heads": 4, "ffn_dim": 256, "max_length": 256}
        shapes = {"tiny": replace(SHAPES["opt_125m"], **tiny)}
    batches = (1, 4) if options.quick else BATCHES
    torch.set_num_threads(1)
    rows, targets = [], []
    for name, shape in shapes.items():
        taken: dict[tuple[str, str, int], float] = {}
        for scheme in ("fp32", "bf16", "int8", "w8a8", "int4"):
            made = runner(shape, scheme, max(batches))
            for kind in ("as written",) if options.quick else ("as written", "compiled"):
                if kind == "compiled" and not compile_runner(made):
                    continue
                for batch in batches:
                    case = {"shape": name, "weights": scheme, "step": kind, "sequences": batch}
                    rows.append(Row(case, _figures(made, step(batch))))
                    taken[scheme, kind, batch] = rows[-1].numbers["cpu_s"].value
            del made
        targets += _targets(name, taken)
    return Measured(tuple(rows), tuple(targets), ("1 thread; the processor's own time, not that of the clock",))


def _targets(shape: str, taken: dict[tuple[str, str, int], float]) -> list[Target]:
    return [
        Target(
            f"{shape}, {batch} sequences: time with bf16 / with int8, {kind}",
            1.0,
            taken["bf16", kind, batch] / taken["int8", kind, batch],
            SAME_ARITHMETIC,
        )
        for kind in ("as written", "compiled")
        for batch in BATCHES
        if ("int8", kind, batch) in taken
    ]


def _figures(made: Runner, work: Step) -> dict[str, Number]:
    made.run(work)
    taken = []
    for _ in range(5):
        began = time.process_time()
        made.run(work)
        taken.append(time.process_time() - began)
    with profile(activities=[ProfilerActivity.CPU]) as seen, _named_kernels():
        made.run(work)
    events = seen.key_averages()
    whole = sum(event.self_cpu_time_total for event in events)

    def share(names: tuple[str, ...]) -> Number:
        return Number(100 * sum(e.self_cpu_time_total for e in events if e.key in names) / whole, "%")

    return {
        "operators": Number(sum(event.count for event in events if "::" in event.key), ""),
        "cpu_s": Number(statistics.median(taken), "s"),
        "products": share(PRODUCTS),
        "attention": share(ATTENTION),
    }


@contextmanager
def _named_kernels() -> Iterator[None]:
    """Inside, the profiler sees the loops that LLVM made, which are no operators, by name."""
    call = Kernel.__call__

    def named(self: Kernel, count: int, *arguments: int) -> None:
        with record_function(f"llvm::{self.name}"):
            call(self, count, *arguments)

    Kernel.__call__ = named
    try:
        yield
    finally:
        Kernel.__call__ = call


MEASURES = (
    "apps/serve/runner.py",
    "apps/serve/compiled.py",
    "core/models",
    "core/nn",
    "core/quant",
    "core/kernels",
    "benchmarks/decode_step.py",
)
BENCHMARK = Benchmark("decode_step", "A step of decoding", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="decode_step"), sys.argv[1:]))
