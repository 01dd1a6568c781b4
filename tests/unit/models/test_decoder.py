import copy
from dataclasses import replace

import pytest
import torch

from core.config import UserError
from core.models import SHAPES, Decoder, DecoderConfig, initialise
from core.models.decoder import init_rows, init_std, rotary_angles
from core.nn.attention import StepContext

DEBUG = replace(SHAPES["debug"], num_layers=2)
LLAMA = DecoderConfig(
    vocab_size=41, dim=24, num_layers=2, num_heads=6, num_kv_heads=2, ffn_dim=40, positions="rotary", norm="rms_norm",
    activation="swiglu", attention_bias=False, mlp_bias=False, tied_head=False, family="llama",
)  # fmt: skip
BLOOM = DecoderConfig(
    vocab_size=41, dim=24, num_layers=2, num_heads=3, ffn_dim=96, positions="alibi", embedding_norm=True, family="bloom"
)
CONFIGS = {"gpt2": DEBUG, "bloom": BLOOM, "llama": LLAMA}


def built(config, seed=0):
    """Weights ten times GPT-2's, so that what is compared is not lost in the residual."""
    model = Decoder(config).double()
    initialise(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim == 2 else 1)
    return model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 7}, "7 heads do not divide dim 64"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3; it must divide the 8 heads"),
        ({"positions": "rotary"}, "positions is 'rotary'; a model of family gpt2 has 'learned'"),
        ({"activation": "swiglu"}, "activation swiglu in family gpt2"),
        ({"family": "opt", "position_offset": 2, "norm_first": False}, "set final_norm to False"),
        ({"family": "opt", "position_offset": 2, "mlp_bias": False}, "one switch for both"),
        ({"family": "bloom", "positions": "alibi", "embedding_norm": True}, r"4 \* dim = 256"),
    ],
)
def test_impossible_configurations(changes, message):
    with pytest.raises(UserError, match=message) as error:
        replace(DEBUG, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shape", [(257, 64), (1, 3), (5, 70_000), (300_000,), (2500, 3, 20)])
def test_init_of_a_part_is_the_part_of_the_whole(shape):
    whole = init_rows("w", shape, tuple(slice(0, n) for n in shape), 3, 0.5)
    for a, b in ((0, 1), (0, shape[0]), (shape[0] // 3, shape[0] - shape[0] // 4), (shape[0], shape[0])):
        box = (slice(a, b), *(slice(n // 3, n) for n in shape[1:]))
        assert torch.equal(init_rows("w", shape, box, 3, 0.5), whole[box])
    if whole.numel() > 1000:
        assert abs(whole.std() / 0.5 - 1) < 6 / (2 * whole.numel()) ** 0.5
        assert len(whole.flatten()[:200_000].unique()) > 0.9 * min(whole.numel(), 200_000)  # no block repeats another
    assert not torch.equal(whole, init_rows("w", shape, tuple(slice(0, n) for n in shape), 4, 0.5))
    assert not torch.equal(whole, init_rows("v", shape, tuple(slice(0, n) for n in shape), 3, 0.5))


def test_init_scheme():
    model = Decoder(replace(DEBUG, num_layers=8))
    initialise(model, 0)
    block = model.blocks[3]
    assert init_std("blocks.3.mlp.down.weight", model.config) == pytest.approx(0.02 / 4)
    assert init_std("blocks.3.attention.qkv.weight", model.config) == 0.02
    for weight, std in (
        (block.mlp.down.weight, 0.005),
        (block.mlp.up.weight, 0.02),
        (model.embedding.positions.weight, 0.02),
    ):
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.05)
    assert torch.equal(block.mlp_norm.weight, torch.ones(64))
    assert not block.attention.qkv.bias.any()


@pytest.mark.parametrize("family", CONFIGS)
def test_meta_then_filled_is_the_same(family):
    """Built on the meta device, emptied and filled: the same model, its head tied, its slopes right."""
    config = CONFIGS[family]
    model = Decoder(config)
    with torch.device("meta"):
        other = Decoder(config)
    other.to_empty(device="cpu")
    for m in (model, other):
        initialise(m, 5)
    ids = torch.randint(0, config.vocab_size, (2, 9))
    assert (other.head.weight is other.embedding.tokens.weight) is config.tied_head
    assert torch.equal(model(ids), other(ids))
    assert torch.equal(model(ids), copy.deepcopy(model)(ids))


def test_slopes_survive_bf16():
    model = Decoder(BLOOM).to(torch.bfloat16)
    assert model.blocks[0].attention.slopes.dtype == torch.float64
    assert model.blocks[0].attention.slopes.tolist() == [2**-4, 2**-8, 2**-2]


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_documents_are_as_alone(family):
    """Two documents in one row, attention and positions kept apart, give each document's own logits and gradients."""
    config = CONFIGS[family]
    model = built(config)
    a, b = torch.randint(0, config.vocab_size, (1, 5)), torch.randint(0, config.vocab_size, (1, 4))
    packed = torch.cat((a, b), 1)
    documents = torch.tensor([[0] * 5 + [1] * 4])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    logits = model(packed, positions=positions, context=StepContext(documents))
    torch.testing.assert_close(logits[:, :5], model(a), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits[:, 5:], model(b), rtol=1e-12, atol=1e-12)
    assert (model(packed)[:, 5:] - model(b)).abs().max() > 1e-3
    loss = model(packed, positions=positions, context=StepContext(documents), targets=packed)
    torch.testing.assert_close(loss, model(a, targets=a) + model(b, targets=b), rtol=1e-13, atol=0)


@pytest.mark.parametrize("family", CONFIGS)
def test_right_padding_changes_nothing(family):
    config = CONFIGS[family]
    model, ids = built(config), torch.randint(0, config.vocab_size, (2, 8))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    torch.testing.assert_close(model(ids, mask)[1, :5], model(ids[1:, :5])[0], rtol=1e-12, atol=1e-12)
    assert model(ids, mask).isfinite().all()


@pytest.mark.parametrize("family", CONFIGS)
def test_half_precision_is_near(family):
    """bf16 stays within its rounding of fp64, with padding too; ALiBi is not rounded to bf16 (positions beyond 256)."""
    config = replace(CONFIGS[family], max_length=512)
    model = Decoder(config)
    initialise(model, 0)
    ids = torch.randint(0, config.vocab_size, (1, 400))
    exact = copy.deepcopy(model).double()(ids, targets=ids)
    loss = model.to(torch.bfloat16)(ids, torch.ones_like(ids), targets=ids)
    assert loss.dtype == torch.float32
    assert abs(loss.double() / exact - 1) < 2**-9


def test_too_long():
    with pytest.raises(UserError, match=r"129 tokens.*128"):
        Decoder(DEBUG)(torch.zeros(1, 129, dtype=torch.long))


def test_rotary_angles_do_not_depend_on_the_dtype():
    """The angle of a far position is exact although the result is bf16."""
    positions = torch.tensor([[100_003]])
    wide, narrow = (rotary_angles(LLAMA, positions, dtype)[0] for dtype in (torch.float64, torch.bfloat16))
    assert (wide - narrow).abs().max() <= 2**-9
