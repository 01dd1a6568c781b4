"""What each ZeRO level holds, byte for byte, and the parameters that need care: frozen, unused, tied, transposed."""

import gc
import math
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from core.compose import ParallelConfig, parallelize
from core.config import UserError
from core.layout import full_tensor
from core.mesh import MeshConfig, Zero, build_mesh
from core.optim.build import OptimConfig, build_optimizer
from core.optim.clip import scale_gradients
from core.parallel.data import DataParallel, own_gradient
from core.precision import Precision
from core.trace.account import MemoryAccount

SHAPES = [(5, 6), (5,), (4, 3), (1, 7)]


class Weights(nn.Module):
    """Parameters of given shapes, each used in full."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in SHAPES)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.stack([w.square().sum() for w in self.weights]).sum()


def spread(model: nn.Module, zero: Zero, precision: Precision = "fp64", mesh: MeshConfig | None = None) -> DataParallel:
    resolved = (mesh or MeshConfig()).resolve(dist.get_world_size(), zero)
    return parallelize(model, build_mesh(resolved, "cpu"), ParallelConfig(zero=zero, precision=precision))


def backward(parallel: DataParallel, x: Tensor, last: bool = True) -> None:
    with parallel.microbatch(last=last):
        parallel.model(x).sum().backward()


def storage_bytes(tensors: list[Tensor | None]) -> int:
    """Bytes of the storages behind tensors, each once."""
    plain = [getattr(t, "_local_tensor", t) for t in tensors if t is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain}.values())


def held_bytes(zero: Zero, precision: Precision) -> dict[str, int]:
    """Bytes on this rank: parameters and masters (storages that both use once), gradients after `reduce`, moments."""
    parallel = spread(Weights(), zero, precision)
    optimizer = build_optimizer(OptimConfig(), parallel.masters)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    backward(parallel, torch.ones(1, dtype=dtype))
    parallel.reduce()
    parameters, masters = list(parallel.model.parameters()), list(parallel.masters.values())
    found = {"parameters and masters": storage_bytes([*parameters, *masters])}
    found["gradients"] = storage_bytes([m.grad for m in masters] + [p.grad for p in parameters])
    optimizer.step()
    parallel.publish()
    parallel.release()
    assert all(t.grad is None for t in (*parameters, *masters))
    state = [v for s in optimizer.state.values() for v in s.values() if v.ndim]  # but the count of steps
    return found | {"moments": storage_bytes(state)}


def elements(ranks: int) -> int:
    """What one of `ranks` holds in whole rows: ceil(rows / ranks) of each parameter."""
    return sum(-(-rows // ranks) * math.prod(rest) for rows, *rest in SHAPES)


@pytest.mark.parametrize(
    ("zero", "precision", "parameters", "gradients", "moments"),
    # Bytes per parameter: (whole, per rank's share).
    [
        (0, "fp32", (4, 0), (4, 0), (8, 0)),
        (1, "fp32", (4, 0), (4, 0), (0, 8)),
        (2, "fp32", (4, 0), (0, 4), (0, 8)),
        (3, "fp32", (0, 4), (0, 4), (0, 8)),
        (0, "bf16", (2 + 4, 0), (4, 0), (8, 0)),
        (1, "bf16", (2, 4), (4, 0), (0, 8)),
        (2, "bf16", (2, 4), (0, 4), (0, 8)),
        (3, "bf16", (0, 4), (0, 4), (0, 8)),
    ],
)
def test_bytes_per_rank(ranks, zero: Zero, precision: Precision, parameters, gradients, moments) -> None:
    found = ranks(2).run(held_bytes, zero, precision)[0]
    whole, share = elements(1), elements(2)
    padded = 2 * share if zero else whole  # a message that is cut over two ranks is made of equal shares
    assert found["parameters and masters"] == parameters[0] * whole + parameters[1] * share
    assert found["gradients"] == gradients[0] * padded + gradients[1] * share
    assert found["moments"] == moments[0] * whole + moments[1] * share


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def backward_peak(zero: Zero) -> int:
    """Most bytes that a backward adds when every parameter is a message of its own, in units of a parameter."""
    with patch("core.parallel.data.BUCKET_BYTES", 1):
        parallel = spread(Chain(), zero, "fp32")
    x = torch.ones(1, 64)
    with MemoryAccount() as account:
        account.add(parallel.model.parameters())
        before = account.current_bytes
        backward(parallel, x)
        parallel.reduce()
        return (account.peak_bytes - before) // (64 * 64 * 4)


def test_zero_2_lets_go_of_gradients_as_the_backward_goes(ranks) -> None:
    assert min(ranks(2).run(backward_peak, 1)) >= 16
    # Shares, two messages, the gradient just made, and one or two that gloo's threads have yet to let go of.
    assert max(ranks(2).run(backward_peak, 2)) <= 16 // 2 + 5


def copies_of_gradients(zero: Zero, precision: Precision) -> list[int]:
    """Operators that copy, add or zero in each of two microbatches and in `reduce`; 17 parameters, one is not used."""
    torch.manual_seed(0)
    model = Chain()
    model.unused = nn.Parameter(torch.ones(3))
    parallel = spread(model, zero, precision)
    x = torch.ones(1, 64, dtype=parallel.compute_dtype)
    counts = []
    for part in (lambda: backward(parallel, x, last=False), lambda: backward(parallel, x), parallel.reduce):
        with Counted() as counted:
            part()
        counts.append(counted.number)
    return counts


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.number += operator.overloadpacket._qualified_op_name.removeprefix("aten::") in COPYING
        return operator(*args, **(kwargs or {}))


COPYING = ("copy_", "_to_copy", "clone", "add_", "zero_", "zeros_like", "cat")


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_one_rank_takes_its_gradients_as_they_are(ranks, zero: Zero) -> None:
    """16 additions in the second microbatch, nothing for what was not used; casts where the formats differ."""
    assert ranks(1).run(copies_of_gradients, zero, "fp32") == [[0, 16, 0]]
    assert ranks(1).run(copies_of_gradients, zero, "bf16") == [[16, 16, 0]]
    first, second, _ = ranks(2).run(copies_of_gradients, zero, "fp32")[0]
    assert first == 16
    assert second >= 16  # and the zeros of what is sent


class Joined(nn.Module):
    """Of two parameters whose gradients autograd leaves in the same memory, and of two that are slices of one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 2))
        self.c, self.d = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a.view(6) + self.b.view(6)) * x + torch.cat([self.c, self.d]) * x


def joined_gradients(microbatches: int) -> list[Tensor]:
    """Twice the gradients of a, b, c, d, by the function that clips them."""
    parallel = spread(Joined(), 0)
    for index in range(microbatches):
        backward(parallel, torch.arange(6, dtype=torch.float64), last=index == microbatches - 1)
    parallel.reduce()
    scale_gradients(parallel.masters.values(), 2.0)
    return [m.grad.flatten() for m in parallel.masters.values()]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_that_lie_in_one_memory_are_parted(ranks, microbatches: int) -> None:
    plain = Joined().double()
    plain(torch.arange(6, dtype=torch.float64)).sum().backward()
    assert plain.a.grad.data_ptr() == plain.b.grad.data_ptr()
    (found,) = ranks(1).run(joined_gradients, microbatches)
    x = 2.0 * microbatches * torch.arange(6, dtype=torch.float64)
    for gradient, expected in zip(found, (x, x, x[:2], x[2:]), strict=True):
        assert gradient.equal(expected)


def test_a_gradient_is_taken_only_where_nobody_else_has_it() -> None:
    def taken(gradient: Tensor, dtype: torch.dtype = torch.float32) -> bool:
        own = own_gradient(gradient, dtype)
        assert own.dtype == dtype
        assert own.is_contiguous()
        assert own.equal(gradient.to(dtype))
        return own.untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr()

    assert taken(torch.ones(2, 3))
    assert not taken(torch.ones(2, 3), torch.float64)
    assert not taken(torch.ones(2, 3).t())
    assert not taken(torch.ones(3, 3)[:2])  # it would keep nine elements for six
    assert not taken((whole := torch.ones(6)).view(2, 3)), whole


def same_on_every_mesh(ranks, program, *, world_sizes=(1, 2), levels=(0, 1, 2, 3)) -> None:
    """`program(zero)` returns tensors on each rank: the same, whatever the level and the number of ranks."""
    expected = ranks(1).run(program, 0)[0]
    for size in world_sizes:
        for zero in levels:
            for found in ranks(size).run(program, zero):
                for name, value in expected.items():
                    torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13, msg=f"{name}, zero {zero}")


class Tied(nn.Module):
    """A frozen, an unused and a tied parameter, a transposed one, a parameter that only some inputs reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, 5, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.transposed = nn.Parameter(torch.randn(4, 5).t())
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.blocks[0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.embed.weight.t()
        for block in self.blocks:
            x = block(x).tanh()
        return (x @ self.head.weight) @ torch.ones(3, 1, dtype=x.dtype) + (x @ self.transposed).sum(-1, keepdim=True)


def poisoned(*args, **kwargs) -> Tensor:
    """torch.empty, with nothing left to luck in what nobody writes."""
    out = torch.zeros(*args, **kwargs)
    return out.fill_(torch.nan) if out.is_floating_point() else out


@patch.object(torch, "empty", poisoned)
def special_parameters(zero: Zero) -> dict[str, Tensor]:
    """Masters after three steps, and parameters, on the same global batch of 4 rows."""
    parallel = spread(Tied(), zero)
    optimizer = build_optimizer(OptimConfig(lr=0.1), parallel.masters)
    assert "head.weight" not in parallel.masters
    assert "blocks.0.bias" not in parallel.masters
    rank, rows = dist.get_rank(), 4 // dist.get_world_size()
    for step in range(3):
        x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for row in range(rows):
            backward(parallel, x[rank * rows + row][None], last=row == rows - 1)
        parallel.reduce()
        optimizer.step()
        parallel.publish()
        parallel.release()
    assert parallel.model.get_parameter("head.weight") is parallel.model.get_parameter("embed.weight")
    found = {n: full_tensor(m).clone() for n, m in parallel.masters.items()}
    with torch.no_grad():
        found["output"] = parallel.model(torch.ones(2, 3, dtype=torch.float64)).clone()
    return found


def plain_special_parameters() -> dict[str, Tensor]:
    """The same by torch alone."""
    model = Tied().double()
    decay = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), foreach=False)
    for step in range(3):
        model(torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return found | {"output": model(torch.ones(2, 3, dtype=torch.float64)).detach()}


def test_frozen_unused_tied_and_transposed_parameters(ranks) -> None:
    same_on_every_mesh(ranks, special_parameters)
    found, expected = ranks(1).run(special_parameters, 0)[0], plain_special_parameters()
    torch.testing.assert_close({n: found[n] for n in expected}, expected, rtol=1e-12, atol=1e-13)


def small_updates(zero: Zero) -> tuple[float, float]:
    """A weight of 1 after 64 bf16 steps of 2^-12 each, which bf16 itself cannot take; master and parameter."""
    parallel = spread(nn.Linear(4, 4, bias=False), zero, "bf16")
    with torch.no_grad():
        for master in parallel.masters.values():
            master.fill_(1.0)
    parallel.publish()
    optimizer = torch.optim.SGD(parallel.masters.values(), lr=2.0**-12)
    ranks = dist.get_world_size()
    for _ in range(64):
        backward(parallel, -torch.ones(1, 4, dtype=torch.bfloat16) / ranks)
        parallel.reduce()
        optimizer.step()
        parallel.publish()
        parallel.release()
    (master,) = parallel.masters.values()
    assert master.dtype == torch.float32
    with torch.no_grad():
        return float(master.mean()), float(parallel.model(torch.eye(4, dtype=torch.bfloat16)).float().mean())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_masters_gather_updates_too_small_for_bf16(ranks, zero: Zero) -> None:
    expected = 1 + 64 * 2.0**-12
    assert float(torch.tensor(1.0, dtype=torch.bfloat16) + 2.0**-12) == 1.0
    for master, parameter in ranks(2).run(small_updates, zero):
        assert master == expected
        assert parameter == float(torch.tensor(expected, dtype=torch.bfloat16)) > 1.0


def evaluated_then_loaded() -> tuple[float, float]:
    """Under ZeRO-3 an evaluation leaves what is outside the blocks gathered; new values must be seen all the same."""
    parallel = spread(nn.Linear(2, 2, bias=False), 3)
    x = torch.ones(1, 2, dtype=torch.float64)
    outputs = []
    for value in (1.0, 5.0):
        with torch.no_grad():
            for master in parallel.masters.values():
                master.fill_(value)
            parallel.publish()
            outputs.append(float(parallel.model(x).sum()))
    return outputs[0], outputs[1]


def test_published_values_are_seen_after_an_evaluation(ranks) -> None:
    assert ranks(2).run(evaluated_then_loaded) == [(4.0, 20.0)] * 2


def held_rows_of_a_tiny_model(zero: Zero) -> dict[str, Tensor]:
    """One parameter of one row: most ranks hold nothing of it, and step all the same."""
    torch.manual_seed(0)
    parallel = spread(nn.Linear(3, 1, bias=False), zero)
    optimizer = build_optimizer(OptimConfig(lr=0.1), parallel.masters)
    x = torch.ones(4 // dist.get_world_size(), 3, dtype=torch.float64)
    for _ in range(2):
        backward(parallel, x)
        parallel.reduce()
        optimizer.step()
        parallel.publish()
        parallel.release()
    return {n: full_tensor(m).clone() for n, m in parallel.masters.items()}


def test_ranks_that_hold_no_row(ranks) -> None:
    same_on_every_mesh(ranks, held_rows_of_a_tiny_model, world_sizes=(4,))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def scalar(zero: Zero) -> dict[str, Tensor]:
    parallel = spread(Scaled(), zero)
    optimizer = torch.optim.SGD(parallel.masters.values(), lr=0.1)
    for _ in range(2):
        backward(parallel, torch.ones(4 // dist.get_world_size(), dtype=torch.float64))
        parallel.reduce()
        optimizer.step()
        parallel.publish()
        parallel.release()
    return {
        "scale": full_tensor(parallel.masters["scale"]),
        "output": parallel.model(torch.ones((), dtype=torch.float64)).detach(),
    }


def test_a_scalar_stays_whole(ranks) -> None:
    same_on_every_mesh(ranks, scalar)
    for zero in (1, 3):
        assert float(ranks(2).run(scalar, zero)[1]["output"]) == pytest.approx(2.0 - 2 * 0.1 * 4)


def test_tensor_parallelism_needs_a_plan_where_none_is_found(ranks) -> None:
    said = "mesh.tp=2 without a plan: Linear takes input, of which nothing is known; say how the model's modules are"
    assert all(line.startswith(said) for line in ranks(2).run(refusal))


def refusal() -> str:
    with pytest.raises(UserError) as refused:
        spread(nn.Linear(2, 2), 0, mesh=MeshConfig(tp=2))
    return str(refused.value)


def nothing_to_train(zero: Zero) -> str:
    with pytest.raises(UserError) as refused:
        spread(nn.Linear(2, 2).requires_grad_(False), zero)
    return str(refused.value)


def test_a_model_that_is_all_frozen_is_refused(ranks) -> None:
    for zero in (0, 3):
        assert "nothing to train" in ranks(1).run(nothing_to_train, zero)[0]


def left_behind(zero: Zero, precision: Precision) -> int:
    """How many of a trained model, its parameters and what spread it are there when nobody has them any more."""

    def trained() -> list[weakref.ref]:
        parallel = spread(Weights(), zero, precision)
        optimizer = build_optimizer(OptimConfig(), parallel.masters)
        backward(parallel, torch.ones(1, dtype=parallel.compute_dtype))
        parallel.reduce()
        optimizer.step()
        parallel.release()
        parallel.publish()
        return [weakref.ref(thing) for thing in (parallel, parallel.model, *parallel.model.parameters())]

    references = trained()
    gc.collect()
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_model_that_nobody_needs_any_more_is_freed(ranks, zero: Zero, precision: Precision) -> None:
    assert ranks(1).run(left_behind, zero, precision) == [0]


def kept_gradient() -> float:
    model = Weights()
    spread(model, 0)
    gc.collect()
    model(torch.ones(1, dtype=torch.float64)).sum().backward()
    return float(next(model.parameters()).grad.sum())


def test_a_model_that_outlives_what_spread_it_keeps_its_gradients(ranks) -> None:
    assert ranks(1).run(kept_gradient) == [2.0 * math.prod(SHAPES[0])]
