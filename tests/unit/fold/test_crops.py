"""Crops of complexes and the copies that their chains are compared with, beside forms that are written out."""

import itertools

import numpy as np
import pytest

from apps.fold.score import superpose
from apps.fold.training.crops import (
    INTERFACE,
    SPATIAL_SHARE,
    contiguous_crop,
    crop_of_complex,
    in_interface,
    spatial_crop,
)
from apps.fold.training.permutation import Copies, matched

LENGTHS = [7, 3, 12, 1, 5]


def written_out(lengths: list[int], size: int, generator: np.random.Generator) -> np.ndarray:
    """Algorithm 1 of Evans et al. 2021, with a mask a chain."""
    masks = [np.zeros(length, bool) for length in lengths]
    n_added, n_remaining = 0, sum(lengths)
    for k in generator.permutation(len(lengths)):
        n_remaining -= lengths[k]
        crop_size_max = min(size - n_added, lengths[k])
        crop_size_min = min(lengths[k], max(0, size - (n_added + n_remaining)))
        crop_size = generator.integers(crop_size_min, crop_size_max, endpoint=True)
        n_added += crop_size
        crop_start = generator.integers(0, lengths[k] - crop_size, endpoint=True)
        masks[k][crop_start : crop_start + crop_size] = True
    return np.flatnonzero(np.concatenate(masks))


@pytest.mark.parametrize("size", [1, 4, 11, 27, 28])
def test_contiguous_crops_are_those_of_the_written_out_algorithm(size: int) -> None:
    crops = set()
    for seed in range(60):
        found = contiguous_crop(LENGTHS, size, np.random.default_rng(seed))
        np.testing.assert_array_equal(found, written_out(LENGTHS, size, np.random.default_rng(seed)))
        assert len(found) == min(size, sum(LENGTHS))
        crops.add(tuple(found))
    assert len(crops) == 1 if size == 28 else len(crops) > 8


def complex_of(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """CA of 28 residues, whether they were seen, and their chains."""
    generator = np.random.default_rng(seed)
    asym = np.repeat(np.arange(1, 6), LENGTHS)
    seen = (generator.random(28) < 0.8).astype(np.float32)
    return generator.normal(0, 12, (28, 3)).astype(np.float32), seen, asym


def test_an_interface_has_the_residues_near_another_chain() -> None:
    for seed in range(5):
        alpha, seen, asym = complex_of(seed)
        near = [
            any(
                seen[i] and seen[j] and asym[i] != asym[j] and np.linalg.norm(alpha[i] - alpha[j]) <= INTERFACE
                for j in range(28)
            )
            for i in range(28)
        ]
        assert in_interface(alpha, seen, asym).tolist() == near
        assert 0 < sum(near) < 28


def test_spatial_crops_have_the_nearest_residues_that_were_seen() -> None:
    alpha, seen, _ = complex_of(1)
    centre = int(np.flatnonzero(seen)[3])
    found = spatial_crop(alpha, seen, centre, 9)
    distance = {i: float(np.linalg.norm(alpha[i] - alpha[centre])) for i in range(28) if seen[i]}
    assert found.tolist() == sorted(sorted(distance, key=lambda i: distance[i])[:9])
    assert len(spatial_crop(alpha, seen, centre, 26)) == 26  # also residues that were not seen, where there is room


def test_half_of_the_crops_lie_around_an_interface() -> None:
    alpha, seen, asym = complex_of(2)
    centres = np.flatnonzero(in_interface(alpha, seen, asym))
    around = {tuple(spatial_crop(alpha, seen, int(centre), 9)) for centre in centres}
    crops = [tuple(crop_of_complex(alpha, seen, asym, 9, np.random.default_rng(seed))) for seed in range(400)]
    assert np.mean([crop in around for crop in crops]) == pytest.approx(SPATIAL_SHARE, abs=0.1)
    assert {crop for crop in crops if crop in around} == around
    apart = alpha + 1000 * asym[:, None].astype(np.float32)
    assert not in_interface(apart, seen, asym).any()
    assert len(crop_of_complex(apart, seen, asym, 9, np.random.default_rng(0))) == 9
    np.testing.assert_array_equal(crop_of_complex(alpha, seen, asym, 28, np.random.default_rng(0)), np.arange(28))


def shuffled_complex(entities: list[int], length: int, seed: int, noise: float, cropped: bool = False) -> Copies:
    """A prediction that is the experiment turned, moved, with noise, and with copies in another order.

    Copies are compact and their sequences of different lengths; a crop lacks residues, and maybe whole chains.
    """
    generator = np.random.default_rng(seed)
    sizes = [length + 2 * entity for entity in entities]
    chains = [generator.normal(0, 4, (size, 3)) + generator.normal(0, 15, 3) for size in sizes]
    members = {e: [k for k, one in enumerate(entities) if one == e] for e in entities}
    most = max(map(len, members.values()))
    order = {e: generator.permutation(len(at)) for e, at in members.items()}
    turn, _ = np.linalg.qr(generator.normal(size=(3, 3)))
    turn *= np.linalg.det(turn)
    parts = []
    for number, entity in enumerate(entities):
        at, size = members[entity], sizes[number]
        own = at.index(number)
        true = np.zeros((size, most, 3))
        seen = np.zeros((size, most), bool)
        for copy, member in enumerate(at):
            true[:, copy], seen[:, copy] = chains[member], generator.random(size) < 0.85
        moved = chains[at[order[entity][own]]] @ turn.T + 30 + generator.normal(0, noise, (size, 3))
        kept = np.arange(size) if not cropped else np.sort(generator.permutation(size)[: generator.integers(4, size)])
        shape = np.ones(len(kept), np.int64)
        ids = [(number + 1) * shape, entity * shape, own * shape, len(at) * shape]
        parts.append((moved[kept], true[kept], seen[kept], *ids))
    if cropped:
        del parts[int(generator.integers(len(parts)))]
    return Copies(*map(np.concatenate, zip(*parts)))


def best_by_force(one: Copies) -> tuple[float, np.ndarray]:
    """The least RMSD over all ways to give chains different copies of their sequence."""
    chains = [np.flatnonzero(one.asym_N == asym) for asym in np.unique(one.asym_N)]
    best, least = one.own_N, np.inf
    for choice in itertools.product(*(range(one.copies_N[at[0]]) for at in chains)):
        if len({(one.entity_N[at[0]], copy) for at, copy in zip(chains, choice)}) < len(chains):
            continue
        copy_N = np.concatenate([np.full(len(at), copy) for at, copy in zip(chains, choice)])
        if (error := one.rmsd(copy_N)) < least:
            best, least = copy_N, error
    return least, best


@pytest.mark.parametrize("entities", [[1, 1], [1, 1, 1, 1], [1, 1, 2, 2], [1, 2, 2, 2], [1, 1, 2, 3]])
@pytest.mark.parametrize("cropped", [False, True])
def test_copies_are_those_of_all_permutations(entities: list[int], cropped: bool) -> None:
    moved = 0
    for seed in range(8):
        one = shuffled_complex(entities, 8, seed, noise=0.8, cropped=cropped)
        least, best = best_by_force(one)
        found = matched(one)
        assert one.rmsd(found) == pytest.approx(least, rel=2e-3)
        np.testing.assert_array_equal(found, best)
        moved += bool((best != one.own_N).any())
    assert moved


def test_the_files_assignment_stands_where_all_are_alike() -> None:
    one = shuffled_complex([1, 1, 1], 8, 0, noise=0.0)
    rest = list(vars(one).values())[3:]
    nothing = Copies(np.zeros_like(one.predicted_N3), one.true_NK3, np.ones_like(one.seen_NK), *rest)
    np.testing.assert_array_equal(matched(nothing), nothing.own_N)
    unseen = Copies(one.predicted_N3, one.true_NK3, np.zeros_like(one.seen_NK), *rest)
    np.testing.assert_array_equal(matched(unseen), unseen.own_N)


def test_rmsd_is_of_the_whole_superposed() -> None:
    one = shuffled_complex([1, 2], 8, 3, noise=0.5)
    seen = np.flatnonzero(one.seen_NK[:, 0])
    assert one.rmsd(one.own_N) == pytest.approx(superpose(one.predicted_N3[seen], one.true_NK3[seen, 0])[1])
