"""`fold train`: config -> mesh -> model on meta -> materialise -> optimizer -> chains -> fit.

What a run leaves in --out: config.json, metrics.jsonl, summary.json, checkpoints, curves (loss.png), and model/, the
averaged weights as a folder that `fold predict --model` takes.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from apps.fold.model.config import ModelConfig, MultimerConfig
from apps.fold.model.network import trainable
from apps.fold.training import plan
from apps.fold.training.batches import FoldBatches, Predictions
from apps.fold.training.config import FoldTrainConfig, check_combination, model_config, plan_of, resolved_mesh
from apps.fold.training.dataset import (
    Beside,
    Dataset,
    Selection,
    beside,
    clusters_of,
    load,
    prepare,
    report_refused,
)
from apps.fold.training.distillation import LEAST, Confidence, prediction_files, reference_of, turns_of
from apps.fold.training.initialise import fill, initialise
from apps.fold.training.objective import Objective, confidence_alone
from apps.fold.training.recipes import RECIPES
from apps.fold.training.validation import validation
from apps.fold.weights.folder import save_folder
from apps.fold.weights.source import read_alphafold
from core.auto.checkpointing import Checkpointing
from core.checkpoint import read_full
from core.compose import parallelize
from core.config import as_json, parse
from core.mesh import data_axis
from core.metrics import plot_loss
from core.optim.average import WeightAverage, unbiased
from core.optim.build import build_optimizer
from core.precision import compute_dtype
from core.run_folder import behind_checkpoint
from core.runtime import Runtime, agreed, launched, require_compiler, start
from core.trace.machine import Bandwidth, Speed
from core.trace.segments import Segments
from core.train import checkpoint_path, fit, launch_run, open_run
from core.train.segments import chosen_first


def main(argv: list[str]) -> int:
    """Exit code 2 when nothing could be trained; files that are left out get a line each.

    With --plan the run is planned, and not begun.
    """
    if "--plan" in argv:
        return plan.main([word for word in argv if word != "--plan"])
    config = parse(RECIPES, argv, "megalith fold train", default="initial_training")
    check_combination(config)
    if config.nproc > 1 and not launched():
        return launch_run(config.out, config.nproc, "apps.fold", ["train", *argv])
    train(config)
    return 0


def train(config: FoldTrainConfig) -> dict[str, Any]:
    """The training run, on every rank.  Returns its summary."""
    of_weights, values = (None, None) if config.weights is None else read_alphafold(config.weights)
    model = model_config(config, of_weights)
    segments = chosen_segments(config, model)
    with start(config.device, config.seed) as runtime, ExitStack() as run_folder:
        if config.compile:
            require_compiler(runtime.device)
        mesh = runtime.mesh(config.axial_mesh, config.zero)
        chains, heldout = _datasets(config, isinstance(model, MultimerConfig), runtime)
        clusters = None if config.data.clusters is None else clusters_of(chains, config.data.clusters)
        predictions = None if config.distill.predictions is None else _predictions(config, runtime)
        run_folder.enter_context(open_run(config, runtime))
        with torch.device("meta"):
            network = trainable(model)
        if config.learns == "confidence":
            confidence_alone(network)
        spread = plan_of(config, agreed(segments))
        parallel = parallelize(network, mesh, config, spread, materialise=_materialise(config, values))
        optimizer = build_optimizer(config.optim, parallel.masters)
        average = None
        if config.average is not None:
            average = WeightAverage(parallel.masters, unbiased(config.average), empty_like=parallel.empty_like)
        dtype = compute_dtype(config.precision)
        summary = fit(
            parallel,
            optimizer,
            FoldBatches(chains, config.data, model, config.seed, clusters, predictions),
            Objective(config.loss, config.learns),
            config,
            runtime,
            evaluate=None
            if heldout is None
            else validation(heldout, model, parallel, average, data_axis(mesh), runtime.device, dtype),
            average=average,
            values=as_json(config),
        )
        if runtime.leads:
            report(config, model, summary)
    return summary


def chosen_segments(config: FoldTrainConfig, model: ModelConfig) -> Segments | None:
    """See `core.train.segments.chosen_first`."""

    def choose(speed: Speed, kind: str, link: Bandwidth) -> Checkpointing:
        return plan.chosen(config, resolved_mesh(config), model, speed, kind, link)

    return chosen_first(config.device, config, choose)


def _materialise(config: FoldTrainConfig, values: Mapping[str, torch.Tensor] | None) -> Callable[[nn.Module], None]:
    if values is not None:
        return lambda network: fill(network, values)
    return lambda network: initialise(network, config.seed)


def _datasets(config: FoldTrainConfig, complexes: bool, runtime: Runtime) -> tuple[Dataset, Dataset | None]:
    """The chains, or complexes, to learn from and those held out; the ranks share the reading."""
    data, selection = config.data, config.data.selection(complexes)
    assert data.structures is not None
    folders = [data.structures] + ([data.validation] if data.validation is not None else [])
    datasets = _read(folders, beside(data.alignments, data.templates), selection, _cache(config), runtime)
    if runtime.leads:
        chains = datasets[0].chains
        alone = sum(chain.num_rows == 1 for chain in chains)
        kind = "complexes" if complexes else "chains"
        print(f"{len(chains)} {kind} to learn from, {alone} of them without an alignment")
        if data.templates is not None:
            print(f"{sum(chain.num_templates > 0 for chain in chains)} of them have templates")
    return datasets[0], datasets[1] if data.validation is not None else None


def _predictions(config: FoldTrainConfig, runtime: Runtime) -> Predictions:
    """The predictions to learn from beside the chains."""
    distill, cache = config.distill, _cache(config)
    assert distill.predictions is not None
    there, reference = beside(distill.alignments, config.data.templates), None
    if distill.confidence == "divergence":
        reference = reference_of(prediction_files(distill.predictions), cache, write=runtime.leads)
        if runtime.world_size > 1:
            dist.barrier()
    least = LEAST[distill.confidence] if distill.least is None else distill.least
    selection = replace(config.data.selection(False), confidence=Confidence(distill.confidence, least, reference))
    (found,) = _read([distill.predictions], there, selection, cache, runtime)
    if runtime.leads:
        print(
            f"{len(found)} predictions to learn from, in {distill.share:.4g} of the rows; targets are residues with a "
            f"{distill.confidence} of {least:g} or more"
        )
    return Predictions(found, turns_of(distill.share), distill.max_rows)


def _cache(config: FoldTrainConfig) -> Path:
    return config.data.cache or config.out.parent / "chains"


def _read(folders: list[Path], there: Beside, selection: Selection, cache: Path, runtime: Runtime) -> list[Dataset]:
    """The datasets of these folders, whose reading the ranks share."""
    for folder in folders:
        prepare(folder, there, selection, cache, (runtime.rank, runtime.world_size))
    if runtime.world_size > 1:
        dist.barrier()
    datasets = [load(folder, there, selection, cache) for folder in folders]
    if runtime.leads:
        for dataset in datasets:
            report_refused(dataset)
    return datasets


def report(config: FoldTrainConfig, model: ModelConfig, summary: dict[str, Any]) -> None:
    """Print the run's results, and the commands that take them next."""
    with behind_checkpoint(summary["step"], "free space, and continue with --resume"):
        _write_results(config, model, summary)


def _write_results(config: FoldTrainConfig, model: ModelConfig, summary: dict[str, Any]) -> None:
    curves = partial(plot_loss, config.out / "metrics.jsonl", config.out / "loss.png", unit="", counted="chains")
    if summary["status"] == "stopped" or summary["step"] < config.steps:
        curves()
        print(f"stopped after step {summary['step']} of {config.steps}, saved; continue with --resume")
        return
    with torch.device("meta"):
        network = trainable(model)
    if config.learns == "confidence":
        confidence_alone(network)
    averaged = {name for name, p in network.named_parameters() if p.requires_grad and config.average is not None}
    keys = {name: f"{'average' if name in averaged else 'model'}/{name}" for name, _ in network.named_parameters()}
    found = read_full(checkpoint_path(config.out), list(keys.values()))
    save_folder(config.out / "model", model, {name: found[key].float() for name, key in keys.items()}, config.note)
    curves()
    for name in ("loss", "validation_lddt_ca", "validation_plddt", "wall_s"):
        if summary.get(name) is not None:
            print(f"{name:24} {summary[name]:,.4g}")
    print(f"{'curves':24} {config.out / 'loss.png'}")
    print(f"{'weights':24} {config.out / 'model'}")
