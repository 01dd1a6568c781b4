"""`fold evaluate`: a prediction against an experimental structure: lDDT, TM-score, RMSD, GDT; of a complex DockQ."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from apps.fold.dockq import DockQ, dockq
from apps.fold.features.structures import Chain, read_structure
from apps.fold.features.templates import align
from apps.fold.score import compare
from core.config import UserError, parse
from core.files import replace_file


@dataclass(frozen=True)
class EvaluateConfig:
    predicted: Path | None = None
    """an mmCIF or PDB file; lDDT, TM-score, RMSD and GDT are of its first protein chain"""
    reference: Path | None = None
    """an experimental structure; these take the chain that matches best"""
    chain: tuple[str, ...] = ()
    """of the reference: the one that is taken alone, or those whose interfaces are scored; by default all"""
    out: Path | None = None
    """a json file for the scores"""


def main(argv: list[str]) -> int:
    config = parse({"default": EvaluateConfig}, argv, "megalith fold evaluate", default="default")
    if config.predicted is None or config.reference is None:
        raise UserError("megalith fold evaluate needs both --predicted FILE and --reference FILE")
    chains = read_structure(config.predicted)
    named = _named(read_structure(config.reference), config)
    predicted, reference = chains[0], _best_match(chains[0], named)
    interfaces = _interfaces(len(chains), len(named), config)
    scores = compare(predicted, reference)
    table = Table("score", "value")
    table.add_row("reference", f"{config.reference.name}, chain {reference.name}")
    table.add_row(
        "aligned residues", f"{scores.aligned} of {scores.reference}, {100 * scores.identity:.0f} % identical"
    )
    for name, label in _LABELS.items():
        value = getattr(scores, name)
        table.add_row(label, "-" if value is None else f"{value:.4f}")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(table)
    if interfaces is not None:
        console.print(_table(interfaces))
        if not interfaces.certain:
            console.print("equal chains have more assignments than were looked at; another one may have a better DockQ")
    if config.out is not None:
        written = {"predicted": str(config.predicted), "reference": str(config.reference), "chain": reference.name}
        written |= dataclasses.asdict(scores)
        written |= {} if interfaces is None else {"complex": dataclasses.asdict(interfaces)}
        replace_file(config.out, json.dumps(written, indent=1).encode() + b"\n")
    return 0


_LABELS = {
    "lddt": "lDDT, all atoms",
    "lddt_ca": "lDDT, CA",
    "tm_score": "TM-score",
    "rmsd": "RMSD of CA (Angstrom)",
    "gdt_ts": "GDT-TS",
    "gdt_ha": "GDT-HA",
    "plddt_correlation": "correlation of pLDDT with lDDT",
}


def _named(chains: Sequence[Chain], config: EvaluateConfig) -> list[Chain]:
    """The reference's chains that --chain names, in its order; all where it names none."""
    by_name = {chain.name: chain for chain in chains}
    for name in config.chain:
        if name not in by_name:
            raise UserError(f"{config.reference} has no protein chain {name}; it has {', '.join(by_name)}")
        if config.chain.count(name) > 1:
            raise UserError(f"--chain names {name} twice; name each chain once")
    return [by_name[name] for name in config.chain] or list(chains)


def _best_match(predicted: Chain, chains: Sequence[Chain]) -> Chain:
    def identities(chain: Chain) -> int:
        return sum(predicted.sequence[i] == chain.sequence[j] for i, j in align(predicted.sequence, chain.sequence))

    return max(chains, key=identities)


def _interfaces(predicted: int, reference: int, config: EvaluateConfig) -> DockQ | None:
    """DockQ of two complexes, of so many chains; None where one is a chain alone."""
    assert config.predicted is not None
    assert config.reference is not None
    if predicted == 1 and len(config.chain) > 1:
        raise UserError(f"--chain names {len(config.chain)} chains, and {config.predicted} has one; name one")
    if predicted == 1 or reference == 1:
        return None
    files = config.predicted, config.reference
    atoms, truth = (read_structure(path, hetero=False) for path in files)
    return dockq(atoms, _named(truth, config), files)


def _table(found: DockQ) -> Table:
    table = Table("interface", "predicted by", "DockQ", "Fnat", "iRMSD", "LRMSD", "contacts", "clashes")
    for one in found.interfaces:
        numbers = (f"{value:.4f}" for value in (one.dockq, one.fnat, one.irmsd, one.lrmsd))
        table.add_row(" ".join(one.reference), " ".join(one.predicted), *numbers, str(one.contacts), str(one.clashes))
    table.add_row("all", " ".join(found.chains.values()), f"{found.dockq:.4f}")
    return table
