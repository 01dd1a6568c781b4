"""`diffusion finetune --method full|lora|dreambooth`: go on training a pipeline that exists.

Each method has a recipe of its name, whose defaults are taken unless --recipe names another.
"""

from apps.diffusion.train import run
from apps.diffusion.train_recipes import FINETUNE
from core.config import UserError, parse


def main(argv: list[str], command: str = "finetune", method: str = "full") -> int:
    method = _method(argv) or method
    if method not in FINETUNE:
        raise UserError(f"no method {method!r}; the methods are {', '.join(FINETUNE)}")
    return run(command, parse(FINETUNE, argv, f"diffusion {command}", default=method), argv)


def _method(argv: list[str]) -> str | None:
    """What --method says: it decides which defaults the other options change."""
    for option, after in zip(argv, [*argv[1:], ""]):
        name, equals, value = option.removeprefix("--").partition("=")
        if name == "method":
            return value if equals else after
    return None
