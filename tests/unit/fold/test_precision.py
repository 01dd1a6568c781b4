"""The format of predictions where none is named, bf16 on a GPU, and how far that is from exact; products in fp32."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from apps.fold.golden import outputs_of
from apps.fold.model.heads import plddt, predicted_tm_score
from apps.fold.plan import FoldPlanConfig
from apps.fold.precision import chosen_precision
from apps.fold.predict import PredictConfig, resolved
from apps.fold.score import superpose
from core.config import UserError
from core.precision import set_matmul_precision
from tests.support.fold import GOLDEN


def test_bf16_stays_within_what_the_documentation_says() -> None:
    """docs/fold.md: 1 of pLDDT's 100 for each residue, and 0.5 Å of all CA; measured 0.22 and 0.20 Å."""
    exact, rounded = (outputs_of(GOLDEN, dtype) for dtype in (torch.float64, torch.bfloat16))
    logits, places = "predicted_lddt/logits", "structure_module/final_atom_positions"
    wanted, found = (plddt(torch.tensor(run[logits])) for run in (exact, rounded))
    assert 0.01 < float((found - wanted).abs().max()) < 1.0
    ca = [run[places][:, 1] for run in (rounded, exact)]  # pyright: ignore[reportOptionalSubscript]
    _, rmsd = superpose(*ca)
    assert 0.01 < rmsd < 0.5


def test_what_auto_is() -> None:
    assert chosen_precision("auto", "cuda:1", measured=True) == "bf16"
    assert chosen_precision("auto", "cuda", measured=False) == "fp32"
    assert chosen_precision("auto", "cpu", measured=True) == "fp32"
    assert chosen_precision("fp16", "cuda", measured=True) == "fp16"


def test_prediction_and_plan_choose_alike(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "esm"}')
    with patch("apps.fold.predict.device_kind", lambda _: "cuda"):
        assert resolved(PredictConfig()).computing == "bf16"
        assert resolved(PredictConfig(model=(tmp_path,))).computing == "fp32"
        assert resolved(PredictConfig(precision="fp64")).computing == "fp64"
    assert resolved(PredictConfig(device="cpu")).computing == "fp32"
    assert FoldPlanConfig(device="cuda").computing == "bf16"
    assert FoldPlanConfig(device="cpu").computing == "fp32"
    assert FoldPlanConfig(device="cuda", model=str(tmp_path)).computing == "fp32"


def test_products_in_fp32_are_as_asked() -> None:
    before = torch.get_float32_matmul_precision()
    assert PredictConfig().matmul_precision == before == "highest"
    try:
        set_matmul_precision("high")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        set_matmul_precision("highest")
    with pytest.raises(UserError, match="matmul_precision=tf32; give highest, high or medium"):
        set_matmul_precision("tf32")  # pyright: ignore[reportArgumentType]


def test_ptm_is_of_the_exact_length_in_16_bits() -> None:
    """Of 250 residues d0 would be 5.875 and not 5.852 Å."""
    logits = torch.randn(1, 250, 250, 64, generator=torch.Generator().manual_seed(0)) - 0.35 * torch.arange(64)
    exact, rounded = (predicted_tm_score(logits, torch.ones(1, 250, dtype=t)) for t in (torch.float32, torch.bfloat16))
    assert torch.equal(exact, rounded)
