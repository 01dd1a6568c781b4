"""`llm plan` of a link: forms of messages by seconds and bytes of a step, and the steps that each is expected to add.

A form is how data-parallel ranks tell each other what they have learned: all of it, in fewer numbers or bits, or
seldom. Each is planned in the place of the run's own, on the same ranks, by the closed forms of `core.estimate`, in
which nothing overlaps. Steps whose gradients go whole count as such: seconds and bytes are those of a mean step.

Forms are ranked by seconds x (1 + penalty). The penalty is the share of steps that a form needs beyond those of whole
gradients to the same loss: as a committed benchmark has measured it (`MEASURED`), else as it was published
(`PUBLISHED`). Forms of which neither tells it come behind, and those that do not go with the run are named.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from rich.table import Table

from apps.llm.config import PretrainConfig, run_shape
from core.config import UserError, in_words, option, time_in_words
from core.estimate import (
    Machine,
    ModelShape,
    RunShape,
    data_parallel_bytes,
    estimate_memory,
    estimate_time,
    sent_bytes,
)
from core.mesh import Zero
from core.parallel.compress import CommConfig
from core.parallel.local import LocalTrainingConfig
from core.parallel.local_steps import is_due, num_due
from core.runtime import ranks_of

ROUND, FRAGMENTS, OVERLAP = 50, 2, 5
"""Of forms that meet seldom: steps of a round, parts of the model, steps that an average may take."""
WHOLE_SHARE, WHOLE_STEPS, LOCAL_STEPS = 10, 16, 16
"""Signs are learned in a tenth of all steps (1-bit Adam), or as many first ones (0/1 Adam); its most local steps."""
ZERO_PP = CommConfig(weights="int8", gradients="int4", secondary=True)
"""What slow_links measures."""


class Penalty(NamedTuple):
    """Steps that a form needs beyond those of whole gradients, as a share of these, and who says so."""

    share: float
    source: str


_ZERO_ONE = "Lu et al. 2022, arXiv:2202.06009: the convergence speed of Adam"
NONE = Penalty(0.0, "gradients go whole")
PUBLISHED = {
    "PowerSGD": Penalty(0.0, "Vogels et al. 2019, arXiv:1905.13727: test performance on par with SGD"),
    "top-k": Penalty(
        0.0, "Lin et al. 2018, arXiv:1712.01887: no loss of accuracy, with momentum correction, which is not here"
    ),
    "1-bit Adam": Penalty(0.0, "Tang et al. 2021, arXiv:2102.02888: with Adam's convergence speed"),
    "1-bit LAMB": Penalty(0.0, "Li et al. 2021, arXiv:2104.06069: with LAMB's convergence speed"),
    "0/1 Adam": Penalty(0.0, _ZERO_ONE),
    "0/1 Adam, local steps": Penalty(0.0, _ZERO_ONE),
    "DiLoCo": Penalty(0.0, "Douillard et al. 2023, arXiv:2311.08105: 8 workers as synchronous training, H = 500"),
    "Streaming DiLoCo": Penalty(0.0, "Douillard et al. 2025, arXiv:2501.18512: similar quality in 4 bits"),
    "MuLoCo": Penalty(0.0, "Thérien et al. 2025, arXiv:2505.23725: next to no degradation in 2 bits"),
}
"""Of the papers' models; what they say of other optimizers than ours is not told."""
MEASURED: dict[tuple[str, int], tuple[str, float]] = {
    # measured: python -m tests.support.link_results
    ("ZeRO++", 2): ("slow_links", 0.031),
    ("ZeRO++ with feedback", 2): ("slow_links", 0.007),
    ("PowerSGD", 2): ("slow_links", 0.514),
    ("MuLoCo", 2): ("slow_links", 0.553),
    ("ZeRO++", 4): ("slow_links", 0.031),
    ("ZeRO++ with feedback", 4): ("slow_links", 0.007),
    ("PowerSGD", 4): ("slow_links", 0.514),
    ("MuLoCo", 4): ("slow_links", 1.689),
    ("8-bit activations", 2): ("coded_activations", 0.000),
    # end
}
"""Form and workers -> benchmark, and the share of steps more to the same loss: of slow_links with Muon."""


@dataclass(frozen=True)
class Form:
    """zero  None: the run's own
    kind  the form whose penalty is this one's
    """

    kind: str
    zero: Zero | None = None
    comm: CommConfig = field(default_factory=CommConfig)
    local: LocalTrainingConfig = field(default_factory=LocalTrainingConfig)
    is_own: bool = False

    def of(self, config: PretrainConfig) -> PretrainConfig:
        """The run with this form in the place of its own.  Raises UserError where it does not go with the rest."""
        if self.is_own:
            return config
        zero = config.zero if self.zero is None else self.zero
        node = config.comm.node if self.comm.codes_shards else 1
        activations = self.comm.activations or config.comm.activations
        comm = replace(self.comm, activations=activations, node=node)
        each = config.reduce_each and zero >= 2 and not comm.is_of_data
        return replace(config, zero=zero, comm=comm, local=self.local, reduce_each=each)

    @property
    def name(self) -> str:
        return f"{self.kind}, as asked" if self.is_own else self.kind

    @property
    def options(self) -> str:
        """The words that say it."""
        said = [] if self.zero is None else [f"--zero {self.zero}"]
        for group, given in (("comm", self.comm), ("local", self.local)):
            for item in fields(given):
                value, name = getattr(given, item.name), option(f"{group}.{item.name}")
                if value != getattr(type(given)(), item.name):
                    said.append(name if value is True else f"{name} {value}")
        return " ".join(said)


@dataclass(frozen=True)
class Planned:
    """A form on this run's ranks: seconds and bytes over a rank's link of a mean step, bytes of its fullest moment."""

    form: Form
    step_s: float
    sent_bytes: float
    peak_bytes: int
    penalty: Penalty | None

    @property
    def expected_s(self) -> float:
        """Seconds for what a step of whole gradients learns, where the penalty is known; else of a step."""
        return self.step_s * (1 + (0.0 if self.penalty is None else self.penalty.share))


def forms(config: PretrainConfig) -> list[Form]:
    """Those that are compared, of which one is the run's own."""
    inside: Zero | None = None if config.zero and config.mesh.dp_replicate is not None else 0  # what a worker is
    fragments, few = min(FRAGMENTS, config.model.num_layers), LocalTrainingConfig(every=ROUND, bits=2)
    streaming = replace(few, bits=4, fragments=fragments, overlap=OVERLAP)
    first = max(WHOLE_STEPS, config.steps // WHOLE_SHARE)
    alone = CommConfig("zero_one", start=WHOLE_STEPS, local_steps=LOCAL_STEPS, local_start=first)
    in_signs, name = CommConfig("one_bit", start=max(1, config.steps // WHOLE_SHARE)), config.optim.name
    listed = [
        *(Form(kind, zero) for kind, zero in _PLAIN.items()),
        Form("ZeRO++", 3, ZERO_PP),
        Form("ZeRO++ with feedback", 3, replace(ZERO_PP, feedback=True)),
        Form("PowerSGD", 0, CommConfig("powersgd")),
        Form("top-k", 0, CommConfig("top_k")),
        Form("random-k", 0, CommConfig("random_k")),
        Form("1-bit LAMB" if name == "lamb" else "1-bit Adam", 0, in_signs),
        Form("0/1 Adam", 0, CommConfig("zero_one", start=WHOLE_STEPS)),
        Form("0/1 Adam, local steps", 0, alone),
        Form("DiLoCo", inside, local=LocalTrainingConfig(every=ROUND)),
        Form("MuLoCo" if name == "muon" else "DiLoCo in 2 bits", inside, local=few),
        Form("Streaming DiLoCo", inside, local=streaming),
    ]
    if config.mesh.pp > 1 or config.mesh.ep > 1:
        listed.append(Form("8-bit activations", comm=CommConfig(activations="int8")))
    own = Form(_kind(config, listed), config.zero, config.comm, config.local, is_own=True)
    return [own, *(form for form in listed if (form.zero, form.comm, form.local) != (own.zero, own.comm, own.local))]


_PLAIN: dict[str, Zero] = {"all-reduce": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}


def _kind(config: PretrainConfig, listed: Sequence[Form]) -> str:
    """The listed form that the run's own is one of."""
    comm, local = config.comm, config.local
    if not comm.is_of_data and not local.every:
        plain = next(kind for kind, zero in _PLAIN.items() if zero == config.zero)
        return plain if comm.activations is None else "8-bit activations"

    def traits(comm: CommConfig, local: LocalTrainingConfig) -> tuple[object, ...]:
        of_rounds = local.every > 0, local.fragments > 1, local.bits is not None
        return comm.compress, comm.has_local_steps, comm.codes_shards, comm.keeps_errors, *of_rounds

    alike = (form.kind for form in listed if traits(form.comm, form.local) == traits(comm, local))
    return next(alike, "this form")


def penalty_of(kind: str, workers: int) -> Penalty | None:
    """What a form is expected to cost on so many workers: as measured on the nearest number, else as published."""
    if kind in _PLAIN:
        return NONE
    measured = {number: found for (name, number), found in MEASURED.items() if name == kind}
    if measured:
        nearest = min(measured, key=lambda number: abs(number - workers))
        benchmark, share = measured[nearest]
        return Penalty(share, f"benchmarks/results/{benchmark}.json, {nearest} workers")
    return PUBLISHED.get(kind)


def whole_steps(config: PretrainConfig) -> int:
    """Steps of the run whose gradients go whole beside a form's own."""
    steps, comm = num_steps(config), config.comm
    if config.local.every:
        return min(config.local.start, steps)
    if comm.compress is None:
        return 0
    if comm.compress != "zero_one":
        return min(comm.start, steps)
    return num_due(min(steps, _first_local(config)), comm.start)


def local_steps(config: PretrainConfig) -> int:
    """Steps of the run that a rank takes by itself, and sends nothing."""
    comm, steps = config.comm, max(0, num_steps(config) - _first_local(config))
    if not comm.has_local_steps:
        return 0
    sums = num_due(steps, comm.local_each, comm.local_steps)
    ends = num_steps(config) == config.steps and steps > 0  # the last step of a run adds up in any case
    return steps - sums - (ends and not is_due(steps - 1, comm.local_each, comm.local_steps))


def _first_local(config: PretrainConfig) -> int:
    """The step from which on second moments stay."""
    start = config.comm.local_start if config.comm.has_local_steps else None
    return num_steps(config) if start is None else start


def num_steps(config: PretrainConfig) -> int:
    """Steps until the run ends, or is told to stop."""
    return min(config.steps, config.stop_after or config.steps)


def planned(form: Form, config: PretrainConfig, model: ModelShape, machine: Machine) -> Planned:
    """Raises UserError where the form does not go with the run."""
    given = form.of(config)
    run = run_shape(given)
    share, alone = (number / num_steps(given) for number in (whole_steps(given), local_steps(given)))
    of_one = step_s, sent = _of_a_step(model, run, machine)
    if alone:  # as the others, but for what data-parallel ranks send
        between = data_parallel_bytes(model, run)
        step_s, sent = step_s - alone * between / machine.bandwidth, sent - alone * between
    if share:
        comm = CommConfig(activations=given.comm.activations)
        of_whole = _of_a_step(model, run_shape(replace(given, comm=comm, local=LocalTrainingConfig())), machine)
        more = (share * (whole - own) for whole, own in zip(of_whole, of_one, strict=True))
        step_s, sent = (mean + part for mean, part in zip((step_s, sent), more, strict=True))
    workers = run.num_workers if run.local_every else run.num_gradient_ranks
    return Planned(form, step_s, sent, estimate_memory(model, run).peak_bytes, penalty_of(form.kind, workers))


def _of_a_step(model: ModelShape, run: RunShape, machine: Machine) -> tuple[float, float]:
    return estimate_time(model, run, machine).step_s, sent_bytes(model, run)


def ranked(config: PretrainConfig, model: ModelShape, machine: Machine) -> tuple[list[Planned], dict[str, str]]:
    """The forms, the least seconds for what a step learns first, and those that do not go, with the reason."""
    found, refused = list[Planned](), dict[str, str]()
    for form in forms(config):
        try:
            found.append(planned(form, config, model, machine))
        except UserError as why:
            refused[form.kind] = str(why)
    return sorted(found, key=lambda one: (one.penalty is None, one.expected_s)), refused


def is_compared(config: PretrainConfig, given: set[str]) -> bool:
    """Whether forms are: of several data-parallel ranks, where a link or a form is given.

    given  dotted names of the options that were typed
    """
    several = config.mesh.resolve(ranks_of(config.nproc), config.zero).data_ranks * config.mesh.cp > 1
    return several and ("bandwidth_gb_s" in given or config.comm.is_given or config.local.every > 0)


def compared(config: PretrainConfig, model: ModelShape, machine: Machine) -> tuple[Table, list[str]]:
    """A table of the forms, and lines: the options and the source of each, and what does not go."""
    found, refused = ranked(config, model, machine)
    link = f"{8 * machine.bandwidth / 1e9:g} Gbit/s"
    table = Table(title=f"messages over a link of {link}, by seconds x (1 + penalty)")
    for name in ("", "form", "a step", "a rank sends", "peak", "steps more", "expected"):
        table.add_column(name, justify="left" if name == "form" else "right")
    lines = []
    for place, one in enumerate(found, 1):
        more = "not known" if one.penalty is None else f"{one.penalty.share:+.1%}"
        step, expected = (_seconds(s) for s in (one.step_s, one.expected_s))
        sizes = in_words(round(one.sent_bytes)), in_words(one.peak_bytes)
        table.add_row(str(place), one.form.name, step, *sizes, more, "" if one.penalty is None else expected)
        source = "what it costs is not known" if one.penalty is None else one.penalty.source
        lines.append(f"{place}: {one.form.options}; {source}")
    return table, [*lines, *(f"not {kind}: {why}" for kind, why in refused.items())]


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 120 else time_in_words(seconds)


def own_penalty(config: PretrainConfig, workers: int) -> str | None:
    """A line: what the run's own form is expected to cost; None of gradients that go whole."""
    own = forms(config)[0]
    if own.kind in _PLAIN:
        return None
    penalty, of = penalty_of(own.kind, workers), f"{own.kind} ({own.options})"
    if penalty is None:
        return f"{of}: what it costs in steps is not known; benchmarks/slow_links.py measures such forms"
    return f"{of}: expected to take {penalty.share:+.1%} steps; {penalty.source}"
