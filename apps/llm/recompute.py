"""`--recompute.mode budget`: what a run computes again, found before it starts."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from apps.llm.config import PretrainConfig, check_combination
from apps.llm.foreign import ForeignModel
from apps.llm.loss import token_loss
from apps.llm.residency import microbatch
from core.auto.checkpointing import Checkpointing
from core.estimate import RunShape, decoder_shape
from core.estimate.pipeline import stage_costs
from core.mesh import MeshConfig
from core.models.decoder import Decoder
from core.models.plan import decoder_plan
from core.trace.machine import Bandwidth, Speed
from core.train.segments import choose_segments, lines_here


class OwnModel:
    """The configuration's decoder, as `ForeignModel` is one of a folder."""

    def __init__(self, config: PretrainConfig):
        self._config, self.num_parameters = config, config.model.num_parameters()
        run = RunShape(microbatch_size=1, sequence_length=config.data.sequence_length)
        self.plan = decoder_plan(config.model, check_combination(config), stage_costs(decoder_shape(config.model), run))

    def build(self) -> nn.Module:
        with torch.device("meta"):
            return Decoder(self._config.model)

    def loss(self, rows: int, length: int) -> Callable[[nn.Module], Tensor]:
        return partial(token_loss, batch=microbatch(self._config, rows, length))


def chosen(
    config: PretrainConfig, mesh: MeshConfig, speed: Speed, model: ForeignModel | OwnModel, kind: str, link: Bandwidth
) -> Checkpointing:
    """The segments of a model.  Raises UserError for a budget in which none fit.

    kind, link  cpu or cuda, of the device, and its link to the host
    """
    rows = config.microbatch_rows(config.data.global_batch // mesh.data_ranks)
    loss = model.loss(max(rows), config.data.sequence_length)
    lines = lines_here(config.recompute, kind, link)
    return choose_segments(model.build(), loss, mesh, config, speed, model.plan, config.optim, len(rows), lines)
