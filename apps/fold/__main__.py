"""`fold COMMAND …`, also as `python -m apps.fold COMMAND …`."""

import sys
from importlib import import_module

from core.config import UserError, run_command

WITHOUT_TORCH = ("msa",)
"""Commands that are never one rank of several, and start in a moment because they import no torch."""

COMMANDS = {
    "predict": "structures with confidences for the sequences of a FASTA file",
    "plan": "whether a prediction fits, how it would be cut, how long a sequence may be",
    "msa": "alignments of sequences with databases, by jackhmmer",
    "train": "the model, on structures with alignments",
    "evaluate": "a prediction against an experimental structure",
    "convert": "weights from one format into another",
    "doctor": "compare this installation with a golden run of the original code",
    "recipes": "the model presets",
}


def main() -> int:
    return run_command(_dispatch, sys.argv[1:], speaks=sys.argv[1:2] in [[c] for c in WITHOUT_TORCH] or _leads())


def _leads() -> bool:
    from core.runtime import leads

    return leads()


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("fold COMMAND [--option value …]; fold COMMAND --help lists the options\n")
        print("\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items()))
        return 0
    command, *rest = argv
    if command not in COMMANDS:
        raise UserError(f"fold has no command '{command}'; the commands are {', '.join(COMMANDS)}")
    return import_module(f"apps.fold.{command}").main(rest)


if __name__ == "__main__":
    sys.exit(main())
