"""`llm generate`: continue a prompt, printed as it is written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from apps.llm.model import find_model
from apps.llm.tokenizer import Tokenizer
from core.config import UserError, parse
from core.models import generate
from core.models.decoder import Decoder
from core.precision import MatmulPrecision, Precision, compute_dtype, set_matmul_precision
from core.runtime import device_of


@dataclass(frozen=True)
class GenerateConfig:
    model: Path = Path()
    """a Hugging Face folder, or a run folder of `megalith llm pretrain`"""
    prompt: str = ""
    """text to continue; none: from the start of a document"""
    max_new_tokens: int = 200
    temperature: float = 0.8
    """0 takes the likeliest token each time"""
    top_k: int | None = None
    """sample among this many likeliest tokens"""
    top_p: float | None = 0.95
    """sample among the likeliest tokens that together have this probability"""
    seed: int = 0
    num_samples: int = 1
    precision: Precision = "fp32"
    matmul_precision: MatmulPrecision = "highest"
    """of products in fp32: highest (exact), high (on a GPU by TF32, with 11 bits) or medium (as bf16)"""
    device: str = "auto"
    """cpu, cuda, cuda:N; auto: CUDA where there is one"""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.num_samples < 1:
            raise UserError(
                f"max_new_tokens={self.max_new_tokens}, num_samples={self.num_samples}; both are at least 1"
            )
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature}; give a number >= 0, such as 0.8")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k}; give a number of tokens, at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}; give a probability above 0 and at most 1")

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        if self.temperature:
            return {}
        why = "with temperature=0, which takes the likeliest token each time; leave it out"
        return dict.fromkeys(("top_k", "top_p", "seed", "num_samples"), why)


def main(argv: list[str]) -> int:
    config = parse({"default": GenerateConfig}, argv, "megalith llm generate", default="default")
    set_matmul_precision(config.matmul_precision)
    source = find_model(config.model)
    source.config.require_causal()
    model = source.load(compute_dtype(config.precision), device_of(config.device))
    tokenizer = source.tokenizer()
    for sample in range(config.num_samples):
        if config.num_samples > 1:
            print(f"--- sample {sample + 1}")
        print(config.prompt, end="", flush=True)
        write(model, tokenizer, config, seed=config.seed + sample, show=lambda text: print(text, end="", flush=True))
        print()
    return 0


def write(
    model: Decoder, tokenizer: Tokenizer, config: GenerateConfig, *, seed: int, show: Callable[[str], None]
) -> str:
    """Continue the prompt, and return the new text; `show` gets each piece as soon as its characters are complete.

    A text that ends amid a character ends in U+FFFD.
    """
    prompt = tokenizer.encode_prompt(config.prompt)
    written: list[int] = []
    shown = ""

    def stream(token_B: Tensor) -> None:
        nonlocal shown
        written.append(int(token_B[0]))
        text = tokenizer.decode(written, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # a character's bytes may come in several tokens
            show(text[len(shown) :])
            shown = text

    ids_BL = torch.tensor([prompt], device=next(model.parameters()).device)
    with torch.inference_mode():
        generate(
            model,
            ids_BL,
            config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=seed,
            eos_id=tokenizer.eos_id,
            stream=stream,
        )
    text = tokenizer.decode(written, skip_special_tokens=True)
    show(text[len(shown) :])
    return text
