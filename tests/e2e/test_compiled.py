"""Steps that torch.compile has made: the same tokens as the decoder's, and no token depends on its neighbours."""

import shutil

import pytest
import torch

from apps.serve.compiled import compile_runner
from apps.serve.runner import Runner, Step
from apps.serve.scheduler import Limits
from core.quant import pack, quantize
from tests.support.serving import greedy, random_schedule, real_engine, run
from tests.unit.models.test_pretrained import example, random_decoder
from tests.unit.serve.test_exact import sampled_requests, written_alone

PROMPTS = ([1, 2, 3], [*range(20)], [5], [*range(20), 7, 8])


@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="no C++ compiler; ends where Debian's g++ is",
)
def test_compiled_steps() -> None:
    plain = random_decoder(example("bloom", max_length=64, num_layers=1)).float()
    decoder, written, graph = pack(quantize(plain, "int8", embeddings=True, head=True)), [], None
    for is_compiled in (False, True):
        engine = real_engine(decoder, Limits(4, 64, 6, 3), 40)
        if is_compiled:
            graph = compile_runner(engine.runner)
            assert graph
        found = run(engine, [greedy(str(n), prompt, 8) for n, prompt in enumerate(PROMPTS)])
        written.append([found.ids(str(n)) for n in range(len(PROMPTS))])
    assert written[0] == written[1]

    def logits(tokens: list[int]) -> torch.Tensor:
        every = list(range(len(tokens)))
        slots, tables = [4 * token for token in tokens], [[token] for token in tokens]
        return engine.runner.run(
            Step(tokens, [0] * len(every), slots, tables, [1] * len(every), [*every, len(every)], every)
        )

    together = logits([0, 1, 2, 3, 4])
    for token in range(5):
        assert torch.equal(logits([token])[0], together[token])
    assert torch.equal(logits([4, 2]), together[[4, 2]])

    def prepare(runner: Runner) -> None:
        assert compile_runner(runner, graph)

    asked = sampled_requests()
    alone = written_alone(decoder, asked, prepare)
    for seed in range(2):  # tests/soak does it a thousand times
        assert random_schedule(decoder, asked, seed, prepare)[0] == alone, seed
