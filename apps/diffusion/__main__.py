"""`diffusion COMMAND …`, also as `python -m apps.diffusion COMMAND …`."""

import sys

from core.config import App
from core.runtime import leads

APP = App(
    "apps.diffusion",
    {
        "sample": "pictures of prompts",
        "recipes": "the models that have a name",
    },
)


def main() -> int:
    return APP.run(sys.argv[1:], speaks=leads())


if __name__ == "__main__":
    sys.exit(main())
