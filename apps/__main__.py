"""`megalith APP COMMAND …`: the four applications under one name; also `python -m apps APP COMMAND …`."""

import sys
from importlib import import_module

from core.config import HELP, UserError, run_command

APPS = {
    "llm": "train, fine-tune, evaluate and export language models",
    "diffusion": "train, fine-tune and sample Stable Diffusion",
    "fold": "predict protein structures, and train what predicts them",
    "serve": "serve language models over HTTP",
}


def main() -> int:
    return run_command(dispatch, sys.argv[1:])


def dispatch(argv: list[str]) -> int:
    """Run the application that argv names.  Raises UserError where there is none of that name."""
    if not argv or argv[0] in HELP:
        lines = ["megalith APP COMMAND …; megalith APP --help lists the app's commands", ""]
        print("\n".join([*lines, *(f"  {name:10} {what}" for name, what in APPS.items())]))
        return 0
    app, *rest = argv
    if app not in APPS:
        raise UserError(f"megalith has no app '{app}'; the apps are {', '.join(APPS)}")
    sys.argv = [f"megalith {app}", *rest]  # as the app's own command finds them
    return import_module(f"apps.{app}.__main__").main()


if __name__ == "__main__":
    sys.exit(main())
