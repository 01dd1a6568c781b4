"""Every private name of torch that is used here, and nothing else: what a new torch may move or change stands in one
place. tests/unit/test_compat.py has a canary for each, and holds that no other file names one.

What takes long to import is imported when it is asked for. Operators (`torch.ops.aten._…`) and `torch._foreach_…`,
which torch documents, are no matter of this file.
"""

import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as without_torch_function
from torch._C import _current_autograd_node as current_node
from torch._C import _current_graph_task_id as backward_number
from torch._compile import _disable_dynamo as uncompiled
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental import _config as symbolic_shapes
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.nn.modules.conv import _ConvTransposeNd as TransposedConvolution
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

if TYPE_CHECKING:
    from torch.distributed.checkpoint.utils import _DistWrapper as CheckpointRanks
    from torch.distributed.tensor import DTensor

__all__ = [
    "FAKE_TENSOR_LOG",
    "Convolution",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "TransposedConvolution",
    "backward_number",
    "current_node",
    "symbolic_shapes",
    "traced_add_param_group",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "uncompiled",
    "without_modes",
    "without_torch_function",
]

FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
"""The name of the log in which torch tells of operators that cannot run without values."""

traced_add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
"""`Optimizer.add_param_group` as torch.compile may trace it: what hides it from there imports the compiler, seconds in
the first optimizer of a process."""

OUTSIDE = -1
"""`backward_number()`, torch's number of the running backward, where none runs."""
next_sequence_number = torch.autograd._get_sequence_nr
"""The number of the node that autograd makes next in this thread."""
softmax_backward = torch._softmax_backward_data
int_mm = torch._int_mm
int4_mm, pack_int4 = torch._weight_int4pack_mm_for_cpu, torch._convert_weight_to_int4pack_for_cpu
has_amx, has_avx512_bf16 = torch.cpu._is_amx_tile_supported, torch.cpu._is_avx512_bf16_supported
multiplies_bytes = torch.cpu._is_vnni_supported


# --- distributed ------------------------------------------------------------------------------------------------------


def own_part(tensor: "DTensor") -> Tensor:
    """The plain tensor that this rank stores of a DTensor, itself: `to_local` makes another, and autograd sees it."""
    return tensor._local_tensor


def group_named(name: str) -> ProcessGroup:
    given: Any = name  # `GroupName` to type checkers, which is a string
    return dist.distributed_c10d._resolve_process_group(given)


def connection_to_store() -> Store:
    """Another connection to the store of the process group that there is, for a thread of its own."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


def fake_store() -> Store:
    """A store for a process group of ranks that do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def forget_shardings() -> None:
    """Let DTensor forget how operators go on meshes: it takes equal ones for the same, whose groups may be gone."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def flight_record() -> str | None:
    """The notes of NCCL's flight recorder, as JSON; None without one."""
    from torch._C import _distributed_c10d

    ask = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    return None if ask is None else ask()


def name_methods_by_frame() -> None:
    """Let the elastic launcher's rendezvous take a method's name from its frame, for which it reads the sources of the
    whole stack: a second of a launch, where many modules are imported."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def symmetric_memory() -> Any:
    """Memory that all ranks of a group see: `empty` makes it, and `rendezvous` shows it to the others."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory


def gathered_together(unit: nn.Module) -> list[nn.Parameter]:
    """The sharded parameters that FSDP2 gathers in one message with a module, in the message's order."""
    from torch.distributed.fsdp import fully_shard

    state: Any = fully_shard.state(unit)
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [one.sharded_param for group in groups if group is not None for one in group.fsdp_params]


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a mesh is a part of; itself, where it is of none."""
    return mesh._get_root_mesh()


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes as one of that name; a collective of all ranks."""
    return mesh._flatten(name)


def unflattened(axis: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One axis as several; a collective of all ranks."""
    return axis._unflatten(0, sizes, names)


def concatenated(meshes: list[DeviceMesh]) -> DeviceMesh:
    """The axes of several parts of a mesh as those of one mesh."""
    return DeviceMesh._concatenate(meshes)


def checkpoint_ranks(group: ProcessGroup | None) -> "CheckpointRanks":
    """The exchange between Distributed Checkpoint's ranks; the first leads.  group: None where there is one rank"""
    from torch.distributed.checkpoint.utils import _DistWrapper

    return _DistWrapper(group, use_dist=group is not None, coordinator_rank=0)


def storage_info(file: str, first_byte: int, num_bytes: int) -> Any:
    """The place of a chunk, as Distributed Checkpoint's own index notes it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, first_byte, num_bytes)


def narrowed(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The box of a tensor, a view."""
    from torch.distributed._shard._utils import narrow_tensor_by_index

    return narrow_tensor_by_index(tensor, offsets, sizes)


# --- memory and modules -----------------------------------------------------------------------------------------------


class FakeTensorMode(fake_tensor.FakeTensorMode):
    """torch's mode of tensors without memory, which finds what an operator makes by fewer facts.

    torch keeps what each operator made, by its arguments; of a tensor it looks at twenty facts, and most of them follow
    from the others: half of the time that an operator takes.
    """

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        facts = [func, torch.get_default_dtype(), torch._C._get_default_device(), torch.is_inference_mode_enabled()]
        given = (args, kwargs, kwargs.values()) if kwargs else (args,)
        if self.shape_env is None and all(self._add_facts(facts, some) for some in given):
            return fake_tensor._DispatchCacheKey(tuple(facts))
        return super()._cache_key(state, func, args, kwargs)

    def _add_facts(self, facts: list[Any], args: Collection[Any]) -> bool:
        """Add what says which arguments these are; return False where torch must say it."""
        facts.append(len(args))
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                if arg.fake_mode is not self or arg.constant is not None or arg.layout is not torch.strided:
                    return False
                facts += (arg.dtype, arg.shape, arg.stride(), arg.storage_offset(), arg.untyped_storage().nbytes())
                facts += (arg.fake_device, arg.requires_grad, arg.is_conj(), arg.is_neg(), arg.is_inference())
            elif kind in _VALUES:
                facts += (kind, arg)
            elif kind is list or kind is tuple:
                facts.append(kind)
                if not self._add_facts(facts, arg):
                    return False
            else:
                return False
        return True


_VALUES = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}


def alias_of(tensor: Tensor) -> Tensor:
    """The tensor without its graph, inside a dispatch mode: it is written to as the first one is, and counts that."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def num_holders(memory: torch.UntypedStorage) -> int | None:
    """The number of tensors and names that hold a storage; None where torch does not count."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else count(memory._cdata)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """The compiled form of a module's call; None where it is not compiled."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    module._compiled_call_impl = call


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is compiled: by its `compile`, or by `torch.compile`, which puts a module around it."""
    return compiled_call(module) is not None or "_orig_mod" in module._modules


def may_compile() -> bool:
    """Whether torch's tracer is there, which loads when something is compiled and takes a second."""
    return "torch._dynamo" in sys.modules


def follows_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks run at each of an optimizer's steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def share_step_hooks(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Let what runs after each step of an optimizer run after those of another, too."""
    other._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks


# --- tracing ----------------------------------------------------------------------------------------------------------


def sequence_number(node: Any) -> int:
    """The number that a node of autograd was made with."""
    return node._sequence_nr()


def wants_values(error: BaseException) -> bool:
    """Return whether something failed because a tensor without memory has no values."""
    from torch._subclasses import fake_tensor

    return isinstance(error, (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException))


# --- compilation ------------------------------------------------------------------------------------------------------


def allow_graphs(of_one: int, of_all: int) -> None:
    """Let torch.compile keep at least so many graphs of one piece of code, and of all."""
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, of_one)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, of_all)


def has_cpp_compiler() -> bool:
    """Return whether torch.compile finds the compiler that it builds its code for a CPU with."""
    from torch._inductor import cpp_builder, exc  # a second to import, of which most runs are spared

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return False
    return True


def compiled_alone(traced: Any, given: list[Any], options: dict[str, Any]) -> Callable[..., Any]:
    """A traced graph as inductor compiles it, without torch.compile's checks around."""
    return torch._inductor.standalone_compile(traced, given, options=options)
