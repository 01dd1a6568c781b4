"""A minimizer of our own, for machines without OpenMM: violations and springs alone, by L-BFGS in torch.

It knows no force field: no charges, no hydrogens, no energy of torsions. Distances of bonded atoms, peptide bonds and
their angles are drawn to within two deviations of their ideals, atoms that overlap are drawn apart, and the springs of
the protocol hold the rest. Its energies are of these terms only, and cannot be compared with a force field's.

Shapes: N residues, A = 14 atoms, M = N A.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from apps.fold.model import residues
from apps.fold.output.files import Atom
from apps.fold.relaxation.protocol import STIFFNESS, End, Limit, OutOfTime, Round, Structure, Tell, heavy_atoms
from apps.fold.stereochemistry import Clashes, Stereochemistry, cosines, distances
from core.compat import traced_add_param_group

_BOND_STIFFNESS = 600.0  # kcal/mol/Angstrom^2, as bonds of a force field have
_ANGLE_STIFFNESS = 120.0  # kcal/mol, of cosines
_FREE = 2.0  # deviations
_MARGIN = 0.1  # Angstrom by which atoms are drawn further apart than they have to be
_ITERATIONS, _BATCH = 1_000, 20  # at most in a round, and between two looks at which atoms are near
_NOISE = 0.01  # Angstrom
_CONVERGED = 1e-4  # kcal/mol by which a batch lowers the energy of an atom, at the end


def drawn_apart(structure: Structure, limit: Limit) -> tuple[Structure, bool]:
    """The structure with its violations mended, whatever the way, for one whose atoms lie on each other; and whether
    that ended before the limit of time."""
    moving = Violations(structure, limit)
    found = moving.minimize(np.zeros(len(structure.aatype_N), bool), limit, lambda text: None)
    apart = replace(structure, atoms_NA3=moving.positions() * structure.exists_NA[..., None])
    return apart, found.end != "limit of time"


class _LBFGS(torch.optim.LBFGS):
    """Without what the first optimizer imports: that would take seconds of a limit of time."""

    add_param_group = traced_add_param_group


class _Batch:
    """Energies and gradients of some iterations, and the lowest energy.  Raises OutOfTime where the next would be late.

    first, lowest  kcal/mol; best_M3: the atoms where it is lowest, None before the first
    """

    def __init__(self, limit: Limit):
        self._limit, self._longest, self._before = limit, 0.0, limit.clock()

    def begin(self, gradient: Callable[[], Tensor], x_M3: Tensor) -> None:
        self._gradient, self._x_M3 = gradient, x_M3
        self.first = self.lowest = float("inf")
        self.best_M3: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._limit.passed(self._longest):
            raise OutOfTime
        value = self._gradient()
        energy, now = float(value.detach()), self._limit.clock()
        self._longest, self._before = max(self._longest, now - self._before), now
        if self.best_M3 is None:
            self.first = energy
        if self.best_M3 is None or energy < self.lowest:
            self.lowest, self.best_M3 = energy, self._x_M3.detach().clone()
        return value


class Violations:
    """See `apps.fold.relaxation.protocol.Minimizer`.  Atoms that are missing stay so.

    Atoms in one place, which know no direction, begin a hundredth of an Angstrom from there.
    """

    method = "violations by L-BFGS (no force field)"

    def __init__(self, structure: Structure, limit: Limit):
        limit.check()
        self._structure, self.placed_NA = structure, structure.exists_NA
        self._rules = Stereochemistry(structure.aatype_N, structure.exists_NA, structure.follows_N)
        self._exists_M = torch.from_numpy(structure.exists_NA.reshape(-1) > 0)
        flat_M3 = structure.atoms_NA3.reshape(-1, 3)
        _, place_M, count = np.unique(np.round(flat_M3, 3), axis=0, return_inverse=True, return_counts=True)
        noise_M3 = np.random.default_rng(0).normal(0, _NOISE, flat_M3.shape) * (count[place_M.reshape(-1)] > 1)[:, None]
        self._flat_M3 = torch.from_numpy(flat_M3 + noise_M3 * structure.exists_NA.reshape(-1, 1))

    def minimize(self, held_N: np.ndarray, limit: Limit, tell: Tell) -> Round:
        start_M3, x_M3 = self._flat_M3, self._flat_M3.clone().requires_grad_()
        held_M = torch.from_numpy(held_N).repeat_interleave(residues.NUM_ATOM14) & self._exists_M
        count, before, energy, batch = int(self._exists_M.sum()), None, 0.0, _Batch(limit)
        iterations, end = 0, "converged"
        while iterations < _ITERATIONS:
            clashes = self._rules.clashes(self._shaped(x_M3), 4 * _MARGIN)
            optimizer = _LBFGS([x_M3], max_iter=_BATCH, line_search_fn="strong_wolfe")
            batch.begin(partial(self._gradient, x_M3, start_M3, held_M, clashes), x_M3)
            try:
                optimizer.step(batch)
            except OutOfTime:
                end = "limit of time"
            if batch.best_M3 is None:
                break
            with torch.no_grad():
                x_M3.copy_(batch.best_M3)
            before, energy = batch.first if before is None else before, batch.lowest
            iterations += _BATCH
            tell(f"iteration {iterations}, {energy:,.1f} kcal/mol of violations and springs")
            if batch.first - energy < _CONVERGED * count or end == "limit of time":
                break
        self._flat_M3 = x_M3.detach()
        reached: End = "plateau" if iterations >= _ITERATIONS and end == "converged" else end
        return Round(before or 0.0, energy, iterations, reached)

    def positions(self) -> np.ndarray:
        return self._shaped(self._flat_M3).numpy().copy()

    def atoms(self) -> list[Atom]:
        return heavy_atoms(self._structure, self.positions())

    def _shaped(self, flat_M3: Tensor) -> Tensor:
        return flat_M3.detach().view(-1, residues.NUM_ATOM14, 3)

    def _gradient(self, x_M3: Tensor, start_M3: Tensor, held_M: Tensor, clashes: Clashes) -> Tensor:
        x_M3.grad = None
        value = self._energy(x_M3, start_M3, held_M, clashes)
        value.backward()
        return value

    def _energy(self, x_M3: Tensor, start_M3: Tensor, held_M: Tensor, clashes: Clashes) -> Tensor:
        rules, bounds = self._rules, self._rules.bounds
        springs = STIFFNESS / 2 * ((x_M3 - start_M3)[held_M] ** 2).sum()
        off = (distances(x_M3, bounds.pairs) - bounds.ideal).abs() - _FREE * bounds.deviation
        turned = (cosines(x_M3, rules.angles_J3) - rules.cosines_J).abs() - _FREE * rules.spread_J
        near = clashes.nearest + _MARGIN - distances(x_M3, clashes.pairs)
        bonded = (torch.relu(off) ** 2).sum() + (torch.relu(near) ** 2).sum()
        return springs + _BOND_STIFFNESS / 2 * bonded + _ANGLE_STIFFNESS / 2 * (torch.relu(turned) ** 2).sum()
