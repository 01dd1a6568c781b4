"""The minimizer of AlphaFold's relaxation: OpenMM's L-BFGS in the force field AMBER99SB, without solvent.

Heavy atoms that are missing and hydrogens, as at pH 7, are placed by PDBFixer, from a fixed seed. Bonds with hydrogens
keep their lengths; all pairs of atoms are counted, above 5,000 atoms those within 2 nm. Both packages are optional.
"""

import io
import random
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from apps.fold.model import residues
from apps.fold.output.files import Atom
from apps.fold.relaxation.bounded import within
from apps.fold.relaxation.protocol import STIFFNESS, Clock, End, Limit, OutOfTime, Round, Structure, Tell, Unstable
from core.config import UserError

TOLERANCE = 10.0  # kJ/mol/nm: the root of the mean square of the force at which a minimization has converged
_KCAL = 4.184  # kJ
_MOST_ATOMS, _CUTOFF = 5_000, 2.0  # nm
_PLATEAU, _WINDOW = 1e-5, 200  # of the energy, which it fell by less in so many iterations
_TOLD_S = 0.2
_TO_STOP = 4  # iterations, of the longest so far: what it takes to stop and to read what was reached
_TO_CONSTRAIN = 90
"""Looks at the energy: once stopped, OpenMM makes bonds stiffer up to five times, with a line search each."""

INSTALL = "pip install 'megalith[relax]'"


class Packages(NamedTuple):
    """OpenMM's modules and PDBFixer's class, which are imported where they are needed."""

    openmm: Any
    app: Any
    unit: Any
    PDBFixer: Any


def find_openmm() -> Packages:
    """Raises UserError where OpenMM or PDBFixer is not installed, or is too old."""
    try:
        openmm, app, unit, pdbfixer = map(import_module, ("openmm", "openmm.app", "openmm.unit", "pdbfixer"))
    except ImportError as error:
        raise UserError(
            f"relaxation by AMBER takes OpenMM and PDBFixer ({error}); {INSTALL}, or give --method violations"
        ) from None
    if not hasattr(openmm, "MinimizationReporter"):
        raise UserError(f"relaxation takes OpenMM 8.1 or later, and {openmm.__version__} is installed; {INSTALL}")
    return Packages(openmm, app, unit, pdbfixer.PDBFixer)


def lone_residue(structure: Structure) -> str | None:
    """What is to be said of a residue that AMBER99SB does not know, being bonded to no other; None without any."""
    lone = ~structure.follows_N & ~np.append(structure.follows_N[1:], False)
    if not lone.any():
        return None
    return f"residue {int(np.argmax(lone)) + 1} is bonded to no other, and AMBER99SB knows no such residue"


class Amber:
    """See `apps.fold.relaxation.protocol.Minimizer`.

    Raises UserError for a platform that OpenMM has not here, and for a structure that its force field does not know.
    """

    method = "AMBER99SB by OpenMM"

    def __init__(self, structure: Structure, limit: Limit, platform: str = "CPU"):
        self._packages = find_openmm()
        if (lone := lone_residue(structure)) is not None:
            raise UserError(f"{lone}; give --method violations, or leave it out")
        self._structure, self.placed_NA = structure, residues.ATOM14_MASK[structure.aatype_N]
        openmm, found = self._packages.openmm, _platform(self._packages.openmm, platform)
        made = within(limit, partial(_complete, self._packages, structure, platform, limit.clock), "placing atoms")
        if limit.passed(made.seconds):
            raise OutOfTime
        self._residue, self._names, self._heavy = made.residue, made.names, made.heavy
        system = openmm.XmlSerializer.deserialize(made.system)
        self._springs = system.getForce(made.springs)
        self._context = openmm.Context(system, openmm.VerletIntegrator(0.001), found)
        self._context.setPositions(made.positions)
        self._positions = self._read()

    def minimize(self, held_N: np.ndarray, limit: Limit, tell: Tell) -> Round:
        openmm = self._packages.openmm
        stiffness = STIFFNESS * _KCAL * 100  # kJ/mol/nm^2
        for spring, index in enumerate(np.nonzero(self._heavy)[0]):
            k = stiffness if held_N[self._residue[index]] else 0.0
            self._springs.setParticleParameters(spring, int(index), [k, *self._positions[index]])
        self._springs.updateParametersInContext(self._context)
        begun, before = limit.clock(), self._energy()
        watch = _watch(openmm, limit, tell, limit.clock() - begun)
        try:
            openmm.LocalEnergyMinimizer.minimize(self._context, TOLERANCE, 0, watch)
        except openmm.OpenMMException as error:
            raise Unstable(f"OpenMM cannot minimize this structure: {str(error).partition('.  ')[0]}") from error
        found, after = self._read(), self._energy()
        if after > before:  # stopped while bonds with hydrogens were not yet as long as they have to be
            self._context.setPositions(self._positions)
            return Round(before, before, watch.iterations, watch.end)
        self._positions = found
        return Round(before, after, watch.iterations, watch.end)

    def positions(self) -> np.ndarray:
        found = np.zeros_like(self._structure.atoms_NA3)
        for index in np.nonzero(self._heavy)[0]:
            row = self._residue[index]
            names = residues.atoms_of(residues.RESTYPES[self._structure.aatype_N[row]])
            if self._names[index] in names:
                found[row, names.index(self._names[index])] = 10 * self._positions[index]
        return found

    def atoms(self) -> list[Atom]:
        """Without the oxygens that end parts of a chain behind which residues are missing."""
        last = np.append(np.diff(self._structure.chain_N) > 0, True)
        return [
            Atom(row, name, 10 * position)
            for row, name, position in zip(self._residue, self._names, self._positions)
            if name != "OXT" or last[row]
        ]

    def _read(self) -> np.ndarray:
        """Positions in nm.  Raises UserError where they are not finite."""
        state = self._context.getState(getPositions=True)
        found = np.array(state.getPositions(asNumpy=True)._value)
        if not np.isfinite(found).all():
            raise Unstable("OpenMM's minimization went to coordinates that are not finite; give --method violations")
        return found

    def _energy(self) -> float:
        """In kcal/mol."""
        energy = self._context.getState(getEnergy=True).getPotentialEnergy()
        return float(energy.value_in_unit(self._packages.unit.kilocalories_per_mole))


def _platform(openmm: Any, name: str) -> Any:
    known = [openmm.Platform.getPlatform(number).getName() for number in range(openmm.Platform.getNumPlatforms())]
    if name not in known:
        raise UserError(f"OpenMM has no platform {name!r} here; it has {', '.join(known)}")
    platform = openmm.Platform.getPlatformByName(name)
    if name == "CPU":
        platform.setPropertyDefaultValue("Threads", str(torch.get_num_threads()))
    if "DeterministicForces" in platform.getPropertyNames():
        platform.setPropertyDefaultValue("DeterministicForces", "true")
    return platform


def _topology(packages: Packages, structure: Structure) -> tuple[Any, Any]:
    """Of the atoms that are there; a chain ends where the next residue is missing."""
    openmm, app, unit, _ = packages
    topology, positions, chain = app.Topology(), [], None
    for row, restype in enumerate(structure.aatype_N):
        if not structure.follows_N[row]:
            chain = topology.addChain(str(topology.getNumChains() + 1))
        letter = residues.RESTYPES[restype]
        residue = topology.addResidue(residues.THREE_LETTERS[letter], chain, str(row + 1))
        for slot, name in enumerate(residues.atoms_of(letter)):
            if structure.exists_NA[row, slot]:
                topology.addAtom(name, app.Element.getBySymbol(name[0]), residue)
                positions.append(openmm.Vec3(*structure.atoms_NA3[row, slot].tolist()))
    return topology, unit.Quantity(positions, unit.angstrom)


class _Made(NamedTuple):
    """All atoms of a structure: of each its residue from 0, its name, whether it is no hydrogen, its position in nm.

    system, springs  OpenMM's system as text, and which of its forces the springs are, which hold nothing yet
    seconds          what the system took to make and to write, which is more than it takes to read
    """

    residue: list[int]
    names: list[str]
    heavy: np.ndarray
    positions: np.ndarray
    system: str
    springs: int
    seconds: float


def _complete(packages: Packages, structure: Structure, platform: str, clock: Clock) -> _Made:
    openmm, app, unit, _ = packages
    host = platform if platform == "Reference" else "CPU"  # a fork has no GPU
    topology, positions = _placed(packages, structure, _platform(openmm, host))
    begun = clock()
    residue = [atom.residue.index for atom in topology.atoms()]
    assert residue[-1] + 1 == len(structure.aatype_N)
    small = topology.getNumAtoms() <= _MOST_ATOMS
    try:
        system = app.ForceField("amber99sb.xml").createSystem(
            topology,
            nonbondedMethod=app.NoCutoff if small else app.CutoffNonPeriodic,
            nonbondedCutoff=_CUTOFF * unit.nanometer,
            constraints=app.HBonds,
        )
    except ValueError as error:
        raise UserError(f"AMBER99SB does not know this structure: {str(error).splitlines()[0]}") from error
    heavy = np.array([atom.element.symbol != "H" for atom in topology.atoms()])
    springs = openmm.CustomExternalForce("0.5 * k * ((x - x0)^2 + (y - y0)^2 + (z - z0)^2)")
    for name in ("k", "x0", "y0", "z0"):
        springs.addPerParticleParameter(name)
    for index in np.nonzero(heavy)[0]:
        springs.addParticle(int(index), [0.0, 0.0, 0.0, 0.0])
    at = system.addForce(springs)
    nm = np.array(positions.value_in_unit(unit.nanometer))
    names = [atom.name for atom in topology.atoms()]
    text = openmm.XmlSerializer.serialize(system)
    return _Made(residue, names, heavy, nm, text, at, clock() - begun)


def _placed(packages: Packages, structure: Structure, platform: Any) -> tuple[Any, Any]:
    """Topology and positions with all atoms; hydrogens begin where Python's random numbers say."""
    text = io.StringIO()
    packages.app.PDBxFile.writeFile(*_topology(packages, structure), text, keepIds=True)
    text.seek(0)
    random.seed(0)
    try:
        fixer = packages.PDBFixer(pdbxfile=text, platform=platform)
        fixer.missingResidues = {}
        fixer.findMissingAtoms()
        fixer.addMissingAtoms(seed=0)
        fixer.addMissingHydrogens(7.0)
    except (packages.openmm.OpenMMException, ZeroDivisionError) as error:
        raise Unstable(f"PDBFixer cannot complete this structure: {error}") from error
    except (ValueError, KeyError) as error:
        raise UserError(f"PDBFixer cannot complete this structure: {str(error).splitlines()[0]}") from error
    return fixer.topology, fixer.positions


def _watch(openmm: Any, limit: Limit, tell: Tell, energy_s: float) -> Any:
    """A reporter of OpenMM's that ends a minimization at the limit of time, or when its energy falls no more.

    energy_s  seconds of a look at the energy
    """

    class Watch(openmm.MinimizationReporter):
        def __init__(self) -> None:
            super().__init__()
            self.iterations, self._told = 0, limit.clock()
            self._before, self._longest = self._told, 0.0  # the last iteration's end; seconds of the longest
            self.end: End = "converged"
            self._energies: list[float] = []
            self._strength = 0.0

        def report(self, iteration: int, x: Any, grad: Any, args: dict[str, float]) -> bool:
            self.iterations += 1
            energy, now = args["system energy"] + args["restraint energy"], limit.clock()
            if args["restraint strength"] != self._strength:
                self._strength, self._energies = args["restraint strength"], []
            self._energies.append(energy)
            self._before, self._longest = now, max(self._longest, now - self._before)
            if now - self._told > _TOLD_S:
                tell(f"iteration {self.iterations}, {args['system energy'] / _KCAL:,.0f} kcal/mol")
                self._told = now
            if limit.passed(max(_TO_STOP * self._longest, _TO_CONSTRAIN * energy_s)):
                self.end = "limit of time"
            elif len(self._energies) > _WINDOW:
                fell = self._energies[-1 - _WINDOW] - energy
                if fell < _PLATEAU * max(1.0, abs(energy)):
                    self.end = "plateau"
            return self.end != "converged"

    return Watch()
