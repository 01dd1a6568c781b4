"""What a real step of a decoder allocates, tensor by tensor: what the estimator has to agree with."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from core.compose import ParallelConfig, parallelize
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import pipeline_plan, tensor_parallel_plan
from core.optim.build import OptimConfig, build_optimizer
from core.placement.table import ModelPlan
from core.trace.account import MemoryAccount


def accounted_peak_bytes(
    model: DecoderConfig, mesh: DeviceMesh, parallel: ParallelConfig, rows: int, length: int, num_microbatches: int
) -> int:
    """The most bytes of tensors alive at once on this rank in its second step, when the optimizer's state exists."""
    with torch.device("meta"):
        decoder = Decoder(model)
    plan = tensor_parallel_plan(model)
    spread = parallelize(
        decoder,
        mesh,
        parallel,
        ModelPlan(tensor=plan, pipeline=pipeline_plan()),
        materialise=lambda m: initialise(m, 0),
    )
    del decoder
    optimizer = build_optimizer(OptimConfig(), spread.masters)
    ids = torch.randint(model.vocab_size, (rows, length))

    def step() -> None:
        spread.run([ids] * num_microbatches, lambda ids: spread.model(ids, targets=ids))
        spread.reduce()
        optimizer.step()
        spread.release()
        spread.publish()

    step()
    with MemoryAccount() as account:
        account.add(spread.model.parameters())
        account.add(spread.masters.values())
        account.add(value for state in optimizer.state.values() for value in state.values())
        step()
    return account.peak_bytes
