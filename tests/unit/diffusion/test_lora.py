"""LoRA files: both layouts out and in, alpha that is not the rank, the sums that PEFT and diffusers make of them."""

import pytest
import torch
from diffusers import StableDiffusionPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from apps.diffusion import convert
from apps.diffusion.formats.lora import Pair, load_lora, merge_lora, save_lora
from apps.diffusion.loading import load_pipeline
from apps.diffusion.pipeline import save_pipeline
from core.config import UserError
from core.quant import quantize
from tests.support.diffusion import narrow_pipeline

ATTENTION = "down_blocks.0.attentions.0.transformer_blocks.0"
MODULES = {  # with rank and alpha
    f"unet.{ATTENTION}.attn1.to_q": (4, 8.0),
    f"unet.{ATTENTION}.attn2.to_out.0": (4, 8.0),
    f"unet.{ATTENTION}.ff.net.0.proj": (2, 1.0),
    "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_v": (4, 3.0),
    "text_encoder.encoder.layers.1.self_attn.q_proj": (4, 2.0),
    "text_encoder.encoder.layers.0.mlp.fc2": (4, 2.0),
}
CONVOLUTIONS = {"unet.down_blocks.1.attentions.0.proj_in": (2, 4.0), "unet.mid_block.resnets.0.conv1": (3, 5.0)}


def _lora(pipeline, modules, seed=0):
    generator, lora = torch.Generator().manual_seed(seed), {}
    for name, (rank, alpha) in modules.items():
        part, _, path = name.partition(".")
        out, *inner = pipeline.modules[part].get_submodule(path).weight.shape
        up = torch.randn(out, rank, *[1] * (len(inner) - 1), generator=generator)
        lora[name] = Pair(torch.randn(rank, *inner, generator=generator), up, alpha)
    return lora


def _weights(pipeline, lora):
    return {n: pipeline.modules[n.partition(".")[0]].get_submodule(n.partition(".")[2]).weight for n in lora}


def _diffusers_pipeline(seed=0):
    ours = narrow_pipeline(seed)
    parts = ours.modules | {"tokenizer": ours.tokenizer, "safety_checker": None, "feature_extractor": None}
    from diffusers import DDIMScheduler

    return StableDiffusionPipeline(**parts, scheduler=DDIMScheduler(), requires_safety_checker=False)


@pytest.fixture(scope="module")
def narrow():
    return narrow_pipeline(0)


@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_out_and_in_again(narrow, layout, tmp_path):
    lora = _lora(narrow, MODULES | CONVOLUTIONS)
    found = load_lora(save_lora(lora, tmp_path / "lora.safetensors", layout), narrow)
    assert found.keys() == lora.keys()
    for name, pair in lora.items():
        assert torch.equal(found[name].up, pair.up)
        assert torch.equal(found[name].down, pair.down)
        assert found[name].alpha == pair.alpha, name


@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_diffusers_adds_the_same(layout, tmp_path):
    """Fused by diffusers and PEFT, and merged by us: the weights are equal, and differ from those before."""
    ours = narrow_pipeline(0)
    # Of kohya's layout diffusers 0.42 loses an alpha of its own (of attention in the U-Net), and q_proj of the text.
    alike = {name: (4, 8.0) for name in MODULES if "q_proj" not in name}
    lora = _lora(ours, MODULES | CONVOLUTIONS if layout == "diffusers" else alike)
    path = save_lora(lora, tmp_path / "lora.safetensors", layout)
    before = {name: weight.clone() for name, weight in _weights(ours, lora).items()}
    merge_lora(ours, load_lora(path, ours), scale=0.5)
    theirs = _diffusers_pipeline()
    theirs.load_lora_weights(path)
    theirs.fuse_lora(lora_scale=0.5)
    theirs.unload_lora_weights()
    for name, weight in _weights(ours, lora).items():
        part, _, inner = name.partition(".")
        fused = getattr(theirs, part).get_submodule(inner).weight
        torch.testing.assert_close(weight, fused, rtol=1e-5, atol=1e-5, msg=name)
        assert (weight - before[name]).abs().max() > 0.1


def test_what_peft_trained_is_read(tmp_path):
    """A file that diffusers writes of adapters in PEFT's modules; merged, it is what PEFT merges."""
    theirs = _diffusers_pipeline()
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["to_q", "to_out.0", "conv1"], init_lora_weights=False)
    theirs.unet.add_adapter(config)
    layers = get_peft_model_state_dict(theirs.unet)
    for metadata, alpha in ({**config.to_dict()}, 7.0), (None, 3.0):
        out = tmp_path / f"{alpha}"
        theirs.save_lora_weights(out, unet_lora_layers=layers, unet_lora_adapter_metadata=metadata)
        ours = narrow_pipeline(0)
        lora = load_lora(out / "pytorch_lora_weights.safetensors", ours)
        assert {pair.alpha for pair in lora.values()} == {alpha}
    merge_lora(ours, {name: Pair(pair.down, pair.up, 7.0) for name, pair in lora.items()})
    theirs.unet.fuse_lora()
    for name, weight in _weights(ours, lora).items():
        merged = theirs.unet.get_submodule(name.partition(".")[2]).base_layer.weight
        torch.testing.assert_close(weight, merged, rtol=1e-5, atol=1e-6, msg=name)
    assert len(lora) == 64 + 44 / 2


def test_adapters_that_are_rank_stabilized_are_scaled_as_peft_does(tmp_path):
    """By alpha over the root of the rank, which their header says."""
    theirs, ours = _diffusers_pipeline(), narrow_pipeline(0)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["to_q"], init_lora_weights=False, use_rslora=True)
    theirs.unet.add_adapter(config)
    layers = get_peft_model_state_dict(theirs.unet)
    theirs.save_lora_weights(tmp_path, unet_lora_layers=layers, unet_lora_adapter_metadata=config.to_dict())
    lora = load_lora(tmp_path / "pytorch_lora_weights.safetensors", ours)
    merge_lora(ours, lora)
    theirs.unet.fuse_lora()
    for name, weight in _weights(ours, lora).items():
        merged = theirs.unet.get_submodule(name.partition(".")[2]).base_layer.weight
        torch.testing.assert_close(weight, merged, rtol=1e-5, atol=1e-6, msg=name)


def test_names_of_older_files(narrow, tmp_path):
    lora = _lora(narrow, {f"unet.{ATTENTION}.attn1.to_q": (4, 4.0), f"unet.{ATTENTION}.attn1.to_out.0": (4, 4.0)})
    text = _lora(narrow, {"text_encoder.encoder.layers.1.self_attn.q_proj": (2, 2.0)})
    (query, out), [words] = lora.values(), text.values()
    save_file(
        {
            f"unet.{ATTENTION}.attn1.processor.to_q_lora.down.weight": query.down,
            f"unet.{ATTENTION}.attn1.processor.to_q_lora.up.weight": query.up,
            f"unet.{ATTENTION}.attn1.processor.to_out_lora.down.weight": out.down,
            f"unet.{ATTENTION}.attn1.processor.to_out_lora.up.weight": out.up,
            "text_encoder.text_model.encoder.layers.1.self_attn.q_proj.lora_linear_layer.down.weight": words.down,
            "text_encoder.text_model.encoder.layers.1.self_attn.q_proj.lora_linear_layer.up.weight": words.up,
        },
        tmp_path / "old.safetensors",
    )
    found = load_lora(tmp_path / "old.safetensors", narrow)
    assert found.keys() == (lora | text).keys()
    for name, pair in (lora | text).items():
        assert torch.equal(found[name].up, pair.up)
        assert found[name].alpha == pair.rank


def test_refused(narrow, tmp_path):
    wide = narrow_pipeline(0, v2=True)
    module = f"unet.{ATTENTION}.attn2.to_k"
    path = save_lora(_lora(wide, {module: (4, 4.0)}), tmp_path / "v2.safetensors", "kohya")
    said = r"made for another model: lora_unet_down_blocks_0_.*attn2_to_k has matrices \[32, 4\] and \[4, 64\], "
    with pytest.raises(UserError, match=said + r"and its weight is \[32, 32\]"):
        load_lora(path, narrow)

    def refuse(said, tensors):
        save_file(tensors, tmp_path / "wrong.safetensors")
        with pytest.raises(UserError, match=said):
            load_lora(tmp_path / "wrong.safetensors", narrow)

    one = torch.ones(1, 1)
    refuse("it changes lora_unet_input_blocks_1, which", {"lora_unet_input_blocks_1.lora_down.weight": one})
    refuse(
        "it changes transformer.x, which",
        {"transformer.x.lora_A.weight": one, "transformer.x.lora_B.weight": one.clone()},
    )
    refuse("is no plain LoRA .* of the kind hada", {"lora_unet_mid_block.hada_w1_a": one})
    refuse("which is no part of a LoRA", {"conv_in.weight": one})
    refuse("lacks one of the two matrices", {f"{module}.lora_A.weight": torch.ones(4, 32)})
    with pytest.raises(UserError, match=r"is no \.safetensors file"):
        load_lora(tmp_path / "lora.pt", narrow)
    with pytest.raises(UserError, match="exists already"):
        save_lora({}, path)
    small = narrow_pipeline(1)
    quantize(small.unet, "int8")
    with pytest.raises(UserError, match="quantized weights take no LoRA"):
        merge_lora(small, _lora(narrow, {module: (4, 4.0)}))


def test_the_command_merges_and_changes_the_layout(narrow, tmp_path):
    lora = _lora(narrow, MODULES)
    folder = save_pipeline(narrow, tmp_path / "narrow")
    path = save_lora(lora, tmp_path / "lora.safetensors")
    kohya = tmp_path / "kohya.safetensors"
    assert convert.main([str(path), str(kohya), "--model", str(folder), "--layout", "kohya"]) == 0
    assert f"lora_unet_{ATTENTION.replace('.', '_')}_attn1_to_q.alpha" in load_file(kohya)
    merged = tmp_path / "merged"
    assert convert.main([str(folder), str(merged), "--lora", str(kohya), "--lora-scale", "2"]) == 0
    wanted = narrow_pipeline(0)
    merge_lora(wanted, lora, 2.0)
    found = load_pipeline(merged)
    for name, weight in _weights(wanted, lora).items():
        assert torch.equal(_weights(found, lora)[name], weight)
