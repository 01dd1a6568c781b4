"""`diffusion finetune --method full|lora|dreambooth`: go on training a pipeline that exists.

Each method has a recipe of its name, whose defaults are taken unless --recipe names another.
"""

from typing import get_args

from apps.diffusion.config import Method
from apps.diffusion.train import run
from apps.diffusion.train_recipes import FINETUNE
from core.config import UserError, parse


def main(argv: list[str], command: str = "finetune", method: str = "full") -> int:
    method = _method(argv) or method
    if method not in get_args(Method):
        raise UserError(f"no method {method!r}; the methods are {', '.join(get_args(Method))}")
    return run(command, parse(FINETUNE, argv, f"megalith diffusion {command}", default=method), argv)


def _method(argv: list[str]) -> str | None:
    """The method that --method names: it decides which defaults the other options change."""
    for option, after in zip(argv, [*argv[1:], ""]):
        name, equals, value = option.removeprefix("--").partition("=")
        if name == "method":
            return value if equals else after
    return None
