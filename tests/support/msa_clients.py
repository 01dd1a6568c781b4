"""`python -m tests.support.msa_clients BOLTZ.whl CHAI.whl`: other programs' clients, unchanged, against our server.

pip download --no-deps boltz chai_lab brings the wheels. Of each the one function is taken that asks a server, since the
rest of a package imports a model; its pauses are made short. A line for each question that is answered as it should be.
"""

import ast
import logging
import os
import random
import sys
import tarfile
import tempfile
import time
import typing
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import requests
from requests.auth import HTTPBasicAuth
from tqdm import tqdm

from tests.support.msa_server import CRAMBIN, UBIQUITIN, configured, databases, serving

KEY = "0123456789abcdef"
_NAMES = ("run_mmseqs2", "_run_mmseqs2")


def client_of(wheel: Path) -> Callable[..., Any]:
    """The function of a wheel that asks a server."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            text = archive.read(name).decode("utf-8", "replace") if name.endswith(".py") else ""
            found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name in _NAMES]
            if found:
                found[0].decorator_list = []
                around = {"logging": logging, "os": os, "random": random, "requests": requests, "tarfile": tarfile}
                around |= {"tqdm": tqdm, "typing": typing, "HTTPBasicAuth": HTTPBasicAuth, "Path": Path}
                around |= {name: getattr(typing, name) for name in ("Dict", "List", "Optional", "Tuple", "Union")}
                around |= {"time": SimpleNamespace(sleep=lambda _: time.sleep(0.05)), "TQDM_BAR_FORMAT": "{desc}"}
                around["logger"] = logging.getLogger(wheel.name)
                exec(compile(ast.Module([found[0]], []), name, "exec"), around)
                return around[found[0].name]
    raise SystemExit(f"{wheel} holds no {' or '.join(_NAMES)}")


def main(wheels: list[str]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "keys").write_text(f"{KEY} anyone\n")
        more = {"jackhmmer": "jackhmmer", "api_key_file": folder / "keys"}
        with serving(configured(folder, *databases(folder), **more)) as server:
            url = server.url.replace("//", f"//anyone:{KEY}@")
            for number, wheel in enumerate(wheels):
                ask = client_of(Path(wheel))
                for options in ({}, {"use_env": False}, {"use_pairing": True}):
                    asked = folder / f"{number}{'-'.join(options)}"
                    found = ask([UBIQUITIN, CRAMBIN], str(asked), host_url=url, **options)
                    texts = found[0] if isinstance(found, tuple) else found
                    heads = [text.splitlines()[:2] for text in texts]
                    assert heads == [[">101", UBIQUITIN], [">102", CRAMBIN]], heads
                    counts = [text.count(">") for text in texts]
                    assert min(counts) > 5, counts
                    print(f"{Path(wheel).name}: {options or 'as it is'}: {counts} rows", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
