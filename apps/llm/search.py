"""`llm plan --gpus N`: the plans of a run on N GPUs that no other beats in time and memory, each with its command.

What of the plan is typed is held, such as --mesh.tp 8 or --zero 1; the search finds the rest. Other options of the run
are those of its recipe, and stand in the commands where they are typed.
"""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from apps.llm.check import as_json, check_run, show_check
from apps.llm.config import FINETUNE, PretrainConfig, check_combination, local_shape
from apps.llm.links import own_penalty
from apps.llm.plan_config import LLMPlanConfig
from apps.llm.recipes import RECIPES
from apps.llm.residency import estimate_residency
from apps.llm.schedules import AS_GOOD, as_good, penalty
from core.auto.check import Line
from core.auto.draw import draw_plans
from core.auto.machines import Cluster, cluster_of, gpu_named
from core.auto.step_time import UNKNOWN, StepClock, StepTime
from core.auto.strategies import ALLOWED, SCHEDULED, Drive, Found, Job, Plan, nearest, options_of, search
from core.config import UserError, in_words, option, option_names, parse, size_in_bytes, time_in_words
from core.estimate.memory import estimate_memory
from core.estimate.residency import GeminiEstimate
from core.estimate.shape import RunShape, decoder_shape
from core.gemini.direct import drive_speeds
from core.gemini.tier import parse_bytes
from core.optim.spec import spec_of
from core.parallel.pipeline.schedule import SCHEDULES, PipelineConfig, ScheduleName
from core.precision import compute_dtype
from core.trace.machine import Speed

MOST_SHOWN = 16
SEARCHED = (*options_of(RunShape()), "mesh.dp_shard")
"""Options of a run that are sought, unless they are typed."""


@dataclass(frozen=True)
class Prices:
    """What a plan takes beside time: of a GPU and hour, of a GPU in watts, of a kWh in grams of CO2."""

    per_gpu_hour: float
    watts: float
    grams_per_kwh: float
    steps: int

    def of(self, step_s: float, gpus: int) -> dict[str, float]:
        """Of all the steps, each of `step_s` seconds."""
        gpu_hours = self.steps * step_s * gpus / 3600
        energy = gpu_hours * self.watts / 1000
        return {
            "gpu_hours": gpu_hours,
            "money": gpu_hours * self.per_gpu_hour,
            "energy_kwh": energy,
            "co2_kg": energy * self.grams_per_kwh / 1000,
        }


def show_plans(config: LLMPlanConfig, given: set[str], recipe: str, console: Console) -> int:
    """Search, and print the plans as a table or as JSON.  Returns the exit code: 1 where a check fails.

    given   dotted names of what was typed
    recipe  that the run's options are of
    """
    cluster = asked_cluster(config, given)
    if config.schedules and "pipeline.schedule" in given:
        raise UserError("--schedules and --pipeline.schedule both say what is tried; give one of them")
    if config.local.every and config.mesh.dp_replicate is None:
        raise UserError(
            f"local.every={config.local.every} with --gpus and no mesh.dp_replicate: that is the number of workers, on "
            "which depends what is learned, so it is not searched; give --mesh.dp-replicate 2"
        )
    job = job_of(config, {name: _value(config, name) for name in SEARCHED if name in given}, config.schedules)
    drive = None
    if config.gemini.disk is not None:
        cluster, drive = asked_drive(config, given, recipe, cluster)
    found = search(job, cluster, drive)
    prices = asked_prices(config, cluster, given)
    commands = [command_of(config, plan, given, recipe, cluster) for plan in found.plans]
    if config.draw is not None:
        draw_plans(config.draw, decoder_shape(config.model), found.plans, cluster)
    checked = _checked(config, found, given, recipe) if config.check else None
    if config.json:
        said = _as_json(config, found, cluster, prices, commands) | {
            "old_weights": old_weights(config, job, found, cluster),
            "messages": messages(config, found),
        }
        if checked is not None:
            said |= {"checked": {"plan": checked[0], "counts": as_json(checked[2])}}
        print(json.dumps(said, indent=1))
        return int(checked is not None and not all(line.agrees for lines in checked[2].values() for line in lines))
    console.print(_table(config, found, cluster, prices, recipe))
    console.print("\n".join(cluster.facts()))
    console.print(_shares(found.plans[0]))
    for line in (*old_weights(config, job, found, cluster), *messages(config, found)):
        console.print(line)
    for number, (command, plan) in list(enumerate(zip(commands, found.plans, strict=True), 1))[:MOST_SHOWN]:
        console.print(f"{number}: {command}", soft_wrap=True, markup=False, highlight=False)
        if plan.residency is not None:
            console.print(f"   {plan.residency.plan.describe()}", soft_wrap=True, markup=False, highlight=False)
    if config.draw is not None:
        console.print(f"the plans, and a step of the first, are drawn in {config.draw}")
    console.print("not known:\n" + "\n".join(f"- {what}" for what in UNKNOWN), markup=False)
    if checked is None:
        return 0
    number, run, counted = checked
    console.print(f"plan {number}, of those without a budget the first, held against a rank that runs it:")
    return show_check(counted, check_combination(run), console)


def _checked(
    config: LLMPlanConfig, found: Found, given: set[str], recipe: str
) -> tuple[int, PretrainConfig, dict[int, list[Line]]]:
    """(its number, its configuration, what it is held to) of the first plan whose bytes are closed forms.

    Raises UserError where all plans have a budget.
    """
    for number, plan in enumerate(found.plans, 1):
        if plan.budget_bytes is None:
            run = config_of(config, plan, given, recipe)
            return number, run, check_run(run)
    raise UserError("--check and every plan is Gemini's, which traces its step itself; add --gemini.budget None")


def config_of(config: LLMPlanConfig, plan: Plan, given: set[str], recipe: str) -> PretrainConfig:
    """The configuration that a plan's command starts, on all of its ranks."""
    _, *words = run_words(config, plan, given, recipe)
    run = plan.run
    ranks = ["--nproc", str(run.num_data_ranks * run.cp * run.tp * run.pp)]
    if config.source is None:
        return parse(RECIPES, [*words, *ranks], "megalith llm pretrain", recipe)
    found = parse({"default": lambda: FINETUNE}, [*words, *ranks], "megalith llm finetune", "default")
    return replace(found, model=config.model)


def nearest_plan(config: PretrainConfig, run: RunShape, device_bytes: int, host_bytes: int) -> str:
    """What to do, in a line, where a run does not fit: the options of that on as many ranks which differs in fewest."""
    ranks = run.num_data_ranks * run.cp * run.tp * run.pp
    # Which device it is matters for time alone.
    cluster = replace(cluster_of(gpu_named("a100-40gb"), ranks, memory_bytes=device_bytes), host_bytes=host_bytes)
    changed = nearest(job_of(config, {"precision": config.precision}), cluster, run)
    if changed is None:
        return "nor do several on as many ranks, or with model data on their hosts; take more ranks, or a smaller model"
    return (
        f"the nearest plan that fits is {shlex.join(word for name in changed for word in _words(name, changed[name]))}"
    )


def job_of(config: PretrainConfig, held: Mapping[str, Any], schedules: tuple[ScheduleName, ...] = ()) -> Job:
    """held: options that are given, by their dotted names; schedules: see `Job`."""
    held = dict(held)
    if held.get("gemini.budget") is not None:
        held["gemini.budget"] = parse_bytes(held["gemini.budget"])
    batches = tuple(rows for _, rows in config.data.batch_size.stages)
    given = config.model, batches, config.data.sequence_length, config.precision, config.optim, held
    rounds: dict[str, Any] = {}
    if config.local.every:
        rounds = {"local_every": config.local.every, **local_shape(config.local)}
    return Job(*given, schedules, config.pipeline.correction, config.comm, rounds)


def asked_cluster(config: LLMPlanConfig, given: set[str]) -> Cluster:
    assert config.gpus is not None
    if config.gpu is None:
        raise UserError(f"gpus={config.gpus} of which kind? give --gpu, such as a100-40gb or h100")
    sheet: dict[str, Any] = {
        "across_gb_s": "bandwidth_gb_s",
        "memory_gb_s": "memory_gb_s",
        "utilisation": "utilisation",
    }
    values = {ours: (name, _value(config, name)) for ours, name in sheet.items()}
    more = {ours: value for ours, (name, value) in values.items() if name in given}
    if config.memory is not None:
        more["memory_bytes"] = size_in_bytes(config.memory, "memory", "GiB")
    if config.measured is not None:
        if "across_gb_s" in more:
            raise UserError("--bandwidth-gb-s with a measured machine, whose links are in its file; leave it out")
        return config.measured.cluster(config.gpus, **more)
    return cluster_of(gpu_named(config.gpu), config.gpus, **more)


def asked_drive(config: LLMPlanConfig, given: set[str], recipe: str, cluster: Cluster) -> tuple[Cluster, Drive]:
    """The cluster with as much of its hosts as a rank may take, and the drive below them.

    Raises UserError where nobody knows what the drive does in a second, and for what does not go with one.
    """
    gemini, name = config.gemini, f"gemini.disk={config.gemini.disk} with --gpus"
    if "gemini.budget" in given and gemini.budget is None:
        raise UserError(f"{name} and gemini.budget=None: nothing would move; leave one of them out")
    if spec_of(config.optim.name).looks:
        raise UserError(
            f"{name} and optim.name={config.optim.name}: what looks at whole steps needs all masters at once; use "
            "another --optim.name"
        )
    if config.drive is not None:
        read, write = config.drive
    elif all(folder.is_dir() for folder in gemini.folders):
        read, write = map(sum, zip(*drive_speeds(gemini.folders), strict=True))
    else:
        raise UserError(
            f"{name}: it is no folder of this machine, where its bandwidth could be measured; give --disk-gb-s, what "
            "it reads and writes in a second, such as 3.5 2.5"
        )
    if gemini.host_bytes is not None:
        cluster = replace(cluster, host_bytes=gemini.host_bytes)
    host = gemini.host or f"{int(cluster.host_bytes) // 2**20}MiB"
    options = {"gemini.disk": gemini.disk, "gemini.host": host}
    ranks = min(cluster.ranks, cluster.ranks_per_machine)

    def price(run: RunShape, budget_bytes: int) -> GeminiEstimate:
        plan = Plan(run, budget_bytes, StepTime(*[0.0] * 6), budget_bytes, beside=options)
        made = config_of(config, plan, given, recipe)
        peak = cluster.gpu.peak_flops(compute_dtype(run.precision))
        assert peak is not None
        speed = Speed(peak * cluster.utilisation, cluster.bytes_per_s)
        machine = check_combination(made), speed, cluster.to_host.bytes_per_s
        return estimate_residency(made, *machine, drives=[(read / ranks, write / ranks)])

    return cluster, Drive(read / ranks, write / ranks, options, price)


def asked_prices(config: LLMPlanConfig, cluster: Cluster, given: set[str]) -> Prices:
    steps = 1
    if config.tokens is not None:
        steps = math.ceil(config.tokens / (config.data.global_batch * config.data.sequence_length))
    elif given & {"steps", "stop_after"}:
        steps = min(config.steps, config.stop_after or config.steps)
    watts = cluster.gpu.watts if config.power is None else config.power
    return Prices(config.price, watts, config.carbon, steps)


def _value(config: Any, name: str) -> Any:
    return attrgetter(name)(config)


# --- commands ---------------------------------------------------------------------------------------------------------


def command_of(config: LLMPlanConfig, plan: Plan, given: set[str], recipe: str, cluster: Cluster) -> str:
    """The line that runs a plan: of `llm pretrain`, or for the model of a folder of `llm finetune`."""
    words = [*launcher_words(cluster), *run_words(config, plan, given, recipe)]
    if cluster.machines == 1 and cluster.ranks > 1:
        words += ["--nproc", str(cluster.ranks)]
    return " ".join(word if word.startswith("$") else shlex.quote(word) for word in words)


def launcher_words(cluster: Cluster) -> list[str]:
    if cluster.machines == 1:
        return ["megalith", "llm"]
    machines = ["--nnodes", str(cluster.machines), "--nproc-per-node", str(cluster.ranks_per_machine)]
    return ["torchrun", *machines, "--rdzv-backend", "c10d", "--rdzv-endpoint", "$HEAD:29500", "-m", "apps.llm"]


def run_words(config: LLMPlanConfig, plan: Plan, given: set[str], recipe: str) -> list[str]:
    """The command and its options: those in which the run differs from the command's defaults."""
    if config.source is None:
        words, base = ["pretrain", "--recipe", recipe], RECIPES[recipe]()
    else:
        words, base = ["finetune", "--model", str(config.source)], FINETUNE
    if config.optim.name != base.optim.name:
        words, base = (
            [*words, "--optim.name", config.optim.name],
            replace(base, optim=base.optim.named(config.optim.name)),
        )
    planned = {name: value for name, value in plan.options().items() if name not in given}
    if config.gemini.disk is not None:
        planned |= {"gemini.disk": None, "gemini.host": None, **plan.beside}
    if plan.budget_bytes is not None:
        planned.pop("reduce_each", None)
    told = {*planned, *given, *_OF_A_SHAPE}
    for name in option_names(base):
        if name in _OF_A_LAUNCH or (config.source is not None and name not in told - {"source"}):
            continue
        value = planned.get(name, _value(config, name))
        if value != _value(base, name):
            words += _words(name, value)
    return words


_OF_A_LAUNCH = ("nproc", "model.rope_scaling")
"""Options that the launcher says, or that are a group of their own."""
_OF_A_SHAPE = ("data.sequence_length", "data.global_batch", "precision", "optim.name")
"""Options that the commands of a plan agree in, whatever their defaults."""


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        group, _, last = name.rpartition(".")
        return [option(name)] if value else [option(f"{group}.no_{last}" if group else f"no_{last}")]
    if isinstance(value, tuple | list):
        return [option(name), *map(str, value)]
    return [option(name), str(value)]


# --- old weights ------------------------------------------------------------------------------------------------------


def old_weights(config: PretrainConfig, job: Job, found: Found, cluster: Cluster) -> list[str]:
    """Lines: what plans whose steps overlap are expected to cost, and which schedule is as good without old weights."""
    late, fresh = ([plan for plan in found.plans if _is_late(plan.run) is wanted] for wanted in (True, False))
    if not set(ALLOWED).intersection(name for name, _ in job.scheduled):
        waits = any(plan.run.pp > 1 for plan in found.plans)
        names = " ".join(dict.fromkeys((*(name for name, _ in SCHEDULED), *ALLOWED)))
        return [f"2bw, whose gradients are of weights one update old, was not tried; --schedules {names} does"] * waits
    if not late:
        return ["no plan with 2bw takes less time or memory than those that learn from the newest weights"]
    first = late[0]
    lines = [penalty(config)]
    clocks = [
        (plan.run.pipeline.schedule if plan.run.pp > 1 else "a plan without a pipeline", plan.step_s) for plan in fresh
    ]
    clocks += _by_fresh_schedules(job, first.run, cluster)
    name, step_s = min(clocks, key=lambda one: one[1], default=("none", math.inf))
    if step_s <= (1 + AS_GOOD) * first.step_s:
        lines.append(as_good(name, step_s / first.step_s))
    return lines


def _is_late(run: RunShape) -> bool:
    return run.pp > 1 and SCHEDULES[run.pipeline.schedule].runs_ahead


def _by_fresh_schedules(job: Job, run: RunShape, cluster: Cluster) -> Iterator[tuple[ScheduleName, float]]:
    """(schedule, seconds of its step) of the same run by those of the newest weights, where it fits."""
    shape = decoder_shape(job.model)
    for name, chunks in SCHEDULED:
        pipeline = PipelineConfig(name, chunks=chunks)
        other = replace(run, pipeline=pipeline)
        fits = run.pp * pipeline.stages_per_rank <= job.model.num_layers
        if fits and estimate_memory(shape, other).peak_bytes <= cluster.memory_bytes:
            yield name, StepClock(shape, other, cluster).time().step_s


def messages(config: PretrainConfig, found: Found) -> list[str]:
    """A line: what the messages that are asked for are expected to cost; none of gradients that go whole."""
    run = found.plans[0].run
    line = own_penalty(config, run.num_workers if run.local_every else run.num_gradient_ranks)
    return [] if line is None else [line]


# --- what is printed --------------------------------------------------------------------------------------------------


def _as_json(
    config: LLMPlanConfig, found: Found, cluster: Cluster, prices: Prices, commands: Sequence[str]
) -> dict[str, Any]:
    plans = [
        {
            "step_time_s": plan.step_s,
            "memory_bytes": plan.memory_bytes,
            **prices.of(plan.step_s, cluster.ranks),
            "command": command,
            "options": {name: _plain(value) for name, value in plan.options().items()},
            "shares_s": _parts(plan),
            **_on_drive(plan),
        }
        for plan, command in zip(found.plans, commands, strict=True)
    ]
    return {
        "gpu": cluster.gpu.name,
        "gpus": cluster.ranks,
        "batch": config.data.global_batch,
        "sequence_length": config.data.sequence_length,
        "steps": prices.steps,
        "price_per_gpu_hour": prices.per_gpu_hour,
        "power_w": prices.watts,
        "carbon_g_per_kwh": prices.grams_per_kwh,
        "memory_limit_bytes": cluster.memory_bytes,
        "cluster": list(cluster.facts()),
        "fitting": found.tried,
        "plans": plans,
        "unknown": list(UNKNOWN),
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _on_drive(plan: Plan) -> dict[str, float]:
    """What a plan with a drive takes of it and of the host, for each rank."""
    if plan.residency is None:
        return {}
    found = plan.residency.plan
    return {
        "device_bytes": plan.residency.device_bytes,
        "host_bytes": found.host_bytes,
        "disk_bytes": found.disk_bytes,
        "disk_read_bytes": found.disk_read_bytes,
        "disk_written_bytes": found.disk_written_bytes + found.durable_bytes,
        "written_a_day_bytes": found.written_a_day,
        "drive_days": found.drive_days,
    }


def _parts(plan: Plan) -> dict[str, float]:
    time = plan.time
    return {
        "computing": time.compute_s,
        "messages": time.messages_s,
        "waiting": time.bubble_s,
        "gradients": time.reduced_s,
        "update": time.update_s,
        "host": time.host_s,
        "sharing": time.shared_s,
    }


def _shares(plan: Plan) -> str:
    parts = ", ".join(f"{name} {seconds / plan.step_s:.1%}" for name, seconds in _parts(plan).items() if seconds)
    return f"of the first plan's step of {plan.step_s:.3g} s: {parts}"


def _table(config: LLMPlanConfig, found: Found, cluster: Cluster, prices: Prices, recipe: str) -> Table:
    name = recipe if config.source is None else str(config.source)
    rows = f"{config.data.global_batch} x {config.data.sequence_length} tokens"
    shown = found.plans[:MOST_SHOWN]
    many = f"{len(found.plans)} of {found.tried:,} plans that fit are beaten by none in time and memory"
    table = Table(title=f"{name} on {cluster.ranks} x {cluster.gpu.name}, {rows} a step: {many}")
    of = "step" if prices.steps == 1 else f"{prices.steps:,} steps"
    for column in ("", "step", "memory", f"GPU hours ({of})", "money", "kWh", "kg CO2"):
        table.add_column(column, justify="right")
    table.add_column("plan")
    for number, plan in enumerate(shown, 1):
        costs = [f"{value:,.3g}" for value in prices.of(plan.step_s, cluster.ranks).values()]
        step = f"{plan.step_s:.3g} s" if plan.step_s < 120 else time_in_words(plan.step_s)
        table.add_row(str(number), step, in_words(plan.memory_bytes), *costs, " ".join(_told(plan)))
    return table


def _told(plan: Plan) -> Iterator[str]:
    """The plan's options that are not the plainest run's."""
    plain = options_of(RunShape())
    if plan.run.num_data_ranks > 1:
        yield f"dp={plan.run.num_data_ranks}"
    for name, value in plan.options().items():
        if value != plain.get(name) or name in ("zero", "microbatch"):
            yield f"{name.removeprefix('mesh.').removeprefix('pipeline.').removeprefix('gemini.')}={value}"
