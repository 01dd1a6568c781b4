"""Gemini in a training loop of one's own: `wrap` the model and its optimizer, and leave the loop as it is.

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
gemini = core.gemini.wrap(model, optimizer, budget="10GiB")
for batch in batches:
    loss = model(**batch).loss
    loss.backward()
    gemini.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()

With a disk every step can be a checkpoint:

gemini = core.gemini.wrap(model, optimizer, budget="10GiB", host="16GiB", disk="/mnt/nvme/run")
first, _ = gemini.resume()
for step in range(first, steps):
    ...
    optimizer.step()
    optimizer.zero_grad()
    gemini.commit(step + 1)
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import local
from types import MethodType
from typing import Any, get_args

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from core.compat import follows_steps, own_part
from core.config import UserError
from core.gemini.config import GeminiConfig
from core.gemini.durable import DurableSteps
from core.gemini.replicas import GeminiReplicas
from core.gemini.residency import Policy
from core.gemini.state_device import bring_state
from core.layout import full_tensor
from core.mesh import MeshConfig, build_mesh, shard_axis
from core.optim.clip import gradient_norm, scale_gradients
from core.optim.hessian_free import HessianFree
from core.optim.home import WholeMatrixOptimizer
from core.optim.sharded import ShardedOptimizer
from core.parallel.rows import own_rows
from core.precision import COMPUTE_DTYPE, Precision
from core.rng import rng_text, set_rng_text
from core.runtime import join
from core.weights import persistent_buffers

RUN = "core.gemini.wrap"
"""What the records of a folder are of, where no run folder says it."""
RNG, BUFFER = "rng", "buffer/"
"""Keys in what is kept beside a step: the random generators' state as text, and before the names of buffers."""


class Gemini:
    """A model and an optimizer that Gemini moves.  What a loop asks of it beyond `step`:"""

    def __init__(self, parallel: GeminiReplicas, optimizer: torch.optim.Optimizer):
        self.parallel, self.optimizer = parallel, optimizer
        self._is_reduced = False
        self._has_resumed = False
        if parallel.disk is None:
            optimizer.register_step_pre_hook(lambda *_: self.reduce())
            optimizer.register_step_post_hook(lambda *_: self._stepped())
        else:  # a step reads and writes one chunk after another: it is a step of each of them
            self._own_step: Callable[..., Any] = optimizer.step
            self._is_of_chunk = local()
            parallel.stepping = self._stepping
            optimizer.step = MethodType(lambda _, *given, **options: self._step(*given, **options), optimizer)
            optimizer.load_state_dict = _refuse_state
        optimizer.zero_grad = self.zero_grad
        parallel.model.zero_grad = self.zero_grad

    def reduce(self) -> None:
        """Complete the gradients: every master's `.grad` is the sum over all ranks and all backwards since the step."""
        if not self._is_reduced:
            self.parallel.hooks.end_backward()
            self.parallel.reduce()
            self._is_reduced = True

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Surround the last backward before a step that takes the gradients as they are.

        What lies on a disk is then updated as its gradients become final, beside the backward. The rates of the step
        must be set before. Whoever clips all the same gets the same result, later.
        """
        with self.parallel.updating_early():
            yield

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`, as torch's; returns the norm before."""
        self.parallel.give_up_updates()
        self.reduce()
        norm = gradient_norm(self.parallel.masters.values(), self.parallel.mesh)
        scale_gradients(self.parallel.masters.values(), min(1.0, max_norm / (float(norm) + 1e-6)))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of a step that was given up too."""
        self.parallel.hooks.give_up()
        self.parallel.release()
        self._is_reduced = False

    def state_dict(self) -> dict[str, Tensor]:
        """What the model's own `state_dict` would have: whole values on the host, parameters in the masters' format.

        Buffers are this rank's. A collective where chunks are sharded.
        """
        if self.parallel.disk is not None:
            self.confirm()
        model = self.parallel.model
        found = {**self.parallel.frozen, **self.parallel.masters}
        whole = {name: full_tensor(value).cpu() for name, value in found.items()}
        if self.parallel.disk is not None:
            whole = {name: value.clone() for name, value in whole.items()}  # what lies on the disk is mapped
            self.parallel.disk.forget()
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            whole[name] = whole[first[id(parameter)]]
        return whole | {name: b.detach().cpu() for name, b in persistent_buffers(model, every_name=True).items()}

    def resume(self) -> tuple[int, dict[str, Any]]:
        """Take over the last step that the disk has of every rank, with buffers and random generators as they were.

        Returns the number of steps that it has taken and what `commit` was given beside it; (0, {}) where the disk has
        none. Before the first step. A collective.  Raises UserError where the folder is of a run of another kind, or of
        another model or optimizer.
        """
        durable = self._durable("resume")
        found = durable.latest()
        if found is None:
            self._require_no_others(durable)
        self._has_resumed = True
        if found is None:
            return 0, {}
        step, run = found
        if run != RUN:
            raise UserError(f"gemini.wrap: disk={durable.folder} holds step {step} of {run}; give another folder")
        with durable.loading(), torch.no_grad():
            values, blob = durable.restore(step)
            self._set_beside(blob, f"gemini.wrap: step {step} in disk={durable.folder}")
            self.parallel.publish()
        return step, values

    def _require_no_others(self, durable: DurableSteps) -> None:
        if (others := durable.of_other_ranks()) is not None:
            step, _, ranks = others
            raise UserError(
                f"gemini.wrap: disk={durable.folder} holds step {step} of {ranks} rank{'s' * (ranks > 1)}; go on with "
                "as many, or give another folder"
            )

    def commit(self, step: int, values: Mapping[str, Any] | None = None) -> None:
        """Begin to make masters, the optimizer's state, and buffers durable as those after so many steps.

        They are when the next step's updates begin, or `confirm` or `close` return: a process that is killed from then
        on goes on from it. What is written meanwhile is so beside the next forward and backward.

        values  JSON-able, of the loop's own: a scheduler's state, an epoch

        A collective, between two steps.  Raises UserError for a folder that holds a step that was not taken over.
        """
        durable = self._durable("commit")
        if not self._has_resumed:
            if (found := durable.latest()) is not None:
                raise UserError(
                    f"gemini.wrap: disk={durable.folder} already holds step {found[0]}; call resume() before the first "
                    "step, or give another folder"
                )
            self._require_no_others(durable)
        self._has_resumed = True
        durable.commit(step, RUN, dict(values or {}), self._beside())

    def _beside(self) -> bytes:
        """What a step is besides masters and the optimizer's state, as a file of safetensors."""
        buffers = persistent_buffers(self.parallel.model)
        kept = {f"{BUFFER}{name}": buffer.detach().cpu().contiguous().clone() for name, buffer in buffers.items()}
        return save(kept | {RNG: torch.frombuffer(bytearray(json.dumps(rng_text()).encode()), dtype=torch.uint8)})

    def _set_beside(self, blob: bytes, where: str) -> None:
        buffers = persistent_buffers(self.parallel.model)
        try:
            found = load(blob)
        except SafetensorError as error:
            raise UserError(f"{where} is of a version that kept no buffers; go on with that one") from error
        random = found.pop(RNG).numpy().tobytes()
        alike = {f"{BUFFER}{name}": buffer.shape for name, buffer in buffers.items()}
        if alike != {name: kept.shape for name, kept in found.items()}:
            raise UserError(f"{where} is of a model with other buffers ({', '.join(found) or 'none'}); give that one")
        for name, buffer in buffers.items():
            buffer.copy_(found[f"{BUFFER}{name}"])
        set_rng_text(json.loads(random))

    def confirm(self) -> None:
        """Return when the last step that was committed is durable.  A collective."""
        self._durable("confirm").confirm()

    def close(self) -> None:
        """Let others have the folder on the disk; what is durable stays there. The model can be used no more."""
        self.parallel.close()

    def _durable(self, what: str) -> DurableSteps:
        if self.parallel.disk is None:
            raise UserError(f"gemini.wrap: {what}() without a disk, on which steps are durable; give disk=")
        assert isinstance(self.parallel.durable, DurableSteps)
        return self.parallel.durable

    @property
    def device_peak_bytes(self) -> int:
        """The most that was on the device at once."""
        return self.parallel.tier.peak_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes between host and device so far, both ways."""
        return self.parallel.tier.moved_bytes

    def _step(self, closure: Callable[[], Any] | None = None, **options: Any) -> None:
        """The optimizer's `step` where chunks lie on a disk."""
        if vars(self._is_of_chunk):
            self._own_step(closure, **options)
            return
        if closure is not None:
            raise UserError("gemini.wrap: a step with a closure does not go with disk=; compute the loss before it")
        if follows_steps(self.optimizer):
            raise UserError("gemini.wrap: hooks at the optimizer's steps do not go with disk=: there is one a chunk")
        self.reduce()
        self.parallel.update(self.optimizer)
        self._stepped()

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Within, in this thread, the optimizer's step is its own."""
        self._is_of_chunk.yes = True
        try:
            yield
        finally:
            del self._is_of_chunk.yes

    def _stepped(self) -> None:
        self.parallel.release()
        self.parallel.publish()
        self._is_reduced = False


def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    budget: str | int,
    *,
    precision: Precision | None = None,
    mesh: DeviceMesh | None = None,
    sample: Callable[[], Callable[[nn.Module], Tensor]] | None = None,
    host: str | int | None = None,
    disk: str | Path | Sequence[str | Path] | None = None,
    policy: Policy = "auto",
    device: str | None = None,
) -> Gemini:
    """Train `model` in `budget` bytes of a device, with the optimizer that was made of its parameters.

    model      any nn.Module that has values; it stays the same object, with the same parameters
    optimizer  any of core.optim, or an elementwise one of torch, with its state; from now on it updates masters.
               Parameters that are frozen may be among its own
    budget     of each rank's device: "10GiB", "800MB", a number of bytes
    precision  of parameters, by default that which they have; masters, optimizer state and reductions are fp32, under
               fp64 fp64
    mesh       the ranks; by default all of the process group, over which chunks are sharded
    sample     draws a microbatch and returns the function model -> loss of it: with it a step is planned before it runs
    host       of each rank's host memory what may live there: as a budget; None: no limit
    disk       folder on a drive for what the host does not hold, each rank's in it, or several, each on a drive of its
               own: see `Gemini.commit`
    policy     for comparisons: "static", "cpu"; see `core.gemini.residency`
    device     "cpu" or "cuda"; by default CUDA where there is one

    A KFAC is told of the model by `observe` as ever, before its step.

    Raises UserError for a budget in which no step fits, for an optimizer whose state cannot be cut, for HessianFree,
    for parameters of several formats without a precision, and for a folder that is no drive's or another's.
    """
    if isinstance(optimizer, HessianFree):
        raise UserError(
            "gemini.wrap: HessianFree's products by two backwards do not pass Gemini's chunks; use another optimizer"
        )
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    join(kind)
    if mesh is None:
        mesh = build_mesh(MeshConfig().resolve(dist.get_world_size(), 3), kind)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_optimizer = [names.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
    if None in of_optimizer:
        raise UserError(
            "gemini.wrap: the optimizer has parameters that are not the model's; give it model.parameters()"
        )
    precision = precision or _precision_of(model)
    own = {id(p): own_part(p) if isinstance(p, DTensor) else p for p in model.parameters()}
    values = {key: tensor.data for key, tensor in own.items()}
    config = GeminiConfig(
        str(budget),
        policy,
        host=None if host is None else str(host),
        disk=None if disk is None else Path(",".join(map(str, [disk] if isinstance(disk, str | Path) else disk))),
    )
    parallel = GeminiReplicas(model, mesh, 3, precision, lambda model: None, config)
    state, replaced = dict(optimizer.state), dict[Tensor, Tensor]()
    try:
        for group in optimizer.param_groups:
            for p in filter(lambda p: names[id(p)] in parallel.masters, group["params"]):
                dtype = values[id(p)].dtype
                replaced[p] = _replaced(optimizer, p, dtype, parallel.masters[names[id(p)]], parallel)
        _put(optimizer, replaced)
        for master in parallel.masters.values():
            bring_state(optimizer, master)
        parallel.prepare(optimizer, None if sample is None else lambda: [sample()])
    except BaseException:  # model and optimizer are as they were: another budget can be tried
        parallel.close()
        for key, value in values.items():
            own[key].data = value
        _put(optimizer, {master: p for p, master in replaced.items()})
        optimizer.state.clear()
        optimizer.state.update(state)
        raise
    return Gemini(parallel, optimizer)


def _precision_of(model: nn.Module) -> Precision:
    """Raises UserError where parameters have several formats, or one that none is called after."""
    named: dict[torch.dtype, Precision] = {COMPUTE_DTYPE[name]: name for name in get_args(Precision)}
    found: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            found.setdefault(parameter.dtype, name)
    if len(found) > 1 or not found.keys() <= named.keys():
        formats = ", ".join(f"{name} of {str(dtype).removeprefix('torch.')}" for dtype, name in found.items())
        raise UserError(
            f"gemini.wrap: the model has {formats}; give precision= ({', '.join(get_args(Precision))}), which all "
            "parameters then have"
        )
    return named[next(iter(found))] if found else "fp32"


def _refuse_state(state_dict: Any) -> None:
    raise UserError(
        "gemini.wrap: with disk= the optimizer's state lies on the disk; load it before wrap, or resume from the disk"
    )


def _put(optimizer: torch.optim.Optimizer, found: dict[Tensor, Tensor]) -> None:
    """Put other tensors in the place of an optimizer's parameters."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.take_over(found)
        return
    for group in optimizer.param_groups:
        group["params"] = [found.get(p, p) for p in group["params"]]


def _replaced(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    dtype: torch.dtype,
    master: Tensor,
    parallel: GeminiReplicas,
) -> Tensor:
    """The master in the place of a parameter, with what the optimizer has kept of it so far: this rank's rows.

    dtype  that the parameter had: what is kept in it is in the master's format from now on
    """
    state = dict(optimizer.state.pop(parameter, {}))
    for key, value in state.items():
        if isinstance(value, Tensor) and value.ndim and value.dtype == dtype:
            value = value.to(master.dtype)
            state = {**state, key: value}
        if parallel.ranks == 1 or not isinstance(value, Tensor) or not value.ndim:
            continue
        if isinstance(optimizer, WholeMatrixOptimizer) and optimizer.takes_whole(parameter):
            continue  # its home keeps it
        if value.shape != parameter.shape:
            raise UserError(
                f"gemini.wrap: the optimizer's {key} is not shaped like its parameter, so it cannot be cut over ranks; "
                "wrap it before its first step"
            )
        state = {**state, key: own_rows(value, shard_axis(parallel.mesh)).clone()}
    if state:
        optimizer.state[master] = state
    return master
