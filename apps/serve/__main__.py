"""`serve [COMMAND] …`, also as `python -m apps.serve …`; without a command: serve models over HTTP."""

import sys
from importlib import import_module

from core.config import UserError, run_command
from core.runtime import leads

COMMANDS = {
    "chat": "talk to a served model in the terminal",
    "quantize": "write a model with weights in 8 or 4 bits",
    "plan": "devices that a model needs, by number format",
    "bench": "measure a server: throughput and latency",
}


def main() -> int:
    return run_command(_dispatch, sys.argv[1:], speaks=leads())


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(
            "serve --model DIR [--option value …]: serve models over HTTP; serve --model DIR --help lists the options"
        )
        print("serve COMMAND [--option value …]; serve COMMAND --help lists the options\n")
        print("\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items()))
        return 0
    command, *rest = argv
    if command.startswith("-"):
        return import_module("apps.serve.serve").main(argv)
    if command not in COMMANDS:
        raise UserError(
            f"serve has no command '{command}'; the commands are {', '.join(COMMANDS)}, or serve --model DIR"
        )
    return import_module(f"apps.serve.{command}").main(rest)


if __name__ == "__main__":
    sys.exit(main())
