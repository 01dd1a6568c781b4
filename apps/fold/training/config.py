"""The options of `fold train`: the training run of core.train, plus a model, chains and a loss."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from apps.fold.axial import axial_plan
from apps.fold.features.templates import Allowed
from apps.fold.loss.total import LossConfig
from apps.fold.model.config import (
    MULTIMER_PRESETS,
    PRESETS,
    ModelConfig,
    MultimerConfig,
    demo,
    demo_multimer,
    released,
    tiny,
    tiny_multimer,
)
from apps.fold.training.batches import BatchConfig
from apps.fold.training.dataset import Selection
from apps.fold.training.distillation import DistillConfig
from apps.fold.weights.source import is_multimer
from core.config import UserError
from core.mesh import MeshConfig
from core.optim.spec import spec_of
from core.placement.table import ModelPlan
from core.runtime import ranks_of
from core.trace.segments import Segments
from core.train import TrainConfig

_OWN_MODELS = {
    "demo": demo,
    "demo_multimer": demo_multimer,
    "debug": lambda: tiny(templates=False),
    "debug_templates": tiny,
    "debug_multimer": tiny_multimer,
}
_OF_COMPLEXES = ("data.max_chains", "loss.interface", "loss.centres", "loss.interface_clamp")
_RELEASED = [*PRESETS, *MULTIMER_PRESETS]


@dataclass(frozen=True)
class DataConfig(BatchConfig):
    """The chains that are learned from, and the options that make rows of them."""

    structures: Path | None = None
    """a folder of mmCIF (or PDB) files"""
    alignments: Path | None = None
    """a folder of NAME_CHAIN.a3m or .sto, or several in NAME_CHAIN/; without: the sequences alone"""
    templates: Path | None = None
    """a folder of mmCIF files of templates, which NAME_CHAIN.hhr among the alignments (results of hhsearch) names; or
    of structures in NAME_CHAIN/; for models with templates"""
    max_template_date: str = ""
    """hits that were published later are left out, as 2018-04-30; always those of less than 60 days before the chain"""
    validation: Path | None = None
    """a folder of structures that are held out; their alignments lie among the others"""
    clusters: Path | None = None
    """a file with a cluster of alike chains a line, NAME_CHAIN with blanks between: an epoch has one chain of each,
    at random; a chain that is in none is one by itself. Without: every chain once"""
    min_residues: int = 10
    """chains of which fewer residues were seen are left out"""
    max_resolution: float = 9.0
    """structures that are less precise are left out, in Angstrom"""
    max_chains: int = 20
    """complexes of more chains are left out, by models of these"""
    cache: Path | None = None
    """where what was read is kept, by content; by default chains/ beside --out"""

    def __post_init__(self) -> None:
        super().__post_init__()
        Allowed(self.max_template_date)
        for name in ("min_residues", "max_chains"):
            if getattr(self, name) < 1:
                raise UserError(f"data.{name}={getattr(self, name)}; give a number, at least 1")
        if not self.max_resolution > 0:
            raise UserError(f"data.max_resolution={self.max_resolution}; give Angstrom, above 0")

    def selection(self, complexes: bool) -> Selection:
        """complexes: for a model of these."""
        return Selection(self.min_residues, self.max_resolution, self.max_template_date, complexes, self.max_chains)


@dataclass(frozen=True)
class FoldTrainConfig(TrainConfig):
    """Train the structure predictor on experimental structures."""

    CHOOSES_SEGMENTS: ClassVar[bool] = True
    ELASTIC: ClassVar[bool] = False

    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("data.structures", "data.alignments", "data.templates", "data.validation", "data.crop", "data.global_batch"),
        "distill.predictions",
        *(
            "model",
            "average",
            *(name for name in TrainConfig.ESSENTIAL if not name.startswith("mesh.")),
            "axial",
            "nproc",
        ),
    )

    model: str = "model_3_ptm"
    """a preset (`megalith fold recipes`; model_1, model_2 and those of complexes read templates), demo, debug,
    debug_templates, demo_multimer or debug_multimer, which starts from --seed; or the weights to start from: npz, .pt,
    or a folder of `megalith fold convert` or of a run"""
    data: DataConfig = field(default_factory=DataConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    learns: Literal["all", "confidence"] = "all"
    """what of the model; confidence: the heads of pLDDT and PAE alone, of weights by --model that stay as they are"""
    average: float | None = 0.999
    """decay of the moving average of the weights, which validates and predicts; None: no average"""
    num_recycles: int | None = None
    """recycling iterations at most; a step draws how many. By default the model's"""
    max_msa: int | None = None
    """rows of the clustered MSA; by default the model's"""
    max_extra_msa: int | None = None
    """rows of the extra MSA; by default the model's"""
    note: str = ""
    """what predictions with the weights that are learned will be marked with"""
    axial: int = 1
    """ranks that share each chain's alignment and pairs (axial parallelism): each keeps a part of what the blocks
    leave for their backward"""
    nproc: int = 1
    """local ranks to launch; under torchrun leave it at 1"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, what in (("nproc", "local ranks"), ("axial", "ranks that share a chain")):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}; give the number of {what}, at least 1")
        if self.axial > 1:
            self._check_axial()
        if self.recompute.mode == "budget" and self.learns == "confidence":
            raise UserError(
                "recompute.mode=budget with learns=confidence: the blocks learn nothing, and keep nothing for a "
                "backward; leave out --recompute.mode"
            )
        if self.average is not None and not 0 <= self.average < 1:
            raise UserError(f"average={self.average}; give a decay from 0 to below 1, or None")
        if self.learns == "confidence" and self.is_preset:
            raise UserError(
                "learns=confidence teaches the confidence heads of given weights, and "
                f"model={self.model} has none; give --model FILE or FOLDER"
            )
        if self.learns == "confidence" and self.distill.predictions is not None:
            raise UserError(
                f"learns=confidence with distill.predictions={self.distill.predictions}: confidence is learned from "
                "experiments alone; leave out --distill.predictions"
            )
        for name in ("max_msa", "max_extra_msa"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value}; give at least 1 row")

    def _check_axial(self) -> None:
        """Raises UserError for what does not go with ranks that share a chain."""
        for there, given, why, instead in (
            (self.axial > self.data.crop, f"data.crop={self.data.crop}", "there are more ranks than rows of pairs",
             f"--axial {self.data.crop} at most"),
            (self.compile, "compile", "torch makes no graphs of the messages within a block", "no --compile"),
            (self.local.asynchronous is not None or self.rounds is not None, "local.*",
             "a worker is one rank", "no --local.*"),
            (self.noise_scale, "noise_scale", "a rank has the gradient of a part of each chain", "no --noise-scale"),
            (spec_of(self.optim.name).looks, f"optim.name={self.optim.name}",
             "it differentiates gradients, and the messages between the ranks have none", "--optim.name adamw"),
            *((size > 1, f"mesh.{name}={size}", "the ranks of a chain are its own axis", f"--mesh.{name} 1")
              for name in ("cp", "pp", "ep") for size in [getattr(self.mesh, name)]),
        ):  # fmt: skip
            if there:
                raise UserError(f"axial={self.axial} with {given}: {why}; use {instead}, or --axial 1")

    def unread(self) -> dict[str, str]:
        found = super().unread()
        if self.data.validation is None:
            found["evaluate_every"] = "and nothing is held out; give --data.validation FOLDER"
        if self.data.templates is None:
            found["data.max_template_date"] = "without templates; give --data.templates FOLDER"
        if not self.of_complexes:
            why = f"model={self.model} is of single chains; give --model of complexes, as model_1_multimer_v3"
            found |= dict.fromkeys(_OF_COMPLEXES, why)
        else:
            found["data.clusters"] = (
                f"model={self.model} is of complexes, which no cluster of chains tells apart; leave it out"
            )
        return found

    @property
    def axial_mesh(self) -> MeshConfig:
        """The mesh, whose axis tp is that of the ranks that share a chain."""
        return replace(self.mesh, tp=self.axial)

    @property
    def is_preset(self) -> bool:
        return self.model in _OWN_MODELS or self.model in _RELEASED

    @property
    def of_complexes(self) -> bool:
        """Whether the model is one of complexes; weights that are not there are none."""
        if self.is_preset:
            return self.model in MULTIMER_PRESETS or isinstance(_own_model(self.model), MultimerConfig)
        return Path(self.model).exists() and is_multimer(Path(self.model))

    @property
    def weights(self) -> Path | None:
        """The weights that the run starts from; None for a preset.  Raises UserError for weights that are not there."""
        if self.is_preset:
            return None
        if not Path(self.model).exists():
            known = ", ".join([*_OWN_MODELS, *_RELEASED])
            raise UserError(f"model={self.model}: there are no such weights, and the presets are {known}")
        return Path(self.model)


def _own_model(name: str) -> ModelConfig | None:
    return _OWN_MODELS[name]() if name in _OWN_MODELS else None


def model_config(config: FoldTrainConfig, of_weights: ModelConfig | None = None) -> ModelConfig:
    """The model of a run: that of its weights, or its preset, with the run's limits.

    Raises UserError for a model with templates where there are none, and the other way round.
    """
    name = config.model
    if of_weights is not None:
        model = of_weights
    else:
        model = _own_model(name) or released(name)
    of_complexes = isinstance(model, MultimerConfig)  # these are told of templates that are not there, too
    if of_complexes and config.data.decoys:
        raise UserError(
            f"data.decoys={config.data.decoys}: the sequences of complexes are not shuffled, and {name} learns from "
            "complexes; leave out --data.decoys"
        )
    if of_complexes and config.distill.predictions is not None:
        raise UserError(
            f"distill.predictions={config.distill.predictions}: predictions are learned from as single chains, and "
            f"{name} is of complexes; leave out --distill.predictions"
        )
    if model.templates is not None and config.data.templates is None and not of_complexes:
        raise UserError(
            f"{name} has templates; give --data.templates FOLDER, or use model_3, model_4 or model_5 (_ptm)"
        )
    if model.templates is None and config.data.templates is not None:
        raise UserError(f"{name} takes no templates; leave out --data.templates, or use model_1 or model_2 (_ptm)")
    given = {k: getattr(config, k) for k in ("num_recycles", "max_msa", "max_extra_msa")}
    model = replace(model, **{k: v for k, v in given.items() if v is not None})
    for rows in ("max_msa", "max_extra_msa"):
        if config.axial > getattr(model, rows):
            raise UserError(
                f"axial={config.axial} with {rows}={getattr(model, rows)}: there are more ranks than rows; use --axial "
                f"{getattr(model, rows)} at most"
            )
    return model


def plan_of(config: FoldTrainConfig, segments: Segments | None = None) -> ModelPlan:
    """How the model is spread, beside data parallelism; segments: those of mode budget."""
    return ModelPlan(tensor={} if config.axial == 1 else axial_plan(config.recompute, segments), recompute=segments)


def check_combination(config: FoldTrainConfig) -> MeshConfig:
    """The mesh with all its sizes.  Raises UserError for what cannot run together, before anything is loaded."""
    if config.data.structures is None:
        raise UserError(
            "megalith fold train needs --data.structures FOLDER of mmCIF files (--recipe tiny brings its own)"
        )
    if config.is_preset:
        model_config(config)
    return resolved_mesh(config)


def resolved_mesh(config: FoldTrainConfig) -> MeshConfig:
    """The mesh with all its sizes.  Raises UserError for a batch or a model that it does not divide."""
    if config.mesh.tp > 1:
        raise UserError(
            f"mesh.tp={config.mesh.tp}: the structure predictor has no tensor parallelism; use mesh.tp=1, or --axial "
            f"{config.mesh.tp} for ranks that share each chain"
        )
    ranks = ranks_of(config.nproc)
    if ranks % config.axial:
        raise UserError(
            f"axial={config.axial} does not divide the {ranks} rank{'s' * (ranks > 1)} that run; use --nproc "
            f"{-(-ranks // config.axial) * config.axial}, or fewer axial ranks"
        )
    mesh = config.axial_mesh.resolve(ranks, config.zero)
    batch, ranks = config.data.global_batch, mesh.data_ranks
    if batch % ranks:
        divisors = ", ".join(str(n) for n in range(1, batch + 1) if batch % n == 0)
        raise UserError(
            f"data.global_batch={batch} does not divide over {ranks} data-parallel ranks; "
            f"use one of {{{divisors}}} ranks, or a batch that is a multiple of {ranks}"
        )
    return mesh
