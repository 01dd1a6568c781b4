"""How much memory training under a budget takes of its process on a CPU, beside what Gemini says it has.

python -m tests.support.gemini_memory     prints a line of json for each of SIZES
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from core.compose import ParallelConfig
from core.models.decoder import DecoderConfig
from core.precision import Precision
from core.runtime import start
from core.train import train_step
from tests.support.resident import in_child, rise_of
from tests.support.training import Case, batch_of, build, gemini_of, loss, weight

LARGE = DecoderConfig(vocab_size=4096, dim=768, num_layers=6, num_heads=12, ffn_dim=3072, max_length=64)
SMALL = replace(LARGE, dim=512, num_heads=8, ffn_dim=2048)
TINY = replace(LARGE, dim=64, num_layers=2, num_heads=2, ffn_dim=64)
STEPS = 3


@dataclass(frozen=True)
class Size:
    """Of a run: batch in sequences of 64 tokens; with a host's budget what does not fit into it is on a disk."""

    model: DecoderConfig
    budget: str
    precision: Precision = "fp32"
    batch: int = 2
    microbatch: int | None = None
    host: str | None = None


@dataclass(frozen=True)
class Found:
    """Bytes: the rise of resident memory, the most on the device by the account, and what is planned for the host."""

    rise: int
    device: int
    host: int

    @property
    def ratio(self) -> float:
        """Of what the process took to what is accounted for."""
        return self.rise / (self.device + self.host)


SIZES = [
    *(Size(LARGE, budget, precision) for precision in ("fp32", "bf16") for budget in ("300MB", "500MB", "1GB")),
    *(Size(SMALL, budget, batch=16, microbatch=8) for budget in ("350MB", "600MB")),
    Size(SMALL, "600MB", batch=16),
]


def measured(size: Size) -> Found:
    """Of a few steps in a child."""
    return in_child(_measured, size)


def _measured(size: Size) -> Found:
    with start("cpu"), TemporaryDirectory() as folder:
        # what libraries make at their first use
        _steps(replace(size, model=TINY, budget="1GiB", host=size.host and "1GiB"), Path(folder) / "first")
        rise, (device, host) = rise_of(lambda: _steps(size, Path(folder) / "disk"))
    return Found(rise, device, host)


def _steps(size: Size, disk: Path) -> tuple[int, int]:
    parallel = ParallelConfig(precision=size.precision)
    case = Case(
        size.model,
        parallel=parallel,
        batch=size.batch,
        microbatch=size.microbatch,
        length=64,
        optim="adamw",
        budget=size.budget,
        planned=True,
        host=size.host,
        disk=None if size.host is None else disk,
    )
    state, config = build(case)
    for step in range(STEPS):
        train_step(state, batch_of(case, step), loss, weight, config, step)
        state.commit(step + 1, config)
    gemini = gemini_of(state.parallel)
    assert gemini.planned is not None
    return gemini.tier.peak_bytes, gemini.planned.plan.host_bytes


if __name__ == "__main__":
    for size in SIZES:
        found = measured(size)
        print(json.dumps({**asdict(size), **asdict(found), "ratio": found.ratio}), flush=True)
