"""What lies and what is sent on real ranks is what the table and the closed forms of the styles say, to the byte."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.comm.collectives import all_reduce
from core.comm.volume import count_volume
from core.compose import ParallelConfig, parallelize
from core.layout import layout_of, local
from core.mesh import MeshConfig, Zero, axis_size, build_mesh, mesh_shape, sub_mesh
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import decoder_plan
from core.parallel.context import SequenceCut
from core.parallel.data import Completion
from core.parallel.pipeline.schedule import PipelineConfig
from core.parallel.rows import own_rows
from core.placement.messages import Sent, Widths, microbatch_bytes, partial_sum_bytes
from core.placement.style import matches
from core.placement.table import placement
from tests.parity.test_experts import TOPK
from tests.parity.test_train import GPT2, LLAMA

RAGGED = replace(GPT2, num_layers=2, dim=30, num_heads=3, ffn_dim=51, vocab_size=61, max_length=9)
ROTARY = replace(LLAMA, num_layers=2, dim=32, num_heads=8, num_kv_heads=4, vocab_size=61)
FLAT = replace(RAGGED, num_layers=1)  # of eight ranks: two blocks are counted on fewer
NORMED = replace(ROTARY, family="qwen3", head_dim=6, qk_norm=True)
FP64 = Widths(8, 8)

CASES: dict[str, tuple[int, DecoderConfig, MeshConfig, Zero]] = {
    "tp": (2, ROTARY, MeshConfig(tp=2), 0),
    "tp-zero3": (4, ROTARY, MeshConfig(tp=2), 3),
    "tp-normed-heads": (2, NORMED, MeshConfig(tp=2), 0),
    "2d-normed-heads": (4, replace(NORMED, num_heads=3, num_kv_heads=3, dim=30), MeshConfig(tp=4, tp_mode="2d"), 0),
    "2d": (4, RAGGED, MeshConfig(tp=4, tp_mode="2d"), 0),
    "2d-zero3": (8, FLAT, MeshConfig(tp=4, tp_mode="2d"), 3),
    "2.5d": (8, FLAT, MeshConfig(tp=8, tp_mode="2.5d", tp_depth=2), 0),
    "3d": (8, FLAT, MeshConfig(tp=8, tp_mode="3d"), 0),
    "ring": (2, ROTARY, MeshConfig(cp=2), 0),
    "ulysses-zero2": (2, RAGGED, MeshConfig(cp=2, cp_mode="ulysses"), 2),
    "mixed": (4, ROTARY, MeshConfig(cp=4, cp_mode="mixed", cp_ulysses=2), 0),
    "tp-ring": (4, ROTARY, MeshConfig(cp=2, tp=2), 1),
    "2d-ring": (8, replace(ROTARY, num_layers=1, num_kv_heads=8), MeshConfig(cp=2, tp=4, tp_mode="2d"), 0),
    "2.5d-ulysses": (4, RAGGED, MeshConfig(cp=2, cp_mode="ulysses", tp=2, tp_mode="2.5d", tp_depth=2), 0),
    "2.5d-experts-zero3": (4, TOPK, MeshConfig(ep=2, tp=2, tp_mode="2.5d", tp_depth=2), 3),
    "experts-zero3": (4, TOPK, MeshConfig(ep=2), 3),
    "experts-tp-zero1": (4, TOPK, MeshConfig(ep=2, tp=2), 1),
    "stages-zero1": (4, RAGGED, MeshConfig(pp=2), 1),
    "stages-tp": (4, ROTARY, MeshConfig(pp=2, tp=2), 0),
}
BATCH, LENGTH = 4, 8


def spread(name: str) -> tuple[Any, DecoderConfig, MeshConfig, Zero]:
    _, config, given, zero = CASES[name]
    mesh = given.resolve(dist.get_world_size(), zero)
    with torch.device("meta"):
        model = Decoder(config)
    options = ParallelConfig(
        zero=zero, precision="fp64", pipeline=PipelineConfig(microbatches=2 if mesh.pp > 1 else None)
    )
    fill = lambda model: initialise(model, 3)  # noqa: E731
    parallel = parallelize(model, build_mesh(mesh, "cpu"), options, decoder_plan(config, mesh), materialise=fill)
    return parallel, config, mesh, zero


def lies_as_its_row_says(name: str) -> list[str]:
    """Of the parameters that a forward has, and of those that the optimizer updates: values, whole and in their box."""
    parallel, config, mesh, zero = spread(name)
    whole = Decoder(config).double()
    initialise(whole, 3)
    here, wrong, found = mesh_shape(mesh, dist.get_rank()), [], []
    with torch.device("meta"):
        twin = Decoder(config)
    # The same table again, of a shape: without the ranks' groups.
    table = placement(twin, decoder_plan(config, mesh), here, zero)
    for key, master in parallel.masters.items():
        want = table[key].master.local(whole.get_parameter(key).detach())
        row = parallel.table[key]
        if layout_of(master).box() != row.master.box() or row.master.box() != table[key].master.box():
            wrong.append(f"{key}: box {layout_of(master).box()}, in the table {table[key].master.box()}")
        elif not torch.equal(master.detach(), want):
            wrong.append(f"{key}: values")
        found.append(key)
        here_now = local(parallel.model.get_parameter(key).detach())
        if zero < 3 and not torch.equal(here_now, table[key].layout.local(whole.get_parameter(key).detach())):
            wrong.append(f"{key}: what a forward has")
    rank = parallel.mesh["pp"].get_local_rank()
    mine = {n for n, row in parallel.table.items() if n == row.names[0] and row.owners[0] == rank}
    return wrong + [f"not held as the table says: {key}" for key in mine.symmetric_difference(found)]


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_lies_as_its_row_says(ranks, name: str) -> None:
    num_ranks = CASES[name][0]
    assert ranks(num_ranks).run(lies_as_its_row_says, name) == [[]] * num_ranks


def sent_and_said(name: str) -> tuple[Sent, Sent]:
    """Bytes of a microbatch and of the sums of partial gradients: counted, and by the closed forms."""
    parallel, config, mesh, zero = spread(name)
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % config.vocab_size
    # What data parallelism sends is counted in tests/unit/test_volume.py.
    used = patch.object(Completion, "used_anywhere", lambda _, masters, together: set(masters))
    with used, count_volume(parallel.mesh) as volume:
        with parallel.microbatch(last=mesh.cp == 1):
            parallel.model(ids, targets=ids).backward()
        if mesh.cp == 1:  # with context parallelism data parallelism sends over its axis, too
            parallel.reduce()
    axes = ("tp", "cp") if mesh.cp > 1 else ("tp",)
    counted = {k: n for k, n in volume.bytes.items() if k[1].startswith(axes) and k[0] != "recv" and n}
    here = mesh_shape(mesh, dist.get_rank())
    with torch.device("meta"):
        model = Decoder(config)
    plan = decoder_plan(config, mesh)
    cut = SequenceCut(LENGTH, mesh.cp, zigzag=mesh.cp_mode != "ulysses" and mesh.cp > 1)
    said = microbatch_bytes(model, plan, here, BATCH, cut.local_length, FP64)
    if mesh.cp == 1:
        said += partial_sum_bytes(placement(model, plan, here, zero), 8)
    return counted, dict(said)


SENDING = [name for name, (_, _, mesh, _) in CASES.items() if mesh.ep == mesh.pp == 1]


@pytest.mark.parametrize("name", SENDING)
def test_messages_are_those_of_the_closed_forms(ranks, name: str) -> None:
    for counted, said in ranks(CASES[name][0]).run(sent_and_said, name):
        assert counted == said


def activations(name: str) -> list[str]:
    """Shapes of what enters and leaves a plan's modules beside those of one rank, where a style says how it lies."""
    parallel, config, mesh, _ = spread(name)
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % config.vocab_size
    whole = Decoder(config).double()
    wrong = []
    for part, axes in decoder_plan(config, mesh).steps(parallel.mesh):
        want, got = _shapes(whole, part, ids), _shapes(parallel.model, part, ids)
        for pattern, style in part.items():
            for key in [key for key in want if matches(key, pattern)]:
                for side, lies in (("inputs", style.inputs), ("outputs", style.outputs)):
                    full, here = want[key][side], got[key][side]
                    for axis, placed in lies.items():
                        if placed.is_shard() and full is not None:
                            dim = placed.dim % len(full)
                            full[dim] = _share(full[dim], here[dim], parallel.mesh, axis or axes[0], dim)
                    if lies and full != here:
                        wrong.append(f"{key} {side}: {here}, and {lies} of one rank's shapes is {full}")
    return wrong


def _share(full: int, here: int, mesh: Any, axis: str, dim: int) -> int:
    """Heads and features are cut in units: their shares add up. Batch and sequence are padded to equal ones."""
    if dim < 2:
        return -(-full // axis_size(mesh, axis))
    total = torch.tensor(here)
    dist.all_reduce(total, group=sub_mesh(mesh, axis).get_group())
    return here if int(total) == full else -1


def _shapes(model: nn.Module, part: Any, ids: Tensor) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}

    def note(key: str):
        def hook(module: nn.Module, args: tuple, out: Any) -> None:
            shapes = [list(x.shape) if isinstance(x, Tensor) and x.ndim > 1 else None for x in (args[0], out)]
            found[key] = dict(zip(("inputs", "outputs"), shapes, strict=True))

        return hook

    modules = {n: m for n, m in model.named_modules() if n and any(matches(n, pattern) for pattern in part)}
    handles = [module.register_forward_hook(note(key)) for key, module in modules.items()]
    with torch.no_grad():
        model(ids, targets=ids)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", ["tp", "tp-normed-heads", "2d-normed-heads", "2d", "2.5d", "3d"])
def test_activations_lie_as_the_styles_say(ranks, name: str) -> None:
    num_ranks = CASES[name][0]
    assert ranks(num_ranks).run(activations, name) == [[]] * num_ranks


def with_rows_of_another(name: str) -> list[str]:
    def other_rows(whole: Tensor, axis: Any, dim: int = 0) -> Tensor:
        return own_rows(whole.flip(dim), axis, dim)

    with patch("core.parallel.data.own_rows", other_rows):
        return lies_as_its_row_says(name)


def test_other_rows_than_those_of_the_table_are_seen(ranks) -> None:
    """What is held above can fail."""
    for wrong in ranks(4).run(with_rows_of_another, "experts-tp-zero1"):
        assert "blocks.0.mlp.router.weight: values" in wrong


def with_a_message_more(name: str) -> tuple[Sent, Sent]:
    def twice(x: Tensor, axis: Any) -> Tensor:
        all_reduce(x, axis)
        return all_reduce(x, axis)

    with patch("core.parallel.grid.all_reduce", twice):
        return sent_and_said(name)


def test_a_message_that_no_style_tells_of_is_seen(ranks) -> None:
    for counted, said in ranks(4).run(with_a_message_more, "2d"):
        assert counted != said
