"""A plain block cut over a grid, and what a training step of a decoder on a grid holds and sends."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.comm.volume import count_volume
from core.compose import ParallelConfig, parallelize
from core.layout import Layout, full_tensor, layout_of, tag
from core.mesh import MeshConfig, TpMode, build_mesh
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import tensor_parallel_plan
from core.parallel import grid, summa, tensor2d, tensor3d
from core.parallel.data import Completion
from core.parallel.plan import apply_plan
from core.placement.style import Plan


class Plain(nn.Module):
    """No module of ours: an MLP with a norm and a residual."""

    def __init__(self, norm: type[nn.Module], dim: int = 7, hidden: int = 11):
        super().__init__()
        self.norm, self.up, self.down = norm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


def plain_plan(mode: TpMode) -> Plan:
    form = tensor3d if mode == "3d" else tensor2d
    down = tensor3d.linear_back if mode == "3d" else tensor2d.linear
    return {"norm": grid.norm, "up": form.linear, "down": down, "": grid.from_whole}


def plain(norm: type[nn.Module], mesh: MeshConfig) -> dict[str, Tensor]:
    """Output, input gradient and parameter gradients, whole; on one rank without any of our styles."""
    torch.manual_seed(3)
    model = Plain(norm).double()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)
    x = torch.randn(5, 3, 7, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(5, 3, 7, dtype=torch.float64)
    if mesh.tp == 1:
        y = model(x)
        (y * weights).sum().backward()
        return {"y": y.detach(), "x": _grad(x), **{n: _grad(p) for n, p in model.named_parameters()}}
    built = build_mesh(mesh.resolve(dist.get_world_size()), "cpu")
    parallel = parallelize(model, built, ParallelConfig(precision="fp64"), plan=plain_plan(mesh.tp_mode))
    with parallel.microbatch(last=True):
        y = parallel.model(x)
        (y * weights).sum().backward()
    parallel.reduce()
    whole = {n: full_tensor(tag(_grad(m), layout_of(m))) for n, m in parallel.masters.items()}
    return {"y": y.detach(), "x": _grad(x), **whole}


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad.clone()


# --- SUMMA ------------------------------------------------------------------------------------------------------------


def products(sizes: tuple[int, int, int]) -> float:
    """The largest difference of the three products and their gradients from those of whole matrices."""
    mesh = build_mesh(MeshConfig(tp=4, tp_mode="2d").resolve(4), "cpu")
    torch.manual_seed(1)
    m, k, n = sizes
    x, w, y = (torch.randn(*shape, dtype=torch.float64) for shape in ((m, k), (k, n), (m, n)))
    at = grid.Spread(mesh)
    line = summa.Grid(mesh, [s.stop - s.start for s in at.columns(k)])
    worst = 0.0
    for function, a, b, whole in (
        (lambda a, b: summa.AB.apply(line, a, b, False), x, w, lambda a, b: a @ b),
        (lambda a, b: summa.ABT.apply(line, a, b), y, w, lambda a, b: a @ b.T),
        (lambda a, b: summa.ATB.apply(line, a, b), x, y, lambda a, b: a.T @ b),
    ):
        found, expected = _with_gradients(function, _block(a, mesh), _block(b, mesh)), _with_gradients(whole, a, b)
        for part, of in zip(found, expected, strict=True):
            worst = max([worst, *(part - _block(of, mesh)).abs().flatten().tolist()])
    return worst


def _block(matrix: Tensor, mesh: Any) -> Tensor:
    return Layout(tuple(matrix.shape)).cut(mesh, "tp_row", 0).cut(mesh, "tp_col", 1).local(matrix).clone()


def _with_gradients(function: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """c = function(a, b), and the gradients of sum c^2 / 2."""
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    c = function(a, b)
    c.backward(c.detach())
    return c.detach(), _grad(a), _grad(b)


# --- what a step holds and sends --------------------------------------------------------------------------------------

SQUARE = DecoderConfig(vocab_size=128, dim=128, num_layers=1, num_heads=8, ffn_dim=128, max_length=8)
"""Every weight matrix and every activation of 16 x 8 tokens has at least 128 x 128 elements."""


class _Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator has returned, and which operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: tuple[int, str] = (0, "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.found = max(self.found, (leaf.untyped_storage().nbytes() // leaf.element_size(), str(func)))
        return out


def largest_allocation(mesh: MeshConfig) -> tuple[int, str]:
    """Of building, filling, forward and backward of a decoder on the grid."""
    built = build_mesh(mesh.resolve(dist.get_world_size()), "cpu")
    with torch.device("meta"):
        model = Decoder(SQUARE)
    plan = tensor_parallel_plan(SQUARE, mesh.tp_mode)
    apply_plan(model, plan, built["tp"] if mesh.tp_mode == "1d" else built["tp_depth", "tp_row", "tp_col"])
    ids = torch.arange(16 * 8).view(16, 8)
    with _Largest() as largest:
        model.to_empty(device="cpu")
        initialise(model, 0)
        model(ids, targets=ids).backward()
    return largest.found


def volume_of_step(mesh: MeshConfig, config: DecoderConfig, batch: int, length: int) -> dict[tuple[str, str], int]:
    """(operation, axis) -> bytes of forward, backward and the sums of partial gradients."""
    built = build_mesh(mesh.resolve(dist.get_world_size()), "cpu")
    with torch.device("meta"):
        model = Decoder(config)
    plan = tensor_parallel_plan(config, mesh.tp_mode)
    parallel = parallelize(model, built, ParallelConfig(), plan=plan, materialise=lambda m: initialise(m, 0))
    ids = torch.arange(batch * length).view(batch, length) % config.vocab_size
    # What says which parameters were used is counted in tests/unit/test_volume.py.
    used = patch.object(Completion, "used_anywhere", lambda _, masters, together: set(masters))
    with used, count_volume(built) as volume:
        with parallel.microbatch(last=True):
            parallel.model(ids, targets=ids).backward()
        parallel.reduce()
    return dict(volume.bytes)
