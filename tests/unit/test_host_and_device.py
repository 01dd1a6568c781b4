"""Masters of which some lie on the host: what ranks say to each other lies on the device of the mesh, on every rank.

There is no such device here, so tensors are fakes of one, with which torch refuses what it refuses on a GPU.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from core.mesh import device_of
from core.optim.clip import gradient_norm, scale_gradients
from core.optim.sharded import Line, Reduction
from core.parallel.data import Completion

MESH: Any = SimpleNamespace(device_type="cuda", size=lambda *_: 2, mesh_dim_names=("dp_replicate",))
GROUP: Any = "a group"


class Sent:
    """Messages instead of a process group, which has none."""

    def __init__(self) -> None:
        self.devices: list[str] = []

    def all_reduce(self, tensor: Tensor, *_: Any, **__: Any) -> Any:
        self.devices.append(tensor.device.type)
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def sent() -> Iterator[Sent]:
    sent = Sent()
    with (
        FakeTensorMode(),
        patch.object(dist, "all_reduce", sent.all_reduce),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(Tensor, "copy_", lambda to, *_, **__: to),  # goes between any devices, but asks for a driver
    ):
        yield sent


def master(device: str, *shape: int) -> Tensor:
    made = torch.empty(shape, device=device, requires_grad=True)
    made.grad = torch.empty(shape, device=device)
    return made


@pytest.mark.parametrize("devices", [["cpu", "cuda"], ["cuda", "cpu"], ["cpu"], []])
def test_the_norm_of_gradients(sent: Sent, devices: list[str]) -> None:
    masters = [master(device, 3, 4) for device in devices]
    assert gradient_norm(masters, MESH).device.type == "cuda"
    assert sent.devices == ["cuda"]
    scale_gradients(masters, 0.5)


@pytest.mark.parametrize("devices", [["cpu", "cuda"], ["cuda", "cpu"], ["cpu", "cpu"]])
def test_sums_of_optimizers(sent: Sent, devices: list[str]) -> None:
    line = Line(GROUP, device_of(MESH))
    parts = [torch.empty(5, device=device) for device in devices]
    Reduction([(part, (line,)) for part in parts]).wait()
    assert sent.devices == ["cuda"]
    assert [part.device.type for part in parts] == devices


@pytest.mark.parametrize("devices", [["cpu", "cuda"], ["cuda", "cpu"], ["cpu", "cpu"]])
def test_partial_gradients(sent: Sent, devices: list[str]) -> None:
    completion = Completion.__new__(Completion)
    completion.mesh = MESH
    grads = [torch.empty(5, device=device) for device in devices]
    axis = SimpleNamespace(size=lambda: 2, get_group=lambda: GROUP)
    with patch("core.parallel.data.sub_mesh", lambda *_: axis):
        completion.sum_partial(grads, "tp")
    assert sent.devices == ["cuda"]
    assert [grad.device.type for grad in grads] == devices
