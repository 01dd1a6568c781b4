"""Captured steps write what others write, whoever else is there; on a CPU what is captured is called again."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from apps.serve.decode import WAYS, Decode, buckets
from apps.serve.model import build_engine, find_model
from apps.serve.request import Request, Sampling
from apps.serve.runner import Step
from apps.serve.sampler import Ask, Way
from apps.serve.scheduler import Limits
from core.models import Decoder
from core.nn.routing import MoEConfig
from core.quant import Scheme, pack, quantize
from tests.support.http_server import ENGINE, small_model
from tests.support.serving import (
    Written,
    expected,
    greedy,
    random_aborts,
    random_schedule,
    real_engine,
    run,
    stand_in_engine,
)
from tests.unit.models.test_pretrained import example, random_decoder
from tests.unit.serve.test_exact import LAYOUTS, LIMITS, NEW, flat_model, prompts, sampled_requests, written_alone

SCHEMES = {"plain": None, "int8": Scheme("int8"), "w8a8": Scheme("w8a8"), "int4": Scheme("int4", 32)}
LLAMA = {
    "family": "llama", "positions": "rotary", "norm": "rms_norm", "activation": "swiglu", "num_kv_heads": 2,
    "attention_bias": False, "mlp_bias": False, "tied_head": False,
}  # fmt: skip
SAMPLINGS = (
    Sampling(temperature=0),
    Sampling(temperature=1.3),
    Sampling(temperature=0.8, top_k=7, min_p=0.02),
    Sampling(temperature=1.2, top_p=0.9),
    Sampling(temperature=0, repetition_penalty=1.3, logit_bias={3: 4.0, 5: -4.0}),
    Sampling(temperature=1.1, presence_penalty=0.7, frequency_penalty=0.4, top_p=0.95),
)


def model(family: str, scheme: Scheme | None) -> Decoder:
    config = example(LAYOUTS[family][0], max_length=32, **LAYOUTS[family][1])
    made = random_decoder(config).float()
    if scheme is None:
        return made
    quantize(made, scheme, embeddings=True, head=True)
    return made if scheme.name == "int4" else pack(made)  # whose second form rounds a step's sums to bf16


def requests(seed: int = 0) -> list[Request]:
    """Everything that a row can be asked, in one load; some texts end early, some are several, some tell logprobs."""
    dice, asked = random.Random(seed), []
    for number, prompt in enumerate(prompts(61, seed)):
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        options = {"logprobs": dice.choice([None, None, 0, 3])}
        if number % 4 == 1:
            options |= {"stop_ids": frozenset(range(0, 61, 3)), "min_tokens": 4}
        if number % 5 == 2:
            options["num_sequences"] = 3
        if number % 5 == 4:
            options["prompt_logprobs"] = 2
        object.__setattr__(sampling, "seed", number)
        asked.append(Request(str(number), tuple(prompt), NEW, sampling, **options))
    return asked


def reported(written: Written) -> dict:
    """All that is reported: tokens with their logprobs, texts, how they end, prompts."""
    tokens = {
        key: [(t.id, t.offset, t.ends, [i for i, _ in t.top]) for t in tokens] for key, tokens in written.tokens.items()
    }
    scored = {name: [t.id for t in done.tokens] for name, done in written.prompts.items()}
    return {"tokens": tokens, "texts": written.texts, "finish": written.finish, "prompts": scored}


def logprobs(written: Written) -> list[float]:
    return [t.logprob for _, tokens in sorted(written.tokens.items()) for t in tokens if t.logprob is not None]


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("gpt2", "plain"), ("opt_350m", "plain"), ("bloom", "int8"), ("llama", "int4"), ("opt", "w8a8"),
        ("mixtral", "plain"),
    ],
)  # fmt: skip
def test_captured_steps_write_what_others_write(family: str, scheme: str, kind: str) -> None:
    """Greedy and drawn, with penalties, shared beginnings, and preemption where pages are scarce."""
    captured_equals_eager(family, scheme, kind)


def captured_equals_eager(family: str, scheme: str, kind: str) -> None:
    decoder, (limits, num_pages) = model(family, SCHEMES[scheme]), LIMITS[kind]
    engine = real_engine(decoder, limits, num_pages, graphs=True)
    launched, launch = [], engine.runner.decode.launch
    engine.runner.decode.launch = lambda *step: launched.append(len(step[0].ids)) or launch(*step)
    found, wanted = run(engine, requests()), run(real_engine(decoder, limits, num_pages), requests())
    assert reported(found) == reported(wanted)
    assert logprobs(found) == pytest.approx(logprobs(wanted), abs=1e-4)
    assert (engine.counts.preemptions > 0) == (kind == "scarce")
    assert len(launched) > 0.3 * engine.counts.steps
    assert engine.pages.num_free == num_pages
    assert not engine.sampler.histories._lanes


def test_experts_write_it_with_rows_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a captured step makes as many rows as there can be, and does not wait to know their number."""
    monkeypatch.setattr("core.nn.moe.COUNTS_ROWS", ())
    captured_equals_eager("mixtral", "plain", "plenty")


@pytest.mark.parametrize("graphs", ["on", "auto", "off"])
def test_a_server_captures_steps_of_experts(graphs: Literal["on", "auto", "off"], tmp_path: Path) -> None:
    small_model(tmp_path, **LLAMA | {"moe": MoEConfig(4)})
    engine = build_engine(find_model(tmp_path), replace(ENGINE, graphs=graphs), "cpu")
    assert (engine.runner.decode is not None) == (graphs == "on")
    found = run(engine, [greedy("a", [1, 2, 3], 5)]).ids("a")
    assert found == run(real_engine(engine.runner.model, LIMITS["plenty"][0], 40), [greedy("a", [1, 2, 3], 5)]).ids("a")


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_a_schedule_decides_nothing(scheme: str | None) -> None:
    decoder, asked, preempted = flat_model(scheme), sampled_requests(), 0
    alone = written_alone(decoder, asked)
    for seed in range(2):
        found, preemptions = random_schedule(decoder, asked, seed, graphs=True)
        assert found == alone, seed
        preempted += preemptions
    assert preempted > 0


@pytest.mark.parametrize("num_pages", [9, 60])
def test_a_step_ahead_makes_no_mistake_with_pages(num_pages: int) -> None:
    """On a stand-in for the model that sees them all; the next step begins before tokens are read."""
    limits = Limits(page_size=2, max_batch_tokens=24, prefill_chunk=5, max_running=6)
    engine = stand_in_engine(num_pages, limits, ahead=True)
    asked = [[n % 3, *range(n % 7)] for n in range(20)]
    written = run(engine, [greedy(str(n), prompt, 3 + n % 6) for n, prompt in enumerate(asked)])
    assert [written.ids(str(n)) for n in range(20)] == [expected(p, 3 + n % 6) for n, p in enumerate(asked)]
    assert (engine.counts.preemptions > 0) == (num_pages == 9)
    assert any(source >= 0 for step in engine.runner.steps for source in step.sources)
    assert engine.pages.num_free == num_pages


def test_who_leaves_while_a_step_is_under_way() -> None:
    limits = Limits(page_size=2, max_batch_tokens=40, prefill_chunk=6, max_running=8)
    engine = stand_in_engine(40, limits, ahead=True)
    random_aborts(engine, 300)
    assert engine.counts.aborted > 20
    assert engine.pages.num_free == 40


def test_the_next_step_is_launched_before_the_last_one_is_read() -> None:
    engine, order = stand_in_engine(60, Limits(4, 64, 16, 8), ahead=True), []
    launch, settle = engine._begin, engine._settle
    engine._begin = lambda flight, step: order.append("launch") or launch(flight, step)
    engine._settle = lambda flight: order.append("read") or settle(flight)
    assert run(engine, [greedy("a", [1, 2, 3], 5)]).ids("a") == expected([1, 2, 3], 5)
    # After the last one nothing is launched: that its text is long enough is known before it is read.
    assert order == ["launch", "launch", "read", "launch", "read", "launch", "read", "launch", "read", "read"]


def test_rows_that_fill_up_a_step_change_nothing() -> None:
    """The same row beside four others, and beside four that fill up the step: not a bit of it."""
    decoder, ask = random_decoder(example("llama", max_length=32)).float(), Ask(Sampling(temperature=0), num_logprobs=3)
    engine = real_engine(decoder, Limits(4, 64, 16, 5), 20, graphs=True)
    decode = engine.runner.decode
    assert isinstance(decode, Decode)
    decode.buckets = decode.buckets[-1:]
    rows = []
    for count in (5, 1):
        every = list(range(count))
        step = Step(
            [5, 6, 7, 8, 9][:count], [0] * count, [4 * row for row in every], [[row] for row in every], [1] * count,
            [*every, count], every, drawn=every, asks=[ask] * count,
        )  # fmt: skip
        for layer in engine.runner.pages:
            layer.k.fill_(torch.nan)  # what is kept of nobody would be seen
        way = decode.way(step)
        assert way is not None
        rows.append(decode.launch(step, way)()[0])
        written = engine.runner.pages[0].k.flatten(0, 1)[:, 0, 0].isfinite()
        assert written.nonzero()[:, 0].tolist() == [4 * row for row in every]
    assert rows[0] == rows[1]


def test_buckets_and_ways() -> None:
    assert buckets(1) == [1]
    assert buckets(3) == [1, 2, 3]
    assert buckets(64) == [1, 2, 4, 8, 16, 32, 48, 64]
    assert all(any(way.covers(Way(a, b, c, t)) for way in WAYS)
               for a in (0, 1) for b in (0, 1) for c in (0, 1) for t in (None, 0, 20))  # fmt: skip
    assert not WAYS[0].covers(Way(False, False, False, 0))
