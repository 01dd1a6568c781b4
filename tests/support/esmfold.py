"""A tiny ESMFold of transformers with random weights."""

from pathlib import Path
from typing import Any

import torch

TRUNK: dict[str, Any] = {
    "num_blocks": 2,
    "sequence_state_dim": 32,
    "pairwise_state_dim": 16,
    "sequence_head_width": 8,
    "pairwise_head_width": 8,
    "position_bins": 4,
    "max_recycles": 3,
    "structure_module": {
        "sequence_dim": 24,
        "pairwise_dim": 12,
        "ipa_dim": 4,
        "resnet_dim": 16,
        "num_heads_ipa": 4,
        "num_qk_points": 2,
        "num_v_points": 3,
        "num_blocks": 2,
    },
}


def theirs(seed: int = 0, **folding: Any):
    """transformers' model, no parameter of which is 0: what begins as 0 in training would hide what follows it."""
    from transformers import EsmConfig, EsmForProteinFolding

    config = EsmConfig(
        vocab_size=33,
        mask_token_id=32,
        pad_token_id=1,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        layer_norm_eps=1e-5,
        position_embedding_type="rotary",
        token_dropout=True,
        emb_layer_norm_before=False,
        is_folding_model=True,
        esmfold_config={"fp16_esm": False, "lddt_head_hid_dim": 16, "trunk": TRUNK} | folding,
    )
    model = EsmForProteinFolding(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name.lower() and name.endswith("weight")
            parameter.copy_(noise / noise.shape[1] ** 0.5 if noise.ndim == 2 else 0.1 * noise + is_norm)
    return model


def save(folder: Path, seed: int = 0) -> Path:
    """A folder as transformers writes it."""
    theirs(seed).save_pretrained(folder)
    return folder
