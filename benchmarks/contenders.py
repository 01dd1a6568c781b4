"""One training step as each system takes it: ours, plain PyTorch over `transformers`, DDP, FSDP2, DeepSpeed.

All start from the same weights, see the same batches and minimise the same mean loss with the same AdamW (matrices
decayed, vectors not), clipped to the same norm, at a constant rate. A contender is a function of a `Turn` that builds
what it needs and returns `step(batch) -> loss of this rank's rows`.

`python -m benchmarks.contenders TURN.json RESULT.json` is one rank's turn:

1. build, then warm up; the losses of these steps are kept, to be compared between the contenders
2. time each of the following steps
3. if asked, account the memory of one more step, tensor by tensor (that step is slow and not timed)

Not here: what is compared with what, and in which order (`benchmarks.train`).
"""

import contextlib
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.result import versions
from core.compose import parallelize
from core.models import Decoder, DecoderConfig, initialise
from core.optim.build import OptimConfig, build_optimizer
from core.optim.schedule import ScheduleConfig
from core.optim.spec import own_values
from core.precision import LossScale
from core.runtime import Runtime, start
from core.trace.account import MemoryAccount, resident_peak_bytes
from core.train import TrainConfig, TrainState, train_step

SEED = 0
OPTIM = OptimConfig(lr=1e-3, weight_decay=0.1, clip_norm=1.0, schedule=ScheduleConfig("constant"))

Batch = dict[str, Tensor]
Step = Callable[[Batch], Tensor | float]


@dataclass(frozen=True)
class Size:
    """A GPT-2 and the global batch that it is trained on."""

    name: str
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    rows: int
    length: int

    def model(self) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=self.vocab_size,
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            ffn_dim=4 * self.dim,
            max_length=self.length,
        )


@dataclass(frozen=True)
class Turn:
    """What one process group is to measure.

    weights  Hugging Face folder that the peers start from; ours draws the same from SEED
    """

    contender: str
    precision: str
    size: Size
    num_ranks: int
    num_threads: int
    num_warmup: int
    num_steps: int
    account: bool
    weights: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Turn":
        fields = json.loads(text)
        return Turn(**(fields | {"size": Size(**fields["size"])}))


def batch_of(size: Size, step: int, rank: int, num_ranks: int) -> Batch:
    """This rank's rows of a step: ids that thin out like words do (Zipf), so that there is something to learn."""
    generator = torch.Generator().manual_seed(1000 + step)
    frequency_V = 1.0 / torch.arange(1, size.vocab_size + 1, dtype=torch.float64)
    ids = torch.multinomial(frequency_V, size.rows * size.length, replacement=True, generator=generator)
    rows = size.rows // num_ranks
    ids_BL = ids.view(size.rows, size.length)[rank * rows :][:rows].contiguous()
    # transformers shifts the labels itself, so the last token of a row predicts nothing.
    targets_BL = torch.cat((ids_BL[:, 1:], torch.full_like(ids_BL[:, :1], -100)), 1)
    return {"input_ids": ids_BL, "targets": targets_BL}


# --- ours -------------------------------------------------------------------------------------------------------------


def ours(turn: Turn, runtime: Runtime, zero: int = 0) -> Step:
    """The training loop's own step over `parallelize`."""
    config = TrainConfig(zero=zero, precision=turn.precision, steps=1_000_000, optim=OPTIM)
    with torch.device("meta"):
        model = Decoder(turn.size.model())
    mesh = runtime.mesh(config.mesh, config.zero)
    parallel = parallelize(model, mesh, config, materialise=lambda m: initialise(m, SEED))
    state = TrainState(parallel, build_optimizer(config.optim, parallel.masters), LossScale(config.precision), {})
    steps = itertools.count()
    return lambda batch: train_step(state, batch, _our_loss, _num_targets, config, next(steps))["loss"]


def _our_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["input_ids"], targets=batch["targets"]) / _num_targets(batch)


def _num_targets(batch: Batch) -> Tensor:
    return (batch["targets"] != -100).sum().double()


# --- theirs -----------------------------------------------------------------------------------------------------------


def transformers_model(folder: str) -> Any:
    """GPT2LMHeadModel with the weights that ours starts from, no dropout, torch's scaled_dot_product_attention."""
    from transformers import GPT2LMHeadModel

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32, **dropout)
    model.config.use_cache = False
    return model.train()


def peers_adamw(parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """torch's, fused, with the options that ours takes from OPTIM: matrices decayed, vectors not."""
    parameters, options = list(parameters), own_values(OPTIM)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": options["weight_decay"]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=OPTIM.lr, betas=options["betas"], eps=options["eps"], fused=True)


def _their_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss


def _plain_step(model: nn.Module, autocast: bool) -> Step:
    """The loop of torch's tutorials: forward, backward, clip, AdamW (fused), gradients set to None."""
    optimizer = peers_adamw(model.parameters())

    def step(batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = _their_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain(turn: Turn, runtime: Runtime) -> Step:
    """transformers and torch.optim; under bf16 by autocast."""
    return _plain_step(transformers_model(turn.weights), turn.precision == "bf16")


def plain_masters(turn: Turn, runtime: Runtime) -> Step:
    """transformers with bf16 parameters and, by hand, fp32 masters: the formats that ours has."""
    model = transformers_model(turn.weights)
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.to(torch.bfloat16)
    parameters = list(model.parameters())
    optimizer = peers_adamw(masters)

    def step(batch: Batch) -> Tensor:
        loss = _their_loss(model, batch)
        loss.backward()
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(masters, OPTIM.clip_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        return loss.detach()

    return step


def ddp(turn: Turn, runtime: Runtime) -> Step:
    """DistributedDataParallel over transformers; under bf16 by autocast."""
    model = DistributedDataParallel(transformers_model(turn.weights), gradient_as_bucket_view=True)
    return _plain_step(model, turn.precision == "bf16")


def fsdp2(turn: Turn, runtime: Runtime) -> Step:
    """fully_shard on each block and on the whole, torch.optim.AdamW on the DTensors."""
    model = transformers_model(turn.weights)
    dtype = torch.bfloat16 if turn.precision == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = runtime.mesh(TrainConfig(zero=3).mesh, 3)["dp_shard"]
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _plain_step(model, autocast=False)


def deepspeed(turn: Turn, runtime: Runtime, zero: int) -> Step:
    """DeepSpeed's engine at a ZeRO stage, over gloo, with torch's fused AdamW."""
    import deepspeed

    model = transformers_model(turn.weights)
    config = {
        "train_micro_batch_size_per_gpu": turn.size.rows // turn.num_ranks,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": OPTIM.clip_norm,
        # Its default of 5e8 elements is one message of 2 GB; those of DDP and of ours are 25 to 32 MiB.
        "zero_optimization": {"stage": zero, "reduce_bucket_size": 1 << 23, "allgather_bucket_size": 1 << 23},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": turn.precision == "bf16"},
        "steps_per_print": 1_000_000,
    }
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=peers_adamw(model.parameters()), config=config)

    def step(batch: Batch) -> Tensor:
        loss = _their_loss(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


CONTENDERS: dict[str, Callable[..., Step]] = {
    "ours": ours,
    **{f"ours zero {z}": lambda t, r, z=z: ours(t, r, z) for z in (0, 1, 2, 3)},
    "transformers": plain,
    "transformers, default malloc": plain,
    "transformers, fp32 masters": plain_masters,
    "DDP": ddp,
    "FSDP2": fsdp2,
    **{f"DeepSpeed zero {z}": lambda t, r, z=z: deepspeed(t, r, z) for z in (1, 2, 3)},
}


# --- one turn ---------------------------------------------------------------------------------------------------------


def take_turn(turn: Turn) -> dict[str, Any]:
    """Measure; what rank 0 returns holds for all ranks (the losses are means, the memory is the largest)."""
    with contextlib.ExitStack() as stack:
        runtime = stack.enter_context(_default_malloc() if "default malloc" in turn.contender else start("cpu", SEED))
        torch.set_num_threads(turn.num_threads)
        step = CONTENDERS[turn.contender](turn, runtime)
        batches = (batch_of(turn.size, i, runtime.rank, runtime.world_size) for i in itertools.count())
        losses = [float(step(next(batches))) for _ in range(turn.num_warmup)]
        seconds = [_timed(step, next(batches)) for _ in range(turn.num_steps)]
        accounted = _accounted(step, next(batches)) if turn.account else 0
        # DDP's reducer must not outlive the group: as its last owner it waits, holding the interpreter's lock, for a
        # thread of gloo that frees its tensors under that lock (one turn in thirty never ended).
        del step
        gc.collect()
        means = torch.tensor(losses, dtype=torch.float64)
        peaks = torch.tensor([accounted, resident_peak_bytes()])
        dist.all_reduce(means)
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
    return {
        "losses": (means / turn.num_ranks).tolist(),
        "seconds": seconds,
        "accounted_peak_bytes": peaks[0].item(),
        "resident_peak_bytes": peaks[1].item(),
        "versions": versions("torch", "transformers", "deepspeed"),
    }


@contextlib.contextmanager
def _default_malloc() -> Iterator[Runtime]:
    """A group of one rank in a process whose allocator is as the C library has it."""
    dist.init_process_group("gloo")
    yield Runtime(0, 0, 1, torch.device("cpu"))
    dist.destroy_process_group()


def _timed(step: Step, batch: Batch) -> float:
    """Seconds of one step, from when all ranks are ready to when this one has its loss."""
    dist.barrier()
    begin = time.perf_counter()
    float(step(batch))
    return time.perf_counter() - begin


def _accounted(step: Step, batch: Batch) -> int:
    """Peak bytes of tensors during one step, counting all that were alive before it."""
    with MemoryAccount() as account:
        account.add(o for o in gc.get_objects() if issubclass(type(o), Tensor))
        step(batch)
    return account.peak_bytes


if __name__ == "__main__":
    measured = take_turn(Turn.from_json(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(measured))
