"""`llm tokenize`: prepare a corpus once, so that runs on it start at once."""

from dataclasses import dataclass, field
from pathlib import Path

from apps.llm.corpus import DataConfig, prepare
from apps.llm.pretrain import show_progress
from core.config import parse


@dataclass(frozen=True)
class TokenizeConfig:
    data: DataConfig = field(default_factory=DataConfig)
    out: Path = Path("runs/corpora")
    """folder of tokenized corpora; runs in runs/… find them there"""


def main(argv: list[str]) -> int:
    config = parse({"default": TokenizeConfig}, argv, "llm tokenize", default="default")
    corpus = prepare(config.data, config.out, progress=show_progress)
    for name, shards in (("train", corpus.train), ("heldout", corpus.heldout)):
        if shards is not None:
            bytes_per_token = shards.num_text_bytes / shards.num_tokens
            print(
                f"{name:8} {shards.num_documents:,} documents, {shards.num_text_bytes:,} bytes, "
                f"{shards.num_tokens:,} tokens ({bytes_per_token:.2f} bytes a token)  {shards.folder}"
            )
    if corpus.skipped:
        print(corpus.skipped)
    return 0
