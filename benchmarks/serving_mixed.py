"""Serving a mixed load: requests that come at random times, a long prompt beside a decode batch, prompts alike.

Poisson        requests of mixed lengths at random times (a Poisson process from a seed), faster than any of the systems
               serves them, so that what is measured is what a system gets done: tokens a second. The systems are those
               of `benchmarks.serving`; one that knows only whole batches takes those who have come, and transformers'
               continuous batching is handed all requests at once, which flatters it.
long prompt    a prompt of 1,500 tokens alone; then four sequences decode, and another comes. The mean time of their
               tokens before it and while it is computed, and the time until it is, paced as `serve` does
               (`apps.serve.pace`) and with chunks of 512 tokens; and the same beside one decoding sequence of a model
               of 380M parameters in int4
prompts alike  the time to the first token of a prompt whose beginning nobody has sent before, and of one that shares
               all but its last tokens with it; medians
ready          `serve --model FOLDER` in a process of its own: seconds until it listens; the interpreter's imports are
               in it, and given beside it
"""

import contextlib
import gc
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from apps.serve.bench import BenchConfig, figures, loads
from apps.serve.engine import Engine
from apps.serve.pace import Pace
from apps.serve.request import Delta, PromptDone, Request, Sampling
from benchmarks.limits import SAME_BYTES, limit_of
from benchmarks.result import ROOT, Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from benchmarks.serving import MEASURES, Contender, Size, contenders, engine_of, join_peers
from core.config import run_command
from core.models import SHAPES, Decoder, DecoderConfig, initialise
from core.precision import bf16_units
from core.quant import load_quantized, quantize
from core.runtime import keep_freed_memory

STRETCH = 2.0
PEERS = ("vLLM", "CTranslate2 int8")
GPT_380M = replace(SHAPES["gpt3_350m"], num_layers=26)


@dataclass(frozen=True)
class Amount:
    """How much of everything.

    requests, rounds  of the Poisson load
    concurrency       requests that a system computes at once, at most
    long_prompt       tokens of the prompt that comes beside four decoding sequences
    prefix, prompts   tokens that prompts share, and how many pairs of them
    larger            the model that decodes one sequence beside such a prompt
    """

    size: Size
    requests: int
    rounds: int
    concurrency: int
    long_prompt: int
    prefix: int
    prompts: int
    larger_name: str = "gpt_380m"
    larger: DecoderConfig = GPT_380M


def amount(options: Options) -> Amount:
    if options.quick:
        tiny = {"vocab_size": 512, "dim": 128, "num_layers": 2, "num_heads": 2, "ffn_dim": 512, "max_length": 256}
        return Amount(
            Size("tiny", replace(SHAPES["opt_125m"], **tiny), (), (4, 24), (4, 12)),
            8,
            1,
            4,
            200,
            96,
            2,
            "tiny",
            replace(SHAPES["opt_125m"], **tiny),
        )
    if options.full:
        return Amount(Size("opt_125m", SHAPES["opt_125m"], (), (16, 512), (8, 256)), 96, 3, 32, 1500, 1024, 5)
    return Amount(Size("opt_125m", SHAPES["opt_125m"], (), (16, 256), (8, 128)), 32, 1, 8, 1500, 512, 3)


def measure(options: Options) -> Measured:
    keep_freed_memory()  # as `serve` does
    much = amount(options)
    notes = [f"{torch.get_num_threads()} threads", "weights are random; greedy; texts of exactly the length asked for"]
    with tempfile.TemporaryDirectory() as root, torch.no_grad(), contextlib.ExitStack() as processes:
        folder, scratch = Path(root) / "model", Path(root) / "scratch"
        scratch.mkdir()
        dtype = torch.bfloat16 if bf16_units(torch.device("cpu")) else torch.float32
        found = contenders(much.size, dtype, folder, scratch, options, compiled=True)
        notes += join_peers(found, processes, PEERS, much.size, folder, scratch, options)
        versions = {package: version for one in found for package, version in one.versions.items()}
        rows, targets = _poisson(much, found, notes)
        del found
        gc.collect()
        processes.close()
        model = load_quantized(scratch / "int8")
        assert isinstance(model, Decoder)
        for more_rows, more_targets in (
            _long_prompt(model, Beside(much.size.name, "int8", 4, much.long_prompt)),
            _long_prompt(in_4_bits(much.larger), Beside(much.larger_name, "int4", 1, much.long_prompt)),
            _prompts_alike(much, model),
            _ready(much, scratch / "int8", notes),
        ):
            rows += more_rows
            targets += more_targets
    if not options.peers_python:
        notes.append(f"left out: {', '.join(PEERS)}: --peers-python names an interpreter that has them")
    return Measured(tuple(rows), tuple(targets), tuple(notes), versions)


Found = tuple[list[Row], list[Target]]


def _poisson(much: Amount, found: Sequence[Contender], notes: list[str]) -> Found:
    size = much.size
    base = BenchConfig(requests=much.requests, prompt_tokens=size.prompt_tokens, max_tokens=size.max_tokens)
    for _ in range(2):  # the first time chooses kernels, for each number of rows that comes
        _, alone_s = found[0].serve(loads(base), much.concurrency)
    load = loads(replace(base, rate=2 * much.requests / alone_s))
    notes.append(f"{much.requests} requests in {load[-1].at_s:.1f} s; {much.concurrency} at once")
    rates: dict[str, list[float]] = {one.name: [] for one in found}
    for _ in range(much.rounds):
        for one in found:
            rates[one.name].append(figures(*one.serve(load, much.concurrency))["tokens_per_s"])
    rate = {name: statistics.median(each) for name, each in rates.items()}
    rows = [
        Row({"shape": size.name, "load": "Poisson", "system": name}, {"tokens_per_s": Number(each, "tokens/s")})
        for name, each in rate.items()
    ]
    plain = next(name for name in rate if name in ("ours fp32", "ours bf16"))
    wanted = (("ours static", 5.0), ("continuous", 3.0), ("vLLM", 1.3))
    return rows, [
        Target(
            f"Poisson: {mine} / {theirs}, tokens a second",
            1.0 if limit_of(mine, theirs) == SAME_BYTES else least,
            rate[mine] / rate[theirs],
            limit_of(mine, theirs),
        )
        for weights in (plain, "ours int8", "ours w8a8")
        for mine in (weights, f"{weights} compiled")
        for theirs, least in wanted
        if mine in rate and theirs in rate
    ]


@dataclass(frozen=True)
class Beside:
    """A long prompt beside so many decoding sequences, with a model of this shape in this scheme."""

    shape: str
    scheme: str
    decoding: int
    prompt_tokens: int

    @property
    def who(self) -> str:
        return "one decoding sequence" if self.decoding == 1 else f"{self.decoding} decoding sequences"


def in_4_bits(config: DecoderConfig) -> Decoder:
    model = Decoder(config).eval()
    initialise(model, 0)
    quantize(model, "int4", embeddings=True, head=True)
    return model


def _long_prompt(model: Decoder, asked: Beside) -> Found:
    rows, targets = [], []
    for name, stretch in (("paced", STRETCH), ("chunks of 512", None)):
        length = asked.prompt_tokens + 40
        engine = engine_of(model, asked.decoding + 1, length, None if stretch is None else Pace(stretch))
        dice = random.Random(0)

        def prompt(length: int, dice: random.Random = dice) -> tuple[int, ...]:
            return tuple(dice.randrange(model.config.vocab_size) for _ in range(length))

        room = engine.max_length - 16
        engine.submit(Request("alone", prompt(asked.prompt_tokens), 1, Sampling(temperature=0)))
        idle_s = sum(_steps(engine, room, "alone"))
        for number in range(asked.decoding):
            engine.submit(Request(str(number), prompt(16), room, Sampling(temperature=0)))
        _steps(engine, 8, None)
        alone_s = _steps(engine, 24, None)
        engine.submit(Request("long", prompt(asked.prompt_tokens), 1, Sampling(temperature=0)))
        beside_s = _steps(engine, room, "long")
        numbers = {
            "per_token_alone_mean_s": Number(statistics.mean(alone_s), "s"),
            "per_token_beside_mean_s": Number(statistics.mean(beside_s), "s"),
            "per_token_beside_longest_s": Number(max(beside_s), "s"),
            "first_token_of_the_prompt_alone_s": Number(idle_s, "s"),
            "first_token_of_the_prompt_s": Number(sum(beside_s), "s"),
        }
        rows.append(
            Row({"shape": asked.shape, "load": "long prompt", "system": f"ours {asked.scheme}, {name}"}, numbers)
        )
        if stretch is not None:
            part = f"{asked.shape} {asked.scheme}, a prompt of {asked.prompt_tokens} beside {asked.who}, {name}"
            slower = numbers["per_token_beside_mean_s"].value / numbers["per_token_alone_mean_s"].value
            targets.append(Target(f"{part}: a token's mean time alone x 2 / beside it", 1.0, 2 / slower))
            what = f"{part}: time to its first token alone x 3 / beside them"
            targets.append(Target(what, 1.0, 3 * idle_s / sum(beside_s)))
    return rows, targets


def _steps(engine: Engine, most: int, until: str | None) -> list[float]:
    """Seconds of the next steps, at most so many, or until the prompt of a request is computed."""
    taken, done = [], False
    while not done and len(taken) < most and engine.has_work:
        began = time.perf_counter()
        events = engine.step()
        taken.append(time.perf_counter() - began)
        done = any(isinstance(event, PromptDone) and event.request.id == until for event in events)
    return taken


def _prompts_alike(much: Amount, model: Decoder) -> Found:
    engine, dice = engine_of(model, 2 * much.prompts, much.prefix + 40), random.Random(1)
    first_s: dict[str, list[float]] = {"new": [], "shared": []}
    for pair in range(much.prompts):
        prefix = [dice.randrange(much.size.model.vocab_size) for _ in range(much.prefix)]
        for kind, seen in first_s.items():
            own = [dice.randrange(much.size.model.vocab_size) for _ in range(8)]
            engine.submit(Request(f"{kind} {pair}", (*prefix, *own), 1, Sampling(temperature=0)))
            began = time.perf_counter()
            while not any(isinstance(event, Delta) for event in engine.step()):
                pass
            seen.append(time.perf_counter() - began)
    new_s, shared_s = (statistics.median(first_s[kind]) for kind in ("new", "shared"))
    numbers = {"first_token_p50_s": Number(new_s, "s"), "first_token_shared_p50_s": Number(shared_s, "s")}
    row = Row({"shape": much.size.name, "load": "prompts alike", "system": "ours int8"}, numbers)
    return [row], [Target(f"time to the first token, {much.prefix} tokens new / shared", 5.0, new_s / shared_s)]


def _ready(much: Amount, folder: Path, notes: list[str]) -> Found:
    began = time.perf_counter()
    modules = "import apps.serve.serve; from transformers import AutoTokenizer"
    imports = f"import apps.serve.__main__ as m\nwith m.importing(): {modules}"
    subprocess.run([sys.executable, "-c", imports], cwd=ROOT, check=True, capture_output=True)
    imports_s, began = time.perf_counter() - began, time.perf_counter()
    command = [sys.executable, "-m", "apps.serve", "--model", str(folder), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        taken_s = time.perf_counter() - began
        process.terminate()
        _, said = process.communicate()
    if not line.startswith("serving"):
        notes.append(f"serve did not start: {(said.splitlines() or ['?'])[-1]}")
        return [], []
    numbers = {"ready_s": Number(taken_s, "s"), "imports_s": Number(imports_s, "s")}
    row = Row({"shape": much.size.name, "load": "ready", "system": "ours int8"}, numbers)
    return [row], [Target("3 s / until it listens", 1.0, 3 / taken_s)]


BENCHMARK = Benchmark("serving_mixed", "Serving a mixed load", measure, (*MEASURES, "benchmarks/serving_mixed.py"))

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="serving_mixed"), sys.argv[1:]))
