"""`serve [COMMAND] …`, also as `python -m apps.serve …`; without a command: serve models over HTTP."""

import sys

from core.config import App, importing

with importing():
    from core.runtime import tells

APP = App(
    "apps.serve",
    {
        "chat": "talk to a served model in the terminal",
        "quantize": "write a model with weights in 8 or 4 bits",
        "plan": "devices that a model needs, by number format",
        "bench": "measure a server: throughput and latency",
    },
    bare=(
        "serve",
        "megalith serve --model DIR [--option value …]: serve models over HTTP; with --help, too, it lists the options",
    ),
)


def main() -> int:
    return APP.run(sys.argv[1:], speaks=tells)


if __name__ == "__main__":
    sys.exit(main())
