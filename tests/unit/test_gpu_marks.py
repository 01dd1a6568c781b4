"""The tests of `make gpu`: each asks for the device that it runs on, and none of a CPU's own paths is among them."""

import re
from pathlib import Path

from benchmarks.gpu.suite import files
from tests.support.command import ROOT, run

# Nothing is run: kernels need not be the interpreter's, nor has anybody to be forked.
COLLECT = """
import sys, pytest
from tests import conftest
from tests.support import interpreter
interpreter.take_interpreter = conftest.fork_server = lambda: None

class Collected:
    def pytest_collection_finish(self, session):
        for item in session.items:
            marks = {mark.name for mark in item.iter_markers()}
            print("ITEM", item.nodeid.split("[")[0], "device" in item.fixturenames, "gpu" in marks)

sys.exit(pytest.main(["--collect-only", "-q", "--no-header", "-p", "no:cacheprovider", *sys.argv[1:]], [Collected()]))
"""
OF_A_CPU = ("compile", "vnni", "paged_loops", "matmul", "attention_on_cpu", "references_on_cpu", "traffic", "far_apart")
_NAMED = re.compile(r"""\bmark\.gpu\b|["']gpu["']""")


def _collected(folder: Path) -> dict[str, tuple[bool, bool]]:
    """Test without its parameters -> (it asks for `device`, it is marked gpu), on a machine without a GPU."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if _may_be_marked(path)]
    (folder / "collect.py").write_text(COLLECT)
    done = run(folder / "collect.py", *files)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("ITEM ")]
    return {name: (asks == "True", marked == "True") for _, name, asks, marked in lines}


def _may_be_marked(path: Path) -> bool:
    """A mark is named where it is set, as an attribute or in quotes, in the file or in its folder's conftest."""
    return any(_NAMED.search(file.read_text()) for file in (path, path.parent / "conftest.py") if file.exists())


def test_what_is_marked_gpu(tmp_path: Path) -> None:
    """It asks for the device; `make gpu` looks into every file that has one; none of a CPU's own paths is among it.

    `make gpu` looks into no other file: they would be imported, with what they need.
    """
    collected = _collected(tmp_path)
    marked = {name: asks for name, (asks, is_marked) in collected.items() if is_marked}
    assert len(marked) > 60
    assert [name for name, asks in marked.items() if not asks] == []
    assert {name.split("::")[0] for name in marked} == {*files()}
    for path in sorted((ROOT / "tests" / "kernels").glob("test_*.py")):
        of_file = {is_marked for name, (_, is_marked) in collected.items() if f"kernels/{path.name}::" in name}
        name = path.stem.removeprefix("test_")
        if "forced()" in path.read_text() and name not in OF_A_CPU:
            assert of_file == {True}, path.name
        if name in OF_A_CPU:
            assert of_file == {False}, path.name
