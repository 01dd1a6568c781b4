"""Command A, second, and `make gpu`: the tests that are marked gpu, many at once on one card."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

from benchmarks.gpu.protocol import Entry, Phase, Where, environment
from benchmarks.result import ROOT, Number, Row

LIMIT_S = 9 * 60
QUICK = ("tests/gpu/test_masks.py", "-k", "plain and float32")
_OUTCOME, _TEST = r"(?P<outcome>PASSED|FAILED|SKIPPED|ERROR|XFAIL)", r"(?P<file>tests/[\w/]+\.py)(?P<name>::.*?)"
_LINES = re.compile(rf"^\[gw\d+\] .*?{_OUTCOME} {_TEST}\s*$"), re.compile(f"^{_TEST} {_OUTCOME} ")
"""What pytest says of a test by several processes, and by one."""


def files() -> list[str]:
    """Those with tests of a GPU: others import packages that its machine need not have."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text, of_kernels = path.read_text(), path.parent.name == "kernels"
        if "mark.gpu" in text or (of_kernels and 'usefixtures("device")' in text):
            found.append(str(path.relative_to(ROOT)))
    return found


def command(where: Where, *chosen: str, verbose: bool = False) -> list[str]:
    """pytest's, of this interpreter. `loadfile` would leave most processes idle: files are few and long."""
    line = [sys.executable, "-m", "pytest", "-v" if verbose else "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    line += ["-p", "benchmarks.gpu.told", "--tb", "short"]
    several = ["--numprocesses", str(where.untimed_workers), "--dist", "worksteal"]
    line += [*(several if where.untimed_workers > 1 else ()), *(chosen or files())]
    return line if where.on_gpu else [*line, "--device", "cpu"]


def main(device: str) -> int:
    """`make gpu`: as pytest says it."""
    where = Where(device, quick=False)
    try:
        return subprocess.run(command(where), cwd=ROOT, env=environment(where), timeout=LIMIT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"error: the tests took longer than {LIMIT_S} s", file=sys.stderr)
        return 1


def phases(where: Where) -> list[Phase]:
    return [Phase([Entry("tests of a GPU", run, least_s=30, most_s=LIMIT_S)])]


def run(where: Where) -> Iterator[Row | str]:
    """A figure each file, as soon as pytest is done with it or ends.  Raises AssertionError with what failed."""
    line = command(where, *(QUICK if where.quick else ()), verbose=True)
    process = subprocess.Popen(
        line, cwd=ROOT, env=environment(where), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    outcomes: dict[str, Counter[str]] = {}
    failed, last, reported = [], [], 0
    assert process.stdout is not None
    for said in process.stdout:
        print(said, end="", file=sys.stderr)
        last = [*last[-5:], said.strip()]
        if found := next((found for line in _LINES if (found := line.search(said))), None):
            outcome, file, name = found["outcome"], found["file"], found["name"]
            outcomes.setdefault(file, Counter())[outcome] += 1
            if outcome in ("FAILED", "ERROR"):
                failed.append(f"{file}{name}")
                yield f"{outcome} {file}{name}"
            done = sum(sum(of.values()) for of in outcomes.values())
            if done >= reported + 100:
                reported = done
                yield Row({"tests": "so far"}, {"done": Number(done, ""), "failed": Number(len(set(failed)), "")})
    code = process.wait()
    for file, of in sorted(outcomes.items()):
        names = {"passed": "PASSED", "failed": "FAILED", "errors": "ERROR", "skipped": "SKIPPED"}
        yield Row({"tests": file}, {name: Number(of[key], "") for name, key in names.items()})
    if code or not outcomes:
        raise AssertionError(f"pytest ended with exit code {code}: {len(set(failed))} failed; {' | '.join(last[-2:])}")
