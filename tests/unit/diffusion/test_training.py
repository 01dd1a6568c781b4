"""The training commands: what they leave, that they go on exactly, what they refuse before anything is trained."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from diffusers.configuration_utils import FrozenDict
from PIL import Image
from safetensors.torch import load_file

from apps.diffusion import dreambooth, finetune, pretrain, train
from apps.diffusion.adapters import LoraConfig, adapters_of, add_adapters
from apps.diffusion.config import FinetuneConfig
from apps.diffusion.data import prepare
from apps.diffusion.data.class_images import draw_class_images
from apps.diffusion.data.folder import read_folder
from apps.diffusion.data.store import fingerprint
from apps.diffusion.denoiser import Denoiser, Objective
from apps.diffusion.formats.lora import load_lora, save_lora
from apps.diffusion.formats.single_file import save_single_file
from apps.diffusion.generate import PictureJob, Sampling, generate
from apps.diffusion.images import read_settings, to_pil
from apps.diffusion.loading import load_pipeline
from apps.diffusion.noise import NoiseSchedule
from apps.diffusion.pipeline import Pipeline, save_pipeline
from apps.diffusion.train import LORA_FILES
from apps.diffusion.train_recipes import FINETUNE
from core.checkpoint import read_full
from core.compose import parallelize
from core.config import UserError, parse
from core.optim.build import build_optimizer
from core.precision import LossScale
from core.quant import quantize
from core.runtime import Runtime, start
from core.train import TrainState, checkpoint_path, num_rows, train_step
from tests.support.diffusion import narrow_pipeline
from tests.support.diffusion_training import drawn_batches, tiny_pipeline, write_pictures

CPU = ("--device", "cpu", "--log.no-tensorboard")
UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """weights, shallow (of one block), weights-v (predicts v), pictures with captions, subject and class without."""
    folder = tmp_path_factory.mktemp("diffusion")
    save_pipeline(tiny_pipeline(), folder / "weights")
    save_pipeline(tiny_pipeline(shallow=True), folder / "shallow")
    save_pipeline(tiny_pipeline(prediction="v_prediction"), folder / "weights-v")
    write_pictures(folder / "pictures", 5)
    write_pictures(folder / "subject", 3, captions=False)
    write_pictures(folder / "class", 4, captions=False)
    (folder / "pictures" / "broken.png").write_text("nothing")
    return folder


def _argv(folder: Path, out: Path, **options: Any) -> list[str]:
    given = {"model": folder / "weights", "out": out, "steps": 3, **options}
    return [
        *CPU,
        *(
            f"--{name.replace('__', '.').replace('_', '-')}={value}"
            for name, value in given.items()
            if value is not None
        ),
    ]


def _subject(folder: Path) -> dict[str, Any]:
    return {"instance_dir": folder / "subject", "instance_prompt": "a photo of sks dog"}


def _weights(out: Path, file: str = UNET) -> dict[str, torch.Tensor]:
    return load_file(out / file)


def test_a_run_leaves_a_pipeline_that_diffusers_loads(folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    options = {"data__images": folder / "pictures", "data__global_batch": 2, "noise__min_snr": 5, "steps": 1}
    assert finetune.main([*_argv(folder, out, **options), "--train-text-encoder", "--data.flip"]) == 0
    said = capsys.readouterr().out
    assert "left out: broken.png" in said
    assert "1 of 6 images" in said
    assert (out / "left_out.txt").read_text().startswith(f"{folder / 'pictures'}/broken.png: it has no caption; ")
    assert (out / "loss.png").stat().st_size > 1000
    theirs = StableDiffusionPipeline.from_pretrained(out, safety_checker=None, local_files_only=True)
    ours = load_pipeline(out)
    for name, parameter in theirs.unet.named_parameters():
        assert torch.equal(parameter, ours.unet.get_parameter(name)), name
    before = load_pipeline(folder / "weights")
    moved = [n for n, p in ours.unet.named_parameters() if not torch.equal(p, before.unet.get_parameter(n))]
    assert len(moved) > 0.9 * len(list(ours.unet.parameters()))
    assert not torch.equal(ours.text_encoder.final_layer_norm.weight, before.text_encoder.final_layer_norm.weight)
    assert all(torch.equal(p, q) for p, q in zip(ours.vae.parameters(), before.vae.parameters()))
    encoded = list((tmp_path / "cache").rglob("*.tensor"))
    assert len(encoded) == 10  # five images, each mirrored too; no texts
    stamps = {path: path.stat().st_mtime_ns for path in encoded}
    with pytest.raises(UserError, match="already holds a run"):
        finetune.main([*_argv(folder, out, **options), "--train-text-encoder", "--data.flip"])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.tensor")} == stamps


def test_a_run_that_was_stopped_goes_on_to_the_bit(folder: Path, tmp_path: Path) -> None:
    prior = {"class_dir": folder / "class", "class_prompt": "a photo of a dog", "prior_weight": 0.5}
    prior |= {"num_class_images": 4, "model": folder / "shallow"}
    options = {**_subject(folder), **prior, "noise__offset": 0.1, "steps": 3, "optim__lr": 1e-3, "average": 0.5}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert dreambooth.main(_argv(folder, whole, **options)) == 0
    assert dreambooth.main(_argv(folder, parts, **options, stop_after=2)) == 0
    assert not (parts / "model_index.json").exists()
    assert dreambooth.main([*_argv(folder, parts, **options), "--resume"]) == 0
    found, wanted = _weights(parts), _weights(whole)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    last = read_full(checkpoint_path(whole), ["model/unet.conv_in.weight"])["model/unet.conv_in.weight"]
    assert not torch.equal(last, wanted["conv_in.weight"])  # which is the average
    start = _weights(folder / "shallow")
    assert any(not torch.equal(start[name], wanted[name]) for name in wanted)


def test_latents_are_known_again_in_another_process(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """Folders as they are published leave fields out; diffusers notes these in an order that each process has anew."""
    weights = shutil.copytree(folder / "shallow", tmp_path / "weights")
    config = json.loads((weights / "vae" / "config.json").read_text())
    del config["use_quant_conv"], config["use_post_quant_conv"], config["force_upcast"]
    (weights / "vae" / "config.json").write_text(json.dumps(config))
    prints: list[str] = []

    def printed(module: Any, config: dict[str, Any]) -> str:
        prints.append(fingerprint(module, config))
        return prints[-1]

    def loaded(*given: Any) -> Pipeline:
        pipeline = load_pipeline(*given)
        noted = pipeline.vae.config["_use_default_values"]
        assert len(noted) == 3
        fields = dict(pipeline.vae.config)
        pipeline.vae._internal_dict = FrozenDict({**fields, "_use_default_values": sorted(noted, reverse=bool(prints))})
        return pipeline

    monkeypatch.setattr(prepare, "fingerprint", printed)
    monkeypatch.setattr(train, "load_pipeline", loaded)
    for out in ("one", "other"):
        given = _argv(folder, tmp_path / out, model=weights, data__images=folder / "pictures", steps=1)
        assert finetune.main([*given, "--data.global-batch", "2"]) == 0
    assert len(prints) == 2
    assert prints[0] == prints[1]


def test_what_begins_anew_learns_another_noise(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = {"data__images": folder / "pictures", "noise__prediction": "v_prediction", "data__resolution": 24}
    argv = _argv(folder, out, **options, data__global_batch=2, precision="fp32", save_precision="fp16", seed=1, steps=1)
    assert pretrain.main([*argv, "--noise.zero-terminal-snr", "--data.no-buckets"]) == 0
    pipeline = load_pipeline(out)
    assert pipeline.prediction_type == "v_prediction"
    assert pipeline.schedule["rescale_betas_zero_snr"]
    assert pipeline.schedule["timestep_spacing"] == "trailing"
    assert _weights(out)["conv_in.weight"].dtype == torch.float16
    start = load_pipeline(folder / "weights").unet
    assert (pipeline.unet.conv_in.weight - start.conv_in.weight).abs().max() > 0.05
    assert pipeline.unet.conv_in.bias.abs().max() < 1e-3  # it began as `begin_as_identity` says
    theirs = StableDiffusionPipeline.from_pretrained(out, safety_checker=None, local_files_only=True)
    assert theirs.scheduler.config.rescale_betas_zero_snr


def test_adapters_add_a_product_to_what_a_layer_makes() -> None:
    torch.manual_seed(0)
    layers = torch.nn.ModuleDict(
        {"to_q": torch.nn.Linear(5, 7), "conv1": torch.nn.Conv2d(3, 4, 3, 2, 1), "other": torch.nn.Linear(5, 5)}
    )
    x, image = torch.randn(2, 5), torch.randn(2, 3, 9, 9)
    before = layers["to_q"](x), layers["conv1"](image)
    add_adapters(layers, LoraConfig(rank=2, alpha=3.0, targets="all"), seed=0)
    assert torch.equal(layers["to_q"](x), before[0])
    assert torch.equal(layers["conv1"](image), before[1])
    assert [n for n, p in layers.named_parameters() if p.requires_grad] == [
        "to_q.lora_down.weight", "to_q.lora_up.weight", "conv1.lora_down.weight", "conv1.lora_up.weight",
    ]  # fmt: skip
    for name in ("to_q", "conv1"):
        torch.nn.init.normal_(layers[name].lora_up.weight)
    lora = adapters_of(layers)
    q = torch.nn.functional.linear(
        x, layers["to_q"].weight + 1.5 * lora["to_q"].up @ lora["to_q"].down, layers["to_q"].bias
    )
    assert torch.allclose(layers["to_q"](x), q, atol=1e-5)
    kernel = layers["conv1"].weight + lora["conv1"].delta()
    c = torch.nn.functional.conv2d(image, kernel, layers["conv1"].bias, 2, 1)
    assert torch.allclose(layers["conv1"](image), c, atol=1e-5)
    assert lora["conv1"].alpha == 3.0


def test_a_lora_run_leaves_files_that_diffusers_loads(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = {"method": "lora", "lora__rank": 4, "lora__alpha": 6, "lora__targets": "all", "lora__layout": "both"}
    options |= {"model": folder / "shallow"}
    argv = [*_argv(folder, out, **_subject(folder), **options, steps=2, optim__lr=0.05), "--train-text-encoder"]
    assert dreambooth.main(argv) == 0
    assert not (out / "model_index.json").exists()
    held = [name for name in read_full(checkpoint_path(out)) if name.startswith("model/")]
    assert held
    assert all("lora_" in name for name in held)  # checkpoints are small
    pipeline = load_pipeline(folder / "shallow")
    lora = load_lora(out / LORA_FILES["diffusers"], pipeline)
    again = load_lora(out / LORA_FILES["kohya"], pipeline)
    assert all(
        torch.equal(pair.up, again[name].up) and pair.alpha == again[name].alpha == 6 for name, pair in lora.items()
    )
    assert {name.partition(".")[0] for name in lora} == {"unet", "text_encoder"}
    assert any("conv" in name for name in lora)
    theirs = StableDiffusionPipeline.from_pretrained(folder / "shallow", safety_checker=None, local_files_only=True)
    seen, times, text = torch.randn(2, 4, 8, 8), torch.tensor([5, 900]), torch.randn(2, 16, 16)
    before = theirs.unet(seen, times, text).sample
    theirs.load_lora_weights(out, weight_name=LORA_FILES["diffusers"])
    after = theirs.unet(seen, times, text).sample
    add_adapters(pipeline.unet, LoraConfig(), 0, {n[5:]: pair for n, pair in lora.items() if n.startswith("unet.")})
    ours = pipeline.unet(seen, times, text).sample
    assert (after - before).abs().max() > 1e-3
    assert (ours - after).abs().max() < 1e-4 * (after - before).abs().max()
    taken = {"lora__rank", "lora__alpha", "lora__targets"}  # of the file; typed, they are refused
    on = {name: value for name, value in options.items() if name not in taken}
    on |= {"lora__start": out / LORA_FILES["kohya"], "optim__lr": 0.0, "steps": 1}
    assert dreambooth.main([*_argv(folder, tmp_path / "on", **_subject(folder), **on), "--train-text-encoder"]) == 0
    kept = load_lora(tmp_path / "on" / LORA_FILES["diffusers"], load_pipeline(folder / "shallow"))
    assert all(torch.equal(kept[name].down, pair.down) for name, pair in lora.items())
    with pytest.raises(UserError, match="add --train-text-encoder"):
        dreambooth.main(_argv(folder, tmp_path / "off", **_subject(folder), **on))
    other = load_lora(out / LORA_FILES["diffusers"], load_pipeline(folder / "shallow"))
    name, pair = next(iter(other.items()))
    save_lora({name: replace(pair, up=pair.up[:-1])}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="made for another model"):
        dreambooth.main(
            _argv(folder, tmp_path / "o", **_subject(folder), **(on | {"lora__start": tmp_path / "other.safetensors"}))
        )
    assert not (tmp_path / "o").exists()


def test_validation_draws_a_grid_and_a_loss_that_only_learning_moves(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = {
        **_subject(folder), "model": folder / "shallow", "validation__num_images": 2, "validation__sampling__steps": 2,
        "validation__images": folder / "pictures",
        "evaluate_every": 1, "optim__lr": 0.0, "average": 0.5,
    }  # fmt: skip
    argv = _argv(folder, out, **options)
    assert dreambooth.main([*argv, "--validation.prompts", "a dog", "a red circle"]) == 0
    names = sorted(path.name for path in (out / "validation").iterdir())
    assert names == ["step-00000001.png", "step-00000002.png", "step-00000003.png"]
    pictures = [Image.open(out / "validation" / name).copy() for name in names]
    assert pictures[0].size == (34, 34)
    assert pictures[0].tobytes() == pictures[2].tobytes()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
    losses.append(json.loads((out / "summary.json").read_text())["validation_loss"])
    assert len(losses) == 3
    assert len(set(losses)) == 1
    assert len({row["loss"] for row in rows}) == 3


def test_class_images_that_are_missing_are_drawn(folder: Path, tmp_path: Path) -> None:
    class_dir = tmp_path / "class"
    given = {"instance_dir": folder / "subject", "instance_prompt": "a photo of sks dog"}
    config = FinetuneConfig(class_dir=class_dir, class_prompt="a photo of a dog", num_class_images=3, **given)
    alone = Runtime(0, 0, 1, torch.device("cpu"))

    def load(dtype: torch.dtype) -> Pipeline:
        return load_pipeline(folder / "shallow", dtype)

    draw_class_images(config, load, alone)
    drawn = {path.name: np.asarray(Image.open(path)).astype(int) for path in class_dir.iterdir()}
    assert sorted(drawn) == ["class-00000.png", "class-00001.png", "class-00002.png"]
    assert len({picture.tobytes() for picture in drawn.values()}) == 3
    (class_dir / "class-00001.png").unlink()
    draw_class_images(config, load, alone)
    for path in class_dir.iterdir():  # the same picture, alone as beside others
        assert np.abs(np.asarray(Image.open(path)).astype(int) - drawn[path.name]).max() <= 1
    assert len(list(class_dir.iterdir())) == 3
    draw_class_images(config, lambda dtype: pytest.fail("nothing is missing"), alone)


def test_class_images_have_captions_of_their_own(folder: Path, tmp_path: Path, capsys) -> None:
    """Those that are drawn the prompt that they are drawn of, those that are there what stands beside them."""
    dogs, prompts = tmp_path / "dogs", tmp_path / "prompts.txt"
    prompts.write_text("a red dog\na blue dog\n")
    dogs.mkdir()
    Image.new("RGB", (32, 32), "green").save(dogs / "mine.png")
    (dogs / "metadata.jsonl").write_text(json.dumps({"file_name": "mine.png", "text": "a green dog"}) + "\n")
    given = {**_subject(folder), "model": folder / "shallow", "class_dir": dogs}
    given |= {"steps": 1, "class_sampling__steps": 2}
    argv = _argv(folder, tmp_path / "run", **given, class_prompts=prompts, num_class_images=4)
    assert dreambooth.main(argv) == 0
    assert "drawing 3 images of 2 prompts" in capsys.readouterr().out
    captions = {picture.path.name: picture.caption for picture in read_folder(dogs).pictures}
    drawn = {"class-00000.png": "a red dog", "class-00001.png": "a blue dog", "class-00002.png": "a red dog"}
    assert captions == {**drawn, "mine.png": "a green dog"}
    assert read_settings(dogs / "class-00001.png")["prompt"] == "a blue dog"
    config = FinetuneConfig(class_dir=dogs, instance_dir=folder / "subject", instance_prompt="a photo of sks dog")
    _, others = prepare._folders(config, (0, 1))  # a folder whose captions are there needs no prompt
    assert {picture.caption for picture in others.pictures} == set(captions.values())
    given = {"instance_dir": dogs, "instance_prompt": None, "class_dir": dogs}
    assert prepare._folders(FinetuneConfig(**given), (0, 1))[0].pictures[-1].caption == "a green dog"
    with pytest.raises(UserError, match="dogs lacks 2 of 6 class images; give --class-prompt or --class-prompts"):
        dreambooth.main(_argv(folder, tmp_path / "other", **given, num_class_images=6))


def test_class_images_are_drawn_as_they_are_told_to_be(folder: Path, tmp_path: Path) -> None:
    given = {"instance_dir": folder / "subject", "instance_prompt": "a photo of sks dog", "num_class_images": 2}
    alone = Runtime(0, 0, 1, torch.device("cpu"))
    for name, sampling in (("usual", Sampling()), ("little", Sampling("ddim", 3, 1.0))):
        config = FinetuneConfig(
            class_dir=tmp_path / name, class_prompt="a dog", class_sampling=sampling, seed=5, **given
        )
        draw_class_images(config, partial(load_pipeline, folder / "shallow"), alone)
        jobs = [PictureJob("a dog", 5), PictureJob("a dog", 6)]
        wanted = [to_pil(picture) for _, picture in generate(load_pipeline(folder / "shallow"), jobs, sampling)]
        found = [Image.open(tmp_path / name / f"class-0000{number}.png") for number in range(2)]
        assert [image.tobytes() for image in found] == [image.tobytes() for image in wanted]


OPTIMIZERS = [
    ("adamw8bit", "fp32", {"optim__lr": 1e-3}),
    ("adafactor", "bf16", {"optim__lr": 1e-2, "optim__factored": "largest"}),
    ("adamw", "fp16", {"optim__lr": 1e-3, "average": 0.9, "loss_scale__initial": 256}),
]


@pytest.mark.parametrize(("name", "precision", "options"), OPTIMIZERS, ids=[name for name, *_ in OPTIMIZERS])
def test_optimizers_and_formats_learn_and_go_on(folder: Path, tmp_path: Path, name, precision, options) -> None:
    given = {**_subject(folder), "optim__name": name, "precision": precision, "data__global_batch": 2, "steps": 2}
    given |= {
        "microbatch": 1,
        "recompute__mode": "full",
        "checkpoint__every": 1,
        "model": folder / "shallow",
        **options,
    }
    more = ["--average-on-host"] if "average" in options else []
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert dreambooth.main([*_argv(folder, whole, **given), *more]) == 0
    shutil.copytree(whole / "checkpoints", parts / "checkpoints")
    shutil.rmtree(checkpoint_path(parts))  # of the last step: it goes on from the first
    assert dreambooth.main([*_argv(folder, parts, **given), *more, "--resume"]) == 0
    found, wanted, start = _weights(parts), _weights(whole), _weights(folder / "shallow")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    moved = [name for name in wanted if (wanted[name] - start[name]).abs().max() > 1e-5]
    assert len(moved) > 0.9 * len(wanted)
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["loss"] < 10 for row in rows)


@pytest.mark.parametrize("name", ["came", "lamb", "lars", "muon", "sgd", "sm3"])
def test_other_optimizers_learn(name: str) -> None:
    """As the command makes them; a run's folders are the same with each."""
    argv = ["--instance-dir", "x", "--instance-prompt", "sks", "--optim.name", name, "--optim.lr", "0.01"]
    config = parse(FINETUNE, [*CPU, *argv, "--precision", "fp32"], "dreambooth", default="dreambooth")
    pipeline = tiny_pipeline(shallow=True)
    batches, objective = drawn_batches(4, False, False), Objective(NoiseSchedule(pipeline.schedule))
    with start("cpu") as runtime:
        parallel = parallelize(Denoiser(pipeline.unet).train(), runtime.mesh(config.mesh, config.zero), config)
        before = {name: master.detach().clone() for name, master in parallel.masters.items()}
        state = TrainState(parallel, build_optimizer(config.optim, parallel.masters), LossScale("fp32"), {})
        for step in range(2):
            train_step(state, batches.batch(step, 0, 1), objective, num_rows, config, step)
        assert all(master.isfinite().all() for master in parallel.masters.values())
        moved = [name for name, master in parallel.masters.items() if not torch.equal(master, before[name])]
    assert len(moved) > 0.9 * len(before)


def test_recipes_of_little_memory_run_in_it(folder: Path, tmp_path: Path) -> None:
    """Their settings together, on a pipeline that is as much smaller as the budget is."""
    for recipe, budget in (("dreambooth_6gb", 450_000), ("full_5gb", 240_000)):
        prior = {"class_dir": folder / "class", "class_prompt": "a photo of a dog", "num_class_images": 4}
        given = {**_subject(folder), **prior} if recipe.startswith("dream") else {"data__images": folder / "pictures"}
        out = tmp_path / recipe
        given |= {"model": folder / "shallow", "steps": 2, "recipe": recipe, "optim__lr": 1e-3}
        argv = _argv(folder, out, **given, gemini__budget=f"{budget // 1000}KB")
        assert (dreambooth if recipe.startswith("dream") else finetune).main(argv) == 0
        assert 0 < json.loads((out / "summary.json").read_text())["device_peak_bytes"] <= budget
        found, start = _weights(out), _weights(folder / "shallow")
        assert sum(not torch.equal(value, start[name]) for name, value in found.items()) > 0.9 * len(found)


def test_single_files_are_trained_on_too(tmp_path: Path) -> None:
    pipeline = narrow_pipeline(0, v2=True)
    save_pipeline(pipeline, tmp_path / "narrow")
    save_single_file(pipeline, tmp_path / "narrow.safetensors")
    write_pictures(tmp_path / "pictures", 1)
    options = {"model": tmp_path / "narrow.safetensors", "data__images": tmp_path / "pictures", "steps": 1}
    argv = _argv(tmp_path, tmp_path / "run", **options, method="lora", tokenizer=tmp_path / "narrow")
    assert finetune.main(argv) == 0
    lora = load_lora(tmp_path / "run" / LORA_FILES["diffusers"], pipeline)
    assert any(pair.up.abs().max() > 0 for pair in lora.values())
    with pytest.raises(UserError, match="predicts v_prediction"):
        finetune.main([*argv, "--noise.prediction", "epsilon"])
    small = tiny_pipeline(shallow=True)
    quantize(small.unet, "int8")
    save_pipeline(small, tmp_path / "int8")
    with pytest.raises(UserError, match="8 bits, which do not learn"):
        finetune.main(_argv(tmp_path, tmp_path / "other", **options | {"model": tmp_path / "int8"}))


SUBJECT = {"instance_dir": "{folder}/subject", "instance_prompt": "a"}
REFUSED: list[tuple[Any, dict[str, Any], list[str], str]] = [
    (finetune, {}, [], "no pictures given"),
    (finetune, {"data__images": "{folder}/none"}, [], "no folder"),
    (finetune, {"data__images": "{folder}/weights"}, [], "holds no image"),
    (finetune, {"data__images": "{folder}/subject"}, [], "no caption"),
    (finetune, {"data__images": "{folder}/pictures", "data__prompt": " "}, [], "data.prompt is empty"),
    (finetune, {"data__images": "{folder}/pictures", "model": "{folder}/none"}, [], "does not exist"),
    (finetune, {"data__images": "{folder}/pictures", "model": "{folder}/pictures"}, [], "model_index.json"),
    (finetune, {"data__images": "{folder}/pictures", "method": "dream"}, [], "no method 'dream'"),
    (finetune, {"data__images": "{folder}/pictures", "noise__prediction": "v_prediction"}, [], "predicts epsilon"),
    (
        finetune,
        {"data__images": "{folder}/pictures", "model": "{folder}/weights-v", "noise__prediction": "epsilon"},
        [],
        "predicts v_prediction",
    ),
    (finetune, {"data__images": "{folder}/pictures"}, ["--noise.zero-terminal-snr"], "noise alone"),
    (finetune, {"data__images": "{folder}/pictures", "data__resolution": 18}, [], "give 16"),
    (finetune, {"data__images": "{folder}/pictures", "mesh__tp": 2, "nproc": 2}, [], "mesh.tp=2"),
    (finetune, {"data__images": "{folder}/pictures", "data__global_batch": 3, "nproc": 2}, [], "does not divide"),
    (finetune, {"data__images": "{folder}/pictures", "data__caption_dropout": 2}, [], "caption_dropout=2"),
    (dreambooth, {}, [], "DreamBooth needs"),
    (dreambooth, {"instance_dir": "{folder}/subject"}, [], "no caption; .* or give one prompt for all"),
    (dreambooth, {"instance_prompt": "a"}, [], "--instance-prompt without --instance-dir"),
    (dreambooth, {"instance_dir": "{folder}/subject", "instance_prompt": ""}, [], "is empty"),
    (dreambooth, {"instance_dir": "{folder}/subject", "instance_prompt": "a", "class_prompt": "b"}, [], "--class-dir"),
    (dreambooth, {**SUBJECT, "class_prompts": "{folder}/none"}, [], "--class-prompts without --class-dir"),
    (dreambooth, {**SUBJECT, "class_dir": "{folder}/c", "class_prompts": "{folder}/none"}, [], "a prompt a line"),
    (
        dreambooth,
        {**SUBJECT, "class_dir": "{folder}/c", "class_prompts": "x", "class_prompt": "b"},
        [],
        "one caption for all class images, or one for each",
    ),
    (
        dreambooth,
        {**SUBJECT, "class_dir": "{folder}/subject/class", "class_prompt": "b"},
        [],
        "--class-dir .*/class lies in --instance-dir .*/subject, which is read with its subfolders",
    ),
    (
        dreambooth,
        {**SUBJECT, "class_dir": "{folder}", "class_prompt": "b"},
        [],
        "--instance-dir .* lies in --class-dir",
    ),
    (
        finetune,
        {"data__images": "{folder}", "data__prompt": "a", "validation__images": "{folder}/pictures"},
        [],
        "--validation.images .*/pictures lies in --data.images",
    ),
    (dreambooth, {**SUBJECT, "num_class_images": 3}, [], "--num-class-images without images of the class"),
    (
        dreambooth,
        {**SUBJECT, "class_dir": "{folder}/c", "class_sampling__steps": 3},
        [],
        "class-sampling.steps without",
    ),
    (
        dreambooth,
        {**SUBJECT, "class_dir": "{folder}/c", "class_prompt": "b", "class_sampling__height": 3},
        [],
        "height is 3; give a multiple of",
    ),
    (
        dreambooth,
        {**SUBJECT, "class_dir": "{folder}/c", "class_prompt": "b", "class_sampling__width": 0},
        [],
        "width is 0; give a multiple of",
    ),
    (finetune, {"data__images": "{folder}/pictures", "data__resolution": 0}, [], "data.resolution=0; give the side"),
    (pretrain, {"data__images": "{folder}/pictures", "unet": "sd_v9"}, [], "sd_v1"),
    (pretrain, {"data__images": "{folder}/pictures", "unet": "sd_v1"}, [], "width"),
    (pretrain, {"data__images": "{folder}/pictures", "fresh": "unet+text_encoder"}, [], "nothing would teach it"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_cannot_be_trained_is_refused_in_one_line(folder: Path, tmp_path: Path, case: int) -> None:
    command, options, more, message = REFUSED[case]
    options = {k: v.format(folder=folder) if isinstance(v, str) else v for k, v in options.items()}
    with pytest.raises(UserError, match=message) as refused:
        command.main([*_argv(folder, tmp_path / "run", **options), *more])
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()
