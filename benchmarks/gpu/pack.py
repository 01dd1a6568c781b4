"""`make gpu-pack`: the wheels that images for GPUs lack, into .gpu-pack/, on a machine with a package registry.

Which ones, and in which versions, pack.txt says; image.txt says what is taken to be there. The pack is refused where a
package in it needs one that neither has, and where it is larger than 60 MiB, which with the tree is what can be sent.
"""

import argparse
import email
import email.message
import subprocess
import sys
import zipfile
from pathlib import Path

from benchmarks.gpu.packed import PACK, Unusable, name_of, normalised

HERE = Path(__file__).parent
MOST_BYTES = 60 << 20
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]


def names_in(path: Path) -> list[str]:
    """Lines of a list, without comments."""
    return [line.split("#")[0].strip() for line in path.read_text().splitlines() if line.split("#")[0].strip()]


def fetch(folder: Path, python: str) -> None:
    """Download the wheels.  Raises Unusable with pip's last words."""
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    options += ["--python-version", python, *(word for p in PLATFORMS for word in ("--platform", p))]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), "-r", str(HERE / "pack.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unusable(f"pip download failed: {' '.join(done.stderr.strip().splitlines()[-2:])}")


def lacking(wheels: list[Path], image: list[str], python: str) -> list[str]:
    """What packages of the pack need, under Linux and this Python, and neither the pack nor the image has."""
    from packaging.requirements import Requirement

    there = {*map(name_of, wheels), *map(normalised, image)}
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    environment |= {"platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython"}
    found = []
    for wheel in wheels:
        for text in _metadata(wheel).get_all("Requires-Dist", []):
            needed = Requirement(text)
            applies = needed.marker is None or needed.marker.evaluate({**environment, "extra": ""})
            if applies and normalised(needed.name) not in there:
                found.append(f"{name_of(wheel)} needs {needed.name}")
    return found


def _metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as content:
        (name,) = (n for n in content.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(content.read(name))


def check(folder: Path, python: str) -> int:
    """Bytes of the pack.  Raises Unusable where it is not whole or too large."""
    wheels = sorted(folder.glob("*.whl"))
    packed, wanted = set(map(name_of, wheels)), {normalised(n.split("==")[0]) for n in names_in(HERE / "pack.txt")}
    if packed != wanted:
        raise Unusable(f"{folder} has not what pack.txt lists: {', '.join(sorted(packed ^ wanted))}")
    if found := lacking(wheels, names_in(HERE / "image.txt"), python):
        raise Unusable(f"{'; '.join(found)}: neither in pack.txt nor in image.txt; add it to one of them")
    num_bytes = sum(wheel.stat().st_size for wheel in wheels)
    if num_bytes > MOST_BYTES:
        raise Unusable(f"{folder} has {num_bytes / 2**20:.1f} MiB, and at most {MOST_BYTES >> 20} MiB can be sent")
    return num_bytes


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.pack", description=__doc__)
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="version of Python on the GPU's machine")
    parser.add_argument("--folder", type=Path, default=PACK, help="where the wheels go (default: .gpu-pack)")
    given = parser.parse_args(argv)
    try:
        fetch(given.folder, given.python)
        num_bytes = check(given.folder, given.python)
    except Unusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(list(given.folder.glob('*.whl')))} wheels, {num_bytes / 2**20:.1f} MiB, in {given.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
