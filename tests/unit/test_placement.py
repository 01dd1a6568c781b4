"""Tables of placement: of any number of ranks, without one of them."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.compose import ParallelConfig, parallelize, transform
from core.config import UserError
from core.mesh import MeshConfig, Zero, axis_size, mesh_shape
from core.models.decoder import Decoder, DecoderConfig
from core.models.plan import decoder_plan, decoder_table
from core.nn.routing import MoEConfig
from core.parallel.tensor1d import colwise, rowwise
from core.placement.messages import microbatch_bytes
from core.placement.stages import PipelinePlan, StageSplit
from core.placement.table import ModelPlan, placement
from core.runtime import start

PLAIN = DecoderConfig(vocab_size=515, dim=96, num_layers=2, num_heads=16, ffn_dim=250, max_length=33)
EXPERTS = replace(PLAIN, ffn_dim=256, moe=MoEConfig(8, every=2, router="switch", capacity_factor=1.0))

MESHES: dict[str, tuple[DecoderConfig, MeshConfig, int, Zero]] = {
    "one rank": (PLAIN, MeshConfig(), 1, 0),
    "zero 1": (PLAIN, MeshConfig(), 3, 1),
    "tp": (PLAIN, MeshConfig(tp=8), 64, 3),
    "2d": (PLAIN, MeshConfig(tp=16, tp_mode="2d"), 128, 2),
    "2.5d": (PLAIN, MeshConfig(tp=8, tp_mode="2.5d", tp_depth=2), 64, 3),
    "3d": (PLAIN, MeshConfig(tp=64, tp_mode="3d"), 512, 1),
    "context": (PLAIN, MeshConfig(cp=4, cp_mode="mixed", cp_ulysses=2, tp=2), 32, 3),
    "experts": (EXPERTS, MeshConfig(ep=4, tp=2), 64, 3),
    "2d-experts": (EXPERTS, MeshConfig(tp=4, tp_mode="2d", ep=2, cp=2), 64, 3),
    "all": (EXPERTS, MeshConfig(dp_replicate=8, ep=8, cp=2, tp=4, pp=2), 4096, 3),
}


@pytest.mark.parametrize("name", MESHES)
def test_every_element_is_updated_by_as_many_ranks_as_hold_copies(name: str) -> None:
    config, given, world, zero = MESHES[name]
    mesh = given.resolve(world, zero)
    table, shape = decoder_table(config, mesh, zero), mesh_shape(mesh)
    assert not dist.is_initialized()
    assert shape.size() == world
    of_axes = {row.master.axes() for row in table.values()}
    ranks = {axes: Counter(tuple(_index(a, shape, rank) for a in axes) for rank in range(world)) for axes in of_axes}
    for row in table.values():
        axes, boxes = row.master.axes(), Counter[tuple[tuple[int, int], ...]]()
        for at, number in ranks[axes].items():
            boxes[tuple((s.start, s.stop) for s in row.master.box(dict(zip(axes, at, strict=True))))] += number
        held = {box: math.prod(stop - start for start, stop in box) for box in boxes}
        assert sum(held.values()) == math.prod(row.master.shape), "the boxes do not tile the whole"
        copies = world // math.prod(axis_size(shape, axis) for axis in row.master.axes())
        assert all(number == copies for box, number in boxes.items() if held[box])


def _index(axis: str, shape, rank: int) -> int:
    index = 0
    for part in axis.split("+"):
        place = shape.mesh_dim_names.index(part)
        index = index * shape.shape[place] + rank // math.prod(shape.shape[place + 1 :]) % shape.shape[place]
    return index


def test_a_table_of_4096_ranks() -> None:
    table = decoder_table(*_all())
    dense, expert = table["blocks.0.mlp.up.weight"], table["blocks.1.mlp.experts.up.weight"]
    assert dense.master.cuts == (("tp", 0), ("dp_shard+ep+cp", 0))
    assert expert.master.cuts == (("tp", 1), ("ep", 0), ("dp_shard+cp", 1))
    assert table["blocks.1.mlp.router.weight"].partial == ("tp",)
    assert table["norm.weight"].partial == ("tp",)
    assert not dense.partial
    assert table["head.weight"] == table["embedding.tokens.weight"]


def _all() -> tuple[DecoderConfig, MeshConfig, Zero]:
    config, given, world, zero = MESHES["all"]
    return config, given.resolve(world, zero), zero


def test_what_keeps_a_parameter_whole() -> None:
    model = nn.Linear(3, 2)
    model.scale, model.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))
    model.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
    mesh = MeshConfig(dp_shard=2, dp_replicate=1)
    whole = {zero: {n: r.whole for n, r in placement(model, {}, mesh, zero).items()} for zero in (1, 3)}
    assert {n for n, why in whole[1].items() if why} == {"scale", "frozen"}
    assert {n for n, why in whole[3].items() if why} == {"scale", "none"}
    assert whole[3]["scale"] == "a scalar has no rows"
    assert whole[1]["frozen"] == "nothing of it is updated"


def test_stages_that_share_a_parameter_both_hold_it() -> None:
    with torch.device("meta"):
        model = Decoder(PLAIN)
    mesh = MeshConfig(pp=2).resolve(2)
    plan = decoder_plan(PLAIN, mesh)
    split = StageSplit((range(1), range(1, 2)), (0, 1), PipelinePlan("blocks", before=("embedding",)))
    owners = {n: r.owners for n, r in placement(model, plan, mesh, stages=split).items()}
    assert owners["embedding.tokens.weight"] == owners["head.weight"] == (0, 1)
    assert owners["embedding.positions.weight"] == owners["blocks.0.mlp.up.weight"] == (0,)
    assert owners["blocks.1.mlp.up.weight"] == owners["norm.weight"] == (1,)


@pytest.mark.parametrize(
    ("mesh", "config", "said"),
    [
        (MeshConfig(tp=3), PLAIN, "16 heads do not divide over tp=3"),
        (MeshConfig(tp=16), replace(PLAIN, vocab_size=17), "17 rows of a vocabulary reach 9 ranks of tp=16"),
        (MeshConfig(tp=9, tp_mode="2d"), replace(PLAIN, num_heads=2), "2 key/value heads leave a rank of tp_col=3"),
        (MeshConfig(tp=16, tp_mode="2d", ep=4), EXPERTS, "8 experts leave some of the 16 ranks without any"),
        (MeshConfig(ep=16), EXPERTS, "8 experts leave a rank of mesh.ep=16 without any; use a mesh.ep of at most 8"),
        (MeshConfig(ep=2), PLAIN, "mesh.ep=2 and the model has no experts"),
        (MeshConfig(cp=8, cp_mode="ulysses", tp=4), PLAIN, "4 heads have none for some of the 8 ranks"),
    ],
)
def test_what_cannot_lie_on_a_mesh_is_refused(mesh: MeshConfig, config: DecoderConfig, said: str) -> None:
    world = mesh.tp * mesh.cp * mesh.ep * 4
    with pytest.raises(UserError, match=said.replace("{", r"\{")):
        decoder_table(config, mesh.resolve(world))


def test_an_axis_of_several_ranks_needs_a_plan() -> None:
    model = nn.Linear(4, 4)
    for option in ("tp", "cp", "pp", "ep"):
        mesh = MeshConfig(**{option: 2}).resolve(4)
        with pytest.raises(UserError, match=f"mesh.{option}=2 without a plan"):
            placement(model, ModelPlan(), mesh)


def test_closed_forms_are_of_any_number_of_ranks() -> None:
    """Megatron's four all-reduces a block, as gathers and scatters, whatever tp is."""
    with torch.device("meta"):
        model = Decoder(PLAIN)
    for tp in (2, 16):
        mesh = MeshConfig(tp=tp).resolve(tp * 8)
        sent = microbatch_bytes(model, decoder_plan(PLAIN, mesh), mesh, batch=3, length=32)
        activations = 3 * 32 * 96 * 4
        assert sent["all_gather", "tp"] == sent["reduce_scatter", "tp"] == activations * (2 * 4 + 2)
        assert sent["all_reduce", "tp"] == 3 * 3 * 32 * 4


def test_parameters_that_modules_share_have_to_be_cut_alike() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(UserError, match=r"0.weight and 1.weight are one parameter, and the plan cuts them differently"):
        placement(model, {"0": colwise, "1": rowwise}, MeshConfig(tp=2).resolve(2))


def test_transforms_change_the_modules_that_their_patterns_mean() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    transform(model, {"a": lambda module: module.to(torch.bfloat16)})
    assert [module.weight.dtype for module in model.values()] == [torch.bfloat16, torch.float32]
    with pytest.raises(UserError, match="the plan's pattern 'c' matches no module"):
        transform(model, {"c": lambda module: module})


def test_kernels_come_first_and_what_a_precision_adds_is_trained() -> None:
    made: list[str] = []

    def kernel(module: nn.Module) -> None:
        made.append("kernel")

    def widened(module: nn.Module) -> None:
        made.append("precision")
        module.register_parameter("scale", nn.Parameter(torch.ones(4)))

    plan = ModelPlan(kernels={"0": kernel}, precision={"0": widened})
    with start("cpu") as runtime:
        parallel = parallelize(nn.Sequential(nn.Linear(4, 4)), runtime.mesh(MeshConfig()), ParallelConfig(), plan)
        assert made == ["kernel", "precision"]
        assert set(parallel.masters) == set(parallel.table) == {"0.weight", "0.bias", "0.scale"}
