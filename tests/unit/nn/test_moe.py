"""Experts: routers against the papers' algorithms token by token, the layer against a plain sum, losses, refusals."""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from core.config import UserError
from core.kernels.grouped_matmul import reference
from core.kernels.operator import forced
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.nn.attention import StepContext
from core.nn.experts import Experts, by_torchs_product
from core.nn.mlp import MLP
from core.nn.moe import AuxiliaryLoss, MoE, load_figures, take_load
from core.nn.routing import MoEConfig, Routing, WholeRows, by_expert, choose, most_rows
from core.parallel.recompute import RecomputeConfig, apply_recompute
from tests.support.fake_gpu import Operators, fake_gpu, on_fake_gpu

examples = settings(deadline=None, max_examples=40, derandomize=True, database=None)
E, L, D = 5, 9, 6
CONFIGS = {
    "topk": MoEConfig(E, experts_per_token=3),
    "switch": MoEConfig(E, router="switch", capacity_factor=0.9),
    "gshard": MoEConfig(E, router="gshard", capacity_factor=0.7, second_expert="always"),
    "expert_choice": MoEConfig(E, router="expert_choice", experts_per_token=1, capacity_factor=0.5),
}


def routed(p_BLE: Tensor, config: MoEConfig, real_BL: Tensor | None = None):
    real_BL = torch.ones(p_BLE.shape[:2], dtype=torch.bool) if real_BL is None else real_BL
    return choose(p_BLE, Routing(config, WholeRows(), real_BL, real_BL.sum(1), None, True))


def by_hand(p_LE: list[list[float]], real: list[bool], config: MoEConfig) -> dict[tuple[int, int], float]:
    """(token, expert) -> gate of one row, as the papers' algorithms go through it, one token after the other."""
    n = sum(real)
    room = min(n, math.ceil(n * config.capacity * config.per_token / E)) if config.router != "topk" else n
    taken, gates = [0] * E, {}
    if config.router == "expert_choice":
        for e in range(E):
            tokens = sorted((t for t in range(len(p_LE)) if real[t]), key=lambda t: -p_LE[t][e])
            gates |= {(t, e): p_LE[t][e] for t in tokens[:room]}
        return gates
    ranked = [sorted(range(E), key=lambda e: -p[e])[: config.per_token] for p in p_LE]
    for choice in range(config.per_token):
        for t, best in enumerate(ranked):
            if real[t]:
                e = best[choice]
                total = sum(p_LE[t][b] for b in best) if config.router != "switch" else 1.0
                if taken[e] < room:
                    gates[t, e] = p_LE[t][e] / total
                taken[e] += 1
    return gates


@examples
@given(st.sampled_from(sorted(CONFIGS)), st.integers(0, 999), st.booleans())
def test_routers_do_what_the_papers_algorithms_do(name: str, seed: int, padded: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    p_BLE = (3 * torch.randn(2, L, E, generator=draw, dtype=torch.float64)).softmax(-1)
    real_BL = torch.rand(2, L, generator=draw) < (0.7 if padded else 2.0)
    choice = routed(p_BLE, CONFIGS[name], real_BL)
    for b in range(2):
        expected = by_hand(p_BLE[b].tolist(), real_BL[b].tolist(), CONFIGS[name])
        found = {(t, e): float(choice.gates_BLE[b, t, e]) for t, e in choice.kept_BLE[b].nonzero().tolist()}
        assert found == pytest.approx(expected, rel=1e-12)


def test_the_second_expert_of_gshard_takes_part_with_probability_2_g2() -> None:
    torch.manual_seed(0)
    config = MoEConfig(2, router="gshard", capacity_factor=math.inf)
    p_BLE = torch.tensor([0.8, 0.2], dtype=torch.float64).expand(4, 5000, 2)
    kept = routed(p_BLE, config).kept_BLE
    assert kept[..., 0].all()
    assert float(kept[..., 1].double().mean()) == pytest.approx(0.4, abs=0.015)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_the_layer_is_the_gated_sum_of_its_experts(name: str, activation) -> None:
    torch.manual_seed(1)
    moe = MoE(D, 7, activation, True, CONFIGS[name]).double()
    x_BLD = torch.randn(3, L, D, dtype=torch.float64)
    choice = routed(moe.router(x_BLD).softmax(-1), CONFIGS[name])
    expected = torch.zeros_like(x_BLD)
    for e in range(E):
        mlp = MLP(D, 7, activation, True).double()
        for part, stack in moe.experts.named_parameters():
            mlp.get_parameter(part).data.copy_(stack[e])
        expected += (choice.gates_BLE * choice.kept_BLE)[..., e, None] * mlp(x_BLD)
    torch.testing.assert_close(moe(x_BLD), expected, rtol=1e-12, atol=1e-12)
    dropped = ~choice.kept_BLE.any(-1)
    assert bool((choice.wanted_BLE != choice.kept_BLE).any() or dropped.any()) == (name != "topk")
    assert not moe(x_BLD)[dropped].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_grouped_product_and_the_loop_agree(dtype: torch.dtype) -> None:
    """On the CPU too, where the loop is taken; an expert without rows has a gradient of zero."""
    torch.manual_seed(2)
    x, w = (torch.randn(n, dtype=dtype, requires_grad=True) for n in ((9, 8), (4, 16, 8)))
    ends = torch.tensor([5, 5, 9, 9])
    grads = []
    for product in (reference, by_torchs_product):
        y = product(x, w, ends)
        assert y.shape == (9, 16)
        grads.append((y, *torch.autograd.grad(y.float().sin().sum(), (x, w))))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    assert not grads[0][2][1].any()


def test_experts_without_any_row_stay_in_the_graph() -> None:
    experts = Experts(3, D, 4, "swiglu", bias=True)
    x = torch.randn(0, D, requires_grad=True)
    y = experts(x, torch.zeros(3, dtype=torch.long))
    assert y.shape == (0, D)
    y.sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


SMALL = DecoderConfig(vocab_size=31, dim=12, num_layers=3, num_heads=2, ffn_dim=10, max_length=8)


def decoder(moe: MoEConfig, **changes) -> Decoder:
    model = Decoder(replace(SMALL, moe=moe, **changes))
    initialise(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name:
                parameter.mul_(40)
    return model.double()


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 31, (4, 8), generator=draw)
    targets = ids.roll(-1, 1)
    targets[0, :5] = targets[2, 6:] = -100
    return ids, targets


@pytest.mark.parametrize("router", ["topk", "switch", "gshard"])
def test_what_routers_add_to_the_loss(router) -> None:
    """Against the equations, row by row, from the layers' inputs; every third row weighted by its targets."""
    moe = MoEConfig(4, every=2, router=router, balance_weight=0.3, z_weight=0.2, second_expert="random")
    moe = replace(moe, second_expert="always") if router == "gshard" else moe
    model = decoder(moe)
    ids, targets = batch()
    seen = []
    layer = model.blocks[1].mlp
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    total = model(ids, targets=targets)
    handle.remove()
    expected = torch.zeros(())
    for b in range(4):
        logits = layer.router(seen[0])[b]
        p = logits.softmax(-1)
        k = 2 if router == "topk" else 1
        f = torch.zeros(4, dtype=torch.float64)
        for best in p.topk(k, -1).indices.flatten().tolist():
            f[best] += 1 / (8 * k)
        balance, z = 4 * (f * p.mean(0)).sum(), logits.logsumexp(-1).square().mean()
        expected = expected + (targets[b] != -100).sum() * (0.3 * balance + 0.2 * z)
    model.eval()
    plain = model(ids, targets=targets)
    model.train()
    torch.testing.assert_close(total - plain, expected, rtol=1e-10, atol=1e-10)
    weights = [p for n, p in model.named_parameters() if "router" in n or "attention.qkv" in n]
    found = torch.autograd.grad(2.5 * total, weights, retain_graph=True)
    for a, b, c in zip(
        found, torch.autograd.grad(plain, weights), torch.autograd.grad(expected, weights, allow_unused=True)
    ):
        torch.testing.assert_close(a, 2.5 * (b if c is None else b + c), rtol=1e-9, atol=1e-12)


def test_the_loss_does_not_depend_on_recomputation_or_microbatches_and_load_is_counted_once() -> None:
    moe = MoEConfig(4, balance_weight=0.3, z_weight=0.2)
    ids, targets = batch()
    results = []
    for mode, split in (("none", 4), ("full", 4), ("selective", 2), ("none", 1)):
        model = decoder(moe)
        apply_recompute(model, RecomputeConfig(mode))
        total = sum(float(_backward(model, i, t)) for i, t in zip(ids.split(split), targets.split(split), strict=True))
        load = take_load(model, torch.device("cpu"))
        assert load is not None
        assert take_load(model, torch.device("cpu")).sum() == 0
        assert load[:, :4].sum(1).tolist() == [2 * ids.numel()] * 3
        results.append((total, [p.grad for p in model.parameters()], load))
    (expected, grads, load), *others = results
    for found, found_grads, found_load in others:
        assert found == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(found_load, load, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found_grads, grads, rtol=1e-10, atol=1e-13)


def _backward(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    total = model(ids, targets=targets)
    total.backward()
    return total.detach()


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_do_not_know_of_each_other_nor_tokens_of_padding(name: str) -> None:
    torch.manual_seed(4)
    moe = MoE(D, 7, "gelu", True, CONFIGS[name]).double()
    x_BLD = torch.randn(3, L, D, dtype=torch.float64)
    together = moe(x_BLD)
    for row in range(3):
        torch.testing.assert_close(moe(x_BLD[row : row + 1]), together[row : row + 1], rtol=1e-12, atol=1e-13)
    padded = torch.cat([torch.randn(3, 4, D, dtype=torch.float64), x_BLD], 1)
    mask = torch.cat([torch.zeros(3, 4), torch.ones(3, L)], 1)
    out = moe(padded, torch.arange(L + 4)[None], mask)
    torch.testing.assert_close(out[:, 4:], together, rtol=1e-12, atol=1e-13)
    assert not out[:, :4].any()


def test_jitter_is_of_training_alone() -> None:
    torch.manual_seed(5)
    moe = MoE(D, 7, "gelu", True, replace(CONFIGS["topk"], jitter=0.5))
    x_BLD = torch.randn(2, L, D)
    assert not torch.equal(moe(x_BLD), moe(x_BLD))
    moe.eval()
    assert torch.equal(moe(x_BLD), moe(x_BLD))


def test_figures_of_a_load() -> None:
    moe = MoE(D, 7, "gelu", True, replace(CONFIGS["switch"], balance_weight=0.0))
    with torch.no_grad():
        moe.router.weight.zero_()  # all alike: the first expert is everybody's best
    context = StepContext()
    context.auxiliary = AuxiliaryLoss(torch.tensor([3, 1]))
    moe(torch.randn(2, L, D), context=context)
    load = take_load(moe, torch.device("cpu"))
    assert load is not None
    figures = load_figures(load)
    assert figures["moe_load"] == [[4, 0, 0, 0, 0]]  # ceil(0.9 * 9 / 5) = 2 in each of two rows
    assert figures["moe_dropped"] == pytest.approx(14 / 18)
    assert figures["moe_imbalance"] == E
    assert figures["moe_balance"] == pytest.approx(1.0)
    assert figures["moe_z"] == pytest.approx(math.log(E) ** 2)


def test_a_gpt_of_experts_trains_compiled_as_eager() -> None:
    """The layer is left out of the graph; what is around it is compiled."""
    ids, targets = batch()
    found = []
    for compiled in (False, True):
        torch.compiler.reset()
        model = decoder(MoEConfig(4, router="switch", z_weight=0.1), num_layers=1)
        if compiled:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        total = _backward(model, ids, targets)
        found.append((total, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"router": "switch"}, "moe.router=switch and no experts; give moe.num_experts"),
        ({"num_experts": 1}, "num_experts=1 and 2 a token; give at least 2"),
        ({"num_experts": 4, "experts_per_token": 5}, "give at least 5"),
        ({"num_experts": 4, "router": "switch", "experts_per_token": 2}, "switch, which takes 1; leave it out"),
        ({"num_experts": 4, "capacity_factor": 2.0}, "topk, which drops nothing"),
        ({"num_experts": 4, "experts_per_token": 1}, "use router switch"),
        ({"num_experts": 4, "second_expert": "always"}, "gshard alone"),
        ({"num_experts": 4, "router": "gshard", "capacity_factor": 0.0}, "a positive factor"),
        ({"num_experts": 4, "jitter": 1.0}, "jitter=1.0; give from 0 to below 1"),
        ({"num_experts": 4, "every": 0}, "every=0; give at least 1"),
        ({"num_experts": 4, "every": 4}, "there are 3; give at most 3"),
    ],
)
def test_refusals(options: dict, says: str) -> None:
    with pytest.raises(UserError) as refusal:
        replace(SMALL, moe=MoEConfig(**options))
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@examples
@given(st.sampled_from(sorted(CONFIGS)), st.integers(0, 999), st.booleans(), st.booleans())
def test_rows_of_a_number_that_is_known_beforehand(name: str, seed: int, padded: bool, bias: bool) -> None:
    """As a GPU lays them out, so that nobody waits for how many there are: outputs and all gradients are the same."""
    torch.manual_seed(seed)
    moe = MoE(D, 7, "swiglu", bias, CONFIGS[name]).double().eval()
    x, mask = torch.randn(2, L, D, dtype=torch.float64, requires_grad=True), torch.rand(2, L) < (0.7 if padded else 2.0)
    wanted = [torch.randn(2, L, D, dtype=torch.float64)]
    leaves = [x, *moe.parameters()]
    found = []
    for most in (lambda *_: None, most_rows):
        with patch("core.nn.moe.most_rows", most), patch("core.nn.moe.COUNTS_ROWS", ()):
            y = moe(x, mask=mask)
        found.append([y, *torch.autograd.grad(y, leaves, wanted)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_more_rows_are_kept_than_are_made(name: str) -> None:
    for length in range(1, 12):
        p_BLE = torch.randn(3, length, E).softmax(-1)
        kept = routed(p_BLE, CONFIGS[name]).kept_BLE
        most = most_rows(CONFIGS[name], WholeRows(), 3, length)
        assert most is not None
        assert int(kept.sum()) <= most <= 3 * length * E
        order = by_expert(kept.flatten(0, 1), most)
        assert len(order.token_A) == most
        exact = by_expert(kept.flatten(0, 1), None)
        assert order.real_A is not None
        for padded, wanted in zip(order[:2], exact[:2], strict=True):
            assert torch.equal(padded[order.real_A], wanted)
            assert not padded[~order.real_A].any()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "capability", "product"),
    [
        (torch.bfloat16, (9, 0), "_grouped_mm"),
        (torch.bfloat16, (8, 0), "grouped_matmul"),  # torch's own reads the ends on the host there
        (torch.bfloat16, (12, 0), "grouped_matmul"),
        (torch.float16, (9, 0), "grouped_matmul"),
        (torch.float32, (9, 0), "grouped_matmul"),
    ],
)
def test_on_a_gpu_nobody_waits(
    name: str, masked: bool, dtype: torch.dtype, capability: tuple[int, int], product: str
) -> None:
    moe = MoE(16, 32, "swiglu", True, CONFIGS[name])
    with fake_gpu() as counted, patch.object(torch.cuda, "get_device_capability", lambda *_: capability):
        on_fake_gpu(moe, dtype)
        x = torch.empty(2, L, 16, dtype=dtype, device="cuda")
        mask = torch.empty(2, L, dtype=torch.long, device="cuda") if masked else None
        assert moe(x, mask=mask).device.type == "cuda"
    assert counted.counts[product] == 3
    assert not counted.waits
    assert not counted.copies


@pytest.mark.parametrize("name", CONFIGS)
def test_three_rows_of_a_token_are_not_added_by_atomics(name: str) -> None:
    """Which take them in any order: neither forward nor on the way back.  Of two the order tells nothing."""
    moe = MoE(16, 32, "swiglu", False, CONFIGS[name]).to("meta")
    x = torch.empty(2, L, 16, device="meta", requires_grad=True)
    with Operators() as counted, forced(), patch("core.nn.moe.COUNTS_ROWS", ()):
        y = moe(x)
        forward = counted.counts["index_add"]
        y.sum().backward()
    assert (forward > 0, counted.counts["index_add"] > forward) == ((False, False) if name == "topk" else (True, True))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_backward_waits_for_nothing_either(name: str, dtype: torch.dtype) -> None:
    """On the meta device, where reading a number is an error, along the path of a GPU."""
    moe = MoE(16, 32, "swiglu", True, CONFIGS[name]).to("meta", dtype)
    x, context = torch.empty(2, L, 16, dtype=dtype, device="meta", requires_grad=True), StepContext()
    context.auxiliary = AuxiliaryLoss(torch.empty(2, device="meta"))
    with Operators() as counted, forced(), patch("core.nn.moe.COUNTS_ROWS", ()):
        context.auxiliary.added_to(moe(x, context=context).sum()).backward()
    assert all(p.grad is not None for p in (x, *moe.parameters()))
    assert counted.counts["grouped_matmul"] == 3 + 3
    assert counted.counts["grouped_matmul_weights"] == 3
    assert not counted.waits
