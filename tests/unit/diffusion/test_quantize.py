"""Pipelines in 8 bits: how large, how near to what they were, out and in again."""

import math

import pytest
import torch

from apps.diffusion import quantize as command
from apps.diffusion import sample
from apps.diffusion.formats.single_file import save_single_file
from apps.diffusion.generate import PictureJob, Sampling, generate
from apps.diffusion.loading import load_pipeline
from apps.diffusion.pipeline import save_pipeline
from apps.diffusion.shapes import SHAPES, meta_modules
from core.config import UserError
from core.quant import QuantizedWeight, quantize, stored_bytes
from core.quant.choose import choose
from tests.support.diffusion import narrow_pipeline
from tests.support.diffusion_training import tiny_pipeline

JOBS = [PictureJob("a red circle", 1), PictureJob("a photo of a dog", 2)]


def _pictures(pipeline, steps=6):
    return torch.stack([picture for _, picture in generate(pipeline, JOBS, Sampling("dpm++", steps, 5.0))])


def _psnr(found, wanted):
    return 10 * math.log10(1 / (found - wanted).pow(2).mean().item())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_pipeline(tiny_pipeline(), tmp_path_factory.mktemp("quantize") / "tiny")


def test_one_line_rounds_every_layer_and_keeps_the_pictures():
    pipeline = narrow_pipeline(0)
    before, wanted = stored_bytes(pipeline.unet), _pictures(pipeline)
    quantize(pipeline.unet)
    plain = [
        name
        for name, module in pipeline.unet.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d) and not isinstance(module.weight, QuantizedWeight)
    ]
    assert plain == []
    assert stored_bytes(pipeline.unet) < 0.28 * before  # of narrow layers scales and biases are a larger share
    found = _pictures(pipeline)
    assert wanted.std() > 0.01
    assert 45 < _psnr(found, wanted) < 90


@pytest.mark.parametrize("name", ["sd_v1", "sd_v2"])
def test_whole_models_are_at_most_26_percent_of_fp32(name):
    unet = meta_modules(SHAPES[name])["unet"]
    rounded = [unet.get_parameter(chosen.name) for chosen in choose(unet)]
    in_fp32 = 4 * sum(p.numel() for p in unet.parameters())
    spared = sum(3 * weight.numel() - 4 * weight.shape[0] for weight in rounded)
    assert 0.25 * in_fp32 < in_fp32 - spared < 0.26 * in_fp32


def test_out_and_in_again(folder, tmp_path, capsys):
    out = tmp_path / "int8"
    assert command.main([str(folder), str(out), "--parts", "unet", "text_encoder", "--precision", "fp32"]) == 0
    assert "in fp32" in capsys.readouterr().out
    wanted = tiny_pipeline()
    quantize(wanted.unet, "int8")
    quantize(wanted.text_encoder, "int8", embeddings=True)
    found = load_pipeline(out)
    assert isinstance(found.text_encoder.embeddings.token_embedding.weight, QuantizedWeight)
    for part, module in wanted.modules.items():
        state = found.modules[part].state_dict()
        for name, tensor in module.state_dict().items():
            other = state[name]
            if isinstance(tensor, QuantizedWeight):
                tensor, other = tensor.dequantized(), other.dequantized()
            assert torch.equal(tensor, other), name
    assert torch.equal(_pictures(found, 1), _pictures(wanted, 1))
    with pytest.raises(UserError, match="a single file holds plain weights"):
        save_single_file(found, tmp_path / "int8.safetensors")
    options = ["--model", str(out), "--prompt", "a dog", "--steps", "1", "--out", str(tmp_path / "pictures")]
    assert sample.main(options) == 0
    assert (tmp_path / "pictures" / "00000-0.png").is_file()


def test_half_precision_beside_the_integers(tmp_path):
    out = tmp_path / "int8"
    command.main([str(save_pipeline(tiny_pipeline(), tmp_path / "tiny")), str(out)])
    pipeline = load_pipeline(out, torch.bfloat16)
    assert pipeline.unet.conv_in.weight.dtype == pipeline.unet.conv_in.bias.dtype == torch.bfloat16
    assert isinstance(pipeline.unet.conv_in.weight, QuantizedWeight)
    assert _pictures(pipeline, 1).isfinite().all()


def test_refused(folder, tmp_path):
    for arguments, said in (
        ([str(folder)], "takes the pipeline and the folder to write"),
        ([str(folder), str(folder)], "exists already"),
        ([str(folder), str(tmp_path / "x"), "--group-size", "32"], "group_size is an option of int4"),
    ):
        with pytest.raises(UserError, match=said):
            command.main(arguments)
    assert not (tmp_path / "x").exists()
