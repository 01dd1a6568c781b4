"""Decoding by a traced graph: the same tokens and the same bits whoever else is there; what cannot be compiled.

The graph is run as it was traced; tests/e2e has it compiled.
"""

import logging

import pytest
import torch

from apps.serve.compiled import check_compilable, compile_runner
from apps.serve.runner import Runner, Step
from apps.serve.scheduler import Limits
from core.config import UserError
from core.models import Decoder
from core.quant import Scheme, pack, quantize
from tests.support.serving import greedy, random_schedule, real_engine, run
from tests.unit.models.test_pretrained import example, random_decoder
from tests.unit.serve.test_exact import flat_model, sampled_requests, written_alone

PROMPTS = ([1, 2, 3], [*range(20)], [5], [*range(20), 7, 8])


def model(family: str, scheme: Scheme | None) -> Decoder:
    made = random_decoder(example(family, max_length=64)).float()
    return made if scheme is None else pack(quantize(made, scheme, embeddings=True, head=True))


def written(decoder: Decoder, compiled: bool, page_dtype: torch.dtype = torch.float32) -> list[list[int]]:
    engine = real_engine(decoder, Limits(4, 64, 6, 3), 40, page_dtype)
    if compiled:
        assert compile_runner(engine.runner)
    found = run(engine, [greedy(str(n), prompt, 8) for n, prompt in enumerate(PROMPTS)])
    return [found.ids(str(n)) for n in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("opt", None),
        ("opt", Scheme("int8")),
        ("bloom", Scheme("w8a8")),
        ("llama", Scheme("int4", 32)),
        ("qwen3", None),
        ("gpt_neox", Scheme("int8")),
        ("gpt2", Scheme("llm.int8", threshold=1.0)),
    ],
    ids=str,
)
def test_the_graph_writes_what_the_decoder_writes(
    family: str, scheme: Scheme | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda graph, given, **options: graph)
    assert written(model(family, scheme), compiled=True) == written(model(family, scheme), compiled=False)


def test_nothing_goes_around_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone token neither."""
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda graph, given, **options: graph)
    decoder = model("opt", Scheme("int8"))
    engine, wanted = real_engine(decoder, Limits(4, 64, 19, 3), 40), written(decoder, compiled=False)
    graph = compile_runner(engine.runner)
    assert graph
    compute, parts = graph._compute, []
    monkeypatch.setattr(graph, "_compute", lambda ids, positions: parts.append(ids.shape[1]) or compute(ids, positions))
    monkeypatch.setattr(decoder, "forward", None)
    found = run(engine, [greedy(str(n), prompt, 8) for n, prompt in enumerate(PROMPTS)])
    assert [found.ids(str(n)) for n in range(len(PROMPTS))] == wanted
    assert sum(parts) >= sum(map(len, PROMPTS)) - engine.counts.cached_tokens
    lone = Step([5], [0], [0], [[0]], [1], [0, 1], [0])
    parts.clear()
    assert engine.runner.run(lone).shape == (1, decoder.config.vocab_size)
    assert parts == [1]


def test_rows_do_not_depend_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda graph, given, **options: graph)
    runner = Runner(model("opt", Scheme("int8")), 20, 4, torch.float32)
    assert compile_runner(runner)

    def logits(tokens: list[int]) -> torch.Tensor:
        every = list(range(len(tokens)))
        step = Step(
            tokens, [0] * len(every), [4 * t for t in tokens], [[t] for t in tokens], [1] * len(every),
            [*every, len(every)], every,
        )  # fmt: skip
        return runner.run(step)

    together = logits([0, 1, 2, 3, 4])
    for token in range(5):
        assert torch.equal(logits([token])[0], together[token])
    assert torch.equal(logits([4, 2]), together[[4, 2]])


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_a_schedule_decides_nothing(scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of prompts that are one token long, tokens computed again after a preemption, pages of others."""
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda graph, given, **options: graph)
    decoder, asked, preempted = flat_model(scheme), sampled_requests(), 0
    graph = compile_runner(real_engine(decoder, Limits(), 4).runner)
    assert graph

    def prepare(runner: Runner) -> None:
        assert compile_runner(runner, graph) is graph

    alone = written_alone(decoder, asked, prepare)
    for seed in range(2):
        found, preemptions = random_schedule(decoder, asked, seed, prepare)
        assert found == alone, seed
        preempted += preemptions
    assert preempted > 0


def test_a_step_of_which_nobody_wants_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's middle."""
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda graph, given, **options: graph)
    runner = Runner(model("opt", None), 20, 4, torch.float32)
    assert compile_runner(runner)
    step = Step([1, 2, 3], [0, 1, 2], [0, 1, 2], [[0]], [3], [0, 3], [])
    assert runner.run(step).shape == (0, runner.model.config.vocab_size)


@pytest.mark.parametrize(
    ("family", "page_dtype"),
    [*((family, torch.float64) for family in ("opt", "bloom", "llama")), ("bloom", torch.int8), ("llama", torch.int8)],
    ids=str,
)
def test_attention_over_pages(family: str, page_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64 but for pages of int8, whose rounding is the same: parity to 1e-10, beside prompts in parts, too."""
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda graph, given, **options: graph)
    decoder = random_decoder(example(family, max_length=64))
    lengths = [9, 1, 14, 4, 2]
    tables = [[7, 2, 5], [3], [0, 9, 1, 6], [8, 10], [11]]
    found = []
    for is_compiled in (False, True):
        runner = Runner(decoder, 12, 4, page_dtype)
        prompts = [list(range(2, 2 + length)) for length in lengths]
        runner.run(_step(prompts, tables, [0] * 5))
        if is_compiled:
            assert compile_runner(runner)
        more = [[20], [21], [22, 23], [24], [25, 26]]
        together = runner.run(_step(more, tables, lengths))
        apart = [runner.run(_step(*([given] for given in one))) for one in zip(more, tables, lengths)]
        assert (together - torch.cat(apart)).abs().max() < (1e-10 if page_dtype == torch.float64 else 1e-5)
        found.append(together)
    assert (found[0] - found[1]).abs().max() < (1e-10 if page_dtype == torch.float64 else 1e-5)


def _step(new: list[list[int]], tables: list[list[int]], before: list[int]) -> Step:
    """New tokens behind those that are in the pages; the logits of the last one of each sequence."""
    step = Step()
    for ids, table, start in zip(new, tables, before):
        places = range(start, start + len(ids))
        step.ids.extend(ids)
        step.positions.extend(places)
        step.slots.extend(table[place // 4] * 4 + place % 4 for place in places)
        step.tables.append(table)
        step.lengths.append(places.stop)
        step.starts.append(len(step.ids))
        step.rows.append(len(step.ids) - 1)
    return step


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*given: object, **options: object) -> None:
        raise RuntimeError("No working C++ compiler found\nand more lines")

    monkeypatch.setattr(torch._inductor, "standalone_compile", fail)
    runner = Runner(model("opt", None), 20, 4, torch.float32)
    with caplog.at_level(logging.WARNING):
        assert not compile_runner(runner)
    (record,) = caplog.records
    assert "No working C++ compiler found; install" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert runner.graph is None
    assert runner.run(Step([1], [0], [0], [[0]], [1], [0, 1], [0])).shape == (1, 61)


def test_what_is_not_compiled() -> None:
    check_compilable("cpu", 1, 0)
    for given in (("cuda", 1, 0), ("cpu", 2, 0), ("cpu", 1, 4)):
        with pytest.raises(UserError, match=r"leave (--engine\.compile|one of them) out"):
            check_compilable(*given)
