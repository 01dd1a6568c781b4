"""`fold train --recompute.mode budget`: the gradients of no recomputation to the bit, within the budget, as planned."""

import copy
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.config import ModelConfig, MultimerConfig
from apps.fold.train import main as train
from apps.fold.training.config import FoldTrainConfig, plan_of, resolved_mesh
from apps.fold.training.initialise import initialise
from apps.fold.training.plan import _loss, _network, chosen, recipes
from core.auto.checkpointing import Checkpointing
from core.config import UserError
from core.estimate.chain import estimate_chain
from core.mesh import MeshConfig
from core.parallel.plan import block_lists, blocks_of
from core.parallel.recompute import RecomputeConfig, apply_recompute
from core.runtime import start
from core.trace.chain import Chain
from core.trace.machine import Bandwidth, Speed
from core.trace.segments import Lean, Segments, runs_of
from core.train import segments
from core.train.segments import described
from tests.support.accounted import accounted_step
from tests.support.fold import (
    dropping,
    one_block,
    random_features,
    randomise,
    small_model,
    small_multimer,
    small_template_model,
)

SPEED, LINK = Speed(1e12, 1e11), Bandwidth(1e10, 1e10, 1e10, 1e10)
ALONE: Segments = ((1,),)


def templates_twice(num_blocks: int = 1) -> ModelConfig:
    config = one_block(templates=True)
    evoformer = replace(config.evoformer, num_blocks=num_blocks)
    config = replace(config, evoformer=evoformer, structure=replace(config.structure, num_layers=2))
    return replace(config, num_recycles=0, max_msa=5, max_extra_msa=4, max_templates=2)


def counted(model: nn.Module) -> Counter[int]:
    runs = Counter[int]()
    for index, block in enumerate(blocks_of(model)):

        def forward(*args: Any, own: Callable[..., Any] = block.forward, index: int = index) -> Any:
            runs[index] += 1
            return own(*args)

        block.forward = forward
    return runs


def test_gradients_are_those_of_no_recomputation_to_the_bit() -> None:
    """With dropout, two templates, and an iteration without gradients, which runs every block once."""
    model = randomise(AlphaFold(dropping(templates_twice(2)))).train()
    features = random_features(7, rows=5, extra=4, templates=2)
    lists = [len(blocks) for blocks in block_lists(model)]
    ahead, behind = lists[0], sum(lists[3:])
    assert lists[:3] == [1, 1, 2]

    def step(segments: Segments | None) -> tuple[list[Tensor | None], Counter[int]]:
        network = copy.deepcopy(model)
        runs = counted(network)
        if segments is not None:
            apply_recompute(network, RecomputeConfig("budget", budget="1GiB"), segments=segments)
        torch.manual_seed(3)
        found = network([features, features])
        logits = [x for x in vars(found.logits).values() if x is not None]
        torch.stack([(x**2).sum() for x in (found.positions_BN373, *logits)]).sum().backward()
        return [p.grad for p in network.parameters()], runs

    expected, _ = step(None)
    for own in (((2,), 1), ((1,), Lean(1, "products"), (1,)), ((((1,), 1), 1),)):
        grads, runs = step((*ALONE * ahead, *own, *ALONE * behind))
        assert [runs[ahead + k] for k in range(3)] == [1 + n for n in runs_of(own)]
        assert runs[0] == 2 * 3  # of each of two templates: without gradients, forward, again
        for grad, other in zip(grads, expected, strict=True):
            if grad is None or other is None:
                assert grad is other
            else:
                assert torch.equal(grad, other)


def planned(model: ModelConfig, budget: str, **options: Any) -> tuple[FoldTrainConfig, Checkpointing]:
    recipe = recipes()["debug_complexes" if isinstance(model, MultimerConfig) else "debug"]()
    data = replace(recipe.data, crop=8, global_batch=2)
    config = replace(recipe, data=data, recompute=RecomputeConfig("budget", budget=budget), **options)
    return config, chosen(config, resolved_mesh(config), model, SPEED, "cpu", LINK)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (templates_twice, {}),
        pytest.param(small_template_model, {"microbatch": 1}, marks=pytest.mark.soak),
        pytest.param(small_model, {"zero": 2, "microbatch": 1}, marks=pytest.mark.soak),
        pytest.param(small_model, {"zero": 3, "average": None}, marks=pytest.mark.soak),
        pytest.param(small_multimer, {"microbatch": 1}, marks=pytest.mark.soak),
        pytest.param(small_multimer, {"zero": 1}, marks=pytest.mark.soak),
    ],
)
def test_a_step_takes_what_was_planned(monkeypatch, make: Callable[[], ModelConfig], options: dict[str, Any]) -> None:
    """And a budget that is too small is refused with the least, which is enough."""
    model, chains = make(), list[Chain]()

    def traced_once(*given: Any, **options: Any) -> Chain:
        if not chains:
            chains.append(estimate_chain(*given, **options))
        return chains[0]

    monkeypatch.setattr(segments, "estimate_chain", traced_once)
    with pytest.raises(UserError, match=r"recompute\.budget=1KiB: a step takes at least .* \((\d+) bytes\)") as refused:
        planned(model, "1KiB", **options)
    (least,) = re.findall(r"\((\d+) bytes\)", str(refused.value))
    budgets = [int(times * int(least)) for times in (1.0, 1.3)]
    plans = [planned(model, str(budget), **options) for budget in budgets]
    with start("cpu") as runtime:
        for budget, (config, found) in zip(budgets, plans, strict=True):
            assert found.peak_bytes <= budget
            sizes = config.microbatch_rows(config.data.global_batch)
            mesh, most = runtime.mesh(MeshConfig(), config.zero), min(2, model.num_recycles + 1)
            loss = _loss(config, model, max(sizes), most)
            network, spread = _network(config, model), plan_of(config, found.segments)
            measured, _ = accounted_step(network, loss, mesh, config, len(sizes), spread, lambda m: initialise(m, 0))
            if config.average is not None:
                measured += sum(p.nbytes for p in _network(config, model).parameters())
            assert measured == pytest.approx(found.peak_bytes, rel=0.05)
            assert "which a forward calls several times, run again in each call" in described(found)
    assert plans[0][1].step.again_s > plans[1][1].step.again_s


@pytest.mark.soak
@pytest.mark.parametrize(
    ("recipe", "elsewhere"), [("debug", ()), ("debug_complexes", ()), ("debug", ("--recompute.host", "1GiB"))]
)
def test_a_run_keeps_to_its_budget_and_its_plan_says_so(
    tmp_path: Path, capsys, recipe: str, elsewhere: tuple[str, ...]
) -> None:
    """With the losses of no recomputation; the rows of chains without alignments, crops shorter than each."""
    words = ["--recipe", recipe, "--max-msa", "1", "--max-extra-msa", "1", "--data.crop", "16", "--device", "cpu"]
    words += ["--data.validation", "None", "--steps", "2", "--num-recycles", "1", "--data.global-batch", "1"]
    words += ["--optim.schedule.warmup-steps", "0"]

    def run(*more: str) -> tuple[dict[str, Any], list[float]]:
        out = tmp_path / str(len(more))
        assert train([*words, "--out", str(out), *more]) == 0
        lines = (out / "metrics.jsonl").read_text().splitlines()
        summary = json.loads((out / "summary.json").read_text())
        return summary, [json.loads(line)["loss"] for line in lines]

    plain, losses = run()
    budget = int(0.7 * plain["device_peak_bytes"])
    given = ("--recompute.mode", "budget", "--recompute.budget", str(budget), *elsewhere)
    capsys.readouterr()
    kept, same = run(*given)
    (said,) = re.findall(r"at most ([\d.]+) MiB in a step: .*", capsys.readouterr().out)
    assert same == losses
    assert kept["device_peak_bytes"] == pytest.approx(float(said) * 2**20, rel=0.05)
    assert train([*words, *given, "--plan"]) == 0
    (planned,) = re.findall(r"at most ([\d.]+) MiB in a step: .*", capsys.readouterr().out)
    assert float(planned) * 2**20 <= 1.01 * budget  # of three digits; what is fastest depends on how fast a machine is
