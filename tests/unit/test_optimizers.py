"""LAMB, LARS, SM3, CAME and 8-bit AdamW on one rank, each against the algorithm of its paper written out densely."""

import copy
import inspect
import itertools
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.config import UserError, parse
from core.kernels.blockwise import BLOCK, code_values, dequantize, in_8_bits, quantize
from core.optim import AdamW8bit, Came, Lamb, Lars, OptimConfig, Sm3, build_optimizer
from core.optim.build import OPTIMIZERS
from core.optim.came import CameConfig
from core.optim.pieces import pieces
from core.optim.roles import role_of
from core.optim.schedule import ScheduleConfig, batch_factor
from core.optim.sharded import step_over
from core.optim.size import state_bytes

SHAPES = [(5, 7), (3,), (2, 3, 4), ()]
STEPS = 5
Step = Callable[[Tensor, Tensor, dict[str, Tensor], int], Tensor]


def draw(seed: int, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def check(make: Callable[[list[Tensor]], torch.optim.Optimizer], step_of: Step, shapes=SHAPES, limit=1e-12) -> None:
    """The optimizer moves every parameter as `step_of` (p, g, state, t) -> new p does."""
    params = [p.requires_grad_() for p in draw(0, shapes)]
    expected, states = draw(0, shapes), [{} for _ in shapes]
    optimizer = make(params)
    for t in range(1, STEPS + 1):
        grads = draw(t, shapes)
        for p, g in zip(params, grads):
            p.grad = g
        optimizer.step()
        expected = [step_of(p, g, state, t) for p, g, state in zip(expected, grads, states)]
    for start, want, got in zip(draw(0, shapes), expected, params, strict=True):
        assert float((want - start).norm()) > 1e-6
        assert float((got.detach() - want).norm()) <= limit * float((want - start).norm())


def test_lamb_is_algorithm_2() -> None:
    lr, beta1, beta2, eps, decay = 0.1, 0.8, 0.9, 1e-3, 0.2

    def step(x: Tensor, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        m = state["m"] = beta1 * state.get("m", torch.zeros_like(x)) + (1 - beta1) * g
        v = state["v"] = beta2 * state.get("v", torch.zeros_like(x)) + (1 - beta2) * g**2
        r = (m / (1 - beta1**t)) / (torch.sqrt(v / (1 - beta2**t)) + eps)
        return x - lr * x.norm() / (r + decay * x).norm() * (r + decay * x)

    check(lambda p: Lamb(p, lr, (beta1, beta2), eps, decay), step)


def test_lamb_without_trust_is_adamw_without_its_decoupling() -> None:
    """adapt=False and no decay: torch.optim.Adam."""
    params, others = ([p.requires_grad_() for p in draw(0, SHAPES)] for _ in range(2))
    ours, theirs = Lamb(params, 0.1, weight_decay=0.0, adapt=False, eps=1e-8), torch.optim.Adam(others, 0.1)
    for t in range(1, STEPS + 1):
        for p, q, g in zip(params, others, draw(t, SHAPES)):
            p.grad, q.grad = g, g.clone()
        ours.step()
        theirs.step()
    for p, q in zip(params, others):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_trust_ratios_are_one_where_a_norm_is_zero_and_bounded_where_asked() -> None:
    zero = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
    large = torch.full((4, 4), 50.0, dtype=torch.float64, requires_grad=True)
    for p in (zero, large):
        p.grad = torch.ones_like(p)
    Lamb([zero, large], 0.1, weight_decay=0.0, max_norm=8.0).step()
    torch.testing.assert_close(zero.detach(), torch.full_like(zero, -0.1), rtol=1e-5, atol=0)
    torch.testing.assert_close(large.detach(), torch.full_like(large, 50 - 0.1 * 8 / 4), rtol=1e-5, atol=0)


def test_lars_is_algorithm_1() -> None:
    lr, momentum, decay, trust = 2.0, 0.8, 0.2, 0.02

    def step(w: Tensor, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        rate = trust * w.norm() / (g.norm() + decay * w.norm())
        v = state["v"] = momentum * state.get("v", torch.zeros_like(w)) + lr * rate * (g + decay * w)
        return w - v

    check(lambda p: Lars(p, lr, momentum, decay, trust=trust, eps=0.0), step)


def test_lars_without_adaptation_is_momentum() -> None:
    def step(w: Tensor, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        v = state["v"] = 0.8 * state.get("v", torch.zeros_like(w)) + 0.1 * (g + 0.2 * w)
        return w - v

    check(lambda p: Lars(p, 0.1, 0.8, 0.2, adapt=False), step)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_sm3_is_algorithm_ii(momentum: float) -> None:
    """Entry by entry, over the sets of the cover: all indices that share one coordinate."""

    def step(w: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        shape = w.shape or (1,)
        w_, g_ = w.reshape(shape), g.reshape(shape)
        before = state.get("mu", [[0.0] * n for n in shape])
        after = [[0.0] * n for n in shape]
        update = torch.zeros_like(w_)
        for index in torch.cartesian_prod(*(torch.arange(n) for n in shape)).view(-1, len(shape)).tolist():
            nu = min(before[dim][i] for dim, i in enumerate(index)) + float(g_[tuple(index)]) ** 2
            for dim, i in enumerate(index):
                after[dim][i] = max(after[dim][i], nu)
            update[tuple(index)] = float(g_[tuple(index)]) / math.sqrt(nu) if nu else 0.0
        state["mu"] = after
        m = state["m"] = momentum * state.get("m", torch.zeros_like(w_)) + (1 - momentum) * update
        return (w_ - 0.1 * m).view(w.shape)

    check(lambda p: Sm3(p, 0.1, momentum), step)


def test_sm3_leaves_alone_what_never_had_a_gradient() -> None:
    p = torch.ones(2, 2, requires_grad=True)
    p.grad = torch.zeros(2, 2)
    optimizer = Sm3([p])
    optimizer.step()
    assert torch.equal(p, torch.ones(2, 2))


def test_came_is_algorithm_2() -> None:
    lr, (b1, b2, b3), (e1, e2), d, decay = 0.1, (0.8, 0.9, 0.95), (1e-3, 1e-2), 1.2, 0.2

    def approximated(r: Tensor, c: Tensor) -> Tensor:
        return r.unsqueeze(-1) * c.unsqueeze(-2) / r.mean(-1)[..., None, None]

    def step(p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        def average(key: str, new: Tensor, beta: float) -> Tensor:
            state[key] = beta * state.get(key, torch.zeros_like(new)) + (1 - beta) * new
            return state[key]

        square = g**2 + e1
        if p.ndim > 1:
            v = approximated(average("r", square.mean(-1), b2), average("c", square.mean(-2), b2))
        else:
            v = average("v", square, b2)
        u = g / v.sqrt()
        u = u / max(1.0, float(u.square().mean().sqrt()) / d)
        m = average("m", u, b1)
        if p.ndim > 1:
            residual = (u - m) ** 2 + e2
            s = approximated(average("R", residual.mean(-1), b3), average("C", residual.mean(-2), b3))
            return p * (1 - lr * decay) - lr * m / s.sqrt()
        return p * (1 - lr * decay) - lr * m

    check(lambda p: Came(p, lr, (b1, b2, b3), (e1, e2), d, decay), step, limit=1e-11)


# --- 8 bits -----------------------------------------------------------------------------------------------------------


def nearest_codes(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Block by block and value by value, of a matrix."""
    values = torch.tensor(code_values(signed), dtype=torch.float64)
    codes, scales = torch.zeros(x.shape, dtype=torch.uint8), []
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], BLOCK):
            block = x[row, start : start + BLOCK]
            scale = block.abs().max()
            distance = (block[:, None] / (scale if scale > 0 else 1.0) - values[None]).abs()
            if not signed:
                distance[block > 0, 0] = math.inf
            codes[row, start : start + BLOCK] = distance.argmin(1).to(torch.uint8)
            scales.append(scale)
    return codes, torch.stack(scales).view(x.shape[0], -1)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(3, 700), (2, BLOCK), (4, 65)])
def test_blocks_hold_the_nearest_of_256_values(signed: bool, shape: tuple[int, int]) -> None:
    x = draw(0, [shape])[0] * torch.logspace(-6, 3, shape[1], dtype=torch.float64)
    x[0, 3], x[1] = 0.0, 0.0
    x = x if signed else x.square()
    codes, scales = quantize(x, signed)
    expected_codes, expected_scales = nearest_codes(x, signed)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected_codes)
    values = dequantize(codes, scales, signed)
    assert (values == 0)[1].all()
    assert ((values == 0) <= (x == 0)).all() or signed
    again = quantize(values, signed)
    assert torch.equal(again[0], codes), "quantising what was dequantised changes nothing"
    assert torch.equal(again[1], scales)


def test_the_code_is_dynamic() -> None:
    for signed in (True, False):
        values = code_values(signed)
        assert len(set(values)) == 256
        assert values == sorted(values)
        assert {0.0, 1.0} <= set(values)
    assert code_values(True)[0] == -1.0
    assert min(v for v in code_values(False) if v > 0) < 1e-6
    fine = [v for v in code_values(True) if v > 0.1]
    assert max(b / a for a, b in itertools.pairwise(fine)) < 1.15, "at most 7 % from the nearest among the largest"


def test_shapes_without_elements_have_blocks() -> None:
    for shape in [(0, 300), (3, 0), (2, 0, 5)]:
        codes, scales = quantize(torch.zeros(shape), True)
        assert dequantize(codes, scales, True).shape == shape


def test_adamw8bit_is_adamw_with_rounded_moments() -> None:
    lr, beta1, beta2, eps, decay = 0.1, 0.8, 0.9, 1e-3, 0.2

    def rounded(x: Tensor, signed: bool) -> Tensor:
        if not in_8_bits(tuple(x.shape)):
            return x
        codes, scales = nearest_codes(x.flatten(1), signed)
        values = torch.tensor(code_values(signed), dtype=torch.float64)[codes.int()]
        return (values * scales.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]).view(x.shape)

    def step(p: Tensor, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        m = beta1 * state.get("m", torch.zeros_like(p)) + (1 - beta1) * g
        v = beta2 * state.get("v", torch.zeros_like(p)) + (1 - beta2) * g**2
        state["m"], state["v"] = rounded(m, True), rounded(v, False)
        hat = (v / (1 - beta2**t)).sqrt() + eps
        return p * (1 - lr * decay) - lr * (m / (1 - beta1**t)) / hat

    shapes = [(9, 500), (16, 16, 3, 6), (40,), (5, 3), ()]
    check(lambda p: AdamW8bit(p, lr, (beta1, beta2), eps, decay), step, shapes, limit=1e-11)


def test_a_checkpoint_of_8_bits_holds_moments_under_adamws_names() -> None:
    p = draw(0, [(20, 300)])[0].requires_grad_()
    optimizer = AdamW8bit([p])
    for t in range(3):
        p.grad = draw(t, [(20, 300)])[0]
        optimizer.step()
    kept = {key: value.clone() for key, value in optimizer.state[p].items()}
    stored = optimizer.stored(p)
    assert {key: tuple(value.shape) for key, value in stored.items()} == {
        "step": (),
        "exp_avg": (20, 300),
        "exp_avg_sq": (20, 300),
    }
    other = AdamW8bit([p])
    other.init_state()
    loaded = other.stored(p)
    for key, value in stored.items():
        loaded[key].copy_(value)
    other.restore(p, loaded)
    for key, value in kept.items():
        assert torch.equal(other.state[p][key], value), key


# --- by name ----------------------------------------------------------------------------------------------------------


BY_GRADIENTS = [name for name, spec in OPTIMIZERS.items() if not spec.looks]


@pytest.mark.parametrize("name", BY_GRADIENTS)
def test_every_name_is_built_and_its_state_has_the_size_that_is_foretold(name: str) -> None:
    config = OptimConfig(name=name, lr=0.1)  # pyright: ignore
    shapes = {"blocks.0.w": (40, 300), "head": (30, 200), "blocks.0.conv": (8, 8, 3, 3), "b": (50,), "s": ()}
    shapes["blocks.0.experts.up.weight"] = (3, 7, 11)
    masters = {n: torch.randn(shape).requires_grad_() for n, shape in shapes.items()}
    before = {n: m.detach().clone() for n, m in masters.items()}
    optimizer = build_optimizer(config, masters)
    for master in masters.values():
        master.grad = torch.randn(master.shape)
    for _ in range(2):  # the first of SOAP begins
        optimizer.step()
    for n, master in masters.items():
        assert not torch.equal(master, before[n]), n
        tensors = [t for key, t in optimizer.state[master].items() if key != "step"]
        assert sum(t.nbytes for t in tensors) == state_bytes(config, shapes[n], 4, role=role_of(n, shapes[n])), n


TORCHS: dict[str, tuple[type[torch.optim.Optimizer], list[dict[str, Any]]]] = {
    "sgd": (torch.optim.SGD, [{"momentum": 0.0}, {"momentum": 0.8}, {"momentum": 0.8, "nesterov": True}]),
    "adagrad": (torch.optim.Adagrad, [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3}]),
    "rmsprop": (torch.optim.RMSprop, [{"alpha": 0.9, "eps": 1e-3}, {"momentum": 0.5, "centered": True}]),
    "adam": (torch.optim.Adam, [{"betas": (0.8, 0.9), "eps": 1e-3}, {"amsgrad": True}]),
}


@pytest.mark.parametrize("name", list(TORCHS))
def test_the_plain_family_is_torchs_with_each_of_its_options(name: Any) -> None:
    """A matrix decays by the option, a vector never; the state has the bytes that are foretold."""
    kind, cases = TORCHS[name]
    for options in cases:
        config = OptimConfig(name, lr=0.1, weight_decay=0.2, **options)
        masters = {n: p.requires_grad_() for n, p in zip("wb", draw(0, [(5, 7), (3,)]))}
        others = [p.requires_grad_() for p in draw(0, [(5, 7), (3,)])]
        ours = build_optimizer(config, masters)
        groups = [{"params": others[:1], "weight_decay": 0.2}, {"params": others[1:], "weight_decay": 0.0}]
        theirs = kind(groups, lr=0.1, **options)  # pyright: ignore[reportCallIssue]
        for t in range(1, STEPS + 1):
            for p, q, g in zip(masters.values(), others, draw(t, [(5, 7), (3,)])):
                p.grad, q.grad = g, g.clone()
            ours.step()
            theirs.step()
        for n, p, q in zip("wb", masters.values(), others):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12, msg=f"{n} with {options}")
            held = sum(t.nbytes for t in ours.state[p].values() if isinstance(t, Tensor) and t.ndim)
            assert held == state_bytes(config, tuple(p.shape), 8), options


def test_nesterov_needs_a_momentum() -> None:
    with pytest.raises(UserError, match=r"sgd: nesterov=True; give it with a momentum above 0"):
        OptimConfig("sgd", momentum=0.0, nesterov=True)


@pytest.mark.parametrize("name", BY_GRADIENTS)
def test_a_step_is_the_steps_of_its_parts_in_any_order(name: str) -> None:
    shapes = {"blocks.0.w": (40, 300), "blocks.1.w": (30, 20), "head": (30, 200), "b": (50,)}
    runs = []
    for orders in ([["blocks.0.w", "blocks.1.w", "head", "b"]], [["b", "blocks.1.w"], [], ["head"], ["blocks.0.w"]]):
        draw = torch.Generator().manual_seed(0)
        masters = {n: torch.randn(shape, generator=draw).requires_grad_() for n, shape in shapes.items()}
        optimizer = build_optimizer(OptimConfig(name=name, lr=0.1), masters)
        for _ in range(3):
            for master in masters.values():
                master.grad = torch.randn(master.shape, generator=draw)
            for part in orders:
                step_over(optimizer, [masters[n] for n in part])
        runs.append(masters)
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(masters)
    for n in shapes:
        torch.testing.assert_close(runs[0][n], runs[1][n], rtol=1e-6, atol=1e-6, msg=n)


@pytest.mark.parametrize(
    "options", [{"beta1": 0.9}, {"beta1": 0.9, "momentum_format": "bf16"}, {"beta1": 0.9, "momentum_format": "8bit"}]
)
def test_adafactors_first_moment_has_the_size_that_is_foretold(options: dict[str, Any]) -> None:
    config = OptimConfig(name="adafactor", factored="largest", **options)
    for shape in [(40, 300), (6, 5, 3, 3), (50,)]:
        p = torch.randn(shape, requires_grad=True)
        optimizer = build_optimizer(config, {"p": p})
        p.grad = torch.randn(shape)
        optimizer.step()
        held = sum(t.nbytes for key, t in optimizer.state[p].items() if key != "step")
        assert held == state_bytes(config, shape, 4)


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(UserError, match=r"no optimizer 'adan'; the optimizers are adafactor, adagrad, adam, adamw"):
        OptimConfig(name="adan")  # pyright: ignore
    with pytest.raises(UserError) as refusal:
        parse({"r": OptimConfig}, ["--name", "adan"], "command", "r")
    assert all(name in str(refusal.value) for name in OPTIMIZERS)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lars", {"betas": (0.9, 0.95)}),
        ("sm3", {"weight_decay": 0.1}),
        ("adamw", {"beta1": 0.9}),
        ("adamw", {"relative_step": False}),
        ("adafactor", {"momentum": 0.9}),
        ("came", {"factored": "largest"}),
        ("sgd", {"eps": 1e-8}),
        ("sgd", {"dampening": 0.1}),
        ("adagrad", {"momentum": 0.9}),
        ("adam", {"foreach": True}),
    ],
)
def test_options_that_an_optimizer_does_not_have_are_refused(name: Any, options: dict[str, Any]) -> None:
    ((option, value),) = options.items()
    with pytest.raises(UserError) as refusal:
        OptimConfig(name=name, **options)
    text = str(refusal.value)
    assert text.startswith(f"optim.name={name} has no option {option}={value}; its options are lr")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("came", {"betas": (0.9, 0.99)}),
        ("adamw", {"betas": (0.9, 0.99, 0.999)}),
        ("adafactor", {"d": 0.5}),
        ("lars", {"trust": 0.0}),
        ("lamb", {"max_norm": -1.0}),
        ("adagrad", {"lr_decay": -0.5}),
        ("adagrad", {"initial_accumulator_value": -1.0}),
        ("rmsprop", {"alpha": 1.5}),
        ("adam", {"betas": (0.9, 1.0)}),
        ("sgd", {"momentum": -0.25}),
    ],
)
def test_values_are_checked_before_anything_runs(name: Any, options: dict[str, Any]) -> None:
    ((option, value),) = options.items()
    with pytest.raises(UserError, match=option) as refusal:
        OptimConfig(name=name, **options)
    assert str(value) in str(refusal.value)


def test_options_come_from_the_command_line() -> None:
    argv = "--name adafactor --lr 0.01 --beta1 0.9 --momentum-format 8bit --relative-step False --convention paper"
    config = parse({"r": OptimConfig}, argv.split(), "command", "r")
    optimizer = build_optimizer(config, {"w": torch.zeros(3, 3)})
    group = optimizer.param_groups[0]
    assert (group["lr"], group["beta1"], group["momentum_format"]) == (0.01, 0.9, "8bit")
    assert (group["relative_step"], group["convention"], group["eps"]) == (False, "paper", (None, 1e-3))
    came = parse({"r": OptimConfig}, ["--name", "came", "--betas", "0.8", "0.9", "0.99"], "command", "r")
    assert (type(came), came.betas) == (CameConfig, (0.8, 0.9, 0.99))


@pytest.mark.parametrize(
    "words", ["--momentum 0.9", "momentum=0.9", "--name lars --betas 0.8 0.9", "--name=sgd --eps 1"]
)
def test_an_option_of_another_optimizer_is_refused_by_name(words: str) -> None:
    *_, option = [word.lstrip("-").partition("=")[0] for word in words.split() if word.startswith(("--", "momentum"))]
    with pytest.raises(UserError, match=rf"optim\.name=\w+ has no option {option}; its options are lr, .*weight_decay"):
        parse({"r": OptimConfig}, words.split(), "command", "r")
    with pytest.raises(UserError, match=r"no option --typo; see"):
        parse({"r": OptimConfig}, ["--typo", "1"], "command", "r")


def test_what_a_recipe_changes_goes_along_to_another_optimizer() -> None:
    schedule = ScheduleConfig(warmup_steps=7)

    def recipe() -> OptimConfig:
        return OptimConfig(lr=0.5, weight_decay=0.0, betas=(0.5, 0.6), clip_norm=None, schedule=schedule)

    lars = parse({"r": recipe}, ["--name", "lars", "--trust", "0.5"], "command", "r")
    assert lars == OptimConfig("lars", lr=0.5, weight_decay=0.0, clip_norm=None, schedule=schedule, trust=0.5)
    lamb = parse({"r": recipe}, ["--name", "lamb"], "command", "r")
    assert lamb.betas == (0.5, 0.6)
    assert parse({"r": recipe}, ["--name", "came"], "command", "r").betas == OptimConfig("came").betas  # it has three
    assert lamb.eps == OptimConfig("lamb").eps != OptimConfig().eps  # a default of the other is no choice


def test_a_config_is_data_that_can_be_copied_and_sent() -> None:
    for name in OPTIMIZERS:
        config = OptimConfig(name, lr=0.5)
        assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == replace(config) == config
        assert config != replace(config, lr=0.25)
        assert isinstance(config, OptimConfig)


def test_every_optimizer_is_told_of() -> None:
    documented = re.findall(
        r"^\| `(\w+)` \|", Path("docs/optim.md").read_text().partition("## Element by element")[0], re.MULTILINE
    )
    assert sorted(documented) == sorted(OPTIMIZERS)
    (told,) = re.findall(r'each has options of its own:(.*?)"""', inspect.getsource(OptimConfig), re.DOTALL)
    assert re.findall(r"\w+", told.replace(" or ", " ")) == list(OPTIMIZERS)


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_vectors_are_not_adapted(name: Any) -> None:
    masters = {"w": torch.ones(2, 2), "b": torch.ones(2)}
    groups = build_optimizer(OptimConfig(name=name), masters).param_groups
    assert [group["adapt"] for group in groups] == [True, False]


def test_the_rate_grows_with_the_batch() -> None:
    for scaling, factor in (("none", 1.0), ("linear", 16.0), ("sqrt", 4.0)):
        config = ScheduleConfig(scaling=scaling, base_batch=32)  # pyright: ignore
        assert batch_factor(512, config) == factor
    with pytest.raises(UserError, match="base_batch=0"):
        ScheduleConfig(base_batch=0)


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
def test_pieces_cover_every_element_once(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("core.optim.pieces._CPU_ELEMENTS", size)
    tensors = [torch.zeros(7, 11), torch.zeros(0, 3), torch.zeros(()), torch.zeros(5, 4).mT, torch.zeros(100)]
    others = [torch.zeros_like(t) for t in tensors]
    for indices, (first, second) in pieces(tensors, others):
        for index, a, b in zip(indices, first, second, strict=True):
            a += index + 1
            b -= 1
    for index, (a, b) in enumerate(zip(tensors, others)):
        assert (a == index + 1).all()
        assert (b == -1).all()
