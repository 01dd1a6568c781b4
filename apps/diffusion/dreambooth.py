"""`diffusion dreambooth`: teach a pipeline one subject, `diffusion finetune --method dreambooth` for short.

With `--method lora` into low-rank adapters instead of the weights.
"""

from apps.diffusion import finetune


def main(argv: list[str]) -> int:
    return finetune.main(argv, "dreambooth", "dreambooth")
