"""K-FAC on one rank: factors against closed forms, Newton's step, invariances, refusals, and what it falls back on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.pytorch_utils import Conv1D

from core.config import UserError
from core.kernels import cross_entropy
from core.nn.experts import GroupedLinear
from core.nn.loss import Head
from core.optim import KFAC, HessianFree, OptimConfig, build_optimizer
from core.optim.kfac import FACTORS
from core.optim.kfac_layers import unpacked_factor
from core.optim.kfac_solve import NotInverted
from core.optim.prediction import Drawing, Prediction, drawn_targets, exact_fisher, mean_loss
from core.optim.size import beside_bytes, state_bytes

ROWS, LENGTH = 6, 5


@pytest.fixture(autouse=True)
def in_fp64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def factors(optimizer: KFAC, name: str) -> tuple[Tensor, Tensor]:
    """R and C of a layer by the name of its weight."""
    layer = next(layer for layer in optimizer._layers if layer.weight == name)
    state = optimizer.state[optimizer._named[name]]
    r, c = (unpacked_factor(state[key], shape) for key, shape in zip(FACTORS, layer.factor_shapes()))
    return r, c


def seen(model: nn.Module, x: Tensor, sharing: Any = "expand", parts: int = 1, **options: Any) -> KFAC:
    """One step of K-FAC that has looked at the squares of a model's outputs, in several microbatches."""
    optimizer = KFAC(model, lr=0.0, sharing=sharing, damping=0.1, **options)
    for part in x.chunk(parts):
        optimizer.observe(lambda part=part: model(part).square().sum() / len(part), items=len(part))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


class Mean(nn.Module):
    """A layer, and then something that couples its positions."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


def cases(model: Mean, x: Tensor) -> tuple[Tensor, Tensor]:
    """Input and gradient of the outputs of each row's own loss, [rows, positions, features]."""
    y = model.layer(x)
    y = y.detach().requires_grad_()
    (g,) = torch.autograd.grad(y.tanh().square().sum(), [y])
    return x, g


LINEAR: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "no bias": lambda: nn.Linear(4, 3, bias=False),
    "conv1d": lambda: Conv1D(3, 4),
}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_factors_of_linear_layers_are_their_sums(name: str, sharing: Any, parts: int) -> None:
    """However the batch is cut into microbatches, unequal ones too."""
    model, x = Mean(LINEAR[name]()), torch.randn(ROWS, LENGTH, 4)
    a, g = cases(model, x)
    if name != "no bias":
        a = torch.cat([a, torch.ones(ROWS, LENGTH, 1)], -1)
    if sharing == "reduce":
        a, g = a.mean(1, keepdim=True), g.sum(1, keepdim=True)
    want_a = torch.einsum("nti,ntj->ij", a, a) / a.shape[:2].numel()
    want_g = torch.einsum("nti,ntj->ij", g, g) / ROWS
    r, c = factors(seen(model, x, sharing, parts), "layer.weight")
    wanted = (want_a, want_g) if name == "conv1d" else (want_g, want_a)
    torch.testing.assert_close((r, c), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_of_a_convolution_are_those_of_its_patches(sharing: Any) -> None:
    """Patch by patch, by the convolution's definition."""
    model, x = Mean(nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2))), torch.randn(ROWS, 2, 5, 6)
    _, g = cases(model, x)
    wide = F.pad(x, (0, 0, 1, 1))
    places = [(i, j) for i in range(g.shape[2]) for j in range(g.shape[3])]
    a = torch.stack([wide[:, :, 2 * i : 2 * i + 3, j : j + 3 : 2].flatten(1) for i, j in places], 1)
    a = torch.cat([a, torch.ones(ROWS, len(places), 1)], -1)
    g = torch.stack([g[:, :, i, j] for i, j in places], 1)
    if sharing == "reduce":
        a, g = a.mean(1, keepdim=True), g.sum(1, keepdim=True)
    r, c = factors(seen(model, x, sharing), "layer.weight")
    torch.testing.assert_close(r, torch.einsum("nti,ntj->ij", g, g) / ROWS, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(c, torch.einsum("nti,ntj->ij", a, a) / a.shape[:2].numel(), rtol=1e-12, atol=1e-14)


def test_factors_of_an_embedding_are_counts_and_gradients() -> None:
    model, ids = Mean(nn.Embedding(7, 3, padding_idx=2)), torch.randint(0, 7, (ROWS, LENGTH))
    ids[0, :2] = torch.tensor([2, 5])
    y = model.layer(ids).detach().requires_grad_()
    (g,) = torch.autograd.grad(y.tanh().square().sum(), [y])
    g = g * (ids != 2)[..., None]
    counts = torch.bincount(ids[ids != 2], minlength=7).double()
    r, c = factors(seen(model, ids), "layer.weight")
    torch.testing.assert_close(r, counts / counts.sum(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(c, torch.einsum("nti,ntj->ij", g, g) / ROWS, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("max_dim", [4096, 6])
@pytest.mark.parametrize("bias", [False, True])
def test_a_head_with_its_loss_is_a_layer_before_cross_entropy(
    sharing: Any, max_dim: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Factors and EKFAC's scales, though the loss never holds all logits; with a diagonal for a long vocabulary."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 600)
    x, targets = torch.randn(ROWS, LENGTH, 4), torch.randint(0, 9, (ROWS, LENGTH))
    targets[0, :2] = targets[3] = -100
    head, layer = Head(9, 4, bias=bias), nn.Linear(4, 9, bias=bias)
    head.load_state_dict(layer.state_dict())
    items = int((targets >= 0).sum())

    def of_head(rows: slice) -> Tensor:
        return head(x[rows], targets[rows]) / items

    def of_layer(rows: slice) -> Tensor:
        return F.cross_entropy(layer(x[rows]).flatten(0, 1), targets[rows].flatten(), reduction="sum") / items

    found = []
    for module, loss in ((head, of_head), (layer, of_layer)):
        optimizer = KFAC(module, lr=0.0, sharing=sharing, max_dim=max_dim, method="ekfac", factor_decay=0.5)
        for _ in range(2):
            for rows in (slice(0, 2), slice(2, ROWS)):
                optimizer.observe(lambda rows=rows, loss=loss: loss(rows) * items / 9, items=9.0)
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        state = optimizer.state[optimizer._named["weight"]]
        scales = [state["scales"]] if "scales" in state else []
        found.append([*factors(optimizer, "weight"), *scales])
    assert len(found[0]) == 2 + (max_dim > 9)
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=1e-14)


class Tied(nn.Module):
    """An embedding and a head that have one weight, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).tanh())


def test_tied_weights_have_the_product_with_the_partial_traces_of_the_sum() -> None:
    model, ids = Tied(), torch.randint(0, 5, (ROWS, LENGTH))
    e = model.embedding(ids).detach().requires_grad_()
    hidden = e.tanh()
    y = hidden @ model.head.weight.detach().T
    (g_e,) = torch.autograd.grad(y.square().sum(), [e])
    hidden, g_y = hidden.detach().flatten(0, 1), (2 * y.detach()).flatten(0, 1)
    g_e, count = g_e.flatten(0, 1), ROWS * LENGTH
    pairs = [
        (torch.bincount(ids.flatten(), minlength=5).double().diag() / count, g_e.T @ g_e / ROWS),
        (g_y.T @ g_y / ROWS, hidden.T @ hidden / count),
    ]
    whole = sum(torch.einsum("ab,ij->aibj", r, c) for r, c in pairs)
    assert isinstance(whole, Tensor)
    r, c = factors(seen(model, ids), "embedding.weight")
    product = torch.einsum("ab,ij->aibj", r, c)
    for what in ("aibi->ab", "aiaj->ij"):
        torch.testing.assert_close(torch.einsum(what, product), torch.einsum(what, whole), rtol=1e-12, atol=1e-12)


def test_sides_that_are_long_have_diagonals() -> None:
    model, x = Mean(nn.Linear(4, 3)), torch.randn(ROWS, LENGTH, 4)
    r, c = factors(seen(model, x), "layer.weight")
    short_r, short_c = factors(seen(model, x, max_dim=4), "layer.weight")
    torch.testing.assert_close(short_r, r)
    torch.testing.assert_close(short_c, c.diagonal())


ROUTED = torch.tensor([3, 0, 2, 1])
"""Rows of each of four experts, of 6 items."""


def routed_factors(optimizer: KFAC, expert: int) -> tuple[Tensor, Tensor]:
    layer = next(layer for layer in optimizer._layers if layer.expert == expert)
    state = optimizer._state_of(layer)
    r, c = (unpacked_factor(state[key], shape) for key, shape in zip(FACTORS, layer.factor_shapes()))
    return r, c


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_of_an_expert_are_of_its_own_rows(sharing: Any) -> None:
    """Inputs their mean, gradients their sum over the items of the whole batch; what lies behind all rows is no row."""
    stack, x = GroupedLinear(4, 4, 3, bias=True), torch.randn(8, 4)
    items, parts = 6, torch.arange(6).split(ROUTED.tolist())
    optimizer = KFAC(stack, lr=0.0, sharing=sharing)
    optimizer.observe(lambda: stack(x, ROUTED)[:6].tanh().square().sum() / items, items=items)
    optimizer._take_factors()
    y = stack(x, ROUTED).detach().requires_grad_()
    (g,) = torch.autograd.grad(y[:6].tanh().square().sum(), [y])
    for expert, rows in enumerate(parts):
        a, r, c = torch.cat([x[rows], torch.ones(len(rows), 1)], 1), *routed_factors(optimizer, expert)
        torch.testing.assert_close(r, g[rows].T @ g[rows] / items, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(c, a.T @ a / max(1, len(rows)), rtol=1e-12, atol=1e-14)


def test_an_expert_without_rows_keeps_its_factors() -> None:
    stack, x = GroupedLinear(2, 4, 3, bias=False), torch.randn(ROWS, 4)
    optimizer = KFAC(stack, lr=0.1, factor_decay=0.5, inverse_every=1)

    def step(rows: list[int]) -> list[tuple[Tensor, Tensor]]:
        counts = torch.tensor(rows)
        optimizer.observe(lambda: stack(x, counts).square().sum() / ROWS, items=ROWS)
        optimizer.zero_grad()
        stack(x, counts).square().sum().backward()
        optimizer.step()
        return [routed_factors(optimizer, expert) for expert in range(2)]

    first, second = step([2, 4]), step([0, 6])
    torch.testing.assert_close(second[0], first[0], rtol=0, atol=0)
    assert not torch.equal(second[1][1], first[1][1])
    assert not optimizer.fallbacks


# --- steps ------------------------------------------------------------------------------------------------------------


def least_squares(x: Tensor, y: Tensor, layer: nn.Module) -> Prediction:
    return Prediction(layer(x), "y", "normal")


@pytest.mark.parametrize("method", ["inverse", "eigen", "ekfac"])
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), lambda: Conv1D(3, 4)], ids=["linear", "conv1d"])
def test_one_step_with_the_exact_fisher_is_newtons(method: Any, make: Callable[[], nn.Module]) -> None:
    """Of least squares, undamped: the loss is the least there is, whatever an affine map does to the inputs."""
    x, y = torch.randn(20, 4), torch.randn(20, 3)
    with_ones = torch.cat([x, torch.ones(20, 1)], 1)
    least = (with_ones @ torch.linalg.lstsq(with_ones, y).solution - y).square().sum() / 40
    for inputs in (x, x @ torch.randn(4, 4) + torch.randn(4)):
        layer = make()
        optimizer = KFAC(layer, lr=1.0, momentum=0.0, damping=0.0, kl_clip=None, fisher="exact", method=method)
        optimizer.observe(lambda i=inputs, m=layer: exact_fisher(least_squares(i, y, m), y), items=20)
        mean_loss(least_squares(inputs, y, layer), y).backward()
        optimizer.step()
        assert abs(float(mean_loss(least_squares(inputs, y, layer), y).detach() - least)) <= 1e-12


@pytest.mark.parametrize("method", ["inverse", "eigen", "ekfac"])
def test_one_step_is_newtons_for_every_expert(method: Any) -> None:
    """However seldom one is chosen. It is not with inputs averaged over all rows: the steps of some are too long."""
    rows, x, y = torch.tensor([12, 6, 10]), torch.randn(28, 3), torch.randn(28, 2)
    stack = GroupedLinear(3, 3, 2, bias=True)
    optimizer = KFAC(stack, lr=1.0, momentum=0.0, damping=0.0, kl_clip=None, fisher="exact", method=method)

    def predicted() -> Prediction:
        return Prediction(stack(x, rows), "y", "normal")

    optimizer.observe(lambda: exact_fisher(predicted(), y), items=28)
    mean_loss(predicted(), y).backward()
    optimizer.step()
    with_ones, least = torch.cat([x, torch.ones(28, 1)], 1), 0.0
    for own, wanted in zip(with_ones.split(rows.tolist()), y.split(rows.tolist())):
        least += float((own @ torch.linalg.lstsq(own, wanted).solution - wanted).square().sum() / 56)
    assert abs(float(mean_loss(predicted(), y).detach()) - least) <= 1e-12


class OneByOne(nn.Module):
    """A stack of linear layers as those of transformers' experts: F.linear with one matrix after the other."""

    def __init__(self, proj_EOI: Tensor):
        super().__init__()
        self.proj = nn.Parameter(proj_EOI.detach().clone())

    def forward(self, x_AI: Tensor, rows: Tensor) -> Tensor:
        parts = enumerate(x_AI.split(rows.tolist()))
        return torch.cat([F.linear(part, weight=self.proj[torch.tensor(e)]) for e, part in parts if len(part)])


class AtOnce(OneByOne):
    def forward(self, x_AI: Tensor, rows: Tensor) -> Tensor:
        return torch.einsum("ai,aoi->ao", x_AI, self.proj.repeat_interleave(rows, 0))


@pytest.mark.parametrize("method", ["inverse", "eigen", "ekfac"])
def test_a_stack_of_a_module_that_it_does_not_know_moves_as_one_that_it_knows(method: Any) -> None:
    known = GroupedLinear(3, 4, 3, bias=False)
    stacks, found = (known, OneByOne(known.weight)), []
    for stack in stacks:
        torch.manual_seed(1)
        optimizer = KFAC(stack, lr=0.1, inverse_every=2, method=method, sharing="reduce")
        for rows in [[5, 3, 4], [0, 2, 10], [4, 4, 4], [6, 6, 0]] * 3:
            x, counts = torch.randn(12, 4), torch.tensor(rows)
            optimizer.observe(lambda x=x, n=counts, m=stack: m(x, n).tanh().square().sum() / 12, items=12)
            optimizer.zero_grad()
            (stack(x, counts).tanh() - 1).square().sum().backward()
            optimizer.step()
        found.append(next(stack.parameters()).detach())
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_experts_of_transformers_are_layers() -> None:
    """Each token's two experts see it once."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=13, num_hidden_layers=1, num_local_experts=3, num_experts_per_tok=2, **sizes)
    config._experts_implementation = "eager"
    model, tokens = MixtralForCausalLM(config), torch.randint(13, (2, 5))
    optimizer = KFAC(model, lr=0.1)
    optimizer.observe(lambda: model(tokens, labels=tokens).loss, items=8)
    assert optimizer._observer is not None
    for name in ("gate_up_proj", "down_proj"):
        indices = [i for i, layer in enumerate(optimizer._layers) if layer.weight.endswith(f"experts.{name}")]
        assert len(indices) == 3
        assert sum(optimizer._observer.seen[i, 0].cases for i in indices if (i, 0) in optimizer._observer.seen) == 20
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "normal"])
def test_the_exact_fisher_is_the_hessian_of_the_loss_by_the_outputs(kind: Any) -> None:
    outputs, classes = torch.randn(3, 4, requires_grad=True), kind == "categorical"
    given = torch.tensor([1, -100, 3]) if classes else torch.rand(3, 4)
    made = Prediction(outputs, "y", kind, 2.0 if kind == "normal" else 1.0)
    items = 2 if classes else 3
    columns = [torch.autograd.grad(c, [outputs], retain_graph=True)[0].flatten() for c in exact_fisher(made, given)]
    found = sum(torch.outer(c, c) for c in columns)
    blocks = torch.block_diag(*(torch.ones(4, 4),) * 3).bool()

    def loss(z: Tensor) -> Tensor:
        return mean_loss(Prediction(z.view(3, 4), "y", kind, made.variance), given)

    hessian = torch.autograd.functional.hessian(loss, outputs.detach().flatten())
    assert isinstance(found, Tensor)
    torch.testing.assert_close((found * items) * blocks, torch.as_tensor(hessian), rtol=1e-10, atol=1e-12)


def test_targets_are_drawn_from_the_model_row_by_row() -> None:
    logits = torch.randn(4000, 2, 3)
    given = torch.zeros(4000, 2, dtype=torch.int64)
    given[7, 1] = -100
    drawn = drawn_targets(Prediction(logits, "y", "categorical"), given, Drawing(1, 2, 10))
    assert drawn[7, 1] == -100
    parts = [
        drawn_targets(Prediction(logits[i : i + 1000], "y", "categorical"), given[i : i + 1000], Drawing(1, 2, 10 + i))
        for i in range(0, 4000, 1000)
    ]
    assert torch.equal(drawn, torch.cat(parts)), "a row's targets depend on its place in the whole batch alone"
    for again in (Drawing(1, 3, 10), Drawing(2, 2, 10)):
        assert not torch.equal(drawn, drawn_targets(Prediction(logits, "y", "categorical"), given, again))
    wanted = logits.softmax(-1).mean((0, 1))
    share = torch.bincount(drawn[drawn >= 0], minlength=3) / (drawn >= 0).sum()
    assert (share - wanted).abs().max() < 0.02
    noise = drawn_targets(Prediction(logits, "y", "normal", 4.0), logits, Drawing(0, 0, 0)) - logits
    assert float(noise.std()) == pytest.approx(2.0, rel=0.03)
    ones = drawn_targets(Prediction(logits, "y", "bernoulli"), logits.sigmoid(), Drawing(0, 0, 0))
    assert float(ones.mean()) == pytest.approx(float(logits.sigmoid().mean()), abs=0.02)


def test_damping_clip_momentum_and_decay_are_the_equations() -> None:
    layer, x, y = nn.Linear(4, 3), torch.randn(20, 4), torch.randn(20, 3)
    lr, momentum, damping, clip, decay = 0.3, 0.8, 0.05, 0.01, 0.1
    optimizer = KFAC(
        layer, lr, momentum, damping=damping, kl_clip=clip, weight_decay=decay, factor_decay=0.5, inverse_every=1
    )
    w, b = layer.weight.detach().clone(), layer.bias.detach().clone()
    a = torch.cat([x, torch.ones(20, 1)], 1)
    means: list[Tensor] = []
    moved = torch.zeros(3, 5)
    for step in range(1, 4):
        drawn = torch.randn(20, 3)
        optimizer.observe(lambda t=drawn: (layer(x) - t).square().sum() / 40, items=20)
        optimizer.zero_grad()
        ((layer(x) - y).square().sum() / 40).backward()
        optimizer.step()
        errors = x @ w.T + b - drawn
        new = [errors.T @ errors / 20, a.T @ a / 20]
        weight = min(0.5, 1 - 1 / step)
        means = [weight * m + (1 - weight) * n for m, n in zip(means or new, new)]
        g_factor, a_factor = means
        pi = ((a_factor.trace() / 5) / (g_factor.trace() / 3)).sqrt()
        v = (x @ w.T + b - y).T @ a / 20
        g_inverse = torch.linalg.inv(g_factor + damping**0.5 / pi * torch.eye(3))
        p = g_inverse @ v @ torch.linalg.inv(a_factor + damping**0.5 * pi * torch.eye(5))
        nu = min(1.0, float((clip / (lr**2 * (v * p).sum())).sqrt()))
        assert nu < 1
        moved = momentum * moved + nu * p
        w, b = w * (1 - lr * decay) - lr * moved[:, :4], b - lr * moved[:, 4]
        torch.testing.assert_close(layer.weight.detach(), w, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(layer.bias.detach(), b, rtol=1e-10, atol=1e-12)


def test_ekfac_divides_by_mean_squares_in_the_basis() -> None:
    layer, x, y = nn.Linear(4, 3, bias=False), torch.randn(20, 4), torch.randn(20, 3)
    optimizer = KFAC(layer, 0.1, 0.0, damping=0.05, kl_clip=None, method="ekfac", factor_decay=0.5)
    drawn = [torch.randn(20, 3) for _ in range(2)]
    for step in range(2):
        if step == 1:
            state = optimizer.state[layer.weight]
            q_g, q_a = state["row_basis"].clone(), state["column_basis"].clone()
            old, w = state["scales"].clone(), layer.weight.detach().clone()
            g, v = x @ w.T - drawn[1], (x @ w.T - y).T @ x / 20
            rows = torch.einsum("ni,nj->nij", g @ q_g, x @ q_a)
            scales = 0.5 * old + 0.5 * rows.square().mean(0)
            want = w - 0.1 * q_g @ ((q_g.T @ v @ q_a) / (scales + 0.05)) @ q_a.T
        optimizer.observe(lambda t=drawn[step]: (layer(x) - t).square().sum() / 40, items=20)
        optimizer.zero_grad()
        ((layer(x) - y).square().sum() / 40).backward()
        optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), want, rtol=1e-10, atol=1e-12)


def test_a_loss_that_is_scaled_makes_the_same_factors() -> None:
    model, x = Mean(nn.Linear(4, 3)), torch.randn(ROWS, LENGTH, 4)
    optimizer = KFAC(model, lr=0.0)
    optimizer.observe(lambda: model(x).square().sum() / ROWS, items=ROWS, scale=1024.0)
    optimizer._take_factors()
    torch.testing.assert_close(factors(optimizer, "layer.weight"), factors(seen(model, x), "layer.weight"))


def test_the_empirical_fisher_is_of_the_steps_own_backward() -> None:
    model, x = Mean(nn.Linear(4, 3)), torch.randn(ROWS, LENGTH, 4)
    optimizer = KFAC(model, lr=0.0, fisher="empirical")

    def closure() -> Tensor:
        loss = model(x).square().sum() / ROWS
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(factors(optimizer, "layer.weight"), factors(seen(model, x), "layer.weight"))


def test_what_has_no_factors_is_adamws() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv2d(4, 4, 3, groups=2))
    optimizer = KFAC(model, lr=0.5, lr_others=0.25)
    factored, others = optimizer.param_groups
    assert (len(factored["params"]), len(others["params"])) == (2, 4)
    assert (factored["lr"], others["lr"]) == (0.5, 0.25)


@contextmanager
def refused(text: str) -> Iterator[None]:
    with pytest.raises(UserError, match=text) as refusal:
        yield
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("make", [KFAC, HessianFree])
def test_parameters_without_names_are_refused(make: Any) -> None:
    with pytest.raises(UserError, match=f"{make.__name__} looks at layers, and a generator has no .*give the model"):
        make(nn.Linear(2, 2).parameters())


def test_what_cannot_be_is_refused_in_a_line() -> None:
    with refused("kfac: the model has no layer with factors"):
        KFAC(nn.LayerNorm(3))
    with refused("kfac: the model has no layer with factors"):
        KFAC(nn.Sequential(nn.Linear(2, 2)), exclude=("0",))
    layer = nn.Linear(2, 2)
    optimizer = KFAC(layer)
    layer(torch.ones(1, 2)).sum().backward()
    with refused("kfac: step 1 needs a look at the model, and it was not observed: the closure is missing"):
        optimizer.step()
    unwatched = build_optimizer(OptimConfig("kfac"), dict(layer.named_parameters()))
    with refused("kfac: no model is watched"):
        unwatched.step()
    for option, value in {"damping": -1.0, "kl_clip": 0.0, "fisher": "true", "factor_every": 0, "method": "qr"}.items():
        with refused(f"kfac: {option}={value}; give "):
            OptimConfig("kfac", **{option: value})
    at_once = AtOnce(torch.ones(3, 2, 2))
    optimizer = KFAC(nn.ModuleDict({"experts": at_once, "layer": nn.Linear(2, 2)}))
    optimizer.observe(lambda: at_once(torch.ones(6, 2), torch.tensor([1, 2, 3])).sum(), items=6)
    with refused("kfac: experts.proj is a stack of 3 matrices, and AtOnce does not say which rows each of them sees"):
        optimizer.step()
    table = nn.Embedding(4, 3)
    looked_up = KFAC(Mean(table))
    with refused(r"kfac: layer is given 1 rows of a microbatch of 6"):
        looked_up.observe(lambda: table(torch.ones(1, 2, dtype=torch.int64)).sum(), items=6, rows=6)


def test_curvature_that_is_not_finite_leaves_the_factors_of_before_and_is_counted() -> None:
    model, x = nn.Linear(4, 3), torch.randn(ROWS, 4)
    optimizer = KFAC(model, lr=0.1, inverse_every=1)

    def step(factor: float) -> None:
        optimizer.observe(lambda: model(x).square().sum() * factor / ROWS, items=ROWS)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    step(float("nan"))
    assert optimizer.fallbacks == 1
    first = model.weight.detach().clone()
    step(1.0)
    assert optimizer.fallbacks == 1
    assert not torch.equal(first, model.weight)
    kept, before = factors(optimizer, "weight")[0].clone(), model.weight.detach().clone()
    step(float("inf"))
    assert optimizer.fallbacks == 2
    assert torch.equal(factors(optimizer, "weight")[0], kept)
    assert model.weight.isfinite().all()
    assert not torch.equal(before, model.weight)
    with patch("core.optim.kfac.damped_inverses", side_effect=NotInverted("test")):
        step(1.0)
    assert optimizer.fallbacks == 3
    assert model.weight.isfinite().all()


@pytest.mark.parametrize("method", ["inverse", "eigen", "ekfac"])
def test_a_matrix_of_the_blocks_keeps_the_bytes_that_are_foretold(method: Any) -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(6, 5)])})
    optimizer = KFAC(model, method=method)
    optimizer.init_state()
    held = [
        sum(t.nbytes for k, t in optimizer.state[p].items() if k not in ("step", "updates")) for p in model.parameters()
    ]
    bias = model.get_parameter("blocks.0.bias")
    config = OptimConfig("kfac", method=method)
    assert held[0] + held[1] == state_bytes(config, (5, 6), 8, role="matrix") + bias.nbytes
    assert held[1] == bias.nbytes


@pytest.mark.parametrize("method", ["inverse", "eigen", "ekfac"])
def test_a_stack_of_experts_keeps_the_bytes_that_are_foretold(method: Any) -> None:
    """Of each expert's factors; and what a look takes beside them, but for the widest factor."""
    stack = GroupedLinear(3, 6, 5, bias=True)
    optimizer = KFAC(nn.ModuleDict({"experts": stack}), method=method)
    optimizer.init_state()
    held = [
        sum(t.nbytes for k, t in optimizer.state[p].items() if k != "step" and "updates" not in k)
        for p in stack.parameters()
    ]
    config: Any = OptimConfig("kfac", method=method)
    assert stack.bias is not None
    assert sum(held) == state_bytes(config, (3, 5, 6), 8, role="experts") + stack.bias.nbytes
    assert optimizer.beside_bytes == beside_bytes(config, (3, 5, 6), 8, "experts") + 8 * 7**2


@pytest.mark.parametrize("suffix", ["", ".1"], ids=["a layer's", "an expert's"])
def test_factors_of_an_earlier_order_are_refused(suffix: str) -> None:
    model = nn.ModuleDict({"experts": GroupedLinear(3, 6, 5, bias=True)}) if suffix else nn.Linear(3, 2)
    optimizer = KFAC(model)
    optimizer.init_state()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    saved["state"][0][f"row_factor{suffix}"] = saved["state"][0].pop(f"row_lower{suffix}")
    with pytest.raises(UserError, match=r"the state dict has row_factor, .* this one has row_lower"):
        KFAC(model).load_state_dict(saved)
