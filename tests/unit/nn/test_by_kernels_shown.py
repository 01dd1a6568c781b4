"""Kernels that a GPU takes by itself are those that a committed table shows right and not slower there."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from apps.llm.config import PretrainConfig
from apps.llm.pretrain import kernels
from core.kernels import shown_right
from core.kernels.shown_right import shown
from core.models import SHAPES, Decoder
from core.nn.attention import attend, rotate_both
from core.nn.by_kernels import FAMILIES, attend_by_kernel, by_kernels
from core.optim import OptimConfig
from tests.support.fake_gpu import fake_gpu, on_fake_gpu


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shown_right, "chip", lambda: "sm_90")
    return tmp_path


def write(folder: Path, **families: tuple[bool, float]) -> None:
    table = {name: {"right": right, "speedup": speedup} for name, (right, speedup) in families.items()}
    (folder / "sm_90.json").write_text(json.dumps({"device": "some GPU", "families": table}))


def test_only_what_is_right_and_not_slower(gpu: Path) -> None:
    assert shown(gpu) == frozenset()
    write(gpu, layer_norm=(True, 1.2), rope=(True, 0.9), swiglu=(False, 3.0), attention=(True, 1.0))
    assert shown(gpu) == {"layer_norm", "attention"}


def test_without_a_gpu_none(tmp_path: Path) -> None:
    write(tmp_path, layer_norm=(True, 2.0))
    with patch.object(torch.cuda, "is_available", lambda: False):
        assert shown(tmp_path) == frozenset()


def test_what_is_no_table_is_named(gpu: Path) -> None:
    (gpu / "sm_90.json").write_text('{"families": {"rope": true}}')
    with pytest.raises(ValueError, match=r"sm_90.json is no table of what kernels have shown"):
        shown(gpu)


def test_the_default_of_training_follows_the_table(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apps.llm.pretrain.shown", lambda: shown(gpu))
    write(gpu, attention=(True, 0.6), layer_norm=(True, 1.1), rope=(True, 1.0), swiglu=(False, 2.0))

    def taken(device: str, **options: Any) -> set[str]:
        runtime: Any = SimpleNamespace(device=torch.device(device), leads=True)
        plan = kernels(PretrainConfig(**options), runtime)
        return set(plan[""].keywords["families"]) if plan else set()  # pyright: ignore[reportFunctionMemberAccess]

    assert taken("cuda") == {"layer_norm", "rope"}
    assert taken("cuda", kernels=True) == taken("cuda", kernels=True, shown_kernels=False) == set(FAMILIES)
    assert taken("cuda", optim=OptimConfig("hessian_free")) == set()
    assert taken("cuda", shown_kernels=False) == taken("cpu") == taken("cpu", kernels=True) == set()


def test_a_model_takes_the_families_that_are_named() -> None:
    model = by_kernels(Decoder(SHAPES["debug"]), ["layer_norm", "attention"])  # attention takes both of its families
    block = model.blocks[0]  # pyright: ignore[reportIndexIssue]
    assert block.attention.attend is attend
    assert block.attention.turn is rotate_both
    assert "forward" in vars(next(module for module in block.modules() if isinstance(module, nn.LayerNorm)))
    by_kernels(model, ["attention", "attention_varlen"])
    assert block.attention.attend is attend_by_kernel


def test_group_norms_of_any_model_take_their_kernel() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
    by_kernels(model, [])
    assert "forward" not in vars(model[1])
    by_kernels(model, ["group_norm"])
    x = torch.randn(1, 3, 6, 6)
    expected = nn.functional.group_norm(model[0](x), 2, model[1].weight, model[1].bias)
    assert torch.equal(model[1](model[0](x)), expected)
    with fake_gpu() as counted:
        on_fake_gpu(model)
        model[1](torch.empty(2, 8, 4, 4, device="cuda"))
    assert counted.counts["group_norm_forward"] == 1
