"""The README's library example, as it stands there, alone and on four ranks."""

import re
from pathlib import Path

import pytest

from core.checkpoint import complete_steps
from tests.support.command import ROOT, losses, run, summary


@pytest.fixture(scope="module")
def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return code


def test_it_is_short(example: str) -> None:
    assert len([line for line in example.splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_it_trains_and_continues(example: str, tmp_path: Path, num_ranks: int) -> None:
    file, out = tmp_path / "own.py", tmp_path / "runs" / "mine"
    # The model's own dropout is random; without it the ranks' number makes no difference that bf16 does not make.
    file.write_text(example.replace("n_head=4", "n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0"))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks)
    done = run(*(launcher if num_ranks > 1 else ()), file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(out)[0] == pytest.approx(4.6, abs=0.1)  # ln 97 and a little
    assert losses(out)[-1] < 0.95 * losses(out)[0]
    assert list(complete_steps(out / "checkpoints")) == [20]

    file.write_text(file.read_text().replace("steps=20", "steps=22"))
    assert run(file, cwd=tmp_path).returncode == 0
    assert summary(out)["step"] == 22
    assert len(losses(out)) == 22


def test_it_trains_on_tensor_parallel_ranks_without_a_plan(example: str, tmp_path: Path) -> None:
    """Its dropouts as they are; what was saved goes on alone."""
    file, out = tmp_path / "own.py", tmp_path / "runs" / "mine"
    changed = example.replace("zero=2,", "zero=2, mesh=MeshConfig(tp=2),").replace("steps=20", "steps=4")
    file.write_text(f"from core.mesh import MeshConfig\n{changed}")
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4, file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(out)[0] == pytest.approx(4.6, abs=0.1)
    assert losses(out)[-1] < losses(out)[0]
    file.write_text(example.replace("steps=20", "steps=6"))
    assert run(file, cwd=tmp_path).returncode == 0
    assert summary(out)["step"] == 6
