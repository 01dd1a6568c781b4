"""Bytes and seconds of sampling or of a training step on a device, before anything is loaded.

The real modules run on tensors without memory: drawing and Gemini's steps under the tracer (`core.trace.tracer`), of
which Gemini's planner makes its plan; other training steps with all that a run does around them (`core.estimate.step`).
An operator takes the time of its FLOPs or of the bytes that it touches, whichever is longer. Attention counts as a
flash kernel does it, which keeps queries, keys, values, the result and one number a row; or as the sliced one that
`set_attention` sets.

What it leaves out of a GPU: the CUDA context (0.5 to 1 GB), the allocator's fragmentation, workspaces of convolutions.

On a CPU the host's memory and the device's are one. What the process takes there has moments of its own: loading
(modules in memory, and the file of the last one mapped), encoding images, steps with all modules and the staged copies
of a checkpoint beside them, and saving, which loads the pipeline once more when what was trained is gone.
`core.runtime.process_holding` adds what a process takes beside its tensors. Left out there: data (latents that are held
up to `apps.diffusion.data.store.HELD_BYTES`), validation pictures, class images.

Shapes: B pictures, C latent channels, h x w latents, L tokens, D width of the text encoder.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from apps.diffusion.adapters import add_adapters
from apps.diffusion.attention import set_attention
from apps.diffusion.denoiser import Denoiser, Objective
from apps.diffusion.generate import guide
from apps.diffusion.modules import VAE
from apps.diffusion.noise import NoiseSchedule
from apps.diffusion.pipeline import INDEX, build_meta, check_fit, check_index, read_schedule, sides_of, without_gaps
from apps.diffusion.plan_config import DiffusionPlanConfig
from apps.diffusion.shapes import SHAPES, Modules, Shape, meta_modules
from core.checkpoint import staged_bytes
from core.compose import ParallelConfig
from core.config import UserError, in_words
from core.estimate import estimate_step
from core.estimate.residency import estimate_gemini
from core.gemini.chunk import Sharers
from core.gemini.direct import drive_speeds, with_drives
from core.gemini.planning import probe_bytes
from core.gemini.tier import parse_bytes
from core.mesh import MeshConfig
from core.optim.roles import role_of
from core.optim.size import state_bytes
from core.parallel.recompute import apply_recompute
from core.quant.choose import choose
from core.runtime import process_holding
from core.trace.machine import Bandwidth, bandwidth_of, described_bandwidth
from core.trace.tracer import StepTrace, trace_step
from core.weights import read_json


@dataclass(frozen=True)
class Footprint:
    """A device's bytes that are there all the time, the fullest moment of each part beyond them, and seconds.

    host_bytes   model data that lives on the host
    least_bytes  the smallest budget in which Gemini could run the step
    said         what Gemini's planner says of it
    on_cpu       bytes of tensors at the moments of a process on a CPU, those that would be on the host counted
    """

    resident: dict[str, int]
    moments: dict[str, int]
    seconds: dict[str, float]
    host_bytes: int = 0
    least_bytes: int = 0
    said: str = ""
    on_cpu: dict[str, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        return sum(self.resident.values()) + max(self.moments.values())

    @property
    def process_bytes(self) -> int:
        """Bytes of a process on a CPU once its libraries are loaded."""
        return process_holding(max(self.on_cpu.values()))


def footprint(config: DiffusionPlanConfig) -> Footprint:
    """Raises UserError for a folder of something else, and for a budget in which no step fits."""
    shape = shape_of(config)
    modules = modules_of(config, shape)
    sizes = [_fp32_bytes(module) for module in modules.values()]
    if config.task == "sample":
        found = _sampling(config, shape, modules)
        held = [found.resident[TITLES[name]] for name in modules]
        files = held if config.scheme == "int8" else sizes
        return replace(found, on_cpu={"loading": _loading(files, held), "drawing": found.peak_bytes})
    # A run loads all in fp32, and only what is trained becomes another format.
    before = {"loading": _loading(sizes, sizes), "encoding images": _encoding(config, shape, modules)}
    return _training(config, shape, modules, before)


def modules_of(config: DiffusionPlanConfig, shape: Shape) -> Modules:
    """Build the modules without memory, in the format that they compute in."""
    modules = meta_modules(shape) if config.weights is None else _built(config.weights, shape)
    for module in modules.values():
        nn.Module.to(module, config.dtype)
    for name in ("unet", "vae"):
        set_attention(modules[name], config.attention)
    return modules


def shape_of(config: DiffusionPlanConfig) -> Shape:
    """The model's configurations.  Raises UserError for a folder that is no pipeline's."""
    if config.weights is None:
        return SHAPES[config.model]
    folder = config.weights
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} holds no {INDEX}; give a diffusers folder of Stable Diffusion, or --model NAME")
    index = read_json(folder / INDEX)
    check_index(index, folder)
    configs = {name: read_json(folder / name / "config.json") for name in ("unet", "vae", "text_encoder")}
    configs = {name: without_gaps(name, config, folder / name / "config.json") for name, config in configs.items()}
    return Shape(**configs, schedule=read_schedule(folder, index))


def _built(folder: Path, shape: Shape) -> Modules:
    configs = {"unet": shape.unet, "vae": shape.vae, "text_encoder": shape.text_encoder}
    modules = {name: build_meta(name, config, folder / name / "config.json") for name, config in configs.items()}
    check_fit(modules, folder)
    return modules


def factor_of(shape: Shape) -> int:
    """Pixels of a latent's side."""
    return 2 ** (len(shape.vae["block_out_channels"]) - 1)


def pixels_of(config: DiffusionPlanConfig, shape: Shape) -> int:
    """Raises UserError for a model whose pictures are not square, unless --pixels is given."""
    height, width = (factor_of(shape) * side for side in sides_of(shape.unet["sample_size"]))
    if config.pixels is None and height != width:
        raise UserError(f"the model's pictures are {width} x {height} pixels; give --pixels, the side of a square")
    return config.pixels or height


# --- sampling ---------------------------------------------------------------------------------------------------------

TITLES = {"unet": "U-Net", "vae": "VAE", "text_encoder": "text encoder"}
STEPS = {"sample": 25, "train": 1000}


def _sampling(config: DiffusionPlanConfig, shape: Shape, modules: Modules) -> Footprint:
    dtype, side = config.dtype, pixels_of(config, shape) // factor_of(shape)
    channels, width = shape.unet["in_channels"], shape.unet["cross_attention_dim"]
    rows, quantized = config.batch * (2 if config.guided else 1), config.scheme == "int8"
    latents = (config.batch, channels, side, side)
    vae = modules["vae"]
    if config.vae_tile is not None:
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = config.vae_tile, config.vae_tile // factor_of(shape)

    def denoise(unet: nn.Module) -> Tensor:
        x_BChw, text_BLD = torch.empty(latents), torch.empty(rows, _length(shape), width, dtype=dtype)
        seen = x_BChw.to(dtype).repeat(rows // config.batch, 1, 1, 1)
        predicted = unet(seen, 500.0, encoder_hidden_states=text_BLD, return_dict=False)[0].float()
        if not config.guided:
            return predicted
        without, with_prompt = predicted.chunk(2)
        return guide(without, with_prompt, 7.5, 0.0)

    def decode(vae: VAE) -> Tensor:
        x_BChw = torch.empty(latents)
        return vae.decode(x_BChw[:1].to(dtype)).sample

    found = {
        "text_encoder": _traced(modules["text_encoder"], lambda model: model(_ids(rows, shape))[0], config),
        "unet": _traced(modules["unet"], denoise, config),
        "vae": _traced(vae, decode, config),
    }
    resident = {TITLES[name]: _bytes(module) for name, module in modules.items()}
    moments = {TITLES[name]: peak for name, (peak, _) in found.items()}
    if quantized:
        resident[TITLES["unet"]] = int8_bytes(modules["unet"])
        # what is multiplied by 8-bit weights of convolutions has one of them widened beside it
        moments[TITLES["unet"]] += max(weight.nbytes for weight in _int8_weights(modules["unet"]))
    steps = config.steps or STEPS["sample"]
    seconds = {
        "prompts": found["text_encoder"][1],
        f"{steps} steps": steps * found["unet"][1],
        "decoding": config.batch * found["vae"][1],
    }
    return Footprint(resident, moments, seconds)


def _traced(module: nn.Module, run: Callable[[nn.Module], Tensor], config: DiffusionPlanConfig) -> tuple[int, float]:
    """(most bytes beside parameters, seconds) of an evaluation without gradients."""
    with torch.no_grad():
        [stretches] = trace_step(module.eval(), run, config.speed).microbatches
    return max(stretch.other_bytes for stretch in stretches), sum(stretch.seconds for stretch in stretches)


def int8_bytes(module: nn.Module, kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d)) -> int:
    """Bytes of a module's parameters, layers of these kinds in 8 bits with an fp32 scale a row, the rest as it is."""
    rounded = _int8_weights(module, kinds)
    codes = sum(weight.numel() + 4 * weight.shape[0] for weight in rounded)
    return _bytes(module) - sum(weight.nbytes for weight in rounded) + codes


def _int8_weights(module: nn.Module, kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d)) -> list[Tensor]:
    return [module.get_parameter(c.name) for c in choose(module) if isinstance(c.holders[0][0], kinds)]


def _loading(files: Iterable[int], modules: Iterable[int]) -> int:
    """The most while a pipeline is loaded, of bytes of its files and modules: a file is mapped until it is copied."""
    return max(map(sum, zip(files, accumulate(modules), strict=True)))


# --- training ---------------------------------------------------------------------------------------------------------


def _training(config: DiffusionPlanConfig, shape: Shape, modules: Modules, before: dict[str, int]) -> Footprint:
    beside = [modules["vae"]] if config.train_text_encoder else [modules["vae"], modules["text_encoder"]]
    beside_bytes = _fp32_bytes(*beside)
    model = trained_model(config, modules)
    masters, saved = _saved_bytes(config, model)
    found = (by_replicas if config.gemini.budget is None else by_gemini)(config, shape, model)
    if config.average and config.gemini.disk is None:
        found = replace(found, resident=found.resident | {"moving average": masters})
    step_bytes = beside_bytes + found.peak_bytes + found.host_bytes
    staged = staged_bytes(saved, 1 if config.zero else config.nproc)
    after = {"training, a checkpoint staged": step_bytes + staged, "saving": before["loading"]}
    return replace(found, on_cpu=before | after)


def _encoding(config: DiffusionPlanConfig, shape: Shape, modules: Modules) -> int:
    """With the whole pipeline in fp32, as `apps.diffusion.data.encoding` encodes: one image at a time."""
    vae, side = nn.Module.to(modules["vae"], torch.float32), pixels_of(config, shape)

    def encode(vae: VAE) -> Tensor:
        pixels = torch.empty(1, 3, side, side, dtype=torch.uint8)
        posterior = vae.encode(pixels.float() / 127.5 - 1).latent_dist
        return torch.cat((posterior.mean, posterior.logvar))

    return _fp32_bytes(*modules.values()) + _traced(vae, encode, config)[0]


def _fp32_bytes(*modules: nn.Module) -> int:
    return torch.float32.itemsize * sum(parameter.numel() for module in modules for parameter in module.parameters())


def trained_model(config: DiffusionPlanConfig, modules: Modules) -> nn.Module:
    """The trained module, on the meta device."""
    text_encoder = modules["text_encoder"] if config.train_text_encoder else None
    model = Denoiser(modules["unet"], text_encoder, channels_last=True).train()
    if config.method == "lora":
        add_adapters(model, config.lora, seed=0)
    return model


def _loss_of(config: DiffusionPlanConfig, shape: Shape) -> Callable[[nn.Module], Tensor]:
    objective = Objective(NoiseSchedule(shape.schedule))
    return lambda model: objective(model, _batch(config, shape))


def _batch(config: DiffusionPlanConfig, shape: Shape) -> dict[str, Tensor]:
    """A microbatch as the training loop hands it over."""
    side = pixels_of(config, shape) // factor_of(shape)
    latents = (config.batch, shape.unet["in_channels"], side, side)
    batch = {"latents": torch.empty(latents, dtype=config.dtype), "noise": torch.empty(latents, dtype=config.dtype)}
    batch["timesteps"] = torch.empty(config.batch, dtype=torch.int64)
    if config.train_text_encoder:
        return batch | {"prompt_ids": _ids(config.batch, shape)}
    text = (config.batch, _length(shape), shape.unet["cross_attention_dim"])
    return batch | {"text": torch.empty(text, dtype=config.dtype)}


def _saved_bytes(config: DiffusionPlanConfig, model: nn.Module) -> tuple[int, int]:
    """Bytes of a rank's part: masters, and all that a checkpoint holds, with the optimizer's state and the average."""
    wide, ranks = config.wide.itemsize, config.nproc if config.zero else 1
    masters = state = 0
    for name, p in model.named_parameters():
        if p.requires_grad:
            own, role = _own_shape(p, ranks), role_of(name, p.shape)
            masters += wide * prod(own)
            state += state_bytes(config.optim, own, wide, whole=tuple(p.shape), role=role, ranks=config.nproc)
    return masters, masters + state + (masters if config.average else 0)


def by_replicas(config: DiffusionPlanConfig, shape: Shape, model: nn.Module) -> Footprint:
    """The footprint of training without Gemini: the run's own step, on tensors without memory."""
    parallel = ParallelConfig(zero=config.zero, precision=config.format, recompute=config.recompute)
    mesh = MeshConfig().resolve(config.nproc, config.zero)
    found = estimate_step(model, _loss_of(config, shape), mesh, parallel, config.speed, optimizer=config.optim)
    resident = {"parameters": found.parameters_bytes, "masters": found.masters_bytes}
    resident = {name: size for name, size in resident.items() if size} | {"optimizer's state": found.state_bytes}
    state, phases = sum(resident.values()), found.phases
    moments = {
        "forward and backward": max(phases["forward"], phases["backward"]) - state,
        "update": max(phases["update"], phases["publish"]) - state,
    }
    seconds = {"computing": found.compute_s}
    if config.nproc > 1:
        seconds["messages between devices"] = found.sent.wire_bytes / (1e9 * config.bandwidth_gb_s)
    return Footprint(resident, moments, seconds)


def _own_shape(parameter: Tensor, ranks: int) -> tuple[int, ...]:
    return (-(-parameter.shape[0] // ranks), *parameter.shape[1:]) if parameter.ndim else ()


def by_gemini(config: DiffusionPlanConfig, shape: Shape, model: nn.Module) -> Footprint:
    """The footprint under Gemini on a rank's device; the budget holds model data, activations and messages."""
    return under_budget(config, model, traced(config, shape, model))


def traced(config: DiffusionPlanConfig, shape: Shape, model: nn.Module) -> StepTrace:
    """A step of the model, which recomputes from then on what the run would recompute."""
    apply_recompute(model, config.recompute)
    return trace_step(model, _loss_of(config, shape), config.speed)


def under_budget(config: DiffusionPlanConfig, model: nn.Module, step: StepTrace) -> Footprint:
    """The footprint of such a step under Gemini's budget."""
    assert config.gemini.budget is not None
    ranks, budget_bytes = config.nproc if config.zero else 1, parse_bytes(config.gemini.budget)
    found = estimate_gemini(
        model,
        step,
        budget_bytes,
        with_drives(
            _bandwidth(config, ranks, probe_bytes(_bytes(model), budget_bytes)), drive_speeds(config.gemini.folders)
        ),
        config.optim,
        config.wide,
        shared_by=lambda name: Sharers(ranks=ranks, sends=config.nproc > 1),
        policy=config.gemini.policy,
        host_budget_bytes=config.gemini.host_bytes,
        averaged=config.average and config.gemini.disk is not None,
    )
    return Footprint(
        {"messages between devices": found.messages_bytes} if found.messages_bytes else {},
        {"fullest moment of Gemini's plan": found.plan.device_peak_bytes},
        {"planned": found.plan.step_s},
        found.plan.host_bytes,
        found.least_bytes,
        f"{found.plan.describe()}; the smallest budget is {in_words(found.least_bytes)}",
    )


def _bandwidth(config: DiffusionPlanConfig, ranks: int, probed_bytes: int) -> Bandwidth:
    """The bandwidth that a run finds: on this CPU by copies of so many bytes, of a GPU by what is said of it."""
    if config.measured:
        return bandwidth_of(torch.device("cpu"), ranks, probed_bytes)
    return described_bandwidth(config.speed, 1e9 * config.bandwidth_gb_s, ranks)


# --- tensors of the trace ---------------------------------------------------------------------------------------------


def _length(shape: Shape) -> int:
    return shape.text_encoder["max_position_embeddings"]


def _ids(rows: int, shape: Shape) -> Tensor:
    return torch.empty(rows, _length(shape), dtype=torch.int64)


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
