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
from tests.support.full_disk import limited_files

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


def test_a_full_disk_behind_the_last_step_is_told_with_what_is_saved(text, tmp_path, monkeypatch):
    """Weights come before the picture, and what is begun goes."""
    reported = []
    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "report", lambda *given: reported.append(given))
        out = run(text, tmp_path / "run")
    begins = r"File too large; the checkpoint of step 1 is saved: "
    elsewhere = f"free space and give --resume, or write elsewhere by megalith llm export --model {out} --out FOLDER"
    with pytest.raises(UserError, match=f"/hf/.*: {begins}{elsewhere}$"), limited_files(1000):
        pretrain.report(*reported[0])
    assert not (out / "hf").exists()
    assert not (out / "loss.png").exists()
    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "export", lambda *_: None)
        picture = "only the picture is missing; free space and give --resume for it"
        with pytest.raises(UserError, match=f"/run/loss.png: {begins}{picture}$"), limited_files(1000):
            pretrain.report(*reported[0])
    assert pretrain.main([*OPTIONS.split(), "--data.path", str(text), "--out", str(out), "--resume"]) == 0
    assert (out / "loss.png").exists()
    assert formats(out / "hf")[0] == torch.float32
