"""`fold recipes`: the models that have a name."""

import sys
from math import prod

from rich.console import Console
from rich.table import Table

from apps.fold.model.config import MULTIMER_PRESETS, PRESETS, released
from apps.fold.weights.table import name_table
from core.config import UserError


def main(argv: list[str]) -> int:
    if argv:
        raise UserError(f"megalith fold recipes takes no options, and was given {' '.join(argv)}")
    table = Table("model", "parameters", "blocks", "templates", "MSA rows", "extra rows", "PAE, pTM")
    for name in (*PRESETS, *MULTIMER_PRESETS):
        config = released(name)
        count = sum(prod(entry.shape) for entry in name_table(config))
        has = "yes" if config.templates else "no"
        pae = "yes" if config.heads.pae_bins else "no"
        blocks = f"{config.extra.num_blocks} + {config.evoformer.num_blocks}"
        table.add_row(name, f"{count:,}", blocks, has, str(config.max_msa), str(config.max_extra_msa), pae)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0
