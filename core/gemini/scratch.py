"""A file on a drive for what a step puts down and takes up again, which is gone when the process is."""

import os
import sys
import weakref
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from core.config import UserError
from core.gemini.direct import DirectFile
from core.gemini.generation import require_drive
from core.run_folder import hold


def scratch_file(folder: Path, option: str) -> DirectFile:
    """An empty file of this rank, past the page cache where the file system lets it.

    folder  which the rank's part of is this process's as long as the file is
    option  that gave it

    Raises UserError for a folder that lies in memory, cannot be written, or whose part another process holds.
    """
    path, given, held = folder / f"activations-{dist.get_rank()}", f"{option}={folder}", ExitStack()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_drive(folder, given)
        held.enter_context(hold(path, f"--{option}"))
        file = DirectFile(path / "activations.bin", create=True)
        file.path.unlink()
    except OSError as error:
        held.close()
        raise UserError(f"{given}: {error}; give a folder on a drive that can be written") from None
    if not file.is_direct:
        print(f"warning: {given} lies on a file system without O_DIRECT: its page cache takes memory", file=sys.stderr)
    held.callback(os.close, file.handle)
    weakref.finalize(file, held.close)
    return file
