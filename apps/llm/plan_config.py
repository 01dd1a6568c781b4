"""The options of `llm plan`: those of a training run, the machine that it is planned for, and what a search asks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from apps.llm.config import PretrainConfig
from core.auto.machines import GRAMS_PER_KWH, gpu_named
from core.auto.measured import MeasuredMachine, is_file, read_machine
from core.config import UserError
from core.estimate import Machine, PlannedRun
from core.gemini.config import GeminiConfig
from core.parallel.pipeline.schedule import ScheduleName
from core.precision import compute_dtype
from core.runtime import ranks_of
from core.trace.machine import Speed


@dataclass(frozen=True)
class PlannedGemini(GeminiConfig):
    """Gemini's options of a plan, which may seek the budget for a host and a disk that are given."""

    SAYS_OF_MOVES: ClassVar[tuple[str, ...]] = ("figure", "policy", "order")


@dataclass(frozen=True)
class LLMPlanConfig(PlannedRun, PretrainConfig):
    """Plan a training run: the options of `megalith llm pretrain`, and the device that it is planned for."""

    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("source", "gpus", "gpu", "batch", "schedules", "json", "check", "measure", "price", "draw"),
        *("memory", "timeline", "data.sequence_length", "data.global_batch", "steps", "precision"),
        *("microbatch", "optim.name", "recompute.mode", "zero", "mesh.tp", "mesh.pp", "mesh.cp", "mesh.ep"),
        *("gemini.budget", "nproc"),
    )

    CALLED: ClassVar[Mapping[str, str]] = {**PretrainConfig.CALLED, "source": "model"}
    RENAMED: ClassVar[Mapping[str, str]] = {"memory_gb": "memory=GB", "source": "model"}

    gemini: PlannedGemini = field(default_factory=PlannedGemini)
    source: Path | None = None
    """the name of a shape, as of its recipe; a run folder, or a Hugging Face folder of any causal model, config.json
    alone; by default the plan is of the recipe's model and --model.* options"""
    gpus: int | None = None
    """search: print the plans on so many devices of --gpu that none beats in time and memory, each with its command.
    Options of the run that are typed are held"""
    gpu: str | None = None
    """a name such as A100 or H100, or the JSON file of a machine that --measure wrote; by default, of one run, this
    machine's device"""
    batch: int | None = None
    """rows of the global batch: --data.global-batch in a word"""
    schedules: tuple[ScheduleName, ...] = ()
    """with --gpus: schedules of a pipeline that are tried, such as 1f1b zbv 2bw; by default those whose gradients are
    of the newest weights, of which 2bw is not one"""
    json: bool = False
    """with --gpus: print the plans as JSON"""
    check: bool = False
    """run one rank of the plan, of a search its first, without memory and without the others, and hold what it
    allocates and sends against what the plan says, to the byte; exit code 1 where they differ"""
    measure: Path | None = None
    """measure this machine with --nproc ranks or under torchrun, products, memory and links, and write it to this JSON
    file, which --gpu takes; nothing is planned"""
    tokens: float | None = None
    """with --gpus: price a training on so many; by default the --steps that are typed, or one step"""
    price: float = 1.0
    """with --gpus: money for a device and hour; by default 1, so that money is GPU hours"""
    power: float | None = None
    """with --gpus: watts of a device, with its share of the machine; by default its board's most"""
    carbon: float = GRAMS_PER_KWH
    """with --gpus: grams of CO2 a kWh; by default the world's electricity in 2024"""
    disk_gb_s: tuple[float, ...] = ()
    """with --gemini.disk: what the drives of a machine read in a second, all together, in 1e9 bytes, and what they
    write where that is another number, such as 3.5 2.5; by default measured where the folder is there"""
    draw: Path | None = None
    """with --gpus: draw the plans, and a step of the first, to this PNG"""
    timeline: Path | None = None
    """with --mesh.pp: draw the stages' step to this PNG, with its bubble beside the published one"""

    def __post_init__(self) -> None:
        for name, least in (("gpus", 1), ("batch", 1), ("tokens", 1), ("price", 0), ("power", 0), ("carbon", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < float("inf"):
                raise UserError(f"{name}={value}; give a number that is at least {least}")
        if self.measured is None and self.gpus is not None and self.gpu is not None:
            gpu_named(self.gpu)
        if self.measure is not None and self.measure.suffix != ".json":
            raise UserError(f"measure={self.measure}: a machine is a JSON file; give a name that ends in .json")
        if len(self.disk_gb_s) > 2 or not all(0 < rate < float("inf") for rate in self.disk_gb_s):
            raise UserError(
                f"disk_gb_s={' '.join(map(str, self.disk_gb_s))}; give one number above 0, or what is read and what is "
                "written"
            )
        if self.draw is not None and self.draw.suffix != ".png":
            raise UserError(f"draw={self.draw}: the picture is a PNG; give a name that ends in .png")
        super().__post_init__()

    def check_gpu(self) -> None:
        """Of a search's, which says itself what it computes in, nothing is asked here."""
        if self.gpus is None:
            super().check_gpu()

    @cached_property
    def measured(self) -> MeasuredMachine | None:
        """The machine of a file that --gpu names.  Raises UserError for a file of none."""
        return read_machine(Path(self.gpu)) if self.gpu is not None and is_file(self.gpu) else None

    @property
    def drive(self) -> tuple[float, float] | None:
        """Bytes a second that the drives read and write, where they are given."""
        return (1e9 * self.disk_gb_s[0], 1e9 * self.disk_gb_s[-1]) if self.disk_gb_s else None

    @property
    def peak_flops(self) -> float | None:
        if self.measured is None:
            return super().peak_flops
        return self.measured.gpu().peak_flops(compute_dtype(self.precision))

    @property
    def machine(self) -> Machine | None:
        """With the links of a file, where none is given."""
        found = super().machine
        if found is None or self.measured is None or self.bandwidth_gb_s != PlannedRun.bandwidth_gb_s:
            return found
        ranks = max(2, ranks_of(self.nproc))
        return replace(found, bandwidth=self.measured.cluster(ranks).link(1, ranks).bytes_per_s)

    @property
    def speed(self) -> Speed:
        """With the memory of a file, where none is given."""
        found = super().speed
        if self.measured is None or self.memory_gb_s != PlannedRun.memory_gb_s:
            return found
        return replace(found, bytes_per_s=self.measured.memory_bytes_per_s)

    def check_positions(self) -> None:
        """Check those of the folder's model, where one is given, once it is read."""
        if self.source is None:
            super().check_positions()

    def unread(self) -> dict[str, str]:
        found = super().unread()
        found["local.asynchronous"] = "in a plan, which is of steps that all ranks take together; leave it out"
        if self.gemini.disk is None:
            found["disk_gb_s"] = "without a drive; give --gemini.disk"
        if self.gpus is not None:
            if self.gemini.disk is None:
                found["gemini.host"] = (
                    "with --gpus and no gemini.disk, where the host's memory is its machine's; give --gemini.disk, too"
                )
            return found | dict.fromkeys(NOT_SEARCHED, "with --gpus, where it is sought or not asked; leave it out")
        searched = ("schedules", "json", "tokens", "price", "power", "carbon", "draw")
        found |= dict.fromkeys(searched, "without a search; give --gpus")
        if self.peak_flops is None:
            why = "and what this machine's device computes in a second is not known; give --gpu, such as A100"
            found["utilisation"] = why
            if not is_traced(self):
                found["bandwidth_gb_s"] = why
        if not is_traced(self) and self.source is None:
            found["memory_gb_s"] = "without a budget; give --gemini.budget or --recompute.mode budget"
        if self.gemini.budget is None:
            why = "without a budget: nothing moves; give --gemini.budget, such as 10GiB, or --gpus, which seeks one"
            found |= dict.fromkeys(("gemini.host", "gemini.disk"), why)
        found["gemini.durable_every"] = "in a plan, which is of steps that are all made durable; leave it out"
        if self.pipeline.cost != "estimated":
            found["pipeline.cost"] = "in a plan, which measures nothing; leave it out"
        return found


NOT_SEARCHED = (
    *("nproc", "timeline", "pipeline.microbatches", "pipeline.split", "pipeline.cost", "pipeline.replicas"),
    *("gemini.policy", "gemini.order", "gemini.durable_every"),
    "elastic.store",
)
"""Options of a plan that a search does not take."""


def is_traced(config: PretrainConfig) -> bool:
    """Whether a budget has the step of our decoder traced, of which there are closed forms."""
    return config.gemini.budget is not None or config.recompute.mode == "budget"
