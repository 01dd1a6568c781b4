"""The plan of memory: weights and steps of whole models without memory, and what narrow ones really allocate."""

import json
import re
from dataclasses import replace

import pytest
import torch

from apps.diffusion import finetune
from apps.diffusion.adapters import LoraConfig
from apps.diffusion.footprint import (
    by_replicas,
    footprint,
    int8_bytes,
    modules_of,
    shape_of,
    traced,
    trained_model,
    under_budget,
)
from apps.diffusion.pipeline import save_pipeline
from apps.diffusion.plan import main
from apps.diffusion.plan_config import RECIPES, DiffusionPlanConfig
from core.config import UserError
from core.gemini.config import GeminiConfig
from core.parallel.recompute import RecomputeConfig
from core.quant import quantize, stored_bytes
from core.trace.account import MemoryAccount
from core.trace.machine import LEAST_PROBE_BYTES, Bandwidth, Speed
from tests.support.diffusion import narrow_pipeline
from tests.support.diffusion_training import tiny_pipeline, write_pictures

UNET, VAE, TEXT = 859_520_964, 83_653_863, 123_060_480
FULL = RecomputeConfig("full")
SHALLOW = tiny_pipeline(shallow=True)
by_depth = pytest.mark.parametrize("name", ["tiny", pytest.param("narrow", marks=pytest.mark.soak)])
"""Two levels with a block each, and Stable Diffusion's depth."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    save_pipeline(narrow_pipeline(0), folder / "narrow")
    save_pipeline(tiny_pipeline(), folder / "tiny")
    save_pipeline(SHALLOW, folder / "shallow")
    write_pictures(folder / "pictures", 4, sizes=((64, 64),))
    return folder


def test_the_plan_of_sampling_at_full_size():
    eighth = footprint(DiffusionPlanConfig(model="sd_v1", precision="fp16", scheme="int8"))
    assert sum(eighth.resident.values()) == pytest.approx(1.01 * UNET + 2 * (VAE + TEXT), rel=0.01)
    assert eighth.peak_bytes < 2.5e9
    # 401.6 G multiplications in an evaluation of a picture of 512 x 512; with guidance two, in each of 25 steps
    least_s = 25 * 2 * 2 * 401.6e9 / (0.4 * 312e12)
    assert least_s < eighth.seconds["25 steps"] < 1.5 * least_s


def test_the_plan_of_sampling(folder):
    """Int8 spares what the weights spare; slices of scores need more than a flash kernel; tiles less than a picture."""
    base = DiffusionPlanConfig(model=str(folder / "shallow"), pixels=128, precision="fp16")
    plain = footprint(base)
    assert sum(plain.resident.values()) == sum(2 * p.numel() for m in SHALLOW.modules.values() for p in m.parameters())
    eighth = footprint(replace(base, scheme="int8"))
    assert eighth.resident["U-Net"] < plain.resident["U-Net"]
    assert plain.moments["U-Net"] < eighth.moments["U-Net"] < plain.moments["U-Net"] + plain.resident["U-Net"]
    assert eighth.seconds == plain.seconds
    sliced = footprint(replace(base, attention="sliced", vae_tile=64, guided=False, batch=2))
    assert sliced.moments["U-Net"] > plain.moments["U-Net"] + 4 * 4096 * 4096
    assert sliced.moments["VAE"] < 4 * 4096 * 4096  # the scores of a tile are those of 1024 positions


def planned(config, by):
    shape = shape_of(config)
    return by(config, shape, trained_model(config, modules_of(config, shape)))


def test_the_plan_of_training(folder):
    count = sum(p.numel() for p in SHALLOW.unet.parameters())
    base = DiffusionPlanConfig(
        task="train", model=str(folder / "shallow"), batch=8, pixels=64, precision="bf16", recompute=FULL
    )
    whole = planned(base, by_replicas)
    expected = {"parameters": 2 * count, "masters": 4 * count, "optimizer's state": 8 * count}
    assert whole.resident == pytest.approx(expected, rel=0.01)
    spread = planned(replace(base, nproc=4, zero=1), by_replicas)
    assert spread.resident["optimizer's state"] == pytest.approx(2 * count, rel=0.1)
    assert spread.resident["parameters"] == 2 * count
    assert spread.moments["update"] == pytest.approx(whole.moments["update"], rel=0.1)
    message = spread.moments["forward and backward"] - whole.moments["forward and backward"]
    assert 0 < message < 4 * count  # which one rank does not make
    # gradients scattered in fp32, parameters gathered in bf16
    assert spread.seconds["messages between devices"] == pytest.approx((4 + 2) * count * 3 / 4 / 25e9, rel=0.02)
    kept = planned(replace(base, recompute=RecomputeConfig()), by_replicas)
    assert kept.moments["forward and backward"] > whole.moments["forward and backward"]
    assert kept.seconds["computing"] < 0.9 * whole.seconds["computing"]


def test_gemini_fits_a_step_into_its_budget(folder):
    base = DiffusionPlanConfig(task="train", model=str(folder / "shallow"), batch=1, recompute=FULL)
    shape = shape_of(base)
    model = trained_model(base, modules_of(base, shape))
    step = traced(base, shape, model)

    def planned(budget):
        return under_budget(replace(base, gemini=GeminiConfig(budget)), model, step)

    with pytest.raises(UserError, match="too small for this model and batch; give at least") as refused:
        planned("10KiB")
    [least] = re.findall(r"give at least ([\d.]+) MiB", str(refused.value))
    tight = planned(f"{least}MiB")
    assert tight.least_bytes <= tight.peak_bytes <= float(least) * 2**20
    roomy = planned("1GB")
    assert roomy.host_bytes == 0
    assert tight.host_bytes > 8 * sum(p.numel() for p in SHALLOW.unet.parameters())
    assert sum(tight.seconds.values()) > sum(roomy.seconds.values())
    assert "the smallest budget is" in tight.said


@by_depth
def test_the_plan_counts_what_a_training_step_allocates(folder, tmp_path, name):
    argv = ["--model", folder / name, "--data.images", folder / "pictures", "--data.global-batch", 4]
    argv += ["--device", "cpu", "--out", tmp_path / "run", "--steps", 2, "--checkpoint.every", 0, "--average", 0.9]
    argv += ["--train-text-encoder", "--recompute.mode", "full", "--log.no-tensorboard"]
    assert finetune.main([str(word) for word in argv]) == 0
    measured = json.loads((tmp_path / "run" / "summary.json").read_text())["device_peak_bytes"]
    common = DiffusionPlanConfig(task="train", model=str(folder / name), batch=4, precision="fp32", average=True)
    foreseen = footprint(replace(common, train_text_encoder=True, recompute=FULL))
    assert foreseen.peak_bytes == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("name", ["shallow", pytest.param("narrow", marks=pytest.mark.soak)])
def test_the_plan_of_adapters_counts_what_a_step_allocates(folder, tmp_path, name):
    argv = ["--model", folder / name, "--data.images", folder / "pictures", "--data.global-batch", 4, "--steps", 2]
    argv += ["--device", "cpu", "--out", tmp_path / "run", "--checkpoint.every", 0, "--method", "lora"]
    assert finetune.main([str(word) for word in [*argv, "--lora.rank", 3, "--log.no-tensorboard"]]) == 0
    measured = json.loads((tmp_path / "run" / "summary.json").read_text())["device_peak_bytes"]
    config = DiffusionPlanConfig(task="train", model=str(folder / name), batch=4, precision="fp32", method="lora")
    foreseen = footprint(replace(config, lora=LoraConfig(rank=3)))
    assert foreseen.peak_bytes == pytest.approx(measured, rel=0.02)
    assert foreseen.resident["optimizer's state"] < 0.1 * foreseen.resident["parameters"]


def test_recipes_are_planned_as_they_run():
    sixteen, subject, adapters = (RECIPES[name]() for name in ("full_6gb", "dreambooth_6gb", "lora_4gb"))
    assert (sixteen.batch, sixteen.gemini.budget, sixteen.optim.name) == (16, "5GB", "adamw8bit")
    assert (subject.batch, subject.train_text_encoder, subject.recompute) == (2, True, FULL)
    assert (adapters.method, adapters.lora, adapters.gemini.budget) == ("lora", LoraConfig(), None)
    assert all(recipe().precision == "bf16" for name, recipe in RECIPES.items() if name.endswith("gb"))


@by_depth
def test_the_plan_counts_what_sampling_allocates(folder, name):
    """The U-Net on meta, and on the CPU under an account, with attention in slices."""
    pixels, side, text_shape = {"narrow": (128, 16, (2, 77, 32)), "tiny": (64, 32, (2, 16, 16))}[name]
    from apps.diffusion.attention import set_attention
    from apps.diffusion.loading import load_pipeline

    foreseen = footprint(
        DiffusionPlanConfig(
            model=str(folder / name), precision="fp32", attention="sliced", batch=2, pixels=pixels, guided=False
        )
    )
    unet = load_pipeline(folder / name).unet
    set_attention(unet, "sliced")
    account = MemoryAccount()
    account.add(unet.parameters())
    before = account.current_bytes
    with torch.no_grad(), account:
        x, text = torch.randn(2, 4, side, side), torch.randn(text_shape)
        unet(x, 500.0, text)
    assert foreseen.moments["U-Net"] == pytest.approx(account.peak_bytes - before, rel=0.02)
    assert foreseen.resident["U-Net"] == stored_bytes(unet)
    quantize(unet)
    assert int8_bytes(load_pipeline(folder / name).unet) == stored_bytes(unet)


def test_the_command_of_the_plan(folder, capsys, tmp_path):
    weights = str(folder / "shallow")
    words = ["--model", weights, "--precision", "fp16", "--scheme", "int8", "--memory", "4GB"]
    for planned_for in (["--device", "cuda"], ["--gpu", "A100"]):
        assert main([*words, *planned_for]) == 0
        said = capsys.readouterr().out
        assert "fits 3.73 GiB" in said
        assert re.search(r"1 picture in [\d.e-]+ s at 40% of the A100's peak", said)
    assert main([*words, "--device", "cpu", "--utilisation", "0.5"]) == 0
    said = capsys.readouterr().out
    assert "how long a CPU takes is not foreseen" in said
    assert "the plan is the same without --utilisation" in said
    # Between what the tensors of this narrow pipeline take and what a process does: a device of that size holds it.
    between = ["--model", weights, "--memory", "30MiB"]
    assert main([*between, "--device", "cuda"]) == 0
    with pytest.raises(UserError, match="per rank, the CPU has 30 MiB"):
        main([*between, "--device", "cpu"])
    for argv, line in (
        (["--gpu", "A100", "--device", "cpu"], "gpu=A100 with device=cpu; give one of them"),
        (
            ["--model", weights, "--device", "cuda", "--memory", "1KB"],
            r"needs .* per rank, the device has 1000 bytes; try --scheme int8",
        ),
        (["--recipe", "lora_1gb"], "no recipe 'lora_1gb', did you mean lora_4gb"),
        (["--model", "sdxl"], "no model 'sdxl': there is no such folder, and those that have a name are sd_v1"),
        (["--model", str(tmp_path)], r"holds no model_index\.json"),
        (["--pixels", "500"], "pixels is 500; give a multiple of 64"),
        (["--gpu", "abacus"], "gpu=abacus has no known bf16 peak"),
        (["--gemini.budget", "4GB"], "use --task train"),
        (["--utilisation", "0"], "utilisation=0"),
    ):
        with pytest.raises(UserError, match=line):
            main(argv)


def test_a_budget_on_a_cpu_is_planned_by_what_its_run_would_measure(folder, capsys, monkeypatch):
    """By Gemini's own probe of this machine, whatever a GPU's data sheet says."""
    words = ["--task", "train", "--model", str(folder / "shallow"), "--gemini.budget", "60MB"]
    asked = []

    def probe(device, ranks, num_bytes):
        asked.append((device.type, ranks, num_bytes))
        return Bandwidth(1e6, 1e6, 1e6, 1e6, 1e-5)

    monkeypatch.setattr("apps.diffusion.footprint.bandwidth_of", probe)
    monkeypatch.setattr("apps.diffusion.plan_config.speed_of", lambda device, dtype: Speed(1e12, 1e6))
    assert main([*words, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert asked == [("cpu", 1, LEAST_PROBE_BYTES)]
    touched_s = 8 * sum(p.numel() for p in SHALLOW.unet.parameters()) / 1e6
    assert float(re.search(r"a step takes about ([\d.e+]+) s", said)[1]) > touched_s
    assert "copies as measured on this CPU now" in said
    assert "A100" not in said
    assert main([*words, "--device", "cpu", "--utilisation", "0.1", "--bandwidth-gb-s", "1"]) == 0
    again = capsys.readouterr().out
    assert "the plan is the same without --bandwidth-gb-s, --utilisation" in again
    assert again.startswith(said.rstrip())
    asked.clear()
    assert main([*words, "--device", "cuda"]) == 0
    assert asked == []
    assert float(re.search(r"a step takes about ([\d.e+-]+) s", capsys.readouterr().out)[1]) < touched_s / 100
