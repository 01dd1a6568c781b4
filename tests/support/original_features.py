"""Features by the original's own pipeline, to compare ours with: tests/data/fold/original_features.npz.

    pip install alphafold-colabfold jax dm-tree ml_collections      # in an environment of its own
    python -m tests.support.original_features

alphafold-colabfold is DeepMind's code with TensorFlow's operators for features written in numpy. Of every case the file
holds what went in, what was drawn (the order of rows, the letters that took the place of hidden ones, the choice of
extra rows) and what came out, by the original's names. The structures are those that the package carries.
"""

import random
import tempfile
from pathlib import Path

import numpy as np

from apps.fold.features.entries import read_entries
from apps.fold.toy import HELDOUT, STRUCTURES
from tests.support.fold import hhr_text

FILE = Path(__file__).parents[1] / "data" / "fold" / "original_features.npz"
LIMITS = {"a3m": (16, 24), "few": (64, 24), "stockholm": (10, 12)}
"""case -> cluster centres and extra rows; `few` has fewer rows than centres"""

_QUERY = "MKTAYIAKQRQISFVKSHFXRQLEBZUORLGLIEVQAP"
_AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
_OF_RESIDUES, _OF_ROWS = ("aatype", "residue_index", "target_feat"), ("msa_feat", "true_msa", "bert_mask")
_OF_EXTRA = ("extra_msa", "extra_has_deletion", "extra_deletion_value")
_OF_TEMPLATES = ("aatype", "all_atom_positions", "all_atom_masks", "pseudo_beta", "pseudo_beta_mask")


def alignments() -> dict[str, str]:
    """case -> the text of an alignment with gaps, deletions before, within and behind, and unusual letters."""
    generator = random.Random(0)
    inserts = [generator.choice((0, 0, 0, 1, 2)) for _ in _QUERY]

    def letter(column: str) -> str:
        return column if generator.random() < 0.6 else generator.choice(f"{_AMINO_ACIDS}---XBZUOJ")

    def a3m_row() -> str:
        """A part of the query's length: rows agree in gaps, too, which is not to count."""
        first, last = sorted(generator.sample(range(len(_QUERY) + 1), 2))
        row = [generator.choice(("", "", "", "a", "gg", "wwwww")) + letter(column) for column in _QUERY]
        return "-" * first + "".join(row[first:last]) + "kk" + "-" * (len(_QUERY) - last)

    def stockholm_row() -> str:
        parts = ("".join(generator.choice("-ACD") for _ in range(count)) for count in inserts)
        return "".join(inserted + letter(column) for inserted, column in zip(parts, _QUERY))

    query = "".join("-" * count + column for count, column in zip(inserts, _QUERY))
    return {
        "a3m": f">q\n{_QUERY}\n" + "".join(f">{i}\n{a3m_row()}\n" for i in range(60)),
        "few": f">q\n{_QUERY}\n" + "".join(f">{i}\n{a3m_row()}\n" for i in range(9)),
        "stockholm": f"# STOCKHOLM 1.0\nq {query}\n" + "".join(f"{i} {stockholm_row()}\n" for i in range(40)) + "//\n",
    }


def hits() -> tuple[str, str]:
    """A sequence, and hhsearch's result for it: 1A8O with gaps on both sides, and 1A7G."""
    first, second = (read_entries(path)[0].sequence for path in (STRUCTURES / "1a8o.cif", HELDOUT / "1a7g.cif"))
    sequence = f"GG{first[:30]}AAA{first[33:60]}{second[10:45]}"
    above, below = f"{first[:30]}---AAA{first[33:60]}", f"{first[:33]}---{first[33:60]}"
    found = [("1a8o_A", above, below, 3, 1, 50.0), ("1a7g_E", second[10:45], second[10:45], 63, 11, 20.0)]
    return sequence, hhr_text(sequence, found)


def main() -> None:
    cases = {case: _of_alignment(text, *LIMITS[case]) for case, text in alignments().items()}
    cases["templates"] = _of_hits(*hits())
    arrays = {f"{case}/{name}": array for case, made in cases.items() for name, array in made.items()}
    np.savez_compressed(FILE, **arrays)
    print(f"{FILE}: {len(arrays)} arrays, {FILE.stat().st_size:,} bytes")


def _of_alignment(text: str, centres: int, extra: int) -> dict[str, np.ndarray]:
    from alphafold.data import parsers, pipeline
    from alphafold.model.tf import np_backend

    msa = parsers.parse_stockholm(text) if text.startswith("#") else parsers.parse_a3m(text)
    assert len(set(msa.sequences)) == len(msa.sequences), (
        "DeepMind's pipeline drops repeated rows, ColabFold's does not"
    )
    shuffles, shuffle = [], np_backend.random_shuffle

    def recorded(*args, **kwargs):
        shuffles.append(np.asarray(shuffle(*args, **kwargs)))
        return shuffles[-1]

    np_backend.random_shuffle = recorded
    try:
        made = _processed(_QUERY, pipeline.make_msa_features([msa]), centres, extra)
    finally:
        np_backend.random_shuffle = shuffle
    order, chosen = shuffles
    rows, more = min(centres, len(msa.sequences)), int(made["extra_msa_mask"][:, 0].sum())
    kept = {name: made[name] for name in _OF_RESIDUES} | {name: made[name][:rows] for name in _OF_ROWS}
    kept |= {name: made[name][:more] for name in _OF_EXTRA}
    return kept | {"text": np.array(text), "sequence": np.array(_QUERY), "order": order, "chosen": chosen}


def _of_hits(sequence: str, text: str) -> dict[str, np.ndarray]:
    from alphafold.data import parsers, pipeline, templates

    with tempfile.TemporaryDirectory() as folder:
        for path in (STRUCTURES / "1a8o.cif", HELDOUT / "1a7g.cif"):  # to which a date is added, that it asks for
            name, rest = path.read_text(encoding="utf-8").split("\n", 1)
            revision = "_pdbx_audit_revision_history"
            dated = f"{name}\n{revision}.ordinal 1\n{revision}.revision_date 2000-01-01\n{rest}"
            (Path(folder) / path.name).write_text(dated, encoding="utf-8")
        featurizer = templates.HhsearchHitFeaturizer(folder, "2100-01-01", 20, "kalign", None, None)
        found = featurizer.get_templates(sequence, parsers.parse_hhr(text))
    assert not found.errors
    msa = parsers.parse_a3m(f">q\n{sequence}\n")
    made = _processed(sequence, {**pipeline.make_msa_features([msa]), **found.features}, 8, 8)
    count = len(found.features["template_aatype"])
    kept = {name: made[f"template_{name}"][:count] for name in _OF_TEMPLATES}
    return kept | {"text": np.array(text), "sequence": np.array(sequence)}


def _processed(sequence: str, found: dict[str, np.ndarray], centres: int, extra: int) -> dict[str, np.ndarray]:
    """The features of one iteration."""
    from alphafold.data import pipeline
    from alphafold.model import config, features

    given = config.model_config("model_1_ptm" if "template_aatype" in found else "model_5_ptm")
    given.data.common.num_recycle = 0
    given.data.common.max_extra_msa, given.data.eval.max_msa_clusters = extra, centres
    given.data.common.reduce_msa_clusters_by_max_templates = False
    made = pipeline.make_sequence_features(sequence, "x", len(sequence)) | found
    return {name: np.asarray(a)[0] for name, a in features.np_example_to_features(made, given, 0).items()}


if __name__ == "__main__":
    main()
