"""`llm plan --model FOLDER --gpus N` of a model that is not our decoder's: how `core.auto.parallelize` would spread it.

The step is traced without memory; stages, layouts and recomputation are planned together (`core.auto.staged`) for the
whole batch at once and for microbatches; those plans are shown that none beats in time and memory.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from apps.llm.any_model import AnyModel
from apps.llm.plan_config import LLMPlanConfig
from apps.llm.search import MOST_SHOWN, Prices, asked_cluster, asked_prices, launcher_words
from core.auto.execute import draws
from core.auto.machines import Cluster
from core.auto.readable import folded
from core.auto.staged import StagedPlan, plan_stages
from core.config import UserError, in_words, option
from core.optim.spec import Part, spec_of
from core.precision import compute_dtype, master_dtype
from core.trace.graph import Graph
from core.trace.machine import Speed
from core.trace.record import trace_graph

READ = (
    *(
        "source",
        "gpus",
        "gpu",
        "batch",
        "data.global_batch",
        "data.sequence_length",
        "precision",
        "microbatch",
        "mesh.pp",
    ),
    *("memory", "memory_gb_s", "bandwidth_gb_s", "utilisation", "optim.name", "json", "tokens", "steps", "stop_after"),
    *("price", "power", "carbon"),
)
"""Options that such a plan reads."""
MICROBATCHES = (1, 8)
"""Numbers that are tried, where --microbatch says none; those that divide the batch."""
SOLVE_S = 5.0
UNKNOWN = (
    "messages beside computation: seconds add up",
    "memory inside of operators and on the way from one layout to another",
    "recomputation by segments: gradient_checkpointing_enable() computes every block again",
    "stages of what draws random numbers, such as dropout, which they refuse: set it to 0 in config.json",
)
DRAWS = "the model draws random numbers, such as dropout, and stages refuse it; set it to 0 in config.json"


def show_spread(config: LLMPlanConfig, given: set[str], model: AnyModel, console: Console) -> int:
    """Plan, and print the plans as a table or as JSON.

    given  dotted names of what was typed
    """
    if unread := sorted(name for name in given if name not in READ and not name.startswith("optim.")):
        raise UserError(
            f"{option(unread[0])} with a model that is spread as it is ({model.refused}): such a plan does not read "
            "it; leave it out"
        )
    cluster = asked_cluster(config, given)
    prices = asked_prices(config, cluster, given)
    length = config.data.sequence_length if "data.sequence_length" in given else None
    plans = front(plans_of(config, given, model, cluster, length))
    if config.json:
        print(json.dumps(_as_json(config, model, plans, cluster, prices, length), indent=1))
        return 0
    console.print(_table(config, model, plans, cluster, prices))
    console.print("\n".join(cluster.facts()))
    for number, plan in list(enumerate(plans, 1))[:MOST_SHOWN]:
        console.print(f"{number}: {command(cluster)}, with {call(plan)}", soft_wrap=True, markup=False, highlight=False)
    console.print("parameters of plan 1:\n" + "\n".join(folded(_layouts(plans[0]))), markup=False, highlight=False)
    console.print("not known:\n" + "\n".join(f"- {what}" for what in UNKNOWN), markup=False)
    return 0


def plans_of(
    config: LLMPlanConfig, given: set[str], model: AnyModel, cluster: Cluster, length: int | None
) -> list[StagedPlan]:
    """Raises UserError where none fits, or the device does not compute in the format."""
    dtype, batch = compute_dtype(config.precision), config.data.global_batch
    peak = cluster.gpu.peak_flops(dtype)
    if peak is None:
        raise UserError(f"gpu={config.gpu} does not compute in {config.precision}; give another --precision or --gpu")
    speed = Speed(peak * cluster.utilisation, cluster.bytes_per_s)
    counts = [m for m in MICROBATCHES if batch % m == 0]
    if config.microbatch is not None and "microbatch" in given:
        if batch % config.microbatch:
            raise UserError(f"microbatch={config.microbatch} of a batch of {batch} rows; give a divisor")
        counts = [batch // config.microbatch]
    stages = [config.mesh.pp] if "mesh.pp" in given else None
    for parameter in model.model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    state = _state(config, model)
    found: list[StagedPlan] = []
    refused: UserError | None = None
    for count in counts:
        graph = _traced(model, batch // count, length, config)
        if any(draws(node) for node in graph.nodes):
            if stages not in (None, [1]):
                raise UserError(f"mesh.pp={config.mesh.pp}: {DRAWS}")
            stages = [1]
        if stages == [1] and count > 1:
            continue
        try:
            found += plan_stages(
                graph, cluster, count, speed=speed, state=state, schedule="gpipe", stages=stages, time_limit_s=SOLVE_S
            )
        except UserError as error:
            refused = error
    if not found:
        raise refused or UserError(f"microbatch={config.microbatch}: one stage takes the batch at once; leave it out")
    return [plan for plan in found if len(plan.stages) > 1 or plan.microbatches == 1]


def _traced(model: AnyModel, rows: int, length: int | None, config: LLMPlanConfig) -> Graph:
    dtype = compute_dtype(config.precision)

    def wide(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    batch = {name: wide(value) for name, value in model.batch(rows, length).items()}
    return trace_graph(model.model, batch, train=True)


def _state(config: LLMPlanConfig, model: AnyModel) -> float:
    """Bytes that optimizer and masters keep by byte of a parameter."""
    wide, narrow = master_dtype(config.precision).itemsize, compute_dtype(config.precision).itemsize
    kept = total = 0
    for parameter in model.model.parameters():
        shape = tuple(parameter.shape)
        kept += spec_of(config.optim.name).state_bytes(config.optim, Part(shape, shape, wide))
        kept += wide * parameter.numel() if wide != narrow else 0
        total += narrow * parameter.numel()
    return kept / total


def front(plans: Sequence[StagedPlan]) -> list[StagedPlan]:
    """Those that none beats, the fastest first.  Raises UserError where there is none."""
    if not plans:
        raise UserError("no plan of one stage takes the batch at once; give a smaller --batch, or more --gpus")
    best = [plan for plan in plans if not any(other.beats(plan) for other in plans)]
    unique = {(plan.step_s, plan.memory_bytes): plan for plan in reversed(best)}
    return sorted(unique.values(), key=lambda plan: plan.step_s)


# --- what is printed --------------------------------------------------------------------------------------------------


def command(cluster: Cluster) -> str:
    """The line that starts a script of one's own on the ranks."""
    if cluster.machines == 1:
        return f"torchrun --nproc-per-node {cluster.ranks} train.py"
    return " ".join([*launcher_words(cluster)[:-2], "train.py"])


def call(plan: StagedPlan) -> str:
    """The line that spreads the model in it."""
    words = [f"mesh={plan.mesh}"]
    if len(plan.stages) > 1:
        words += [f"stages={tuple(len(stage.blocks) for stage in plan.stages)}", f"microbatches={plan.microbatches}"]
    line = f"core.auto.parallelize(model, inputs, {', '.join(words)})"
    if any(stage.again_s for stage in plan.stages):
        return f"model.gradient_checkpointing_enable(); {line}"
    return line


def _layouts(plan: StagedPlan) -> dict[str, str]:
    """Parameter -> how it lies on the mesh of its stage, axis by axis."""
    specs = plan.formulation.specs(plan.layouts.choice)
    return {name: specs[name][0].by_axis(len(plan.mesh)) for name in plan.parameters}


def _as_json(
    config: LLMPlanConfig,
    model: AnyModel,
    plans: Sequence[StagedPlan],
    cluster: Cluster,
    prices: Prices,
    length: int | None,
) -> dict[str, Any]:
    return {
        "model": model.name,
        "gpu": cluster.gpu.name,
        "gpus": cluster.ranks,
        "batch": config.data.global_batch,
        "sequence_length": length,
        "steps": prices.steps,
        "price_per_gpu_hour": prices.per_gpu_hour,
        "power_w": prices.watts,
        "carbon_g_per_kwh": prices.grams_per_kwh,
        "memory_limit_bytes": cluster.memory_bytes,
        "cluster": list(cluster.facts()),
        "plans": [
            {
                "step_time_s": plan.step_s,
                "memory_bytes": plan.memory_bytes,
                **prices.of(plan.step_s, cluster.ranks),
                "command": command(cluster),
                "call": call(plan),
                "options": {
                    "stages": [len(stage.blocks) for stage in plan.stages],
                    "mesh": list(plan.mesh),
                    "microbatches": plan.microbatches,
                    "schedule": plan.schedule,
                    "recompute": [[str(segment) for segment in stage.segments] for stage in plan.stages],
                },
                "layouts": _layouts(plan),
                "gap": plan.layouts.gap,
                "shares_s": _shares(plan),
            }
            for plan in plans
        ],
        "unknown": list(UNKNOWN),
    }


def _shares(plan: StagedPlan) -> dict[str, float]:
    """Of the step's seconds: those of the slowest stage, and what it waits for the others."""
    slowest = max(plan.stages, key=lambda stage: stage.forward_s + stage.backward_s)
    again = plan.microbatches * slowest.again_s
    working = plan.microbatches * (slowest.forward_s + slowest.backward_s) - again
    once = max(stage.once_s for stage in plan.stages)
    waiting = plan.step_s - working - again - once
    return {"computing and changing layouts": working, "recomputing": again, "gradients": once, "waiting": waiting}


def _table(
    config: LLMPlanConfig, model: AnyModel, plans: Sequence[StagedPlan], cluster: Cluster, prices: Prices
) -> Table:
    many = f"{len(plans)} plans that none beats in time and memory"
    table = Table(
        title=f"{model.name} on {cluster.ranks} x {cluster.gpu.name}, {config.data.global_batch} rows a step: {many}"
    )
    of = "step" if prices.steps == 1 else f"{prices.steps:,} steps"
    for column in ("", "step", "memory", f"GPU hours ({of})", "money", "kWh", "kg CO2"):
        table.add_column(column, justify="right")
    table.add_column("plan")
    for number, plan in enumerate(plans[:MOST_SHOWN], 1):
        costs = [f"{value:,.3g}" for value in prices.of(plan.step_s, cluster.ranks).values()]
        table.add_row(str(number), f"{plan.step_s:.3g} s", in_words(plan.memory_bytes), *costs, " ".join(_told(plan)))
    return table


def _told(plan: StagedPlan) -> Iterator[str]:
    by = "x".join(map(str, plan.mesh))
    yield f"{len(plan.stages)} stages of {by} ranks" if len(plan.stages) > 1 else f"{by} ranks"
    if len(plan.stages) > 1:
        yield f"blocks={'+'.join(str(len(stage.blocks)) for stage in plan.stages)} microbatches={plan.microbatches}"
    if any(stage.again_s for stage in plan.stages):
        yield "recompute=" + " ".join("+".join(map(str, stage.segments)) for stage in plan.stages)
    yield f"gap={plan.layouts.gap:.4%}"
