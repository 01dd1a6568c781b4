"""The one command of all applications: what it runs, what it says, and that the project's papers are there."""

import subprocess
import sys

import pytest

from apps.__main__ import APPS, dispatch
from core.config import UserError
from tests.support.command import ROOT


@pytest.mark.parametrize("app", APPS)
def test_each_app_is_reached_with_its_own_arguments(app, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["megalith"])
    assert dispatch([app, "--help"]) == 0
    assert f"{app} COMMAND" in capsys.readouterr().out
    dispatch([app, "no-such-command"])
    assert f"{app} has no command 'no-such-command'" in capsys.readouterr().err


def test_the_apps_are_those_of_the_repository(capsys):
    assert set(APPS) == {folder.name for folder in (ROOT / "apps").iterdir() if (folder / "__main__.py").is_file()}
    assert dispatch([]) == 0
    assert all(name in capsys.readouterr().out for name in ["megalith APP COMMAND"])
    with pytest.raises(UserError, match="megalith has no app 'lmm'; the apps are llm, diffusion, fold, serve"):
        dispatch(["lmm", "plan"])


def test_as_a_module_with_an_exit_code():
    done = subprocess.run([sys.executable, "-m", "apps", "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: megalith has no app 'nothing'; the apps are llm, diffusion, fold, serve\n"


def test_a_help_that_nobody_reads_to_its_end():
    """`megalith llm --help | head -0`: no traceback."""
    command = (
        f"{sys.executable} -c 'import time; time.sleep(1); from apps.__main__ import main; exit(main())' llm --help"
    )
    done = subprocess.run(f"set -o pipefail; {command} | true", cwd=ROOT, capture_output=True, text=True, shell=True,
                          executable="/bin/bash")  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "")


def test_licence_and_papers():
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff"):
        assert (ROOT / name).read_text().strip(), name
