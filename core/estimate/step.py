"""A training step of any module before it runs: its own code, on tensors without memory and ranks that do not exist.

1. The model is spread over a mesh of pretended ranks by `core.compose` and gets its optimizer, as in a run.
2. A step of the run's runs on fake tensors, as rank 0: forwards, backwards, reduction, clipping's norm, update,
   publishing. Autograd keeps what it would keep, FSDP2 gathers what it would gather, checkpoints compute again.
3. Meanwhile an account notes which storages are alive (`core.trace.account`), which messages are sent over which axis
   (`core.comm.volume`), and what each operator computes and touches. The step is cut where its phases end.

Microbatches between the first and the last repeat the first, so two stand for any number.

Not seen: memory inside one operator, libraries' workspaces, the allocator's fragmentation. Operators are those of a
CPU, whose norms and attention keep a little more or less than a GPU's. A step that looks at values is refused, and so
are pipelines, whose stages wait for each other.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.comm.volume import Volume, count_volume
from core.compat import FakeTensor, FakeTensorMode, tree_leaves, without_modes
from core.compose import ParallelConfig, parallelize
from core.config import UserError, in_words
from core.mesh import MeshConfig, build_mesh, mesh_shape
from core.optim.build import OptimConfig, build_optimizer
from core.optim.clip import gradient_norm, scale_gradients
from core.parallel.parallel_model import ParallelModel
from core.placement.style import Plan
from core.placement.table import NO_PLAN, ModelPlan, parameter_names, set_parameter
from core.runtime import pretended
from core.trace.account import DEVICE_OF, MemoryAccount, plain_tensors
from core.trace.machine import Speed
from core.trace.tracer import operator_cost

_Work = dict[tuple[str, str, str], float]
"""FLOPs and seconds; calls and bytes of messages, by operation and axis."""


@dataclass(frozen=True)
class StepEstimate:
    """The estimate of the first rank, who has the largest shards.

    gradients_bytes    what the optimizer reads
    masters_bytes      those that are not the parameters themselves
    state_bytes        the optimizer's
    activations_bytes  what a microbatch's forward leaves for its backward
    phases             the most bytes alive at once in each part of the step
    flops, compute_s   of the whole step, what is recomputed included
    sent               messages and their bytes of the whole step, by operation and axis
    """

    parameters_bytes: int
    gradients_bytes: int
    masters_bytes: int
    state_bytes: int
    activations_bytes: int
    phases: dict[str, int]
    flops: float
    compute_s: float
    sent: Volume

    @property
    def optimizer_bytes(self) -> int:
        """All that is there for the update alone."""
        return self.masters_bytes + self.state_bytes

    @property
    def peak_bytes(self) -> int:
        """The fullest moment of the step: what the device must have."""
        return max(self.phases.values())

    def table(self) -> list[tuple[str, str]]:
        """Rows (kind, size) to print."""
        kinds = ("parameters", "gradients", "optimizer", "activations")
        peak_phase = max(self.phases, key=lambda phase: self.phases[phase])
        rows = [(kind, getattr(self, f"{kind}_bytes")) for kind in kinds]
        return [(name, in_words(n)) for name, n in (*rows, (f"peak ({peak_phase})", self.peak_bytes))]

    def messages(self) -> list[str]:
        """A line for each operation and axis."""
        return [
            f"{operation} over {axis}: {in_words(num_bytes)} in {calls:,} message{'s' * (calls > 1)}"
            for (operation, axis), num_bytes in sorted(self.sent.bytes.items())
            for calls in [self.sent.calls[operation, axis]]
        ]


def estimate_step(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    mesh: MeshConfig,
    parallel: ParallelConfig,
    speed: Speed,
    plan: ModelPlan | Plan = NO_PLAN,
    optimizer: OptimConfig | None = None,
    num_microbatches: int = 1,
) -> StepEstimate:
    """One optimizer step of `num_microbatches` microbatches.

    model  without values, on the meta device; it is spread, and of no more use
    loss   of a microbatch; makes its tensors itself, which then have no memory
    mesh   resolved

    Raises UserError for what `parallelize` refuses, for pipelines and Gemini, and for a step that looks at values.
    """
    if mesh.pp > 1:
        raise UserError(f"mesh.pp={mesh.pp}: a pipeline's step is not estimated for this model; use --mesh.pp 1")
    if parallel.gemini.budget is not None:
        raise UserError(f"gemini.budget={parallel.gemini.budget}: Gemini plans the step by itself; leave it out")
    with pretended(mesh_shape(mesh).size()):
        built, chosen = build_mesh(mesh, "cpu"), optimizer or OptimConfig()
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        eager = torch.compiler.set_stance("force_eager")
        with fake, eager, count_volume(built) as sent, _Account(speed, sent) as account:
            try:
                spread = parallelize(_without_memory(model), built, parallel, plan)
                made = build_optimizer(chosen, spread.masters)
                for master in spread.masters.values():
                    master.grad = torch.empty_like(master)
                account.updating = True
                made.step()  # its state comes to be
                account.updating = False
                spread.release()
                return _run(account, spread, made, loss, num_microbatches)
            except RuntimeError as error:  # torch: a value that is not there, an operator without shapes
                said = next(iter(str(error).splitlines()), "")
                why = f"cannot be foreseen without values ({type(error).__name__}: {said})"
                if account.updating:
                    given = f"optim.name={chosen.name} on {built.size()} ranks"
                    raise UserError(f"{given}: its update {why}; plan one rank, or another optimizer") from error
                raise UserError(f"this model's step {why}; plan one that does not look at them") from error


def _run(
    account: "_Account",
    spread: ParallelModel,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[nn.Module], Tensor],
    num_microbatches: int,
) -> StepEstimate:
    """The step, on a rank that has all that it keeps from step to step."""
    parameters = _storages(spread.model.parameters())
    masters = _storages(spread.masters.values())
    state = _storages(value for of_one in optimizer.state.values() for value in of_one.values())
    begun: list[_Work] = []
    activations, account.peak_bytes = 0, account.current_bytes

    def forward(_: int) -> Tensor:
        nonlocal activations
        if begun:
            account.end("backward")
        begun.append(account.work())
        before = account.current_bytes
        value = loss(spread.model)
        account.end("forward")
        activations = account.current_bytes - before
        return value

    few = min(num_microbatches, 2)
    spread.run(range(few), forward)
    account.end("backward")
    spread.reduce()
    gradients = _storages(master.grad for master in spread.masters.values() if master.grad is not None)
    gradient_norm(spread.masters.values(), spread.mesh)
    scale_gradients(spread.masters.values(), 0.5)
    account.updating = True
    spread.update(optimizer)
    account.updating = False
    account.end("update")
    spread.release()
    spread.publish()
    account.end("publish")
    # Those between the first microbatch and the last do what the first one does.
    after, more = account.work(), num_microbatches - few
    first, second = begun[0], begun[-1]
    work = {key: n - first.get(key, 0) + more * (second.get(key, 0) - first.get(key, 0)) for key, n in after.items()}
    calls, num_bytes = (
        Counter({key[1:]: round(n) for key, n in work.items() if key[0] == kind and n}) for kind in ("calls", "bytes")
    )
    return StepEstimate(
        parameters_bytes=sum(parameters.values()),
        gradients_bytes=sum(gradients.values()),
        masters_bytes=sum(size for key, size in masters.items() if key not in parameters),
        state_bytes=sum(state.values()),
        activations_bytes=activations,
        phases=account.phases,
        flops=work["flops", "", ""],
        compute_s=work["seconds", "", ""],
        sent=Volume(calls, num_bytes, account.sent.sizes),
    )


class _Account(MemoryAccount):
    """The account of fake tensors, phase by phase, and of what is done."""

    _plain_types = (*MemoryAccount._plain_types, FakeTensor)

    def __init__(self, speed: Speed, sent: Volume):
        super().__init__()
        self.speed, self.sent = speed, sent
        self.flops, self.seconds = 0.0, 0.0
        self.updating = False
        self.phases: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.updating and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1  # an update takes the same memory whatever a norm is
        if func is DEVICE_OF:
            return args[0].device
        if FakeTensor not in types and func.namespace == "aten" and _has_values((args, kwargs)):
            with without_modes():  # what a step knows without its data, such as the numbers of ranks
                return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            flops, num_bytes = operator_cost(func, args, kwargs or {}, result)
            self.flops += flops
            self.seconds += self.speed.seconds(flops, num_bytes)
        return result

    def end(self, phase: str) -> None:
        """A part of the step is over; what was alive meanwhile is noted as its."""
        self.phases[phase] = max(self.phases.get(phase, 0), self.peak_bytes)
        self.peak_bytes = self.current_bytes

    def work(self) -> _Work:
        """Since the account was opened."""
        found: _Work = {("flops", "", ""): self.flops, ("seconds", "", ""): self.seconds}
        for kind, counted in (("calls", self.sent.calls), ("bytes", self.sent.bytes)):
            found |= {(kind, *key): n for key, n in counted.items()}
        return found


def _without_memory(model: nn.Module) -> nn.Module:
    """The model with fake tensors in the place of its own; what modules share they go on sharing."""
    for names in parameter_names(model):
        given = model.get_parameter(names[0])
        made = nn.Parameter(torch.empty(given.shape, dtype=given.dtype), given.requires_grad)
        for name in names:
            set_parameter(model, name, made)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model


def _has_values(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) for leaf in tree_leaves(tree))


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes of each storage that some tensors lie in, once."""
    plain = [inner for tensor in tensors if isinstance(tensor, Tensor) for inner in plain_tensors(tensor)]
    return {id(storage): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in plain)}
