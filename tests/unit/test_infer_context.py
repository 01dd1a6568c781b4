"""Context parallelism that is inferred: what is cut, and what is refused and why."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.compose import ParallelConfig, parallelize
from core.config import UserError
from core.mesh import MeshConfig, build_mesh
from core.parallel.context import SequenceCut
from core.parallel.infer import infer_context, sample_of
from core.parallel.infer.places import Attention, Sequence, given
from core.parallel.infer.places import Block as LocalBlock
from core.placement.table import ModelPlan
from core.runtime import pretended
from tests.support.foreign import bert, bloom, gpt2, llama

DIM, HEADS = 24, 4


class Block(nn.Module):
    """With what a test changes."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.register_buffer("table", torch.ones(64, DIM))

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Any:
        q, k, v = self.qkv(self.norm(x + positions)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.mixed(x + self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    def mixed(self, x: Tensor) -> Any:
        return x


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(3, DIM), nn.Embedding(64, DIM)
        self.blocks, self.head = nn.ModuleList(block() for _ in range(2)), nn.Linear(DIM, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        positions = self.places(torch.arange(length, device=input_ids.device))[None]
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        return self.head(self.through(self.embed(input_ids), positions, mask))

    def through(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, positions, mask)
        return x


def places(model: nn.Module, mode: Any = "ulysses") -> dict[str, LocalBlock]:
    """The blocks' part of a plan."""
    plan = infer_context(model, 2, sample_of(model), mode)
    return {name: style.wrap.__self__ for name, style in plan.items() if name}


def test_what_goes_along_the_sequence_is_cut_and_masks_stay_whole() -> None:
    found = places(Model())
    assert [(place.first, place.last) for place in found.values()] == [(True, False), (False, True)]
    assert found["blocks.0"].held == {"0": 1, "1": 1, "2": "whole"}
    assert found["blocks.1"].held == {"0": "here", "1": 1, "2": "whole"}
    assert found["blocks.0"].attends == [Attention(HEADS, HEADS, DIM // HEADS, True)]


def test_masks_of_padding_and_angles_of_transformers_are_told_apart() -> None:
    held = places(llama())["model.layers.0"].held
    assert held["attention_mask"] == "whole"
    assert held["position_embeddings.0"] == held["position_embeddings.1"] == 1


@pytest.mark.parametrize(
    ("make", "mode", "zigzag"), [(gpt2, "ring", True), (gpt2, "ulysses", False), (bert, "ring", False)]
)
def test_pieces_of_both_ends_are_for_causal_rings(make: Callable[[], nn.Module], mode: str, zigzag: bool) -> None:
    (sequence,) = {id(place.sequence): place.sequence for place in places(make(), mode).values()}.values()
    assert sequence.zigzag == zigzag


class Averages(Block):
    def mixed(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Rolls(Block):
    def mixed(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 1)


class Shifts(Block):
    def mixed(self, x: Tensor) -> Tensor:
        return x + F.pad(x, (0, 0, 1, -1))


class TakesTheFirst(Block):
    def mixed(self, x: Tensor) -> Tensor:
        return x + x[:, :1]


class Halves(Block):
    def mixed(self, x: Tensor) -> Tensor:
        return x + x.unflatten(1, (2, -1)).flip(1).flatten(1, 2)


class Sums(Block):
    """Over the sequence, by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(24, 24)

    def mixed(self, x: Tensor) -> Tensor:
        return x + self.mix(x.transpose(1, 2)).transpose(1, 2)


class Convolves(Block):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(DIM, DIM, 3, padding=1)

    def mixed(self, x: Tensor) -> Tensor:
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)


class Numbers(Block):
    def mixed(self, x: Tensor) -> Tensor:
        return x * torch.arange(x.shape[1])[:, None]


class LooksUp(Block):
    def mixed(self, x: Tensor) -> Tensor:
        return x * self.table[: x.shape[1]]


class CountsPlaces(Block):
    def mixed(self, x: Tensor) -> Tensor:
        return x * math.log(x.shape[1])


class CountsInAConstant(Block):
    def mixed(self, x: Tensor) -> Tensor:
        return x / torch.tensor(x.shape[1])


class FillsWithTheCount(Block):
    def mixed(self, x: Tensor) -> Tensor:
        return x * torch.full((DIM,), x.shape[1])


class Draws(Block):
    def mixed(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class DropsFlat(Block):
    def mixed(self, x: Tensor) -> Tensor:
        return F.dropout(x.flatten(0, 1), 0.1, self.training).view_as(x)


class DropsWeights(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.1)


class Written(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v


class WrittenWithAMask(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1)).masked_fill(~mask, -1e9).softmax(-1) @ v


class MasksByItself(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        own = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, own)


class CutsTheMask(Block):
    """As long as the keys that it sees."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask[..., : k.shape[2]])


class SeesTheStart(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5])


class TwoSizes(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, torch.cat((v, v), -1), mask)[..., : v.shape[-1]]


class LooksAtValues(Block):
    def mixed(self, x: Tensor) -> Tensor:
        return x * 2 if bool((x > 0).any()) else x


class HoldsWhatLooksAtValues(Block):
    """As transformers' experts do that are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Looks()

    def mixed(self, x: Tensor) -> Tensor:
        return self.router(x)


class Looks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if bool((x > 0).any()) else x


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (Averages, r"blocks\.0 \(mean\) works along the sequence: mean works along it"),
        (Rolls, r"blocks\.0 \(roll\) works along the sequence: roll is not known to work along it"),
        (Shifts, r"blocks\.0 \(constant_pad_nd\) works along the sequence"),
        (TakesTheFirst, r"blocks\.0 \(slice\) leaves nothing of the sequence, or one place of it"),
        (Halves, r"blocks\.0 .* has a sequence twice, or a part of it"),
        (Sums, r"blocks\.0\.mix \(mm\) sums over the sequence"),
        (Convolves, r"blocks\.0\.convolution .* a convolution works along it"),
        (Numbers, r"blocks\.0 \(mul\) joins places with what all ranks have of the whole sequence"),
        (LooksUp, r"blocks\.0 \(mul\) joins places with what all ranks have of the whole sequence"),
        (CountsPlaces, r"mul is given \(2\.48.*\), and \(3\.17.*\) on the whole sequence"),
        (CountsInAConstant, r"lift_fresh is given \(12,\), and \(24,\) on the whole sequence"),
        (FillsWithTheCount, r"full is given \(12,\), and \(24,\) on the whole sequence"),
        (Draws, r"blocks\.0 \(rand_like\) draws from each rank's own generator"),
        (DropsFlat, r"blocks\.0 .* does not have its places as dim 1; set the dropout to 0"),
        (DropsWeights, "drops parts of its weights; set the dropout of attention to 0"),
        (
            Written,
            r"blocks\.0 \(bmm\) has a sequence twice, or a part of it \(is attention written out\?\); use mesh\.cp=1",
        ),
        (WrittenWithAMask, r"blocks\.0 is given an argument 2 that has a sequence twice.* elsewhere than to a mask"),
        (MasksByItself, r"ones makes \[12, 12\] and not \[24, 24\]"),
        (CutsTheMask, r"calls slice, where on the whole sequence blocks\.0 \(transpose\) is called"),
        (SeesTheStart, r"blocks\.0 \(slice\) has a sequence twice, or a part of it"),
        (TwoSizes, "has heads of two sizes, 6 and 12"),
        (LooksAtValues, r"no list of blocks .* scaled_dot_product_attention \(blocks\.0 looks at values\); use"),
        (HoldsWhatLooksAtValues, r"blocks\.0\.router looks at values"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_blocks_that_are_not_sure_are_refused_with_the_reason(block: Callable[[], nn.Module], why: str) -> None:
    model = Model(block)
    with pytest.raises(UserError, match=why):
        infer_context(model, 2, sample_of(model), "ulysses")


class Experts(nn.Module):
    """A stack of matrices, which waits for values."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, DIM, DIM))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for number in chosen.unique():
            token, choice = (chosen == number).nonzero(as_tuple=True)
            y = y.index_add(0, token, self.one(x)[token] @ self.stack[number] * weights[token, choice, None])
        return y

    def one(self, x: Tensor) -> Tensor:
        return x


class OverTokens(Experts):
    def one(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def routed(experts: Callable[[], nn.Module], reordered: bool = False) -> Callable[[], nn.Module]:
    class Routed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(DIM, 3), experts()

        def mixed(self, x: Tensor) -> Tensor:
            routed = x.transpose(0, 1) if reordered else x
            weights, chosen = self.router(routed).flatten(0, 1).softmax(-1).topk(2)
            return x + self.experts(x.flatten(0, 1), chosen, weights).view_as(x)

    return Routed


def test_experts_compute_each_place_by_itself() -> None:
    assert places(Model(routed(Experts))).keys() == {"blocks.0", "blocks.1"}
    for block, why in (
        (routed(OverTokens), r"blocks\.0\.experts looks at values"),
        (routed(Experts, reordered=True), r"blocks\.0\.experts \(experts\) is given tokens and .* different orders"),
    ):
        with pytest.raises(UserError, match=why):
            places(Model(block))


class AddsBetween(Model):
    def through(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        return self.blocks[1](2 * self.blocks[0](x, positions, mask), positions, mask)


class KeepsTheMiddle(Model):
    def through(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        middle = self.blocks[0](x, positions, mask)
        return self.blocks[1](middle, positions, mask) + middle


class CallsTwice(Model):
    def through(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        return super().through(super().through(x, positions, mask), positions, mask)


class Remembers(Model):
    def through(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, positions, mask=Memory(mask))
        return x


class Memory:
    def __init__(self, mask: Tensor) -> None:
        self.mask = mask


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (AddsBetween, "blocks.1 is given another tensor than blocks.0 returns"),
        (KeepsTheMiddle, r"the model \(add\) uses what a block computes"),
        (CallsTwice, "it has no list of blocks that are called once each"),
        (lambda: Remembers(TakesMemory), "a block is given a Memory as its argument mask"),
        (
            bloom,
            r"transformer\.h are not sure to do so: transformer\.h\.0 is given an argument attention_mask that .* "
            r"written out.*use mesh\.cp=1",
        ),
        (lambda: eager(gpt2), r'its attention is "eager": make it with attn_implementation="sdpa"'),
    ],
)
def test_models_that_are_not_sure_are_refused_with_the_reason(make: Callable[[], nn.Module], why: str) -> None:
    model = make()
    with pytest.raises(UserError, match=why):
        infer_context(model, 2, sample_of(model), "ring")


class TakesMemory(Block):
    def forward(self, x: Tensor, positions: Tensor, mask: Any) -> Tensor:
        return super().forward(x, positions, mask.mask)


def eager(make: Callable[[], Any]) -> Any:
    model = make()
    model.set_attn_implementation("eager")
    return model


# --- what is refused when it is called --------------------------------------------------------------------------------


class Line:
    """An axis that nothing is sent over."""

    def size(self) -> int:
        return 2

    def get_local_rank(self) -> int:
        return 0


def running(model: nn.Module, mode: Any = "ring") -> Any:
    """A model whose blocks have rank 0's places."""
    for name, style in infer_context(model, 2, sample_of(model), mode).items():
        style.wrap(model.get_submodule(name), Line())
    return model


@pytest.mark.parametrize(
    ("given_to_it", "why"),
    [
        (
            {"attention_mask": torch.ones(2, 6)[:, :6].tril(3)},
            "attention is given a mask .* use --mesh.cp-mode ulysses",
        ),
        ({"use_cache": True}, "use_cache=True with mesh.cp: .* leave it out, or use mesh.cp=1"),
        ({"output_hidden_states": True}, "output_hidden_states=True with mesh.cp"),
        ({"output_attentions": True}, "output_attentions=True with mesh.cp"),
        ({"input_ids": torch.zeros(2, 1, dtype=torch.int64)}, "a sequence of 1 tokens has none for some of cp=2 ranks"),
    ],
)
def test_what_a_call_asks_for_and_ranks_do_not_have_is_refused(given_to_it: dict[str, Any], why: str) -> None:
    ids = {"input_ids": torch.zeros(2, 6, dtype=torch.int64)}
    with pytest.raises(UserError, match=why):
        running(gpt2())(**ids | given_to_it)


def test_one_place_for_each_rank_is_no_step_of_generation() -> None:
    sequence = Sequence("ulysses", zigzag=False)
    with pytest.raises(UserError, match="a sequence of 2 tokens leaves one for each of cp=2 ranks; use a smaller cp"):
        sequence.begin(2, Line())
    sequence.begin(3, Line())
    assert sequence.cut == SequenceCut(3, 2, False)


class Varies(Model):
    """What its blocks are given after the plan was found."""

    def __init__(self) -> None:
        super().__init__()
        self.change: Callable[..., Any] = lambda positions, mask: (positions, mask)

    def through(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        return super().through(x, *self.change(positions, mask))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda positions, mask: (positions[:, :1], mask),
            r"argument 1 of shape \[1, 1, 24\] does not have the 6 places",
        ),
        (
            lambda positions, mask: (positions, mask[..., :4]),
            r"the mask of attention, of shape \[1, 1, 6, 4\], is not of",
        ),
        (
            lambda positions, mask: (positions, (mask,)),
            "argument 2.0, and none was given to it where its plan was found",
        ),
    ],
)
def test_arguments_of_blocks_that_are_not_as_foreseen_are_refused(change: Callable[..., Any], why: str) -> None:
    model = running(Varies(), "ulysses")
    model.change = change
    with pytest.raises(UserError, match=why):
        model(torch.zeros(2, 6, dtype=torch.int64))


def test_attention_that_is_not_as_foreseen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for attend, why in (
        (DropsWeights.attend, "attention drops 0.1 of its weights"),
        (
            lambda self, q, k, v, mask: F.scaled_dot_product_attention(q, k[:, :, :2], v[:, :, :2]),
            "is not that of the 3",
        ),
    ):
        model = running(Model(), "ulysses")
        monkeypatch.setattr(Block, "attend", attend)
        with pytest.raises(UserError, match=why):
            model(torch.zeros(2, 6, dtype=torch.int64))
        monkeypatch.undo()


def test_more_calls_of_attention_than_foreseen_are_refused() -> None:
    model = running(Model(), "ulysses")
    place = LocalBlock("blocks.0", Sequence("ulysses", False), {"0": 1, "1": 1, "2": "whole"}, [], DIM, True, False)
    block = place.wrap(Block(), Line())
    with pytest.raises(UserError, match=r"blocks\.0 calls attention more often than where its plan was found"):
        block(torch.zeros(2, 6, DIM), torch.zeros(1, 6, DIM), torch.ones(1, 1, 6, 6, dtype=torch.bool))
    del model


def test_arguments_are_changed_in_tuples_and_dicts() -> None:
    seen: list[str] = []

    def change(place: str, x: Tensor) -> Tensor:
        seen.append(place)
        return x + 1

    zero = torch.zeros(())
    args, kwargs = given((zero, None), {"both": (zero, [zero]), "options": {"scale": zero, "name": "x"}}, change)
    assert seen == ["0", "both.0", "both.1.0", "options.scale"]
    assert args == (1, None)
    assert kwargs == {"both": (1, [1]), "options": {"scale": 1, "name": "x"}}


# --- what is refused of the mesh --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "config", "plan", "why"),
    [
        ({"cp_mode": "mixed", "cp": 4, "cp_ulysses": 2}, {}, {}, "mesh.cp_mode=mixed takes a plan"),
        ({"cp": 2}, {"compile": True}, {}, "it does not go with compile"),
        ({"cp": 2, "tp": 2}, {}, {"tensor": {}}, "it does not go with a given plan of tensor parallelism"),
        ({"cp": 2, "pp": 2}, {}, {}, "it does not go with stages of a pipeline; use mesh.pp=1"),
        ({"cp": 2}, {}, {"kernels": {"embed": lambda module: module}}, "it does not go with kernels or formats"),
        ({"cp": 2}, {}, {"experts": {}}, "it does not go with a given plan of experts"),
        ({"cp": 8, "cp_mode": "ulysses"}, {}, {}, "4 heads have none for some of the 8 ranks"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    mesh: dict[str, Any], config: dict[str, Any], plan: dict[str, Any], why: str
) -> None:
    sizes = MeshConfig(**mesh)
    num_ranks = sizes.cp * sizes.tp * sizes.pp
    with pretended(num_ranks):
        built = build_mesh(sizes.resolve(num_ranks), "cpu")
        with pytest.raises(UserError, match=why):
            parallelize(Model(), built, ParallelConfig(**config), ModelPlan(**plan))
