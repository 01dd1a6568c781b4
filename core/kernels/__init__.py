"""Triton kernels, one family a file: mathematics, reference, kernels, operators, public function, SPEC.

    operator.py   how a kernel becomes an operator of torch, and when it runs
    blocks.py     block sizes by chip; the autotuner
    spec.py       what a kernel promises, as data
    compile.py    `make kernels`: every kernel for four chips, without a GPU

On a GPU a public function runs its kernel, elsewhere its reference; tests, ahead-of-time compilation and the benchmark
are generated from the SPECs. For CPUs llvm.py makes loops, of which vnni.py, paged_loops.py and attention_loops.py hold
some. This package imports torch, triton and, when a loop is made, llvmlite, and nothing of ours.
"""

import importlib
import pkgutil

from core.kernels.spec import KernelSpec


def specs() -> dict[str, KernelSpec]:
    """Every kernel's SPEC, by name."""
    found: dict[str, KernelSpec] = {}
    for module in pkgutil.iter_modules(__path__):
        for spec in getattr(importlib.import_module(f"{__name__}.{module.name}"), "SPECS", ()):
            found[spec.name] = spec
    return found
