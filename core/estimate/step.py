"""A training step of any module before it runs: its own code, on tensors without memory and ranks that do not exist.

1. The model is spread over a mesh of pretended ranks by `core.compose` and gets its optimizer, as in a run. Blocks
   that are alike are traced once (`core.trace.alike`): the step with few of them and with one period more says to the
   byte what it takes with all.
2. A step of the run's runs on fake tensors, as rank 0: forwards, backwards, reduction, clipping's norm, update,
   publishing. Autograd keeps what it would keep, FSDP2 gathers what it would gather, checkpoints compute again. Of a
   pipeline those ranks' steps run of which one is the fullest, each by itself (`core.estimate.stages`).
3. Meanwhile an account notes which storages are alive (`core.trace.account`), which messages are sent over which axis
   (`core.comm.volume`), and what each operator computes and touches. The step is cut where its phases end.

Microbatches between the first and the last repeat the first, so two stand for any number, and three where the first
gathers what others read in a second copy. Routers send each expert as
many rows as another (`core.trace.balanced`), as many as it has room for.

Not seen: memory inside one operator, libraries' workspaces, the allocator's fragmentation. Operators are those of a
CPU, whose norms and attention keep a little more or less than a GPU's. A step that looks at values is refused.
"""

import gc
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from core.comm.volume import Volume, count_volume
from core.compat import FakeTensor, FakeTensorMode, tree_leaves, without_modes
from core.compose import ParallelConfig, parallelize, with_stages
from core.config import UserError, in_words
from core.estimate.growth import cuts_of, plan_of
from core.estimate.stages import ActionSums, Sums, added, few_microbatches, telling_ranks
from core.mesh import MeshConfig, build_mesh, mesh_shape
from core.optim.build import OptimConfig, build_optimizer
from core.optim.clip import gradient_norm, scale_gradients
from core.optim.home import WholeMatrixOptimizer
from core.optim.spec import spec_of
from core.parallel.correction import CORRECTIONS
from core.parallel.one_bit import InSigns
from core.parallel.parallel_model import ParallelModel
from core.parallel.pipeline.run import Pipeline
from core.parallel.pipeline.schedule import SCHEDULES, Action, Kind, PipelineConfig, schedule
from core.parallel.pipeline.shapes import Form
from core.parallel.pipeline.stages import split_into_stages
from core.parallel.zero_one import ZeroOne
from core.placement.stages import StageSplit
from core.placement.style import Plan
from core.placement.table import NO_PLAN, ModelPlan, model_plan, parameter_names, set_parameter
from core.runtime import pretended
from core.trace.account import DEVICE_OF, MemoryAccount, no_garbage, plain_tensors
from core.trace.alike import Cut, Growth, Label, NotAlike, Section, Traced, grown, shortened
from core.trace.balanced import balanced_loads
from core.trace.cost import operator_cost
from core.trace.machine import Speed
from core.trace.tracer import tensors_in

log = logging.getLogger("estimate")


@dataclass(frozen=True)
class StepEstimate:
    """The estimate of the first rank, who has the largest shards; of a pipeline, of the fullest stage's.

    gradients_bytes    of masters, also of a copy that another stage's rank updates
    masters_bytes      those that are not the parameters themselves
    state_bytes        the optimizer's; counters_bytes of them count steps
    activations_bytes  what a microbatch's forward leaves for its backward; of a pipeline's first backward, those of all
                       microbatches that are in flight then
    phases             the most bytes alive at once in each part of the step
    flops, compute_s   of the whole step, what is recomputed included; seconds of the stage that takes longest, without
                       the time in which it waits for others
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
    counters_bytes: int = 0

    @property
    def optimizer_bytes(self) -> int:
        """All that is there for the update alone."""
        return self.masters_bytes + self.state_bytes

    @property
    def average_bytes(self) -> int:
        """Of a moving average of the weights, which is as large as the masters; not part of the other figures."""
        return self.masters_bytes or self.parameters_bytes

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
    """One optimizer step of `num_microbatches` microbatches, of the fullest rank.

    model  without values, on the meta device; it may be spread, and be of no more use
    loss   of a microbatch; makes its tensors itself, which then have no memory
    mesh   resolved

    Raises UserError for what `parallelize` refuses, for Gemini, for an optimizer that evaluates the model, and for a
    step that looks at values.
    """
    options = optimizer or OptimConfig()
    if parallel.rounds is not None:
        raise UserError(
            f"local.every={parallel.rounds.every}: a traced step is one that all ranks take together; leave it out, "
            "and add what docs/local_training.md says of a round"
        )
    if spec_of(options.name).looks:
        raise UserError(
            f"optim.name={options.name}: its step evaluates the model, which a traced one does not show; plan another "
            "optimizer, such as adamw, and add what docs/optim.md says of its memory"
        )
    spec = SCHEDULES[parallel.pipeline.schedule]
    if parallel.pipeline.has_replicas:
        raise UserError(
            "pipeline.replicas: a step is foreseen of stages of one rank each; leave it out, or plan our decoder, of "
            "which there are closed forms"
        )
    if mesh.pp > 1 and spec.depth(mesh.pp) > 1:
        raise UserError(
            f"pipeline.schedule={parallel.pipeline.schedule} on mesh.pp={mesh.pp}: its stages hold more versions than "
            "are foreseen of any model; plan --pipeline.schedule 2bw, or our decoder, of which there are closed forms"
        )
    ahead = mesh.pp > 1 and spec.runs_ahead
    traced = replace(parallel, pipeline=_drained(parallel.pipeline)) if ahead else parallel
    step = _Step(mesh, traced, speed, model_plan(plan), options, loss, num_microbatches, overlaps=ahead)
    places = step.of_places(model)
    found = [
        _overlapping(one, rank, mesh, parallel, num_microbatches) if ahead else one for rank, one in places.items()
    ]
    fullest = max(found, key=lambda estimate: estimate.peak_bytes)
    return replace(fullest, compute_s=max(estimate.compute_s for estimate in found))


def _drained(pipeline: PipelineConfig) -> PipelineConfig:
    """The schedule of whose actions the steps of one that runs ahead are cut."""
    return replace(pipeline, schedule="1f1b", correction="none", correction_strength=None, replicas=())


def _overlapping(
    one: StepEstimate, rank: int, mesh: MeshConfig, parallel: ParallelConfig, num_microbatches: int
) -> StepEstimate:
    """A step among many, of what it takes alone: all the while with several versions, and gradients of more steps.

    Left out is the message of a few numbers by which stages tell each other the norm.
    """
    pipeline = parallel.pipeline
    spec, correction = SCHEDULES[pipeline.schedule], CORRECTIONS[pipeline.correction].make
    delay = spec.delay(rank, mesh.pp)
    shards = (mesh.dp_shard or 1) * mesh.cp if parallel.zero else 1
    of_masters = one.masters_bytes or one.parameters_bytes // shards
    # Masters that are views of one version would hold all of it, and those of other values share nothing.
    own = 0 if one.masters_bytes or (shards == 1 and not correction.leads(delay)) else of_masters
    versions = (spec.versions(rank, mesh.pp) - 1) * one.parameters_bytes
    gradients = (spec.gradients(rank, mesh.pp) - 1) * one.gradients_bytes
    state = len(correction.keys(delay)) * of_masters
    computing = max(
        (number - 1) * one.parameters_bytes + (steps - 1) * one.gradients_bytes
        for number, steps in spec.held((1,) * mesh.pp, rank, num_microbatches)
    )
    more = {phase: computing if phase in ("forward", "backward") else versions + gradients for phase in one.phases}
    return replace(
        one,
        parameters_bytes=one.parameters_bytes + versions,
        gradients_bytes=one.gradients_bytes + gradients,
        masters_bytes=one.masters_bytes + own,
        state_bytes=one.state_bytes + state,
        phases={phase: num_bytes + more[phase] + own + state for phase, num_bytes in one.phases.items()},
    )


def estimate_places(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    mesh: MeshConfig,
    parallel: ParallelConfig,
    plan: ModelPlan | Plan,
    optimizer: OptimConfig,
    num_microbatches: int,
    places: Collection[int],
) -> dict[int, StepEstimate]:
    """The same of the first rank of each of some places of a pipeline, and of its beginning; without one of that alone.

    Arguments and errors as of `estimate_step`.
    """
    step = _Step(mesh, parallel, Speed(1e12, 1e12), model_plan(plan), optimizer, loss, num_microbatches)
    return step.of_places(model, places)


@dataclass
class _Step:
    """The step of a run, to be traced on any rank and with any number of blocks.

    overlaps  with steps behind it, so that a rank always has forwards behind its first gradients
    form      of what pipeline stages hand on, once the first one has been traced
    axes      sizes of those that messages are counted by
    """

    sizes: MeshConfig
    parallel: ParallelConfig
    speed: Speed
    plan: ModelPlan
    options: OptimConfig
    loss: Callable[[nn.Module], Tensor]
    num_microbatches: int
    overlaps: bool = False
    form: Form | None = None
    axes: dict[str, int] = field(default_factory=dict)

    def split(self, model: nn.Module) -> StageSplit | None:
        """The stages of a pipeline.  Raises UserError where no plan says them, nor the model's forward."""
        if self.sizes.pp == 1:
            return None
        self.plan = with_stages(self.plan, model, self.sizes.pp)
        assert self.plan.pipeline is not None
        return split_into_stages(model, self.plan.pipeline, self.sizes.pp, self.parallel.pipeline)

    def of_places(self, model: nn.Module, places: Collection[int] | None = None) -> dict[int, StepEstimate]:
        """The estimates of some of a pipeline's ranks, by default of those of which one is the fullest.

        The first is always among them: only it knows the form of what stages hand on.
        """
        if self.parallel.gemini.budget is not None:
            given = f"gemini.budget={self.parallel.gemini.budget}"
            raise UserError(f"{given}: Gemini plans the step by itself; leave it out")
        split = self.split(model)
        ranks: Collection[int] = [0]
        if split is not None:
            telling = telling_ranks(split, self.parallel.pipeline, self.num_microbatches)
            ranks = telling if places is None else sorted({0, *places})
        return {rank: self.of_rank(model, split, rank) for rank in ranks}

    def of_rank(self, model: nn.Module, split: StageSplit | None, rank: int) -> StepEstimate:
        """The estimate of the first rank of a pipeline's stage; the model is left as it was."""
        shape = mesh_shape(self.sizes)
        behind = shape.shape[shape.mesh_dim_names.index("pp") + 1 :] if "pp" in shape.mesh_dim_names else ()
        given = model, self.sizes, self.parallel, self.plan, split, rank
        with pretended(shape.size(), rank * math.prod(behind)):
            mesh = build_mesh(self.sizes, "cpu")
            trace = partial(self.trace, model, mesh, split)
            cuts = cuts_of(*given)
            growths = [growth for cut in cuts for growth in cut.growths]
            if growths:
                try:
                    few, *more = (trace(cuts, longer) for longer in (None, *growths))
                    return _estimate(*grown(few, list(zip(growths, more, strict=True))), self.axes)
                except NotAlike as why:
                    log.info("all blocks are traced, since the step does not grow with them evenly: %s", why)
            return _estimate(*grown(trace(cuts_of(*given, few=False))), self.axes)

    def trace(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        split: StageSplit | None,
        cuts: Sequence[Cut],
        longer: Growth | None = None,
    ) -> Traced:
        """The step with the blocks that the cuts leave.  Raises NotAlike where it is known not to grow with them."""
        with traced(mesh, self.speed) as account:
            try:
                parallel = self.parallel if split is None else _with_split(self.parallel, cuts[0], longer)
                few, plan = shortened(model, cuts, longer), plan_of(self.plan, cuts, longer)
                spread = parallelize(without_memory(few), mesh, parallel, plan)
                optimizer = build_optimizer(self.options, spread.masters)
                if any(cut.growths for cut in cuts) and isinstance(optimizer, WholeMatrixOptimizer):
                    raise NotAlike("whole matrices are dealt out by their cost")
                if isinstance(spread.compression, InSigns):  # a step behind those that are sent whole
                    spread.compression.settle()
                    spread.compression.attach(NoMoments(optimizer))
                make_state(account, spread, optimizer)
                for cut in cuts:
                    account.watch(spread.model, cut.name)
                found = self._run(account, spread, optimizer)
                self.axes |= account.sent.sizes
                return found
            except Exception as error:  # of the model's own code, which may count its blocks by a number of its own
                if any(cut.growths for cut in cuts):
                    raise NotAlike(f"with fewer blocks: {error}") from error
                if isinstance(error, RuntimeError):  # torch: a value that is not there, an operator without shapes
                    raise self._refusal(account, error) from error
                raise

    def _refusal(self, account: "StepAccount", error: RuntimeError) -> UserError:
        said = next(iter(str(error).splitlines()), "")
        why = f"cannot be foreseen without values ({type(error).__name__}: {said})"
        if account.updating:
            given = f"optim.name={self.options.name} on {mesh_shape(self.sizes).size()} ranks"
            return UserError(f"{given}: its update {why}; plan one rank, or another optimizer")
        return UserError(f"this model's step {why}; plan one that does not look at them")

    def _run(self, account: "StepAccount", spread: ParallelModel, optimizer: torch.optim.Optimizer) -> Traced:
        """The step, on a rank that has all that it keeps from step to step."""
        parameters = _storages(spread.model.parameters())
        staged = isinstance(spread, Pipeline)
        held = spread.inner.masters if staged else spread.masters  # those of a tied head's copy too
        masters = _storages(held.values())
        states = [value for of_one in optimizer.state.values() for value in of_one.values()]
        state, counters = _storages(states), _storages(t for t in states if isinstance(t, Tensor) and not t.ndim)
        sums = self._run_stages(account, spread) if staged else self._run_whole(account, spread)
        if isinstance(spread.compression, ZeroOne) and spread.compression.local is None:
            spread.compression.momenta = None  # many of its steps come behind one that was sent whole
        spread.reduce()
        gradients = _storages(master.grad for master in held.values() if master.grad is not None)
        update(account, spread, optimizer)
        sums = added(account.sums(), sums)
        sums |= {
            "parameters": sum(parameters.values()),
            "gradients": sum(gradients.values()),
            "masters": sum(size for key, size in masters.items() if key not in parameters),
            "state": sum(state.values()),
            "counters": sum(counters.values()),
        }
        return Traced(sums, account.sections[:-1])

    def _run_whole(self, account: "StepAccount", spread: ParallelModel) -> Sums:
        """Forwards and backwards; returns the sums of those left out, less what came before."""
        begun: list[Sums] = []
        kept = 0
        account.begin()

        def forward(_: int) -> Tensor:
            nonlocal kept
            if begun:
                account.end("backward")
            begun.append(account.sums())
            before = account.current_bytes
            value = self.loss(spread.model)
            account.end("forward")
            kept = account.current_bytes - before
            return value

        # The first one may gather what others only read again.
        few = min(self.num_microbatches, 3 if self.parallel.comm.secondary else 2)
        spread.run(range(few), forward)
        account.end("backward")
        # Those between the first microbatch and the last do what the one before the last does.
        one = added(begun[-1], begun[max(0, few - 2)], -1)
        return added(added({"activations": kept}, begun[0], -1), one, self.num_microbatches - few)

    def _run_stages(self, account: "StepAccount", spread: Pipeline) -> Sums:
        """The same of a pipeline rank's actions, one after the other."""
        if self.form is None:
            self.form = spread.first_form(lambda: self.loss(spread.model))
            spread.inner.publish()  # what that forward has gathered goes
        spread.expect(self.form)
        account.begin()
        begun, first = account.sums(), account.current_bytes
        of_actions, kept, is_filling = ActionSums(begun), 0, True

        def note(action: Action, *_: float) -> None:
            nonlocal kept, is_filling
            is_filling &= action.kind is Kind.FORWARD
            if is_filling:
                kept = account.current_bytes - first
            account.end("forward" if action.kind is Kind.FORWARD else "backward")
            of_actions.note(action, account.sums())

        enough = max(self.num_microbatches, self.sizes.pp + 1) if self.overlaps else self.num_microbatches
        few = few_microbatches(spread.stages.split, spread.config, spread.rank, enough)
        spread.observe = note
        spread.run(range(few), lambda _: self.loss(spread.model))
        account.end("backward")
        every = schedule(spread.config.schedule, self.sizes.pp, self.num_microbatches, spread.config.chunks)
        left_out = of_actions.left_out(every.ranks[spread.rank], account.sums())
        return added(added({"activations": kept}, begun, -1), left_out)


@contextmanager
def traced(mesh: DeviceMesh, speed: Speed) -> Iterator["StepAccount"]:
    """Inside, tensors have no memory, and what is done with them is noted."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.compiler.set_stance("force_eager"),
        balanced_loads(),
        collected(),
        count_volume(mesh) as sent,
        StepAccount(speed, sent) as account,
    ):
        yield account


class NoMoments:
    """`core.parallel.one_bit.Moments` whose state nobody reads: tensors without memory have no values."""

    beta1, beta2, bound = 0.9, 0.999, 1.0

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    def momentum(self, name: str) -> None:
        return None

    variance = moves = root = momentum

    def rate(self, group: int) -> tuple[float, float]:
        return 1.0, 0.0

    def standing(self, name: str) -> tuple[int, int]:
        return 1, 0

    def step(self, in_signs: bool) -> None:
        self.optimizer.step()

    def count(self, names: Sequence[str]) -> None:
        pass

    def arrive(self, ways: Mapping[str, tuple[float, float, float]]) -> None:
        self.optimizer.step()

    def counts(self) -> dict[str, int]:
        return {}

    def restore(self, counts: Mapping[str, int]) -> None:
        pass


def make_state(account: "StepAccount", spread: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its state, as its first step does."""
    for master in spread.masters.values():
        master.grad = torch.empty_like(master)
    account.updating = True
    optimizer.step()
    account.updating = False
    spread.release()


def update(account: "StepAccount", spread: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    """The step's end, behind its reductions."""
    account.mark(Label("norm"))
    if spread.compression is None or spread.compression.norm is None:
        gradient_norm(spread.masters.values(), spread.mesh)
    scale_gradients(spread.masters.values(), 0.5)
    account.mark(Label("update"))
    account.updating = True
    spread.update(optimizer)
    account.updating = False
    account.end("update")
    spread.release()
    spread.publish()
    account.end("publish")


def _with_split(parallel: ParallelConfig, cut: Cut, longer: Growth | None) -> ParallelConfig:
    """The same with as many blocks in each stage as are left."""
    split = tuple(len(stage) for stage in cut.kept(longer))
    return replace(parallel, pipeline=replace(parallel.pipeline, split=split))


def _estimate(sums: Sums, phases: dict[str, int], sizes: dict[str, int]) -> StepEstimate:
    calls, num_bytes = (
        Counter({key[1:]: round(n) for key, n in sums.items() if key[0] == kind and n}) for kind in ("calls", "bytes")
    )
    held = ("parameters", "gradients", "masters", "state", "counters", "activations")
    bytes_of = {f"{kind}_bytes": round(sums[kind]) for kind in held}
    sent = Volume(calls, num_bytes, sizes)
    return StepEstimate(**bytes_of, phases=phases, flops=sums["flops"], compute_s=sums["seconds"], sent=sent)


@contextmanager
def collected() -> Iterator[None]:
    """Garbage goes before, and not at some moment of it: moments are compared."""
    gc.collect()
    with no_garbage():
        yield


class StepAccount(MemoryAccount):
    """The account of fake tensors, section by section, and of what is done."""

    _plain_types = (*MemoryAccount._plain_types, FakeTensor)

    def __init__(self, speed: Speed, sent: Volume):
        super().__init__()
        self.speed, self.sent = speed, sent
        self.flops, self.seconds = 0, 0.0
        self.updating = False
        self.sections: list[Section] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.updating and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1  # an update takes the same memory whatever a norm is
        if func is DEVICE_OF:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        if FakeTensor not in types and func.namespace == "aten" and _has_values((args, kwargs)):
            with without_modes():  # what a step knows without its data, such as the numbers of ranks
                return func(*args, **(kwargs or {}))
        before = self.current_bytes
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            cost = operator_cost(func, args, kwargs or {}, result)
            self.flops += cost.flops
            self.seconds += self.speed.seconds(cost.flops, cost.num_bytes)
            if self.peak_bytes > before:
                self._note_moment(func, result)
        return result

    def _note_tensor(self, tensor: Tensor) -> None:
        for plain in plain_tensors(tensor):  # all are of the one device that there is
            self._note(plain.untyped_storage())

    def _note_moment(self, maker: Any, made: Any = ()) -> None:
        if self.sections:
            self.sections[-1].makers.append((maker, tuple(tuple(tensor.shape) for tensor in tensors_in(made))))
            self.sections[-1].alive_bytes.append(self.peak_bytes)
        self.peak_bytes = self.current_bytes

    def begin(self) -> None:
        """Open the first section, and forget those before."""
        self.sections = []
        self.peak_bytes = self.current_bytes
        self.mark(Label("begin"))

    def mark(self, label: Label) -> None:
        """Begin a section."""
        self._note_moment("end")
        self.sections.append(Section(label))
        self._note_moment("begin")

    def end(self, phase: str) -> None:
        """A part of the step is over: the phase of the sections since the last one."""
        self.mark(Label(phase))
        for section in self.sections[:-1]:
            section.phase = section.phase or phase

    def watch(self, model: nn.Module, name: str) -> None:
        """Mark where blocks of a list begin and end, and where their backwards begin."""
        for index, block in enumerate(model.get_submodule(name).children()):
            block.register_forward_pre_hook(self._marks(Label("forward", name, index)))
            block.register_forward_hook(self._marks(Label("behind", name, index)))

    def _marks(self, label: Label) -> Callable[..., None]:
        def mark(module: nn.Module, inputs: Any, output: Any = None) -> None:
            self.mark(label)
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self.mark(label._replace(what="backward")))

        return mark

    def sums(self) -> Sums:
        """Since the account was opened."""
        found: Sums = {"flops": self.flops, "seconds": self.seconds}
        for kind, counted in (("calls", self.sent.calls), ("bytes", self.sent.bytes)):
            found |= {(kind, *key): n for key, n in counted.items()}
        return found


def without_memory(model: nn.Module) -> nn.Module:
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
