"""`python -m core.rank LAUNCHER MODULE ARGUMENTS…`: a module as a rank that ends with the process that launched it.

A launcher that is killed by -9 tells its ranks nothing. They would go on, and save into a folder that another run may
have begun to use. So the kernel is asked, before anything else is imported, to kill this process when its parent ends
(prctl(2), PR_SET_PDEATHSIG); where the parent has ended before that was asked, this process ends itself. A checkpoint
that is being written then is left out by who reads (`core.checkpoint`).

Only Linux has that call. Elsewhere a thread looks for the parent, half a second apart.
"""

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_INTERVAL_S = 0.5


def end_with(launcher: int) -> None:
    """End this process when its parent, which is to be `launcher`, ends, however it does."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is None or prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        threading.Thread(target=_look_for, args=(launcher,), name="launcher", daemon=True).start()
    if os.getppid() != launcher:
        os._exit(1)


def _look_for(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_INTERVAL_S)
    os._exit(1)


if __name__ == "__main__":
    _, launcher, module, *arguments = sys.argv
    end_with(int(launcher))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
