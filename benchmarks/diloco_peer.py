"""torchft's part of `benchmarks.diloco`: two workers, groups of one rank, under `torchft.local_sgd.DiLoCo`.

    python -m benchmarks.diloco_peer {"optimizer": …} FOLDER      by an interpreter that has torchft

They begin with the weights in FOLDER/begin.safetensors and leave FOLDER/theirs.safetensors. The last line on stdout is
JSON: seconds of each step, and bytes of what a worker gives to `Manager.allreduce` in a round.
"""

import json
import multiprocessing
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore

from apps.llm.loss import token_loss
from benchmarks.diloco import WORKERS, Given, Tokens
from benchmarks.elastic_peer import lighthouse
from core.models.decoder import Decoder

LIMIT_S = 1200.0
fork = multiprocessing.get_context("fork")


def worker(given: Given, number: int, address: str, folder: Path) -> NoReturn:
    from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]
    from torchft.local_sgd import DiLoCo  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # of positions, as where a model is made in fp64
    model = Decoder(given.model)
    model.load_state_dict(load_file(folder / "begin.safetensors"), strict=False)  # a tied head has no value of its own
    rate, parameters = given.rate, list(model.parameters())
    inner = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=rate),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
    }[given.optimizer]()
    outer = torch.optim.SGD(parameters, lr=given.outer_lr, momentum=given.outer_momentum, nesterov=True)
    kept = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=WORKERS,
        use_async_quorum=False,
        init_sync=False,  # else the second would take over the first one's weights behind the first round
        replica_id=f"worker_{number}",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=kept.port,
        lighthouse_addr=address,
        timeout=timedelta(seconds=60),
    )
    sent, allreduce = list[int](), manager.allreduce

    def counted(tensor: torch.Tensor, *more: Any, **options: Any) -> Any:
        sent.append(tensor.nbytes)
        return allreduce(tensor, *more, **options)

    manager.allreduce = counted
    seconds, data = list[float](), Tokens(given)
    with DiLoCo(manager, [model], inner, outer, sync_every=given.every):
        for step in range(given.steps):
            begin = time.monotonic()
            inner.zero_grad()
            token_loss(model, data.batch(step, number, WORKERS)).backward()
            inner.step()
            seconds.append(time.monotonic() - begin)
    if number == 0:
        values = {name: value.detach().contiguous() for name, value in model.named_parameters()}
        save_file(values, folder / "theirs.safetensors")
        said = {"seconds": seconds, "a_round": sum(sent) / given.rounds}
        aside = folder / "said.part"
        aside.write_text(json.dumps(said))
        aside.replace(folder / "said.json")
    while not (folder / "said.json").exists():  # the first may still ask the others
        time.sleep(0.05)
    os._exit(0)


def main(given: Given, folder: Path) -> None:
    address = folder / "lighthouse"
    keeper = fork.Process(target=lighthouse, args=(WORKERS, address), daemon=True)
    keeper.start()
    while not address.exists() or not address.read_text():
        time.sleep(0.05)
    workers = [fork.Process(target=worker, args=(given, n, address.read_text(), folder)) for n in range(WORKERS)]
    for process in workers:
        process.start()
    try:
        for process in workers:
            process.join(LIMIT_S)
        print((folder / "said.json").read_text())
    finally:
        for process in [*workers, keeper]:
            process.kill()


if __name__ == "__main__":
    main(Given(**json.loads(sys.argv[1])), Path(sys.argv[2]))
