"""Plans: which modules a pattern reaches, and what stays of a module that a style has changed."""

from dataclasses import replace
from functools import partialmethod

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from core.compose import ParallelConfig, compile_blocks, parallelize
from core.config import UserError
from core.layout import full_tensor, layout_of
from core.mesh import MeshConfig, build_mesh
from core.models.decoder import Decoder, DecoderConfig
from core.models.plan import decoder_plan, decoder_table
from core.models.shapes import SHAPES
from core.nn.loss import Head
from core.parallel.plan import apply_plan, blocks_of
from core.parallel.tensor1d import colwise, rowwise, vocab_embedding, vocab_head
from core.placement.style import matches
from core.placement.table import parameter_names
from core.runtime import pretended


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


def test_names_of_shared_parameters_stand_together() -> None:
    names = parameter_names(Net())
    assert ["embed.weight", "head.weight"] in names
    assert len(names) == 1 + 8


def test_blocks_are_the_outermost_lists() -> None:
    net = Net()
    nested = nn.ModuleDict({"net": net, "more": nn.ModuleList([nn.ModuleList([nn.Linear(1, 1)])])})
    assert blocks_of(nested) == [*net.blocks, nested["more"][0]]
    assert blocks_of(nn.Linear(1, 1)) == []


def test_a_model_may_say_what_its_blocks_are() -> None:
    class Saying(Net):
        def repeated_blocks(self) -> list[nn.Module]:
            return [self.head]

    net = Saying()
    assert blocks_of(net) == [net.head]


def refusals() -> list[str]:
    axis = build_mesh(MeshConfig(tp=2).resolve(2), "cpu")["tp"]
    said = []
    for plan in (
        {"blocks.*.0": colwise, "block.*.1": rowwise},
        {"embed": vocab_embedding},
    ):
        try:
            apply_plan(Net(), plan, axis)
        except UserError as error:
            said.append(str(error))
    padded = nn.Embedding(4, 2, padding_idx=0)
    try:
        apply_plan(padded, {"": vocab_embedding}, axis)
    except UserError as error:
        said.append(str(error))
    return said


def test_a_plan_that_cannot_be_followed_is_refused(ranks) -> None:
    unmatched, half_tied, padding = ranks(2).run(refusals)[0]
    assert (
        unmatched == "the plan's pattern 'block.*.1' matches no module; the model's modules are embed, blocks, head, …"
    )
    assert half_tied.startswith("embed.weight and head.weight are one parameter, and the plan cuts them differently;")
    assert "without padding_idx" in padding


def vocabulary_too_small() -> str:
    axis = build_mesh(MeshConfig(tp=4).resolve(4), "cpu")["tp"]
    with pytest.raises(UserError) as refused:
        apply_plan(Head(5, 2), {"": vocab_head}, axis)
    return str(refused.value)


def test_a_vocabulary_that_does_not_reach_every_rank_is_refused(ranks) -> None:
    expected = "5 rows of a vocabulary reach 3 ranks of tp=4; use a smaller tp"
    assert ranks(4).run(vocabulary_too_small) == [expected] * 4


def test_a_star_stands_for_one_part_of_a_name() -> None:
    assert matches("blocks.0.mlp", "blocks.*.mlp")
    assert matches("blocks.0.mlp_norm", "blocks.*.*norm")
    assert not matches("blocks.0.attention.mlp", "blocks.*.mlp")
    assert not matches("blocks.0", "blocks.*.mlp")


def test_heads_that_do_not_divide_are_told_what_would() -> None:
    def refused(num_heads: int, num_kv_heads: int, tp: int) -> None:
        config = replace(SHAPES["llama_7b"], num_layers=1, dim=48, num_heads=num_heads, num_kv_heads=num_kv_heads)
        decoder_table(config, MeshConfig(tp=tp).resolve(tp))

    refused(12, 6, 3)
    with pytest.raises(UserError, match=r"8 heads do not divide over tp=3; use tp in \{1, 2, 4, 8\}"):
        refused(8, 8, 3)
    with pytest.raises(UserError, match=r"2 key/value heads do not divide over tp=4; use tp in \{1, 2\}"):
        refused(8, 2, 4)


def styled() -> None:
    axis = build_mesh(MeshConfig(tp=2).resolve(2), "cpu")["tp"]
    torch.manual_seed(0)
    plain, net = Net().double(), Net().double()
    net.load_state_dict(plain.state_dict())
    names = [n for n, _ in net.named_parameters()]
    plan = {"embed": vocab_embedding, "blocks.*.0": colwise, "blocks.*.1": rowwise, "head": colwise}
    assert apply_plan(net, plan, axis) is net

    assert [n for n, _ in net.named_parameters()] == names
    assert net.head.weight is net.embed.weight
    for name, parameter in net.named_parameters():
        assert tuple(parameter.shape) == tuple(plain.get_parameter(name).shape)
        assert torch.equal(full_tensor(parameter), plain.get_parameter(name))
    assert isinstance(net.embed.weight, DTensor)
    assert layout_of(net.embed.weight).local_shape() == ((4, 4), (3, 4))[dist.get_rank()]

    ids = torch.tensor([[0, 3, 6], [4, 4, 5]])
    outputs, expected = net(ids), plain(ids)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    outputs.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(full_tensor(parameter.grad), plain.get_parameter(name).grad, rtol=1e-12, atol=1e-12)

    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert not isinstance(self.weight, DTensor)
            raise ZeroDivisionError

    broken = Broken(2, 4)
    apply_plan(broken, {"": colwise}, axis)
    with pytest.raises(ZeroDivisionError):
        broken(torch.ones(1, 2))
    assert isinstance(broken.weight, DTensor), "a forward that fails leaves the module as it was"


def test_styles_change_how_a_module_computes_and_not_what_it_is(ranks) -> None:
    ranks(2).run(styled)


def test_every_parameter_of_the_decoder_is_cut_or_known_to_have_partial_gradients() -> None:
    config = DecoderConfig(vocab_size=11, dim=8, num_layers=1, num_heads=2, ffn_dim=6, max_length=5)
    table = decoder_table(config, MeshConfig(tp=2).resolve(2))
    assert all(not row.partial for row in table.values() if row.layout.cuts), "partial where the parameter is whole"
    found = {n: "partial" if row.partial else str(row.layout.cuts) for n, row in table.items()}
    assert set(found.values()) == {"(('tp', 0),)", "(('tp', 1),)", "partial"}
    rows = {n for n, cuts in found.items() if cuts == "(('tp', 1),)"}
    assert rows == {"blocks.0.attention.out.weight", "blocks.0.mlp.down.weight"}
    assert found["blocks.0.mlp.down.bias"] == found["embedding.positions.weight"] == found["norm.weight"] == "partial"


def test_blocks_of_other_stages_do_not_make_those_of_this_one_unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have lost their parameters, and are not called: no graph of theirs is to be told from others'."""
    asked: list[object] = []
    monkeypatch.setattr(nn.Module, "compile", lambda block, dynamic: asked.append(dynamic))
    blocks: list[nn.Module] = [nn.Linear(3, 3) for _ in range(3)]
    blocks[1].weight = blocks[1].bias = None  # pyright: ignore
    compile_blocks(blocks)
    assert asked == [None] * 3
    asked.clear()
    compile_blocks([nn.Linear(3, 3), nn.Linear(3, 4)])
    assert asked == [False] * 2


@pytest.mark.parametrize("mesh", [MeshConfig(tp=4, tp_mode="2d"), MeshConfig(tp=8, tp_mode="3d")], ids=["2d", "3d"])
def test_blocks_of_a_grid_share_their_graphs(monkeypatch: pytest.MonkeyPatch, mesh: MeshConfig) -> None:
    """What lies between messages that torch.compile does not trace is compiled once, however many blocks there are."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    config = DecoderConfig(vocab_size=16, dim=8, num_layers=5, num_heads=2, ffn_dim=12, max_length=4)
    model, ids = Decoder(config), torch.zeros(4, 4, dtype=torch.int64)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with pretended(mesh.tp), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        built = build_mesh(mesh.resolve(mesh.tp), "cpu")
        parallel = parallelize(model, built, ParallelConfig(compile=True), decoder_plan(config, mesh))
        with parallel.microbatch(last=True):
            parallel.model(ids, targets=ids).backward()
    assert 1 < torch._dynamo.utils.counters["stats"]["unique_graphs"] < 2 * config.num_layers
