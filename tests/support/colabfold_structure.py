"""`python -m tests.support.colabfold_structure PROGRAM`: the whole of ColabFold, from our alignments to structures.

PROGRAM is the colabfold_batch of an environment of its own (pip install 'colabfold[alphafold]'). AlphaFold's weights
are not at hand here, so those that it reads have the released models' shapes, and values from a seed; `fold convert`'s
writer makes the files. It asks our server for the alignments of a protein and of a complex, folds them, and writes PDB
files and scores, which are held beside the sequences. That is the program as it is, which computes in bf16.

Then it is told to compute in fp32, without recycling (it rounds to fp16 between passes), and the features that it
computes from are noted: from the same features and the same file of weights ours gives the same coordinates and pLDDT.
What `fold predict` gives of the same A3M is said beside, whose MSA is masked by other random draws.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from Bio.PDB.PDBParser import PDBParser
from Bio.SeqUtils import seq1

from apps.fold.features.arrays import features_of_arrays
from apps.fold.golden_complex import complex_of, possible_draws
from apps.fold.model.config import ModelConfig, MultimerConfig, released
from apps.fold.model.features import Features
from apps.fold.model.heads import plddt
from apps.fold.model.network import trainable
from apps.fold.predict import main as predict
from apps.fold.training.initialise import initialise
from apps.fold.weights.alphafold import arrays_of, load_npz, write_npz
from apps.fold.weights.source import build
from tests.support.colabfold_batch import rows, run
from tests.support.msa_server import CRAMBIN, UBIQUITIN, configured, databases, serving

SEED = 0  # colabfold_batch's own, of its draws
_SPREAD = 0.5
"""of what final layers add, in parts of what comes in: with zeros, as training begins, all residues lie in one place"""
_CLOSE_A, _CLOSE_PLDDT = 2e-3, 3e-2
"""between ours and ColabFold's in fp32, which writes three digits of an Angstrom, and hands out logits in fp16"""


@dataclass(frozen=True)
class Kind:
    """A model of ColabFold's `--model-type`, and a record that it folds.

    finished  the file by which ColabFold knows that the weights are there
    """

    name: str
    released: str
    finished: str
    sequences: tuple[str, ...]


KINDS = (
    Kind("alphafold2_ptm", "model_3_ptm", "download_finished.txt", (UBIQUITIN[:24],)),
    Kind(
        "alphafold2_multimer_v3",
        "model_3_multimer_v3",
        "download_complexes_multimer_v3_finished.txt",
        (UBIQUITIN[:24], CRAMBIN[:20]),
    ),
)

# ColabFold's program, in fp32, that also writes what its network is given; the first argument is that file.
_IN_FP32 = """
import functools, sys
import numpy as np
from alphafold.model import model
from colabfold import batch

noted, predict = sys.argv.pop(1), model.RunModel.predict

def predict_noted(self, features, **options):
    arrays = {name: np.asarray(array) for name, array in features.items()}
    np.savez(noted, **{name: array for name, array in arrays.items() if array.dtype.kind in "biuf"})
    return predict(self, features, **options)

model.RunModel.predict = predict_noted
batch.run = functools.partial(batch.run, use_bfloat16=False)
batch.main()
"""


@torch.no_grad()
def make_weights(folder: Path, kind: Kind) -> Path:
    """The file of a released shape, by the name that ColabFold gives it; its other four models are the same file."""
    config = released(kind.released)
    network, draw = trainable(config), torch.Generator().manual_seed(1)
    initialise(network, 1)
    for parameter in network.parameters():
        if parameter.ndim > 1 and not parameter.any():
            parameter.normal_(0, _SPREAD * parameter[0].numel() ** -0.5, generator=draw)
    made = folder / "params" / f"params_{kind.released}.npz"
    write_npz(made, arrays_of(dict(network.named_parameters()), config))
    for number in (1, 2, 4, 5):
        other = made.with_name(made.name.replace("model_3", f"model_{number}"))
        other.unlink(missing_ok=True)
        other.hardlink_to(made)
    (made.parent / kind.finished).touch()
    return made


def words(kind: Kind, data: Path, recycles: int) -> list[str]:
    """Options of colabfold_batch for one model, the third."""
    chosen = ["--num-models", "1", "--model-order", "3", "--num-recycle", str(recycles)]
    return ["--data", str(data), "--model-type", kind.name, *chosen]


def result(out: Path, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of the atoms [A, 3] and pLDDT of the residues, of the PDB file, which has to be the record's."""
    (made,) = out.glob(f"*_unrelaxed_rank_001_{kind.name}_model_3_seed_{SEED:03d}.pdb")
    structure = PDBParser(QUIET=True).get_structure("made", made)
    assert structure is not None
    (model,) = structure
    chains = ["".join(seq1(residue.get_resname()) for residue in chain) for chain in model]
    assert tuple(chains) == kind.sequences, (chains, kind.sequences)
    atoms, length = list(model.get_atoms()), sum(map(len, kind.sequences))
    (scored,) = out.glob(f"*_scores_rank_001_{kind.name}_model_3_seed_{SEED:03d}.json")
    scores = json.loads(scored.read_text())
    assert (np.shape(scores["pae"]), len(scores["plddt"])) == ((length, length), length)
    assert ("iptm" in scores, 0 < scores["ptm"] < 1) == (len(chains) > 1, True)
    centres = np.stack([residue["CA"].coord for chain in model for residue in chain])
    assert np.linalg.norm(centres[1:] - centres[:-1], axis=1).min() > 0.1
    by_residue = np.array([residue["CA"].get_bfactor() for chain in model for residue in chain], np.float64)
    assert np.allclose(by_residue, scores["plddt"], atol=0.011)
    return np.stack([atom.coord for atom in atoms]), by_residue


def ours(weights: Path, noted: Path, recycles: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same of ours in fp64, from the features that were noted; of complexes for each way in which jax may draw."""
    config, parameters = load_npz(weights, num_recycles=recycles)
    with np.load(noted) as file:
        batch = dict(file)
    for used, iterations in _iterations(config, batch, recycles):
        network = build(used, parameters, torch.float64, "cpu")
        with torch.inference_mode():
            found = network([one.to("cpu", torch.float64) for one in iterations])
        there = found.atom_mask_BN37[0].bool()
        yield found.positions_BN373[0][there].numpy(), plddt(found.logits.plddt)[0].numpy()


def _iterations(
    config: ModelConfig, batch: dict[str, np.ndarray], recycles: int
) -> Iterator[tuple[ModelConfig, Sequence[Features]]]:
    if not isinstance(config, MultimerConfig):
        arrays = [{name: array[i : i + 1] for name, array in batch.items()} for i in range(recycles + 1)]
        yield config, [features_of_arrays(one) for one in arrays]
        return
    one = complex_of(batch)
    shown = int((one.msa_mask.max(-1) == 1).sum())  # ColabFold reads no more rows than there are
    rows_of = replace(config, max_msa=min(config.max_msa, shown), max_extra_msa=max(1, shown - config.max_msa))
    yield from possible_draws(one, rows_of, {"seed": SEED, "compiled": False}, recycles)


def apart(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    """The largest difference of a coordinate, in Angstrom, and of pLDDT."""
    return float(np.abs(one[0] - other[0]).max()), float(np.abs(one[1] - other[1]).max())


def main(program: str, kept: str | None = None) -> None:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # XLA would take minutes more
    with tempfile.TemporaryDirectory() as made:
        folder, data = Path(made), Path(kept or made) / "data"
        with serving(configured(folder, *databases(folder), jackhmmer="jackhmmer")) as server:
            for kind in KINDS:
                _fold(program, folder / kind.name, data, server.url, kind)


def _fold(program: str, folder: Path, data: Path, url: str, kind: Kind) -> None:
    weights, given = make_weights(data, kind), folder / "short.fasta"
    folder.mkdir()
    given.write_text(f">short\n{':'.join(kind.sequences)}\n")
    began = time.perf_counter()
    run(program, given, folder / "out", url, *words(kind, data, 1))
    as_it_is = result(folder / "out", kind)
    depth, took = len(rows(folder / "out/short.a3m")), time.perf_counter() - began
    assert depth > 1
    print(f"{kind.name}: a PDB file of {' and '.join(kind.sequences)}, {depth} rows, {took:.0f} s", flush=True)

    again, noted = folder / "again", folder / "features.npz"
    more = [str(folder / "out/short.a3m"), str(again), "--host-url", url, *words(kind, data, 0)]
    python = [Path(program).parent / "python", "-c", _IN_FP32, noted]
    done = subprocess.run([*python, *more], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ColabFold in fp32: exit code {done.returncode}\n{done.stderr[-3000:]}")
    theirs = result(again, kind)
    off, off_plddt = np.inf, np.inf
    for one in ours(weights, noted, 0):
        off, off_plddt = min((off, off_plddt), apart(theirs, one))
        if off <= _CLOSE_A:
            break
    print(f"{kind.name}: in fp32, from the same features, {off:.2g} A and {off_plddt:.2g} of pLDDT apart", flush=True)
    assert off <= _CLOSE_A
    assert off_plddt <= _CLOSE_PLDDT

    options = ["--model", str(weights), "--msa", str(folder / "out/short.a3m"), "--num-recycles", "1", "--no-plots"]
    assert predict([str(given), *options, "--out", str(folder / "ours")]) == 0
    said = json.loads((folder / "ours/short/rank_1_confidence.json").read_text())
    mean = float(as_it_is[1].mean())
    print(f"{kind.name}: fold predict's mean pLDDT {said['mean_plddt']:.2f}, ColabFold's {mean:.2f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
