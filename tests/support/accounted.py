"""What a real step allocates, tensor by tensor, and sends: what the estimator has to agree with."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from core.comm.volume import Volume, count_volume
from core.compose import ParallelConfig, parallelize
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import pipeline_plan, tensor_parallel_plan
from core.optim.build import OptimConfig, build_optimizer
from core.optim.clip import gradient_norm
from core.placement.table import NO_PLAN, ModelPlan
from core.trace.account import MemoryAccount


def accounted_peak_bytes(
    model: DecoderConfig, mesh: DeviceMesh, parallel: ParallelConfig, rows: int, length: int, num_microbatches: int
) -> int:
    """The most bytes of tensors alive at once on this rank in a decoder's step."""
    return accounted_decoder(model, mesh, parallel, rows, length, num_microbatches)[0]


def accounted_decoder(
    model: DecoderConfig, mesh: DeviceMesh, parallel: ParallelConfig, rows: int, length: int, num_microbatches: int
) -> tuple[int, Volume]:
    """The same, and what is sent."""
    with torch.device("meta"):
        decoder = Decoder(model)
    plan = ModelPlan(tensor=tensor_parallel_plan(model), pipeline=pipeline_plan())
    loss = partial(decoder_loss, rows, length)
    return accounted_step(decoder, loss, mesh, parallel, num_microbatches, plan, lambda m: initialise(m, 0))


def decoder_loss(rows: int, length: int, model: nn.Module) -> Tensor:
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return model(ids, targets=ids)


def accounted_step(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    mesh: DeviceMesh,
    parallel: ParallelConfig,
    num_microbatches: int = 1,
    plan: ModelPlan = NO_PLAN,
    materialise: Callable[[nn.Module], None] = lambda model: None,
) -> tuple[int, Volume]:
    """The same of any model, in a step when the optimizer's state exists."""
    spread = parallelize(model, mesh, parallel, plan, materialise=materialise)
    del model
    optimizer = build_optimizer(OptimConfig(), spread.masters)

    def step(num_microbatches: int) -> None:
        spread.run(range(num_microbatches), lambda _: loss(spread.model))
        spread.reduce()
        gradient_norm(spread.masters.values(), spread.mesh)
        optimizer.step()
        spread.release()
        spread.publish()

    if mesh.size() > 1:  # ranks keep what they have met: buffers of messages, what pipeline stages send
        step(min(num_microbatches, 2))
    else:
        for master in spread.masters.values():
            master.grad = torch.zeros_like(master)
        optimizer.step()
        spread.release()
    with count_volume(mesh) as sent, MemoryAccount() as account:
        account.add(spread.model.parameters())
        account.add(spread.masters.values())
        account.add(value for state in optimizer.state.values() for value in state.values())
        step(num_microbatches)
    return account.peak_bytes, sent
