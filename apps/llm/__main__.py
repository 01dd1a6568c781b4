"""`llm COMMAND …`, also as `python -m apps.llm COMMAND …` and under `torchrun -m apps.llm COMMAND …`."""

import sys
from importlib import import_module

from core.config import UserError, run_command
from core.runtime import leads

COMMANDS = {
    "pretrain": "train a decoder from scratch on text",
    "finetune": "go on training a model that exists, on text or on prompt/completion pairs",
    "evaluate": "loss, perplexity and bits per byte of a model on text",
    "generate": "continue a prompt",
    "export": "a run's checkpoint as a Hugging Face folder",
    "tokenize": "prepare a corpus: tokenizer and token shards",
    "plan": "memory and time of a run, before it runs",
    "recipes": "the configurations that have a name",
}


def main() -> int:
    return run_command(_dispatch, sys.argv[1:], speaks=leads())


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("llm COMMAND [--recipe NAME] [--option value …]; llm COMMAND --help lists the options\n")
        print("\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items()))
        return 0
    command, *rest = argv
    if command not in COMMANDS:
        raise UserError(f"llm has no command '{command}'; the commands are {', '.join(COMMANDS)}")
    return import_module(f"apps.llm.{command}").main(rest)


if __name__ == "__main__":
    sys.exit(main())
