"""`diffusion COMMAND …`, also as `python -m apps.diffusion COMMAND …`."""

import sys

from core.config import App, importing

with importing():
    from core.runtime import tells

APP = App(
    "apps.diffusion",
    {
        "pretrain": "train a U-Net from nothing on captioned images",
        "finetune": "go on training a pipeline, on captioned images or on one subject",
        "dreambooth": "teach a pipeline one subject from a few images",
        "sample": "pictures of prompts",
        "convert": "a pipeline or a LoRA from one format into another",
        "quantize": "weights in 8 or 4 bits, convolutions too",
        "plan": "memory of sampling or of a training step, before it runs",
        "recipes": "the models that have a name",
    },
)


def main() -> int:
    return APP.run(sys.argv[1:], speaks=tells)


if __name__ == "__main__":
    sys.exit(main())
