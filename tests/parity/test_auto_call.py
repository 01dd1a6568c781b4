"""What a spread module takes and returns, keeps and refuses: beside the same module untouched, on two ranks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from core.auto import parallelize, plan_of, plans_of
from core.config import UserError
from core.layout import full_tensor, is_dtensor
from tests.support import foreign
from tests.support.spread import CASES, FREE, SLOW, mesh_of, tokens
from tests.support.zoo import in_fp64

TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def pair(make: Any, inputs: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A module and the same one spread, in fp64."""
    torch.manual_seed(0)
    alone = make().double()
    model = copy.deepcopy(alone)
    options = {"mesh": mesh_of((2,)), "links": [FREE], "speed": SLOW} | options
    assert parallelize(model, inputs, **options) is model
    return alone, model


def whole(tensor: Tensor) -> Tensor:
    return full_tensor(tensor).detach() if is_dtensor(tensor) else tensor.detach()


def same(model: nn.Module, alone: nn.Module) -> None:
    """Gradients are equal, or missing on both."""
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(whole(ours.grad), theirs.grad, **TIGHT, msg=lambda said, n=name: f"{n}: {said}")


class Several(nn.Module):
    """Two results, nested; an input that is written to; a view that is written to before its base is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(6, 8), nn.Linear(6, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> dict[str, Any]:
        shifted = x.new_zeros(x.shape)
        shifted[:, 1:] = x[:, :-1]
        if mask is not None:
            x = x * mask
        return {"both": (self.first(x) * scale, self.second(shifted)), "count": 3, "mask": mask}


def calls() -> None:
    x = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone, model = pair(Several, {"x": x, "scale": 2.0})
    assert plan_of(model).is_cut()
    names = [name for name, _ in alone.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == list(model.state_dict()) == names
    # One of two results: what only the other needs has no gradient.
    for of in (alone, model):
        made = of(x, 2.0)
        assert made["count"] == 3
        assert made["mask"] is None
        assert type(made["both"]) is tuple
        (made["both"][0].square().sum() / 3).backward()
    same(model, alone)
    # Once more, so that gradients add up, of both, with an input of another kind, and of its own gradient.
    given = [x.clone().requires_grad_() for _ in range(2)]
    for of, mine in zip((alone, model), given, strict=True):
        made = of(mine, mask=(x > 0).double())
        sum(part.sin().sum() for part in made["both"]).backward()
    same(model, alone)
    torch.testing.assert_close(given[1].grad, given[0].grad, **TIGHT)
    # DTensors in the place of whole tensors; another number of rows.
    cut = distribute_tensor(x[:4], mesh_of((2,)), [Shard(0)])
    torch.testing.assert_close(model(cut)["both"][1], alone(x[:4])["both"][1], **TIGHT)
    with torch.no_grad():
        torch.testing.assert_close(whole(model.eval()(x)["both"][0]), alone(x)["both"][0].detach(), **TIGHT)
    assert len(plans_of(model)) == 4
    loss, spread = (lambda made: made["both"][0].square().mean()), copy.deepcopy(alone).train()
    for of in (alone, spread):
        of.zero_grad()
    parallelize(spread, (x,), mesh=mesh_of((2,)), links=[FREE], speed=SLOW, loss=loss, budget="1MiB")
    loss(alone.train()(x)).backward()
    spread(x).backward()
    same(spread, alone)
    made = model(x)["both"][0].sum()
    made.backward(retain_graph=True)
    with pytest.raises(UserError, match="runs once"):
        made.backward()
    made = model(x)["both"][0]
    with torch.no_grad():
        made.mul_(2)
    with pytest.raises(UserError, match="written to before its backward"):
        made.sum().backward()


def test_calls(ranks) -> None:
    ranks(2).run(calls)


def constrained() -> None:
    constraints: dict[str, Any] = {
        "input": {"input_ids": "S0R", "labels": "S(0)"},
        "output": {"logits": "RRS0"},
        "node": {
            "transformer.h.*.mlp.c_fc.weight": "RS0",
            "transformer.h.*.mlp.c_fc": "RRS0",
            "*.c_proj.weight": "S0R",
        },
    }
    with in_fp64():
        alone, model = pair(foreign.gpt2, tokens(0), **constraints)
        made, expected = model(**tokens(1)), alone(**tokens(1))
        made.loss.backward()
        expected.loss.backward()
    assert type(made) is type(expected)
    assert isinstance(made.logits, DTensor)
    assert made.logits.placements == (Shard(2),)
    torch.testing.assert_close(whole(made.logits), expected.logits.detach(), **TIGHT)
    cached, one = (of.past_key_values.layers[1].keys for of in (made, expected))
    torch.testing.assert_close(whole(cached), one.detach(), **TIGHT)
    same(model, alone)
    plan = plan_of(model)
    for name, parameter in model.named_parameters():
        if name.endswith("c_fc.weight"):
            assert parameter.placements == (Shard(1),)
        if name.endswith("c_proj.weight"):
            assert parameter.placements == (Shard(0),)
    assert model.lm_head.weight is model.transformer.wte.weight
    text = str(plan)
    assert "transformer.h.*.mlp.c_fc.weight" in text
    explained = plan.explain("addmm_1")
    assert "forward of transformer.h.0.attn.c_attn" in explained
    assert plan.compare(plan).count("\n") == 2
    with pytest.raises(UserError, match="nothing in the step is called addmm_99"):
        plan.explain("addmm_99")
    with in_fp64():
        _, free = pair(foreign.gpt2, tokens(0))
    assert "instead" in plan.compare(plan_of(free))


def test_constraints_and_text(ranks) -> None:
    ranks(2).run(constrained)


def saved(folder: Path) -> None:
    """Under the original names, into a module that nothing spreads, and back into one that is spread otherwise."""
    alone, model = pair(CASES["resnet"].make, CASES["resnet"].inputs(0))
    CASES["resnet"].loss(model(**CASES["resnet"].inputs(0))).backward()
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    plain = {"model": alone.state_dict()}
    dcp.load(plain, checkpoint_id=folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(whole(tensor), plain["model"][name]), name
    _, other = pair(CASES["resnet"].make, CASES["resnet"].inputs(0), node={"blocks.*.first.weight": "RRRR"})
    other.load_state_dict(plain["model"])
    for name, tensor in other.state_dict().items():
        assert torch.equal(whole(tensor), plain["model"][name]), name


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        return self.up(x) if x.sum() > 0 else x


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.9)
        return self.up(x)


def refused(rank_differs: bool) -> None:
    x, options = torch.ones(4, 6), {"mesh": mesh_of((2,)), "links": [FREE], "speed": SLOW}
    with pytest.raises(UserError, match=r"test_auto_call\.py:\d+ \(return self\.up\(x\) if x\.sum\(\) > 0 else x\)"):
        parallelize(Looks(), {"x": x}, **options)
    with pytest.raises(UserError, match=r"writes to the parameter up\.weight"):
        parallelize(Writes(), {"x": x}, **options)
    with pytest.raises(UserError, match="cache: a plan's inputs are tensors"):
        parallelize(Looks(), {"x": x, "cache": object()}, **options)
    linear = nn.Linear(6, 6)
    with pytest.raises(UserError, match=r"node=\{'upp': …\} names nothing"):
        parallelize(linear, {"input": x}, node={"upp": "S0R"}, **options)
    with pytest.raises(UserError, match="axis 0 stands twice"):
        parallelize(linear, {"input": x}, node={"addmm_1": "S0S0"}, **options)
    with pytest.raises(UserError, match="no plan fits"):
        parallelize(linear, {"input": x}, budget=8, **options)
    if rank_differs:
        with pytest.raises(UserError, match="input has other values on other ranks"):
            parallelize(linear, {"input": x + torch.distributed.get_rank()}, **options)
    model = parallelize(linear, {"input": x}, **options)
    with pytest.raises(UserError, match="is parallelized already"):
        parallelize(model, {"input": x}, **options)
    with pytest.raises(UserError, match="is not copied"):
        copy.deepcopy(model)
    model.weight = nn.Parameter(torch.ones(6, 6))
    with pytest.raises(UserError, match="weight lies no longer as it is planned"):
        model(x)
    with pytest.raises(UserError, match="Linear has no plan"):
        plan_of(nn.Linear(2, 2))


def test_checkpoints_and_refusals(ranks, tmp_path: Path) -> None:
    ranks(2).run(saved, tmp_path / "checkpoint")
    ranks(2).run(refused, True)
