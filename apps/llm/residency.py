"""Gemini's plan of a run in its budget, before it runs: a rank's model is traced without memory and other ranks."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from apps.llm.config import PretrainConfig
from apps.llm.foreign import ForeignModel
from apps.llm.loss import token_loss
from core.config import UserError, in_words
from core.estimate.residency import GeminiEstimate, estimate_budget
from core.mesh import MeshConfig
from core.models.decoder import Decoder
from core.models.plan import decoder_plan
from core.placement.table import NO_PLAN
from core.precision import compute_dtype
from core.runtime import device_bytes
from core.trace.machine import Speed


def estimate_residency(
    config: PretrainConfig,
    mesh: MeshConfig,
    speed: Speed,
    link_bytes_per_s: float,
    foreign: ForeignModel | None = None,
    drives: Sequence[tuple[float, float]] | None = None,
) -> GeminiEstimate:
    """The plan of a rank's device, for the step of its largest microbatch; of all, where they run by blocks.

    mesh              with all its sizes
    link_bytes_per_s  between a device and the host, each way
    foreign           the model, where it is not the configuration's
    drives            see `core.estimate.residency.estimate_budget`

    Raises UserError for a budget in which no step fits, and for models and meshes whose step is not foreseen here.
    """
    given = f"megalith llm plan with gemini.budget={config.gemini.budget}"
    if mesh.pp > 1:
        raise UserError(
            f"{given} and mesh.pp={mesh.pp}: a stage's step is foreseen only by the ranks that run it; plan "
            "one with mesh.pp=1 and as many layers as a stage has, or start the run, which refuses what does not fit"
        )
    sizes = config.microbatch_rows(config.data.global_batch // mesh.data_ranks)
    if foreign is not None:
        model, plan = foreign.build(), NO_PLAN
        losses = [foreign.loss(rows, config.data.sequence_length) for rows in sizes]
    else:
        model, plan = _decoder(config, given), decoder_plan(config.model, config.mesh)
        batches = (microbatch(config, rows, config.data.sequence_length) for rows in sizes)
        losses = [partial(token_loss, batch=batch) for batch in batches]
    largest = losses[sizes.index(max(sizes))]
    made = model, largest, mesh, config, speed, link_bytes_per_s, plan, config.optim, losses
    return estimate_budget(*made, drives=drives)


def _decoder(config: PretrainConfig, given: str) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config.model)
    num_bytes = sum(p.numel() for p in model.parameters()) * compute_dtype(config.precision).itemsize
    if config.model.moe.num_experts and num_bytes > device_bytes("cpu", 4):
        raise UserError(
            f"{given}: routers look at values, so the step is run on drawn ones, which take {in_words(num_bytes)}, "
            "more than this machine has to spare; plan a smaller model, or leave the budget out"
        )
    return model


def microbatch(config: PretrainConfig, rows: int, length: int) -> dict[str, Tensor]:
    """A microbatch of so many rows, as the training loop hands it over."""
    ids = torch.zeros(rows, length, dtype=torch.int64)
    batch = {"input_ids": ids, "targets": ids.clone()}
    if config.data.mask_documents:
        batch |= {"documents": ids, "positions": torch.arange(ids.shape[1]).expand_as(ids)}
    return batch
