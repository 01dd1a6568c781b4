"""Loading what is served: a Hugging Face folder, or a run folder of `llm pretrain`, which has one inside."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from apps.serve.config import EngineConfig
from apps.serve.engine import Engine
from apps.serve.pace import Pace
from apps.serve.runner import PAGE_DTYPES, Runner
from apps.serve.scheduler import Limits
from apps.serve.text import Text, load_text
from core.config import UserError
from core.models import Decoder, DecoderConfig, load_config, load_pretrained, load_weights
from core.nn.packing import pack_linear
from core.precision import compute_dtype
from core.quant import Scheme, is_quantized, load_quantized, pack, stored_bytes
from core.runtime import device_bytes, gigabytes

# Of the memory that is free once the weights are there, for pages, where nothing is said.
_SHARE = {"cpu": 0.25, "cuda": 0.85}


@dataclass(frozen=True)
class Source:
    """A folder that holds a model, and the name under which it is served."""

    folder: Path
    name: str
    config: DecoderConfig


def find_source(folder: Path) -> Source:
    """What lies in a folder.  Raises UserError where that is no model."""
    inside = folder / "hf"
    is_run = not (folder / "tokenizer.json").is_file() and (inside / "config.json").is_file()
    if not folder.is_dir():
        raise UserError(f"no folder {folder}; give a Hugging Face folder, or a run folder of llm pretrain")
    if (folder / "checkpoints").is_dir() and not is_run and not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} is a run without a folder to serve, hf; make it: llm export --run {folder}")
    name = folder.resolve().name if folder.resolve().name != "hf" else folder.resolve().parent.name
    folder = inside if is_run else folder
    return Source(folder, name, load_config(folder))


def build_engine(
    source: Source, config: EngineConfig, device: str, axis: DeviceMesh | None = None, scheme: Scheme | None = None
) -> Engine:
    """Load a model and give it pages.

    axis    the tensor-parallel ranks that share it
    scheme  weights are quantized so while they are loaded; a folder that is quantized already takes none

    Raises UserError for a broken folder, and where memory does not suffice.
    """
    text = load_text(source.folder)
    check_vocabulary(source, text)
    if source.config.moe.num_experts and (scheme is not None or (axis is not None and axis.size() > 1)):
        raise UserError(f"{source.name} has experts, which are served whole on one rank; leave --tp and --quantize out")
    if config.compile:
        from apps.serve.compiled import check_compilable  # what it imports, others need not wait for

        check_compilable(device, 1 if axis is None else axis.size(), source.config.moe.num_experts)
    dtype = None if config.precision == "auto" else compute_dtype(config.precision)
    _require_memory(source, dtype, scheme, device, axis)
    model = _load(source, dtype, scheme, device, axis)
    model_dtype = model.embedding.tokens.weight.dtype
    page_dtype = model_dtype if config.page_dtype == "auto" else PAGE_DTYPES[config.page_dtype]
    limits = Limits(config.page_size, config.max_batch_tokens, config.prefill_chunk, config.max_running)
    max_length = config.max_length or source.config.max_length
    if source.config.positions == "learned" and max_length > source.config.max_length:
        raise UserError(
            f"max_length is {max_length}; {source.name} has positions for {source.config.max_length}, "
            "so give at most those"
        )
    num_pages = _num_pages(source.config, config, max_length, page_dtype, device, axis)
    runner = Runner(model, num_pages, config.page_size, page_dtype, axis)
    if config.compile:
        from apps.serve.compiled import compile_runner

        compile_runner(runner)
    return Engine(
        runner,
        text,
        limits,
        num_pages=num_pages,
        vocab_size=source.config.vocab_size,
        max_length=max_length,
        sharing=config.prefix_sharing,
        pace=Pace(config.stretch),
    )


def _load(
    source: Source, dtype: torch.dtype | None, scheme: Scheme | None, device: str, axis: DeviceMesh | None
) -> Decoder:
    ranks = 1 if axis is None else axis.size()

    def cut(model: nn.Module) -> None:
        from core.models.plan import tensor_parallel_plan  # what they import, one rank need not wait for
        from core.parallel.plan import apply_plan

        assert axis is not None
        apply_plan(model, tensor_parallel_plan(source.config), axis)

    if scheme is not None or is_quantized(source.folder):
        chosen: dict[str, Any] = {} if scheme is None else {"embeddings": True, "head": True}
        model = load_quantized(source.folder, scheme, **chosen, device=device, cut=cut if ranks > 1 else None)
        assert isinstance(model, Decoder)
        if scheme is not None and stored_bytes(model) < _free_bytes(device) // ranks // 2:
            pack(model)  # for speed, in as much memory again
        return model if dtype is None else model.to(dtype)
    if ranks == 1:
        model = load_pretrained(source.folder, dtype=dtype, device=device)
    else:
        with torch.device("meta"):
            model = Decoder(source.config)
        cut(model)
        model.to(dtype or torch.float32).to_empty(device=device)
        load_weights(model, source.config, source.folder)
    if stored_bytes(model) < _free_bytes(device) // ranks // 2:
        pack_linear(model)  # for speed, in as much memory again
    return model


def page_bytes(model: DecoderConfig, page_size: int, dtype: torch.dtype, ranks: int = 1) -> int:
    """Of one page in all layers, on one rank."""
    heads = model.kv_heads // ranks
    scales = 4 if dtype == torch.int8 else 0
    return 2 * model.num_layers * page_size * heads * (model.head_size * dtype.itemsize + scales)


def _num_pages(
    model: DecoderConfig,
    config: EngineConfig,
    max_length: int,
    dtype: torch.dtype,
    device: str,
    axis: DeviceMesh | None,
) -> int:
    """What `kv_gb` holds; else a share of what is free, and no more than all running sequences can use."""
    ranks = 1 if axis is None else axis.size()
    each = page_bytes(model, config.page_size, dtype, ranks)
    usable = config.max_running * (-(-max_length // config.page_size) + 1)
    if config.kv_gb is not None:
        return min(int(config.kv_gb * 1e9 / each), usable)
    return min(int(_SHARE[torch.device(device).type] * _free_bytes(device) / ranks / each), usable)


def _free_bytes(device: str) -> int:
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info()[0]
    return available_bytes()


def available_bytes() -> int:
    """What the kernel can give without swapping; what is cached of files counts."""
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _require_memory(
    source: Source, dtype: torch.dtype | None, scheme: Scheme | None, device: str, axis: DeviceMesh | None
) -> None:
    """Refuse what cannot fit before anything is read."""
    ranks = 1 if axis is None else axis.size()
    bits = 8 * (dtype or torch.float16).itemsize if scheme is None else scheme.bits
    needed = source.config.num_parameters() * bits // 8 // ranks
    if is_quantized(source.folder):
        needed = sum(file.stat().st_size for file in source.folder.glob("*.safetensors"))
    is_cuda = torch.device(device).type == "cuda"
    there = device_bytes(device, 1) if is_cuda else available_bytes() // ranks
    if needed > there:
        raise UserError(
            f"{source.name} needs {gigabytes(needed)} a rank for its weights, and {gigabytes(there)} are free; "
            "serve it over more ranks with --tp, or in fewer bits with --quantize"
        )


def check_vocabulary(source: Source, text: Text) -> None:
    """Raises UserError for a tokenizer of another model."""
    if text.vocab_size > source.config.vocab_size:
        raise UserError(
            f"{source.folder}: the tokenizer has {text.vocab_size} tokens, the model {source.config.vocab_size}; "
            "they do not belong together"
        )
    outside = sorted(one for one in text.end_ids if not 0 <= one < source.config.vocab_size)
    if outside:
        raise UserError(
            f"{source.folder}: eos_token_id is {outside[0]}, and the model's vocabulary has {source.config.vocab_size} "
            "tokens, so no text would end; correct generation_config.json or config.json"
        )
