"""Running the commands as a user does: a process of their own, with one thread a rank.

`run`, `llm` and `Forked` fork that process from one that has imported torch already, because importing it takes longer
than most commands do; the ranks that it launches are forked, too (`forked_ranks`). What `start` starts is an
interpreter of its own, and so are its ranks. On a GPU all are: what is forked from a process that knows of CUDA cannot
use it.
"""

import faulthandler
import gc
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from tests.support.device import DEVICE
from tests.support.forkserver import context, fork_server
from tests.support.stacks import end_with_stacks

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1",
    # Before what is there already: where packages are not installed but unpacked (benchmarks.gpu.packed).
    "PYTHONPATH": os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]))),
}  # fmt: skip


class Hang(AssertionError):
    """A command that did not end in time, with the stacks of its processes."""


def run(
    *arguments: object, cwd: Path = ROOT, timeout_s: float = 240, typed: str = ""
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` (-m MODULE … or FILE …), to its end, which reads what is typed.

    Raises Hang when it takes longer.
    """
    words = [str(argument) for argument in arguments]
    if DEVICE == "cuda":
        return _interpreter(words, cwd, timeout_s, typed)
    with tempfile.TemporaryDirectory(prefix="command-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = context().Process(target=_python, args=(words, str(cwd), str(out), str(err), ENVIRONMENT, typed))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            assert process.pid is not None
            end_with_stacks(process.pid)
            process.join()
            raise Hang(f"{words} took longer than {timeout_s} s\n{out.read_text()}\n{err.read_text()}")
        return subprocess.CompletedProcess(words, process.exitcode, out.read_text(), err.read_text())


def _interpreter(words: list[str], cwd: Path, timeout_s: float, typed: str) -> subprocess.CompletedProcess[str]:
    options = {"cwd": cwd, "env": ENVIRONMENT, "capture_output": True, "text": True, "check": False, "input": typed}
    try:
        return subprocess.run([sys.executable, *words], timeout=timeout_s, **options)
    except subprocess.TimeoutExpired as error:
        raise Hang(f"{words} took longer than {timeout_s} s\n{error.stdout}\n{error.stderr}") from None


def _python(
    words: list[str], cwd: str, out: str, err: str, environment: Mapping[str, str] = ENVIRONMENT, typed: str = ""
) -> None:
    import torch

    from tests.support.forked_ranks import forked_ranks, run_python

    gc.freeze()  # what was imported before the fork is not looked through again, nor copied for it
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    if typed:
        sys.stdin = io.StringIO(typed)
    faulthandler.enable()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)  # read from the environment when the process that this one is forked from imported it
    with forked_ranks(words):
        run_python(words)


def start(*arguments: object) -> subprocess.Popen:
    """`python ARGUMENTS` in an interpreter of its own, left running."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


class Forked:
    """`python ARGUMENTS`, forked and left running: as much of a Popen as tests use. Ended where the `with` ends."""

    def __init__(
        self,
        *arguments: object,
        cwd: Path = ROOT,
        environment: Mapping[str, str] = ENVIRONMENT,
        files: tuple[Path | None, ...] = (None, None),
    ):
        self.args = [str(argument) for argument in arguments]
        self._folder = tempfile.TemporaryDirectory(prefix="command-")
        self._out, self._err = (
            file or Path(self._folder.name, name) for file, name in zip(files, ("out", "err"), strict=True)
        )
        given = self.args, str(cwd), str(self._out), str(self._err), dict(environment)
        self._process = context().Process(target=_python, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *error: object) -> None:
        if self.poll() is None:
            end_with_stacks(self.pid)
        self._process.join()
        self._folder.cleanup()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self) -> tuple[str, str]:
        self._process.join()
        return self._out.read_text(), self._err.read_text()

    def first_line(self, timeout_s: float) -> str:
        """What it prints first, once it has.  Raises Hang when that takes longer."""
        deadline = time.monotonic() + timeout_s
        while not (self._out.exists() and "\n" in self._out.read_text()):
            assert self.poll() is None, self.communicate()[1]
            if time.monotonic() > deadline:
                hang(self, f"nothing printed within {timeout_s} s")
            time.sleep(0.05)
        return self._out.read_text().splitlines()[0]


def ended(process: "subprocess.Popen | Forked", timeout_s: float) -> int:
    """The exit code of what `start` started.  Raises Hang when it takes longer."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        hang(process, f"not ended after {timeout_s} s")


@contextmanager
def forked_modules(package: str) -> Iterator[None]:
    """Inside, `subprocess.run` and `subprocess.Popen` fork `python -m PACKAGE.MODULE …` where the python is this one.

    To be entered before this process computes anything: the server of forks is a fork of it.
    """
    fork_server()
    started = subprocess.Popen

    def popen(line: list[Any], **options: Any) -> Any:
        words = [str(word) for word in line]
        if words[:2] == [sys.executable, "-m"] and words[2].startswith(f"{package}."):
            return _Module(words[1:], **options)
        return started(line, **options)

    module = cast(Any, subprocess)
    module.Popen = popen
    try:
        yield
    finally:
        module.Popen = started


class _Module(Forked):
    """As much of a Popen as `subprocess.run` and benchmarks use."""

    def __init__(
        self,
        words: list[str],
        *,
        stdout: IO[str] | int,
        stderr: IO[str] | int,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        text: bool = True,
    ):
        files = (None if isinstance(file, int) else Path(file.name) for file in (stdout, stderr))
        super().__init__(*words, cwd=cwd, environment=os.environ if env is None else env, files=tuple(files))

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return super().communicate()

    def kill(self) -> None:
        self._process.kill()


def hang(process: "subprocess.Popen | Forked", what: str) -> NoReturn:
    """End what `start` started, and raise Hang."""
    end_with_stacks(process.pid)
    printed = process.communicate()[1]
    raise Hang(f"{process.args}: {what}\n{printed if isinstance(printed, str) else printed.decode()}")


def llm(*arguments: object, cwd: Path = ROOT) -> str:
    """`llm ARGUMENTS`, which has to succeed; what it printed."""
    done = run("-m", "apps.llm", *arguments, cwd=cwd)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics(folder)]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())
