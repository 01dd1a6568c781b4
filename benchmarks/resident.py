"""Load one model and print what that took: a process of its own, for `benchmarks.quantization`.

    python -m benchmarks.resident '{"folder": "…", "scheme": null}'

Prints {"peak_bytes": resident peak beyond what was resident before, "stored_bytes": of the model}.
"""

import json
import sys
import tempfile
from pathlib import Path

from core.models import SHAPES, Decoder, save_pretrained
from core.quant import Scheme, load_quantized, quantize_folder, stored_bytes


def main(argument: str) -> None:
    given = json.loads(argument)
    scheme = None if given["scheme"] is None else Scheme.from_json(given["scheme"])
    _warm_up(scheme or Scheme("int8"))
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    options = {} if scheme is None else {"embeddings": True, "head": True}
    model = load_quantized(given["folder"], scheme, **options)
    print(json.dumps({"peak_bytes": status_bytes("VmHWM") - before, "stored_bytes": stored_bytes(model)}))


def _warm_up(scheme: Scheme) -> None:
    """What is imported and allocated at a first use is not the model's."""
    with tempfile.TemporaryDirectory() as name:
        plain, quantized = Path(name) / "plain", Path(name) / "quantized"
        save_pretrained(Decoder(SHAPES["debug"]), SHAPES["debug"], plain)
        load_quantized(quantize_folder(plain, quantized, scheme))
        load_quantized(plain, scheme)


def status_bytes(field: str) -> int:
    """Of this process: VmRSS, VmHWM, …"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    main(sys.argv[1])
