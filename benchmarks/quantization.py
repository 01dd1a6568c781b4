"""What quantization costs in quality and saves in memory, scheme by scheme beside fp32.

Quality. An OPT and a BLOOM are trained by `llm pretrain` on the source of Python's standard library. A second OPT is
the same function with outliers planted: 2 % of the channels behind each norm are a hundred times as large, and the
columns of the next weights as much smaller. That is what emergent outlier features of large models look like to a
quantizer (Dettmers et al. 2022; Xiao et al., SmoothQuant, 2023, for scaling norm and weights against each other). On
held-out text each scheme is compared with fp32: perplexity, mean KL(fp32 || quantized) of a token's distribution, and
how often the likeliest token is the same. `naive w8a8` has one scale for the inputs of a whole batch, as torch's
dynamic quantization has.

Memory. The OPT-125M shape, random weights: bytes stored, and the resident peak of a fresh process that loads the
checkpoint of plain weights while quantizing it, and of one that loads the quantized folder (`benchmarks.resident`).

Embeddings and head are quantized, too, everywhere but where `layers only` stands. `calibrated` weights are rounded by
what they meet (`core.quant.calibrate`) in text that the models were trained on.
"""

import copy
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.llm.config import PretrainConfig
from apps.llm.corpus import prepare
from apps.llm.demo import num_ranks
from apps.llm.model import find_model
from apps.llm.pretrain import main as pretrain
from apps.llm.recipes import RECIPES
from benchmarks.result import ROOT, Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import UserError, as_json, parse, run_command
from core.data import EvalBatches
from core.models import SHAPES, Decoder, DecoderConfig, initialise, save_pretrained
from core.quant import QuantizedWeight, Scheme, pack, quantize, quantize_folder, stored_bytes
from core.runtime import keep_freed_memory

FAMILIES = {
    "OPT": ("--model.family=opt", "--model.position-offset=2", "--model.activation=relu"),
    "BLOOM": ("--model.family=bloom", "--model.positions=alibi", "--model.embedding-norm"),
}
FACTOR, FRACTION, SEED = 100.0, 0.02, 0
EVERYTHING = {"embeddings": True, "head": True}


@dataclass(frozen=True)
class Size:
    """How much is trained and measured.

    recipe, options  of `llm pretrain`
    num_sequences    of held-out text; half as many others to calibrate by
    memory_shape     the model whose memory is measured
    """

    recipe: str
    options: tuple[str, ...]
    num_sequences: int
    memory_shape: DecoderConfig


QUICK = Size(
    "debug", ("--steps=5", "--model.ffn-dim=256", "--model.num-layers=2"), 8, replace(SHAPES["debug"], num_layers=2)
)
_SMALL = ("--model.dim=192", "--model.ffn-dim=768", "--model.vocab-size=2048", "--data.vocab-size=2048")
USUAL = Size("demo", (*_SMALL, "--precision=fp32", "--steps=120"), 64, SHAPES["opt_125m"])
FULL = Size("demo", (*_SMALL, "--precision=fp32", "--steps=1000"), 256, SHAPES["opt_125m"])


@dataclass(frozen=True)
class Way:
    """A scheme as it is compared.

    naive       inputs are rounded with one scale for the whole batch before they meet int8 weights
    packed      as 4-bit weights are served on a CPU: tokens of prompts, as these are, in bf16
    calibrated  by what the weights meet in text of the corpus that is not held out
    """

    label: str
    scheme: Scheme
    everything: bool = True
    naive: bool = False
    packed: bool = False
    calibrated: bool = False

    def applied(self, model: Decoder, text: list[tuple[Any, ...]]) -> nn.Module:
        model = copy.deepcopy(model)
        options = EVERYTHING if self.everything else {}
        quantize(model, self.scheme, calibration=text if self.calibrated else None, **options)
        return pack(model) if self.packed else model


WAYS = (
    Way("int8", Scheme("int8")),
    Way("w8a8", Scheme("w8a8")),
    Way("naive w8a8", Scheme("int8"), naive=True),
    Way("llm.int8", Scheme("llm.int8")),
    Way("int4 group 32", Scheme("int4", 32)),
    Way("int4 group 64", Scheme("int4", 64)),
    Way("int4 group 64, packed", Scheme("int4", 64), packed=True),
    Way("int4 group 64, layers only", Scheme("int4", 64), everything=False),
    Way("int4 group 64, symmetric", Scheme("int4", 64, True)),
    Way("int4 group 128", Scheme("int4", 128)),
    *(Way(f"int4 group {group}, calibrated", Scheme("int4", group), calibrated=True) for group in (32, 64, 128)),
    Way("int4 group 64, layers only, calibrated", Scheme("int4", 64), everything=False, calibrated=True),
)


def measure(options: Options) -> Measured:
    size = QUICK if options.quick else FULL if options.full else USUAL
    figures: list[Row] = []
    for family in FAMILIES:
        model, batches, text = trained(family, size)
        keep_freed_memory()  # as `serve quantize` does; the training is in processes of its own
        figures += compare(model, batches, text, {"model": family, "outliers": "none"})
        if family == "OPT":
            plant(model, FACTOR, FRACTION, SEED)
            figures += compare(model, batches, text, {"model": family, "outliers": f"x{FACTOR:.0f}"})
    schemes = (Scheme("int4", 64),) if options.quick else (Scheme("int8"), Scheme("int4", 64))
    figures += [memory(size.memory_shape, scheme) for scheme in schemes]
    return Measured(tuple(figures), tuple(targets(figures)), notes(size))


def notes(size: Size) -> tuple[str, ...]:
    return (
        f"trained by: llm pretrain --recipe {size.recipe} {' '.join(size.options)}; {size.num_sequences} held-out "
        f"sequences are evaluated, {size.num_sequences // 2} others are what weights are calibrated by",
        "bits: of a weight, with scales, zeros and all that is not quantized",
        "resident peak: VmHWM of a fresh process beyond what it had before it began to load",
    )


# --- quality ----------------------------------------------------------------------------------------------------------


def trained(family: str, size: Size) -> tuple[Decoder, list[dict[str, Tensor]], list[tuple[Any, ...]]]:
    """A model of the family, trained by the command, batches of held-out text, and others to calibrate by."""
    out = ROOT / "runs" / "quantization" / f"{size.recipe}-{family.lower()}"
    argv = ["--recipe", size.recipe, *FAMILIES[family], *size.options, f"--out={out}", "--no-hf"]
    config = parse(RECIPES, argv, "llm pretrain", default="debug")
    ranks = num_ranks(config.data.global_batch) if config.steps > 20 else 1  # each starts for seconds
    if not _is_trained(out, config):
        shutil.rmtree(out, ignore_errors=True)
        if code := pretrain([*argv, f"--nproc={ranks}"]):
            raise UserError(f"llm pretrain ended with exit code {code}; no result")
    corpus = prepare(config.data, out.parent / "corpora")
    if corpus.heldout is None:
        raise UserError(f"no document of {config.data.path} is held out; nothing to evaluate on")
    batches = _some(EvalBatches(corpus.heldout, config.data.sequence_length, 8), size.num_sequences)
    known = _some(EvalBatches(corpus.train, config.data.sequence_length, 8), size.num_sequences // 2)
    text = [(batch["input_ids"], None, batch.get("positions")) for batch in known]
    return find_model(out).load(torch.float32), batches, text


def _some(batches: EvalBatches, num_sequences: int) -> list[dict[str, Tensor]]:
    """As many as wanted, from all over the text."""
    steps = min(batches.num_batches, -(-num_sequences // 8))
    return [batches.batch(step * batches.num_batches // steps, 0, 1) for step in range(steps)]


def _is_trained(run: Path, config: PretrainConfig) -> bool:
    """Whether an earlier benchmark left this very run, finished."""
    if not (run / "summary.json").exists():
        return False
    before, now = json.loads((run / "config.json").read_text()), as_json(config)
    ended = json.loads((run / "summary.json").read_text())["step"] == config.steps
    return ended and all(before[name] == now[name] for name in now if name != "nproc")


@torch.no_grad()
def plant(model: Decoder, factor: float, fraction: float, seed: int) -> None:
    """Outliers behind each block's norms, in place: the function stays, up to rounding.

    A few channels of the norm's result are multiplied, the columns of the weight that reads them divided.
    """
    generator = torch.Generator().manual_seed(seed)
    dim = model.config.dim
    count = max(1, round(fraction * dim))
    blocks: Any = model.blocks
    for block in blocks:
        for norm, reader in ((block.attention_norm, block.attention.qkv), (block.mlp_norm, block.mlp.up)):
            channels = torch.randperm(dim, generator=generator)[:count]
            norm.weight[channels] *= factor
            if norm.bias is not None:
                norm.bias[channels] *= factor
            reader.weight[:, channels] /= factor


@contextmanager
def rounded_inputs(model: nn.Module) -> Iterator[None]:
    """Inside, inputs of quantized layers are rounded to 255 steps with one scale for all tokens of the batch."""

    def rounded(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        step = args[0].abs().amax().clamp(min=1e-30) / 127
        return (args[0] / step).round() * step, *args[1:]

    layers = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "weight", None), QuantizedWeight) and not isinstance(module, nn.Embedding)
    ]
    hooks = [layer.register_forward_pre_hook(rounded) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Sums:
    """Over the tokens so far."""

    loss: float = 0.0
    divergence: float = 0.0
    agreed: int = 0
    tokens: int = 0

    def add(self, logits: Tensor, reference: Tensor, targets: Tensor) -> None:
        """logits, reference [N, V]; targets [N]."""
        log_p, log_q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
        self.loss += float(F.nll_loss(log_q, targets, reduction="sum"))
        self.divergence += float((log_p.exp() * (log_p - log_q)).sum())
        self.agreed += int((logits.argmax(-1) == reference.argmax(-1)).sum())
        self.tokens += len(targets)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.tokens)


@torch.inference_mode()
def compare(
    model: Decoder, batches: list[dict[str, Tensor]], text: list[tuple[Any, ...]], case: dict[str, str | int]
) -> list[Row]:
    """fp32 and every way on the same tokens; calibrated by the text."""
    with torch.inference_mode(False):
        models = {way.label: way.applied(model, text) for way in WAYS}
    naive = {way.label for way in WAYS if way.naive}
    sums = {label: Sums() for label in ("fp32", *models)}
    for batch in batches:
        ids, positions, counted = batch["input_ids"], batch.get("positions"), batch["targets"] != -100
        reference = model(ids, positions=positions)[counted]
        sums["fp32"].add(reference, reference, batch["targets"][counted])
        for label, quantized in models.items():
            if label in naive:
                with rounded_inputs(quantized):
                    logits = quantized(ids, positions=positions)[counted]
            else:
                logits = quantized(ids, positions=positions)[counted]
            sums[label].add(logits, reference, batch["targets"][counted])
    plain = sums["fp32"].perplexity
    sizes = {"fp32": stored_bytes(model)} | {label: stored_bytes(quantized) for label, quantized in models.items()}
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    return [
        Row(
            case | {"scheme": label},
            {
                "perplexity": Number(found.perplexity, ""),
                "change": Number(100 * (found.perplexity / plain - 1), "%"),
                "KL": Number(found.divergence / found.tokens, "nats/token"),
                "same token": Number(100 * found.agreed / found.tokens, "%"),
                "bits": Number(8 * sizes[label] / num_weights, "bits/weight"),
                "stored": Number(sizes[label], "bytes"),
                "of fp32": Number(100 * sizes[label] / sizes["fp32"], "%"),
            },
        )
        for label, found in sums.items()
    ]


# --- memory -----------------------------------------------------------------------------------------------------------


def memory(shape: DecoderConfig, scheme: Scheme) -> Row:
    """Bytes of a model of the shape, and what processes that load it have resident at most."""
    with tempfile.TemporaryDirectory(prefix="quantization-benchmark-") as name:
        plain, quantized = Path(name) / "plain", Path(name) / "quantized"
        with torch.device("meta"):
            model = Decoder(shape)
        model.to_empty(device="cpu")
        initialise(model, SEED)
        plain_bytes, largest = stored_bytes(model), max(parameter.nbytes for parameter in model.parameters())
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        save_pretrained(model, shape, plain)
        del model
        quantize_folder(plain, quantized, scheme, **EVERYTHING)
        while_quantizing, stored = _resident(plain, scheme)
        mapped, _ = _resident(quantized, None)
    return Row(
        {"model": f"{num_weights / 1e6:,.0f}M", "outliers": "", "scheme": f"{scheme.name}, everything"},
        {
            "bits": Number(8 * stored / num_weights, "bits/weight"),
            "stored": Number(stored, "bytes"),
            "of fp32": Number(100 * stored / plain_bytes, "%"),
            "largest tensor": Number(largest, "bytes"),
            "peak, quantizing while loading": Number(while_quantizing, "bytes resident"),
            "peak, loading the quantized folder": Number(mapped, "bytes resident"),
        },
    )


def _resident(folder: Path, scheme: Scheme | None) -> tuple[int, int]:
    """(resident peak of loading, bytes stored) in a fresh process."""
    given = json.dumps({"folder": str(folder), "scheme": None if scheme is None else scheme.as_json()})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.resident", given], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UserError(f"loading {folder} failed: {(done.stderr.splitlines() or ['?'])[-1]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["peak_bytes"], found["stored_bytes"]


# --- targets ----------------------------------------------------------------------------------------------------------


def targets(figures: list[Row]) -> Iterator[Target]:
    """Each as a ratio that is to be at least 1: what is allowed to what was found."""
    for row in figures:
        scheme, outliers = row.case["scheme"], row.case["outliers"]
        where = f"{row.case['model']}{f', outliers {outliers}' if outliers not in ('', 'none') else ''}"
        allowed = {("int8", "none"): 0.1, ("llm.int8", f"x{FACTOR:.0f}"): 0.1}
        allowed |= {(way.label, "none"): 1.0 for way in WAYS if way.label.startswith("int4 group 64")}
        if (scheme, outliers) in allowed:
            limit, change = allowed[scheme, outliers], row.numbers["change"].value
            yield Target(
                f"{limit} % / change of perplexity by {scheme}, {where}", 1.0, limit / max(change, limit / 100)
            )
        if (scheme, outliers) == ("naive w8a8", f"x{FACTOR:.0f}"):
            yield Target(f"change of perplexity by {scheme} / 5 %, {where}", 1.0, row.numbers["change"].value / 5)
        if "largest tensor" in row.numbers:
            number = {name: found.value for name, found in row.numbers.items()}
            limit = 26 if str(scheme).startswith("int8") else 16
            yield Target(f"{limit} % / share of fp32's bytes, {scheme}, {where}", 1.0, limit / number["of fp32"])
            allowed_peak = 1.25 * number["stored"] + number["largest tensor"]
            for what in ("quantizing while loading", "loading the quantized folder"):
                reached = allowed_peak / number[f"peak, {what}"]
                yield Target(f"1.25 x stored + largest tensor / resident peak {what}, {scheme}, {where}", 1.0, reached)


MEASURES = (
    "core/quant",
    "core/kernels",
    "core/models",
    "benchmarks/resident.py",
    "benchmarks/quantization.py",
)
BENCHMARK = Benchmark("quantization", "Quantization: quality and memory", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="quantization"), sys.argv[1:]))
