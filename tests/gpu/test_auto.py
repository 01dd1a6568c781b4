"""A foreign model that the solver has spread over one GPU learns what it learns untouched on a CPU."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from core.auto import parallelize
from core.layout import full_tensor, is_dtensor
from core.runtime import start
from tests.support import foreign
from tests.support.spread import tokens
from tests.support.zoo import in_fp64

pytestmark = pytest.mark.gpu


def test_spread_over_one_device(device: torch.device) -> None:
    torch.manual_seed(0)
    alone = foreign.gpt2().double()
    model = copy.deepcopy(alone).to(device)
    here = {name: x.to(device) for name, x in tokens(0).items()}
    with start(device.type), in_fp64():
        parallelize(model, here, mesh=init_device_mesh(device.type, (1,), mesh_dim_names=("x",)))
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
        for step in range(3):
            batch = tokens(step)
            found, wanted = model(**{n: x.to(device) for n, x in batch.items()}).loss, alone(**batch).loss
            assert found.device.type == device.type
            assert found.item() == pytest.approx(wanted.item(), rel=1e-10)
            for loss, optimizer in ((found, ours), (wanted, theirs)):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        for (name, got), want in zip(model.named_parameters(), alone.parameters(), strict=True):
            whole = full_tensor(got) if is_dtensor(got) else got
            torch.testing.assert_close(whole.detach().cpu(), want.detach(), rtol=1e-9, atol=1e-11, msg=name)
