"""A training run: config -> pipeline -> mesh -> batches -> U-Net on meta -> materialise -> optimizer -> fit.

What a run leaves in --out: config.json, metrics.jsonl, summary.json, checkpoints, curves (loss.png), the names of
images that could not be used (left_out.txt, where there are any), and the trained pipeline as a diffusers folder, that
`StableDiffusionPipeline.from_pretrained(OUT)` and `--model OUT` load; a LoRA run leaves its file instead. Validation
pictures lie in validation/.
"""

import gc
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch

from apps.diffusion.adapters import adapters_of, add_adapters
from apps.diffusion.config import DiffusionConfig, FinetuneConfig, PretrainConfig, check_combination
from apps.diffusion.data.class_images import class_sampling, draw_class_images
from apps.diffusion.data.folder import LEFT_OUT, write_refused
from apps.diffusion.data.prepare import prepare
from apps.diffusion.denoiser import Denoiser, Objective, emptied, give
from apps.diffusion.formats.lora import Layout, load_lora, save_lora
from apps.diffusion.generate import check_sampling
from apps.diffusion.initialise import begin_as_identity
from apps.diffusion.loading import load_pipeline
from apps.diffusion.noise import NoiseSchedule, Schedule, prediction_of, with_zero_terminal_snr
from apps.diffusion.pipeline import EMBEDDED, Pipeline, build_text_encoder, build_unet, has_quantized, save_pipeline
from apps.diffusion.shapes import SHAPES
from apps.diffusion.validation import Validation
from core.checkpoint import complete_steps, iterate_full
from core.compose import parallelize
from core.config import UserError, as_json
from core.kernels.shown_right import shown
from core.metrics import plot_loss
from core.nn.by_kernels import by_kernels
from core.optim.average import WeightAverage, ramp
from core.optim.build import build_optimizer
from core.precision import compute_dtype
from core.run_folder import behind_checkpoint
from core.runtime import freed_memory_given_back, launched, leads, start
from core.train import checkpoint_path, fit, launch_run, open_run


def run(command: str, config: DiffusionConfig, argv: list[str]) -> int:
    """Check, launch the ranks, train.  Returns the exit code."""
    check_combination(config)
    if config.nproc > 1 and not launched():
        return launch_run(config.out, config.nproc, "apps.diffusion", [command, *argv])
    summary = train(config)
    if leads():
        report(config, summary)
    return 0


def train(config: DiffusionConfig) -> dict[str, Any]:
    """The training run, on every rank.  Returns its summary."""
    pipeline = starting_pipeline(config)
    schedule, model = NoiseSchedule(pipeline.schedule), denoiser(config, pipeline)
    with start(config.device, config.seed) as runtime, ExitStack() as run_folder:
        mesh = runtime.mesh(config.mesh, config.zero)
        if isinstance(config, FinetuneConfig) and config.has_prior:
            draw_class_images(config, partial(load_weights, config), runtime)
        with freed_memory_given_back(pipeline.stored_bytes, runtime.device):
            batches, heldout, folders = prepare(config, pipeline, runtime)
        run_folder.enter_context(open_run(config, runtime))
        if runtime.leads and (config.resume or not complete_steps(config.out / "checkpoints")):  # fit refuses others
            write_refused(folders, config.out / LEFT_OUT)
        parallel = parallelize(model, mesh, config, materialise=emptied(model, runtime.device))
        optimizer = build_optimizer(config.optim, parallel.masters)
        host = "cpu" if config.average_on_host else None
        average = None
        if config.average is not None:
            average = WeightAverage(parallel.masters, ramp(config.average), host, parallel.empty_like)
        objective = Objective(schedule.to(runtime.device), config.noise.min_snr, getattr(config, "prior_weight", 1.0))
        validation = Validation(
            config.validation,
            pipeline,
            batches.text,
            parallel,
            objective,
            average,
            heldout,
            config.out / "validation",
            config.seed,
            compute_dtype(config.precision),
        )
        summary = fit(
            parallel,
            optimizer,
            batches,
            objective,
            config,
            runtime,
            evaluate=validation if config.validation.wanted else None,
            average=average,
            keep_frozen=False,  # they are those of --model
            values=as_json(config),
        )
        if runtime.leads and finished(config, summary):
            # The pipeline is loaded once more, to take over what was trained: not beside it. Hooks hold modules in
            # cycles.
            del pipeline, model, parallel, optimizer, average, validation, batches, heldout, objective
            gc.collect()
            behind = behind_checkpoint(summary["step"], "free space, and continue with --resume")
            with freed_memory_given_back(0, runtime.device), behind:
                save(config)
    return summary


def finished(config: DiffusionConfig, summary: dict[str, Any]) -> bool:
    return summary["status"] != "stopped" and summary["step"] >= config.steps


def starting_pipeline(config: DiffusionConfig) -> Pipeline:
    """The weights' pipeline, with what begins anew drawn from the seed, and with the noise of this run.

    Raises UserError for weights that cannot be trained as asked.
    """
    pipeline = load_weights(config)
    pipeline.schedule = schedule_of(config, pipeline.schedule)
    NoiseSchedule(pipeline.schedule)  # complains before anything is encoded
    if config.validation.prompts:
        check_sampling(pipeline, config.validation.sampling)
    if isinstance(config, FinetuneConfig) and config.prompts_of_class():
        check_sampling(pipeline, class_sampling(config))
    if begins_anew(config):
        _begin_anew(config, pipeline)
    return pipeline


def begins_anew(config: DiffusionConfig) -> TypeGuard[PretrainConfig]:
    return isinstance(config, PretrainConfig) and config.fresh != "nothing"


def _begin_anew(config: PretrainConfig, pipeline: Pipeline) -> None:
    shape = dict(pipeline.unet.config) if config.unet is None else _shape(config.unet)
    with torch.device("meta"):
        pipeline.unet = build_unet(shape)
    pipeline.check(weights_of(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        pipeline.unet = build_unet(shape)
        begin_as_identity(pipeline.unet)
        if config.fresh == "unet+text_encoder":
            pipeline.text_encoder = build_text_encoder(pipeline.text_encoder.config.to_dict())


def weights_of(config: DiffusionConfig) -> Path:
    """The weights that a run starts from: without --model the pipeline that comes with the program."""
    return config.model or EMBEDDED


def load_weights(config: DiffusionConfig, dtype: torch.dtype = torch.float32) -> Pipeline:
    """Raises UserError for weights that are no pipeline, or in 8 bits."""
    weights = weights_of(config)
    # A folder says what it predicts; a single file may have to be told.
    prediction = config.noise.prediction if weights.is_file() and not begins_anew(config) else None
    pipeline = load_pipeline(weights, dtype, prediction, config.tokenizer)
    if pipeline.guidance_width is not None:
        raise UserError(
            f"{weights} was distilled with its guidance (time_cond_proj_dim), and is not trained here; give the model "
            "that it was distilled from"
        )
    if any(has_quantized(module) for module in pipeline.modules.values()):
        raise UserError(f"{weights} holds weights in 8 bits, which do not learn; give those that it was made from")
    return pipeline


def _shape(model: str) -> dict[str, Any]:
    if model not in SHAPES:
        raise UserError(f"unet={model}; the models that have a name are {', '.join(SHAPES)}")
    return SHAPES[model].unet


def schedule_of(config: DiffusionConfig, stored: Schedule) -> Schedule:
    """The noise of a run: that of its weights, unless what begins anew is to learn another.

    Raises UserError for trained weights that are told to predict something else than they do.
    """
    said = prediction_of(stored)
    wanted = config.noise.prediction or said
    if wanted != said and not begins_anew(config):
        raise UserError(
            f"noise.prediction={wanted}, and {weights_of(config)} predicts {said} (its "
            "scheduler_config.json says so): it would have to unlearn that; leave --noise.prediction out"
        )
    schedule = stored if wanted == said else {**stored, "prediction_type": wanted}
    return with_zero_terminal_snr(schedule) if config.noise.zero_terminal_snr else schedule


def denoiser(config: DiffusionConfig, pipeline: Pipeline) -> Denoiser:
    """The trained part of a pipeline, in training mode; of a LoRA run only the adapters want a gradient.

    Raises UserError for a LoRA to go on from that was made for another model, or for what is not trained.
    """
    text_encoder = pipeline.text_encoder if config.train_text_encoder else None
    by_kernels(pipeline.unet, shown())
    model = Denoiser(pipeline.unet, text_encoder, config.channels_last).train()
    if is_lora(config):
        start = None if config.lora.start is None else load_lora(config.lora.start, pipeline)
        if start and text_encoder is None and any(name.startswith("text_encoder.") for name in start):
            raise UserError(f"{config.lora.start} adapts the text encoder too; add --train-text-encoder")
        add_adapters(model, config.lora, config.seed, start)
    return model


def is_lora(config: DiffusionConfig) -> TypeGuard[FinetuneConfig]:
    return isinstance(config, FinetuneConfig) and config.method == "lora"


def save(config: DiffusionConfig) -> None:
    """Write what the last checkpoint has learned into --out: a diffusers folder, or the files of a LoRA."""
    pipeline = starting_pipeline(config)
    trained = denoiser(config, pipeline)
    kind = "model" if config.average is None else "average"
    names = [name for name, parameter in trained.named_parameters() if parameter.requires_grad]
    for name, value in iterate_full(checkpoint_path(config.out), [f"{kind}/{name}" for name in names]):
        give(trained, {name.removeprefix(f"{kind}/"): value})
    dtype = compute_dtype(config.save_precision)
    if not is_lora(config):
        save_pipeline(pipeline, config.out, dtype, replace=True)
        return
    for layout, file in LORA_FILES.items():
        if config.lora.layout in (layout, "both"):
            aside = config.out / f".{file}"
            aside.unlink(missing_ok=True)
            save_lora(adapters_of(trained), aside, layout, dtype).replace(config.out / file)


LORA_FILES: dict[Layout, str] = {"diffusers": "pytorch_lora_weights.safetensors", "kohya": "kohya.safetensors"}


def report(config: DiffusionConfig, summary: dict[str, Any]) -> None:
    """Print the run's results, and the commands that take them next."""
    with behind_checkpoint(summary["step"], "free space, and continue with --resume"):
        plot_loss(config.out / "metrics.jsonl", config.out / "loss.png", unit="", counted="rows")
    if not finished(config, summary):
        print(f"stopped after step {summary['step']} of {config.steps}, saved; continue with --resume")
        return
    for name in ("loss", "device_peak_bytes", "wall_s"):
        if summary.get(name) is not None:
            print(
                f"{name:20} {summary[name]:,.4g}"
                if isinstance(summary[name], float)
                else f"{name:20} {summary[name]:,}"
            )
    print(f"{'loss curve':20} {config.out / 'loss.png'}")
    for picture in sorted((config.out / "validation").glob("*.png"))[-1:]:
        print(f"{'pictures':20} {picture}")
    print(f"{'LoRA' if is_lora(config) else 'pipeline':20} {config.out}")
