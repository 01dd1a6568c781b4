"""The command line: what changes a recipe, and the one line that each mistake gets."""

import gc
import io
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from core.config import LAUNCHER, UserError, as_json, importing, option_names, parse, run_command, size_in_bytes


@dataclass(frozen=True)
class Rate:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float | None = 1.0
    average: bool = False

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise UserError(f"lr={self.lr}; give lr >= 0")


@dataclass(frozen=True)
class Run:
    steps: int = 10
    shape: Literal["cosine", "linear"] = "cosine"
    out: Path = Path("runs/latest")
    resume: str | None = None
    quick: bool = False
    code: Literal["int8", "int4"] | None = None
    sizes: tuple[int, ...] = ()
    optim: Rate = field(default_factory=Rate)


RECIPES = {"debug": Run, "gpt2_124m": lambda: Run(steps=600_000, optim=Rate(lr=6e-4))}


def parsed(*argv: str) -> Run:
    return parse(RECIPES, list(argv), "llm pretrain", default="debug")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", Run()),
        ("--recipe gpt2_124m", Run(steps=600_000, optim=Rate(lr=6e-4))),
        ("recipe=gpt2_124m --steps 5", Run(steps=5, optim=Rate(lr=6e-4))),
        ("--steps 5 --recipe=gpt2_124m", Run(steps=5, optim=Rate(lr=6e-4))),
        ("--optim.clip-norm None", Run(optim=Rate(clip_norm=None))),
        ("--optim.clip-norm none", Run(optim=Rate(clip_norm=None))),
        ("optim.clip-norm=NONE --resume None --code none", Run(optim=Rate(clip_norm=None))),
        ("--out none", Run(out=Path("none"))),
        ("--optim.no-average --no-quick", Run()),
        ("--optim.clip-norm=2", Run(optim=Rate(clip_norm=2.0))),
        ("optim.clip_norm=2 --optim.betas 0.8 0.9", Run(optim=Rate(betas=(0.8, 0.9), clip_norm=2.0))),
        ("--quick", Run(quick=True)),
        ("--no-quick", Run()),
        ("--out there/a=b", Run(out=Path("there/a=b"))),
        ("--quick steps=3", Run(quick=True, steps=3)),
        ("--resume", Run(resume="auto")),
        ("--resume --steps 3", Run(resume="auto", steps=3)),
        ("--resume runs/a --steps 3", Run(resume="runs/a", steps=3)),
    ],
)
def test_options_change_the_recipe(argv: str, expected: Run) -> None:
    assert parsed(*argv.split()) == expected


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--stpes 3", "llm pretrain has no option --stpes, did you mean --steps"),
        ("--learning-rate 3", "llm pretrain has no option --learning-rate, did you mean --optim.lr"),
        ("--num-gpus 3", "llm pretrain has no option --num-gpus"),
        ("--zzz 3", "llm pretrain has no option --zzz; see"),
        ("stpes=3", "llm pretrain has no option stpes, did you mean --steps"),
        ("--recipes debug", "no option --recipes, did you mean --recipe?"),
        ("--optim.betas 0.8 0.9 xx=3", "llm pretrain has no option xx"),
        ("--optim 3", "no option --optim, did you mean --optim.lr or --optim.betas or --optim.clip-norm?"),
        ("--lr 3", "no option --lr, did you mean --optim.lr?"),
        ("--recipe debgu", "no recipe 'debgu', did you mean debug?; the recipes are debug, gpt2_124m"),
        ("--recipe", "no recipe ''; the recipes are debug, gpt2_124m"),
        ("--steps many", "--steps many: give a whole number; see llm pretrain --help-all"),
        ("--steps 2.5", "--steps 2.5: give a whole number; see"),
        ("--steps=", "--steps=: give a whole number; see"),
        ("--shape square", "--shape square: give cosine or linear; see"),
        ("--shape none", "--shape none: give cosine or linear; see"),
        ("--optim.betas 0.9", "--optim.betas 0.9: give 2 numbers; see"),
        ("--optim.betas a b", "--optim.betas a b: give 2 numbers; see"),
        ("--optim.clip-norm far", "--optim.clip-norm far: give a number, or none; see"),
        ("--optim.clip-norm=", "--optim.clip-norm=: give a number, or none; see"),
        ("--optim.clip-norm", "--optim.clip-norm: give a number, or none; see"),
        ("--resume a b", "--resume a b: give a value, or none; see"),
        ("--code int2", "--code int2: give int8 or int4, or none; see"),
        ("--sizes 1 a", "--sizes 1 a: give any number of whole numbers; see"),
        ("--quick yes", "--quick yes: give --quick or --no-quick, without a value; see"),
        ("--quick=True", "--quick=True: give --quick or --no-quick, without a value; see"),
        ("--optim.no-average=1", "--optim.no-average=1: give --optim.average or --optim.no-average, without a value"),
        ("--no-optim.average", "no option --no-optim.average, did you mean --optim.no-average?; see"),
        ("--no-steps", "llm pretrain has no option --no-steps, did you mean --steps"),
        ("--optim.lr=-1", "lr=-1.0; give lr >= 0"),
        ("corpus", "corpus stands behind no option; options are written --name value; see llm pretrain --help"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_mistake_gets_one_line(argv, says, encoding, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))  # the parser asks it for its lines
    with pytest.raises(UserError) as refusal:
        parsed(*argv.split())
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not any(part in str(refusal.value) for part in ("│", "─", "----", "; ;", "parsing optim"))
    assert capsys.readouterr().err == ""


def test_what_a_recipe_lacks_as_a_whole_is_refused() -> None:
    @dataclass(frozen=True)
    class Rotary:
        scaling: Rate | None = None

    for typed in ("--scaling none", "--scaling=2", "--scaling"):
        with pytest.raises(
            UserError, match=f"^{typed}: this recipe has none, and an option cannot give it one; choose"
        ):
            parse({"debug": Rotary}, typed.split(), "llm pretrain", default="debug")


@dataclass(frozen=True)
class Cache:
    RENAMED: ClassVar[Mapping[str, str]] = {"kv_gb": "size=GB"}

    size: str | None = None


@dataclass(frozen=True)
class Tune:
    """An option --model beside --model.dim; it was called --source, and the cache's size was a number."""

    RENAMED: ClassVar[Mapping[str, str]] = {"source": "model", "hidden": "model.dim"}
    CALLED: ClassVar[Mapping[str, str]] = {"source": "model"}

    @dataclass(frozen=True)
    class Shape:
        dim: int = 8

    source: Path = Path()
    """the folder to go on from"""
    model: Shape = field(default_factory=Shape)
    cache: Cache = field(default_factory=Cache)
    stop_after: int | None = None

    def unread(self) -> dict[str, str]:
        return {"source": "in vain"} if self.source == Path("vain") else {}


def tuned(*argv: str) -> Tune:
    return parse({"default": Tune}, list(argv), "llm finetune", default="default")


@pytest.mark.parametrize(
    ("argv", "expected", "notes"),
    [
        ("--model a", Tune(Path("a")), []),
        ("--model=a --model.dim 4", Tune(Path("a"), Tune.Shape(4)), []),
        ("model=a model.dim=4", Tune(Path("a"), Tune.Shape(4)), []),
        ("--source a", Tune(Path("a")), ["--source is called --model now"]),
        (
            "--source=a --hidden 4",
            Tune(Path("a"), Tune.Shape(4)),
            ["--source is", "--hidden is called --model.dim now"],
        ),
        ("--cache.size 4GiB", Tune(cache=Cache("4GiB")), []),
        ("--cache.kv-gb 4", Tune(cache=Cache("4GB")), ["--cache.kv-gb is called --cache.size now"]),
        ("cache.kv-gb=0.5", Tune(cache=Cache("0.5GB")), ["--cache.kv-gb is called --cache.size now"]),
        ("--stop_after 3", Tune(stop_after=3), ["--stop_after is spelled --stop-after now"]),
        ("stop_after=3", Tune(stop_after=3), ["--stop_after is spelled --stop-after now"]),
    ],
)
def test_former_names_and_spellings_are_told(argv, expected, notes, capsys, monkeypatch) -> None:
    assert tuned(*argv.split()) == expected
    said = capsys.readouterr().err.splitlines()
    assert [line.startswith(f"note: {note}") for line, note in zip(said, notes, strict=True)] == [True] * len(notes)
    monkeypatch.setenv("RANK", "1")  # one of several says it
    tuned(*argv.split())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(LAUNCHER, "1")  # who launched this rank has said it
    tuned(*argv.split())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--model a --source b", "--model and --source, its former name; give --model alone"),
        ("--modle a", "llm finetune has no option --modle, did you mean --model"),
        ("--suorce a", "llm finetune has no option --suorce, did you mean --model?"),
        ("--model", "--model: give a path; see"),
        ("--model vain", "--model in vain; see llm finetune --help-all"),
    ],
)
def test_mistakes_speak_of_options_as_they_are_called(argv: str, says: str) -> None:
    with pytest.raises(UserError) as refusal:
        tuned(*argv.split())
    assert says in str(refusal.value)


def test_help_shows_options_as_they_are_called(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tuned("--help-all")
    said = capsys.readouterr().out
    assert "--model PATH" in said
    assert "--source" not in said


def test_help_names_options_and_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaves:
        parsed("--recipe", "gpt2_124m", "--help")
    assert leaves.value.code == 0
    said = capsys.readouterr().out
    assert "--optim.lr" in said
    assert "0.0006" in said
    assert "debug, gpt2_124m" in " ".join(said.split())


@dataclass(frozen=True)
class Crowded(Run):
    ESSENTIAL: ClassVar[tuple[str, ...]] = ("optim.lr", "steps")


def test_help_shows_what_most_people_need(capsys: pytest.CaptureFixture[str]) -> None:
    """In its order, with what each is and its default; --help-all shows everything."""
    for asked, shown in (
        ("--help", ["optim.lr", "steps"]),
        ("--help-all", list(option_names(Run()))),
    ):
        with pytest.raises(SystemExit) as leaves:
            parse({"crowded": Crowded}, ["--optim.clip-norm", "2", asked], "llm pretrain", default="crowded")
        assert leaves.value.code == 0
        said = capsys.readouterr().out
        found = re.findall(r"^. --([a-z][\w.-]+)|^ --([a-z][\w.-]+)", said, re.MULTILINE)
        assert [(boxed or plain).replace("-", "_") for boxed, plain in found] == shown
        assert ("--help-all lists 9 more" in said) == (asked == "--help")
    (lr,) = [line for line in said.splitlines() if "--optim.lr" in line]
    assert "FLOAT" in lr


def test_option_names_are_dotted() -> None:
    names = ["steps", "shape", "out", "resume", "quick", "code", "sizes"]
    names += ["optim.lr", "optim.betas", "optim.clip_norm", "optim.average"]
    assert list(option_names(Run())) == names


def test_as_json_keeps_every_field() -> None:
    written = json.loads(json.dumps(as_json(Run(steps=3))))
    assert written == {
        "steps": 3,
        "shape": "cosine",
        "out": "runs/latest",
        "resume": None,
        "quick": False,
        "code": None,
        "sizes": [],
        "optim": {"lr": 0.1, "betas": [0.9, 0.95], "clip_norm": 1.0, "average": False},
    }


def test_run_command_turns_mistakes_into_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def mistaken(argv: list[str]) -> None:
        raise UserError(f"given {argv[0]}; allowed that; do so")

    def interrupted(argv: list[str]) -> None:
        raise KeyboardInterrupt

    assert run_command(lambda argv: None, []) == 0
    assert run_command(lambda argv: 3, []) == 3
    assert run_command(interrupted, []) == 130
    assert run_command(mistaken, ["this"], speaks=lambda: False) == 2
    assert capsys.readouterr() == ("", "")
    assert run_command(mistaken, ["this"]) == 2
    assert capsys.readouterr() == ("", "error: given this; allowed that; do so\n")
    with pytest.raises(ZeroDivisionError):
        run_command(lambda argv: 1 // 0, [])


def test_a_size_without_a_unit_is_in_the_option_s() -> None:
    """Sizes with units: tests/unit/gemini/test_tier.py."""
    assert size_in_bytes("24", "memory", "GiB") == size_in_bytes("24GiB", "memory") == 24 * 2**30
    assert size_in_bytes(0.5, "memory", "GiB") == 2**29
    assert size_in_bytes("24", "memory") == 24
    with pytest.raises(UserError, match=r"^memory=-3: that is no size; give one such as 10GiB, 800MB or 24, which"):
        size_in_bytes("-3", "memory", "GiB")


def test_a_path_that_cannot_be_used_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")

    def command(argv: list[str]) -> None:
        (tmp_path / "file" / argv[0]).mkdir()

    assert run_command(command, ["out"]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/file/out: Not a directory; choose another path\n"

    def without_a_path(argv: list[str]) -> None:
        raise OSError("what no user can mend")

    with pytest.raises(OSError, match="no user"):
        run_command(without_a_path, [])


def test_while_modules_are_imported_nobody_looks_for_garbage() -> None:
    before = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        with importing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    gc.unfreeze()
