"""Golden runs of AlphaFold-Multimer's original code, versions 1, 2 and 3, of two and of three chains.

    pip install alphafold-colabfold colabfold-kernels            # ColabFold's fork; 2.3.27 made colabfold/
    python -m tests.support.original_multimer colabfold FOLDER
    git clone https://github.com/google-deepmind/alphafold      # c77e5d2 made the rest; it imports what pip installed
    python -m tests.support.original_multimer alphafold tests/data/fold

Each is a folder as `fold doctor --golden` reads it. Features are those that the original's own `pair_and_merge` makes
of alignments and templates drawn here; weights are random, on coarse grids, so that the files stay small. The code runs
operation by operation: what XLA makes of a vector that vanishes when it fuses operations is not in the original's
equations (apps/fold/golden_rounding.py), and config.json says so (`compiled`).

The fork computes what DeepMind's code computes, from the same features and weights, but for its recycling, which is
outside of the network (`RunModel.predict`): each pass has a key of its own, versions 1 and 2 never end early, and
version 3 ends with the pass that has settled, where DeepMind's code runs one more. Between passes it rounds to fp16,
which is left out here.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from apps.fold.features.complexes import ChainInput, assemble
from apps.fold.features.sampling import draw_rows, features_of_complex
from apps.fold.features.sequences import residue_types
from apps.fold.features.templates import Template
from apps.fold.model import residues
from apps.fold.model.config import MultimerConfig
from apps.fold.model.features import Features
from tests.support.original_complex import chain_features, chains

SEED = 1
SEQUENCES = {"A": "MKTXYIA", "B": "GSHWL", "C": "PVDCEF"}
KEPT = ("msa", "deletion_matrix", "msa_mask", "bert_mask", "cluster_bias_mask", "aatype", "residue_index", "asym_id",
        "entity_id", "sym_id", "seq_mask", "template_aatype", "template_all_atom_mask",
        "template_all_atom_positions")  # fmt: skip
_ROWS, _EXTRA, _LAYERS, _BINS = 5, 6, 2, 12
_STACKS = ("evoformer_iteration", "extra_msa_stack", "template_embedding_iteration")


@dataclass(frozen=True)
class Run:
    """A run.  preset: the original's name of the model; chains: the sequences of its chains, as they are given."""

    preset: str
    chains: str
    recycles: int = 1


RUNS = {
    "multimer_v1_2": Run("model_1_multimer", "AA"),
    "multimer_v1_3": Run("model_1_multimer", "ABA"),
    "multimer_v2_2": Run("model_4_multimer_v2", "AB"),
    "multimer_v2_3": Run("model_1_multimer_v2", "ABC"),
    "multimer_v3_2": Run("model_1_multimer_v3", "AB"),
    "multimer_v3_3": Run("model_5_multimer_v3", "AAB", 2),
}


def given() -> dict[str, ChainInput]:
    """The chains by name, with templates whose backbones are drawn, some residues and side chains missing."""
    generator = np.random.default_rng(0)
    return {
        name: replace(chain, templates=tuple(_template(chain.sequence, generator) for _ in range(number)))
        for number, (name, chain) in enumerate(chains(SEQUENCES).items(), start=1)
    }


def features_of(names: str, config: MultimerConfig) -> Features:
    """Features of the chains by these names, rows drawn from a seed, with two templates a chain."""
    found = given()
    one = assemble([found[name] for name in names], 2).complex
    return features_of_complex(one, draw_rows(one, config, np.random.default_rng(0)), config)


def _template(sequence: str, generator: np.random.Generator) -> Template:
    """Atoms on a grid of 1/4 Angstrom."""
    aatype = residue_types(sequence)
    aatype[generator.random(len(aatype)) < 0.2] = residues.GAP
    has = np.concatenate([residues.ATOM37_MASK, np.zeros_like(residues.ATOM37_MASK[:1])])
    mask = has[np.minimum(aatype, len(has) - 1)] * (generator.random((len(aatype), 37)) < 0.9)
    walk = np.cumsum(generator.integers(-12, 13, (len(aatype), 1, 3)), 0) + generator.integers(-8, 9, (1, 37, 3))
    positions = (walk + generator.integers(-2, 3, walk.shape)) / 4 * mask[..., None]
    return Template("t", aatype, positions.astype(np.float32), mask.astype(np.float32))


def batch_of(run: Run) -> dict[str, np.ndarray]:
    """What the original makes of the chains."""
    data = {name: import_module(f"alphafold.data.{name}") for name in ("feature_processing", "pipeline_multimer")}
    identifiers, constants = map(
        import_module, ("alphafold.data.msa_identifiers", "alphafold.common.residue_constants")
    )
    to_theirs = np.argsort(constants.MAP_HHBLITS_AATYPE_TO_OUR_AATYPE).astype(np.int32)
    found = given()
    one = {str(n): chain_features(found[name], identifiers, to_theirs) for n, name in enumerate(run.chains)}
    merged = data["feature_processing"].pair_and_merge(data["pipeline_multimer"].add_assembly_features(one))
    return {name: np.asarray(merged[name]) for name in KEPT}


def small(preset: str, recycles: int) -> Any:
    """The original's configuration at small widths; that of single representations is the structure module's."""
    config = import_module("alphafold.model.config").model_config(preset).model
    config.num_recycle = recycles
    embedding, heads = config.embeddings_and_evoformer, config.heads
    structure, template = heads.structure_module, config.embeddings_and_evoformer.template
    with config.unlocked():
        config.calc_extended_ptm = True  # the fork's, which `RunModel` sets: logits of the PAE are kept
        config.global_config.update({"bfloat16": False, "zero_init": False, "subbatch_size": 64})
        embedding.update({"evoformer_num_block": 1, "extra_msa_stack_num_block": 1, "num_msa": _ROWS})
        embedding.update({"num_extra_msa": _EXTRA, "msa_channel": 8, "pair_channel": 6, "seq_channel": 8})
        embedding.extra_msa_channel = 4
        for part, widths in ((embedding.evoformer, (2, 4)), (template.template_pair_stack, (1, 4))):
            for name, module in part.items():
                if "attention" in name:
                    module.num_head = widths[0]
                elif "multiplication" in name:
                    module.num_intermediate_channel = widths[1]
                    module.fuse_projection_weights = preset.endswith("v3")  # the fork fuses those of other files, too
        embedding.evoformer.outer_product_mean.num_outer_channel = 3
        template.update({"num_channels": 4})
        template.template_pair_stack.num_block = 1
        structure.update({"num_channel": 8, "num_head": 2, "num_layer": _LAYERS, "num_point_qk": 2, "num_point_v": 3})
        structure.update({"num_scalar_qk": 3, "num_scalar_v": 3})
        structure.sidechain.num_channel = 6
        heads.predicted_lddt.update({"num_channels": 6})
        heads.predicted_aligned_error.update({"num_bins": _BINS})
        heads.distogram.update({"num_bins": _BINS})
    return config


def drawn(shapes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, np.ndarray]]:
    """Values for all parameters, none of them as training begins, on grids of half a deviation."""
    generator = np.random.default_rng(SEED)
    found: dict[str, dict[str, np.ndarray]] = {}
    for scope in sorted(shapes):
        found[scope] = {}
        for leaf in sorted(shapes[scope]):
            shape = shapes[scope][leaf].shape
            noise = np.round(generator.normal(size=shape) * 2) / 2
            value = noise / 8 + (leaf == "scale")
            if leaf.endswith(("weights", "_w")) and len(shape) > 1:
                value = noise * 2.0 ** np.round(np.log2(_fan_in(scope, leaf, shape)) / -2)
            found[scope][leaf] = value.astype(np.float32)
    return found


def _fan_in(scope: str, leaf: str, shape: tuple[int, ...]) -> int:
    """How many numbers a sum of the map is over; blocks of a stack lie in one array."""
    one = shape[1:] if any(stack in scope for stack in _STACKS) else shape
    return max(1, prod(one[:-1]) if leaf == "output_w" else one[0])


def _whole(apply: Callable[..., Any], key: Any, features: dict[str, Any]) -> dict[str, Any]:
    return apply(key, features)


def _passes(config: Any, apply: Callable[..., Any], key: Any, features: dict[str, Any]) -> dict[str, Any]:
    """The fork's `RunModel.predict`, in fp32."""
    split, before, result = import_module("jax").random.split, _nothing(config, len(features["aatype"])), {}
    for number in range(config.num_recycle + 1):
        key, used = split(key)
        result = {**apply(used, features | {"prev": before}), "num_recycles": number}
        before = result["prev"]
        if number and result["tol"] < config.recycle_early_stop_tolerance:
            break
    return {**result, "predicted_aligned_error": result["pae_matrix_with_logits"]}


def _nothing(config: Any, length: int) -> dict[str, np.ndarray]:
    """What the fork's first pass is given in the place of an earlier one's results."""
    widths = config.embeddings_and_evoformer
    shapes = {"msa_first_row": (length, widths.msa_channel), "pair": (length, length, widths.pair_channel)}
    return {f"prev_{name}": np.zeros(shape, np.float32) for name, shape in (shapes | {"pos": (length, 37, 3)}).items()}


def run_original(run: Run) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Batch, parameters and outputs, by the names of the files."""
    hk, jax, jnp = map(import_module, ("haiku", "jax", "jax.numpy"))
    confidence, model = map(import_module, ("alphafold.common.confidence", "alphafold.model.modules_multimer"))
    config, batch, clip = small(run.preset, run.recycles), batch_of(run), jnp.clip
    as_before = patch.object(jnp, "clip", lambda x, a_min=None, a_max=None: clip(x, a_min, a_max))  # jax's names then

    def forward(features: dict[str, Any]) -> Any:
        return model.AlphaFold(config)(features, is_training=False, return_representations=True)

    transformed, shape = hk.transform(forward), (len(batch["aatype"]), 37)
    nothing = {"all_atom_positions": np.zeros((*shape, 3), np.float32), "all_atom_mask": np.zeros(shape, np.float32)}
    key = jax.random.PRNGKey(SEED)
    features = {name: jnp.asarray(array) for name, array in (batch | nothing).items()}  # nothing is not looked at
    outside = hasattr(confidence, "compute_tol")
    run_all = partial(_passes, config) if outside else _whole
    with as_before:
        begin = {"prev": _nothing(config, len(batch["aatype"]))} if outside else {}
        parameters = drawn(jax.eval_shape(transformed.init, key, features | begin))
        with jax.disable_jit():
            result = run_all(partial(transformed.apply, parameters), key, features)
    out = {f"representations/{name}": result["representations"][name] for name in
           ("single", "pair", "msa", "msa_first_row", "structure_module")}  # fmt: skip
    structure = result["structure_module"]
    out |= {f"structure_module/{name}": structure[name] for name in ("final_atom_positions", "final_atom_mask")}
    for head in ("predicted_lddt", "predicted_aligned_error", "distogram", "masked_msa", "experimentally_resolved"):
        out[f"{head}/logits"] = result[head]["logits"]
    logits, breaks = (np.asarray(result["predicted_aligned_error"][name]) for name in ("logits", "breaks"))
    asym_id = np.asarray(batch["asym_id"])
    out["ptm"] = confidence.predicted_tm_score(logits, breaks)
    across = {} if outside else {"interface": True}
    out["iptm"] = confidence.predicted_tm_score(logits, breaks, asym_id=asym_id, **across)
    out["plddt"] = confidence.compute_plddt(np.asarray(result["predicted_lddt"]["logits"]))
    out["num_recycles"] = result["num_recycles"]
    flat = {f"{scope}//{leaf}": array for scope, leaves in parameters.items() for leaf, array in leaves.items()}
    return batch, flat, {name: np.asarray(array) for name, array in out.items()}


def main() -> None:
    if sys.argv[1] != "colabfold":  # the installed package
        sys.path.insert(0, str(Path(sys.argv[1]).resolve()))
    for name in sys.argv[3:] or RUNS:
        run, folder = RUNS[name], Path(sys.argv[2]) / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, arrays in zip(("batch", "params", "out"), run_original(run)):
            np.savez_compressed(folder / f"{file}.npz", **arrays)
        described = {
            "preset": run.preset,
            "num_recycle": run.recycles,
            "structure_layers": _LAYERS,
            "num_extra_msa": _EXTRA,
            "seed": SEED,
            "compiled": False,
            "params_sha256": hashlib.sha256((folder / "params.npz").read_bytes()).hexdigest(),
        }
        (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n")
        print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir())} bytes", flush=True)


if __name__ == "__main__":
    main()
