"""Command D: what no GPU has measured yet, what is worth most first, so that whatever time there is goes to that.

Entries are those of the other commands, under their names, and these:

    few rows of quantized weights   int8 and int4 by the kernels whose warps share the columns, beside the widened
                                    weight and bf16; each is held to the product with the widened weight in fp32
    block sizes of few rows         those that `core.kernels.tune` finds for int8 and int4, told as they are shipped
                                    (core/kernels/tuned) and taken by what runs behind it
    activations elsewhere           steps of the 350M shape, 4 x 2048 tokens, with what blocks save kept, computed
                                    again, on the host, in 8 bits a number, and on a drive
    Gemini on a drive               OPT's 1.3B shape in 10 GiB of the device and 12 of the host, every step durable
    GPT-2 by core.auto              steps of transformers' GPT-2 as it is, and as `core.auto.parallelize` spreads it
                                    over one device

Of the families of kernels those come first whose rates are the oldest in benchmarks/results; the others come last.
"""

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import kernels
from benchmarks.gpu import decoding, entries, speed, training
from benchmarks.gpu.protocol import Entry, Phase, Where
from benchmarks.offload import Turn, shaped
from benchmarks.result import RESULTS, Number, Row, Target, read
from core.config import UserError
from core.kernels import quantized_matmul, specs
from core.kernels.blocks import SHIPPED, autotune
from core.kernels.tune import tune
from core.models import SHAPES
from core.parallel.recompute import RecomputeConfig
from core.runtime import start
from tests.support.device import by_kernels

TESTS_S = 240
"""The most that the tests of a GPU get: what is behind them has to be reached."""
OLD_FAMILIES = 5
SIZES = {"queries, keys, values": (12288, 4096), "down": (4096, 11008)}
"""Of Llama-7B's weights: rows and columns."""
ROWS = (1, 4, 8, 16, 32)
OFF = 2.0**-7
"""Of the largest element: x, the widened weight and the result are each rounded to 8 bits of mantissa."""


def phases(where: Where) -> list[Phase]:
    known = {
        entry.name: (replace(entry, most_s=TESTS_S) if entry.name == "tests of a GPU" else entry)
        for command in "abc" for phase in entries.phases(command, where) for entry in phase.entries
    }  # fmt: skip
    own = [
        Entry("few rows of quantized weights", few_rows, least_s=15, most_s=75),
        Entry("block sizes of few rows", block_sizes, least_s=30, most_s=120),
        Entry("activations elsewhere", activations, least_s=30, most_s=90),
        Entry("Gemini on a drive", on_a_drive, least_s=60, most_s=150),
        Entry("GPT-2 by core.auto", by_auto, least_s=20, most_s=90),
    ]
    known |= {entry.name: entry for entry in own}
    families = [f"{name}, speed" for name in oldest_first()]
    order = (
        *("tests of a GPU", "roofline", "int4_matmul is right", "int8_matmul is right", "block sizes of few rows"),
        *("few rows of quantized weights", "llama_7b, int4", *families[:OLD_FAMILIES], "Evoformer block"),
        *("Stable Diffusion", "pretrain gpt3_350m, our kernels", "activations elsewhere", "Gemini on a drive"),
        *("llama_7b, int8", "bloom_7b1", "GPT-2 by core.auto", "Gemini", "pretrain gpt3_350m", *families),
    )
    names = dict.fromkeys(name for text in order for name in known if name.startswith(text))
    return [Phase([known[name] for name in names])]


def oldest_first() -> list[str]:
    """Families of kernels by when one of benchmarks/results timed them last; those that none did come first."""
    timed = dict.fromkeys(specs(), "")
    for path in RESULTS.glob("gpu_*.json"):
        result = read(path)
        for row in result.figures:
            if (name := row.case.get("kernel")) in timed and "time" in row.numbers:
                timed[str(name)] = max(timed[str(name)], result.date)
    return sorted(timed, key=lambda name: timed[name])


# --- products of few rows ---------------------------------------------------------------------------------------------


def few_rows(where: Where) -> Iterator[Row]:
    """Raises AssertionError with what is off, when all was measured."""
    sizes, counts = ({"small": (64, 256)}, (1, 3)) if where.quick else (SIZES, ROWS)
    generator, wrong = torch.Generator(where.device).manual_seed(0), []
    for what, (N, K) in sizes.items():
        weight = torch.randn(N, K, device=where.device, generator=generator) * K**-0.5
        of_bits = _products(weight)
        plain = weight.bfloat16()
        for rows in counts:
            x = torch.randn(rows, K, device=where.device, generator=generator).bfloat16()
            for bits, (num_bytes, widened, product) in of_bits.items():
                wanted = x.float() @ widened.T
                for how in (None, "wide"):
                    case = {"weight": what, "rows": rows, "bits": bits, "by": "widened" if how else "ours"}
                    with by_kernels():
                        found = product(x, how=how)
                    off = float((found.float() - wanted).abs().max() / wanted.abs().max())
                    if not off <= OFF:
                        wrong.append(f"{case} is off by {off:.3g}")
                    yield Row(case, _rates(partial(product, x, how=how), num_bytes, where))
            case = {"weight": what, "rows": rows, "bits": 16, "by": "torch"}
            yield Row(case, _rates(partial(torch.matmul, x, plain.T), plain.nbytes, where))
    if wrong:
        raise AssertionError("; ".join(wrong))


def _products(weight: Tensor) -> dict[int, tuple[int, Tensor, Callable[..., Tensor]]]:
    """bits -> (bytes, the weight widened again, fp32, the product)"""
    codes, scale = quantized_matmul.quantize_int8(weight)
    packed, scales, zeros = quantized_matmul.quantize_int4(weight, 128, False)
    assert zeros is not None
    four = (packed, scales, zeros)
    return {
        8: (
            codes.nbytes + scale.nbytes,
            quantized_matmul.dequantize_int8(codes, scale),
            lambda x, how: quantized_matmul.int8_matmul(x, codes, scale, how=how),
        ),
        4: (
            sum(part.nbytes for part in four),
            quantized_matmul.dequantize_int4(*four, weight.shape[1]),
            lambda x, how: quantized_matmul.int4_matmul(x, *four, group=128, how=how),
        ),
    }


def _rates(run: Callable[[], Any], num_bytes: int, where: Where) -> dict[str, Number]:
    """num_bytes: of the weight, which has to be read"""
    seconds = kernels.seconds_of(run)
    share = num_bytes / speed.roofline(where).bandwidth / seconds
    return {"time": Number(1e6 * seconds, "us"), "share": Number(share, "of the copy's")}


def block_sizes(where: Where) -> Iterator[str | Row]:
    """Those of products of few rows, kept where a package ships them; none without a GPU, which times them."""
    if where.on_gpu:
        autotune(SHIPPED)
    for name in ("int4_matmul", "int8_matmul"):
        found = list(tune(specs()[name], specs()[name].timed, where.device)) if where.on_gpu else []
        yield "; ".join(found) or f"{name}: nothing to choose"
        yield Row({"of": name}, {"chosen": Number(len(found), "block sizes")})
    autotune(None)


# --- training ---------------------------------------------------------------------------------------------------------


def activations(where: Where) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="activations-", dir=_drive()) as folder:
        ways = {
            "kept": RecomputeConfig(),
            "computed again": RecomputeConfig("full"),
            "on the host": RecomputeConfig("offload"),
            "in 8 bits": RecomputeConfig("compressed", bits=8),
            "on a drive": RecomputeConfig("offload", disk=Path(folder)),
        }
        config, rows, length = SHAPES["gpt3_350m"], 4, 2048
        if where.quick:
            tiny = {"vocab_size": 64, "dim": 64, "num_layers": 2, "num_heads": 2, "ffn_dim": 128, "max_length": 32}
            config, rows, length = replace(config, **tiny), 2, 32
        for name, recompute in ways.items():
            if where.on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            with start(where.device) as runtime:
                step = training.step_of(config, False, False, where, runtime, recompute)
                ids = torch.randint(config.vocab_size, (rows, length), device=where.device)
                seconds = [training.timed(step, ids, where) for _ in range(2 if where.quick else 4)]
                numbers = {"step": Number(1e3 * min(seconds[1:]), "ms")}
                if where.on_gpu:
                    numbers["memory"] = Number(torch.cuda.max_memory_allocated() / 2**30, "GiB")
                del step
            yield Row({"shape": "gpt3_350m", "activations": name, "rows": rows, "length": length}, numbers)
            gc.collect()


def _drive() -> Path | None:
    """A folder whose files do not lie in memory: that of temporary files, or, where those do, the working tree's."""
    from core.gemini.generation import require_drive

    folder = Path(tempfile.gettempdir())
    try:
        require_drive(folder, "it")
    except UserError:
        return Path.cwd()
    return None


def on_a_drive(where: Where) -> Iterator[Row | str]:
    shape = shaped("GPT-2", 2, 64) if where.quick else shaped("OPT", 24, 2048, 32)
    shape = replace(shape, vocab_size=64) if where.quick else shape
    device, host = (2**21, 2**22) if where.quick else (10 * 2**30, 12 * 2**30)
    with tempfile.TemporaryDirectory(prefix="gemini-", dir=_drive()) as folder:
        turn = Turn(
            "Gemini on a disk", shape, *((1, 32) if where.quick else (4, 1024)), 1 if where.quick else 2, device
        )
        turn = replace(turn, device=where.device, disk=folder, host_bytes=host)
        turn = replace(turn, precision="bf16" if where.on_gpu else "fp32")
        found = training.attempt(turn, Path(sys.executable))
    if found is None:
        yield f"{turn.contender} does not train {shape.name} in {device / 2**30:.3g} and {host / 2**30:.3g} GiB"
        return
    numbers = {"step": Number(statistics.median(found.seconds), "s"), "peak": Number(found.peak_bytes / 2**30, "GiB")}
    yield Row({"model": shape.name, "contender": turn.contender}, numbers)


def by_auto(where: Where) -> Iterator[Row]:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import GPT2Config, GPT2LMHeadModel

    from core.auto import parallelize

    sizes: dict[str, Any] = (
        {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32} if where.quick else {}
    )
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    shape = (2, 16) if where.quick else (8, 1024)
    with start(where.device):
        ids = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(where.device)
        batch = {"input_ids": ids, "labels": ids}
        for name in ("as it is", "core.auto"):
            model = GPT2LMHeadModel(config).to(where.device)
            if name == "core.auto":
                parallelize(model, batch, mesh=init_device_mesh(where.device, (1,), mesh_dim_names=("x",)))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            taken = [_step_s(model, optimizer, batch) for _ in range(2 if where.quick else 8)]
            yield Row({"model": "GPT-2", "by": name}, {"step": Number(1e3 * statistics.median(taken[1:]), "ms")})


def _step_s(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> float:
    began = time.perf_counter()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if batch["input_ids"].is_cuda:
        torch.cuda.synchronize()
    if not bool(loss.detach().isfinite()):
        raise ArithmeticError("the loss is not finite")
    return time.perf_counter() - began


def targets(figures: list[Row]) -> list[Target]:
    """Those of the commands whose entries are taken."""
    of: Iterable[Callable[[list[Row]], list[Target]]] = (speed.targets, decoding.targets, training.targets)
    return [target for one in of for target in one(figures)]
