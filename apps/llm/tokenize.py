"""`llm tokenize`: prepare a corpus once, so that runs on it start at once."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

from apps.llm.corpus import DataConfig, prepare
from apps.llm.pretrain import show_progress
from core.config import parse
from core.data import RampConfig


@dataclass(frozen=True)
class TokenizeConfig:
    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *(
            "data.path",
            "data.format",
            "data.tokenizer",
            "data.vocab_size",
            "data.heldout_fraction",
            "data.cache",
            "out",
        ),
    )

    data: DataConfig = field(default_factory=DataConfig)
    out: Path = Path("runs/corpora")
    """folder of tokenized corpora; runs in runs/… find them there"""

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        of_runs = ("sequence_length", "global_batch", "mask_documents", *(f"ramp.{f.name}" for f in fields(RampConfig)))
        return {f"data.{name}": "of the runs, which cut the tokens into rows; leave it out" for name in of_runs}


def main(argv: list[str]) -> int:
    config = parse({"default": TokenizeConfig}, argv, "megalith llm tokenize", default="default")
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
