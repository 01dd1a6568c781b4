"""Captured steps on a GPU write what steps as they are write, and what a CPU writes; `make gpu` runs them."""

from dataclasses import replace

import pytest
import torch

from apps.serve.decode import Decode, warm_up
from apps.serve.engine import Engine
from apps.serve.machine import machine_of
from apps.serve.request import Request, Sampling
from apps.serve.runner import Runner
from apps.serve.sampler import Ask, Sampler, Way, numbers_of, pick
from apps.serve.scheduler import Limits
from core.models import Decoder
from core.nn.by_kernels import by_kernels
from core.quant import Scheme, quantize
from tests.support.serving import Letters, run
from tests.unit.models.test_pretrained import example, random_decoder
from tests.unit.serve.test_exact import LAYOUTS

pytestmark = pytest.mark.gpu

LIMITS = Limits(4, 64, 16, 6)
PROMPTS = ([1, 2, 3], [*range(20)], [5], [*range(20), 7, 8], [*range(9)], [40, 3])
GREEDY = Sampling(temperature=0)
MIXED = (
    GREEDY,
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.9, top_k=5, seed=2),
    Sampling(temperature=1.2, top_p=0.8, min_p=0.01, seed=3),
    Sampling(temperature=1.0, presence_penalty=0.5, repetition_penalty=1.3, logit_bias={3: 2.0}, seed=4),
    GREEDY,
)


def written(
    model: Decoder, device: str, samplings: tuple[Sampling, ...], graphs: bool = False, num_pages: int = 100
) -> list[list[int]]:
    model = model.to(device)
    if device == "cuda":
        by_kernels(model)
    limits = replace(LIMITS, window=model.config.every_window, local_window=model.config.local_window)
    runner = Runner(model, num_pages, limits.page_size, torch.float32, local=limits.local(num_pages))
    sampler = None
    if graphs:
        warm_up(runner, limits.max_batch_tokens, 64)
        sampler = Sampler(61, runner.machine)
        Decode(runner, sampler, limits.max_running, 64)
    engine = Engine(
        runner, Letters(), limits, num_pages=num_pages, vocab_size=61, max_length=64, sampler=sampler, ahead=graphs
    )
    asked = [Request(str(n), tuple(p), 24, s) for n, (p, s) in enumerate(zip(PROMPTS, samplings, strict=True))]
    found = run(engine, asked)
    assert engine.pages.num_free == num_pages
    return [found.ids(str(n)) for n in range(len(PROMPTS))]


def model(family: str, scheme: Scheme | None = None) -> Decoder:
    """In fp32, and certain of its tokens: two devices add in different orders."""
    layout, changes = LAYOUTS[family]
    made = random_decoder(example(layout, max_length=64, **changes)).float()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1.5)
    return made if scheme is None else quantize(made, scheme, embeddings=True, head=True)


@pytest.mark.parametrize(
    ("family", "num_pages"),
    [
        *((family, num_pages) for family in ("gpt2", "opt", "bloom", "llama") for num_pages in (100, 18)),
        *((family, 18) for family in LAYOUTS if family not in ("gpt2", "opt", "bloom", "llama")),
    ],
)
def test_graphs_write_what_steps_as_they_are_write(device: torch.device, family: str, num_pages: int) -> None:
    """Where pages are so few that they change hands, both kinds of tables name different ones (Gemma 3, Qwen3)."""
    greedy = (GREEDY,) * len(PROMPTS)
    wanted = written(model(family), device.type, greedy, num_pages=num_pages)
    assert written(model(family), device.type, greedy, graphs=True, num_pages=num_pages) == wanted
    assert written(model(family), "cpu", greedy, num_pages=num_pages) == wanted


@pytest.mark.parametrize("scheme", [None, Scheme("int8"), Scheme("int4", 32)], ids=str)
def test_draws_by_graphs(device: torch.device, scheme: Scheme | None) -> None:
    wanted = written(model("llama", scheme), device.type, MIXED)
    assert written(model("llama", scheme), device.type, MIXED, graphs=True) == wanted


@pytest.mark.parametrize("scheme", [Scheme("w8a8"), Scheme("llm.int8")], ids=str)
def test_activations_in_8_bits_by_graphs(device: torch.device, scheme: Scheme) -> None:
    """The likeliest tokens: a draw at a boundary would see a number that is rounded to the next step."""
    greedy = (GREEDY,) * len(PROMPTS)
    wanted = written(model("llama", scheme), device.type, greedy)
    assert written(model("llama", scheme), device.type, greedy, graphs=True) == wanted


@pytest.mark.parametrize("vocab_size", [61, 50_257])
def test_a_gpu_draws_what_a_cpu_draws(device: torch.device, vocab_size: int) -> None:
    """The same logits, every way; but for draws at a boundary, of which there are none among these."""
    logits_RV = torch.randn(len(MIXED), vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    found = []
    for place in ("cpu", device.type):
        sampler, asks = Sampler(vocab_size, machine_of(place)), [Ask(s, place=7) for s in MIXED]
        results = pick(logits_RV.to(place), numbers_of(asks).to(place), Way(True, True, True, 5), sampler.histories)
        found.append(results.cpu())
    assert torch.equal(found[0][:, 0], found[1][:, 0])
    assert torch.equal(found[0][:, 2:7], found[1][:, 2:7])
