"""The pack of wheels on a machine without a network: what is missing there is unpacked and found by `import`.

`use_pack` looks at each wheel in .gpu-pack. What is installed already, in whatever version, stays what is imported;
the rest is unpacked once into a folder beside the wheels, by name of the interpreter, and the folder goes onto sys.path
and PYTHONPATH. Nothing is installed, and nothing outside the pack is written. Imports nothing but the standard library.
"""

import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACK = ROOT / ".gpu-pack"
NEEDED = ("tyro", "diffusers", "datasets", "fastapi", "uvicorn", "zstandard", "biopython")
"""Packages of ours that images lack, by which one sees that a pack is needed."""


class Unusable(Exception):
    """Why the pack cannot be used, and what to do."""


def use_pack(folder: Path = PACK) -> list[str]:
    """Make importable what the pack has and this interpreter lacks.  Returns the names of what was taken from it.

    Raises Unusable where something is missing and no wheel of it fits.
    """
    missing = [wheel for wheel in sorted(folder.glob("*.whl")) if not installed(name_of(wheel))]
    absent = [name for name in NEEDED if not installed(name) and name not in map(name_of, missing)]
    if absent:
        raise Unusable(
            f"{', '.join(absent)}: not installed, and not in {folder.name}/; run `make gpu-pack` where there is a "
            "package registry, and bring the folder along"
        )
    unfit = [wheel.name for wheel in missing if not fits(wheel)]
    if unfit:
        raise Unusable(
            f"{', '.join(unfit)}: not for Python {sys.version_info[0]}.{sys.version_info[1]}; "
            f"make the pack by `python -m benchmarks.gpu.pack --python {sys.version_info[0]}.{sys.version_info[1]}`"
        )
    places = [str(ROOT)]
    if missing:
        places.append(str(unpacked(missing, folder)))
    # In front for the processes that are started, where only what is missing here is in it; behind for this one.
    sys.path.extend(place for place in places if place not in sys.path)
    before = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place and place not in places]
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *before])
    return [name_of(wheel) for wheel in missing]


def installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def normalised(name: str) -> str:
    """As registries compare names (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(wheel: Path) -> str:
    return normalised(wheel.name.split("-")[0])


def fits(wheel: Path, version: Sequence[int] = sys.version_info) -> bool:
    """By the tags in its name, on Linux."""
    pythons, abis, _ = wheel.stem.rsplit("-", 3)[1:]
    tag = f"cp{version[0]}{version[1]}"
    if "abi3" in abis.split("."):
        return any(int(p[3:] or 0) <= version[1] for p in pythons.split(".") if p.startswith("cp3"))
    return any(python in (tag, "py3", f"py{version[0]}{version[1]}") for python in pythons.split("."))


def unpacked(wheels: Iterable[Path], folder: Path) -> Path:
    """The folder in which they are unpacked, complete or not there."""
    wheels = list(wheels)
    key = hashlib.sha256("\n".join([sys.executable, *(w.name for w in wheels)]).encode()).hexdigest()[:12]
    place = folder / "unpacked" / key
    if place.is_dir():
        return place
    place.parent.mkdir(exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=place.parent))
    for wheel in wheels:
        _unpack(wheel, partial)
    try:
        partial.rename(place)
    except OSError:  # another process was faster
        shutil.rmtree(partial)
    return place


def _unpack(wheel: Path, place: Path) -> None:
    """Its modules; scripts and headers, which a wheel keeps apart, are left in it."""
    with zipfile.ZipFile(wheel) as content:
        for member in content.infolist():
            parts = Path(member.filename).parts
            if parts and parts[0].endswith(".data"):
                if len(parts) < 3 or parts[1] not in ("purelib", "platlib"):
                    continue
                member.filename = str(Path(*parts[2:]))
            content.extract(member, place)
