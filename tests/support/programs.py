"""Programs of others that tests run: without one a test is left out, and says which package ends that."""

import shutil

import pytest

_PACKAGES = {"hhfilter": "hhsuite", "jackhmmer": "hmmer", "mmseqs": "mmseqs2"}
"""Program -> package of Debian, which .ci/run installs."""


def require_program(name: str) -> None:
    """Leave out the test that calls it where the program is not on the PATH."""
    if shutil.which(name) is None:
        pytest.skip(f"no {name}; ends where Debian's {_PACKAGES[name]} is installed (.ci/run does)")
