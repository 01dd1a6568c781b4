"""Training a U-Net by core's step is what a plain PyTorch loop with diffusers' own scheduler does, on any mesh.

1. One rank against the loop written out below: losses, displacements and the moving average, for each
   prediction, with and without prior preservation and min-SNR, in fp64; adapters against PEFT's.
2. n ranks against one: every level of ZeRO, accumulation, recomputation, Gemini under a budget, compiled blocks, with
   the text encoder learning too or not, all weights or adapters.

Adam's epsilon is large: a key's bias has a gradient of zero, and a small one would turn the noise of its rounding into
steps.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partialmethod
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from diffusers import DDPMScheduler
from diffusers.training_utils import EMAModel
from peft import LoraConfig as PeftConfig
from torch import nn

from apps.diffusion.adapters import DOWN, UP, LoraConfig, add_adapters
from apps.diffusion.denoiser import Denoiser, Objective, emptied
from apps.diffusion.noise import NoiseSchedule
from apps.diffusion.pipeline import Pipeline
from core.compose import parallelize
from core.gemini.config import GeminiConfig
from core.mesh import MeshConfig, build_mesh, data_axis
from core.optim.average import WeightAverage, ramp
from core.optim.build import OptimConfig, build_optimizer
from core.optim.schedule import ScheduleConfig
from core.parallel.recompute import RecomputeConfig
from core.precision import LossScale
from core.train import TrainConfig, TrainState, num_rows, train_step
from tests.support.covering import FEW, few_rows, few_steps, products
from tests.support.diffusion_training import drawn_batches, tiny_pipeline
from tests.support.training import LR, Piece, held, largest_difference, moved, moved_since, removed

TOLERANCE = 1e-10
DECAY, CLIP, EPS, PRIOR, AVERAGE = 0.02, 0.6, 1e-4, 0.7, 0.4


@dataclass(frozen=True)
class Case:
    prediction: str = "epsilon"
    prior: bool = False
    min_snr: float | None = None
    train_text: bool = False
    zero: int = 0
    mesh: MeshConfig = field(default_factory=MeshConfig)
    microbatch: int | None = None
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    steps: int = FEW
    offset: float = 0.0
    lora: LoraConfig | None = None
    budget: str | None = None
    compile: bool = False
    shallow: bool = False


def denoiser(case: Case) -> tuple[Pipeline, Denoiser]:
    """What learns, in fp32 as it is loaded; adapters begin with a part of their own."""
    pipeline = tiny_pipeline(prediction=case.prediction, shallow=case.shallow)  # pyright: ignore[reportArgumentType]
    model = Denoiser(pipeline.unet, pipeline.text_encoder if case.train_text else None, channels_last=True).train()
    if case.lora is not None:
        add_adapters(model, case.lora, seed=3)
        generator = torch.Generator().manual_seed(4)
        for name, parameter in model.named_parameters():
            if name.endswith(f"{UP}.weight"):
                parameter.data.normal_(0, 0.1, generator=generator)
    return pipeline, model


def ours(case: Case, without: tuple[str, ...] = (), weight_of: float = PRIOR) -> dict[str, Any]:
    """Losses, and this rank's pieces of displacements by name.

    without  collectives that are left out, to show that their absence is seen
    """
    pipeline, model = denoiser(case)
    config = TrainConfig(
        zero=case.zero,  # pyright: ignore[reportArgumentType]
        precision="fp64",
        mesh=case.mesh,
        microbatch=case.microbatch,
        recompute=case.recompute,
        compile=case.compile,
        gemini=GeminiConfig(case.budget),
        steps=case.steps,
        optim=OptimConfig(
            lr=LR, betas=(0.9, 0.99), eps=EPS, weight_decay=DECAY, clip_norm=CLIP, schedule=ScheduleConfig("constant")
        ),
    )
    mesh = build_mesh(config.mesh.resolve(dist.get_world_size(), config.zero), "cpu")
    axis = data_axis(mesh)
    with patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager")):
        parallel = parallelize(model, mesh, config, materialise=emptied(model, torch.device("cpu")))
    average = WeightAverage(parallel.masters, ramp(AVERAGE))
    state = TrainState(parallel, build_optimizer(config.optim, parallel.masters), LossScale("fp64"), {}, average)
    batches = drawn_batches(4, case.prior, case.train_text, offset_noise=case.offset)
    objective = Objective(NoiseSchedule(pipeline.schedule), case.min_snr, weight_of)
    first = batches.batch(0, axis.get_local_rank(), axis.size())
    parallel.prepare(state.optimizer, lambda: [lambda m: objective(m, wide(first))])
    start = held(parallel.masters)
    losses = []
    with removed(*without) if without else nullcontext():
        for step in range(case.steps):
            batch = batches.batch(step, axis.get_local_rank(), axis.size())
            losses.append(train_step(state, batch, objective, num_rows, config, step)["loss"])
    result = found(losses, start, parallel.masters, average.tensors)
    return result if case.budget is None else result | moved(parallel)  # pyright: ignore[reportArgumentType]


def wide(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def found(
    losses: list[float], start: dict[str, Piece], end: dict[str, torch.Tensor], averages: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """What is compared: the average's displacement beside that of the parameters."""
    displacement = moved_since(start, end)
    displacement |= {f"{name} average": piece for name, piece in moved_since(start, averages).items()}
    begin = start | {f"{name} average": piece for name, piece in start.items()}
    return {"losses": losses, "start": begin, "displacement": displacement}


def plain(case: Case) -> dict[str, Any]:
    """The same by diffusers' scheduler, PEFT and torch's optimizer, in the form of diffusers' scripts."""
    pipeline = tiny_pipeline(prediction=case.prediction)  # pyright: ignore[reportArgumentType]
    unet, text_encoder = pipeline.unet.double().train(), pipeline.text_encoder.double().train()
    scheduler = DDPMScheduler.from_config(dict(pipeline.schedule))
    modules: dict[str, Any] = {"unet": unet} | ({"text_encoder": text_encoder} if case.train_text else {})
    if case.lora is not None:
        adapt_by_peft(modules, case)
    named = {
        f"{part}.{our_name(name)}": p
        for part, module in modules.items()
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    start = held(named)
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), eps=EPS, foreach=False)
    ema = EMAModel(named.values(), decay=AVERAGE)
    batches = drawn_batches(4, case.prior, case.train_text, offset_noise=case.offset)
    losses = []
    for step in range(case.steps):
        batch = wide(batches.batch(step, 0, 1))
        latents, noise, timesteps = batch["latents"], batch["noise"], batch["timesteps"]
        text = text_encoder(batch["prompt_ids"]).last_hidden_state if case.train_text else batch["text"]
        predicted = unet(scheduler.add_noise(latents, noise, timesteps), timesteps, text).sample
        if case.prediction == "epsilon":
            target = noise
        elif case.prediction == "v_prediction":
            target = scheduler.get_velocity(latents, noise, timesteps)
        else:
            target = latents
        if case.prior:
            instance, of_class = (
                mean_loss(predicted[rows], target[rows], timesteps[rows], scheduler, case)
                for rows in (~batch["prior"], batch["prior"])
            )
            loss = instance + PRIOR * of_class
        else:
            loss = mean_loss(predicted, target, timesteps, scheduler, case)
        loss.backward()
        gradients = [p.grad for p in named.values() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
        for gradient in gradients:  # clip_grad_norm_ divides by the norm + 1e-6
            gradient.mul_(min(1.0, CLIP / float(norm)))
        optimizer.step()
        optimizer.zero_grad()
        ema.step(named.values())
        losses.append(loss.item())
    return found(losses, start, named, dict(zip(named, ema.shadow_params, strict=True)))


def adapt_by_peft(modules: dict[str, Any], case: Case) -> None:
    """PEFT's adapters of attention, with the values that ours begin with."""
    assert case.lora is not None
    targets = {"unet": ["to_q", "to_k", "to_v", "to_out.0"], "text_encoder": ["q_proj", "k_proj", "v_proj", "out_proj"]}
    begin = dict(denoiser(case)[1].named_parameters())
    for part, module in modules.items():
        module.requires_grad_(False)
        module.add_adapter(PeftConfig(r=case.lora.rank, lora_alpha=case.lora.alpha, target_modules=targets[part]))
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.data = begin[f"{part}.{our_name(name)}"].detach().double()


def our_name(name: str) -> str:
    return name.replace("lora_A.default", DOWN).replace("lora_B.default", UP)


def mean_loss(predicted, target, timesteps, scheduler, case: Case) -> torch.Tensor:
    error = torch.nn.functional.mse_loss(predicted, target, reduction="none").mean((1, 2, 3))
    if case.min_snr is None:
        return error.mean()
    level = scheduler.alphas_cumprod.double()[timesteps]
    snr = level / (1 - level)
    clamped = torch.minimum(snr, torch.full_like(snr, case.min_snr))
    divisor = {"epsilon": snr, "v_prediction": snr + 1, "sample": torch.ones_like(snr)}[case.prediction]
    return (error * clamped / divisor).mean()


def both(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    return ours(case), plain(case)


PLAIN = products(prediction=["epsilon", "v_prediction", "sample"], of=["captions", "prior"], min_snr=[None, 0.5])


@pytest.mark.parametrize(("name", "steps"), few_steps(PLAIN, many=["epsilon-prior-0.5"]))
def test_steps_are_those_of_a_plain_loop(ranks, name: str, steps: int) -> None:
    prediction, of, min_snr = PLAIN[name].values()
    prior = of == "prior"
    if min_snr is None:
        case = Case(prediction, prior, train_text=prior, steps=steps)
    else:
        case = Case(prediction, prior, min_snr=min_snr, train_text=not prior, offset=0.1, steps=steps)
    got, wanted = ranks(1).run(both, case)[0]
    assert all(moved.norm() > 0 for name, (_, moved) in wanted["displacement"].items() if "weight" in name)
    difference, where = largest_difference([got], wanted, case.steps)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g}, {case}"


def test_another_weight_of_the_class_is_seen(ranks) -> None:
    case = Case(prior=True, min_snr=0.5, steps=3)
    got = ranks(1).run(ours, case, weight_of=PRIOR + 1e-6)
    difference, _ = largest_difference(got, ranks(1).run(plain, case)[0], case.steps)
    assert difference > 1e3 * TOLERANCE


def test_adapters_learn_as_pefts_do(ranks) -> None:
    case = Case("v_prediction", prior=True, train_text=True, lora=LoraConfig(rank=3, alpha=5.0))
    got, wanted = ranks(1).run(both, case)[0]
    assert len(wanted["displacement"]) == 2 * 2 * (4 * 2 * 4 + 2 * 4)  # of U-Net and text encoder, and their averages
    assert all(moved.norm() > 0 for _, moved in wanted["displacement"].values())
    difference, where = largest_difference([got], wanted, case.steps)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g}"


LORA = LoraConfig(rank=2, alpha=3.0, targets="all")
TEXT = {"train_text": True}
FULL = {"recompute": RecomputeConfig("full")}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "1-zero3": (1, TEXT | {"zero": 3}),
    "1-gemini": (1, TEXT | {"budget": "6.6MB"}),
    "1-gemini-accumulated": (1, FULL | {"budget": "1.7MB", "microbatch": 3, "shallow": True}),
    "2-zero1-accumulated": (2, {"zero": 1, "microbatch": 3}),
    "2-zero2": (2, TEXT | {"zero": 2}),
    "2-zero3-recomputed": (2, TEXT | FULL | {"zero": 3}),
    "2-gemini": (2, TEXT | {"zero": 3, "budget": "4.1MB"}),
    "2-lora-zero2": (2, TEXT | {"lora": LORA, "zero": 2}),
    "2-zero0-recomputed": (2, {"recompute": RecomputeConfig("selective")}),
    "2-zero0-offloaded": (2, {"recompute": RecomputeConfig("offload")}),
    "2-zero3-compressed": (2, TEXT | {"zero": 3, "recompute": RecomputeConfig("compressed"), "microbatch": 3}),
    "4-zero3-accumulated": (4, TEXT | {"zero": 3, "microbatch": 1}),
    "4-gemini-copies": (4, {"budget": "1.8MB", "recompute": RecomputeConfig("full", every=2)}),
}
_WANTED: dict[Case, dict[str, Any]] = {}


def _recomputed(config: RecomputeConfig) -> str:
    return "none" if config.stored else config.mode


FACTORS = {
    name: {
        "ranks": min(num_ranks, 2),  # four see nothing that two do not: they are for `make soak`
        "zero": options.get("zero", 0),
        "gemini": "budget" in options,
        "accumulated": "microbatch" in options,
        "recomputed": _recomputed(options.get("recompute", RecomputeConfig())),
        "lora": "lora" in options,
    }
    for name, (num_ranks, options) in MESHES.items()
}


@pytest.mark.parametrize("mesh", few_rows(FACTORS, strength=1))
def test_ranks_train_as_one(ranks, mesh: str) -> None:
    num_ranks, options = MESHES[mesh]
    difference, where, results = _difference(ranks, num_ranks, options)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"
    if "budget" in options:
        for result in results:
            assert 0 < result["peak"] <= result["budget"]
            assert result["moved"] > 0


def test_a_missing_collective_is_seen(ranks) -> None:
    for options, without in (
        (TEXT, ("core.parallel.data", "all_reduce")),
        (TEXT | {"lora": LORA, "zero": 2}, ("core.parallel.data", "reduce_scatter_tensor")),
    ):
        difference, _, _ = _difference(ranks, 2, options, without)
        assert not difference <= 1e4 * TOLERANCE, without


def test_compiled_blocks_train_as_they_are(ranks) -> None:
    """A U-Net's blocks are unlike each other: all are compiled, for two sizes of pictures, not only the first few."""
    case = Case(prior=True, steps=2, shallow=True)
    graphs, compiled = ranks(1).run(counted, replace(case, compile=True))[0]
    difference, where = largest_difference([compiled], ranks(1).run(ours, case)[0], case.steps)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g}"
    assert graphs > FEW_GRAPHS, "at which torch gives up, left to itself"


FEW_GRAPHS = 4
"""Of one piece of code, where torch's own limit of 8 takes twice as many blocks and half a minute."""


def counted(case: Case) -> tuple[int, dict[str, Any]]:
    """How many graphs were made, and what `ours` finds."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=FEW_GRAPHS):
        result = ours(case)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], result


def _difference(
    ranks, num_ranks: int, options: dict[str, Any], without: tuple[str, ...] = ()
) -> tuple[float, str, list[dict[str, Any]]]:
    case = Case("v_prediction", prior=True, min_snr=0.5, **options)
    single = replace(case, zero=0, mesh=MeshConfig(), microbatch=None, recompute=RecomputeConfig(), budget=None)
    if single not in _WANTED:
        _WANTED[single] = ranks(1).run(ours, single)[0]
    results = ranks(num_ranks).run(ours, case, without)
    return *largest_difference(results, _WANTED[single], case.steps), results
