"""The configuration of the llm commands: the training run of core.train, plus a decoder and a corpus."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from apps.llm.corpus import DataConfig
from apps.llm.export import ExportDtype
from core.config import UserError
from core.estimate import RunShape
from core.mesh import MeshConfig, mesh_shape
from core.models.decoder import DecoderConfig
from core.models.plan import decoder_table
from core.optim.adamw import AdamWConfig
from core.optim.schedule import ScheduleConfig
from core.parallel.coded_shards import check_nodes
from core.parallel.compress import names_to_compress
from core.parallel.context import check_length
from core.parallel.local import LocalTrainingConfig, check_fragments
from core.runtime import ranks_of
from core.train import TrainConfig

Objective = Literal["clm", "mlm"]


def objective_of(model: DecoderConfig) -> Objective:
    """What a model learns: a causal one the next token, one that attends both ways the tokens that masks hide."""
    return "clm" if model.causal else "mlm"


@dataclass(frozen=True)
class PretrainConfig(TrainConfig):
    """Train a decoder, or a masked language model, on a corpus."""

    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("objective", "data.path", "data.tokenizer", "data.sequence_length", "data.global_batch"),
        *TrainConfig.ESSENTIAL,
        *("mesh.ep", "nproc"),
    )
    CHOOSES_SEGMENTS: ClassVar[bool] = True

    model: DecoderConfig = field(
        default_factory=lambda: DecoderConfig(vocab_size=257, dim=64, num_layers=16, num_heads=8, ffn_dim=256)
    )
    objective: Objective | None = None
    """clm: each token from those before it; mlm: masked tokens from all others; by default what the model is for, and
    without --recipe mlm takes the recipe debug_bert"""
    data: DataConfig = field(default_factory=DataConfig)
    nproc: int = 1
    """local ranks to launch; under torchrun leave it at 1"""
    kernels: bool = False
    """on a GPU: all of norms, attention, rotary positions and SwiGLU by the kernels of core.kernels, not by torch's"""
    shown_kernels: bool = True
    """on a GPU: without --kernels those of them that a committed table says this GPU has shown right and not slower;
    not with hessian_free, for which a norm's kernel lacks a second derivative"""
    hf: bool = True
    """at the end also write the model as a Hugging Face folder, in --out/hf"""
    hf_dtype: ExportDtype | None = None
    """format of that folder's weights: fp32, bf16 or fp16; by default that of --precision (fp32 of fp64)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hf_dtype is not None and not self.hf:
            raise UserError(f"hf_dtype={self.hf_dtype} without a folder: hf is off; leave hf_dtype out")
        if self.nproc < 1:
            raise UserError(f"nproc={self.nproc}; give the number of local ranks, at least 1")
        self.check_positions()

    def check_positions(self) -> None:
        """Raises UserError for sequences that the model has no positions for."""
        if self.model.positions == "learned" and self.data.sequence_length > self.model.max_length:
            raise UserError(
                f"data.sequence_length={self.data.sequence_length} and the model has positions for "
                f"{self.model.max_length}; shorten the sequence or raise model.max_length"
            )

    def unread(self) -> dict[str, str]:
        found = super().unread()
        if self.kernels:
            found["shown_kernels"] = "with kernels, which takes them all; leave one out"
        elif self.optim.name == "hessian_free":
            found["shown_kernels"] = "with optim.name=hessian_free, which takes none unless --kernels is given"
        if not self.data.heldout_fraction:
            found["evaluate_every"] = "and nothing is held out; give --data.heldout-fraction"
        return found


def unread_beside_a_model(data: DataConfig) -> dict[str, str]:
    """Options of a tokenizer of the corpus's own, where there is a model's; see `core.config.Unread`."""
    why = "beside --model, whose tokenizer is taken; leave it out"
    found = {"data.vocab_size": why, "data.mask_token": why}
    if data.tokenizer == "bpe":
        found["data.tokenizer"] = "bpe beside --model, whose tokenizer is taken; give byte or a folder, or leave it out"
    return found


@dataclass(frozen=True)
class FinetuneConfig(PretrainConfig):
    """Go on training a model that exists: a Hugging Face folder, or a run folder of `megalith llm pretrain`."""

    ESSENTIAL: ClassVar[tuple[str, ...]] = ("source", "data.pairs", *PretrainConfig.ESSENTIAL)
    CALLED: ClassVar[Mapping[str, str]] = {**PretrainConfig.CALLED, "source": "model"}

    source: Path = Path()
    """the folder of the model; its tokenizer is taken from there too, unless data.tokenizer names another"""

    def unread(self) -> dict[str, str]:
        return super().unread() | unread_beside_a_model(self.data)


FINETUNE = FinetuneConfig(
    data=DataConfig(global_batch=8, sequence_length=256),
    steps=200,
    optim=AdamWConfig(lr=5e-5, weight_decay=0.0, schedule=ScheduleConfig(shape="linear", warmup_steps=10, final=0.0)),
    out=Path("runs/finetune"),
)
"""What `megalith llm finetune` has by default."""


def check_combination(config: PretrainConfig) -> MeshConfig:
    """The mesh with all its sizes.  Raises UserError for what cannot run together, before anything is loaded."""
    check_objective(config)
    mesh = resolved_mesh(config)
    names_to_compress(decoder_table(config.model, mesh, config.zero), config.comm)
    check_nodes(config.comm, mesh_shape(mesh))
    if mesh.pp > 1:
        config.pipeline.check_stages(mesh.pp, config.model.num_layers)
        if config.model.tied_head:
            config.pipeline.check_shared("embedding.tokens.weight")
    check_length(config.data.sequence_length, mesh.cp)
    if config.local.every:
        check_fragments(config.local.fragments, config.model.num_layers)
    return mesh


def run_shape(config: PretrainConfig, rows: int | None = None) -> RunShape:
    """The shape of a run of this configuration: how it cuts model and batch.

    rows  of the global batch; by default the full one
    """
    mesh = check_combination(config)
    microbatches = config.microbatch_rows((rows or config.data.global_batch) // mesh.data_ranks)
    assert mesh.dp_replicate is not None
    assert mesh.dp_shard is not None
    return RunShape(
        precision=config.precision,
        optimizer=config.optim,
        dp_replicate=mesh.dp_replicate,
        dp_shard=mesh.dp_shard,
        cp=mesh.cp,
        cp_exchange=mesh.exchange_ranks,
        tp=mesh.tp,
        tp_mode=mesh.tp_mode,
        tp_depth=mesh.tp_depth,
        pp=mesh.pp,
        pipeline=config.pipeline,
        ep=mesh.ep,
        zero=config.zero,
        recompute=config.recompute.mode,
        recompute_every=config.recompute.every,
        recompute_bits=config.recompute.bits,
        microbatch_size=max(microbatches),
        num_microbatches=len(microbatches),
        reduce_each=config.reduce_each,
        comm=config.comm,
        sequence_length=config.data.sequence_length,
        local_every=config.local.every,
        **(local_shape(config.local) if config.local.every else {}),
    )


def local_shape(local: LocalTrainingConfig) -> dict[str, Any]:
    """What `RunShape` asks of rounds."""
    return {
        "outer_momentum": local.outer_momentum > 0,
        "local_code": local.code,
        "local_error": local.code is not None and local.error_feedback,
        "fragments": local.fragments,
    }


def check_objective(config: PretrainConfig) -> None:
    """Raises UserError for an objective that is not the model's, and for pairs of a masked language model."""
    own = objective_of(config.model)
    if config.objective not in (None, own):
        sees = (
            "attends to earlier tokens alone" if own == "clm" else "attends both ways, and would see what it predicts"
        )
        other = "use --recipe debug_bert or bert_base" if own == "clm" else f"use --objective {own}"
        raise UserError(
            f"objective={config.objective} and a model of family {config.model.family}, which {sees}; {other}"
        )
    if own == "mlm" and config.data.pairs:
        raise UserError(
            "data.pairs with objective=mlm: a completion is predicted from what is before it, and a masked token from "
            "both sides; leave --data.pairs out"
        )


def resolved_mesh(config: PretrainConfig) -> MeshConfig:
    """The same of any model.  Raises UserError for ranks that the mesh or the batch does not divide over."""
    mesh = config.mesh.resolve(ranks_of(config.nproc), config.zero)
    for _, batch in config.data.batch_size.stages:
        check_divides(batch, mesh.data_ranks)
        config.microbatch_rows(batch // mesh.data_ranks)  # refuses what is too few for a schedule
    return mesh


def check_divides(batch: int, ranks: int) -> None:
    """Raises UserError where `batch` rows cannot be dealt evenly to `ranks` data-parallel ranks."""
    if batch % ranks:
        divisors = ", ".join(str(n) for n in range(1, batch + 1) if batch % n == 0)
        raise UserError(
            f"a global batch of {batch} rows (--data.global-batch, --data.ramp) does not divide over {ranks} "
            f"data-parallel ranks; use one of {{{divisors}}} ranks, or a batch that is a multiple of {ranks}"
        )
