"""`llm pretrain`: config -> mesh -> model on meta -> plan -> materialise -> optimizer -> data -> fit."""

import math
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from apps.llm.batches import evaluation_batches, mask_id, training_batches
from apps.llm.config import PretrainConfig, check_combination, objective_of
from apps.llm.corpus import Corpus, prepare
from apps.llm.export import export
from apps.llm.loss import num_targets, predicted, summed_loss, token_loss
from apps.llm.plan import run_shape, warning
from apps.llm.recipes import RECIPES, default_recipe
from apps.llm.recompute import OwnModel, chosen
from apps.llm.tokenizer import load_tokenizer
from core.auto.checkpointing import Checkpointing
from core.compose import parallelize
from core.config import UserError, as_json, in_words, parse
from core.estimate import decoder_shape, stage_costs
from core.kernels.shown_right import shown
from core.mesh import data_axis
from core.metrics import bits_per_byte, plot_loss, transformer_flops_per_token
from core.models.decoder import Decoder, DecoderConfig, decoder_without_memory, initialise
from core.models.hf_config import NO_ARCHITECTURE, has_architecture
from core.models.measured_costs import measured_costs
from core.models.plan import decoder_plan
from core.nn.by_kernels import FAMILIES, by_kernels
from core.optim.build import build_optimizer
from core.placement.stages import Costs
from core.placement.table import Transforms
from core.precision import compute_dtype
from core.run_folder import behind_checkpoint
from core.runtime import Runtime, agreed, device_bytes, device_kind, launched, leads, ranks_of, start
from core.trace.machine import Bandwidth, Speed
from core.trace.segments import Segments
from core.train import fit, launch_run, open_run
from core.train.segments import chosen_first


def main(argv: list[str]) -> int:
    config = parse(RECIPES, argv, "megalith llm pretrain", default=default_recipe(argv))
    return run("pretrain", config, argv, materialise=lambda model: initialise(model, config.seed))


def run(command: str, config: PretrainConfig, argv: list[str], materialise: Callable[[nn.Module], None]) -> int:
    """Check, launch the ranks, train.  Returns the exit code."""
    check_combination(config)
    check_tokenizer(config)
    if config.nproc > 1 and not launched():
        return launch_run(config.out, config.nproc, "apps.llm", [command, *argv])
    if leads():
        ranks, kind = ranks_of(config.nproc), device_kind(config.device)
        if line := warning(config, kind, device_bytes(kind, ranks), device_bytes("cpu", ranks)):
            print(f"warning: {line}", file=sys.stderr)
    corpus = prepare(config.data, config.out.parent / "corpora", progress=show_progress)
    if leads() and corpus.skipped:
        print(corpus.skipped)
    check_vocabulary(config, corpus)
    summary = train(config, corpus, materialise)
    if leads():
        report(config, summary)
    return 0


def train(config: PretrainConfig, corpus: Corpus, materialise: Callable[[nn.Module], None]) -> dict[str, Any]:
    """The training run, on every rank.  Returns its summary."""
    segments = chosen_segments(config)
    with start(config.device, config.seed) as runtime, open_run(config, runtime):
        mesh = runtime.mesh(config.mesh, config.zero)
        if segments is not None:
            segments = agreed(segments)
        with torch.device("meta"):
            model = Decoder(config.model)
        parallel = parallelize(
            model,
            mesh,
            config,
            replace(
                decoder_plan(config.model, config.mesh, block_costs(config, runtime)),
                kernels=kernels(config, runtime),
                recompute=segments,
            ),
            materialise=materialise,
        )
        optimizer = build_optimizer(config.optim, parallel.masters)
        summary = fit(
            parallel,
            optimizer,
            training_batches(config, corpus),
            token_loss,
            config,
            runtime,
            weight=num_targets,
            evaluate=heldout_evaluation(config, corpus, data_axis(mesh), runtime.device),
            flops_per_token=flops_per_token(config.model, config.data.sequence_length),
            values=as_json(config),
            predict=predicted,
        )
        if runtime.leads:
            with behind_checkpoint(summary["step"], "free space, and continue with --resume"):
                corpus.tokenizer.save(config.out / "tokenizer")
    return summary


def chosen_segments(config: PretrainConfig) -> Segments | None:
    """See `core.train.segments.chosen_first`."""

    def choose(speed: Speed, kind: str, link: Bandwidth) -> Checkpointing:
        return chosen(config, check_combination(config), speed, OwnModel(config), kind, link)

    return chosen_first(config.device, config, choose)


def block_costs(config: PretrainConfig, runtime: Runtime) -> Costs:
    """The costs that stages are balanced by, alike on every rank."""
    run = run_shape(config)
    if run.pp == 1 or config.pipeline.cost == "estimated":
        return stage_costs(decoder_shape(config.model), run)
    dtype = compute_dtype(config.precision)
    return agreed(measured_costs(config.model, run.microbatch_size, run.sequence_length, dtype, runtime.device))


def kernels(config: PretrainConfig, runtime: Runtime) -> Transforms:
    """The plan of `core.kernels` for the whole model: all families, those that the GPU has shown, or none."""
    if runtime.device.type != "cuda":
        asked = "--kernels" if config.kernels else "" if config.shown_kernels else "--no-shown-kernels"
        if asked and runtime.leads:
            print(f"warning: {asked} changes nothing here: kernels run on a GPU only", file=sys.stderr)
        return {}
    families = frozenset(FAMILIES) if config.kernels else frozenset[str]()
    if not config.kernels and config.shown_kernels and config.optim.name != "hessian_free":
        families = shown()
    return {"": partial(by_kernels, families=families)} if families else {}


def check_tokenizer(config: PretrainConfig) -> None:
    """Raises UserError, before anything is tokenized, where masks need a token that the tokenizer will not have."""
    data = config.data
    if objective_of(config.model) == "mlm" and not (data.tokenizer == "bpe" and data.mask_token):
        mask_id(load_tokenizer("byte" if data.tokenizer == "bpe" else data.tokenizer, mask=data.mask_token))


def check_vocabulary(config: PretrainConfig, corpus: Corpus) -> None:
    """Raises UserError where the model's vocabulary has no room for every token."""
    if corpus.tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"the tokenizer has {corpus.tokenizer.vocab_size} tokens and the model {config.model.vocab_size} rows; "
            f"use --model.vocab-size {corpus.tokenizer.vocab_size} or more, or a smaller data.vocab_size"
        )


def heldout_evaluation(
    config: PretrainConfig, corpus: Corpus, axis: Any, device: torch.device
) -> Callable[[nn.Module], Mapping[str, float]] | None:
    """model -> loss a token of the held-out text, all of it, and bits per byte, or of a masked language model its
    pseudo-perplexity; None where none was held out."""
    heldout = corpus.heldout
    if heldout is None:
        return None
    batches = evaluation_batches(config.model, config.data, heldout, corpus.tokenizer)

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for step in range(batches.num_batches):
            batch = {k: v.to(device) for k, v in batches.batch(step, axis.get_local_rank(), axis.size()).items()}
            sums += torch.stack((summed_loss(model, batch).double(), num_targets(batch)))
        dist.all_reduce(sums, group=axis.get_group())
        total, count = sums.tolist()
        if objective_of(config.model) == "mlm":
            return {"heldout_loss": total / count, "heldout_pseudo_perplexity": math.exp(total / count)}
        return {
            "heldout_loss": total / count,
            "heldout_bits_per_byte": bits_per_byte(total, heldout.num_text_bytes),
        }

    return evaluate


def flops_per_token(model: DecoderConfig, sequence_length: int) -> float:
    decoder = decoder_without_memory(model)
    looked_up = sum(p.numel() for p in decoder.embedding.parameters())
    head = model.vocab_size * model.embedding_size
    active = sum(p.numel() * model.active_share(name) for name, p in decoder.named_parameters())
    multiplied = round(active) - looked_up + (head if model.tied_head else 0)
    seen = sum(min(model.layer_window(n) or sequence_length, sequence_length) for n in range(model.num_layers))
    return transformer_flops_per_token(multiplied, 1, model.num_heads * model.head_size, seen)


def report(config: PretrainConfig, summary: dict[str, Any]) -> None:
    """Print the run's results, and the commands that take them next."""
    if summary["status"] == "followed":  # the replica that led to the end tells of it
        return
    if summary["status"] == "stopped" or summary["step"] < config.steps:
        with behind_checkpoint(summary["step"], "free space, and continue with --resume"):
            plot_loss(config.out / "metrics.jsonl", config.out / "loss.png")
        print(f"stopped after step {summary['step']} of {config.steps}, saved; continue with --resume")
        return
    measured = ("heldout_bits_per_byte", "heldout_pseudo_perplexity", "tokens_per_s", "mfu", "device_peak_bytes")
    for name in ("loss", *measured):
        if summary.get(name) is not None:
            print(
                f"{name:24} {summary[name]:,.4g}"
                if isinstance(summary[name], float)
                else f"{name:24} {summary[name]:,}"
            )
    if config.hf:
        where: Path | str = "none: " + NO_ARCHITECTURE
        if has_architecture(config.model):
            elsewhere = f"write elsewhere by megalith llm export --model {config.out} --out FOLDER"
            with behind_checkpoint(summary["step"], f"free space and give --resume, or {elsewhere}"):
                where = export(config.out, config.out / "hf", config.hf_dtype)
        print(f"{'Hugging Face folder':24} {where}")
    with behind_checkpoint(summary["step"], "only the picture is missing; free space and give --resume for it"):
        plot_loss(config.out / "metrics.jsonl", config.out / "loss.png")
    print(f"{'loss curve':24} {config.out / 'loss.png'}")
    print(f"{'metrics':24} {config.out / 'metrics.jsonl'}")


def show_progress(what: str, num_bytes: int) -> None:
    if sys.stdout.isatty() and leads():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{what}: {in_words(num_bytes)}"[:width].ljust(width), end="\r", flush=True)
