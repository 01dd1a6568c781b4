"""`llm finetune`: go on training a model that exists, on text or on prompt/completion pairs.

The same loop, mesh and options as `llm pretrain`; the model's shape, its weights and its tokenizer come from --model.
"""

from dataclasses import replace
from pathlib import Path

from apps.llm.config import FINETUNE
from apps.llm.model import find_model
from apps.llm.pretrain import run
from core.config import UserError, parse
from core.models.decoder import DecoderConfig


def main(argv: list[str]) -> int:
    config = parse({"default": lambda: FINETUNE}, argv, "megalith llm finetune", default="default")
    if config.source == Path():
        raise UserError("no --model given; it is the folder of the model to go on from (Hugging Face, or a run)")
    source = find_model(config.source)
    _refuse_shape(config.model)
    tokenizer = config.data.tokenizer if config.data.tokenizer != "bpe" else str(source.tokenizer_folder)
    config = replace(config, model=source.config, data=replace(config.data, tokenizer=tokenizer))
    return run("finetune", config, argv, materialise=source.fill)


def _refuse_shape(given: DecoderConfig) -> None:
    """A shape beside --model would be ignored, so it is refused."""
    if given != FINETUNE.model:
        raise UserError("model.* options beside --model: the shape is that of the folder; leave them out")
