"""A decoder cut over ranks serves what it serves whole: tokens, with preemption, whatever the layout."""

import pytest
import torch
import torch.distributed as dist

from apps.llm.tokenizer import byte_tokenizer
from apps.serve.config import EngineConfig
from apps.serve.engine import Engine
from apps.serve.memory import Load, folder_format, need
from apps.serve.model import build_engine, find_source
from apps.serve.runner import Runner
from apps.serve.scheduler import Limits
from core.mesh import MeshConfig, build_mesh
from core.models import load_weights, save_pretrained
from core.models.decoder import Decoder
from core.models.plan import tensor_parallel_plan
from core.parallel.plan import apply_plan
from core.precision import compute_dtype
from core.quant import QuantizedWeight, Scheme, is_quantized, load_quantized, quantize_folder, stored_bytes
from tests.support.serving import Letters, greedy, run
from tests.unit.models.test_pretrained import example, random_decoder

CONFIGS = {
    "gpt2": example("gpt2", num_heads=4, max_length=32),
    "opt_350m": example("opt", num_heads=2, max_length=32, embed_dim=12, norm_first=False, final_norm=False),
    "bloom": example("bloom", num_heads=6, max_length=32),
    "llama": example("llama", num_heads=4, num_kv_heads=2, max_length=32),
}
# Lengths of one token too: a step of a single row is cut over the ranks like any other.
PROMPTS = [[7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 10], [60] * 13]
NEW = 9


def engine_of(config, folder, tp, num_pages, scheme=None):
    axis = None if tp == 1 else build_mesh(MeshConfig(tp=tp).resolve(tp), "cpu")["tp"]
    if scheme is not None or is_quantized(folder):
        asked = {} if scheme is None else {"embeddings": True, "head": True}
        cut = None if axis is None else lambda m: apply_plan(m, tensor_parallel_plan(config), axis)
        model = load_quantized(folder, scheme, **asked, packed=False, cut=cut)
    elif tp == 1:
        model = random_decoder(config).float()
    else:
        with torch.device("meta"):
            model = Decoder(config)
        apply_plan(model, tensor_parallel_plan(config), axis)
        model.float().to_empty(device="cpu")
        load_weights(model, config, folder)
    runner = Runner(model, num_pages, 2, torch.float32, axis)
    return Engine(
        runner, Letters(), Limits(2, 16, 5, 4), num_pages=num_pages, vocab_size=config.vocab_size, max_length=32
    )  # fmt: skip


def case(config, folder, tp, num_pages, scheme=None):
    """On the first rank what was written, and how often somebody was preempted; the others follow."""
    engine = engine_of(config, folder, tp, num_pages, scheme)
    if tp > 1 and dist.get_rank() > 0:
        engine.runner.follow()
        return None
    engine.runner.beat()
    written = run(engine, [greedy(str(n), prompt, NEW, logprobs=0) for n, prompt in enumerate(PROMPTS)])
    engine.runner.release()
    ids = [written.ids(str(n)) for n in range(len(PROMPTS))]
    logprobs = [token.logprob for n in range(len(PROMPTS)) for token in written.tokens[str(n), 0]]
    heads = engine.runner.pages[0].k.shape[2]
    weights = stored_bytes(engine.runner.model)
    return ids, logprobs, engine.counts.preemptions, engine.counts.page_copies, heads, weights


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_write_what_one_writes(ranks, name, tmp_path):
    config = CONFIGS[name]
    save_pretrained(random_decoder(config).float(), config, tmp_path)
    ids, logprobs, *_ = ranks(1).run(case, config, tmp_path, 1, 200)[0]
    for num_pages in (200, 14):
        found, *others = ranks(2).run(case, config, tmp_path, 2, num_pages)
        assert others == [None]
        assert found[0] == ids
        assert found[1] == pytest.approx(logprobs, abs=1e-4)
        assert (found[2] > 0) == (num_pages == 14)
        assert found[4] == config.kv_heads // 2


def loaded(folder, tp, precision, scheme=None):
    """By the way of the command: the format in which it computes, bytes of its weights, those that it was to need, and
    pages."""
    axis = None if tp == 1 else build_mesh(MeshConfig(tp=tp).resolve(tp), "cpu")["tp"]
    source, config = find_source(folder), EngineConfig(precision=precision, max_running=4, max_batch_tokens=64)
    engine = build_engine(source, config, "cpu", axis, scheme)
    model, pages = engine.runner.model, engine.runner.pages[0].k
    dtype = None if precision == "auto" else compute_dtype(precision)
    format = folder_format(source.config, source.folder, dtype, None, scheme)
    needed = need(source.config, format, Load(4, 32, 64), tp).weights
    parameters = {p.dtype for p in model.parameters() if not isinstance(p, QuantizedWeight)}
    return parameters, pages.dtype, stored_bytes(model), needed, len(pages)


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
    config, folder = example(name, **WIDE), tmp_path / "plain"
    save_pretrained(random_decoder(config).float(), config, folder)
    quantize_folder(folder, tmp_path / "quantized", scheme, embeddings=True, head=True)
    # In 8 bits each rank rounds its part of an input, to 15 bits of the part's own largest element.
    tolerance = {"int8": 5e-3, "int4": 1e-4}[scheme]
    ids, logprobs, *_, whole = ranks(1).run(case, config, folder, 1, 200, Scheme(scheme))[0]
    for source, how in ((folder, Scheme(scheme)), (tmp_path / "quantized", None)):
        found, _ = ranks(2).run(case, config, source, 2, 200, how)
        assert found[0] == ids
        assert found[1] == pytest.approx(logprobs, abs=tolerance)
        assert found[5] < 0.53 * whole
