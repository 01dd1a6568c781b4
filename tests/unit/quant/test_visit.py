"""Weights are rounded on a device, block after block, while the model stays on the host; results are the same.

The device is cpu:0, which is another name of the host, so that what moves is seen and what is computed is the same.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from core.config import UserError
from core.quant import QuantizedWeight, quantize, visit
from tests.unit.quant.models import FAMILIES, UNet, decoder, tokens, unet_inputs

DEVICE = torch.device("cpu", 0)
ALL = {"embeddings": True, "head": True}


class There:
    """Modules that are on the device, and how often blocks came."""

    def __init__(self) -> None:
        self.modules: set[nn.Module] = set()
        self.came: list[nn.Module] = []
        self.real = visit._move

    def move(self, module: nn.Module, device: torch.device, recurse: bool = True) -> None:
        self.real(module, device, recurse)
        parts = set(module.modules()) if recurse else {module}
        if device == DEVICE:
            self.modules |= parts
            self.came += [module] if recurse else []
        else:
            self.modules -= parts


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[There]:
    found = There()
    monkeypatch.setattr(visit, "_move", found.move)
    yield found
    assert not found.modules


def stored(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        parts = parameter.parts if isinstance(parameter, QuantizedWeight) else {"": parameter}
        found |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    return found


def require_same(found: nn.Module, wanted: nn.Module) -> None:
    ours, theirs = stored(found), stored(wanted)
    assert list(ours) == list(theirs)
    assert any(name.endswith(".codes") for name in ours)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert {tensor.device for tensor in ours.values()} == {torch.device("cpu")}


@pytest.mark.parametrize("family", FAMILIES)
def test_calibrated_block_after_block(family: str, there: There) -> None:
    data = [tokens(rows) for rows in (2, 3)]
    wanted = quantize(decoder(family), "int4", group_size=32, calibration=data, **ALL)
    model = decoder(family)
    blocks = list(model.blocks)
    most = [0]

    def ran(block: nn.Module, *_: Any) -> None:
        if block not in blocks:  # its copy, which has its hooks, too
            return
        there_now = [one for one in blocks if one in there.modules]
        assert block in there_now, "a block runs where it is not"
        most[0] = max(most[0], len(there_now))

    hooks = [block.register_forward_hook(ran) for block in blocks]
    found = quantize(model, "int4", group_size=32, calibration=data, device=DEVICE, **ALL)
    for hook in hooks:
        hook.remove()
    require_same(found, wanted)
    assert most == [1]
    assert set(there.came) == set(blocks)
    assert not any("forward" in vars(block) for block in blocks)


def test_a_block_that_is_read_many_times_comes_once(there: There) -> None:
    """The checks and the embeddings' gradients go through the whole model; the blocks' own weights move nothing."""
    model = decoder("llama")
    few, many = ([tokens() for _ in range(n)] for n in (1, 5))
    came = []
    for data in (few, many):
        there.came.clear()
        quantize(decoder("llama") if data is few else model, "int4", calibration=data, device=DEVICE)
        came.append(len(there.came))
    # For each batch more the blocks come to be found out what they are called with, twice the first one.
    assert came[1] - came[0] <= 4 * (len(model.blocks) + 1)


class Sent(TorchFunctionMode):
    """Numbers of elements of what was sent to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and args[1:] == (DEVICE,):
            self.elements.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scheme", ["int8", "int4", "llm.int8"])
def test_without_calibration_a_weight_at_a_time(scheme: str) -> None:
    wanted, model = quantize(decoder(), scheme, **ALL), decoder()
    with Sent() as sent:
        found = quantize(model, scheme, device=DEVICE, **ALL)
    require_same(found, wanted)
    assert sent.elements == [p.numel() for p in wanted.parameters() if isinstance(p, QuantizedWeight)]


def test_a_model_that_is_no_chain_of_blocks_is_there_whole(there: There) -> None:
    data = [unet_inputs()]
    torch.manual_seed(0)
    plain = UNet()
    torch.manual_seed(0)
    twin = UNet()
    wanted = quantize(plain, "int4", group_size=32, calibration=data)
    require_same(quantize(twin, "int4", group_size=32, calibration=data, device=DEVICE), wanted)


def test_an_error_leaves_the_model_on_the_host(there: There) -> None:
    model = decoder("opt")
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        quantize(model, "int4", calibration=[tokens()], device=DEVICE)
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cpu")}
