"""Diffusers folders in and out: nothing changes, diffusers loads them, and what is wrong is named."""

import json
import shutil
import socket

import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file, save_file

from apps.diffusion.loading import load_pipeline
from apps.diffusion.pipeline import save_pipeline
from apps.diffusion.shapes import SHAPES, meta_modules
from core.config import UserError
from tests.support.diffusion import narrow_pipeline


@pytest.fixture(scope="module")
def narrow():
    return narrow_pipeline(0)


@pytest.fixture(scope="module")
def folder(narrow, tmp_path_factory):
    return save_pipeline(narrow, tmp_path_factory.mktemp("pipeline") / "narrow")


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*address):
        raise AssertionError(f"a connection to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def _edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_narrow_has_the_topology_of_v1(narrow):
    shapes = {part: module.state_dict().keys() for part, module in meta_modules(SHAPES["sd_v1"]).items()}
    for part, module in narrow.modules.items():
        assert module.state_dict().keys() == shapes[part]
    assert len(shapes["unet"]) == 686
    assert len(shapes["vae"]) == 248
    assert sum(p.numel() for p in meta_modules(SHAPES["sd_v1"])["unet"].parameters()) == 859_520_964


def test_a_folder_holds_the_same_weights(narrow, folder):
    loaded = load_pipeline(folder)
    assert loaded.schedule == narrow.schedule
    for part, module in narrow.modules.items():
        state = loaded.modules[part].state_dict()
        for name, tensor in module.state_dict().items():
            assert torch.equal(state[name], tensor), name
    assert not loaded.unet.training
    prompts = ["a photo of a dog", "", "Ünïcode ☃"]
    assert torch.equal(loaded.encode_prompts(prompts), narrow.encode_prompts(prompts))


def test_diffusers_loads_the_folder(narrow, folder):
    theirs = StableDiffusionPipeline.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    embeddings, _ = theirs.encode_prompt("a red circle", "cpu", 1, False)
    assert torch.equal(embeddings, narrow.encode_prompts(["a red circle"]))
    for part, module in narrow.modules.items():
        state = getattr(theirs, part).state_dict()
        for name, tensor in module.state_dict().items():
            assert torch.equal(state[name], tensor), name
    assert theirs.scheduler.config.prediction_type == "epsilon"
    assert theirs.scheduler.config.beta_end == 0.012


def test_the_text_encoder_is_written_with_its_prefix(folder):
    names = load_file(folder / "text_encoder" / "model.safetensors").keys()
    assert all(name.startswith("text_model.") for name in names)
    assert (folder / "tokenizer" / "vocab.json").is_file()
    assert (folder / "tokenizer" / "merges.txt").is_file()


def test_names_of_older_and_newer_folders(narrow, copy):
    """transformers 5 leaves out `text_model.`, old ones store position_ids; diffusers had other names in the VAE."""
    path = copy / "text_encoder" / "model.safetensors"
    text = {name.removeprefix("text_model."): tensor for name, tensor in load_file(path).items()}
    save_file(text | {"embeddings.position_ids": torch.arange(77)[None]}, path)
    path = copy / "vae" / "diffusion_pytorch_model.safetensors"
    former = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    vae = load_file(path)
    for new, old in former.items():
        vae = {name.replace(f"attentions.0.{new}.", f"attentions.0.{old}."): tensor for name, tensor in vae.items()}
    assert "decoder.mid_block.attentions.0.proj_attn.weight" in vae
    save_file(vae, path)
    loaded = load_pipeline(copy)
    for part in ("vae", "text_encoder"):
        state = loaded.modules[part].state_dict()
        for name, tensor in narrow.modules[part].state_dict().items():
            assert torch.equal(state[name], tensor), name


def test_half_precision_files(narrow, tmp_path):
    out = save_pipeline(narrow, tmp_path / "half", dtype=torch.float16)
    assert load_file(out / "unet" / "diffusion_pytorch_model.safetensors")["conv_in.weight"].dtype == torch.float16
    loaded = load_pipeline(out)
    assert loaded.unet.dtype == torch.float32
    torch.testing.assert_close(loaded.unet.conv_in.weight, narrow.unet.conv_in.weight, rtol=1e-3, atol=1e-6)


def test_writing_over_a_pipeline_keeps_other_files(narrow, copy):
    (copy / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        save_pipeline(narrow, copy)
    other = narrow_pipeline(1)
    save_pipeline(other, copy, replace=True)
    assert (copy / "notes.txt").read_text() == "mine"
    assert torch.equal(load_pipeline(copy).unet.conv_in.weight, other.unet.conv_in.weight)
    assert sorted(p.name for p in copy.parent.iterdir()) == ["copy"]


def test_what_is_wrong_with_a_folder_is_named(copy, tmp_path):
    with pytest.raises(UserError, match=r"holds no model_index.json"):
        load_pipeline(tmp_path)
    unet = copy / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(unet)
    conv_in = tensors.pop("conv_in.weight")
    save_file(tensors | {"strange": torch.zeros(1)}, unet)
    with pytest.raises(UserError, match=r"lacks conv_in\.weight; holds strange"):
        load_pipeline(copy)
    save_file(tensors | {"conv_in.weight": conv_in[:, :3].contiguous()}, unet)
    with pytest.raises(UserError, match=r"conv_in\.weight of shape \[32, 3, 3, 3\] and not \[32, 4, 3, 3\]"):
        load_pipeline(copy)
    unet.write_bytes(unet.read_bytes()[:1000])
    with pytest.raises(UserError, match="truncated"):
        load_pipeline(copy)
    unet.rename(unet.with_suffix(".bin"))
    with pytest.raises(UserError, match="pickled"):
        load_pipeline(copy)


def test_parts_that_do_not_fit(copy):
    save_file(
        load_file(copy / "unet" / "diffusion_pytorch_model.safetensors") | {"conv_in.weight": torch.zeros(32, 9, 3, 3)},
        copy / "unet" / "diffusion_pytorch_model.safetensors",
    )
    _edit(copy / "unet" / "config.json", in_channels=9)
    with pytest.raises(UserError, match="takes 9 channels and makes 4, the VAE's latents have 4"):
        load_pipeline(copy)
    _edit(copy / "scheduler" / "scheduler_config.json", prediction_type="flow")
    with pytest.raises(UserError, match="prediction_type is 'flow', which is not supported: known are epsilon"):
        load_pipeline(copy)
    _edit(copy / "model_index.json", text_encoder=["transformers", "T5EncoderModel"])
    with pytest.raises(UserError, match="whose text_encoder is T5EncoderModel"):
        load_pipeline(copy)
