"""Frames, torsions, atoms: against biopython-free geometry done here, and under rotations."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from apps.fold.model import residues
from apps.fold.model.rigid import Frames, frames_from_points, rotation_from_quaternion, turned_by
from apps.fold.model.torsions import (
    atom37_of_atom14,
    atoms_of_frames,
    distance_bins,
    frames_of_torsions,
    pseudo_beta,
    torsions_of_atoms,
)

EVERY = torch.arange(20)


def _rotation(seed: int) -> Tensor:
    q, r = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    q = q * r.diagonal().sign()
    return q if torch.linalg.det(q) > 0 else -q


def _residues(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(sin, cos) of random torsions, atom37 positions and mask of one residue of each type, their frames at random."""
    generator = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.rand(20, 7, generator=generator, dtype=torch.float64)
    sin_cos = torch.stack([angle.sin(), angle.cos()], -1)
    frames = Frames(torch.stack([_rotation(i) for i in range(20)]), torch.randn(20, 3, generator=generator).double())
    atoms = atom37_of_atom14(EVERY, atoms_of_frames(EVERY, frames_of_torsions(EVERY, frames, sin_cos)))
    return sin_cos, atoms, torch.from_numpy(residues.ATOM37_MASK[:20]).double()


def test_atoms_of_torsions_have_these_torsions() -> None:
    """Chi comes back from the atoms; psi does, too, since the oxygen moves with it."""
    sin_cos, atoms, mask = _residues()
    found = torsions_of_atoms(EVERY, atoms, mask)
    chi_mask = torch.from_numpy(residues.CHI_MASK[:20]).double()
    assert torch.equal(found.mask[:, 3:], chi_mask)
    # Ideal atoms have three decimals, and those of a group lie in its plane only to a few thousandths.
    assert ((found.sin_cos - sin_cos)[:, 3:] * chi_mask[..., None]).abs().max() < 1e-6
    assert (found.sin_cos - sin_cos)[:, 2].abs().max() < 1e-6
    assert (found.sin_cos[:, 3:] * (1 - chi_mask[..., None])).abs().max() == 0


def test_a_dihedral_is_what_the_textbook_says() -> None:
    _, atoms, mask = _residues(1)
    found = torsions_of_atoms(EVERY, atoms, mask)
    a, b, c, d = (atoms[1, residues.ATOM37.index(name)] for name in ("CA", "CB", "CG", "CD"))  # arginine's chi2
    u, v, w = b - a, c - b, d - c
    first, second = torch.linalg.cross(u, v), torch.linalg.cross(v, w)
    expected = torch.atan2(v.norm() * (u @ second), first @ second)
    sin, cos = found.sin_cos[1, 4]
    assert torch.atan2(sin, cos).item() == pytest.approx(expected.item(), abs=1e-6)


def test_torsions_do_not_change_when_everything_turns() -> None:
    _, atoms, mask = _residues()
    turned = atoms @ _rotation(99).T + torch.tensor([1.0, 2, 3], dtype=torch.float64) * 1
    before, after = torsions_of_atoms(EVERY, atoms, mask), torsions_of_atoms(EVERY, turned * mask[..., None], mask)
    assert (before.sin_cos - after.sin_cos).abs().max() < 1e-6


def test_symmetric_side_chains_have_an_alternative() -> None:
    _, atoms, mask = _residues()
    found = torsions_of_atoms(EVERY, atoms, mask)
    changed = ((found.sin_cos + found.alternative).abs().amax(-1) < 1e-9) & (found.mask > 0)
    turned = {(residues.RESTYPES[i], int(chi) - 2) for i, chi in zip(*map(np.asarray, np.nonzero(changed.numpy())))}
    assert turned == {("D", 2), ("E", 3), ("F", 2), ("Y", 2)}
    assert torch.equal(found.sin_cos[~changed], found.alternative[~changed])


def test_undefined_torsions_get_the_placeholder() -> None:
    _, atoms, mask = _residues()
    found = torsions_of_atoms(EVERY, atoms, mask, undefined=(1.0, 0.0))
    assert torch.equal(found.sin_cos[0, 0], torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert found.mask[0, :2].tolist() == [0, 0]
    assert found.mask[1, :2].tolist() == [1, 1]


def test_quaternions() -> None:
    q = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q = q / q.norm(dim=-1, keepdim=True)
    rotation = rotation_from_quaternion(q)
    eye = torch.eye(3, dtype=torch.float64)
    assert (rotation @ rotation.transpose(-1, -2) - eye).abs().max() < 1e-12
    assert (torch.linalg.det(rotation) - 1).abs().max() < 1e-12
    vector = 0.3 * torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    small = torch.cat([torch.ones(5, 1, dtype=torch.float64), vector], -1)
    small = rotation_from_quaternion(small / small.norm(dim=-1, keepdim=True))
    assert (rotation_from_quaternion(turned_by(q, vector)) - rotation @ small).abs().max() < 1e-12
    about_z = rotation_from_quaternion(torch.tensor([math.cos(0.1), 0, 0, math.sin(0.1)], dtype=torch.float64))
    assert about_z[1, 0].item() == pytest.approx(math.sin(0.2))


def test_frames_of_points() -> None:
    points = torch.randn(3, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    frames = frames_from_points(*points)
    local = torch.stack([frames.inverse_apply(x) for x in points])
    assert local[1].abs().max() < 1e-12
    assert (local[0, :, 0] < 0).all()
    assert local[0, :, 1:].abs().max() < 1e-7
    assert (local[2, :, 1] > 0).all()
    assert local[2, :, 2].abs().max() < 1e-7
    assert (frames.apply(local) - points).abs().max() < 1e-7
    other = Frames(_rotation(1), torch.tensor([1.0, 2, 3], dtype=torch.float64))
    assert (frames.compose(other).apply(points[0]) - frames.apply(other.apply(points[0]))).abs().max() < 1e-12


def test_distance_bins() -> None:
    x = torch.tensor([[0.0, 0, 0], [3.0, 0, 0], [3.3, 0, 0], [100.0, 0, 0]])
    bins = distance_bins(x, 3.25, 20.75, 15)
    assert bins[0, 1].sum() == 0
    assert bins[0, 2].argmax() == 0
    assert bins[0, 3].argmax() == 14
    assert bins[0, 2].sum() == bins[0, 3].sum() == 1


def test_pseudo_beta_of_glycine_is_its_alpha() -> None:
    aatype = torch.tensor([residues.RESTYPES.index("G"), residues.RESTYPES.index("A")])
    positions = torch.arange(2 * 37 * 3).view(2, 37, 3)
    assert torch.equal(pseudo_beta(aatype, positions), torch.stack([positions[0, 1], positions[1, 3]]))
    mask = torch.zeros(2, 37)
    mask[0, 1] = 1
    assert pseudo_beta(aatype, mask).tolist() == [1, 0]


def test_tables_equal_another_implementation_s() -> None:
    """The residue tables of transformers' ESMFold, written down independently of ours."""
    theirs = pytest.importorskip("transformers.models.esm.openfold_utils.residue_constants")
    assert list(residues.ATOM37) == theirs.atom_types
    for restype, letter in enumerate(residues.RESTYPES):
        names = theirs.restype_name_to_atom14_names[residues.THREE_LETTERS[letter]]
        assert residues.atoms_of(letter) == [name for name in names if name]
        assert "".join(theirs.restypes)[restype] == letter
    assert np.array_equal(residues.ATOM14_MASK, theirs.restype_atom14_mask)
    assert np.array_equal(residues.ATOM37_MASK, theirs.restype_atom37_mask)
    assert np.array_equal(residues.ATOM14_GROUP * (residues.ATOM14_MASK > 0), theirs.restype_atom14_to_rigid_group)
    assert np.array_equal(residues.ATOM14_POSITION, theirs.restype_atom14_rigid_group_positions)
    assert np.array_equal(residues.CHI_PI_PERIODIC, np.array(theirs.chi_pi_periodic))
    frames = theirs.restype_rigid_group_default_frame
    there = np.abs(frames[:20]).sum((-1, -2)) > 0
    assert np.abs(residues.GROUP_ROTATION[:20] - frames[:20, :, :3, :3])[there].max() < 1e-6
    assert np.abs(residues.GROUP_TRANSLATION[:20] - frames[:20, :, :3, 3])[there].max() < 1e-6
