"""`fold evaluate`: a prediction against an experimental structure: lDDT, TM-score, RMSD, GDT."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from apps.fold.features.structures import Chain, read_structure
from apps.fold.features.templates import align
from apps.fold.score import compare
from core.config import UserError, parse
from core.files import replace_file


@dataclass(frozen=True)
class EvaluateConfig:
    predicted: Path | None = None
    """an mmCIF or PDB file; its first protein chain is taken"""
    reference: Path | None = None
    """an experimental structure; the chain that matches best is taken, unless --chain names one"""
    chain: str | None = None
    out: Path | None = None
    """a json file for the scores"""


def main(argv: list[str]) -> int:
    config = parse({"default": EvaluateConfig}, argv, "megalith fold evaluate", default="default")
    if config.predicted is None or config.reference is None:
        raise UserError("megalith fold evaluate needs both --predicted FILE and --reference FILE")
    predicted = read_structure(config.predicted)[0]
    reference = _reference(predicted, read_structure(config.reference), config)
    scores = compare(predicted, reference)
    table = Table("score", "value")
    table.add_row("reference", f"{config.reference.name}, chain {reference.name}")
    table.add_row(
        "aligned residues", f"{scores.aligned} of {scores.reference}, {100 * scores.identity:.0f} % identical"
    )
    for name, label in _LABELS.items():
        value = getattr(scores, name)
        table.add_row(label, "-" if value is None else f"{value:.4f}")
    Console(highlight=False).print(table)
    if config.out is not None:
        written = {"predicted": str(config.predicted), "reference": str(config.reference), "chain": reference.name}
        replace_file(config.out, json.dumps(written | dataclasses.asdict(scores), indent=1).encode() + b"\n")
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


def _reference(predicted: Chain, chains: list[Chain], config: EvaluateConfig) -> Chain:
    if config.chain is not None:
        named = [chain for chain in chains if chain.name == config.chain]
        if not named:
            names = ", ".join(chain.name for chain in chains)
            raise UserError(f"{config.reference} has no protein chain {config.chain}; it has {names}")
        return named[0]

    def identities(chain: Chain) -> int:
        return sum(predicted.sequence[i] == chain.sequence[j] for i, j in align(predicted.sequence, chain.sequence))

    return max(chains, key=identities)
