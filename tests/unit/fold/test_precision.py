"""What nobody names: bf16 on a GPU, and how far that is from exact on the golden run; products in fp32."""

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from apps.fold.golden import outputs_of
from apps.fold.plan import PlanConfig
from apps.fold.precision import chosen_precision
from apps.fold.predict import PredictConfig, resolved
from core.config import UserError
from core.precision import set_matmul_precision

GOLDEN = Path("tests/data/fold/mini_model_1_ptm")


def plddt_of(logits: np.ndarray) -> torch.Tensor:
    """[N], of 100: bins of 2."""
    return torch.tensor(logits).softmax(-1) @ torch.arange(1.0, 100.0, 2.0, dtype=torch.float64)


def rmsd(found: np.ndarray, wanted: np.ndarray) -> float:
    """Å between [N, 3], superposed."""
    found, wanted = found - found.mean(0), wanted - wanted.mean(0)
    u, _, v = np.linalg.svd(found.T @ wanted)
    turn = u @ np.diag([1.0, 1.0, np.sign(np.linalg.det(u @ v))]) @ v
    return float(np.sqrt(((found @ turn - wanted) ** 2).sum(-1).mean()))


def test_bf16_stays_within_what_the_documentation_says() -> None:
    """docs/fold.md: 1 of pLDDT's 100 for each residue, and 0.5 Å of all CA; measured 0.22 and 0.20 Å."""
    exact, rounded = (outputs_of(GOLDEN, dtype) for dtype in (torch.float64, torch.bfloat16))
    logits, places = "predicted_lddt/logits", "structure_module/final_atom_positions"
    plddt = [plddt_of(run[logits]) for run in (exact, rounded)]  # pyright: ignore[reportArgumentType]
    assert 0.01 < float((plddt[0] - plddt[1]).abs().max()) < 1.0
    ca = [run[places][:, 1] for run in (rounded, exact)]  # pyright: ignore[reportOptionalSubscript]
    assert 0.01 < rmsd(*ca) < 0.5


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
    assert PlanConfig(device="cuda").computing == "bf16"
    assert PlanConfig(device="cpu").computing == "fp32"
    assert PlanConfig(device="cuda", model=str(tmp_path)).computing == "fp32"


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
