"""The Evoformer block: time of forward and of forward with backward, and memory, beside the algorithms as written.

The published micro-benchmark: batch 1, c_m 256, c_z 128, an MSA of 128 rows x 256 residues, 12 blocks, fp32 and bf16. A
CPU takes minutes for 12 blocks, so there one is timed, unless --full is given, at that size and at 32 x 128; the time
of a block is what is reported. `--part 128x256-bf16` measures one size and format, and keeps it for the run that does
the rest.

ours       EvoformerBlock with what the device has: kernels on a GPU, torch's fused attention on a CPU. Without
           gradients on a CPU in the slices that a plan takes for the fastest (apps/fold/subbatch), as `fold predict`
           works, written over copies of m and z; "ours, whole" is the same without slices
reference  the same block by torch's plain operators: attention with all its logits in memory
OpenFold   its EvoformerBlock, by --peers-python, an interpreter that finds it (benchmarks/evoformer_peer.py):
               PYTHONPATH=CHECKOUT python -m benchmarks.evoformer --peers-python PYTHON

All have the same weights. A contender whose outputs differ from ours is not timed. Beside them stands what others
printed of that block on an A100 (`PRINTED`).

Memory on a CPU: the most bytes of tensors alive at once in a forward without gradients, weights and inputs among them,
counted operator by operator. "ours, bounded" works in the slices of a plan that has 40 % of OpenFold's peak.

"planned" are the 12 blocks in fp32 and bf16 as `fold train --plan` counts a step (core.estimate), on tensors without
memory: FLOPs, what a block keeps for its backward, the fullest moment, and the milliseconds that an A100 takes at
least by its data sheet, operator by operator, by FLOPs or by bytes of memory; the optimizer's update is among them.

"operations" is the same forward operation by operation, by the clock around each of the block's modules: whole, in the
plan's slices, with the triangle products in other orders, and in slices of 16 rows, whose launches cost what they save.

Memory of long sequences: the peak of a forward without gradients beside weights and inputs, in units of z (2 c_z
residues^2 bytes in bf16), from tensors without contents on the meta device; of ours whole and in the slices of a plan.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from apps.fold.model.attention import GatedAttention
from apps.fold.model.config import ModelConfig, preset
from apps.fold.model.evoformer import EvoformerBlock
from apps.fold.model.layers import LayerNorm
from apps.fold.model.triangle import TriangleMultiplication
from apps.fold.subbatch import FoldJob, How, apply_subbatches, least_bytes, plan_subbatches
from apps.fold.weights.table import name_table
from benchmarks.result import ROOT, Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.auto.machines import gpu_named
from core.compose import ParallelConfig
from core.config import UserError, run_command
from core.estimate import estimate_step
from core.kernels.gated_output import output_reference
from core.kernels.triangle import reference as triangle_reference
from core.mesh import MeshConfig
from core.metrics.throughput import gpu_peak_flops
from core.runtime import keep_freed_memory
from core.trace.account import MemoryAccount
from core.trace.machine import Speed

NUM_BLOCKS = 12
ROWS, RESIDUES = 128, 256
SMALL = (32, 128)
LENGTHS = (256, 512, 1024, 2048, 4096)
OURS, WHOLE, BOUNDED, OPENFOLD = "ours", "ours, whole", "ours, bounded", "OpenFold"
PEAK = "peak"
UNBOUNDED = 10**15
SHARE = 0.4
"""of OpenFold's peak, which ours is to stay within"""
# Largest difference of an output, relative to its largest element: fp32 sums in another order, and bf16's 8 bits.
AGREE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}

# Milliseconds of a block of 128 x 256 on an A100, forward and backward (dptech-corp/Uni-Fold, pull request 10).
PRINTED = {
    "OpenFold": (17.198, 23.703),
    "OpenFold, low memory": (20.906, 39.007),
    "FastFold": (9.415, 20.247),
    "Uni-Fold": (8.440, 18.472),
}

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def config_of() -> ModelConfig:
    """Released widths."""
    return preset("model_5_ptm")


def blocks_of(count: int, device: torch.device, dtype: torch.dtype) -> nn.ModuleList:
    """Blocks with random values in every parameter: what begins as 0 would make all outputs alike."""
    model = config_of()
    blocks = nn.ModuleList(EvoformerBlock(model.msa_dim, model.pair_dim, model.evoformer) for _ in range(count))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in blocks.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.5 * noise / parameter.shape[1] ** 0.5 if parameter.ndim == 2 else 1 + 0.1 * noise)
    return blocks.to(device, dtype).eval()


def inputs_of(rows: int, residues: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    """m, z and their masks, of a batch of one."""
    model, generator = config_of(), torch.Generator(device).manual_seed(1) if device.type != "meta" else None

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    m, z = drawn(1, rows, residues, model.msa_dim), drawn(1, residues, residues, model.pair_dim)
    return m, z, m.new_ones(1, rows, residues), z.new_ones(1, residues, residues)


def as_written(blocks: nn.ModuleList) -> nn.ModuleList:
    """The blocks with the references of the kernels in place of the kernels."""
    for module in blocks.modules():
        if isinstance(module, GatedAttention):
            module.forward = partial(_attention, module)
        elif isinstance(module, TriangleMultiplication):
            module.forward = partial(_triangle, module)
        elif isinstance(module, LayerNorm):
            module.forward = nn.LayerNorm.forward.__get__(module)
    return blocks


def _attention(
    module: GatedAttention,
    x: Tensor,
    mask: Tensor,
    *,
    residual: Tensor,
    bias: Tensor | None = None,
    dropout: Tensor | None = None,
) -> Tensor:
    q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, module.head_dim)).transpose(1, 3).unbind(2)
    scores_XHLS = q @ k.mT * module.head_dim**-0.5
    if bias is not None:
        scores_XHLS = scores_XHLS + bias.repeat_interleave(len(x) // len(bias), 0)
    scores_XHLS = scores_XHLS + 1e9 * (mask[:, None, None] - 1)
    o = (torch.softmax(scores_XHLS, -1) @ v).transpose(1, 2).flatten(2)
    return output_reference(o, module.gate(x), module.out_weight, module.out_bias, residual=residual, mask=dropout)


def _triangle(module: TriangleMultiplication, z: Tensor, mask: Tensor) -> Tensor:
    return triangle_reference(z, mask, outgoing=module.outgoing, residual=z, **dict(module.named_parameters()))


# --- time -------------------------------------------------------------------------------------------------------------


def run_blocks(blocks: nn.ModuleList, inputs: Inputs) -> tuple[Tensor, Tensor]:
    m, z, *masks = inputs
    for block in blocks:
        m, z = block(m, z, *masks)
    return m, z


def forward(blocks: nn.ModuleList, inputs: Inputs) -> None:
    with torch.inference_mode():
        run_blocks(blocks, inputs)


def forward_backward(blocks: nn.ModuleList, inputs: Inputs) -> None:
    m, z = run_blocks(blocks, (inputs[0].requires_grad_(), inputs[1].requires_grad_(), *inputs[2:]))
    (m.float().mean() + z.float().mean()).backward()
    blocks.zero_grad()
    for x in inputs[:2]:
        x.grad = None
        x.requires_grad_(False)


WORK: dict[str, Callable[[nn.ModuleList, Inputs], None]] = {
    "forward": forward,
    "forward and backward": forward_backward,
}


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The least of `repeats`, after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        found.append(time.perf_counter() - began)
    return min(found[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(options: Options) -> Measured | None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        keep_freed_memory()  # as `fold predict` does, and here OpenFold's process, too
    count = 1 if options.quick or (device.type == "cpu" and not options.full) else NUM_BLOCKS
    sizes = [(4, 16)] if options.quick else [(ROWS, RESIDUES), SMALL]  # the larger first: an allocator's memory grows
    dtypes = [torch.float32] if options.quick else [torch.float32, torch.bfloat16]
    parts = {_part(size[0], size[1], _format(dtype)): (size, dtype) for size in sizes for dtype in dtypes}
    if options.part not in ("", *parts):
        raise UserError(f"--part {options.part}: evoformer has the parts {', '.join(parts)}")
    rows: list[Row] = []
    times: dict[tuple[str, str, tuple[int, int], torch.dtype], float] = {}
    for name, (size, dtype) in parts.items():
        if options.part not in ("", name):
            continue
        slow = device.type == "cpu" and not options.full and (size != SMALL or dtype != torch.float32)
        repeats = 1 if options.quick else 2 if slow else 5
        found = [row for row in options.earlier if _part_of(row) == name]
        if not found:
            taken = _times(count, size, dtype, device, repeats, options.peers_python)
            found = [_row(contender, work, size, dtype, value) for (contender, work), value in taken.items()]
            for row in found:
                options.kept(row)
        rows += found
        times |= {(str(row.case["contender"]), str(row.case["work"]), size, dtype): _taken(row) for row in found}
    if options.part:
        return None
    if device.type == "cpu":
        rows += _operations((4, 16) if options.quick else SMALL, 1 if options.quick else 5)
    planned = ((4, 16), 2) if options.quick else ((ROWS, RESIDUES), NUM_BLOCKS)
    rows += [row for dtype in (torch.float32, torch.bfloat16) for row in _planned(*planned, dtype)]
    rows += _printed()
    rows += [_memory(residues) for residues in ((64,) if options.quick else LENGTHS)]
    targets = () if options.quick else _targets(times, device)
    notes = [f"{count} block(s) in a row; seconds of one, the least of 5 (of 2 where a CPU is slow) after a first one."]
    if options.peers_python is None:
        notes.append("OpenFold is left out: --peers-python names an interpreter that finds it.")
    return Measured(tuple(rows), targets, tuple(notes))


def _printed() -> list[Row]:
    rows = []
    for contender, (forward_ms, backward_ms) in PRINTED.items():
        case: dict[str, str | int] = {"contender": f"{contender}, printed", "rows": ROWS, "residues": RESIDUES}
        for work, block_ms in zip(WORK, (forward_ms, forward_ms + backward_ms)):
            rows.append(Row(case | {"work": work, "format": "not stated"}, {"block": Number(block_ms, "ms")}))
    return rows


def _part(rows: str | int, residues: str | int, form: str | int) -> str:
    return f"{rows}x{residues}-{form}"


def _part_of(row: Row) -> str:
    """The part that a figure was kept of."""
    return _part(row.case["rows"], row.case["residues"], row.case["format"])


def _taken(row: Row) -> float:
    """Seconds, or bytes, of a figure of `_row`."""
    return row.numbers[PEAK].value * 1e6 if PEAK in row.numbers else row.numbers["block"].value / 1e3


def _row(contender: str, work: str, size: tuple[int, int], dtype: torch.dtype, taken: float) -> Row:
    case: dict[str, str | int] = {"contender": contender, "rows": size[0], "residues": size[1]}
    number = {PEAK: Number(taken / 1e6, "MB")} if work == PEAK else {"block": Number(1e3 * taken, "ms")}
    return Row(case | {"work": work, "format": _format(dtype)}, number)


def _format(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def _times(
    count: int, size: tuple[int, int], dtype: torch.dtype, device: torch.device, repeats: int, python: Path | None
) -> dict[tuple[str, str], float]:
    """(contender, work) -> seconds of a block; on a CPU for the work "peak" bytes."""
    inputs, found = inputs_of(*size, device, dtype), {}
    expected = None
    for name, change in ((OURS, lambda blocks: blocks), ("reference", as_written)):
        blocks = change(blocks_of(count, device, dtype))
        with torch.inference_mode():
            got = run_blocks(blocks, inputs)
        expected = got if expected is None else expected
        require_equal(name, got, expected, dtype)
        if device.type == "cpu":
            found[name, PEAK] = peak_bytes(blocks, inputs)
        for work, run in WORK.items():
            found[name, work] = seconds(partial(run, blocks, inputs), device, repeats) / count
        del blocks
    assert expected is not None
    if device.type == "cpu":
        found |= {(WHOLE, work): found[OURS, work] for work in ("forward", PEAK)}
        blocks = blocks_of(count, device, dtype)
        slice_blocks(blocks, plan_subbatches(_job(inputs), UNBOUNDED).choices)
        found |= _in_slices(OURS, blocks, inputs, expected, repeats)
    if python is not None:
        for work, taken in openfold(python, count, inputs, expected, repeats).items():
            found[OPENFOLD, work] = taken if work == PEAK else taken / count
    if (OPENFOLD, PEAK) in found and dtype == torch.float32 and size != (ROWS, RESIDUES):
        blocks = bounded(blocks_of(count, device, dtype), inputs, int(SHARE * found[OPENFOLD, PEAK]))
        found |= _in_slices(BOUNDED, blocks, inputs, expected, repeats)
    return found


# --- planned ----------------------------------------------------------------------------------------------------------


class _Stack(nn.Module):
    """Blocks one after another."""

    def __init__(self, blocks: nn.ModuleList):
        super().__init__()
        self.blocks = blocks

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return run_blocks(self.blocks, inputs)


def _planned(size: tuple[int, int], count: int, dtype: torch.dtype) -> list[Row]:
    """A step of so many blocks, ours and the reference's, by the plan of a training run."""
    peak, gpu = gpu_peak_flops("A100", dtype), gpu_named("a100-40gb")
    assert peak is not None
    config = ParallelConfig(precision=_format(dtype))  # pyright: ignore[reportArgumentType]

    def loss(model: nn.Module) -> Tensor:
        m, z, *masks = (torch.empty(shape, dtype=dtype) for shape in shapes)
        m, z = model((m.requires_grad_(), z.requires_grad_(), *masks))
        return m.float().mean() + z.float().mean()

    rows = []
    for contender, change in ((OURS, lambda blocks: blocks), ("reference", as_written)):
        meta = torch.device("meta")
        shapes = [x.shape for x in inputs_of(*size, meta, dtype)]
        stack = _Stack(change(blocks_of(count, meta, torch.float32)))
        step = estimate_step(stack, loss, MeshConfig().resolve(1), config, Speed(peak, 1e9 * gpu.memory_gb_s))
        case: dict[str, str | int] = {"contender": f"{contender}, {count} blocks planned, A100", "rows": size[0]}
        case |= {"residues": size[1], "work": "forward and backward", "format": _format(dtype)}
        numbers = {
            "block": Number(1e3 * step.compute_s / count, "ms"),
            "FLOPs of a block": Number(step.flops / count / 1e9, "GFLOP"),
            "kept by a block": Number(step.activations_bytes / count / 1e6, "MB"),
            "fullest moment": Number(step.peak_bytes / 1e9, "GB"),
        }
        rows.append(Row(case, numbers))
    return rows


# --- operations -------------------------------------------------------------------------------------------------------


def _operations(size: tuple[int, int], repeats: int) -> list[Row]:
    """Milliseconds of a block's operations in fp32 on a CPU, each the least of the repeats, in some ways to work."""
    cpu, fp32 = torch.device("cpu"), torch.float32
    inputs, products = inputs_of(*size, cpu, fp32), ("outgoing", "incoming")
    plan = {n: how for n, how in plan_subbatches(_job(inputs), UNBOUNDED).choices.items() if n.startswith("blocks.")}
    half, few = -(-size[1] // 2), min(16, size[1])
    ways: dict[str, Mapping[str, How]] = {
        "whole": {},
        "the plan's slices": plan,
        "the plan's, products with a copy": {
            n: How("copy", half) if n.endswith(products) else h for n, h in plan.items()
        },
        "slices of 16": {n: How("copy" if n.endswith(products) else "rows", few) for n in plan},
    }
    rows = []
    for way, choices in ways.items():
        blocks = blocks_of(1, cpu, fp32)
        slice_blocks(blocks, choices)
        numbers = {name: Number(1e3 * taken, "ms") for name, taken in _by_operation(blocks, inputs, repeats).items()}
        case: dict[str, str | int] = {"contender": way, "rows": size[0], "residues": size[1], "work": "operations"}
        rows.append(Row(case | {"format": "fp32"}, numbers))
    return rows


def _by_operation(blocks: nn.ModuleList, inputs: Inputs, repeats: int) -> dict[str, float]:
    """operation, and "block" -> seconds of a forward, the least of the repeats after one that is not counted."""
    block = blocks[0]
    assert isinstance(block, EvoformerBlock)
    watched = {"block": block, **{n: m for n, m in block.named_children() if n != "pair"}}
    watched |= {f"pair {name}": module for name, module in block.pair.named_children()}
    began, taken = {}, {name: [] for name in watched}
    for name, module in watched.items():
        module.register_forward_pre_hook(lambda *_, name=name: began.__setitem__(name, time.perf_counter()))
        module.register_forward_hook(lambda *_, name=name: taken[name].append(time.perf_counter() - began[name]))
    m, z, *masks = inputs
    with torch.inference_mode():
        for _ in range(repeats + 1):
            run_blocks(blocks, (m.clone(), z.clone(), *masks))
    return {name: min(some[1:]) for name, some in taken.items()}


# --- memory on a CPU --------------------------------------------------------------------------------------------------


def _job(inputs: Inputs) -> FoldJob:
    m = inputs[0]
    return FoldJob(config_of(), m.shape[2], m.shape[1], 1, dtype=m.dtype)


def peak_bytes(blocks: nn.ModuleList, inputs: Inputs) -> int:
    """The most bytes of tensors alive at once in a forward without gradients on a CPU, weights and inputs among them.

    Slices that work in place overwrite m and z, which are therefore copies that the count has for the inputs.
    """
    m, z, *masks = inputs
    given = (m.clone(), z.clone(), *masks)
    with torch.no_grad(), MemoryAccount() as account:
        account.add([*blocks.parameters(), *given])
        run_blocks(blocks, given)
    return account.peak_bytes


def bounded(blocks: nn.ModuleList, inputs: Inputs, budget: int) -> nn.ModuleList:
    """The blocks in the slices of the largest plan with which they stay within the budget, or of the smallest plan.

    A plan's budget is one for the whole model; what the blocks' peak is is counted.
    """
    job = _job(inputs)
    low, high = least_bytes(job), plan_subbatches(job, UNBOUNDED).peak_bytes
    for _ in range(12):
        middle = (low + high) // 2
        slice_blocks(blocks, plan_subbatches(job, middle).choices)
        low, high = (middle, high) if peak_bytes(blocks, inputs) <= budget else (low, middle)
    slice_blocks(blocks, plan_subbatches(job, low).choices)
    return blocks


def _in_slices(
    name: str, blocks: nn.ModuleList, inputs: Inputs, expected: tuple[Tensor, Tensor], repeats: int
) -> dict[tuple[str, str], float]:
    """Bytes and seconds of blocks that write over their inputs."""
    m, run = inputs[0], partial(in_place, blocks, inputs)
    require_equal(name, run(), expected, m.dtype)
    taken = seconds(run, m.device, repeats) / len(blocks)
    return {(name, PEAK): peak_bytes(blocks, inputs), (name, "forward"): taken}


def in_place(blocks: nn.ModuleList, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """m and z of blocks that write over copies of them."""
    m, z, *masks = inputs
    with torch.inference_mode():
        return run_blocks(blocks, (m.clone(), z.clone(), *masks))


def slice_blocks(blocks: nn.ModuleList, choices: Mapping[str, How]) -> None:
    """Let the blocks work as a plan for the whole model says."""
    theirs = {name.removeprefix("blocks."): how for name, how in choices.items() if name.startswith("blocks.")}
    apply_subbatches(blocks, theirs)


def require_equal(name: str, got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Raises UserError where m or z differs."""
    for what, mine, theirs in zip("mz", got, expected):
        off = float((mine.float() - theirs.float()).abs().max() / theirs.float().abs().max())
        if not off <= AGREE[dtype]:
            raise UserError(f"{name} computes another {what} than ours ({off:.1e} of its largest element); not timed")


def openfold(
    python: Path,
    count: int,
    inputs: Inputs,
    expected: tuple[Tensor, Tensor],
    repeats: int,
    works: Collection[str] = tuple(WORK),
    chunk: int | None = None,
) -> dict[str, float]:
    """work -> seconds of all blocks, and bytes of their peak on a CPU, in OpenFold's process; chunk: its chunk_size."""
    device, dtype = inputs[0].device, inputs[0].dtype
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "task.pt"
        state = openfold_state(blocks_of(count, torch.device("cpu"), torch.float32))
        cpu = [x.detach().cpu() for x in inputs]
        given = {"chunk": chunk, "works": list(works)}
        torch.save({"state": state, "inputs": cpu, "outputs": None, **given}, task)
        arguments = [str(task), str(count), str(device), _format(dtype), str(repeats), str(torch.get_num_threads())]
        done = subprocess.run(
            [str(python), "-m", "benchmarks.evoformer_peer", *arguments],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise UserError(f"{python} could not run OpenFold's block: {(done.stderr.strip() or '?').splitlines()[-1]}")
        outputs = torch.load(task, weights_only=True)["outputs"]
        require_equal(OPENFOLD, outputs, (expected[0].cpu(), expected[1].cpu()), dtype)
        return json.loads(done.stdout.splitlines()[-1])


def openfold_state(blocks: nn.ModuleList) -> dict[str, Tensor]:
    """OpenFold's state dict of these blocks."""
    model = config_of()
    table = name_table(replace(model, evoformer=replace(model.evoformer, num_blocks=len(blocks))))
    parameters = {f"blocks.{name}": p.detach() for name, p in blocks.named_parameters()}
    found = {}
    for entry in table:
        if entry.name in parameters:
            parts = parameters.pop(entry.name).split([source.our_shape[0] for source in entry.sources])
            found |= {s.openfold.removeprefix("evoformer."): p for s, p in zip(entry.sources, parts)}
    assert not parameters, f"no name of OpenFold's for {sorted(parameters)}"
    return found


# --- memory -----------------------------------------------------------------------------------------------------------


def _memory(residues: int) -> Row:
    """Peaks in units of z, of ours whole, of the reference, and of plans with and without much room."""
    z = 2 * config_of().pair_dim * residues**2
    device = torch.device("meta")
    numbers = {}
    for name, change in (("ours, whole", lambda blocks: blocks), ("reference", as_written)):
        blocks, inputs = change(blocks_of(1, device, torch.bfloat16)), inputs_of(ROWS, residues, device, torch.bfloat16)
        with torch.no_grad(), MemoryAccount("meta") as account:
            account.add([*blocks.parameters(), *inputs])
            before = account.current_bytes
            run_blocks(blocks, inputs)
        numbers[f"{name}, beside"] = Number((account.peak_bytes - before) / z, "z")
    job = FoldJob(config_of(), residues, ROWS, 1024, dtype=torch.bfloat16, device="cuda")
    for name, budget in (("fastest plan", 10**13), ("least", least_bytes(job))):
        plan = plan_subbatches(job, budget)
        beside = max(plan.peaks[n] - plan.beside[n] for n in plan.choices if n.startswith("blocks."))
        numbers[f"{name}, beside"] = Number(beside / z, "z")
    return Row({"rows": ROWS, "residues": residues, "work": "memory", "format": "bf16"}, numbers)


def _targets(times: dict, device: torch.device) -> tuple[Target, ...]:
    """Ratios of times, so that 1 or more is met."""
    large, small, fp32, bf16 = (ROWS, RESIDUES), SMALL, torch.float32, torch.bfloat16
    ratio = statistics.mean(times["reference", work, large, fp32] / times[OURS, work, large, fp32] for work in WORK)
    found = [Target("reference / ours, 128 x 256, fp32", 1.0, ratio)]
    if (OPENFOLD, "forward", small, fp32) in times:
        theirs, mine = (times[name, "forward", small, fp32] for name in (OPENFOLD, OURS))
        found.append(Target("OpenFold / ours, forward, 32 x 128, fp32", 1.5, theirs / mine))
    if (OPENFOLD, PEAK, small, fp32) in times:
        theirs, mine = (times[name, PEAK, small, fp32] for name in (OPENFOLD, OURS))
        found.append(Target("40 % of OpenFold's peak / ours, forward, 32 x 128, fp32", 1.0, SHARE * theirs / mine))
        theirs, mine = (times[name, "forward", small, fp32] for name in (OPENFOLD, BOUNDED))
        found.append(Target("OpenFold / ours within 40 % of its peak, forward, 32 x 128, fp32", 1.5, theirs / mine))
    if device.type == "cuda":
        for work, wanted_ms in (("forward", 2.5), ("forward and backward", 8.0)):
            taken = 1e3 * times[OURS, work, large, bf16]
            found.append(Target(f"{wanted_ms:g} ms / ours, {work}, 128 x 256, bf16", 1.0, wanted_ms / taken))
    work = "forward and backward"
    for contender in ("reference", OPENFOLD):
        if (contender, work, large, bf16) in times:
            ahead = times[contender, work, large, bf16] / times[OURS, work, large, bf16]
            found.append(Target(f"{contender} / ours, {work}, 128 x 256, bf16", 1.0, ahead))
    return tuple(found)


MEASURES = (
    "apps/fold/model",
    "apps/fold/subbatch",
    "core/estimate",
    "core/kernels",
    "benchmarks/evoformer_peer.py",
    "benchmarks/evoformer.py",
)
BENCHMARK = Benchmark("evoformer", "The Evoformer block", measure, MEASURES, takes=("--part",), resumes=True)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="evoformer"), sys.argv[1:]))
