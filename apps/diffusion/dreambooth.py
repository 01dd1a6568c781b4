"""`diffusion dreambooth`: teach a pipeline one subject, `diffusion finetune --method dreambooth` for short."""

from apps.diffusion import finetune


def main(argv: list[str]) -> int:
    return finetune.main(argv, "dreambooth", "dreambooth")
