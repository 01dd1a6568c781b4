"""A spread module in every mode that a module is used in: what it does then is what the untouched one does."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.auto import clip_grad_norm_, parallelize, plan_of, plans_of
from core.auto.costs import Link
from core.config import UserError
from core.layout import full_tensor
from core.trace.machine import Speed
from tests.parity.test_auto_call import TIGHT, pair, same, whole
from tests.support import foreign
from tests.support.spread import FREE, SLOW, mesh_of, tokens
from tests.support.zoo import in_fp64

OPTIONS: dict[str, Any] = {"links": [FREE], "speed": SLOW}


def learn(of: nn.Module, **inputs: Any) -> Tensor:
    of.zero_grad()
    loss = of(**inputs).loss
    loss.backward()
    return loss.detach()


def frozen_and_evaluated() -> None:
    """Parameters that learn change between calls; evaluation with and without a graph; batches of other values."""
    with in_fp64():
        alone, model = pair(foreign.gpt2, tokens(0))
        for frozen in ("transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight", "transformer.h.1.attn.c_attn.bias"):
            for of in (alone, model):
                of.get_parameter(frozen).requires_grad_(False)
            torch.testing.assert_close(learn(model, **tokens(1)), learn(alone, **tokens(1)), **TIGHT)
            same(model, alone)
        assert len(plans_of(model)) == 4
        for of in (alone, model):
            of.requires_grad_(True).eval()
        torch.testing.assert_close(learn(model, **tokens(2)), learn(alone, **tokens(2)), **TIGHT)
        same(model, alone)
        with torch.no_grad():
            made, expected = model(**tokens(3)), alone(**tokens(3))
        assert not made.loss.requires_grad
        torch.testing.assert_close(whole(made.logits), expected.logits, **TIGHT)
        with torch.inference_mode():
            torch.testing.assert_close(model(**tokens(4)).loss, alone(**tokens(4)).loss, **TIGHT)
        # A parameter that is frozen beforehand stays frozen, and is a DTensor as the others.
        before = copy.deepcopy(alone).train()
        before.transformer.wte.requires_grad_(False)
        spread = parallelize(copy.deepcopy(before), tokens(0), mesh=mesh_of((2,)), **OPTIONS)
        torch.testing.assert_close(learn(spread, **tokens(1)), learn(before, **tokens(1)), **TIGHT)
        same(spread, before)
        most = 0.01
        expected_norm = nn.utils.clip_grad_norm_(before.parameters(), most)
        torch.testing.assert_close(clip_grad_norm_(spread, most), expected_norm, **TIGHT)
        same(spread, before)
        # Another shape is planned when it comes.
        short = {key: tensor[:3, :4] for key, tensor in tokens(1).items()}
        torch.testing.assert_close(learn(spread, **short), learn(before, **short), **TIGHT)
        same(spread, before)
        assert len(plans_of(spread)) == 2


def computed_again() -> None:
    """Transformers' own checkpointing: less is kept, and the gradients are those of one rank."""
    with in_fp64():
        peaks = []
        for kwargs in (None, {"use_reentrant": False}):
            torch.manual_seed(0)
            alone: Any = foreign.llama().double().train()
            if kwargs is not None:
                alone.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
            model = copy.deepcopy(alone)
            given = tokens(0) | {"use_cache": False}
            parallelize(model, given, mesh=mesh_of((2,)), state=0.0, **OPTIONS)
            torch.testing.assert_close(learn(model, **given), learn(alone, **given), **TIGHT)
            same(model, alone)
            again = [node for node in plan_of(model).graph.nodes if node.recomputed]
            assert bool(again) == (kwargs is not None)
            peaks.append(sum(n.bytes_written for n in plan_of(model).graph.nodes if n.kept))
        assert peaks[1] < peaks[0]
        torch.manual_seed(0)
        dropping: Any = foreign.DROPPING["gpt2 with dropout"].make().double().train()
        dropping.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with pytest.raises(UserError, match="draws random numbers in the backward"):
            parallelize(dropping, tokens(0) | {"use_cache": False}, mesh=mesh_of((2,)), **OPTIONS)


def cast() -> None:
    """Autocast is traced with the call: products in bf16, masters in fp32, one rank's numbers to bf16's rounding."""
    torch.manual_seed(0)
    alone = foreign.gpt2().train()
    model = copy.deepcopy(alone)
    with torch.autocast("cpu", torch.bfloat16):
        parallelize(model, tokens(0), mesh=mesh_of((2,)), **OPTIONS)
        ours, theirs = learn(model, **tokens(1)), learn(alone, **tokens(1))
    products = [node for node in plan_of(model).graph.nodes if node.op._schema.name in ("aten::mm", "aten::addmm")]
    assert products
    assert all(value.dtype == torch.bfloat16 for node in products for value in node.outputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=0)
    for (name, mine), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        assert expected.grad is not None
        assert mine.dtype == mine.grad.dtype == torch.float32
        apart = (full_tensor(mine.grad) - expected.grad).norm()
        assert apart <= 0.02 * max(expected.grad.norm(), 1e-3 * expected.numel() ** 0.5), name
    # Without autocast the same module is planned once more, in fp32.
    torch.testing.assert_close(learn(model, **tokens(1)), learn(alone, **tokens(1)), rtol=1e-5, atol=1e-6)
    assert len(plans_of(model)) == 2


def dropped() -> None:
    """Dropout draws what one rank draws, whatever ranks have drawn alone; in evaluation it draws nothing."""
    with in_fp64():
        alone, model = pair(foreign.DROPPING["gpt2 with dropout"].make, tokens(0))
        losses = []
        for of in (alone, model):
            torch.manual_seed(3 if of is alone or torch.distributed.get_rank() == 0 else 4)
            losses += [learn(of, **tokens(1)), learn(of, **tokens(2))]
        torch.testing.assert_close(losses[2:], losses[:2], **TIGHT)
        same(model, alone)
        drawn = torch.get_rng_state()
        torch.testing.assert_close(learn(model.eval(), **tokens(1)), learn(alone.eval(), **tokens(1)), **TIGHT)
        assert torch.equal(torch.get_rng_state(), drawn)


def test_frozen_and_evaluated(ranks) -> None:
    ranks(2).run(frozen_and_evaluated)


def test_checkpointed(ranks) -> None:
    ranks(2).run(computed_again)


def test_cast(ranks) -> None:
    ranks(2).run(cast)


def test_dropped(ranks) -> None:
    ranks(2).run(dropped)


def badly_priced() -> None:
    nan = float("nan")
    linear, given = nn.Linear(6, 6), {"input": torch.ones(4, 6)}
    with pytest.raises(UserError, match="latency_s=nan of a link"):
        parallelize(linear, given, links=[Link(nan, 1e9)])
    with pytest.raises(UserError, match="bytes_per_s=nan of a link"):
        parallelize(linear, given, links=[Link(0.0, nan)])
    with pytest.raises(UserError, match="flops_per_s=nan of a device"):
        parallelize(linear, given, speed=Speed(nan, 1e9))
    with pytest.raises(UserError, match="state=nan"):
        parallelize(linear, given, state=nan, mesh=mesh_of((2,)))
    with pytest.raises(UserError, match="budget=nan: that is no size"):
        parallelize(linear, given, budget=nan)
    with pytest.raises(UserError, match=r"mesh=\(2, 2\): 4 ranks, and there are 2; .* prime"):
        parallelize(linear, given, mesh=(2, 2))
    with pytest.raises(UserError, match=r"mesh=\(0,\): give the ranks"):
        parallelize(linear, given, mesh=(0,))
    with pytest.raises(UserError, match=r"input=\{'ids': …\} names nothing in the step; there are input"):
        parallelize(linear, given, input={"ids": "S0"}, mesh=(2,))
    with pytest.raises(UserError, match="does not run on these inputs"):
        parallelize(linear, {"images": torch.ones(2)}, mesh=(2,))
    model = parallelize(linear, given, mesh=(2,), **OPTIONS)
    assert model(given["input"]).shape == (4, 6)


def test_bad_input_is_a_line(ranks) -> None:
    ranks(2).run(badly_priced)
