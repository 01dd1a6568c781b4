"""Mixtral against transformers: the same logits and gradients, both ways; what has no class there is refused."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from core.config import UserError
from core.models import load_pretrained, save_pretrained
from core.models.decoder import DecoderConfig
from core.models.hf_config import config_from_hf, config_to_hf, has_architecture
from core.models.name_table import hf_to_ours
from core.models.shapes import SHAPES
from core.nn.routing import MoEConfig
from tests.unit.models.test_pretrained import batch, example, in_transformers, random_decoder, relative_error


def mixtral(**moe) -> DecoderConfig:
    config = example("llama", ffn_dim=40, attention_bias=False, mlp_bias=False, tied_head=False)
    return replace(config, moe=MoEConfig(**{"num_experts": 5, "experts_per_token": 2, "balance_weight": 0.25} | moe))


@pytest.mark.parametrize("per_token", [2, 4])
def test_logits_and_gradients(per_token: int, tmp_path) -> None:
    config = mixtral(experts_per_token=per_token)
    ours = random_decoder(config)
    theirs = in_transformers(ours, tmp_path)
    theirs.set_experts_implementation("eager")  # torch's grouped product has no fp64
    ids, mask = batch(config)
    targets = torch.randint(0, config.vocab_size, ids.shape).masked_fill(mask == 0, -100)
    logits = theirs(ids, attention_mask=mask).logits
    assert relative_error(ours(ids), theirs(ids).logits.detach()) < 1e-6  # theirs: norms, angles, router in fp32
    assert relative_error(ours(ids, mask)[mask.bool()], logits[mask.bool()].detach()) < 1e-6
    ours.eval()
    ours(ids, mask, targets=targets).backward()
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    E, F2 = config.moe.num_experts, config.ffn_dim
    for n in range(config.num_layers):  # in memory theirs are stacked and fused
        prefix = f"model.layers.{n}"
        fused, down = grads[f"{prefix}.mlp.experts.gate_up_proj"], grads[f"{prefix}.mlp.experts.down_proj"]
        grads[f"{prefix}.block_sparse_moe.gate.weight"] = grads[f"{prefix}.mlp.gate.weight"]
        for e in range(E):
            expert = f"{prefix}.block_sparse_moe.experts.{e}"
            parts = {"w1": fused[e, :F2], "w3": fused[e, F2:], "w2": down[e]}
            grads |= {f"{expert}.{name}.weight": part for name, part in parts.items()}
    parameters = dict(ours.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in parameters.values())
    for entry in hf_to_ours(config):
        error = float((parameters[entry.name].grad - entry.read(grads)).abs().max()) / largest
        assert error < 1e-5, (entry.name, error)


def test_round_trip_is_exact(tmp_path) -> None:
    """Ours, sharded on disk, read back; again from what transformers saves; and any box of it."""
    config = mixtral()
    ours = random_decoder(config)
    save_pretrained(ours, config, tmp_path / "ours", max_shard_bytes=10_000)
    in_transformers(ours, tmp_path / "once").save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        back = load_pretrained(tmp_path / folder)
        assert back.config == config
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), back.parameters(), strict=True))
    entry = next(e for e in hf_to_ours(config) if e.name == "blocks.1.mlp.experts.up.weight")
    whole = torch.randn(entry.shape)
    theirs = entry.write(whole)
    for box in ((slice(1, 3), slice(0, 40), slice(2, 9)), (slice(4, 5), slice(7, 9), slice(0, 24))):
        assert torch.equal(entry.read(theirs, box), whole[box])
    assert entry.read(theirs, (slice(5, 5), slice(0, 40), slice(0, 24))).shape == (0, 40, 24)


def test_published_configuration() -> None:
    from transformers import MixtralConfig

    theirs = MixtralConfig().to_dict() | {"max_position_embeddings": 32768}
    ours = config_from_hf(theirs)
    assert ours == replace(SHAPES["mixtral_8x7b"], moe=MoEConfig(8, experts_per_token=2, balance_weight=0.001))
    assert config_from_hf(config_to_hf(ours)) == ours
    assert ours.num_parameters() == 46_702_792_704
    with pytest.raises(UserError, match="sliding_window=4096"):
        config_from_hf(theirs | {"sliding_window": 4096})


@pytest.mark.parametrize(
    "config",
    [
        mixtral(router="expert_choice"),
        mixtral(every=2),
        replace(mixtral(), mlp_bias=True),
        example("gpt2", moe=MoEConfig(4)),
    ],
)
def test_what_has_no_class_is_refused_before_anything_is_written(config: DecoderConfig, tmp_path) -> None:
    assert not has_architecture(config)
    with pytest.raises(UserError, match="no architecture of these experts") as refusal:
        save_pretrained(random_decoder(config), config, tmp_path / "hf")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "hf").exists()
