"""`diffusion COMMAND …`, also as `python -m apps.diffusion COMMAND …`."""

import sys
from importlib import import_module

from core.config import UserError, run_command

COMMANDS = {
    "recipes": "the models that have a name",
}


def main() -> int:
    return run_command(_dispatch, sys.argv[1:], speaks=_leads())


def _leads() -> bool:
    from core.runtime import leads

    return leads()


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("diffusion COMMAND [--option value …]; diffusion COMMAND --help lists the options\n")
        print("\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items()))
        return 0
    command, *rest = argv
    if command not in COMMANDS:
        raise UserError(f"diffusion has no command '{command}'; the commands are {', '.join(COMMANDS)}")
    return import_module(f"apps.diffusion.{command}").main(rest)


if __name__ == "__main__":
    sys.exit(main())
