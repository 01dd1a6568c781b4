"""The engine on real decoders: greedy tokens equal transformers', and nobody's tokens depend on the neighbours."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from apps.serve.model import longest_text
from apps.serve.request import Request, Sampling
from apps.serve.scheduler import Limits
from core.config import UserError
from core.models.rope import RopeScaling
from core.nn.routing import MoEConfig
from core.quant import quantize
from tests.support.serving import Written, greedy, random_schedule, real_engine, run
from tests.unit.models.test_generate import LONGROPE
from tests.unit.models.test_pretrained import example, in_transformers, random_decoder

LAYOUTS = {
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {}),
    "opt_350m": ("opt", {"embed_dim": 12, "norm_first": False, "final_norm": False}),
    "bloom": ("bloom", {}),
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "gemma3": ("gemma3_text", {}),
    "qwen3": ("qwen3", {"window": 4, "full_layers": (1,)}),
    "phi3": ("phi3", {"window": 4}),
    "gpt_neox": ("gpt_neox", {}),
    "yarn": ("llama", {"rope_scaling": RopeScaling(4.0, kind="yarn", original_max_length=8, beta_fast=2.0)}),
    "mixtral": ("llama", {"moe": MoEConfig(5, experts_per_token=2), "attention_bias": False, "mlp_bias": False}),
}
NEW = 10
# page_size, max_batch_tokens, prefill_chunk, max_running; pages: plenty, or hardly more than one sequence needs.
LIMITS = {
    "plenty": (Limits(4, 64, 16, 8), 400),
    "scarce": (Limits(2, 24, 5, 6), 22),
    "single": (Limits(1, 7, 3, 2), 80),
}
SEEDS = {kind: seed for seed, kind in enumerate(LIMITS)}
"""Of the prompts of each."""


def prompts(vocab_size, seed=0):
    """Ten prompts of 1 to 20 tokens, half of which begin alike and leave each other at odd places."""
    dice = random.Random(seed)
    shared = [dice.randrange(vocab_size) for _ in range(12)]
    own = lambda n: [dice.randrange(vocab_size) for _ in range(n)]  # noqa: E731
    return [
        own(1),
        own(2),
        own(7),
        own(20),
        own(13),
        *(shared[:n] + own(m) for n, m in ((12, 3), (12, 8), (9, 4), (5, 1), (12, 0))),
    ]


@pytest.fixture(scope="module", params=LAYOUTS)
def model(request, tmp_path_factory):
    """A decoder in fp32, and what transformers writes after each of 30 prompts, those of one length together."""
    family, changes = LAYOUTS[request.param]
    config = example(family, max_length=32, **changes)
    ours = random_decoder(config)
    theirs = in_transformers(ours, tmp_path_factory.mktemp("hf")).float()
    each = {tuple(prompt) for seed in SEEDS.values() for prompt in prompts(config.vocab_size, seed)}
    assert len(each) == 30
    written = {}
    for length in {len(prompt) for prompt in each}:
        alike = [prompt for prompt in each if len(prompt) == length]
        ids = torch.tensor(alike)
        with torch.no_grad():
            out = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
            )
        written |= dict(zip(alike, out[:, length:].tolist(), strict=True))
    return ours.float(), written


@pytest.mark.parametrize("kind", LIMITS)
def test_greedy_equals_transformers(model, kind):
    """30 texts of a model, ten by each schedule."""
    decoder, theirs = model
    limits, num_pages = LIMITS[kind]
    engine = real_engine(decoder, limits, num_pages)
    given = prompts(decoder.config.vocab_size, SEEDS[kind])
    asked, written, dice = list(enumerate(given)), Written(), random.Random(1)
    while asked or engine.has_work:  # they come at any time
        if asked and dice.random() < 0.5:
            number, prompt = asked.pop(0)
            engine.submit(greedy(str(number), prompt, NEW))
        written.take(engine.step())
    assert [written.ids(str(n)) for n in range(len(given))] == [theirs[tuple(prompt)] for prompt in given]
    scarce = kind == "scarce" and decoder.config.every_window is None  # else what pages a text holds does not grow
    assert (engine.counts.preemptions > 0) == scarce
    assert engine.counts.cached_tokens > 0
    assert engine.counts.page_copies > 0 or limits.page_size == 1
    assert engine.pages.num_free == num_pages


def sampled(name, prompt, seed, **options):
    return Request(name, tuple(prompt), NEW, Sampling(temperature=1.2, top_p=0.95, seed=seed), **options)


def sampled_requests():
    return [sampled(str(n), prompt, seed=n) for n, prompt in enumerate(prompts(61))]


def flat_model(scheme=None):
    """A decoder with flatter distributions, so that draws matter."""
    decoder = random_decoder(example("opt", max_length=32)).float()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(0.7)
    return decoder if scheme is None else quantize(decoder, scheme, embeddings=True, head=True)


def written_alone(decoder, asked, prepare=id):
    alone = {}
    for request in asked:
        engine = real_engine(decoder, Limits(16, 64, 64, 1), 8)
        prepare(engine.runner)
        alone[request.id] = run(engine, [request]).ids(request.id)
    assert len({tuple(ids) for ids in alone.values()}) == len(asked)
    return alone


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_tokens_do_not_depend_on_neighbours(scheme):
    """The same requests alone, and in many batches; tests/soak does it a thousand times."""
    decoder, asked, preempted = flat_model(scheme), sampled_requests(), 0
    alone = written_alone(decoder, asked)
    for seed in range(2):
        found, preemptions = random_schedule(decoder, asked, seed)
        assert found == alone, seed
        preempted += preemptions
    assert preempted > 0


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.float16, 0.003), (torch.int8, 0.03)])
def test_narrow_pages(dtype, bound):
    """Logits stay near those of fp32 pages, and differ: the pages are what was asked for."""
    decoder = random_decoder(example("llama", max_length=32)).float()
    prompt = prompts(61)[3]
    rows = {}
    for page_dtype in (torch.float32, dtype):
        engine = real_engine(decoder, Limits(4, 64, 6, 4), 20, page_dtype, max_length=40)
        kept, compute = [], engine.runner.run
        engine.runner.run = lambda step, kept=kept, compute=compute: kept.append(compute(step)) or kept[-1]
        run(engine, [greedy("a", prompt, 1)])
        rows[page_dtype] = kept[-1][-1]
        assert engine.runner.pages[0].k.dtype == page_dtype
    error = (rows[dtype] - rows[torch.float32]).norm() / rows[torch.float32].norm()
    assert 0 < error < bound


def test_logprobs_of_text_and_prompt():
    """Those of the model's own forward, in chunks and after a preemption too; the likeliest first."""
    config = example("gpt2", max_length=32)
    decoder, plain = random_decoder(config).float(), random_decoder(config).float()
    prompt = prompts(config.vocab_size)[3]
    for limits, num_pages in LIMITS.values():
        engine = real_engine(decoder, limits, num_pages)
        others = [greedy(f"other {n}", p, NEW) for n, p in enumerate(prompts(config.vocab_size)[4:])]
        written = run(engine, [*others, greedy("a", prompt, NEW, logprobs=3, prompt_logprobs=2)])
        tokens = written.tokens["a", 0]
        whole = [*prompt, *(token.id for token in tokens)]
        with torch.no_grad():
            logprobs = plain(torch.tensor([whole])).double().log_softmax(-1)[0]
        prompt_tokens = written.prompts["a"].tokens
        assert [token.id for token in prompt_tokens] == prompt
        assert prompt_tokens[0].logprob is None
        for place, token in enumerate([*prompt_tokens[1:], *tokens]):
            assert token.logprob == pytest.approx(float(logprobs[place, token.id]), abs=1e-4)
            count = 2 if place + 1 < len(prompt) else 3
            best = logprobs[place].topk(count)
            assert [other for other, _ in token.top] == best.indices.tolist()
            assert [p for _, p in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_only_the_prompt():
    decoder = random_decoder(example("gpt2", max_length=32)).float()
    engine = real_engine(decoder, LIMITS["plenty"][0], 40)
    written = run(engine, [greedy("a", [1, 2, 3], 0, prompt_logprobs=0), greedy("b", [1, 2], 0)])
    assert len(written.prompts["a"].tokens) == 3
    assert written.texts == {("a", 0): "", ("b", 0): ""}
    assert set(written.finish.values()) == {"length"}


def test_ends():
    """Tokens that end the text, not before min_tokens; stop strings; nothing left behind."""
    decoder = random_decoder(example("gpt2", max_length=32)).float()
    engine = real_engine(decoder, LIMITS["plenty"][0], 40)
    free = run(engine, [greedy("a", [5, 6], NEW)])
    ids, text = free.ids("a"), free.texts["a", 0]
    end = ids[3]
    first = ids.index(end)
    ended = run(engine, [greedy("b", [5, 6], NEW, stop_ids=frozenset({end}))])
    assert ended.ids("b") == ids[:first]
    assert [token.id for token in ended.tokens["b", 0] if token.ends] == [end]
    assert ended.finish["b", 0] == "stop"
    late = run(engine, [greedy("c", [5, 6], NEW, stop_ids=frozenset({end}), min_tokens=first + 2)])
    assert late.ids("c")[:first] == ids[:first]
    assert end not in late.ids("c")
    assert len(late.ids("c")) >= first + 2 - (late.finish["c", 0] == "stop")
    stop = text[4:6]
    stopped = run(engine, [greedy("d", [5, 6], NEW, stop=(stop,))])
    assert stopped.texts["d", 0] == text[: text.index(stop)]
    assert stopped.ids("d") == ids[: text.index(stop)]  # the tokens of the stop string are not told
    kept = run(engine, [greedy("e", [5, 6], NEW, stop=(stop,), include_stop=True)])
    assert kept.texts["e", 0] == text[: text.index(stop) + 2]
    assert engine.pages.num_free == 40


def test_impossible_requests():
    decoder = random_decoder(example("gpt2", max_length=32)).float()
    engine = real_engine(decoder, Limits(4, 64, 16, 8), 6)
    assert engine.max_length == 20  # what five of the six pages hold
    everything = frozenset(range(61))
    for request, message in (
        (greedy("a", [], 1), "empty"),
        (greedy("a", [61], 1), "outside 0 … 60"),
        (greedy("a", [1] * 15, 6), r"is 20 tokens\. However, you requested 21 tokens \(15 in the prompt\)"),
        (greedy("a", [1], 1, stop_ids=frozenset({99})), "token 99 is outside"),
        (greedy("a", [1], 1, stop_ids=everything, min_tokens=1), "every token ends"),
        (Request("a", (1,), 1, Sampling(logit_bias={-1: 1.0})), "token -1 is outside"),
    ):
        with pytest.raises(UserError, match=message):
            engine.submit(request)
    assert not engine.has_work
    with pytest.raises(UserError, match="hold no sequence"):
        real_engine(decoder, Limits(1, 64, 16, 8), 2)


def test_sequences_of_a_request_differ_and_repeat():
    decoder = random_decoder(example("bloom", max_length=32)).float()
    request = Request("a", (1, 2, 3, 4, 5), NEW, Sampling(temperature=2.0, seed=3), num_sequences=4)
    found = []
    for limits, num_pages in LIMITS.values():
        written = run(real_engine(decoder, limits, num_pages), [request])
        found.append([written.ids("a", i) for i in range(4)])
    assert found[0] == found[1] == found[2]
    assert all(a != b for a, b in itertools.combinations(found[0], 2))


def test_texts_that_are_turned_alike():
    """Pages keep keys as they were turned, so no text grows to where all its tokens turn otherwise."""
    stretched = RopeScaling(2.0, kind="dynamic")
    for config, most in (
        (example("llama", max_length=32), None),
        (example("llama", max_length=32, rope_scaling=stretched), 32),
        (example("gpt2", max_length=32), 32),
        (example("phi3", max_length=32, rope_scaling=LONGROPE), 8),
    ):
        source = SimpleNamespace(config=config, name="it")
        assert longest_text(source, None) == (most or 32)
        assert longest_text(source, 7) == 7
        if most is None:
            assert longest_text(source, 33) == 33
            continue
        why = "has positions for" if config.positions == "learned" else "turns all tokens of a text of more than"
        with pytest.raises(UserError, match=f"max_length is 33; it {why} {most}"):
            longest_text(source, 33)
