"""Gemini's plan of a run in its budget, before it runs: a rank's model is traced without memory and other ranks."""

import torch
from torch import Tensor, nn

from apps.llm.config import PretrainConfig, check_combination
from apps.llm.loss import token_loss
from core.compose import cut
from core.config import UserError, in_words
from core.estimate.residency import GeminiEstimate, estimate_gemini
from core.gemini.tier import parse_bytes
from core.mesh import build_mesh, gradient_axis, shard_axis
from core.models.decoder import Decoder
from core.models.plan import decoder_plan
from core.precision import compute_dtype, master_dtype
from core.runtime import device_bytes, pretended
from core.trace.machine import Speed, described_bandwidth
from core.trace.tracer import trace_step


def estimate_residency(config: PretrainConfig, speed: Speed, link_bytes_per_s: float) -> GeminiEstimate:
    """The plan of a rank's device, for the step of its largest microbatch.

    link_bytes_per_s  between a device and the host, each way

    Raises UserError for a budget in which no step fits, and for models and meshes whose step is not foreseen here.
    """
    assert config.gemini.budget is not None
    mesh_config = check_combination(config)
    given = f"megalith llm plan with gemini.budget={config.gemini.budget}"
    if mesh_config.pp > 1:
        raise UserError(
            f"{given} and mesh.pp={mesh_config.pp}: a stage's step is foreseen only by the ranks that run it; plan "
            "one with mesh.pp=1 and as many layers as a stage has, or start the run, which refuses what does not fit"
        )
    with torch.device("meta"):
        model = Decoder(config.model)
    num_bytes = sum(p.numel() for p in model.parameters()) * compute_dtype(config.precision).itemsize
    if config.model.moe.num_experts and num_bytes > device_bytes("cpu", 4):
        raise UserError(
            f"{given}: routers look at values, so the step is run on drawn ones, which take {in_words(num_bytes)}, "
            "more than this machine has to spare; plan a smaller model, or leave the budget out"
        )
    sizes = mesh_config.sizes()
    with pretended(int(torch.Size(sizes).numel())):
        mesh = build_mesh(mesh_config, "cpu")
        cut(model, mesh, config, decoder_plan(config.model, config.mesh))
        nn.Module.to(model, compute_dtype(config.precision))
        batch = _batch(config, mesh_config.data_ranks)
        step = trace_step(model, lambda model: token_loss(model, batch), speed, draws=True)
        ranks = shard_axis(mesh).size() if config.zero else 1
        return estimate_gemini(
            model,
            step,
            parse_bytes(config.gemini.budget),
            described_bandwidth(speed, link_bytes_per_s, ranks),
            config.optim,
            master_dtype(config.precision),
            ranks=ranks,
            sends=gradient_axis(mesh).size() > 1,
            policy=config.gemini.policy,
        )


def _batch(config: PretrainConfig, data_ranks: int) -> dict[str, Tensor]:
    """The largest microbatch of a rank, as the training loop hands it over."""
    rows = max(config.microbatch_rows(config.data.global_batch // data_ranks))
    ids = torch.zeros(rows, config.data.sequence_length, dtype=torch.int64)
    batch = {"input_ids": ids, "targets": ids.clone()}
    if config.data.mask_documents:
        batch |= {"documents": ids, "positions": torch.arange(ids.shape[1]).expand_as(ids)}
    return batch
