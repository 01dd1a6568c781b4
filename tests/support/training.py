"""A short training run of a tiny decoder on any mesh, and its comparison with one rank."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from core.layout import full_tensor, layout_of
from core.mesh import MeshConfig, build_mesh, data_axis
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import tensor_parallel_plan
from core.optim.build import OptimConfig, build_optimizer
from core.parallel.compose import ParallelConfig, parallelize

LR = 1e-2


@dataclass(frozen=True)
class Case:
    """One run: a model, a mesh, and how it is parallelised."""

    model: DecoderConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    parallel: ParallelConfig = field(default_factory=lambda: ParallelConfig(precision="fp64"))
    steps: int = 10
    batch: int = 12
    length: int = 7
    microbatches: int = 1
    seed: int = 0


def batch_of(case: Case, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, case.model.vocab_size, (case.batch, case.length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, : step % 3] = -100
    return {"input_ids": tokens[:, :-1], "targets": targets}


def run(case: Case) -> dict[str, Any]:
    """Losses, and per parameter its start and its displacement, whole, on every rank."""
    mesh = build_mesh(case.mesh.resolve(torch.distributed.get_world_size(), case.parallel.zero), "cpu")
    with torch.device("meta"):
        model = Decoder(case.model)
    model = model.to(torch.float64)
    data = parallelize(
        model,
        mesh,
        case.parallel,
        plan=tensor_parallel_plan(case.model),
        materialise=lambda m: initialise(m, case.seed),
    )
    optimizer = build_optimizer(OptimConfig(lr=LR, weight_decay=0.1, clip_norm=None), data.masters)
    start = {n: full_tensor(m).clone() for n, m in data.masters.items()}
    losses = [_step(case, data, optimizer, mesh, step) for step in range(case.steps)]
    displacement = {n: full_tensor(m) - start[n] for n, m in data.masters.items()}
    held = {n: layout_of(m).local_shape() for n, m in data.masters.items()}
    return {"losses": losses, "start": start, "displacement": displacement, "held": held}


def _step(case: Case, data, optimizer, mesh, step: int) -> float:
    dp = data_axis(mesh)
    batch = batch_of(case, step)
    count = int((batch["targets"] != -100).sum())
    rows = case.batch // dp.size()
    mine = {k: v[dp.get_local_rank() * rows :][:rows] for k, v in batch.items()}
    total = torch.zeros((), dtype=torch.float64)
    parts = [dict(zip(mine, values)) for values in zip(*(v.chunk(case.microbatches) for v in mine.values()))]
    for index, part in enumerate(parts):
        with data.microbatch(last=index == len(parts) - 1):
            loss = data.model(part["input_ids"], targets=part["targets"]) / count
            loss.backward()
            total += loss.detach()
    data.reduce()
    optimizer.step()
    data.publish()
    data.release()
    torch.distributed.all_reduce(total, group=dp.get_group())
    return float(total)


def largest_difference(found: dict[str, Any], expected: dict[str, Any], steps: int) -> dict[str, float]:
    """Relative differences: of the losses, and of each parameter's displacement.

    A displacement is compared with the larger of its own norm and 1e-3 lr steps sqrt(n): a parameter whose true
    gradient is zero (a key bias) moves by rounding noise that Adam blows up.
    """
    differences = {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(found["losses"], expected["losses"], strict=True)),
    }
    for name, want in expected["displacement"].items():
        assert torch.equal(found["start"][name], expected["start"][name]), f"{name} does not start alike"
        floor = 1e-3 * LR * steps * want.numel() ** 0.5
        difference = (found["displacement"][name] - want).norm() / max(float(want.norm()), floor)
        differences[name] = float(difference)
    return differences


def same_as_single(ranks, num_ranks: int, case: Case, tolerance: float = 1e-10) -> list[dict[str, Any]]:
    """Run the case on one rank and on `num_ranks`; every rank must come to the single rank's losses and weights."""
    single = replace(case, mesh=MeshConfig(), parallel=ParallelConfig(precision="fp64"), microbatches=1)
    expected = reference(ranks, single)
    results = ranks(num_ranks).run(run, case)
    for result in results:
        differences = largest_difference(result, expected, case.steps)
        worst = max(differences, key=lambda name: differences[name])
        assert differences[worst] <= tolerance, f"{worst} differs by {differences[worst]:.3g} from one rank"
    return results


_REFERENCES: dict[Case, dict[str, Any]] = {}


def reference(ranks, case: Case) -> dict[str, Any]:
    """The run on one rank; each once a session."""
    if case not in _REFERENCES:
        _REFERENCES[case] = ranks(1).run(run, case)[0]
    return _REFERENCES[case]
