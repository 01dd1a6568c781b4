"""AlphaFold's relaxation as a script of OpenMM's own calls, from PDB text to PDB text: what ours is compared with."""

import io
import random

import numpy as np
from openmm import CustomExternalForce, LangevinIntegrator, Platform, app, unit
from pdbfixer import PDBFixer

ENERGY, LENGTH = unit.kilocalories_per_mole, unit.angstroms


def cleaned(pdb: str) -> str:
    """With all heavy atoms and hydrogens; `random` places hydrogens."""
    fixer = PDBFixer(pdbfile=io.StringIO(pdb))
    fixer.findMissingResidues()
    fixer.missingResidues = {}
    fixer.findNonstandardResidues()
    fixer.replaceNonstandardResidues()
    fixer.removeHeterogens(False)
    fixer.findMissingAtoms()
    fixer.addMissingAtoms(seed=0)
    fixer.addMissingHydrogens()
    text = io.StringIO()
    app.PDBFile.writeFile(fixer.topology, fixer.positions, text)
    return text.getvalue()


def energies(pdb: str) -> tuple[float, float]:
    """Before and after one round in which all heavy atoms are held, in kcal/mol."""
    random.seed(0)
    start = app.PDBFile(io.StringIO(cleaned(pdb)))
    system = app.ForceField("amber99sb.xml").createSystem(start.topology, constraints=app.HBonds)
    springs = CustomExternalForce("0.5 * k * ((x-x0)^2 + (y-y0)^2 + (z-z0)^2)")
    springs.addGlobalParameter("k", 10 * ENERGY / LENGTH**2)
    for name in ("x0", "y0", "z0"):
        springs.addPerParticleParameter(name)
    for index, atom in enumerate(start.topology.atoms()):
        if atom.element.name != "hydrogen":
            springs.addParticle(index, start.positions[index])
    system.addForce(springs)
    platform = Platform.getPlatformByName("CPU")
    simulation = app.Simulation(start.topology, system, LangevinIntegrator(0, 0.01, 0.0), platform)
    simulation.context.setPositions(start.positions)

    def energy() -> float:
        return simulation.context.getState(getEnergy=True).getPotentialEnergy().value_in_unit(ENERGY)

    before = energy()
    simulation.minimizeEnergy(maxIterations=0, tolerance=10 * unit.kilojoules_per_mole / unit.nanometer)
    assert np.isfinite(energy())
    return before, energy()
