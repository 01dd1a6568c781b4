"""SOAP, Shampoo, GaLore and Muon's options: equations written out, and what must hold without a peer."""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.config import UserError
from core.optim import SOAP, GaLore, Muon, OptimConfig, Shampoo, build_optimizer
from core.optim.build import groups_in_words
from core.optim.matrices import MatrixOptimizer
from core.optim.muon import orthogonalised, polar_factor
from core.optim.roles import role_of
from core.optim.size import state_bytes
from core.optim.spectra import eigenbasis, packed, refreshed, settled, unpacked
from tests.support.small import config_of, train

STEPS = 7
Make = Callable[[list[Tensor]], MatrixOptimizer]


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moved(make: Make, start: Tensor, grads: list[Tensor]) -> Tensor:
    """The displacement of a parameter by given gradients."""
    parameter = start.clone().requires_grad_()
    optimizer = make([parameter])
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    assert optimizer.fallbacks == 0
    return parameter.detach() - start


def gradients(*shape: int, steps: int = STEPS) -> list[Tensor]:
    return [draw(step, *shape) * (1 + step % 3) for step in range(1, steps + 1)]


def near(found: Tensor, expected: Tensor, limit: float = 1e-10) -> None:
    assert float(expected.norm()) > 1e-6
    assert float((found - expected).norm()) <= limit * float(expected.norm())


# --- SOAP -------------------------------------------------------------------------------------------------------------


def soap_by_hand(grads: list[Tensor], start: Tensor, every: int, *, forget_order: bool = False) -> Tensor:
    """The authors' algorithm of one matrix, with dense factors and the bases of `torch.linalg`."""
    lr, b1, b2, eps, decay = 0.1, 0.9, 0.8, 1e-6, 0.2
    w, (m, v) = start.clone(), (torch.zeros_like(start) for _ in range(2))
    left, right = 0.2 * grads[0] @ grads[0].T, 0.2 * grads[0].T @ grads[0]
    q, p = (torch.linalg.eigh(factor)[1].flip(-1) for factor in (left, right))
    for k, g in enumerate(grads[1:], 1):
        m, turned = b1 * m + (1 - b1) * g, q.T @ g @ p
        v = b2 * v + (1 - b2) * turned**2
        step = (q.T @ m @ p / (1 - b1**k)) / ((v / (1 - b2**k)).sqrt() + eps)
        w = w * (1 - lr * decay) - lr * q @ step @ p.T
        left, right = b2 * left + (1 - b2) * g @ g.T, b2 * right + (1 - b2) * g.T @ g
        if k % every == 0:
            rows, columns = (
                torch.diag(basis.T @ factor @ basis).argsort(descending=True)
                for basis, factor in ((q, left), (p, right))
            )
            v = v if forget_order else v[rows][:, columns]
            q, p = torch.linalg.qr(left @ q[:, rows])[0], torch.linalg.qr(right @ p[:, columns])[0]
    return w - start


def soap(**options: Any) -> Make:
    given = {"lr": 0.1, "betas": (0.9, 0.8), "eps": 1e-6, "weight_decay": 0.2, "precondition_frequency": 2} | options
    return lambda parameters: SOAP(parameters, **given)


def test_soap_is_the_authors_algorithm() -> None:
    """On a square matrix both factors have full rank from the first gradient on, so that bases are unique."""
    start, grads = draw(0, 6, 6), gradients(6, 6, steps=12)
    found = moved(soap(), start, grads)
    near(found, soap_by_hand(grads, start, 2), 1e-9)
    wrong = soap_by_hand(grads, start, 2, forget_order=True)
    assert float((found - wrong).norm()) > 1e-3 * float(wrong.norm()), "the moments are not sorted with the basis"


@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
def test_soap_in_its_own_basis_is_adamw(shape: tuple[int, int]) -> None:
    start, grads = draw(0, *shape), gradients(*shape)
    parameter = start.clone().requires_grad_()
    optimizer = soap(precondition_frequency=1000)([parameter])
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
        for side in ("left", "right"):
            basis = optimizer.state[parameter][f"{side}_basis"]
            basis.copy_(torch.eye(basis.shape[-1]))
    other = start.clone().requires_grad_()
    adamw = torch.optim.AdamW([other], lr=0.1, betas=(0.9, 0.8), eps=1e-6, weight_decay=0.2)
    for grad in grads[1:]:
        other.grad = grad.clone()
        adamw.step()
    near(parameter.detach() - start, other.detach() - start, 1e-12)


@pytest.mark.parametrize("kind", ["permutation", "rotation"])
def test_one_sided_soap_turns_with_its_rows(kind: str) -> None:
    turn = (
        torch.eye(5, dtype=torch.float64)[[3, 0, 4, 1, 2]]
        if kind == "permutation"
        else torch.linalg.qr(draw(9, 5, 5))[0]
    )
    start, grads = draw(0, 5, 8), gradients(5, 8)
    straight = moved(soap(sides="one", weight_decay=0.0), start, grads)
    turned = moved(soap(sides="one", weight_decay=0.0), turn @ start, [turn @ grad for grad in grads])
    near(turned, turn @ straight, 1e-9)


def test_one_sided_soap_has_the_shorter_side() -> None:
    assert set(SOAP.shapes((5, 8), options_of(soap(sides="one")))) == {"exp_avg", "exp_avg_sq", "left", "left_basis"}
    assert set(SOAP.shapes((8, 5), options_of(soap(sides="one")))) == {"exp_avg", "exp_avg_sq", "right", "right_basis"}
    long = SOAP.shapes((8, 5), options_of(soap(max_preconditioner_dim=6)))
    assert long == {"exp_avg": (8, 5), "exp_avg_sq": (8, 5), "right": (1, 15), "right_basis": (1, 5, 5)}


def options_of(make: Make) -> dict[str, Any]:
    return make([torch.ones(2, 2)]).defaults


# --- Shampoo ----------------------------------------------------------------------------------------------------------


def root_of(factor: Tensor, p: int) -> Tensor:
    values, vectors = torch.linalg.eigh(factor)
    powers = torch.where(values > 1e-13 * values.max(), values.abs().pow(-1 / p), 0.0)
    return vectors @ powers.diag() @ vectors.T


def shampoo(**options: Any) -> Make:
    given = {"lr": 0.1, "betas": (0.9, 0.8), "eps": 1e-6, "weight_decay": 0.2, "precondition_frequency": 1} | options
    return lambda parameters: Shampoo(parameters, **given)


@pytest.mark.parametrize("root", [2, 3, 4])
@pytest.mark.parametrize("graft", ["adamw", "sgd", "none"])
@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
def test_shampoo_is_its_equations(root: int, graft: str, shape: tuple[int, int]) -> None:
    start, grads = draw(0, *shape), gradients(*shape)
    w, m, v = start.clone(), torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    left, right = (torch.zeros(n, n, dtype=torch.float64) for n in shape)
    for t, g in enumerate(grads, 1):
        left, right = 0.8 * left + 0.2 * g @ g.T, 0.8 * right + 0.2 * g.T @ g
        m, v = 0.9 * m + 0.1 * g, 0.8 * v + 0.2 * g**2
        hat, rest = m / (1 - 0.9**t), 1 - 0.8**t
        step = root_of(left / rest, root) @ hat @ root_of(right / rest, root)
        length = {"adamw": hat / ((v / rest).sqrt() + 1e-6), "sgd": hat, "none": step}[graft]
        w = 0.98 * w - 0.1 * step * length.norm() / step.norm()
    near(moved(shampoo(root=root, graft=graft), start, grads), w - start, 1e-9)


@pytest.mark.parametrize(("root", "sides", "power"), [(None, "both", 1 / 2), (3, "both", 2 / 3), (None, "one", 1 / 2)])
def test_shampoo_of_diagonal_gradients_is_adagrad(root: int | None, sides: str, power: float) -> None:
    """G / (sum G^2)^(2 / p), of one side G / (sum G^2)^(1 / 2)."""
    grads = [grad.diagonal().diag() for grad in gradients(6, 6)]
    total, expected = torch.zeros(6, dtype=torch.float64), torch.zeros(6, 6, dtype=torch.float64)
    for grad in grads:
        total += grad.diagonal() ** 2
        expected -= 0.1 * (grad.diagonal() / total.pow(power)).diag()
    make = shampoo(root=root, sides=sides, graft="none", shampoo_beta=1.0, betas=(0.0, 0.9), weight_decay=0.0)
    near(moved(make, draw(0, 6, 6), grads), expected, 1e-12)


def test_blocks_are_matrices_of_their_own() -> None:
    start, grads = draw(0, 7, 5), gradients(7, 5)
    whole = moved(shampoo(graft="none", max_preconditioner_dim=4), start, grads)
    for rows in (slice(0, 4), slice(4, 7)):
        for columns in (slice(0, 4), slice(4, 5)):
            at = (rows, columns)
            near(whole[at], moved(shampoo(graft="none"), start[at], [grad[at] for grad in grads]), 1e-10)
    sizes = Shampoo.shapes((7, 5), options_of(shampoo(max_preconditioner_dim=4)))
    assert sizes["left"] == (1, 2 * 10 + 2 * 6)
    assert sizes["right"] == (1, 2 * (10 + 1))


def test_directions_without_gradients_are_not_blown_up() -> None:
    """A gradient of rank 2 with rounding: roots of L + eps would multiply the rounding by up to (1e-12)^(-1/2)."""
    low = draw(1, 20, 2) @ draw(2, 2, 6)
    grads = [(low.float() + 1e-7 * draw(step, 20, 6).float()) for step in range(1, 3)]
    make = shampoo(root=2, graft="none", weight_decay=0.0)
    step = moved(make, torch.zeros(20, 6), grads).double()
    outside = step - torch.linalg.qr(draw(1, 20, 2))[0] @ (torch.linalg.qr(draw(1, 20, 2))[0].T @ step)
    assert float(outside.norm()) < 1e-2 * float(step.norm())


def test_roots_are_made_when_they_are_due() -> None:
    """At 1, 2 and from then on each third step; between them they stay."""
    parameter = draw(0, 4, 4).requires_grad_()
    optimizer, changed, before = shampoo(precondition_frequency=3)([parameter]), [], torch.zeros(1, 10)
    for step, grad in enumerate(gradients(4, 4, steps=9), 1):
        parameter.grad = grad
        optimizer.step()
        root = optimizer.state[parameter]["left_root"].clone()
        changed += [step] if not torch.equal(root, before.to(root)) else []
        before = root
    assert changed == [1, 2, 3, 6, 9]


# --- GaLore -----------------------------------------------------------------------------------------------------------


def galore(**options: Any) -> Make:
    given = {"lr": 0.1, "betas": (0.9, 0.8), "eps": 1e-6, "weight_decay": 0.2, "alpha": 1.0} | options
    return lambda parameters: GaLore(parameters, **given)


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6)])
def test_galore_of_full_rank_is_adamw_in_the_basis_of_the_first_gradient(shape: tuple[int, int]) -> None:
    start, grads = draw(0, *shape), gradients(*shape)
    u, _, vt = torch.linalg.svd(grads[0])
    turn = (lambda w: u.T @ w) if shape[0] < shape[1] else (lambda w: w @ vt.T)
    other = turn(start).requires_grad_()
    adamw = torch.optim.AdamW([other], lr=0.1, betas=(0.9, 0.8), eps=1e-6, weight_decay=0.2)
    for grad in grads:
        other.grad = turn(grad)
        adamw.step()
    near(turn(moved(galore(), start, grads)), other.detach() - turn(start), 1e-10)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6)])
def test_galore_is_its_equations(shape: tuple[int, int], rotate: bool) -> None:
    """The right side of square and tall matrices; two directions, new ones each third step."""
    start, grads = draw(0, *shape), gradients(*shape)
    flip = (lambda w: w) if shape[0] < shape[1] else (lambda w: w.T)
    w, basis = flip(start).clone(), torch.zeros(min(shape), 2, dtype=torch.float64)
    m, v = (torch.zeros(2, max(shape), dtype=torch.float64) for _ in range(2))
    for t, grad in enumerate(map(flip, grads), 1):
        if t % 3 == 1:
            new = torch.linalg.svd(grad)[0][:, :2]
            new = new * torch.where((new * basis).sum(0) < 0, -1.0, 1.0)
            turn, basis = new.T @ basis, new
            m, v = (turn @ m, turn**2 @ v) if rotate and t > 1 else (m, v)
        low = basis.T @ grad
        m, v = 0.9 * m + 0.1 * low, 0.8 * v + 0.2 * low**2
        step = basis @ (m / (1 - 0.9**t) / ((v / (1 - 0.8**t)).sqrt() + 1e-6))
        w = 0.98 * w - 0.1 * 0.25 * step
    found = moved(galore(rank=2, update_gap=3, alpha=0.25, rotate_moments=rotate), start, grads)
    near(flip(found), w - flip(start), 1e-10)


# --- Muon -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 9), (9, 4)])
def test_muon_scales_and_the_exact_polar_factor(shape: tuple[int, int]) -> None:
    grad = draw(1, *shape)
    u, _, vt = torch.linalg.svd(grad, full_matrices=False)
    scales: dict[Any, float] = {"rms": 0.2 * 3, "jordan": max(1.0, shape[0] / shape[1]) ** 0.5}
    for scale, size in scales.items():
        options: dict[str, Any] = {"weight_decay": 0.0, "scale": scale, "polar": "exact"}
        made = partial(lambda options, p: Muon([{"params": p, "orthogonalise": True}], 0.1, **options), options)
        near(moved(made, draw(0, *shape), [grad]), -0.1 * size * u @ vt, 1e-12)
    low = draw(1, 9, 2) @ draw(2, 2, 4)
    values = torch.linalg.svdvals(polar_factor(low))
    torch.testing.assert_close(values, torch.tensor([1.0, 1, 0, 0], dtype=torch.float64), rtol=0, atol=1e-12)


def test_heads_and_stacks_are_orthogonalised_each_by_itself() -> None:
    grad = draw(1, 12, 5)
    for group, parts in (({"rows": 3}, grad.view(4, 3, 5)), ({}, grad[None])):
        given = {"params": [parameter := draw(0, 12, 5)], "orthogonalise": True, **group}
        parameter.grad = grad
        Muon([given], 0.1, weight_decay=0.0, momentum=0.0, scale="jordan").step()
        expected = torch.cat([orthogonalised(part) * max(1, len(part) / 5) ** 0.5 for part in parts])
        near(parameter - draw(0, 12, 5), -0.1 * expected, 1e-12)
    stack = draw(0, 4, 3, 5)
    stack.grad = grad.view(4, 3, 5).clone()
    Muon([("blocks.0.experts.up.weight", stack)], 0.1, weight_decay=0.0, momentum=0.0, scale="jordan").step()
    near(stack - draw(0, 4, 3, 5), -0.1 * torch.stack([orthogonalised(part) for part in stack.grad]), 1e-12)
    named = [("blocks.0.attention.qkv.weight", draw(0, 12, 5)), ("blocks.0.mlp.up.weight", draw(0, 7, 5))]
    assert [group.get("rows") for group in Muon(named, 0.1, head_dim=4).param_groups] == [4, None]
    with pytest.raises(UserError, match="head_dim=4: no named matrix is fused queries"):
        Muon(named[1:], 0.1, head_dim=4)
    with pytest.raises(UserError, match="does not divide into matrices of rows=5"):
        Muon(named, 0.1, head_dim=5)


# --- bases, groups, bad input -----------------------------------------------------------------------------------------


def test_packed_factors() -> None:
    full = draw(0, 2, 5, 5)
    full = full + full.mT
    assert packed(full).shape == (2, 15)
    assert torch.equal(unpacked(packed(full), 5), full)


def test_bases_do_not_depend_on_rounding() -> None:
    """Of a factor of rank 3, and of one whose coordinates 1 and 4 are always zero."""
    thin, eye = draw(0, 8, 3), torch.eye(8, dtype=torch.float64)
    sparse = draw(1, 8, 8)
    sparse[[1, 4]] = 0.0
    for factor in (thin @ thin.T, sparse @ sparse.T):
        noisy = factor + 1e-17 * (noise := draw(2, 8, 8)) + 1e-17 * noise.T
        bases = [found[1] for one in (factor, noisy) if (found := eigenbasis(one))]
        torch.testing.assert_close((bases[0].T @ bases[1]).abs(), eye, rtol=0, atol=1e-9)
        start = torch.linalg.qr(draw(3, 8, 8))[0]
        (order, first), (same, second) = (found for one in (factor, noisy) if (found := refreshed(one, start)))
        assert torch.equal(order, same)
        torch.testing.assert_close((first.T @ second).abs(), eye, rtol=0, atol=1e-9)
    torch.testing.assert_close(settled(eye[:, [4, 1]]).abs(), eye[:, [1, 4]])


@pytest.mark.parametrize("make", [soap(), shampoo(), galore(rank=2)], ids=["soap", "shampoo", "galore"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_gradient_that_is_not_finite_is_passed_over_and_counted(make: Make, at: int) -> None:
    parameter = draw(0, 4, 6).requires_grad_()
    optimizer = make([parameter])
    for step, grad in enumerate(gradients(4, 6)):
        parameter.grad = grad.clone()
        if step == at:
            parameter.grad[1, 2] = math.nan
        before = {key: value.clone() for key, value in optimizer.state[parameter].items() if key != "step"}
        value = parameter.detach().clone()
        optimizer.step()
        assert optimizer.fallbacks == (step >= at)
        if step == at > 0:
            assert all(torch.equal(optimizer.state[parameter][key], kept) for key, kept in before.items())
            assert torch.equal(parameter.detach(), value * (1 - 0.1 * 0.2)), "only the decay"
    assert parameter.isfinite().all()


@pytest.mark.parametrize("make", [soap(), shampoo(), galore(rank=2)], ids=["soap", "shampoo", "galore"])
def test_a_decomposition_that_fails_leaves_the_basis_as_it_was(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise torch.linalg.LinAlgError("did not converge")

    parameter = draw(0, 4, 6).requires_grad_()
    optimizer = make([parameter])
    for name in ("eigh", "qr", "svd"):
        monkeypatch.setattr(torch.linalg, name, fails)
    for grad in gradients(4, 6):
        parameter.grad = grad
        optimizer.step()
    assert optimizer.fallbacks > 0
    assert parameter.isfinite().all()
    assert not torch.equal(parameter.detach(), draw(0, 4, 6))


ROLES = {
    "embedding.tokens.weight": ((9, 4), "embedding"),
    "transformer.wte.weight": ((9, 4), "embedding"),
    "model.embed_tokens.weight": ((9, 4), "embedding"),
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": ((9, 4), "embedding"),
    "head.weight": ((9, 4), "head"),
    "lm_head.weight": ((9, 4), "head"),
    "embed_out.weight": ((9, 4), "head"),
    "blocks.0.attention.qkv.weight": ((12, 4), "matrix"),
    "blocks.0.attention.qkv.bias": ((12,), "bias"),
    "blocks.0.experts.up.weight": ((3, 8, 4), "experts"),
    "model.layers.0.mlp.experts.gate_up_proj": ((3, 8, 4), "experts"),
    "blocks.0.experts.up.bias": ((3, 8), "bias"),
    "blocks.0.norm1.weight": ((4,), "norm"),
    "transformer.ln_f.weight": ((4,), "norm"),
    "down_blocks.0.resnets.0.conv1.weight": ((4, 4, 3, 3), "kernel"),
    "down_blocks.0.resnets.0.time_emb_proj.weight": ((4, 4), "matrix"),
    "time_embedding.linear_1.weight": ((4, 4), "outer"),
    "pooler.dense.weight": ((4, 4), "outer"),
    "cls_token": ((4,), "vector"),
}


@pytest.mark.parametrize("name", ROLES)
def test_roles(name: str) -> None:
    shape, role = ROLES[name]
    assert role_of(name, shape) == role


def masters() -> dict[str, Tensor]:
    return {name: draw(0, *shape) for name, (shape, _) in ROLES.items()}


@pytest.mark.parametrize("name", ["muon", "soap", "shampoo", "galore"])
def test_groups_are_found(name: Any) -> None:
    given: dict[str, Any] = {"whole": ("matrix", "head", "experts")}
    optimizer = build_optimizer(OptimConfig(name, **given), masters())
    assert isinstance(optimizer, MatrixOptimizer)
    groups, flag = optimizer.param_groups, type(optimizer).flag
    assert [(len(g["params"]), g[flag], g["stacked"]) for g in groups] == [
        *((5, True, False), (2, True, True), (7, False, False), (5, False, False))
    ]
    assert groups[-1]["weight_decay"] == 0.0
    kind: Any = type(optimizer)
    same = kind([("blocks.0.w", draw(0, 4, 5)), ("norm.weight", draw(0, 4))], lr=0.1)
    assert [g[flag] for g in same.param_groups] == [True, False]


@pytest.mark.parametrize("name", ["muon", "soap", "shampoo", "galore"])
def test_what_cannot_be_grouped_is_refused_in_a_line(name: Any) -> None:
    kind: Any = type(build_optimizer(OptimConfig(name), masters()))

    def refused(call: Callable[[], Any]) -> str:
        with pytest.raises(UserError) as error:
            call()
        assert "\n" not in str(error.value)
        return str(error.value)

    unknown: dict[str, Any] = {"whole": ("heads",)}
    heads = refused(lambda: OptimConfig(name, **unknown))
    assert f"{name}: whole=heads: heads is no group of parameters; give some of matrix, experts" in heads
    assert "whole=norm: norm are no matrices" in refused(lambda: kind([("a", draw(0, 2))], lr=0.1, whole=("norm",)))
    group = {"params": [draw(0, 3, 4)], "orthogonalize": True}
    assert "parameter group 0 has no option orthogonalize; give some of" in refused(lambda: kind([group], lr=0.1))
    vector = {"params": [draw(0, 3)], kind.flag: True}
    assert f"shape [3] is no matrix that can be {kind.done}" in refused(lambda: kind([vector], lr=0.1))
    stack = {"params": [draw(0, 3, 4)], kind.flag: True, "stacked": True}
    assert "shape [3, 4] is no stack of matrices" in refused(lambda: kind([stack], lr=0.1))
    if name != "muon":
        assert "may be a stack of matrices or a kernel" in refused(lambda: kind([draw(0, 3, 4, 5)], lr=0.1))
        only = {"head.weight": draw(0, 9, 4)}
        assert "nothing to factor" in refused(lambda: build_optimizer(OptimConfig(name), only))
    if name == "soap":
        long = [draw(0, 30, 40)]
        assert "max_preconditioner_dim=10" in refused(lambda: SOAP(long, max_preconditioner_dim=10))


def test_the_plan_says_who_gets_what() -> None:
    more = {"blocks.1.attention.qkv.weight": draw(0, 12, 4)}
    lines = groups_in_words(OptimConfig("soap", plan=True), masters() | more).splitlines()
    assert "matrix     soap   decays    blocks.*.attention.qkv.weight [12, 4] x 2" in lines
    assert "experts    soap   decays    blocks.*.experts.up.weight [3, 8, 4]" in lines
    assert "bias       adamw  no decay  blocks.*.experts.up.bias [3, 8]" in lines
    assert "head       adamw  decays    lm_head.weight [9, 4]" in lines
    assert len(lines) == len(ROLES)
    others = groups_in_words(OptimConfig("sm3"), masters()).splitlines()
    assert "matrix     sm3    no decay  blocks.*.attention.qkv.weight [12, 4]" in others


def test_a_run_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config_of(tmp_path, steps=1, optim=OptimConfig("soap", plan=True)))
    assert "matrix     soap   decays    blocks.*" in capsys.readouterr().out


def test_a_basis_goes_on_alike_behind_a_direction_of_rounding() -> None:
    """The seventh column depends on those before it. What QR puts in its place is rounding, and takes from the eighth
    all, something or nothing, so that it may fall below the share that it is above."""
    basis, small = torch.linalg.qr(draw(3, 8, 8))[0], torch.tensor([1.0] * 7 + [0.1], dtype=torch.float64)
    null = torch.cat([draw(4, 7), torch.zeros(1, dtype=torch.float64)])
    outside = torch.eye(8, dtype=torch.float64) - null.outer(null) / null.square().sum()
    root = outside @ (small[:, None] * draw(5, 8, 8))
    factor = basis @ root @ root.T @ basis.T
    order, _ = found if (found := refreshed(factor, basis)) else pytest.fail("it has no basis")
    assert int(order[-1]) == 7
    columns = factor @ basis[:, order]
    before = torch.linalg.qr(columns[:, :6])[0]
    rest = columns[:, 7] - before @ (before.T @ columns[:, 7])
    share = 0.9 * float(rest.norm() / torch.linalg.qr(columns)[1].diagonal().abs().max())
    made = []
    for seed in range(8):
        noise = 1e-16 * draw(10 + seed, 8, 8)
        renewed = refreshed(factor + noise + noise.T, basis, share)
        assert renewed is not None
        made.append(renewed[1])
    for other in made[1:]:
        same = (made[0].T @ other).abs()
        torch.testing.assert_close(same, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-9)


# --- narrow moments ---------------------------------------------------------------------------------------------------

NARROW: dict[str, dict[str, Any]] = {
    "muon": {},
    "soap": {"precondition_frequency": 2},
    "shampoo": {"precondition_frequency": 2},
    "galore": {"rank": 48, "update_gap": 2, "rotate_moments": True},
}


@pytest.mark.parametrize("name", list(NARROW))
@pytest.mark.parametrize(("momentum_format", "limit"), [("bf16", 0.02), ("8bit", 0.2)])
def test_moments_in_16_and_8_bits(name: Any, momentum_format: str, limit: float) -> None:
    """Nearly the steps of wide moments; state of the bytes that are foretold, also behind a state dict."""
    ends, shape = [], (64, 96)
    for kept in ("fp32", momentum_format):
        config = OptimConfig(name, lr=0.01, momentum_format=kept, **NARROW[name])
        masters = {"blocks.0.w": draw(0, *shape).float().requires_grad_(), "b": draw(1, 5).float().requires_grad_()}
        matrix, optimizer = masters["blocks.0.w"], build_optimizer(config, masters)
        for step in range(1, 7):
            matrix.grad, masters["b"].grad = draw(step, *shape).float(), draw(step, 5).float()
            optimizer.step()
            if step == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        held = sum(t.nbytes for t in optimizer.state[matrix].values() if t.ndim)
        assert held == state_bytes(config, shape, 4, role="matrix")
        ends.append(matrix.detach() - draw(0, *shape).float())
        first = "momentum_buffer" if name == "muon" else "exp_avg"
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
        assert optimizer.state[matrix][first + "_codes" * (kept == "8bit")].dtype == dtypes[kept]
    difference = float((ends[1] - ends[0]).norm() / ends[0].norm())
    assert 1e-6 < difference < limit


def test_a_format_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="soap: momentum_format=int4; give fp32, bf16 or 8bit"):
        OptimConfig("soap", momentum_format="int4")  # pyright: ignore
    with pytest.raises(UserError, match="muon: momentum_format=fp8; give fp32, bf16 or 8bit"):
        Muon([{"params": [torch.ones(4, 4)], "orthogonalise": True, "momentum_format": "fp8"}], lr=0.1)
    with pytest.raises(UserError, match="has no option momentum_format"):
        OptimConfig("kfac", momentum_format="bf16")
