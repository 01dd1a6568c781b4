"""Features of complexes by the original's own code, to compare ours with: tests/data/fold/original_complex.npz.

    git clone https://github.com/google-deepmind/alphafold      # the file was made at c77e5d2
    python -m tests.support.original_complex alphafold          # with scipy

Of every case the file holds what the original's `pair_and_merge` makes of the chains' alignments, by its names; what
goes in is made here. Modules of theirs that only search, or need more packages, stand in as empty ones.
"""

import random
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import scipy.linalg

from apps.fold.features.alignment import merge, parse_a3m, single_sequence
from apps.fold.features.complexes import ChainInput
from apps.fold.features.sequences import residue_types
from apps.fold.features.templates import Template
from apps.fold.model import residues

FILE = Path(__file__).parents[1] / "data" / "fold" / "original_complex.npz"
CASES = {"heteromer": "ABA", "three": "ABC", "homomer": "AA"}
"""case -> the sequences of its chains, as they are given"""
KEPT = ("msa", "deletion_matrix", "msa_mask", "bert_mask", "cluster_bias_mask", "aatype", "residue_index", "asym_id",
        "entity_id", "sym_id", "seq_mask", "template_aatype", "template_all_atom_mask")  # fmt: skip

_SEQUENCES = {"A": "MKTAYIAKQRQX", "B": "GSHMLLEWYPVDC", "C": "WWTTGHIKLE"}
_SPECIES = ("HUMAN", "MOUSE", "YEAST", "ECOLI", "FUNHE", "9ZZZZ")


def chains(sequences: Mapping[str, str] = _SEQUENCES) -> dict[str, ChainInput]:
    """Chains with rows that agree with them more or less, of species that all, two or one of them have, or of none."""
    generator = random.Random(4)

    def row(sequence: str, same: float) -> str:
        letters = "".join(
            c if generator.random() < same else generator.choice(residues.RESTYPES + "-") for c in sequence
        )
        return "".join(generator.choice(("", "", "", "", "g", "aa")) + letter for letter in letters)

    def alignment(sequence: str, names: list[str]):
        rows = [f">{name}\n{row(sequence, generator.choice((0.3, 0.6, 0.9)))}\n" for name in names]
        return merge([single_sequence(sequence), parse_a3m(f">query\n{sequence}\n{''.join(rows)}")])

    found = {}
    for number, (name, sequence) in enumerate(sequences.items()):
        species = _SPECIES[number : number + 4]
        names = [f"tr|A0A{i:03d}|A0A{i:03d}_{generator.choice(species)}/1-{len(sequence)}" for i in range(14)]
        names += ["UniRef100_A0A/2-9", "sp|P12345|NAME_HUMAN", "sp|P12345-2|NAME_HUMAN"]
        generator.shuffle(names)
        paired, own = alignment(sequence, names), alignment(sequence, [f"row{i}" for i in range(9)])
        own = merge([own, type(own)(paired.letters[3:7], paired.deletions[3:7], paired.names[3:7])])  # some are both
        mask = residues.ATOM37_MASK[residue_types(sequence)]
        one = Template("t", residue_types(sequence), np.full((*mask.shape, 3), 1.5, np.float32), mask)
        found[name] = ChainInput(sequence, own, paired, (one,) * number)
    return found


def _original(checkout: Path) -> dict[str, types.ModuleType]:
    """Their modules, by name, without what they import from elsewhere."""
    for name in ("alphafold", "alphafold.common", "alphafold.data", "alphafold.data.pipeline", "jax"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["jax"].__dict__["tree"] = types.SimpleNamespace(map=lambda function, tree, **_: tree)  # not looked at
    sys.modules["jax.scipy"] = scipy
    sys.modules["alphafold.data"].__dict__["pipeline"] = sys.modules["alphafold.data.pipeline"]
    sys.modules["alphafold.data.pipeline"].__dict__["FeatureDict"] = dict
    loaded = {}
    for name in ("common.residue_constants", "data.msa_pairing", "data.msa_identifiers", "data.feature_processing",
                 "data.pipeline_multimer"):  # fmt: skip
        path = checkout / "alphafold" / f"{name.replace('.', '/')}.py"
        text = path.read_text()
        if name == "data.pipeline_multimer":  # the part that needs neither programs nor packages
            text = "import collections\nimport numpy as np\nfrom typing import Any, MutableMapping\n" + "".join(
                text[text.index(f"def {one}") :].split("\n\n\n", 1)[0].replace("pipeline.FeatureDict", "dict")
                + "\n\n\n"
                for one in ("int_id_to_str_id", "add_assembly_features")
            )
        module = types.ModuleType(f"alphafold.{name}")
        sys.modules[f"alphafold.{name}"] = module
        exec(compile(text, str(path), "exec"), module.__dict__)
        parent, _, last = name.partition(".")
        setattr(sys.modules[f"alphafold.{parent}"], last, module)
        loaded[last] = module
    for name in ("jax", "jax.scipy"):  # scipy asks for more of it
        del sys.modules[name]
    return loaded


def chain_features(chain: ChainInput, identifiers: types.ModuleType, to_theirs: np.ndarray) -> dict[str, np.ndarray]:
    aatype, templates = residue_types(chain.sequence), chain.templates
    shape = (max(1, len(templates)), len(aatype), 37)
    found = {
        "aatype": aatype.astype(np.int32),
        "residue_index": np.arange(len(aatype), dtype=np.int32),
        "sequence": np.asarray(chain.sequence, object),
        "seq_length": np.asarray(len(aatype)),
        "msa": to_theirs[chain.own.letters],
        "deletion_matrix_int": chain.own.deletions,
        "num_alignments": np.asarray(len(chain.own), np.int32),
        "msa_all_seq": to_theirs[chain.paired.letters],
        "deletion_matrix_int_all_seq": chain.paired.deletions,
        "msa_species_identifiers_all_seq": np.array(
            [identifiers.get_identifiers(name).species_id.encode() for name in chain.paired.names], object
        ),
        "template_aatype": np.zeros(shape[:2], np.int32),
        "template_all_atom_mask": np.zeros(shape, np.float32),
        "template_all_atom_positions": np.zeros((*shape, 3), np.float32),
    }
    for number, one in enumerate(templates):
        found["template_aatype"][number] = one.aatype
        found["template_all_atom_mask"][number] = one.mask
        found["template_all_atom_positions"][number] = one.positions
    return found


def main() -> None:
    theirs = _original(Path(sys.argv[1]))
    order = np.array(theirs["residue_constants"].MAP_HHBLITS_AATYPE_TO_OUR_AATYPE)
    to_theirs = np.argsort(order).astype(np.int32)
    content = {}
    for case, letters in CASES.items():
        given = chains()
        one = {
            str(n): chain_features(given[name], theirs["msa_identifiers"], to_theirs) for n, name in enumerate(letters)
        }
        merged = theirs["feature_processing"].pair_and_merge(theirs["pipeline_multimer"].add_assembly_features(one))
        content |= {f"{case}/{name}": np.asarray(merged[name]) for name in KEPT}
    np.savez_compressed(FILE, **content)
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
