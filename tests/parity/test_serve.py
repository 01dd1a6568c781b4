"""A decoder cut over ranks serves what it serves whole: tokens, with preemption, whatever the layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from apps.llm.tokenizer import byte_tokenizer
from apps.serve import model
from apps.serve.config import EngineConfig
from apps.serve.decode import Decode
from apps.serve.engine import Engine
from apps.serve.memory import Load, Room, folder_format, need, page_bytes, share_out
from apps.serve.model import find_model
from apps.serve.pages import most_local_pages
from core.mesh import MeshConfig, build_mesh
from core.models import DecoderConfig, save_pretrained
from core.precision import compute_dtype
from core.quant import QuantizedWeight, Scheme, quantize_folder, stored_bytes
from tests.support.serving import greedy, run
from tests.unit.models.test_pretrained import example, random_decoder

SIZES = {"max_length": 32, "vocab_size": 301}  # an odd vocabulary that has room for the bytes
CONFIGS = {
    "gpt2": example("gpt2", num_heads=4, **SIZES),
    "opt_350m": example("opt", num_heads=2, embed_dim=12, norm_first=False, final_norm=False, **SIZES),
    "bloom": example("bloom", num_heads=6, **SIZES),
    "llama": example("llama", num_heads=4, num_kv_heads=2, **SIZES),
    "mistral": example("mistral", num_heads=4, num_kv_heads=2, **SIZES),
    "gemma3": example("gemma3_text", num_heads=4, num_kv_heads=2, **SIZES),
    "qwen3": example("qwen3", num_heads=4, num_kv_heads=2, **SIZES),
}
# Lengths of one token too: a step of a single row is cut over the ranks like any other.
PROMPTS = [[7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 10], [60] * 13]
NEW = 9
MANY, FEW = 60, 14  # pages: as many as are used, and so few that somebody is preempted


def folder_of(config: DecoderConfig, folder: Path) -> Path:
    save_pretrained(random_decoder(config).float(), config, folder)
    byte_tokenizer().save(folder)
    return folder


def engine_of(
    folder: Path, tp: int, num_pages: int, scheme: Scheme | None, forms: bool, graphs: Literal["on", "off"] = "off"
) -> Engine:
    """The command's, in fp32 with small pages; every prompt begins as soon as it may.

    forms  weights may have second forms for speed; that of 4 bits rounds inputs to bf16, of the ranks' sums, too
    """
    source, page_size = find_model(folder), 2
    page, window = page_bytes(source.config, page_size, torch.float32, tp), source.config.local_window
    local = 0 if window is None else page * (1 - len(source.config.full_layers) / source.config.num_layers)
    of_window = 0 if window is None else min(num_pages, most_local_pages(window, page_size, 4, 16))
    cache = f"{round((num_pages + 0.5) * (page - local) + of_window * local)}B"
    config = EngineConfig(
        "fp32", page_size=page_size, cache=cache, max_running=4, max_batch_tokens=16, prefill_chunk=5, stretch=1e9,
        graphs=graphs,
    )  # fmt: skip
    axis = None if tp == 1 else build_mesh(MeshConfig(tp=tp).resolve(tp), "cpu")["tp"]
    with patch.object(model, "share_out", share_out if forms else without_forms):
        return model.build_engine(source, config, "cpu", axis, scheme)


def without_forms(*asked: Any) -> list[Room]:
    """What is given where memory suffices for no second form."""
    return [replace(room, forms=False) for room in share_out(*asked)]


def case(
    folder: Path, tp: int, num_pages: int, scheme: Scheme | None = None, forms: bool = True,
    graphs: Literal["on", "off"] = "off",
):  # fmt: skip
    """On the first rank what was written, and how often somebody was preempted; the others follow."""
    engine = engine_of(folder, tp, num_pages, scheme, forms, graphs)
    assert engine.pages.num_pages == num_pages
    if graphs == "on":  # those that captured steps know
        assert isinstance(engine.runner.decode, Decode)
        assert engine.runner.tokens is engine.runner.decode.tokens
    if tp > 1 and dist.get_rank() > 0:
        engine.runner.follow()
        return None
    engine.runner.beat()
    written = run(engine, [greedy(str(n), prompt, NEW, min_tokens=NEW, logprobs=0) for n, prompt in enumerate(PROMPTS)])
    engine.runner.release()
    ids = [written.ids(str(n)) for n in range(len(PROMPTS))]
    logprobs = [token.logprob for n in range(len(PROMPTS)) for token in written.tokens[str(n), 0]]
    heads = engine.runner.pages[0].k.shape[2]
    weights = stored_bytes(engine.runner.model)
    return ids, logprobs, engine.counts.preemptions, engine.counts.page_copies, heads, weights


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_write_what_one_writes(ranks, name, tmp_path):
    config = CONFIGS[name]
    folder = folder_of(config, tmp_path)
    ids, logprobs, *_ = ranks(1).run(case, folder, 1, MANY)[0]
    for num_pages in (MANY, FEW) if name == "gpt2" else (FEW,):
        found, *others = ranks(2).run(case, folder, 2, num_pages)
        assert others == [None]
        assert found[0] == ids
        assert found[1] == pytest.approx(logprobs, abs=1e-4)
        assert (found[2] > 0) == (num_pages == FEW and config.every_window is None)
        assert found[4] == config.kv_heads // 2


@pytest.mark.parametrize("name", ["bloom", "llama"])
def test_two_ranks_write_by_captured_steps_what_one_writes(ranks, name, tmp_path):
    """The next step begins on all ranks with the first one's tokens, before it has read them."""
    folder = folder_of(CONFIGS[name], tmp_path)
    ids, logprobs, *_ = ranks(1).run(case, folder, 1, MANY)[0]
    for num_pages in (MANY, FEW):
        found, *others = ranks(2).run(case, folder, 2, num_pages, None, True, "on")
        assert others == [None]
        assert found[0] == ids
        assert found[1] == pytest.approx(logprobs, abs=1e-4)
        assert (found[2] > 0) == (num_pages == FEW)


def messages(folder: Path, graphs: Literal["on", "off"]) -> tuple[int, int, int]:
    """On the first rank: steps, tensors sent for them, and objects pickled."""
    engine, sent, pickled = engine_of(folder, 2, MANY, None, True, graphs), [], []
    if dist.get_rank() > 0:
        engine.runner.follow()
        return 0, 0, 0
    runner, broadcast = engine.runner, engine.runner._broadcast
    with (
        patch.object(runner, "_broadcast", lambda x: sent.append(x.numel()) or broadcast(x)),
        patch.object(dist, "broadcast_object_list", lambda *objects, **options: pickled.append(objects)),
    ):
        run(engine, [greedy(str(n), prompt, NEW) for n, prompt in enumerate(PROMPTS)])
        steps = engine.counts.steps
        runner.release()
    return steps, len(sent), len(pickled)


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_a_step_is_one_message(ranks, graphs, tmp_path):
    """A tensor of numbers; and where steps are captured the tokens, which are part of them."""
    steps, sent, pickled = ranks(2).run(messages, folder_of(CONFIGS["llama"], tmp_path), graphs)[0]
    assert pickled == 0
    assert steps > NEW
    shared = steps if graphs == "on" else 0
    assert steps + 1 <= sent <= steps + 1 + shared


def loaded(folder, tp, precision, scheme=None):
    """By the way of the command: the format in which it computes, bytes of its weights, those that it was to need, and
    pages."""
    axis = None if tp == 1 else build_mesh(MeshConfig(tp=tp).resolve(tp), "cpu")["tp"]
    source, config = find_model(folder), EngineConfig(precision=precision, max_running=4, max_batch_tokens=64)
    engine = model.build_engine(source, config, "cpu", axis, scheme)
    decoder, pages = engine.runner.model, engine.runner.pages[0].k
    dtype = None if precision == "auto" else compute_dtype(precision)
    format = folder_format(source.config, source.folder, dtype, None, scheme)
    needed = need(source.config, format, Load(4, 32, 64), tp).weights
    parameters = {p.dtype for p in decoder.parameters() if not isinstance(p, QuantizedWeight)}
    return parameters, pages.dtype, stored_bytes(decoder), needed, len(pages)


def test_plain_and_quantized_folders_take_what_is_counted(ranks, tmp_path):
    """In the folder's own format or in the one that is asked for; each rank its part, and as many pages as the others,
    whatever a rank of its own finds free."""
    config = example("gpt2", **WIDE)
    for dtype, kind in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        save_pretrained(random_decoder(config).to(dtype), config, tmp_path / kind)
        byte_tokenizer().save(tmp_path / kind)
    quantize_folder(tmp_path / "bf16", tmp_path / "int8", "int8", embeddings=True, head=True)
    for kind, precision, computed in (
        ("bf16", "auto", torch.bfloat16),
        ("fp32", "auto", torch.float32),
        ("fp32", "fp16", torch.float16),
        ("int8", "auto", torch.bfloat16),
    ):
        found = ranks(2).run(loaded, tmp_path / kind, 2, precision)
        assert [(p, k) for p, k, *_ in found] == [({computed}, computed)] * 2
        assert all(num_bytes <= needed <= 1.01 * num_bytes for _, _, num_bytes, needed, _ in found)
        assert found[0][4] == found[1][4]


WIDE = {"dim": 128, "ffn_dim": 512, "num_heads": 4, "max_length": 32, "vocab_size": 300}


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_two_ranks_write_what_one_writes_of_quantized_weights(ranks, name, scheme, tmp_path):
    """Rounded as a whole, then cut; while loading, and from a quantized folder."""
    folder = folder_of(example(name, **WIDE), tmp_path / "plain")
    quantize_folder(folder, tmp_path / "quantized", scheme, embeddings=True, head=True)
    # In 8 bits each rank rounds its part of an input, to 15 bits of the part's own largest element.
    tolerance, forms = {"int8": (5e-3, True), "int4": (1e-4, False)}[scheme]
    ids, logprobs, *_, whole = ranks(1).run(case, folder, 1, MANY, Scheme(scheme), forms)[0]
    for source, how in ((folder, Scheme(scheme)), (tmp_path / "quantized", None)):
        found, _ = ranks(2).run(case, source, 2, MANY, how, forms)
        assert found[0] == ids
        assert found[1] == pytest.approx(logprobs, abs=tolerance)
        assert found[5] < 0.53 * whole
