"""`fold COMMAND …`, also as `python -m apps.fold COMMAND …`."""

import sys

from core.config import App, importing

WITHOUT_TORCH = ("msa",)
"""Commands that are never one rank of several, and start in a moment because they import no torch."""

APP = App(
    "apps.fold",
    {
        "predict": "structures with confidences for the sequences of a FASTA file",
        "plan": "whether a prediction fits, how it would be cut, how long a sequence may be",
        "msa": "alignments of sequences with databases, by jackhmmer, hhblits and MMseqs2",
        "train": "the model, on structures with alignments",
        "evaluate": "a prediction against an experimental structure",
        "convert": "weights from one format into another",
        "doctor": "compare this installation with a golden run of the original code",
        "recipes": "the model presets",
    },
)


def main() -> int:
    return APP.run(sys.argv[1:], speaks=sys.argv[1:2] in [[c] for c in WITHOUT_TORCH] or _leads())


def _leads() -> bool:
    with importing():
        from core.runtime import leads
    return leads()


if __name__ == "__main__":
    sys.exit(main())
