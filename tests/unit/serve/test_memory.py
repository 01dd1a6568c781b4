"""What a model needs, against what it takes; and how what is free is divided among models."""

from dataclasses import replace

import pytest
import torch

from apps.serve.config import EngineConfig
from apps.serve.memory import Asked, Format, Load, Need, folder_format, need, quantized_format, share_out
from apps.serve.model import build_engines, find_model
from apps.serve.plan import formats
from apps.serve.runner import Runner, Step
from apps.serve.scheduler import Limits
from core.config import UserError, size_in_bytes
from core.models import SHAPES, save_pretrained
from core.nn.routing import MoEConfig
from core.quant import SCHEMES, Scheme, quantize, quantize_folder, stored_bytes
from core.quant.integers import NUM_DIGITS, exact_kernels
from core.trace.account import MemoryAccount
from tests.support.http_server import small_model
from tests.unit.models.test_pretrained import example, random_decoder

WIDE = {"dim": 128, "ffn_dim": 512, "num_heads": 4, "num_layers": 2, "max_length": 1024, "vocab_size": 500}
LLAMA = {"num_kv_heads": 4, "head_dim": None, "attention_bias": False, "mlp_bias": False}
CONFIGS = {
    "gpt2": example("gpt2", **WIDE),
    "opt": example("opt", **WIDE),
    "bloom": example("bloom", **WIDE),
    "llama": example("llama", **WIDE | LLAMA),
    "mixtral": example("llama", **WIDE | LLAMA, moe=MoEConfig(4, experts_per_token=2)),
}


def prompts(num_sequences: int, length: int, new: int, page_size: int = 16) -> Step:
    """A step of the last `new` tokens of each prompt, whose last logits are wanted."""
    step, each = Step(), -(-length // page_size)
    for number in range(num_sequences):
        pages, places = list(range(number * each, (number + 1) * each)), range(length - new, length)
        step.ids.extend([1] * new)
        step.positions.extend(places)
        step.slots.extend(pages[place // page_size] * page_size + place % page_size for place in places)
        step.tables.append(pages)
        step.lengths.append(length)
        step.starts.append(len(step.ids))
        step.rows.append(len(step.ids) - 1)
    return step


def cases():
    for name in CONFIGS:
        for dtype in (torch.float32, torch.bfloat16):
            for scheme in (None, *SCHEMES):
                if scheme is None or name in ("gpt2", "llama"):
                    yield name, dtype, scheme


@pytest.mark.parametrize(("name", "dtype", "scheme"), cases())
def test_weights_pages_and_work_are_what_a_step_takes(name, dtype, scheme):
    """Weights and pages to the byte; of the work at least what is measured, and hardly more."""
    config, num_pages = CONFIGS[name], 64
    model = random_decoder(config).to(dtype)
    if scheme is None:
        format = Format(dtype, dtype)
    else:
        quantize(model, scheme, embeddings=True, head=True)
        format = quantized_format(config, Scheme(scheme), dtype, dtype)
    # Several prompts; the second half of one, whose mask and bias are counted as torch needs them, which other ways of
    # computing attention do not.
    # Pieces of products in fp32, of constant size, are much of what so small a model takes.
    hardly = 1.65 if scheme in NUM_DIGITS and "floats" in exact_kernels() else 1.35
    for num_sequences, length, new, most in ((8, 64, 64, hardly), (1, 512, 256, 8)):
        needed = need(config, format, Load(num_sequences, length, num_sequences * new), device="cpu")
        # llm.int8: a weight has gains where its columns ask for them; beside parameters there are ALiBi's slopes
        assert needed.weights == pytest.approx(stored_bytes(model), rel=0.02 if scheme == "llm.int8" else 1e-4)
        runner, step = Runner(model, num_pages, 16, dtype), prompts(num_sequences, length, new)
        runner.run(step)  # what is kept from call to call
        held = [t for pages in runner.pages for t in (pages.k, pages.v)]
        assert num_pages * needed.page == sum(tensor.nbytes for tensor in held)
        with MemoryAccount() as account:
            account.add([*model.parameters(), *held])
            before = account.current_bytes
            runner.run(step)
        assert account.peak_bytes - before <= needed.work <= most * (account.peak_bytes - before)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("scheme", "ranks", "held"),
    [
        # 4,096 rows of 4,096 columns are 32 MiB widened; those of 8 bits are in fp32 before, or their results beside
        # them: for 2,048 tokens 16 MiB.
        ("int8", 1, (32 + 64) * MIB),
        ("int8", 2, (32 + 64) * MIB),
        ("int4", 1, (32 + 16) * MIB),
        # The codes of x, and sums of 16,384 channels three times over, in 32 bits; the bias in fp32.
        ("w8a8", 1, 2048 * (4096 + 4) + 12 * 2048 * 16384 + 4 * 16384),
        ("llm.int8", 1, 2048 * (16384 + 4)),
    ],
)
def test_what_products_hold_on_a_gpu_is_counted(monkeypatch, scheme, ranks, held):
    """Of the widest matrices of a model, 16,384 x 4,096."""
    config, half, load = SHAPES["gpt3_6_7b"], torch.float16, Load(8, 2048, 2048)
    format = quantized_format(config, Scheme(scheme), half, half)
    with_product = need(config, format, load, ranks)
    monkeypatch.setattr("apps.serve.memory.working_bytes", lambda *_: 0)
    assert with_product.work - need(config, format, load, ranks).work == held


def test_a_head_is_multiplied_with_the_last_rows_alone():
    """Of each sequence, and not with all tokens of a step."""
    config, half = replace(SHAPES["debug"], vocab_size=1 << 20, dim=1024), torch.float16
    format = quantized_format(config, Scheme("w8a8"), half, half)
    head = {name: one for name, one in format.stored.items() if name == "embedding.tokens.weight"}
    alone = replace(format, stored=head)
    many, few = (need(config, alone, Load(sequences, 128, 2048)).work for sequences in (8, 4))
    none = [need(config, replace(format, stored={}), Load(n, 128, 2048)).work for n in (8, 4)]
    assert (many - none[0]) - (few - none[1]) == 4 * (1024 + 4) + 12 * 4 * (1 << 20)


def test_models_of_one_server_share_what_is_free():
    """A second model of the same size gets the same, however little the first would have left it."""
    needed = Need(weights=1000, page=10, work=100)
    one, two = (Asked(name, needed, most_pages=10**6) for name in "ab")
    rooms = share_out([one, two], 10_000, "cpu")
    assert [room.num_pages for room in rooms] == [97, 98]  # a quarter of 7,800, half of it each
    assert share_out([one], 10_000, "cuda")[0].num_pages == int(0.85 * 8900) // 10
    few = Asked("b", needed, most_pages=20)
    assert [room.num_pages for room in share_out([one, few], 10_000, "cpu")] == [175, 20]  # what it cannot use
    given = Asked("b", needed, most_pages=10**6, kv_bytes=5000)
    assert [room.num_pages for room in share_out([one, given], 10_000, "cpu")] == [70, 500]


def test_second_forms_take_no_more_than_half_of_what_is_left():
    asked = [Asked(name, Need(1000, 10, 0, forms=1000), 10**6) for name in "ab"]
    assert [room.forms for room in share_out(asked, 10_000, "cpu")] == [True, True]
    assert [room.forms for room in share_out(asked, 4_500, "cpu")] == [True, False]
    assert [room.forms for room in share_out(asked, 3_500, "cpu")] == [False, False]


def test_what_does_not_fit_is_refused_by_its_parts():
    small, large = Asked("small", Need(1000, 10, 100), 10), Asked("large", Need(9 * 10**9, 10, 100), 10)
    with pytest.raises(UserError, match=r"4\.66 GiB are free on a rank, and small .* large 8\.38 GiB for its weights"):
        share_out([small, large], 5 * 10**9, "cpu")
    with pytest.raises(UserError, match=r"small .*2\.79 GiB for pages"):
        share_out([Asked("small", Need(1000, 10, 100), 10**9, kv_bytes=3 * 10**9)], 10**9, "cpu")


def test_pages_that_hold_no_sequence_are_refused():
    """Two pages are the least: given where a share would be less, and refused where they do not fit."""
    one = Asked("a", Need(1000, 100, 100), most_pages=100)
    for device in ("cpu", "cuda"):
        assert share_out([one], 1300, device)[0].num_pages == 2
        for free in (1299, 1200, 1100):
            with pytest.raises(UserError, match=r"1.\d\d KiB are free .* a 1000 bytes for .*, 200 bytes for pages"):
                share_out([one], free, device)
    several = [one, Asked("b", Need(1000, 10, 100), 10**6), Asked("c", Need(1000, 300, 100), 100, least_pages=3)]
    assert [room.num_pages for room in share_out(several, 4420, "cpu")] == [2, 2, 3]
    tight = Asked("a", Need(1000, 100, 100, forms=150), 100)
    assert [share_out([tight], free, "cpu")[0].forms for free in (1449, 1450)] == [False, True]


def test_a_cache_that_holds_no_sequence_is_told_what_would():
    needed = Need(1000, 3333, 100)
    with pytest.raises(UserError, match=r"^--engine.cache 3.91 KiB holds no sequence of a; give") as caught:
        share_out([Asked("a", needed, 100, kv_bytes=4000)], 10**6, "cpu")
    room = size_in_bytes(str(caught.value).split("at least ")[1], "engine.cache", "GiB")
    assert share_out([Asked("a", needed, 100, kv_bytes=room)], 10**6, "cpu")[0].num_pages == 2


@pytest.mark.parametrize("page_size", [1, 16])
def test_no_weights_are_read_where_no_sequence_would_fit(tmp_path, monkeypatch, page_size):
    source = find_model(small_model(tmp_path / "one"))
    asked = []

    def kept(found, free, device):
        asked.extend(found)
        return share_out(found, free, device)

    monkeypatch.setattr("apps.serve.model.share_out", kept)
    engine = EngineConfig(page_size=page_size)
    enough = build_engines([source], engine, "cpu")["one"]
    least, needed = asked[0].least_pages, asked[0].need
    monkeypatch.setattr("apps.serve.model.free_bytes", lambda device, axis: needed.total(least))
    assert build_engines([source], engine, "cpu")["one"].pages.num_pages == least < enough.pages.num_pages
    monkeypatch.setattr("apps.serve.model._load", lambda *options: pytest.fail("weights were loaded"))
    monkeypatch.setattr("apps.serve.model.free_bytes", lambda device, axis: needed.total(least) - 1)
    with pytest.raises(UserError, match="memory does not suffice"):
        build_engines([source], engine, "cpu")
    with pytest.raises(UserError, match="holds no sequence"):
        build_engines([source], EngineConfig(page_size=page_size, cache=f"{least * needed.page - 1}B"), "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_counted_in_the_format_in_which_it_computes(tmp_path, dtype):
    """An fp32 folder is not one of 16 bits; a quantized one is as large as its files; on two ranks about half."""
    config = example("gpt2", **WIDE)
    save_pretrained(random_decoder(config).to(dtype), config, tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "int8", "int8", embeddings=True, head=True)
    load = Load(1, 16, 16)
    for folder, size in (("plain", dtype.itemsize), ("int8", 1.05)):
        format = folder_format(config, tmp_path / folder, None, None, None)
        assert (format.dtype, format.pages) == (dtype, dtype)
        one, two = (need(config, format, load, ranks).weights for ranks in (1, 2))
        assert one == pytest.approx(size * config.num_parameters(), rel=0.05)
        assert 0.5 * one <= two < 0.75 * one  # positions and norms are on both
        assert formats(config, tmp_path / folder)["as it is"].dtype == dtype
    assert folder_format(config, tmp_path / "plain", torch.float16, None, None).dtype == torch.float16


def test_a_server_measures_what_is_free_once(tmp_path, monkeypatch):
    """Two models alike have pages alike, though loading the first leaves less."""
    sources = [find_model(small_model(tmp_path / name)) for name in ("one", "two")]
    free = iter([10_000_000, 1000, 1000])
    monkeypatch.setattr("apps.serve.model.free_bytes", lambda device, axis: next(free))
    engine = EngineConfig(max_running=64, max_batch_tokens=100)
    found = build_engines(sources, engine, "cpu")
    assert found["one"].pages.num_pages == found["two"].pages.num_pages > 100


def test_layers_with_a_window_have_few_pages_of_their_own():
    """Their bytes are what the tensors take, and a gigabyte holds the pages whose bytes it is."""
    config, half = example("gemma3_text", max_length=100), torch.bfloat16
    decoder, limits = random_decoder(config).to(half), Limits(2, 24, 8, 2, local_window=config.local_window)
    needed = need(config, Format(half, half), Load(2, 100, 24, 2, local_window=config.local_window), device="cpu")
    for num_pages in (5, 200):
        runner = Runner(decoder, num_pages, 2, half, local=limits.local(num_pages))
        assert needed.cache(num_pages) == sum(x.nbytes for pages in runner.pages for x in (pages.k, pages.v))
    assert needed.most_local < 200
    for num_pages in range(1, 200):
        assert needed.pages_in(needed.cache(num_pages)) == num_pages == needed.pages_in(needed.cache(num_pages + 1) - 1)
    gemma, load = SHAPES["gemma3_1b"], Load(8, 32768, 2048)
    one_kind = need(gemma, Format(half, half), load)
    two = need(gemma, Format(half, half), replace(load, local_window=gemma.local_window))
    assert two.page + two.local_page == one_kind.page
    assert two.cache(load.pages) < one_kind.cache(load.pages) / 5


def test_pages_and_keys_of_windows():
    """Four sequences hold three pages each for their windows, and those of a step's tokens."""
    load = Load(4, 1000, 64, 16, window=32)
    assert (load.pages, load.seen) == (4 * 3 + 4, 96)
    assert replace(load, length=20).pages == 4 * 2
    assert (replace(load, window=None).pages, replace(load, window=None).seen) == (4 * 63, 1000)
