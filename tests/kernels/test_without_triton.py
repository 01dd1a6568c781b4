"""Where Triton is not installed kernels are defined all the same, and their references run."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
from core.kernels import attention, cross_entropy, norms, softmax, triangle
from core.models import Decoder, DecoderConfig
x = torch.randn(2, 5)
assert torch.equal(softmax.softmax(x), torch.softmax(x, -1))
ids = torch.zeros(1, 4, dtype=torch.int64)
config = DecoderConfig(vocab_size=7, dim=8, num_layers=1, num_heads=2, ffn_dim=8, max_length=4)
Decoder(config)(ids, targets=ids).backward()
print("fine")
"""


def test_a_machine_without_triton() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "fine\n", done.stderr
