"""A plan's closed forms are what a rank that runs it allocates and sends, to the byte; and what differs is seen."""

from collections import Counter
from unittest.mock import patch

import pytest

from apps.llm.__main__ import APP
from apps.llm.check import check_run
from apps.llm.recipes import RECIPES
from core.auto import check
from core.config import UserError, parse

DEBUG = ["--model.num-layers", "4", "--model.dim", "32", "--model.num-heads", "4", "--model.ffn-dim", "64"]
WIDE = "--model.dim 256 --model.ffn-dim 1024 --data.sequence-length 8"
"""Little but weights: the fullest moment is that of gradients."""
RUNS = {
    "one rank": "--nproc 1",
    "copies": "--nproc 2 --precision bf16",
    "ZeRO 1": "--nproc 2 --zero 1 --precision bf16 --microbatch 3",
    "ZeRO 2, reduced each time": "--nproc 4 --zero 2 --microbatch 3 --reduce-each",
    "ZeRO 3 between copies": "--nproc 4 --zero 3 --mesh.dp-replicate 2 --recompute.mode full --microbatch 3",
    "ZeRO 3, reduced each time": f"--nproc 2 --zero 3 --microbatch 3 --reduce-each {WIDE}",
    "ZeRO 2, reduced each time, wide": f"--nproc 2 --zero 2 --microbatch 3 --reduce-each {WIDE}",
    "more ranks than rows": "--nproc 48 --zero 2 --data.global-batch 48",
    "few more rows than ranks": "--nproc 24 --zero 1 --data.global-batch 24",
    "rows that fill units": "--nproc 48 --zero 3 --data.global-batch 48",
    "experts": "--recipe debug_moe --nproc 4 --mesh.ep 2 --zero 1",
    "tensor": "--nproc 4 --mesh.tp 2 --recompute.mode full --zero 1",
    "a square": "--nproc 8 --mesh.tp 4 --mesh.tp-mode 2d --zero 2",
    "squares": "--nproc 8 --mesh.tp 8 --mesh.tp-mode 2.5d --mesh.tp-depth 2",
    "a cube": "--nproc 8 --mesh.tp 8 --mesh.tp-mode 3d",
    "a ring": "--nproc 4 --mesh.cp 2 --zero 3",
    "heads for sequence": "--nproc 4 --mesh.cp 2 --mesh.cp-mode ulysses --precision bf16",
    "stages": "--nproc 4 --mesh.pp 2 --microbatch 3 --zero 1 --recompute.mode full",
    "stages of tensors": "--nproc 4 --mesh.tp 2 --mesh.pp 2 --microbatch 6",
    "stages in bf16": "--nproc 2 --mesh.pp 2 --microbatch 6 --precision bf16 --pipeline.schedule zb-h1",
    "stages of shards": "--nproc 4 --mesh.pp 2 --microbatch 2 --zero 3",
    "stages of shards at once": "--nproc 4 --mesh.pp 2 --microbatch 2 --zero 3 --pipeline.schedule gpipe",
    "three stages of shards": "--nproc 6 --mesh.pp 3 --microbatch 1 --zero 3 --model.num-layers 6",
    "stages of shards in turns": "--nproc 4 --mesh.pp 2 --microbatch 2 --zero 3 --pipeline.schedule interleaved",
    "experts of tensors": "--recipe debug_moe --nproc 4 --mesh.ep 2 --mesh.tp 2 --zero 1",
    "stages in turns": "--nproc 2 --mesh.pp 2 --microbatch 6 --pipeline.schedule interleaved",
}


def parsed(words: str):
    """Of `debug` with fewer and thinner blocks, where the words do not say otherwise."""
    given = words.split()
    small = [word for pair in zip(DEBUG[::2], DEBUG[1::2]) if pair[0] not in given for word in pair]
    own = given if "--recipe" in given else ["--recipe", "debug", *small, *given]
    return parse(RECIPES, own, "megalith llm pretrain", "debug")


LONGER = (
    "ZeRO 2, reduced each time",
    "a square",
    "squares",
    "a cube",
    "stages in turns",
    "heads for sequence",
    "stages",
    "few more rows than ranks",
    "rows that fill units",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.soak) if n in LONGER else n for n in RUNS])
def test_every_count_is_the_plans(name: str) -> None:
    found = check_run(parsed(RUNS[name]))
    wrong = [line for lines in found.values() for line in lines if not line.agrees]
    assert not wrong
    exact = [line.what for lines in found.values() for line in lines if not line.within]
    assert {"parameters", "masters", "gradients", "state"} <= set(exact)
    assert len(exact) > 4 or name == "one rank"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (64, "--mesh.tp 8 --mesh.pp 8 --no-reduce-each"),
        (4096, "--mesh.tp 8 --mesh.pp 16 --data.global-batch 1536 --zero 1 --no-reduce-each"),
        (4096, "--mesh.tp 8 --data.global-batch 1536 --zero 3"),
    ],
)
@pytest.mark.soak
def test_gpt3_on_any_number_of_ranks(ranks: int, words: str) -> None:
    shape = f"--recipe gpt3_175b --precision bf16 --recompute.mode full --microbatch 1 --nproc {ranks}"
    found = check_run(parse(RECIPES, [*shape.split(), *words.split()], "megalith llm pretrain", "debug"))
    assert all(line.agrees for lines in found.values() for line in lines)


def one_more(*arguments, **named) -> Counter:
    """What the plan says, and a byte more of it."""
    said = check_of(*arguments, **named)
    return Counter({key: n + 1 for key, n in said.items()})


check_of = check.step_bytes


def test_a_byte_that_nobody_sends_is_seen(capsys) -> None:
    words = ["plan", "--recipe", "debug", *DEBUG, "--nproc", "2", "--check"]
    assert APP.dispatch(words) == 0
    assert "the plan is what a rank of 2 does" in capsys.readouterr().out
    with patch.object(check, "step_bytes", one_more):
        assert APP.dispatch(words) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "the plan differs from what a rank of 2 does in 1 counts; most in all_reduce over dp_replicate" in said


def test_the_first_plan_of_a_search_is_checked(capsys) -> None:
    words = ["plan", "--recipe", "debug", "--gpus", "2", "--gpu", "l4", "--batch", "8", "--check"]
    assert APP.dispatch([*words, "--zero", "1", "--gemini.budget", "None"]) == 0
    assert "held against a rank that runs it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--gemini.budget", "1GiB", "--zero", "3"], "--check with gemini.budget=1GiB, whose plan is a trace"),
        (["--recompute.mode", "budget", "--recompute.budget", "1GiB"], "--check with recompute.mode=budget"),
    ],
)
def test_what_is_traced_anyway_is_refused(more: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        APP.dispatch(["plan", "--recipe", "debug", "--nproc", "2", "--check", *more])
    assert "\n" not in str(refused.value)
