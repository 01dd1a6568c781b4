"""`make demo-fold`: train the toy anew, fold what it has seen and what it has not, and show it beside experiments.

1. `fold train --recipe tiny`: three small proteins; then --recipe tiny_confidence: what it knows, and what not
2. `fold predict` of these and of a fourth one, with what was learned and with the weights that training began with
3. lDDT of CA against the experiment, the confidence, and how far the two agree; demo.json and demo.png
4. `fold train --recipe tiny_complexes`: two small dimers; `fold predict` of them, and DockQ; dimers.json

The toy knows three proteins by heart: their high lDDT says that losses, gradients and the structure module work,
not that it can fold. What it is asked to show beyond that is that it knows what it does not know.

All runs lie in runs/demo-fold, or in --out. What an earlier demo left there is replaced; a folder with anything else
is refused. Options are those of `fold train`, for all runs; or `--run FOLDER`, to show a run of the recipe that is
there already.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from apps.fold.demo.interfaces import show_dimers
from apps.fold.features.entries import read_entries
from apps.fold.features.structures import Chain, read_structure
from apps.fold.model import residues
from apps.fold.model.alphafold import AlphaFold
from apps.fold.predict import main as predict
from apps.fold.score import compare, corresponding, superpose
from apps.fold.toy import HELDOUT, STRUCTURES
from apps.fold.train import main as train
from apps.fold.training.config import model_config
from apps.fold.training.initialise import initialise
from apps.fold.training.recipes import RECIPES
from apps.fold.weights.folder import load_folder, read_note, save_folder
from apps.fold.weights.source import is_multimer
from core.config import UserError, parse, run_command
from core.files import save_figure
from core.run_folder import made_anew

NAME = "python -m apps.fold.demo"
OUT = Path("runs/demo-fold")
TRAINED, UNTRAINED = "trained", "untrained"
LEAST_LDDT, LEAST_CORRELATION = 0.8, 0.6
MOST_UNSEEN = 0.4
"""what it may say at most of a chain that it has never seen"""


@dataclass(frozen=True)
class Shown:
    """A prediction beside the experiment, on the residues that both have, n of them.

    predicted, experiment  CA in Angstrom, float[n, 3], the prediction superposed
    plddt, lddt            of each residue, float[n], 0 to 1
    """

    name: str
    memorised: bool
    predicted: np.ndarray
    experiment: np.ndarray
    plddt: np.ndarray
    lddt: np.ndarray


def main(argv: list[str]) -> int:
    """Exit code 1 when what was learned falls short of what the demo is to show."""
    if argv[:1] == ["--run"] and len(argv) == 2:
        run = Path(argv[1])
        return show_dimers(run) if is_multimer(run / "model") else show(run)
    out = parse(RECIPES, ["--recipe", "tiny", "--out", str(OUT), *argv], NAME, default="tiny").out
    first, second, third = (out / name for name in ("tiny", "tiny_confidence", "tiny_complexes"))
    own = _without_model(argv)
    given = {first: argv, second: [*own, "--model", str(first / "model")], third: own}
    for run in (second, third):  # before the first one trains
        config = parse(RECIPES, ["--recipe", run.name, *given[run]], NAME, default="tiny")
        if config.is_preset:
            model_config(config)
    with made_anew(out):  # the demo shows a run from scratch
        for run, options in given.items():
            if code := train(["--recipe", run.name, *options, "--out", str(run)]):
                return code
        return max(show(second, first), show_dimers(third))


def _without_model(argv: list[str]) -> list[str]:
    """The second run's model is that of the first one's weights."""
    behind = [False, *(word == "--model" for word in argv)]
    return [word for word, is_value in zip(argv, behind) if not is_value and word.partition("=")[0] != "--model"]


def show(out: Path, *before: Path) -> int:
    """Fold with a finished run, and write and tell what came out.

    before  runs whose weights it began with, whose time counts, too
    """
    model, _ = load_folder(out / "model")
    network = AlphaFold(model)
    initialise(network, json.loads((out / "config.json").read_text())["seed"])
    save_folder(out / UNTRAINED, model, dict(network.state_dict()), read_note(out / "model"))
    files = [(path, True) for path in sorted(STRUCTURES.iterdir())] + [(path, False) for path in HELDOUT.iterdir()]
    fasta = out / "demo.fasta"
    fasta.write_text("".join(f">{path.stem}\n{read_entries(path)[0].sequence}\n" for path, _ in files))
    shown = {}
    for name, weights in ((TRAINED, out / "model"), (UNTRAINED, out / UNTRAINED)):
        folders = out / "folded" / name
        if predict([str(fasta), "--model", str(weights), "--out", str(folders), "--overwrite"]):
            raise UserError(f"the demo's sequences were not folded with {weights}; what was wrong stands above")
        shown[name] = [beside(folders / path.stem / "rank_1.cif", path, memorised) for path, memorised in files]
    figures = figures_of(shown[TRAINED], shown[UNTRAINED])
    figures["wall_s"] = sum(json.loads((run / "summary.json").read_text())["wall_s"] for run in (out, *before))
    (out / "demo.json").write_text(json.dumps(figures, indent=1) + "\n")
    draw(out / "demo.png", shown[TRAINED])
    return tell(figures, out)


def beside(predicted: Path, experiment: Path, memorised: bool) -> Shown:
    mine, theirs = read_structure(predicted)[0], read_structure(experiment)[0]
    here, there = corresponding(mine, theirs)
    moved, _ = superpose(_ca(mine, here), _ca(theirs, there))
    lddt = np.array(compare(mine, theirs).lddt_per_residue)
    return Shown(experiment.stem, memorised, moved, _ca(theirs, there), mine.b_factors[here] / 100, lddt)


def _ca(chain: Chain, at: np.ndarray) -> np.ndarray:
    return chain.positions[at, residues.CA]


def figures_of(trained: list[Shown], untrained: list[Shown]) -> dict[str, Any]:
    """The demo's figures: each chain's means, and the correlation over the residues of all."""
    plddt, lddt = (np.concatenate([getattr(one, name) for one in trained]) for name in ("plddt", "lddt"))
    chains = [
        {
            "name": one.name,
            "memorised": one.memorised,
            "residues": len(one.lddt),
            "lddt_ca": round(float(one.lddt.mean()), 4),
            "plddt": round(float(one.plddt.mean()), 4),
            "untrained_lddt_ca": round(float(before.lddt.mean()), 4),
        }
        for one, before in zip(trained, untrained)
    ]
    return {"chains": chains, "correlation": round(float(np.corrcoef(plddt, lddt)[0, 1]), 4)}


def tell(figures: dict[str, Any], out: Path) -> int:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    table = Table("chain", "", "residues", "lDDT of CA", "the model says", "untrained")
    for one in figures["chains"]:
        seen = "memorised" if one["memorised"] else "never seen"
        numbers = (f"{one[name]:.2f}" for name in ("lddt_ca", "plddt", "untrained_lddt_ca"))
        table.add_row(one["name"], seen, str(one["residues"]), *numbers)
    console.print(table)
    console.print(
        "The model was trained on the chains marked as memorised and on nothing else: it knows them by heart and "
        "cannot fold others. What it can do is say so.\n"
        f"Correlation of what it says (pLDDT) with lDDT, over all residues: {figures['correlation']:.2f}; "
        f"trained in {figures['wall_s']:.0f} s",
        soft_wrap=True,
    )
    console.print(
        f"structures {out / 'folded'}, pictures {out / 'demo.png'}, figures {out / 'demo.json'}", soft_wrap=True
    )
    worst = min(one["lddt_ca"] for one in figures["chains"] if one["memorised"])
    surest = max(one["plddt"] for one in figures["chains"] if not one["memorised"])
    if worst >= LEAST_LDDT and surest <= MOST_UNSEEN and figures["correlation"] >= LEAST_CORRELATION:
        return 0
    print(
        f"fell short: lDDT of a memorised chain {worst:.2f} (at least {LEAST_LDDT}), "
        f"said of one never seen {surest:.2f} (at most {MOST_UNSEEN}), "
        f"correlation {figures['correlation']:.2f} (at least {LEAST_CORRELATION})",
        file=sys.stderr,
    )
    return 1


def draw(path: Path, shown: list[Shown]) -> None:
    """A row for each chain: both CA traces, superposed; what the model said of each residue, and what was true."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(10, 3.2 * len(shown)), layout="constrained")
    for row, one in enumerate(shown):
        trace = figure.add_subplot(len(shown), 2, 2 * row + 1, projection="3d")
        trace.plot(*one.experiment.T, color="#999999", label="experiment")
        trace.plot(*one.predicted.T, color="#0053d6", label="predicted")
        trace.set_axis_off()
        trace.set_title(f"{one.name}, {'memorised' if one.memorised else 'never seen'}", fontsize=10)
        trace.legend(fontsize=8, loc="lower left")
        curve = figure.add_subplot(len(shown), 2, 2 * row + 2)
        curve.plot(one.lddt, color="#999999", label=f"lDDT, mean {one.lddt.mean():.2f}")
        curve.plot(one.plddt, color="#0053d6", label=f"predicted, mean {one.plddt.mean():.2f}")
        curve.set(xlabel="residue", ylim=(0, 1), xlim=(0, max(1, len(one.lddt) - 1)))
        curve.legend(fontsize=8, loc="lower left")
    figure.suptitle("not for science: a toy that knows the memorised chains by heart", fontsize=11)
    save_figure(figure, path, 110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
