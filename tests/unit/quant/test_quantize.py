"""Which weights of a model are quantized, and that the model computes with what they stand for."""

import copy

import pytest
import torch
from torch import Tensor, nn

from core.config import UserError
from core.models import generate
from core.quant import QuantizedWeight, dequantize, quantize, stored_bytes
from tests.unit.quant.models import FAMILIES, UNet, decoder, tokens, unet_inputs

ROUNDING = {"int8": 1e-4, "int4": 1e-5}
"""Of results in fp32. Inputs of 8-bit weights keep 15 bits of their row's largest element; with 8 it would be 1e-2."""


def quantized_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if isinstance(parameter, QuantizedWeight)}


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).abs().max() / wanted.abs().max())


def spread(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).detach().norm() / wanted.detach().norm())


@pytest.mark.parametrize("options", [{"scheme": "int8"}, {"scheme": "int4", "group_size": 32}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_computes_with_what_the_weights_stand_for(family: str, options: dict) -> None:
    model = decoder(family).double()
    plain = dequantize(copy.deepcopy(quantize(model, embeddings=True, head=True, **options)))
    assert not quantized_names(plain)
    ids = tokens()
    wanted = plain(ids)
    assert error(model(ids), wanted) < 1e-10
    assert error(model(ids, targets=ids), plain(ids, targets=ids)) < 1e-10
    assert error(model.float()(ids), wanted) < ROUNDING[options["scheme"]]
    assert torch.equal(generate(model, ids, 5), generate(plain.float(), ids, 5))


def test_layers_by_default_embeddings_and_head_by_option() -> None:
    layers = {
        f"blocks.{n}.{part}.weight" for n in (0, 1) for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    }
    embedded = {"embedding.tokens.weight", "embedding.positions.weight"}
    for options, tied, more in (
        ({}, False, set()),
        ({"embeddings": True}, False, embedded),
        ({"head": True}, False, {"head.weight"}),
        ({"embeddings": True, "head": True}, False, embedded | {"head.weight"}),
        ({}, True, set()),
        ({"head": True}, True, {"embedding.tokens.weight"}),  # one weight, under its first name
        ({"embeddings": True}, True, embedded),
    ):
        model = quantize(decoder(tied_head=tied), "int8", **options)
        assert quantized_names(model) == layers | more
        assert (model.head.weight is model.embedding.tokens.weight) is tied


def test_skip_takes_names_and_patterns_with_all_below() -> None:
    model = quantize(decoder(), "int8", skip=("blocks.0", "*.mlp.up", "out"))
    assert quantized_names(model) == {"blocks.1.attention.qkv.weight", "blocks.1.mlp.down.weight"}
    with pytest.raises(UserError, match="skip='block' matches no module; the model's modules are embedding, blocks"):
        quantize(decoder(), "int8", skip=("block",))


def test_two_calls_mix_schemes() -> None:
    model = quantize(quantize(decoder(), "int4"), "int8", head=True)
    schemes = {
        name: parameter.scheme.name
        for name, parameter in model.named_parameters()
        if isinstance(parameter, QuantizedWeight)
    }
    assert schemes.pop("embedding.tokens.weight") == "int8"
    assert set(schemes.values()) == {"int4"}
    with pytest.raises(UserError, match="is quantized already"):
        quantize(model, "int8", head=True)


def test_a_model_without_layers_is_refused() -> None:
    for model in (nn.LayerNorm(4), nn.ConvTranspose2d(2, 2, 2), nn.Embedding(4, 4)):
        with pytest.raises(UserError, match="has no linear layer or convolution to quantize"):
            quantize(model, "int8")


@pytest.mark.parametrize("scheme", ["int8", "w8a8", "llm.int8", "int4"])
def test_unet(scheme: str) -> None:
    """Every convolution but the transposed one, and the projections of torch's own attention."""
    model, inputs = UNet().eval(), unet_inputs()
    plain = stored_bytes(model)
    wanted = model(*inputs)
    quantize(model, scheme)
    assert quantized_names(model) == {
        "conv_in.weight",
        "time.0.weight",
        "time.2.weight",
        "down.weight",
        "attention.out_proj.weight",
        "conv_out.weight",
    }
    found = model(*inputs)
    assert error(found, wanted) < (0.2 if scheme == "int4" else 0.02)
    if scheme in ("int8", "int4"):
        assert error(found, dequantize(copy.deepcopy(model))(*inputs)) < ROUNDING[scheme]
    assert stored_bytes(model) < plain


def test_torchs_own_transformer_layer() -> None:
    """Its fast path multiplies by raw storage; with quantized weights it must not be taken."""
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    quantize(model, "int8")
    x = torch.randn(2, 5, 32)
    with torch.inference_mode():
        assert error(model(x), dequantize(copy.deepcopy(model))(x)) < ROUNDING["int8"]


def test_transformers_models() -> None:
    """OPT, BLOOM and GPT-2 (whose weights stand as [in, out]), with tied heads and OPT's shifted positions."""
    import transformers

    small = {"vocab_size": 61}
    half = {"word_embed_proj_dim": 16, "do_layer_norm_before": False, "max_position_embeddings": 32}
    configs = (
        transformers.OPTConfig(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2, **half, **small),
        transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=2, **small),
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, **small),
    )
    ids = tokens()
    for config in configs:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
        for scheme in ("int8", "int4"):
            tested = quantize(copy.deepcopy(model), scheme, embeddings=True, head=True)
            weights = {f"{name}.weight" for name in linear if name != "lm_head"}
            assert weights <= quantized_names(tested)
            assert tested.get_output_embeddings().weight is tested.get_input_embeddings().weight
            plain = dequantize(copy.deepcopy(tested))
            with torch.no_grad():
                assert error(tested(ids).logits, plain(ids).logits) < ROUNDING[scheme]
                assert not torch.equal(plain(ids).logits, model(ids).logits)


def test_outliers_in_a_model_break_w8a8_and_not_llm_int8() -> None:
    """The function stays, one scale for a batch ruins it, and what is kept apart costs nothing."""
    from benchmarks.quantization import plant, rounded_inputs

    model, ids = decoder(dim=192, ffn_dim=768).double(), tokens()
    before = model(ids)
    plant(model, factor=100.0, fraction=0.05, seed=0)
    wanted = model(ids)
    assert error(wanted, before) < 1e-10
    model.float()
    models = {scheme: quantize(copy.deepcopy(model), scheme) for scheme in ("int8", "w8a8", "llm.int8")}
    errors = {scheme: spread(tested(ids), wanted) for scheme, tested in models.items()}
    with rounded_inputs(models["int8"]):
        naive = spread(models["int8"](ids), wanted)
    assert errors["llm.int8"] < 1.1 * errors["int8"], errors
    assert naive > errors["w8a8"] > 2 * errors["llm.int8"], (naive, errors)
