"""Losses: invariance, zero at the truth, plain re-derivations, and violations of structures that have some."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from apps.fold.loss.heads import distogram_loss, lddt, masked_msa_loss, pae_loss, plddt_loss
from apps.fold.loss.structure import (
    angle_norm_loss,
    backbone_fape,
    centre_loss,
    chi_loss,
    complex_fape,
    fape,
    frame_aligned_errors,
    side_chain_fape,
)
from apps.fold.loss.total import LossConfig, fine_tuning, total_loss
from apps.fold.loss.truth import frames_of_atoms, renamed, truth_of_atoms
from apps.fold.loss.violation import clashes_between, clashes_within, peptide_violations, violation_loss
from apps.fold.model import residues
from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.config import tiny
from apps.fold.model.rigid import Frames
from apps.fold.model.structure import Structure
from apps.fold.model.torsions import atom37_of_atom14, atoms_of_frames, frames_of_torsions, table
from apps.fold.training.config import DataConfig
from core.config import UserError
from tests.support.fold import random_features, random_parameters

F64 = torch.float64
N = 20
AATYPE = torch.arange(N)[None]


def _rotations(count: int, seed: int) -> Tensor:
    x = torch.randn(count, 3, 3, dtype=F64, generator=torch.Generator().manual_seed(seed))
    q, _ = torch.linalg.qr(x)
    return q * torch.linalg.det(q)[:, None, None]


def _structure(seed: int = 0) -> Structure:
    """A chain of one residue of each type with random torsions, as the structure module would return it."""
    generator = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.rand(1, N, 7, generator=generator, dtype=F64)
    sin_cos = torch.stack([angle.sin(), angle.cos()], -1)
    shift = 4 * torch.randn(1, N, 3, generator=generator, dtype=F64)
    backbone = Frames(_rotations(N, seed)[None], shift)
    groups = frames_of_torsions(AATYPE, backbone, sin_cos)
    atoms = atoms_of_frames(AATYPE, groups)
    return Structure(
        torch.zeros(1, N, 4), *(f.map(lambda x: x[None]) for f in (backbone, groups)), sin_cos[None], sin_cos[None],
        atoms[None],
    )  # fmt: skip


def _truth(structure: Structure):
    mask = table(residues.ATOM37_MASK, AATYPE, F64)
    return truth_of_atoms(AATYPE, atom37_of_atom14(AATYPE, structure.atom14[-1]), mask)


def _moved(structure: Structure, seed: int = 7) -> Structure:
    """The same structure turned and shifted as a whole."""
    turn = Frames(_rotations(1, seed)[0], torch.tensor([5.0, -3, 11], dtype=F64))
    return replace(
        structure,
        backbone=turn.compose(structure.backbone),
        groups=turn.compose(structure.groups),
        atom14=turn.apply(structure.atom14) * table(residues.ATOM14_MASK, AATYPE, F64)[..., None],
    )


def test_frames_of_ideal_atoms_are_those_that_made_them() -> None:
    structure = _structure()
    truth = _truth(structure)
    mask = truth.group_mask_BNG[..., None]
    assert ((truth.groups.translation - structure.groups.translation[0]) * mask).abs().max() < 1e-5
    # Atoms that span a frame lie in its plane to the last of their three decimals.
    assert ((truth.groups.rotation - structure.groups.rotation[0]) * mask[..., None]).abs().max() < 5e-3
    expected = {"A": 2, "R": 6, "G": 2, "F": 4, "K": 6, "V": 3}
    for letter, count in expected.items():
        assert truth.group_mask_BNG[0, residues.RESTYPES.index(letter)].sum() == count


def test_losses_vanish_at_the_truth_wherever_it_lies() -> None:
    structure = _structure()
    truth = _truth(structure)
    for same in (structure, _moved(structure)):
        # The distance is regularised: sqrt(1e-4) Angstrom in units of 10 is 1e-3.
        assert backbone_fape(same, truth).item() == pytest.approx(1e-3, abs=2e-4)
        assert side_chain_fape(same, truth).item() == pytest.approx(1e-3, abs=1e-3)
        assert chi_loss(same, truth).item() < 1e-5
        assert angle_norm_loss(same, torch.ones(1, N)).item() < 1e-6


def test_fape_does_not_see_the_frame_of_reference_but_sees_a_mirror() -> None:
    a, b = _structure(0), _structure(1)
    truth = _truth(b)
    for loss in (backbone_fape, side_chain_fape):
        assert abs(loss(a, truth) - loss(_moved(a), truth)).item() < 1e-9
        assert loss(a, truth).item() > 0.3
    mirrored = b.backbone.translation * torch.tensor([1.0, 1, -1], dtype=F64)
    seen = fape(b.backbone, b.backbone, torch.ones(1, 1, N), mirrored, b.backbone.translation, torch.ones(1, 1, N))
    assert seen.item() > 0.1


def test_fape_against_the_algorithm() -> None:
    a, b = _structure(0), _structure(1)
    frame_mask, point_mask = (torch.ones(N, dtype=F64) for _ in range(2))
    frame_mask[3], point_mask[5] = 0, 0
    got = fape(a.backbone.map(lambda x: x[0, 0]), b.backbone.map(lambda x: x[0, 0]), frame_mask,
               a.backbone.translation[0, 0], b.backbone.translation[0, 0], point_mask)  # fmt: skip
    total = 0.0
    for i in range(N):
        for j in range(N):
            x, y = (
                s.backbone.rotation[0, 0, i].T @ (s.backbone.translation[0, 0, j] - s.backbone.translation[0, 0, i])
                for s in (a, b)
            )
            total += min(math.sqrt(((x - y) ** 2).sum() + 1e-4), 10) / 10 * frame_mask[i] * point_mask[j]
    assert got.item() == pytest.approx(float(total) / (1e-4 + 19 * 19), rel=1e-10)


def test_lddt_by_hand() -> None:
    """Which pairs count follows from the true distance; an error of 5 Angstrom is beyond every limit."""
    true, predicted = (torch.tensor([[x, 0.0, 0.0] for x in row], dtype=F64) for row in ((0, 3, 20), (0, 8, 5)))
    assert lddt(predicted, true, torch.ones(3, dtype=F64)).tolist() == pytest.approx([0, 0, 1], abs=1e-9)
    near = torch.tensor([[0.0, 0, 0], [4.5, 0, 0], [20, 0, 0]], dtype=F64)
    assert lddt(near, true, torch.ones(3, dtype=F64)).tolist() == pytest.approx([0.5, 0.5, 1], abs=1e-9)


def test_neighbours_in_the_chain_may_be_as_near_as_a_peptide_bond() -> None:
    aatype, exists = torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, 14, dtype=F64)
    exists[0, 0, 2] = exists[0, 1, 0] = 1
    atoms = torch.zeros(1, 2, 14, 3, dtype=F64)
    atoms[0, 1, 0, 0] = 1.33
    assert clashes_between(atoms, exists, aatype, torch.tensor([[0, 1]])).item() == 0
    apart = clashes_between(atoms, exists, aatype, torch.tensor([[0, 2]])).item()
    assert apart == pytest.approx(1.7 + 1.55 - 1.5 - 1.33, abs=1e-6)


def test_symmetric_side_chains_are_renamed_to_suit() -> None:
    structure = _structure()
    truth = _truth(structure)
    swapped = structure.atom14[-1].clone()
    for name, pairs in residues.SWAPS.items():
        letter = residues.ONE_LETTER[name]
        n, atoms = residues.RESTYPES.index(letter), residues.atoms_of(letter)
        for first, second in pairs:
            i, j = atoms.index(first), atoms.index(second)
            swapped[0, n, [i, j]] = swapped[0, n, [j, i]]
    assert torch.equal(renamed(truth, swapped).atom14_BNA3, swapped)
    assert torch.equal(renamed(truth, structure.atom14[-1]).atom14_BNA3, truth.atom14_BNA3)
    changed = (renamed(truth, swapped).groups.rotation - truth.groups.rotation).abs().amax((-1, -2)) > 1e-3
    assert {(residues.RESTYPES[n], g) for _, n, g in changed.nonzero().tolist()} == {
        ("D", 5), ("E", 6), ("F", 5), ("Y", 5),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_names_stay_where_both_suit_alike(dtype: torch.dtype) -> None:
    """All predicted distances are too short: the errors of both names are the same, but for rounding."""
    structures = [_structure(seed) for seed in range(8)]
    truth = truth_of_atoms(
        AATYPE.expand(8, -1),
        torch.cat([_truth(structure).atom37_BN373 for structure in structures]).to(dtype),
        torch.cat([_truth(structure).atom37_mask_BN37 for structure in structures]).to(dtype),
    )
    dense = 1e-3 * torch.cat([structure.atom14[-1] for structure in structures]).to(dtype)
    assert torch.equal(renamed(truth, dense).atom14_BNA3, truth.atom14_BNA3)


def test_symmetric_chi_may_be_turned_by_pi() -> None:
    structure = _structure()
    truth = _truth(structure)
    for letter, chi, free in (("D", 4, True), ("F", 4, True), ("N", 4, False), ("L", 4, False)):
        turned = structure.torsions.clone()
        turned[..., residues.RESTYPES.index(letter), chi, :] *= -1
        assert (chi_loss(replace(structure, torsions=turned), truth).item() < 1e-5) == free


def test_lddt() -> None:
    x = 5 * torch.randn(1, 30, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 30, dtype=F64)
    assert torch.equal(lddt(x @ _rotations(1, 3)[0].T + 4, x, mask), torch.ones_like(mask))
    line = torch.zeros(1, 3, 3)
    line[0, :, 0] = torch.tensor([0.0, 10.0, 30.0])
    moved = line.clone()
    moved[0, 1, 0] = 11.5  # the one distance within 15 Angstrom is off by 1.5: below 2 and 4, not below 0.5 and 1
    assert lddt(moved, line, torch.ones(1, 3))[0].tolist() == [0.5, 0.5, 1.0]
    shrunk = lddt(0.7 * x, x, mask)
    assert 0 < shrunk.mean() < 0.9


def test_head_losses_are_small_where_the_logits_know() -> None:
    structure = _structure()
    truth = _truth(structure)
    beta = truth.atom37_BN373[0, :, residues.CB].clone()
    beta[residues.RESTYPES.index("G")] = truth.atom37_BN373[0, residues.RESTYPES.index("G"), residues.CA]
    edges = torch.linspace(2.3125, 21.6875, 63)
    known = torch.nn.functional.one_hot(torch.bucketize(torch.cdist(beta, beta), edges.double()), 64)
    assert distogram_loss(100.0 * known[None], truth).item() < 1e-6
    assert distogram_loss(torch.zeros(1, N, N, 64), truth).item() == pytest.approx(math.log(64), rel=1e-5)
    letters, hidden = torch.randint(0, 22, (1, 4, N)), torch.zeros(1, 4, N)
    hidden[0, 2, 3] = 1
    logits = torch.zeros(1, 4, N, 23)
    assert masked_msa_loss(logits, letters, hidden).item() == pytest.approx(math.log(23), rel=1e-5)
    logits[0, 2, 3, letters[0, 2, 3]] = 100
    assert masked_msa_loss(logits, letters, hidden).item() < 1e-6
    best = torch.zeros(1, N, 50)
    best[..., 49] = 100
    positions = truth.atom37_BN373
    assert plddt_loss(best, positions, truth).item() < 1e-6
    assert plddt_loss(best, torch.zeros_like(positions), truth).item() > 1
    # The first edge is 0, so only a residue in its own frame falls into the first bin.
    exact = 100.0 * torch.nn.functional.one_hot(1 - torch.eye(N, dtype=torch.long), 64)[None]
    assert pae_loss(exact, structure, truth).item() < 1e-6
    assert pae_loss(exact, _structure(1), truth).item() > 1


def _chain(aatype: Tensor) -> Tensor:
    """An extended chain with ideal peptide bonds: atom14 positions [1, L, 14, 3]."""
    L = aatype.shape[1]
    n, ca, c = (torch.tensor(x, dtype=F64) for x in ((-0.525, 1.363, 0.0), (0.0, 0, 0), (1.526, 0, 0)))
    frames, rotation, origin = [], torch.eye(3, dtype=F64), torch.zeros(3, dtype=F64)
    for _ in range(L):
        frames.append(Frames(rotation, origin))
        here = Frames(rotation, origin)
        # place the next N at 1.329 Angstrom in the plane, its CA beyond, trans
        ca_c = torch.nn.functional.normalize(c - ca, dim=0)
        angle = math.acos(-0.4473)
        across = torch.tensor([0.0, -1.0, 0.0], dtype=F64)
        n_next = c + 1.329 * (-math.cos(angle) * ca_c + math.sin(angle) * across)
        to_c = torch.nn.functional.normalize(c - n_next, dim=0)
        normal = torch.nn.functional.normalize(ca_c - (ca_c @ to_c) * to_c, dim=0)
        bend = math.acos(-0.5203)
        ca_next = n_next + 1.461 * (math.cos(bend) * to_c + math.sin(bend) * normal)
        # the next residue's frame: from its own N - CA direction, its C away in the plane
        y = torch.nn.functional.normalize(n_next - ca_next, dim=0)
        z = torch.tensor([0.0, 0, -1.0], dtype=F64)
        local = torch.nn.functional.normalize(n - ca, dim=0)
        a = math.atan2(local[1], local[0])
        x = math.cos(a) * y + math.sin(a) * torch.linalg.cross(y, z)
        turn = torch.stack([x, torch.linalg.cross(z, x), z], -1)
        rotation, origin = here.rotation @ turn, here.apply(ca_next)
    backbone = Frames(
        torch.stack([f.rotation for f in frames])[None], torch.stack([f.translation for f in frames])[None]
    )
    trans = torch.tensor([0.0, -1.0], dtype=F64).expand(1, L, 7, 2)
    return atoms_of_frames(aatype, frames_of_torsions(aatype, backbone, trans))


@pytest.mark.parametrize(
    ("distance", "number"),
    [(1e-6, 1), (0.499, 1), (0.501, 2), (15.499, 31), (15.501, 32), (30.999, 62), (31.001, 63), (500.0, 63)],
)
def test_an_aligned_error_counts_in_the_bin_of_the_original(distance: float, number: int) -> None:
    """Edges every half Angstrom from 0 to 31, as `sum(error > edges)`: bin 0 is that of a residue in its own frame."""
    structure = _structure()
    truth, j = _truth(structure), 3
    shift = torch.zeros(1, 1, N, 3, dtype=F64)
    shift[..., j, :] = distance * _rotations(1, 5)[0, 0]
    backbone = Frames(structure.backbone.rotation, structure.backbone.translation + shift)
    expected = 1 - torch.eye(N, dtype=torch.long)[None]  # rounding is an error, too
    expected[:, j] = expected[:, :, j] = number
    expected[:, j, j] = 0
    moved = expected * ((torch.arange(N) == j)[:, None] | (torch.arange(N) == j))
    logits = 100 * torch.nn.functional.one_hot(expected, 64).double()
    assert pae_loss(logits, replace(structure, backbone=backbone), truth).item() < 1e-6
    for off in (-1, 1):
        if 0 <= number + off < 64:
            wrong = 100 * torch.nn.functional.one_hot(expected + off * (moved > 0), 64).double()
            assert pae_loss(wrong, replace(structure, backbone=backbone), truth).item() > 1


def test_violations() -> None:
    aatype = torch.tensor([[residues.RESTYPES.index(c) for c in "AAAAA"]])
    index, exists = torch.arange(5)[None], table(residues.ATOM14_MASK, aatype, F64)
    atoms = _chain(aatype)
    assert torch.linalg.vector_norm(atoms[0, 0, 2] - atoms[0, 1, 0]).item() == pytest.approx(1.329, abs=1e-3)
    assert peptide_violations(atoms, exists, aatype, index).item() == 0
    stretched = atoms.clone()
    stretched[0, 3:] += torch.tensor([3.0, 0, 0], dtype=F64)
    assert peptide_violations(stretched, exists, aatype, index).item() > 0.05
    assert peptide_violations(stretched, exists, aatype, torch.tensor([[0, 1, 2, 9, 10]])).item() == 0
    on_top = atoms.clone()
    on_top[0, 4] = on_top[0, 0]
    assert clashes_between(on_top, exists, aatype, index) > clashes_between(atoms, exists, aatype, index) + 1
    assert violation_loss(on_top, aatype, index) > violation_loss(atoms, aatype, index)


def test_a_disulfide_is_no_clash() -> None:
    aatype = torch.tensor([[residues.RESTYPES.index("C")] * 2])
    atoms, exists = torch.zeros(1, 2, 14, 3, dtype=F64), torch.zeros(1, 2, 14, dtype=F64)
    exists[..., 5] = 1
    atoms[0, 1, 5, 0] = 1.0
    assert clashes_between(atoms, exists, aatype, torch.tensor([[0, 5]])).item() == 0
    serine = torch.full_like(aatype, residues.RESTYPES.index("S"))
    assert clashes_between(atoms, exists, serine, torch.tensor([[0, 5]])).item() > 0


def test_ideal_residues_do_not_clash_with_themselves() -> None:
    """Bonded atoms and those two bonds apart are never counted; folded-up side chains are."""
    structure = _structure()
    exists = table(residues.ATOM14_MASK, AATYPE, F64)
    trans = torch.tensor([0.0, -1.0], dtype=F64).expand(1, N, 7, 2)
    atoms = atoms_of_frames(AATYPE, frames_of_torsions(AATYPE, structure.backbone.map(lambda x: x[0]), trans))
    without_rings = exists * (residues.RESTYPES.index("P") != AATYPE)[..., None]
    assert clashes_within(atoms, without_rings, AATYPE).item() < 0.05
    assert clashes_within(0.3 * atoms, exists, AATYPE).item() > 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backbone": -0.5}, "loss.backbone=-0.5; give a number, at least 0"),
        ({"plddt": math.nan}, "loss.plddt=nan"),
        ({"interface_clamp": -1.0}, "loss.interface_clamp=-1.0"),
        ({"unclamped": 1.5}, "loss.unclamped=1.5; give a share"),
        ({"resolution": (3.0, 0.1)}, r"loss.resolution=3.0 0.1; .* the smaller one first"),
    ],
)
def test_weights_that_are_none_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        LossConfig(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_residues": -1}, "data.min_residues=-1; give a number, at least 1"),
        ({"max_chains": 0}, "data.max_chains=0"),
        ({"max_resolution": -2.0}, "data.max_resolution=-2.0; give Angstrom"),
        ({"max_resolution": math.nan}, "data.max_resolution=nan"),
    ],
)
def test_data_of_which_nothing_can_be_left_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        DataConfig(**options)


@pytest.mark.parametrize("config", [LossConfig(), fine_tuning()])
def test_the_total_is_finite_and_so_are_its_gradients(config: LossConfig) -> None:
    """From a start like the real one: all residues in one place."""
    model_config = tiny()
    model = AlphaFold(model_config)
    model.load_state_dict(random_parameters(model_config))
    features = random_features(10, rows=4, extra=3, templates=1)
    positions, mask = 5 * torch.randn(1, 10, 37, 3), table(residues.ATOM37_MASK, features.aatype_BN)
    mask[0, 4] = 0
    truth = truth_of_atoms(features.aatype_BN, positions * mask[..., None], mask)
    letters, hidden = torch.randint(0, 22, (1, 4, 10)), (torch.rand(1, 4, 10) < 0.3).float()
    prediction = model([features])
    total, parts = total_loss(prediction, features, truth, letters, hidden, torch.tensor([2.0]), config)
    assert {name for name in vars(config) if isinstance(getattr(config, name), float)} - {"unclamped"} >= set(parts)
    assert ("violation" in parts) == (config.violation > 0)
    assert total.item() == pytest.approx(
        sum(getattr(config, name) * part.item() for name, part in parts.items()), rel=1e-5
    )
    total.backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
    _, without = total_loss(prediction, features, truth, letters, hidden, torch.tensor([5.0]), config)
    assert without["plddt"].item() == without["pae"].item() == 0
    assert frames_of_atoms(features.aatype_BN, positions, mask)[1][0, 4].sum() == 0


# Two chains of ten residues and two of padding: a complex.
ASYM = torch.tensor([[1] * 9 + [2] * 9 + [0] * 2])


def test_fape_of_a_complex_is_the_mean_within_chains_and_that_between_them() -> None:
    predicted, truth = _structure(1), _truth(_structure(2))
    truth = replace(truth, group_mask_BNG=truth.group_mask_BNG * ASYM.clamp(max=1)[..., None])
    true = truth.groups.map(lambda x: x[:, :, 0])
    sums = {name: [0.0, 0] for name in ("within", "free", "between", "limited")}
    for i in range(18):
        for j in range(18):
            here = predicted.backbone.map(lambda x, i=i: x[0, 0, i]).inverse_apply(
                predicted.backbone.translation[0, 0, j]
            )
            there = true.map(lambda x, i=i: x[0, i]).inverse_apply(true.translation[0, j])
            error = math.sqrt(((here - there) ** 2).sum() + 1e-4)
            one_chain = (i < 9) == (j < 9)
            terms = {"within": min(error, 10) / 10, "free": error / 10} if one_chain else {}
            terms |= {} if one_chain else {"between": error / 20, "limited": min(error, 12) / 20}
            for name, term in terms.items():
                sums[name][0] += term
                sums[name][1] += 1
    mean = {name: total / count for name, (total, count) in sums.items()}
    within, between = complex_fape(predicted, truth, ASYM)
    assert within.item() == pytest.approx(mean["within"], rel=1e-5)
    assert between.item() == pytest.approx(mean["between"], rel=1e-5)
    within, between = complex_fape(predicted, truth, ASYM, unclamped=0.3, interface_clamp=12.0)
    assert within.item() == pytest.approx(0.7 * mean["within"] + 0.3 * mean["free"], rel=1e-5)
    assert between.item() == pytest.approx(mean["limited"], rel=1e-5)
    assert mean["limited"] < mean["between"]


def _pulled_apart(degrees: float) -> float:
    """How differently two equal chains are drawn that are predicted in one place, beside how much.

    The second is the first turned about an axis. Both losses between chains, and that within them.
    """
    chain, predicted = (_structure(seed).backbone.map(lambda x: x[0, 0, :9]) for seed in (2, 1))
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = torch.tensor([[c, -s, 0], [s, c, 0], [0, 0, 1]], dtype=F64)
    axis = torch.tensor([25.0, 10.0, 0.0], dtype=F64)
    mate = Frames(turn @ chain.rotation, (chain.translation - axis) @ turn.T + axis)
    true = Frames(torch.cat([chain.rotation, mate.rotation]), torch.cat([chain.translation, mate.translation]))
    place = torch.cat([predicted.translation] * 2).requires_grad_()
    frames, asym = Frames(torch.cat([predicted.rotation] * 2), place), torch.tensor([[1] * 9 + [2] * 9])
    error = frame_aligned_errors(frames, true, place, true.translation)
    loss = error.mean() + centre_loss(place[None], true.translation[None], torch.ones(1, 18, dtype=F64), asym).sum()
    loss.backward()
    assert place.grad is not None
    first, second = place.grad.split(9)
    return float((first - second).norm() / (first + second).norm())


def test_equal_chains_about_a_twofold_axis_are_drawn_alike_from_one_place() -> None:
    """So a network for which they are alike stays there: only what tells them apart already is made to grow."""
    assert _pulled_apart(180.0) < 1e-12
    assert _pulled_apart(120.0) > 0.05


def test_chains_that_are_too_near_cost_and_those_too_far_do_not() -> None:
    truth = torch.zeros(1, N, 3, dtype=F64)
    truth[:, 9:18] = torch.tensor([30.0, 0, 0])
    seen = torch.ones(1, N, dtype=F64)
    seen[:, :2] = 0
    predicted = truth.clone()
    predicted[:, :2] = 500  # not seen
    predicted[:, 18:] = 500  # padding
    for distance, expected in ((30, 0.0), (27, 0.0), (60, 0.0), (10, (16 / 20) ** 2), (2, (24 / 20) ** 2)):
        predicted[:, 9:18, 0] = distance
        assert centre_loss(predicted, truth, seen, ASYM).item() == pytest.approx(expected, abs=1e-5)
    assert centre_loss(predicted, truth, seen, ASYM.clamp(max=1)).item() == 0


def test_no_bond_joins_two_chains_whose_atoms_clash_all_the_same() -> None:
    structure = _structure()
    atoms, index = structure.atom14[-1], torch.arange(N)[None]
    asym = torch.tensor([[1] * 10 + [2] * 10])
    apart = atoms.clone()
    apart[:, 10:] += 1000.0
    chain, index_of_chains = violation_loss(apart, AATYPE, index), torch.arange(10).repeat(2)[None]
    joined = [violation_loss(apart[:, at], AATYPE[:, at], index[:, at]) for at in (slice(10), slice(10, 20))]
    assert violation_loss(apart, AATYPE, index, asym) < 0.5 * chain  # the bond across is 1,000 Angstrom long
    assert violation_loss(apart, AATYPE, index, asym) < 2 * sum(joined)
    crop = torch.cat([torch.arange(10), torch.arange(10, 20)])[None]  # numbers that go on, as crops may have them
    torch.testing.assert_close(
        violation_loss(apart, AATYPE, crop, asym), violation_loss(apart, AATYPE, index_of_chains, asym)
    )
    on_top = apart.clone()
    on_top[:, 10:] = atoms[:, :10]  # residues of one number in both chains, one on the other
    far = violation_loss(apart, AATYPE, index_of_chains, asym)
    assert violation_loss(on_top, AATYPE, index_of_chains, asym) > far + 1
