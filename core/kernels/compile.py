"""`make kernels`: compile every kernel in every shipped configuration for four chips, on a machine without a GPU.

    python -m core.kernels.compile [--quick] [KERNEL …]

--quick compiles the first of a SPEC's `timed` cases only, in one dtype.

1. Each SPEC's `timed` cases, in each dtype, run forward and backward on meta tensors: shapes are real, memory is not.
2. A driver that only names a chip stands in for CUDA's and HIP's, and Triton's launches compile and stop there: what is
   compiled is what would be launched, with the same specialisation (on divisibility by 16, on ones).
3. Registers and spills are what ptxas says (NVIDIA) and what stands in the notes of the assembly (AMD).

Exit code 1 when a kernel spills registers. Meta tensors count as aligned; unaligned pointers compile at first use.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from core.kernels import specs
from core.kernels.blocks import compiling_for
from core.kernels.operator import forced
from core.kernels.spec import Case, KernelSpec, outputs_of

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Binary:
    """One compiled kernel: registers a thread, bytes of shared memory a block, bytes spilled to memory a thread."""

    spec: str
    chip: str
    kernel: str
    case: str
    registers: int
    shared_bytes: int
    spilled_bytes: int


class _NamesAChip:
    """What Triton asks of a driver until it launches."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def _compiling(chip: str, compiled: list[Any]) -> Iterator[None]:
    """Inside, launches of kernels compile for the chip; what came out is appended to `compiled`."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    driver = triton.runtime.driver
    before = driver._active  # its own reset would look for a GPU
    driver.set_active(_NamesAChip(TARGETS[chip]))
    for spec in specs().values():  # binaries of another chip are cached by device number
        _forget_binaries(spec)
    try:
        with patch.object(JITFunction, "run", compile_only), compiling_for(chip), forced(compiling=True):
            yield
    finally:
        driver._active = before


def _forget_binaries(spec: KernelSpec) -> None:
    module = sys.modules[spec.function.__module__]
    for value in vars(module).values():
        if isinstance(value, JITFunction):
            value.device_caches.clear()


def compile_spec(spec: KernelSpec, chip: str, quick: bool = False) -> Iterator[Binary]:
    """Compile a family for a chip: each binary once."""
    seen: set[str] = set()
    cases, dtypes = (spec.timed[:1], spec.dtypes[:2][-1:]) if quick else (spec.timed, spec.dtypes)
    for case, dtype in itertools.product(cases, dtypes):
        compiled: list[Any] = []
        with _compiling(chip, compiled):
            _forward_and_backward(spec, case, dtype)
        for kernel in compiled:
            if kernel is not None and kernel.hash not in seen:
                seen.add(kernel.hash)
                described = f"{' '.join(f'{k}={v}' for k, v in case.items())} {str(dtype).removeprefix('torch.')}"
                found = resources(kernel, TARGETS[chip].backend)
                yield Binary(spec.name, chip, kernel.metadata.name, described, *found)


def _forward_and_backward(spec: KernelSpec, case: Case, dtype: torch.dtype) -> None:
    inputs = spec.inputs(case, dtype, "meta", torch.Generator())
    inputs = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in inputs.items()}
    leaves = [n for n in spec.grads if isinstance(inputs.get(n), Tensor)]
    for name in leaves:
        inputs[name] = inputs[name].detach().requires_grad_()
    outputs = [o for o in outputs_of(spec.function(**inputs)) if o.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.empty_like(o) for o in outputs])


def resources(kernel: Any, backend: str) -> tuple[int, int, int]:
    """(registers a thread, bytes of shared memory, bytes a thread keeps in memory because registers did not suffice)"""
    if backend == "hip":
        notes = kernel.asm["amdgcn"]
        # Scalar registers spill into lanes of vector registers; what reaches memory is the private segment.
        return _note(notes, "vgpr_count"), kernel.metadata.shared, _note(notes, "private_segment_fixed_size")
    said = _assembled_again(kernel.asm["ptx"])
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers is not None, said
    assert spilled is not None, said
    return int(registers[1]), kernel.metadata.shared, max(int(spilled[1]), int(spilled[2]))


def _assembled_again(ptx: str) -> str:
    """What ptxas says of a kernel, which Triton throws away."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"\.target (sm_(\d+)\w*)", ptx)
    assert target is not None
    tool = get_ptxas(int(target[2]))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [tool.path, "-v", f"--gpu-name={target[1]}", str(source), "-o", str(source.with_suffix(".o"))]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _note(text: str, name: str) -> int:
    found = re.search(rf"\.{name}:\s+(\d+)", text)
    assert found is not None, f"no {name} in the assembly"
    return int(found[1])


def main(argv: list[str]) -> int:
    known = specs()
    names, quick = [a for a in argv if a != "--quick"], "--quick" in argv
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"error: no kernel '{unknown[0]}'; the kernels are {', '.join(known)}", file=sys.stderr)
        return 2
    spilled = 0
    print(f"{'family':24}{'kernel':40}{'chip':8}{'registers':>10}{'shared':>9}{'spilled':>9}  case")
    for name in names or known:
        for chip in TARGETS:
            for b in compile_spec(known[name], chip, quick):
                numbers = f"{b.registers:10}{b.shared_bytes:9}{b.spilled_bytes:9}"
                print(f"{b.spec:24}{b.kernel:40}{b.chip:8}{numbers}  {b.case}", flush=True)
                spilled += b.spilled_bytes > 0
    print(f"{spilled} kernels spill registers" if spilled else "no kernel spills registers")
    return int(spilled > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
