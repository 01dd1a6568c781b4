"""One short test of each part: products, experts, serving, fold, compiled blocks.

On the device against the CPU or against fp64.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from apps.fold.golden import OUTPUTS, compare
from apps.fold.subbatch import FoldJob, How, least_bytes, plan_subbatches
from apps.serve.scheduler import Limits
from benchmarks.evoformer import blocks_of, config_of, inputs_of, run_blocks, slice_blocks
from core.compose import compile_blocks
from core.models import Decoder
from core.models.generate import generate
from core.nn.by_kernels import by_kernels
from core.nn.routing import MoEConfig
from core.quant import Scheme
from core.quant.weight import quantized_weight
from tests.support.fold import GOLDEN
from tests.support.serving import greedy, real_engine, run
from tests.unit.models.test_pretrained import example, random_decoder

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]

LIMITS = Limits(4, 64, 16, 6)
PROMPTS = ([1, 2, 3], [*range(12)], [5], [40, 3])


@pytest.mark.parametrize("rows", [1, 5, 16, 200])
@pytest.mark.parametrize("scheme", [Scheme("int8"), Scheme("int4", 64), Scheme("int4", 128, False)], ids=str)
def test_quantized_products(scheme: Scheme, rows: int, device: torch.device) -> None:
    """In 16 bits, of any number of rows: decoding's and prefill's, which may go different ways."""
    generator = torch.Generator().manual_seed(0)
    weight = quantized_weight(torch.randn(96, 256, generator=generator) + 0.3, scheme)
    x, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in ((rows, 256), (96,)))
    wanted = x.double() @ weight.matrix(dtype=torch.float64).T + bias.double()
    found = F.linear(x.to(device), torch.nn.Parameter(weight, requires_grad=False).to(device), bias.to(device))
    assert (found.device.type, found.dtype) == (device.type, torch.bfloat16)
    # The weights as they are widened to bf16, and the result, are rounded.
    assert float((found.cpu().double() - wanted).norm() / wanted.norm()) <= 2**-8


def _loss_and_gradients(model: Decoder, ids_BL: Tensor) -> list[Tensor]:
    loss = model(ids_BL, targets=ids_BL)
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("router", ["topk", "switch", "expert_choice"])
def test_experts(router: str, device: torch.device) -> None:
    config = example("llama", moe=MoEConfig(num_experts=4, router=router))
    ids = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(0))
    wanted = _loss_and_gradients(random_decoder(config), ids)
    found = _loss_and_gradients(random_decoder(config).float().to(device), ids.to(device))
    for got, want in zip(found, wanted, strict=True):
        assert float((got.double() - want).abs().max()) <= 2e-4 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom", "llama"])
def test_serving_writes_what_a_cpu_writes(family: str, device: torch.device) -> None:
    model = random_decoder(example(family)).float()
    wanted = [generate(model, torch.tensor([p]), 10)[0, len(p) :].tolist() for p in PROMPTS]
    engine = real_engine(by_kernels(model.to(device)), LIMITS, num_pages=40)
    written = run(engine, [greedy(str(n), prompt, 10) for n, prompt in enumerate(PROMPTS)])
    assert [written.ids(str(n)) for n in range(len(PROMPTS))] == wanted


def test_fold_is_the_original(device: torch.device) -> None:
    differences = compare(GOLDEN, device.type)
    assert set(differences) == set(OUTPUTS)
    assert max(differences.values()) <= 2e-5, differences


def test_a_block_of_fold_in_slices(device: torch.device) -> None:
    inputs = inputs_of(6, 20, torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        wanted = run_blocks(blocks_of(1, torch.device("cpu"), torch.float64), tuple(x.double() for x in inputs))
        for sliced in (False, True):
            blocks = blocks_of(1, device, torch.float32)
            if sliced:
                slice_blocks(blocks, {f"blocks.{name}": how for name, how in _ways(blocks).items()})
            found = run_blocks(blocks, tuple(x.to(device) for x in inputs))
            for got, want in zip(found, wanted, strict=True):
                assert float((got.cpu().double() - want).abs().max() / want.abs().max()) <= 1e-4


def _ways(blocks: torch.nn.ModuleList) -> dict[str, How]:
    """Slices of seven rows of every operation; the triangle products over a copy."""
    job = FoldJob(config_of(), 20, 6, 1, dtype=torch.float32)
    choices = plan_subbatches(job, least_bytes(job)).choices
    return {name.removeprefix("blocks."): how for name, how in choices.items() if name.startswith("blocks.")}


def test_compiled_blocks_compute_the_same(device: torch.device) -> None:
    ids = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(0)).to(device)
    plain, compiled = (random_decoder(example("llama")).float().to(device) for _ in range(2))
    compile_blocks(list(compiled.blocks))
    wanted, found = _loss_and_gradients(plain, ids), _loss_and_gradients(compiled, ids)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
