"""Muon: updates are nearly orthogonal, along U V^T; the rest is torch's AdamW; homes are balanced."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.config import UserError
from core.models.decoder import Decoder
from core.models.shapes import SHAPES
from core.optim import SOAP, GaLore, Shampoo, muon
from core.optim.build import OptimConfig, build_optimizer
from core.optim.home import balanced, pieces_from_home, pieces_to_home
from core.optim.muon import Muon, orthogonalised


@pytest.mark.parametrize("shape", [(8, 8), (5, 13), (40, 7)])
@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, "vector"), (torch.float32, None), (torch.float64, None)])
def test_orthogonalised_is_near_the_polar_factor(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], dtype: torch.dtype, units: str | None
) -> None:
    monkeypatch.setattr(muon, "bf16_units", lambda device: units)
    matrix = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalised(matrix)
    assert found.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
    found = found.to(dtype)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6  # the quintic leaves singular values within about [0.7, 1.2]
    assert values.max() < 1.3
    assert torch.nn.functional.cosine_similarity(found.flatten(), (u @ vt).flatten(), dim=0) > 0.97


@pytest.mark.parametrize("shape", [(11, 17), (3, 19, 8)])
def test_blocks_of_symmetric_products_change_nothing(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    as_one = orthogonalised(matrix)
    monkeypatch.setattr(muon, "_ROWS", 3)
    torch.testing.assert_close(orthogonalised(matrix), as_one, rtol=1e-12, atol=1e-12)


def _masters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"blocks.0.qkv.weight": (6, 4), "blocks.0.norm.weight": (4,), "embedding.weight": (9, 4)}
    return {n: torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for n, s in shapes.items()}


def test_the_step() -> None:
    masters, reference = _masters(), _masters()
    config = OptimConfig(name="muon", lr=0.1, momentum=0.9, weight_decay=0.5)
    optimizer = build_optimizer(config, masters)
    adamw = build_optimizer(
        OptimConfig(name="adamw", lr=0.1, weight_decay=0.5), {n: reference[n] for n in reference if "qkv" not in n}
    )
    matrix = reference["blocks.0.qkv.weight"].detach().clone()
    momentum = torch.zeros_like(matrix)
    for step in range(3):
        for name, master in masters.items():
            generator = torch.Generator().manual_seed(step)
            master.grad = torch.randn(master.shape, dtype=torch.float64, generator=generator)
            reference[name].grad = master.grad.clone()
        grad = masters["blocks.0.qkv.weight"].grad
        assert grad is not None
        momentum = 0.9 * momentum + grad
        update = orthogonalised(grad + 0.9 * momentum)
        matrix = (1 - 0.1 * 0.5) * matrix - 0.1 * 0.2 * 6**0.5 * update
        optimizer.step()
        adamw.step()
    torch.testing.assert_close(masters["blocks.0.qkv.weight"].detach(), matrix, rtol=1e-12, atol=1e-12)
    for name in ("blocks.0.norm.weight", "embedding.weight"):
        torch.testing.assert_close(masters[name], reference[name], rtol=1e-12, atol=1e-12)


def _optimum(costs: list[float], num_ranks: int) -> float:
    """The least that the busiest rank can have, by trying all there is."""
    best, costs = sum(costs), sorted(costs, reverse=True)

    def deal(index: int, loads: list[float]) -> None:
        nonlocal best
        if max(loads) >= best:
            return
        if index == len(costs):
            best = max(loads)
            return
        for rank, load in enumerate(loads):
            if load not in loads[:rank]:
                deal(index + 1, [*loads[:rank], load + costs[index], *loads[rank + 1 :]])

    deal(0, [0.0] * num_ranks)
    return best


_SIDES = st.integers(1, 64)


@given(
    st.integers(2, 4),
    st.one_of(
        st.lists(st.integers(1, 20).map(float), min_size=1, max_size=9),
        st.lists(st.sampled_from([3.0, 1.0, 4.0, 12.0]), min_size=1, max_size=9),
        st.lists(st.builds(lambda m, n: float(max(m, n) * min(m, n) ** 2), _SIDES, _SIDES), min_size=1, max_size=9),
    ),
)  # fmt: skip
def test_homes_are_within_grahams_bound(num_ranks: int, costs: list[float]) -> None:
    """Mostly within a tenth of the best; beyond it where only a change among three ranks would relieve the busiest."""
    homes = balanced(costs, num_ranks)
    loads = [sum(cost for cost, home in zip(costs, homes, strict=True) if home == rank) for rank in range(num_ranks)]
    assert max(loads) <= (4 / 3 - 1 / (3 * num_ranks)) * _optimum(costs, num_ranks)


@pytest.mark.parametrize(("num_ranks", "best"), [(2, 168), (3, 112), (8, 42), (12, 28), (24, 16), (100, 9)])
def test_homes_of_a_transformer(num_ranks: int, best: int) -> None:
    """GPT-2's 48 matrices, in 768^3; more ranks than matrices, too. On 24 each has one of the costliest."""
    costs = [7.0, 3.0, 9.0, 9.0] * 12
    homes = balanced(costs, num_ranks)
    loads = [sum(cost for cost, home in zip(costs, homes, strict=True) if home == rank) for rank in range(num_ranks)]
    assert max(loads) <= 1.1 * best


def least_load(costs: list[float], num_ranks: int) -> float:
    """What the busiest rank has at least, whatever the homes: of the k n + 1 costliest one rank has k + 1 or more."""
    costs = sorted(costs, reverse=True)
    crowded = (sum(costs[k * num_ranks - k : k * num_ranks + 1]) for k in range(1, (len(costs) - 1) // num_ranks + 1))
    return max(costs[0], sum(costs) / num_ranks, *crowded)


@pytest.mark.parametrize("kind", [Muon, SOAP, Shampoo, GaLore])
@pytest.mark.parametrize("shape", ["gpt2_124m", "opt_1_3b", "mixtral_8x7b"])
def test_homes_of_real_models_are_within_a_tenth_of_the_best(shape: str, kind: Any) -> None:
    """A stack of experts has one home. The best balance is no better than `least_load`."""
    with torch.device("meta"):
        model = Decoder(SHAPES[shape])
    optimizer = kind(model.named_parameters(), lr=0.1)
    costs = [optimizer._cost(tuple(p.shape), g) for g in optimizer.param_groups if g[kind.flag] for p in g["params"]]
    for num_ranks in (2, 4, 8, 64):
        loads = [0.0] * num_ranks
        for cost, home in zip(costs, balanced(costs, num_ranks), strict=True):
            loads[home] += cost
        assert max(loads) <= 1.1 * least_load(costs, num_ranks), f"{num_ranks} ranks"


def test_every_element_goes_home_once_and_comes_back_to_all() -> None:
    """Two halves of one matrix on two ranks each, another whole on all, the third in part on one alone."""
    upper, lower = (((range(2),), (range(3),)), ((range(2, 4),), (range(3),)))
    whole, nothing = ((range(5),), (range(2),)), ((range(0),), (range(0),))
    held = [[upper, whole, whole], [lower, whole, nothing], [upper, whole, nothing], [lower, whole, nothing]]
    homes = [1, 2, 3]
    there, back = (list(way(held, homes)) for way in (pieces_to_home, pieces_from_home))
    assert {(p.matrix, p.source, p.dest, p.held) for p in there} == {
        *((0, 0, 1, upper), (0, 1, 1, lower)),  # the home has its own half itself
        *((1, 2, 2, whole), (2, 0, 3, whole)),
    }
    assert {(p.matrix, p.source, p.dest) for p in back} == {
        *((0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 1, 3)),
        *((1, 2, 0), (1, 2, 1), (1, 2, 2), (1, 2, 3), (2, 3, 0)),
    }


def test_kernels_of_convolutions_are_matrices() -> None:
    """And parameters that do not lie row after row in memory move as those that do."""
    generator = torch.Generator().manual_seed(2)
    kernel = torch.randn(6, 2, 3, 3, dtype=torch.float64, generator=generator)
    grads = [torch.randn(6, 2, 3, 3, dtype=torch.float64, generator=generator) for _ in range(3)]
    given = [
        kernel.clone(),
        kernel.clone(memory_format=torch.channels_last),
        kernel.flatten(1).clone(),
        kernel.flatten(1).t().clone().t(),
    ]
    optimizer = Muon([{"params": given, "orthogonalise": True}], lr=0.1)
    for grad in grads:
        for parameter in given:
            parameter.grad = grad.reshape(parameter.shape)
        given[1].grad = grad.clone(memory_format=torch.channels_last)
        optimizer.step()
    for parameter in given[1:]:
        torch.testing.assert_close(parameter.reshape(kernel.shape), given[0], rtol=1e-12, atol=1e-12)
    assert not torch.equal(given[0], kernel)


@pytest.mark.parametrize("orthogonalise", [True, False])
@pytest.mark.parametrize("transposed", ["parameter", "gradient", "both"])
def test_what_is_transposed_in_memory_moves_alike(orthogonalise: bool, transposed: str) -> None:
    value = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    plain, other = value.clone(), value.t().clone().t() if transposed != "gradient" else value.clone()
    optimizer = Muon([{"params": [plain, other], "orthogonalise": orthogonalise}], lr=0.1)
    for step in range(2):
        plain.grad = torch.randn(5, 7, generator=torch.Generator().manual_seed(step))
        other.grad = plain.grad.t().clone().t() if transposed != "parameter" else plain.grad.clone()
        optimizer.step()
    torch.testing.assert_close(other, plain)
    assert not torch.equal(plain, value)


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ([torch.ones(3, 4)], "does not say orthogonalise"),
        ([{"params": [torch.ones(3, 4)]}], "parameter group 0 does not say orthogonalise"),
        ([{"params": [torch.ones(3, 4)], "orthogonalise": 1}], "does not say orthogonalise"),
        ([{"params": [torch.ones(3)], "orthogonalise": True}], r"shape \[3\] is no matrix"),
    ],
)
def test_groups_say_what_they_are(groups: list, named: str) -> None:
    with pytest.raises(UserError, match=named):
        Muon(groups, lr=0.1)


def test_a_closure_is_called_and_complex_parameters_are_refused() -> None:
    matrix = torch.ones(3, 4, requires_grad=True)
    optimizer = Muon([{"params": [matrix], "orthogonalise": True}], lr=0.1)

    def closure() -> torch.Tensor:
        loss = matrix.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 12
    assert not torch.equal(matrix, torch.ones(3, 4))
    phase = torch.ones(3, 4, dtype=torch.complex64)
    phase.grad = phase.clone()
    with pytest.raises(UserError, match="no complex parameters"):
        Muon([{"params": [phase], "orthogonalise": True}], lr=0.1).step()
