"""After its warm-up a server compiles no kernel any more, whatever its steps are: counted for a chip without a GPU."""

import pytest

from tests.kernels.test_compile import run

SCRIPT = """
import random
from dataclasses import replace
import torch
from torch import Tensor
from apps.serve.decode import warm_up
from apps.serve.machine import OnHost
from apps.serve.runner import Runner, Step
from core.kernels.compile import _compiling
from core.models import Decoder, DecoderConfig
from core.nn import moe
from core.nn.by_kernels import by_kernels
from core.nn.routing import MoEConfig
from core.quant.scheme import Scheme
from core.quant.weight import QuantizedWeight

class OnMeta(OnHost):
    def put(self, x: Tensor) -> Tensor:
        return x.to("meta")

def quantized(model, scheme):
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            O, I = module.weight.shape
            wide = scheme.name != "int4"
            codes = torch.empty(O, I if wide else I // 2, dtype=torch.int8 if wide else torch.uint8, device="meta")
            scale = torch.empty(O, device="meta") if wide else torch.empty(
                O, I // scheme.group_size, dtype=torch.bfloat16, device="meta")
            weight = QuantizedWeight(scheme, codes, scale, None, (O, I), torch.bfloat16)
            module.weight = torch.nn.Parameter(weight, requires_grad=False)

def step(dice, prompts, decoding, most):
    made, page = Step(), 0
    for number in range(prompts + decoding):
        new = dice.randint(2, 200) if number < prompts else 1
        new = min(new, most - len(made.ids))
        if not new:
            break
        length = new + dice.randint(0, 600)
        table = list(range(page, page + -(-length // 16)))
        page = (page + len(table)) % 3000
        made.ids.extend([1] * new)
        made.positions.extend(range(length - new, length))
        made.slots.extend(range(new))
        made.tables.append(table)
        made.lengths.append(length)
        made.starts.append(len(made.ids))
        made.rows.append(len(made.ids) - 1)
    return made

# Enough columns that products with 33 to 64 rows are made in parts, which `_merge_parts` adds up.
config = DecoderConfig(vocab_size=512, dim=1024, num_layers=1, num_heads=16, num_kv_heads=8, ffn_dim=2048,
                       max_length=2048, positions="rotary", norm="rms_norm", activation="swiglu",
                       attention_bias=False, mlp_bias=False, family="llama", tied_head=False)
moe.COUNTS_ROWS = ()  # as on a GPU, where rows of experts are not counted
for scheme in (None, Scheme("int8"), Scheme("int4", 32), "experts"):
    experts = scheme == "experts"
    with torch.device("meta"):
        model = Decoder(replace(config, moe=MoEConfig(8)) if experts else config).to(torch.bfloat16)
    if isinstance(scheme, Scheme):
        quantized(model, scheme)
    runner = Runner(by_kernels(model), 4000, 16, torch.bfloat16)
    runner.machine = OnMeta(torch.device("meta"))
    for most in (1024, 21):  # of which one is no power of two
        dice, compiled = random.Random(0), []
        with _compiling("sm_90", compiled):
            warm_up(runner, most, 2048)
            for decoding in (1, 2, 4, 8, 16, min(most, 32)):  # what graphs are made for
                runner.compute(step(dice, 0, decoding, most))
            known = {kernel.hash for kernel in compiled}
            compiled.clear()
            for _ in range(60):
                runner.compute(step(dice, dice.randint(0, 3), dice.randint(1, 40), most))
        later = {kernel.metadata.name for kernel in compiled if kernel.hash not in known}
        names = {kernel.metadata.name for kernel in compiled}
        assert ("_merge_parts" in names) == (isinstance(scheme, Scheme) and most > 32), names
        assert ("_group_rows" in names) == experts, names
        print(scheme, len(known), "kernels before,", len(compiled), "launches after,", "compiled then:", sorted(later))
        assert len(compiled) > 300
        assert not later
"""


@pytest.mark.timeout(1800)
def test_no_request_waits_for_a_kernel_to_be_compiled() -> None:
    done = run("-c", SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("compiled then: []") == 8
