"""What a step of decoding asks of a GPU, counted without one: a launch, two copies, a wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh

from apps.serve.decode import Decode
from apps.serve.engine import Engine
from apps.serve.request import Request, Sampling
from apps.serve.runner import Runner, Step
from apps.serve.sampler import Ask, Sampler
from apps.serve.scheduler import Limits
from core.comm.sums import sums_over
from core.layout import local
from core.mesh import MeshConfig, build_mesh
from core.models import Decoder
from core.models.plan import replicated_plan
from core.nn.attention import Attention
from core.nn.by_kernels import by_kernels
from core.parallel.plan import apply_plan
from core.placement.table import set_parameter
from core.quant import Scheme
from core.quant.scheme import SchemeName
from core.quant.weight import QuantizedWeight
from core.runtime import pretended
from tests.support.counted_machine import DEVICE, FakeGpu, counted_machine
from tests.support.serving import Letters
from tests.unit.models.test_pretrained import example
from tests.unit.serve.test_exact import LAYOUTS

LIMITS = Limits(4, 64, 16, 8)
WAYS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8},
    "sorted": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalised": {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {3: 2.0}},
}


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with counted_machine() as machine:
        yield machine


def quantized(model: Decoder, scheme: Scheme) -> None:
    """Every matrix, of integers that are not there: quantizing would look at numbers."""
    known: dict[int, torch.nn.Parameter] = {}
    for name, weight in list(model.named_parameters(remove_duplicate=False)):
        if weight.ndim == 2 and "positions" not in name:
            known.setdefault(id(weight), torch.nn.Parameter(_integers(weight, scheme), requires_grad=False))
            set_parameter(model, name, known[id(weight)])


def _integers(weight: torch.Tensor, scheme: Scheme) -> QuantizedWeight:
    O, I = weight.shape
    if scheme.name == "int4":
        groups = -(-I // scheme.group_size)
        codes = torch.empty(O, groups * scheme.group_size // 2, dtype=torch.uint8, device=DEVICE)
        scale = torch.empty(O, groups, dtype=torch.bfloat16, device=DEVICE)
    else:
        codes = torch.empty(O, I, dtype=torch.int8, device=DEVICE)
        scale = torch.empty(O, dtype=torch.float32, device=DEVICE)
    return QuantizedWeight(scheme, codes, scale, None, (O, I), torch.bfloat16)


def engine_on(
    gpu: FakeGpu, family: str, scheme: Scheme | None = None, page_dtype: torch.dtype = torch.bfloat16
) -> Engine:
    """As the command builds one on a GPU."""
    layout, changes = LAYOUTS[family]
    config = example(layout, max_length=64, **changes)
    torch.set_default_dtype(torch.bfloat16)  # fake parameters cannot be converted
    try:
        with torch.device(DEVICE):
            model = Decoder(config)
    finally:
        torch.set_default_dtype(torch.float32)
    for module in model.modules():
        if isinstance(module, Attention) and module.slopes is not None:
            module.slopes = module.slopes.to(DEVICE)
    if scheme is not None:
        quantized(model, scheme)
    return engine_of(gpu, model, page_dtype)


def engine_of(
    gpu: FakeGpu, model: Decoder, page_dtype: torch.dtype = torch.bfloat16, axis: DeviceMesh | None = None
) -> Engine:
    config = model.config
    limits = replace(LIMITS, window=config.every_window, local_window=config.local_window)
    runner = Runner(by_kernels(model), 100, limits.page_size, page_dtype, axis, limits.local(100))
    runner.machine = gpu
    leads = axis is None or axis.get_local_rank() == 0
    sampler = Sampler(config.vocab_size, gpu) if leads else None
    Decode(runner, sampler, limits.max_running, 64)
    return Engine(
        runner, Letters(), limits, num_pages=100, vocab_size=config.vocab_size, max_length=64, sampler=sampler,
        ahead=True,
    )  # fmt: skip


def start(engine: Engine, way: str, count: int = 3, **options: object) -> None:
    for number in range(count):
        sampling = Sampling(**WAYS[way], seed=number)
        engine.submit(Request(f"{way} {number}", (1, 2, 3 + number), 20, sampling, **options))


@pytest.mark.parametrize(
    ("way", "family"),
    [
        pytest.param(way, family, marks=() if at == of % len(WAYS) else pytest.mark.soak)
        for at, way in enumerate(WAYS)
        for of, family in enumerate(LAYOUTS)
    ],
)
def test_a_step_is_one_launch_two_copies_and_a_wait(gpu: FakeGpu, family: str, way: str) -> None:
    is_one_launch(engine_on(gpu, family), gpu, way)


def is_one_launch(engine: Engine, gpu: FakeGpu, way: str) -> None:
    counter = gpu.counter
    start(engine, way)
    for _ in range(3):  # prompts, and the first step by a graph
        engine.step()
    for _ in range(4):
        counter.reset()
        assert engine.step()
        assert (counter.graphs, counter.waits, counter.launches) == (1, 1, [])
        assert sorted(counter.copies) == ["cpu to cuda", "cuda to cpu"]


@pytest.mark.parametrize(
    ("capability", "product"), [((8, 0), "megalith::grouped_matmul"), ((9, 0), "aten::_grouped_mm")]
)
def test_experts_are_part_of_it(capability: tuple[int, int], product: str) -> None:
    """Only the device knows how many rows each expert has, and nobody asks it; by our product and by torch's."""
    with counted_machine(capability) as gpu:
        engine = engine_on(gpu, "mixtral")
        assert product in gpu.counter.captured
        is_one_launch(engine, gpu, "sorted")


@contextmanager
def one_of_two(rank: int, family: str) -> Iterator[tuple[FakeGpu, Engine]]:
    """A rank of tensor parallelism, whose other rank is not there either."""
    config = example(family, max_length=64, num_heads=4, num_kv_heads=2)
    with torch.device("meta"):
        model = Decoder(config)
    with pretended(2, rank):
        axis = build_mesh(MeshConfig(tp=2).resolve(2), "cpu")["tp"]
        apply_plan(model, replicated_plan(config, sums_over(axis, "cpu", torch.bfloat16)), axis)
        with counted_machine() as gpu:
            for name, parameter in list(model.named_parameters(remove_duplicate=False)):
                shape = local(parameter).shape
                there = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
                set_parameter(model, name, torch.nn.Parameter(there, requires_grad=False))
            yield gpu, engine_of(gpu, model, axis=axis)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_sums_of_ranks_are_part_of_it(family: str) -> None:
    """And so is the message with the drawn tokens; the numbers of a step go to the others from the host."""
    with one_of_two(0, family) as (gpu, engine):
        assert {"c10d::allreduce_", "c10d::_allgather_base_", "c10d::broadcast_"} <= gpu.counter.captured
        is_one_launch(engine, gpu, "sorted")


def test_a_rank_that_follows_waits_for_nothing() -> None:
    with one_of_two(1, "llama") as (gpu, engine):
        decode, counter = engine.runner.decode, gpu.counter
        assert isinstance(decode, Decode)
        step = Step([5], [0], [0], [[0]], [1], [0, 1], [0], drawn=[0], asks=[Ask(Sampling())])
        words = decode._filled(step, 1)
        decode._layouts[1].array(words, "header")[2:4] = 1, 0
        counter.reset()
        decode.follow(words)
        assert (counter.graphs, counter.waits, counter.launches, counter.copies) == (1, 0, [], ["cpu to cuda"])


@pytest.mark.parametrize("scheme", ["int8", "int4", "w8a8", "llm.int8"])
def test_quantized_weights_and_pages_too(gpu: FakeGpu, scheme: SchemeName) -> None:
    engine, counter = engine_on(gpu, "gpt2", Scheme(scheme), torch.int8), gpu.counter
    start(engine, "sorted")
    for _ in range(3):
        engine.step()
    counter.reset()
    assert engine.step()
    assert (counter.graphs, counter.waits, counter.launches, len(counter.copies)) == (1, 1, [], 2)


def test_told_logprobs_are_part_of_it(gpu: FakeGpu) -> None:
    engine, counter = engine_on(gpu, "llama"), gpu.counter
    start(engine, "greedy", logprobs=5)
    for _ in range(3):
        engine.step()
    counter.reset()
    assert engine.step()
    assert (counter.graphs, counter.waits, counter.launches, len(counter.copies)) == (1, 1, [], 2)


@pytest.mark.parametrize("family", ["opt", "gemma3", "mixtral"])
def test_a_step_with_prompts_is_one_copy_each_way(gpu: FakeGpu, family: str) -> None:
    """In chunks, of which nothing is read, and beside decoding sequences; operators are launched one by one there."""
    engine, counter = engine_on(gpu, family), gpu.counter
    start(engine, "sorted", count=2)
    for _ in range(4):
        engine.step()
    engine.submit(Request("long", tuple(range(50)), 5, Sampling(temperature=0)))
    computed = []
    for _ in range(5):
        before = engine.counts.computed_tokens
        counter.reset()
        assert engine.step()
        computed.append(engine.counts.computed_tokens - before)
        assert counter.waits == 1
        assert sorted(counter.copies) == ["cpu to cuda", "cuda to cpu"]
        assert (counter.graphs == 1) == (not counter.launches)
    assert computed == [18, 18, 18, 4, 3]


def test_a_prompt_that_is_scored_is_one_more_copy_each_way(gpu: FakeGpu) -> None:
    """Its tokens go there, and their logprobs come back; that others draw from some rows alone asks for nothing."""
    engine, counter, chunks = engine_on(gpu, "opt"), gpu.counter, 0
    start(engine, "sorted", count=1)
    for _ in range(4):
        engine.step()
    engine.submit(Request("scored", tuple(range(40)), 5, Sampling(temperature=0), prompt_logprobs=2))
    counter.reset()
    engine.step()  # reads the step before, and launches one with the first chunk
    while (flight := engine._flight) is not None and len(flight.asked) == 2:
        chunks += any(sequence.wants_prompt_logprobs for sequence, _ in flight.asked)
        scored = len(flight.prompts)
        assert len(flight.drawn) >= 1
        assert counter.copies.count("cpu to cuda") == 1 + scored
        assert counter.copies.count("cuda to cpu") == 1 + scored
        counter.reset()
        engine.step()
        assert counter.waits == 1 + scored
    assert chunks == 3


def test_a_wait_is_seen(gpu: FakeGpu) -> None:
    """The count can fail: what looks at a number, or launches by itself, is noticed."""
    x = torch.ones(3, device=DEVICE)
    for look in (lambda: x.sum().item(), lambda: x.tolist(), lambda: x.nonzero(), lambda: x[x > 0]):
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            look()
    gpu.counter.reset()
    x.add_(1)
    torch.arange(3, device="cpu").to(DEVICE)
    assert gpu.counter.launches == ["aten::add_"]
    assert gpu.counter.copies == ["cpu to cuda"]


def test_prompts_alone_launch_no_attention_of_theirs(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs, too: a step of decoding alone is known as one, and has no kernel for more than one query."""
    engine, contexts = engine_on(gpu, "gpt2"), []
    engine.runner.decode = None
    logits = engine.runner.logits
    monkeypatch.setattr(engine.runner, "logits", lambda *given: contexts.append(given[2].starts_B) or logits(*given))
    start(engine, "greedy")
    for _ in range(6):
        engine.step()
    assert [starts is None for starts in contexts] == [False, *[True] * 5]
