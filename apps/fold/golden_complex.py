"""Features of a complex's golden run: the rows and the hidden letters that the original's network drew.

The original draws them inside, from jax's key. So the key is tried: config.json's `seed`, or the first few, in both
ways of counting that jax has had, in all ways in which recycling iterations get theirs (`Keys`). config.json's
`compiled`, true where it is left out, says whether XLA fused operations of the run (golden_rounding.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from apps.fold.features.sampling import (
    Complex,
    Drawn,
    features_of_complex,
    gumbel,
    order_of_rows,
    profile_of,
    replacements,
)
from apps.fold.golden_rounding import own_directions
from apps.fold.jax_numbers import JaxNumbers
from apps.fold.model.config import MultimerConfig
from apps.fold.model.features import Features

_SEEDS = 8
Keys = Literal["one", "inside", "outside"]
"""How iterations get keys: all have one; the network splits its own (DeepMind's code); or whoever calls the network for
each iteration does (ColabFold's fork, alphafold-colabfold), and decides which is the last."""


def complex_of(batch: Mapping[str, np.ndarray]) -> Complex:
    """The complex of a batch by the original's names, whose arrays have no leading dim."""

    def real(name: str) -> np.ndarray:
        return np.asarray(batch[name], np.float32)

    def whole(name: str) -> np.ndarray:
        return np.asarray(batch[name], np.int64)

    ids = {name: whole(name) for name in ("aatype", "residue_index", "asym_id", "entity_id", "sym_id")}
    msa = np.asarray(batch["msa"], np.uint8)
    first = np.eye(1, len(msa), dtype=np.float32)[0]
    return Complex(
        **ids,
        mask=real("seq_mask"),
        msa=msa,
        deletions=real("deletion_matrix"),
        msa_mask=real("msa_mask"),
        cluster_bias=real("cluster_bias_mask") if "cluster_bias_mask" in batch else first,
        bert_mask=real("bert_mask") if "bert_mask" in batch else real("msa_mask"),
        template_aatype=whole("template_aatype"),
        template_positions=real("template_all_atom_positions"),
        template_mask=real("template_all_atom_mask"),
    )


def possible_draws(
    one: Complex, config: MultimerConfig, described: Mapping[str, Any], recycles: int
) -> Iterator[tuple[MultimerConfig, list[Features]]]:
    """The features of all iterations, for each key and way that the run may have had, and what ours is to be.

    recycles  how many iterations the run had before its last
    """
    seed = described.get("seed")
    as_many = replace(config, num_recycles=recycles, recycle_tolerance=-1.0)
    for number in range(_SEEDS) if seed is None else [seed]:
        for partitionable in (True, False):
            for keys in get_args(Keys):
                ours = as_many if keys == "outside" else config
                found = _iterations(one, ours, JaxNumbers(partitionable), number, keys)
                if described.get("compiled", True):
                    found = [_as_rounded(features, one) for features in found]
                yield ours, found


def _iterations(one: Complex, config: MultimerConfig, jax: JaxNumbers, seed: int, keys: Keys) -> list[Features]:
    key, used = jax.key(seed), []
    if keys != "outside":
        key = _first(jax, key)
    for number in range(config.num_recycles + 1):
        of_this = key
        if keys == "outside":
            key, of_this = jax.split(key)
            of_this = _first(jax, of_this)
        elif keys == "inside" and number < config.num_recycles:
            key, of_this = jax.split(key)
        used.append(jax.split(of_this)[1])
    return [features_of_complex(one, _drawn(one, config, jax, of_rows), config) for of_rows in used]


def _first(jax: JaxNumbers, key: np.ndarray) -> np.ndarray:
    """The key that a network's module asks haiku for first."""
    return jax.split(key)[1]


def _as_rounded(features: Features, one: Complex) -> Features:
    assert features.templates is not None
    own = torch.from_numpy(own_directions(one.template_positions))[None]
    return replace(features, templates=replace(features.templates, own_directions_BTN3=own))


def _drawn(one: Complex, config: MultimerConfig, jax: JaxNumbers, key: np.ndarray) -> Drawn:
    _, of_rows, of_letters = jax.split(key, 3)
    order = order_of_rows(one, gumbel(jax.uniform(of_rows, (len(one.msa),))))
    letters, mask = one.msa[order[: config.max_msa]], one.msa_mask[order[: config.max_msa]]
    _, of_places, of_replacements = jax.split(of_letters, 3)
    hidden = (jax.uniform(of_places, letters.shape) < config.hidden_share) & (mask > 0)
    logits = replacements(letters, np.broadcast_to(profile_of(one), (*letters.shape, 22)))
    drawn = (logits + gumbel(jax.uniform(of_replacements, logits.shape))).argmax(-1)
    return Drawn(order, np.where(hidden, drawn, letters * (mask > 0)).astype(np.uint8))
