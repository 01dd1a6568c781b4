"""What of torch is private is used in one place, and still does what it is used for."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from core import compat

ROOT = Path(__file__).parents[2]
PRIVATE = re.compile(
    r"\btorch\.(?!ops\.)(?:\w+\.)*_(?!foreach_|_)\w+|from torch[\w.]*\._[\w.]* import|import torch\._|"
    r"from torch[\w.]* import (?:\w+, )*_|\._local_tensor\b|\._compiled_call_impl\b|\._get_root_mesh\b|\._unflatten\(|"
    r"\._flatten\(|\._get_default_store\b|\._resolve_process_group\b|_concatenate\(\[|\._optimizer_step_"
)


def test_no_other_file_names_what_is_private() -> None:
    found = []
    for path in sorted((*ROOT.glob("core/**/*.py"), *ROOT.glob("apps/**/*.py"))):
        if path != ROOT / "core/compat.py":
            lines = enumerate(path.read_text().splitlines(), 1)
            found += [f"{path.relative_to(ROOT)}:{n}: {line.strip()}" for n, line in lines if PRIVATE.search(line)]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ["x = torch._int_mm(a, b)", "from torch._C import y", "return tensor._local_tensor", "from torch.a import _B",
     "from torch.utils._pytree import tree_leaves", "torch.cpu._is_amx_tile_supported()", "mesh._flatten(name)"],
)  # fmt: skip
def test_a_private_name_is_seen(line: str) -> None:
    assert PRIVATE.search(line)
    assert not PRIVATE.search("torch._foreach_mul_(x, 2), torch.ops.aten._to_copy.default, self._flatten_all(x)")


# --- canaries ---------------------------------------------------------------------------------------------------------


def of_meshes() -> str:
    """On two ranks."""
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))
    assert compat.root_of(mesh["a"]) == mesh == compat.root_of(mesh)
    flat = compat.flattened(mesh["a", "b"], "both")
    assert (flat.size(), flat.mesh_dim_names, flat.get_local_rank()) == (2, ("both",), dist.get_rank())
    assert compat.root_of(flat) == mesh
    outer = compat.unflattened(mesh["a"], (2, 1), ("outer", "inner"))
    assert (outer["outer"].size(), outer["inner"].size()) == (2, 1)
    joined = compat.concatenated([mesh["a"], mesh["c"]])
    assert (joined.mesh_dim_names, tuple(joined.shape)) == (("a", "c"), (2, 1))
    group = mesh["a"].get_group()
    assert compat.group_named(group.group_name) is group
    store = compat.connection_to_store()
    store.add("compat", 1)
    ranks = compat.checkpoint_ranks(dist.new_group(backend="gloo"))
    assert ranks.broadcast("what", lambda: "said") == "said"
    assert (ranks.get_rank(), ranks.get_world_size()) == (dist.get_rank(), 2)
    whole = torch.arange(6.0).view(3, 2)
    tensor = distribute_tensor(whole, mesh["a"], [Shard(0)], src_data_rank=None)
    assert isinstance(tensor, DTensor)
    assert torch.equal(compat.own_part(tensor), whole.chunk(2)[dist.get_rank()])
    assert compat.own_part(tensor).data_ptr() == tensor.to_local().data_ptr()
    assert compat.flight_record() is None or json.loads(compat.flight_record() or "")
    return "fine"


def test_meshes_and_groups(ranks) -> None:
    assert ranks(2).run(of_meshes) == ["fine"] * 2


def of_units() -> list[list[str]]:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.zeros(3, 2))
            self.inner = nn.Linear(2, 2)

    mesh, unit = init_device_mesh("cpu", (2,)), Unit()
    fully_shard(unit.inner, mesh=mesh)
    fully_shard(unit, mesh=mesh)
    names = {parameter: name for name, parameter in unit.named_parameters()}
    return [[names[parameter] for parameter in compat.gathered_together(one)] for one in (unit, unit.inner)]


def test_what_is_gathered_together(ranks) -> None:
    assert ranks(2).run(of_units)[0] == [["own"], ["inner.weight", "inner.bias"]]


def test_ranks_that_do_not_exist() -> None:
    from core.runtime import pretended

    with pretended(4096):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 4096)
        x = torch.ones(2)
        dist.all_reduce(x)  # comes back at once
    assert type(compat.fake_store()).__name__ == "FakeStore"


def test_shardings_are_forgotten() -> None:
    """What fails without it: tests/unit/test_auto_check.py, stages of tensors."""
    from torch.distributed.tensor import DTensor

    compat.forget_shardings()
    assert DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_info().currsize == 0


def test_checkpoints() -> None:
    noted = compat.storage_info("file", 3, 5)
    assert (noted.relative_path, noted.offset, noted.length) == ("file", 3, 5)
    x = torch.arange(12.0).view(3, 4)
    assert torch.equal(compat.narrowed(x, (1, 2), (2, 2)), x[1:, 2:])


def test_the_number_of_the_running_backward() -> None:
    """Outside none; inside the same throughout, and another in a backward within."""
    seen: list[int] = []
    assert compat.backward_number() == compat.OUTSIDE
    x = torch.ones(2, requires_grad=True)

    def inner(_: Tensor) -> None:
        seen.append(compat.backward_number())
        with torch.enable_grad():
            y = torch.ones(1, requires_grad=True)
            z = y * 2
            z.register_hook(lambda _: seen.append(compat.backward_number()))
            z.sum().backward()

    y = x * 3
    y.register_hook(inner)
    (y * 2).sum().backward()
    outer, within = seen
    assert compat.OUTSIDE < outer < within


def test_the_numbers_of_autograds_nodes() -> None:
    """A node has the number that was told to be next before its operator, also in the backward."""
    x = torch.ones(2, requires_grad=True)
    number = compat.next_sequence_number()
    y = x.exp()
    z = y.sin()
    assert [compat.sequence_number(node) for node in (y.grad_fn, z.grad_fn)] == [number, number + 1]
    seen: list[int] = []
    y.register_hook(lambda _: seen.append(compat.sequence_number(compat.current_node())))
    z.sum().backward()
    assert seen[0] in (number, number + 1)  # torch's hooks of a tensor run before the node that made it, or behind z's


@pytest.mark.parametrize(
    ("look", "wants"),
    [(lambda x: bool(x.any()), True), (lambda x: x.nonzero(), True), (lambda x: x @ x, False)],
)
def test_what_fails_without_values(look, wants) -> None:
    with compat.FakeTensorMode(), pytest.raises(RuntimeError) as error:
        look(torch.ones(3, 5))
    assert compat.wants_values(error.value) == wants


def test_holders_of_memory() -> None:
    x = torch.ones(3)
    memory = x.untyped_storage()
    assert compat.num_holders(memory) == 2
    view = x[1:]
    assert compat.num_holders(memory) == 3
    assert view.numel() == 2


def test_an_alias_counts_what_is_written_to_the_first() -> None:
    class Kept(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mul.Tensor:
                aliases.append(compat.alias_of(made))
            return made

    aliases: list[Tensor] = []
    x = torch.ones(3, requires_grad=True)
    with Kept():
        y = x * 2
    (alias,) = aliases
    assert alias.data_ptr() == y.data_ptr()
    assert (alias.grad_fn, alias.requires_grad, alias._version) == (None, False, 0)
    y.add_(1)
    assert alias._version == 1


def test_compiled_modules() -> None:
    module, called = nn.Linear(2, 2), []
    assert compat.compiled_call(module) is None
    assert not compat.is_compiled(module)
    compat.set_compiled_call(module, lambda *given: called.append(given))
    assert compat.is_compiled(module)
    module(torch.ones(1, 2))
    assert len(called) == 1
    assert compat.is_compiled(torch.compile(nn.Linear(2, 2), backend="eager"))  # pyright: ignore[reportArgumentType]
    compat.allow_graphs(11, 1111)
    assert torch._dynamo.config.recompile_limit >= 11
    assert torch._dynamo.config.accumulated_recompile_limit >= 1111
    assert compat.has_cpp_compiler() in (True, False)
    assert isinstance(compat.symbolic_shapes.use_duck_shape, bool)


def test_the_node_that_runs() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: (seen.append(compat.current_node()), x)[1]):
        y = x.exp()
    y.sum().backward()
    assert seen == [y.grad_fn]
    assert compat.current_node() is None


def test_hooks_of_an_optimizers_steps() -> None:
    optimizer, other = (torch.optim.SGD([torch.ones(1, requires_grad=True)]) for _ in range(2))
    assert not compat.follows_steps(optimizer)
    seen: list[torch.optim.Optimizer] = []
    optimizer.register_step_post_hook(lambda stepped, *_: seen.append(stepped))
    assert compat.follows_steps(optimizer)
    assert not compat.follows_steps(other)
    compat.share_step_hooks(optimizer, other)
    other.step()
    assert seen == [other]


def test_code_that_is_not_compiled() -> None:
    seen = []

    @compat.uncompiled
    def note(x: Tensor) -> Tensor:
        seen.append(type(x))
        return x + 1

    assert torch.equal(torch.compile(lambda x: note(x * 2), backend="eager")(torch.ones(2)), torch.full((2,), 3.0))
    assert seen == [Tensor]
    assert compat.may_compile()


def test_a_graph_compiled_alone() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    if not compat.has_cpp_compiler():
        pytest.skip("no C++ compiler; ends where Debian's g++ is")
    traced = make_fx(lambda x: x * 2 + 1)(torch.ones(3))
    found = compat.compiled_alone(traced, [torch.ones(3)], {})(torch.arange(3.0))
    (found,) = found if isinstance(found, list | tuple) else (found,)
    assert torch.equal(found, torch.tensor([1.0, 3.0, 5.0]))


class Watched(compat.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_dispatch_modes() -> None:
    with Watched() as watched:
        x = torch.ones(2) + 1
        with compat.without_modes():
            x = x * 2
        x = x - 1
    assert [name.partition(".")[0] for name in watched.seen] == ["ones", "add", "sub"]


def test_tensors_without_memory() -> None:
    with compat.FakeTensorMode() as mode:
        x = torch.ones(10**9, 10**6) @ torch.ones(10**6, 3)
    assert isinstance(x, compat.FakeTensor)
    assert x.shape == (10**9, 3)
    assert isinstance(mode.from_tensor(torch.ones(2)), compat.FakeTensor)


def made_without_memory(mode: Any) -> list[tuple[Any, ...]]:
    """What operators make that differ in one fact of their arguments."""
    with mode:
        x = torch.ones(2, 3)
        several = [
            x.sum(1),
            x.sum((0, 1)),
            x.T + 1,
            torch.ones(3, 2) + 1,
            x.double().sum(1),
            x.sum(1, keepdim=True),
            x.sum(1, dtype=torch.float64),
            x * 2,
            x * 2.0,
            x.int() * 2,
            x.int() * 2.0,
            x[:, 1:],
            x[:, 1:][:, :1],
            x[:, :2][:, :1],
            x[1:].expand(4, 3),
            x.to(torch.float64),
            torch.cat([x, x]),
            torch.cat([x, x[:, :0]], 1),
            *x.split([1, 2], 1),
            *x.max(1),
            x.add_(1),
            torch.empty(2, 3),
            torch.empty(2, 3, dtype=torch.int64),
            x.new_ones(3, 2).contiguous(memory_format=torch.contiguous_format),
            torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last) + 1,
        ]
        with torch.inference_mode():
            several.append(x + 1)
    return [
        (y.shape, y.stride(), y.storage_offset(), y.untyped_storage().nbytes(), y.dtype, y.is_inference())
        for y in several
    ]


def test_what_is_made_without_memory_is_found_by_fewer_facts() -> None:
    """And is what torch itself makes, the first time and when it is found again."""
    expected = made_without_memory(compat.fake_tensor.FakeTensorMode())
    assert made_without_memory(compat.FakeTensorMode()) == expected
    first = compat.FakeTensorMode.cache_info()
    assert made_without_memory(compat.FakeTensorMode()) == expected
    again = compat.FakeTensorMode.cache_info()
    assert (again.misses - first.misses, again.size) == (0, first.size)
    assert again.hits - first.hits > 20


class Marked(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with compat.without_torch_function():
            return ("marked", func(*args, **(kwargs or {})))


def test_functions_of_subclasses() -> None:
    mark, value = torch.add(torch.ones(2).as_subclass(Marked), 1)
    assert mark == "marked"
    assert torch.equal(value.as_subclass(Tensor), torch.full((2,), 2.0))


def test_methods_of_a_rendezvous_are_named_by_their_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch asks for it: from a method that the one to be named calls."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def recorded() -> str:
        return dynamic_rendezvous.get_method_name()

    def joins() -> str:
        return recorded()

    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", dynamic_rendezvous.get_method_name)
    assert joins() == "joins"
    compat.name_methods_by_frame()
    assert "stack" not in dynamic_rendezvous.get_method_name.__code__.co_names
    assert joins() == "joins"


def test_memory_that_ranks_share() -> None:
    """It takes GPUs: here, that what is asked of it is there."""
    found = compat.symmetric_memory()
    assert callable(found.empty)
    assert callable(found.rendezvous)
    schema = torch.ops.symm_mem.one_shot_all_reduce_copy.default._schema
    assert [str(a.type) for a in schema.arguments] == ["Tensor", "Tensor", "str", "str"]


def test_what_the_first_optimizer_imports_can_be_left_out() -> None:
    """`fold relax` has a limit of time; that nothing else imports it there is held by its own test."""
    assert compat.traced_add_param_group is not torch.optim.Optimizer.add_param_group
    assert compat.traced_add_param_group.__name__ == "add_param_group"


def test_trees() -> None:
    tree = {"a": [torch.ones(1), (2, torch.zeros(1))]}
    assert [type(leaf) for leaf in compat.tree_leaves(tree)] == [Tensor, int, Tensor]
    assert compat.tree_map(lambda leaf: 0, tree) == {"a": [0, (0, 0)]}
    assert compat.tree_map_only(int, lambda leaf: leaf + 1, tree)["a"][1][0] == 3


def test_kinds_of_convolutions() -> None:
    assert isinstance(nn.Conv2d(1, 1, 1), compat.Convolution)
    assert not isinstance(nn.Conv2d(1, 1, 1), compat.TransposedConvolution)
    assert isinstance(nn.ConvTranspose1d(1, 1, 1), compat.TransposedConvolution)


def test_operators() -> None:
    scores = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    p, grad = scores.softmax(-1), torch.randn(3, 5, dtype=torch.float64)
    (expected,) = torch.autograd.grad(p, scores, grad)
    torch.testing.assert_close(compat.softmax_backward(grad, p.detach(), -1, torch.float64), expected)
    a, b = torch.randint(-128, 128, (32, 48), dtype=torch.int8), torch.randint(-128, 128, (48, 16), dtype=torch.int8)
    assert torch.equal(compat.int_mm(a, b), a.int() @ b.int())
    codes = torch.randint(0, 16, (32, 64), dtype=torch.int32)
    scale_and_zero = torch.stack((torch.full((2, 32), 0.5), torch.zeros(2, 32)), -1).bfloat16()
    x = torch.randn(3, 64).bfloat16()
    y = compat.int4_mm(x, compat.pack_int4(codes, 1), 32, scale_and_zero)
    torch.testing.assert_close(y.float(), x.float() @ ((codes - 8) * 0.5).T, rtol=2e-2, atol=2e-1)
    assert {compat.has_amx(), compat.has_avx512_bf16()} <= {True, False}
