"""Against transformers: the same logits and gradients from the same folder, both ways, for families without experts."""

import json
import math
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core import weights
from core.config import UserError
from core.layout import layout_of, local
from core.mesh import MeshConfig, build_mesh
from core.models import Decoder, DecoderConfig, RopeScaling, load_pretrained, load_weights, save_pretrained
from core.models.families import FAMILIES as every
from core.models.hf_config import config_from_hf, config_to_hf
from core.models.name_table import hf_to_ours
from core.models.plan import replicated_plan
from core.parallel.plan import apply_plan
from core.runtime import pretended

FAMILIES = ("gpt2", "opt", "bloom", "llama", "mistral", "gemma3_text", "qwen3", "phi3", "gpt_neox")
GEMMA3 = {"norm": "rms_norm_from_one", "qk_norm": True, "out_norms": True, "scaled_embedding": True}
few = settings(max_examples=20, deadline=None, derandomize=True, database=None)


def scaling(pick, family, size):
    """One of the kinds of a family, in texts of 11 tokens; of pairs as many as turn `size` features."""
    length, pairs = pick(8, 16), size // 2
    kinds = {
        "llama3": RopeScaling(4.0, original_max_length=length),
        "linear": RopeScaling(3.0, kind="linear"),
        "dynamic": RopeScaling(3.0, kind="dynamic"),
        "yarn": RopeScaling(4.0, original_max_length=length, kind="yarn", beta_fast=2.0, truncate=pick(True, False)),
        "longrope": RopeScaling(
            original_max_length=length,
            kind="longrope",
            short_factor=tuple(1.5 + n for n in range(pairs)),
            long_factor=tuple(2.5 + 3 * n for n in range(pairs)),
        ),
    }
    known = [kinds[kind] for kind in every[family].rope_kinds.values() if size > 2 or kind != "dynamic"]
    return pick(None, *known)


@st.composite
def configs(draw, family):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    num_heads, head = pick(1, 2, 3, 5, 6), pick(2, 4, 8)
    dim = num_heads * head
    shared = {
        "family": family, "vocab_size": pick(7, 61, 97), "dim": dim, "num_layers": pick(1, 2), "num_heads": num_heads,
        "ffn_dim": 4 * dim, "max_length": 24, "tied_head": pick(True, False),
    }  # fmt: skip
    if family == "gpt2":
        return DecoderConfig(
            **shared | {"ffn_dim": pick(12, 4 * dim)}, activation=pick("gelu", "gelu_tanh", "relu", "silu")
        )
    if family == "opt":
        norm_first, bias = pick(True, False), pick(True, False)
        return DecoderConfig(
            **shared | {"ffn_dim": pick(12, 4 * dim)}, position_offset=2, activation=pick("relu", "gelu"),
            attention_bias=bias, mlp_bias=bias, norm_affine=pick(True, False), norm_first=norm_first,
            final_norm=norm_first and pick(True, False), embed_dim=pick(None, dim // 2),
        )  # fmt: skip
    if family == "bloom":
        return DecoderConfig(**shared, positions="alibi", embedding_norm=True, residual_after_norm=pick(True, False))
    shared["max_length"] = pick(8, 24)  # dynamic stretches what is longer
    share = pick(*[share for share in (0.25, 0.5, 1.0) if head * share % 2 == 0])
    if family == "gpt_neox":
        return DecoderConfig(
            **shared | {"ffn_dim": pick(12, 4 * dim)}, positions="rotary", activation=pick("gelu", "gelu_tanh"),
            attention_bias=pick(True, False), parallel_residual=pick(True, False), rotary_share=share,
            rope_theta=pick(100.0, 10_000.0), rope_scaling=scaling(pick, family, int(head * share)),
        )  # fmt: skip
    num_kv_heads = pick(*[n for n in range(1, num_heads + 1) if num_heads % n == 0])
    own = pick(None, 2 * head) if family != "phi3" else None
    share = share if family == "phi3" else 1.0
    bias = (True, False) if family in ("llama", "qwen3", "gemma3_text") else (False,)
    mlp_bias = bias if family == "llama" else (False,)
    some = (None, 1, 4, 11, 30)
    windows = {"mistral": some, "qwen3": some, "phi3": some, "gemma3_text": (1, 3, 4, 30)}.get(family, (None,))
    window = pick(*windows)
    if family in ("qwen3", "gemma3_text") and window is not None:
        shared["full_layers"] = pick((), (0,))
    if family == "gemma3_text":
        shared |= GEMMA3 | {"query_scalar": pick(5, 8)}
        shared["local_rope_theta"] = pick(10.0, 1e4)
    return DecoderConfig(
        num_kv_heads=None if num_kv_heads == num_heads else num_kv_heads, positions="rotary",
        head_dim=own, rope_theta=pick(100.0, 10_000.0), norm_eps=1e-6, rotary_share=share,
        rope_scaling=scaling(pick, family, int((own or head) * share)),
        activation=pick("swiglu", "geglu_tanh" if family == "gemma3_text" else "geglu"), attention_bias=pick(*bias),
        mlp_bias=pick(*mlp_bias), window=window,
        **{"norm": "rms_norm", "qk_norm": family == "qwen3"} | shared,
    )  # fmt: skip


def random_decoder(config, seed=0):
    """Weights large enough that every term matters: normal 0.3, norms and biases too."""
    model = Decoder(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3, generator=generator)
    return model


def in_transformers(model, folder):
    """The same weights as transformers loads them; nothing may be missing, unexpected or mismatched."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    save_pretrained(model, model.config, folder)
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not any(info.values()), info
    return theirs.eval()


def batch(config, seed=0):
    """ids[3, 11] and a mask with left padding of 0, 2 and 10 tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab_size, (3, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    mask[2, :10] = 0
    return ids, mask


def relative_error(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def widen_frequencies(theirs, rope, layer_type):
    """Those that `rope` describes, of all layers or of a type of them, made anew in fp64."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config, rotary = theirs.config, theirs.base_model.rotary_emb
    prefix, of_type = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
    if rope["rope_type"] == "default":
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = int(head * rope.get("partial_rotary_factor", 1.0))
        frequency = rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float64) / -size)
    else:
        frequency = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, **of_type)[0]
        assert frequency.dtype == torch.float64
    setattr(rotary, f"{prefix}inv_freq", frequency)
    setattr(rotary, f"{prefix}original_inv_freq", frequency.clone())
    setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)
    setattr(rotary, f"{prefix}long_inv_freq", None)


@contextmanager
def casts_lifted(theirs):
    """transformers computes some things in fp32 whatever the model's dtype; inside, they are computed in fp64.

    BLOOM: softmax, ALiBi's slopes, and a constant of its gelu that has eight digits. Llama: norms and rotary angles,
    whose stretching is made of fp32 numbers in several ways.
    """
    from transformers.models.bloom import modeling_bloom

    softmax, to = F.softmax, torch.Tensor.to

    def wide_to(x, *args, **kwargs):
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        return to(x, *args, **{k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()})

    def wide_made(make, *args, dtype=None, **kwargs):
        return make(*args, dtype=torch.float64 if dtype is torch.float32 else dtype, **kwargs)

    def wide_slopes(num_heads, device=None):
        n = 2 ** math.floor(math.log2(num_heads))
        powers = [(n, i) for i in range(1, n + 1)] + [(2 * n, i) for i in range(1, 2 * (num_heads - n) + 1, 2)]
        return torch.tensor([2.0 ** (-8 * i / m) for m, i in powers], dtype=torch.float64)

    def wide_alibi(mask, num_heads, dtype):
        places = ((mask.cumsum(-1) - 1) * mask)[:, None, :]
        return (wide_slopes(num_heads)[..., None] * places).reshape(-1, 1, mask.shape[1]).to(dtype)

    with ExitStack() as stack:
        patch = lambda *args: stack.enter_context(mock.patch.object(*args))  # noqa: E731
        if theirs.config.model_type == "bloom":
            patch(F, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
            patch(modeling_bloom, "build_alibi_tensor", wide_alibi)
            if hasattr(modeling_bloom, "_get_alibi_slopes"):  # later ones ask for the slopes alone, too
                patch(modeling_bloom, "_get_alibi_slopes", wide_slopes)
            patch(modeling_bloom.BloomGelu, "forward", lambda self, x: F.gelu(x, approximate="tanh"))
        if (rope := getattr(theirs.config, "rope_parameters", None)) is not None:
            patch(torch.Tensor, "to", wide_to)
            patch(torch.Tensor, "float", lambda x: to(x, torch.float64))
            for make in ("arange", "tensor"):
                patch(torch, make, partial(wide_made, getattr(torch, make)))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
            for layer_type in getattr(theirs.base_model.rotary_emb, "layer_types", [None]):
                widen_frequencies(theirs, rope if layer_type is None else rope[layer_type], layer_type)
        yield


def check_logits(config, folder, seed):
    ours = random_decoder(config, seed)
    theirs = in_transformers(ours, folder)
    ids, mask = batch(config, seed)
    # With their casts to fp32 a Mistral of width 4 that was drawn differs by 1.2e-6, a Qwen3 that norms heads of two
    # features by 1.1e-5; without them all are within 1e-10.
    wide = {"gpt2": 1e-10, "opt": 1e-10, "bloom": 1e-6, "qwen3": 1e-4, "gemma3_text": 1e-4}
    bound = wide.get(config.family, 1e-5)
    with torch.no_grad():
        plain, padded = ours(ids), ours(ids, mask)[mask.bool()]
        assert relative_error(plain, theirs(ids).logits) < bound
        if config.family != "bloom":  # theirs in fp64 is nan: the mask's lowest fp64 overflows in its fp32 softmax
            assert relative_error(padded, theirs(ids, attention_mask=mask).logits[mask.bool()]) < bound
        with casts_lifted(theirs):
            assert relative_error(plain, theirs(ids).logits) < 1e-10
            assert relative_error(padded, theirs(ids, attention_mask=mask).logits[mask.bool()]) < 1e-10


@few
@given(config=configs("gpt2"), seed=st.integers(0, 99))
def test_gpt2_logits(config, seed, tmp_path_factory):
    check_logits(config, tmp_path_factory.mktemp("hf"), seed)


@few
@given(config=configs("opt"), seed=st.integers(0, 99))
def test_opt_logits(config, seed, tmp_path_factory):
    check_logits(config, tmp_path_factory.mktemp("hf"), seed)


@few
@given(config=configs("bloom"), seed=st.integers(0, 99))
def test_bloom_logits(config, seed, tmp_path_factory):
    check_logits(config, tmp_path_factory.mktemp("hf"), seed)


@few
@given(config=configs("llama"), seed=st.integers(0, 99))
def test_llama_logits(config, seed, tmp_path_factory):
    check_logits(config, tmp_path_factory.mktemp("hf"), seed)


@few
@given(config=configs("mistral"), seed=st.integers(0, 99))
def test_mistral_logits(config, seed, tmp_path_factory):
    check_logits(config, tmp_path_factory.mktemp("hf"), seed)


@settings(few, max_examples=8)
@given(config=configs("gemma3_text"), seed=st.integers(0, 99))
def test_gemma3_logits(config, seed, tmp_path_factory):
    check_logits(config, tmp_path_factory.mktemp("hf"), seed)


def test_gemma3_keys_of_older_files():
    """transformers 4 told of layers by a pattern, and of each kind's rotary positions by keys of their own."""
    config = example("gemma3_text", num_layers=5, full_layers=(1, 3), rope_scaling=RopeScaling(original_max_length=24))
    new = config_to_hf(config)
    old = {key: value for key, value in new.items() if key not in ("layer_types", "rope_parameters")}
    scaling = {k: v for k, v in new["rope_parameters"]["full_attention"].items() if k != "rope_theta"}
    old |= {"sliding_window_pattern": 2, "rope_theta": config.rope_theta, "rope_scaling": scaling}
    assert config_from_hf(old | {"rope_local_base_freq": config.local_rope_theta}) == config
    assert config_from_hf(old).local_rope_theta == 1e4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"sliding_window": None}, "window is None"),
        ({"layer_types": ["full_attention"]}, "layer_types of 1 layers: full_attention; give .* for each of the 2"),
        ({"layer_types": ["full_attention", "chunked"]}, "chunked"),
        ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern=0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters of rope_theta, rope_type"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "rope_type='linear'"),
        ({"hidden_activation": "relu"}, "'relu'"),
    ],
)
def test_what_gemma3_does_not_compute_is_named(change, message):
    with pytest.raises(UserError, match=message) as error:
        config_from_hf(config_to_hf(example("gemma3_text")) | change)
    assert "\n" not in str(error.value)


def test_layers_of_a_file_are_those_of_the_configuration():
    """JSON has lists alone; a run's folder is read back with them."""
    assert replace(example("gemma3_text"), full_layers=[1]) == example("gemma3_text")
    assert replace(example("gpt2"), full_layers=[]) == example("gpt2")


def test_gemma3_stretches_no_layer_with_a_window():
    with pytest.raises(UserError, match=r"rope_scaling stretches no .*, so give --model\.local-rope-theta"):
        example("gemma3_text", local_rope_theta=None, rope_scaling=RopeScaling())


@few
@given(config=configs("qwen3"), seed=st.integers(0, 99))
def test_qwen3_logits(config, seed, tmp_path_factory):
    check_logits(config, tmp_path_factory.mktemp("hf"), seed)


@few
@given(config=configs("phi3"), seed=st.integers(0, 99))
def test_phi3_logits(config, seed, tmp_path_factory):
    check_logits(config, tmp_path_factory.mktemp("hf"), seed)


@few
@given(config=configs("gpt_neox"), seed=st.integers(0, 99))
def test_gpt_neox_logits(config, seed, tmp_path_factory):
    check_logits(config, tmp_path_factory.mktemp("hf"), seed)


def test_qwen3_windows():
    """They are where the keys say so: in layers from max_window_layers on, or in those that layer_types names."""
    from transformers import Qwen3Config

    written = config_to_hf(example("qwen3"))
    plain, full, local = config_from_hf(written), "full_attention", "sliding_attention"
    content = {key: value for key, value in written.items() if key not in ("layer_types", "sliding_window")}
    on = content | {"use_sliding_window": True, "max_window_layers": 0}
    for case, window, full_layers in (
        (written, None, ()),
        (content | {"sliding_window": 3, "max_window_layers": 0}, None, ()),
        (on, 4096, ()),
        (on | {"sliding_window": None}, None, ()),
        (on | {"sliding_window": 5, "max_window_layers": 1}, 5, (0,)),
        (on | {"sliding_window": 5, "max_window_layers": 2}, 5, (0, 1)),
        (on | {"sliding_window": 5, "layer_types": [local, full]}, 5, (1,)),
    ):
        ours, theirs = config_from_hf(case), Qwen3Config.from_dict(case)
        assert ours == replace(plain, window=window, full_layers=full_layers)
        of_layers = [theirs.sliding_window if kind == local else None for kind in theirs.layer_types]
        assert [ours.layer_window(n) for n in range(2)] == of_layers
        assert config_from_hf(config_to_hf(ours)) == ours
    for types, why in (
        ([full, local], "layer_types with sliding_attention and no window"),
        ([full, "chunked_attention"], "layer_types of 2 layers: chunked_attention, full_attention"),
        ([full], "layer_types of 1 layers"),
    ):
        with pytest.raises(UserError, match=why):
            config_from_hf(content | {"layer_types": types})


def example(family, **changes):
    """One small configuration of a family with three heads, two layers and an odd vocabulary."""
    shared = {
        "family": family,
        "vocab_size": 61,
        "dim": 24,
        "num_layers": 2,
        "num_heads": 3,
        "ffn_dim": 96,
        "max_length": 24,
    }
    rotary = {"positions": "rotary", "norm": "rms_norm", "activation": "swiglu", "num_kv_heads": 1}
    plain = {"attention_bias": False, "mlp_bias": False}
    neox = {"positions": "rotary", "rotary_share": 0.5, "activation": "gelu", "parallel_residual": True}
    return {
        "gpt2": lambda: DecoderConfig(**shared | changes),
        "opt": lambda: DecoderConfig(**shared | {"position_offset": 2, "activation": "relu"} | changes),
        "bloom": lambda: DecoderConfig(**shared | {"positions": "alibi", "embedding_norm": True} | changes),
        "llama": lambda: DecoderConfig(**shared | rotary | changes),
        "mistral": lambda: DecoderConfig(**shared | rotary | plain | {"window": 4} | changes),
        "gemma3_text": lambda: DecoderConfig(
            **shared
            | rotary
            | plain
            | GEMMA3
            | {"activation": "geglu_tanh", "window": 4, "full_layers": (1,)}
            | {"local_rope_theta": 100.0, "query_scalar": 6}
            | changes
        ),
        "qwen3": lambda: DecoderConfig(**shared | rotary | plain | {"head_dim": 12, "qk_norm": True} | changes),
        "phi3": lambda: DecoderConfig(**shared | rotary | plain | {"rotary_share": 0.75} | changes),
        "gpt_neox": lambda: DecoderConfig(**shared | neox | changes),
    }[family]()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family, tmp_path):
    config = example(family)
    ours = random_decoder(config)
    theirs = in_transformers(ours, tmp_path)
    ids, mask = batch(config)
    targets = torch.randint(0, config.vocab_size, ids.shape).masked_fill(mask == 0, -100)
    loss = ours(ids, mask, targets=targets)
    loss.backward()
    with casts_lifted(theirs):
        their_loss = F.cross_entropy(
            theirs(ids, attention_mask=mask).logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        their_loss.backward()
    assert abs(loss.item() / their_loss.item() - 1) < 1e-12
    names = every[family].names
    their_grads = {names.full_name(name): parameter.grad for name, parameter in theirs.named_parameters()}
    parameters = dict(ours.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in parameters.values())
    for entry in hf_to_ours(config):
        error = (parameters[entry.name].grad - entry.read(their_grads)).abs().max() / largest
        assert error < 1e-10, (entry.name, error)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_is_exact(family, tied, tmp_path):
    """Ours, sharded on disk, read back; and again from what transformers itself saves."""
    config = example(family, tied_head=tied)
    ours = random_decoder(config)
    save_pretrained(ours, config, tmp_path / "ours", max_shard_bytes=10_000)
    assert (tmp_path / "ours" / "model.safetensors.index.json").is_file()
    in_transformers(ours, tmp_path / "once").save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    for folder in ("ours", "theirs"):
        back = load_pretrained(tmp_path / folder)
        assert back.config == config
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), back.parameters(), strict=True))
        assert back.embedding.tokens.weight.dtype == torch.float64
        assert (back.head.weight is back.embedding.tokens.weight) is tied


@few
@given(data=st.data())
def test_configuration_round_trip(data):
    config = data.draw(configs(data.draw(st.sampled_from(FAMILIES))))
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


def test_table_reads_any_box():
    """Each rank reads its part alone: a row range that cuts through heads, and a column range."""
    config = example("gpt2")
    entry = next(e for e in hf_to_ours(config) if e.name == "blocks.1.attention.qkv.weight")
    whole = torch.randn(entry.shape)
    theirs = entry.write(whole)
    assert list(theirs) == ["transformer.h.1.attn.c_attn.weight"]
    for rows in (slice(0, 72), slice(5, 41), slice(70, 72), slice(72, 72)):
        for columns in (slice(0, 24), slice(3, 9)):
            assert torch.equal(entry.read(theirs, (rows, columns)), whole[rows, columns])


def rewritten(folder, change):
    """Change the tensors of a folder's single file."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "prefix", "instead"),
    [
        ("gpt2", "transformer.", ""),
        ("opt", "model.decoder.", "decoder."),
        ("bloom", "transformer.", ""),
        ("llama", "model.", ""),
        ("mistral", "model.", ""),
        ("gemma3_text", "model.", ""),
        ("qwen3", "model.", ""),
        ("phi3", "model.", ""),
        ("gpt_neox", "gpt_neox.", ""),
    ],
)
def test_files_without_the_prefix(family, prefix, instead, tmp_path):
    """As the first releases are: names of the bare model, buffers of old versions, a pickle of tensors."""
    config = example(family)
    ours = random_decoder(config)
    save_pretrained(ours, config, tmp_path)
    bare = {
        instead + key.removeprefix(prefix): value for key, value in load_file(tmp_path / "model.safetensors").items()
    }
    if family == "gpt2":
        bare |= {"h.0.attn.bias": torch.ones(1), "h.1.attn.masked_bias": torch.ones(1)}
    (tmp_path / "model.safetensors").unlink()
    torch.save(bare, tmp_path / "pytorch_model.bin")
    back = load_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(a.float(), b) for a, b in zip(ours.parameters(), back.parameters(), strict=True))


def test_load_into_a_model(tmp_path):
    config = example("opt", embed_dim=6)
    ours, other = random_decoder(config, 0), random_decoder(config, 1)
    save_pretrained(ours.named_parameters(), config, tmp_path)
    load_weights(other, config, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), other.parameters(), strict=True))


class TakenFrom(TorchDispatchMode):
    """Bytes of a file that operators other than views are given."""

    def __init__(self, opened):
        super().__init__()
        self._open, self._mapped, self.bytes = opened, set(), 0

    def open(self, *args):
        """In place of `core.weights._open`."""
        tensors = self._open(*args)
        self._mapped |= {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
        return tensors

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not any(map(self._of_file, tree_leaves(result))):
            self.bytes += sum(x.nbytes for x in tree_leaves((args, kwargs)) if self._of_file(x))
        return result

    def _of_file(self, x):
        return isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() in self._mapped


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_the_bytes_that_it_holds(family, rank, tmp_path, monkeypatch):
    """Of matrices that are stacked in one, and of transposed ones, too."""
    grouped = example(family).num_kv_heads is not None
    config = example(family, dim=32, num_heads=4, ffn_dim=128, **({"num_kv_heads": 2} if grouped else {}))
    whole = random_decoder(config)
    save_pretrained(whole, config, tmp_path)
    with pretended(2, rank):
        axis = build_mesh(MeshConfig(tp=2).resolve(2, 0), "cpu")["tp"]
        with torch.device("meta"):
            own = Decoder(config).double()
        apply_plan(own, replicated_plan(config), axis)
        own.to_empty(device="cpu")
        with TakenFrom(weights._open) as taken:
            monkeypatch.setattr(weights, "_open", taken.open)
            load_weights(own, config, tmp_path)
        for name, parameter in own.named_parameters():
            assert torch.equal(local(parameter), layout_of(parameter).local(whole.get_parameter(name))), name
        held = sum(local(parameter).nbytes for parameter in own.parameters())
    assert taken.bytes == held < 0.6 * sum(parameter.nbytes for parameter in whole.parameters())


def test_dtype_of_export(tmp_path):
    config = example("llama")
    save_pretrained(random_decoder(config), config, tmp_path, torch.bfloat16, special_ids={"eos_token_id": 3})
    assert load_pretrained(tmp_path).head.weight.dtype == torch.bfloat16
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["dtype"] == "bfloat16"
    assert content["eos_token_id"] == 3
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {k: v for k, v in t.items() if "c_fc.bias" not in k},
            r"lacks transformer\.h\.0\.mlp\.c_fc\.bias, tran",
        ),
        (lambda t: t | {"transformer.h.0.lora.weight": torch.ones(1)}, r"holds .*transformer\.h\.0\.lora\.weight"),
        (lambda t: t | {"wte.weight": torch.ones(1)}, r"holds .*wte\.weight"),
        (lambda t: t | {"transformer.wte.weight": torch.ones(61, 25)}, r"wte\.weight is \[61, 25\].*\[61, 24\]"),
        (lambda t: t | {"lm_head.weight": torch.ones(61, 24)}, "lm_head.weight differs from the embedding"),
    ],
)
def test_wrong_tensors_are_named(change, message, tmp_path):
    config = example("gpt2")
    save_pretrained(random_decoder(config), config, tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(UserError, match=message) as error:
        load_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_foreign_folders(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        load_pretrained(tmp_path)
    for content, message in (
        ("{", "cannot read"),
        ("[]", "not a JSON object"),
        ('{"model_type": "t5"}', "'t5'.*gpt2, opt, bloom, llama"),
        ('{"model_type": "opt"}', "holds no weights"),
        ('{"model_type": "llama", "rope_parameters": {"rope_type": "llama3"}}', "lacks factor, low_freq_factor"),
        (
            json.dumps(config_to_hf(example("gpt2")) | {"scale_attn_by_inverse_layer_idx": True}),
            "scale_attn_by_inverse",
        ),
        (json.dumps(config_to_hf(example("llama")) | {"rope_parameters": {"rope_type": "axial"}}), "axial"),
        (json.dumps(config_to_hf(example("gpt2"))), "holds no weights"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(UserError, match=message) as error:
            load_pretrained(tmp_path)
        assert "\n" not in str(error.value)


def test_positions_of_old_llama_files():
    """transformers 4 wrote rope_theta and rope_scaling."""
    new = config_to_hf(example("llama", rope_theta=5e5, rope_scaling=RopeScaling(factor=32.0)))
    rope = new.pop("rope_parameters")
    old = new | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert config_from_hf(old) == example("llama", rope_theta=5e5, rope_scaling=RopeScaling(factor=32.0))
