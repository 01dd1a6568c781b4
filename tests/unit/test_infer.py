"""Tensor parallelism that is inferred: what is cut, what is refused and why, and that the trial sees what is wrong."""

import copy
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.config import UserError
from core.mesh import MeshConfig, mesh_shape
from core.parallel.infer import axes, find, infer_plan, infer_stages, sample_of, trial
from core.parallel.infer.axes import Axis
from core.parallel.infer.roles import Roles
from core.placement.stages import Costs
from core.placement.style import Cut
from core.placement.table import placement
from tests.support.foreign import CASES, UNSEEN, gpt2, llama, t5

DIM, HEADS = 24, 4


class Attention(nn.Module):
    """With what a test changes."""

    def __init__(self, heads: int = HEADS, kv_heads: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads or heads, DIM // heads
        self.query = nn.Linear(DIM, DIM)
        self.key, self.value = (nn.Linear(DIM, self.kv_heads * self.size) for _ in range(2))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.projected(x))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        scores = q @ k.transpose(-2, -1) / self.size**0.5
        return self.out(self.mixed(scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        q = self.query(x).view(*x.shape[:2], self.heads, self.size)
        return q, *(f(x).view(*x.shape[:2], self.kv_heads, self.size) for f in (self.key, self.value))

    def mixed(self, o: Tensor) -> Tensor:
        return o


class Model(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.embed, self.norm, self.attention = nn.Embedding(3, DIM), nn.LayerNorm(DIM), attention

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.norm(x + self.attention(self.norm(x)))


def inferred(model: nn.Module, ranks: int = 2) -> find.Found:
    return infer_plan(model, ranks, sample_of(model))


def cut(model: nn.Module) -> set[str]:
    found = inferred(model)
    return {f"{name}.{leaf}" for name, style in found.plan.items() for leaf in style.cuts_of(model.get_submodule(name))}


def test_columns_rows_and_a_sum_of_gradients_for_three_projections() -> None:
    plan = inferred(Model(Attention())).plan
    projections = {f"attention.{name}" for name in ("query", "key", "value")}
    cuts = {name: {leaf: cut.dim for leaf, cut in style.cuts.items()} for name, style in plan.items() if style.cuts}
    assert cuts == {name: {"weight": 0, "bias": 0} for name in projections} | {"attention.out": {"weight": 1}}
    assert [m.operation for m in plan["attention"].messages.backward] == ["all_reduce"]
    assert all(not plan[name].messages.backward for name in projections)
    assert [m.operation for m in plan["attention.out"].messages.forward] == ["all_reduce"]


def test_one_head_of_keys_for_all_stays_whole_and_its_gradient_is_summed() -> None:
    model = Model(Attention(kv_heads=1))
    found = inferred(model)
    assert "attention.query.weight" in cut(model)
    assert "attention.key.weight" not in cut(model)
    assert {"attention.key.weight", "attention.value.weight"} <= found.left.keys()
    assert found.plan["attention.key"].messages.backward


class Fused(Attention):
    """Queries, keys and values in one matrix; how they lie there, a test says."""

    def __init__(self, kv_heads: int = HEADS, order: str = "one behind the other") -> None:
        super().__init__(kv_heads=kv_heads)
        self.order, self.qkv = order, nn.Linear(DIM, (HEADS + 2 * kv_heads) * self.size)
        del self.query, self.key, self.value

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        qkv, counts = self.qkv(x), (self.heads, self.kv_heads, self.kv_heads)
        if self.order == "stacked":
            return qkv.view(*x.shape[:2], 3, self.heads, self.size).unbind(2)
        if self.order == "head by head":
            return qkv.view(*x.shape[:2], self.heads, 3 * self.size).chunk(3, 3)
        return tuple(part.unflatten(2, (-1, self.size)) for part in qkv.split([n * self.size for n in counts], 2))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, (24, 24, 24)),
        ({"kv_heads": 2}, (24, 12, 12)),
        ({"order": "stacked"}, (24, 24, 24)),
        ({"order": "head by head"}, ()),
    ],
)
def test_matrices_in_one_are_cut_in_parts(options: dict[str, Any], parts: tuple[int, ...]) -> None:
    style = inferred(Model(Fused(**options))).plan["attention.qkv"]
    assert style.cuts == {"weight": Cut(0, parts=parts), "bias": Cut(0, parts=parts)}
    assert not style.partial


def test_one_head_of_keys_for_all_in_a_matrix_with_the_queries_is_refused() -> None:
    with pytest.raises(UserError, match="no axis of this model can be cut"):
        inferred(Model(Fused(kv_heads=1)))


IN_PARTS = {
    "transformer.h.1.attn.c_attn.weight": (1, (48, 48, 48)),
    "transformer.h.1.attn.c_attn.bias": (0, (48, 48, 48)),
    "model.layers.1.self_attn.qkv_proj.weight": (0, (48, 24, 24)),  # 8 heads of queries, 4 of keys, 4 of values
    "model.layers.1.mlp.gate_up_proj.weight": (0, (80, 80)),
}
"""Parameters of GPT-2 and Phi-3: dim, and lengths of what lies one behind the other along it."""


def test_each_rank_has_its_part_of_each_in_the_order_of_one_rank() -> None:
    seen = set()
    for make in (gpt2, UNSEEN["phi3"].make):
        model = make()
        plan = inferred(model, 4).plan
        for rank in range(4):
            table = placement(model, plan, mesh_shape(MeshConfig(tp=4).resolve(4), rank))
            for name in IN_PARTS.keys() & table.keys():
                dim, parts = IN_PARTS[name]
                starts = [sum(parts[:number]) + rank * length // 4 for number, length in enumerate(parts)]
                expected = tuple(range(at, at + length // 4) for at, length in zip(starts, parts, strict=True))
                assert table[name].layout.stretches()[dim] == expected, name
                assert not table[name].partial
                seen.add(name)
    assert seen == IN_PARTS.keys()


class MixesHeads(Attention):
    def mixed(self, o: Tensor) -> Tensor:
        return o - o.mean(1, keepdim=True)


class Norms(Attention):
    def mixed(self, o: Tensor) -> Tensor:
        return F.layer_norm(o.transpose(1, 2), (self.heads, self.size)).transpose(1, 2)


class Numbers(Attention):
    def mixed(self, o: Tensor) -> Tensor:
        """A rank has other heads than these."""
        return o * torch.arange(self.heads, dtype=o.dtype)[:, None, None]


class AddsInside(Attention):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return F.linear(y, self.out.weight)


class Looks(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool((x > 0).any()) else x


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (MixesHeads, "mean works along it"),
        (Norms, "it is normalised"),
        (Numbers, "meets it in a value that is made whole there"),
        (AddsInside, "two activations are multiplied along it"),
        (Looks, "looks at values"),
    ],
)
def test_what_is_not_sure_is_refused_with_the_reason(make: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(UserError, match=why):
        inferred(Model(make()))


def test_heads_that_do_not_divide_are_refused_by_the_module_s_name() -> None:
    with pytest.raises(
        UserError, match=r"attention\.\w+: its 4 parts .* do not divide over tp=3; use a tp that divides 4"
    ):
        inferred(Model(Attention()), 3)


def test_a_model_of_unknown_inputs_is_refused() -> None:
    class Strange(nn.Module):
        def forward(self, wishes: Tensor) -> Tensor:
            return wishes

    with pytest.raises(
        UserError, match="Strange takes wishes, of which nothing is known; say how the model's modules are cut"
    ):
        sample_of(Strange())


def test_the_model_stays_as_it_is() -> None:
    model = gpt2()
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    inferred(model)
    assert all(
        model.get_parameter(n) is p and torch.equal(p, v)
        for n, (p, v) in before.items()
        if n in dict(model.named_parameters())
    )
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes


def test_transformers_own_plan_cuts_alike() -> None:
    """colwise and rowwise of LlamaConfig.base_model_tp_plan; an embedding that it keeps whole we cut, too."""
    model = llama()
    theirs = {f"model.{pattern}".replace("*", "0"): how for pattern, how in model.config.base_model_tp_plan.items()}
    theirs = {name: {"colwise": 0, "rowwise": 1}[how] for name, how in theirs.items() if how in ("colwise", "rowwise")}
    ours = {n: s.cuts["weight"].dim for n, s in inferred(model).plan.items() if "weight" in s.cuts and ".0." in n}
    assert ours == {name: dim for name, dim in theirs.items() if ".0." in name}


@pytest.mark.parametrize(
    "break_it",
    [
        lambda role: role.cuts.update(weight=Cut(1 - role.cuts["weight"].dim)) if "weight" in role.cuts else None,
        lambda role: role.sizes.clear(),
        lambda role: role.narrow.clear(),
    ],
    ids=["columns for rows", "no sizes", "no part of an argument"],
)
def test_the_trial_sees_a_wrong_role(break_it) -> None:
    """Each of the roles of T5 and BLOOM in turn is broken; those that it changes anything of are seen.

    But for those of the second blocks of T5, which are as the first.
    """
    seen = 0
    for make in (t5, CASES["bloom"].make):
        mode, whole, inputs, roles = roles_of(make)
        with mode, find.quiet():
            for module, role in roles.roles.items():
                if re.search(r"\bblock\.1\b", module):
                    continue
                before = {name: copy.copy(value) for name, value in vars(role).items()}
                break_it(role)
                if vars(role) != before and role.leave not in ("gather", "lookup"):
                    seen += trial.tried(whole, inputs, roles, 2) is not None
                vars(role).update(before)
    assert seen >= 2


@cache
def roles_of(make: Callable[[], nn.Module]) -> tuple[Any, nn.Module, dict[str, Any], Roles]:
    """Those of a model on two ranks, with what they are tried on."""
    model, mode = make(), find.FakeTensorMode(allow_non_fake_inputs=True)
    sample = sample_of(model)
    with mode, find.quiet():
        whole = find.without_values(model)
        inputs = {name: find.without_value(value) for name, value in sample.items()}
        _, roles, _ = find.fitted(whole, 2, inputs)
        assert trial.tried(whole, inputs, roles, 2) is None
    return mode, whole, inputs, roles


class Stack(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(3, DIM), nn.LayerNorm(DIM)
        self.layers = nn.ModuleList(Attention() for _ in range(num_layers))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return self.norm(x)


def test_modules_of_one_class_are_tried_together(monkeypatch) -> None:
    """A model of more layers is not tried more often."""
    tried, counts = trial.tried, []

    def counted(*given: Any) -> Any:
        counts[-1] += 1
        return tried(*given)

    monkeypatch.setattr(trial, "tried", counted)
    for num_layers in (2, 4):
        counts.append(0)
        plan = inferred(Stack(num_layers)).plan
        assert {f"layers.{i}.out" for i in range(num_layers)} <= plan.keys()
    assert counts[0] == counts[1] > 1


def test_axes_are_taken_apart_and_made_one() -> None:
    whole, heads, size = Axis(12), Axis(3), Axis(4)
    axes.unify((whole,), (heads, size))
    assert list(whole.leaves()) == [heads.root, size.root]
    first, second = (axes.part_of((size,), start, 2, "") for start in (0, 2))
    axes.unify(first, second)
    assert len(set(whole.leaves())) == 2
    axes.freeze(first, "why")
    assert [leaf.frozen for leaf in whole.leaves()] == ["", "why", "why"]
    assert axes.grouped((whole,), (3, 4), "") == ((heads.root,), (size.root,))
    assert axes.grouped((whole,), (4, 3), "odd")[0][0].frozen == "odd"
    assert heads.root.frozen == "odd"


class Chain(nn.Module):
    """Three blocks, with what a test changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(3, DIM), nn.Parameter(torch.ones(DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = start = self.embed(input_ids)
        mask = torch.ones_like(start[..., 0])
        for number, block in enumerate(self.blocks):
            x = block(self.between(x, start, number), mask)
        return self.head(x)

    def between(self, x: Tensor, start: Tensor, number: int) -> Any:
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) * mask[..., None]


class AddsTheStart(Chain):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = start = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, torch.ones_like(input_ids))
        return self.head(x + start)


class Doubles(Chain):
    def between(self, x: Tensor, start: Tensor, number: int) -> Tensor:
        return 2 * x if number == 1 else x


class Scales(Chain):
    def between(self, x: Tensor, start: Tensor, number: int) -> Tensor:
        return x * self.scale if number == 0 else x


class SharesInside(Chain):
    def forward(self, input_ids: Tensor) -> Tensor:
        return F.linear(super().forward(input_ids), self.blocks[0].up.weight[:DIM, :3])


class ReturnsTheStart(Chain):
    def forward(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids), self.embed(input_ids)


class TakesTurns(Chain):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in reversed(self.blocks):
            x = block(x, x[..., 0])
        return self.head(x)


class CountsCalls(Chain):
    """Each stage makes it by itself, and another one."""

    def between(self, x: Tensor, start: Tensor, number: int) -> Tensor:
        made = [name for name, _ in self.blocks[0].named_parameters()]
        return x if made else x.clone().reshape(-1, DIM)


def test_a_chain_of_blocks_is_cut_by_its_costs() -> None:
    model = Chain()
    plan = infer_stages(model, sample_of(model))
    assert (plan.blocks, plan.before, plan.tuple_size) == ("blocks", ("embed",), 0)
    rows = sample_of(model)["input_ids"].numel()
    assert plan.costs == Costs((2.0 * rows * DIM * 2 * DIM,) * 3, 0.0, float(rows * DIM * 3))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (AddsTheStart, r"blocks: the model .add. uses what was made in front of the blocks"),
        (Doubles, "blocks: blocks.1 is given another tensor than blocks.0 returns"),
        (Scales, "blocks: the model .mul. uses a parameter by itself in front of the blocks"),
        (SharesInside, "blocks: blocks.0.up.weight is used behind, and belongs to another stage"),
        (ReturnsTheStart, "blocks: embed.weight is used behind, and belongs to another stage"),
        (TakesTurns, "it has no list of modules that are called once each, in their order"),
        (CountsCalls, "blocks: stage 1 of 3 cannot run by itself"),
        (t5, "decoder.block: .* uses what was made in front of the blocks"),
    ],
)
def test_blocks_that_are_no_stages_for_sure_are_refused_with_the_reason(
    make: Callable[[], nn.Module], why: str
) -> None:
    model = make()
    with pytest.raises(UserError, match=f"no list of blocks can be cut into stages for sure .{why}"):
        infer_stages(model, sample_of(model))
