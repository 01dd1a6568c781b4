"""Loading what is served: a Hugging Face folder, or a run folder of `llm pretrain`, which has one inside."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from apps.serve.config import EngineConfig
from apps.serve.decode import Decode, warm_up
from apps.serve.engine import Engine, length_within
from apps.serve.memory import Asked, Format, Load, Room, folder_format, free_bytes, need, share_out
from apps.serve.pace import Pace
from apps.serve.runner import PAGE_DTYPES, Runner
from apps.serve.sampler import Sampler
from apps.serve.scheduler import Limits
from apps.serve.text import Text, load_text
from core.config import UserError, in_words, size_in_bytes
from core.models import Decoder, DecoderConfig, load_config, load_pretrained, load_weights
from core.nn.packing import pack_linear
from core.precision import compute_dtype, set_matmul_precision
from core.quant import Scheme, is_quantized, load_quantized
from core.quant.folder import loaded_bytes
from core.quant.measured import measure_weights

log = logging.getLogger("serve")
_SAID_EACH_S = 10.0
"""how often a start that takes long says how far it is"""


@dataclass(frozen=True)
class ModelFolder:
    """A folder that holds a model, and the name under which it is served."""

    folder: Path
    name: str
    config: DecoderConfig


def find_model(folder: Path) -> ModelFolder:
    """Find the model in a folder.  Raises UserError where there is none, and for a masked language model."""
    inside = folder / "hf"
    is_run = not (folder / "tokenizer.json").is_file() and (inside / "config.json").is_file()
    if not folder.is_dir():
        raise UserError(f"no folder {folder}; give a Hugging Face folder, or a run folder of megalith llm pretrain")
    if (folder / "checkpoints").is_dir() and not is_run and not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{folder} is a run without a folder to serve, hf; make it: megalith llm export --model {folder}"
        )
    name = folder.resolve().name if folder.resolve().name != "hf" else folder.resolve().parent.name
    folder = inside if is_run else folder
    config = load_config(folder)
    config.require_causal()
    return ModelFolder(folder, name, config)


def build_engine(
    source: ModelFolder, config: EngineConfig, device: str, axis: DeviceMesh | None = None, scheme: Scheme | None = None
) -> Engine:
    """`build_engines` of one model."""
    return build_engines([source], config, device, axis, scheme)[source.name]


def build_engines(
    sources: Sequence[ModelFolder],
    config: EngineConfig,
    device: str,
    axis: DeviceMesh | None = None,
    scheme: Scheme | None = None,
) -> dict[str, Engine]:
    """Load models and give them pages; what is free is measured once and divided among them.

    axis    the tensor-parallel ranks that share each of them
    scheme  weights are quantized so while they are loaded; a folder that is quantized already takes none

    Returns name -> engine. Raises UserError for a broken folder, and where memory does not suffice, before weights are
    read.
    """
    set_matmul_precision(config.matmul_precision)
    texts = [load_text(source.folder) for source in sources]
    for source, text in zip(sources, texts, strict=True):
        check_vocabulary(source, text)
    plans = [_plan(source, config, device, axis, scheme) for source in sources]
    rooms = share_out([plan.asked for plan in plans], free_bytes(device, axis), device)
    return {
        source.name: _build(source, text, config, plan, room, device, axis, scheme)
        for source, text, plan, room in zip(sources, texts, plans, rooms, strict=True)
    }


@dataclass(frozen=True)
class _Plan:
    """How a model is held, decided before it is loaded."""

    format: Format
    limits: Limits
    max_length: int
    asked: Asked


def _plan(
    source: ModelFolder, config: EngineConfig, device: str, axis: DeviceMesh | None, scheme: Scheme | None
) -> _Plan:
    ranks = 1 if axis is None else axis.size()
    check_whole(source, ranks, scheme)
    if config.compile:
        from apps.serve.compiled import check_compilable  # what it imports, others need not wait for

        check_compilable(device, ranks, source.config.moe.num_experts)
    model = source.config
    limits = Limits(
        config.page_size, config.max_batch_tokens, config.prefill_chunk, config.max_running, model.every_window,
        model.local_window,
    )  # fmt: skip
    max_length = longest_text(source, config.max_length)
    dtype = None if config.precision == "auto" else compute_dtype(config.precision)
    pages = None if config.page_dtype == "auto" else PAGE_DTYPES[config.page_dtype]
    format = folder_format(source.config, source.folder, dtype, pages, scheme)
    load = Load(
        config.max_running, max_length, config.max_batch_tokens, config.page_size, limits.window, limits.local_window
    )
    needed = need(source.config, format, load, ranks, device)
    if is_quantized(source.folder) and ranks == 1:
        needed = replace(needed, forms=0)  # the first form is the mapped file, and leaves memory
    usable = config.max_running * (limits.pages(max_length) + 1)  # with a window more than is held, for shared texts
    kv_bytes = None if config.cache is None else size_in_bytes(config.cache, "engine.cache", "GiB")
    return _Plan(format, limits, max_length, Asked(source.name, needed, usable, limits.least_pages, kv_bytes))


def longest_text(source: ModelFolder, asked: int | None) -> int:
    """Tokens of a text at most.  Raises UserError for more than the model's positions allow."""
    model, most = source.config, source.config.alike_to
    if most is None:
        return asked or model.max_length
    if asked is not None and asked > most:
        have = f"{source.name} has positions for {most}"
        if model.rope_scaling is not None:
            have = f"{source.name} turns all tokens of a text of more than {most} otherwise, and pages hold them turned"
        raise UserError(f"max_length is {asked}; {have}, so give at most those")
    return asked or min(model.max_length, most)


def _build(
    source: ModelFolder,
    text: Text,
    config: EngineConfig,
    plan: _Plan,
    room: Room,
    device: str,
    axis: DeviceMesh | None,
    scheme: Scheme | None,
) -> Engine:
    says = log.info if axis is None or axis.get_local_rank() == 0 else log.debug
    size, begin = loaded_bytes(source.folder), time.monotonic()
    how = "" if scheme is None else f", which are rounded to {scheme.name}"
    says("%s: loading %s of weights%s", source.name, in_words(size), how)
    progress = _said_now_and_then(lambda done: says("%s: %s of %s", source.name, in_words(done), in_words(size)))
    model = _load(source, plan.format.dtype, scheme, device, axis, room.forms, progress)
    says("%s: loaded in %.1f s", source.name, time.monotonic() - begin)
    if torch.device(device).type == "cuda":
        from core.nn.by_kernels import by_kernels  # what it imports, a CPU need not wait for

        by_kernels(model)
    local = plan.limits.local(room.num_pages)
    runner = Runner(model, room.num_pages, config.page_size, plan.format.pages, axis, local)
    if config.compile:
        from apps.serve.compiled import compile_runner

        compile_runner(runner)
    max_length = length_within(plan.max_length, room.num_pages, plan.limits)
    sampler = _capture(runner, config, source.config, max_length, axis)
    return Engine(
        runner,
        text,
        plan.limits,
        num_pages=room.num_pages,
        vocab_size=source.config.vocab_size,
        max_length=plan.max_length,
        sharing=config.prefix_sharing,
        pace=Pace(config.stretch),
        sampler=sampler,
        ahead=runner.decode is not None,
    )


def _capture(
    runner: Runner, config: EngineConfig, model: DecoderConfig, max_length: int, axis: DeviceMesh | None
) -> Sampler | None:
    """Compile what steps need, and capture those of decoding alone.  Returns who draws for the runner's `decode`."""
    on_gpu, leads = runner.device.type == "cuda", axis is None or axis.get_local_rank() == 0
    if on_gpu:
        if leads:
            log.info("compiling and capturing steps")
        warm_up(runner, config.max_batch_tokens, max_length)
    if config.graphs == "off" or (config.graphs == "auto" and not on_gpu):
        return None
    sampler = Sampler(model.vocab_size, runner.machine) if leads else None
    Decode(runner, sampler, config.max_running, max_length)
    return sampler


def _said_now_and_then(say: Callable[[int], None]) -> Callable[[str, int], None]:
    """Progress in bytes, for a log: a line each `_SAID_EACH_S`."""
    said = time.monotonic()

    def progress(_: str, num_bytes: int) -> None:
        nonlocal said
        if time.monotonic() - said >= _SAID_EACH_S:
            said = time.monotonic()
            say(num_bytes)

    return progress


def _load(
    source: ModelFolder,
    dtype: torch.dtype,
    scheme: Scheme | None,
    device: str,
    axis: DeviceMesh | None,
    forms: bool,
    progress: Callable[[str, int], None],
) -> Decoder:
    """forms: give weights a second form for speed, in as much memory again"""
    ranks = 1 if axis is None else axis.size()

    def cut(model: nn.Module) -> None:
        from core.comm.sums import sums_over  # what they import, one rank need not wait for
        from core.models.plan import replicated_plan
        from core.parallel.plan import apply_plan

        assert axis is not None
        apply_plan(model, replicated_plan(source.config, sums_over(axis, device, dtype)), axis)

    if scheme is not None or is_quantized(source.folder):
        chosen: dict[str, Any] = {} if scheme is None else {"embeddings": True, "head": True}
        packed = forms or (scheme is None and ranks == 1)  # of a mapped folder one form is in memory
        model = load_quantized(
            source.folder, scheme, **chosen, device=device, packed=packed, cut=cut if ranks > 1 else None,
            progress=progress,
        )  # fmt: skip
        assert isinstance(model, Decoder)
        model = model.to(dtype)
        measure_weights(model, dtype)
        return model
    if ranks == 1:
        model = load_pretrained(source.folder, dtype=dtype, device=device)
    else:
        with torch.device("meta"):
            model = Decoder(source.config)
        cut(model)
        model.to(dtype).to_empty(device=device)
        load_weights(model, source.config, source.folder)
    if forms:
        pack_linear(model)
    return model


def check_whole(source: ModelFolder, ranks: int, scheme: Scheme | None) -> None:
    """Raises UserError where a model that is served whole and in plain weights is to be served otherwise."""
    if source.config.moe.num_experts and (scheme is not None or ranks > 1):
        raise UserError(f"{source.name} has experts, which are served whole on one rank; leave --tp and --quantize out")


def check_vocabulary(source: ModelFolder, text: Text) -> None:
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
