"""Compressed messages on a device: what they learn is what they learn on a CPU, and NCCL takes their bytes.

One rank sends nothing of its gradients, but compresses them, in every form; codes that are summed and gathered go
through the group all the same.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.comm.block_code import BlockCode, RoundedCode
from core.comm.coded_rows import CodedRows, RowPart, gather_coded, sum_coded
from core.parallel.coded_sum import CodedSum
from core.parallel.compress import CommConfig
from core.parallel.local import LocalTrainingConfig
from core.runtime import start
from core.train import num_rows, train_step
from tests.gpu.test_device_work import waits
from tests.support.small import Rows, Small, build, config_of, loss, train

pytestmark = pytest.mark.gpu

SENT: dict[str, dict[str, Any]] = {
    "powersgd": {"comm": CommConfig("powersgd", rank=2)},
    "top_k": {"comm": CommConfig("top_k", density=0.3)},
    "random_k": {"comm": CommConfig("random_k", density=0.3)},
    "one_bit": {"comm": CommConfig("one_bit", start=2)},
    "zero_one": {"comm": CommConfig("zero_one", start=1)},
    "averages that arrive late": {"local": LocalTrainingConfig(every=3, overlap=2)},
}


@pytest.mark.parametrize("name", SENT)
def test_a_device_learns_what_a_cpu_learns(name: str, device: torch.device, tmp_path: Path) -> None:
    found = []
    for where in ("cpu", device.type):
        out = tmp_path / f"{where}-{len(found)}"
        found.append(train(config_of(out, device=where, steps=8, **SENT[name]))[1])
    for name_of, value in found[1].items():
        torch.testing.assert_close(value.cpu(), found[0][name_of], rtol=1e-8, atol=1e-10, msg=name_of)


@pytest.mark.parametrize("name", ["one_bit", "random_k"])
@pytest.mark.cuda
def test_a_compressed_step_waits_once(name: str, device: torch.device) -> None:
    config = config_of(Path("/nowhere"), precision="fp32", device="cuda", **SENT[name])
    with start("cuda"):
        state = build(config, Small().to(device))
        batch = {key: x.float().pin_memory() for key, x in Rows().batch(0, 0, 1).items()}
        for step in range(4):
            train_step(state, batch, loss, num_rows, config, step)
        with waits("warn") as found:
            train_step(state, batch, loss, num_rows, config, 4)
    assert len(found) == 1, found


def test_codes_go_through_the_group(device: torch.device) -> None:
    x, rows = torch.randn(705), CodedRows(RoundedCode(8), [RowPart(700, True), RowPart(5, False)])
    wanted = torch.empty(1, 705)
    rows.decode(rows.encode(x[None]), wanted)
    with start(device.type):
        group = dist.group.WORLD
        assert group is not None
        whole = torch.zeros(1, 705, device=device)
        gather_coded(whole, x.to(device), rows, group)
        assert torch.equal(whole.cpu(), wanted)
        lost = torch.empty(1, 705, device=device)
        assert torch.equal(sum_coded(x.to(device)[None], rows, None, group, lost).cpu(), wanted[0])
        assert torch.equal(lost.cpu(), x[None] - wanted)
        sums = []
        for where in (torch.device("cpu"), device):
            coded = CodedSum(BlockCode(4), {"x": x.to(where)}, [["x"]], group)
            sums.append([coded.sum(0, x.to(where)).cpu() for _ in range(3)])
        torch.testing.assert_close(sums[1], sums[0], rtol=1e-5, atol=1e-5)
