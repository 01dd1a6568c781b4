"""The configuration of the serve commands."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from core.config import UserError, size_in_bytes
from core.precision import MatmulPrecision
from core.quant import Scheme
from core.quant.scheme import SchemeName

PageDtype = Literal["auto", "fp32", "bf16", "fp16", "int8"]


@dataclass(frozen=True)
class EngineConfig:
    """The options of a model's engine."""

    RENAMED: ClassVar[Mapping[str, str]] = {"kv_gb": "cache=GB"}

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """format of weights and activations; auto: that of the folder"""
    matmul_precision: MatmulPrecision = "highest"
    """of products in fp32: highest (exact), high (on a GPU by TF32, with 11 bits) or medium (as bf16)"""
    page_dtype: PageDtype = "auto"
    """format of the cache; auto: that of the activations"""
    page_size: int = 16
    """tokens of a page of the cache"""
    cache: str | None = None
    """memory for the cache of a model on a rank, such as 4GiB (4 alone is GiB); by default a share of what is free"""
    max_running: int = 64
    """sequences at once"""
    max_batch_tokens: int = 2048
    """tokens of all sequences in one step"""
    prefill_chunk: int = 512
    """tokens of prompts in a step at most, while sequences decode: bounds the longest pause"""
    stretch: float = 2.0
    """how many times as long a step may take on average while prompts wait and sequences decode: at 2 both get half of
    the time; more lets prompts begin sooner, less keeps the others' pace"""
    max_length: int | None = None
    """tokens of prompt and text together; by default those that the model is meant for"""
    prefix_sharing: bool = True
    """keep what was computed, for requests that begin alike"""
    compile: bool = False
    """compute by one graph of torch.compile, which takes up to a minute at the start; for CPUs with a C++ compiler"""
    graphs: Literal["auto", "on", "off"] = "auto"
    """capture steps in which all sequences decode, launch each as one, decide on the next meanwhile; auto: on CUDA"""

    def __post_init__(self) -> None:
        if self.cache is not None:
            size_in_bytes(self.cache, "engine.cache", "GiB")
        if self.stretch <= 1:
            raise UserError(f"stretch is {self.stretch}; prompts take time beside the decode batch; give more than 1")
        if self.max_length is not None and self.max_length < 2:
            raise UserError(f"max_length is {self.max_length}; prompt and text need at least 2 tokens")


@dataclass(frozen=True)
class HttpConfig:
    """The limits of clients."""

    RENAMED: ClassVar[Mapping[str, str]] = {"max_body_bytes": "max_body=B"}

    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0 for all"""
    port: int = 8000
    api_key_file: Path | None = None
    """file whose first line clients must send as a bearer token; none: no key is asked for"""
    allow_host: tuple[str, ...] = ()
    """names, beside --host and this machine's own (localhost, 127.0.0.1), under which the server may be called while it
    asks for no key; with --host 0.0.0.0 any address is fine"""
    cors_origins: tuple[str, ...] = ()
    """web origins whose pages may call the API"""
    max_queue: int = 256
    """requests that may wait; more are told to come again (429)"""
    timeout_s: float = 600.0
    """longest time of a request, waiting included"""
    drain_s: float = 30.0
    """after SIGTERM, time for requests that have begun"""
    max_body: str = "4MiB"
    """largest request body, such as 4MiB"""
    max_choices: int = 128
    """texts that one request may ask for"""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise UserError(f"port {self.port}; ports are 1 to 65535, 0 takes a free one")
        for name in ("max_queue", "timeout_s", "max_choices"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be positive")
        size_in_bytes(self.max_body, "max_body")


@dataclass(frozen=True)
class ServeConfig(HttpConfig):
    """Serve models over HTTP."""

    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("model", "host", "port", "api_key_file", "device", "tp", "quantize", "engine.precision"),
        *("engine.page_dtype", "engine.cache", "engine.max_running", "engine.max_length"),
    )

    model: tuple[Path, ...] = ()
    """folders to serve: Hugging Face's, or runs of megalith llm pretrain; the first is the default"""
    quantize: SchemeName | None = None
    """quantize weights while they are loaded, embeddings and head too; see docs/quantization.md"""
    group_size: int = 64
    """int4: weights that share a scale, 32, 64 or 128"""
    tp: int = 1
    """ranks over which the model is cut"""
    device: str = "auto"
    """cpu or cuda; auto: CUDA where there is one"""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scheme()
        if self.tp < 1:
            raise UserError(f"tp is {self.tp}; give the number of ranks, at least 1")
        if self.tp > 1 and len(self.model) > 1:
            raise UserError(f"{len(self.model)} models over tp={self.tp}; serve one, or start a server for each")

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        found = {}
        if self.quantize != "int4":
            found["group_size"] = f"with quantize={self.quantize}: only int4 has groups; give --quantize int4"
        if self.api_key_file is not None:
            found["allow_host"] = "with a key, which lets clients in under any name; leave out one of the two"
        return found

    def scheme(self) -> Scheme | None:
        """The scheme that weights are quantized by.  Raises UserError for a group size that there is not."""
        return None if self.quantize is None else Scheme(self.quantize, self.group_size)
