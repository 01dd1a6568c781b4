"""`fold COMMAND …`, also as `python -m apps.fold COMMAND …`."""

import sys

from core.config import App

WITHOUT_TORCH = ("msa", "msa-server")
"""Commands that are never one rank of several, and start in a moment because they import no torch."""

APP = App(
    "apps.fold",
    {
        "predict": "structures with confidences for the sequences of a FASTA file",
        "plan": "whether a prediction fits, how it would be cut, how long a sequence may be",
        "msa": "alignments of sequences with databases, by jackhmmer, hhblits and MMseqs2",
        "msa-server": "alignments for others, by ColabFold's protocol",
        "train": "the model, on structures with alignments",
        "relax": "a structure without clashes and with the bonds of proteins, by OpenMM",
        "evaluate": "a prediction against an experimental structure",
        "convert": "weights from one format into another",
        "doctor": "compare this installation with a golden run of the original code",
        "recipes": "the model presets",
    },
)


def main() -> int:
    return APP.run(sys.argv[1:], _speaks)


def _speaks() -> bool:
    if sys.argv[1:2] in [[command] for command in WITHOUT_TORCH]:
        return True
    from core.runtime import tells

    return tells()


if __name__ == "__main__":
    sys.exit(main())
