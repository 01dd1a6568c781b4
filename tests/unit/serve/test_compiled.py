"""Steps by a traced graph: the same tokens and the same bits whoever else is there; what cannot be compiled.

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
from tests.support.serving import greedy, real_engine, run
from tests.unit.models.test_pretrained import example, random_decoder

PROMPTS = ([1, 2, 3], [*range(20)], [5], [*range(20), 7, 8])


def model(family: str, scheme: Scheme | None) -> Decoder:
    made = random_decoder(example(family, max_length=64)).float()
    return made if scheme is None else pack(quantize(made, scheme, embeddings=True, head=True))


def written(decoder: Decoder, compiled: bool) -> list[list[int]]:
    engine = real_engine(decoder, Limits(4, 64, 6, 3), 40)
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
        ("gpt2", Scheme("llm.int8", threshold=1.0)),
    ],
    ids=str,
)
def test_the_graph_writes_what_the_decoder_writes(
    family: str, scheme: Scheme | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda graph, **options: graph)
    assert written(model(family, scheme), compiled=True) == written(model(family, scheme), compiled=False)


def test_rows_do_not_depend_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda graph, **options: graph)
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


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(graph: object, **options: object) -> None:
        raise RuntimeError("No working C++ compiler found\nand more lines")

    monkeypatch.setattr(torch, "compile", fail)
    runner = Runner(model("opt", None), 20, 4, torch.float32)
    with caplog.at_level(logging.WARNING):
        assert not compile_runner(runner)
    (record,) = caplog.records
    assert "No working C++ compiler found; install" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert runner.body is None
    assert runner.run(Step([1], [0], [0], [[0]], [1], [0, 1], [0])).shape == (1, 61)


def test_what_is_not_compiled() -> None:
    check_compilable("cpu", 1, 0)
    for given in (("cuda", 1, 0), ("cpu", 2, 0), ("cpu", 1, 4)):
        with pytest.raises(UserError, match=r"leave (--engine\.compile|one of them) out"):
            check_compilable(*given)
