"""Single-file checkpoints: the published names and shapes, out and in again, and as diffusers reads them."""

import math

import pytest
import torch
from diffusers import StableDiffusionPipeline
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from apps.diffusion import convert
from apps.diffusion.formats.ldm_names import stored_names
from apps.diffusion.formats.single_file import load_single_file, save_single_file
from apps.diffusion.formats.topology import text_config, unet_config, vae_config
from apps.diffusion.loading import load_pipeline
from apps.diffusion.pipeline import save_pipeline
from apps.diffusion.shapes import SD_V1, SD_V2_BASE, meta_modules
from core.config import UserError
from tests.support.diffusion import narrow_pipeline

# Of the published files: keys that tell the numbering, with their shapes.
V1 = {
    "model.diffusion_model.time_embed.2.weight": (1280, 1280),
    "model.diffusion_model.input_blocks.0.0.weight": (320, 4, 3, 3),
    "model.diffusion_model.input_blocks.1.1.proj_in.weight": (320, 320, 1, 1),
    "model.diffusion_model.input_blocks.3.0.op.weight": (320, 320, 3, 3),
    "model.diffusion_model.input_blocks.4.0.skip_connection.weight": (640, 320, 1, 1),
    "model.diffusion_model.input_blocks.8.1.transformer_blocks.0.ff.net.0.proj.weight": (10240, 1280),
    "model.diffusion_model.input_blocks.11.0.emb_layers.1.weight": (1280, 1280),
    "model.diffusion_model.middle_block.1.transformer_blocks.0.attn2.to_k.weight": (1280, 768),
    "model.diffusion_model.middle_block.2.out_layers.3.weight": (1280, 1280, 3, 3),
    "model.diffusion_model.output_blocks.2.1.conv.weight": (1280, 1280, 3, 3),
    "model.diffusion_model.output_blocks.5.2.conv.weight": (1280, 1280, 3, 3),
    "model.diffusion_model.output_blocks.8.2.conv.bias": (640,),
    "model.diffusion_model.output_blocks.11.0.skip_connection.weight": (320, 640, 1, 1),
    "model.diffusion_model.out.2.weight": (4, 320, 3, 3),
    "first_stage_model.encoder.down.2.downsample.conv.weight": (512, 512, 3, 3),
    "first_stage_model.encoder.down.1.block.0.nin_shortcut.weight": (256, 128, 1, 1),
    "first_stage_model.encoder.mid.attn_1.q.weight": (512, 512, 1, 1),
    "first_stage_model.encoder.mid.block_2.conv2.weight": (512, 512, 3, 3),
    "first_stage_model.decoder.mid.attn_1.proj_out.bias": (512,),
    "first_stage_model.decoder.up.0.block.0.nin_shortcut.weight": (128, 256, 1, 1),
    "first_stage_model.decoder.up.3.upsample.conv.weight": (512, 512, 3, 3),
    "first_stage_model.encoder.conv_out.weight": (8, 512, 3, 3),
    "first_stage_model.quant_conv.weight": (8, 8, 1, 1),
    "first_stage_model.post_quant_conv.bias": (4,),
    "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight": (49408, 768),
    "cond_stage_model.transformer.text_model.encoder.layers.11.mlp.fc1.weight": (3072, 768),
    "cond_stage_model.transformer.text_model.final_layer_norm.bias": (768,),
}
V2 = {
    "model.diffusion_model.input_blocks.1.1.proj_in.weight": (320, 320),
    "model.diffusion_model.input_blocks.2.1.transformer_blocks.0.attn2.to_k.weight": (320, 1024),
    "cond_stage_model.model.positional_embedding": (77, 1024),
    "cond_stage_model.model.token_embedding.weight": (49408, 1024),
    "cond_stage_model.model.ln_final.weight": (1024,),
    "cond_stage_model.model.transformer.resblocks.22.attn.in_proj_weight": (3072, 1024),
    "cond_stage_model.model.transformer.resblocks.0.attn.in_proj_bias": (3072,),
    "cond_stage_model.model.transformer.resblocks.0.attn.out_proj.weight": (1024, 1024),
    "cond_stage_model.model.transformer.resblocks.10.mlp.c_fc.weight": (4096, 1024),
    "cond_stage_model.model.transformer.resblocks.10.ln_2.bias": (1024,),
}


@pytest.fixture(scope="module", params=[False, True], ids=["v1", "v2"])
def written(request, tmp_path_factory):
    """(pipeline, its diffusers folder, its single file)"""
    folder = tmp_path_factory.mktemp("single")
    pipeline = narrow_pipeline(0, v2=request.param)
    return pipeline, save_pipeline(pipeline, folder / "narrow"), save_single_file(pipeline, folder / "n.safetensors")


def _equal(found, wanted):
    for part, module in wanted.modules.items():
        state = found.modules[part].state_dict()
        assert state.keys() == module.state_dict().keys()
        for name, tensor in module.state_dict().items():
            assert torch.equal(state[name], tensor), (part, name)


def _bare(file, tmp_path, **extra):
    """The tensors of a file without what its header says, as others write them."""
    path = tmp_path / "bare.safetensors"
    save_file(load_file(file) | extra, path)
    return path


@pytest.mark.parametrize(
    ("shape", "known", "count"),
    [(SD_V1, V1, 686 + 248 + 196), (SD_V2_BASE, V2, 686 + 248 + 4 + 23 * 12)],
    ids=["v1", "v2"],
)
def test_published_names_and_shapes(shape, known, count):
    """Of the whole models: every name once, the topology read off the shapes, the U-Net's names as in diffusers."""
    open_clip = shape is SD_V2_BASE
    configs = {"unet": shape.unet, "vae": shape.vae, "text_encoder": shape.text_encoder}
    entries, our_names = {}, {}
    for part, module in meta_modules(shape).items():
        state = module.state_dict()
        names = stored_names(part, state, configs[part], open_clip)
        assert len(set(names.values())) == len(state)
        our_names |= {(stored.key, stored.third): name for name, stored in names.items()}
        entries |= {stored.key: stored.shape(tuple(state[name].shape)) for name, stored in names.items()}
    assert {key: entries.get(key) for key in known} == known
    thirds = 2 * 2 * 23 if open_clip else 0  # queries, keys and values are one matrix and one bias
    assert len(our_names) - len(entries) == thirds
    assert len(entries) == count
    for found, wanted in (
        (unet_config(entries, open_clip, "x"), shape.unet),
        (vae_config(entries, "x"), shape.vae),
        (text_config(entries, open_clip, "x"), shape.text_encoder),
    ):
        common = found.keys() & wanted.keys()
        assert {key: found[key] for key in common} == {key: wanted[key] for key in common}
        assert wanted.keys() - common <= {"norm_num_groups"}
    theirs = convert_ldm_unet_checkpoint({key: key for key in entries}, {"layers_per_block": 2})
    assert {name: our_names[key, None] for name, key in theirs.items()} == {name: name for name in theirs}
    assert len(theirs) == 686


def test_out_and_in_again(written):
    pipeline, folder, file = written
    with pytest.raises(UserError, match="holds no tokenizer; give --tokenizer"):
        load_pipeline(file)
    loaded = load_pipeline(file, tokenizer=folder)
    _equal(loaded, pipeline)
    assert loaded.schedule == pipeline.schedule
    assert loaded.unet.config.attention_head_dim == pipeline.unet.config.attention_head_dim
    prompts = ["a red circle", ""]
    if pipeline.text_encoder.config.hidden_act != "gelu":
        assert torch.equal(loaded.encode_prompts(prompts), pipeline.encode_prompts(prompts))
    else:  # filled up with token 0, as OpenCLIP's texts are
        assert loaded.tokenize(prompts)[0, -1] == loaded.tokenizer.get_vocab()["!"]


def test_diffusers_reads_the_file(written):
    pipeline, folder, file = written
    theirs = StableDiffusionPipeline.from_single_file(file, config=str(folder), local_files_only=True)
    for part, module in pipeline.modules.items():
        state = getattr(theirs, part).state_dict()
        for name, tensor in module.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=0, msg=name)


def test_files_of_others(written, tmp_path):
    """No configuration in the header, tables and copies that are not used, bare names of the text encoder."""
    pipeline, folder, file = written
    is_v2 = pipeline.prediction_type == "v_prediction"
    extra = {"alphas_cumprod": torch.ones(1000), "model_ema.decay": torch.ones(())}
    if is_v2:
        spare = {f"cond_stage_model.model.transformer.resblocks.23.ln_1.{kind}": torch.ones(64) for kind in "ab"}
        extra |= {"cond_stage_model.model.text_projection": torch.ones(64, 64)} | spare
    else:
        extra["cond_stage_model.transformer.text_model.embeddings.position_ids"] = torch.arange(77)[None]
    path = _bare(file, tmp_path, **extra)
    if is_v2:
        with pytest.raises(UserError, match="does not say what its U-Net predicts; give --prediction-type"):
            load_single_file(path, folder)
        assert load_single_file(path, folder, "v_prediction").prediction_type == "v_prediction"
        path.with_suffix(".yaml").write_text('model:\n  params:\n    parameterization: "v"\n')
        with pytest.raises(UserError, match=r"predicts v_prediction, and --prediction-type epsilon was given"):
            load_single_file(path, folder, "epsilon")
    loaded = load_single_file(path, folder)
    assert loaded.prediction_type == pipeline.prediction_type
    _equal(loaded, pipeline)
    if not is_v2:
        short = "cond_stage_model.transformer."
        tensors = {name.replace(f"{short}text_model.", short): tensor for name, tensor in load_file(file).items()}
        save_file(tensors | {"v_pred": torch.ones(()), "ztsnr": torch.ones(())}, path)
        loaded = load_single_file(path, folder)
        assert loaded.schedule["rescale_betas_zero_snr"]
        assert loaded.prediction_type == "v_prediction"
        _equal(loaded, pipeline)


def test_averaged_weights(written, tmp_path):
    pipeline, folder, file = written
    with pytest.raises(UserError, match="holds no averaged weights"):
        load_single_file(file, folder, ema=True)
    start = "model.diffusion_model."
    averaged = {
        "model_ema." + key.removeprefix("model.").replace(".", ""): tensor + 1
        for key, tensor in load_file(file).items()
        if key.startswith(start)
    }
    path = _bare(file, tmp_path, **averaged)
    loaded = load_single_file(path, folder, pipeline.prediction_type, ema=True)
    assert torch.equal(loaded.unet.conv_in.weight, pipeline.unet.conv_in.weight + 1)
    assert torch.equal(loaded.vae.quant_conv.weight, pipeline.vae.quant_conv.weight)


def test_the_header_names_the_model(written):
    pipeline, _, file = written
    with safe_open(file, "pt") as opened:
        header = opened.metadata()
    is_v2 = pipeline.prediction_type == "v_prediction"
    assert header["modelspec.prediction_type"] == ("v" if is_v2 else "epsilon")
    assert header["modelspec.architecture"] == ("stable-diffusion-v2-64-v" if is_v2 else "stable-diffusion-v1")


def test_what_is_wrong_with_a_file_is_named(tmp_path):
    pipeline = narrow_pipeline(0)
    folder = save_pipeline(pipeline, tmp_path / "narrow")
    file = save_single_file(pipeline, tmp_path / "n.safetensors")
    tensors = load_file(file)
    path = tmp_path / "wrong.safetensors"

    def refused(said, changed):
        save_file(changed, path)
        with pytest.raises(UserError, match=said):
            load_single_file(path, folder)

    refused(r"holds control_model\.x, which the model has not", tensors | {"control_model.x": torch.ones(1)})
    refused("is a checkpoint of SDXL", tensors | {"conditioner.embedders.0.x": torch.ones(1)})
    refused("is a LoRA; give the model as weights", {"lora_unet_x.lora_down.weight": torch.ones(1, 1)})
    refused("holds no U-Net", {"encoder.conv_in.weight": torch.ones(1)})
    short = {name: tensor for name, tensor in tensors.items() if "middle_block.1.norm" not in name}
    refused(r"lacks model\.diffusion_model\.middle_block\.1\.norm\.bias, .*norm\.weight;", short)
    kernel = "model.diffusion_model.middle_block.0.in_layers.2.weight"
    refused(rf"has {kernel} of shape \[128, 128, 1, 3\]", tensors | {kernel: tensors[kernel][:, :, :1].clone()})
    refused("no whole Stable Diffusion", {k: t for k, t in tensors.items() if "out.2" not in k})
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match="truncated"):
        load_single_file(path, folder)
    with pytest.raises(UserError, match="hold pickles and are not opened"):
        load_single_file(tmp_path / "model.ckpt", folder)
    with pytest.raises(UserError, match="exists already"):
        save_single_file(pipeline, file)
    with pytest.raises(UserError, match=r"does not end in \.safetensors"):
        save_single_file(pipeline, tmp_path / "model")


def test_the_command(written, tmp_path):
    pipeline, folder, file = written
    out = tmp_path / "out"
    assert convert.main([str(file), str(out), "--tokenizer", str(folder / "tokenizer")]) == 0
    _equal(load_pipeline(out), pipeline)
    half = tmp_path / "half.safetensors"
    assert convert.main([str(out), str(half), "--precision", "fp16"]) == 0
    tensors, weight = load_file(half), pipeline.unet.conv_in.weight
    assert all(tensor.dtype == torch.float16 for tensor in tensors.values())
    assert torch.equal(tensors["model.diffusion_model.input_blocks.0.0.weight"], weight.half())
    assert math.isclose(half.stat().st_size, file.stat().st_size / 2, rel_tol=0.02)
    for arguments, said in (
        ([str(file)], "takes what to read and what to write"),
        ([str(folder), str(out)], "exists already"),
        ([str(folder), str(tmp_path / "new"), "--ema"], "ema is for single files"),
        ([str(folder), str(tmp_path / "new"), "--prediction-type", "sample"], "and --prediction-type sample was given"),
    ):
        with pytest.raises(UserError, match=said):
            convert.main(arguments)
    assert not (tmp_path / "new").exists()
