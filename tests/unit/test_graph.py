"""A step traced without memory is the step that runs: its FLOPs, its memory at every moment, its values."""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from core.config import UserError
from core.trace import record
from core.trace.account import MemoryAccount
from core.trace.graph import Graph, Storage, block_of, run_graph
from core.trace.record import trace_graph
from tests.support import traced

SIZE = 4  # bytes of a float


def modes(names: Iterable[str], few: Sequence[str]) -> list[Any]:
    """Training and evaluation of each; the few's training, and one evaluation, are not left to `make soak`."""
    return [
        pytest.param(name, train, marks=() if name in few and (train or name == few[0]) else pytest.mark.soak)
        for name in names
        for train in (True, False)
    ]


def peak_and_flops(model: nn.Module, inputs: dict[str, Any], loss: Callable[[Any], Tensor] | None, train: bool):
    """The same step for real: the most bytes of tensors alive at once, and what torch counts of FLOPs."""

    def step() -> None:
        if not train:
            with torch.no_grad():
                held = model(**inputs)
            del held
        elif loss is None:
            model(**inputs).loss.backward()
        else:
            loss(model(**inputs)).backward()

    model.train(train)
    with FlopCounterMode(display=False) as flops:
        step()
    model.zero_grad()
    with MemoryAccount() as account:
        account.add([*model.parameters(), *model.buffers(), *(v for v in inputs.values() if isinstance(v, Tensor))])
        step()
    return account.peak_bytes, flops.get_total_flops()


@pytest.mark.parametrize(("name", "train"), modes(traced.CASES, few=["gpt2", "t5", "convnext", "evoformer"]))
def test_flops_and_peak_are_those_of_the_step_that_runs(name: str, train: bool) -> None:
    case = traced.CASES[name]
    torch.manual_seed(0)
    model, inputs = case.make(), case.inputs()
    graph = trace_graph(model, inputs, case.loss if train else None, train=train)
    peak_bytes, flops = peak_and_flops(model, inputs, case.loss, train)
    print(f"{name}: {len(graph.nodes)} nodes, peak {graph.peak().num_bytes} of {peak_bytes}, FLOPs {graph.flops()}")
    assert graph.flops() == pytest.approx(flops, rel=0.01)
    assert graph.peak().num_bytes == pytest.approx(peak_bytes, rel=0.05)
    assert graph.peak("used").num_bytes <= graph.peak().num_bytes
    assert graph.bytes_of("parameters") == sum(parameter.nbytes for parameter in model.parameters())
    if train:
        trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        assert set(graph.gradients) == trained
        assert {node.module for node in graph.nodes if node.flops and node.kind == "backward"} <= {
            node.module for node in graph.nodes if node.flops and node.kind == "forward"
        }


@pytest.mark.parametrize("name", traced.broad(few=["gpt2", "evoformer"]))
def test_the_graph_computes_the_step(name: str) -> None:
    """Without dropout."""
    case = traced.CASES[name]
    torch.manual_seed(0)
    model, inputs = case.make().train(), case.inputs()
    for module in model.modules():
        if "Dropout" in type(module).__name__:
            module.p = 0.0
        if "DropPath" in type(module).__name__:
            module.drop_prob = 0.0
    graph = trace_graph(model, inputs, case.loss)
    given = dict(model.named_parameters()) | dict(model.named_buffers()) | inputs
    given = {name: value.detach().clone() for name, value in given.items() if isinstance(value, Tensor)}
    found = run_graph(graph, given)
    output = model(**inputs)
    loss = output.loss if case.loss is None else case.loss(output)
    loss.backward()
    torch.testing.assert_close(found["output.0"], loss.detach())
    for parameter, gradient in model.named_parameters():
        if gradient.grad is not None:
            torch.testing.assert_close(found[parameter], gradient.grad, msg=lambda said, p=parameter: f"{p}: {said}")


# --- by hand ----------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One weight that two products take."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).sum()


def test_a_tied_weight_counts_twice_in_flops_and_once_in_memory() -> None:
    graph = trace_graph(Tied(), {"x": torch.zeros(5, 7)})
    product = 2 * 5 * 7 * 7
    assert graph.flops("forward") == 2 * product
    assert graph.flops("backward") == 3 * product  # twice the forward, but for the gradient of the input
    assert graph.bytes_of("parameters") == graph.bytes_of("gradients") == 7 * 7 * SIZE
    assert list(graph.gradients) == ["up.weight"]


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(7, 7), nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor, again: bool) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(lambda x, b=block: b(x).sin(), x, use_reentrant=False) if again else block(x).sin()
        return x.sum()


def test_what_is_recomputed_counts_and_is_not_kept() -> None:
    plain, again = (trace_graph(Recomputing(), {"x": torch.zeros(5, 7), "again": again}) for again in (False, True))
    product = 2 * 5 * 7 * 7
    assert plain.flops() == (4 + 7) * product
    assert again.flops() == (4 + 7 + 3) * product
    assert sum(node.flops for node in again.nodes if node.recomputed) == 3 * product
    assert not any(node.recomputed for node in plain.nodes)
    assert {node.module for node in again.nodes if node.recomputed and node.flops} == {f"blocks.{n}" for n in range(3)}
    assert again.bytes_of("activations") < plain.bytes_of("activations")


class Views(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = (x * 2).view(-1)
        z = y[:3].expand(4, 3)
        del y
        return z + 1


def test_views_share_memory_which_lives_as_long_as_any_of_them() -> None:
    graph = trace_graph(Views(), {"x": torch.zeros(5, 7)}, train=False)
    names = [node.name for node in graph.nodes if not node.is_view]
    assert names == ["mul_1", "add_1"]
    product, added = (storage for storage in graph.storages if storage.born is not None)
    assert (product.num_bytes, added.num_bytes) == (5 * 7 * SIZE, 4 * 3 * SIZE)
    assert product.freed == len(graph.nodes) - 1
    assert graph.peak().num_bytes == 2 * 5 * 7 * SIZE + 4 * 3 * SIZE
    assert [node.bytes_read for node in graph.nodes if node.name == "add_1"] == [3 * SIZE]  # what expand repeats: once


class Holding(nn.Module):
    """It holds what it made, of which only the product's input is needed for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        seen = (x + 1) + 2
        self.last = made = seen * self.weight
        return {"loss": made.sum() * scale, "more": [seen, made]}


def test_what_is_kept_is_less_than_what_the_forward_leaves() -> None:
    graph = trace_graph(Holding(), {"x": torch.zeros(5, 7), "scale": 3.0})
    last = max(node.index for node in graph.nodes if node.kind == "forward")
    made = [storage for storage in graph.alive(last) if storage.born is not None]
    kept = [storage for storage in made if storage.kind == "activations"]
    names = {graph.nodes[storage.born].name for storage in kept if storage.born is not None}
    assert len(made) > len(kept)
    assert names == {"add_2", "mul_2"}  # and the loss, by which its gradient is shaped
    assert [node.name for node in graph.nodes if node.kept] == ["add_2", "mul_2"]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Dropout(0.3), nn.Flatten())
        self.head = nn.Linear(5 * 5 * 4, 2)

    def forward(self, pictures: Tensor, *, classes: Tensor) -> Any:
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(self.layers(pictures)), classes))


def test_batch_norm_dropout_and_keywords() -> None:
    model = Normed()
    inputs = {"pictures": torch.randn(3, 3, 7, 6), "classes": torch.tensor([0, 1, 1])}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    graph = trace_graph(model, inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    peak_bytes, flops = peak_and_flops(model, inputs, None, True)
    assert (graph.peak().num_bytes, graph.flops()) == (pytest.approx(peak_bytes, abs=64), flops)
    (norm,) = [node for node in graph.nodes if "batch_norm" in node.name and node.kind == "forward"]
    assert [value.name for value in norm.writes] == ["layers.1.running_mean", "layers.1.running_var"]
    assert norm.module == "layers.1"
    (drawn,) = [node for node in graph.nodes if node.name == "bernoulli__1"]
    assert drawn.outputs[0].before is drawn.inputs[0] is drawn.writes[0]
    assert drawn.outputs[0].storage is drawn.inputs[0].storage
    (backward,) = [node for node in graph.nodes if "batch_norm" in node.name and node.kind == "backward"]
    assert (backward.module, backward.source) == ("layers.1", norm.index)


def test_an_update_is_part_of_it() -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    inputs = [torch.zeros(2, 7)]
    graph = trace_graph(model, inputs, optimizer=lambda parameters: torch.optim.AdamW(parameters.values()))
    size = graph.bytes_of("parameters")
    assert graph.bytes_of("gradients") == size
    assert 2 * size <= graph.bytes_of("state") < 2 * size + 100  # and the numbers of the steps
    updates = [node for node in graph.nodes if node.kind == "update"]
    assert {value.name for node in updates for value in node.writes} >= set(graph.gradients)
    assert list(graph.inputs)[:4] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert "gradient of output.0" in graph.inputs


def test_alike_blocks_are_known() -> None:
    from tests.support.foreign import gpt2

    model = gpt2()
    graph = trace_graph(model, {"input_ids": torch.zeros(3, 5, dtype=torch.int64)}, lambda out: out.logits.sum())
    alike = graph.alike
    of_blocks = [(block_of(node.module), place) for node, place in zip(graph.nodes, alike) if place is not None]
    assert {block[:2] for block, _ in of_blocks if block is not None} == {
        ("transformer.h", "0"),
        ("transformer.h", "1"),
    }
    assert len({place.kind for _, place in of_blocks}) == 1
    assert set(graph.multiplicity().values()) == {2}
    products = [place for node, place in zip(graph.nodes, alike) if node.flops and node.kind == "backward"]
    assert sum(place is not None for place in products) > sum(place is None for place in products)


# --- a few blocks for many --------------------------------------------------------------------------------------------


class Residual(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu() + x


class InTurn(nn.Module):
    """Blocks of two kinds in turn, the last two others; and a list that is gone through twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Residual(8, 8, bias=number % 2 == 0) for number in range(15))
        self.first.extend([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.second = nn.ModuleList(nn.Linear(8, 8) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.first, *self.second, *self.second):
            x = block(x)
        return x.mean()


def _deep_decoder(recompute: str = "none") -> nn.Module:
    from core.models.decoder import Decoder, DecoderConfig
    from core.parallel.recompute import RecomputeConfig, apply_recompute

    with torch.device("meta"):
        model = Decoder(DecoderConfig(vocab_size=67, dim=16, num_layers=9, num_heads=2, ffn_dim=32, max_length=8))
    apply_recompute(model, RecomputeConfig(recompute))  # pyright: ignore[reportArgumentType]
    return model


def _deep_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=37, n_positions=8, n_embd=16, n_layer=8, n_head=2))


def _deep_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"vocab_size": 37, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 8, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def _ids(*names: str) -> dict[str, Any]:
    return {name: torch.zeros(3, 5, dtype=torch.int64, device="meta") for name in names}


DEEP = {
    "in turn": (InTurn, {"x": torch.zeros(5, 8)}, 2),
    "decoder": (_deep_decoder, _ids("input_ids_BL", "targets"), 1),
    "decoder recomputed": (lambda: _deep_decoder("full"), _ids("input_ids_BL", "targets"), 1),
    "gpt2": (_deep_gpt2, _ids("input_ids", "labels") | {"use_cache": False}, 1),
    "t5": (_deep_t5, _ids("input_ids", "labels") | {"use_cache": False}, 2),
}


def told(graph: Graph) -> list[Any]:
    """All of a graph, to be compared; storages by the order in which nodes come to them."""
    values = [value for node in graph.nodes for value in (*node.inputs, *node.outputs)]
    places = {storage: place for place, storage in enumerate(dict.fromkeys(value.storage for value in values))}

    def of(values: Any) -> Any:
        return [(v.name, v.shape, v.stride, v.node, v.users, places.get(v.storage)) for v in values]

    return [
        *((str(n.op), n.name, n.module, n.kind, n.source, n.recomputed, n.flops, n.kept) for n in graph.nodes),
        *((of(node.inputs), of(node.outputs), of(node.writes), str(node.on_meta())) for node in graph.nodes),
        *((s.kind, s.num_bytes, s.name, s.born, s.freed, s.uses) for s in places),
        *(len(graph.storages), len(graph.values), list(graph.inputs), list(graph.gradients), list(graph.constants)),
        *(of(graph.inputs.values()), of(graph.gradients.values()), of(graph.outputs)),
    ]


@pytest.mark.parametrize(("name", "train"), modes(DEEP, few=["in turn", "decoder recomputed"]))
def test_a_few_blocks_tell_of_many(name: str, train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make, inputs, lists = DEEP[name]
    made, model = [], make()
    grow = record.GrownGraph.made
    monkeypatch.setattr(record.GrownGraph, "made", lambda self: made.append(grow(self)) or made[-1])
    inputs = {name: value for name, value in inputs.items() if train or name not in ("labels", "targets")}
    if name == "t5" and not train:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    whole, grown = (trace_graph(model, inputs, train=train, whole=whole) for whole in (True, False))
    assert len(made) == lists
    assert made[-1] is grown
    for one, other in zip(told(grown), told(whole), strict=True):
        assert one == other
    assert grown.bytes_alive() == whole.bytes_alive()
    assert grown.alike == whole.alike


class Gathering(nn.Module):
    """What every block makes is looked at behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x := block(x) for block in self.blocks]).sum()


def test_blocks_that_others_look_into_are_all_traced(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="trace")
    graph = trace_graph(Gathering(), {"x": torch.zeros(5, 8)})
    assert "all blocks are traced: something else looks into blocks that look alike" in caplog.text
    assert len([node for node in graph.nodes if node.kind == "forward" and node.flops]) == 7


# --- refusals ---------------------------------------------------------------------------------------------------------


class Looking(nn.Module):
    def __init__(self, look: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.look, self.weight = look, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.look(x)
        return x * self.weight


def _branches(x: Tensor) -> Any:
    return 1 if x.any() else 0  # the line


def _chooses(x: Tensor) -> Any:
    return x[x > 0]


def _fails(x: Tensor) -> Any:
    return x @ x


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (
            _branches,
            r"Looking cannot be traced: .*test_graph\.py:\d+ \(return 1 if x\.any\(\) else 0  # the line\) looks",
        ),
        (_chooses, r"\(return x\[x > 0\]\) looks at a tensor's values, .*; write it without"),
        (_fails, r"\(return x @ x\) fails on these inputs with RuntimeError: .*; see that it runs on them"),
    ],
)
def test_a_module_that_cannot_be_traced_is_told_by_its_line(look: Any, said: str) -> None:
    model = Looking(look)
    with pytest.raises(UserError, match=said) as refused:
        trace_graph(model, {"x": torch.zeros(3, 5)})
    assert "\n" not in str(refused.value)
    assert not torch.nn.modules.module._global_forward_hooks
    assert type(model.weight) is nn.Parameter


def test_inputs_that_a_model_does_not_take_and_models_without_gradients() -> None:
    with pytest.raises(UserError, match=r"Looking does not run on these inputs: .*unexpected keyword argument 'y'"):
        trace_graph(Looking(len), {"y": torch.zeros(3)})
    with pytest.raises(UserError, match="Views has no output that depends on a parameter which learns"):
        trace_graph(Views(), {"x": torch.zeros(5, 7)})


# --- accounts ---------------------------------------------------------------------------------------------------------


def test_lives_of_storages() -> None:
    held, gone = Storage(0, 10, "parameters"), Storage(1, 5, born=0, freed=2, uses=[0, 1])
    graph = Graph([SimpleNamespace(index=n) for n in range(3)], [], [held, gone], {}, (), {}, {})  # pyright: ignore
    assert graph.bytes_alive()["temporaries"] == [0, 5, 5, 5]
    assert graph.bytes_alive("used")["temporaries"] == [0, 5, 5, 0]
    peak = graph.peak()
    assert (peak.node, peak.num_bytes, peak.by_kind) == (0, 15, {"parameters": 10, "temporaries": 5})
    assert [storage.index for storage in peak.alive] == [0, 1]
    assert graph.alive(2, "used") == [held] == graph.alive(None)


@pytest.mark.parametrize(
    ("path", "place"),
    [("h.3.mlp", ("h", "3", "mlp")), ("a.b.11", ("a.b", "11", "")), ("0.2.x", ("", "0", "2.x")), ("h3.mlp", None)],
)
def test_places_in_lists(path: str, place: Any) -> None:
    assert block_of(path) == place
