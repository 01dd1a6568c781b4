"""`llm COMMAND …`, also as `python -m apps.llm COMMAND …` and under `torchrun -m apps.llm COMMAND …`."""

import sys

from core.config import App, importing

with importing():
    from core.runtime import tells

APP = App(
    "apps.llm",
    {
        "pretrain": "train a decoder from scratch on text",
        "finetune": "go on training a model that exists, on text or on prompt/completion pairs",
        "evaluate": "loss, perplexity and bits per byte of a model on text",
        "generate": "continue a prompt",
        "export": "a run's checkpoint as a Hugging Face folder",
        "tokenize": "prepare a corpus: tokenizer and token shards",
        "plan": "memory and time of a run, before it runs",
        "profile": "FLOPs, bytes and memory of a step, operator by operator, without memory or data",
        "scaling": "the scaling law of runs, and what a budget should train",
        "recipes": "the configurations that have a name",
    },
    usage="[--recipe NAME] [--option value …]",
)


def main() -> int:
    return APP.run(sys.argv[1:], speaks=tells)


if __name__ == "__main__":
    sys.exit(main())
