"""`serve quantize IN OUT`: a model with weights in 8 or 4 bits, as a folder that is served at once."""

import sys
from dataclasses import dataclass
from pathlib import Path

from apps.serve.model import find_source
from core.config import UserError, parse
from core.quant import quantize_folder
from core.quant.scheme import SchemeName
from core.runtime import gigabytes


@dataclass(frozen=True)
class QuantizeConfig:
    """Write the quantized model of a folder."""

    scheme: SchemeName = "int8"
    """see docs/quantization.md"""
    group_size: int = 64
    """int4: weights that share a scale, 32, 64 or 128"""
    symmetric: bool = False
    """int4: without zeros"""
    threshold: float = 6.0
    """llm.int8: inputs above it are not rounded"""
    embeddings: bool = True
    """also embeddings"""
    head: bool = True
    """also the output layer"""


def main(argv: list[str]) -> int:
    folders = argv[:2]
    if argv in (["-h"], ["--help"]):
        print("serve quantize IN OUT [--option value …]")
        folders = []
    elif len(folders) < 2 or any(folder.startswith("-") for folder in folders):
        raise UserError("serve quantize takes the model's folder and the one to write: serve quantize IN OUT")
    config = parse({"default": QuantizeConfig}, argv[len(folders) :], "serve quantize IN OUT", default="default")
    source, target = find_source(Path(folders[0])).folder, Path(folders[1])
    quantize_folder(
        source,
        target,
        config.scheme,
        group_size=config.group_size,
        symmetric=config.symmetric,
        threshold=config.threshold,
        embeddings=config.embeddings,
        head=config.head,
        progress=_show if sys.stderr.isatty() else None,
    )
    print(f"{target}: {gigabytes(_weight_bytes(source))} of weights in {gigabytes(_weight_bytes(target))}")
    return 0


def _show(name: str, num_bytes: int) -> None:
    print(f"\r{gigabytes(num_bytes):>10}  {name:60.60}", end="", file=sys.stderr, flush=True)


def _weight_bytes(folder: Path) -> int:
    files = (*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"))
    return sum(file.stat().st_size for file in files)
