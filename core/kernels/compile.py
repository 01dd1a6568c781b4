"""`make kernels`: compile every kernel in every shipped configuration for four chips, on a machine without a GPU.

    python -m core.kernels.compile [--quick] [--turns] [--json FILE] [KERNEL …]
    python -m core.kernels.compile --table FILE

--quick compiles the first of a SPEC's `timed` cases only, in one dtype; --turns each family for one chip, the next
family for the next chip. --json keeps what was found in FILE, family by family, beside what it
holds of others; --table shows FILE as a table in Markdown and compiles nothing.

1. Each SPEC's `timed` cases, in each dtype, run forward and backward on meta tensors: shapes are real, memory is not.
2. A driver that only names a chip stands in for CUDA's and HIP's, and Triton's launches compile and stop there: what is
   compiled is what would be launched, with the same specialisation (on divisibility by 16, on ones).
3. Registers and spills are what the binary and ptxas say (NVIDIA) and what stands in the notes of the assembly (AMD).
4. Of a loop the instructions are counted (NVIDIA), those of the longest: so many each warp issues for a turn of it.

Exit code 1 when a kernel spills registers. Meta tensors count as aligned; unaligned pointers compile at first use.
"""

import argparse
import io
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

from core.kernels import specs
from core.kernels.blocks import compiling_for
from core.kernels.operator import forced
from core.kernels.spec import Case, KernelSpec, forward_and_backward

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Binary:
    """One compiled kernel: registers a thread, bytes of shared memory a block, bytes spilled to memory a thread.

    loop  instructions of the longest loop; 0 without one, and on AMD
    """

    spec: str
    chip: str
    kernel: str
    case: str
    registers: int
    shared_bytes: int
    spilled_bytes: int
    loop: int = 0


class _NamesAChip:
    """The answers that Triton asks of a driver until it launches."""

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
    driver.set_active(_NamesAChip(TARGETS[chip]))  # pyright: ignore[reportArgumentType]  as much as is asked for
    _forget_binaries()  # those of another chip are cached by device number
    try:
        with patch.object(JITFunction, "run", compile_only), compiling_for(chip), forced(compiling=True):
            yield
    finally:
        driver._active = before


def _forget_binaries() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("core.kernels."):
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
            forward_and_backward(spec, _on_meta(spec, case, dtype))
        for kernel in compiled:
            if kernel is not None and kernel.hash not in seen:
                seen.add(kernel.hash)
                described = f"{' '.join(f'{k}={v}' for k, v in case.items())} {str(dtype).removeprefix('torch.')}"
                found = resources(kernel, TARGETS[chip])
                yield Binary(spec.name, chip, kernel.metadata.name, described, *found, longest_loop(kernel))


def _on_meta(spec: KernelSpec, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    inputs = spec.inputs(case, dtype, "meta", torch.Generator())
    return {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in inputs.items()}


def resources(kernel: Any, target: GPUTarget) -> tuple[int, int, int]:
    """(registers a thread, bytes of shared memory, bytes a thread keeps in memory because registers did not suffice)"""
    if target.backend == "hip":
        notes = kernel.asm["amdgcn"]
        # Scalar registers spill into lanes of vector registers; what reaches memory is the private segment.
        return _note(notes, "vgpr_count"), kernel.metadata.shared, _note(notes, "private_segment_fixed_size")
    used = _used(kernel.asm["cubin"])
    registers, stack = re.search(r"REG:(\d+)", used), re.search(r"STACK:(\d+)", used)
    assert registers is not None, used
    assert stack is not None, used
    # A stack frame may be that of a division in 64 bits; without one nothing is spilled.
    return int(registers[1]), kernel.metadata.shared, _spilled(kernel, target) if int(stack[1]) else 0


def _used(cubin: bytes) -> str:
    """The registers and memory that the binary says it needs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def longest_loop(kernel: Any) -> int:
    """Instructions from the label of a loop to the jump back to it, the most of any loop."""
    if "cubin" not in kernel.asm:
        return 0
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    labels, longest, at = dict[str, int](), 0, 0
    for line in text.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = at
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/", line):
            at += 1
            jump = re.search(r"\bBRA\b.*`\((\.L\w+)\)", line)
            if jump and at - labels.get(jump[1], at) > 1:  # what follows the end jumps to itself
                longest = max(longest, at - labels[jump[1]])
    return longest


def _spilled(kernel: Any, target: GPUTarget) -> int:
    """The spills that ptxas tells when Triton assembles the kernel once more, with the options that it took before."""
    with knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as said:
        knobs.nvidia.dump_ptxas_log = True
        backend: Any = make_backend(target)  # NVIDIA's
        backend.make_cubin(kernel.asm["ptx"], {}, kernel.metadata, target.arch)
    found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said.getvalue())
    assert found is not None, said.getvalue()
    return max(int(found[1]), int(found[2]))


def _note(text: str, name: str) -> int:
    found = re.search(rf"\.{name}:\s+(\d+)", text)
    assert found is not None, f"no {name} in the assembly"
    return int(found[1])


def _keep(path: Path, family: str, found: list[Binary]) -> None:
    """Put a family's binaries in place of what the file has of it; complete or not at all."""
    others = [b for b in _kept(path) if b.spec != family] if path.exists() else []
    aside = path.with_suffix(".part")
    aside.write_text("".join(json.dumps(asdict(b)) + "\n" for b in [*others, *found]))
    aside.replace(path)


def _kept(path: Path) -> list[Binary]:
    return [Binary(**json.loads(line)) for line in path.read_text().splitlines()]


def table(binaries: list[Binary]) -> Iterator[str]:
    """Lines of Markdown: for each kernel and chip the most registers, shared memory and spills of its binaries."""
    chips = [chip for chip in TARGETS if any(b.chip == chip for b in binaries)]
    yield f"| family | kernel | binaries | {' | '.join(chips)} |"
    yield f"|---|---|---{'|---' * len(chips)}|"
    for spec, kernel in dict.fromkeys((b.spec, b.kernel) for b in binaries):
        mine = [b for b in binaries if (b.spec, b.kernel) == (spec, kernel)]
        cells = [_most([b for b in mine if b.chip == chip]) for chip in chips]
        yield f"| {spec} | `{kernel}` | {len(mine)} | {' | '.join(cells)} |"


def _most(binaries: list[Binary]) -> str:
    """Registers, KiB of shared memory, and bytes spilled, if any."""
    if not binaries:
        return ""
    registers, shared_bytes = (max(getattr(b, name) for b in binaries) for name in ("registers", "shared_bytes"))
    spilled = max(b.spilled_bytes for b in binaries)
    return f"{registers}, {shared_bytes / 1024:.3g}" + (f", **spills {spilled}**" if spilled else "")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m core.kernels.compile", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first case of a family, in one dtype")
    parser.add_argument("--turns", action="store_true", help="each family for one chip, whose turn it is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep what was found here, a line a binary")
    parser.add_argument("--table", type=Path, metavar="FILE", help="show what --json kept as a table; compile nothing")
    parser.add_argument("names", nargs="*", metavar="KERNEL")
    given = parser.parse_args(argv)
    if given.table is not None:
        if not given.table.exists():
            print(f"error: no file {given.table}; --json FILE writes one", file=sys.stderr)
            return 2
        print("\n".join(table(_kept(given.table))))
        return 0
    known = specs()
    unknown = [name for name in given.names if name not in known]
    if unknown:
        print(f"error: no kernel '{unknown[0]}'; the kernels are {', '.join(known)}", file=sys.stderr)
        return 2
    spilled = 0
    print(f"{'family':24}{'kernel':40}{'chip':8}{'registers':>10}{'shared':>9}{'spilled':>9}{'loop':>7}  case")
    for number, name in enumerate(given.names or known):
        found: list[Binary] = []
        for chip in [list(TARGETS)[number % len(TARGETS)]] if given.turns else TARGETS:
            for b in compile_spec(known[name], chip, given.quick):
                numbers = f"{b.registers:10}{b.shared_bytes:9}{b.spilled_bytes:9}{b.loop:7}"
                print(f"{b.spec:24}{b.kernel:40}{b.chip:8}{numbers}  {b.case}", flush=True)
                found.append(b)
        spilled += sum(b.spilled_bytes > 0 for b in found)
        if given.json is not None:
            _keep(given.json, name, found)
    print(f"{spilled} kernels spill registers" if spilled else "no kernel spills registers")
    return int(spilled > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
