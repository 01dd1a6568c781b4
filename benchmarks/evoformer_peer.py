"""OpenFold's Evoformer block, in an environment that has it, for `benchmarks.evoformer`.

`python -m benchmarks.evoformer_peer TASK.pt BLOCKS DEVICE FORMAT REPEATS THREADS` (this module imports nothing of the
project but its account of memory, which needs torch alone): loads the weights and inputs of the task, writes its
outputs into it, times, and prints {work: seconds}, the least of REPEATS after one that is not counted; on a CPU also
"peak", the most bytes of tensors alive at once in a forward without gradients. Attention as OpenFold has it by default,
without its compiled extension; the task says which works are timed, and in chunks of how many rows blocks go ("chunk",
OpenFold's chunk_size; None: whole).

A checkout on the PYTHONPATH will do, beside torch, numpy and scipy: of OpenFold only the block's modules are imported.
"""

import ctypes
import importlib.util
import json
import sys
import time
import types
from pathlib import Path

import torch

WIDTHS = {
    "c_m": 256,
    "c_z": 128,
    "c_hidden_msa_att": 32,
    "c_hidden_opm": 32,
    "c_hidden_mul": 128,
    "c_hidden_pair_att": 32,
    "no_heads_msa": 8,
    "no_heads_pair": 4,
    "transition_n": 4,
    "msa_dropout": 0.15,
    "pair_dropout": 0.25,
    "no_column_attention": False,
    "opm_first": False,
    "fuse_projection_weights": False,
    "inf": 1e9,
    "eps": 1e-3,
}


def blocks_of(count: int) -> torch.nn.ModuleDict:
    found = importlib.util.find_spec("openfold")
    if found is None or found.submodule_search_locations is None:
        raise SystemExit("this interpreter has no openfold; put a checkout of it on the PYTHONPATH")
    package = types.ModuleType("openfold")  # its own __init__ wants all that it reads data with
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["openfold"] = package
    # It cannot be imported without its CUDA extension, which nothing here calls.
    sys.modules.setdefault("attn_core_inplace_cuda", types.ModuleType("attn_core_inplace_cuda"))
    from openfold.model.evoformer import EvoformerBlock

    return torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(EvoformerBlock(**WIDTHS) for _ in range(count))})


def run(
    model: torch.nn.ModuleDict, inputs: list[torch.Tensor], chunk: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    m, z, *masks = inputs
    for block in model["blocks"]:
        # Without gradients in place, its fastest way; transitions unmasked, as the released weights were trained.
        m, z = block(m, z, *masks, chunk_size=chunk, inplace_safe=not torch.is_grad_enabled(), _mask_trans=False)
    return m, z


def forward(model: torch.nn.ModuleDict, inputs: list[torch.Tensor], chunk: int | None) -> None:
    with torch.no_grad():
        run(model, [inputs[0].clone(), inputs[1].clone(), *inputs[2:]], chunk)


def forward_backward(model: torch.nn.ModuleDict, inputs: list[torch.Tensor], chunk: int | None) -> None:
    m, z = run(model, [inputs[0].clone().requires_grad_(), inputs[1].clone().requires_grad_(), *inputs[2:]], chunk)
    (m.float().mean() + z.float().mean()).backward()
    model.zero_grad()


def peak_bytes(model: torch.nn.ModuleDict, inputs: list[torch.Tensor], chunk: int | None) -> int:
    """Weights and inputs among them; its own inputs are overwritten."""
    path = Path(__file__).parents[1] / "core" / "trace" / "account.py"
    spec = importlib.util.spec_from_file_location("memory", path)
    assert spec is not None
    assert spec.loader is not None
    memory = importlib.util.module_from_spec(spec)
    sys.modules["memory"] = memory
    spec.loader.exec_module(memory)
    given = [inputs[0].clone(), inputs[1].clone(), *inputs[2:]]
    with torch.no_grad(), memory.MemoryAccount() as account:
        account.add([*model.parameters(), *given])
        run(model, given, chunk)
    return account.peak_bytes


def keep_freed_memory() -> None:
    """As core.runtime has it, which needs more than this environment has."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 64 * 1024 * 1024)) if mallopt is not None else ():
        mallopt(option, value)


def main(argv: list[str]) -> None:
    path, device, repeats = Path(argv[0]), torch.device(argv[2]), int(argv[4])
    if device.type == "cpu":
        keep_freed_memory()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[argv[3]]
    torch.set_num_threads(int(argv[5]))
    task = torch.load(path, weights_only=True)
    model = blocks_of(int(argv[1])).to(device)
    model.load_state_dict(task["state"])
    model = model.to(dtype).eval()
    inputs = [x.to(device, dtype) for x in task["inputs"]]
    chunk = task["chunk"]
    with torch.no_grad():
        outputs = run(model, [inputs[0].clone(), inputs[1].clone(), *inputs[2:]], chunk)
    torch.save(task | {"outputs": [x.cpu() for x in outputs]}, path)
    found: dict[str, float] = {}
    if device.type == "cpu":
        found["peak"] = peak_bytes(model, inputs, chunk)
    for name, work in (("forward", forward), ("forward and backward", forward_backward)):
        if name not in task["works"]:
            continue
        taken = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            work(model, inputs, chunk)
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        found[name] = min(taken[1:])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
