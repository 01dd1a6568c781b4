"""Training, one for every app and every form of parallelism: `TrainConfig` says what, `fit` does it."""

from core.train.config import LogConfig, TrainConfig
from core.train.folder import checkpoint_path, launch_run, open_run
from core.train.loop import Evaluate, Loss, fit, num_rows, num_tokens, train_step
from core.train.state import TrainState, resume

__all__ = [
    "Evaluate",
    "LogConfig",
    "Loss",
    "TrainConfig",
    "TrainState",
    "checkpoint_path",
    "fit",
    "launch_run",
    "num_rows",
    "num_tokens",
    "open_run",
    "resume",
    "train_step",
]
