"""Gemini: train models several times larger than the device's memory; the model data lives where a plan says.

Decided before a step runs, by pure functions:

trace      what one step of a model asks for, moment by moment: which chunks, how much memory beside them, how long
moments    that of any module, from its trace by parameters (`core.trace`)
residency  where each chunk lives and every move of a step: a pure function of the trace, the budget, the bandwidths
    lifetimes    which buffers stay between two uses
    timeline     the moves that follow, their bytes and seconds
search     the chunk size, by planning the step of each candidate
order      a step's microbatches one after the other, or by blocks, by the time of either
planning   all of it, on all ranks alike
figure     memory over a step, planned beside measured

Done while it runs:

chunk      parameters that move together: a buffer on the device, a shard on the host or the device
states     the states of a parameter and the legal moves between them
tier       the account of the device's bytes
transport  fetching and reducing a chunk, over the link and the ranks
executor   what comes and goes at each moment, never over the budget
hooks      which moment it is, told by hooks on the model's modules
replicas   Gemini as the training loop sees it
vertical   a step of several microbatches by blocks
disk       chunks that live on a drive below the host, and durable steps
    direct      reads and writes past the page cache, with checksums
    area        memory in which values are read ahead
    waiting     gradients that wait there for their update
    slots       what lies where in a chunk's two places on the drive
    generation  the record of a durable step, and a folder with it
    drives      the folders of a rank, each with a file for slots
    durable     what the training loop asks of them
loop       Gemini in a loop of one's own: `wrap`
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.gemini.loop import Gemini, wrap

__all__ = ["Gemini", "wrap"]


def __getattr__(name: str) -> Any:
    """The pure parts (trace, residency) go without torch's distributed machinery: it is imported when asked for."""
    if name in __all__:
        return getattr(import_module("core.gemini.loop"), name)
    raise AttributeError(name)
