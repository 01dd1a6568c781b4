"""What a device does by itself: nobody waits for it, what moves is where it is read, and ways of one product agree."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from apps.fold.subbatch.slices import every, host_zeros, settle, update_rows
from core.gemini import wrap
from core.kernels import quantized_matmul, ways
from core.models import Decoder, DecoderConfig, initialise
from core.models.generate import generate
from core.nn.moe import MoE
from core.nn.routing import MoEConfig
from core.optim import AdamW8bit
from core.pinned import host_empty
from core.quant import quantize
from core.quant.measured import measure_weights
from core.runtime import start
from core.train import num_rows, train_step
from tests.support.small import build, config_of
from tests.unit.quant.models import decoder, tokens

pytestmark = pytest.mark.gpu


@contextmanager
def waits(how: str = "error") -> Iterator[list[str]]:
    """Inside, whoever lets the host wait raises, or is written down."""
    found: list[str] = []
    torch.cuda.set_sync_debug_mode(how)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
        found += [str(one.message) for one in said if "synchroniz" in str(one.message)]


@pytest.mark.parametrize("router", ["topk", "switch", "gshard", "expert_choice"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.cuda
def test_experts_wait_for_nobody(router: str, dtype: torch.dtype, device: torch.device) -> None:
    moe = MoE(64, 128, "swiglu", True, MoEConfig(4, router=router)).to(device, dtype)  # pyright: ignore
    x = torch.randn(2, 32, 64, device=device, dtype=dtype, requires_grad=True)
    moe(x).sum().backward()  # libraries begin
    with waits():
        moe(x).float().square().sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def test_experts_compute_what_a_cpu_computes(device: torch.device) -> None:
    config = MoEConfig(4, router="switch", capacity_factor=0.7)
    moe, x = MoE(64, 128, "swiglu", True, config), torch.randn(2, 32, 64)
    wanted = moe(x)
    found = moe.to(device)(x.to(device)).cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
def test_a_training_step_waits_once(device: torch.device) -> None:
    ids = torch.randint(41, (4, 9))
    config = config_of(Path("/nowhere"), precision="bf16", device="cuda")
    shape = DecoderConfig(vocab_size=41, dim=32, num_layers=2, num_heads=2, ffn_dim=128, max_length=9)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["ids"], targets=batch["ids"]) / batch["ids"].numel()

    with start("cuda"):
        model = Decoder(shape).to(device)
        initialise(model, 0)
        state = build(config, model)
        batch = {"ids": ids.pin_memory()}
        for step in range(2):
            train_step(state, batch, loss, num_rows, config, step)
        with waits("warn") as found:
            train_step(state, batch, loss, num_rows, config, 2)
    assert len(found) == 1, found


def trained(budget: str | None, device: torch.device) -> float:
    """A loss after four steps; with a budget Gemini has the model and its optimizer from the second on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(device)

    def loss(model: nn.Module) -> Tensor:
        return model(x).square().mean()

    for step in range(4):
        if step == 1 and budget is not None:
            wrap(model, optimizer, budget, sample=lambda: loss, device=device.type)
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss(model).detach())


def test_the_state_of_an_optimizer_follows_its_masters(device: torch.device) -> None:
    """With what the optimizer has from steps before, and in steps after the masters have moved."""
    assert trained("1GiB", device) == pytest.approx(trained(None, device), rel=1e-4)


def test_adamw_in_8_bits_steps_as_on_a_cpu(device: torch.device) -> None:
    found = []
    for where in (torch.device("cpu"), device):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(70, 300).to(where))
        optimizer = AdamW8bit([parameter], lr=1e-2)
        for step in range(5):
            grad = torch.randn(70, 300, generator=torch.Generator().manual_seed(step))
            parameter.grad = grad.to(where)
            optimizer.step()
        found.append(parameter.detach().cpu())
    assert float((found[0] - found[1]).abs().mean()) < 1e-6


@pytest.mark.parametrize("rows", [3, 16, 64, 300])
@pytest.mark.cuda
def test_ways_of_a_product_agree(rows: int, device: torch.device) -> None:
    """Also with the library's own kernels, which no interpreter runs."""
    x = torch.randn(rows, 512, device=device, dtype=torch.bfloat16)
    w = torch.randn(256, 512, device=device)
    eight, four = quantized_matmul.quantize_int8(w), quantized_matmul.quantize_int4(w, 64, False)
    products = {
        "int8": lambda how: quantized_matmul.int8_matmul(x, *eight, how=how),
        "int4": lambda how: quantized_matmul.int4_matmul(x, *four, group=64, how=how),
        "w8a8": lambda how: quantized_matmul.int8_dynamic_matmul(x, *eight, how=how),
    }
    for name, product in products.items():
        other = "wide" if name != "w8a8" else "library"
        if other == "library" and rows <= 16:
            continue
        tile, found = product("tile").float(), product(other).float()
        assert float((found - tile).abs().max()) < 2e-2 * float(tile.abs().max()), name


@pytest.mark.cuda
def test_products_are_measured_once(tmp_path: Path, device: torch.device) -> None:
    model = quantize(nn.Sequential(nn.Linear(512, 256)).to(device), "int4", group_size=64)
    ways.forget()
    try:
        assert len(measure_weights(model, torch.bfloat16, tmp_path)) == len(ways.ROWS)
        (kept,) = tmp_path.iterdir()
        assert torch.cuda.get_device_name().replace(" ", "-") in kept.name
    finally:
        ways.forget()


def test_rounded_on_the_device_as_on_the_host(device: torch.device) -> None:
    wanted, found = quantize(decoder(), "int8"), quantize(decoder(), "int8", device=device)
    for (name, ours), theirs in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert ours.device.type == "cpu", name
        assert torch.equal(ours, theirs), name


def test_calibrated_on_the_device(device: torch.device) -> None:
    data = [tokens(4, 16) for _ in range(2)]
    plain, wanted = decoder("llama"), quantize(decoder("llama"), "int4", group_size=32, calibration=data)
    found = quantize(decoder("llama"), "int4", group_size=32, calibration=data, device=device)
    assert {p.device.type for p in found.parameters()} == {"cpu"}
    exact = plain(data[0])
    ours, theirs = (float((model(data[0]) - exact).square().mean()) for model in (found, wanted))
    assert ours < 1.2 * theirs  # sums in another order choose other codes here and there


@pytest.mark.cuda
def test_pinned_memory_is_what_was_asked_for(device: torch.device) -> None:
    tensor = host_empty((3 << 20) + 5, torch.float32, pinned=True)
    assert tensor.is_pinned()
    there = torch.arange(tensor.numel(), device=device, dtype=torch.float32)
    tensor.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(tensor, there.cpu())
    del tensor
    assert host_empty(10, torch.float32, pinned=True).is_pinned()


@pytest.mark.parametrize("padded", [False, True])
def test_bloom_generates_in_16_bits_what_its_rounded_weights_say(padded: bool, device: torch.device) -> None:
    """Long enough that distances in 16 bits would collapse: the same as in fp64 with the same weights."""
    torch.manual_seed(0)
    model = decoder("bloom").to(torch.bfloat16)
    ids = torch.randint(0, 61, (2, 600), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0 if padded else 1
    given = {"attention_mask": mask.to(device)} if padded else {}
    with torch.no_grad():
        exact = model.double()(ids, mask if padded else None)[:, -1]
        logits = model.to(device, torch.bfloat16)(ids.to(device), *given.values())[:, -1].double().cpu()
    assert float((logits - exact).abs().max()) < 0.05 * float(exact.abs().max())
    assert generate(model, ids[:, -20:].to(device), 3).shape == (2, 23)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.cuda
def test_slices_of_host_memory_are_copied_beside_what_is_computed(columns: bool, device: torch.device) -> None:
    """Rows without anybody waiting; columns stop over in pinned places, for which the host waits."""
    with torch.no_grad():
        z, like = host_zeros((1, 301, 301, 64), torch.bfloat16), torch.zeros(1, device=device)
        z.copy_(torch.arange(z.numel()).view(z.shape) % 101)
        wanted = z * 2 + 1
        for _ in range(2):  # places are made at the first
            given = z.transpose(1, 2) if columns else z
            with waits() if not columns else nullcontext():
                update_rows(given, like, every(301, 40), lambda _, rows: rows.take() * 2 + 1)
            settle(z, like)
            assert torch.equal(z, wanted)
            z.sub_(1).div_(2)
