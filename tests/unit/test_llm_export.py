"""The Hugging Face folder of a run: in the format in which the run computed, or in the one that is asked for."""

import json
from pathlib import Path

import pytest
import torch

from apps.llm import export, pretrain
from core.checkpoint import inspect
from core.config import UserError
from core.models import load_pretrained
from core.train import checkpoint_path

OPTIONS = (
    "--device cpu --steps 1 --data.tokenizer byte --data.global-batch 2 --data.sequence-length 16 --model.dim 16 "
    "--model.num-layers 1 --model.num-heads 2 --model.ffn-dim 16 --data.heldout-fraction 0"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("a text of some tokens. " * 20)
    return path


def run(text: Path, out: Path, *options: str) -> Path:
    assert pretrain.main([*OPTIONS.split(), "--data.path", str(text), "--out", str(out), *options]) == 0
    return out


def formats(folder: Path) -> tuple[torch.dtype, set[str]]:
    described = json.loads((folder / "config.json").read_text())
    dtypes = {parameter.dtype for parameter in load_pretrained(folder).parameters()}
    assert len(dtypes) == 1
    return dtypes.pop(), {described["dtype"], described["torch_dtype"]}


@pytest.mark.parametrize(
    ("precision", "asked", "written"),
    [("bf16", None, "bfloat16"), ("fp32", None, "float32"), ("fp64", None, "float32"), ("bf16", "fp32", "float32")],
)
def test_a_run_is_exported_in_its_format(text, tmp_path, precision, asked, written):
    out = run(text, tmp_path / "run", "--precision", precision, *(() if asked is None else ("--hf-dtype", asked)))
    assert formats(out / "hf") == (getattr(torch, written), {written})
    masters = [t for name, t in inspect(checkpoint_path(out)).tensors.items() if name.startswith("model/")]
    assert {t.dtype for t in masters} == {torch.float64 if precision == "fp64" else torch.float32}
    assert json.loads((out / "hf" / "config.json").read_text())["eos_token_id"] == 256


def test_export_takes_the_format_as_an_option(text, tmp_path):
    """The masters are there still: what is exported in fp32 has more digits than the run's own folder."""
    out = run(text, tmp_path / "run", "--precision", "bf16")
    for dtype, written in ((None, torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)):
        options = () if dtype is None else ("--dtype", dtype)
        assert export.main(["--model", str(out), "--out", str(tmp_path / str(dtype)), *options]) == 0
        assert formats(tmp_path / str(dtype))[0] == written
    whole, half = (load_pretrained(tmp_path / name).head.weight.float() for name in ("fp32", "None"))
    assert torch.equal(whole.bfloat16().float(), half)
    assert not torch.equal(whole, half)


def test_a_format_without_a_folder_is_refused(text, tmp_path):
    with pytest.raises(UserError, match="hf_dtype=bf16 without a folder"):
        run(text, tmp_path / "run", "--no-hf", "--hf-dtype", "bf16")
