"""Command B, second: decoding with models of 7 billion random weights, as the server computes it.

Llama's shape and BLOOM's, in bf16 and with weights in 8 and 4 bits, for 1, 8 and 64 sequences at once: prompts of 128
tokens, then steps of decoding alone. A figure: tokens a second, the share of the copy's bandwidth that the bytes which
a step has to read would take (the weights, and the keys and values of all sequences), what a step launches (kernels
one by one, and graphs), and where its time goes. The bandwidth is measured first, in the same process.
"""

import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from apps.serve.decode import Decode, warm_up
from apps.serve.engine import Engine
from apps.serve.memory import page_bytes
from apps.serve.request import Delta, Request, Sampling
from apps.serve.runner import Runner
from apps.serve.sampler import Sampler
from apps.serve.scheduler import Limits
from apps.serve.text import Text
from benchmarks.gpu.protocol import Entry, Phase, Where
from benchmarks.gpu.speed import roofline
from benchmarks.result import Number, Row, Target
from benchmarks.serving import PAGE_SIZE, NoText, page_dtype
from core.kernels import paged_attention, quantized_matmul
from core.models import SHAPES, Decoder, DecoderConfig
from core.nn.by_kernels import by_kernels
from core.quant import Scheme, quantize, stored_bytes
from core.quant.measured import measure_weights

MODELS, SCHEMES, SEQUENCES = ("llama_7b", "bloom_7b1"), ("bf16", "int8", "int4"), (1, 8, 64)
PROMPT, STEPS, PROFILED, LONGEST = 128, 48, 4, 8
MODULES = {"products": quantized_matmul, "attention": paged_attention}
"""Of kernels of ours, by what they do."""
LIBRARY = r"gemm|gemv|nvjet|cutlass"
"""In the names of the kernels by which torch multiplies matrices."""
SHARE = 0.70
"""of the copy's bandwidth, which a lone sequence is to reach in bf16 and in 4 bits"""


def phases(where: Where) -> list[Phase]:
    return [
        Phase([
            Entry(f"{name}, {scheme}", partial(decode, name, scheme), least_s=25, most_s=90)
            for name in MODELS for scheme in SCHEMES
        ])
    ]  # fmt: skip


def shape_of(name: str, where: Where) -> DecoderConfig:
    tiny = {"vocab_size": 64, "dim": 64, "num_layers": 2, "num_heads": 4, "ffn_dim": 256}
    return replace(SHAPES[name], max_length=512, **(tiny if where.quick else {}))


@torch.no_grad()
def model_of(config: DecoderConfig, scheme: str, where: Where) -> Decoder:
    """Weights drawn where they will be: on the host they would take minutes."""
    with torch.device("meta"):
        model = Decoder(config)
    dtype = torch.bfloat16 if where.on_gpu else torch.float32
    model.to(dtype).to_empty(device=where.device)
    fill(model, where.device)
    if scheme != "bf16":
        quantize(model, Scheme(scheme), embeddings=True, head=True)
        measure_weights(model, dtype)  # as the server does when it loads a model
    return by_kernels(model.eval())


@torch.no_grad()
def fill(model: torch.nn.Module, device: str) -> None:
    """A decoder: matrices normally distributed, vectors of ones, buffers as its modules make them."""
    assert isinstance(model, Decoder)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.02, generator=generator) if parameter.ndim > 1 else parameter.fill_(1.0)
    fresh = dict(_on_host(model.config).named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(fresh[re.sub(r"^blocks\.\d+\.", "blocks.0.", name)])


@cache
def _on_host(config: DecoderConfig) -> Decoder:
    """One block of it: buffers are alike in all, and large only where the model is."""
    return Decoder(replace(config, num_layers=1, vocab_size=8))


def engine_of(model: Decoder, sequences: int, length: int) -> Engine:
    """As `serve` builds it: with steps captured where the server captures them."""
    num_pages, limits = sequences * (-(-length // PAGE_SIZE) + 1), Limits(PAGE_SIZE, 8192, 2048, sequences)
    runner = Runner(model, num_pages, PAGE_SIZE, page_dtype(model))
    given: dict[str, Any] = {"num_pages": num_pages, "vocab_size": model.config.vocab_size, "max_length": length}
    if runner.device.type == "cuda":
        warm_up(runner, limits.max_batch_tokens, length)
    sampler = Sampler(model.config.vocab_size, runner.machine)
    Decode(runner, sampler, sequences, length)
    given |= {"sampler": sampler, "ahead": True}
    return Engine(runner, cast(Text, NoText()), limits, **given)


def decode(name: str, scheme: str, where: Where) -> Iterator[Row | str]:
    config = shape_of(name, where)
    model, prompt, steps = model_of(config, scheme, where), *((8, 6) if where.quick else (PROMPT, STEPS))
    for sequences in (1, 2) if where.quick else SEQUENCES:
        engine = engine_of(model, sequences, prompt + steps + 32)
        taken = _steady(engine, sequences, prompt, steps, config.vocab_size)
        median = statistics.median(taken)
        read = stored_bytes(model) + sequences * _kept_bytes(config, prompt + steps // 2, page_dtype(model))
        numbers = {
            "step": Number(1e3 * median, "ms"),
            "rate": Number(sequences / median, "tokens/s"),
            "bandwidth": Number(read / median / 1e9, "GB/s"),
            "share": Number(read / roofline(where).bandwidth / median, "of the copy's"),
        }
        case = {"model": name, "weights": scheme, "sequences": sequences}
        if where.on_gpu:
            seen = _profiled(engine)
            by_kernel = _by_kernel(seen)
            numbers |= _launches(seen) | spent(by_kernel, median)
            yield f"{' '.join(map(str, case.values()))}, a step: {longest(by_kernel)}"
        yield Row(case, numbers)
        del engine


def _kept_bytes(config: DecoderConfig, length: int, dtype: torch.dtype) -> int:
    return -(-length // PAGE_SIZE) * page_bytes(config, PAGE_SIZE, dtype)


def _steady(engine: Engine, sequences: int, prompt: int, steps: int, vocab_size: int) -> list[float]:
    """Seconds of the steps in which all sequences write, the first ones left out."""
    generator = torch.Generator().manual_seed(0)
    for number in range(sequences):
        ids = tuple(torch.randint(vocab_size, (prompt,), generator=generator).tolist())
        engine.submit(Request(str(number), ids, steps + 24, Sampling(temperature=0)))
    started: set[str] = set()
    while len(started) < sequences:
        started |= {event.request.id for event in engine.step() if isinstance(event, Delta)}
    taken = []
    for index in range(steps):
        began = time.perf_counter()
        engine.step()
        if index > 1:
            taken.append(time.perf_counter() - began)
    return taken


def _profiled(engine: Engine) -> profile:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            engine.step()
        torch.cuda.synchronize()
    return seen


def _launches(seen: profile) -> dict[str, Number]:
    """Of a step, what the host launches, and what it waits for."""
    counts = {event.key: event.count for event in seen.key_averages()}

    def a_step(*names: str) -> Number:
        return Number(sum(count for key, count in counts.items() if key.startswith(names)) / PROFILED, "a step")

    return {
        "kernels": a_step("cudaLaunchKernel", "cuLaunchKernel"),
        "graphs": a_step("cudaGraphLaunch"),
        "copies": a_step("cudaMemcpy"),
        "waits": a_step("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
    }


def _by_kernel(seen: profile) -> dict[str, tuple[float, float]]:
    """Name of what ran on the device -> (seconds, runs) of a step."""
    of_device = [event for event in seen.key_averages() if event.device_type == DeviceType.CUDA]
    return {e.key: (1e-6 * e.self_device_time_total / PROFILED, e.count / PROFILED) for e in of_device}


def spent(by_kernel: dict[str, tuple[float, float]], step_s: float) -> dict[str, Number]:
    """Where a step's time goes. idle: what no kernel takes, of the unprofiled step."""
    parts = dict.fromkeys((*MODULES, "others"), 0.0)
    for name, (seconds, _) in by_kernel.items():
        ours = next((kind for kind, module in MODULES.items() if hasattr(module, name)), "others")
        parts["products" if re.search(LIBRARY, name) else ours] += seconds
    parts["idle"] = step_s - sum(parts.values())
    return {kind: Number(1e3 * seconds, "ms") for kind, seconds in parts.items()}


def longest(by_kernel: dict[str, tuple[float, float]]) -> str:
    """The kernels that take longest, with microseconds and runs of a step."""
    first = sorted(by_kernel.items(), key=lambda item: -item[1][0])[:LONGEST]
    return "; ".join(f"{name[:60]} {1e6 * seconds:.0f} us, {runs:g} runs" for name, (seconds, runs) in first)


def targets(figures: list[Row]) -> list[Target]:
    wanted = [r for r in figures if r.case.get("sequences") == 1 and r.case.get("weights") in ("bf16", "int4")]
    return [
        Target(f"{r.case['model']}, {r.case['weights']}, one sequence: share of the copy's bandwidth", SHARE,
               r.numbers["share"].value)
        for r in wanted
    ]  # fmt: skip
