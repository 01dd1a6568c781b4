"""A step that cannot be interrupted, ended at a limit of time: it runs in a fork of this process.

Calls of PDBFixer and OpenMM go on to their end. A process can be ended; what it made comes back through a pipe. The
step may use what was imported before, but no GPU, and none of torch's threads, which a fork does not have.
"""

import gc
import os
import pickle
import select
import signal
from collections.abc import Callable
from typing import NoReturn, TypeVar

from apps.fold.relaxation.protocol import Limit, OutOfTime
from core.config import UserError
from core.rank import end_with

T = TypeVar("T")


def within(limit: Limit, step: Callable[[], T], doing: str) -> T:
    """What the step returns, which has to be picklable.

    doing  what the step does, for the user, if its process is ended from outside

    Raises OutOfTime where the limit passes before, and what the step raises.
    """
    limit.check()
    ours, its = os.pipe()
    caller, process = os.getpid(), os.fork()
    if not process:
        _run(step, caller, its)
    os.close(its)
    try:
        sent = _sent(ours, limit)
    finally:
        os.close(ours)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    if not sent:
        raise UserError(f"the process was ended while {doing}; is there memory for it?")
    returned, found = pickle.loads(sent)
    if not returned:
        raise found
    return found


def _sent(ours: int, limit: Limit) -> bytes:
    """All that comes through the pipe: what the step made, once it has ended, so that only its beginning is awaited."""
    if not select.select([ours], [], [], limit.left())[0]:
        raise OutOfTime
    with open(ours, "rb", closefd=False) as pipe:
        return pipe.read()


def _run(step: Callable[[], object], caller: int, its: int) -> NoReturn:
    """In the fork, which ends here, whatever happens: none of what the caller does at its end is done twice."""
    try:
        end_with(caller)
        gc.freeze()  # what the caller has let go of may want to end threads, which are not here
        try:
            result = True, step()
        except Exception as error:
            result = False, error
        with os.fdopen(its, "wb") as pipe:
            pickle.dump(result, pipe)
    finally:
        os._exit(0)
