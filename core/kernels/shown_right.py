"""The kernels that a GPU has shown right and not slower than torch's operators: taken there without being asked.

The protocol of docs/gpu.md measures each family on a card, and `python -m benchmarks.gpu shown` makes a table of its
results, shown/CHIP.json, which is committed:

    {"device": "NVIDIA H200", "results": ["gpu_a-h200.json", …],
     "families": {"layer_norm": {"right": true, "speedup": 1.31}, …}}

    right     results and gradients are within the SPEC's tolerance of the fp64 reference, in all formats
    speedup   torch's best time over ours, the least of the timed cases and passes

A chip without a table takes no such kernel unless it is asked to.
"""

import json
from pathlib import Path

import torch

from core.kernels.blocks import chip

FOLDER = Path(__file__).parent / "shown"


def shown(folder: Path = FOLDER) -> frozenset[str]:
    """Families that this machine's GPU takes by itself; none without a GPU or a table of its chip.

    Raises ValueError for a table that is not one.
    """
    path = folder / f"{chip()}.json"
    if not torch.cuda.is_available() or not path.exists():
        return frozenset()
    try:
        families = json.loads(path.read_text())["families"]
        return frozenset(name for name, one in families.items() if one["right"] and one["speedup"] >= 1.0)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no table of what kernels have shown ({error}); make it again") from error
