"""The pack of wheels for a machine without a network: what is taken from it, what stays, and what is refused."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import pack, packed
from benchmarks.result import ROOT


def wheel(folder: Path, name: str, tag: str = "py3-none-any", needs: tuple[str, ...] = (), body: str = "x = 1") -> Path:
    path = folder / f"{name.replace('-', '_')}-1.0-{tag}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-1.0.dist-info"
    metadata = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {need}" for need in needs)]
    with zipfile.ZipFile(path, "w") as content:
        content.writestr(f"{module}.py", body)
        content.writestr(f"{module}-1.0.data/purelib/{module}_beside.py", body)
        content.writestr(f"{module}-1.0.data/scripts/{module}", body)
        content.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\n" + "\n".join(metadata) + "\n\n")
    return path


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """An interpreter that has nothing but the standard library."""
    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    return tmp_path / "empty" / "bin" / "python"


def run(python: Path, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-c", program], cwd=ROOT, env={"PATH": ""}, capture_output=True, text=True, check=False
    )


def test_what_is_missing_is_found_and_by_the_processes_that_are_started(tmp_path: Path, empty: Path) -> None:
    folder = tmp_path / "pack"
    for name in (*packed.NEEDED, "some-thing"):
        wheel(folder, name)
    program = f"""
import os, subprocess, sys
from pathlib import Path
from benchmarks.gpu.packed import use_pack
print(len(use_pack(Path({str(folder)!r}))))
import some_thing, some_thing_beside
print(some_thing.__file__)
code = "import tyro, benchmarks.gpu; print(tyro.__file__)"
print(subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True).stdout.strip())
"""
    for _ in range(2):  # unpacked, then found there
        done = run(empty, program)
        count, mine, theirs = done.stdout.split() if done.returncode == 0 else pytest.fail(done.stderr)
        assert int(count) == len(packed.NEEDED) + 1
        assert Path(mine).parent == Path(theirs).parent
        assert Path(mine).parent.parent == folder / "unpacked"
    assert len(list((folder / "unpacked").iterdir())) == 1
    assert not list(folder.glob("unpacked/*/bin")) + list(folder.glob("unpacked/*/*.data"))


def test_what_is_installed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "before")
    wheel(tmp_path, "tyro", body="raise ImportError")
    assert packed.use_pack(tmp_path) == []
    assert not (tmp_path / "unpacked").exists()


def test_without_a_pack_one_line_says_what_to_do(tmp_path: Path, empty: Path) -> None:
    """The command itself, which imports nothing of ours before."""
    program = f"""
import sys
from pathlib import Path
from benchmarks.gpu import packed
packed.use_pack.__defaults__ = (Path({str(tmp_path)!r}),)
from benchmarks.gpu.__main__ import main
sys.exit(main(["a", "--out", "x", "--device", "cpu", "--quick"]))
"""
    done = run(empty, program)
    assert done.returncode == 2
    assert done.stderr.startswith("error: tyro, diffusers, datasets")
    assert "run `make gpu-pack`" in done.stderr
    assert done.stderr.count("\n") == 1


def test_wheels_of_another_python_are_refused(tmp_path: Path, empty: Path) -> None:
    for name in packed.NEEDED:
        wheel(tmp_path, name, tag="cp399-cp399-manylinux2014_x86_64" if name == "zstandard" else "py3-none-any")
    program = "from pathlib import Path; from benchmarks.gpu.packed import use_pack; "
    done = run(empty, program + f"use_pack(Path({str(tmp_path)!r}))")
    assert "zstandard-1.0-cp399-cp399-manylinux2014_x86_64.whl: not for Python 3." in done.stderr


@pytest.mark.parametrize(
    ("tag", "version", "whether"),
    [
        ("py3-none-any", (3, 12), True),
        ("cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64", (3, 12), True),
        ("cp312-cp312-manylinux2014_x86_64", (3, 13), False),
        ("cp39-abi3-manylinux_2_34_x86_64", (3, 12), True),
        ("py2.py3-none-any", (3, 12), True),
        ("py312-none-any", (3, 12), True),
        ("py311-none-any", (3, 12), False),
    ],
)
def test_tags(tag: str, version: tuple[int, int], whether: bool) -> None:
    assert packed.fits(Path(f"some_thing-1.0-{tag}.whl"), version) is whether


def test_a_pack_that_lacks_a_need_is_refused(tmp_path: Path) -> None:
    needs = (
        "torch>=2",
        "absent-thing",
        "win-thing; sys_platform == 'win32'",
        "more; extra == 'x'",
        "old; python_version < '3'",
    )
    wheels = [wheel(tmp_path, "some-thing", needs=needs)]
    assert pack.lacking(wheels, pack.names_in(pack.HERE / "image.txt"), "3.12") == ["some-thing needs absent-thing"]


def test_the_lists_are_lists() -> None:
    """Pinned, each once, and nothing that an image has."""
    pinned, image = pack.names_in(pack.HERE / "pack.txt"), pack.names_in(pack.HERE / "image.txt")
    names = [packed.normalised(line.split("==")[0]) for line in pinned]
    assert all(line.count("==") == 1 for line in pinned)
    assert len(set(names)) == len(names)
    assert not set(names) & {packed.normalised(name) for name in image}
    assert {packed.normalised(name) for name in packed.NEEDED} <= set(names)
