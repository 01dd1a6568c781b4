"""`diffusion sample` as a command: pictures of a folder on disk, and one line for what is wrong."""

from pathlib import Path

from apps.diffusion.images import read_settings
from apps.diffusion.pipeline import save_pipeline
from tests.support.command import run
from tests.support.diffusion import narrow_pipeline


def test_pictures_and_a_refusal(tmp_path: Path) -> None:
    folder = save_pipeline(narrow_pipeline(0), tmp_path / "narrow")
    command = ("-m", "apps.diffusion", "sample", "--model", folder, "--out", tmp_path / "out", "--steps", 2)
    done = run(*command, "--prompt", "a red circle", "--images", 2, "--grid")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["00000-0.png", "00001-1.png", "grid.png"]
    assert read_settings(tmp_path / "out" / "00001-1.png")["seed"] == 1
    refused = run(*command, "--prompt", "a", "--height", 60)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == "error: height is 60; give a multiple of 8, such as 64"
    assert "Traceback" not in refused.stderr
