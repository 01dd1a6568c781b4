"""Quantized models in folders: made from a checkpoint tensor by tensor, loaded by memory map.

    quantized.safetensors   (or shards with an index) plain tensors under their names; NAME.codes, NAME.scale,
                            NAME.zero and NAME.gain for a quantized weight NAME
    quantization.json       format, scheme, shape and dtype of each quantized weight, size and checksum of each file of
                            tensors, and its own checksum; written last
    config.json, …          as they were beside the checkpoint

The files of weights are not called model.*, so that nobody takes them for a checkpoint of plain weights. Loading
compares them with their checksums, which reads them once from the disk; what is mapped then lies in the page cache.
Folders of format 1, which have no checksums, are read with a line that says so.

Going through a checkpoint, one tensor of it is in memory at a time: it is mapped, rounded some rows at a time, and
unmapped. So the peak is the quantized model (or, writing a folder, one shard of it) and one tensor.

Which module a folder stands for, an `Architecture` says. Those of `core.models` register themselves by the model_type
in config.json; for any other module one is given.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.config import UserError
from core.files import Damaged, check_stamps, naming, replace_file, signed, stamp, unsigned
from core.layout import Layout, layout_of
from core.quant.choose import Chosen, choose, parameter_holders
from core.quant.packed import pack
from core.quant.quantize import put, quantized, scheme_of
from core.quant.scheme import Scheme
from core.quant.weight import QuantizedWeight
from core.weights import Weights, file_bytes, read_json, save_weights

DESCRIPTION = "quantization.json"
_STEM = "quantized"
_FORMAT, _WITHOUT_CHECKSUMS = 2, 1
_CARRIED = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
_SHARD_BYTES = 1 << 30


def own_names(model: nn.Module, folder: Path) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint whose names are those of the module's state dict. UserError where they are not."""
    weights, known = Weights(folder, hold=False), model.state_dict(keep_vars=True)
    wanted = {name: tensor.shape for name, tensor in _state(model)}
    lacking = [name for name in wanted if name not in weights]
    unknown = [name for name in weights if name not in known]
    for problem, names in (("lacks", lacking), ("holds what the model does not know:", unknown)):
        if names:
            raise UserError(f"{folder} {problem} {_some(names)}; give the checkpoint of this very model")
    for name, shape in wanted.items():
        if weights[name].shape != shape:
            raise UserError(f"{folder}: {name} is {list(weights[name].shape)}, and the model's is {list(shape)}")
    return weights


@dataclass(frozen=True)
class Architecture:
    """The module that a folder stands for.

    build    folder -> the module, on the meta device: from its config.json, without weights
    tensors  (module, folder) -> its parameters and buffers from a checkpoint of plain weights, each read when it is
             asked for; raises UserError where the folder is not whole
    """

    build: Callable[[Path], nn.Module]
    tensors: Callable[[nn.Module, Path], Mapping[str, Tensor]] = own_names


ARCHITECTURES: dict[str, Architecture] = {}
"""model_type of config.json -> architecture; `core.models` puts its families here."""


def is_quantized(folder: str | Path) -> bool:
    """Return whether a folder holds a quantized model, as `quantize_folder` writes it."""
    return (Path(folder) / DESCRIPTION).is_file()


def loaded_bytes(folder: Path) -> int:
    """Bytes of the files of weights that are loaded of a folder, quantized or plain.  UserError where it holds none."""
    return file_bytes(folder, _STEM if is_quantized(folder) else None)


def quantize_folder(
    source: str | Path,
    target: str | Path,
    scheme: str | Scheme,
    *,
    group_size: int = 64,
    symmetric: bool = False,
    threshold: float = 6.0,
    embeddings: bool = False,
    head: bool = False,
    skip: Iterable[str] = (),
    architecture: Architecture | None = None,
    max_shard_bytes: int = _SHARD_BYTES,
    progress: Callable[[str, int], None] | None = None,
    device: torch.device | str | None = None,
) -> Path:
    """Write the quantized model of a checkpoint folder, holding one shard of it and one tensor of the checkpoint.

    target        a folder that does not exist, or is empty; it appears when it is whole
    scheme, …     as in `quantize`
    architecture  by default the one that is known for config.json's model_type
    progress      called with the name of each finished tensor and the bytes of the checkpoint so far
    device        where weights are rounded, one at a time; None: on the host

    Returns the target. Raises UserError as `quantize` does, and for a source that is not whole or a target in use.
    """
    source, target = Path(source), Path(target)
    scheme = scheme_of(scheme, group_size, symmetric, threshold)
    check_target(target)
    model, tensors, found = _opened(source, architecture, embeddings=embeddings, head=head, skip=skip)
    stream = _quantizing(model, tensors, found, scheme, progress or (lambda name, num_bytes: None), device)
    _write(stream, target, source, max_shard_bytes)
    return target


def save_quantized(
    model: nn.Module, target: str | Path, source: str | Path | None = None, max_shard_bytes: int = _SHARD_BYTES
) -> Path:
    """Write a model that `quantize` has quantized.

    source  folder whose config.json, tokenizer and the like are carried along
    """
    target = Path(target)
    check_target(target)
    if not any(isinstance(p, QuantizedWeight) for p in model.parameters()):
        raise UserError("the model holds no quantized weight; quantize it first")
    _write(_state(model), target, None if source is None else Path(source), max_shard_bytes)
    return target


def load_quantized(
    folder: str | Path,
    scheme: str | Scheme | None = None,
    *,
    group_size: int = 64,
    symmetric: bool = False,
    threshold: float = 6.0,
    embeddings: bool = False,
    head: bool = False,
    skip: Iterable[str] = (),
    architecture: Architecture | None = None,
    device: torch.device | str = "cpu",
    packed: bool | None = None,
    cut: Callable[[nn.Module], object] | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> nn.Module:
    """The module of a quantized folder; on the CPU its weights are the mapped files, so that it is there at once.

    scheme, …  for a folder of plain weights: quantize while loading, holding the quantized model and one tensor
    packed     give 4-bit weights on a CPU their packed form where that is faster, which rounds inputs to bf16: see
               `pack`. By default those of a quantized folder, where that form is then what is in memory; while
               quantizing both would be
    cut        makes DTensors of the module's parameters, as a plan of tensor parallelism does: of each weight, rounded
               as a whole, only this rank's part is kept, as a plain parameter
    progress   while quantizing called with the name of what was last read and the bytes of plain weights read so far

    Returns it for inference: in eval mode, nothing requires gradients. Raises UserError for a folder that is foreign,
    truncated or incomplete, for one that is not quantized where no scheme is given, and for a scheme where it is.
    """
    folder, skip = Path(folder), tuple(skip)
    if scheme is None and (embeddings or head or skip):
        raise UserError(f"embeddings, head and skip are for quantizing; name a scheme, or load {folder} without them")
    if scheme is None:
        model = (architecture or _architecture_of(folder)).build(_checked(folder))
        stream = _stored(model, folder)
    elif is_quantized(folder):
        raise UserError(f"{folder} is quantized already; leave the scheme out, or give the folder of plain weights")
    else:
        scheme = scheme_of(scheme, group_size, symmetric, threshold)
        model, tensors, found = _opened(folder, architecture, embeddings=embeddings, head=head, skip=skip)
        stream = _quantizing(model, tensors, found, scheme, progress or (lambda name, num_bytes: None), device)
    if cut is not None:
        cut(model)
    _fill(model, stream, device)
    _check_whole(model, folder)
    if packed if packed is not None else scheme is None:
        mapped = scheme is None and cut is None
        pack(model, (lambda name, weight: _map_again(folder, name, weight)) if mapped else None)
    return model.eval()


# --- from a checkpoint ------------------------------------------------------------------------------------------------


def _opened(
    folder: Path, architecture: Architecture | None, **options: Any
) -> tuple[nn.Module, Mapping[str, Tensor], list[Chosen]]:
    if is_quantized(folder):
        raise UserError(f"{folder} is quantized already; give the folder of plain weights")
    architecture = architecture or _architecture_of(folder)
    model = architecture.build(folder)
    found = choose(model, **options)
    return model, architecture.tensors(model, folder), found


def _architecture_of(folder: Path) -> Architecture:
    family = read_json(folder / "config.json").get("model_type")
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES) or "none, because core.models was not imported"
        raise UserError(f"{folder}: model_type is {family!r}, known are {known}; give an architecture")
    return ARCHITECTURES[family]


def _quantizing(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    found: list[Chosen],
    scheme: Scheme,
    progress: Callable[[str, int], None],
    device: torch.device | str | None,
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the model's state, each quantized or copied when its turn comes."""
    chosen, num_bytes = {item.name: item for item in found}, 0
    for name, _ in _state(model):
        value = tensors[name]
        num_bytes += value.nbytes
        value = quantized(value, chosen[name], scheme, device=device) if name in chosen else value.detach().clone()
        yield name, value
        del value  # before the next one is read
        progress(name, num_bytes)


def _state(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, a shared one once, and the buffers that belong to the state."""
    buffers = [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    return [*model.named_parameters(), *buffers]


# --- writing ----------------------------------------------------------------------------------------------------------


def check_target(target: Path) -> None:
    """Raises UserError for a folder that holds something."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already; choose another folder, or remove it")


def _write(stream: Iterable[tuple[str, Tensor]], target: Path, source: Path | None, max_shard_bytes: int) -> None:
    """Write aside, then rename: the folder is whole or not there."""
    aside = target.with_name(f".{target.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        described: dict[str, Any] = {}
        save_weights(_in_parts(stream, described), aside, max_shard_bytes, _STEM)
        for path in sorted(source.iterdir()) if source is not None else ():
            if path.is_file() and path.suffix in _CARRIED and not path.name.endswith(".index.json"):
                with naming(aside / path.name):
                    shutil.copyfile(path, aside / path.name)
        files = {path.name: stamp(path) for path in sorted(aside.glob(f"{_STEM}*.safetensors*"))}
        replace_file(aside / DESCRIPTION, signed({"format": _FORMAT, "weights": described, "files": files}))
        os.replace(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _in_parts(stream: Iterable[tuple[str, Tensor]], described: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors as they are stored; notes in `described` what their quantized ones are."""
    for name, value in stream:
        if isinstance(value, QuantizedWeight):
            described[name] = {
                "scheme": value.scheme.as_json(),
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
                "transposed": value.transposed,
            }
            if value.gain is not None:
                described[name]["gain"] = True
            yield from ((f"{name}.{part}", tensor) for part, tensor in value.parts.items())
        else:
            yield name, value


# --- reading ----------------------------------------------------------------------------------------------------------


def _checked(folder: Path) -> Path:
    if not is_quantized(folder):
        raise UserError(f"{folder} holds no {DESCRIPTION}; quantize a checkpoint first, or name a scheme to load it by")
    return folder


def _stored(model: nn.Module, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a quantized folder, checked against the module; views of its files."""
    _require_whole(folder)
    described, weights = described_weights(folder), Weights(folder, _STEM, hold=False)
    used = set()
    for name, parameter in _state(model):
        parts = _part_shapes(described[name]) if name in described else {"": (parameter.dtype, tuple(parameter.shape))}
        found: dict[str, Tensor] = {}
        for part, (dtype, shape) in parts.items():
            key = f"{name}.{part}" if part else name
            if key not in weights:
                raise UserError(f"{folder} lacks {key}; it was made from another model, or quantize it again")
            found[part] = tensor = weights[key]
            if tuple(tensor.shape) != shape or (part and tensor.dtype != dtype):
                raise UserError(f"{folder}: {key} is {_form(tensor)}, and should be {list(shape)}; quantize again")
        used |= {f"{name}.{part}" if part else name for part in parts}
        yield name, found[""] if "" in found else _assembled(described[name], found, name, parameter, folder)
    if unknown := [key for key in weights if key not in used]:
        raise UserError(f"{folder} holds what the model does not know: {_some(unknown)}; it is of another model")


def described_weights(folder: Path) -> dict[str, dict[str, Any]]:
    """name -> scheme, shape, dtype, … of each quantized weight of a folder.  Raises UserError for another format."""
    path = folder / DESCRIPTION
    content = read_json(path)
    found = content.get("format")
    if found not in (_FORMAT, _WITHOUT_CHECKSUMS):
        raise UserError(f"{path} has format {found!r}; this version reads {_FORMAT}: quantize again")
    weights = content.get("weights")
    if not isinstance(weights, dict) or not all(_is_description(value) for value in weights.values()):
        raise UserError(f"{path} does not describe quantized weights; quantize the model again")
    return {name: value | {"scheme": Scheme.from_json(value["scheme"])} for name, value in weights.items()}


def parameter_dtype(folder: Path, name: str) -> torch.dtype:
    """The format that a parameter of a quantized folder computes in.  Raises UserError for a folder that lacks it."""
    described = described_weights(folder)
    if name in described:
        return getattr(torch, described[name]["dtype"])
    weights = Weights(folder, _STEM, hold=False)
    if name not in weights:
        raise UserError(f"{folder} lacks {name}; it was made from another model, or quantize it again")
    return weights[name].dtype


def _require_whole(folder: Path) -> None:
    """Raises UserError where the files of tensors, or what describes them, are not those that were written."""
    content = read_json(folder / DESCRIPTION)
    if content.get("format") == _WITHOUT_CHECKSUMS and not {"files", "crc32"} & content.keys():
        print(f"note: {folder} has no checksums, so damage in it is not seen; quantize again", file=sys.stderr)
        return
    try:
        raw = (folder / DESCRIPTION).read_bytes()
        try:
            content = unsigned(raw)
        except Damaged as error:
            raise Damaged(f"{DESCRIPTION} {error}") from None
        if content.get("format") == _WITHOUT_CHECKSUMS:
            raise Damaged(f"{DESCRIPTION} has checksums, and says that it has format {_WITHOUT_CHECKSUMS}")
        if content.get("format") == _FORMAT:  # any other is refused by its number, see `described_weights`
            check_stamps(folder, content["files"])
    except Damaged as error:
        raise UserError(f"{folder}: {error}; copy the folder again, or quantize the model again") from None


def _is_description(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) | {"gain"} == {"scheme", "shape", "dtype", "transposed", "gain"}
        and value.get("gain", True) is True
        and isinstance(value["shape"], list)
        and len(value["shape"]) >= 2
        and all(isinstance(size, int) and size >= 0 for size in value["shape"])
        and value["dtype"] in ("float64", "float32", "bfloat16", "float16")
        and isinstance(value["transposed"], bool)
    )


def _part_shapes(described: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Formats and shapes of the tensors that hold a weight of a folder."""
    shape = tuple(described["shape"])
    return part_shapes(described["scheme"], shape[::-1] if described["transposed"] else shape, "gain" in described)


def part_shapes(
    scheme: Scheme, shape: tuple[int, ...], gain: bool = False
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Formats and shapes of the tensors that hold a weight [out, in, …], or a rank's part of one."""
    rows, columns = shape[0], math.prod(shape[1:])
    if scheme.name != "int4":
        parts = {"codes": (torch.int8, (rows, columns)), "scale": (torch.float32, (rows,))}
        return parts | {"gain": (torch.float32, (columns,))} if gain else parts
    groups = -(-columns // scheme.group_size)
    parts = {
        "codes": (torch.uint8, (rows, groups * scheme.group_size // 2)),
        "scale": (torch.bfloat16, (rows, groups)),
    }
    return parts if scheme.symmetric else parts | {"zero": (torch.uint8, (rows, groups))}


def weight_bytes(scheme: Scheme, shape: tuple[int, ...], gain: bool = False) -> int:
    """Bytes in which a weight [out, in, …], or a rank's part of one, is stored."""
    return sum(dtype.itemsize * math.prod(part) for dtype, part in part_shapes(scheme, shape, gain).values())


def _assembled(
    described: Mapping[str, Any], parts: Mapping[str, Tensor], name: str, parameter: Tensor, folder: Path
) -> QuantizedWeight:
    shape, dtype = tuple(described["shape"]), getattr(torch, described["dtype"])
    if shape != tuple(parameter.shape):
        raise UserError(f"{folder}: {name} is {list(shape)}, and config.json says {list(parameter.shape)}")
    stored = (parts["codes"], parts["scale"], parts.get("zero"))
    return QuantizedWeight(described["scheme"], *stored, shape, dtype, described["transposed"], gain=parts.get("gain"))


def _fill(model: nn.Module, stream: Iterator[tuple[str, Tensor]], device: torch.device | str) -> None:
    holders, modules = parameter_holders(model), dict(model.named_modules())
    for name, value in stream:
        if name in holders:
            put(holders[name], _own(value, layout_of(model.get_parameter(name))).to(device))
        else:
            prefix, _, attribute = name.rpartition(".")
            modules[prefix]._buffers[attribute] = value.to(device)
        del value


def _own(value: Tensor, layout: Layout) -> Tensor:
    """This rank's part of a tensor."""
    if not layout.cuts:
        return value
    return value.cut(layout.box()) if isinstance(value, QuantizedWeight) else value[layout.box()].clone()


def _map_again(folder: Path, name: str, weight: QuantizedWeight) -> None:
    """Codes that were read for packing leave memory: they are mapped anew, and read no more."""
    weight.codes = Weights(folder, _STEM, hold=False)[f"{name}.codes"]


def _check_whole(model: nn.Module, folder: Path) -> None:
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if empty:
        raise UserError(f"{folder} does not hold {_some(empty)}, which the model needs; let the architecture make them")


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
