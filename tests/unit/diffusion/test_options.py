"""Every option of the diffusion commands is read by a run, or refused where a run would not read it."""

import pytest
import torch

from apps.diffusion.__main__ import APP
from apps.diffusion.adapters import LoraConfig, adapters_of, add_adapters
from apps.diffusion.denoiser import Denoiser
from apps.diffusion.formats.lora import save_lora
from apps.diffusion.pipeline import save_pipeline
from apps.diffusion.plan_config import WITHOUT_EFFECT
from tests.support.diffusion_training import tiny_pipeline, write_pictures
from tests.support.options import TRAINING, Probe

CPU = ["--device", "cpu", "--log.no-tensorboard"]
SUBJECT = "--instance-dir DIR/subject --instance-prompt sks"
COMMANDS = {
    "pretrain": ["", "--fresh nothing"],
    "finetune": ["", "--method lora", "--method lora --lora.start DIR/lora.safetensors"],
    "dreambooth": [SUBJECT, f"{SUBJECT} --class-dir OUT/class --class-prompt dog --num-class-images 3"],
    "sample": ["", "--sampler ddim --guidance 1"],
    "convert": [
        "DIR/weights OUT/converted",
        "DIR/weights OUT/converted.safetensors",
        "DIR/lora.safetensors OUT/lora.safetensors --model DIR/weights",
    ],
    "quantize": ["DIR/weights OUT/quantized"],
    "plan": [
        "",
        "--task train --device cpu",
        "--task train --method lora --nproc 2 --gpu H100",
        "--task train --device cpu --gemini.budget 60MB",
    ],
}
"""command -> words of each of its modes"""
VALUES = TRAINING | {"class_prompt": "dog", "instance_prompt": "sks", "unet": "sd_v1", "vae_tile": 64, "gpu": "A100"}
VALUES |= {"gemini.budget": "60MB", "validation.sampling.height": 16, "validation.sampling.width": 16}
# Read, as part of what is handed on, by runs that have no use for them.
ALSO = {
    "pretrain": ["validation.sampling.negative"],
    "finetune": ["average_on_host", "prior_weight", "validation.sampling.negative"],
    "dreambooth": ["average_on_host", "validation.sampling.negative"],
    "sample --sampler ddim --guidance 1": ["negative", "guidance_rescale"],
    "plan --task train --method lora --nproc 2 --gpu H100": ["lora.start"],
}
VALUES_ALONE = ["optim.lr", "optim.betas", "optim.eps", "optim.weight_decay"]
"""Options that a plan of training hands to the optimizer that it runs, and that its figures are the same without."""
_TRAIN = [*WITHOUT_EFFECT, *(name for name in VALUES_ALONE if name not in WITHOUT_EFFECT)]
TOLD = {
    "plan --task train --device cpu": ["steps", *(name for name in _TRAIN if not name.startswith("lora."))],
    "plan --task train --method lora --nproc 2 --gpu H100": _TRAIN,
    "plan --task train --device cpu --gemini.budget 60MB": [
        *("steps", "utilisation", "memory_gb_s", "bandwidth_gb_s"),
        *(name for name in _TRAIN if not name.startswith("lora.")),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diffusion")
    save_pipeline(tiny_pipeline(shallow=True), folder / "weights")
    adapted = Denoiser(tiny_pipeline(shallow=True).unet, None, False)
    add_adapters(adapted, LoraConfig(), seed=0)
    save_lora(adapters_of(adapted), folder / "lora.safetensors", "diffusers", torch.float32)
    write_pictures(folder / "pictures", 3)
    write_pictures(folder / "subject", 2, captions=False)
    return folder


@pytest.mark.parametrize(("command", "mode"), [(c, mode) for c, modes in COMMANDS.items() for mode in modes])
def test_an_option_is_obeyed_or_refused(command, mode, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = mode.replace("DIR", str(folder)).replace("OUT", str(tmp_path)).split()
    weights = ["--model", str(folder / "weights"), "--out", str(tmp_path / "out")]
    pictures = ["--data.images", str(folder / "pictures")]
    training = [*CPU, *weights, "--steps", "1", "--data.global-batch", "2", "--optim.schedule.warmup-steps", "0"]
    given = {
        "pretrain": [*training, *pictures],
        "finetune": [*training, *pictures],
        "dreambooth": training,
        "sample": [*weights, "--device", "cpu", "--prompt", "dog", "--steps", "1"],
        "plan": ["--model", str(folder / "weights"), "--pixels", "64"],
    }.get(command, [])
    argv = [command, *words] if command in ("convert", "quantize") else [command, *given, *words]
    also = ALSO.get(f"{command} {mode}", ALSO.get(command, ()))
    told = TOLD.get(f"{command} {mode}", ())
    Probe(APP.dispatch, argv, VALUES, also, told, VALUES_ALONE if told else (), notes=["settings_of"]).check()


def test_a_plan_is_the_same_without_the_optimizer_s_values(folder, capsys):
    words = ["plan", "--task", "train", "--model", str(folder / "weights"), "--pixels", "64", "--device", "cpu"]
    others = ["--optim.lr", "0.5", "--optim.betas", "0.1", "0.2", "--optim.eps", "0.1", "--optim.weight-decay", "0.3"]

    def printed(*more):
        assert APP.dispatch([*words, *more]) == 0
        return capsys.readouterr().out

    plain = printed()
    said = "the plan is the same without --optim.betas, --optim.eps, --optim.lr, --optim.weight-decay\n"
    assert printed(*others) == plain + said
